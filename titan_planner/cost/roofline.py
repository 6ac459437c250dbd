"""How long one op takes on one GPU: the larger of computing and moving bytes, both at fitted fractions of the peaks."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from titan_planner.cost.ops import ELEMENT_BYTES, Elementwise, Matmul, Mixing
from titan_planner.cost.program import Attention
from titan_planner.ir.cluster import Gpu

Precision: TypeAlias = Literal["float32", "bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]

_TILE = (128, 256)
"""Rows and columns of the output that one thread block computes (cuBLAS and CUTLASS on Ampere and later use 128 x 128 to
256 x 128 for large products). Tiles go to the GPU's units in waves, and the last wave is seldom full."""

_HALF_K = 96.0
"""Inner size at which prologue and epilogue of a tile take as long as its main loop."""

KERNEL_SECONDS = 2e-6
"""Start and end of one kernel on the device, which no other kernel of the same stream fills (torchao's roofline notes)."""


@dataclass(frozen=True, slots=True)
class Casts:
    """Bytes per element moved to make 8-bit operands, by what is cast (torchao roofline_utils: reads and writes of amax,
    scale and cast kernels; with the transposed copy where the recipe needs one)."""

    input: float
    weight: float
    gradient: float


CASTS: dict[tuple[Precision, bool], Casts] = {
    # (recipe, whether casts are fused into the kernels that make the values)
    ("tensorwise", False): Casts(6, 8, 6),
    ("rowwise", False): Casts(8, 10, 8),
    ("rowwise_with_gw_hp", False): Casts(3, 6, 8),
    ("mxfp8", False): Casts(6, 6, 6),
    ("tensorwise", True): Casts(3, 4, 4),
    ("rowwise", True): Casts(6, 8, 6),
    ("rowwise_with_gw_hp", True): Casts(3, 6, 6),
    ("mxfp8", True): Casts(4, 4, 6),
}


@functools.lru_cache(maxsize=65536)
def shape_efficiency(m: float, n: int, k: int, units: int, groups: int = 1) -> float:
    """Part of what a large matmul reaches that `groups` of [m, k] x [k, n] reach: the last wave of tiles, and short inner loops.

    Wave quantisation after NVIDIA's matrix multiplication guide: tiles / (waves x units). The smaller of both
    orientations of a tile counts, as a library would choose.
    """
    best = 0.0
    for rows, columns in (_TILE, _TILE[::-1], (128, 128)):
        tiles = groups * math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(tiles / units)
        filled = groups * m * n / (rows * columns) / (waves * units)
        # A smaller tile reuses its operands less.
        best = max(best, filled * (0.94 if rows == columns else 1.0))
    return min(1.0, best) * k / (k + _HALF_K)


_FLOAT32 = 1 / 15
"""Float32 outside of tensor cores over dense bf16: 67 of 989 TFLOP/s on an H100, 19.5 of 312 on an A100 (datasheets)."""

_RECIPE: dict[Precision, float] = {
    "float32": 1.0,
    "bf16": 1.0,
    "tensorwise": 1.0,
    "rowwise": 0.8,
    "rowwise_with_gw_hp": 0.8,
    "mxfp8": 0.95,
}
"""What products with finer scales reach over products with one scale a tensor: scales are applied within the main loop
(TorchTitan's published pairs: rowwise trains at 0.85 to 0.9 of tensorwise with casts of the same cost)."""


@functools.lru_cache(maxsize=65536)
def product_seconds(
    m: float, n: int, k: int, groups: int, precision: Precision, gpu: Gpu, output_bytes: int, float8: float = 1.0
) -> float:
    """Time of `groups` products of m rows in all; operands of 2 bytes (8-bit ones 1), results of `output_bytes`."""
    fit = gpu.efficiency
    if m <= 0:
        return 0.0
    if precision == "float32":
        # Without TF32, which torch leaves off; a CPU computes in it as in any other.
        slower = 1.0 if gpu.device == "cpu" else _FLOAT32
        peak, operand = gpu.bf16_tflops * 1e12 * fit.matmul * slower, 4
    elif precision == "bf16" or gpu.fp8_tflops is None:
        peak, operand = gpu.bf16_tflops * 1e12 * fit.matmul, 2
    else:
        peak, operand = gpu.fp8_tflops * 1e12 * fit.matmul_float8 * float8 * _RECIPE[precision], 1
    flops = 2.0 * m * n * k / (peak * shape_efficiency(m / groups, n, k, gpu.compute_units, groups))
    moved = operand * (m * k + groups * n * k) + output_bytes * m * n
    return max(flops, moved / memory_rate(gpu)) + KERNEL_SECONDS


def memory_rate(gpu: Gpu) -> float:
    """Bytes per second that memory-bound kernels reach."""
    return gpu.memory_gb_per_s * 1e9 * gpu.efficiency.memory


@dataclass(frozen=True, slots=True)
class MatmulSeconds:
    """One linear: its three products, and the casts of 8-bit operands."""

    forward: float
    input_gradient: float
    weight_gradient: float
    forward_casts: float
    backward_casts: float


@functools.lru_cache(maxsize=65536)
def matmul_seconds(
    op: Matmul, precision: Precision, gpu: Gpu, fused_casts: bool, gradient_bytes: int, float8: float = 1.0
) -> MatmulSeconds:
    """Forward, gradient of the input, gradient of the weight (accumulated in `gradient_bytes`), and casts."""
    if op.wide:
        # float32 on tensor cores (TF32) runs at half the bf16 rate; only routers, which are small.
        one = 2 * product_seconds(op.m, op.n, op.k, op.groups, "bf16", gpu, 4)
        return MatmulSeconds(one, one, one, 0.0, 0.0)
    weight_precision: Precision = "bf16" if precision == "rowwise_with_gw_hp" else precision
    forward = product_seconds(op.m, op.n, op.k, op.groups, precision, gpu, ELEMENT_BYTES, float8)
    to_input = product_seconds(op.m, op.k, op.n, op.groups, precision, gpu, ELEMENT_BYTES, float8)
    # Of a grouped product each group sums over its own rows.
    rows = op.m / op.groups
    to_weight = product_seconds(
        float(op.n * op.groups), op.k, max(1, round(rows)), op.groups, weight_precision, gpu, 2 * gradient_bytes, float8
    )
    if precision in ("float32", "bf16") or gpu.fp8_tflops is None:
        return MatmulSeconds(forward, to_input, to_weight, 0.0, 0.0)
    casts = CASTS[precision, fused_casts]
    rate = memory_rate(gpu)
    inputs, weights, outputs = op.m * op.k, float(op.groups * op.n * op.k), op.m * op.n
    return MatmulSeconds(
        forward,
        to_input,
        to_weight,
        (casts.input * inputs + casts.weight * weights) / rate,
        casts.gradient * outputs / rate,
    )


# What older and newer kernels reach over FlashAttention-2, forward and backward. FlashAttention-2
# paper, section 4: the first reaches 30 to 50 % of an A100's peak forward and 25 to 35 % backward, the second up to 73 %
# and 63 %, and 37 % of an H100's forward. FlashAttention-3 paper, figures 5 and 6: up to 75 % of an H100 forward. FlashAttention-2
# has no kernels of its own for Blackwell, which cuDNN has.
_GENERATION: dict[str, dict[str, tuple[float, float]]] = {
    "first": {"ampere": (0.65, 0.60), "hopper": (0.55, 0.50), "blackwell": (0.5, 0.5)},
    "second": {"ampere": (1.0, 1.0), "hopper": (1.0, 1.0), "blackwell": (1.0, 1.0)},
    "third": {"ampere": (1.0, 1.0), "hopper": (1.5, 1.5), "blackwell": (3.0, 3.0)},
}

_SCORE_BYTES = (14.0, 18.0)
"""Bytes moved per score that is kept in memory, forward and backward: written by the first product, read and written by the
scaled and masked softmax and by dropout with its mask, read by the second product (Korthikanti et al. 2022, section 4)."""


@functools.lru_cache(maxsize=16384)
def attention_seconds(
    op: Mixing, gpu: Gpu, generation: Attention = "second", wide: bool = False
) -> tuple[float, float]:
    """(forward, backward): backward computes the scores again and has five products for two (FlashAttention-2, sec. 3.1).

    Scores that are kept in memory are computed for masked pairs too, and not again. `wide`: in float32.
    """
    fit = gpu.efficiency
    peak = gpu.bf16_tflops * 1e12 * (_FLOAT32 if wide and gpu.device != "cpu" else 1.0)
    if generation == "materialised":
        products = 2 * op.flops / (peak * fit.matmul * op.qk_dim / (op.qk_dim + _HALF_K))
        scores = 2 * op.pairs * op.heads / memory_rate(gpu)
        return products + _SCORE_BYTES[0] * scores, 2 * products + _SCORE_BYTES[1] * scores
    factors = _GENERATION[generation][_architecture(gpu)]
    # Heads of 64 fill the tensor cores' pipeline half as long as those of 128 (FlashAttention-2, figures 4 to 6).
    narrow = min(1.0, 0.55 + 0.45 * op.qk_dim / 128)
    forward = op.flops / (peak * min(0.9, fit.attention * factors[0]) * narrow) + KERNEL_SECONDS
    backward = 2.5 * op.flops / (peak * min(0.9, fit.attention_backward * factors[1]) * narrow) + 3 * KERNEL_SECONDS
    return forward, backward


_TORCH_FLOAT8 = {"ampere": 1.0, "hopper": 0.8, "blackwell": 0.5}
"""What torch._scaled_mm reaches over Transformer Engine's 8-bit products: TorchTitan's and torchao's published runs beside
NVIDIA's of the same GPUs, which differ by this more in 8 bits than in 16."""


def float8_products(gpu: Gpu, told: float | None) -> float:
    """The part of the fitted 8-bit rate that a program's kernels reach; `told` None means torch's."""
    return _TORCH_FLOAT8[_architecture(gpu)] if told is None else told


def _architecture(gpu: Gpu) -> str:
    major = 8 if gpu.compute_capability is None else int(gpu.compute_capability.split(".")[0])
    return "blackwell" if major >= 10 else "hopper" if major == 9 else "ampere"


def elementwise_seconds(op: Elementwise, gpu: Gpu) -> tuple[float, float]:
    """(forward, backward)."""
    rate = memory_rate(gpu)
    return (
        op.forward_bytes / rate + op.forward_kernels * KERNEL_SECONDS,
        op.backward_bytes / rate + op.backward_kernels * KERNEL_SECONDS,
    )
