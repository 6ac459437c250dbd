"""One candidate of the search (a mesh, batch and schedule): the price of any split into stages under any policies, and its memory.

    candidate = Candidate(plan, menus, cache)
    candidate.seconds(assignment)       # equal to step_seconds(assigned plan).total

Splits and policies are counts of layers per kind, so that thousands can be priced. What the memory allows is asked rank by
rank: `recompute` finds the policies with the least added time that fit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from titan_planner.cost.local import imbalance_of
from titan_planner.cost.memory import Activations, Group, Rank, Ranks, available_bytes
from titan_planner.cost.program import TITAN
from titan_planner.cost.step import muon_seconds, update_seconds_per_element
from titan_planner.cost.timeline import StageTime, simulate, torch_sends
from titan_planner.ir.execution import CheckpointPolicy
from titan_planner.ir.model import Moe
from titan_planner.ir.parallel import SPLIT_BACKWARD_SCHEDULES
from titan_planner.ir.plan import Layer, Plan
from titan_planner.knapsack import Kind, Option, least_seconds
from titan_planner.schedules import Held, Work, work_of
from titan_planner.search.pieces import Piece, Pieces, StageSeconds, kinds_of

StageCounts = tuple[tuple[int, ...], ...]
"""Per kind of layer, how many of them take each of its policies."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Layers per stage, and per stage the policies of its layers by count."""

    layers: tuple[int, ...]
    counts: tuple[StageCounts, ...]


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The policies of one pipeline rank's stages that fit with the least added time, stage by stage."""

    counts: tuple[StageCounts, ...]


class Candidate:
    """`plan` without its split: layers and their policies are what is asked for here."""

    def __init__(
        self, plan: Plan, menus: Sequence[tuple[CheckpointPolicy, ...]], cache: dict[tuple[object, ...], Piece]
    ) -> None:
        policies = {policy.name: policy for menu in menus for policy in menu}
        policies = {"none": plan.activation_checkpoint.policies[0], **policies}
        self.plan = replace(
            plan, activation_checkpoint=replace(plan.activation_checkpoint, policies=tuple(policies.values()))
        )
        self.kinds, self.kind_of = kinds_of(self.plan, menus)
        self.pieces = Pieces(self.plan, self.kinds, cache)
        pipeline = plan.pipeline
        self.stages = len(pipeline.stages)
        self.rank_of = tuple(stage.pp_rank for stage in pipeline.stages)
        self.stages_of = tuple(
            tuple(s for s, rank in enumerate(self.rank_of) if rank == r) for r in range(plan.mesh.pp)
        )
        self.runs = pipeline.microbatches if plan.mesh.pp > 1 else 1
        self.splits_backward = pipeline.actions is not None or pipeline.schedule in SPLIT_BACKWARD_SCHEDULES
        self._stage_memo: dict[tuple[object, ...], StageSeconds] = {}
        self._rank_memo: dict[tuple[object, ...], Recomputed | None] = {}
        self._frames: dict[tuple[object, ...], _Room] = {}

    @functools.cached_property
    def ranks(self) -> Ranks:
        """Memory of the pipeline ranks."""
        return Ranks(self.plan, TITAN, imbalance_of(self.plan))

    # -------------------------------------------------------------- splits

    def kinds_in(self, start: int, end: int) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Layers of every kind in [start, end), and the kinds of the first and the last."""
        return _kinds_in(self.kind_of, len(self.kinds), start, end)

    def intervals(self, layers: Sequence[int]) -> list[tuple[int, int]]:
        """[start, end) of every stage."""
        ends = list(itertools.accumulate(layers))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    # -------------------------------------------------------------- time

    def stage_seconds(self, stage: int, interval: tuple[int, int], counts: StageCounts) -> StageSeconds:
        """One microbatch of `stage` with the layers of `interval`."""
        ends = self.kinds_in(*interval)[1]
        embedding, head = stage == 0, stage == self.stages - 1
        pp = self.plan.mesh.pp
        # Under a split backward the first stage differs; where weights are freed after forward, every stage does.
        alike = stage if pp > 1 and self.pieces.block_reshard is not False else stage >= pp
        key = (embedding, head, alike, ends, counts)
        found = self._stage_memo.get(key)
        if found is None:
            found = self._stage_memo[key] = self.pieces.stage(stage, counts, ends, embedding, head)
        return found

    def seconds(self, assignment: Assignment) -> float:
        """Time of one step, as `step_seconds` of the assigned plan has it."""
        intervals = self.intervals(assignment.layers)
        times = [
            self.stage_seconds(stage, interval, counts)
            for stage, (interval, counts) in enumerate(zip(intervals, assignment.counts, strict=True))
        ]
        repeats = self.plan.batch.accumulation_steps
        span = self.span(times) * repeats
        return span + max(self.around(intervals, times))

    def span(self, times: Sequence[StageSeconds]) -> float:
        """From the first forward to the last backward of one run of the schedule."""
        if self.plan.mesh.pp == 1:
            return times[0].forward + times[0].backward
        found = []
        for stage, took in enumerate(times):
            weight = took.backward if stage == 0 else took.weight
            found.append(StageTime(took.forward, took.backward, took.backward - weight, weight))
        work = self.work
        return simulate(work, found, self.transfers, sends=torch_sends(work)).makespan_s

    @functools.cached_property
    def work(self) -> Work:
        """What the pipeline runs."""
        return work_of(self.plan.pipeline)

    @functools.cached_property
    def transfers(self) -> tuple[float, ...]:
        """Seconds of a message over every boundary between stages; nothing within a rank."""
        each = self.pieces.transfer
        return tuple(0.0 if self.rank_of[s] == self.rank_of[s + 1] else each for s in range(self.stages - 1))

    def around(self, intervals: Sequence[tuple[int, int]], times: Sequence[StageSeconds]) -> list[float]:
        """Of every pipeline rank what comes once a step: first gathers, last reductions, norm and update."""
        found = [0.0] * self.plan.mesh.pp
        for stage, took in enumerate(times):
            found[self.rank_of[stage]] += took.once
        for rank, seconds in enumerate(self.updates(intervals)):
            found[rank] += seconds
        return found

    def updates(self, intervals: Sequence[tuple[int, int]]) -> list[float]:
        """Norm, clipping, update and their collectives of every pipeline rank."""
        each = self.update_each
        held = [0.0] * self.plan.mesh.pp
        for stage, interval in enumerate(intervals):
            numel = sum(
                count * sharded for count, sharded in zip(self.kinds_in(*interval)[0], self.sharded[0], strict=True)
            )
            if stage == 0:
                numel += self.sharded[1]
            if stage == self.stages - 1:
                numel += self.sharded[2]
            held[self.rank_of[stage]] += numel
        found = [each * numel for numel in held]
        waits = self._step_waits
        if waits is None or self.plan.optimizer.name == "Muon":
            assigned = self.assigned_layers(intervals)
            waits = self.pieces.step_waits(replace(self.plan, layers=assigned))
            if self.plan.optimizer.name == "Muon":
                more = muon_seconds(replace(self.plan, layers=assigned))
                found = [a + b for a, b in zip(found, more, strict=True)]
        return [a + b for a, b in zip(found, waits, strict=True)]

    @functools.cached_property
    def update_each(self) -> float:
        """Seconds of norm, clipping and update for one element that a rank holds between steps."""
        return update_seconds_per_element(self.plan)

    @functools.cached_property
    def sharded(self) -> tuple[tuple[float, ...], float, float]:
        """Elements that a rank holds between steps: of each kind of layer, of the embedding, of norm and output."""
        elements, mesh = self.ranks.elements, self.plan.mesh

        def sharded(fqn: str) -> float:
            numel = elements[fqn]
            if self.plan.fsdp.strategy != "fsdp":
                return float(numel.all)
            return (numel.all - numel.experts) / mesh.fsdp + numel.experts / mesh.efsdp

        return (
            tuple(sharded(kind.fqn) for kind in self.kinds),
            sharded("tok_embeddings"),
            sharded("norm") + sharded("output"),
        )

    @functools.cached_property
    def _step_waits(self) -> tuple[float, ...] | None:
        """Collectives around the update, where they do not depend on the split."""
        routed = any(isinstance(kind.block.feed_forward, Moe) for kind in self.kinds)
        if (routed and self.plan.mesh.pp > 1) or self.plan.float8.precompute_float8_dynamic_scale_for_fsdp:
            return None
        even = [self.plan.model.num_layers // self.stages] * self.stages
        even[-1] += self.plan.model.num_layers - sum(even)
        return self.pieces.step_waits(replace(self.plan, layers=self.assigned_layers(self.intervals(even))))

    def assigned_layers(
        self, intervals: Sequence[tuple[int, int]], counts: Sequence[StageCounts] | None = None
    ) -> tuple[Layer, ...]:
        """Every top-level module with its stage and policy; of equal layers of a stage the first recompute most."""
        found = [Layer(fqn="tok_embeddings", stage=0, checkpoint="none")]
        for stage, (start, end) in enumerate(intervals):
            left = None if counts is None else [list(options) for options in counts[stage]]
            for number in range(start, end):
                name = "none"
                if left is not None:
                    kind = self.kind_of[number]
                    option = max(o for o, count in enumerate(left[kind]) if count)
                    left[kind][option] -= 1
                    name = self.kinds[kind].policies[option].name
                found.append(Layer(fqn=f"layers.{number}", stage=stage, checkpoint=name))
        last = self.stages - 1
        found += [Layer(fqn=fqn, stage=last, checkpoint="none") for fqn in ("norm", "output")]
        return tuple(found)

    def finished(self, assignment: Assignment) -> Plan:
        """The plan with its layers assigned; policies that no layer takes are left out."""
        layers = self.assigned_layers(self.intervals(assignment.layers), assignment.counts)
        used = {layer.checkpoint for layer in layers}
        policies = self.plan.activation_checkpoint.policies
        kept = tuple(policy for n, policy in enumerate(policies) if n == 0 or policy.name in used)
        return replace(
            self.plan,
            layers=layers,
            activation_checkpoint=replace(self.plan.activation_checkpoint, policies=kept),
        )

    # -------------------------------------------------------------- memory

    def recompute(self, rank: int, intervals: Sequence[tuple[int, int]]) -> Recomputed | None:
        """The policies of `rank`'s stages with the least added time that fit in memory; None when none do.

        `intervals` are those of the rank's stages, in their order.
        """
        stages = self.stages_of[rank]
        kinds = tuple(self.kinds_in(*interval) for interval in intervals)
        key = (self._alike(rank), kinds)
        if key not in self._rank_memo:
            self._rank_memo[key] = self._recompute(rank, stages, kinds)
        return self._rank_memo[key]

    def _alike(self, rank: int) -> tuple[object, ...]:
        """What tells a rank from others that hold as many layers."""
        stages = self.stages_of[rank]
        points = self.ranks.points[rank]
        return (
            tuple((s == 0, s == self.stages - 1, s < self.plan.mesh.pp) for s in stages),
            tuple((p.until_input, p.until_weight) for p in points),
        )

    def _recompute(
        self, rank: int, stages: tuple[int, ...], kinds: tuple[tuple[tuple[int, ...], tuple[int, int]], ...]
    ) -> Recomputed | None:
        room = _Room(self, rank, stages, kinds)
        least = tuple(
            tuple(
                tuple(count if o == 0 else 0 for o in range(len(kind.policies)))
                for kind, count in zip(self.kinds, numbers, strict=True)
            )
            for numbers, _ in kinds
        )
        if room.fits(least):
            return Recomputed(least)
        best: tuple[float, tuple[StageCounts, ...]] | None = None
        for working in room.workings:
            for first in room.first_choices():
                counts = room.solve(working, first)
                if counts is None or not room.fits(counts):
                    continue
                added = room.added(counts)
                if best is None or added < best[0]:
                    best = (added, counts)
        return None if best is None else Recomputed(best[1])

    def shortfall(self, assignment: Assignment) -> float:
        """Bytes by which the fullest rank exceeds what it may take; negative when all fit."""
        worst = -float("inf")
        intervals = self.intervals(assignment.layers)
        for rank, stages in enumerate(self.stages_of):
            kinds = tuple(self.kinds_in(*intervals[s]) for s in stages)
            room = _Room(self, rank, stages, kinds)
            counts = tuple(assignment.counts[s] for s in stages)
            worst = max(worst, room.nbytes(counts) - room.available)
        return worst


@functools.lru_cache(maxsize=65536)
def _kinds_in(kind_of: tuple[int, ...], kinds: int, start: int, end: int) -> tuple[tuple[int, ...], tuple[int, int]]:
    found = [0] * kinds
    for kind in kind_of[start:end]:
        found[kind] += 1
    return tuple(found), (kind_of[start], kind_of[end - 1])


class _Room:
    """The memory of one pipeline rank with given layers, as a function of their policies."""

    def __init__(
        self,
        of: Candidate,
        rank: int,
        stages: tuple[int, ...],
        kinds: tuple[tuple[tuple[int, ...], tuple[int, int]], ...],
    ) -> None:
        self.of, self.stages, self.kinds = of, stages, kinds
        groups: list[Group] = []
        for stage, (numbers, (first, _)) in zip(stages, kinds, strict=True):
            if stage == 0:
                groups.append(Group("tok_embeddings", 1, 0, "none"))
            order = sorted(range(len(numbers)), key=lambda kind: kind != first)
            groups += [Group(of.kinds[k].fqn, numbers[k], stage, "none") for k in order if numbers[k]]
            if stage == of.stages - 1:
                groups += [Group("norm", 1, stage, "none"), Group("output", 1, stage, "none")]
        self.rank: Rank = of.ranks.rank(rank, tuple(groups))
        self.points: tuple[Held, ...] = of.ranks.points[rank]
        self.available = available_bytes(of.plan)
        frames = self.rank.frames
        self.fixed = [frame.parts.total for frame in frames]
        self.cuda = of.plan.cluster.gpu.device == "cuda"
        self.most: float = sum(map(max, zip(*((
            f.parts.parameters, f.parts.gradients, f.parts.optimizer, f.parts.unsharded, f.parts.logits, f.parts.float8,
            f.parts.communication) for f in frames), strict=True)))  # fmt: skip

    @functools.cached_property
    def prices(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Per kind and policy, bytes kept of one microbatch and bytes that its backward needs beside them."""
        return tuple(
            tuple(self.of.ranks.priced(kind.fqn, policy.name) for policy in kind.policies) for kind in self.of.kinds
        )

    def kept(self, counts: Sequence[StageCounts]) -> Activations:
        """What the blocks keep under these policies, as `Rank.kept` adds it up."""
        by_stage = dict(self.rank.around_stages)
        kept, working, least = 0.0, 0.0, float("inf")
        for stage, options in zip(self.stages, counts, strict=True):
            for kind, taken in enumerate(options):
                for option, count in enumerate(taken):
                    if count:
                        saved, beside = self.prices[kind][option]
                        kept += saved * count
                        by_stage[stage] += saved * count
                        working, least = max(working, beside), min(least, saved)
        if self.of.plan.mesh.pp > 1:
            for stage, (_, ends), options in zip(self.stages, self.kinds, counts, strict=True):
                if stage and self._keeps_what_arrives(ends[0], options):
                    by_stage[stage] -= self.rank.sizes.stream_bytes
        return Activations(tuple(by_stage[stage] for stage in self.stages), kept, least, working)

    def _keeps_what_arrives(self, first: int, options: StageCounts) -> bool:
        sizes = self.rank.sizes
        if sizes.kernels != "eager" or sizes.norm_kernel:
            return True
        # The first layers of a kind recompute most.
        option = max(o for o, count in enumerate(options[first]) if count)
        return self.of.kinds[first].policies[option].mode != "none"

    def nbytes(self, counts: Sequence[StageCounts]) -> float:
        """Bytes that the rank takes of its device, as `RankMemory.nbytes`."""
        amounts = [max(0.0, amount) for amount in self.rank.activations(self.kept(counts))]
        if self.cuda:
            return self.most + max(amounts)
        return max(fixed + amount for fixed, amount in zip(self.fixed, amounts, strict=True))

    def fits(self, counts: Sequence[StageCounts]) -> bool:
        """Whether the rank has room for them."""
        return self.nbytes(counts) <= self.available

    # -------------------------------------------------------------- the knapsack

    @functools.cached_property
    def workings(self) -> list[float]:
        """Bytes that backward of a block may need beside what is kept, by the policies that are allowed."""
        found = {
            beside
            for numbers, _ in self.kinds
            for kind, count in enumerate(numbers)
            if count
            for _, beside in self.prices[kind]
        }
        return sorted(found)

    def first_choices(self) -> Iterator[bool]:
        """Whether the stages' first layers must recompute: eager blocks that do need no copy of their input."""
        yield False
        sizes = self.rank.sizes
        if sizes.kernels == "eager" and not sizes.norm_kernel and any(self.stages):
            yield True

    def solve(self, working: float, first: bool) -> tuple[StageCounts, ...] | None:
        """The least added time with policies whose backward needs at most `working` beside what is kept."""
        budgets = self._budgets(working, first)
        kinds: list[Kind] = []
        places: list[tuple[int, int, tuple[int, ...]]] = []
        for position, (numbers, ends) in enumerate(self.kinds):
            stage = self.stages[position]
            for kind, count in enumerate(numbers):
                if not count:
                    continue
                allowed = tuple(o for o, (_, beside) in enumerate(self.prices[kind]) if beside <= working)
                held = self._held(position)
                forced = tuple(o for o in allowed if self.of.kinds[kind].policies[o].mode != "none")
                if first and stage and kind == ends[0]:
                    kinds.append(Kind(1, held, self._options(kind, forced, stage)))
                    places.append((position, kind, forced))
                    count -= 1
                if count:
                    kinds.append(Kind(count, held, self._options(kind, allowed, stage)))
                    places.append((position, kind, allowed))
        if any(not kind.options for kind in kinds):
            return None
        choice = least_seconds(kinds, budgets)
        if choice is None:
            return None
        found = [[[0] * len(kind.policies) for kind in self.of.kinds] for _ in self.stages]
        for (position, kind, allowed), taken in zip(places, choice.counts, strict=True):
            for option, count in zip(allowed, taken, strict=True):
                found[position][kind][option] += count
        return tuple(tuple(map(tuple, stage)) for stage in found)

    def _held(self, position: int) -> tuple[float, ...]:
        found = [float(point.until_weight[position]) for point in self.points]
        if not self.cuda and self.stages[0] == 0 and self.of.plan.mesh.pp > 1:
            # While the embedding runs backward, one microbatch of the first stage is gone.
            found += [value - (position == 0) for value in found]
        return tuple(found)

    def _options(self, kind: int, allowed: Sequence[int], stage: int) -> tuple[Option, ...]:
        return tuple(Option(self._added(kind, option, stage), self.prices[kind][option][0]) for option in allowed)

    def _added(self, kind: int, option: int, stage: int) -> float:
        """Seconds that a policy adds to backward over the first of the menu."""
        pieces = self.of.pieces
        base, piece = pieces.block(kind, 0, stage).backward, pieces.block(kind, option, stage).backward
        return sum(piece[i] - base[i] for i in (0, 3, 4, 5))

    def added(self, counts: Sequence[StageCounts]) -> float:
        """Seconds that the policies add to the rank's backwards."""
        total = 0.0
        for stage, options in zip(self.stages, counts, strict=True):
            for kind, taken in enumerate(options):
                for option, count in enumerate(taken):
                    if count and option:
                        total += count * self._added(kind, option, stage)
        return total

    def _budgets(self, working: float, first: bool) -> tuple[float, ...]:
        """What blocks may keep at each of the rank's fullest moments, all microbatches in flight together."""
        stream = float(self.rank.sizes.stream_bytes)
        names = [frame.name for frame in self.rank.frames]
        room = [self.available - (self.most if self.cuda else fixed) for fixed in self.fixed]
        at = dict(zip(names, room, strict=True))
        limit = at["first block's backward"] + self.rank.counted_at_once - working
        if "loss" in at:
            limit = min(limit, at["loss"], at["output's backward"] - stream)
        around = [self.rank.around_stages[stage] for stage in self.stages]
        if self.of.plan.mesh.pp > 1:
            for position in range(len(self.kinds)):
                sizes = self.rank.sizes
                as_it_is = sizes.kernels != "eager" or sizes.norm_kernel
                if self.stages[position] and (as_it_is or first):
                    around[position] -= stream
        between = self.rank.between
        found = []
        for point in self.points:
            beside = sum(
                w * (a + b) - i * b
                for w, i, a, b in zip(point.until_weight, point.until_input, around, between, strict=True)
            )
            found.append(limit - beside)
        name = "embedding's backward in the pipeline"
        if not self.cuda and name in at:
            found += [at[name] - stream + around[0] - (limit - budget) for budget in found]
        return tuple(found)
