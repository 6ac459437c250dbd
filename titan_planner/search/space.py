"""The modelled space: every mesh, batch, schedule and sharding option that the search may choose, as values, and the plan of each.

A choice has two halves. What one rank computes and says within a layer (`Inner`) is shared by many meshes; how layers and data
are spread over the rest of the ranks is the other half. Pins of the request leave one value where there would be several.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from titan_planner.ir.capabilities import kv_replicas
from titan_planner.ir.job import Batch
from titan_planner.ir.model import Model
from titan_planner.ir.parallel import Mesh, ModuleSharding, Pipeline, Schedule
from titan_planner.ir.plan import Plan
from titan_planner.ir.request import DEGREE_FIELDS
from titan_planner.ir.rules import divisors, mixtures
from titan_planner.layout import comm_backend, fsdp_units, tp_allowed
from titan_planner.schedules import place_stages
from titan_planner.sharding import expert_rows, tensor_parallel_rows

Method: TypeAlias = Literal["allgather", "ring", "alltoall"]

STAGES_PER_RANK = (1, 2, 3, 4, 6, 8)
"""Virtual stages a rank that are tried where the schedule leaves a choice."""

CHUNKS = (1, 8)
"""Chunks of the loss that are tried: more than one all take the same time (head and loss once more), and 8 leave little to save."""

SCHEDULES: tuple[Schedule, ...] = (
    "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV", "GPipe", "LoopedBFS",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inner:
    """What one rank has of every layer, and of how many sequences at once."""

    tp: int
    cp: int
    ep: int
    etp: int
    sequences: int  # of one forward: a microbatch of a pipeline, else a rank's local batch
    method: Method
    sequence_parallel: bool
    chunks: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One point of the space."""

    inner: Inner
    pp: int
    dp_replicate: int
    dp_shard: int
    microbatches: int
    accumulation: int
    schedule: Schedule | None
    per_rank: int
    reshard: bool | int  # of blocks after forward
    last_reshard: bool | int  # of the unit that backward needs first
    defer: bool

    @property
    def key(self) -> tuple[object, ...]:
        """The order among equals: less model parallelism, larger shards, then the plainer option."""
        i = self.inner
        return (
            self.pp * i.cp * i.tp * i.ep, self.pp, i.cp, i.tp, i.ep, i.etp, self.dp_replicate, -i.sequences,
            SCHEDULES.index(self.schedule) if self.schedule else -1, self.per_rank, i.chunks,
            ("allgather", "ring", "alltoall").index(i.method), not i.sequence_parallel, int(not self.reshard),
            int(self.reshard), self.defer,
        )  # fmt: skip


class Space:
    """The choices that `plan`'s request leaves open. `plan` is the naive plan, whose batch counts where none is pinned."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model, self.cluster, self.request = plan.model, plan.cluster, plan.request
        self.pins = plan.request.parallelism
        self.world = plan.cluster.num_gpus
        self.ddp = plan.fsdp.strategy == "ddp"
        asked, local = plan.request.global_batch_size, plan.request.local_batch_size
        self.local = local if isinstance(local, int) else None
        self.batch = asked if isinstance(asked, int) and asked > 0 else None
        if self.batch is None and self.local is None:
            self.batch = plan.batch.global_batch_size

    def pinned(self, axis: str) -> int | None:
        """The degree that the user fixed, None where the search may choose or `-1` stands for the rest."""
        degree = getattr(self.pins, DEGREE_FIELDS[axis])
        return degree if isinstance(degree, int) and degree > 0 else None

    # -------------------------------------------------------------- inner

    def inners(self) -> Iterator[Inner]:
        """All that divide; rules about them are the caller's to check."""
        for tp in self._degrees("tp", self.world):
            if not tp_allowed(tp, self.cluster, self.request) and self.pinned("tp") is None:
                continue
            for cp in self._degrees("cp", self.world // tp):
                if self.plan.batch.seq_len % cp or (self.ddp and cp > 1 and self.pinned("cp") is None):
                    continue
                for ep, etp in self._expert_degrees(tp):
                    for sequences in self._sequences(self.world // (tp * cp)):
                        for method in self._methods(cp):
                            for sequence_parallel in self._sequence_parallel(tp, cp):
                                for chunks in self._chunks(cp):
                                    yield Inner(tp, cp, ep, etp, sequences, method, sequence_parallel, chunks)

    def _degrees(self, axis: str, ranks: int) -> tuple[int, ...]:
        pinned = self.pinned(axis)
        if pinned is not None:
            return (pinned,) if ranks % pinned == 0 else ()
        return divisors(ranks)

    def _expert_degrees(self, tp: int) -> Iterator[tuple[int, int]]:
        routed = mixtures(self.model)
        ep, etp = self.pins.expert_parallel_degree, self.pins.expert_tensor_parallel_degree
        if not routed:
            yield ep if isinstance(ep, int) else 1, etp if isinstance(etp, int) else 1
            return
        common = math.gcd(*(moe.num_experts for moe in routed))
        for degree in (ep,) if isinstance(ep, int) else divisors(common):
            for inside in (etp,) if isinstance(etp, int) else (1, tp) if tp > 1 else (1,):
                if self.world % (degree * inside) == 0:
                    yield degree, inside

    def _sequences(self, ranks: int) -> tuple[int, ...]:
        """Sequences of one forward, of `ranks` that are left for data and stages."""
        micro = self.pins.pipeline_parallel_microbatch_size
        found: set[int] = set()
        if self.pinned("pp") in (None, 1):
            found |= {self.local} if self.local is not None else set(divisors(self._share()))
        if self.pinned("pp") != 1 and ranks > 1:
            whole = self.local if self.local is not None else self._share()
            found |= {micro} if isinstance(micro, int) else set(divisors(whole))
        return tuple(sorted(found))

    def _share(self) -> int:
        """What a rank's batch divides: the whole batch, over the data ranks that are pinned."""
        assert self.batch is not None
        fixed = (self.pinned("dp_replicate") or 1) * (self.pinned("dp_shard") or 1)
        return self.batch // fixed if self.batch % fixed == 0 else 1

    def _methods(self, cp: int) -> tuple[Method, ...]:
        asked = self.pins.context_parallel_method
        if asked != "auto":
            return (asked,)
        return ("allgather", "ring", "alltoall") if cp > 1 else ("allgather",)

    def _sequence_parallel(self, tp: int, cp: int) -> tuple[bool, ...]:
        asked = self.pins.enable_sequence_parallel
        if tp == 1:
            return (False,)
        if asked != "auto":
            return (asked,)
        return (True, False)

    def _chunks(self, cp: int) -> tuple[int, ...]:
        asked = self.request.loss.chunks
        if isinstance(asked, int):
            return (asked,)
        return tuple(chunks for chunks in CHUNKS if self.plan.batch.seq_len // cp % chunks == 0)

    # -------------------------------------------------------------- the rest

    def pipelines(self, inner: Inner) -> Iterator[tuple[int, int, int, int]]:
        """(pp, dp, microbatches, accumulation steps) for every number of stages' ranks that the batch divides over."""
        ranks = self.world // (inner.tp * inner.cp)
        for pp in self._degrees("pp", ranks):
            dp = ranks // pp
            if pp > self.model.num_layers or not any(True for _ in self.replicas(inner, dp)):
                continue
            if pp == 1:
                if self.local is not None and self.local != inner.sequences:
                    continue
                total = self.batch if self.batch is not None else inner.sequences * dp
                if total % (inner.sequences * dp) == 0:
                    yield 1, dp, 1, total // (inner.sequences * dp)
                continue
            local = (
                self.local
                if self.local is not None
                else self.batch // dp
                if self.batch and self.batch % dp == 0
                else None
            )
            micro = self.pins.pipeline_parallel_microbatch_size
            if local is None or local % inner.sequences or (isinstance(micro, int) and micro != inner.sequences):
                continue
            total = self.batch if self.batch is not None else local * dp
            if total % (local * dp) == 0:
                yield pp, dp, local // inner.sequences, total // (local * dp)

    def replicas(self, inner: Inner, dp: int) -> Iterator[tuple[int, int]]:
        """(dp_replicate, dp_shard), largest shards first."""
        replicate, shard = self.pinned("dp_replicate"), self.pinned("dp_shard")
        region = inner.cp * inner.tp
        for size in sorted(divisors(dp), reverse=True):
            if self.ddp and size > 1:
                continue
            if shard not in (None, size) or replicate not in (None, dp // size):
                continue
            if size * region % (inner.ep * inner.etp) == 0:
                yield dp // size, size

    def schedules(self, pp: int, microbatches: int) -> Iterator[tuple[Schedule | None, int]]:
        """(schedule, stages a rank) that can run these microbatches."""
        if pp == 1:
            yield None, 1
            return
        asked = self.pins.pipeline_parallel_schedule
        for schedule in SCHEDULES if asked == "auto" else (asked,):
            for per_rank in self._stages_per_rank(schedule, pp):
                if pp * per_rank <= self.model.num_layers and runs(schedule, pp, per_rank, microbatches):
                    yield schedule, per_rank

    def _stages_per_rank(self, schedule: Schedule, pp: int) -> tuple[int, ...]:
        if schedule in ("1F1B", "GPipe"):
            return (1,)
        if schedule in ("ZBVZeroBubble", "DualPipeV"):
            return (2,)
        first = 1 if schedule == "InterleavedZeroBubble" else 2
        return tuple(count for count in STAGES_PER_RANK if count >= first)

    def reshards(self, inner: Inner, pp: int, dp_shard: int) -> Iterator[tuple[bool | int, bool | int]]:
        """What blocks, and the unit with the output, do after forward.

        A pipeline frees nothing between its first backward and its end, so that to free costs gathers and saves nothing.
        """
        asked = self.pins.fsdp_reshard_after_forward
        if self.ddp:
            yield True, False
        elif asked == "always":
            yield True, True
        elif isinstance(asked, int):
            yield asked, asked
        elif asked == "never":
            yield False, False
        elif asked == "default":
            yield pp == 1, False
        elif pp > 1 or dp_shard * inner.cp == 1:
            yield False, False
        else:
            yield True, False
            yield False, False
            node = self.cluster.gpus_per_node
            shards = dp_shard * inner.cp
            if inner.tp == 1 and inner.ep == 1 and 1 < node < shards and shards % node == 0:
                yield node, False

    def defers(self, accumulation: int) -> tuple[bool, ...]:
        """Whether gradients are reduced after the last accumulation step only."""
        asked = self.pins.defer_gradient_sync
        if asked != "auto":
            return (asked,)
        return (True, False) if accumulation > 1 else (False,)

    # -------------------------------------------------------------- plans

    def inner_plan(self, inner: Inner) -> Plan:
        """A plan whose ranks compute and say within layers what `inner` says; its data ranks are all that are left."""
        dp = self.world // (inner.tp * inner.cp)
        mesh = Mesh(pp=1, dp_replicate=1, dp_shard=dp, cp=inner.cp, tp=inner.tp, ep=inner.ep, etp=inner.etp)
        return self._realized(inner, mesh, None, 1, 1, 1, (True, False), False)

    def plan_of(self, choice: Choice) -> Plan:
        """The plan of `choice`, its layers not yet assigned to stages."""
        i = choice.inner
        mesh = Mesh(
            pp=choice.pp, dp_replicate=choice.dp_replicate, dp_shard=choice.dp_shard, cp=i.cp, tp=i.tp, ep=i.ep, etp=i.etp
        )  # fmt: skip
        return self._realized(
            i, mesh, choice.schedule, choice.per_rank, choice.microbatches, choice.accumulation,
            (choice.reshard, choice.last_reshard), choice.defer,
        )  # fmt: skip

    def _realized(
        self,
        inner: Inner,
        mesh: Mesh,
        schedule: Schedule | None,
        per_rank: int,
        microbatches: int,
        accumulation: int,
        reshard: tuple[bool | int, bool | int],
        defer: bool,
    ) -> Plan:
        plan, tensor = self.plan, mesh.tp > 1
        local = inner.sequences * microbatches
        loss_parallel = tensor and not self.pins.disable_loss_parallel
        return replace(
            plan,
            mesh=mesh,
            batch=Batch(
                seq_len=plan.batch.seq_len,
                global_batch_size=local * mesh.dp * accumulation,
                local_batch_size=local,
                microbatch_size=inner.sequences,
                accumulation_steps=accumulation,
            ),
            pipeline=Pipeline(
                schedule=schedule,
                stages=place_stages(schedule, mesh.pp, mesh.pp * per_rank),
                microbatches=microbatches,
                actions=self.pins.pipeline_parallel_schedule_actions,
            ),
            fsdp=replace(
                plan.fsdp,
                units=() if self.ddp else fsdp_units(self.model, *reshard),
                defer_gradient_sync=defer,
            ),
            tensor_parallel=replace(
                plan.tensor_parallel,
                sequence_parallel=inner.sequence_parallel,
                loss_parallel=loss_parallel,
                async_tp=False,
                kv_replicas=kv_replicas(self.model, mesh.tp) if tensor and self.pins.kv_head_replication else 1,
            ),
            context_parallel=replace(plan.context_parallel, method=inner.method),
            expert_parallel=replace(plan.expert_parallel, comm_backend=comm_backend(self.request, mesh)),
            loss=replace(plan.loss, chunks=inner.chunks),
            sharding=_rows(self.model, inner.sequence_parallel, loss_parallel, mesh.tp, mesh.ep, mesh.etp),
        )


@functools.lru_cache(maxsize=256)
def _rows(
    model: Model, sequence_parallel: bool, loss_parallel: bool, tp: int, ep: int, etp: int
) -> tuple[ModuleSharding, ...]:
    dense = (
        tensor_parallel_rows(model, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel) if tp > 1 else ()
    )
    mesh = Mesh(pp=1, dp_replicate=1, dp_shard=ep * etp, cp=1, tp=tp, ep=ep, etp=etp)
    return dense + expert_rows(model, mesh)


def runs(schedule: Schedule, pp: int, per_rank: int, microbatches: int) -> bool:
    """Whether torch's schedule takes this many microbatches (rule pp-microbatches)."""
    if schedule in ("1F1B", "DualPipeV"):
        return microbatches >= pp * per_rank
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return microbatches % max(1, microbatches // pp) == 0
    return True
