"""How close to its peaks each GPU of the catalogue comes in training: the cost model's fitted numbers.

`benchmarks/calibrate.py` fits and prints the rows of `_FITTED` on published measurements; a GPU without any takes the row
of the part it is closest to, and says so.
"""

from __future__ import annotations

from dataclasses import replace

from titan_planner.ir.cluster import Efficiency

_FITTED: dict[str, Efficiency] = {
    "a100-sxm-80gb": Efficiency(
        matmul=0.75,
        matmul_float8=0.75,
        attention=0.62,
        attention_backward=0.52,
        memory=0.85,
        intra_node=0.75,
        inter_node=0.80,
        overlap_slowdown=0.10,
        launch_us=7.0,
        source="prior",
    ),
    "h100-sxm-80gb": Efficiency(
        matmul=0.68,
        matmul_float8=0.55,
        attention=0.40,
        attention_backward=0.32,
        memory=0.85,
        intra_node=0.80,
        inter_node=0.80,
        overlap_slowdown=0.10,
        launch_us=6.0,
        source="prior",
    ),
    "gb200-186gb": Efficiency(
        matmul=0.68,
        matmul_float8=0.55,
        attention=0.40,
        attention_backward=0.32,
        memory=0.85,
        intra_node=0.80,
        inter_node=0.80,
        overlap_slowdown=0.10,
        launch_us=5.0,
        source="prior",
    ),
}

_CLOSEST: dict[str, str] = {
    "a100-sxm-40gb": "a100-sxm-80gb",
    "a100-pcie-80gb": "a100-sxm-80gb",
    "a800-sxm-80gb": "a100-sxm-80gb",
    "h100-sxm-96gb-hbm2e": "h100-sxm-80gb",
    "h100-pcie-80gb": "h100-sxm-80gb",
    "h100-nvl-94gb": "h100-sxm-80gb",
    "h800-sxm-80gb": "h100-sxm-80gb",
    "h200-sxm-141gb": "h100-sxm-80gb",
    "h20-96gb": "h100-sxm-80gb",
    "b200-180gb": "gb200-186gb",
    "b300-288gb": "gb200-186gb",
    "gb300-288gb": "gb200-186gb",
    "l40s-48gb": "h100-sxm-80gb",
    "rtx-4090-24gb": "h100-sxm-80gb",
    "mi300x-192gb": "h100-sxm-80gb",
    "mi325x-256gb": "h100-sxm-80gb",
    "cpu": "a100-sxm-80gb",
}


def efficiency(name: str) -> Efficiency:
    """The fitted numbers of the GPU called `name`, else those of the part it is closest to."""
    if name in _FITTED:
        return _FITTED[name]
    other = _CLOSEST[name]
    return replace(_FITTED[other], source=f"no measurements of its own: as {other}")
