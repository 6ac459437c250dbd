"""How close to its peaks each GPU of the catalogue comes in training: the cost model's fitted numbers.

`benchmarks/calibrate.py` fits and prints the rows of `_FITTED` on published measurements; a GPU without any takes the row
of the part it is closest to, and says so.
"""

from __future__ import annotations

from dataclasses import replace

from titan_planner.ir.cluster import Efficiency

_FITTED: dict[str, Efficiency] = {
    "a100-sxm-80gb": Efficiency(
        matmul=0.72,
        matmul_float8=0.72,
        attention=0.58,
        attention_backward=0.48,
        memory=0.85,
        intra_node=0.7,
        inter_node=0.8,
        overlap_slowdown=0.1,
        launch_us=7.0,
        source="prior",
    ),
    "h100-sxm-80gb": Efficiency(
        matmul=0.65,
        matmul_float8=0.58,
        attention=0.4,
        attention_backward=0.3,
        memory=0.85,
        intra_node=0.75,
        inter_node=0.85,
        overlap_slowdown=0.1,
        launch_us=6.0,
        source="prior",
    ),
    "h100-sxm-96gb-hbm2e": Efficiency(
        matmul=0.55,
        matmul_float8=0.45,
        attention=0.33,
        attention_backward=0.25,
        memory=0.85,
        intra_node=0.75,
        inter_node=0.85,
        overlap_slowdown=0.1,
        launch_us=6.0,
        source="prior",
    ),
    "gb200-186gb": Efficiency(
        matmul=0.55,
        matmul_float8=0.5,
        attention=0.17,
        attention_backward=0.14,
        memory=0.85,
        intra_node=0.75,
        inter_node=0.85,
        overlap_slowdown=0.1,
        launch_us=5.0,
        source="prior",
    ),
    "b200-180gb": Efficiency(
        matmul=0.46,
        matmul_float8=0.36,
        attention=0.17,
        attention_backward=0.14,
        memory=0.85,
        intra_node=0.75,
        inter_node=0.85,
        overlap_slowdown=0.1,
        launch_us=5.0,
        source="prior",
    ),
    "mi300x-192gb": Efficiency(
        matmul=0.42,
        matmul_float8=0.3,
        attention=0.25,
        attention_backward=0.18,
        memory=0.7,
        intra_node=0.65,
        inter_node=0.8,
        overlap_slowdown=0.1,
        launch_us=6.0,
        source="prior",
    ),
}

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
    if name in _FITTED:
        return _FITTED[name]
    other = _CLOSEST[name]
    return replace(_FITTED[other], source=f"no measurements of its own: as {other}")
