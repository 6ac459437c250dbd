"""Peak memory: the counts against arithmetic done by hand, and what must hold whatever the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests import plans
from tests.unit.builders import PIPELINE, TINY, compile_text
from titan_planner.cost.local import BALANCED, local, worst_imbalance
from titan_planner.cost.loss import loss_bytes
from titan_planner.cost.memory import Parts, module_numel, rank_memory, stage_memory
from titan_planner.cost.program import DEEPSPEED_BF16, DEEPSPEED_ZERO1, MEGATRON, TORCHTITAN, Program
from titan_planner.cost.reserve import communicators, reserve
from titan_planner.ir.inventory import num_params
from titan_planner.ir.model import Block, Blocks, Gqa, Model, Moe, RmsNorm, Rope, SwiGlu
from titan_planner.ir.parallel import FsdpUnit, Mesh
from titan_planner.ir.plan import Plan
from titan_planner.rules import feasibility

LLAMA = """\
spec_version: 1
name: eight
model: {family: llama3, flavor: 8B}
cluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}
training: {steps: 20, seq_len: 8192, local_batch_size: 1, global_batch_size: 8}
parallelism: {data_parallel_shard_degree: 8}
activation_checkpoint: {mode: selective}
compile: {enable: false}
"""


def parts(plan: Plan, name: str, rank: int = 0, **options: Any) -> Parts:
    """What is in memory at the moment called `name`."""
    moments = rank_memory(plan, **options)[rank].moments
    return next(moment.parts for moment in moments if moment.name == name)


def megatron_plan(layers: int, dim: int, heads: int, kv_heads: int, hidden: int, vocab: int, grid: Mesh) -> Plan:
    """A plan of bfloat16 microbatches of one sequence of 4096 tokens, several a step."""
    attention = Gqa(num_heads=heads, num_kv_heads=kv_heads, head_dim=128, rope=Rope(theta=1e4, scaling=None))
    block = Block(attention=attention, feed_forward=SwiGlu(hidden_dim=hidden), norm=RmsNorm(eps=1e-5))
    model = Model(
        family="llama3",
        flavor="cut",
        vocab_size=vocab,
        dim=dim,
        max_seq_len=4096,
        blocks=(Blocks(repeat=layers, block=block),),
        norm=RmsNorm(eps=1e-5),
        tied=False,
    )
    plan = plans.tiny_plan(grid, model=model, total=4 * grid.dp)
    return replace(
        plan,
        batch=replace(plan.batch, seq_len=4096),
        fsdp=replace(plan.fsdp, param_dtype="bfloat16"),
        cluster=plans.cluster(grid.world_size, device="cuda"),
        tensor_parallel=replace(plan.tensor_parallel, sequence_parallel=grid.tp > 1, loss_parallel=grid.tp > 1),
    )


def test_what_lies_between_steps_is_sixteen_bytes_a_parameter_over_the_ranks() -> None:
    plan = compile_text(LLAMA)
    update = parts(plan, "optimizer")
    assert update.parameters == update.gradients == pytest.approx(4 * num_params(plan.model) / 8)
    assert update.optimizer == pytest.approx(8 * num_params(plan.model) / 8)


def test_foreach_updates_need_another_moment_and_muon_keeps_one() -> None:
    plan = compile_text(LLAMA)
    fused, foreach = (
        parts(replace(plan, optimizer=replace(plan.optimizer, implementation=how)), "optimizer").optimizer
        for how in ("fused", "foreach")
    )
    assert foreach - fused == pytest.approx(4 * num_params(plan.model) / 8)
    muon = parts(replace(plan, optimizer=replace(plan.optimizer, name="Muon")), "loss").optimizer
    matrices = 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336)
    assert fused - muon == pytest.approx(4 * matrices / 8)


@pytest.mark.parametrize(
    ("policy", "bytes_a_rank"),
    # 8 weights of a rank and 2 ranks: weights, gradients, and main weights with two moments, 2 + 4 + 12.
    [("zero1", (2, 4, 6)), ("zero2", (2, 2, 6)), ("ddp", (2, 4, 12))],
)
def test_other_ways_to_share_states_hold_what_they_say(policy: Any, bytes_a_rank: tuple[int, int, int]) -> None:
    plan = megatron_plan(2, 512, 4, 4, 1024, 1024, plans.mesh(dp_shard=2))
    held = parts(plan, "optimizer", program=replace(MEGATRON, data_policy=policy))
    count = num_params(plan.model)
    assert (held.parameters, held.gradients, held.optimizer) == tuple(each * count for each in bytes_a_rank)


# SimuMax's published B200 runs of Megatron-LM with Transformer Engine (docs/b200, MooreThreads/SimuMax commit 4dcaae51):
# torch's peak of allocated memory in GiB. Vocabulary padded to 128512.
@pytest.mark.parametrize(
    ("sizes", "grid", "measured"),
    [
        ((12, 8192, 64, 8, 28672), {"dp_shard": 4, "tp": 2}, 60.68),
        ((12, 8192, 64, 8, 28672), {"dp_shard": 2, "tp": 4}, 39.07),
        ((12, 8192, 64, 8, 28672), {"dp_shard": 1, "tp": 8}, 28.29),
        ((4, 16384, 128, 16, 53248), {"dp_shard": 4, "tp": 2}, 81.59),
        ((4, 16384, 128, 16, 53248), {"dp_shard": 2, "tp": 4}, 52.89),
        ((4, 16384, 128, 16, 53248), {"dp_shard": 1, "tp": 8}, 38.57),
    ],
)
def test_published_runs_of_megatron_are_met(
    sizes: tuple[int, int, int, int, int], grid: dict[str, int], measured: float
) -> None:
    (memory,) = stage_memory(megatron_plan(*sizes, 128512, plans.mesh(**grid)), MEGATRON)
    assert memory.allocated_gib == pytest.approx(measured, rel=0.01)


# TorchTitan's Llama 3 8B on eight H100, sequences of 8192, eager, selective checkpointing: peak reserved memory in GiB,
# in commit 5940ddeb5 of pytorch/torchtitan, which compares resharding policies.
@pytest.mark.parametrize(
    ("reshard", "last", "measured"), [(True, False, 49.59), (True, True, 49.41), (False, False, 62.18)]
)
def test_published_runs_of_torchtitan_are_met(reshard: bool, last: bool, measured: float) -> None:
    plan = compile_text(LLAMA)
    units = (
        FsdpUnit(modules=("tok_embeddings",), reshard_after_forward=reshard),
        FsdpUnit(modules=("layers.*",), reshard_after_forward=reshard),
        FsdpUnit(modules=("norm", "output"), reshard_after_forward=last),
    )
    (memory,) = stage_memory(replace(plan, fsdp=replace(plan.fsdp, units=units)))
    assert memory.reserved_gib == pytest.approx(measured, rel=0.03)


def test_eager_logits_are_twelve_bytes_each_and_chunks_divide_them() -> None:
    plan = compile_text(LLAMA)
    logits = 8192 * 128256
    options: dict[str, Any] = {"loss_parallel": False, "z_loss": False, "logits_held": False}
    plain = loss_bytes(local(plan, Program(), BALANCED), "eager", chunks=1, **options)
    assert (plain.kept, plain.peak, plain.handed_on) == (4 * logits, 12 * logits, 2 * logits)
    chunked = loss_bytes(local(plan, Program(), BALANCED), "eager", chunks=8, **options)
    assert (chunked.kept, chunked.peak) == (0, 12 * logits / 8)
    assert parts(plan, "loss").logits == plain.peak


def test_gradients_of_earlier_microbatches_are_there_when_the_loss_is_computed() -> None:
    plan = compile_text(LLAMA.replace("global_batch_size: 8", "global_batch_size: 16"))
    assert plan.batch.accumulation_steps == 2
    reduced = replace(plan, fsdp=replace(plan.fsdp, defer_gradient_sync=False))
    assert parts(compile_text(LLAMA), "loss").gradients == 0
    assert parts(reduced, "loss").gradients == pytest.approx(4 * num_params(plan.model) / 8)
    deferred = replace(plan, fsdp=replace(plan.fsdp, defer_gradient_sync=True))
    whole = parts(deferred, "loss").unsharded - parts(reduced, "loss").unsharded
    assert whole == pytest.approx(4 * num_params(plan.model))
    assert parts(deferred, "loss").gradients == 0


def test_a_pipelines_gradients_are_whole_until_its_last_microbatch() -> None:
    plan = compile_text(PIPELINE)
    numel = module_numel(plan)
    for rank, memory in enumerate(rank_memory(plan)):
        stages = {stage.index for stage in plan.pipeline.stages if stage.pp_rank == rank}
        mine = sum(numel[layer.fqn] for layer in plan.layers if layer.stage in stages)
        block = next(moment for moment in memory.moments if moment.name == "first block's backward")
        assert block.parts.unsharded >= (2 + 4) * mine
        received = (0 not in stages) + (len(plan.pipeline.stages) - 1 not in stages) + 2 * (len(stages) - 1)
        assert block.parts.communication >= plan.pipeline.microbatches * (received - 1) * 8192 * 4096 * 2 / 4


def test_the_fullest_moment_is_reported_and_the_allocator_keeps_the_rest() -> None:
    plan = compile_text(LLAMA)
    (rank,), (stage,) = rank_memory(plan), stage_memory(plan)
    assert stage.moment == rank.fullest.name
    assert stage.allocated_gib == pytest.approx(rank.fullest.parts.total / 2**30, abs=0.005)
    assert all(moment.parts.total <= rank.fullest.parts.total for moment in rank.moments)
    assert rank.stranded > 0
    assert stage.total_gib == pytest.approx(stage.reserved_gib + stage.reserve_gib)


def test_the_reserve_names_its_lines_and_is_nothing_on_a_cpu() -> None:
    assert reserve(compile_text(TINY)) == ()
    (stage,) = stage_memory(compile_text(TINY))
    assert stage.reserve_gib == stage.allocator_gib == 0
    plan = compile_text(PIPELINE)
    assert communicators(plan) == ("world", "pp", "fsdp", "tp")
    lines = reserve(plan)
    assert all(line.source for line in lines)
    assert stage_memory(plan)[0].reserve_gib == round(sum(line.nbytes for line in lines) / 2**30, 3)


def test_imbalance_of_experts_is_explicit_and_its_worst_is_reported() -> None:
    model = plans.tiny_moe_model()
    plan = plans.tiny_plan(plans.mesh(4, ep=4), model=model)
    layer = model.blocks[1].block.feed_forward
    assert isinstance(layer, Moe)
    # Two experts a rank, and two for each token: one rank may get everything, four times the mean.
    assert worst_imbalance(layer, 4) == 4
    (even,), (worst,) = rank_memory(plan), rank_memory(plan, imbalance=4.0)
    assert even.experts_worst > 0 == worst.experts_worst
    block = "first block's backward"
    more = parts(plan, block, imbalance=4.0).activations - parts(plan, block).activations
    assert even.experts_worst == pytest.approx(more)


def test_memory_grows_with_what_is_kept() -> None:
    kept = [
        stage_memory(compile_text(LLAMA.replace("selective", mode)))[0].allocated_gib
        for mode in ("full", "selective", "none")
    ]
    assert kept == sorted(kept) and kept[0] < kept[2] / 2


def test_torchs_loss_parallel_has_four_float32_copies_of_the_logits() -> None:
    plan = megatron_plan(2, 512, 4, 4, 1024, 1024, plans.mesh(tp=2))
    logits = 4096 * 512
    options: dict[str, Any] = {"loss_parallel": True, "chunks": 1, "z_loss": False}
    sizes = local(plan, Program(), BALANCED)
    torchs = loss_bytes(sizes, "eager", logits_held=False, dtensor=True, **options)
    assert (torchs.kept, torchs.peak) == (4 * logits, 16 * logits)
    held = loss_bytes(sizes, "eager", logits_held=True, dtensor=True, **options)
    assert held.peak - torchs.peak == held.kept - torchs.kept == 2 * logits
    ours = loss_bytes(sizes, "eager", logits_held=False, **options)
    assert ours.peak < torchs.peak
    assert parts(plan, "loss", program=TORCHTITAN).logits == torchs.peak


def test_megatrons_loss_copies_the_logits_to_float32() -> None:
    plan = megatron_plan(2, 512, 4, 4, 1024, 1024, plans.mesh())
    logits = 4096 * 1024
    for copies, peak in ((0, 2 * logits + 4 * 4096), (1, 6 * logits), (2, 10 * logits)):
        assert parts(plan, "loss", program=replace(MEGATRON, loss_copies=copies)).logits == peak


def test_a_norm_kernel_keeps_its_input_as_it_is() -> None:
    plan = compile_text(LLAMA.replace("selective", "none"))
    moment = "last block's backward"
    wide, narrow = (parts(plan, moment, program=Program(norm_kernel=flag)).activations for flag in (False, True))
    stream = 8192 * 4096
    # Of two norms the block's own copies (4 + 4 against 2 bytes), and one gradient in flight is narrower.
    assert wide - narrow >= 2 * 6 * stream


def test_a_pipelines_stage_keeps_what_it_hands_on_and_counts_what_arrives_once() -> None:
    plan = compile_text(PIPELINE)
    name = "first block's backward"
    keeps, empties = (
        [parts(plan, name, rank, program=Program(keeps_outputs=flag)).activations for rank in range(plan.mesh.pp)]
        for flag in (True, False)
    )
    more = [a - b for a, b in zip(keeps, empties, strict=True)]
    stream = 8192 * 4096 * 2 / plan.mesh.tp
    assert all(amount >= stream and amount % stream == 0 for amount in more[:-1])
    # The last stage hands nothing on.
    last = {stage.index for stage in plan.pipeline.stages if stage.pp_rank == plan.mesh.pp - 1}
    assert more[-1] == 0 or len(last) > 1


def test_returned_outputs_stay_until_the_step_is_over() -> None:
    plan = compile_text(PIPELINE)
    rank = plan.pipeline.stages[-1].pp_rank
    chunk = 8192 * plan.model.vocab_size * 2 / plan.mesh.tp
    returns = Program(returns_outputs=True)
    more = parts(plan, "loss", rank, program=returns).logits - parts(plan, "loss", rank).logits
    assert more == plan.pipeline.microbatches * chunk
    assert parts(plan, "outputs together", rank, program=returns).logits == 2 * more
    if rank:
        assert parts(plan, "first block's backward", 0, program=returns) == parts(plan, "first block's backward", 0)


def test_deepspeeds_optimizers_hold_further_gradients() -> None:
    plan = megatron_plan(2, 512, 4, 4, 1024, 1024, plans.mesh(dp_shard=2))
    count = num_params(plan.model)
    held = parts(plan, "optimizer", program=DEEPSPEED_ZERO1)
    # fp16 weights and gradients; main weights, two moments and the gradients' copy in float32 over two ranks.
    assert held.parameters + held.gradients + held.optimizer == (2 + 2 + 16 / 2) * count
    block, update, embedding = (
        parts(plan, moment, program=DEEPSPEED_BF16)
        for moment in ("first block's backward", "optimizer", "embedding's backward")
    )
    assert update.parameters + update.gradients + update.optimizer == (2 + 4 + 12 / 2) * count
    assert (block.unsharded, update.unsharded) == (2 * count, 0)
    assert embedding.unsharded == 2 * count + 4 * 1024 * 512


def test_logits_that_a_model_hands_out_in_float32_stay_through_the_step() -> None:
    plan = compile_text(LLAMA)
    early = Program(wide_logits=True)
    for moment in ("loss", "output's backward", "first block's backward", "embedding's backward"):
        more = parts(plan, moment, program=early).logits - parts(plan, moment).logits
        assert more == 4 * 8192 * 128256


def test_what_an_update_holds_decides_whether_a_model_can_fit() -> None:
    plan = compile_text(LLAMA)
    state = 16 * num_params(plan.model) / 8 / 2**30
    gpu = plan.cluster.gpu

    def on(memory_gib: float) -> Plan:
        return replace(plan, cluster=replace(plan.cluster, gpu=replace(gpu, memory_gib=memory_gib)))

    assert feasibility(on(state * 1.01)) is None
    complaint = feasibility(on(state * 0.99))
    # At its fullest moment, the loss, this plan holds no gradients: parameters and moments alone would fit.
    assert complaint is not None and "gradients 3.7 + optimizer 7.5" in complaint.message
    assert parts(plan, "loss").gradients == 0
    assert feasibility(replace(on(1.0), fsdp=replace(plan.fsdp, cpu_offload=True))) is None
