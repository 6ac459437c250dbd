"""A cluster's own file: the `cluster` section of a spec, with calibrated efficiencies, to be named by `extends`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import yaml

from titan_planner.ir.cluster import Cluster, Link

MARK = "# Written by `titan-plan calibrate`; it may be written again."
"""First line of such a file: what tells it from one that a person keeps."""


def cluster_file(cluster: Cluster) -> str:
    """YAML that lowers to `cluster` again; a spec uses it by `extends: FILE`."""
    gpu = cluster.gpu
    section: dict[str, Any] = {
        "gpu": {
            "like": gpu.name,
            "memory_gib": gpu.memory_gib,
            "memory_gb_per_s": gpu.memory_gb_per_s,
            "bf16_tflops": gpu.bf16_tflops,
            **({} if gpu.fp8_tflops is None else {"fp8_tflops": gpu.fp8_tflops}),
        },
        "gpus_per_node": cluster.gpus_per_node,
        "nodes": cluster.nodes,
        "intra_node": _link(cluster.intra_node),
        "inter_node": _link(cluster.inter_node),
        **({} if cluster.price_per_gpu_hour is None else {"price_per_gpu_hour": cluster.price_per_gpu_hour}),
        "efficiency": {field.name: getattr(gpu.efficiency, field.name) for field in fields(gpu.efficiency)},
    }
    return f"{MARK}\n" + yaml.safe_dump({"cluster": section}, sort_keys=False, allow_unicode=True)


def _link(link: Link) -> dict[str, Any]:
    return {"gb_per_s": link.gb_per_s, "latency_us": link.latency_us, "per_gpu": link.per_gpu}
