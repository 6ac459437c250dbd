"""The machines one can buy or rent: a GPU, how many of it, and the links inside and between such machines.

A node here is what collectives see as one: the GPUs that reach each other by the `intra_node` link.
"""

from __future__ import annotations

from titan_planner.ir.cluster import Node

_AZURE = "Azure virtual machine size documentation"
_AWS = "AWS EC2 accelerated computing instance documentation"
_GCP = "Google Cloud, Networking and GPU machines (https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth)"
_RACK = (
    "72 GPUs in one NVLink domain, which is what this entry calls a node; an operating system sees 4 of them,"
    " so start 18 x 4 processes. For hosts of 4 that are not of one rack use a 4-GPU entry"
)

# name, gpu, gpus_per_node, intra_node, inter_node, source
_TABLE: tuple[tuple[str, str, int, str, str, str], ...] = (
    # Vendors' own machines.
    ("dgx-a100-40gb", "a100-sxm-40gb", 8, "nvlink3", "ib-hdr-200", "NVIDIA DGX A100 320GB datasheet"),
    ("dgx-a100-80gb", "a100-sxm-80gb", 8, "nvlink3", "ib-hdr-200", "NVIDIA DGX A100 640GB datasheet; Selene"),
    ("dgx-h100", "h100-sxm-80gb", 8, "nvlink4", "ib-ndr-400", "NVIDIA DGX H100 datasheet"),
    ("dgx-h200", "h200-sxm-141gb", 8, "nvlink4", "ib-ndr-400", "NVIDIA DGX H200 datasheet"),
    ("dgx-b200", "b200-180gb", 8, "nvlink5", "ib-ndr-400", "NVIDIA DGX B200 datasheet (ConnectX-7, 400 Gb/s)"),
    ("dgx-b300", "b300-288gb", 8, "nvlink5", "ib-xdr-800", "NVIDIA DGX B300 datasheet (ConnectX-8, 800 Gb/s)"),
    ("gb200-nvl72", "gb200-186gb", 72, "nvlink5", "ib-ndr-400", f"NVIDIA GB200 NVL72 page; {_RACK}"),
    ("gb300-nvl72", "gb300-288gb", 72, "nvlink5", "ib-xdr-800", f"NVIDIA GB300 NVL72 page; {_RACK}"),
    (
        "mi300x-platform",
        "mi300x-192gb",
        8,
        "infinity-fabric-mi300x",
        "roce-400",
        "AMD Instinct MI300X Platform data sheet; a 400 Gb/s port per GPU is customary, unverified",
    ),
    (
        "mi325x-platform",
        "mi325x-256gb",
        8,
        "infinity-fabric-mi300x",
        "roce-400",
        "AMD Instinct MI325X Platform data sheet; a 400 Gb/s port per GPU is customary, unverified",
    ),
    (
        "hgx-h20",
        "h20-96gb",
        8,
        "nvlink4",
        "roce-400",
        "8-GPU HGX H20; a 400 Gb/s port per GPU is customary, unverified",
    ),
    # Clusters with published training runs.
    (
        "grand-teton-h100-96gb",
        "h100-sxm-96gb-hbm2e",
        8,
        "nvlink4",
        "roce-400",
        "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md: backend RDMA network, 400 Gb/s per GPU;"
        " the report does not say whether RoCE or InfiniBand",
    ),
    (
        "jean-zay-a100",
        "a100-sxm-80gb",
        8,
        "nvlink3",
        "omni-path-100x4",
        "BigScience BLOOM chronicles: 8 A100 80GB, 4 Omni-Path 100 Gb/s links per node",
    ),
    (
        "deepseek-h800",
        "h800-sxm-80gb",
        8,
        "nvlink4-h800",
        "ib-ndr-400",
        "DeepSeek, Insights into DeepSeek-V3 (arXiv 2505.09343): 8 H800, eight 400 Gb/s InfiniBand ports",
    ),
    # Clouds.
    ("aws-p4d", "a100-sxm-40gb", 8, "nvlink3", "efa-p4d", f"{_AWS}: p4d.24xlarge"),
    ("aws-p4de", "a100-sxm-80gb", 8, "nvlink3", "efa-p4d", f"{_AWS}: p4de.24xlarge"),
    ("aws-p5", "h100-sxm-80gb", 8, "nvlink4", "efa-p5", f"{_AWS}: p5.48xlarge"),
    ("aws-p5e", "h200-sxm-141gb", 8, "nvlink4", "efa-p5", f"{_AWS}: p5e.48xlarge"),
    ("aws-p5en", "h200-sxm-141gb", 8, "nvlink4", "efa-p5en", f"{_AWS}: p5en.48xlarge"),
    ("aws-p6-b200", "b200-180gb", 8, "nvlink5", "efa-p5en", f"{_AWS}: p6-b200.48xlarge"),
    ("aws-p6-b300", "b300-288gb", 8, "nvlink5", "efa-p6-b300", f"{_AWS}: p6-b300.48xlarge"),
    ("azure-nd-a100-v4", "a100-sxm-40gb", 8, "nvlink3", "ib-hdr-200", f"{_AZURE}: Standard_ND96asr_v4"),
    ("azure-ndm-a100-v4", "a100-sxm-80gb", 8, "nvlink3", "ib-hdr-200", f"{_AZURE}: Standard_ND96amsr_A100_v4"),
    ("azure-nd-h100-v5", "h100-sxm-80gb", 8, "nvlink4", "ib-ndr-400", f"{_AZURE}: Standard_ND96isr_H100_v5"),
    ("azure-nd-h200-v5", "h200-sxm-141gb", 8, "nvlink4", "ib-ndr-400", f"{_AZURE}: Standard_ND96isr_H200_v5"),
    (
        "azure-nd-mi300x-v5",
        "mi300x-192gb",
        8,
        "infinity-fabric-mi300x",
        "ib-ndr-400",
        f"{_AZURE}: Standard_ND96isr_MI300X_v5 (8 x 400 Gb/s NDR)",
    ),
    (
        "azure-nd-gb200-v6",
        "gb200-186gb",
        4,
        "nvlink5",
        "ib-ndr-400",
        f"{_AZURE}: ND GB200 v6, 4 GPUs and 4 x 400 Gb/s a virtual machine; 18 of them share one NVLink domain,"
        " which gb200-nvl72 describes",
    ),
    ("gcp-a3-high", "h100-sxm-80gb", 8, "nvlink4", "gcp-tcpx", f"{_GCP}: a3-highgpu-8g"),
    ("gcp-a3-mega", "h100-sxm-80gb", 8, "nvlink4", "gcp-tcpxo", f"{_GCP}: a3-megagpu-8g"),
    ("gcp-a3-ultra", "h200-sxm-141gb", 8, "nvlink4", "roce-400", f"{_GCP}: a3-ultragpu-8g, 8 x ConnectX-7"),
    ("gcp-a4", "b200-180gb", 8, "nvlink5", "roce-400", f"{_GCP}: a4-highgpu-8g, 8 x ConnectX-7"),
    # At hand.
    (
        "workstation-4x4090",
        "rtx-4090-24gb",
        4,
        "pcie-gen4-x16",
        "ethernet-10",
        "nominal: four cards on one board; boards often give fewer lanes to each",
    ),
    ("cpu-4", "cpu", 4, "loopback", "ethernet-10", "nominal: four CPU ranks on one machine"),
)

NODES: dict[str, Node] = {
    name: Node(name=name, gpu=gpu, gpus_per_node=count, intra_node=intra, inter_node=inter, source=source)
    for name, gpu, count, intra, inter, source in _TABLE
}

NODE_ALIASES: dict[str, str] = {
    "dgx-a100": "dgx-a100-80gb",
    "hgx-h100": "dgx-h100",
    "hgx-h200": "dgx-h200",
    "hgx-b200": "dgx-b200",
    "hgx-b300": "dgx-b300",
    "selene": "dgx-a100-80gb",
    "nvl72": "gb200-nvl72",
    "grand-teton": "grand-teton-h100-96gb",
    "jean-zay": "jean-zay-a100",
    "p4d.24xlarge": "aws-p4d",
    "p4de.24xlarge": "aws-p4de",
    "p5.48xlarge": "aws-p5",
    "p5e.48xlarge": "aws-p5e",
    "p5en.48xlarge": "aws-p5en",
    "p6-b200.48xlarge": "aws-p6-b200",
    "p6-b300.48xlarge": "aws-p6-b300",
    "standard-nd96asr-v4": "azure-nd-a100-v4",
    "standard-nd96amsr-a100-v4": "azure-ndm-a100-v4",
    "standard-nd96isr-h100-v5": "azure-nd-h100-v5",
    "standard-nd96isr-h200-v5": "azure-nd-h200-v5",
    "standard-nd96isr-mi300x-v5": "azure-nd-mi300x-v5",
    "a3-highgpu-8g": "gcp-a3-high",
    "a3-megagpu-8g": "gcp-a3-mega",
    "a3-ultragpu-8g": "gcp-a3-ultra",
    "a4-highgpu-8g": "gcp-a4",
    "localhost-cpu": "cpu-4",
}
