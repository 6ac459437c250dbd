"""Float8: the linears that the plan lists compute in 8 bits, and no others. Weights stay what they are, by the same names.

A converted linear casts its operands when it multiplies; its weight remains a high-precision parameter, so that FQNs,
initial values, the optimizer and checkpoints know nothing of it. Only with the Float8 all-gather is the parameter's
tensor of another type, which FSDP asks for what to send; `high_precision` sees through it.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_planner.ir.execution import Float8
from titan_planner.ir.fqn import select
from titan_planner.ir.inventory import expert_modules, linear_modules
from titan_planner.ir.plan import Plan
from titan_runtime.errors import RunError
from titan_runtime.modules.moe import GroupedExperts, GroupedProduct
from titan_runtime.modules.output import OutputProjection

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

SHARDING_DIMS = ("fsdp", "dp_shard")
"""What the mesh of a weight calls the ranks that FSDP shards it over; see `mesh.data_mesh`."""


def apply_float8(module: nn.Module, plan: Plan) -> None:
    """Convert in place the linears of `module` that the plan lists; `module` may hold some of the model's layers only.

    Raises RunError when torchao is missing, and when what was converted is not what the plan lists.
    """
    if plan.float8.recipe is None:
        return
    wanted = planned(module, plan)
    if plan.float8.recipe == "mxfp8":
        converted = _convert_mxfp8(module, wanted, "EMULATED" if plan.float8.emulate else "AUTO")
    else:
        converted = _convert_float8(module, wanted, float8_config(plan.float8))
    require_equal(wanted, converted)
    _convert_experts(module, plan)
    if "output" in wanted:
        # Logits come out as a view of the product; FSDP warns that they must not be changed in place, and no loss does.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)


def planned(module: nn.Module, plan: Plan) -> frozenset[str]:
    """The linears that the plan converts, as far as their layer is in `module`."""
    linears = linear_modules(plan.model)
    chosen = {fqn for selector in plan.float8.converted for fqn in select(selector, linears)}
    return frozenset(fqn for fqn in chosen if _has(module, _top_level(fqn)))


def require_equal(wanted: frozenset[str], converted: frozenset[str]) -> None:
    """RunError that names the difference when not exactly `wanted` is `converted`."""
    parts = [
        f"{word} {', '.join(f'`{fqn}`' for fqn in sorted(fqns)[:4])}{f' and {len(fqns) - 4} more' * (len(fqns) > 4)}"
        for word, fqns in (("lacks", wanted - converted), ("also has", converted - wanted))
        if fqns
    ]
    if parts:
        raise RunError(
            f"float8.converted lists {len(wanted)} linears of this rank, but the converted set {' and '.join(parts)}",
            hint="report this as a bug of Titan",
        )


def converted_linears(module: nn.Module) -> frozenset[str]:
    """FQNs of all linears of `module` that compute in 8 bits."""
    with _quiet_import():
        from torchao.float8.float8_linear import Float8Linear
    kinds = (Float8Linear, Mxfp8Linear)
    return frozenset(fqn for fqn, part in module.named_modules() if isinstance(part, kinds))


def float8_config(float8: Float8) -> Float8LinearConfig:
    """torchao's settings for the plan's. Raises RunError when torchao is missing."""
    from dataclasses import replace

    _require_torchao()
    with _quiet_import():
        from torchao.float8 import Float8LinearConfig
    assert float8.recipe is not None
    recipe = Float8LinearConfig.from_recipe_name(float8.recipe)
    return replace(recipe, emulate=float8.emulate, enable_fsdp_float8_all_gather=float8.enable_fsdp_float8_all_gather)


def after_update(module: nn.Module, plan: Plan) -> None:
    """To be called when the optimizer has changed the weights: all their scales in one reduction, where planned.

    Without it, every weight's scale is a reduction of its own just before the weight is gathered. Collective over the
    ranks that shard a weight. Under tensor parallelism each rank's part has a scale of its own, as it has without the
    all-gather; torchao's function would take one scale for all parts, and so round otherwise than the plan says.
    """
    if not plan.float8.precompute_float8_dynamic_scale_for_fsdp:
        return
    from torchao.float8.float8_utils import amax_to_scale

    sent = [p for p in module.parameters() if isinstance(p, DTensor) and hasattr(p.to_local(), "fsdp_pre_all_gather")]
    if not sent:  # a pipeline rank that holds no converted linear
        return
    wrapped = [parameter._local_tensor for parameter in sent]
    mesh = sent[0].device_mesh
    names = mesh.mesh_dim_names or ()
    largest = torch.stack(torch._foreach_norm([w._tensor.detach() for w in wrapped], ord=math.inf))
    largest = largest.to(mesh.device_type)
    # On every stage of a rank the weights are sharded over the same ranks.
    group = mesh.get_group(next(name for name in SHARDING_DIMS if name in names))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    for weight, scale in zip(wrapped, amax_to_scale(largest, wrapped[0]._dtype), strict=True):
        weight._precomputed_scale = scale


def high_precision(tensor: Tensor) -> Tensor:
    """`tensor` without the type that makes FSDP send it in Float8: the same memory, an ordinary (D)Tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    inner = getattr(local, "_tensor", None)
    if inner is None:
        return tensor
    if not isinstance(tensor, DTensor):
        return inner
    return DTensor.from_local(
        inner,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def float8_problems(plan: Plan, has_torchao: bool, capability: tuple[int, int] | None) -> list[str]:
    """Why this rank cannot compute as planned: sentences. `capability` is the CUDA device's, None on a CPU."""
    float8 = plan.float8
    if float8.recipe is None:
        return []
    if not has_torchao:
        return [NEEDS_TORCHAO]
    needed, name = ((10, 0), "MXFP8") if float8.recipe == "mxfp8" else ((8, 9), "Float8")
    if float8.emulate:
        return []
    if capability is None:
        return [f"the plan computes in {name}, which a CPU has not\n    try: use `float8: none`, or `emulate: true`"]
    if capability < needed:
        return [
            f"the plan computes in {name}, which needs a GPU of compute capability {needed[0]}.{needed[1]} or higher, "
            f"but this one has {capability[0]}.{capability[1]}\n    try: use `float8: none`, or `emulate: true`"
        ]
    return []


NEEDS_TORCHAO = (
    "the plan computes in Float8, but the package torchao is not installed\n"
    "    try: pip install 'titan-planner[runtime]', or use `float8: none`"
)


def _require_torchao() -> None:
    try:
        with _quiet_import():
            import torchao.float8  # noqa: F401
    except ImportError:
        raise RunError(
            NEEDS_TORCHAO.split("\n")[0], hint="pip install 'titan-planner[runtime]', or use `float8: none`"
        ) from None


def _convert_float8(module: nn.Module, wanted: frozenset[str], config: Float8LinearConfig) -> frozenset[str]:
    from torchao.float8 import convert_to_float8_training

    # The output projection can also take the loss in chunks, which torchao's linear cannot.
    convert_to_float8_training(module, module_filter_fn=lambda _, fqn: fqn in wanted and fqn != "output", config=config)
    if "output" in wanted:
        module.output = _float8_output().from_float(module.output, config)
    return converted_linears(module)


@functools.cache
def _float8_output() -> type[Any]:
    from torchao.float8.float8_linear import Float8Linear

    class Float8OutputProjection(OutputProjection, Float8Linear):  # type: ignore[misc]
        """The output projection, multiplying in Float8."""

        def __init__(self, *sizes: int, **options: Any) -> None:
            Float8Linear.__init__(self, *sizes, **options)

        def logits(self, x: Tensor) -> Tensor:
            return Float8Linear.forward(self, x)

    return Float8OutputProjection


class Mxfp8Linear(nn.Linear):
    """A linear without bias whose three products run in MXFP8, 32 elements a scale."""

    kernels: Any

    def forward(self, x: Tensor) -> Tensor:
        """x W^T."""
        from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
        from torchao.prototype.mx_formats.config import ScaleCalculationMode

        return _to_mxfp8_then_scaled_mm(x, self.weight, self.kernels, ScaleCalculationMode.RCEIL)


class Mxfp8OutputProjection(OutputProjection, Mxfp8Linear):
    """The output projection, multiplying in MXFP8."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias=bias)

    def logits(self, x: Tensor) -> Tensor:
        return Mxfp8Linear.forward(self, x)


def _convert_mxfp8(module: nn.Module, wanted: frozenset[str], kernels: str) -> frozenset[str]:
    _require_torchao()
    with _quiet_import():
        from torchao.quantization.quantize_.common import KernelPreference
    for fqn in wanted:
        part = module.get_submodule(fqn)
        if not isinstance(part, nn.Linear):
            continue  # the comparison with the plan names it
        with torch.device("meta"):
            kind = Mxfp8OutputProjection if fqn == "output" else Mxfp8Linear
            made = kind(part.in_features, part.out_features, bias=False)
        made.weight = part.weight
        made.kernels = KernelPreference[kernels]
        parent, _, name = fqn.rpartition(".")
        setattr(module.get_submodule(parent), name, made)
    return converted_linears(module)


def _convert_experts(module: nn.Module, plan: Plan) -> None:
    """Let the experts that the plan lists multiply in MXFP8, as far as they are in `module`."""
    modules = expert_modules(plan.model)
    for fqn in (fqn for selector in plan.float8.experts for fqn in select(selector, modules)):
        if _has(module, _top_level(fqn)):
            experts = module.get_submodule(fqn)
            assert isinstance(experts, GroupedExperts)
            experts.product = _mxfp8_product("EMULATED" if plan.float8.emulate else "AUTO")


@functools.cache
def _mxfp8_product(kernels: str) -> GroupedProduct:
    with _quiet_import():
        from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common import KernelPreference

    def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return _to_mxfp8_then_scaled_grouped_mm(
            x,
            weight.transpose(-2, -1),
            ends,
            out_dtype=x.dtype,
            kernel_preference=KernelPreference[kernels],
            scale_calculation_mode=ScaleCalculationMode.RCEIL,
            # How many rows an expert gets is up to the router; blocks of 32 of them share scales in backward.
            pad_token_groups_for_grouped_mm=True,
        )

    return product


def converted_experts(module: nn.Module) -> frozenset[str]:
    """FQNs of all stacked experts of `module` that compute in 8 bits."""
    return frozenset(
        fqn for fqn, part in module.named_modules() if isinstance(part, GroupedExperts) and part.product is not None
    )


def _top_level(fqn: str) -> str:
    return ".".join(fqn.split(".")[:2]) if fqn.startswith("layers.") else fqn.split(".")[0]


def _has(module: nn.Module, fqn: str) -> bool:
    try:
        return isinstance(module.get_submodule(fqn), nn.Module)
    except AttributeError:
        return False


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Keep what torchao 0.18 logs on being imported, and nothing else, from the terminal.

    It tries to load libraries built for other GPUs and Pythons, and registers an enum in a way that torch 2.13 finds old.
    """

    def wanted(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not (text.startswith("Failed to load ") or "register_constant() on Enum" in text)

    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(wanted)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(wanted)
