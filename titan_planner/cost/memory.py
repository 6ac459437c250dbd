"""Peak memory of every pipeline rank, by part, at the fullest of the moments that a step goes through.

A step is looked at when the loss is computed, when the output projection and the first and the last block run backward, when
the embedding does, and when the optimizer updates. Of each moment everything is counted: parameters, gradients and moments;
what FSDP has gathered and not reduced yet; what is kept for backward (`activations.py`); logits (`loss.py`); buffers of
collectives. The reported parts are those of the fullest moment. What the caching allocator holds beyond them is a part of
its own: blocks that other moments need and that cannot be reused for this one.

Not modelled: validation (it needs less), the first step's lack of moments, host memory, the data loader, temporaries of single
ops beyond those named, and of expert parallelism any imbalance but the one that the caller states.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import assert_never

from titan_planner.cost.activations import (
    backward_working,
    block_saved,
    embedding_saved,
    final_norm_saved,
    output_saved,
    total,
    weight_gradient_inputs,
)
from titan_planner.cost.local import BALANCED, BYTES, Local, effective_imbalance, heads, local, loss_kernels
from titan_planner.cost.loss import LossBytes, loss_bytes
from titan_planner.cost.program import TITAN, Program
from titan_planner.cost.reserve import GIB as GIB
from titan_planner.cost.reserve import reserve
from titan_planner.ir.execution import KEEP_ALL, CheckpointPolicy
from titan_planner.ir.fqn import matches, select
from titan_planner.ir.inventory import Parameter, linear_modules, muon_parameters, parameters
from titan_planner.ir.model import Block, Model, Moe
from titan_planner.ir.parallel import FsdpUnit, Mesh
from titan_planner.ir.plan import Layer, Plan, StageMemory
from titan_planner.schedules import Held, Kept, peak_bytes, peaks, work_of
from titan_planner.sharding import local_shape

STRANDED = 1.0
"""Of the memory that other moments need and the fullest does not: the part that the caching allocator keeps beside it.
Blocks of gigabytes (logits) are cut up for what lives longer (gradients, moments), and are not whole again when needed.
The one fitted number here: 1 meets TorchTitan's published peaks of reserved memory of Llama 3 8B on 8 H100 (49.59, 49.41 and
62.18 GiB, pytorch/torchtitan commit 5940ddeb5) within 1.5 %, and 0 is 14 to 18 % short. A later table (torchao's, B200: 33.71
GiB) is met within 3 % by 0 and exceeded by 18 % with 1, so that 1 is the cautious choice."""


# ------------------------------------------------------------------ elements


@dataclass(frozen=True, slots=True)
class Numel:
    """Elements of one top-level module on one tensor rank, before FSDP shards them."""

    all: int = 0
    experts: int = 0  # of `all`, routed experts' weights, which have data ranks of their own
    muon: int = 0  # of `all`, matrices that Muon takes, and for which it keeps one moment
    muon_experts: int = 0  # of `muon`, experts'
    float8: int = 0  # of `all`, weights of linears that compute in 8 bits


def module_numel(plan: Plan) -> dict[str, int]:
    """Elements that one tensor rank holds of every top-level module, before FSDP shards them."""
    return {fqn: numel.all for fqn, numel in numels(plan).items()}


def numels(plan: Plan) -> dict[str, Numel]:
    """The same, by what matters for memory."""
    mesh = plan.mesh
    converted = plan.float8.converted if plan.float8.recipe is not None else ()
    found = _numels(plan.model, mesh.tp, mesh.ep, mesh.etp, plan.tensor_parallel.kv_replicas, converted)
    if plan.model.tied and plan.layers[0].stage != plan.layers[-1].stage:
        # The last stage needs its own copy of the tied weight.
        return {**found, "output": found["tok_embeddings"]}
    return found


@functools.lru_cache(maxsize=256)
def _numels(model: Model, tp: int, ep: int, etp: int, kv_replicas: int, converted: tuple[str, ...]) -> dict[str, Numel]:
    """One block of each run of equal ones is counted: models have hundreds of layers. Not to be changed: it is cached."""
    mesh = Mesh(pp=1, dp_replicate=1, dp_shard=max(1, ep * etp), cp=1, tp=tp, ep=ep, etp=etp)
    first_of_run = replace(model, blocks=tuple(replace(run, repeat=1) for run in model.blocks))
    matrices = muon_parameters(first_of_run)
    chosen = _float8_layers(model, converted)
    counted: dict[str, Numel] = {}
    for parameter in parameters(first_of_run):
        owner = top_level(parameter)
        size = math.prod(local_shape(parameter, mesh, kv_replicas))
        so_far = counted.get(owner, Numel())
        counted[owner] = Numel(
            all=so_far.all + size,
            experts=so_far.experts + size * parameter.is_expert,
            muon=so_far.muon + size * (parameter.fqn in matrices),
            muon_experts=so_far.muon_experts + size * (parameter.is_expert and parameter.fqn in matrices),
        )
    found = {"tok_embeddings": counted["tok_embeddings"]}
    number = 0
    for index, run in enumerate(model.blocks):
        for _ in range(run.repeat):
            share = chosen.get(f"layers.{number}", 0)
            block = counted[f"layers.{index}"]
            found[f"layers.{number}"] = replace(block, float8=share // tp) if share else block
            number += 1
    found["norm"] = counted["norm"]
    output = counted.get("output", Numel())
    found["output"] = replace(output, float8=chosen.get("output", 0) // tp)
    return found


@functools.lru_cache(maxsize=64)
def _float8_layers(model: Model, converted: tuple[str, ...]) -> dict[str, int]:
    """Elements of the linears that compute in 8 bits by top-level module, whole. Not to be changed: it is cached."""
    linears = linear_modules(model)
    found: dict[str, int] = {}
    for fqn in {fqn for selector in converted for fqn in select(selector, linears)}:
        parts = fqn.split(".")
        owner = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
        found[owner] = found.get(owner, 0) + math.prod(linears[fqn])
    return found


def sharded_numel(plan: Plan) -> dict[str, float]:
    """Elements of every top-level module that a rank holds between steps; experts are sharded over ranks of their own."""
    if plan.fsdp.strategy != "fsdp":
        return {fqn: float(numel.all) for fqn, numel in numels(plan).items()}
    return {
        fqn: (numel.all - numel.experts) / plan.mesh.fsdp + numel.experts / plan.mesh.efsdp
        for fqn, numel in numels(plan).items()
    }


def top_level(parameter: Parameter) -> str:
    """The stage-able module that owns `parameter`: `layers.3.attention.wq.weight` -> `layers.3`."""
    parts = parameter.fqn.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


# ------------------------------------------------------------------ parts and moments


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes on one rank at one moment of a step."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    unsharded: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    float8: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return float(sum(_amounts(self)))


def _amounts(parts: Parts) -> tuple[float, ...]:
    return (
        parts.parameters,
        parts.gradients,
        parts.optimizer,
        parts.unsharded,
        parts.activations,
        parts.logits,
        parts.float8,
        parts.communication,
    )


@dataclass(frozen=True, slots=True)
class Group:
    """Equal top-level modules of one stage under one policy."""

    fqn: str  # of the first
    count: int
    stage: int
    checkpoint: str


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step and what is in memory then."""

    name: str
    parts: Parts


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One pipeline rank: its first stage, every moment of a step, and how much more unbalanced experts could take."""

    stage: int
    moments: tuple[Moment, ...]
    experts_worst: float

    @property
    def fullest(self) -> Moment:
        """The moment that needs most; the first of equals."""
        return max(self.moments, key=lambda moment: moment.parts.total)

    @property
    def stranded(self) -> float:
        """Bytes that the allocator holds beside the fullest moment: what other moments have more of, part by part."""
        most: float = sum(map(max, zip(*(_amounts(moment.parts) for moment in self.moments), strict=True)))
        return float(STRANDED * (most - self.fullest.parts.total))

    def nbytes(self, device: str) -> float:
        """What the rank's tensors need of the device, with what the caching allocator strands where there is one."""
        return self.fullest.parts.total + (self.stranded if device == "cuda" else 0.0)


def stage_memory(plan: Plan, program: Program = TITAN, imbalance: float = BALANCED) -> tuple[StageMemory, ...]:
    """Memory of the fullest rank of each pipeline *rank*, reported at its first stage; GiB.

    `imbalance` is the load of the busiest expert rank over the mean; `experts_worst_gib` says what the worst would add.
    """
    return reported(plan, rank_memory(plan, program, imbalance))


def available_bytes(plan: Plan) -> float:
    """What a rank's tensors may take: the device's memory less the headroom asked for, context, communicators, workspaces."""
    usable = plan.cluster.gpu.memory_gib * (1 - plan.request.limits.memory_headroom) * GIB
    return usable - sum(line.nbytes for line in reserve(plan))


def reported(plan: Plan, ranks: tuple[RankMemory, ...]) -> tuple[StageMemory, ...]:
    """`ranks` in GiB, rounded to what is believed."""
    cuda = plan.cluster.gpu.device == "cuda"
    reserved = sum(line.nbytes for line in reserve(plan))
    found = []
    for rank in ranks:
        fullest = rank.fullest
        parts = fullest.parts
        found.append(
            StageMemory(
                stage=rank.stage,
                moment=fullest.name,
                parameters_gib=_gib(parts.parameters),
                gradients_gib=_gib(parts.gradients),
                optimizer_gib=_gib(parts.optimizer),
                unsharded_gib=_gib(parts.unsharded),
                activations_gib=_gib(parts.activations),
                logits_gib=_gib(parts.logits),
                float8_gib=_gib(parts.float8),
                communication_gib=_gib(parts.communication),
                allocator_gib=_gib(rank.stranded if cuda else 0.0),
                reserve_gib=_gib(reserved),
                experts_worst_gib=_gib(rank.experts_worst),
            )
        )
    return tuple(found)


def rank_memory(plan: Plan, program: Program = TITAN, imbalance: float = BALANCED) -> tuple[RankMemory, ...]:
    """The same in bytes, moment by moment, for every pipeline rank."""
    ranks = Ranks(plan, program, imbalance)
    return tuple(ranks.rank(rank, groups).memory() for rank, groups in enumerate(ranks.grouped(plan.layers)))


class Ranks:
    """What the memory of all pipeline ranks of a plan follows from, whichever layers they hold under whichever policies."""

    def __init__(self, plan: Plan, program: Program = TITAN, imbalance: float = BALANCED) -> None:
        self.plan, self.program = plan, program
        self.sizes = local(plan, program, imbalance)
        self.worst = 1.0
        if not plan.expert_parallel.force_load_balance:
            self.worst = max((effective_imbalance(plan, m, math.inf) for m in _mixtures(plan.model)), default=1.0)
        self.elements = numels(plan)
        self.blocks = _block_of(plan.model)
        self.policies = {policy.name: policy for policy in plan.activation_checkpoint.policies}
        self.resharded = _resharded(plan.fsdp.units, tuple(self.elements))
        self.float8 = _float8_working(plan, self.sizes)
        self.points = peaks(work_of(plan.pipeline))  # microbatches held at a rank's fullest moments, by stage
        self.prices: dict[tuple[int, str, int], tuple[float, float]] = {}

    def rank(self, rank: int, groups: tuple[Group, ...]) -> Rank:
        """Pipeline rank `rank` with the modules `groups`, in the order of the model."""
        return Rank(self, self.points[rank], groups)

    def grouped(self, layers: tuple[Layer, ...]) -> tuple[tuple[Group, ...], ...]:
        """The modules of every pipeline rank, equal ones together, in the order in which each kind comes first."""
        rank_of = [stage.pp_rank for stage in self.plan.pipeline.stages]
        found: list[dict[tuple[object, ...], Group]] = [{} for _ in range(self.plan.mesh.pp)]
        for layer in layers:
            key: tuple[object, ...] = (layer.fqn,)
            if layer.fqn in self.blocks:
                number, block = self.blocks[layer.fqn]
                # Selectors of forced recomputation may name single layers.
                named = number if self.policies[layer.checkpoint].force_recompute_fqns else -1
                place, reshard = self.resharded[layer.fqn]
                unit = reshard if place >= _ALONE else layer.fqn
                key = (layer.stage, layer.checkpoint, id(block), self.elements[layer.fqn], named, unit)
            here = found[rank_of[layer.stage]]
            so_far = here.get(key)
            here[key] = (
                Group(layer.fqn, 1, layer.stage, layer.checkpoint)
                if so_far is None
                else replace(so_far, count=so_far.count + 1)
            )
        return tuple(tuple(groups.values()) for groups in found)

    def priced(self, fqn: str, checkpoint: str) -> tuple[float, float]:
        """Bytes that a block keeps of one microbatch, and that its backward needs beside them."""
        number, block = self.blocks[fqn]
        policy = self.policies[checkpoint]
        key = (id(block), checkpoint, number if policy.force_recompute_fqns else 0)
        found = self.prices.get(key)
        if found is None:
            found = self.prices[key] = (
                total(block_saved(block, self.sizes, policy, number)),
                backward_working(block, self.sizes, policy, number),
            )
        return found


@functools.lru_cache(maxsize=64)
def _mixtures(model: Model) -> tuple[Moe, ...]:
    return tuple(run.block.feed_forward for run in model.blocks if isinstance(run.block.feed_forward, Moe))


@functools.lru_cache(maxsize=64)
def _block_of(model: Model) -> dict[str, tuple[int, Block]]:
    """FQN of a layer -> (its number, its block). Not to be changed: it is cached."""
    return {f"layers.{number}": (number, block) for number, block in enumerate(model.layers())}


_ALONE = 1000
"""From here on, units of one module each are numbered."""


@functools.lru_cache(maxsize=64)
def _resharded(units: tuple[FsdpUnit, ...], fqns: tuple[str, ...]) -> dict[str, tuple[int, bool | int]]:
    """FQN -> (its unit, whether that is resharded after forward). -1 is the root's. Not to be changed: it is cached."""
    found: dict[str, tuple[int, bool | int]] = {}
    for fqn in fqns:
        number, unit = next(
            ((n, u) for n, u in enumerate(units) if any(matches(selector, fqn) for selector in u.modules)), (-1, None)
        )
        # One selector with `*` makes a unit of every match.
        alone = unit is not None and len(unit.modules) == 1
        place = _ALONE + len(found) if alone else number
        found[fqn] = (place, unit.reshard_after_forward if unit is not None else False)
    return found


def _float8_working(plan: Plan, sizes: Local) -> float:
    """Operands of the widest product in 8 bits: input, weight and gradient; rowwise and MXFP8 need each both ways."""
    if plan.float8.recipe is None:
        return 0.0
    widest = 0.0
    for run in plan.model.blocks:
        feed_forward = run.block.feed_forward
        hidden = feed_forward.shared_dim if isinstance(feed_forward, Moe) else feed_forward.hidden_dim
        columns = max(hidden // sizes.tp, heads(run.block.attention, sizes).queries)
        widest = max(widest, sizes.tokens * (columns + sizes.dim) + columns * sizes.dim)
    return widest * (1 if plan.float8.recipe == "tensorwise" else 2)


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes that the blocks of a rank keep, and need, under their policies."""

    by_stage: tuple[
        float, ...
    ]  # of one microbatch, everything between its forward and its backward, in order of stages
    kept: float  # of one microbatch, by all blocks
    least: float  # by the block that keeps least
    working: float  # beside them, by the block whose backward needs most


class Rank:
    """One pipeline rank at work: its modules, and from their policies what is in memory at every moment of a step."""

    def __init__(self, of: Ranks, points: tuple[Held, ...], groups: tuple[Group, ...]) -> None:
        self.of, self.points, self.groups = of, points, groups
        self.plan, self.program, self.sizes = of.plan, of.program, of.sizes
        self.elements, self.blocks, self.policies = of.elements, of.blocks, of.policies
        self.stages = sorted({group.stage for group in groups})
        fqns = {group.fqn for group in groups}
        self.has_embedding, self.has_output = "tok_embeddings" in fqns, "output" in fqns

    def memory(self) -> RankMemory:
        """Every moment of a step under the policies that the groups name."""
        amounts = self.activations(self.kept())
        moments = tuple(
            Moment(frame.name, replace(frame.parts, activations=max(0.0, amount)))
            for frame, amount in zip(self.frames, amounts, strict=True)
        )
        return RankMemory(stage=self.stages[0], moments=moments, experts_worst=self._experts_worst(self.stages))

    def kept(self) -> Activations:
        """What blocks keep under the policies that the groups name."""
        by_stage = dict(self.around_stages)
        kept, working, least = 0.0, 0.0, math.inf
        for group in self.groups:
            if group.fqn in self.blocks:
                saved, beside = self.of.priced(group.fqn, group.checkpoint)
                kept += saved * group.count
                by_stage[group.stage] += saved * group.count
                working = max(working, beside)
                least = min(least, saved)
        for stage in self.stages if self.plan.mesh.pp > 1 else ():
            if stage and self.keeps_what_arrives(stage):
                by_stage[stage] -= self.sizes.stream_bytes
        return Activations(tuple(by_stage[stage] for stage in self.stages), kept, least, working)

    @functools.cached_property
    def around_stages(self) -> dict[int, float]:
        """Per stage what one microbatch keeps beside its blocks."""
        found = dict.fromkeys(self.stages, 0.0)
        for group in self.groups:
            if group.fqn not in self.blocks:
                found[group.stage] += self._around(group)
        if self.plan.mesh.pp > 1 and self.program.keeps_outputs:
            for stage in self.stages:
                if stage < len(self.plan.pipeline.stages) - 1:
                    found[stage] += self.sizes.stream_bytes
        return found

    @functools.cached_property
    def between(self) -> tuple[float, ...]:
        """Per stage what a split backward adds between its halves."""
        found = dict.fromkeys(self.stages, 0.0)
        # The actions that run say so, which need not be those of the schedule's name.
        if any(any(point.between) for point in self.points):
            for group in self.groups:
                if group.fqn in self.blocks and group.stage:
                    inputs = weight_gradient_inputs(self.blocks[group.fqn][1], self.sizes)
                    found[group.stage] += inputs * group.count
        return tuple(found[stage] for stage in self.stages)

    def activations(self, kept: Activations) -> tuple[float, ...]:
        """Bytes of activations at every one of `frames`."""
        stream = float(self.sizes.stream_bytes)
        fullest = peak_bytes(
            self.points,
            [Kept(until_weight=w, between=b) for w, b in zip(kept.by_stage, self.between, strict=True)],
        )
        amounts = {
            "loss": fullest,
            "output's backward": fullest + stream,
            "first block's backward": fullest - self.counted_at_once + kept.working,
            # Of the last microbatch, so that no other is in flight.
            "last block's backward": min(kept.least, kept.kept) + kept.working,
            "embedding's backward in the pipeline": max(0.0, fullest - kept.by_stage[0]) + stream,
            "embedding's backward": stream,
        }
        return tuple(amounts.get(frame.name, 0.0) for frame in self.frames)

    @functools.cached_property
    def counted_at_once(self) -> float:
        """Of what the last rank keeps beside its blocks, that which is gone when its first block runs backward."""
        return sum(self._around(group) for group in self.groups if group.fqn not in self.blocks) * self.has_output

    @functools.cached_property
    def frames(self) -> tuple[Moment, ...]:
        """The moments of a step and everything that is in memory then but activations."""
        pipeline = self.plan.mesh.pp > 1
        loss = self._loss() if self.has_output else LossBytes(0.0, 0.0, 0.0)
        # Of all microbatches in flight but the one whose loss is computed now, logits wait too.
        returned = self._returned() if self.has_output else 0.0
        waiting = loss.kept * self._losses_waiting() + returned
        gradients, all_gradients = self._gradients(), self._all_gradients()
        found = []
        if self.has_output:
            found += [
                ("loss", self._at(loss.peak + waiting, gradients, "loss")),
                ("output's backward", self._at(loss.handed_on + waiting, gradients, "output")),
            ]
        found += [
            ("first block's backward", self._at(waiting, gradients, "block", self.of.float8)),
            # All gradients but this block's are there.
            ("last block's backward", self._at(returned, all_gradients, "block", self.of.float8)),
        ]
        if self.has_embedding:
            if pipeline:
                found.append(("embedding's backward in the pipeline", self._at(waiting, gradients, "embedding")))
            found.append(("embedding's backward", self._at(returned, all_gradients, "embedding")))
        if returned and pipeline:
            # All chunks, and what they are put together in.
            found.append(("outputs together", self._at(2 * returned, all_gradients, "loss")))
        found.append(("optimizer", self._at_update()))
        return tuple(Moment(name, parts) for name, parts in found)

    # -------------------------------------------------------------- what is kept for backward

    def keeps_what_arrives(self, stage: int) -> bool:
        """Whether the stage's first block keeps the very buffer that its input arrived in, which counts as communication's."""
        if self.program.data_policy != "plan":
            return False
        first = next(group for group in self.groups if group.stage == stage)
        as_it_is = self.sizes.kernels != "eager" or self.sizes.norm_kernel
        return first.fqn in self.blocks and (as_it_is or self.policies[first.checkpoint].mode != "none")

    def _around(self, group: Group) -> float:
        """Of embedding, norm or output, whatever their policy: a checkpoint of one keeps its input instead."""
        full = self.policies[group.checkpoint].mode == "full"
        match group.fqn:
            case "tok_embeddings":
                return 0.0 if full else total(embedding_saved(self.sizes))
            case "norm":
                return self.sizes.stream_bytes if full else total(final_norm_saved(self.sizes))
            case _:
                return self.sizes.stream_bytes if full else total(output_saved(self.sizes))

    def _loss(self) -> LossBytes:
        return loss_bytes(
            self.sizes,
            loss_kernels(self.plan, self.program),
            loss_parallel=self.plan.tensor_parallel.loss_parallel and self.plan.mesh.tp > 1,
            chunks=self.plan.loss.chunks,
            z_loss=self.plan.loss.z_loss > 0,
            logits_held=self.plan.mesh.pp > 1,
            copies=self.program.loss_copies,
            dtensor=self.program.dtensor_loss,
        )

    def _returned(self) -> float:
        """Logits that stay: of all microbatches, where the program has a pipeline return its outputs; float32 ones."""
        if self.plan.mesh.pp == 1:
            return 4.0 * self.sizes.tokens * self.sizes.vocab if self.program.wide_logits else 0.0
        if not self.program.returns_outputs:
            return 0.0
        return float(self.plan.pipeline.microbatches * self.sizes.tokens * self.sizes.vocab * self.sizes.itemsize)

    def _losses_waiting(self) -> int:
        """Microbatches whose loss is computed and waits for backward, beside the one at hand.

        None in most schedules, whose last stage runs backward as soon as it can; all others where forwards come first.
        """
        last = len(self.plan.pipeline.stages) - 1
        held = (point.until_input[point.stages.index(last)] for point in self.points if last in point.stages)
        return max(0, max(held, default=0) - 1)

    def _experts_worst(self, stages: list[int]) -> float:
        """What the busiest rank would hold more, if as many tokens as can be went to its experts."""
        worst = self.of.worst
        if worst <= self.sizes.imbalance:
            return 0.0
        crowded = replace(self.sizes, imbalance=worst)
        more, working = dict.fromkeys(stages, 0.0), 0.0
        for group in self.groups:
            if group.fqn in self.blocks and isinstance(self.blocks[group.fqn][1].feed_forward, Moe):
                number, block = self.blocks[group.fqn]
                policy = self.policies[group.checkpoint]
                saved, beside = self.of.priced(group.fqn, group.checkpoint)
                more[group.stage] += (total(block_saved(block, crowded, policy, number)) - saved) * group.count
                working = max(working, backward_working(block, crowded, policy, number) - beside)
        return peak_bytes(self.points, [Kept(until_weight=more[stage]) for stage in stages]) + working

    # -------------------------------------------------------------- what is held whatever happens

    @functools.cached_property
    def _sums(self) -> Numel:
        """Elements of all modules of this rank, before data parallelism shards them."""
        mine = [(self.elements[group.fqn], group.count) for group in self.groups]
        return Numel(
            all=sum(n.all * count for n, count in mine),
            experts=sum(n.experts * count for n, count in mine),
            muon=sum(n.muon * count for n, count in mine),
            muon_experts=sum(n.muon_experts * count for n, count in mine),
        )

    @functools.cached_property
    def _sharded(self) -> float:
        """Elements that the rank holds between steps as the plan says."""
        return self._over_ranks(self._sums.all, self._sums.experts)

    @property
    def _copied(self) -> int:
        """Elements of a tied weight's second copy on the rank that holds the first as well."""
        both = self.plan.model.tied and self.has_embedding and self.has_output and self.plan.mesh.pp > 1
        return self.elements["output"].all if both else 0

    def _over_ranks(self, numel: float, experts: float) -> float:
        """What FSDP leaves a rank of `numel` elements, of which `experts` are sharded over ranks of their own."""
        mesh = self.plan.mesh
        if self.plan.fsdp.strategy != "fsdp":
            return float(numel)
        return (numel - experts) / mesh.fsdp + experts / mesh.efsdp

    @functools.cached_property
    def _static(self) -> Parts:
        """Parameters and optimizer."""
        plan, program = self.plan, self.program
        if plan.fsdp.cpu_offload:
            return Parts()
        numel = self._sums
        weight = program.weight_bytes or BYTES[plan.dtype]
        moment = BYTES[plan.optimizer.state_dtype]
        match program.data_policy:
            case "plan":
                local_numel = self._sharded
                once = 0.0
                if plan.optimizer.name == "Muon":
                    once = self._over_ranks(numel.muon, numel.muon_experts)
                # Where one rank holds a tied weight twice, only the first stage's is trained.
                trained = local_numel - self._over_ranks(self._copied, 0)
                moments = 2 * moment * trained - once * moment
                if program.moment_bytes is not None:
                    moments = program.moment_bytes * trained
                return Parts(
                    parameters=weight * local_numel, optimizer=moments + program.main_weight_bytes * local_numel
                )
            case "zero1" | "zero2" | "ddp":
                whole = float(numel.all)
                states = program.main_weight_bytes + (
                    program.moment_bytes if program.moment_bytes is not None else 2 * moment
                )
                owned = whole if program.data_policy == "ddp" else self._owned
                return Parts(parameters=weight * whole, optimizer=states * owned)
            case _:
                assert_never(program.data_policy)

    @functools.cached_property
    def _owned(self) -> float:
        """Elements whose optimizer states a rank holds when these are spread over all ranks with the same weights."""
        numel, mesh = self._sums, self.plan.mesh
        return (numel.all - numel.experts) / (mesh.fsdp * mesh.dp_replicate) + numel.experts / (
            mesh.efsdp * mesh.dp_replicate
        )

    def _all_gradients(self) -> float:
        """Gradients at the end of backward, as the optimizer gets them."""
        if self.plan.fsdp.cpu_offload:
            return 0.0
        size = self.program.gradient_bytes or BYTES[self.plan.dtype]
        match self.program.data_policy:
            case "plan":
                return size * self._sharded
            case "zero2":
                return size * self._owned
            case "zero1" | "ddp":
                return float(size * self._sums.all)
            case _:
                assert_never(self.program.data_policy)

    def _gradients(self) -> float:
        """Gradients there are before the last backward: of earlier accumulation steps; buffers that live all the time."""
        if self.program.data_policy != "plan":
            return self._all_gradients()
        earlier = self.plan.batch.accumulation_steps > 1 and not self._whole_gradients()
        return self._all_gradients() if earlier else 0.0

    def _whole_gradients(self) -> bool:
        """Whether unreduced gradients stay until the last backward: deferred, or between microbatches of a pipeline."""
        plan = self.plan
        deferred = plan.fsdp.defer_gradient_sync and plan.batch.accumulation_steps > 1
        return self.program.data_policy == "plan" and (deferred or plan.mesh.pp > 1)

    # -------------------------------------------------------------- what FSDP gathers

    @functools.cached_property
    def _units(self) -> list[tuple[str, float, bool | int, int]]:
        """(names of its members, its bytes when gathered, whether resharded after forward, how many) of this rank's units."""
        shared: dict[int, tuple[str, float, bool | int, int]] = {}
        found = []
        for group in self.groups:
            place, reshard = self.of.resharded[group.fqn]
            nbytes = self._gathered_bytes(self.elements[group.fqn])
            if place >= _ALONE:
                found.append((group.fqn, nbytes, reshard, group.count))
            else:
                name, so_far = shared[place][:2] if place in shared else ("", 0.0)
                shared[place] = (f"{name} {group.fqn}", so_far + nbytes * group.count, reshard, 1)
        return [*found, *shared.values()]

    def _gathered_bytes(self, numel: Numel) -> float:
        size = BYTES[self.plan.fsdp.param_dtype]
        narrow = numel.float8 if self.plan.float8.enable_fsdp_float8_all_gather else 0
        return size * (numel.all - narrow) + narrow

    @functools.cached_property
    def _in_block(self) -> tuple[float, float]:
        """Gathered weights and so on, and communication's buffers, while a block runs backward."""
        return self._unsharded("block"), self._communication("block")

    def _unsharded(self, moment: str) -> float:
        """Gathered weights, unreduced gradients and the flat buffers of their collectives, bytes."""
        plan = self.plan
        if self.program.data_policy != "plan":
            return self._placeholders(moment)
        compute, reduce = BYTES[plan.fsdp.param_dtype], BYTES[plan.fsdp.reduce_dtype]
        numel_all = self._sums.all
        whole = float(reduce * numel_all) if self._whole_gradients() else 0.0
        alone = plan.mesh.fsdp == 1 and plan.fsdp.param_dtype == plan.dtype
        if plan.fsdp.strategy == "ddp" or alone:
            # Weights are used as they are, or each as a copy in the dtype computed in, which stays.
            copies = 0.0 if plan.fsdp.param_dtype == plan.dtype else float(compute * numel_all)
            largest = max((self.elements[group.fqn].all for group in self.groups), default=0)
            flat = largest * reduce if plan.mesh.dp_replicate > 1 and not whole else 0.0
            return copies + whole + flat
        units = self._units
        # A pipeline's schedule keeps weights gathered from its first backward on.
        stays = plan.mesh.pp > 1
        kept = sum(
            count * (size if stays or reshard is False else 0.0 if reshard is True else size / int(reshard))
            for _, size, reshard, count in units
        )
        ahead = max(1, plan.fsdp.prefetch_backward)
        freed: list[float] = []
        for _, size, reshard, count in units if not stays else ():
            freed += [size] * min(count, 1 + ahead) if reshard is not False else []
        freed.sort(reverse=True)
        member = {"loss": "none", "output": "output", "block": "layers.", "embedding": "tok_embeddings"}[moment]
        unit = max([size for names, size, _, _ in units if member in names], default=0.0)
        # In use, gathered ahead, and the flat buffer that the one ahead arrives in.
        in_flight = freed[:ahead] if moment in ("loss", "output") else freed[: 1 + ahead]
        gathered = kept + sum(in_flight) + (freed[0] if freed else 0.0)
        # Its gradient in the dtype computed in, and flat in that of the reduction.
        elements = unit / compute
        reducing = 0.0 if whole else elements * (compute + reduce)
        return gathered + whole + reducing

    def _placeholders(self, moment: str) -> float:
        """Gradients of weights that kernels add to a buffer are still handed to autograd, as tensors without meaning; programs
        without such kernels have true ones until they are added up.

        Transformer Engine keeps one for every shape of a block, Megatron's output projection makes one each time, and the
        embedding's gradient is a true one (transformer_engine.pytorch.module.base.get_dummy_wgrad; Megatron-LM,
        tensor_parallel/layers.py).
        """
        if self.program.backward_gradient_bytes:
            # One at a time is widened to be added, when backward is done: the embedding's is the largest.
            widened = 4.0 * self.elements["tok_embeddings"].all if moment == "embedding" else 0.0
            return self.program.backward_gradient_bytes * self._sums.all + widened if moment != "update" else 0.0
        if self.sizes.kernels != "fused":
            return 0.0
        numel = {group.fqn: self.elements[group.fqn].all for group in self.groups}
        found = max((n for fqn, n in numel.items() if fqn in self.blocks), default=0)
        if moment in ("output", "embedding"):
            found += numel.get("output" if moment == "output" else "tok_embeddings", 0)
        return float(found * self.sizes.itemsize)

    # -------------------------------------------------------------- what else

    def _communication(self, moment: str) -> float:
        """Buffers of pipeline transfers, and of context and expert parallelism while a block runs."""
        plan, sizes = self.plan, self.sizes
        found = 0.0
        if plan.mesh.pp > 1:
            count = len(plan.pipeline.stages)
            ends = sum((stage > 0) + (stage < count - 1) for stage in self.stages)
            # torch allocates what every microbatch will receive once for all; others take turns with two.
            waiting = plan.pipeline.microbatches if self.program.data_policy == "plan" else 2
            found += waiting * ends * sizes.stream_bytes
        if moment != "block":
            return found
        if plan.mesh.cp > 1:
            columns = [heads(run.block.attention, sizes) for run in plan.model.blocks]
            pair = 2 * sizes.tokens * max(c.keys for c in columns)
            match plan.context_parallel.method:
                case "allgather":  # float32 gradients of all keys and values
                    found += plan.mesh.cp * pair * (4 + sizes.itemsize)
                case "ring":  # a block in use and one on its way, their gradients in float32 too
                    found += 2 * pair * (sizes.itemsize + 4)
                case "alltoall":
                    found += 2 * (pair + sizes.tokens * max(c.queries for c in columns)) * sizes.itemsize
                case _:
                    assert_never(plan.context_parallel.method)
        if plan.mesh.ep > 1:
            for moe in _mixtures(plan.model)[:1]:
                found += (sizes.sent_rows(moe) + sizes.expert_rows(moe)) * sizes.dim * sizes.itemsize
        return found

    def _at(self, logits: float, gradients: float, moment: str, float8: float = 0.0) -> Parts:
        if moment == "block":
            unsharded, communication = self._in_block
        else:
            unsharded, communication = self._unsharded(moment), self._communication(moment)
        return Parts(
            parameters=self._static.parameters,
            gradients=gradients,
            optimizer=self._static.optimizer,
            unsharded=unsharded,
            logits=logits,
            float8=float8,
            communication=communication,
        )

    def _at_update(self) -> Parts:
        """The update's own memory counts as the optimizer's: one more moment at a time for foreach, none when fused."""
        plan = self.plan
        more = 0.0
        numel = self._sharded
        if self.program.data_policy == "plan" and not plan.fsdp.cpu_offload:
            if plan.optimizer.state_dtype != plan.dtype:
                more = 4.0 * 4 * min(numel, 1 << 25)
            elif plan.optimizer.implementation == "foreach":
                more = numel * BYTES[plan.optimizer.state_dtype]
        elif self.program.update_gradient_bytes:
            more = self.program.update_gradient_bytes * self._owned
        return Parts(
            parameters=self._static.parameters,
            gradients=self._all_gradients(),
            optimizer=self._static.optimizer + more,
            unsharded=0.0 if self.program.data_policy == "plan" else self._placeholders("update"),
            communication=self._communication("update"),
        )


def _gib(count: float) -> float:
    # Rounded to what is believed, so that bytes of a plan are the same on every machine.
    return round(count / GIB, 3)


def local_tokens(plan: Plan) -> int:
    """Tokens of one microbatch on one context rank."""
    return plan.batch.microbatch_size * plan.batch.seq_len // plan.mesh.cp


def block_activation_bytes(plan: Plan, block: Block, policy: CheckpointPolicy = KEEP_ALL) -> float:
    """Bytes that one block keeps for backward of one microbatch on one rank, with experts' loads balanced."""
    return total(block_saved(block, local(plan, TITAN, BALANCED), policy))
