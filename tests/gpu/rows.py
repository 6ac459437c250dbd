"""The rows of the GPU parity suite: the same plans that run on CPUs, made for CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests import plans
from tests.runtime.test_float8 import gathered, in_float8
from tests.runtime.test_parity import checkpointed
from titan_planner.ir.parallel import Mesh
from titan_planner.ir.plan import Plan

Change = Callable[[Plan], Plan]

EXACT = 2e-4
"""float32 on a GPU against float32 on a CPU: other kernels, other orders of summation, amplified over ten steps."""
BF16 = 2e-2
FLOAT8 = 4e-2


@dataclass(frozen=True)
class Row:
    """A plan for `world` GPUs, and how far its losses may be from one CPU process in float32 (relative)."""

    name: str
    plan: Plan
    tolerance: float

    @property
    def world(self) -> int:
        return self.plan.mesh.world_size


def gpu_plan(grid: Mesh, local: int, *changes: Change) -> Plan:
    """The parity suite's plan on GPUs."""
    plan = plans.tiny_plan(grid, local=local)
    machines = plans.cluster(grid.world_size, device="cuda")
    machines = replace(machines, gpu=replace(machines.gpu, float8=True))
    plan = replace(plan, cluster=machines, optimizer=replace(plan.optimizer, lr=3e-3, max_norm=0.3))
    for change in changes:
        plan = change(plan)
    return plan


def section(name: str, **fields: Any) -> Change:
    """Replace fields of one section of a plan."""
    return lambda plan: replace(plan, **{name: replace(getattr(plan, name), **fields)})


def recomputed(mode: str) -> Change:
    """Checkpoint the second block; what attention keeps is spelled as CUDA's kernels are."""

    def change(plan: Plan) -> Plan:
        plan = checkpointed(plan, mode)
        ops = ("aten.mm.default", *(f"aten._scaled_dot_product_{k}_attention.default" for k in ("flash", "efficient")))
        policies = tuple(
            replace(policy, save_ops=ops) if policy.save_ops else policy
            for policy in plan.activation_checkpoint.policies
        )
        return replace(plan, activation_checkpoint=replace(plan.activation_checkpoint, policies=policies))

    return change


def real_float8(recipe: str = "tensorwise", gather: bool = False) -> Change:
    """Float8 by the hardware's own kernels."""

    def change(plan: Plan) -> Plan:
        plan = gathered(plan, precomputed=True) if gather else in_float8(plan, recipe)
        return replace(plan, float8=replace(plan.float8, emulate=False))

    return change


ONE, TWO, FOUR = plans.mesh(1), plans.mesh(2), plans.mesh(4)
bf16 = section("fsdp", param_dtype="bfloat16")
compiled = section("compile", enable=True)

ROWS = (
    Row("float32", gpu_plan(ONE, 8), EXACT),
    Row("accumulating-8", gpu_plan(ONE, 1), EXACT),
    Row("chunks", gpu_plan(ONE, 4, section("loss", chunks=4)), EXACT),
    Row("recomputed-full", gpu_plan(ONE, 4, recomputed("full")), EXACT),
    Row("recomputed-selective", gpu_plan(ONE, 4, recomputed("selective-alternating")), EXACT),
    Row("offloaded", gpu_plan(ONE, 4, section("fsdp", cpu_offload=True)), EXACT),
    Row("foreach", gpu_plan(ONE, 8, section("optimizer", implementation="foreach")), EXACT),
    Row("compiled", gpu_plan(ONE, 4, compiled), EXACT),
    Row("bf16", gpu_plan(ONE, 4, bf16), BF16),
    Row(
        "bf16-moments",
        gpu_plan(ONE, 4, bf16, section("optimizer", state_dtype="bfloat16", implementation="foreach")),
        BF16,
    ),
    Row("bf16-compiled-recomputed", gpu_plan(ONE, 4, bf16, compiled, recomputed("selective")), BF16),
    Row("float8-tensorwise", gpu_plan(ONE, 4, bf16, real_float8()), FLOAT8),
    Row("float8-rowwise", gpu_plan(ONE, 4, bf16, real_float8("rowwise")), FLOAT8),
    Row("float8-rowwise-gw-hp", gpu_plan(ONE, 4, bf16, real_float8("rowwise_with_gw_hp")), FLOAT8),
    Row("float8-compiled", gpu_plan(ONE, 4, bf16, compiled, real_float8()), FLOAT8),
    Row("fsdp-2", gpu_plan(TWO, 4), EXACT),
    Row("fsdp-2-deferred", gpu_plan(TWO, 1, section("fsdp", defer_gradient_sync=True)), EXACT),
    Row("ddp-2", gpu_plan(plans.mesh(1, 2), 4, section("fsdp", strategy="ddp", units=())), EXACT),
    Row("offloaded-2", gpu_plan(TWO, 4, section("fsdp", cpu_offload=True)), EXACT),
    Row("compiled-2", gpu_plan(TWO, 4, bf16, compiled, recomputed("full")), BF16),
    Row("float8-gathered-2", gpu_plan(TWO, 4, bf16, compiled, real_float8(gather=True)), FLOAT8),
    Row("fsdp-4", gpu_plan(FOUR, 2), EXACT),
    Row("hsdp-2x2", gpu_plan(plans.mesh(2, 2), 1), EXACT),
)
