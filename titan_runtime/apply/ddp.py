"""Replicated data parallelism: every rank holds the whole model, and gradients are summed over ranks."""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from titan_planner.ir.plan import Plan
from titan_runtime.apply.fsdp import DTYPES, sum_gradients


def apply_ddp(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Replicate `module` in place over the 1-D `mesh`. Gradients come out as sums, as with FSDP.

    Not DistributedDataParallel: this one keeps module names, parameters become replicated DTensors that checkpoints and
    the norm treat like any other, and precision is set as for FSDP. Each block's gradients are reduced while the block
    before it is still computing.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[plan.fsdp.param_dtype],
        reduce_dtype=DTYPES[plan.fsdp.reduce_dtype],
        cast_forward_inputs=False,
    )
    for block in module.get_submodule("layers").children():
        replicate(block, mesh=mesh, mp_policy=precision)
    replicate(module, mesh=mesh, mp_policy=precision)
    sum_gradients(module)
