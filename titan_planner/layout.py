"""Everything in a plan that follows from its mesh: the legal meshes, the batch cut, stages, FSDP units, placements."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from titan_planner.ir.capabilities import kv_replicas
from titan_planner.ir.cluster import Cluster
from titan_planner.ir.errors import Complaint, SpecError
from titan_planner.ir.inventory import top_level_modules
from titan_planner.ir.job import Batch
from titan_planner.ir.model import Model
from titan_planner.ir.numbers import divisors, listing
from titan_planner.ir.parallel import FsdpUnit, Mesh, ModuleSharding, Pipeline, Schedule, TensorParallel
from titan_planner.ir.plan import Layer, Plan
from titan_planner.ir.request import DEGREE_FIELDS, LimitsSpec, Request
from titan_planner.schedules import default_stages_per_rank, place_stages
from titan_planner.sharding import expert_rows, tensor_parallel_rows
from titan_planner.stages import layer_stages


def meshes(model: Model, cluster: Cluster, request: Request) -> Iterator[Mesh]:
    """Meshes that honour the pins and use every GPU, least model parallelism first; ties: less pp, then cp, then tp.

    Those that plainly divide nothing are left out, unless no other is left: their rules then say what is wrong.
    Raises `SpecError` when the pinned degrees cannot make up the number of GPUs.
    """
    pins = request.parallelism
    world = cluster.num_gpus
    degrees = {axis: getattr(pins, name) for axis, name in DEGREE_FIELDS.items()}
    replicates = pins.data_parallel_strategy == "ddp"
    if replicates:
        # DDP shards nothing: only dp_replicate can take the ranks that are left.
        degrees |= {axis: 1 for axis in ("dp_shard", "cp") if degrees[axis] == "auto"}
    fixed: dict[str, int] = {axis: degree for axis, degree in degrees.items() if isinstance(degree, int) and degree > 0}
    product = math.prod(fixed.values())
    free = [axis for axis in degrees if axis not in fixed]
    if world % product or (not free and product != world):
        raise SpecError(_product_complaint(free, fixed, product, world))
    rest = world // product
    # `-1` takes what is left; without one it is dp_shard, or dp_replicate where that is pinned or parameters are replicated.
    taker = next((axis for axis, degree in degrees.items() if degree == -1), None)
    taker = taker or next((axis for axis in ("dp_shard", "dp_replicate") if axis in free), None)
    # Replication is a choice about the network that the plain rule leaves at 1.
    choosable = [axis for axis in ("pp", "cp", "tp") if axis in free and axis != taker]
    options: list[dict[str, int]] = [{}]
    for axis in choosable:
        allowed = [d for d in divisors(rest) if axis != "tp" or tp_allowed(d, cluster, request)]
        options = [
            {**option, axis: degree}
            for option in options
            for degree in allowed
            if rest % (math.prod(option.values()) * degree) == 0
        ]
    found: list[tuple[int, dict[str, int]]] = []
    for option in options:
        used = math.prod(option.values())
        if taker is None and used != rest:
            continue
        chosen = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, **fixed, **option}
        if taker is not None:
            chosen[taker] = rest // used
        found.append((used, chosen))
    found.sort(key=lambda entry: (entry[0], entry[1]["pp"], entry[1]["cp"], entry[1]["tp"]))
    if not found:
        raise SpecError(_product_complaint(free, fixed, product, world))
    if taker == "tp":
        inside = [entry for entry in found if tp_allowed(entry[1]["tp"], cluster, request)]
        if not inside:
            raise SpecError(tuple(tp_limits(found[0][1]["tp"], cluster, request.limits)))
        found = inside
    # Clusters of 100,000 GPUs have thousands of meshes; looking closely at each would take minutes.
    plausible = [(used, chosen) for used, chosen in found if _plausible(chosen, model, request)]
    found = plausible or found[:1]
    ep, etp = pins.expert_parallel_degree, pins.expert_tensor_parallel_degree
    for _, chosen in found:
        yield Mesh(**chosen, ep=ep if isinstance(ep, int) else 1, etp=etp if isinstance(etp, int) else 1)


def _plausible(degrees: dict[str, int], model: Model, request: Request) -> bool:
    """Whether stages have layers, heads divide over tp, the pinned ep the ranks, and the pinned batch the data ranks."""
    dp = degrees["dp_replicate"] * degrees["dp_shard"]
    if degrees["pp"] > model.num_layers:
        return False
    if any(run.block.attention.num_heads % degrees["tp"] for run in model.blocks):
        return False
    pins = request.parallelism
    ep, etp = pins.expert_parallel_degree, pins.expert_tensor_parallel_degree
    inner = (ep if isinstance(ep, int) else 1) * (etp if isinstance(etp, int) else 1)
    if degrees["dp_shard"] * degrees["cp"] * degrees["tp"] % inner:
        return False
    given, local = request.global_batch_size, request.local_batch_size
    share = dp * (local if isinstance(local, int) else 1)
    return not isinstance(given, int) or given < 1 or given % share == 0


def tp_allowed(degree: int, cluster: Cluster, request: Request) -> bool:
    """Whether the limits of the request let this many ranks share a matrix."""
    return next(tp_limits(degree, cluster, request.limits), None) is None


def tp_limits(tp: int, cluster: Cluster | None, limits: LimitsSpec) -> Iterator[Complaint]:
    """The limits of a spec that the tensor degree `tp` breaks."""
    at = "parallelism.tensor_parallel_degree"
    if cluster is not None and limits.keep_tp_in_node and cluster.gpus_per_node % tp and cluster.nodes > 1:
        yield Complaint(
            f"tp = {tp} spans nodes of {cluster.gpus_per_node} GPUs, which `limits.keep_tp_in_node` forbids",
            at,
            hint=f"use one of {listing(divisors(cluster.gpus_per_node))}, or set `limits: {{keep_tp_in_node: false}}`",
            rule="limit-tp",
        )
    if limits.max_tp is not None and tp > limits.max_tp:
        yield Complaint(
            f"tp = {tp} exceeds `limits.max_tp` {limits.max_tp}",
            at,
            hint=f"use at most {limits.max_tp}, or raise the limit",
            rule="limit-tp",
        )


def _product_complaint(free: list[str], fixed: dict[str, int], product: int, world: int) -> Complaint:
    shown = " x ".join(f"{DEGREE_FIELDS[axis]} {degree}" for axis, degree in fixed.items() if degree > 1) or "1"
    # A degree that does not divide the GPUs by itself is wrong whatever the others are.
    pinned = {a for a, n in fixed.items() if world % n} or {a for a, n in fixed.items() if n > 1} or fixed
    axis = next((a for a in ("dp_shard", "dp_replicate", "pp", "cp", "tp") if a in pinned), "dp_shard")
    others = product // fixed.get(axis, 1)
    if free:
        message = f"{shown} = {product} does not make up the cluster's {world} GPUs with the degrees that are left"
    else:
        message = f"{shown} = {product} ranks, but the cluster has {world} GPUs"
    if world % others == 0:
        hint = f"`{DEGREE_FIELDS[axis]}: {world // others}` makes {world}, and so does -1"
    else:
        hint = f"the other degrees make {others}, which must divide {world}: lower one of them"
    return Complaint(message, f"parallelism.{DEGREE_FIELDS[axis]}", hint=hint, rule="mesh-world")


@dataclass(frozen=True, slots=True)
class Layout:
    """The mesh-dependent part of a plan."""

    mesh: Mesh
    batch: Batch
    pipeline: Pipeline
    layers: tuple[Layer, ...]
    units: tuple[FsdpUnit, ...]
    tensor_parallel: TensorParallel
    sharding: tuple[ModuleSharding, ...]


def lay_out(
    model: Model,
    request: Request,
    seq_len: int,
    mesh: Mesh,
    *,
    schedule: Schedule | None = None,
    local_batch_size: int | None = None,
) -> Layout:
    """The plainest layout on `mesh` that honours the pins. It may break rules: `verify` tells.

    `schedule` and `local_batch_size` are used where the request leaves them `auto`; without them 1F1B, and as many
    sequences as the batch asks for. Raises `InfeasibleStages`.
    """
    chosen = _schedule(request, mesh, schedule)
    batch = _batch(request, mesh, seq_len, local_batch_size)
    stage_of = layer_stages(model, mesh.pp, default_stages_per_rank(chosen), chosen, request.parallelism)
    tensor = _tensor_parallel(model, request, mesh)
    return Layout(
        mesh=mesh,
        batch=batch,
        pipeline=Pipeline(
            schedule=chosen,
            stages=place_stages(chosen, mesh.pp, 1 + max(stage_of)),
            microbatches=max(1, batch.local_batch_size // batch.microbatch_size) if mesh.pp > 1 else 1,
            actions=request.parallelism.pipeline_parallel_schedule_actions,
        ),
        layers=tuple(
            Layer(fqn=fqn, stage=stage, checkpoint="none")
            for fqn, stage in zip(top_level_modules(model), stage_of, strict=True)
        ),
        units=() if request.parallelism.data_parallel_strategy == "ddp" else _units(model, request, mesh),
        tensor_parallel=tensor,
        sharding=(
            tensor_parallel_rows(model, sequence_parallel=tensor.sequence_parallel, loss_parallel=tensor.loss_parallel)
            if mesh.tp > 1
            else ()
        )
        + expert_rows(model, mesh),
    )


def remesh(plan: Plan, mesh: Mesh, *, schedule: Schedule | None = None, local_batch_size: int | None = None) -> Plan:
    """`plan` on another mesh, with what depends on the mesh laid out anew."""
    layout = lay_out(
        plan.model, plan.request, plan.batch.seq_len, mesh, schedule=schedule, local_batch_size=local_batch_size
    )
    return replace(
        plan,
        mesh=layout.mesh,
        batch=layout.batch,
        pipeline=layout.pipeline,
        layers=layout.layers,
        fsdp=replace(plan.fsdp, units=layout.units),
        expert_parallel=replace(plan.expert_parallel, comm_backend=comm_backend(plan.request, mesh)),
        tensor_parallel=layout.tensor_parallel,
        sharding=layout.sharding,
    )


def comm_backend(request: Request, mesh: Mesh) -> Literal["standard", "deepep", "hybridep"]:
    """The pinned token dispatch, unless the planner left experts on one rank: then nothing is sent."""
    pins = request.parallelism
    alone = mesh.ep == 1 and pins.expert_parallel_degree == "auto"
    return "standard" if alone else pins.expert_parallel_comm_backend


def _schedule(request: Request, mesh: Mesh, wanted: Schedule | None) -> Schedule | None:
    if mesh.pp == 1:
        return None
    pinned = request.parallelism.pipeline_parallel_schedule
    return pinned if pinned != "auto" else wanted or "1F1B"


def _batch(request: Request, mesh: Mesh, seq_len: int, wanted_local: int | None) -> Batch:
    """local x dp x accumulation = global; without pins one sequence a microbatch, and four microbatches a pipeline rank."""
    micro_pin = request.parallelism.pipeline_parallel_microbatch_size
    micro = micro_pin if isinstance(micro_pin, int) else 1
    pinned_local = request.local_batch_size if isinstance(request.local_batch_size, int) else wanted_local
    given = request.global_batch_size
    pinned_global = given if isinstance(given, int) and given > 0 else None
    if pinned_local is not None:
        local = pinned_local
    elif pinned_global is None:
        local = 4 * mesh.pp * micro if mesh.pp > 1 else 1
    else:
        # A pipeline wants many microbatches at once; without one, accumulation needs the least memory.
        local = max(1, pinned_global // mesh.dp) if mesh.pp > 1 else 1
    total = pinned_global if pinned_global is not None else local * mesh.dp
    return Batch(
        seq_len=seq_len,
        global_batch_size=total,
        local_batch_size=local,
        microbatch_size=micro if mesh.pp > 1 else local,
        # Rounded here; the rule batch-product says what would be whole.
        accumulation_steps=max(1, total // (local * mesh.dp)),
    )


def _units(model: Model, request: Request, mesh: Mesh) -> tuple[FsdpUnit, ...]:
    """Embedding, every block, and norm with output; TorchTitan's units. Tied weights must share a unit."""
    pin = request.parallelism.fsdp_reshard_after_forward
    # Under a pipeline every microbatch would gather again, so parameters stay gathered, as TorchTitan does by default.
    reshard: bool | int
    if isinstance(pin, int):
        reshard = pin
    else:
        reshard = pin == "always" or (pin != "never" and mesh.pp == 1)
    # The last unit is needed again at once when backward starts.
    return fsdp_units(model, reshard, reshard if pin == "always" or isinstance(pin, int) else False)


@functools.lru_cache(maxsize=64)
def fsdp_units(model: Model, reshard: bool | int, last: bool | int) -> tuple[FsdpUnit, ...]:
    """The units, with what blocks and what the one with the output does after forward."""
    if model.tied:
        return (
            FsdpUnit(modules=("layers.*",), reshard_after_forward=reshard),
            FsdpUnit(modules=("tok_embeddings", "norm", "output"), reshard_after_forward=last),
        )
    return (
        FsdpUnit(modules=("tok_embeddings",), reshard_after_forward=reshard),
        FsdpUnit(modules=("layers.*",), reshard_after_forward=reshard),
        FsdpUnit(modules=("norm", "output"), reshard_after_forward=last),
    )


def _tensor_parallel(model: Model, request: Request, mesh: Mesh) -> TensorParallel:
    pins = request.parallelism
    on = mesh.tp > 1
    return TensorParallel(
        sequence_parallel=on and pins.enable_sequence_parallel is not False,
        loss_parallel=on and not pins.disable_loss_parallel,
        async_tp=False,
        kv_replicas=kv_replicas(model, mesh.tp) if on and pins.kv_head_replication else 1,
    )
