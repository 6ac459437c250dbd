"""A row as a plan with every decision pinned, and the program that ran it. From the row's fields only; no fit check.

What a row does not say is assumed by a rule that is written here, and every assumption is listed with the plan.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.published.hardware import cluster_of
from benchmarks.published.model import model_of
from benchmarks.published.rows import MALFORMED, NOT_PUBLISHED, Row, Unusable
from titan_planner.cost.estimate import estimate
from titan_planner.cost.program import (
    COMPOSER,
    DDP_MIXED,
    DEEPSPEED_BF16,
    DEEPSPEED_ZERO1,
    FUSED_FSDP,
    MEGATRON,
    NEMO,
    TORCHTITAN,
    XLA_FSDP,
    Program,
)
from titan_planner.ir.cluster import Cluster
from titan_planner.ir.errors import PlanError, SpecError
from titan_planner.ir.execution import Float8Recipe
from titan_planner.ir.fqn import fold
from titan_planner.ir.inventory import parameters, top_level_modules
from titan_planner.ir.model import Model
from titan_planner.ir.parallel import V_SCHEDULES, Schedule
from titan_planner.ir.plan import Plan
from titan_planner.ir.request import (
    ActivationCheckpointSpec,
    ClusterSpec,
    CompileSpec,
    Float8Spec,
    LimitsSpec,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelismSpec,
    Spec,
    TrainingSpec,
)
from titan_planner.ir.rules import mixtures
from titan_planner.ir.verify import verify
from titan_planner.lower import Problem, lower
from titan_planner.passes.context import Context
from titan_planner.passes.filter_float8 import AUTO_FILTER, filter_float8
from titan_planner.passes.select_checkpointing import select_checkpointing
from titan_planner.stages import InfeasibleStages, even_split

RECOMPUTE = "recomputation cannot be expressed"

_TASKS = ("pretrain", "memory")
_KINDS = ("measured", "derived", "fake_backend")


@dataclass(frozen=True, slots=True)
class Built:
    """What a row became. `time_unlike` and `memory_unlike` say why a prediction could not be held against it."""

    plan: Plan
    program: Program
    assumptions: tuple[str, ...]
    time_unlike: str | None = None
    memory_unlike: str | None = None


@dataclass(frozen=True, slots=True)
class _Degrees:
    """Parallelism of a row, complete."""

    pp: int
    vpp: int | None
    dp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    etp: int
    sequence_parallel: bool


def to_plan(row: Row) -> Built:
    """The row as a plan and a program. Raises `Unusable` with the reason when it cannot be expressed."""
    _refuse(row)
    assume: list[str] = []
    fsdp = _is_fully_sharded(row, assume)
    cluster = cluster_of(row, assume)
    degrees = _degrees(row, cluster.num_gpus, fsdp, assume)
    # Megatron pads the vocabulary to a multiple of 128 x tp; elsewhere only what tp needs.
    model = model_of(row, degrees.tp if fsdp else 128 * degrees.tp, assume)
    if degrees.ep > 1 and not mixtures(model):
        assume.append("ep is of no effect without experts")
        degrees = replace(degrees, ep=1, etp=1)
    micro, local, accumulation = _batch(row, degrees, fsdp, assume)
    program, compiled = _program(row, fsdp, cluster, assume)
    recipe, filters, experts_in_float8 = _float8(row, model, program, assume)
    checkpoint = _recompute(row, fsdp, compiled, assume)
    schedule, layers = _pipeline(row, model, degrees, local // micro, fsdp, assume)
    low_precision = fsdp and _holds(row, r"bf16 (master|params|param)\b|bf16[ -]?true|pure bf16")
    state_in_bf16 = low_precision or _holds(row, r"opt_states_bf16|bf16 (optimizer )?(moment|state)", "optimizer")
    pins = _Pins(
        training=TrainingSpec(
            seq_len=model.max_seq_len,
            local_batch_size=local,
            global_batch_size=local * degrees.dp * accumulation,
            dtype="bfloat16" if low_precision else "float32",
            mixed_precision_param="bfloat16",
            mixed_precision_reduce=_reduce_dtype(row, low_precision),
        ),
        optimizer=OptimizerSpec(
            state_dtype="bfloat16" if state_in_bf16 else "float32",
            implementation="foreach" if state_in_bf16 and not low_precision else "fused",
        ),
        parallelism=ParallelismSpec(
            data_parallel_replicate_degree=degrees.dp_replicate,
            data_parallel_shard_degree=degrees.dp_shard,
            context_parallel_degree=degrees.cp,
            tensor_parallel_degree=degrees.tp,
            pipeline_parallel_degree=degrees.pp,
            expert_parallel_degree=degrees.ep,
            expert_tensor_parallel_degree=degrees.etp,
            fsdp_reshard_after_forward=_reshard(row),
            data_parallel_strategy="fsdp",
            defer_gradient_sync=False,
            enable_sequence_parallel=degrees.sequence_parallel,
            context_parallel_method=_context_method(row, fsdp, degrees, assume),
            pipeline_parallel_schedule=schedule or "auto",
            pipeline_parallel_microbatch_size=micro,
            module_fqns_per_model_part=layers,
        ),
        activation_checkpoint=checkpoint.spec,
        float8=Float8Spec(
            recipe=recipe or "none",
            filter_fqns=filters,
            enable_fsdp_float8_all_gather=_gathers_float8(row, recipe, fsdp),
        ),
        compile=CompileSpec(enable=compiled, components=_components(row, compiled, cluster, assume)),
        loss=LossSpec(chunks=_chunks(row, fsdp, assume)),
    )
    plan = _pinned(pins, model, cluster, row.id)
    if experts_in_float8:
        plan = _with_experts_in_float8(plan)
    plan = _with_expert_options(plan, row)
    plan, program = _overlap(row, plan, program)
    if checkpoint.first_layers is not None:
        plan = _first_layers_only(plan, checkpoint.first_layers)
    program = replace(program, recompute_attention=checkpoint.core, query_key_norms=_norms_queries(row, assume))
    if checkpoint.unknown:
        plan = _least_that_fits(plan, program, fsdp, assume)
    if experts_in_float8 or checkpoint.first_layers is not None or plan.tensor_parallel.async_tp:
        # Changed after it was verified. The rule about linears has no word for experts in 8-bit floats.
        _require_rules(plan, {"float8-linears"} if experts_in_float8 else set())
    unlike = checkpoint.memory_unlike
    if _holds(row, r"fp16 gradients plus fp32 main"):
        unlike = unlike or "gradients held twice"
    return Built(plan, program, tuple(assume), memory_unlike=unlike)


def _require_rules(plan: Plan, but: set[str]) -> None:
    broken = [complaint for complaint in verify(plan) if complaint.rule not in but]
    if broken:
        raise Unusable(f"breaks the rule {broken[0].rule}", broken[0].message)


def _refuse(row: Row) -> None:
    if row.problem is not None:
        raise Unusable(MALFORMED, row.problem)
    task, kind = row.text("task"), row.text("kind")
    if task not in _TASKS:
        raise Unusable("not a pre-training step", f"task {task or 'not given'}")
    if kind and kind not in _KINDS:
        raise Unusable("not a measurement", f"kind {kind}")
    offload = [
        name
        for name, value in row.section("overlap").items()
        if "offload" in name and value not in (None, False, 0, "none", "")
    ]
    if offload or re.search(r"offload", row.text("recompute").casefold()):
        raise Unusable("activations in host memory", ", ".join(offload) or "recompute")


def _holds(row: Row, pattern: str, path: str = "precision") -> bool:
    return re.search(pattern, row.text(path).casefold()) is not None


# ------------------------------------------------------------------ who shards what


def _is_fully_sharded(row: Row, assume: list[str]) -> bool:
    """Whether weights are sharded over data ranks (ZeRO-2 and 3 of the rows: FSDP), or whole on every one."""
    stage = row.count("parallelism.zero_stage", minimum=0)
    if stage is not None:
        if stage > 3:
            raise Unusable(MALFORMED, f"zero_stage {stage}")
        return stage >= 2
    if (row.count("parallelism.dp_shard") or 1) > 1:
        assume.append("FSDP, as dp_shard is given")
        return True
    return False


def _zero1(row: Row, assume: list[str]) -> bool:
    stage = row.count("parallelism.zero_stage", minimum=0)
    if stage is None:
        # fp16 tables are of 2020 to 2022, before Megatron had the distributed optimizer.
        sharded = row.text("tags.precision_class") != "fp16"
        assume.append("distributed optimizer" if sharded else "plain data parallelism")
        return sharded
    return stage == 1


def _program(row: Row, fsdp: bool, cluster: Cluster, assume: list[str]) -> tuple[Program, bool]:
    """The program, and whether the plan is compiled."""
    program, compiled = _sharding_program(row, fsdp, cluster, assume)
    program = _with_attention(row, program, assume)
    return (program if fsdp else _megatron_options(row, program)), compiled


def _megatron_options(row: Row, program: Program) -> Program:
    """Dropout, and whether the loss is fused: where the row tells, and not before such kernels were there (fp16)."""
    rates = (row.number_at("model.hidden_dropout"), row.number_at("model.attention_dropout"))
    fused = row.flag("kernels.cross_entropy_loss_fusion")
    if fused is None:
        fused = row.text("tags.precision_class") != "fp16" and not _is_deepspeed(row)
    # Megatron's `native` fusion compiles its functions, which then no longer write over their arguments.
    compiled = row.text("kernels.cross_entropy_fusion_impl") == "native"
    return replace(program, dropout=any(rates), loss_copies=(2 if compiled else 0) if fused else 1)


def _norms_queries(row: Row, assume: list[str]) -> bool:
    """Whether the model is one that norms queries and keys; plans have no word for it, so that their time is not counted."""
    found = re.search(r"qwen-?3", row.text("model.name").casefold()) is not None
    if found:
        assume.append("norms of queries and keys counted in memory only")
    return found


def _is_deepspeed(row: Row) -> bool:
    return "deepspeed" in f"{row.text('framework')} {row.text('parallelism.pp_schedule')}".casefold()


def _with_attention(row: Row, program: Program, assume: list[str]) -> Program:
    """`program` with the generation of its attention kernel, where the row tells another than the program's usual one."""
    told = f"{row.text('kernels.attention_backend')} {row.text('overlap.attention')}".casefold()
    if re.search(r"unfused|math|eager", told) or row.text("kernels.transformer_impl") == "local":
        return replace(program, attention="materialised")
    if re.search(r"cudnn|fused|\bte\b|fa3|flash.?attention.?3", told):
        return replace(program, attention="third")
    if "flash" in told:
        return replace(program, attention="second")
    if row.text("tags.precision_class") == "fp16" or _is_deepspeed(row):
        # Mixed precision in fp16 is of 2020 to 2022, as Megatron-DeepSpeed is, before FlashAttention came to these programs.
        assume.append("attention scores in memory, as before FlashAttention")
        return replace(program, attention="materialised")
    return program


def _sharding_program(row: Row, fsdp: bool, cluster: Cluster, assume: list[str]) -> tuple[Program, bool]:
    compiled, graphs = _compiled(row, assume if fsdp else [])
    about = _software(row)
    if fsdp:
        if re.search(r"jax|maxtext|paxml", about):
            return XLA_FSDP, False
        if re.search(r"\bte\b|transformer.?engine|megatron|nemo", about) or row.text("container"):
            return FUSED_FSDP, False
        precision = row.text("precision").casefold()
        if re.search(r"\bamp\b|autocast|transformer ?engine", precision) and not compiled:
            return COMPOSER, False
        # Tables of Blackwell, and of TorchTitan's graph trainer, are of torch 2.9 and later.
        recent = _is_blackwell(cluster) or re.search(r"graph_trainer|toolkit", row.text("compile")) is not None
        early = "june 2024" in row.text("recompute").casefold()
        program = replace(TORCHTITAN, norm_kernel=recent, returns_outputs=not recent, wide_logits=early)
        if row.count("parallelism.zero_stage") == 2 and not row.text("overlap.reshard_after_forward"):
            program = replace(program, name="zero2", data_policy="zero2", executable=False)
        return replace(program, graphs=graphs), compiled
    sharded = _zero1(row, assume)
    if _holds(row, r"(fp16|bf16) grad\w* accum|fp16 grad\w* only") and sharded:
        program = DEEPSPEED_ZERO1
    elif sharded and _is_deepspeed(row):
        program = DEEPSPEED_BF16
    elif not sharded:
        program = DDP_MIXED
    elif _is_nemo(row):
        program = NEMO
    else:
        program = MEGATRON
    if _holds(row, r"bf16", "optimizer_state_dtypes.exp_avg_dtype"):
        program = replace(program, moment_bytes=4)
    if compiled:
        program = replace(program, kernels="compiled")
    return replace(program, graphs=program.graphs or graphs), False


def _software(row: Row) -> str:
    """What the row names as its software: its framework and kernels, or else what was published by that name."""
    named = row.text("framework") or f"{row.text('source.title')} {row.text('source.repo')}"
    return f"{named} {row.text('overlap.kernels')} {row.text('kernels.transformer_impl')}".casefold()


def _is_nemo(row: Row) -> bool:
    return bool(row.text("container")) or "nemo" in _software(row)


def _compiled(row: Row, assume: list[str]) -> tuple[bool, bool]:
    """(whether memory-bound ops are fused by a compiler, whether CUDA graphs hide launches)."""
    told = row.value("compile")
    if isinstance(told, bool):
        return told, False
    text = row.text("compile").casefold()
    graphs = "cudagraph" in text.replace(" ", "") or "cuda graph" in text
    if not text:
        assume.append("not compiled")
        return False, False
    if re.search(r"\beager\b|no (kernel|inductor|fusion)|without", text):
        return False, graphs
    return re.search(
        r"\byes\b|inductor|thunder|torchcompile|nvfuser|passes|true|per block|xla", text
    ) is not None, graphs


def _components(row: Row, compiled: bool, cluster: Cluster, assume: list[str]) -> tuple[Literal["model", "loss"], ...]:
    """What is compiled: a row that says `compile: true` says it of the blocks; the loss is where it is named.

    TorchTitan compiled blocks only until 2025; tables of Blackwell GPUs and AMD's are of later, when the loss was too.
    """
    text, notes = row.text("compile").casefold(), row.text("notes").casefold()
    if "loss-only compile" in notes:
        return ("loss",)
    if "model components" in text or "model-only compile" in notes:
        return ("model",)
    if not compiled or "loss" in text:
        return ("model", "loss")
    if cluster.gpu.vendor == "amd" or _is_blackwell(cluster):
        assume.append("the loss is compiled too, as in TorchTitan of 2025 and later")
        return ("model", "loss")
    assume.append("the loss is not compiled")
    return ("model",)


def _is_blackwell(cluster: Cluster) -> bool:
    return (cluster.gpu.compute_capability or "0").startswith(("10", "12"))


def _chunks(row: Row, fsdp: bool, assume: list[str]) -> int:
    """Parts in which head and loss take their turn. TorchTitan's chunked loss has eight when it is not told how many."""
    if not fsdp:
        return 1
    notes = row.text("notes").casefold()
    told = re.search(r"(?:chunks ?|num_chunks )(\d+)", notes)
    if told:
        return max(1, int(told[1]))
    if "chunked cross entropy" in notes:
        return 8
    if "autoresearch parallelize" in row.text("source.title").casefold():
        assume.append("the loss in eight chunks, TorchTitan's default in May 2026")
        return 8
    return 1


def _reduce_dtype(row: Row, low_precision: bool) -> Literal["float32", "bfloat16"]:
    told = f"{row.text('overlap.grad_reduce_dtype')} {row.text('overlap.fsdp_mp_mode')}".casefold()
    # Composer's mode PURE reduces in the computing dtype, DEFAULT in float32.
    return "bfloat16" if low_precision or re.search(r"bf16|bfloat16|\bpure\b", told) else "float32"


def _reshard(row: Row) -> Literal["auto", "always", "never", "default"]:
    told = row.text("overlap.reshard_after_forward").casefold()
    if told in ("always", "true"):
        return "always"
    if told in ("never", "false") or (row.count("parallelism.zero_stage", minimum=0) == 2):
        return "never"
    return "default" if told == "default" else "auto"


def _context_method(
    row: Row, fsdp: bool, degrees: _Degrees, assume: list[str]
) -> Literal["allgather", "ring", "alltoall"]:
    told = row.text("overlap.cp_comm_type").casefold()
    if "a2a" in told or "alltoall" in told:
        return "alltoall"
    if "gather" in told:
        return "allgather"
    if "p2p" in told or "ring" in told:
        return "ring"
    if degrees.cp > 1:
        assume.append("context parallelism by " + ("all-gather" if fsdp else "ring"))
    # TorchTitan gathers keys and values, Megatron sends them round.
    return "allgather" if fsdp else "ring"


# ------------------------------------------------------------------ degrees and batch


def _degrees(row: Row, gpus: int, fsdp: bool, assume: list[str]) -> _Degrees:
    def degree(name: str) -> int:
        return row.count(f"parallelism.{name}") or 1

    missing = [name for name in ("tp", "pp") if row.count(f"parallelism.{name}") is None]
    if missing and gpus > 1:
        raise Unusable(NOT_PUBLISHED, ", ".join(f"parallelism.{name}" for name in missing))
    tp, pp, cp = degree("tp"), degree("pp"), degree("cp")
    if gpus % (tp * pp * cp):
        raise Unusable("degrees do not make up the GPUs", f"tp {tp} x pp {pp} x cp {cp} on {gpus}")
    dp = row.count("parallelism.dp") or gpus // (tp * pp * cp)
    if dp * tp * pp * cp != gpus:
        raise Unusable("degrees do not make up the GPUs", f"dp {dp} x tp {tp} x pp {pp} x cp {cp} on {gpus}")
    replicate, shard = row.count("parallelism.dp_replicate"), row.count("parallelism.dp_shard")
    if fsdp:
        shard = shard or dp // (replicate or 1)
        replicate = dp // shard
        if replicate * shard != dp:
            raise Unusable("degrees do not make up the GPUs", f"dp_replicate x dp_shard is not dp {dp}")
    else:
        shard = _optimizer_shards(row, dp)
        replicate = dp // shard
    ep = row.count("parallelism.ep") or 1
    if not fsdp and ep > 1 and shard * cp * tp % ep:
        replicate, shard = 1, dp  # experts are shared over more ranks than shard the optimizer
    etp = row.count("parallelism.etp")
    if etp is None:
        etp = 1
        if ep > 1 and tp > 1:
            assume.append("experts are not cut by tp")
    told = row.flag("parallelism.sp")
    sequence = tp > 1 and (told is not False)
    if told is None and tp > 1:
        assume.append("sequence parallel with tp")
    vpp = row.count("parallelism.vpp")
    return _Degrees(pp, vpp, dp, replicate, shard, cp, tp, ep, etp, sequence)


def _optimizer_shards(row: Row, dp: int) -> int:
    """Ranks over which the optimizer is sharded: all data ranks unless the row names a group that divides them."""
    told = row.value("parallelism.optimizer_shard_group")
    group = row.count("parallelism.optimizer_shard_group") if str(told).isdecimal() else None
    return group if group is not None and dp % group == 0 else dp


def _batch(row: Row, degrees: _Degrees, fsdp: bool, assume: list[str]) -> tuple[int, int, int]:
    """(sequences a microbatch, local batch, accumulation steps); in a pipeline the local batch is all its microbatches."""
    micro, total = row.count("batch.micro"), row.count("batch.global")
    steps, local = row.count("batch.grad_accum"), row.count("batch.local")
    dp = degrees.dp
    if total is None and (micro or local) and steps is None and fsdp:
        steps = 1
        assume.append("no gradient accumulation")
    if micro is None and local is not None:
        # TorchTitan's default microbatch of a pipeline is one sequence; without one it is the local batch.
        micro = 1 if degrees.pp > 1 else local
        assume.append(f"microbatches of {micro}")
    if total is None and micro is not None and steps is not None:
        total = micro * steps * dp
    if micro is None and total is not None and steps is not None and total % (dp * steps) == 0:
        micro = total // (dp * steps)
    if micro is None or total is None:
        raise Unusable(
            NOT_PUBLISHED, ", ".join(n for n, v in (("batch.micro", micro), ("batch.global", total)) if v is None)
        )
    if total % (dp * micro):
        raise Unusable("batch does not divide", f"global {total} over dp {dp} x micro {micro}")
    made = total // (dp * micro)
    if steps is not None and steps != made:
        assume.append(f"{made} microbatches a step, from the global batch; printed are {steps}")
    if degrees.pp == 1:
        return micro, micro, made
    if local is not None and local % micro == 0 and total % (dp * local) == 0:
        return micro, local, total // (dp * local)
    return micro, made * micro, 1


# ------------------------------------------------------------------ pipeline


def _pipeline(
    row: Row, model: Model, degrees: _Degrees, microbatches: int, fsdp: bool, assume: list[str]
) -> tuple[Schedule | None, tuple[tuple[str, ...], ...] | None]:
    """The schedule, and the modules of every stage."""
    if degrees.pp == 1:
        return None, None
    schedule, per_rank = _schedule(row, degrees)
    held = model.num_layers // degrees.pp
    printed = degrees.vpp is not None or row.text("parallelism.pp_schedule")
    even = held % 2 == 0 and held > 2 and model.num_layers % degrees.pp == 0 and microbatches % degrees.pp == 0
    if not printed and even and _is_nemo(row):
        # NVIDIA's recipes for performance interleave every pipeline; where the degree is not printed, two layers a stage.
        schedule, per_rank = "Interleaved1F1B", held // 2
        assume.append("interleaved stages of two layers")
    if schedule == "1F1B" and microbatches < degrees.pp:
        # Torch's 1F1B wants as many microbatches as stages; with fewer it is GPipe's order.
        schedule = "GPipe"
        assume.append(f"GPipe for 1F1B with {microbatches} microbatches on {degrees.pp} stages")
    return schedule, _stages(row, model, degrees.pp * per_rank, fsdp, assume)


def _schedule(row: Row, degrees: _Degrees) -> tuple[Schedule, int]:
    """The schedule in torch's spelling, and stages a rank."""
    text = re.sub(r"[^a-z0-9]", "", row.text("parallelism.pp_schedule").casefold())
    several = degrees.vpp is not None and degrees.vpp > 1
    if "zbv" in text or "zerobubblev" in text:
        schedule: Schedule = "ZBVZeroBubble"
    elif "dualpipev" in text:
        schedule = "DualPipeV"
    elif "dualpipe" in text:
        raise Unusable("schedule has no counterpart", row.text("parallelism.pp_schedule"))
    elif "zerobubble" in text or text.startswith("zb"):
        schedule = "InterleavedZeroBubble"
    elif "loopedbfs" in text or "breadthfirst" in text:
        schedule = "LoopedBFS"
    elif "gpipe" in text or "afab" in text or "allforward" in text:
        schedule = "LoopedBFS" if several else "GPipe"
    elif "interleaved" in text or several:
        schedule = "Interleaved1F1B"
    else:
        schedule = "1F1B"
    if schedule in V_SCHEDULES:
        return schedule, 2
    if schedule in ("1F1B", "GPipe"):
        return schedule, 1
    if degrees.vpp == 1:
        return ("InterleavedZeroBubble", 1) if schedule == "InterleavedZeroBubble" else ("1F1B", 1)
    if degrees.vpp is None and "notprinted" in text:
        raise Unusable(NOT_PUBLISHED, "parallelism.vpp")
    return schedule, degrees.vpp or 2


def _stages(row: Row, model: Model, stages: int, fsdp: bool, assume: list[str]) -> tuple[tuple[str, ...], ...]:
    names = top_level_modules(model)
    counts = _laid_out(row, model.num_layers, stages)
    if counts is not None:
        stage_of = [0, *(stage for stage, count in enumerate(counts) for _ in range(count)), stages - 1, stages - 1]
    else:
        stage_of = _even(model, stages, fsdp, assume)
    parts: list[list[str]] = [[] for _ in range(stages)]
    for name, stage in zip(names, stage_of, strict=True):
        parts[stage].append(name)
    return tuple(fold(part) for part in parts)


def _even(model: Model, stages: int, fsdp: bool, assume: list[str]) -> list[int]:
    """Stage of every top-level module. Raises `Unusable` when a stage would hold nothing.

    TorchTitan weighs embedding and output as a layer each. Megatron does where that comes out even, and else they weigh
    nothing; an outer stage then may hold no layer.
    """
    layers = model.num_layers
    each, rest = divmod(layers + 2, stages)
    if not fsdp and layers % stages and not rest:
        counts = [each - (stage in (0, stages - 1)) for stage in range(stages)]
        return [0, *(stage for stage, count in enumerate(counts) for _ in range(count)), stages - 1, stages - 1]
    try:
        found = even_split(model, stages, 1 if fsdp else 0, 1 if fsdp else 0)
    except InfeasibleStages as error:
        raise Unusable("stages cannot be made", error.message) from None
    if not fsdp and layers % stages:
        assume.append(f"{layers} layers on {stages} stages, as even as can be")
    return list(found)


def _laid_out(row: Row, layers: int, stages: int) -> list[int] | None:
    """Layers of every stage of a Megatron layout such as `Et*3|(tt|)*22L`; None without one, or when it is of other sizes."""
    text = row.text("parallelism.pp_layout") or row.text("overlap.pp_layout")
    if not re.fullmatch(r"[EtmL|()*\d, ]+", text) or not text:
        return None
    for pattern in (r"\(([^()]*)\)\*(\d{1,3})", r"([Etm|])\*(\d{1,3})"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    counts = [part.count("t") for part in text.split("|")]
    return counts if sum(counts) == layers and len(counts) == stages and all(counts) else None


# ------------------------------------------------------------------ precision


def _float8(
    row: Row, model: Model, program: Program, assume: list[str]
) -> tuple[Float8Recipe | None, tuple[str, ...], bool]:
    """(recipe, linears that stay, whether experts are converted too)."""
    text = f"{row.text('precision')} {row.text('tags.precision_class')}".casefold()
    text = re.sub(r"\b(no|not|without) (fp8|float8)", "", text)
    if "fp4" in text:
        raise Unusable("precision has no recipe yet", "NVFP4")
    if re.search(r"not captured|unknown", text) or not text.strip():
        raise Unusable(NOT_PUBLISHED, "precision")
    if not re.search(r"fp8|float8|mxfp8", text):
        if re.search(r"fp16|float16", text) and "bf16" not in text:
            assume.append("fp16 priced as bf16")
        elif not re.search(r"bf16|bfloat16|fp16", text):
            raise Unusable("precision has no recipe yet", row.text("precision"))
        return None, (), False
    recipe: Float8Recipe
    if "mxfp8" in text or "mx fp8" in text:
        recipe = "mxfp8"
    elif "rowwise_with_gw_hp" in text:
        recipe = "rowwise_with_gw_hp"
    elif "rowwise" in text:
        recipe = "rowwise"
    elif "blockwise" in text:
        recipe = "rowwise"
        assume.append("blockwise scaling priced as rowwise")
    else:
        recipe = "tensorwise"
        if not re.search(r"tensorwise|current|delayed|per.tensor|hybrid", text):
            assume.append("tensorwise scaling")
    grouped = "grouped gemms only" in text
    experts = bool(mixtures(model)) and not re.search(r"linears only", text)
    experts = experts and (not program.executable or re.search(r"expert|grouped", text) is not None)
    filters: list[str] = []
    if not re.search(r"all linears", text):
        filters.append("output")  # neither Transformer Engine's layers nor TorchTitan's defaults have it
    if re.search(r"wkv|wk ?, ?wv|wk/wv", text):
        filters += ["attention.wk", "attention.wv"]
    if "auto-filter" in text and "no auto-filter" not in text and recipe in ("tensorwise", "rowwise"):
        filters.append(AUTO_FILTER)
    if grouped:
        filters += ["attention", "feed_forward", "shared_experts"]
    known = [name for name in filters if name == AUTO_FILTER or _names_a_linear(model, name)]
    return recipe, tuple(known), experts


def _names_a_linear(model: Model, pattern: str) -> bool:
    return any(pattern in parameter.fqn for parameter in parameters(model))


def _gathers_float8(row: Row, recipe: str | None, fsdp: bool) -> bool:
    text = row.text("precision").casefold()
    return fsdp and recipe == "tensorwise" and re.search(r"(fp8|float8) (fsdp )?(all-?gather|param)", text) is not None


def _with_experts_in_float8(plan: Plan) -> Plan:
    experts = fold(dict.fromkeys(p.target for p in parameters(plan.model) if p.is_expert))
    return replace(plan, float8=replace(plan.float8, converted=(*plan.float8.converted, *experts)))


def _with_expert_options(plan: Plan, row: Row) -> Plan:
    if not mixtures(plan.model):
        return plan
    about = f"{row.text('overlap')} {row.text('model.moe')}".casefold()
    notes = f"{row.text('notes')} {row.text('overlap.routing')}".casefold()
    balanced = (
        row.flag("overlap.moe_router_force_load_balancing") is True or row.flag("model.moe.pad_to_capacity") is True
    )
    balanced = (
        balanced
        or re.search(r"(force|fake|random).{0,25}balanc|balanc.{0,12}(gate|routing)|random.{0,12}routing", notes)
        is not None
    )
    capacity = row.positive("model.moe.capacity_factor")
    options = replace(
        plan.expert_parallel,
        comm_backend="hybridep" if "hybridep" in about else "deepep" if "deepep" in about else "standard",
        capacity_factor=capacity,
        force_load_balance=balanced,
    )
    return replace(plan, expert_parallel=options)


# ------------------------------------------------------------------ recomputation


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What the row recomputes: the spec's words, and what those have none for."""

    spec: ActivationCheckpointSpec
    unknown: bool = False  # not published
    core: bool = False  # attention's forward runs again
    first_layers: int | None = None  # full recomputation of so many layers of every stage only
    memory_unlike: str | None = None


_NONE = ActivationCheckpointSpec(mode="none")
_FULL = ActivationCheckpointSpec(mode="full")
_SELECTIVE = ActivationCheckpointSpec(mode="selective", selective_ac_option="op")

# Parts of a block that Megatron recomputes alone, and that cost next to no time.
_CHEAP = {"layernorm", "norm", "moe_act", "act", "swiglu", "core_attn", "core", "attention", "mla_up_proj"}


def _recompute(row: Row, fsdp: bool, compiled: bool, assume: list[str]) -> _Checkpoint:
    told = row.value("recompute")
    text = row.text("recompute").casefold()
    tag = row.text("tags.recompute_class").casefold()
    if tag == "unknown" or (not text and tag in ("", "unknown")):
        return _Checkpoint(_NONE, unknown=True)
    if isinstance(told, dict):
        return _modules(row, told, tag, assume)
    if tag == "other" or "except" in text:
        raise Unusable(RECOMPUTE, row.text("recompute")[:60])
    if tag == "none" or (text.startswith("none") and not tag):
        return _Checkpoint(_NONE)
    if tag == "budget" or "budget" in text:
        number = re.search(r"budget\D*(\d*\.?\d+)", text)
        if number is None or not 0 <= float(number[1]) <= 1:
            raise Unusable(RECOMPUTE, row.text("recompute")[:60])
        if not compiled:
            raise Unusable(RECOMPUTE, "a memory budget without the compiler")
        return _Checkpoint(ActivationCheckpointSpec(mode="memory_budget", memory_budget=float(number[1])))
    every = re.search(r"every\s+(\d+|second|other|n)(?:st|nd|rd|th)?\b|every n-th", text)
    if every is not None and fsdp:
        number_text = every[1] or "n"
        if number_text == "n":
            raise Unusable(NOT_PUBLISHED, "how many layers are recomputed")
        interval = int(number_text) if number_text.isdecimal() else 2
        return _Checkpoint(ActivationCheckpointSpec(mode="selective", selective_ac_option=max(1, interval)))
    if tag == "full" or text.startswith("full"):
        return _Checkpoint(_FULL)
    if fsdp:
        if re.search(r"selective layer", text):
            assume.append("every second layer recomputed")
            return _Checkpoint(ActivationCheckpointSpec(mode="selective", selective_ac_option=2))
        if re.search(r"graph", text):
            assume.append("a graph's selective recomputation priced as TorchTitan's by op")
        return _Checkpoint(_SELECTIVE)
    words = [w for w in re.findall(r"[a-z_]+", re.sub(r"\(.*?\)|selective", " ", text)) if w not in ("all", "three")]
    return _of_modules([] if "attention" in text or "core" in text else words, assume)


def _modules(row: Row, told: dict[str, object], tag: str, assume: list[str]) -> _Checkpoint:
    """Megatron's settings: a granularity with a number of layers, or modules."""
    granularity = str(told.get("granularity") or tag).casefold()
    if granularity == "full":
        layers = told.get("num_layers") or told.get("recompute_num_layers")
        method = str(told.get("method") or "").casefold()
        if method == "block" and isinstance(layers, int) and layers > 0:
            return _Checkpoint(_FULL, first_layers=layers)
        if isinstance(layers, int) and layers > 1:
            assume.append(f"groups of {layers} recomputed layers priced as single ones")
            return _Checkpoint(_FULL, memory_unlike="recomputation in groups of layers")
        return _Checkpoint(_FULL)
    named = told.get("recompute_modules") or told.get("modules") or ""
    words = [str(name) for name in named] if isinstance(named, list) else re.findall(r"[a-z_]+", str(named).casefold())
    return _of_modules(words, assume)


def _of_modules(words: list[str], assume: list[str]) -> _Checkpoint:
    costly = [word for word in words if word not in _CHEAP]
    if costly:
        raise Unusable(RECOMPUTE, f"of {', '.join(costly)[:60]} only")
    if not words or set(words) <= {"core_attn", "core", "attention"}:
        return _Checkpoint(_NONE, core=True)
    assume.append(f"recomputing {', '.join(words)} priced as recomputing nothing")
    return _Checkpoint(_NONE, memory_unlike="recomputation of single modules")


def _first_layers_only(plan: Plan, count: int) -> Plan:
    """Full recomputation of the first `count` layers of every stage."""
    seen: dict[int, int] = {}
    layers = []
    for layer in plan.layers:
        if layer.fqn.startswith("layers."):
            seen[layer.stage] = seen.get(layer.stage, 0) + 1
            if seen[layer.stage] > count:
                layer = replace(layer, checkpoint="none")
        layers.append(layer)
    return replace(plan, layers=tuple(layers))


MEMORY_ERROR = 0.05
"""How far the memory estimate may be off, as its target says."""


def _least_that_fits(plan: Plan, program: Program, fsdp: bool, assume: list[str]) -> Plan:
    """Where the row does not say: it ran, so the least recomputation that fits."""
    modes = (_NONE, _SELECTIVE, _FULL) if fsdp else (_NONE, _FULL)
    for asked in modes:
        candidate = _checkpointed(plan, asked)
        priced = estimate(candidate, program)
        # Runs are tuned to the edge of the card, and the estimate has an error of its own.
        if asked is _FULL or priced.peak_memory_gib <= priced.memory_available_gib * (1 + MEMORY_ERROR):
            break
    assume.append(f"recomputation {asked.mode}: the least that fits")
    return candidate


def _checkpointed(plan: Plan, asked: ActivationCheckpointSpec) -> Plan:
    request = replace(plan.request, activation_checkpoint=asked)
    return select_checkpointing(replace(plan, request=request), _context())


# ------------------------------------------------------------------ putting it together


def _context() -> Context:
    return Context("published", finish=lambda plan: plan)


@dataclass(frozen=True, slots=True)
class _Pins:
    """The sections of a spec that rows decide."""

    training: TrainingSpec
    optimizer: OptimizerSpec
    parallelism: ParallelismSpec
    activation_checkpoint: ActivationCheckpointSpec
    float8: Float8Spec
    compile: CompileSpec
    loss: LossSpec


@functools.lru_cache(maxsize=512)
def _lowered(pins: _Pins, model: Model, cluster: Cluster) -> Plan | Unusable:
    spec = Spec(
        spec_version=1,
        # Not read: model and machines are given outright.
        model=ModelSpec(family="published", flavor="row"),
        cluster=ClusterSpec(gpu=cluster.gpu.name),
        training=pins.training,
        optimizer=pins.optimizer,
        parallelism=pins.parallelism,
        activation_checkpoint=pins.activation_checkpoint,
        float8=pins.float8,
        compile=pins.compile,
        loss=pins.loss,
        # The whole card counts: what is not the plan's is a reserve of the estimate.
        limits=LimitsSpec(memory_headroom=0.0, keep_tp_in_node=False),
    )
    try:
        plan = lower(Problem(spec=spec, model=model, cluster=cluster, name="published"))
    except SpecError as error:
        first = error.complaints[0]
        return Unusable(f"breaks the rule {first.rule}" if first.rule else "cannot be lowered", first.message)
    except PlanError as error:
        return Unusable("cannot be lowered", error.complaints[0].message)
    for apply in (filter_float8, select_checkpointing):
        plan = apply(plan, _context())
    enabled = plan.request.compile.enable is True
    plan = replace(plan, compile=replace(plan.compile, enable=enabled))
    try:
        _require_rules(plan, set())
    except Unusable as error:
        return error
    return plan


def _pinned(pins: _Pins, model: Model, cluster: Cluster, name: str) -> Plan:
    """The plan of the pins, without any search. Rows of equal configurations share it but for the name."""
    found = _lowered(pins, model, cluster)
    if isinstance(found, Unusable):
        raise Unusable(found.kind, found.detail)
    return replace(found, name=name)


def _overlap(row: Row, plan: Plan, program: Program) -> tuple[Plan, Program]:
    """Collectives beside computing, and CUDA graphs, where the row tells."""
    tensor = row.flag("overlap.tp_overlap")
    if tensor is None:
        tensor = row.flag("overlap.tp_linear_async_communication")
    asynchronous = row.flag("overlap.async_tp")
    if asynchronous and plan.mesh.tp > 1 and program.name == TORCHTITAN.name:
        if plan.compile.enable and plan.tensor_parallel.sequence_parallel:
            plan = replace(plan, tensor_parallel=replace(plan.tensor_parallel, async_tp=True))
        else:
            tensor = True
    gradients, weights = row.flag("overlap.grad_reduce_overlap"), row.flag("overlap.param_gather_overlap")
    implementation = row.text("overlap.cuda_graph_impl").casefold()
    graphs = row.flag("overlap.cuda_graphs") is True or implementation not in ("", "none", "null")
    return plan, replace(
        program,
        overlap_tensor=program.overlap_tensor if tensor is None else tensor,
        overlap_gradients=program.overlap_gradients if gradients is None else gradients,
        overlap_weights=program.overlap_weights if weights is None else weights,
        graphs=program.graphs or graphs,
    )
