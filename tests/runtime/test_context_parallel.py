"""Ranks that share every sequence attend as one rank does, and train what one rank trains.

Attention is compared with torch's own on whole sequences, forward and gradients; whole runs with the one-process
reference of test_parity. Several cases share a launch of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests import plans
from tests.harness import Rank, run_ranks
from tests.runtime.test_checkpoint import saving_plan, train_ranks
from tests.runtime.test_parity import Curve, checkpointed, parity_plan, reference, run
from titan_planner.ir.inventory import num_params
from titan_planner.ir.parallel import ContextParallel, Mesh
from titan_planner.ir.plan import Plan
from titan_runtime.apply.context import sequence_share, shard_sequences
from titan_runtime.attention import Share, allgather_attention, alltoall_attention, blockwise, ring_attention
from titan_runtime.errors import RunError

METHODS: dict[str, Callable[[Tensor, Tensor, Tensor, Share], Tensor]] = {
    "allgather": allgather_attention,
    "ring": ring_attention,
    "alltoall": alltoall_attention,
}
CHUNKS = {"none": 1, "headtail": 2}


# ------------------------------------------------------------------ who has what


@pytest.mark.parametrize(("size", "chunks"), [*product((1, 2, 3, 4, 8), (1, 2))])
def test_parts_cover_the_sequence_once_and_ranks_see_exactly_what_came_before(size: int, chunks: int) -> None:
    seq_len, local = 4 * size * chunks, 4 * chunks
    shares = [Share(rank, size, chunks, "") for rank in range(size)]
    places = [share.positions(seq_len) for share in shares]
    assert sorted(torch.cat(places).tolist()) == list(range(seq_len))
    for rank, share in enumerate(shares):
        assert places[rank].tolist() == sorted(places[rank].tolist())
        everyone = torch.zeros(local, seq_len, dtype=torch.int64)
        for rows, seen in share.pieces_of_all(local):
            everyone[rows, seen] += 1
        everyone[:, places[rank]] += torch.ones(local, local, dtype=torch.int64).tril()
        assert torch.equal(everyone, (places[rank][:, None] >= torch.arange(seq_len)).long())
        for other in set(range(size)) - {rank}:
            seen_of_it = torch.zeros(local, local, dtype=torch.int64)
            for rows, seen in share.pieces(other, local):
                seen_of_it[rows, seen] += 1
            assert torch.equal(seen_of_it, (places[rank][:, None] >= places[other]).long())


def test_head_and_tail_give_every_rank_the_same_work() -> None:
    def work(rank: int, chunks: int) -> int:
        share = Share(rank, 4, chunks, "")
        return sum((r.stop - r.start) * (s.stop - s.start) for r, s in share.pieces_of_all(8))

    assert [work(rank, 1) for rank in range(4)] == [0, 64, 128, 192]
    assert [work(rank, 2) for rank in range(4)] == [96, 96, 96, 96]


@pytest.mark.parametrize(("size", "chunks"), [*product((2, 4), (1, 2))])
def test_joining_and_splitting_follow_the_positions(size: int, chunks: int) -> None:
    whole = torch.arange(2 * 3 * 16 * 5).view(2, 3, 16, 5)
    shares = [Share(rank, size, chunks, "") for rank in range(size)]
    parts = torch.stack([whole[:, :, share.positions(16)] for share in shares])
    assert torch.equal(shares[0].split(whole), parts)
    assert torch.equal(shares[0].join(parts), whole)


# ------------------------------------------------------------------ blocks of keys


def attention_inputs(heads: int, kv_heads: int, seq_len: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the result, the same on every rank; large enough scores that softmax is not flat."""
    generator = torch.Generator().manual_seed(heads)
    shapes = ((2, heads, seq_len, 8), (2, kv_heads, seq_len, 8), (2, kv_heads, seq_len, 8), (2, heads, seq_len, 8))
    return [2 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Result and gradients of q, k and v of torch's attention over the whole sequence."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("kernel", ["cpu", "portable"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_and_its_gradient(kernel: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "_kernel", lambda q: kernel)
    q, k, v, grad = attention_inputs(4, 2, 12, torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    expected = scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    with torch.no_grad():
        out, lse = blockwise.attend(q, k, v, causal=causal)
        found = blockwise.attend_backward(grad, q, k, v, out, lse, causal=causal)
    torch.testing.assert_close(out, expected.detach())
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 2e-6),
        ("cpu", torch.bfloat16, 2e-2),
        pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),  # torch's flash kernel
        pytest.param("cuda", torch.float32, 1e-4, marks=pytest.mark.gpu),  # the portable one
    ],
)
def test_merged_blocks_are_attention_over_all_keys(device: str, dtype: torch.dtype, tolerance: float) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    whole = attention_inputs(8, 2, 64, dtype)
    expected = plain_attention(*(t.double() for t in whole))
    q, k, v, grad = (t.to(device) for t in whole)
    late, early = slice(32, 64), slice(0, 32)
    q, grad = q[:, :, late], grad[:, :, late]
    merged = blockwise.Merged(*blockwise.attend(q, k[:, :, late], v[:, :, late], causal=True))
    merged.add(slice(0, 32), *blockwise.attend(q, k[:, :, early], v[:, :, early]))
    total = (merged.out.to(dtype), merged.lse)
    own = blockwise.attend_backward(grad, q, k[:, :, late], v[:, :, late], *total, causal=True)
    others = blockwise.attend_backward(grad, q, k[:, :, early], v[:, :, early], *total)
    for ours, theirs in (
        (merged.out, expected[0]),
        (own[0] + others[0], expected[1]),
        (own[1], expected[2]),
        (own[2], expected[3]),
    ):
        difference = (ours.double().cpu() - theirs[:, :, late]).abs().max() / theirs.abs().max()
        assert difference < tolerance


def test_the_cuda_kernel_is_called_as_torch_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes only, on the meta device: there is no GPU here."""
    monkeypatch.setattr(blockwise, "_kernel", lambda q: "cuda")
    q, k, v, grad = (t.to("meta") for t in attention_inputs(4, 2, 16, torch.bfloat16))
    out, lse = blockwise.attend(q, k, v)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    found = blockwise.attend_backward(grad, q, k, v, out, lse)
    assert [t.shape for t in found] == [q.shape, k.shape, v.shape]


def test_a_causal_rectangle_is_refused() -> None:
    q, k, v, _ = attention_inputs(4, 2, 12, torch.float32)
    with pytest.raises(ValueError, match="a causal block of 6 queries and 12 keys"):
        blockwise.attend(q[:, :, :6], k, v, causal=True)


# ------------------------------------------------------------------ attention over ranks


def attend_shared(rank: Rank, dtype: torch.dtype, kernel: str | None) -> dict[str, list[float]]:
    """The largest differences from plain attention: of the result and of the three gradients, relative to their size."""
    if kernel:
        blockwise._kernel = lambda q: kernel
    worst = {}
    for (name, method), (balance, chunks), (heads, kv_heads) in product(
        METHODS.items(), CHUNKS.items(), ((4, 4), (8, 4))
    ):
        share = Share(rank.index, rank.world_size, chunks, dist.group.WORLD.group_name)
        *qkv, grad = attention_inputs(heads, kv_heads, 48, dtype)
        mine = share.positions(48)
        leaves = [t[:, :, mine].requires_grad_() for t in qkv]
        out = method(*leaves, share)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad[:, :, mine])]
        expected = plain_attention(*(t.double() for t in (*qkv, grad)))
        worst[f"{name} {balance} {heads}/{kv_heads}"] = [
            ((ours.double() - whole[:, :, mine]).abs().max() / whole.abs().max()).item()
            for ours, whole in zip(found, expected, strict=True)
        ]
    return worst


@pytest.mark.parametrize(
    ("size", "dtype", "kernel", "tolerance"),
    [
        pytest.param(2, torch.float32, None, 2e-6, id="2-ranks"),
        pytest.param(4, torch.float32, None, 2e-6, id="4-ranks"),
        pytest.param(4, torch.float64, "portable", 1e-13, id="4-ranks-portable-float64"),
        pytest.param(4, torch.bfloat16, None, 2e-2, id="4-ranks-bfloat16"),
    ],
)
def test_every_method_is_plain_attention(size: int, dtype: torch.dtype, kernel: str | None, tolerance: float) -> None:
    for worst in run_ranks(attend_shared, size, dtype, kernel):
        assert len(worst) == 12
        for case, differences in worst.items():
            assert max(differences) < tolerance, (case, differences)


# ------------------------------------------------------------------ whole runs


def shared_plan(grid: Mesh, method: str, balance: str, **sections: object) -> Plan:
    """test_parity's plan with four KV heads, so that four ranks can trade heads."""
    model = plans.tiny_model()
    block = model.blocks[0].block
    attention = replace(block.attention, num_heads=8, num_kv_heads=4)
    model = replace(model, blocks=(replace(model.blocks[0], block=replace(block, attention=attention)),))
    plan = parity_plan(grid, model=model, **sections)
    return replace(plan, context_parallel=ContextParallel(method=method, load_balance=balance))


def run_each(rank: Rank, cases: dict[str, tuple[Plan, bool]]) -> dict[str, Curve]:
    return {name: run(rank, plan, mask) for name, (plan, mask) in cases.items()}


@pytest.fixture(scope="module")
def expected() -> dict[bool, Curve]:
    """What one process does, without and with most labels ignored."""
    plan = shared_plan(plans.mesh(1), "allgather", "none")
    found = {mask: reference(plan, mask) for mask in (False, True)}
    assert all(min(curve.norms) > plan.optimizer.max_norm for curve in found.values())  # every step clips
    return found


def check_each(cases: dict[str, tuple[Plan, bool]], expected: dict[bool, Curve]) -> list[dict[str, Curve]]:
    """Run `cases` in one launch and hold each to the single process; what every rank found."""
    ((size,),) = [{plan.mesh.world_size for plan, _ in cases.values()}]
    found = run_ranks(run_each, size, cases, timeout=120)
    for name, (_, mask) in cases.items():
        first = found[0][name]
        for curves in found:
            assert curves[name].losses == first.losses, name
            assert curves[name].norms == first.norms, name
        assert first.losses == pytest.approx(expected[mask].losses, rel=1e-6), name
        assert first.norms == pytest.approx(expected[mask].norms, rel=1e-6), name
        assert first.weights.keys() == expected[mask].weights.keys()
        for fqn, weight in first.weights.items():
            torch.testing.assert_close(weight, expected[mask].weights[fqn], rtol=0, atol=1e-5, msg=f"{name}: {fqn}")
    return found


def test_two_ranks_train_what_one_trains(expected: dict[bool, Curve]) -> None:
    grid = plans.mesh(cp=2)
    cases = {
        f"{method} {balance} {'masked' if mask else ''}": (shared_plan(grid, method, balance, local=4), mask)
        for number, (method, balance) in enumerate(product(METHODS, CHUNKS))
        for mask in [number % 2 == 1]
    }
    chunked = shared_plan(grid, "ring", "headtail", local=2)
    chunked = replace(chunked, loss=replace(chunked.loss, chunks=4))
    cases["loss in chunks"] = (chunked, True)
    cases["gradients reduced once"] = (
        replace(chunked, fsdp=replace(chunked.fsdp, defer_gradient_sync=True)),
        False,
    )
    check_each(cases, expected)


def test_four_ranks_train_what_one_trains(expected: dict[bool, Curve]) -> None:
    check_each(
        {
            "cp 4 allgather": (shared_plan(plans.mesh(cp=4), "allgather", "headtail", local=8), True),
            "cp 4 ring": (shared_plan(plans.mesh(cp=4), "ring", "headtail", local=8), False),
            "cp 4 ring unbalanced": (shared_plan(plans.mesh(cp=4), "ring", "none", local=8), True),
            "cp 4 alltoall": (shared_plan(plans.mesh(cp=4), "alltoall", "none", local=8), False),
            "cp 2 x dp 2": (shared_plan(plans.mesh(2, cp=2), "ring", "headtail", local=1), True),
            "cp 2 x dp 2 replicas": (shared_plan(plans.mesh(1, 2, cp=2), "allgather", "headtail", local=2), False),
        },
        expected,
    )


def sharded_over(rank: Rank, plan: Plan) -> tuple[list[int], int]:
    """The FSDP mesh's shape, and the parameters that this rank holds."""
    from titan_runtime.apply import build_model
    from titan_runtime.mesh import build_mesh

    module = build_model(plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))
    held = sum(parameter.to_local().numel() for parameter in module.parameters())
    return list(module.tok_embeddings.weight.device_mesh.shape), held


def test_context_ranks_shard_the_parameters_too() -> None:
    plan = shared_plan(plans.mesh(1, 2, cp=2), "ring", "headtail")
    whole = num_params(plan.model)
    assert run_ranks(sharded_over, 4, plan) == [([2, 2], whole // 2)] * 4
    assert run_ranks(sharded_over, 4, shared_plan(plans.mesh(2, cp=2), "ring", "none")) == [([4], whole // 4)] * 4


def test_recomputation_and_compilation(expected: dict[bool, Curve]) -> None:
    cases: dict[str, tuple[Plan, bool]] = {}
    for method in METHODS:
        plan = shared_plan(plans.mesh(cp=2), method, "headtail", local=8)
        cases |= {f"{method} {mode}": (checkpointed(plan, mode), False) for mode in ("full", "selective-alternating")}
        cases[f"{method} none"] = (plan, False)
        # One graph a block, collectives in it. The checkpointed block is the second: both kinds are compiled.
        compiled = replace(plan.compile, enable=True, backend="aot_eager")
        cases[f"{method} compiled"] = (replace(checkpointed(plan, "full"), compile=compiled), False)
    [first, _] = check_each(cases, expected)
    for name in cases:
        method, _, mode = name.partition(" ")
        if mode != "compiled":
            kept = first[f"{method} none"]
            assert (first[name].losses, first[name].norms) == (kept.losses, kept.norms), name
            assert all(torch.equal(first[name].weights[fqn], weight) for fqn, weight in kept.weights.items()), name


# ------------------------------------------------------------------ the run around it


def test_a_checkpoint_moves_between_meshes(tmp_path: Path) -> None:
    def trained(name: str, grid: Mesh, steps: int) -> list[dict[str, Any]]:
        plan = saving_plan(tmp_path / name, grid, steps=steps, local=4, interval=2)
        return train_ranks(replace(plan, context_parallel=replace(plan.context_parallel, load_balance="headtail")))

    one, two = plans.mesh(1), plans.mesh(cp=2)
    straight = trained("one", one, 4)
    # Every token counts once, however many ranks share it.
    assert [line["tokens_seen"] for line in straight] == [256, 512, 768, 1024]
    for name, first, second in (("there", one, two), ("back", two, one)):
        trained(name, first, 2)
        for ours, theirs in zip(trained(name, second, 4), straight, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6), name


@pytest.mark.parametrize(
    ("balance", "seq_len", "message"),
    [
        ("ptrr", 32, "context_parallel.load_balance: `ptrr` sorts the block masks of FlexAttention"),
        ("headtail", 34, "batch.seq_len: 34 tokens cannot be cut into 4 equal chunks for 2 context ranks"),
        ("none", 33, "batch.seq_len: 33 tokens cannot be cut into 2 equal chunks for 2 context ranks"),
    ],
)
def test_what_cannot_be_shared_is_refused(balance: str, seq_len: int, message: str) -> None:
    plan = shared_plan(plans.mesh(cp=2), "ring", balance)
    plan = replace(plan, batch=replace(plan.batch, seq_len=seq_len))
    with pytest.raises(RunError, match=re.escape(message)):
        sequence_share(plan, 0)


def test_tokens_and_labels_are_cut_alike() -> None:
    plan = shared_plan(plans.mesh(2, cp=2), "ring", "headtail")
    whole = (torch.arange(64).view(2, 32), torch.arange(1, 65).view(2, 32))
    [(tokens, labels)] = shard_sequences([whole], plan, rank=3)  # the second context rank
    assert tokens[0].tolist() == list(range(8, 24))
    assert torch.equal(labels, tokens + 1)
    assert shard_sequences([whole], plans.tiny_plan(), rank=0)[0][0] is whole[0]
