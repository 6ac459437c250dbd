"""A row's free-text hardware as a `Cluster` of the planner's catalogue."""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.published.rows import NOT_PUBLISHED, Row, Unusable
from titan_planner.hardware import GPUS, LINKS, NODES, find_link
from titan_planner.ir.cluster import Cluster, Gpu, Link

# Where a row does not say how nodes are connected: one port a GPU of the rate that was customary for the generation, as in
# the vendor's own machine of the catalogue (DGX A100: HDR, DGX H100 and B200: NDR, DGX B300: XDR).
_DEFAULT_NETWORK = {
    "a100": "ib-hdr-200",
    "a800": "ib-hdr-200",
    "h100": "ib-ndr-400",
    "h800": "ib-ndr-400",
    "h200": "ib-ndr-400",
    "h20": "roce-400",
    "b200": "ib-ndr-400",
    "b300": "ib-xdr-800",
    "gb200": "ib-ndr-400",
    "gb300": "ib-xdr-800",
    "mi300x": "roce-400",
    "mi325x": "roce-400",
}
_EFA = {"a100": "efa-p4d", "h100": "efa-p5", "h200": "efa-p5en", "b200": "efa-p5en", "b300": "efa-p6-b300"}


def _family(gpu: str) -> str:
    return gpu.removeprefix("rtx-").split("-")[0]


_FAMILIES = {_family(name) for name in GPUS if name != "cpu"}


def find_published_gpu(text: str, memory_gb: float | None) -> Gpu:
    """The catalogue GPU that a free text means; variants of one chip are told apart by form factor and memory size."""
    words = re.findall(r"[a-z]+\d+[a-z]*|\d{4}", text.casefold())
    family = next((word for word in words if word in _FAMILIES), None)
    if family is None:
        raise Unusable("GPU not in the catalogue", text or "hardware.gpu")
    form = "pcie" if "pcie" in text.casefold() else "nvl" if re.search(r"\bnvl\b", text.casefold()) else ""
    variants = [gpu for name, gpu in GPUS.items() if _family(name) == family]
    suited = [g for g in variants if (form in g.name if form else not re.search(r"pcie|nvl", g.name))] or variants
    if memory_gb is None:
        printed = re.search(r"(\d{2,3})\s*gi?b", text.casefold())
        memory_gb = float(printed[1]) if printed else None
    if memory_gb is None:
        return suited[0]
    # Nominal sizes stand in the names; what the driver reports differs by the unit and by what is reserved.
    return min(suited, key=lambda gpu: abs(_nominal_gb(gpu) - memory_gb))


def _nominal_gb(gpu: Gpu) -> float:
    size = re.search(r"-(\d+)gb", gpu.name)
    return float(size[1]) if size else gpu.memory_gib


def cluster_of(row: Row, assume: list[str]) -> Cluster:
    """The row's machines. What had to be assumed is appended to `assume`."""
    text, fabric = row.text("hardware.gpu"), row.text("hardware.interconnect")
    if not text:
        raise Unusable(NOT_PUBLISHED, "hardware.gpu")
    gpu = find_published_gpu(text, row.positive("hardware.mem_gb"))
    bandwidth = row.positive("hardware.mem_bw_tb_s")
    if bandwidth is not None and abs(bandwidth * 1000 / gpu.memory_gb_per_s - 1) > 0.02:
        gpu = replace(gpu, memory_gb_per_s=bandwidth * 1000)
    (count,) = row.required("hardware.n_gpus")
    each = row.count("hardware.gpus_per_node") or 8
    if re.search(r"nvl ?\d+", f"{text} {fabric}".casefold()):
        # Collectives see the NVLink domain, not the hosts of 4: the largest equal share of it that makes up the job.
        domain = next(node.gpus_per_node for node in NODES.values() if node.gpus_per_node > 8)
        each = _largest_divisor(count, domain)
        if count > each:
            assume.append(f"{each} GPUs in one NVLink domain")
    elif count % each:
        shared = _largest_divisor(count, each)
        if count > each:
            assume.append(f"{count} GPUs on nodes of {each} taken as nodes of {shared}")
        each = shared
    each = min(each, count)
    inter = _network(fabric, gpu, each, assume if count > each else [])
    return Cluster(
        gpu=gpu,
        gpus_per_node=each,
        nodes=count // each,
        intra_node=find_link(gpu.intra_node_link),
        inter_node=inter,
        price_per_gpu_hour=None,
    )


def _largest_divisor(number: int, limit: int) -> int:
    return next(divisor for divisor in range(min(limit, number), 0, -1) if number % divisor == 0)


_RATE = re.compile(r"(?:(\d+)\s*[x×]\s*)?(\d+(?:\.\d+)?)\s*(Gb/s|Gbps|Gbit/s|GB/s|Tb/s|Tbps)")
_UNIT = {"Gb/s": 1 / 8, "Gbps": 1 / 8, "Gbit/s": 1 / 8, "GB/s": 1.0, "Tb/s": 125.0, "Tbps": 125.0}


def _network(fabric: str, gpu: Gpu, each: int, assume: list[str]) -> Link:
    family = _family(gpu.name)
    default = LINKS[_DEFAULT_NETWORK.get(family, "ib-ndr-400")]
    lower = fabric.casefold()
    if re.search(r"\befa\b|efa-", lower):
        return LINKS[_EFA.get(family, "efa-p5")]
    # Clauses about the inside of a node say nothing about the network.
    outside = [
        c for c in re.split(r"[;,]", fabric) if not re.search(r"nvlink|nvswitch|nvl\d|intra|pcie|xgmi", c.casefold())
    ]
    rates = [match for clause in outside for match in _RATE.finditer(clause)]
    if "omni-path" in lower:
        default = LINKS["omni-path-100x4"]
    if len(rates) != 1:
        named = next(
            (f"ib-{name}-{rate}" for name, rate in (("xdr", 800), ("ndr", 400), ("hdr", 200)) if name in lower), None
        )
        if named is None:
            assume.append(f"network {default.name}")
        return LINKS[named] if named else default
    ports, rate, unit = rates[0].groups()
    rate_gb = float(rate) * _UNIT[unit]
    if ports is not None:
        total = int(ports) * rate_gb
    elif re.search(r"per gpu|nic per|per nic|cx\d|connectx|port", lower):
        total = rate_gb * each
    else:
        total = rate_gb  # of the whole node
    # A rate for the node that leaves every GPU a port of 100 Gb/s or more is that of as many ports.
    per_gpu = total / each >= 12.5
    speed = total / each if per_gpu else total
    if abs(speed - default.gb_per_s) < 0.01 and per_gpu == default.per_gpu:
        return default
    return replace(default, name="published", gb_per_s=speed, per_gpu=per_gpu, source=f"the row: {fabric}")
