"""What a user writes: the sections of a spec, with the seed's field names. Every decision is `auto` unless pinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal, TypeAlias

from titan_planner.ir.errors import InvariantError
from titan_planner.ir.execution import Float8Recipe
from titan_planner.ir.parallel import Schedule
from titan_planner.ir.record import Field, record

Auto: TypeAlias = Literal["auto"]
FloatDtype: TypeAlias = Literal["float32", "bfloat16"]

SPEC_VERSION = 1
MAX_TIMEOUT_SECONDS = 30 * 24 * 3600
"""A rank that has said nothing for 30 days never will."""


def check_keep_latest_k(keep_latest_k: int) -> None:
    """Raise `InvariantError` when a failed save could leave no complete checkpoint."""
    if keep_latest_k == 1:
        raise InvariantError(
            "keep_latest_k",
            "`keep_latest_k` is 1, but a failed save would then leave no complete checkpoint",
            "use 2 or more, or 0 to keep all",
            rule="checkpoint-keep",
        )


def check_profile_freq(freq: int, warmup: int, active: int) -> None:
    """Raise `InvariantError` when a trace does not fit between two."""
    if active + warmup > freq:
        raise InvariantError(
            "profile_freq",
            f"`profile_freq` {freq} is shorter than warmup {warmup} + active {active}",
            f"use at least {active + warmup}",
            rule="profiling-period",
        )


@record
class RopeScalingSpec:
    """Replaces the flavor's rotary scaling."""

    factor: Annotated[float | None, Field("How far low frequencies are stretched.", ge=1)] = None
    low_freq_factor: Annotated[float | None, Field("Wavelengths above original / this are stretched fully.", gt=0)] = (
        None
    )
    high_freq_factor: Annotated[float | None, Field("Wavelengths below original / this stay.", gt=0)] = None
    original_max_seq_len: Annotated[
        int | None, Field("Context length before stretching, in tokens.", ge=1, le=10**9)
    ] = None


@record
class MoeOverrides:
    """Changes to every layer with experts; what is absent stays."""

    num_experts: Annotated[int | None, Field("Routed experts.", ge=1, le=10**6)] = None
    hidden_dim: Annotated[int | None, Field("Elements inside one expert.", ge=1, le=10**8)] = None
    top_k: Annotated[int | None, Field("Experts that each token goes to.", ge=1, le=10**6)] = None
    num_shared_experts: Annotated[int | None, Field("Experts that see every token.", ge=0, le=10**4)] = None
    score_function: Annotated[Literal["softmax", "sigmoid"] | None, Field("How the router's logits become scores.")] = (
        None
    )
    score_before_experts: Annotated[bool | None, Field("Scores scale the experts' inputs, not their outputs.")] = None
    route_norm: Annotated[bool | None, Field("A token's chosen scores are divided by their sum.")] = None
    route_scale: Annotated[float | None, Field("Factor on the chosen scores.", gt=0)] = None
    num_groups: Annotated[
        Literal["none"] | int | None, Field("Group-limited routing: groups of experts; none takes it away.", ge=1)
    ] = None
    num_limited_groups: Annotated[int | None, Field("Groups that a token may choose from.", ge=1)] = None
    load_balance_coeff: Annotated[
        Literal["none"] | float | None, Field("Step of the bias that balances loads; none takes it away.", gt=0)
    ] = None


@record
class ModelOverrides:
    """Values that replace the flavor's own."""

    vocab_size: Annotated[int | None, Field("Rows of embedding and output.", ge=2, le=10**8)] = None
    dim: Annotated[int | None, Field("Width of the residual stream.", ge=1, le=10**7)] = None
    num_layers: Annotated[int | None, Field("Number of blocks.", ge=1, le=10**4)] = None
    num_heads: Annotated[int | None, Field("Query heads.", ge=1, le=10**6)] = None
    num_kv_heads: Annotated[int | None, Field("Key and value heads.", ge=1, le=10**6)] = None
    head_dim: Annotated[int | None, Field("Elements of one head; dim / num_heads when absent.", ge=2, le=10**6)] = None
    hidden_dim: Annotated[int | None, Field("Elements inside the feed-forward layer.", ge=1, le=10**8)] = None
    max_seq_len: Annotated[int | None, Field("Longest sequence, in tokens.", ge=1, le=10**9)] = None
    norm_eps: Annotated[float | None, Field("Epsilon of the norms.", gt=0)] = None
    rope_theta: Annotated[float | None, Field("Base of the rotary frequencies.", gt=0)] = None
    rope_scaling: Annotated[RopeScalingSpec | None, Field("Changes to the rotary scaling.")] = None
    moe: Annotated[MoeOverrides | None, Field("Changes to the layers with experts.")] = None
    tied: Annotated[bool | None, Field("Output shares the embedding's weight.")] = None


@record
class ModelSpec:
    """The model: a family and flavor of the catalogue, or a Hugging Face config.json."""

    family: Annotated[str | None, Field("Family of the catalogue; `titan-plan models` lists them.")] = None
    flavor: Annotated[str | None, Field("Size within the family, e.g. 8B.")] = None
    hf_config: Annotated[str | None, Field("Path of a Hugging Face config.json, relative to the spec file.")] = None
    hf_assets_path: Annotated[str | None, Field("Folder with tokenizer.json, and weights if there are any.")] = None
    overrides: Annotated[ModelOverrides, Field("Values that replace the flavor's own.")] = ModelOverrides()

    def check(self) -> None:
        if self.hf_config is not None and (self.family is not None or self.flavor is not None):
            raise InvariantError("hf_config", "`hf_config` stands beside `family` or `flavor`", "keep one of them")
        if self.hf_config is None and (self.family is None or self.flavor is None):
            missing = "flavor" if self.family is not None else "family"
            raise InvariantError(
                missing,
                f"`model` names no {missing}",
                "write `model: {family: llama3, flavor: 8B}` or `model: {hf_config: path/to/config.json}`",
            )


@record
class GpuSpec:
    """A GPU with numbers of the user's own; those not given come from `like`."""

    like: Annotated[str, Field("Catalogue GPU that the other numbers come from.")]
    name: Annotated[str | None, Field("Name to show.")] = None
    memory_gib: Annotated[float | None, Field("Usable memory in GiB.", ge=0.1, le=1e5)] = None
    memory_gb_per_s: Annotated[float | None, Field("Memory bandwidth in 1e9 bytes/s.", ge=1e-2, le=1e7)] = None
    bf16_tflops: Annotated[float | None, Field("Dense bfloat16 peak in 1e12 FLOP/s.", ge=1e-4, le=1e7)] = None
    fp8_tflops: Annotated[float | None, Field("Dense Float8 peak in 1e12 FLOP/s.", ge=1e-4, le=1e7)] = None


@record
class LinkSpec:
    """A link of the catalogue, or one with numbers of the user's own."""

    link: Annotated[str | None, Field("Catalogue name; `titan-plan hardware` lists them.")] = None
    gb_per_s: Annotated[float | None, Field("Unidirectional bandwidth in 1e9 bytes/s.", ge=1e-4, le=1e6)] = None
    latency_us: Annotated[float | None, Field("Latency of one hop in microseconds.", ge=0, le=1e7)] = None
    per_gpu: Annotated[bool | None, Field("True: each GPU has it. False: the node's GPUs share it.")] = None

    def check(self) -> None:
        if self.link is None and self.gb_per_s is None:
            raise InvariantError("link", "a link needs a catalogue name or a bandwidth", "write `{link: ib-ndr-400}`")


@record
class EfficiencySpec:
    """How close to its peaks the GPU comes here, as `titan-plan calibrate` fits it. What is absent is the catalogue's."""

    matmul: Annotated[float | None, Field("Part of the bf16 peak that large matmuls reach.", ge=1e-3, le=1)] = None
    matmul_float8: Annotated[float | None, Field("Part of the 8-bit peak that large matmuls reach.", ge=1e-3, le=1)] = (
        None
    )
    attention: Annotated[float | None, Field("Part of the bf16 peak in attention's forward.", ge=1e-3, le=1)] = None
    attention_backward: Annotated[float | None, Field("The same in backward.", ge=1e-3, le=1)] = None
    memory: Annotated[float | None, Field("Part of the memory bandwidth reached.", ge=1e-3, le=1)] = None
    intra_node: Annotated[float | None, Field("Part of the link inside a node reached.", ge=1e-3, le=1)] = None
    inter_node: Annotated[float | None, Field("Part of the link between nodes reached.", ge=1e-3, le=1)] = None
    overlap_slowdown: Annotated[float | None, Field("Slowdown of computing beside a collective.", ge=0, le=10)] = None
    launch_us: Annotated[float | None, Field("Host time to launch one kernel, microseconds.", ge=0, le=1e5)] = None
    source: Annotated[str | None, Field("What they were fitted on.")] = None


@record
class ClusterSpec:
    """The machines."""

    node: Annotated[str | None, Field("Machine type of the catalogue; gives GPU, count and links at once.")] = None
    gpu: Annotated[str | GpuSpec | None, Field("Catalogue name, or numbers of your own.")] = None
    gpus_per_node: Annotated[int | None, Field("GPUs in one node; 8 when absent.", ge=1, le=10**4)] = None
    nodes: Annotated[int, Field("Number of nodes.", ge=1, le=10**6)] = 1
    intra_node: Annotated[str | LinkSpec | None, Field("Link inside a node; the GPU's own when absent.")] = None
    inter_node: Annotated[str | LinkSpec | None, Field("Link between nodes; needed when nodes > 1.")] = None
    price_per_gpu_hour: Annotated[float | None, Field("Price of one GPU for one hour.", ge=0, le=1e9)] = None
    efficiency: Annotated[EfficiencySpec | None, Field("Calibrated efficiencies; the catalogue's when absent.")] = None

    def check(self) -> None:
        if self.node is None and self.gpu is None:
            raise InvariantError(
                "gpu", "`cluster` names no GPU", "write `gpu: h100-sxm-80gb`; `titan-plan hardware` lists them"
            )


@record
class TrainingSpec:
    """Length, batch and precision of the training."""

    steps: Annotated[int, Field("Optimizer steps.", ge=1, le=10**9)] = 10000
    seq_len: Annotated[int, Field("Tokens per sequence.", ge=1, le=10**9)] = 2048
    local_batch_size: Annotated[
        Auto | int, Field("Sequences per data-parallel rank and accumulation step, or auto.", ge=1, le=10**9)
    ] = "auto"
    global_batch_size: Annotated[
        Auto | int,
        Field("Sequences per step over all ranks; auto or -1 is local x data-parallel ranks.", ge=-1, le=10**9),
    ] = "auto"
    max_norm: Annotated[float, Field("Gradient norm is clipped to this; 0 turns clipping off.", ge=0)] = 1.0
    dtype: Annotated[FloatDtype, Field("Dtype of parameters and gradients between steps.")] = "float32"
    mixed_precision_param: Annotated[Auto | FloatDtype, Field("Dtype of computing; auto is bfloat16 on GPUs.")] = "auto"
    mixed_precision_reduce: Annotated[FloatDtype, Field("Dtype of gradient reduction.")] = "float32"
    enable_cpu_offload: Annotated[bool, Field("Keep parameters and optimizer in host memory.")] = False
    seed: Annotated[int, Field("Base seed of weights and everything drawn.", ge=0, lt=2**63)] = 0
    deterministic: Annotated[bool, Field("Deterministic algorithms only.")] = False
    token_budget: Annotated[float | None, Field("Tokens of the whole training, for time and cost.", ge=1, le=1e20)] = (
        None
    )

    def check(self) -> None:
        if self.global_batch_size == 0:
            raise InvariantError(
                "global_batch_size",
                "`global_batch_size` is 0",
                "use `auto` or a number of sequences",
                rule="batch-product",
            )


@record
class ParamGroupSpec:
    """Optimizer values of some parameters."""

    pattern: Annotated[str, Field("Regular expression searched in the parameter FQN.")]
    lr_scale: Annotated[float, Field("Multiplies lr.", ge=0)] = 1.0
    weight_decay: Annotated[float | None, Field("Replaces weight_decay.", ge=0)] = None


@record
class OptimizerSpec:
    """The optimizer."""

    name: Annotated[
        Literal["AdamW", "Adam", "Muon"], Field("Optimizer; Muon takes the matrices of blocks, AdamW the rest.")
    ] = "AdamW"
    lr: Annotated[float, Field("Peak learning rate.", gt=0)] = 8e-4
    beta1: Annotated[float, Field("First-moment decay; for Muon's matrices its momentum.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field("Second-moment decay.", ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field("Added to the root of the second moment.", gt=0)] = 1e-8
    weight_decay: Annotated[float, Field("Weight decay.", ge=0)] = 0.1
    implementation: Annotated[Literal["fused", "foreach", "for-loop"], Field("How the update is computed.")] = "fused"
    state_dtype: Annotated[FloatDtype, Field("Dtype of the moments.")] = "float32"
    param_groups: Annotated[tuple[ParamGroupSpec, ...], Field("Groups with values of their own.")] = ()


@record
class LrSchedulerSpec:
    """Warmup, stable, decay."""

    warmup_steps: Annotated[int, Field("Steps of linear warmup.", ge=0, le=10**9)] = 200
    total_steps: Annotated[int | None, Field("Length of the curve; training.steps when absent.", ge=1, le=10**9)] = None
    decay_ratio: Annotated[
        float | None,
        Field("Part of the curve that decays, at its end; absent: decay starts right after warmup.", ge=0, le=1),
    ] = None
    decay_type: Annotated[Literal["linear", "sqrt", "cosine"], Field("Shape of the decay.")] = "linear"
    min_lr_factor: Annotated[float, Field("Factor at the end.", ge=0, le=1)] = 0.0


@record
class DataSpec:
    """The training text."""

    source: Annotated[Literal["text", "jsonl", "parquet", "huggingface"], Field("Kind of source.")] = "huggingface"
    dataset: Annotated[str | None, Field("huggingface: name of the dataset, e.g. c4.")] = None
    path: Annotated[str | None, Field("File or folder, relative to where the run starts.")] = None
    tokenizer: Annotated[str | None, Field("tokenizer.json or its folder; model.hf_assets_path when absent.")] = None
    text_field: Annotated[str, Field("Field or column that holds the text.")] = "text"
    add_bos: Annotated[bool, Field("Start documents with the begin-of-text token.")] = True

    def check(self) -> None:
        if self.source != "huggingface" and self.path is None:
            raise InvariantError(
                "path",
                f"`data.source: {self.source}` needs `path`",
                "name a file or folder with the text",
                rule="data-source",
            )
        if self.source != "huggingface" and self.dataset is not None:
            raise InvariantError(
                "dataset",
                f"`data.source: {self.source}` reads `path`, not the dataset `{self.dataset}`",
                "remove `dataset`, or use `source: huggingface`",
                rule="data-source",
            )


@record
class ParallelismSpec:
    """Degrees and schedule, each `auto` or pinned; -1 is `the rest`, once."""

    data_parallel_replicate_degree: Annotated[Auto | int, Field("Replicas of the sharded model.", ge=-1, le=10**7)] = (
        "auto"
    )
    data_parallel_shard_degree: Annotated[
        Auto | int, Field("Ranks that shard parameters; -1 is the rest.", ge=-1, le=10**7)
    ] = "auto"
    context_parallel_degree: Annotated[Auto | int, Field("Ranks that share a sequence.", ge=-1, le=10**7)] = "auto"
    tensor_parallel_degree: Annotated[Auto | int, Field("Ranks that share every matrix.", ge=-1, le=10**7)] = "auto"
    pipeline_parallel_degree: Annotated[Auto | int, Field("Pipeline ranks.", ge=-1, le=10**7)] = "auto"
    expert_parallel_degree: Annotated[Auto | int, Field("Ranks that share the experts.", ge=1, le=10**7)] = "auto"
    expert_tensor_parallel_degree: Annotated[Auto | int, Field("1, or equal to the tensor degree.", ge=1, le=10**7)] = (
        "auto"
    )
    expert_parallel_comm_backend: Annotated[
        Literal["standard", "deepep", "hybridep"], Field("Implementation of token dispatch.")
    ] = "standard"
    expert_capacity_factor: Annotated[
        float | None, Field("Tokens an expert takes, as a multiple of the mean; absent drops none.", gt=0)
    ] = None
    moe_force_load_balance: Annotated[bool, Field("Route round-robin: for measurements only.")] = False
    fsdp_reshard_after_forward: Annotated[
        Auto | Literal["always", "never", "default"] | int,
        Field("Free gathered parameters after forward; default: unless there is a pipeline.", ge=2, le=10**7),
    ] = "auto"
    fsdp_prefetch_forward: Annotated[
        Auto | int, Field("Units that FSDP gathers ahead in forward; 0 leaves it to torch.", ge=0, le=1000)
    ] = "auto"
    fsdp_prefetch_backward: Annotated[Auto | int, Field("The same in backward.", ge=0, le=1000)] = "auto"
    data_parallel_strategy: Annotated[Auto | Literal["fsdp", "ddp"], Field("Shard or replicate parameters.")] = "auto"
    defer_gradient_sync: Annotated[Auto | bool, Field("Reduce gradients only after the last accumulation step.")] = (
        "auto"
    )
    enable_sequence_parallel: Annotated[Auto | bool, Field("Shard norms and residual on the sequence.")] = "auto"
    disable_loss_parallel: Annotated[bool, Field("Gather logits before the loss.")] = False
    enable_async_tensor_parallel: Annotated[Auto | bool, Field("Overlap matmuls with their collectives.")] = "auto"
    kv_head_replication: Annotated[bool, Field("Let the tensor degree exceed the KV heads by replicating them.")] = True
    context_parallel_method: Annotated[
        Auto | Literal["allgather", "ring", "alltoall"], Field("How keys and values meet queries.")
    ] = "auto"
    context_parallel_load_balancer: Annotated[
        Auto | Literal["headtail", "ptrr", "none"], Field("Which parts of the sequence a rank gets.")
    ] = "auto"
    pipeline_parallel_schedule: Annotated[Auto | Schedule, Field("Pipeline schedule.")] = "auto"
    pipeline_parallel_schedule_actions: Annotated[
        tuple[str, ...] | None, Field("A schedule of your own: one row of actions a pipeline rank.")
    ] = None
    pipeline_parallel_microbatch_size: Annotated[Auto | int, Field("Sequences per microbatch.", ge=1, le=10**7)] = (
        "auto"
    )
    pipeline_parallel_layers_per_stage: Annotated[Auto | int, Field("Layers per virtual stage.", ge=1, le=10**7)] = (
        "auto"
    )
    pipeline_parallel_first_stage_less_layers: Annotated[
        int, Field("Weight of the embedding in layers.", ge=0, le=10**4)
    ] = 1
    pipeline_parallel_last_stage_less_layers: Annotated[
        int, Field("Weight of norm and output in layers.", ge=0, le=10**4)
    ] = 1
    module_fqns_per_model_part: Annotated[
        tuple[tuple[str, ...], ...] | None, Field("The modules of each stage, listed outright.")
    ] = None

    def check(self) -> None:
        rest = [name for name in DEGREE_FIELDS.values() if getattr(self, name) == -1]
        if len(rest) > 1:
            raise InvariantError(
                rest[1],
                f"-1 stands for `the rest` and may be used once, but {_list(rest)} all have it",
                rule="mesh-degrees",
            )
        for name in DEGREE_FIELDS.values():
            if getattr(self, name) == 0:
                raise InvariantError(
                    name, f"`{name}` is 0", "use 1 for none, a degree, -1 for the rest, or auto", rule="mesh-degrees"
                )
        for name in ("fsdp_prefetch_forward", "fsdp_prefetch_backward"):
            if self.data_parallel_strategy == "ddp" and getattr(self, name) not in ("auto", 0):
                raise InvariantError(
                    name,
                    f"`{name}` is {getattr(self, name)}, but `data_parallel_strategy: ddp` gathers nothing",
                    f"remove `{name}`, or use `data_parallel_strategy: fsdp`",
                    rule="fsdp-prefetch",
                )


DEGREE_FIELDS: Mapping[str, str] = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
"""Mesh axis -> the spec's field for its degree, in mesh order."""


@record
class ActivationCheckpointSpec:
    """What blocks keep for backward."""

    mode: Annotated[
        Auto | Literal["none", "full", "selective", "memory_budget"], Field("auto keeps as much as memory allows.")
    ] = "auto"
    selective_ac_option: Annotated[
        Literal["op"] | int,
        Field("selective: `op` for per-op saving, or n for full recomputation of every n-th layer.", ge=1, le=10**4),
    ] = "op"
    per_op_sac_force_recompute_mm_shapes_by_fqns: Annotated[
        tuple[str, ...], Field("Linears whose matmul shape is always recomputed.")
    ] = ()
    memory_budget: Annotated[float, Field("memory_budget: 0 is like full, 1 like none.", ge=0, le=1)] = 0.5
    preserve_rng_state: Annotated[bool, Field("Restore RNG state when recomputing.")] = False
    early_stop: Annotated[bool, Field("Stop recomputing once the last needed tensor is back.")] = True
    determinism_check: Annotated[Literal["default", "none"], Field("Compare recomputed metadata.")] = "default"

    def check(self) -> None:
        by_op = self.mode in ("auto", "selective") and self.selective_ac_option == "op"
        if self.per_op_sac_force_recompute_mm_shapes_by_fqns and not by_op:
            raise InvariantError(
                "per_op_sac_force_recompute_mm_shapes_by_fqns",
                "linears to recompute go with the mode selective and the option `op` only",
                "remove them, or use `mode: selective` with `selective_ac_option: op`",
                rule="ac-options",
            )


@record
class Float8Spec:
    """Linears in 8-bit floats."""

    recipe: Annotated[Auto | Float8Recipe | Literal["none"], Field("Scaling recipe.")] = "auto"
    filter_fqns: Annotated[
        tuple[str, ...],
        Field(
            "Linears that stay in high precision: parts of FQNs, or auto_filter_small_kn for those too small to gain."
        ),
    ] = ()
    grouped_mm_fqns: Annotated[
        tuple[str, ...], Field("Experts whose grouped products run in the recipe (mxfp8 only): parts of FQNs.")
    ] = ()
    enable_fsdp_float8_all_gather: Annotated[bool, Field("FSDP gathers in Float8 (tensorwise only).")] = False
    precompute_float8_dynamic_scale_for_fsdp: Annotated[bool, Field("One step for all scales.")] = False
    emulate: Annotated[bool, Field("Emulate where the hardware lacks Float8.")] = False

    def check(self) -> None:
        if self.recipe == "none" and self.emulate:
            raise InvariantError(
                "emulate",
                "`emulate` is on, but the recipe is none",
                "remove `emulate`, or name a recipe",
                rule="float8-options",
            )


@record
class CompileSpec:
    """torch.compile."""

    enable: Annotated[Auto | bool, Field("Compile at all; auto does on GPUs.")] = "auto"
    components: Annotated[tuple[Literal["model", "loss"], ...], Field("What is compiled.")] = ("model", "loss")
    backend: Annotated[str, Field("Compiler backend.")] = "inductor"

    def check(self) -> None:
        if self.enable is not False and not self.components:
            raise InvariantError(
                "components",
                "`components` is empty, so nothing would be compiled",
                "name model or loss, or write `enable: false`",
                rule="compile-components",
            )


@record
class LossSpec:
    """Cross-entropy."""

    chunks: Annotated[Auto | int, Field("Chunks of the sequence for head and loss.", ge=1, le=10**6)] = "auto"
    z_loss: Annotated[float, Field("Weight of the squared log-partition penalty.", ge=0)] = 0.0


@record
class CheckpointSpec:
    """Saving and resuming."""

    enable: Annotated[bool, Field("Save and resume at all.")] = False
    folder: Annotated[str, Field("Under dump_folder.")] = "checkpoint"
    interval: Annotated[int, Field("Steps between saves.", ge=1, le=10**9)] = 500
    interval_minutes: Annotated[float | None, Field("Also after this many minutes.", gt=0, le=10**6)] = None
    keep_latest_k: Annotated[int, Field("Saves kept; 0 keeps all; 1 is refused.", ge=0, le=10**6)] = 10
    async_mode: Annotated[
        Literal["disabled", "async", "async_with_pinned_mem"], Field("Whether saving overlaps training.")
    ] = "disabled"
    enable_first_step_checkpoint: Annotated[bool, Field("Save after step 1, to fail early.")] = False
    last_save_model_only: Annotated[bool, Field("The final save holds weights only; it cannot be resumed.")] = False
    last_save_in_hf: Annotated[bool, Field("Also write the final weights as Hugging Face safetensors.")] = False
    export_dtype: Annotated[Literal["float32", "bfloat16", "float16"], Field("Dtype of a weights-only save.")] = (
        "float32"
    )
    initial_load_path: Annotated[str | None, Field("Checkpoint to start from when the run has none.")] = None
    initial_load_model_only: Annotated[bool, Field("Take only the weights from it.")] = True
    load_step: Annotated[int, Field("Step to resume from; -1 is the latest.", ge=-1, le=10**9)] = -1
    exclude_from_loading: Annotated[
        tuple[Literal["optimizer", "lr_schedule", "data", "train_state"], ...], Field("Parts that are not loaded.")
    ] = ()

    def check(self) -> None:
        check_keep_latest_k(self.keep_latest_k)


@record
class MetricsSpec:
    """Logging."""

    log_freq: Annotated[int, Field("Steps between log lines.", ge=1, le=10**9)] = 10
    enable_tensorboard: Annotated[bool, Field("Write TensorBoard scalars.")] = False
    save_tb_folder: Annotated[str, Field("Under dump_folder.")] = "tb"
    save_for_all_ranks: Annotated[bool, Field("Every rank writes its own.")] = False
    enable_wandb: Annotated[bool, Field("Also log to Weights & Biases.")] = False


@record
class ProfilingSpec:
    """Traces."""

    enable_profiling: Annotated[bool, Field("Record torch.profiler traces.")] = False
    save_traces_folder: Annotated[str, Field("Under dump_folder.")] = "profile_traces"
    profile_freq: Annotated[int, Field("Steps between traces.", ge=1, le=10**9)] = 10
    profiler_active: Annotated[int, Field("Steps recorded.", ge=1, le=10**6)] = 1
    profiler_warmup: Annotated[int, Field("Warmup steps before.", ge=0, le=10**6)] = 3
    enable_memory_snapshot: Annotated[bool, Field("Record CUDA memory snapshots.")] = False

    def check(self) -> None:
        check_profile_freq(self.profile_freq, self.profiler_warmup, self.profiler_active)


@record
class CommSpec:
    """Timeouts of collectives."""

    init_timeout_seconds: Annotated[int, Field("Until the first step has finished.", ge=1, le=MAX_TIMEOUT_SECONDS)] = (
        300
    )
    train_timeout_seconds: Annotated[int, Field("From then on.", ge=1, le=MAX_TIMEOUT_SECONDS)] = 100
    trace_buf_size: Annotated[int, Field("Entries of the flight recorder.", ge=0, le=10**6)] = 20000


@record
class ValidationSpec:
    """Loss on held-out text."""

    enable: Annotated[bool, Field("Validate at all.")] = False
    path: Annotated[str | None, Field("File or folder of the held-out text.")] = None
    freq: Annotated[int, Field("Steps between validations.", ge=1, le=10**9)] = 10
    steps: Annotated[int, Field("Global batches per validation; -1 for one pass over the text.", ge=-1, le=10**9)] = -1


@record
class LimitsSpec:
    """What the planner must respect."""

    memory_headroom: Annotated[float, Field("Part of device memory that stays free.", ge=0, lt=1)] = 0.1
    keep_tp_in_node: Annotated[bool, Field("Never let tensor parallelism span nodes.")] = True
    max_tp: Annotated[int | None, Field("Largest tensor degree.", ge=1, le=10**7)] = None
    expert_imbalance: Annotated[
        float,
        Field(
            "Rows of the busiest expert rank over the mean, for estimates; 1 where routing is forced even.",
            ge=1,
            le=1000,
        ),
    ] = 1.1
    deadline_days: Annotated[
        float | None,
        Field("The training must finish within so many days; needs training.token_budget.", gt=0, le=10**5),
    ] = None


Objective: TypeAlias = Literal["max_throughput", "min_gpus", "min_cost", "min_memory"]


@record
class Request:
    """The part of a spec that passes honour; embedded in the plan, so that a plan says what was asked."""

    local_batch_size: Annotated[Auto | int, Field("Pinned local batch, or auto.", ge=1, le=10**9)]
    global_batch_size: Annotated[Auto | int, Field("Pinned global batch, or auto.", ge=-1, le=10**9)]
    parallelism: ParallelismSpec
    activation_checkpoint: ActivationCheckpointSpec
    float8: Float8Spec
    compile: CompileSpec
    loss: LossSpec
    objective: Annotated[Objective, Field("What the search optimises.")]
    limits: LimitsSpec


@record
class Spec:
    """A whole spec file."""

    spec_version: Annotated[Literal[1], Field("Format version.")]
    name: Annotated[str, Field("Name of the plan; the file's or its folder's name when absent.")] = ""
    description: Annotated[str, Field("What it is for.")] = ""
    dump_folder: Annotated[str, Field("Root of everything the run writes.")] = "./outputs"
    model: Annotated[ModelSpec, Field("The model.")]
    cluster: Annotated[ClusterSpec, Field("The machines.")]
    training: Annotated[TrainingSpec, Field("Length, batch and precision.")] = TrainingSpec()
    optimizer: Annotated[OptimizerSpec, Field("The optimizer.")] = OptimizerSpec()
    lr_scheduler: Annotated[LrSchedulerSpec, Field("The learning-rate curve.")] = LrSchedulerSpec()
    data: Annotated[DataSpec, Field("The training text.")] = DataSpec()
    parallelism: Annotated[Auto | ParallelismSpec, Field("Degrees and schedule; auto leaves all to the planner.")] = (
        "auto"
    )
    activation_checkpoint: Annotated[Auto | ActivationCheckpointSpec, Field("Recomputation.")] = "auto"
    float8: Annotated[
        Literal["auto", "none"] | Float8Spec, Field("8-bit linears; absent is none, because they change numerics.")
    ] = "none"
    compile: Annotated[Auto | CompileSpec, Field("torch.compile.")] = "auto"
    loss: Annotated[LossSpec, Field("The loss.")] = LossSpec()
    checkpoint: Annotated[CheckpointSpec, Field("Saving and resuming.")] = CheckpointSpec()
    metrics: Annotated[MetricsSpec, Field("Logging.")] = MetricsSpec()
    profiling: Annotated[ProfilingSpec, Field("Traces.")] = ProfilingSpec()
    comm: Annotated[CommSpec, Field("Timeouts.")] = CommSpec()
    validation: Annotated[ValidationSpec, Field("Held-out loss.")] = ValidationSpec()
    environment: Annotated[Mapping[str, str], Field("Environment variables of every rank.")] = field(
        default_factory=dict
    )
    objective: Annotated[Objective, Field("What the search optimises.")] = "max_throughput"
    limits: Annotated[LimitsSpec, Field("What the planner must respect.")] = LimitsSpec()

    def request(self) -> Request:
        """What passes honour, with every section spelled out."""
        float8 = self.float8
        if isinstance(float8, str):
            float8 = Float8Spec(recipe="none" if float8 == "none" else "auto")
        return Request(
            local_batch_size=self.training.local_batch_size,
            global_batch_size=self.training.global_batch_size,
            parallelism=ParallelismSpec() if isinstance(self.parallelism, str) else self.parallelism,
            activation_checkpoint=(
                ActivationCheckpointSpec()
                if isinstance(self.activation_checkpoint, str)
                else self.activation_checkpoint
            ),
            float8=float8,
            compile=CompileSpec() if isinstance(self.compile, str) else self.compile,
            loss=self.loss,
            objective=self.objective,
            limits=self.limits,
        )


def _list(names: list[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)
