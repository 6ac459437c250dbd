"""The program that runs a plan, as far as it changes what the plan costs: whose kernels, and who holds weights when.

Plans are priced for this runtime. Published measurements come from others too (Megatron-LM, NeMo, llm-foundry, ...); they
are priced with the same formulas under another `Program`, and marked as what this runtime cannot execute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Kernels: TypeAlias = Literal["plan", "eager", "compiled", "fused"]
"""Who fuses memory-bound ops: as the plan says; nobody; torch.compile; or hand-written kernels (norm, SwiGLU, rope, loss
as in Transformer Engine)."""

DataPolicy: TypeAlias = Literal["plan", "zero1", "zero2", "ddp"]
"""Who holds what between and within steps: as the plan says (FSDP2, HSDP, DDP); weights and gradients whole on every rank
and only the optimizer sharded (Megatron's distributed optimizer); gradients sharded too; nothing sharded."""


Attention: TypeAlias = Literal["materialised", "first", "second", "third"]
"""Generation of the attention kernel: scores in memory, as separate products and a softmax (Megatron-LM before 2023);
FlashAttention and its Triton port (2205.14135); FlashAttention-2 (2307.08691), which torch's SDPA has; FlashAttention-3
(2407.08608) and cuDNN's kernels for Hopper and later, which Transformer Engine calls."""


@dataclass(frozen=True, slots=True)
class Program:
    """Facts about the program that the plan itself does not hold. The default is this runtime."""

    name: str = "titan"
    executable: bool = True  # whether this runtime can do it
    kernels: Kernels = "plan"
    loss: Kernels = "plan"  # the same for the loss
    attention: Attention = "second"
    float8_products: float | None = (
        None  # of the 8-bit rate of Transformer Engine, what this program reaches; None: torch
    )
    data_policy: DataPolicy = "plan"
    weight_bytes: int | None = None  # bytes of a weight that the program holds through the step; None: the plan's dtype
    gradient_bytes: int | None = None  # bytes of a gradient held through the step; None: the plan's dtype
    main_weight_bytes: int = 0  # bytes of a further main copy, sharded with the optimizer (mixed-precision optimizers)
    moment_bytes: int | None = None  # bytes of both moments together; None: the plan's
    recompute: Literal["needed", "all"] = (
        "needed"  # only until the last tensor that backward needs, or the whole region
    )
    recompute_attention: bool = (
        False  # backward runs attention's forward again where blocks are kept (Megatron's "selective")
    )
    dropout: bool = False  # after attention, feed-forward and embedding, and of materialised attention's scores
    loss_copies: int = 0  # of the logits in float32 that a fused loss makes: Megatron-LM's own one, compiled two
    dtensor_loss: bool = False  # loss parallel by torch's own handlers of DTensor (TorchTitan), not by this runtime's
    query_key_norms: bool = False  # the model norms queries and keys, for which plans have no layer kind (Qwen 3)
    norm_kernel: bool = False  # eager norms are one kernel, which keeps its input as it is (torch from 2.9 on)
    keeps_outputs: bool = True  # a pipeline's stage keeps what it hands on until its backward (Megatron-LM empties it)
    returns_outputs: bool = False  # a pipeline hands out the logits of all microbatches (torch's default)
    wide_logits: bool = (
        False  # the model hands out logits in float32, which stay through the step (TorchTitan to Oct. 2024)
    )
    backward_gradient_bytes: int = 0  # of a further gradient of every weight, from its backward until it is added up
    update_gradient_bytes: int = 0  # of a copy of the gradients that are updated with, sharded with the optimizer
    overlap_gradients: bool = True  # gradient reduction overlaps with backward
    overlap_weights: bool = True  # weight gathering overlaps with forward
    overlap_tensor: bool = False  # tensor-parallel collectives overlap with matmuls though the plan does not ask for it
    tensor_overlap: float = (
        0.5  # of such a collective, what hides beside its matmul (torch's async TP: 0.36 to 0.57, see docs)
    )
    graphs: bool = False  # CUDA graphs: no launch overhead


TITAN = Program()
TORCHTITAN = replace(TITAN, name="torchtitan", dtensor_loss=True, returns_outputs=True)
"""TorchTitan, which executes the same plans: its loss is torch's, and until 2025 its pipelines returned their outputs."""

MEGATRON = Program(
    name="megatron",
    executable=False,
    kernels="fused",
    loss="fused",
    attention="third",
    float8_products=1.0,
    recompute="all",
    data_policy="zero1",
    weight_bytes=2,
    gradient_bytes=4,
    main_weight_bytes=4,
    moment_bytes=8,
    keeps_outputs=False,
)
"""Megatron-LM with its distributed optimizer: bf16 weights, fp32 gradients, fp32 main weights and moments over dp, i.e.
6 + 12 / dp bytes a parameter (Megatron-LM docs, distributed optimizer)."""

NEMO = replace(MEGATRON, name="nemo", overlap_tensor=True, tensor_overlap=0.8)
"""NVIDIA's NeMo and Megatron-Bridge recipes for performance: Megatron-LM with tensor-parallel collectives through user
buffers, which overlap with matmuls (NeMo performance guide, communication overlaps)."""

DDP_MIXED = replace(MEGATRON, name="megatron-ddp", data_policy="ddp")
"""Megatron-LM without the distributed optimizer: everything whole on every data rank, 18 bytes a parameter (the 45.56 GiB of
figure 1 in Korthikanti et al. 2022, arXiv 2205.05198, are 18 bytes x 22e9 / 8)."""

DEEPSPEED_ZERO1 = replace(
    MEGATRON, name="deepspeed-zero1", gradient_bytes=2, update_gradient_bytes=4, keeps_outputs=True
)
"""Megatron-DeepSpeed with ZeRO-1 in fp16: weights and gradients of 2 bytes, main weights and moments sharded, i.e.
4 + 12 / dp bytes a parameter (Rajbhandari et al. 2020, arXiv 1910.02054, P_os), and while it updates a float32 copy of the
gradients that a rank owns (DeepSpeed, runtime/zero/stage_1_and_2.py)."""

DEEPSPEED_BF16 = replace(MEGATRON, name="deepspeed-bf16", backward_gradient_bytes=2, keeps_outputs=True)
"""Megatron-DeepSpeed's optimizer for bf16: 6 + 12 / dp bytes a parameter, and 2 for the gradients that a microbatch's backward
makes before they are added to those in float32 (DeepSpeed, runtime/bf16_optimizer.py)."""

FUSED_FSDP = Program(
    name="fused-fsdp", executable=False, kernels="fused", loss="fused", attention="third", float8_products=1.0
)
"""Fully sharded data parallelism under hand-written kernels: Megatron-FSDP, NeMo AutoModel with Transformer Engine."""

XLA_FSDP = Program(
    name="xla-fsdp",
    executable=False,
    kernels="compiled",
    loss="compiled",
    attention="third",
    float8_products=1.0,
    graphs=True,
)
"""MaxText and PaxML: weights fully sharded, and the whole step compiled to one program without launches from the host."""

COMPOSER = Program(
    name="composer", executable=False, kernels="fused", loss="eager", attention="first", float8_products=1.0
)
"""MosaicML's Composer with autocast on FSDP: library kernels for norms and activations, Triton's FlashAttention of 2023, an
eager loss."""
