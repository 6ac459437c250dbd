"""Memory that no tensor of the model takes: the driver's context, communicators, workspaces. Every line with its provenance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from titan_planner.ir.plan import Plan

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class ReserveLine:
    """One entry of the reserve, in bytes."""

    name: str
    nbytes: float
    source: str


_CONTEXT = ReserveLine(
    "CUDA context and kernels",
    0.5 * GIB,
    "about 0.5 GiB a process: okoge-kaz's FSDP memory notes; not seen by the caching allocator",
)
_COMMUNICATOR_BYTES = 0.25 * GIB
_COMMUNICATOR_SOURCE = (
    "assumed: NCCL's buffers of 4 MiB a channel, protocol and peer (NCCL_BUFFSIZE) add up to 0.1 to 0.5 GiB a communicator; "
    "not seen by the caching allocator"
)


def reserve(plan: Plan) -> tuple[ReserveLine, ...]:
    """The lines for one rank of `plan`; none on a CPU, where host memory is not divided up like that."""
    backend = plan.cluster.gpu.backend
    match backend:
        case "gloo":
            return ()
        case "nccl":
            groups = communicators(plan)
            return (
                _CONTEXT,
                ReserveLine(
                    f"NCCL communicators: {', '.join(groups) or 'none'}",
                    len(groups) * _COMMUNICATOR_BYTES,
                    _COMMUNICATOR_SOURCE,
                ),
                ReserveLine(
                    "cuBLAS workspace",
                    workspace_bytes(plan),
                    "torch's getChosenWorkspaceSize: 32 MiB from compute capability 9.0 on, else 8.1 MiB; one a stream",
                ),
            )
        case _:
            assert_never(backend)


def communicators(plan: Plan) -> tuple[str, ...]:
    """Process groups that one rank talks in: all ranks, and one for every axis that has more than one rank and is not all."""
    mesh = plan.mesh
    world = mesh.world_size
    if world == 1:
        return ()
    sizes = {
        "pp": mesh.pp,
        "dp_replicate": mesh.dp_replicate,
        "fsdp": mesh.fsdp,
        "cp": mesh.cp,
        "tp": mesh.tp,
        "ep": mesh.ep,
        "efsdp": mesh.efsdp if mesh.ep > 1 else 1,
        "etp": mesh.etp,
    }
    return ("world", *(axis for axis, size in sizes.items() if 1 < size < world))


def workspace_bytes(plan: Plan) -> float:
    """cuBLAS's workspace of the computing stream."""
    capability = plan.cluster.gpu.compute_capability
    major = int(capability.split(".")[0]) if capability else 0
    return 32 * MIB if major >= 9 else 8.125 * MIB
