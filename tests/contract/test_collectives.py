"""The collectives that the planner counts are those that the runtime issues: kinds, groups, bytes, dtypes, counts, phases.

Every case trains two steps on gloo ranks under a recorder (tests/recorder.py); all cases of one world size share a launch.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.harness import Rank, run_ranks
from tests.plans import NO_CHECKPOINT, mesh, tiny_model, tiny_moe_model, tiny_plan, units
from tests.recorder import Event, Recorder
from titan_planner.cost.collectives import Collective, axis_stride, collectives
from titan_planner.cost.program import MEGATRON
from titan_planner.ir.execution import ActivationCheckpoint
from titan_planner.ir.inventory import muon_parameters, parameters, top_level_modules
from titan_planner.ir.model import Blocks, Mlp
from titan_planner.ir.parallel import (
    ContextParallel,
    ExpertParallel,
    FsdpUnit,
    Mesh,
    Pipeline,
    TensorParallel,
)
from titan_planner.ir.plan import Layer, Plan
from titan_planner.models.llama3 import FLAVORS
from titan_planner.passes.select_checkpointing import SAVE_OPS
from titan_planner.schedules import default_stages_per_rank, place_stages
from titan_planner.sharding import expert_rows, tensor_parallel_rows
from titan_planner.stages import even_split
from titan_runtime.apply import build_model
from titan_runtime.apply.context import shard_sequences
from titan_runtime.loss import loss_function
from titan_runtime.mesh import build_mesh, data_group
from titan_runtime.optimizer import build_optimizer
from titan_runtime.step import train_step

Key = tuple[str, tuple[int, ...], int, str, bool]


# ------------------------------------------------------------------ plans

FULL = replace(NO_CHECKPOINT, name="full", mode="full")
SELECTIVE = replace(NO_CHECKPOINT, name="selective", mode="selective", save_ops=SAVE_OPS)
# Keeps matmuls only, so that whatever is sent is sent again.
MATMULS = replace(NO_CHECKPOINT, name="selective", mode="selective", save_ops=("aten.mm.default",))


def checkpointed(plan: Plan, policy: Any, early_stop: bool = True) -> Plan:
    """`plan` with `policy` on its blocks."""
    return replace(
        plan,
        activation_checkpoint=ActivationCheckpoint(
            policies=(NO_CHECKPOINT, policy),
            preserve_rng_state=False,
            early_stop=early_stop,
            determinism_check="default",
        ),
        layers=tuple(
            replace(layer, checkpoint=policy.name) if layer.fqn.startswith("layers.") else layer
            for layer in plan.layers
        ),
    )


def tensor(grid: Mesh, *, sequence: bool, loss: bool, kv_replicas: int = 1, model: Any = None, **more: Any) -> Plan:
    """A plan with tensor parallelism as the planner lays it out."""
    model = model or tiny_model()
    return tiny_plan(
        grid,
        model=model,
        total=2 * grid.dp,
        tensor_parallel=TensorParallel(
            sequence_parallel=sequence, loss_parallel=loss, async_tp=False, kv_replicas=kv_replicas
        ),
        sharding=tensor_parallel_rows(model, sequence_parallel=sequence, loss_parallel=loss) + expert_rows(model, grid),
        **more,
    )


def half(plan: Plan, reduce_dtype: Any = "float32") -> Plan:
    """`plan` with weights gathered in bfloat16."""
    return replace(plan, fsdp=replace(plan.fsdp, param_dtype="bfloat16", reduce_dtype=reduce_dtype))


def with_units(plan: Plan, *found: FsdpUnit, **more: Any) -> Plan:
    return replace(plan, fsdp=replace(plan.fsdp, units=found, **more))


def replicated(plan: Plan, **more: Any) -> Plan:
    return replace(plan, fsdp=replace(plan.fsdp, strategy="ddp", units=(), **more))


def in_float8(plan: Plan, precomputed: bool) -> Plan:
    """`plan` with blocks' linears in emulated Float8, gathered in it."""
    return replace(
        plan,
        float8=replace(
            plan.float8,
            recipe="tensorwise",
            converted=("layers.*.attention.*", "layers.*.feed_forward.*"),
            emulate=True,
            enable_fsdp_float8_all_gather=True,
            precompute_float8_dynamic_scale_for_fsdp=precomputed,
        ),
    )


def pipelined(schedule: Any, grid: Mesh, *, reshard: bool = False, model: Any = None, accumulation: int = 1) -> Plan:
    """Four layers over `grid.pp` ranks, four microbatches of one sequence."""
    model = model or tiny_model(blocks=(replace(tiny_model().blocks[0], repeat=4),))
    count = grid.pp * default_stages_per_rank(schedule)
    plan = tiny_plan(grid, model=model, local=4, total=4 * grid.dp * accumulation)
    stages = even_split(model, count, 1, 1)
    return replace(
        plan,
        batch=replace(plan.batch, microbatch_size=1),
        pipeline=Pipeline(
            schedule=schedule, stages=place_stages(schedule, grid.pp, count), microbatches=4, actions=None
        ),
        layers=tuple(
            Layer(fqn=fqn, stage=stage, checkpoint="none")
            for fqn, stage in zip(top_level_modules(model), stages, strict=True)
        ),
        fsdp=replace(plan.fsdp, units=tuple(replace(u, reshard_after_forward=reshard) for u in units(model, reshard))),
    )


def routed(grid: Mesh, **more: Any) -> Plan:
    """Experts, every one with equally many tokens."""
    model = tiny_moe_model()
    balanced = ExpertParallel(comm_backend="standard", capacity_factor=None, force_load_balance=True)
    if grid.tp > 1:
        return tensor(grid, sequence=True, loss=True, model=model, expert_parallel=balanced, **more)
    return tiny_plan(grid, model=model, total=2 * grid.dp, expert_parallel=balanced, **more)


def context(method: Any, grid: Mesh, **more: Any) -> Plan:
    return tiny_plan(
        grid,
        total=2 * grid.dp,
        context_parallel=ContextParallel(method=method, load_balance="headtail"),
        **more,
    )


def odd_model() -> Any:
    """Dims that two and four ranks divide only with padding."""
    block = tiny_model().blocks[0].block
    return tiny_model(
        vocab_size=2047,
        blocks=(Blocks(repeat=2, block=replace(block, feed_forward=replace(block.feed_forward, hidden_dim=49))),),
    )


def ungated_model() -> Any:
    block = tiny_model().blocks[0].block
    return tiny_model(
        blocks=(Blocks(repeat=2, block=replace(block, feed_forward=Mlp(hidden_dim=48, activation="relu2"))),)
    )


MUON = replace(tiny_plan().optimizer, name="Muon")


def beside_tensor(plan: Plan) -> Plan:
    """`plan` with the rows of tensor parallelism, with sequence and loss parallel."""
    options = TensorParallel(sequence_parallel=True, loss_parallel=True, async_tp=False, kv_replicas=1)
    rows = tensor_parallel_rows(plan.model, sequence_parallel=True, loss_parallel=True)
    return replace(plan, tensor_parallel=options, sharding=rows)


def everywhere(plan: Plan) -> Plan:
    """`plan` with the policy of its blocks on all modules."""
    return replace(plan, layers=tuple(replace(layer, checkpoint=plan.layers[1].checkpoint) for layer in plan.layers))


def in_pipeline(plan: Plan) -> Plan:
    """`plan` as a 1F1B pipeline of microbatches of one sequence, its layers spread evenly."""
    pp, layers = plan.mesh.pp, plan.layers
    local = plan.batch.global_batch_size // plan.mesh.dp
    stages = even_split(plan.model, pp, 1, 1)
    return replace(
        plan,
        batch=replace(plan.batch, local_batch_size=local, microbatch_size=1, accumulation_steps=1),
        pipeline=Pipeline(schedule="1F1B", stages=place_stages("1F1B", pp, pp), microbatches=local, actions=None),
        layers=tuple(replace(layer, stage=stage) for layer, stage in zip(layers, stages, strict=True)),
    )


DEEP_TIED = tiny_model(tied=True, blocks=(replace(tiny_model().blocks[0], repeat=4),))
TIED = tiny_model(tied=True)
SEPARATE = (
    FsdpUnit(modules=("layers.*.attention",), reshard_after_forward=True),
    FsdpUnit(modules=("layers.0",), reshard_after_forward=False),
    FsdpUnit(modules=("tok_embeddings", "output"), reshard_after_forward=True),
)

CASES: dict[str, Plan] = {
    # FSDP2
    "fsdp 2": tiny_plan(mesh(2), total=2),
    "fsdp 2, accumulation 3": tiny_plan(mesh(2), total=6),
    "fsdp 2, accumulation 3, reduced once": with_units(
        tiny_plan(mesh(2), total=6), *units(tiny_model()), defer_gradient_sync=True
    ),
    "fsdp 2, kept": with_units(tiny_plan(mesh(2), total=4), *units(tiny_model(), False)),
    "fsdp 2, units in units, rest in the root": with_units(tiny_plan(mesh(2), total=4), *SEPARATE),
    "fsdp 2, units in checkpointed units": checkpointed(with_units(tiny_plan(mesh(2), total=4), *SEPARATE), FULL),
    "fsdp 2, no units": with_units(tiny_plan(mesh(2), total=4)),
    "fsdp 2, prefetched": with_units(
        tiny_plan(mesh(2), total=4), *units(tiny_model()), prefetch_forward=2, prefetch_backward=2
    ),
    "fsdp 2, bfloat16": half(tiny_plan(mesh(2), total=2)),
    "fsdp 2, bfloat16 reduced too": half(tiny_plan(mesh(2), total=2), "bfloat16"),
    "fsdp 2, padded": half(tiny_plan(mesh(2), total=2, model=odd_model())),
    "fsdp 2, tied": tiny_plan(mesh(2), total=2, model=TIED),
    "fsdp 2, full checkpointing": checkpointed(tiny_plan(mesh(2), total=4), FULL),
    "fsdp 2, loss in chunks": replace(
        tiny_plan(mesh(2), total=2), loss=replace(tiny_plan().loss, chunks=4)
    ),
    "fsdp 2, Muon": tiny_plan(mesh(2), total=2, optimizer=MUON),
    "fsdp 2, gathered in Float8": half(in_float8(tiny_plan(mesh(2), total=4), False)),
    "fsdp 2, gathered in Float8, scales at once": half(in_float8(tiny_plan(mesh(2), total=4), True)),
    "fsdp 2, without a gate": tiny_plan(mesh(2), total=2, model=ungated_model()),
    "hsdp 2 x 2, Muon": tiny_plan(mesh(2, 2), total=4, optimizer=MUON),
    "fsdp 4, resharded to 2": with_units(tiny_plan(mesh(4), total=8), *units(tiny_model(), 2)),
    "fsdp 4, padded": tiny_plan(mesh(4), total=4, model=odd_model()),
    # HSDP, DDP
    "hsdp 1 x 2": tiny_plan(mesh(1, 2), total=4),
    "hsdp 2 x 2": half(tiny_plan(mesh(2, 2), total=8)),
    "hsdp 2 x 2, reduced once, padded": with_units(
        tiny_plan(mesh(2, 2), total=8, model=odd_model()), *units(tiny_model()), defer_gradient_sync=True
    ),
    "hsdp 2 x 2, resharded to 2": with_units(tiny_plan(mesh(2, 2), total=4), *units(tiny_model(), 2)),
    "ddp 2": replicated(tiny_plan(mesh(1, 2), total=4)),
    "ddp 2, bfloat16, reduced once": half(replicated(tiny_plan(mesh(1, 2), total=4), defer_gradient_sync=True)),
    "ddp 2 x tp 2": replicated(tensor(mesh(1, 2, tp=2), sequence=True, loss=True)),
    # tensor parallelism
    "tp 2": tensor(mesh(tp=2), sequence=True, loss=True),
    "tp 2, bfloat16": half(tensor(mesh(tp=2), sequence=True, loss=True)),
    "tp 2, no sequence parallel": tensor(mesh(tp=2), sequence=False, loss=True),
    "tp 2, no loss parallel": tensor(mesh(tp=2), sequence=True, loss=False),
    "tp 2, neither": tensor(mesh(tp=2), sequence=False, loss=False),
    "tp 2, full": checkpointed(tensor(mesh(tp=2), sequence=True, loss=True), FULL),
    "tp 2, full to the end": checkpointed(tensor(mesh(tp=2), sequence=True, loss=True), FULL, early_stop=False),
    "tp 2, full, no sequence parallel": checkpointed(tensor(mesh(tp=2), sequence=False, loss=True), FULL),
    "tp 2, selective": checkpointed(tensor(mesh(tp=2), sequence=True, loss=True), SELECTIVE),
    "tp 2, selective, no sequence parallel": checkpointed(tensor(mesh(tp=2), sequence=False, loss=True), SELECTIVE),
    "tp 2, only matmuls kept": checkpointed(tensor(mesh(tp=2), sequence=True, loss=True), MATMULS),
    "tp 2, loss in chunks": replace(
        tensor(mesh(tp=2), sequence=True, loss=True), loss=replace(tiny_plan().loss, chunks=4)
    ),
    "tp 2, gathered logits in chunks": replace(
        tensor(mesh(tp=2), sequence=True, loss=False), loss=replace(tiny_plan().loss, chunks=4)
    ),
    "tp 2, tied": tensor(mesh(tp=2), sequence=True, loss=True, model=TIED),
    "tp 2, without a gate": tensor(mesh(tp=2), sequence=True, loss=True, model=ungated_model()),
    "tp 2, chunks of unequal length": replace(
        tensor(mesh(tp=2), sequence=True, loss=True), loss=replace(tiny_plan().loss, chunks=3)
    ),
    "tp 2, Muon": tensor(mesh(tp=2), sequence=True, loss=True, optimizer=MUON),
    "fsdp 2 x tp 2, Muon": tensor(
        mesh(2, tp=2), sequence=True, loss=True, optimizer=MUON
    ),
    "tp 2, everything checkpointed": everywhere(checkpointed(tensor(mesh(tp=2), sequence=True, loss=False), FULL)),
    "tp 4, two KV heads": tensor(mesh(tp=4), sequence=True, loss=True, kv_replicas=2),
    "fsdp 2 x tp 2": checkpointed(half(tensor(mesh(2, tp=2), sequence=True, loss=True)), FULL),
    "hsdp 1 x 2, tp 2": tensor(mesh(1, 2, tp=2), sequence=True, loss=True),
    # context parallelism
    "cp 2 allgather": context("allgather", mesh(cp=2)),
    "cp 2 ring": half(context("ring", mesh(cp=2))),
    "cp 2 alltoall": context("alltoall", mesh(cp=2)),
    "cp 2 allgather, full": checkpointed(context("allgather", mesh(cp=2)), FULL),
    "cp 2 ring, full": checkpointed(context("ring", mesh(cp=2)), FULL),
    "cp 2 alltoall, selective": checkpointed(context("alltoall", mesh(cp=2)), SELECTIVE),
    "cp 2 allgather, selective": checkpointed(context("allgather", mesh(cp=2)), SELECTIVE),
    "cp 4 ring": context("ring", mesh(cp=4)),
    "cp 2 x tp 2 ring": tensor(
        mesh(cp=2, tp=2), sequence=True, loss=True,
        context_parallel=ContextParallel(method="ring", load_balance="headtail"),
    ),
    "cp 2 x tp 2 allgather, full": checkpointed(tensor(mesh(cp=2, tp=2), sequence=True, loss=True), FULL),
    "cp 2 x fsdp 2 allgather": half(context("allgather", mesh(2, cp=2))),
    # experts
    "experts, fsdp 2": routed(mesh(2)),
    "ep 2": routed(mesh(2, ep=2)),
    "ep 2, full": checkpointed(half(routed(mesh(2, ep=2))), FULL),
    "ep 2, selective": checkpointed(routed(mesh(2, ep=2)), SELECTIVE),
    "ep 2, a capacity": replace(
        routed(mesh(2, ep=2)),
        expert_parallel=ExpertParallel(comm_backend="standard", capacity_factor=0.5, force_load_balance=True),
    ),
    "tp 2, experts whole": routed(mesh(tp=2)),
    "tp 2, ep 2": routed(mesh(tp=2, ep=2)),
    "experts, fsdp 2, Muon": routed(mesh(2), optimizer=MUON),
    "ep 2, Muon": routed(mesh(2, ep=2), optimizer=MUON),
    "tp 2, etp 2, Muon": routed(mesh(tp=2, etp=2), optimizer=MUON),
    "fsdp 4, ep 2, Muon": routed(mesh(4, ep=2), optimizer=MUON),
    "fsdp 2 x tp 2, ep 2, etp 2, Muon": routed(mesh(2, tp=2, ep=2, etp=2), optimizer=MUON),
    "fsdp 2 x tp 2, etp 2, Muon": routed(mesh(2, tp=2, etp=2), optimizer=MUON),
    "ddp 2 x tp 2, experts whole": replicated(routed(mesh(1, 2, tp=2))),
    "ddp 2 x tp 2, ep 2": replicated(routed(mesh(1, 2, tp=2, ep=2))),
    "tp 2, etp 2": routed(mesh(tp=2, etp=2)),
    "hsdp 2 x 2, ep 2": routed(mesh(2, 2, ep=2)),
    "fsdp 2 x tp 2, experts whole": routed(mesh(2, tp=2)),
    "fsdp 4, ep 2": half(routed(mesh(4, ep=2))),
    "fsdp 2 x tp 2, ep 2, etp 2": checkpointed(routed(mesh(2, tp=2, ep=2, etp=2)), FULL),
    "fsdp 2 x tp 2, ep 4": routed(mesh(2, tp=2, ep=4)),
    # pipelines
    "pp 2 GPipe": pipelined("GPipe", mesh(pp=2)),
    "pp 2 1F1B": half(pipelined("1F1B", mesh(pp=2))),
    "pp 2 1F1B, accumulation 2, tied": pipelined(
        "1F1B", mesh(pp=2), accumulation=2,
        model=DEEP_TIED,
    ),
    "pp 2 x tp 2 1F1B, full": checkpointed(in_pipeline(tensor(mesh(pp=2, tp=2), sequence=True, loss=True)), FULL),
    "pp 2 x tp 2 1F1B, neither": in_pipeline(tensor(mesh(pp=2, tp=2), sequence=False, loss=False)),
    "pp 2 x tp 2 1F1B, loss in chunks": replace(
        in_pipeline(tensor(mesh(pp=2, tp=2), sequence=True, loss=True)), loss=replace(tiny_plan().loss, chunks=4)
    ),
    "pp 2 x tp 2 ZBVZeroBubble": beside_tensor(pipelined("ZBVZeroBubble", mesh(pp=2, tp=2))),
    "pp 2 x tp 2 ZBVZeroBubble, loss in chunks": replace(
        beside_tensor(pipelined("ZBVZeroBubble", mesh(pp=2, tp=2))), loss=replace(tiny_plan().loss, chunks=4)
    ),
    "pp 2 x tp 2 ZBVZeroBubble, full": checkpointed(
        beside_tensor(pipelined("ZBVZeroBubble", mesh(pp=2, tp=2))), FULL
    ),
    "pp 2 x tp 2 DualPipeV, full": checkpointed(beside_tensor(pipelined("DualPipeV", mesh(pp=2, tp=2))), FULL),
    "pp 2 x fsdp 2, ep 2": in_pipeline(routed(mesh(2, pp=2, ep=2))),
    "pp 2 x fsdp 2 1F1B, tied": pipelined("1F1B", mesh(2, pp=2), model=DEEP_TIED),
    "pp 2 x ddp 2": replicated(pipelined("1F1B", mesh(1, 2, pp=2))),
    "pp 2 x hsdp 1 x 2": pipelined("1F1B", mesh(1, 2, pp=2)),
    "pp 2 by hand": replace(
        pipelined("1F1B", mesh(pp=2)),
        pipeline=replace(
            pipelined("1F1B", mesh(pp=2)).pipeline,
            actions=("0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3", "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"),
        ),
    ),
    "pp 2 x fsdp 2 GPipe, freed": pipelined("GPipe", mesh(2, pp=2), reshard=True),
    "pp 2 x fsdp 2 1F1B": pipelined("1F1B", mesh(2, pp=2), accumulation=2),
    "pp 2 x fsdp 2 1F1B, freed": pipelined("1F1B", mesh(2, pp=2), reshard=True, accumulation=2),
    "pp 2 x fsdp 2 Interleaved1F1B": pipelined("Interleaved1F1B", mesh(2, pp=2)),
    "pp 2 x fsdp 2 ZBVZeroBubble": pipelined("ZBVZeroBubble", mesh(2, pp=2)),
    "pp 2 x fsdp 2 LoopedBFS, freed": pipelined("LoopedBFS", mesh(2, pp=2), reshard=True),
    "pp 2 x fsdp 2 Interleaved1F1B, freed": pipelined("Interleaved1F1B", mesh(2, pp=2), reshard=True),
    "pp 2 x fsdp 2 InterleavedZeroBubble": pipelined("InterleavedZeroBubble", mesh(2, pp=2)),
    "pp 2 x fsdp 2 DualPipeV": pipelined("DualPipeV", mesh(2, pp=2)),
}  # fmt: skip


# Routed as a fresh router does: what a rank sends depends on its tokens.
UNEVEN: dict[str, Plan] = {
    "ep 2, as routed": replace(
        routed(mesh(2, ep=2)),
        expert_parallel=ExpertParallel(comm_backend="standard", capacity_factor=None, force_load_balance=False),
    )
}


# ------------------------------------------------------------------ what was counted


def expected(plan: Plan, rank: int) -> Counter[Key]:
    """What `collectives` says that `rank` issues in one step."""
    found: Counter[Key] = Counter()
    pp_rank = plan.mesh.coordinates(rank)["pp"]
    for one in collectives(plan):
        if one.pp_rank == pp_rank:
            found[(one.kind, _ranks(plan, one, rank), one.nbytes, one.dtype, _in_backward(plan, one))] += one.count
    return found


def _ranks(plan: Plan, one: Collective, rank: int) -> tuple[int, ...]:
    stride = axis_stride(plan, one.axis)
    if one.kind in ("send", "recv"):
        forward = (one.kind == "send") == (one.phase == "forward")
        other = one.stage + (1 if forward else -1)
        rank_of = {stage.index: stage.pp_rank for stage in plan.pipeline.stages}
        return tuple(sorted((rank, rank + (rank_of[other] - rank_of[one.stage]) * stride)))
    if one.axis == "tied":
        first = rank % (axis_stride(plan, "pp"))
        return (first, first + stride)
    start = rank - rank // stride % one.ranks * stride
    return tuple(range(start, start + one.ranks * stride, stride))


def _in_backward(plan: Plan, one: Collective) -> bool:
    """Whether autograd is running when it starts. A pipeline exchanges and reduces between the runs of autograd."""
    if one.phase not in ("recompute", "backward") or one.kind in ("send", "recv"):
        return False
    reduces = one.kind in ("reduce_scatter", "all_reduce") and one.axis in ("fsdp", "efsdp", "dp_replicate")
    return not (reduces and plan.mesh.pp > 1)


# ------------------------------------------------------------------ what was issued


def recorded(rank: Rank, plans: dict[str, Plan]) -> dict[str, tuple[list[Event], dict[str, tuple[int, int]]]]:
    """The events of every plan's second step on this rank, and what the recorder did not see."""
    return {name: _record(rank, plan) for name, plan in plans.items()}


def _record(rank: Rank, plan: Plan) -> tuple[list[Event], dict[str, tuple[int, int]]]:
    device = torch.device("cpu")
    # DTensor's caches take equal meshes for one, and would hand out the one before's, with process groups of its own.
    _clear_sharding_prop_cache()
    world = build_mesh(plan.mesh, "cpu")
    module = build_model(plan, world, device)
    names = [parameter.fqn for parameter in parameters(plan.model)]
    optimizer = build_optimizer(module, plan.optimizer, muon_parameters(plan.model), names)
    loss, group = loss_function(plan, world), data_group(world)
    random = torch.Generator().manual_seed(rank.index)
    recorder = Recorder()
    for step in (1, 2):
        samples = [
            torch.randint(
                0, plan.model.vocab_size, (plan.batch.local_batch_size, plan.batch.seq_len + 1), generator=random
            )
            for _ in range(plan.batch.accumulation_steps)
        ]
        batches = shard_sequences([(s[:, :-1], s[:, 1:]) for s in samples], plan, rank.index)
        recorder = Recorder()
        with recorder:
            train_step(plan, module, optimizer, loss, batches, step, step - 1, device, group)
    return recorder.events, recorder.unseen()


@functools.cache
def launch(world_size: int) -> list[dict[str, tuple[list[Event], dict[str, tuple[int, int]]]]]:
    """All cases of `world_size` ranks in one launch; rank -> case -> what was recorded."""
    plans = {name: plan for name, plan in {**CASES, **UNEVEN}.items() if plan.mesh.world_size == world_size}
    return run_ranks(recorded, world_size, plans, timeout=600.0)


@pytest.mark.parametrize("name", CASES)
def test_the_counted_collectives_are_those_issued(name: str) -> None:
    plan = CASES[name]
    for rank, results in enumerate(launch(plan.mesh.world_size)):
        events, unseen = results[name]
        assert not unseen, f"rank {rank}: the recorder missed operations"
        issued: Counter[Key] = Counter(
            (event.kind, event.ranks, event.nbytes, event.dtype, event.backward) for event in events
        )
        counted = expected(plan, rank)
        assert issued == counted, (
            f"rank {rank}:\nissued, not counted: {dict(issued - counted)}\ncounted, not issued: {dict(counted - issued)}"
        )


def test_uneven_experts_send_as_many_bytes_in_all() -> None:
    """Every choice of a token travels once there and once back, whoever has it: only the share of each rank differs."""
    name, plan = next(iter(UNEVEN.items()))
    issued: Counter[tuple[str, bool]] = Counter()
    counted: Counter[tuple[str, bool]] = Counter()
    shares: set[int] = set()
    for rank, results in enumerate(launch(plan.mesh.world_size)):
        events, unseen = results[name]
        assert not unseen
        shares |= {event.nbytes for event in events if event.kind == "all_to_all" and event.dtype == "float32"}
        for event in events:
            issued[(event.kind, event.backward)] += event.nbytes
        for (kind, _, nbytes, _, backward), count in expected(plan, rank).items():
            counted[(kind, backward)] += count * nbytes
    assert issued == counted
    assert len(shares) > 1, "the loads are even, so this says nothing"


# ------------------------------------------------------------------ other programs, and what the numbers mean


def totals(found: tuple[Collective, ...]) -> Counter[tuple[str, str, str]]:
    """Bytes by kind, axis and phase."""
    total: Counter[tuple[str, str, str]] = Counter()
    for one in found:
        total[(one.kind, one.axis, one.phase)] += one.count * one.nbytes
    return total


def billions(accumulation: int = 4) -> Plan:
    """Llama 3 8B on eight ranks of FSDP2, weights gathered in bfloat16, gradients reduced in float32."""
    return half(tiny_plan(mesh(8), model=FLAVORS["8B"], total=8 * accumulation))


NUM_8B = 8_030_261_248


def test_fsdp_gathers_twice_and_reduces_once_a_microbatch() -> None:
    found = totals(collectives(billions()))
    head = 128_256 * 4096 + 4096  # kept from forward to backward
    assert found["all_gather", "fsdp", "forward"] == 4 * 2 * NUM_8B
    assert found["all_gather", "fsdp", "backward"] == 4 * 2 * (NUM_8B - head)
    assert found["reduce_scatter", "fsdp", "backward"] == 4 * 4 * NUM_8B


def test_a_sharded_optimizer_reduces_and_gathers_once_a_step() -> None:
    """Megatron-LM's distributed optimizer: gradients in float32 and weights in bfloat16, whatever the accumulation."""
    for accumulation in (1, 4):
        found = totals(collectives(billions(accumulation), MEGATRON))
        assert found["reduce_scatter", "fsdp", "backward"] == 4 * NUM_8B
        assert found["all_gather", "fsdp", "forward"] == 2 * NUM_8B
        assert found["all_gather", "fsdp", "backward"] == 0


def test_sharded_gradients_are_reduced_with_every_microbatch() -> None:
    found = totals(collectives(billions(), replace(MEGATRON, data_policy="zero2")))
    assert found["reduce_scatter", "fsdp", "backward"] == 4 * 4 * NUM_8B
    assert found["all_gather", "fsdp", "forward"] == 2 * NUM_8B


def test_replicas_reduce_over_all_data_ranks() -> None:
    plan = replace(billions(), mesh=mesh(4, 2))
    found = collectives(plan, replace(MEGATRON, data_policy="ddp"))
    assert totals(found)["all_reduce", "data", "backward"] == 4 * NUM_8B
    assert {one.ranks for one in found if one.phase == "backward"} == {8}
    assert not any(one.kind in ("all_gather", "reduce_scatter") for one in found)


def test_the_first_gather_and_the_last_reduction_have_nothing_to_hide_behind() -> None:
    found = [one for one in collectives(billions()) if one.axis == "fsdp" and one.kind != "all_reduce"]
    exposed = {(one.kind, one.phase, one.module): one.exposed for one in found if one.exposed}
    assert exposed == {
        ("all_gather", "forward", "tok_embeddings"): 4,
        ("reduce_scatter", "backward", "tok_embeddings"): 4,
    }
    exposed_without = {one.exposed for one in collectives(billions(), replace(MEGATRON, overlap_gradients=False))
                       if one.kind == "reduce_scatter" and one.modules == 32}  # fmt: skip
    assert exposed_without == {32}


def test_what_a_rank_sends_is_the_rings_share() -> None:
    one = next(one for one in collectives(billions()) if one.kind == "all_gather")
    assert one.sent_bytes == one.nbytes * 7 / 8
    assert replace(one, kind="all_reduce").sent_bytes == one.nbytes * 14 / 8
    assert replace(one, kind="send").sent_bytes == one.nbytes
