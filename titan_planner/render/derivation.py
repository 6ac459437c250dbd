"""How a number of the estimate comes about: its formula with this plan's values, down to ops and collectives."""

from __future__ import annotations

from collections.abc import Iterator

from titan_planner.cost.step import StepSeconds, step_seconds
from titan_planner.ir.inventory import num_active_params
from titan_planner.ir.plan import Plan, StepTime
from titan_planner.render.memory_terms import memory_terms
from titan_planner.render.show import MEMORY_PARTS
from titan_planner.render.terms import parameter_terms, step_terms

Fact = tuple[str, str]

_PARTS: dict[str, str] = {name: name.removesuffix("_ms").replace("_", " ") for name in StepTime.__dataclass_fields__}


def derivation(plan: Plan, name: str) -> Iterator[Fact]:
    """The terms of `estimate.<name>`, or of the whole estimate for an empty name. Recomputed from the plan, not read from it."""
    found = step_seconds(plan)
    match name:
        case "":
            yield from _step(plan, found)
            yield from _rates(plan, found)
            yield from _fitted(plan)
        case "step_time_ms" | "step_time":
            yield from _step(plan, found)
            yield from _fitted(plan)
        case "tokens_per_second_per_gpu" | "mfu" | "tflops_per_gpu" | "training_days" | "training_gpu_hours":
            yield from _rates(plan, found)
        case "flops_per_token" | "flops_per_token_causal":
            yield from _flops(plan)
        case "training_cost":
            yield from _rates(plan, found)
            yield from _bought(plan)
        case "num_params":
            yield from _parameters(plan)
        case "memory" | "peak_memory_gib" | "fits":
            yield from _memory(plan, "")
        case _ if name.startswith("memory."):
            yield from _memory(plan, name.removeprefix("memory."))
        case _ if name.startswith("step_time."):
            yield from _part(plan, found, name.removeprefix("step_time."))
        case _:
            return


def _step(plan: Plan, found: StepSeconds) -> Iterator[Fact]:
    estimate = plan.estimate
    assert estimate is not None
    if estimate.step_time is None:
        return
    parts = [
        f"{words} {_ms(getattr(estimate.step_time, part))}"
        for part, words in _PARTS.items()
        if getattr(estimate.step_time, part) > 0
    ]
    rank = f" of pipeline rank {found.rank}, which is busy longest" if plan.mesh.pp > 1 else ""
    yield "step time", f"{_ms(1e3 * found.total)}{rank}: {' + '.join(parts)}"


def _rates(plan: Plan, found: StepSeconds) -> Iterator[Fact]:
    estimate, gpus = plan.estimate, plan.mesh.world_size
    assert estimate is not None
    tokens = plan.batch.tokens_per_step
    speed = tokens / found.total / gpus
    yield "tokens/s/GPU", f"{tokens:,} tokens a step / {found.total:.4g} s / {gpus:,} GPUs = {speed:,.4g}"
    rate = speed * estimate.flops_per_token / 1e12
    yield "TFLOP/s/GPU", f"{speed:,.4g} x {estimate.flops_per_token:.4g} FLOPs a token = {rate:,.4g}"
    peak = plan.cluster.gpu.bf16_tflops
    causal = speed * estimate.flops_per_token_causal / 1e12
    yield (
        "MFU",
        f"{rate:,.4g} / {peak:g} TFLOP/s, the bf16 peak of {plan.cluster.gpu.name} = {rate / peak:.1%} "
        f"({causal / peak:.1%} when masked attention is not counted)",
    )
    if plan.job.token_budget is not None and estimate.training_gpu_hours is not None:
        yield (
            "GPU-hours",
            f"{plan.job.token_budget:.4g} tokens / {speed:,.4g} / 3600 = {estimate.training_gpu_hours:,.4g}, "
            f"{estimate.training_gpu_hours / gpus / 24:,.4g} days; without restarts and evaluation",
        )


def _flops(plan: Plan) -> Iterator[Fact]:
    model, length = plan.model, plan.batch.seq_len
    weights = num_active_params(model) - (0 if model.tied else model.vocab_size * model.dim)
    yield "matrices", f"6 x {weights:,} weights that a token meets (embedding not counted) = {6 * weights:.4g}"
    attention = plan.estimate.flops_per_token - 6 * weights if plan.estimate else 0.0
    yield "attention", f"6 x layers x heads x (qk + v dims) x {length:,} tokens = {attention:.4g}; causal: half"
    yield "source", "PaLM (arXiv 2204.02311) appendix B; causal as Megatron-Bridge"


def _fitted(plan: Plan) -> Iterator[Fact]:
    fit = plan.cluster.gpu.efficiency
    yield (
        "efficiencies",
        f"matmul {fit.matmul:g} of {plan.cluster.gpu.bf16_tflops:g} TFLOP/s, 8-bit {fit.matmul_float8:g}, attention "
        f"{fit.attention:g} forward {fit.attention_backward:g} backward, memory {fit.memory:g} of "
        f"{plan.cluster.gpu.memory_gb_per_s:g} GB/s, links {fit.intra_node:g} and {fit.inter_node:g}, slowdown beside "
        f"collectives {fit.overlap_slowdown:g}, launch {fit.launch_us:g} us",
    )
    yield "fitted on", fit.source


def _part(plan: Plan, found: StepSeconds, part: str) -> Iterator[Fact]:
    for term in step_terms(plan, found, part):
        yield term.name, f"{_ms(term.amount)} = {term.words}"
    yield from _fitted(plan)


def _bought(plan: Plan) -> Iterator[Fact]:
    estimate, price = plan.estimate, plan.cluster.price_per_gpu_hour
    assert estimate is not None
    if estimate.training_cost is None or estimate.training_gpu_hours is None:
        lacks = "a `training.token_budget`" if plan.job.token_budget is None else "a `cluster.price_per_gpu_hour`"
        yield "cost", f"none: it needs {lacks}"
        return
    yield "cost", f"{estimate.training_gpu_hours:,.4g} GPU-hours x {price:g} = {estimate.training_cost:,.4g}"


def _parameters(plan: Plan) -> Iterator[Fact]:
    for term in parameter_terms(plan):
        yield term.name, f"{term.amount:,.0f}" + (f" = {term.words}" if " x " in term.words else "")
    if plan.model.tied:
        yield "output", "0: tied to tok_embeddings"


def _memory(plan: Plan, name: str) -> Iterator[Fact]:
    """`name` is empty, an index of `estimate.memory`, or an index and a field."""
    estimate = plan.estimate
    assert estimate is not None
    index, _, wanted = name.partition(".")
    for number, (stage, moment, parts) in enumerate(memory_terms(plan)):
        if index not in ("", str(number)):
            continue
        recorded = {memory.stage: memory for memory in estimate.memory}.get(stage)
        who = f"stage {stage} " if len(estimate.memory) > 1 else ""
        if recorded is not None and not wanted:
            sums = [(word, getattr(recorded, part)) for part, word in MEMORY_PARTS.items()]
            yield f"stage {stage}", ", ".join(f"{word} {size:.2f}" for word, size in sums if size)
            yield f"{who}fullest", f"at the {moment}; the terms below are of that moment, in GiB"
        for part, terms in parts.items():
            if wanted in ("", part, "total_gib"):
                for term in terms:
                    yield f"{who}{MEMORY_PARTS[part]}: {term.name}", f"{term.amount:,.3f} = {term.words}"


def _ms(value: float) -> str:
    return f"{value:,.4g} ms"
