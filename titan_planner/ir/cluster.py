"""The machines a plan is made for: GPUs, the links between them, and how many."""

from __future__ import annotations

from typing import Annotated, Literal

from titan_planner.ir.record import Field, record


@record
class Efficiency:
    """How close to its peaks a GPU comes in training. Fitted on measurements; the only numbers of the cost model that are."""

    matmul: Annotated[float, Field("Part of the bf16 peak that large matmuls reach.", ge=1e-3, le=1)]
    matmul_float8: Annotated[float, Field("Part of the 8-bit peak that large matmuls reach.", ge=1e-3, le=1)]
    attention: Annotated[float, Field("Part of the bf16 peak that attention reaches in forward.", ge=1e-3, le=1)]
    attention_backward: Annotated[float, Field("The same in backward.", ge=1e-3, le=1)]
    memory: Annotated[float, Field("Part of the memory bandwidth that memory-bound kernels reach.", ge=1e-3, le=1)]
    intra_node: Annotated[float, Field("Part of the link inside a node that collectives reach.", ge=1e-3, le=1)]
    inter_node: Annotated[float, Field("Part of the link between nodes that collectives reach.", ge=1e-3, le=1)]
    overlap_slowdown: Annotated[
        float,
        Field("By how much computing is slower while a collective runs beside it, as a part of its time.", ge=0, le=10),
    ]
    launch_us: Annotated[
        float, Field("Host time to launch one kernel without CUDA graphs, in microseconds.", ge=0, le=1e5)
    ]
    source: Annotated[str, Field("What the numbers were fitted on.", decision=False)]


@record
class Gpu:
    """One accelerator. All rates are dense peaks (no structured sparsity)."""

    name: Annotated[str, Field("Catalogue name, or a name of the user's own.")]
    vendor: Annotated[Literal["nvidia", "amd", "cpu"], Field("Who makes it; decides the capability rules.")]
    memory_gib: Annotated[float, Field("Usable device memory as the driver reports it, in GiB.", ge=0.1, le=1e5)]
    memory_gb_per_s: Annotated[float, Field("Peak memory bandwidth in 1e9 bytes/s.", ge=1e-2, le=1e7)]
    bf16_tflops: Annotated[float, Field("Dense bfloat16 peak in 1e12 FLOP/s.", ge=1e-4, le=1e7)]
    fp8_tflops: Annotated[
        float | None, Field("Dense 8-bit float peak in 1e12 FLOP/s; null when it has none.", ge=1e-4, le=1e7)
    ]
    fp4_tflops: Annotated[
        float | None, Field("Dense 4-bit float peak in 1e12 FLOP/s; null when it has none.", ge=1e-4, le=1e7)
    ]
    compute_units: Annotated[int, Field("Streaming multiprocessors, compute units or cores.", ge=1, le=10**6)]
    compute_capability: Annotated[str | None, Field("CUDA compute capability, e.g. 9.0; null when not NVIDIA.")]
    float8: Annotated[bool, Field("Has tensorwise and rowwise scaled Float8 matrix multiplication.")]
    mxfp8: Annotated[bool, Field("Has MXFP8 (block-scaled) matrix multiplication.")]
    nvfp4: Annotated[bool, Field("Has NVFP4 matrix multiplication.")]
    intra_node_link: Annotated[str, Field("Catalogue name of the link between GPUs of one node.")]
    backend: Annotated[Literal["nccl", "gloo"], Field("torch.distributed backend (RCCL is spelled nccl).")]
    device: Annotated[Literal["cuda", "cpu"], Field("torch device type.")]
    efficiency: Annotated[Efficiency, Field("How close to its peaks it comes.")]
    source: Annotated[str, Field("Where the numbers come from.", decision=False)]


@record
class Link:
    """A connection. Bandwidth is the unidirectional peak."""

    name: Annotated[str, Field("Catalogue name, or a name of the user's own.")]
    gb_per_s: Annotated[
        float, Field("Unidirectional peak in 1e9 bytes/s, per GPU when `per_gpu`, else per node.", ge=1e-4, le=1e6)
    ]
    latency_us: Annotated[
        float, Field("Latency of one hop in microseconds (the alpha of alpha-beta models).", ge=0, le=1e7)
    ]
    per_gpu: Annotated[bool, Field("True: every GPU has this much. False: the GPUs of a node share it.")]
    source: Annotated[str, Field("Where the numbers come from.", decision=False)]


@record
class Node:
    """A machine type one can rent or buy; names in the catalogue."""

    name: str
    gpu: str
    gpus_per_node: int
    intra_node: str
    inter_node: str
    source: str


@record
class Cluster:
    """The machines of one job: `nodes` x `gpus_per_node` equal GPUs, one link kind inside a node and one between nodes."""

    gpu: Gpu
    gpus_per_node: Annotated[int, Field("GPUs (ranks) in one node.", ge=1, le=10**4)]
    nodes: Annotated[int, Field("Number of nodes.", ge=1, le=10**6)]
    intra_node: Annotated[Link, Field("Link between the GPUs of one node.")]
    inter_node: Annotated[Link, Field("Link between nodes.")]
    price_per_gpu_hour: Annotated[
        float | None, Field("Price of one GPU for one hour, any currency.", ge=0, le=1e9, decision=False)
    ]

    @property
    def num_gpus(self) -> int:
        """GPUs in the whole cluster; the plan's world size equals it."""
        return self.nodes * self.gpus_per_node
