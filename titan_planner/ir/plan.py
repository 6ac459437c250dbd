"""The Plan: model, cluster, every decision, the job, the request it answers, the estimate and the remarks."""

from __future__ import annotations

from typing import Annotated, Literal

from titan_planner.ir.cluster import Cluster
from titan_planner.ir.execution import ActivationCheckpoint, Compile, Float8, Loss
from titan_planner.ir.job import Batch, Data, Job, LrSchedule, Optimizer, Seeds
from titan_planner.ir.model import Model
from titan_planner.ir.parallel import (
    ContextParallel,
    ExpertParallel,
    Fsdp,
    Mesh,
    ModuleSharding,
    Pipeline,
    TensorParallel,
)
from titan_planner.ir.record import Field, record
from titan_planner.ir.request import Request

PLAN_VERSION = "1.0"
"""major.minor of the plan format. Readers ignore unknown fields of the same major and refuse another major."""


@record
class Layer:
    """One top-level module: its pipeline stage and what it keeps for backward. One short line in the plan."""

    fqn: Annotated[str, Field("tok_embeddings, layers.N, norm or output.")]
    stage: Annotated[int, Field("Index of the pipeline stage that holds it.", ge=0)]
    checkpoint: Annotated[str, Field("Name of its activation-checkpointing policy.")]


@record
class Remark:
    """What a pass did or could not do, at an address."""

    kind: Annotated[Literal["applied", "missed", "analysis"], Field("Done, not done and why, or a fact.")]
    by: Annotated[str, Field("Name of the pass.")]
    address: Annotated[str, Field("What it concerns, e.g. mesh.tp or layers.17.attention.wk.")]
    message: Annotated[str, Field("One sentence with the numbers that made it so.")]


@record
class StageMemory:
    """Counted memory of the fullest rank of one stage at the fullest moment of a step, in GiB."""

    stage: Annotated[int, Field("Stage index.", ge=0)]
    moment: Annotated[str, Field("The moment of a step that needs most, e.g. loss.")] = ""
    parameters_gib: Annotated[float, Field("Sharded parameters.", ge=0)]
    gradients_gib: Annotated[float, Field("Reduced gradients that exist at that moment.", ge=0)]
    optimizer_gib: Annotated[float, Field("Optimizer states, and main weights where a program has them.", ge=0)]
    unsharded_gib: Annotated[float, Field("Gathered parameters and unreduced gradients of the units in flight.", ge=0)]
    activations_gib: Annotated[float, Field("Activations kept for backward, and one block's computed again.", ge=0)]
    logits_gib: Annotated[float, Field("Logits and the loss's working memory.", ge=0)]
    float8_gib: Annotated[float, Field("Operands cast to 8 bits.", ge=0)] = 0.0
    communication_gib: Annotated[float, Field("Buffers of pipeline, context and expert parallelism.", ge=0)] = 0.0
    allocator_gib: Annotated[
        float, Field("What the caching allocator holds beside the fullest moment, for other moments.", ge=0)
    ] = 0.0
    reserve_gib: Annotated[float, Field("Context, communicators and workspaces.", ge=0)] = 0.0
    experts_worst_gib: Annotated[
        float, Field("What is needed beyond the total if every token went to one rank's experts.", ge=0)
    ] = 0.0

    @property
    def allocated_gib(self) -> float:
        """What tensors take: torch.cuda.max_memory_allocated."""
        return (
            self.parameters_gib
            + self.gradients_gib
            + self.optimizer_gib
            + self.unsharded_gib
            + self.activations_gib
            + self.logits_gib
            + self.float8_gib
            + self.communication_gib
        )

    @property
    def reserved_gib(self) -> float:
        """What the caching allocator has of the device: torch.cuda.max_memory_reserved."""
        return self.allocated_gib + self.allocator_gib

    @property
    def total_gib(self) -> float:
        """Sum of all parts: what the device must have."""
        return self.reserved_gib + self.reserve_gib


@record
class StepTime:
    """Where one optimizer step's time goes, in ms, on the pipeline rank that is busy longest. The parts add up to the step."""

    matmul_ms: Annotated[float, Field("Matrix products, forward and backward.", ge=0)]
    attention_ms: Annotated[float, Field("Attention itself, forward and backward.", ge=0)]
    memory_bound_ms: Annotated[float, Field("Norms, activations, rotary embedding, residuals, loss.", ge=0)]
    float8_casts_ms: Annotated[float, Field("Making 8-bit operands.", ge=0)]
    recompute_ms: Annotated[float, Field("Computing again what was not kept.", ge=0)]
    launch_ms: Annotated[float, Field("The device waiting for the host to launch kernels.", ge=0)]
    data_parallel_ms: Annotated[float, Field("FSDP, HSDP or DDP collectives that nothing hides.", ge=0)]
    tensor_parallel_ms: Annotated[float, Field("Tensor-parallel collectives that nothing hides.", ge=0)]
    context_parallel_ms: Annotated[float, Field("Context-parallel exchange that nothing hides.", ge=0)]
    expert_parallel_ms: Annotated[float, Field("Token dispatch that nothing hides.", ge=0)]
    bubble_ms: Annotated[float, Field("Waiting for other pipeline stages and for transfers between them.", ge=0)]
    optimizer_ms: Annotated[float, Field("Gradient norm, clipping and the update.", ge=0)]


@record
class Estimate:
    """What the planner expects of the plan: counted where things can be counted, else timed with fitted efficiencies."""

    num_params: Annotated[int, Field("Trained elements.", ge=1)]
    flops_per_token: Annotated[float, Field("Model FLOPs per token, forward and backward, attention not halved.", gt=0)]
    flops_per_token_causal: Annotated[
        float, Field("The same with only the attention that the causal mask leaves.", gt=0)
    ]
    memory: Annotated[tuple[StageMemory, ...], Field("Memory per stage.")]
    memory_available_gib: Annotated[float, Field("Device memory less the headroom asked for.", gt=0)]
    fits: Annotated[bool, Field("Whether every stage fits.")]
    step_time_ms: Annotated[float | None, Field("Time of one optimizer step; null when it was not priced.", gt=0)]
    step_time: Annotated[StepTime | None, Field("Where that time goes.")]
    bottleneck: Annotated[
        str | None, Field("What takes most of the step beside matmuls and attention, a field of step_time.")
    ]
    tokens_per_second_per_gpu: Annotated[float | None, Field("Tokens per second and GPU.", gt=0)]
    tflops_per_gpu: Annotated[float | None, Field("Model FLOPs per second and GPU (attention not halved), 1e12.", gt=0)]
    mfu: Annotated[
        float | None, Field("Model FLOPs utilisation: tflops_per_gpu over the GPU's peak in bf16, 0 to 1.", gt=0)
    ]
    training_days: Annotated[float | None, Field("Days for the token budget; null without one.", gt=0)]
    training_gpu_hours: Annotated[float | None, Field("GPU-hours for the token budget; null without one.", gt=0)]
    training_cost: Annotated[
        float | None, Field("Price of those, in the currency of the cluster's price; null without one.", ge=0)
    ]

    @property
    def peak_memory_gib(self) -> float:
        """Memory of the fullest stage."""
        return max((stage.total_gib for stage in self.memory), default=0.0)


@record
class Plan:
    """One training run, decided down to the module. Everything the runtime needs, and nothing it has to decide."""

    plan_version: Annotated[str, Field("Format version.", pattern=r"^\d+\.\d+$", decision=False)]
    name: Annotated[str, Field("Name of the plan.", decision=False)]
    description: Annotated[str, Field("What it is for.", decision=False)]
    model: Model
    cluster: Annotated[Cluster, Field("The machines it was made for.", decision=False)]
    mesh: Mesh
    batch: Batch
    pipeline: Pipeline
    fsdp: Fsdp
    tensor_parallel: TensorParallel
    context_parallel: ContextParallel
    expert_parallel: ExpertParallel
    activation_checkpoint: ActivationCheckpoint
    float8: Float8
    compile: Compile
    loss: Loss
    layers: Annotated[tuple[Layer, ...], Field("Every top-level module, in order.", min_items=3)]
    sharding: Annotated[
        tuple[ModuleSharding, ...], Field("Tensor- and expert-parallel placements; empty without them.")
    ]
    dtype: Annotated[Literal["float32", "bfloat16"], Field("Dtype of parameters and gradients between steps.")]
    optimizer: Optimizer
    lr_schedule: LrSchedule
    data: Data
    seeds: Seeds
    job: Annotated[Job, Field("The run's own affairs.", decision=False)]
    request: Annotated[Request, Field("What was asked for: pins, objective, limits.", decision=False)]
    estimate: Annotated[Estimate | None, Field("What the planner expects.", decision=False)]
    remarks: Annotated[tuple[Remark, ...], Field("What the passes did, did not do, and why.", decision=False)]
