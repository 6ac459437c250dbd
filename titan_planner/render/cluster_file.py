"""A cluster's own file: the `cluster` section of a spec, with calibrated efficiencies, to be named by `extends`."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import yaml

from titan_planner.hardware.gpus import GPUS
from titan_planner.hardware.links import LINKS
from titan_planner.ir.cluster import Cluster, Gpu, Link
from titan_planner.ir.errors import Complaint, PlanError

MARK = "# Written by `titan-plan calibrate`; it may be written again."
"""First line of such a file: what tells it from one that a person keeps."""

_GIVEN = ("memory_gib", "memory_gb_per_s", "bf16_tflops", "fp8_tflops")
"""Numbers of a GPU that a spec may give itself; all others come from the catalogue's GPU that it is `like`."""


def cluster_file(cluster: Cluster) -> str:
    """YAML that lowers to `cluster` again; a spec uses it by `extends: FILE`.

    Raises `PlanError` for a GPU that no catalogue GPU with other numbers is: a spec could not say it.
    """
    gpu = cluster.gpu
    section: dict[str, Any] = {
        "gpu": {
            "like": _base(gpu).name,
            "name": gpu.name,
            **{name: getattr(gpu, name) for name in _GIVEN if getattr(gpu, name) is not None},
        },
        "gpus_per_node": cluster.gpus_per_node,
        "nodes": cluster.nodes,
        "intra_node": _link(cluster.intra_node),
        "inter_node": _link(cluster.inter_node),
        **({} if cluster.price_per_gpu_hour is None else {"price_per_gpu_hour": cluster.price_per_gpu_hour}),
        "efficiency": {field.name: getattr(gpu.efficiency, field.name) for field in fields(gpu.efficiency)},
    }
    return f"{MARK}\n" + yaml.safe_dump({"cluster": section}, sort_keys=False, allow_unicode=True)


def _base(gpu: Gpu) -> Gpu:
    """The catalogue's GPU that has all of `gpu` but what a spec may give itself; of several the namesake, else the closest."""
    stated = {"name", "efficiency", "source", *_GIVEN}
    alike = [
        known
        for known in GPUS.values()
        if all(getattr(known, f.name) == getattr(gpu, f.name) for f in fields(gpu) if f.name not in stated)
        and (gpu.fp8_tflops is not None or known.fp8_tflops is None)
    ]
    if not alike:
        raise PlanError(
            Complaint(
                f"the plan's GPU {gpu.name} is none of the catalogue with other numbers, so that no spec can name it",
                "cluster.gpu",
                hint="compile the plan again: the catalogue has changed since, or the plan was edited",
            )
        )
    return min(alike, key=lambda known: (known.name != gpu.name, _distance(known, gpu)))


def _distance(one: Gpu, other: Gpu) -> float:
    pairs = [(getattr(one, name), getattr(other, name)) for name in _GIVEN]
    return sum(abs(math.log(a / b)) for a, b in pairs if a is not None and b is not None)


def _link(link: Link) -> dict[str, Any]:
    """The link with its catalogue name, where it has one: what switches can do follows from it."""
    named = {"link": link.name} if link.name in LINKS else {}
    return {**named, "gb_per_s": link.gb_per_s, "latency_us": link.latency_us, "per_gpu": link.per_gpu}
