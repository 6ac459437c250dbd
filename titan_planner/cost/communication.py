"""What a stage waits for: the step's collectives, timed, sorted by what may hide them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from titan_planner.cost.collectives import Axis, Collective, collectives
from titan_planner.cost.network import Network, seconds
from titan_planner.cost.program import TITAN, Program
from titan_planner.ir.cluster import Efficiency
from titan_planner.ir.plan import Plan

Part: TypeAlias = Literal["data", "tensor", "context", "expert", "pipeline"]

PART_OF: dict[Axis, Part] = {
    "fsdp": "data",
    "efsdp": "data",
    "dp_replicate": "data",
    "data": "data",
    "tied": "data",
    "tp": "tensor",
    "kv_replica": "tensor",
    "kv_shard": "tensor",
    "cp": "context",
    "ep": "expert",
    "etp": "expert",
    "pp": "pipeline",
}
"""Whose waiting a collective on an axis is."""


@dataclass(slots=True)
class PassCommunication:
    """Seconds of collectives in one pass (forward or backward, recomputation in it) of one microbatch on one stage."""

    waits: dict[Part, float] = field(default_factory=dict)  # nothing may run meanwhile
    matmul: float = 0.0  # tensor parallel, split to run beside its matmuls
    attention: float = 0.0  # context parallel, beside attention on the keys at hand
    hidden: float = 0.0  # data parallel, beside other units' computing
    ends: float = 0.0  # of `hidden`, what has nothing to run beside: the first gather, the last reduction
    once: float = 0.0  # as `hidden`, but once a step: in the first or the last microbatch only
    once_ends: float = 0.0


@dataclass(slots=True)
class StageCommunication:
    """One stage's collectives of one microbatch, and of the step."""

    forward: PassCommunication = field(default_factory=PassCommunication)
    backward: PassCommunication = field(default_factory=PassCommunication)
    transfer: float = 0.0  # one message to the next or the previous stage
    step: dict[Part, float] = field(default_factory=dict)  # once, around the update


def communication(plan: Plan, program: Program = TITAN, imbalance: float = 1.0) -> tuple[StageCommunication, ...]:
    """Every stage's, in order of stages."""
    found = tuple(StageCommunication() for _ in plan.pipeline.stages)
    runs = plan.batch.accumulation_steps * (plan.pipeline.microbatches if plan.mesh.pp > 1 else 1)
    network = network_of(plan.cluster.gpu.efficiency)
    # Stages send the same messages, and to look a group up means to hash the whole cluster.
    known: dict[tuple[object, ...], float] = {}
    for one in collectives(plan, program):
        alike = (one.axis, one.kind, one.ranks, one.nbytes, one.copies)
        took = known.get(alike)
        if took is None:
            took = known[alike] = seconds(plan, one, network)
        sort_into(found[one.stage], one, took, imbalance, runs)
    return found


@functools.lru_cache(maxsize=64)
def network_of(fit: Efficiency) -> Network:
    """What links reach in training: rings as fitted, exchanges in the proportion that they have in isolation."""
    known = Network()
    inside, between = fit.intra_node / known.intra_efficiency, fit.inter_node / known.inter_efficiency
    return Network(
        intra_efficiency=fit.intra_node,
        intra_start=known.intra_start * inside,
        inter_efficiency=fit.inter_node,
        multicast_efficiency=known.multicast_efficiency * inside,
        exchange_intra_efficiency=known.exchange_intra_efficiency * inside,
        exchange_inter_efficiency=known.exchange_inter_efficiency * between,
    )


def sort_into(stage: StageCommunication, one: Collective, took: float, imbalance: float, runs: int) -> None:
    """Add `one`, of which each message takes `took` seconds, to its stage: `runs` microbatches share what happens in a step."""
    part = PART_OF[one.axis]
    if one.phase == "step":
        stage.step[part] = stage.step.get(part, 0.0) + took * one.count
        return
    if one.kind in ("send", "recv"):
        stage.transfer = max(stage.transfer, took)
        return
    if part == "expert":
        took *= imbalance
    side = stage.forward if one.phase == "forward" else stage.backward
    match one.overlaps:
        case None:
            side.waits[part] = side.waits.get(part, 0.0) + took * one.count / runs
        case "matmul":
            side.matmul += took * one.count / runs
        case "attention":
            side.attention += took * one.count / runs
        case "forward" | "backward":
            if one.count <= one.modules and runs > 1:
                side.once += took * one.count
                side.once_ends += took * one.exposed
            else:
                side.hidden += took * one.count / runs
                side.ends += took * one.exposed / runs
