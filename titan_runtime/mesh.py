"""The plan's mesh as a DeviceMesh with named dims, and the sub-meshes that each technique asks for."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_planner.ir.parallel import AXES, Mesh


def build_mesh(mesh: Mesh, device: str) -> DeviceMesh:
    """All ranks as pp x dp_replicate x dp_shard x cp x tp; dims of degree 1 are there too, so code never asks whether.

    `device` is a torch device type. Collective: every rank calls it, with the world's size equal to the mesh's.
    """
    return init_device_mesh(device, tuple(mesh.degree(axis) for axis in AXES), mesh_dim_names=AXES)


def data_mesh(world: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    """The ranks that FSDP works over: 1-D dp_shard x cp, or 2-D with `dp_replicate` (HSDP) when there are replicas.

    Ranks that share a sequence need the same weights at the same time, so they shard them like ranks that do not.
    """
    if mesh.cp == 1:
        return world["dp_replicate", "dp_shard"] if mesh.dp_replicate > 1 else world["dp_shard"]
    # Flattened meshes have no place in their root by which to slice it, so the two are put side by side, as FSDP does.
    shards = world["dp_shard", "cp"]._flatten("fsdp")
    return DeviceMesh._concatenate([world["dp_replicate"], shards]) if mesh.dp_replicate > 1 else shards


def data_rank(mesh: Mesh, rank: int) -> int:
    """Which of the `mesh.dp` shares of every batch belongs to `rank`; ranks that share sequences have the same one."""
    at = mesh.coordinates(rank)
    return at["dp_replicate"] * mesh.dp_shard + at["dp_shard"]


def data_group(world: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that see different tokens of one global batch: replicas, shards and context together. Collective."""
    return world["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp").get_group()


def partial_mesh(world: DeviceMesh, mesh: Mesh, ranks: int) -> DeviceMesh:
    """The ranks of `data_mesh` as groups x `ranks` neighbours, among which weights stay sharded between uses. Collective.

    Made of the whole world, since every rank takes part in making every group: torch would make it of the ranks of a
    pipeline stage alone, and wait for the others for ever.
    """
    whole = world["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp")
    groups = mesh.dp_replicate * mesh.fsdp // ranks
    return whole._unflatten(0, (groups, ranks), (f"groups_of_{ranks}", f"in_groups_of_{ranks}"))


EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep", "etp")


def build_expert_mesh(mesh: Mesh, device: str) -> DeviceMesh:
    """The same ranks as experts see them: dp_shard x cp x tp cut anew into efsdp x ep x etp. Collective.

    Ranks with the same place on ep (and etp) hold the same experts, and FSDP shards those over efsdp. etp is innermost
    as tp is, so that the ranks of one tensor group stay together.
    """
    degrees = (mesh.pp, mesh.dp_replicate, mesh.efsdp, mesh.ep, mesh.etp)
    return init_device_mesh(device, degrees, mesh_dim_names=EXPERT_AXES)


def expert_data_mesh(experts: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    """The ranks that FSDP of experts works over, as `data_mesh` for everything else."""
    return experts["dp_replicate", "efsdp"] if mesh.dp_replicate > 1 else experts["efsdp"]
