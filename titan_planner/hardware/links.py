"""The links between accelerators: unidirectional peak and latency of one hop, each with where it is from.

Conventions, the same in every entry:

- `gb_per_s` is one direction in 1e9 bytes/s. Vendors print NVLink and Infinity Fabric as both directions together
  (H100: 900), so the number here is half. `per_gpu=False` means that the GPUs of a node share it.
- `latency_us` is one step of a ring with NCCL's Simple protocol, the one that large messages use: NVLink 3.4, PCIe 5.7,
  network 14.0 (NCCL 2.28 src/graph/tuning.cc, hwLatencies). NCCL adds 8.4 us per collective (baseLatencies): 32 us for
  an all-gather over the 8 GPUs of a node, 1204 us over 32 such nodes. This is the model NCCL chooses algorithms by.
  AutoParallel's H100 constants give 30 us for the one node; its later profile of a RoCE cluster, where the latency is
  the intercept of a fit over large messages, gives 163 us for one node and 871 us for 32.
  Small messages go by the LL protocol: 0.6, 1.0 and 2.7 us a step.
- Reached bandwidth is lower than the peak: that is the cost model's efficiency, not this table's.
"""

from __future__ import annotations

from titan_planner.ir.cluster import Link

_NCCL = "NCCL 2.28 src/graph/tuning.cc, hwLatencies, ring, Simple"
_NVLINK_HOP = f"latency: {_NCCL}, NVLink"
_PCIE_HOP = f"latency: {_NCCL}, PCI"
_NET_HOP = f"latency: {_NCCL}, network"
_OFI = "latency: what the plug-in aws-ofi-nccl src/platform-aws.cpp declares to NCCL for this instance family"
_NO_HOP = "latency: nominal, unverified"


def _lines(*lines: str) -> str:
    """A `source` of several lines, one per group of numbers."""
    return "\n".join(lines)


_ENTRIES = (
    # Within a node.
    Link(
        name="nvlink3",
        gb_per_s=300.0,
        latency_us=3.4,
        per_gpu=True,
        source=_lines("rate: NVIDIA A100 datasheet, 600 GB/s both ways (12 links x 25 GB/s each way)", _NVLINK_HOP),
    ),
    Link(
        name="nvlink3-a800",
        gb_per_s=200.0,
        latency_us=3.4,
        per_gpu=True,
        source=_lines("rate: NVIDIA A800, 400 GB/s both ways (Reuters, November 2022)", _NVLINK_HOP),
    ),
    Link(
        name="nvlink4",
        gb_per_s=450.0,
        latency_us=3.4,
        per_gpu=True,
        source=_lines("rate: NVIDIA H100 datasheet, 900 GB/s both ways (18 links x 25 GB/s each way)", _NVLINK_HOP),
    ),
    Link(
        name="nvlink4-h800",
        gb_per_s=200.0,
        latency_us=3.4,
        per_gpu=True,
        source=_lines(
            "rate: NVIDIA H800, 400 GB/s both ways; DeepSeek (arXiv 2505.09343) states the same cut", _NVLINK_HOP
        ),
    ),
    Link(
        name="nvlink4-bridge",
        gb_per_s=300.0,
        latency_us=3.4,
        per_gpu=True,
        source=_lines("rate: NVIDIA H100 datasheet, PCIe and NVL cards, 600 GB/s both ways, pairs only", _NVLINK_HOP),
    ),
    Link(
        name="nvlink5",
        gb_per_s=900.0,
        latency_us=3.4,
        per_gpu=True,
        source=_lines(
            "rate: NVIDIA Blackwell datasheet, 1.8 TB/s both ways (18 links x 50 GB/s each way)", _NVLINK_HOP
        ),
    ),
    Link(
        name="infinity-fabric-mi300x",
        gb_per_s=448.0,
        latency_us=3.4,
        per_gpu=True,
        source=_lines(
            "rate: AMD Instinct MI300X data sheet, 7 links x 128 GB/s both ways (896), one to each other GPU;"
            " a pair alone has one link: 64 GB/s each way",
            "latency: NCCL's NVLink figure; RCCL's own unverified",
        ),
    ),
    Link(
        name="pcie-gen4-x16",
        gb_per_s=31.5,
        latency_us=5.7,
        per_gpu=True,
        source=_lines(
            "rate: PCI Express 4.0, 16 GT/s x 16 lanes x 128/130 / 8; root complexes may share it", _PCIE_HOP
        ),
    ),
    Link(
        name="pcie-gen5-x16",
        gb_per_s=63.0,
        latency_us=5.7,
        per_gpu=True,
        source=_lines(
            "rate: PCI Express 5.0, 32 GT/s x 16 lanes x 128/130 / 8; root complexes may share it", _PCIE_HOP
        ),
    ),
    Link(
        name="loopback",
        gb_per_s=4.0,
        latency_us=50.0,
        per_gpu=True,
        source=_lines(
            "all numbers: NOMINAL, for CPU ranks of one machine that talk by gloo over TCP to themselves",
            "rate, latency: tried once, torch 2.13, 2 ranks on 2 cores: 16 MiB sends 4.5 GB/s, ping-pong 45 us a hop;"
            " collectives reached 0.4-1.5 GB/s, and several times the latency with more ranks than cores",
        ),
    ),
    # Between nodes, one network port per GPU.
    Link(
        name="ib-hdr-200",
        gb_per_s=25.0,
        latency_us=14.0,
        per_gpu=True,
        source=_lines("rate: InfiniBand HDR 200 Gb/s (NVIDIA DGX A100: 8 x ConnectX-6)", _NET_HOP),
    ),
    Link(
        name="ib-ndr-200",
        gb_per_s=25.0,
        latency_us=14.0,
        per_gpu=True,
        source=_lines("rate: InfiniBand NDR200, 200 Gb/s", _NET_HOP),
    ),
    Link(
        name="ib-ndr-400",
        gb_per_s=50.0,
        latency_us=14.0,
        per_gpu=True,
        source=_lines("rate: InfiniBand NDR 400 Gb/s (NVIDIA DGX H100: 8 x ConnectX-7)", _NET_HOP),
    ),
    Link(
        name="ib-xdr-800",
        gb_per_s=100.0,
        latency_us=14.0,
        per_gpu=True,
        source=_lines("rate: InfiniBand XDR 800 Gb/s (NVIDIA DGX B300: 8 x ConnectX-8)", _NET_HOP),
    ),
    Link(
        name="roce-100",
        gb_per_s=12.5,
        latency_us=14.0,
        per_gpu=True,
        source=_lines("rate: RDMA over 100 Gb/s Ethernet, a port per GPU", _NET_HOP),
    ),
    Link(
        name="roce-200",
        gb_per_s=25.0,
        latency_us=14.0,
        per_gpu=True,
        source=_lines("rate: RDMA over 200 Gb/s Ethernet, a port per GPU", _NET_HOP),
    ),
    Link(
        name="roce-400",
        gb_per_s=50.0,
        latency_us=14.0,
        per_gpu=True,
        source=_lines(
            "rate: RDMA over 400 Gb/s Ethernet, a port per GPU",
            _NET_HOP,
            "check: AutoParallel's H100 RoCE 400G profile, one rank per node, all-gather 60-45 GB/s over 2-32 nodes",
        ),
    ),
    Link(
        name="efa-p5",
        gb_per_s=50.0,
        latency_us=75.0,
        per_gpu=True,
        source=_lines("rate: AWS p5.48xlarge and p5e.48xlarge, 3200 Gb/s of EFA for 8 GPUs, evenly attached", _OFI),
    ),
    Link(
        name="efa-p5en",
        gb_per_s=50.0,
        latency_us=35.0,
        per_gpu=True,
        source=_lines("rate: AWS p5en.48xlarge and p6-b200.48xlarge, 3200 Gb/s of EFA for 8 GPUs", _OFI),
    ),
    Link(
        name="efa-p6-b300",
        gb_per_s=100.0,
        latency_us=35.0,
        per_gpu=True,
        source=_lines("rate: AWS p6-b300.48xlarge, 6400 Gb/s of EFA for 8 GPUs, unverified", _OFI),
    ),
    Link(
        name="gcp-tcpxo",
        gb_per_s=25.0,
        latency_us=50.0,
        per_gpu=True,
        source=_lines("rate: Google Cloud A3 Mega, GPUDirect-TCPXO, 8 x 200 Gb/s for 8 GPUs", _NO_HOP),
    ),
    # Between nodes, shared by the node's GPUs.
    Link(
        name="efa-p4d",
        gb_per_s=50.0,
        latency_us=75.0,
        per_gpu=False,
        source=_lines(
            "rate: AWS p4d.24xlarge and p4de.24xlarge, 4 x 100 Gb/s of EFA for 8 GPUs (6.25 GB/s each)", _OFI
        ),
    ),
    Link(
        name="gcp-tcpx",
        gb_per_s=100.0,
        latency_us=50.0,
        per_gpu=False,
        source=_lines("rate: Google Cloud A3 High, GPUDirect-TCPX, 4 x 200 Gb/s for 8 GPUs", _NO_HOP),
    ),
    Link(
        name="roce-100x4",
        gb_per_s=50.0,
        latency_us=14.0,
        per_gpu=False,
        source=_lines("rate: RDMA over 4 x 100 Gb/s Ethernet for the node (the InternEvo benchmark cluster)", _NET_HOP),
    ),
    Link(
        name="omni-path-100x4",
        gb_per_s=50.0,
        latency_us=14.0,
        per_gpu=False,
        source=_lines(
            "rate: 4 x Omni-Path 100 Gb/s for the node (Jean Zay A100 partition, BigScience chronicles)",
            "latency: NCCL's network figure, for Omni-Path unverified",
        ),
    ),
    Link(
        name="ethernet-100",
        gb_per_s=12.5,
        latency_us=50.0,
        per_gpu=False,
        source=_lines("rate: one 100 Gb/s port for the node, TCP", _NO_HOP),
    ),
    Link(
        name="ethernet-25",
        gb_per_s=3.125,
        latency_us=50.0,
        per_gpu=False,
        source=_lines("rate: one 25 Gb/s port for the node, TCP", _NO_HOP),
    ),
    Link(
        name="ethernet-10",
        gb_per_s=1.25,
        latency_us=50.0,
        per_gpu=False,
        source=_lines("rate: one 10 Gb/s port for the node, TCP", _NO_HOP),
    ),
)

LINKS: dict[str, Link] = {link.name: link for link in _ENTRIES}

LINK_ALIASES: dict[str, str] = {
    "hdr": "ib-hdr-200",
    "ib-hdr": "ib-hdr-200",
    "infiniband-hdr": "ib-hdr-200",
    "ndr": "ib-ndr-400",
    "ib-ndr": "ib-ndr-400",
    "infiniband-ndr": "ib-ndr-400",
    "xdr": "ib-xdr-800",
    "ib-xdr": "ib-xdr-800",
    "infiniband-xdr": "ib-xdr-800",
    "pcie4": "pcie-gen4-x16",
    "pcie-gen4": "pcie-gen4-x16",
    "pcie5": "pcie-gen5-x16",
    "pcie-gen5": "pcie-gen5-x16",
    "xgmi": "infinity-fabric-mi300x",
    "infinity-fabric": "infinity-fabric-mi300x",
    "efa-p4de": "efa-p4d",
    "efa-p5e": "efa-p5",
    "efa-p6-b200": "efa-p5en",
    "10gbe": "ethernet-10",
    "25gbe": "ethernet-25",
    "100gbe": "ethernet-100",
    "localhost": "loopback",
}
