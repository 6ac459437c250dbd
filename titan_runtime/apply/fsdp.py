"""Fully sharded data parallelism: which modules are gathered together, when they are freed, and in which precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

# Not public yet, but what torch documents for experts: parameters of one unit over meshes of their own.
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from titan_planner.ir.fqn import select
from titan_planner.ir.inventory import fsdp_dim, module_names, parameters
from titan_planner.ir.parallel import Fsdp, FsdpUnit
from titan_planner.ir.plan import Plan
from titan_runtime.errors import RunError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def apply_fsdp(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    experts: DeviceMesh | None = None,
    partial: Mapping[int, DeviceMesh] = MappingProxyType({}),
) -> None:
    """Shard `module` in place over `mesh` (1-D, or 2-D for HSDP) in the plan's units; what is in none is the root's.

    Gradients come out as plain sums over ranks and accumulation steps: the loss is already divided by the number of
    valid tokens of the whole step. With expert parallelism experts are sharded over `experts`, the ranks that hold the
    same ones. Their gradients are whole sums too: each expert has seen the tokens of all ep ranks. `partial` has the mesh
    of every number of ranks that units reshard to, other than all; see `partial_sizes`.
    """
    fsdp = plan.fsdp
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[fsdp.param_dtype],
        reduce_dtype=DTYPES[fsdp.reduce_dtype],
        # Inputs are not cast: activations have param_dtype from the embedding on, and rotary tables must stay float32.
        cast_forward_inputs=False,
    )
    # Gradients, moments and the update live with the shards in host memory; a unit's weights visit the GPU when gathered.
    offload = CPUOffloadPolicy() if fsdp.cpu_offload else OffloadPolicy()
    placement = _placements(module, plan, experts)
    here = {name for name, _ in module.named_modules()}
    units = [
        (present, unit)
        for members, unit in resolve_units(fsdp, module_names(plan.model))
        # A pipeline stage lacks the modules of other stages.
        if (present := tuple(fqn for fqn in members if fqn in here))
    ]
    if plan.model.tied and {"tok_embeddings", "output"} <= here:
        _require_together(units, "tok_embeddings", "output")
    handles: dict[str, FSDPModule] = {}
    for members, unit in units:
        modules = [module.get_submodule(fqn) for fqn in members]
        reshard_after = unit.reshard_after_forward
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            mp_policy=precision,
            reshard_after_forward=reshard_after is not False,
            offload_policy=offload,
            shard_placement_fn=placement,
        )
        handles[members[0]] = cast(FSDPModule, modules[0])
        if reshard_after in partial:
            _reshard_to(handles[members[0]], partial[reshard_after], among=mesh)
    # The root's own parameters are needed again as soon as backward starts; torch keeps them gathered by default.
    fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload, shard_placement_fn=placement)
    sum_gradients(module)
    # In the order in which they run, not the one in which they were wrapped.
    _prefetch([handles[fqn] for fqn in module_names(plan.model) if fqn in handles], fsdp)


def partial_sizes(plan: Plan) -> tuple[int, ...]:
    """The numbers of ranks, fewer than all that shard, to which units of `plan` reshard; ascending."""
    asked = {unit.reshard_after_forward for unit in plan.fsdp.units}
    return tuple(sorted(n for n in asked if not isinstance(n, bool) and n != plan.mesh.fsdp))


def _reshard_to(unit: FSDPModule, mesh: DeviceMesh, among: DeviceMesh) -> None:
    """Let `unit` keep the weights that it shards over `among` sharded over the inner dim of `mesh` after forward.

    What `fully_shard` does with a number, but for the mesh, which it would make anew for every unit. Experts with ranks of
    their own reshard to all of those (rule experts-partial-reshard).
    """
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        if group.mesh_info.mesh != among:
            continue
        group.post_forward_mesh_info = info
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = info
            whole = torch.empty(parameter._orig_size, device="meta")
            parameter._init_sharded_post_forward_param_metadata(whole)


def _placements(
    module: nn.Module, plan: Plan, experts: DeviceMesh | None
) -> Callable[[nn.Parameter], Shard | ShardPlacementResult | None]:
    """Where each parameter goes when that is not dim 0 over the ranks of its unit.

    Experts of a block's unit are gathered and reduced with it, but over ranks of their own. (As a unit of their own
    inside of the block they would do that within a checkpointed region, which breaks selective checkpointing.)
    """
    own = None if experts is None else _mesh_info(experts)  # one object for all: torch tells ranks apart by it
    inventory = {parameter.fqn: parameter for parameter in parameters(plan.model)}
    found: dict[nn.Parameter, Shard | ShardPlacementResult] = {}
    for fqn, parameter in module.named_parameters():
        if fqn in inventory and inventory[fqn].is_expert:
            dim = Shard(fsdp_dim(inventory[fqn], plan.mesh))
            found[parameter] = dim if own is None else ShardPlacementResult(placement=dim, mesh_info=own)
    return found.get


def _mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def sum_gradients(module: nn.Module) -> None:
    """Let every unit of `module` sum gradients over ranks, where torch's default is to average them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # A factor makes FSDP ask for a pre-multiplied sum, which gloo lacks; a plain sum is what a factor of 1
            # means.
            part.set_force_sum_reduction_for_comms(True)


def resolve_units(fsdp: Fsdp, names: tuple[str, ...]) -> list[tuple[tuple[str, ...], FsdpUnit]]:
    """The units as (module FQNs, unit), inner ones first, since FSDP wraps from the leaves up; else in model order.

    One selector with `*` or a range makes a unit of each match; several selectors make one unit of all their modules.
    Raises RunError for a selector that names no module, and for a module in two units.
    """
    found: list[tuple[tuple[str, ...], FsdpUnit]] = []
    owner: dict[str, int] = {}
    for index, unit in enumerate(fsdp.units):
        matched = []
        for selector in unit.modules:
            fqns = select(selector, names)
            if not fqns:
                raise RunError(
                    f"fsdp.units[{index}]: the selector `{selector}` names no module of the model",
                    hint=f"top-level modules are {', '.join(f'`{n}`' for n in names if '.' not in n)} and `layers.N`",
                )
            matched.append(fqns)
        for fqn in (fqn for fqns in matched for fqn in fqns):
            if fqn in owner:
                raise RunError(
                    f"fsdp.units[{index}]: `{fqn}` is already in fsdp.units[{owner[fqn]}], and a module has one unit",
                    hint="remove it from one of them",
                )
            owner[fqn] = index
        if len(matched) == 1:
            found.extend(((fqn,), unit) for fqn in matched[0])
        else:
            found.append((tuple(fqn for fqns in matched for fqn in fqns), unit))
    order = {fqn: position for position, fqn in enumerate(names)}
    return sorted(found, key=lambda entry: (-entry[0][0].count("."), order[entry[0][0]]))


def _require_together(units: list[tuple[tuple[str, ...], FsdpUnit]], first: str, second: str) -> None:
    """Two modules that share a weight are gathered by one unit, or both by the root: a weight has one owner."""
    if any((first in members) != (second in members) for members, _ in units):
        raise RunError(
            f"fsdp.units: `{first}` and `{second}` share a weight (the model is tied), but are in different units",
            hint=f'make one unit of both: {{"modules": ["{first}", "{second}"], ...}}',
        )


def _prefetch(units: list[FSDPModule], fsdp: Fsdp) -> None:
    """Let each unit gather the next ones in the order of the model (forward) or against it (backward)."""
    for index, unit in enumerate(units):
        if fsdp.prefetch_forward:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + fsdp.prefetch_forward])
        if fsdp.prefetch_backward:
            before = units[max(0, index - fsdp.prefetch_backward) : index]
            unit.set_modules_to_backward_prefetch(before[::-1])


def reshard(module: nn.Module) -> None:
    """Free every gathered weight, also of units that keep theirs for a backward which will not come."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def set_last_microbatch(module: nn.Module, fsdp: Fsdp, last: bool) -> None:
    """Say before a forward whether it is the step's last: with deferred sync only then are gradients reduced."""
    if fsdp.defer_gradient_sync and isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
