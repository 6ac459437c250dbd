"""What the plan's decisions make torch do, counted: matmuls that are computed again, collectives that are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import plans
from tests.harness import Rank, RanksFailed, run_ranks
from tests.parity.rows import SCHEDULES, pipeline
from tests.parity.runner import compile_row
from tests.runtime.test_parity import checkpointed
from titan_planner.ir.inventory import module_names
from titan_planner.ir.parallel import FsdpUnit
from titan_planner.ir.plan import Plan
from titan_planner.sharding import tensor_parallel_rows
from titan_runtime.apply import build_model
from titan_runtime.apply.checkpointing import apply_checkpointing, resolve_op
from titan_runtime.apply.compile import apply_compile, compiled_loss
from titan_runtime.apply.fsdp import resolve_units
from titan_runtime.errors import RunError
from titan_runtime.init import initialise
from titan_runtime.loss import cross_entropy_sum
from titan_runtime.mesh import build_mesh
from titan_runtime.modules import Transformer, build


class CountOps(TorchDispatchMode):
    """Counts the operators that are really executed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def executed(plan: Plan) -> Counter[str]:
    module = build(plan.model, seq_len=plan.batch.seq_len).to_empty(device="cpu")
    initialise(module, plan.model, seed=0)
    apply_checkpointing(module, plan)
    tokens = torch.zeros(1, plan.batch.seq_len, dtype=torch.int64)
    with CountOps() as count:
        cross_entropy_sum(module(tokens), tokens).backward()
    return count.counts


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


@pytest.mark.parametrize(
    ("mode", "matmuls", "attentions"),
    [
        # A block has seven matmuls; stopping early, the last one (w2), which only the block's output needs, is not redone.
        pytest.param("full", 6, 1, id="full"),
        pytest.param("selective", 0, 0, id="selective"),
        # Forced: wk, and wv of the same shape. Of the other five (wq, wo, w1, w3, w2) every second: wo and w3.
        pytest.param("selective-alternating", 4, 0, id="selective-alternating"),
    ],
)
def test_one_checkpointed_block_computes_again_what_its_policy_says(mode: str, matmuls: int, attentions: int) -> None:
    plain = executed(plans.tiny_plan())
    again = executed(checkpointed(plans.tiny_plan(), mode))
    assert again["aten.mm.default"] - plain["aten.mm.default"] == matmuls
    assert again[ATTENTION] - plain[ATTENTION] == attentions


def test_checkpointing_keeps_names() -> None:
    plan = checkpointed(plans.tiny_plan(), "full")
    module = build(plan.model)
    names = [fqn for fqn, _ in module.named_parameters()]
    apply_checkpointing(module, plan)
    assert [fqn for fqn, _ in module.named_parameters()] == names


def test_an_operator_that_torch_lacks_is_named() -> None:
    plan = checkpointed(plans.tiny_plan(), "selective")
    policy = replace(plan.activation_checkpoint.policies[1], save_ops=("aten.nope.default",))
    plan = replace(
        plan, activation_checkpoint=replace(plan.activation_checkpoint, policies=(plans.NO_CHECKPOINT, policy))
    )
    with pytest.raises(RunError, match=r"policy `some` saves `aten.nope.default`, which is no operator of torch"):
        apply_checkpointing(build(plan.model), plan)


# ------------------------------------------------------------------ compilation


def graphs(rank: Rank, plan: Plan) -> int:
    """Graphs that the compiler makes of the blocks of `plan` in one forward."""
    from torch._dynamo import register_backend

    made = []

    @register_backend(name="counting")
    def counting(graph, inputs):
        made.append(graph)
        return graph.forward

    module = build(plan.model, seq_len=plan.batch.seq_len).to_empty(device="cpu")
    initialise(module, plan.model, seed=0)
    apply_checkpointing(module, plan)
    apply_compile(module, plan)
    module(torch.zeros(1, plan.batch.seq_len, dtype=torch.int64)).sum().backward()
    return len(made)


def many_blocks(policy_of: Callable[[int], str]) -> Plan:
    """A compiled plan of twelve equal blocks; two policies save different operators."""
    model = plans.tiny_model()
    model = replace(model, blocks=(replace(model.blocks[0], repeat=12),))
    plan = checkpointed(plans.tiny_plan(model=model), "selective")
    _, some = plan.activation_checkpoint.policies
    policies = (plans.NO_CHECKPOINT, some, replace(some, name="more", save_ops=()))
    layers = [
        replace(x, checkpoint=policy_of(int(x.fqn[7:])) if x.fqn.startswith("layers.") else "none") for x in plan.layers
    ]
    return replace(
        plan,
        layers=tuple(layers),
        activation_checkpoint=replace(plan.activation_checkpoint, policies=policies),
        compile=replace(plan.compile, enable=True, backend="counting"),
    )


@pytest.mark.parametrize(
    ("policy_of", "count"),
    [
        pytest.param(lambda n: "none", 1, id="equal-blocks"),
        pytest.param(lambda n: "some", 1, id="equal-checkpointed-blocks"),
        # The compiler does not guard on what a policy saves: one graph here would mean that one policy is ignored.
        pytest.param(lambda n: "some" if n < 6 else "more", 2, id="two-policies"),
        pytest.param(lambda n: "some" if n % 2 else "none", 2, id="alternating"),
    ],
)
def test_equal_blocks_share_one_compilation(policy_of: Callable[[int], str], count: int) -> None:
    assert run_ranks(graphs, 1, many_blocks(policy_of)) == [count]


def test_only_the_planned_components_are_compiled() -> None:
    plan = plans.tiny_plan()
    assert compiled_loss(cross_entropy_sum, plan) is cross_entropy_sum
    on = replace(plan, compile=replace(plan.compile, enable=True, components=("model",)))
    assert compiled_loss(cross_entropy_sum, on) is cross_entropy_sum
    module = build(plan.model)
    apply_compile(module, replace(plan, compile=replace(plan.compile, enable=True, components=("loss",))))
    assert all(block._compiled_call_impl is None for block in module.layers.values())


@pytest.mark.parametrize("name", ["aten.mm", "x", "", "aten.mm.default.name", "aten.nope.default"])
def test_what_is_no_operator_is_named(name: str) -> None:
    assert resolve_op("some", "aten.mm.default") is torch.ops.aten.mm.default
    with pytest.raises(RunError, match=f"policy `some` saves `{name}`, which is no operator"):
        resolve_op("some", name)


def test_a_memory_budget_is_given_to_the_compiler() -> None:
    def budget(rank: Rank, plan: Plan) -> float:
        apply_compile(build(plan.model), plan)
        return torch._functorch.config.activation_memory_budget

    plan = many_blocks(lambda n: "half")
    policy = replace(plans.NO_CHECKPOINT, name="half", mode="memory_budget", memory_budget=0.5)
    ac = replace(plan.activation_checkpoint, policies=(plans.NO_CHECKPOINT, policy))
    plan = replace(plan, activation_checkpoint=ac, compile=replace(plan.compile, backend="aot_eager"))
    assert run_ranks(budget, 1, plan) == [0.5]


def kept(rank: Rank, plan: Plan) -> list[int]:
    """Bytes that compiled blocks keep for backward under the budgets 1, 0.5 and 0."""
    sizes = []
    for budget in (1.0, 0.5, 0.0):
        torch.compiler.reset()
        module = build(plan.model, seq_len=plan.batch.seq_len).to_empty(device="cpu")
        initialise(module, plan.model, seed=0)
        apply_compile(module, with_budget(plan, budget))
        held: dict[int, int] = {}

        def pack(x: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            module(torch.zeros(1, plan.batch.seq_len, dtype=torch.int64)).sum().backward()
        sizes.append(sum(held.values()))
    return sizes


def with_budget(plan: Plan, budget: float) -> Plan:
    policy = replace(plans.NO_CHECKPOINT, name="budget", mode="memory_budget", memory_budget=budget)
    layers = [replace(x, checkpoint="budget") if x.fqn.startswith("layers.") else x for x in plan.layers]
    return replace(
        plan,
        layers=tuple(layers),
        activation_checkpoint=replace(plan.activation_checkpoint, policies=(plans.NO_CHECKPOINT, policy)),
        compile=replace(plan.compile, enable=True, backend="aot_eager"),
    )


def test_a_smaller_memory_budget_keeps_less() -> None:
    [(whole, half, none)] = run_ranks(kept, 1, plans.tiny_plan())
    assert whole > half > none


def configuration(rank: Rank, given: list[Plan]) -> list[tuple[float, bool]]:
    found = []
    for plan in given:
        compiled_loss(cross_entropy_sum, plan)
        found.append((torch._functorch.config.activation_memory_budget, torch._functorch.config.donated_buffer))
    return found


def test_one_plans_settings_of_the_compiler_are_not_the_nexts() -> None:
    on = with_budget(plans.tiny_plan(), 0.5)
    plain = replace(plans.tiny_plan(), compile=on.compile)
    split = replace(
        plain,
        mesh=plans.mesh(pp=2),
        pipeline=replace(plain.pipeline, schedule="DualPipeV"),
    )
    assert run_ranks(configuration, 1, [on, split, plain]) == [[(0.5, True), (1.0, False), (1.0, True)]]


def graphs_on_tensor_ranks(rank: Rank, plan: Plan) -> int:
    """Graphs that the compiler makes of all blocks in one step."""
    made = []

    def counting(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    torch._dynamo.register_backend(counting, name="counting")
    module = build_model(plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))
    for _ in range(2):
        module(torch.zeros(1, plan.batch.seq_len, dtype=torch.int64)).sum().backward()
    return len(made)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_equal_blocks_share_one_compilation_on_tensor_ranks_too(mode: str) -> None:
    plan = many_blocks(lambda n: "none" if mode == "none" else "some")
    if mode == "full":
        full = replace(plans.NO_CHECKPOINT, name="some", mode="full")
        policies = (plans.NO_CHECKPOINT, full)
        plan = replace(plan, activation_checkpoint=replace(plan.activation_checkpoint, policies=policies))
    plan = replace(
        plan,
        mesh=plans.mesh(tp=2),
        cluster=plans.cluster(2),
        tensor_parallel=replace(plan.tensor_parallel, sequence_parallel=True),
        sharding=tensor_parallel_rows(plan.model, sequence_parallel=True, loss_parallel=False),
    )
    assert run_ranks(graphs_on_tensor_ranks, 2, plan) == [1, 1]


def test_a_compiler_that_torch_lacks_is_named() -> None:
    plan = plans.tiny_plan()
    plan = replace(plan, compile=replace(plan.compile, enable=True, backend="inducter"))
    with pytest.raises(RunError, match=r"compile.backend: torch .* has no compiler backend `inducter`") as caught:
        apply_compile(build(plan.model), plan)
    assert "inductor" in str(caught.value.hint)


# ------------------------------------------------------------------ the head


class LargestLogits(TorchDispatchMode):
    """Elements of the largest tensor that has a column for every token of the vocabulary."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.shape[-1:] == (plans.VOCAB,) and func not in OF_WEIGHTS:
            self.numel = max(self.numel, made.numel())
        return made


OF_WEIGHTS = {torch.ops.aten.view.default, torch.ops.aten.t.default}


@pytest.mark.parametrize("chunks", [1, 4])
def test_chunks_keep_the_logits_small(chunks: int) -> None:
    plan = plans.tiny_plan()
    module = build(plan.model, seq_len=32).to_empty(device="cpu")
    initialise(module, plan.model, seed=0)
    tokens = torch.zeros(8, 32, dtype=torch.int64)  # enough that a part is larger than the weight
    with LargestLogits() as largest:
        module(tokens, tokens, cross_entropy_sum, chunks).backward()
    assert largest.numel == 8 * 32 * plans.VOCAB // chunks


def largest_logits(rank: Rank, made: list[Plan]) -> list[tuple[int, int]]:
    """For each plan the elements of the largest logits on this rank: in a step, and in an evaluation."""
    from titan_runtime.apply import build_model
    from titan_runtime.mesh import build_mesh
    from titan_runtime.optimizer import build_optimizer
    from titan_runtime.step import batch_loss, train_step

    device, found = torch.device("cpu"), []
    for plan in made:
        module = build_model(plan, build_mesh(plan.mesh, "cpu"), device)
        optimizer = build_optimizer(module, plan.optimizer)
        tokens = torch.arange(plan.batch.local_batch_size * 32).view(-1, 32)
        with LargestLogits() as step:
            train_step(plan, module, optimizer, cross_entropy_sum, [(tokens, tokens)], 1, 0, device)
        with LargestLogits() as evaluation, torch.no_grad():
            batch_loss(plan, module, cross_entropy_sum, tokens, tokens)
        found.append((step.numel, evaluation.numel))
    return found


def test_chunks_keep_the_logits_of_a_pipeline_small() -> None:
    microbatch = 32 * plans.VOCAB
    for chunks in (1, 4):
        rows = [pipeline(name, 2, name, sections={"loss": {"chunks": chunks}}) for name in SCHEDULES]
        made = [compile_row(row) for row in rows]
        assert {plan.batch.microbatch_size for plan in made} == {1}
        for plan, *sizes in zip(made, *run_ranks(largest_logits, 2, made), strict=True):
            of_last_stage = sizes[plan.pipeline.stages[-1].pp_rank]
            assert of_last_stage == (microbatch // chunks, microbatch // chunks), (plan.pipeline.schedule, chunks)


def test_a_split_backward_keeps_one_number_of_the_loss_and_computes_each_half_once() -> None:
    """As zero-bubble schedules run the last stage: gradients of the inputs first, those of the weights later."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    plan = plans.tiny_plan()

    def last_stage() -> tuple[Transformer, torch.Tensor]:
        module = build(plan.model, seq_len=32).to_empty(device="cpu")
        initialise(module, plan.model, seed=0)
        module.tok_embeddings = None
        return module, torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()

    labels = torch.arange(4 * 32).view(4, 32)
    whole, x = last_stage()
    cross_entropy_sum(whole(x), labels).backward()

    split, arrived = last_stage()
    with CountOps() as forward:
        loss = split(arrived, labels, cross_entropy_sum, 4)
    with CountOps() as first:
        (to_input,), groups = stage_backward_input([loss], None, [arrived], split.parameters())
    kept = [grad for group in groups for grads in group["grads"] for grad in grads if grad is not None]
    assert max(grad.shape[-1] for grad in kept if grad.dim()) < plans.VOCAB
    assert any(grad.dim() == 0 for grad in kept)  # the loss's: what the head's weight gradient starts from
    with CountOps() as second:
        stage_backward_weight(split.parameters(), groups)

    torch.testing.assert_close(to_input, x.grad)
    for name, parameter in split.named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, msg=name)
    # Per block seven products in forward, and as many in each half; per chunk of the head one, and again one and its own.
    blocks = 2 * 7
    assert [count.counts["aten.mm.default"] for count in (forward, first, second)] == [
        blocks + 4,
        blocks + 2 * 4,
        blocks + 2 * 4,
    ]


# ------------------------------------------------------------------ FSDP


def collectives(rank: Rank, plan: Plan) -> dict[str, int]:
    """FSDP's collectives in one step, by name."""
    from titan_runtime.apply import build_model
    from titan_runtime.mesh import build_mesh
    from titan_runtime.optimizer import build_optimizer
    from titan_runtime.step import train_step

    module = build_model(plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))
    optimizer = build_optimizer(module, plan.optimizer)
    tokens = torch.zeros(plan.batch.local_batch_size, plan.batch.seq_len, dtype=torch.int64)
    batch = [(tokens, tokens)] * plan.batch.accumulation_steps
    device = torch.device("cpu")
    with CountOps() as count:
        train_step(plan, module, optimizer, cross_entropy_sum, batch, step=1, schedule_step=0, device=device)
    return {name: times for name, times in count.counts.items() if name.startswith("c10d.")}


def test_units_reshard_and_sync_as_planned() -> None:
    plan = plans.tiny_plan(
        plans.mesh(2), local=2, total=8
    )  # two accumulation steps; four units: embedding, 2 blocks, head
    kept = replace(plan, fsdp=replace(plan.fsdp, units=plans.units(plan.model, False)))
    deferred = replace(plan, fsdp=replace(plan.fsdp, defer_gradient_sync=True))

    freed = run_ranks(collectives, 2, plan)[0]
    assert freed["c10d._reduce_scatter_base_.default"] == 2 * 4
    # Forward gathers all four, backward all but the head's, twice. FSDP re-gathers the embedding in backward as well.
    assert freed["c10d._allgather_base_.default"] == 2 * (4 + 3)
    assert run_ranks(collectives, 2, kept)[0]["c10d._allgather_base_.default"] == 2 * 4
    assert run_ranks(collectives, 2, deferred)[0]["c10d._reduce_scatter_base_.default"] == 4


def test_replicas_sum_their_gradients_once_a_step_when_deferred() -> None:
    plan = plans.tiny_plan(plans.mesh(1, 2), local=2, total=8)
    plan = replace(plan, fsdp=replace(plan.fsdp, strategy="ddp", units=()))
    deferred = replace(plan, fsdp=replace(plan.fsdp, defer_gradient_sync=True))
    # Two accumulation steps, three units (two blocks and the rest), and the all-reduces of token count and loss.
    assert run_ranks(collectives, 2, plan)[0] == {"c10d.allreduce_.default": 2 * 3 + 2}
    assert run_ranks(collectives, 2, deferred)[0] == {"c10d.allreduce_.default": 3 + 2}


def test_a_selector_with_a_range_makes_a_unit_of_each_match_and_inner_ones_come_first() -> None:
    plan = plans.tiny_plan()
    nested = FsdpUnit(modules=("layers.1.feed_forward",), reshard_after_forward=True)
    fsdp = replace(plan.fsdp, units=(*plan.fsdp.units, nested))
    found = [members for members, _ in resolve_units(fsdp, module_names(plan.model))]
    assert found == [
        ("layers.1.feed_forward",),
        ("layers.0",),
        ("layers.1",),
        ("tok_embeddings",),
        ("norm", "output"),
    ]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ((("layers.7",),), r"fsdp.units\[0\]: the selector `layers.7` names no module"),
        ((("layers.*",), ("layers.1",)), r"fsdp.units\[1\]: `layers.1` is already in fsdp.units\[0\]"),
    ],
)
def test_units_that_make_no_sense_are_refused(units: tuple[tuple[str, ...], ...], message: str) -> None:
    plan = plans.tiny_plan()
    made = tuple(FsdpUnit(modules=modules, reshard_after_forward=True) for modules in units)
    with pytest.raises(RunError, match=message):
        resolve_units(replace(plan.fsdp, units=made), module_names(plan.model))


def test_a_tied_weight_in_two_units_is_refused() -> None:
    plan = plans.tiny_plan(plans.mesh(2), model=plans.tiny_model(tied=True))
    split = tuple(FsdpUnit(modules=(m,), reshard_after_forward=True) for m in ("tok_embeddings", "output"))
    with pytest.raises(RanksFailed, match="`tok_embeddings` and `output` share a weight"):
        run_ranks(collectives, 2, replace(plan, fsdp=replace(plan.fsdp, units=split)))
