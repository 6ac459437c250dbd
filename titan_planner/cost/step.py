"""The time of one optimizer step, by part: computing, collectives that nothing hides, bubbles, the update.

Every stage's microbatch is priced alone; the schedule's own actions then run in `timeline`, with stages as uneven as they
are. What happens once a step (weights gathered before the first microbatch, gradients reduced after the last, norm, update)
comes before and after.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from titan_planner.cost.communication import Part, PassCommunication, StageCommunication, communication
from titan_planner.cost.compute import ModuleSeconds, Seconds
from titan_planner.cost.local import BYTES
from titan_planner.cost.memory import module_numel, sharded_numel, top_level
from titan_planner.cost.ops import expert_load
from titan_planner.cost.program import TITAN, Program
from titan_planner.cost.roofline import memory_rate
from titan_planner.cost.stage import stage_seconds
from titan_planner.cost.timeline import StageTime, simulate, torch_sends
from titan_planner.ir.inventory import muon_parameters, parameters
from titan_planner.ir.model import Model
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
    talking = communication(plan, program, expert_load(plan)[1])
    slowdown = plan.cluster.gpu.efficiency.overlap_slowdown
    hides = program.tensor_overlap
    forward = [_pass(c.forward, t.forward, slowdown, hides) for c, t in zip(computing, talking, strict=True)]
    backward = [_pass(c.backward, t.backward, slowdown, hides) for c, t in zip(computing, talking, strict=True)]
    runs = plan.pipeline.microbatches if plan.mesh.pp > 1 else 1
    repeats = plan.batch.accumulation_steps
    span = _span(plan, program, computing, talking, forward, backward) * repeats

    updates = _update_seconds(plan, program)
    busiest: tuple[tuple[float, float], StepSeconds] | None = None
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
        update = updates[rank] + sum(step.values())
        total = span + once + update
        result = StepSeconds(total, rank, compute, recompute, waits, span - busy, update)
        # The step ends with its last rank; among equals the busiest explains it.
        key = (total, busy)
        if busiest is None or key > busiest[0]:
            busiest = (key, result)
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
    hidden = hidden_seconds(compute, talk, tensor_overlap)
    begun: dict[Part, float] = {"tensor": talk.matmul, "context": talk.attention, "data": talk.hidden}
    for part, seconds in begun.items():
        waits[part] += seconds - (1 - slowdown) * hidden[part]
    return _Pass(compute.total + sum(waits.values()), waits)


def hidden_seconds(compute: Seconds, talk: PassCommunication, tensor_overlap: float) -> dict[Part, float]:
    """Collectives of one pass that run beside its computing; each second of computing hides one second of one of them."""
    found = _none()
    found["tensor"] = min(talk.matmul * tensor_overlap, compute.matmul)
    found["context"] = min(talk.attention, compute.attention)
    cover = max(0.0, compute.total - found["tensor"] - found["context"])
    found["data"] = min(talk.hidden - talk.ends, cover)
    return found


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
UPDATE_BYTES = {"fused": 28.0, "foreach": 80.0, "for-loop": 80.0}
NORM_AND_CLIP_BYTES = 12.0


OFFLOAD_BYTES_PER_S = 20e9
"""One GPU's share of what host memory and PCIe carry: 25 GB/s of a Gen4 x16 link, of 200 GB/s of memory for eight GPUs
(nominal, not measured)."""


def _update_seconds(plan: Plan, program: Program) -> tuple[float, ...]:
    """Norm, clipping and update of the elements that one rank of each pipeline rank holds, and their way to the host."""
    if program.data_policy in ("plan", "ddp"):
        held: Mapping[str, float] = sharded_numel(plan)
        shards = 1
    else:
        # The optimizer of weights that are whole on every rank is sharded over all ranks that see other data.
        held, shards = module_numel(plan), plan.mesh.dp * plan.mesh.cp
    numel = [0.0] * plan.mesh.pp
    rank_of = [stage.pp_rank for stage in plan.pipeline.stages]
    for layer in plan.layers:
        numel[rank_of[layer.stage]] += held[layer.fqn] / shards
    muon = muon_seconds(plan) if plan.optimizer.name == "Muon" else (0.0,) * plan.mesh.pp
    each = update_seconds_per_element(plan)
    return tuple(each * count + orthogonal for count, orthogonal in zip(numel, muon, strict=True))


def update_seconds_per_element(plan: Plan) -> float:
    """Norm, clipping and update of one element that a rank holds between steps, and its way to the host and back."""
    width = BYTES[plan.dtype] / 4
    each = (UPDATE_BYTES[plan.optimizer.implementation] + NORM_AND_CLIP_BYTES) * width
    if plan.fsdp.cpu_offload:
        return (each + offloaded_bytes(plan)) / OFFLOAD_BYTES_PER_S
    return each / memory_rate(plan.cluster.gpu)


def offloaded_bytes(plan: Plan) -> float:
    """Bytes per element that a step moves over PCIe: weights up for every gather, gradients down for every reduction.

    Taken as waited for. Weights that stay gathered go up once in each run of a schedule.
    """
    runs = plan.batch.accumulation_steps
    gathers = 2 if any(unit.reshard_after_forward for unit in plan.fsdp.units) and plan.mesh.pp == 1 else 1
    reductions = 1 if plan.fsdp.defer_gradient_sync else runs
    return float(BYTES[plan.dtype] * (gathers * runs + reductions))


_NEWTON_SCHULZ_STEPS = 5


@functools.lru_cache(maxsize=64)
def _muon_flops(model: Model) -> Mapping[str, float]:
    """FLOPs of orthogonalising every matrix that Muon takes, by parameter: per step X X^T, its square, and their product
    with X, of n x m with n <= m: 4 n^2 m + 2 n^3 (titan_runtime/update_rules.py; Jordan et al. 2024, Muon)."""
    chosen = muon_parameters(model)
    found = {}
    for parameter in parameters(model):
        if parameter.fqn in chosen:
            *stack, rows, columns = parameter.shape
            n, m = min(rows, columns), max(rows, columns)
            found[parameter.fqn] = math.prod(stack) * _NEWTON_SCHULZ_STEPS * (4.0 * n * n * m + 2.0 * n**3)
    return found


def muon_seconds(plan: Plan) -> tuple[float, ...]:
    """Every rank orthogonalises the whole matrices of its stages, in bf16; experts are shared out over ep."""
    gpu = plan.cluster.gpu
    stage_of = {layer.fqn: layer.stage for layer in plan.layers}
    rank_of = [stage.pp_rank for stage in plan.pipeline.stages]
    flops = _muon_flops(plan.model)
    found = [0.0] * plan.mesh.pp
    for parameter in parameters(plan.model):
        if parameter.fqn in flops:
            share = plan.mesh.ep if parameter.is_expert else 1
            found[rank_of[stage_of[top_level(parameter)]]] += flops[parameter.fqn] / share
    return tuple(count / (gpu.bf16_tflops * 1e12 * gpu.efficiency.matmul) for count in found)


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
