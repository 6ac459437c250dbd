"""What the cost model says is kept for backward is what torch keeps, byte by byte.

Measured are all storages that ops of the forward pass have made and that are still alive after it, other than the loss
itself: what autograd has saved, what checkpoints hold on to, and the cache of selective checkpointing, which
`saved_tensors_hooks` does not see. Where nothing is checkpointed, the hooks are asked as well. Ranks beyond the one at hand
are those of torch's fake process group, whose collectives give shapes and no values.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness import run_ranks
from tests.plans import mesh, moe, tiny_model, tiny_plan
from titan_planner.cost.activations import block_saved, embedding_saved, final_norm_saved, output_saved, total
from titan_planner.cost.local import BALANCED, local, loss_kernels
from titan_planner.cost.loss import loss_bytes
from titan_planner.cost.program import TITAN
from titan_planner.ir.execution import KEEP_ALL, CheckpointPolicy, Compile, Float8, Float8Recipe, Loss
from titan_planner.ir.model import Block, Blocks, Gqa, Model, RmsNorm, Rope, SwiGlu
from titan_planner.ir.parallel import ContextParallel, Mesh, TensorParallel
from titan_planner.ir.plan import Plan
from titan_planner.passes.select_checkpointing import SAVE_OPS
from titan_planner.sharding import expert_rows, tensor_parallel_rows

FULL = replace(KEEP_ALL, name="full", mode="full")
SELECTIVE = CheckpointPolicy(
    name="selective",
    mode="selective",
    save_ops=SAVE_OPS,
    recompute_every_second_matmul=True,
    force_recompute_fqns=(),
    memory_budget=None,
)
EVERY_MATMUL = replace(SELECTIVE, recompute_every_second_matmul=False)
FORCED = replace(SELECTIVE, force_recompute_fqns=("layers.*.attention.wk", "layers.*.feed_forward.w2"))


def llama(size: str, layers: int = 2, **changes: Any) -> Model:
    """`tiny`, or `medium`: an eighth of Llama 3 8B's width, with its proportions."""
    dim, heads, kv_heads, hidden = {"tiny": (64, 8, 4, 96), "medium": (512, 16, 4, 1792)}[size]
    attention = Gqa(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim // heads, rope=Rope(theta=1e4, scaling=None))
    block = Block(attention=attention, feed_forward=SwiGlu(hidden_dim=hidden), norm=RmsNorm(eps=1e-5))
    return tiny_model(
        dim=dim, vocab_size=1024, blocks=(Blocks(repeat=layers, block=replace(block, **changes)),), family="llama3"
    )


def planned(
    model: Model,
    grid: Mesh | None = None,
    dtype: str = "bfloat16",
    policy: CheckpointPolicy = KEEP_ALL,
    *,
    every: int = 1,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    kv_replicas: int = 1,
    method: str = "allgather",
    **sections: Any,
) -> Plan:
    """A plan of microbatches of 2 x 64 tokens; `policy` on every layer whose number `every` divides."""
    grid = grid or mesh()
    on = grid.tp > 1
    tensor = TensorParallel(
        sequence_parallel=on and sequence_parallel,
        loss_parallel=on and loss_parallel,
        async_tp=False,
        kv_replicas=kv_replicas,
    )
    rows = (
        tensor_parallel_rows(model, sequence_parallel=tensor.sequence_parallel, loss_parallel=tensor.loss_parallel)
        if on
        else ()
    )
    plan = tiny_plan(grid, model=model, local=2, total=2 * grid.dp, tensor_parallel=tensor, **sections)
    return replace(
        plan,
        sharding=rows + expert_rows(model, grid),
        batch=replace(plan.batch, seq_len=64),
        fsdp=replace(plan.fsdp, param_dtype=dtype),
        dtype=dtype,
        context_parallel=ContextParallel(method=method, load_balance="headtail"),  # type: ignore[arg-type]
        activation_checkpoint=replace(
            plan.activation_checkpoint,
            policies=(KEEP_ALL,) if policy.name == "none" else (KEEP_ALL, policy),
        ),
        layers=tuple(
            replace(layer, checkpoint=policy.name)
            if layer.fqn.startswith("layers.") and int(layer.fqn.split(".")[1]) % every == 0
            else layer
            for layer in plan.layers
        ),
    )


def predicted(plan: Plan) -> float:
    """Bytes that the cost model counts for one microbatch on the fullest rank."""
    sizes = local(plan, TITAN, BALANCED)
    blocks = list(plan.model.layers())
    found = total(embedding_saved(sizes)) + total(final_norm_saved(sizes)) + total(output_saved(sizes))
    for layer in plan.layers:
        if layer.fqn.startswith("layers."):
            number = int(layer.fqn.split(".")[1])
            policy = plan.activation_checkpoint.policy(layer.checkpoint)
            assert policy is not None
            found += total(block_saved(blocks[number], sizes, policy, number))
    return (
        found
        + loss_bytes(
            sizes,
            loss_kernels(plan, TITAN),
            loss_parallel=plan.tensor_parallel.loss_parallel,
            chunks=plan.loss.chunks,
            z_loss=plan.loss.z_loss > 0,
            logits_held=False,
        ).kept
    )


class Made(TorchDispatchMode):
    """Every storage that an op makes, without keeping it alive."""

    def __init__(self, outside: set[int]) -> None:
        super().__init__()
        self.outside = outside  # where storages begin that were there before: weights, buffers and the batch
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            # The wrappers of collectives under way have no storage, and what they wrap was seen being made.
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage.data_ptr() in self.outside:
                    continue
                reference = StorageWeakRef(storage)
                self.storages[reference.cdata] = (reference, storage.nbytes())
        return out

    def alive(self) -> int:
        gc.collect()
        return sum(size for reference, size in self.storages.values() if not reference.expired())


def measured(plan: Plan, *, hooks: bool = False) -> tuple[int, int | None]:
    """Bytes that one microbatch keeps on the last rank of a fake group: alive, and as autograd's hooks see it."""
    from titan_runtime.apply.checkpointing import apply_checkpointing
    from titan_runtime.apply.compile import apply_compile, compiled_loss
    from titan_runtime.apply.context import apply_context
    from titan_runtime.apply.experts import apply_experts
    from titan_runtime.apply.float8 import apply_float8
    from titan_runtime.apply.fsdp import DTYPES
    from titan_runtime.apply.tensor import apply_tensor
    from titan_runtime.loss import loss_function
    from titan_runtime.mesh import build_expert_mesh, build_mesh
    from titan_runtime.modules import build
    from titan_runtime.step import batch_loss

    world = build_mesh(plan.mesh, "cpu")
    module = build(plan.model, seq_len=plan.batch.seq_len, dtype=DTYPES[plan.fsdp.param_dtype])
    apply_context(module, plan, world["cp"])
    apart = plan.mesh.ep * plan.mesh.tp > 1 and any(fqn.endswith("experts") for fqn, _ in module.named_modules())
    apply_experts(module, plan, world, build_expert_mesh(plan.mesh, "cpu") if apart else None)
    apply_tensor(module, plan, world)
    apply_float8(module, plan)
    apply_checkpointing(module, plan)
    apply_compile(module, plan)
    module.to_empty(device="cpu")
    outside = set()
    for tensor in (*module.parameters(), *module.buffers()):
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        part.data.zero_()
        outside.add(part.untyped_storage().data_ptr())
    loss = compiled_loss(loss_function(plan, world), plan)
    length = plan.batch.seq_len // plan.mesh.cp
    tokens = torch.zeros(plan.batch.microbatch_size, length, dtype=torch.int64)
    labels = tokens.clone()
    outside |= {tokens.untyped_storage().data_ptr(), labels.untyped_storage().data_ptr()}
    if plan.compile.enable:
        # Compilation makes tensors of its own; the second call does not compile.
        batch_loss(plan, module, loss, tokens, labels)
    seen: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    made = Made(outside)
    hooked = None
    if hooks:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = batch_loss(plan, module, loss, tokens, labels)
        hooked = sum(t.untyped_storage().nbytes() for place, t in seen.items() if place not in outside)
        del result
        seen.clear()
        if plan.compile.enable:
            return 0, hooked
    with made:
        result = batch_loss(plan, module, loss, tokens, labels)
    return made.alive() - result.untyped_storage().nbytes(), hooked


def on_last_rank(rank: Any, plans: Sequence[Plan], hooks: bool) -> list[tuple[int, int | None]]:
    """In a process of its own, which is the last rank of a fake group of each plan's size."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = []
    for plan in plans:
        size = plan.mesh.world_size
        dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
        try:
            found.append(measured(plan, hooks=hooks))
        finally:
            dist.destroy_process_group()
    return found


def check(*plans: Plan, hooks: bool = False, timeout: float = 120.0) -> None:
    """The counts are what is measured, but for a few scalars."""
    results = run_ranks(on_last_rank, 1, plans, hooks, process_group=False, timeout=timeout)[0]
    wrong = []
    for number, (plan, (alive, hooked)) in enumerate(zip(plans, results, strict=True)):
        expected = predicted(plan)
        for word, count in (("alive", alive), ("saved", hooked)):
            if count and abs(expected - count) > 16 * len(plan.layers):
                wrong.append(
                    f"plan {number} (tp {plan.mesh.tp}, {plan.fsdp.param_dtype}, {plan.layers[1].checkpoint}): "
                    f"{word} {count}, counted {expected:.0f}, off by {expected / count - 1:+.2%}"
                )
    assert not wrong, "\n".join(wrong)


DTYPES = ("bfloat16", "float32")


@pytest.mark.parametrize("size", ["tiny", "medium"])
def test_everything_is_kept_without_checkpointing(size: str) -> None:
    check(*(planned(llama(size), mesh(tp=tp), dtype) for tp in (1, 2, 4) for dtype in DTYPES), hooks=True)


@pytest.mark.parametrize(
    ("policy", "every"),
    [(FULL, 1), (FULL, 2), (SELECTIVE, 1), (EVERY_MATMUL, 1), (FORCED, 1)],
    ids=["full", "every second layer", "selective", "all matmuls", "forced recomputation"],
)
def test_checkpointing_keeps_what_its_policy_says(policy: CheckpointPolicy, every: int) -> None:
    check(
        *(
            planned(llama("tiny", layers=3), mesh(tp=tp), dtype, policy, every=every)
            for tp in (1, 2, 4)
            for dtype in DTYPES
        )
    )


def test_the_medium_model_keeps_what_its_policy_says() -> None:
    check(
        *(planned(llama("medium"), mesh(tp=tp), "bfloat16", policy) for tp in (1, 2, 4) for policy in (FULL, SELECTIVE))
    )


@pytest.mark.parametrize("method", ["allgather", "ring", "alltoall"])
def test_each_way_of_sharing_a_sequence_is_counted(method: str) -> None:
    # With load balance the last of two ranks, and a middle one of more, has most to keep; `ring`'s last has.
    ranks = (2,) if method == "allgather" else (2, 4)
    check(
        *(
            planned(llama("tiny"), mesh(cp=cp), dtype, policy, method=method)
            for cp in ranks
            for dtype in DTYPES
            for policy in (KEEP_ALL, SELECTIVE)
        )
    )


def test_other_tensor_parallel_layouts_are_counted() -> None:
    few = replace(llama("tiny").blocks[0].block.attention, num_kv_heads=2)
    check(
        planned(llama("tiny", attention=few), mesh(tp=4), kv_replicas=2),
        planned(llama("tiny"), mesh(tp=2), sequence_parallel=False),
        planned(llama("tiny"), mesh(tp=2), policy=SELECTIVE, sequence_parallel=False),
        *(planned(llama("tiny"), mesh(tp=2), dtype, loss_parallel=False) for dtype in DTYPES),
    )


def test_the_z_loss_and_chunks_of_the_loss_are_counted() -> None:
    losses = (Loss(kind="cross_entropy", chunks=1, z_loss=1e-4), Loss(kind="cross_entropy", chunks=4, z_loss=0.0))
    check(
        *(planned(llama("tiny"), mesh(tp=tp), dtype, loss=loss) for tp in (1, 2) for dtype in DTYPES for loss in losses)
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"score_before_experts": True}, {"num_shared_experts": 0, "route_norm": False, "score_function": "softmax"}],
    ids=["deepseek", "scores first", "mixtral"],
)
def test_experts_are_counted(changes: dict[str, Any]) -> None:
    model = llama("tiny", feed_forward=moe(hidden_dim=32, **changes))
    check(
        *(planned(model, None, dtype, policy) for dtype in DTYPES for policy in (KEEP_ALL, FULL, SELECTIVE)),
        planned(model, mesh(tp=2), "bfloat16"),
    )


def test_tokens_sent_to_experts_of_other_ranks_are_counted() -> None:
    """On two real ranks, for how many rows arrive is told by a collective; dealt out, so that both get equally many."""
    model = llama("tiny", feed_forward=moe(hidden_dim=32))
    for policy in (KEEP_ALL, SELECTIVE):
        plan = planned(model, mesh(dp_shard=2, ep=2), "bfloat16", policy)
        plan = replace(plan, expert_parallel=replace(plan.expert_parallel, force_load_balance=True))
        for alive, _ in run_ranks(lambda rank, plan=plan: measured(plan), 2):
            assert abs(predicted(plan) - alive) <= 16 * len(plan.layers) + 64 * model.num_layers


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tiny", "medium"])
def test_compiled_blocks_keep_what_the_partitioner_chooses(size: str) -> None:
    # The partitioner of inductor without its code generation, which takes no part in what is kept.
    compiled = Compile(enable=True, components=("model",), backend="aot_eager_decomp_partition")
    plans = (planned(llama(size, layers=1), None, "bfloat16", p, compile=compiled) for p in (KEEP_ALL, SELECTIVE))
    check(*plans, hooks=True, timeout=500.0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_default_partitioner"])
def test_other_backends_keep_what_their_partitioner_chooses_if_they_have_one(backend: str) -> None:
    compiled = Compile(enable=True, components=("model", "loss"), backend=backend)
    check(planned(llama("tiny", layers=1), compile=compiled), hooks=True, timeout=300.0)


ATTENTION_LINEARS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
FEED_FORWARD_LINEARS = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")


def in_8_bits(recipe: Float8Recipe, linears: Sequence[str]) -> Float8:
    """`linears` of the first layer computed in 8 bits, by emulation."""
    return Float8(
        recipe=recipe,
        converted=tuple(f"layers.0.{name}" for name in linears),
        skipped=(),
        enable_fsdp_float8_all_gather=False,
        precompute_float8_dynamic_scale_for_fsdp=False,
        emulate=True,
    )


@pytest.mark.slow
def test_compiled_products_in_8_bits_keep_what_is_not_cast_again() -> None:
    compiled = Compile(enable=True, components=("model",), backend="aot_eager_decomp_partition")
    everything = (*ATTENTION_LINEARS, *FEED_FORWARD_LINEARS)
    sections = (
        in_8_bits("rowwise", everything),
        in_8_bits("tensorwise", everything),
        # The gradients of weights are computed in bfloat16 here.
        in_8_bits("rowwise_with_gw_hp", everything),
        # wk and wv read attention's input as it is.
        in_8_bits("rowwise", ("attention.wq", "attention.wo", *FEED_FORWARD_LINEARS)),
    )
    plans = (planned(llama("medium", layers=1), compile=compiled, float8=section) for section in sections)
    check(*plans, hooks=True, timeout=500.0)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.0, 0.7, 0.9, 0.99, 1.0])
def test_a_budget_of_the_compiler_is_used_in_steps(budget: float) -> None:
    compiled = Compile(enable=True, components=("model",), backend="aot_eager_decomp_partition")
    policy = replace(KEEP_ALL, name="memory_budget", mode="memory_budget", memory_budget=budget)
    check(planned(llama("medium", layers=1), policy=policy, compile=compiled), hooks=True, timeout=200.0)
