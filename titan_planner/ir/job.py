"""What is trained on, how it is optimised, and what the run writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from titan_planner.ir.errors import InvariantError
from titan_planner.ir.record import Field, record
from titan_planner.ir.request import MAX_TIMEOUT_SECONDS, check_keep_latest_k, check_profile_freq


@record
class Batch:
    """How a step's samples are cut. global = local x dp x accumulation steps, in sequences."""

    seq_len: Annotated[int, Field("Tokens per sequence.", ge=1, le=10**9)]
    global_batch_size: Annotated[int, Field("Sequences per optimizer step over all ranks.", ge=1, le=10**9)]
    local_batch_size: Annotated[int, Field("Sequences per data-parallel rank and accumulation step.", ge=1, le=10**9)]
    microbatch_size: Annotated[
        int, Field("Sequences per pipeline microbatch; divides local_batch_size.", ge=1, le=10**9)
    ]
    accumulation_steps: Annotated[int, Field("Forward-backward passes per optimizer step.", ge=1, le=10**9)]

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step over all ranks."""
        return self.seq_len * self.global_batch_size


@record
class ParamGroup:
    """Parameters with their own optimizer values. The first group whose pattern matches an FQN claims it."""

    pattern: Annotated[str, Field("Regular expression searched in the parameter FQN.")]
    lr_scale: Annotated[float, Field("Multiplies the learning rate.", ge=0)]
    weight_decay: Annotated[float | None, Field("Replaces weight_decay; null keeps it.", ge=0)]


@record
class Optimizer:
    """The optimizer, with the seed's fields. Muon takes the matrices of blocks, and AdamW everything else."""

    name: Annotated[Literal["AdamW", "Adam", "Muon"], Field("Optimizer.")]
    lr: Annotated[float, Field("Peak learning rate.", gt=0)]
    beta1: Annotated[float, Field("First-moment decay; for Muon's matrices its momentum.", ge=0, lt=1)]
    beta2: Annotated[float, Field("Second-moment decay.", ge=0, lt=1)]
    eps: Annotated[float, Field("Added to the root of the second moment.", gt=0)]
    weight_decay: Annotated[float, Field("Weight decay (decoupled for AdamW).", ge=0)]
    implementation: Annotated[Literal["fused", "foreach", "for-loop"], Field("How the update is computed.")]
    state_dtype: Annotated[Literal["float32", "bfloat16"], Field("Dtype of the moments.")]
    max_norm: Annotated[float, Field("Global gradient norm is clipped to this; 0 turns clipping off.", ge=0)]
    param_groups: Annotated[tuple[ParamGroup, ...], Field("Groups with values of their own; all others use the above.")]


@record
class LrSchedule:
    """Warmup, stable, decay. The factor at step s (from 0) multiplies the peak rate."""

    warmup_steps: Annotated[int, Field("Steps of linear warmup.", ge=0, le=10**9)]
    total_steps: Annotated[
        int, Field("Length of the whole curve in steps; independent of how long a run goes.", ge=1, le=10**9)
    ]
    decay_steps: Annotated[int, Field("Steps of decay at the end of the curve.", ge=0, le=10**9)]
    decay_type: Annotated[Literal["linear", "sqrt", "cosine"], Field("Shape of the decay.")]
    min_lr_factor: Annotated[float, Field("Factor at the end of the decay.", ge=0, le=1)]

    def check(self) -> None:
        if self.warmup_steps + self.decay_steps > self.total_steps:
            raise InvariantError(
                "decay_steps",
                f"warmup {self.warmup_steps} + decay {self.decay_steps} steps exceed the curve's "
                f"`total_steps` {self.total_steps}",
                rule="lr-curve",
            )


@record
class Data:
    """The training text and how it becomes samples."""

    source: Annotated[Literal["text", "jsonl", "parquet", "huggingface"], Field("Kind of source.")]
    dataset: Annotated[str | None, Field("huggingface: name of the dataset, e.g. c4.")]
    path: Annotated[str | None, Field("File or folder, relative to where the run starts.", decision=False)]
    tokenizer: Annotated[str | None, Field("tokenizer.json, or a folder with one.", decision=False)]
    text_field: Annotated[str, Field("Field or column that holds the text of a record.")]
    add_bos: Annotated[bool, Field("Start every document with the begin-of-text token where the tokenizer has one.")]


@record
class Seeds:
    """Randomness: initial weights and everything drawn later."""

    seed: Annotated[int, Field("Base seed.", ge=0, lt=2**63)]
    deterministic: Annotated[bool, Field("Use deterministic algorithms; same plan, same bits.")]


@record
class Checkpoint:
    """When and how training state is saved and loaded."""

    enable: Annotated[bool, Field("Save and resume at all.")]
    folder: Annotated[str, Field("Under dump_folder.")]
    interval: Annotated[int, Field("Steps between saves.", ge=1, le=10**9)]
    interval_minutes: Annotated[
        float | None, Field("Also save after this many minutes; null for steps only.", gt=0, le=10**6)
    ]
    keep_latest_k: Annotated[int, Field("Saves kept; 0 keeps all.", ge=0, le=10**6)]
    async_mode: Annotated[
        Literal["disabled", "async", "async_with_pinned_mem"], Field("Whether saving overlaps training.")
    ]
    enable_first_step_checkpoint: Annotated[bool, Field("Save after step 1, to fail early.")]
    last_save_model_only: Annotated[bool, Field("The final save holds weights only and cannot be resumed.")]
    last_save_in_hf: Annotated[bool, Field("The final save is also written as Hugging Face safetensors.")]
    export_dtype: Annotated[Literal["float32", "bfloat16", "float16"], Field("Dtype of a weights-only final save.")]
    initial_load_path: Annotated[str | None, Field("Checkpoint to start from when the run has none of its own.")]
    initial_load_model_only: Annotated[bool, Field("Take only the weights from it.")]
    load_step: Annotated[int, Field("Step to resume from; -1 is the latest complete one.", ge=-1, le=10**9)]
    exclude_from_loading: Annotated[
        tuple[Literal["optimizer", "lr_schedule", "data", "train_state"], ...], Field("Parts that are not loaded.")
    ]

    def check(self) -> None:
        check_keep_latest_k(self.keep_latest_k)


@record
class Metrics:
    """What is logged."""

    log_freq: Annotated[int, Field("Steps between log lines.", ge=1, le=10**9)]
    enable_tensorboard: Annotated[bool, Field("Write TensorBoard scalars.")]
    save_tb_folder: Annotated[str, Field("Under dump_folder.")]
    save_for_all_ranks: Annotated[bool, Field("Every rank writes its own scalars, not rank 0 only.")]
    enable_wandb: Annotated[bool, Field("Also log to Weights & Biases.")]


@record
class Profiling:
    """torch.profiler traces and memory snapshots."""

    enable_profiling: Annotated[bool, Field("Record traces.")]
    save_traces_folder: Annotated[str, Field("Under dump_folder.")]
    profile_freq: Annotated[int, Field("Steps between traces.", ge=1, le=10**9)]
    profiler_active: Annotated[int, Field("Steps recorded in a trace.", ge=1, le=10**6)]
    profiler_warmup: Annotated[int, Field("Steps before it in which the profiler warms up.", ge=0, le=10**6)]
    enable_memory_snapshot: Annotated[bool, Field("Record CUDA memory snapshots.")]

    def check(self) -> None:
        check_profile_freq(self.profile_freq, self.profiler_warmup, self.profiler_active)


@record
class Comm:
    """Timeouts of collectives."""

    init_timeout_seconds: Annotated[int, Field("Until the first step has finished.", ge=1, le=MAX_TIMEOUT_SECONDS)]
    train_timeout_seconds: Annotated[int, Field("From then on.", ge=1, le=MAX_TIMEOUT_SECONDS)]
    trace_buf_size: Annotated[int, Field("Entries of the NCCL flight recorder; 0 turns it off.", ge=0, le=10**6)]


@record
class Validation:
    """Loss on held-out text during training."""

    enable: Annotated[bool, Field("Validate at all.")]
    path: Annotated[
        str | None, Field("File or folder of the held-out text; the kind of source is the training data's.")
    ]
    freq: Annotated[int, Field("Steps between validations.", ge=1, le=10**9)]
    steps: Annotated[int, Field("Global batches per validation; -1 for one pass over the text.", ge=-1, le=10**9)]


@record
class Job:
    """Everything about a run that changes nothing of what is trained; the command line may override it."""

    steps: Annotated[int, Field("Optimizer steps to train.", ge=1, le=10**9)]
    dump_folder: Annotated[str, Field("Root of everything the run writes, relative to where it starts.")]
    checkpoint: Checkpoint
    metrics: Metrics
    profiling: Profiling
    comm: Comm
    validation: Validation
    environment: Annotated[Mapping[str, str], Field("Environment variables that the launcher sets on every rank.")]
    token_budget: Annotated[
        float | None, Field("Tokens of the whole training run, for time and cost estimates.", ge=1, le=1e20)
    ]
