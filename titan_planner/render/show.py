"""A whole plan on a page: what it is for, every decision, the model as the ranks hold it, stages, memory, estimate."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any

from titan_planner.ir.codec import digest, encode
from titan_planner.ir.fqn import fold, select
from titan_planner.ir.inventory import expert_modules, num_params
from titan_planner.ir.parallel import AXES
from titan_planner.ir.plan import Plan, StageMemory, StepTime
from titan_planner.render import values
from titan_planner.render.asked import summary
from titan_planner.render.modules import Group, Modules, Weight, policy_words, reshard_words
from titan_planner.render.tables import PLAIN, Style, cut, table

MEMORY_PARTS = {
    "parameters_gib": "weights",
    "gradients_gib": "grads",
    "optimizer_gib": "optim",
    "unsharded_gib": "gathered",
    "activations_gib": "activ",
    "logits_gib": "logits",
    "float8_gib": "fp8",
    "communication_gib": "comm",
    "allocator_gib": "alloc",
    "reserve_gib": "reserve",
    "total_gib": "total",
}
"""Field of `StageMemory` -> head of its column."""

_SHOWN_WHERE_THERE_IS_ANY = ("float8_gib", "communication_gib", "allocator_gib", "reserve_gib")


def show(plan: Plan, width: int = 100, *, style: Style = PLAIN) -> str:
    """The plan as text, no line wider than `width` columns."""
    modules = Modules(plan)
    lines = [f"{style.bold(plan.name or 'plan')}  {style.dim(values.digest_of(plan))}"]
    if plan.description:
        lines += textwrap.wrap(plan.description, width, initial_indent="  ", subsequent_indent="  ")
    lines += table(_header(plan), width=width)
    lines += ["", style.bold("decisions")]
    lines += table([(n, v, style.dim(a)) if a else (n, v) for n, v, a in decisions(plan, modules)], width=width, flex=1)
    lines += ["", style.bold("modules") + "  global shape -> largest shape on a rank"]
    for group in modules.groups():
        lines += _group(plan, group, style, width)
    if plan.float8.skipped:
        kept = [(skipped.module, skipped.reason) for skipped in plan.float8.skipped]
        lines += ["", style.bold("kept in high precision"), *table(kept, width=width)]
    where = " at its first stage" if len(plan.pipeline.stages) > plan.mesh.pp else ""
    lines += ["", style.bold("stages") + (f"  memory of a rank{where}, in GiB" if plan.estimate else "")]
    lines += table(stage_rows(plan), right=range(3, 10), width=width, flex=2)
    lines += ["", style.bold("estimate"), *_estimate(plan, style, width)]
    counts = Counter(remark.kind for remark in plan.remarks)
    told = ", ".join(f"{counts[kind]} {kind}" for kind in ("applied", "missed", "analysis"))
    lines += ["", f"remarks: {told}  {style.dim('(titan-plan explain)')}"]
    return "\n".join(lines)


def show_json(plan: Plan) -> dict[str, Any]:
    """What `show` says, as plain data."""
    modules = Modules(plan)
    model, estimate = plan.model, plan.estimate
    counts = Counter(remark.kind for remark in plan.remarks)
    return {
        "name": plan.name,
        "description": plan.description,
        "digest": digest(plan),
        "model": {
            "family": model.family,
            "flavor": model.flavor,
            "num_params": num_params(model),
            "num_layers": model.num_layers,
            "dim": model.dim,
            "vocab_size": model.vocab_size,
        },
        "cluster": {"gpu": plan.cluster.gpu.name, "nodes": plan.cluster.nodes, "num_gpus": plan.cluster.num_gpus},
        "mesh": {**encode(plan.mesh), "world_size": plan.mesh.world_size, "text": values.mesh(plan.mesh)},
        "decisions": [{"name": n, "value": v, "asked": a or None} for n, v, a in decisions(plan, modules)],
        "modules": [
            {
                "modules": list(fold(f"layers.{i}" for i in group.layers)) or [group.fqn],
                "count": max(1, len(group.layers)),
                "stages": list(group.stages),
                "checkpoint": group.checkpoint,
                "parameters": [weight_json(weight) for weight in group.weights],
            }
            for group in modules.groups()
        ],
        "stages": [
            {
                "stage": stage.index,
                "pp_rank": stage.pp_rank,
                "modules": list(fold(layer.fqn for layer in plan.layers if layer.stage == stage.index)),
                "memory": _memory_json(_memory_of(plan, stage.index)),
            }
            for stage in plan.pipeline.stages
        ],
        "estimate": None
        if estimate is None
        else {
            **{name: part for name, part in encode(estimate).items() if name != "memory"},
            "peak_memory_gib": estimate.peak_memory_gib,
        },
        "remarks": {kind: counts[kind] for kind in ("applied", "missed", "analysis")},
    }


def weight_json(weight: Weight) -> dict[str, Any]:
    """One parameter as plain data."""
    float8 = weight.float8
    return {
        "name": weight.name,
        "shape": list(weight.shape),
        "local_shape": list(weight.local_shape),
        "placements": dict(weight.placements),
        "float8": None if float8 is None else {"converted": float8.converted, "reason": float8.reason},
    }


# ------------------------------------------------------------------ header and decisions


def _header(plan: Plan) -> list[tuple[str, str]]:
    model, cluster, batch = plan.model, plan.cluster, plan.batch
    size = f"{values.count(num_params(model))} parameters" + (", tied" if model.tied else "")
    gpus = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name} = {cluster.num_gpus} GPUs"
    between = f", {cluster.inter_node.name} between nodes" if cluster.nodes > 1 else ""
    tokens = values.count(batch.tokens_per_step)
    return [
        ("model", f"{model.family} {model.flavor}: {model.num_layers} layers of width {model.dim}, {size}"),
        ("cluster", f"{gpus}, {cluster.intra_node.name} inside{between}"),
        ("mesh", values.mesh(plan.mesh)),
        ("batch", f"{batch.global_batch_size} x {batch.seq_len} = {tokens} tokens a step"),
    ]


def decisions(plan: Plan, modules: Modules) -> list[tuple[str, str, str]]:
    """Every decision in one line: its name, what was decided, and whether it was pinned or left to the planner."""
    mesh = plan.mesh
    # Name, words, and the addresses whose pins are told; axes of degree 1 have nothing to say.
    rows: tuple[tuple[str, str, list[str]], ...] = (
        ("mesh", values.mesh(mesh), [f"mesh.{axis}" for axis in AXES]),
        ("batch", _batch(plan), ["batch.local_batch_size", "batch.global_batch_size"]),
        ("pipeline", _pipeline(plan), ["pipeline.schedule", "pipeline.stages", "batch.microbatch_size"]),
        ("data parallel", _data_parallel(plan), ["fsdp.strategy", "fsdp.units", "fsdp.defer_gradient_sync"]),
        ("tensor parallel", _tensor_parallel(plan), [f"tensor_parallel.{option}" for option in _TP_OPTIONS]),
        ("context parallel", _context_parallel(plan), ["context_parallel.method", "context_parallel.load_balance"]),
        ("expert parallel", _expert_parallel(plan), ["mesh.ep", "mesh.etp"]),
        ("checkpointing", checkpointing_words(plan), ["layers.*.checkpoint"]),
        ("float8", float8_words(plan, modules), ["float8.recipe"]),
        ("compile", _compile(plan), ["compile.enable"]),
        ("loss", _loss(plan), ["loss.chunks"]),
        ("precision", _precision(plan), []),
        ("optimizer", _optimizer(plan), []),
        ("lr schedule", _lr_schedule(plan), []),
        ("data", " ".join(part for part in (plan.data.source, plan.data.dataset, plan.data.path) if part), []),
        ("run", f"{plan.job.steps} steps, seed {plan.seeds.seed}, {_saves(plan)}", []),
    )
    return [(name, words, summary(plan, addresses)) for name, words, addresses in rows if words]


_TP_OPTIONS = ("sequence_parallel", "loss_parallel", "async_tp")


def _batch(plan: Plan) -> str:
    batch, dp = plan.batch, plan.mesh.dp
    factors = f"{batch.local_batch_size} local x {dp} data-parallel x {batch.accumulation_steps} accumulation"
    return f"{factors} = {batch.global_batch_size}"


def _pipeline(plan: Plan) -> str:
    pipe = plan.pipeline
    if plan.mesh.pp == 1:
        return ""
    name = "own actions" if pipe.actions else pipe.schedule or "no schedule"
    each = f" ({pipe.stages_per_rank} a rank)" if pipe.stages_per_rank > 1 else ""
    return f"{name}, {len(pipe.stages)} stages{each}, {pipe.microbatches} microbatches of {plan.batch.microbatch_size}"


def _tensor_parallel(plan: Plan) -> str:
    tensor = plan.tensor_parallel
    if plan.mesh.tp == 1:
        return ""
    words = [
        "sequence parallel" if tensor.sequence_parallel else "no sequence parallel",
        "loss parallel" if tensor.loss_parallel else "logits gathered",
        "async" if tensor.async_tp else "",
        f"each KV head on {tensor.kv_replicas} ranks" if tensor.kv_replicas > 1 else "",
    ]
    return ", ".join(word for word in words if word)


def _context_parallel(plan: Plan) -> str:
    context = plan.context_parallel
    return f"{context.method}, balanced by {context.load_balance}" if plan.mesh.cp > 1 else ""


def _expert_parallel(plan: Plan) -> str:
    experts = plan.expert_parallel
    capacity = "drops no token" if experts.capacity_factor is None else f"capacity {experts.capacity_factor:g}"
    return f"{experts.comm_backend}, {capacity}" if plan.mesh.ep > 1 else ""


def _compile(plan: Plan) -> str:
    return f"{' and '.join(plan.compile.components)} with {plan.compile.backend}" if plan.compile.enable else "off"


def _loss(plan: Plan) -> str:
    chunks = f"cross-entropy in {plan.loss.chunks} chunk{'s' * (plan.loss.chunks > 1)}"
    return chunks + (f", z-loss {plan.loss.z_loss:g}" if plan.loss.z_loss else "")


def _precision(plan: Plan) -> str:
    fsdp = plan.fsdp
    return f"weights {plan.dtype}, compute {fsdp.param_dtype}, gradients reduced in {fsdp.reduce_dtype}"


def _optimizer(plan: Plan) -> str:
    opt = plan.optimizer
    values_ = f"lr {opt.lr:g}, betas {opt.beta1:g} {opt.beta2:g}, decay {opt.weight_decay:g}, clip {opt.max_norm:g}"
    groups = f", {len(opt.param_groups)} groups" if opt.param_groups else ""
    return f"{opt.name} {values_}, {opt.implementation}, {opt.state_dtype} moments{groups}"


def _lr_schedule(plan: Plan) -> str:
    lr = plan.lr_schedule
    stable = lr.total_steps - lr.warmup_steps - lr.decay_steps
    return f"{lr.warmup_steps} warmup, {stable} stable, {lr.decay_steps} {lr.decay_type} decay to {lr.min_lr_factor:g}"


def _data_parallel(plan: Plan) -> str:
    fsdp, mesh = plan.fsdp, plan.mesh
    if mesh.dp * mesh.cp == 1:
        return "one rank holds all"
    if fsdp.strategy == "ddp":
        return f"DDP over {mesh.dp} ranks"
    blocks = [unit for unit in fsdp.units if any(selector.startswith("layers.") for selector in unit.modules)]
    freed = dict.fromkeys(reshard_words(unit.reshard_after_forward) for unit in blocks)
    prefetch = fsdp.prefetch_forward + fsdp.prefetch_backward
    words = [
        f"FSDP over {mesh.fsdp} ranks",
        f"replicated {mesh.dp_replicate} times" if mesh.dp_replicate > 1 else "",
        f"layers {' or '.join(freed)}" if freed else "one unit",
        f"prefetch {fsdp.prefetch_forward}/{fsdp.prefetch_backward}" if prefetch else "",
        "gradients reduced once a step" if fsdp.defer_gradient_sync else "",
        "offloaded to host memory" if fsdp.cpu_offload else "",
    ]
    return ", ".join(word for word in words if word)


def checkpointing_words(plan: Plan) -> str:
    """Which layers use which policy: `layers.0-31 full, layers.32-125 none`."""
    by_policy: dict[str, list[int]] = {}
    for layer in plan.layers:
        if layer.fqn.startswith("layers."):
            by_policy.setdefault(layer.checkpoint, []).append(int(layer.fqn.partition(".")[2]))
    if len(by_policy) == 1:
        name = next(iter(by_policy))
        policy = plan.activation_checkpoint.policy(name)
        return f"{name} in all layers" + (f": {policy_words(policy)}" if policy and policy.mode != "none" else "")
    return ", ".join(f"layers.{values.numbers(layers)} {name}" for name, layers in by_policy.items())


def float8_words(plan: Plan, modules: Modules) -> str:
    """The recipe and how many linears it covers."""
    if plan.float8.recipe is None:
        return "off"
    experts = [fqn for selector in plan.float8.experts for fqn in select(selector, expert_modules(plan.model))]
    converted = sum(1 for name in modules.linears if (status := modules.float8(name)) and status.converted)
    options = [
        *([f"experts of {len(experts)} layers"] if experts else []),
        *(["Float8 all-gather"] if plan.float8.enable_fsdp_float8_all_gather else []),
        *(["scales precomputed"] if plan.float8.precompute_float8_dynamic_scale_for_fsdp else []),
        *(["emulated"] if plan.float8.emulate else []),
    ]
    return ", ".join([f"{plan.float8.recipe}, {converted} of {len(modules.linears)} linears", *options])


def _saves(plan: Plan) -> str:
    checkpoint = plan.job.checkpoint
    if not checkpoint.enable:
        return "saves no checkpoint"
    how = "" if checkpoint.async_mode == "disabled" else f" ({checkpoint.async_mode})"
    return f"saves every {checkpoint.interval} steps{how}"


# ------------------------------------------------------------------ modules, stages, estimate


def _group(plan: Plan, group: Group, style: Style, width: int) -> list[str]:
    stages = f"stage{'s' * (len(group.stages) > 1)} {values.numbers(sorted(group.stages))}"
    if not group.layers:
        rows = [weight_row(plan, weight) for weight in group.weights]
        if not rows:
            rows = [(group.fqn, "tied to tok_embeddings", "", "", "", "")]
        return table([(*row, style.dim(stages)) for row in rows], width=width)
    many = f" (x{len(group.layers)})" if len(group.layers) > 1 else ""
    policy = plan.activation_checkpoint.policy(group.checkpoint)
    name = f"checkpoint {group.checkpoint}" if policy is None or policy.mode != "none" else "no checkpointing"
    head = f"  {style.bold(f'layers.{values.numbers(group.layers)}')}{many}  {name}  {style.dim(stages)}"
    return [cut(head, width), *table([weight_row(plan, weight) for weight in group.weights], indent=4, width=width)]


def weight_row(plan: Plan, weight: Weight) -> tuple[str, str, str, str, str, str]:
    """Name, shape, arrow, local shape, placements and Float8 of one parameter."""
    float8 = ""
    if weight.float8 is not None and plan.float8.recipe is not None:
        float8 = f"float8 {plan.float8.recipe}" if weight.float8.converted else "high precision"
    placements = " ".join(f"{axis} {placement}" for axis, placement in weight.placements)
    return weight.module, values.shape(weight.shape), "->", values.shape(weight.local_shape), placements, float8


def _memory_of(plan: Plan, stage: int) -> StageMemory | None:
    return next((memory for memory in plan.estimate.memory if memory.stage == stage), None) if plan.estimate else None


def _memory_json(memory: StageMemory | None) -> dict[str, Any] | None:
    return None if memory is None else {**encode(memory), "total_gib": memory.total_gib}


def stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The table of stages with its header line."""
    header: tuple[str, ...] = ("stage", "rank", "modules")
    stages = plan.estimate.memory if plan.estimate else ()
    parts = {
        part: word
        for part, word in MEMORY_PARTS.items()
        if part not in _SHOWN_WHERE_THERE_IS_ANY or any(getattr(stage, part) for stage in stages)
    }
    if plan.estimate:
        header = (*header, *parts.values())
    rows = [header]
    held: dict[int, list[str]] = {}
    for layer in plan.layers:
        held.setdefault(layer.stage, []).append(layer.fqn)
    for stage in plan.pipeline.stages:
        row: tuple[str, ...] = (str(stage.index), str(stage.pp_rank), ", ".join(fold(held.get(stage.index, ()))))
        memory = _memory_of(plan, stage.index)
        if memory:
            row = (*row, *(f"{getattr(memory, part):.2f}" for part in parts))
        rows.append(row)
    return rows


def _estimate(plan: Plan, style: Style, width: int) -> list[str]:
    estimate = plan.estimate
    if estimate is None:
        return ["  none: the plan was not priced"]
    fits = style.green("fits") if estimate.fits else style.red("does NOT fit")
    rows = [
        (values.LABELS[name], values.quantity(name, getattr(estimate, name)))
        for name in ("step_time_ms", "tokens_per_second_per_gpu", "mfu")
    ]
    available = values.quantity("_gib", estimate.memory_available_gib)
    peak = values.quantity("_gib", estimate.peak_memory_gib)
    rows.append((values.LABELS["peak_memory_gib"], f"{peak} of {available} available: {fits}"))
    if estimate.step_time is not None:
        parts = step_parts(estimate.step_time)
        rows.append(("spent on", ", ".join(f"{name} {share:.0%}" for name, share in parts)))
    rows.append(("model FLOPs", f"{values.count(estimate.flops_per_token)} a token"))
    if estimate.training_days is not None and plan.job.token_budget is not None:
        price = estimate.training_cost
        cost = f", {values.count(price)} in the currency of the price" if price is not None else ""
        hours = f", {values.count(estimate.training_gpu_hours)} GPU-hours" if estimate.training_gpu_hours else ""
        budget = values.count(plan.job.token_budget)
        rows.append(("whole training", f"{budget} tokens: {estimate.training_days:,.1f} days{hours}{cost}"))
    return table(rows, width=width)


def step_parts(spent: StepTime) -> list[tuple[str, float]]:
    """What the step is spent on, as parts of it, the five largest first; below half a percent is left out."""
    total = sum(getattr(spent, name) for name in StepTime.__dataclass_fields__)
    shares = [
        (name.removesuffix("_ms").replace("_", " "), getattr(spent, name) / total)
        for name in StepTime.__dataclass_fields__
    ]
    return sorted((entry for entry in shares if entry[1] >= 0.005), key=lambda entry: -entry[1])[:5]
