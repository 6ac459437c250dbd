"""The collectives of one training step: which, on which ranks, how many bytes, how often, and what may hide them.

    for one in collectives(plan):
        seconds = one.count * collective_seconds(plan, one)        # titan_planner.cost.network

Counted, not estimated: `tests/contract/test_collectives.py` holds kinds, groups, bytes, dtypes and counts equal to what the
runtime issues. Every record is seen from one rank of a pipeline rank's group; collectives over one rank are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Literal, TypeAlias, assert_never

from titan_planner.cost.program import TITAN, Program
from titan_planner.ir.execution import CheckpointPolicy
from titan_planner.ir.fqn import matches, select
from titan_planner.ir.inventory import (
    LogicalAxis,
    Parameter,
    feed_forward_name,
    fsdp_dim,
    linear_modules,
    module_names,
    muon_parameters,
    parameters,
)
from titan_planner.ir.model import Block, Gqa, Mlp, Model, Moe, SwiGlu
from titan_planner.ir.parallel import SPLIT_BACKWARD_SCHEDULES, FsdpUnit, Mesh, ModuleSharding
from titan_planner.ir.plan import Layer, Plan
from titan_planner.schedules import Shape, Work, order_of, work_of
from titan_planner.sharding import TP_AXES, tp_dim

Axis: TypeAlias = Literal[
    "fsdp", "efsdp", "dp_replicate", "data", "tp", "kv_replica", "kv_shard", "cp", "ep", "etp", "pp", "tied"
]
"""Who takes part. fsdp: dp_shard x cp. efsdp: ranks with the same experts within dp_shard x cp x tp. data: dp_replicate x
dp_shard x cp, all that see different tokens. kv_replica: neighbours in tp that hold the same KV heads; kv_shard: those that
hold different ones. pp: all pipeline ranks for an all-reduce, two of them for a transfer. tied: the first and the last
pipeline rank."""

Kind: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring", "send", "recv"]
"""ring: every rank sends to the next one and receives from the one before."""

Phase: TypeAlias = Literal["forward", "recompute", "backward", "step"]
"""When it starts. recompute is within backward, for an op that forward has done before. step: once, around the update."""

Overlap: TypeAlias = Literal["forward", "backward", "attention", "matmul"]
"""What may run meanwhile: other units' forward or backward, attention on the block of keys at hand, split matmuls."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "uint8": 1}
"""Bytes of an element by torch's name of the dtype."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Equal collectives of one step on one rank. `nbytes` is the size of one message:

    - all_gather: the gathered result, `ranks` parts; reduce_scatter: the whole input that every rank brings;
    - all_reduce: the tensor; all_to_all: what a rank sends, its own part included; ring, send, recv: what moves.

    FSDP pads every parameter to a multiple of the ranks along the dim it shards, and the bytes are those with padding.
    """

    axis: Axis
    kind: Kind
    ranks: int
    nbytes: int
    dtype: str
    count: int
    """Times in one step on one rank, over all microbatches and all equal `modules`."""
    phase: Phase
    module: str
    """The first of the modules it belongs to (a block, an FSDP unit's first module, ...); `step` for the step itself."""
    modules: int
    """How many equal modules `count` adds up."""
    overlaps: Overlap | None
    """What it may hide behind; None where the rank waits for it."""
    exposed: int
    """How many of `count` have nothing to hide behind although others do: a first gather, a last reduction."""
    stage: int
    """Pipeline stage, 0 without a pipeline."""
    pp_rank: int
    copies: int = 1
    """Of an expert exchange: copies of each token among the bytes, of which a dispatcher (DeepEP, HybridEP) sends only one to
    each rank and over the network only one to each node. 1: all that is counted is sent."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends for one message, by the algorithm that sends least (ring); no latency in it.

        n ranks: all_gather and reduce_scatter B (n - 1)/n, all_reduce twice that, all_to_all B (n - 1)/n, others B
        (Thakur, Rabenseifner, Gropp 2005; Megatron-LM counts the same).
        """
        share = (self.ranks - 1) / self.ranks
        match self.kind:
            case "all_gather" | "reduce_scatter" | "all_to_all":
                return self.nbytes * share
            case "all_reduce":
                return 2 * self.nbytes * share
            case "ring" | "send":
                return float(self.nbytes)
            case "recv":
                return 0.0
            case _:
                assert_never(self.kind)


def collectives(plan: Plan, program: Program = TITAN) -> tuple[Collective, ...]:
    """All collectives of one optimizer step of `plan` run by `program`, pipeline rank by pipeline rank.

    Expert all-to-alls are those of evenly loaded experts; multiply by an imbalance where there is one. Recomputation under
    the policy `memory_budget` is the compiler's, which is taken to keep what was communicated. Of a program's data
    policies zero1 and zero2 take a unit's gradients or weights in one message each.
    """
    stages = tuple(layer.stage for layer in plan.layers)
    sizes = (plan.model, plan.mesh, plan.batch, plan.pipeline, plan.fsdp, plan.dtype, program)
    tensor, float8 = plan.tensor_parallel, plan.float8
    data = _Question((*sizes, stages, tensor.kv_replicas, float8), plan, program)
    inner = (
        plan.layers,
        plan.activation_checkpoint,
        tensor,
        plan.sharding,
        plan.context_parallel,
        plan.expert_parallel,
    )
    modules = _Question((*sizes, *inner, plan.loss), plan, program)
    once = _Question((*sizes, stages, tensor, float8, plan.optimizer.name), plan, program)
    found = (*_between_modules(modules), *_of_units(data), *_around_the_update(once))
    return tuple(sorted(found, key=lambda one: one.pp_rank))


@dataclass(frozen=True, slots=True)
class _Question:
    """A plan as one count depends on it: equal to another plan when all parts in `of` are, so that answers can be kept."""

    of: tuple[object, ...]
    plan: Plan = field(compare=False)
    program: Program = field(compare=False)


@lru_cache(maxsize=512)
def _between_modules(asked: _Question) -> tuple[Collective, ...]:
    step = Step(asked.plan, asked.program)
    parts = _parts(asked.plan.model, asked.plan.layers)
    return _sent([*transfers(step), *(one for part in parts for one in module_collectives(step, part))])


@lru_cache(maxsize=512)
def _of_units(asked: _Question) -> tuple[Collective, ...]:
    plan = asked.plan
    step = Step(plan, asked.program)
    in_float8 = plan.float8.converted if plan.float8.enable_fsdp_float8_all_gather else ()
    units = _stage_units(plan.model, _units_of(plan), plan.layers, in_float8)
    return _sent(one for unit in units for one in unit_collectives(step, unit))


@lru_cache(maxsize=512)
def _around_the_update(asked: _Question) -> tuple[Collective, ...]:
    return _sent(once_a_step(Step(asked.plan, asked.program)))


def _sent(found: Iterable[Collective]) -> tuple[Collective, ...]:
    return tuple(one for one in found if one.ranks > 1 and one.count > 0)


# ------------------------------------------------------------------ what all counts share


class Step:
    """Sizes that many records need, worked out once."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.plan, self.program = plan, program
        mesh, batch = plan.mesh, plan.batch
        # A microbatch is what one forward takes; without a pipeline that is a rank's whole local batch.
        self.microbatches = plan.pipeline.microbatches if mesh.pp > 1 else 1
        self.runs = batch.accumulation_steps * self.microbatches
        self.sequences = batch.microbatch_size if mesh.pp > 1 else batch.local_batch_size
        self.tokens = self.sequences * (batch.seq_len // mesh.cp)
        self.dtype = plan.fsdp.param_dtype
        self.width = BYTES[self.dtype]
        self.stream_bytes = self.tokens * plan.model.dim * self.width
        self.rank_of = {stage.index: stage.pp_rank for stage in plan.pipeline.stages}
        self.last_stage = len(plan.pipeline.stages) - 1
        self.moves: dict[str | int, tuple[list[_Move], list[_Move], list[_Move]]] = {}

    def record(
        self,
        axis: Axis,
        kind: Kind,
        nbytes: int,
        *,
        phase: Phase,
        stage: int,
        module: str,
        dtype: str | None = None,
        count: int | None = None,
        ranks: int | None = None,
        modules: int = 1,
        overlaps: Overlap | None = None,
        exposed: int = 0,
        pp_rank: int | None = None,
        copies: int = 1,
    ) -> Collective:
        """`count` is for all modules; without it, each has one in every run."""
        total = self.runs * modules if count is None else count
        return Collective(
            axis=axis,
            kind=kind,
            ranks=axis_ranks(self.plan, axis) if ranks is None else ranks,
            nbytes=nbytes,
            dtype=dtype or self.dtype,
            count=total,
            phase=phase,
            module=module,
            modules=modules,
            overlaps=overlaps,
            exposed=total if overlaps is None else exposed,
            stage=stage,
            pp_rank=self.rank_of[stage] if pp_rank is None else pp_rank,
            copies=copies,
        )


def axis_ranks(plan: Plan, axis: Axis) -> int:
    """How many ranks take part in a collective over the whole of `axis`."""
    mesh = plan.mesh
    match axis:
        case "fsdp":
            return mesh.fsdp
        case "efsdp":
            return mesh.efsdp
        case "data":
            return mesh.dp_replicate * mesh.fsdp
        case "kv_replica":
            return plan.tensor_parallel.kv_replicas
        case "kv_shard":
            return mesh.tp // plan.tensor_parallel.kv_replicas
        case "tied":
            first, last = plan.pipeline.stages[0].pp_rank, plan.pipeline.stages[-1].pp_rank
            return 1 if first == last else 2
        case "dp_replicate" | "tp" | "cp" | "ep" | "etp" | "pp":
            return mesh.degree(axis)
        case _:
            assert_never(axis)


def axis_stride(plan: Plan, axis: Axis) -> int:
    """Distance between neighbours of `axis` in global ranks; every group is such a progression of ranks.

    From the mesh order pp, dp_replicate, dp_shard, cp, tp, and for experts pp, dp_replicate, efsdp, ep, etp.
    """
    mesh = plan.mesh
    match axis:
        case "tp" | "kv_replica" | "etp":
            return 1
        case "kv_shard":
            return plan.tensor_parallel.kv_replicas
        case "fsdp" | "cp" | "data":
            return mesh.tp
        case "ep":
            return mesh.etp
        case "efsdp":
            return mesh.ep * mesh.etp
        case "dp_replicate":
            return mesh.fsdp * mesh.tp
        case "pp":
            return mesh.dp_replicate * mesh.fsdp * mesh.tp
        case "tied":
            first, last = plan.pipeline.stages[0].pp_rank, plan.pipeline.stages[-1].pp_rank
            return max(1, last - first) * mesh.dp_replicate * mesh.fsdp * mesh.tp
        case _:
            assert_never(axis)


# ------------------------------------------------------------------ equal modules


@dataclass(frozen=True, slots=True)
class ModulePart:
    """Equal top-level modules of one stage."""

    fqn: str  # of the first
    modules: int
    stage: int
    checkpoint: str
    block: Block | None
    weights: int  # parameters of one of them


@lru_cache(maxsize=256)
def _parts(model: Model, layers: tuple[Layer, ...]) -> tuple[ModulePart, ...]:
    blocks = list(model.layers())
    weights = Counter(_top(parameter.fqn) for parameter in parameters(model))
    found: dict[tuple[int, str, int], ModulePart] = {}
    for layer in layers:
        block = blocks[int(layer.fqn[7:])] if layer.fqn.startswith("layers.") else None
        # Blocks of a run are one object; other modules are each their own kind.
        key = (layer.stage, layer.checkpoint, id(block) if block else hash(layer.fqn))
        seen = found.get(key)
        found[key] = (
            ModulePart(layer.fqn, 1, layer.stage, layer.checkpoint, block, weights[layer.fqn])
            if seen is None
            else replace(seen, modules=seen.modules + 1)
        )
    return tuple(found.values())


Shapes: TypeAlias = tuple[tuple[tuple[int, ...], tuple[LogicalAxis, ...], bool], ...]
"""Parameters by (global shape, logical axes, whether the plan gathers it in Float8)."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Equal FSDP units (or DDP buckets) of one stage."""

    fqn: str  # of the first module of the first
    modules: int
    stage: int
    reshard: bool | int
    shapes: Shapes
    first: bool  # has the stage's first module
    last: bool


_WHOLE_BLOCKS = (FsdpUnit(modules=("layers.*",), reshard_after_forward=False),)


def _units_of(plan: Plan) -> tuple[FsdpUnit, ...]:
    # DDP reduces block by block, and everything else with the root.
    return _WHOLE_BLOCKS if plan.fsdp.strategy == "ddp" else plan.fsdp.units


@lru_cache(maxsize=64)
def _owners(model: Model, units: tuple[FsdpUnit, ...]) -> tuple[tuple[bool | int, tuple[tuple[str, str], ...]], ...]:
    """Per unit, root last: its reshard policy, and (parameter, top-level module) of what it gathers."""
    names = module_names(model)
    unit_of: dict[str, int] = {}
    reshards: list[bool | int] = []
    for unit in units:
        matched = [select(selector, names) for selector in unit.modules]
        groups = [(fqn,) for fqn in matched[0]] if len(matched) == 1 else [tuple(f for found in matched for f in found)]
        for group in groups:
            unit_of.update(dict.fromkeys(group, len(reshards)))
            reshards.append(unit.reshard_after_forward)
    root = len(reshards)
    owned: dict[int, list[tuple[str, str]]] = {}
    for parameter in parameters(model):
        owner, name = root, parameter.module
        while name:  # the innermost unit has it
            if name in unit_of:
                owner = unit_of[name]
                break
            name = name.rpartition(".")[0]
        owned.setdefault(owner, []).append((parameter.fqn, _top(parameter.fqn)))
    if model.tied:
        # A last stage without the embedding has a copy, in its own output projection.
        owned.setdefault(unit_of.get("output", root), []).append(("output.weight", "output"))
    # Torch keeps what is the root's own until backward.
    return tuple((reshards[n] if n < root else False, tuple(owned.get(n, ()))) for n in range(root + 1))


def _top(fqn: str) -> str:
    parts = fqn.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


@lru_cache(maxsize=64)
def _shapes_by_fqn(
    model: Model, in_float8: tuple[str, ...]
) -> dict[str, tuple[tuple[int, ...], tuple[LogicalAxis, ...], bool]]:
    """Of every parameter. Not to be changed: it is cached."""
    linears = linear_modules(model)
    chosen = {fqn for selector in in_float8 for fqn in select(selector, linears)}
    return {p.fqn: (p.shape, p.axes, p.module in chosen) for p in parameters(model)}


@lru_cache(maxsize=64)
def shapes_of_modules(model: Model, in_float8: tuple[str, ...]) -> dict[str, Shapes]:
    """Top-level module -> its parameters as `Unit` has them; a tied output has the copy that a stage of its own would hold.

    Equal ones are one object. Not to be changed: it is cached.
    """
    found: dict[str, list[tuple[tuple[int, ...], tuple[LogicalAxis, ...], bool]]] = {}
    shape_of = _shapes_by_fqn(model, in_float8)
    for fqn, shape in shape_of.items():
        found.setdefault(_top(fqn), []).append(shape)
    found.setdefault("output", [shape_of["tok_embeddings.weight"]])
    shared: dict[Shapes, Shapes] = {}
    return {top: shared.setdefault(tuple(shapes), tuple(shapes)) for top, shapes in found.items()}


@lru_cache(maxsize=256)
def _stage_units(
    model: Model, units: tuple[FsdpUnit, ...], layers: tuple[Layer, ...], in_float8: tuple[str, ...]
) -> tuple[Unit, ...]:
    stage_of = {layer.fqn: layer.stage for layer in layers}
    ends: dict[int, tuple[str, str]] = {}
    for layer in layers:
        ends[layer.stage] = (ends[layer.stage][0] if layer.stage in ends else layer.fqn, layer.fqn)
    shape_of = dict(_shapes_by_fqn(model, in_float8))
    copied = model.tied and stage_of["tok_embeddings"] != stage_of["output"]
    if copied:
        shape_of["output.weight"] = shape_of["tok_embeddings.weight"]
    found: dict[tuple[int, bool | int, Shapes], Unit] = {}
    for reshard, owned in _owners(model, units):
        here: dict[int, list[str]] = {}
        for fqn, top in owned:
            if fqn in shape_of:
                here.setdefault(stage_of[top], []).append(fqn)
        for stage, fqns in here.items():
            shapes = tuple(shape_of[fqn] for fqn in fqns)
            tops = {_top(fqn) for fqn in fqns}
            first, last = ends[stage][0] in tops, ends[stage][1] in tops
            key = (stage, reshard, shapes)
            seen = found.get(key)
            found[key] = (
                Unit(_top(fqns[0]), 1, stage, reshard, shapes, first, last)
                if seen is None
                else replace(seen, modules=seen.modules + 1, first=seen.first or first, last=seen.last or last)
            )
    return tuple(found.values())


# ------------------------------------------------------------------ data parallelism


@dataclass(frozen=True, slots=True)
class _Numel:
    """Elements of one unit on a tensor rank, padded for FSDP: of what is sharded over fsdp, and over efsdp."""

    dense: int
    experts: int
    in_float8: int  # of `dense`, those that are gathered in Float8
    weights_in_float8: int  # how many weights these are


@lru_cache(maxsize=4096)
def _numel(shapes: Shapes, mesh: Mesh, kv_replicas: int, apart: bool, shards: int, expert_shards: int) -> _Numel:
    """`apart`: experts are sharded over ranks of their own."""
    dense = experts = narrow = 0
    for shape, axes, in_float8 in shapes:
        expert = axes[0] == "experts"
        local = list(shape)
        if expert:
            local[0] //= mesh.ep
        for dim, axis in enumerate(axes):
            if axis in TP_AXES:
                parts = mesh.etp if expert else mesh.tp
                local[dim] //= parts // kv_replicas if axis == "kv_heads" else parts
                break
        ranks = expert_shards if expert and apart else shards
        dim = 1 if expert and local[0] % mesh.efsdp and local[1] % mesh.efsdp == 0 else 0
        local[dim] = -(-local[dim] // ranks) * ranks
        count = math.prod(local)
        if expert and apart:
            experts += count
        else:
            dense += count
            narrow += count if in_float8 else 0
    return _Numel(dense, experts, narrow, sum(in_float8 for _, _, in_float8 in shapes))


def experts_apart(plan: Plan) -> bool:
    """Whether experts are gathered and reduced over ranks of their own, apart from the rest of their unit."""
    return plan.mesh.ep * plan.mesh.tp > 1 and any(isinstance(run.block.feed_forward, Moe) for run in plan.model.blocks)


def unit_collectives(step: Step, unit: Unit) -> Iterator[Collective]:
    """Gathering of weights and reduction of gradients, by the program's data policy."""
    plan, mesh = step.plan, step.plan.mesh
    policy = step.program.data_policy
    sharded = plan.fsdp.strategy == "fsdp" and policy != "ddp"
    # Replication reduces a block in one message, experts and all.
    apart = experts_apart(plan) and (plan.fsdp.strategy == "fsdp" or policy != "plan")
    numel = _numel(
        unit.shapes,
        mesh,
        plan.tensor_parallel.kv_replicas,
        apart,
        mesh.fsdp if sharded else 1,
        mesh.efsdp if sharded else 1,
    )
    groups: list[tuple[Axis, int, int]] = [("fsdp", mesh.fsdp, numel.dense)]
    if numel.experts:
        groups.append(("efsdp", mesh.efsdp, numel.experts))
    for axis, shards, count in groups:
        if not count:
            continue
        match policy:
            case "plan":
                yield from _planned(step, unit, axis, shards, count, numel)
            case "zero1" | "zero2" | "ddp":
                yield from _whole_weights(step, unit, axis, shards, count)
            case _:
                assert_never(policy)


def _planned(step: Step, unit: Unit, axis: Axis, shards: int, numel: int, of_unit: _Numel) -> Iterator[Collective]:
    """FSDP2, HSDP and replication, as torch and the runtime do it."""
    plan, stage = step.plan, unit.stage
    forwards, backwards = _gathers(step, stage, unit.reshard)
    nbytes, dtype = numel * step.width, str(step.dtype)
    narrow = of_unit.in_float8 if axis == "fsdp" else 0
    if narrow:
        # Weights of several dtypes travel as bytes.
        nbytes, dtype = nbytes - narrow * (step.width - 1), "uint8"
    record = partial(step.record, stage=stage, module=unit.fqn, modules=unit.modules)
    if plan.fsdp.strategy == "fsdp":
        gathers: tuple[tuple[Literal["forward", "backward"], int, int, bool], ...] = (
            ("forward", forwards, shards, unit.first),
            ("backward", backwards, shards if isinstance(unit.reshard, bool) else unit.reshard, unit.last),
        )
        for phase, times, ranks, alone in gathers:
            yield record(
                axis, "all_gather", nbytes, dtype=dtype, ranks=ranks, phase=phase, overlaps=phase,
                count=unit.modules * times, exposed=times if alone else 0,
            )  # fmt: skip
            if narrow and not plan.float8.precompute_float8_dynamic_scale_for_fsdp:
                # Before a weight is cast and sent, all ranks agree on its largest element.
                yield record(
                    axis, "all_reduce", BYTES[plan.dtype], dtype=plan.dtype, ranks=shards, phase=phase, overlaps=phase,
                    count=unit.modules * of_unit.weights_in_float8 * times,
                )  # fmt: skip
    reductions = 1 if plan.fsdp.defer_gradient_sync else plan.batch.accumulation_steps
    # A pipeline reduces when the last backward of a stage is done; a rank's other stages may still compute.
    hidden = plan.mesh.pp == 1 or not _ends_last(step, stage)
    reduced = plan.fsdp.reduce_dtype
    reduce = partial(
        record, dtype=reduced, phase="backward", overlaps="backward" if hidden else None,
        count=unit.modules * reductions, exposed=reductions if unit.first else 0,
    )  # fmt: skip
    if plan.fsdp.strategy == "fsdp":
        yield reduce(axis, "reduce_scatter", numel * BYTES[reduced], ranks=shards)
        numel //= shards
    yield reduce("dp_replicate", "all_reduce", numel * BYTES[reduced])


def _ends_last(step: Step, stage: int) -> bool:
    """Whether `stage` is the one of its rank whose backward ends last: the first of them."""
    rank = step.rank_of[stage]
    return stage == min(s.index for s in step.plan.pipeline.stages if s.pp_rank == rank)


def _gathers(step: Step, stage: int, reshard: bool | int) -> tuple[int, int]:
    """How often a unit of `stage` is gathered in (forward, backward) in one step.

    Without a pipeline once a forward, and once a backward unless it is kept. A pipeline frees nothing after a backward
    before the end of its run, so that a forward finds it gathered when a backward came before, and a backward unless a
    forward did.
    """
    plan = step.plan
    accumulations = plan.batch.accumulation_steps
    if plan.mesh.pp == 1:
        return accumulations, 0 if reshard is False else accumulations
    # Runs of the schedule between two reductions, which leave all weights sharded.
    together = accumulations if plan.fsdp.defer_gradient_sync else 1
    if reshard is False:
        return accumulations // together, 0
    forwards, backwards = _gathers_of_order(work_of(plan.pipeline), stage, together)
    return forwards * (accumulations // together), backwards * (accumulations // together)


@lru_cache(maxsize=1024)
def _gathers_of_order(work: Work, stage: int, runs: int) -> tuple[int, int]:
    """(forward, backward) gathers of a unit of `stage` that is freed after forward, over `runs` runs without an end."""
    order = order_of(work)
    # The weights' half of a split backward needs activations and gradients, no weights.
    kinds = [action.kind for action in order.ranks[order.placement[stage]] if action.stage == stage]
    forwards = backwards = 0
    gathered = False
    for kind in [kind for kind in kinds if kind != "W"] * runs:
        if kind == "F":
            forwards += not gathered
            gathered = False
        else:
            backwards += not gathered
            gathered = True
    return forwards, backwards


def _whole_weights(step: Step, unit: Unit, axis: Axis, shards: int, numel: int) -> Iterator[Collective]:
    """Programs that hold weights whole: gradients reduced at the end of the step (zero2: of every microbatch) and, where
    the optimizer is sharded, weights gathered once before the next forward.

    Megatron-LM's distributed optimizer (docs/source/api-guide/dist_optimizer.md): reduce-scatter of gradients in their main
    dtype, all-gather of weights, buckets in the order of backward.
    """
    plan, program = step.plan, step.program
    gradients = {None: plan.fsdp.reduce_dtype, 2: "bfloat16", 4: "float32"}[program.gradient_bytes]
    weights = {None: plan.fsdp.param_dtype, 2: "bfloat16", 4: "float32"}[program.weight_bytes]
    reductions = step.runs if program.data_policy == "zero2" else 1
    record = partial(step.record, stage=unit.stage, module=unit.fqn, modules=unit.modules)
    reduce = partial(
        record, dtype=gradients, phase="backward", overlaps="backward" if program.overlap_gradients else None,
        count=unit.modules * reductions, exposed=reductions if unit.first else 0,
    )  # fmt: skip
    nbytes = numel * BYTES[gradients]
    if program.data_policy == "ddp":
        # One all-reduce over all ranks that hold the weight.
        yield reduce("data" if axis == "fsdp" else axis, "all_reduce", nbytes, ranks=shards * plan.mesh.dp_replicate)
        return
    yield reduce(axis, "reduce_scatter", nbytes, ranks=shards)
    yield reduce("dp_replicate", "all_reduce", nbytes // shards)
    yield record(
        axis, "all_gather", numel * BYTES[weights], dtype=weights, ranks=shards, phase="forward",
        overlaps="forward" if program.overlap_weights else None, count=unit.modules, exposed=1 if unit.first else 0,
    )  # fmt: skip


# ------------------------------------------------------------------ within modules: tensor, context, expert


@dataclass(frozen=True, slots=True)
class _Move:
    """One collective of one module in one microbatch."""

    axis: Axis
    kind: Kind
    nbytes: int
    dtype: str
    times: int = 1
    overlaps: Overlap | None = None
    tail: bool = False  # nothing after it in its module is kept for backward
    copies: int = 1


_OPS: dict[str, str] = {
    "all_gather": "_c10d_functional.all_gather_into_tensor.default",
    "reduce_scatter": "_c10d_functional.reduce_scatter_tensor.default",
    "all_reduce": "_c10d_functional.all_reduce.default",
    "all_to_all": "_c10d_functional.all_to_all_single.default",
    "ring": "_c10d_functional.all_to_all_single.default",
}


def module_collectives(step: Step, part: ModulePart) -> Iterator[Collective]:
    """What `part` sends between its ranks in forward, recomputation and backward."""
    plan = step.plan
    key = part.fqn if part.block is None else id(part.block)
    if key not in step.moves:  # equal blocks of other stages move the same
        step.moves[key] = _moves(step, part)
    forward, backward, again = step.moves[key]
    policy = plan.activation_checkpoint.policy(part.checkpoint)
    stops = plan.activation_checkpoint.early_stop and step.program.recompute == "needed"
    in_module, in_loss = recomputations(plan, part.stage, part.weights)
    phases: tuple[tuple[Phase, Sequence[_Move], int], ...] = (
        ("forward", forward, step.runs),
        ("recompute", again, in_loss),
        ("recompute", list(_recomputed(forward, policy, stops)), in_module),
        ("backward", backward, step.runs),
    )
    for phase, moves, runs in phases:
        for move in moves:
            yield step.record(
                move.axis, move.kind, move.nbytes, dtype=move.dtype, phase=phase, stage=part.stage, module=part.fqn,
                modules=part.modules, count=runs * part.modules * move.times, overlaps=move.overlaps,
                copies=move.copies,
            )  # fmt: skip


def recomputations(plan: Plan, stage: int, weights: int) -> tuple[int, int]:
    """How often in one step backward computes again: a checkpointed module of `weights` parameters, and the loss in chunks.

    Once a backward. But a pipeline that splits backwards runs one pass for the inputs of a stage and one for *each*
    weight (torch 2.13 `stage_backward_weight`; weights that meet in one operator share one), and a checkpointed module is
    computed again in every pass; the loss in chunks is one operator with one weight. A first stage has no gradients of
    inputs, so its halves are one pass. Equal to recordings for dense blocks; what routed experts share is not known.
    """
    accumulations = plan.batch.accumulation_steps
    if plan.mesh.pp == 1:
        return accumulations, accumulations
    work = work_of(plan.pipeline)
    if isinstance(work, Shape) and work.schedule not in SPLIT_BACKWARD_SCHEDULES:
        return (accumulations * work.microbatches,) * 2
    whole, inputs, later = _backwards(work, stage)
    if stage == 0:
        return (accumulations * (whole + later),) * 2
    return accumulations * (whole + inputs + weights * later), accumulations * (whole + inputs + later)


@lru_cache(maxsize=1024)
def _backwards(work: Work, stage: int) -> tuple[int, int, int]:
    """Whole backwards of a stage in one run of the schedule, those of inputs, and those of weights."""
    order = order_of(work)
    kinds = Counter(action.kind for action in order.ranks[order.placement[stage]] if action.stage == stage)
    return kinds["B"], kinds["I"], kinds["W"]


def _recomputed(forward: Iterable[_Move], policy: CheckpointPolicy | None, stops: bool) -> Iterator[_Move]:
    """Of a module's forward, what its policy repeats. Recomputation may stop when all that was kept is back (`stops`): what
    follows the module's last kept tensor, such as the sum that hands a block's result on, is then not repeated."""
    if policy is None or policy.mode in ("none", "memory_budget"):
        return
    for move in forward:
        if move.tail and stops:
            continue
        if policy.mode == "selective" and _OPS[move.kind] in policy.save_ops:
            continue
        yield move


def _moves(step: Step, part: ModulePart) -> tuple[list[_Move], list[_Move], list[_Move]]:
    """Forward, backward, and what is repeated whatever the policy says (the loss in chunks)."""
    forward: list[_Move] = []
    backward: list[_Move] = []
    again: list[_Move] = []
    plan = step.plan
    if part.block is None:
        leave: list[_Move] = []
        _around(step, part.fqn, forward, backward, leave)
        if part.fqn == "output":
            leave = _per_chunk(step, leave)
            loss = _loss(step)
            if _chunks(step) != [step.plan.batch.seq_len // step.plan.mesh.cp]:
                again = [*leave, *loss]
            else:
                # The loss is not the module's.
                loss = [replace(move, tail=True) for move in loss]
            forward += [*leave, *loss]
        else:
            forward += leave
        return forward, backward, again
    block = part.block
    _around(step, f"{part.fqn}.attention_norm", forward, backward, [])
    leave = []
    _around(step, f"{part.fqn}.attention", forward, backward, [])
    for name in ("wq", "wk", "wv"):
        _around(step, f"{part.fqn}.attention.{name}", forward, backward, [])
    _context(step, block, forward, backward)
    _around(step, f"{part.fqn}.attention.wo", forward, backward, leave)
    forward += [replace(move, tail=False) for move in leave]
    _around(step, f"{part.fqn}.ffn_norm", forward, backward, [])
    leave = []
    name = f"{part.fqn}.{feed_forward_name(block.feed_forward)}"
    match block.feed_forward:
        case SwiGlu() | Mlp():
            _around(step, name, forward, backward, [])
            _around(step, f"{name}.w2", forward, backward, leave)
        case Moe() as moe:
            _around(step, name, forward, backward, leave)
            _around(step, f"{name}.router.gate", forward, backward, [])
            if plan.mesh.ep > 1:
                _experts(step, moe, forward, backward)
            if plan.fsdp.strategy == "ddp" and experts_apart(plan):
                # What replicates knows dp_replicate alone, so that other ranks with the same experts sum by themselves.
                each = moe.num_experts // plan.mesh.ep * moe.hidden_dim // plan.mesh.etp * plan.model.dim
                backward.append(_Move("efsdp", "all_reduce", each * step.width, step.dtype, times=3))
        case _:
            assert_never(block.feed_forward)
    return [*forward, *leave], backward, again


def _around(step: Step, fqn: str, forward: list[_Move], backward: list[_Move], leave: list[_Move]) -> None:
    """The moves that the sharding row of the module `fqn` makes: on the way in, for its weight, on the way out.

    The way in is appended to `forward`, the way out to `leave`.
    """
    plan, full, size = step.plan, step.stream_bytes, step.plan.mesh.tp
    if size == 1:
        return
    row = tensor_row(plan.sharding, fqn)
    if row is None:
        return
    hidden: Overlap | None = "matmul" if plan.tensor_parallel.async_tp or step.program.overlap_tensor else None
    inside = tensor_row(plan.sharding, fqn.rpartition(".")[0]) is not None or ".shared_experts." in fqn

    def move(kind: Kind, nbytes: int = full, overlaps: Overlap | None = hidden, tail: bool = False) -> _Move:
        return _Move("tp", kind, nbytes, step.dtype, overlaps=overlaps, tail=tail)

    if row.weight in (None, "S(0)") and not inside and fqn != "tok_embeddings":
        match row.input, row.input_needed:
            case "S(1)", "R":
                forward.append(move("all_gather"))
                backward.append(move("reduce_scatter"))
            case "R", "R":
                backward.append(move("all_reduce"))
            case _:
                pass
    if row.weight == "R":
        weight = _weight_numel(plan.model, fqn) * step.width
        # A router sums always, a norm where each rank has worked on its part of the sequence.
        if len(_shape(plan.model, fqn)) == 2 or row.input_needed == "S(1)":
            backward.append(move("all_reduce", weight, None))
    if row.weight == "S(0)" and plan.tensor_parallel.kv_replicas > 1 and fqn.endswith((".wk", ".wv")):
        held = _weight_numel(plan.model, fqn) * plan.tensor_parallel.kv_replicas // size
        backward.append(_Move("kv_replica", "all_reduce", held * step.width, step.dtype))
    match row.output, row.output_needed:
        case "P", "R":
            leave.append(move("all_reduce", tail=True))
        case "P", "S(1)":
            leave.append(move("reduce_scatter", tail=True))
            backward.append(move("all_gather"))
        case "S(2)", "R":
            # Only logits are gathered.
            leave.append(move("all_gather", step.tokens * plan.model.vocab_size * step.width, None, tail=True))
        case _:
            pass


@lru_cache(maxsize=4096)
def tensor_row(sharding: tuple[ModuleSharding, ...], fqn: str) -> ModuleSharding | None:
    """The row of the axis tp that says how the module `fqn` is shared."""
    return next((row for row in sharding if row.axis == "tp" and matches(row.module, fqn)), None)


def _shape(model: Model, fqn: str) -> tuple[int, ...]:
    return _shapes_of(model)[fqn]


def _weight_numel(model: Model, fqn: str) -> int:
    return math.prod(_shape(model, fqn))


@lru_cache(maxsize=16)
def _shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    return {parameter.target: parameter.shape for parameter in parameters(model)}


def _chunks(step: Step) -> list[int]:
    """Lengths of the parts of the sequence that head and loss take one after the other.

    As torch.chunk cuts: equal parts rounded up, the last one shorter, and fewer when they are enough.
    """
    plan = step.plan
    length = plan.batch.seq_len // plan.mesh.cp
    if plan.loss.chunks == 1:
        return [length]
    each = -(-length // plan.loss.chunks)
    return [min(each, length - start) for start in range(0, length, each)]


def _per_chunk(step: Step, moves: list[_Move]) -> list[_Move]:
    lengths = _chunks(step)
    return [
        replace(move, nbytes=move.nbytes * length // sum(lengths), times=lengths.count(length))
        for move in moves
        for length in dict.fromkeys(lengths)
    ]


def _loss(step: Step) -> list[_Move]:
    """Cross-entropy on logits of which each rank has a part of the vocabulary: the peak, then two sums in one message."""
    plan = step.plan
    if plan.mesh.tp == 1 or not plan.tensor_parallel.loss_parallel:
        return []
    each = step.tokens * BYTES["float32"]
    return _per_chunk(
        step, [_Move("tp", "all_reduce", each, "float32"), _Move("tp", "all_reduce", 2 * each, "float32")]
    )


def _context(step: Step, block: Block, forward: list[_Move], backward: list[_Move]) -> None:
    """How keys and values of other ranks' parts of the sequence come to the queries (titan_runtime/attention)."""
    plan = step.plan
    cp, tp = plan.mesh.cp, plan.mesh.tp
    if cp == 1:
        return
    match block.attention:
        case Gqa(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim):
            queries = step.tokens * heads // tp * head_dim
            keys = step.tokens * kv_heads * plan.tensor_parallel.kv_replicas // tp * head_dim
        case _:
            assert_never(block.attention)
    # Gradients of keys and values are summed over ranks in float32.
    wide = BYTES["float32"]
    match plan.context_parallel.method:
        case "allgather":
            forward.append(_Move("cp", "all_gather", cp * 2 * keys * step.width, step.dtype))
            backward.append(_Move("cp", "reduce_scatter", cp * 2 * keys * wide, "float32"))
        case "ring":
            shift = _Move("cp", "ring", 2 * keys * step.width, step.dtype, times=cp - 1, overlaps="attention")
            forward.append(shift)
            backward.append(shift)
            # They end where they began: one step more.
            backward.append(_Move("cp", "ring", 2 * keys * wide, "float32", times=cp, overlaps="attention"))
        case "alltoall":
            for numel in (queries + 2 * keys, queries):
                move = _Move("cp", "all_to_all", numel * step.width, step.dtype)
                forward.append(move)
                backward.append(move)
        case _:
            assert_never(plan.context_parallel.method)


def expert_rows_sent(plan: Plan, moe: Moe, tokens: int) -> int:
    """Rows that one rank of evenly loaded experts sends in one dispatch, of its `tokens` of one microbatch.

    Tensor ranks with whole experts route a part of the tokens each; the first part is the largest.
    """
    mesh = plan.mesh
    mine = -(-tokens // mesh.tp) if mesh.tp > 1 and mesh.etp == 1 else tokens
    rows = mine * moe.top_k
    factor = plan.expert_parallel.capacity_factor
    if factor is None:
        return rows
    return min(rows, moe.num_experts * math.ceil(factor * rows / moe.num_experts))


def _experts(step: Step, moe: Moe, forward: list[_Move], backward: list[_Move]) -> None:
    """Counts first, then tokens to the ranks of their experts, and results back; gradients go the same ways.

    Between the ranks of etp nothing moves: they have the same tokens, and what each adds is summed on leaving the layer.
    """
    rows = expert_rows_sent(step.plan, moe, step.tokens)
    once = step.plan.expert_parallel.comm_backend != "standard"
    nbytes = rows * step.plan.model.dim * step.width
    exchange = _Move("ep", "all_to_all", nbytes, step.dtype, copies=moe.top_k if once else 1)
    forward.append(_Move("ep", "all_to_all", moe.num_experts * BYTES["int64"], "int64"))
    forward += [exchange, exchange]
    backward += [exchange, exchange]


# ------------------------------------------------------------------ pipeline transfers


def transfers(step: Step) -> Iterator[Collective]:
    """Activations to the next stage and gradients back, once a microbatch, where the two stages are on different ranks."""
    plan = step.plan
    if plan.mesh.pp == 1:
        return
    nbytes = step.stream_bytes
    if plan.mesh.tp > 1 and plan.tensor_parallel.sequence_parallel:
        nbytes //= plan.mesh.tp
    for stage in range(step.last_stage):
        if step.rank_of[stage] == step.rank_of[stage + 1]:
            continue
        for phase, sender, receiver in (("forward", stage, stage + 1), ("backward", stage + 1, stage)):
            for kind, at in (("send", sender), ("recv", receiver)):
                yield step.record(
                    "pp",
                    kind,  # type: ignore[arg-type]
                    nbytes,
                    ranks=2,
                    phase=phase,  # type: ignore[arg-type]
                    stage=at,
                    module=f"stage {min(stage, stage + 1)}-{stage + 1}",
                    overlaps=phase,  # type: ignore[arg-type]
                )


# ------------------------------------------------------------------ once a step


def once_a_step(step: Step) -> Iterator[Collective]:
    """Valid tokens, loss, gradient norm, loads of experts, tied weights, and what the optimizer gathers."""
    plan, mesh = step.plan, step.plan.mesh
    own = step.program.data_policy == "plan"
    shards = mesh.fsdp if plan.fsdp.strategy == "fsdp" and step.program.data_policy != "ddp" else 1
    model_has = [i for i, block in enumerate(plan.model.layers()) if isinstance(block.feed_forward, Moe)]
    for rank in range(mesh.pp):
        stages = [stage.index for stage in plan.pipeline.stages if stage.pp_rank == rank]

        def once(
            axis: Axis, kind: Kind, nbytes: int, dtype: str, count: int = 1, stage: int = stages[0], what: str = "step"
        ) -> Collective:
            return step.record(axis, kind, nbytes, dtype=dtype, count=count, phase="step", stage=stage, module=what)

        yield once("data", "all_reduce", 8, "int64")  # valid tokens
        yield once("data", "all_reduce", 4, "float32")  # loss
        yield once("pp", "all_reduce", 4, "float32")
        # The norm: one sum for every way in which gradients are spread, over every axis that spreads them.
        for axis in _norm_axes(plan, plan.fsdp.strategy == "fsdp" and step.program.data_policy != "ddp"):
            yield once(axis, "all_reduce", 8, "float64")
        yield once("pp", "all_reduce", 8, "float64")
        here = [i for i in model_has if plan.layers[i + 1].stage in stages]
        if model_has and own:
            counted = sum(_moe(plan.model, i).num_experts + 1 for i in here)
            if here:
                yield once("data", "all_reduce", counted * 8, "int64", what="moe")
                if mesh.tp > 1 and mesh.etp == 1:
                    yield once("tp", "all_reduce", counted * 8, "int64", what="moe")
            yield once("pp", "all_reduce", (len(model_has) + 1) * 8, "float64", what="moe")
        if plan.model.tied and mesh.pp > 1:
            ends = [stage for stage in (0, step.last_stage) if stage in stages]
            if ends:
                rows = plan.model.vocab_size // mesh.tp
                local = -(-rows // shards) * plan.model.dim
                yield once(
                    "tied", "all_reduce", local * BYTES[plan.dtype], plan.dtype, stage=ends[0], what="tok_embeddings"
                )
        if own and plan.float8.precompute_float8_dynamic_scale_for_fsdp:
            weights = _weights_in_float8(plan, stages)
            yield once(
                "fsdp", "all_reduce", weights * BYTES[plan.dtype], plan.dtype, 1 if weights else 0, what="float8"
            )
        if plan.optimizer.name == "Muon" and own:
            yield from _muon(step, stages, shards)


def _weights_in_float8(plan: Plan, stages: Sequence[int]) -> int:
    linears = linear_modules(plan.model)
    chosen = {fqn for selector in plan.float8.converted for fqn in select(selector, linears)}
    stage_of = {layer.fqn: layer.stage for layer in plan.layers}
    return sum(stage_of[_top(fqn)] in stages for fqn in chosen)


def _moe(model: Model, index: int) -> Moe:
    for number, block in enumerate(model.layers()):
        if number == index:
            assert isinstance(block.feed_forward, Moe)
            return block.feed_forward
    raise IndexError(index)


def _norm_axes(plan: Plan, sharded: bool) -> list[Axis]:
    """Axes of the norm's all-reduces, one entry for each."""
    dense: list[Axis] = ["fsdp"] if sharded else []
    found = list(dense)
    if plan.mesh.tp > 1:
        # Matrices are spread over tp too; norms' weights are not, and of KV heads there may be copies.
        found += [*dense, "tp"]
        if plan.tensor_parallel.kv_replicas > 1:
            found += [*dense, "kv_shard"]
    if experts_apart(plan):
        found += ["efsdp"] if sharded else []
        found += ["ep", "etp"]
    return found


def _muon(step: Step, stages: list[int], shards: int) -> Iterator[Collective]:
    """Newton-Schulz needs whole matrices: each rank gathers every momentum in float32, axis by axis.

    Stacked matrices of experts are taken one by one, so that ranks with whole experts gather nothing.
    """
    plan = step.plan
    stage_of = {layer.fqn: layer.stage for layer in plan.layers}
    chosen = muon_parameters(plan.model)
    counts: Counter[tuple[Axis, int, int, int]] = Counter()
    for parameter in parameters(plan.model):
        stage = stage_of[_top(parameter.fqn)]
        if parameter.fqn not in chosen or stage not in stages:
            continue
        cuts = _cuts(plan, parameter, shards)
        if parameter.is_expert and all(dim == 0 for _, ranks, dim in cuts if ranks > 1):
            continue
        shape = list(parameter.shape)
        for _, ranks, dim in cuts:
            shape[dim] = -(-shape[dim] // ranks)
        for axis, ranks, dim in _gathering_order(cuts):
            shape[dim] *= ranks
            counts[axis, ranks, math.prod(shape), stage] += 1
    for (axis, ranks, numel, stage), count in counts.items():
        yield step.record(
            axis, "all_gather", numel * 4, dtype="float32", count=count, phase="step", stage=stage, module="optimizer",
            ranks=ranks,
        )  # fmt: skip


_Cut: TypeAlias = tuple[Axis, int, int]
"""An axis, its ranks, and the dim of a weight that it cuts."""


def _cuts(plan: Plan, parameter: Parameter, shards: int) -> list[_Cut]:
    """What cuts a parameter between steps, outermost first; `shards` ranks of fsdp, 1 without FSDP."""
    mesh, replicas = plan.mesh, plan.tensor_parallel.kv_replicas
    inner = tp_dim(parameter)
    outer: Axis = "fsdp"
    found: list[_Cut] = []
    if parameter.is_expert and experts_apart(plan):
        outer, shards = "efsdp", mesh.efsdp
        found = [("ep", mesh.ep, 0)]
        found += [("etp", mesh.etp, inner)] if inner is not None else []
    elif inner is not None and not parameter.is_expert:
        kv = parameter.axes[inner] == "kv_heads" and replicas > 1
        found = [("kv_shard", mesh.tp // replicas, inner) if kv else ("tp", mesh.tp, inner)]
    return [(outer, shards, fsdp_dim(parameter, mesh)), *found] if plan.fsdp.strategy == "fsdp" else found


def _gathering_order(cuts: list[_Cut]) -> list[_Cut]:
    """DTensor undoes cuts from the inside out, but from the outside in where FSDP has cut a dim that an inner cut has, too:
    it cuts what a rank holds, so its parts lie within the other's (a strided shard, though FSDP be over one rank)."""
    strided = bool(cuts) and any(dim == cuts[0][2] and ranks > 1 for _, ranks, dim in cuts[1:])
    return [cut for cut in (cuts if strided else reversed(cuts)) if cut[1] > 1]
