"""Resolve a spec's `cluster` section against the hardware catalogue."""

from __future__ import annotations

from dataclasses import replace

from titan_planner.hardware import UnknownHardware, find_gpu, find_link, find_node
from titan_planner.ir.cluster import Cluster, Gpu, Link
from titan_planner.ir.errors import Complaint
from titan_planner.ir.request import ClusterSpec, GpuSpec, LinkSpec

_DEFAULT_GPUS_PER_NODE = 8


def resolve_cluster(spec: ClusterSpec) -> tuple[Cluster | None, list[Complaint]]:
    """The cluster, or None with the complaints that prevent it (addresses are the spec's)."""
    complaints: list[Complaint] = []

    def look_up(find, name, address):  # type: ignore[no-untyped-def]
        try:
            return find(name)
        except UnknownHardware as error:
            hint = (
                f"did you mean {' or '.join(f'`{s}`' for s in error.suggestions)}?"
                if error.suggestions
                else "`titan-plan hardware` lists what there is; numbers of your own are accepted too"
            )
            complaints.append(Complaint(f"no {error.kind} is called `{error.name}`", address, hint=hint))
            return None

    node = look_up(find_node, spec.node, "cluster.node") if spec.node is not None else None
    if spec.node is not None and node is None:
        return None, complaints
    gpu: Gpu | None
    if isinstance(spec.gpu, GpuSpec):
        gpu = look_up(find_gpu, spec.gpu.like, "cluster.gpu.like")
        if gpu is not None:
            changes = {
                key: getattr(spec.gpu, key)
                for key in ("name", "memory_gib", "memory_gb_per_s", "bf16_tflops", "fp8_tflops")
                if getattr(spec.gpu, key) is not None
            }
            gpu = replace(gpu, **changes, source=f"the spec's numbers, the others from {gpu.source}")
    else:
        name = spec.gpu if spec.gpu is not None else node.gpu
        gpu = look_up(find_gpu, name, "cluster.gpu")
    per_node = spec.gpus_per_node or (node.gpus_per_node if node is not None else _DEFAULT_GPUS_PER_NODE)

    def link(given: str | LinkSpec | None, default: str | None, address: str) -> Link | None:
        if isinstance(given, LinkSpec):
            base = look_up(find_link, given.link, f"{address}.link") if given.link is not None else None
            if given.link is not None and base is None:
                return None
            if base is None:
                assert given.gb_per_s is not None
                return Link(
                    name=f"{address.rsplit('.', 1)[1]}-custom",
                    gb_per_s=given.gb_per_s,
                    latency_us=given.latency_us if given.latency_us is not None else 10.0,
                    per_gpu=True if given.per_gpu is None else given.per_gpu,
                    source="the spec's numbers",
                )
            changes = {
                key: getattr(given, key)
                for key in ("gb_per_s", "latency_us", "per_gpu")
                if getattr(given, key) is not None
            }
            return replace(base, **changes)
        name = given if given is not None else default
        found: Link | None = look_up(find_link, name, address)
        return found

    intra = inter = None
    if gpu is not None:
        intra = link(spec.intra_node, node.intra_node if node is not None else gpu.intra_node_link, "cluster.intra_node")
        if spec.inter_node is None and node is None and spec.nodes > 1:
            complaints.append(
                Complaint(
                    f"{spec.nodes} nodes need a link between them, but `cluster.inter_node` is not given",
                    "cluster.inter_node",
                    hint="write `inter_node: ib-ndr-400`; `titan-plan hardware` lists links",
                )
            )
        else:
            default = node.inter_node if node is not None else gpu.intra_node_link
            inter = link(spec.inter_node, default, "cluster.inter_node")
    if gpu is None or intra is None or inter is None:
        return None, complaints
    return (
        Cluster(
            gpu=gpu,
            gpus_per_node=per_node,
            nodes=spec.nodes,
            intra_node=intra,
            inter_node=inter,
            price_per_gpu_hour=spec.price_per_gpu_hour,
        ),
        complaints,
    )
