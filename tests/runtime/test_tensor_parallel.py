"""Ranks that share every weight train the same model as one process.

Rows are run in one launch per number of ranks; a row's name is printed before it starts, so a hang names it. The reference and
the run are those of `test_parity`: clipping is active in every step.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before the harness forks, which else every rank would import for itself
import torch.distributed.fsdp

from tests import plans
from tests.harness import Rank, run_ranks
from tests.runtime.test_apply import CountOps
from tests.runtime.test_checkpoint import train_ranks
from tests.runtime.test_parity import Curve, checkpointed, parity_plan, reference, run
from titan_planner.ir.model import Blocks, Model, SwiGlu
from titan_planner.ir.parallel import TensorParallel
from titan_planner.ir.plan import Plan
from titan_planner.ir.verify import verify
from titan_planner.sharding import tensor_parallel_rows

TOLERANCE = 1e-6
WEIGHT_TOLERANCE = 1e-5


def tensor(plan: Plan, *, sequence: bool = True, loss: bool = True, kv_replicas: int = 1) -> Plan:
    """`plan` with the rows that the planner writes for its mesh."""
    return replace(
        plan,
        tensor_parallel=TensorParallel(
            sequence_parallel=sequence, loss_parallel=loss, async_tp=False, kv_replicas=kv_replicas
        ),
        sharding=tensor_parallel_rows(plan.model, sequence_parallel=sequence, loss_parallel=loss),
    )


def model(hidden: int = 48, heads: int = 4, kv_heads: int = 2, layers: int = 2, **changes: Any) -> Model:
    tiny = plans.tiny_model(**changes)
    block = tiny.blocks[0].block
    attention = replace(block.attention, num_heads=heads, num_kv_heads=kv_heads)
    block = replace(block, attention=attention, feed_forward=SwiGlu(hidden_dim=hidden))
    return replace(tiny, blocks=(Blocks(repeat=layers, block=block),))


@dataclass(frozen=True)
class Row:
    """One run. `like` names the row that it must equal in every digit."""

    plan: Plan
    mask: bool = False
    like: str | None = None


def on(tp: int, dp_shard: int = 1, dp_replicate: int = 1, local: int = 2, **sections: Any) -> Plan:
    return parity_plan(plans.mesh(dp_shard, dp_replicate, tp=tp), local=local, **sections)


def deferring(plan: Plan) -> Plan:
    return replace(plan, fsdp=replace(plan.fsdp, defer_gradient_sync=True))


def compiled(plan: Plan) -> Plan:
    # Differentiates and hands tensors in and out as inductor does, without its minute of code generation.
    return replace(plan, compile=replace(plan.compile, enable=True, backend="aot_eager"))


def chunked(plan: Plan, chunks: int) -> Plan:
    return replace(plan, loss=replace(plan.loss, chunks=chunks))


def replicated(plan: Plan) -> Plan:
    return replace(plan, fsdp=replace(plan.fsdp, strategy="ddp", units=(), defer_gradient_sync=True))


ROWS: dict[str, Row] = {
    "tp2": Row(tensor(on(2, local=8))),
    "tp2, stream replicated": Row(tensor(on(2, local=8), sequence=False)),
    "tp2, logits gathered": Row(tensor(on(2, local=8), loss=False)),
    "tp2, neither": Row(tensor(on(2, local=8), sequence=False, loss=False)),
    "tp2, accumulating 4, unequal labels": Row(deferring(tensor(on(2))), mask=True),
    "tp2, tied": Row(tensor(on(2, local=8, model=model(tied=True)))),
    "tp2, tied, stream replicated, logits gathered": Row(
        tensor(on(2, local=8, model=model(tied=True)), sequence=False, loss=False)
    ),
    "tp2, loss in 4 chunks": Row(chunked(tensor(on(2, local=8)), 4)),
    "tp2, loss in 4 chunks, logits gathered": Row(chunked(tensor(on(2, local=8), loss=False), 4)),
    "tp2, recomputed": Row(checkpointed(tensor(on(2, local=8)), "full"), like="tp2"),
    "tp2, recomputed in part": Row(checkpointed(tensor(on(2, local=8)), "selective"), like="tp2"),
    "tp2, recomputed by shape": Row(checkpointed(tensor(on(2, local=8)), "selective-alternating"), like="tp2"),
    "tp2, compiled": Row(compiled(tensor(on(2, local=8)))),
    "tp2, compiled, stream replicated, logits gathered": Row(
        compiled(tensor(on(2, local=8), sequence=False, loss=False))
    ),
    "tp2, compiled, recomputed in part": Row(compiled(checkpointed(tensor(on(2, local=8)), "selective"))),
    "tp2, KV head on both ranks, compiled": Row(
        compiled(tensor(on(2, local=8, model=model(kv_heads=1)), kv_replicas=2))
    ),
    "tp4, KV heads on 2 ranks each": Row(tensor(on(4, local=8), kv_replicas=2)),
    "tp4, KV heads on 2 ranks each, stream replicated": Row(tensor(on(4, local=8), sequence=False, kv_replicas=2)),
    "tp4, 6 KV heads on 2 ranks each": Row(tensor(on(4, local=8, model=model(heads=12, kv_heads=6)), kv_replicas=2)),
    "tp4, 4 KV heads": Row(tensor(on(4, local=8, model=model(kv_heads=4)))),
    "tp2 x dp2, unequal labels": Row(tensor(on(2, 2)), mask=True),
    "tp2 x dp2, uneven shards": Row(tensor(on(2, 2, model=model(hidden=50)))),
    "tp2 x dp2, KV heads on 2 ranks each": Row(tensor(on(2, 2, model=model(kv_heads=1)), kv_replicas=2)),
    "tp2 x 2 replicas": Row(tensor(on(2, 1, 2))),
    "tp2 x 2 replicas, unsharded": Row(replicated(tensor(on(2, 1, 2)))),
    "tp2 x dp2 x 2 replicas, KV head on 2 ranks": Row(
        tensor(on(2, 2, 2, local=1, model=model(kv_heads=1)), kv_replicas=2), mask=True
    ),
}


@cache
def one_process(described: Model, mask: bool) -> Curve:
    return reference(parity_plan(model=described), mask)


def run_rows(rank: Rank, rows: dict[str, Row]) -> dict[str, tuple[Curve, str]]:
    """Every row's curve and a digest of its gathered weights; the weights themselves on the first rank only."""
    found = {}
    for name, row in rows.items():
        print(name, time.time(), flush=True)
        torch._dynamo.reset()
        curve = run(rank, row.plan, row.mask)
        digest = hashlib.sha256()
        for weight in curve.weights.values():
            digest.update(weight.float().contiguous().numpy().tobytes())
        if rank.index:
            curve.weights = {}
        found[name] = (curve, digest.hexdigest())
    return found


@cache
def launched(ranks: int) -> list[dict[str, tuple[Curve, str]]]:
    rows = {name: row for name, row in ROWS.items() if row.plan.mesh.world_size == ranks}
    return run_ranks(run_rows, ranks, rows, timeout=120)


def furthest(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    assert len(found) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_sharing_weights_changes_nothing(name: str) -> None:
    row = ROWS[name]
    assert [found for found in verify(row.plan) if found.rule != "paths-relative"] == []
    results = [result[name] for result in launched(row.plan.mesh.world_size)]
    curve, digest = results[0]
    expected = one_process(row.plan.model, row.mask)
    assert min(expected.norms) > row.plan.optimizer.max_norm
    for other, others_digest in results[1:]:
        assert (other.losses, other.norms) == (curve.losses, curve.norms)
        # Replicas are gathered from different ranks, so equal digests mean equal replicas.
        assert others_digest == digest
    loss, norm = furthest(curve.losses, expected.losses), furthest(curve.norms, expected.norms)
    assert curve.weights.keys() == expected.weights.keys()
    weights = {fqn: (w - expected.weights[fqn]).abs().max().item() for fqn, w in curve.weights.items()}
    print(f"{name}: loss {loss:.1e}, norm {norm:.1e}, weights {max(weights.values()):.1e}")
    assert loss <= TOLERANCE
    assert norm <= TOLERANCE
    assert max(weights.values()) <= WEIGHT_TOLERANCE, max(weights, key=weights.__getitem__)
    if row.like:
        like, likes_digest = launched(row.plan.mesh.world_size)[0][row.like]
        assert (curve.losses, curve.norms, digest) == (like.losses, like.norms, likes_digest)


# ------------------------------------------------------------------ bfloat16


def test_bfloat16_stays_near_float32() -> None:
    plan = tensor(on(2, 2))
    computing = replace(plan, fsdp=replace(plan.fsdp, param_dtype="bfloat16"))
    storing = replace(computing, dtype="bfloat16", optimizer=replace(computing.optimizer, state_dtype="bfloat16"))
    for found in run_ranks(run_rows, 4, {"computing": Row(computing), "storing": Row(storing)}):
        expected = one_process(plan.model, False)
        assert 1e-6 < furthest(found["computing"][0].losses, expected.losses) < 5e-3
        assert furthest(found["storing"][0].losses, expected.losses) < 5e-2


# ------------------------------------------------------------------ the loss


def compare_losses(rank: Rank, dtype: torch.dtype) -> None:
    from titan_runtime.collectives import Ranks
    from titan_runtime.loss import ShardedCrossEntropy, cross_entropy_sum, sharded_cross_entropy_sum

    ranks = Ranks(torch.distributed.group.WORLD.group_name, rank.world_size, rank.index)
    torch.manual_seed(0)
    # Far from zero and apart, so that a sum of exponentials without the maximum taken off would overflow.
    whole = (40 * torch.randn(2, 5, 12) + 90).to(dtype).requires_grad_()
    labels = torch.tensor([[0, 3, 4, -100, 11], [-100, -100, 7, 8, 5]])
    part = whole.detach().chunk(rank.world_size, dim=-1)[rank.index].clone().requires_grad_()
    expected, found = cross_entropy_sum(whole, labels), sharded_cross_entropy_sum(part, labels, ranks)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    (3 * expected).backward()
    (3 * found).backward()
    torch.testing.assert_close(part.grad, whole.grad.chunk(rank.world_size, dim=-1)[rank.index], rtol=1e-5, atol=1e-6)
    # The logarithm of the sum, which a z-loss is made of, has its own way back.
    part.grad = whole.grad = None
    _, log_sum = ShardedCrossEntropy.apply(part.flatten(0, 1), labels.flatten(), ranks)
    torch.testing.assert_close(log_sum, whole.float().logsumexp(-1).flatten(), rtol=1e-6, atol=0)
    log_sum.square().sum().backward()
    whole.float().logsumexp(-1).square().sum().backward()
    torch.testing.assert_close(part.grad, whole.grad.chunk(rank.world_size, dim=-1)[rank.index], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_of_a_sharded_vocabulary_is_exact(dtype: torch.dtype) -> None:
    run_ranks(compare_losses, 3, dtype)


# ------------------------------------------------------------------ checkpoints


def test_checkpoints_go_from_mesh_to_mesh(tmp_path: Path) -> None:
    described = model(hidden=52)

    def plan(folder: str, steps: int, grid: Any, local: int, **changes: Any) -> Plan:
        job = plans.job(str(tmp_path / folder), steps, enable=True, interval=100)
        made = plans.tiny_plan(grid, model=described, local=local, job=job)
        return tensor(made, **changes) if made.mesh.tp > 1 else made

    straight = train_ranks(plan("straight", 5, plans.mesh(1), 8))
    train_ranks(plan("moved", 1, plans.mesh(2, tp=2), 2))
    train_ranks(plan("moved", 2, plans.mesh(1), 4))
    train_ranks(plan("moved", 3, plans.mesh(tp=4), 4, kv_replicas=2))
    train_ranks(plan("moved", 4, plans.mesh(4), 2))
    moved = train_ranks(plan("moved", 5, plans.mesh(2, tp=2), 2, sequence=False, loss=False))
    assert [line["step"] for line in moved] == [1, 2, 3, 4, 5]
    for name in ("loss", "grad_norm"):
        assert furthest([line[name] for line in moved], [line[name] for line in straight]) <= TOLERANCE


# ------------------------------------------------------------------ compilation


def count_compilations(rank: Rank, plan: Plan) -> dict[str, int]:
    """How often the compiler was asked for code, and the collectives in the code for the first block."""
    from titan_runtime.apply import build_model
    from titan_runtime.mesh import build_mesh

    counts: Counter[str] = Counter()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        counts["graphs"] += 1
        return graph.forward

    torch._dynamo.reset()
    torch.compiler.list_backends()  # so that the name below is not taken by a plugin
    torch._dynamo.register_backend(backend, name="counting")
    plan = replace(plan, compile=replace(plan.compile, enable=True, components=("model",), backend="counting"))
    module = build_model(plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))
    module(torch.zeros(1, plan.batch.seq_len, dtype=torch.int64))
    return dict(counts)


def test_equal_blocks_are_compiled_once() -> None:
    plan = tensor(on(2, local=8, model=model(kv_heads=1, layers=3)), kv_replicas=2)
    assert run_ranks(count_compilations, 2, plan)[0] == {"graphs": 1}


def count_fusions(rank: Rank, plan: Plan) -> dict[str, Counter[str]]:
    """Which products the compiler would overlap with their collectives on CUDA, in a block's forward and backward."""
    import torch._inductor.fx_passes.micro_pipeline_tp as overlap
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch.distributed import _symmetric_memory
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from titan_runtime.apply import build_model
    from titan_runtime.apply import tensor as applied
    from titan_runtime.loss import loss_function
    from titan_runtime.mesh import build_mesh

    found: dict[str, Counter[str]] = {}

    def compiler(name: str) -> Any:
        def compile(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            changed = copy.deepcopy(graph)
            view_to_reshape(changed)
            overlap.micro_pipeline_tp_pass(changed.graph)
            names = [str(node.target).split(".") for node in changed.graph.nodes]
            found[name] = Counter(parts[1] for parts in names if parts[0] == "symm_mem")
            return graph.forward

        return compile

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        both = {"fw_compiler": compiler("forward"), "bw_compiler": compiler("backward")}
        return aot_autograd(**both, decompositions=select_decomp_table())(graph, inputs)

    # The pass asks for both before it looks at the graph.
    torch.distributed.is_nccl_available = lambda: True
    _symmetric_memory.is_symm_mem_enabled_for_group = lambda name: True
    applied._overlap = lambda ranks, device_type: None  # refuses a CPU
    plan = replace(plan, tensor_parallel=replace(plan.tensor_parallel, async_tp=True))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.mesh.world_size)
    torch._dynamo.register_backend(backend, name="overlapping")
    plan = replace(plan, compile=replace(plan.compile, enable=True, components=("model",), backend="overlapping"))
    world = build_mesh(plan.mesh, "cpu")
    module, tokens = (
        build_model(plan, world, torch.device("cpu")),
        torch.zeros(1, plan.batch.seq_len, dtype=torch.int64),
    )
    loss_function(plan, world)(module(tokens), tokens).backward()
    return found


def test_the_compiler_finds_the_products_to_overlap_with_collectives() -> None:
    """On CUDA with `async_tp`; here its pass is only asked. No rank talks to another: the process group is a fake."""
    [found] = run_ranks(count_fusions, 1, tensor(on(2, local=8)), process_group=False)
    # Attention and feed-forward: gather, then the products; the last product, then scatter.
    assert found["forward"] == {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}
    # The scatters of backward are of sums of several products, which torch does not overlap.
    assert found["backward"] == {"fused_all_gather_matmul": 2}


# ------------------------------------------------------------------ recomputation


def count_matmuls(rank: Rank, plan: Plan) -> int:
    from titan_runtime.apply import build_model
    from titan_runtime.loss import loss_function
    from titan_runtime.mesh import build_mesh

    world = build_mesh(plan.mesh, "cpu")
    module, tokens = (
        build_model(plan, world, torch.device("cpu")),
        torch.zeros(1, plan.batch.seq_len, dtype=torch.int64),
    )
    with CountOps() as count:
        loss_function(plan, world)(module(tokens), tokens).backward()
    return count.counts["aten.mm.default"]


def test_a_policy_finds_its_linears_by_the_shapes_that_a_rank_multiplies() -> None:
    plain = tensor(on(2, local=8))
    # As without tensor parallelism: wk and wv are forced, and of the other five (wq, wo, w1, w3, w2) every second.
    again = (
        run_ranks(count_matmuls, 2, checkpointed(plain, "selective-alternating"))[0]
        - run_ranks(count_matmuls, 2, plain)[0]
    )
    assert again == 4


# ------------------------------------------------------------------ what is refused


def refuse(rank: Rank, cases: list[tuple[Plan, str]]) -> None:
    from titan_runtime.apply import build_model
    from titan_runtime.errors import RunError
    from titan_runtime.mesh import build_mesh

    for plan, message in cases:
        with pytest.raises(RunError, match=message):
            build_model(plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))


def edited(plan: Plan, module: str, **changes: Any) -> Plan:
    return replace(
        plan, sharding=tuple(replace(row, **changes) if row.module == module else row for row in plan.sharding)
    )


def test_rows_that_do_not_fit_together_are_refused() -> None:
    plan = tensor(on(2))
    without = replace(plan, sharding=tuple(row for row in plan.sharding if row.module != "norm"))
    odd = replace(plan, batch=replace(plan.batch, seq_len=31))
    overlapping = replace(plan, tensor_parallel=replace(plan.tensor_parallel, async_tp=True))
    cases = [
        (overlapping, "asynchronous tensor parallelism needs CUDA"),
        (without, "no row for the axis `tp` says where the weight `norm.weight` lies"),
        (odd, "cannot share 31 tokens evenly among 2 ranks"),
        (
            tensor(on(2, model=model(hidden=49))),
            "has 49 elements along dim 0, which cannot be shared evenly by 2 ranks",
        ),
        (
            edited(plan, "norm", input="R", input_needed="R", output="R"),
            r"`norm` expects its input as R, but .* S\(1\)",
        ),
        (edited(plan, "layers.*.attention.wo", output_needed="R"), r"hands its result on as R, but S\(1\) is needed"),
        (edited(plan, "output", output_needed="R"), r"hands its result on as R, but S\(2\) is needed"),
        (edited(plan, "layers.*.feed_forward.w1", weight="R"), "which this version cannot compute"),
        (edited(plan, "layers.*.attention.wq", output="P"), "which this version cannot compute"),
    ]
    run_ranks(refuse, 2, cases)


def scatter_unevenly(rank: Rank) -> None:
    from titan_runtime.collectives import Ranks, reduce_scatter

    ranks = Ranks(torch.distributed.group.WORLD.group_name, rank.world_size, rank.index)
    with pytest.raises(ValueError, match="5 elements along dim 1 cannot be shared evenly by 2 ranks"):
        reduce_scatter(torch.ones(1, 5), 1, ranks)


def test_an_uneven_scatter_is_an_exception_and_not_the_end_of_the_process() -> None:
    run_ranks(scatter_unevenly, 2)
