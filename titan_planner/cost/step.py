"""The time of one optimizer step, by part: computing, collectives that nothing hides, bubbles, the update.

Every stage's microbatch is priced alone; the schedule's own actions then run in `timeline`, with stages as uneven as they
are. What happens once a step (weights gathered before the first microbatch, gradients reduced after the last, norm, update)
comes before and after.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from titan_planner.cost.communication import Part, PassCommunication, StageCommunication, communication
from titan_planner.cost.compute import ModuleSeconds, Seconds
from titan_planner.cost.memory import module_numel, sharded_numel
from titan_planner.cost.program import TITAN, Program
from titan_planner.cost.roofline import memory_rate
from titan_planner.cost.stage import BYTES, imbalance_of, stage_seconds
from titan_planner.cost.timeline import StageTime, simulate, torch_sends
from titan_planner.ir.plan import Plan, StepTime
from titan_planner.schedules import work_of


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """One step of one rank, in seconds; the parts of the pipeline rank that is busy longest add up to `total`."""

    total: float
    rank: int
    compute: Seconds  # forward and backward, all microbatches
    recompute: float
    waits: dict[Part, float]
    bubble: float
    optimizer: float


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass of one microbatch on one stage: how long it takes, and what of that is waiting."""

    seconds: float
    waits: dict[Part, float]


def step_seconds(plan: Plan, program: Program = TITAN) -> StepSeconds:
    """Time of one optimizer step of `plan` run by `program`."""
    computing = stage_seconds(plan, program)
    talking = communication(plan, program, imbalance_of(plan))
    slowdown = plan.cluster.gpu.efficiency.overlap_slowdown
    hides = program.tensor_overlap
    forward = [_pass(c.forward, t.forward, slowdown, hides) for c, t in zip(computing, talking, strict=True)]
    backward = [_pass(c.backward, t.backward, slowdown, hides) for c, t in zip(computing, talking, strict=True)]
    runs = plan.pipeline.microbatches if plan.mesh.pp > 1 else 1
    repeats = plan.batch.accumulation_steps
    span = _span(plan, program, computing, talking, forward, backward) * repeats

    busiest: tuple[float, StepSeconds] | None = None
    for rank in range(plan.mesh.pp):
        stages = [stage.index for stage in plan.pipeline.stages if stage.pp_rank == rank]
        compute, recompute, waits = Seconds(), 0.0, _none()
        busy = 0.0
        for stage in stages:
            done = computing[stage]
            compute += (done.forward + done.to_input + done.to_weight) * (runs * repeats)
            recompute += done.recompute.total * runs * repeats
            busy += (forward[stage].seconds + backward[stage].seconds) * runs * repeats
            for one in (forward[stage], backward[stage]):
                for part, seconds in one.waits.items():
                    waits[part] += seconds * runs * repeats
        once = _once(computing, talking, stages, slowdown)
        waits["data"] += once
        step = _step_collectives(talking, stages)
        update = optimizer_seconds(plan, program, rank) + sum(step.values())
        total = span + once + update
        result = StepSeconds(total, rank, compute, recompute, waits, span - busy, update)
        if busiest is None or busy + once + update > busiest[0]:
            busiest = (busy + once + update, result)
    assert busiest is not None
    return busiest[1]


def _none() -> dict[Part, float]:
    return {"data": 0.0, "tensor": 0.0, "context": 0.0, "expert": 0.0, "pipeline": 0.0}


def _pass(compute: Seconds, talk: PassCommunication, slowdown: float, tensor_overlap: float) -> _Pass:
    """Computing and collectives of one pass together.

    What may hide is waited for as far as it takes longer than what it hides behind; what does hide slows computing down, as
    both share the memory and the multiprocessors.
    """
    waits = _none()
    for part, seconds in talk.waits.items():
        waits[part] += seconds
    if talk.matmul:
        hides = min(talk.matmul * tensor_overlap, compute.matmul)
        waits["tensor"] += talk.matmul - hides + slowdown * hides
    if talk.attention:
        hides = min(talk.attention, compute.attention)
        waits["context"] += talk.attention - hides + slowdown * hides
    if talk.hidden:
        hides = min(talk.hidden - talk.ends, compute.total)
        waits["data"] += talk.hidden - hides + slowdown * hides
    return _Pass(compute.total + sum(waits.values()), waits)


def _once(
    computing: tuple[ModuleSeconds, ...], talking: tuple[StageCommunication, ...], stages: list[int], slowdown: float
) -> float:
    """Waiting, of one rank, for the weights before its first microbatch and for the gradients after its last."""
    waited = 0.0
    for stage in stages:
        for compute, talk in (
            (computing[stage].forward, talking[stage].forward),
            (computing[stage].backward, talking[stage].backward),
        ):
            hides = min(talk.once - talk.once_ends, compute.total)
            waited += talk.once - hides + slowdown * hides
    return waited


def _step_collectives(talking: tuple[StageCommunication, ...], stages: list[int]) -> dict[Part, float]:
    found = _none()
    for stage in stages:
        for part, seconds in talking[stage].step.items():
            found[part] += seconds
    return found


def _span(
    plan: Plan,
    program: Program,
    computing: tuple[ModuleSeconds, ...],
    talking: tuple[StageCommunication, ...],
    forward: list[_Pass],
    backward: list[_Pass],
) -> float:
    """From the first forward to the end of the last backward of one run of the schedule."""
    if plan.mesh.pp == 1:
        return forward[0].seconds + backward[0].seconds
    times = []
    for stage, (compute, f, b) in enumerate(zip(computing, forward, backward, strict=True)):
        # Waiting of backward is for the gradient that goes on, so it belongs to the half that hands it on. torch does all
        # of the first stage's backward in that half: it has no gradient to hand on (see `StageTime`).
        weight = b.seconds if stage == 0 else compute.to_weight.total
        times.append(StageTime(f.seconds, b.seconds, b.seconds - weight, weight))
    work = work_of(plan.pipeline)
    transfers = [t.transfer for t in talking[:-1]]
    sends = torch_sends(work) if program.data_policy == "plan" else "overlap"
    return simulate(work, times, transfers, sends=sends).makespan_s


# Bytes per element of the update. Norm: gradient read (4); clipping: read, write (8); AdamW: weight, gradient and two moments
# read, weight and two moments written (28, fused). Unfused updates move each operand once per operation.
_UPDATE_BYTES = {"fused": 28.0, "foreach": 80.0, "for-loop": 80.0}
_NORM_AND_CLIP_BYTES = 12.0


def optimizer_seconds(plan: Plan, program: Program, rank: int) -> float:
    """Norm, clipping and update of the elements that one rank of pipeline rank `rank` holds."""
    numel = _updated_numel(plan, program, rank)
    width = BYTES[plan.dtype] / 4
    moved = (_UPDATE_BYTES[plan.optimizer.implementation] + _NORM_AND_CLIP_BYTES) * width * numel
    return moved / memory_rate(plan.cluster.gpu)


def _updated_numel(plan: Plan, program: Program, rank: int) -> float:
    """Elements that one rank of pipeline rank `rank` updates."""
    stages = {stage.index for stage in plan.pipeline.stages if stage.pp_rank == rank}
    here = [layer.fqn for layer in plan.layers if layer.stage in stages]
    if program.data_policy in ("plan", "ddp"):
        held = sharded_numel(plan)
        return sum(held[fqn] for fqn in here)
    # The optimizer of weights that are whole on every rank is sharded over all ranks that see other data.
    whole = module_numel(plan)
    return sum(whole[fqn] for fqn in here) / (plan.mesh.dp * plan.mesh.cp)


def step_time(found: StepSeconds) -> StepTime:
    """The parts in ms, rounded to what is believed."""
    ms = {
        "matmul_ms": found.compute.matmul,
        "attention_ms": found.compute.attention,
        "memory_bound_ms": found.compute.memory_bound,
        "float8_casts_ms": found.compute.casts,
        "recompute_ms": found.recompute,
        "launch_ms": found.compute.launch,
        "data_parallel_ms": found.waits["data"],
        "tensor_parallel_ms": found.waits["tensor"],
        "context_parallel_ms": found.waits["context"],
        "expert_parallel_ms": found.waits["expert"],
        "bubble_ms": found.bubble,
        "optimizer_ms": found.optimizer,
    }
    return StepTime(**{name: believed(1e3 * max(0.0, seconds)) for name, seconds in ms.items()})


def believed(value: float, digits: int = 4) -> float:
    """`value` to `digits` significant digits: more are noise, and would make plans differ between machines."""
    if value == 0:
        return 0.0
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))
