"""The cost of a step as a sum of pieces: what one module of every kind adds to a stage, for one mesh, batch and schedule.

`cost/step.py` prices a plan layer by layer. A search asks for the same price under thousands of splits and policies, so here
every kind of block is priced once for each policy, and stages are sums over counts. The counts and formulas are those of
`titan_planner.cost`; tests hold both equal on random plans.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from titan_planner.cost.collectives import (
    Collective,
    ModulePart,
    Shapes,
    Step,
    Unit,
    module_collectives,
    once_a_step,
    recomputations,
    shapes_of_modules,
    transfers,
    unit_collectives,
)
from titan_planner.cost.communication import PassCommunication, StageCommunication, network_of, sort_into
from titan_planner.cost.compute import ModuleSeconds, block_seconds, embedding_seconds, head_seconds
from titan_planner.cost.network import Network, seconds
from titan_planner.cost.ops import expert_load, shape_of
from titan_planner.cost.program import TITAN
from titan_planner.cost.stage import converted_names, kernels_of, layer_blocks, loss_fusion, num_weights
from titan_planner.ir.execution import CheckpointPolicy
from titan_planner.ir.model import Block
from titan_planner.ir.plan import Plan

Counts: TypeAlias = Sequence[Sequence[int]]
"""Blocks of every kind under each of its policies."""

Vector: TypeAlias = tuple[float, float, float, float, float, float]
"""One pass of one module in seconds: computing, of it matmuls and attention; collectives waited for, beside matmuls, beside
attention."""

ZERO: Vector = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Piece:
    """One module, one microbatch."""

    forward: Vector
    backward: Vector
    weight: float  # of backward, gradients of weights


@dataclass(frozen=True, slots=True)
class DataPiece:
    """Gathering and reducing of one FSDP unit in one pass of one microbatch, in seconds.

    A unit that begins (`first`) or ends (`last`) its stage has collectives that nothing hides; of a step's, `once`.
    """

    waits: float = 0.0
    hidden: float = 0.0
    once: float = 0.0
    first: tuple[float, float] = (0.0, 0.0)  # of (hidden, once)
    last: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that cost the same under every policy that they may take."""

    block: Block
    converted: frozenset[str]  # linears in 8 bits, named below the block
    policies: tuple[CheckpointPolicy, ...]
    forced: tuple[frozenset[str], ...]  # of each policy, the linears that are always recomputed
    shapes: Shapes  # parameters, as FSDP's units count them
    fqn: str  # of the first


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """One microbatch on one stage, and the waiting that happens once a step."""

    forward: float
    backward: float
    weight: float
    once: float


def kinds_of(
    plan: Plan, menus: Sequence[tuple[CheckpointPolicy, ...]]
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The kinds of layers of `plan`, and the kind of every layer. `menus`: the policies that each layer may take."""
    converted = converted_names(plan.model, plan.float8.converted)
    none: frozenset[str] = frozenset()
    shapes = shapes_of_modules(plan.model, in_float8(plan))
    found: dict[tuple[object, ...], int] = {}
    kinds: list[LayerKind] = []
    order: list[int] = []
    forced: dict[int, list[dict[int, frozenset[str]]]] = {}
    for number, (block, menu) in enumerate(zip(layer_blocks(plan.model), menus, strict=True)):
        if id(menu) not in forced:
            forced[id(menu)] = [converted_names(plan.model, policy.force_recompute_fqns) for policy in menu]
        again = tuple(names.get(number, none) for names in forced[id(menu)])
        mine = converted.get(number, none)
        key = (id(block), id(menu), mine, again)
        if key not in found:
            fqn = f"layers.{number}"
            found[key] = len(kinds)
            kinds.append(LayerKind(block, mine, menu, again, shapes[fqn], fqn))
        order.append(found[key])
    return tuple(kinds), tuple(order)


def in_float8(plan: Plan) -> tuple[str, ...]:
    """Selectors of the linears that FSDP gathers in Float8."""
    return plan.float8.converted if plan.float8.enable_fsdp_float8_all_gather else ()


class _Hashed:
    """A key that knows its hash."""

    __slots__ = ("key", "known")

    def __init__(self, key: tuple[object, ...], known: int) -> None:
        self.key, self.known = key, known

    def __hash__(self) -> int:
        return self.known

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.known == other.known and self.key == other.key


class Pieces:
    """Prices of everything that `plan`'s stages can hold. `plan` needs no split and no policies of its own."""

    def __init__(self, plan: Plan, kinds: tuple[LayerKind, ...], cache: dict[tuple[object, ...], Piece]) -> None:
        """`plan` defines all policies of all kinds. `cache` is shared by the plans of one search."""
        self.plan, self.kinds = plan, kinds
        self.step = Step(plan, TITAN)
        self.network: Network = network_of(plan.cluster.gpu.efficiency)
        self.slowdown = plan.cluster.gpu.efficiency.overlap_slowdown
        self.overlap = TITAN.tensor_overlap
        self.shape = shape_of(plan, TITAN)
        self.kernels = kernels_of(plan, TITAN)
        self.imbalance = expert_load(plan)[1]
        self.runs = self.step.runs
        self._cache = cache
        self._in_float8 = in_float8(plan)
        mesh = plan.mesh
        inner = (
            self.shape, self.kernels, self.step.sequences, plan.batch.seq_len, mesh.cp, plan.tensor_parallel,
            plan.context_parallel, plan.expert_parallel, plan.fsdp.param_dtype, plan.loss.chunks, plan.float8.converted,
            plan.activation_checkpoint.early_stop, mesh.efsdp if plan.fsdp.strategy == "ddp" else 0,
        )  # fmt: skip
        # Hashed once: it is looked up for every module.
        self._inner_key = _Hashed(inner, hash(inner))
        self._blocks: dict[tuple[int, int, bool], Piece] = {}
        self._units: dict[tuple[object, ...], tuple[DataPiece, DataPiece]] = {}
        self.other_units = {ends: self._other_units(*ends) for ends in itertools.product((False, True), repeat=2)}

    # -------------------------------------------------------------- modules

    def block(self, kind: int, option: int, stage: int) -> Piece:
        """One block of the kind under its option'th policy; `stage` matters only where the schedule splits backward."""
        later = stage > 0 and self.plan.mesh.pp > 1
        key = (kind, option, later)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._block(self.kinds[kind], option, stage)
        return found

    def _block(self, kind: LayerKind, option: int, stage: int) -> Piece:
        plan, policy = self.plan, kind.policies[option]
        again = 1.0
        if policy.mode != "none" and plan.mesh.pp > 1:
            again = recomputations(plan, stage, num_weights(kind.block))[0] / self.runs
        key = (id(kind.block), kind.converted, policy, kind.forced[option], again, self._inner_key)
        found = self._cache.get(key)
        if found is None:
            took = block_seconds(
                kind.block, plan.model.dim, self.shape, policy, kind.converted, self.kernels, kind.forced[option]
            )
            took = replace(took, recompute=took.recompute * again)
            part = ModulePart(kind.fqn, 1, stage, policy.name, kind.block, num_weights(kind.block))
            found = self._cache[key] = self._piece(took, part)
        return found

    def _piece(self, took: ModuleSeconds, part: ModulePart) -> Piece:
        talk = self._talk(module_collectives(self.step, part))
        forward, backward = took.forward, took.backward
        return Piece(
            (
                forward.total, forward.matmul, forward.attention,
                sum(talk.forward.waits.values()), talk.forward.matmul, talk.forward.attention,
            ),
            (
                backward.total, backward.matmul, backward.attention,
                sum(talk.backward.waits.values()), talk.backward.matmul, talk.backward.attention,
            ),
            took.to_weight.total,
        )  # fmt: skip

    def _talk(self, found: Iterable[Collective]) -> StageCommunication:
        stage = StageCommunication()
        for one in found:
            if one.ranks > 1 and one.count > 0:
                sort_into(stage, one, seconds(self.plan, one, self.network), self.imbalance, self.runs)
        return stage

    @functools.cached_property
    def embedding(self) -> Piece:
        """Looking tokens up, and what tensor parallelism moves for it."""
        plan = self.plan
        took = embedding_seconds(plan.model.dim, plan.model.vocab_size // plan.mesh.tp, self.shape, self.kernels)
        return self._piece(took, ModulePart("tok_embeddings", 1, 0, "none", None, 1))

    @functools.cached_property
    def head(self) -> Piece:
        """Final norm, output projection and loss."""
        plan = self.plan
        vocab = plan.model.vocab_size // plan.mesh.tp
        local = vocab if plan.tensor_parallel.loss_parallel or plan.mesh.tp == 1 else plan.model.vocab_size
        precision = (
            self.kernels.precision if -1 in converted_names(plan.model, plan.float8.converted) else self.kernels.base
        )
        took = head_seconds(
            plan.model.dim, vocab, local, self.shape, plan.loss.chunks, precision, loss_fusion(plan), self.kernels
        )
        last = self.step.last_stage
        output = self._piece(took, ModulePart("output", 1, last, "none", None, 1))
        norm = self._piece(ModuleSeconds(), ModulePart("norm", 1, last, "none", None, 1))
        return Piece(
            add(output.forward, norm.forward), add(output.backward, norm.backward), output.weight + norm.weight
        )

    # -------------------------------------------------------------- data parallelism

    def unit(self, shapes: Shapes, reshard: bool | int, stage: int) -> tuple[DataPiece, DataPiece]:
        """(forward, backward) of one FSDP unit with these parameters."""
        # What a stage reduces is hidden unless its backward is the last of its rank; loops and Vs alike have those first.
        later = stage >= self.plan.mesh.pp
        # Under a pipeline, how often what is freed is gathered again depends on the stage.
        key = (shapes, reshard, stage if self.plan.mesh.pp > 1 and reshard is not False else later)
        found = self._units.get(key)
        if found is None:
            plain, first, last = (
                self._talk(unit_collectives(self.step, Unit("", 1, stage, reshard, shapes, begins, ends)))
                for begins, ends in ((False, False), (True, False), (False, True))
            )
            found = self._units[key] = (
                _data_piece(plain.forward, first.forward, last.forward),
                _data_piece(plain.backward, first.backward, last.backward),
            )
        return found

    @functools.cached_property
    def block_reshard(self) -> bool | int:
        """Of blocks' units; what replicates reduces block by block."""
        if self.plan.fsdp.strategy == "ddp":
            return False
        return next(u.reshard_after_forward for u in self.plan.fsdp.units if "layers.*" in u.modules)

    def _other_units(self, embedding: bool, head: bool) -> tuple[tuple[Shapes, bool | int, bool, bool], ...]:
        """Units beside blocks': (parameters, reshard, begins its stage, ends its stage) where the stage holds these ends."""
        plan, shapes = self.plan, shapes_of_modules(self.plan.model, self._in_float8)
        here = ("tok_embeddings",) * embedding + ("norm", "output") * head
        units = [u for u in plan.fsdp.units if "layers.*" not in u.modules] if plan.fsdp.strategy == "fsdp" else []
        groups = [(u.modules, u.reshard_after_forward) for u in units] or [
            (("tok_embeddings", "norm", "output"), False)
        ]
        found = []
        for modules, reshard in groups:
            mine = [module for module in modules if module in here]
            if plan.model.tied and "output" in mine and embedding:
                mine.remove("output")  # one weight for both, which comes with the embedding
            if mine:
                parameters = tuple(shape for module in mine for shape in shapes[module])
                found.append((parameters, reshard, "tok_embeddings" in mine, "output" in mine))
        return tuple(found)

    # -------------------------------------------------------------- stages

    def stage(self, stage: int, counts: Counts, ends: tuple[int, int], embedding: bool, head: bool) -> StageSeconds:
        """`counts[k][o]`: blocks of kind k under its option o. `ends`: kinds of the stage's first and last block."""
        forward = backward = ZERO
        weight = 0.0
        data = _Data(), _Data()
        for kind, options in enumerate(counts):
            total = sum(options)
            if not total:
                continue
            for option, count in enumerate(options):
                if count:
                    piece = self.block(kind, option, stage)
                    forward = add(forward, piece.forward, count)
                    backward = add(backward, piece.backward, count)
                    weight += piece.weight * count
            begins = not embedding and ends[0] == kind
            finishes = not head and ends[1] == kind
            for side, found in zip(self.unit(self.kinds[kind].shapes, self.block_reshard, stage), data, strict=True):
                found.add(side, total, begins, finishes)
        for piece, here in ((self.embedding, embedding), (self.head, head)):
            if here:
                forward, backward = add(forward, piece.forward), add(backward, piece.backward)
                weight += piece.weight
        for shapes, reshard, begins, finishes in self.other_units[embedding, head]:
            for side, found in zip(self.unit(shapes, reshard, stage), data, strict=True):
                found.add(side, 1, begins, finishes)
        waited = 0.0
        for vector, found in zip((forward, backward), data, strict=True):
            hides = min(found.once - found.once_ends, vector[0])
            waited += found.once - hides + self.slowdown * hides
        return StageSeconds(self._pass(forward, data[0]), self._pass(backward, data[1]), weight, waited)

    def _pass(self, vector: Vector, data: _Data) -> float:
        """As `cost/step.py` adds computing and collectives of one pass up."""
        compute, matmul, attention, waits, beside_matmul, beside_attention = vector
        tensor = min(beside_matmul * self.overlap, matmul)
        context = min(beside_attention, attention)
        hidden = min(data.hidden - data.hidden_ends, max(0.0, compute - tensor - context))
        begun = beside_matmul + beside_attention + data.hidden
        return compute + waits + data.waits + begun - (1 - self.slowdown) * (tensor + context + hidden)

    @functools.cached_property
    def transfer(self) -> float:
        """Seconds of one message between neighbours of the pipeline."""
        found = StageCommunication()
        for one in transfers(self.step):
            sort_into(found, one, seconds(self.plan, one, self.network), self.imbalance, self.runs)
            if found.transfer:
                break
        return found.transfer

    def step_waits(self, plan: Plan) -> tuple[float, ...]:
        """Collectives around the update, of each pipeline rank of `plan`, which is this one with its layers assigned."""
        found = [StageCommunication() for _ in plan.pipeline.stages]
        for one in once_a_step(Step(plan, TITAN)):
            if one.ranks > 1 and one.count > 0:
                sort_into(found[one.stage], one, seconds(plan, one, self.network), self.imbalance, self.runs)
        totals = [0.0] * plan.mesh.pp
        for stage in plan.pipeline.stages:
            totals[stage.pp_rank] += sum(found[stage.index].step.values())
        return tuple(totals)


class _Data:
    """What the units of one stage make of one pass."""

    __slots__ = ("hidden", "hidden_ends", "once", "once_ends", "waits")

    def __init__(self) -> None:
        self.waits = self.hidden = self.hidden_ends = self.once = self.once_ends = 0.0

    def add(self, piece: DataPiece, times: int, begins: bool, ends: bool) -> None:
        self.waits += piece.waits * times
        self.hidden += piece.hidden * times
        self.once += piece.once * times
        for share, applies in ((piece.first, begins), (piece.last, ends)):
            if applies:
                self.hidden_ends += share[0]
                self.once_ends += share[1]


def add(one: Vector, other: Vector, times: int = 1) -> Vector:
    """one + other x times."""
    return (
        one[0] + other[0] * times,
        one[1] + other[1] * times,
        one[2] + other[2] * times,
        one[3] + other[3] * times,
        one[4] + other[4] * times,
        one[5] + other[5] * times,
    )


def _data_piece(plain: PassCommunication, first: PassCommunication, last: PassCommunication) -> DataPiece:
    return DataPiece(
        sum(plain.waits.values()),
        plain.hidden,
        plain.once,
        (first.ends - plain.ends, first.once_ends - plain.once_ends),
        (last.ends - plain.ends, last.once_ends - plain.once_ends),
    )
