"""Resolve a spec's `cluster` section against the hardware catalogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TypeVar

from titan_planner.hardware import UnknownHardware, find_gpu, find_link, find_node
from titan_planner.ir.cluster import Cluster, Efficiency, Gpu, Link
from titan_planner.ir.errors import Complaint
from titan_planner.ir.request import ClusterSpec, EfficiencySpec, GpuSpec, LinkSpec

T = TypeVar("T")

_DEFAULT_GPUS_PER_NODE = 8
_DEFAULT_LATENCY_US = 10.0


class _Catalogue:
    """Looks names up and keeps the complaints about those it does not know."""

    def __init__(self) -> None:
        self.complaints: list[Complaint] = []

    def find(self, look_up: Callable[[str], T], name: str, address: str) -> T | None:
        try:
            return look_up(name)
        except UnknownHardware as error:
            hint = (
                f"did you mean {' or '.join(f'`{s}`' for s in error.suggestions)}?"
                if error.suggestions
                else "`titan-plan hardware` lists what there is; numbers of your own are accepted too"
            )
            self.complaints.append(Complaint(f"no {error.kind} is called `{error.name}`", address, hint=hint))
            return None

    def gpu(self, given: str | GpuSpec) -> Gpu | None:
        if isinstance(given, str):
            return self.find(find_gpu, given, "cluster.gpu")
        base = self.find(find_gpu, given.like, "cluster.gpu.like")
        if base is None:
            return None
        numbers = ("name", "memory_gib", "memory_gb_per_s", "bf16_tflops", "fp8_tflops")
        changes = {key: getattr(given, key) for key in numbers if getattr(given, key) is not None}
        return replace(base, **changes, source=f"the spec's numbers; the others: {base.source}")

    def link(self, given: str | LinkSpec, address: str) -> Link | None:
        if isinstance(given, str):
            return self.find(find_link, given, address)
        if given.link is None:
            assert given.gb_per_s is not None  # LinkSpec checks that one of the two is given
            return Link(
                name="custom",
                gb_per_s=given.gb_per_s,
                latency_us=_DEFAULT_LATENCY_US if given.latency_us is None else given.latency_us,
                per_gpu=True if given.per_gpu is None else given.per_gpu,
                source="the spec's numbers",
            )
        base = self.find(find_link, given.link, f"{address}.link")
        if base is None:
            return None
        numbers = ("gb_per_s", "latency_us", "per_gpu")
        changes = {key: getattr(given, key) for key in numbers if getattr(given, key) is not None}
        return replace(base, **changes)


def _calibrated(known: Efficiency, given: EfficiencySpec) -> Efficiency:
    changes = {field.name: getattr(given, field.name) for field in fields(given)}
    changes = {name: value for name, value in changes.items() if value is not None}
    return replace(known, **{"source": "the spec's numbers", **changes})


def resolve_cluster(spec: ClusterSpec) -> tuple[Cluster | None, list[Complaint]]:
    """The cluster, or None with the complaints that prevent it (addresses are the spec's)."""
    catalogue = _Catalogue()
    node = catalogue.find(find_node, spec.node, "cluster.node") if spec.node is not None else None
    named = spec.gpu if spec.gpu is not None else node.gpu if node is not None else None
    gpu = catalogue.gpu(named) if named is not None else None
    if gpu is not None and spec.efficiency is not None:
        gpu = replace(gpu, efficiency=_calibrated(gpu.efficiency, spec.efficiency))
    intra_name = spec.intra_node or (node.intra_node if node else gpu.intra_node_link if gpu else None)
    intra = catalogue.link(intra_name, "cluster.intra_node") if intra_name is not None else None
    # A single node has no other to talk to: the inside link stands in.
    inter_name = spec.inter_node or (node.inter_node if node else intra_name if spec.nodes == 1 else None)
    inter = intra if inter_name is intra_name and intra is not None else None
    if inter is None and inter_name is not None:
        inter = catalogue.link(inter_name, "cluster.inter_node")
    if spec.nodes > 1 and inter_name is None and spec.node is None:
        catalogue.complaints.append(
            Complaint(
                f"{spec.nodes} nodes need a link between them, but `cluster.inter_node` is not given",
                "cluster.inter_node",
                hint="write `inter_node: ib-ndr-400`; `titan-plan hardware` lists links",
            )
        )
    if catalogue.complaints or gpu is None or intra is None or inter is None:
        return None, catalogue.complaints
    per_node = spec.gpus_per_node or (node.gpus_per_node if node is not None else _DEFAULT_GPUS_PER_NODE)
    cluster = Cluster(
        gpu=gpu,
        gpus_per_node=per_node,
        nodes=spec.nodes,
        intra_node=intra,
        inter_node=inter,
        price_per_gpu_hour=spec.price_per_gpu_hour,
    )
    return cluster, []
