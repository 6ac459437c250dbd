"""How close to its peaks each GPU of the catalogue comes in training: the cost model's fitted numbers.

`benchmarks/calibrate.py` fits them on published measurements (`fitted.py`), starting from `PRIORS`; a GPU without measurements
takes the numbers of the part it is closest to, and says so.
"""

from __future__ import annotations

from dataclasses import replace

from titan_planner.hardware.fitted import FITTED
from titan_planner.ir.cluster import Efficiency

PRIORS: dict[str, Efficiency] = {
    "a100-sxm-80gb": Efficiency(
        matmul=0.72,
        matmul_float8=0.72,
        attention=0.58,
        attention_backward=0.46,
        memory=0.87,
        intra_node=0.7,
        inter_node=0.85,
        overlap_slowdown=0.1,
        launch_us=7.0,
        source="prior: FlashAttention papers, torchao roofline notes, nccl-tests",
    ),
    "h100-sxm-80gb": Efficiency(
        matmul=0.65,
        matmul_float8=0.62,
        attention=0.4,
        attention_backward=0.32,
        memory=0.87,
        intra_node=0.75,
        inter_node=0.9,
        overlap_slowdown=0.1,
        launch_us=6.0,
        source="prior: FlashAttention papers, torchao roofline notes, nccl-tests",
    ),
    "h100-sxm-96gb-hbm2e": Efficiency(
        matmul=0.52,
        matmul_float8=0.48,
        attention=0.33,
        attention_backward=0.26,
        memory=0.87,
        intra_node=0.75,
        inter_node=0.9,
        overlap_slowdown=0.1,
        launch_us=6.0,
        source="prior: FlashAttention papers, torchao roofline notes, nccl-tests",
    ),
    "gb200-186gb": Efficiency(
        matmul=0.55,
        matmul_float8=0.52,
        attention=0.16,
        attention_backward=0.13,
        memory=0.87,
        intra_node=0.75,
        inter_node=0.85,
        overlap_slowdown=0.1,
        launch_us=5.0,
        source="prior: FlashAttention papers, torchao roofline notes, nccl-tests",
    ),
    "b200-180gb": Efficiency(
        matmul=0.46,
        matmul_float8=0.42,
        attention=0.16,
        attention_backward=0.13,
        memory=0.8,
        intra_node=0.75,
        inter_node=0.85,
        overlap_slowdown=0.1,
        launch_us=5.0,
        source="prior: FlashAttention papers, torchao roofline notes, nccl-tests",
    ),
    "mi300x-192gb": Efficiency(
        matmul=0.36,
        matmul_float8=0.26,
        attention=0.25,
        attention_backward=0.2,
        memory=0.75,
        intra_node=0.65,
        inter_node=0.85,
        overlap_slowdown=0.1,
        launch_us=6.0,
        source="prior: FlashAttention papers, torchao roofline notes, nccl-tests",
    ),
}
"""What is assumed of a GPU before any measurement: where a fit starts, and what it is pulled to."""

_CLOSEST: dict[str, str] = {
    "a100-sxm-40gb": "a100-sxm-80gb",
    "a100-pcie-80gb": "a100-sxm-80gb",
    "a800-sxm-80gb": "a100-sxm-80gb",
    "h100-pcie-80gb": "h100-sxm-80gb",
    "h100-nvl-94gb": "h100-sxm-80gb",
    "h800-sxm-80gb": "h100-sxm-80gb",
    "h200-sxm-141gb": "h100-sxm-80gb",
    "h20-96gb": "h100-sxm-80gb",
    "b300-288gb": "b200-180gb",
    "gb300-288gb": "gb200-186gb",
    "l40s-48gb": "h100-sxm-80gb",
    "rtx-4090-24gb": "h100-sxm-80gb",
    "mi325x-256gb": "mi300x-192gb",
    "cpu": "a100-sxm-80gb",
}


def efficiency(name: str) -> Efficiency:
    """The fitted numbers of the GPU called `name`, else those of the part it is closest to."""
    known = {**PRIORS, **FITTED}
    if name in known:
        return known[name]
    other = _CLOSEST[name]
    return replace(known[other], source=f"no measurements of its own: as {other}")
