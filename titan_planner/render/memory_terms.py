"""What the memory of an estimate adds up from: for each pipeline rank and part, elements, units, microbatches and reserves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from titan_planner.cost.activations import block_saved, embedding_saved, final_norm_saved, output_saved, total
from titan_planner.cost.local import BYTES, Local, imbalance_of, local, loss_kernels
from titan_planner.cost.memory import GIB, STRANDED, Moment, Parts, RankMemory, numels, rank_memory, sharded_numel
from titan_planner.cost.program import TITAN
from titan_planner.cost.reserve import reserve
from titan_planner.cost.stage import layer_blocks
from titan_planner.ir.fqn import fold, matches
from titan_planner.ir.plan import Layer, Plan
from titan_planner.render.terms import Term
from titan_planner.schedules import peaks, work_of


def memory_terms(plan: Plan) -> tuple[tuple[int, str, dict[str, tuple[Term, ...]]], ...]:
    """(first stage, fullest moment, field of `StageMemory` -> its terms in GiB) of every pipeline rank."""
    sizes = local(plan, TITAN, imbalance_of(plan))
    rank_of = [stage.pp_rank for stage in plan.pipeline.stages]
    found = []
    for rank, memory in enumerate(rank_memory(plan, TITAN, imbalance_of(plan))):
        layers = tuple(layer for layer in plan.layers if rank_of[layer.stage] == rank)
        moment, parts = memory.fullest, memory.fullest.parts
        terms = {
            "parameters_gib": _parameters(plan, layers, parts),
            "gradients_gib": _gradients(plan, layers, parts),
            "optimizer_gib": _optimizer(plan, layers, parts),
            "unsharded_gib": _unsharded(plan, layers, moment),
            "activations_gib": _activations(plan, sizes, rank, layers, moment),
            "logits_gib": _logits(plan, sizes, parts),
            "float8_gib": _float8(plan, parts),
            "communication_gib": _communication(plan, sizes, layers, moment),
            "allocator_gib": _stranded(plan, memory),
            "reserve_gib": ((line.name, line.nbytes, line.source) for line in reserve(plan)),
        }
        told = {
            part: tuple(Term(name, nbytes / GIB, words) for name, nbytes, words in entries if nbytes)
            for part, entries in terms.items()
        }
        found.append((memory.stage, moment.name, told))
    return tuple(found)


_Entry = tuple[str, float, str]  # name, bytes, words


def _held(plan: Plan, layers: tuple[Layer, ...]) -> tuple[float, str]:
    """Elements that the rank holds of these layers, and what they are a part of."""
    sharded, whole = sharded_numel(plan), numels(plan)
    held = sum(sharded[layer.fqn] for layer in layers)
    every = sum(whole[layer.fqn].all for layer in layers)
    experts = sum(whole[layer.fqn].experts for layer in layers)
    if plan.fsdp.strategy != "fsdp":
        return held, f"{every:,} elements, whole on every data rank"
    if experts and plan.mesh.efsdp != plan.mesh.fsdp:
        sum_of = f"{every - experts:,} / {plan.mesh.fsdp} + experts' {experts:,} / {plan.mesh.efsdp}"
    else:
        sum_of = f"{every:,} / {plan.mesh.fsdp}"
    return held, f"{sum_of} ranks = {held:,.0f} elements"


def _parameters(plan: Plan, layers: tuple[Layer, ...], parts: Parts) -> Iterator[_Entry]:
    if parts.parameters:
        held, words = _held(plan, layers)
        size = BYTES[plan.dtype]
        yield "weights", held * size, f"{words} x {size} bytes ({plan.dtype})"


def _gradients(plan: Plan, layers: tuple[Layer, ...], parts: Parts) -> Iterator[_Entry]:
    if parts.gradients:
        held, words = _held(plan, layers)
        size = BYTES[plan.dtype]
        yield "reduced gradients", held * size, f"{words} x {size} bytes ({plan.dtype})"


def _optimizer(plan: Plan, layers: tuple[Layer, ...], parts: Parts) -> Iterator[_Entry]:
    if not parts.optimizer:
        return
    held, words = _held(plan, layers)
    size, dtype = BYTES[plan.optimizer.state_dtype], plan.optimizer.state_dtype
    once = 0.0
    if plan.optimizer.name == "Muon":
        whole = [numels(plan)[layer.fqn] for layer in layers]
        experts = sum(numel.muon_experts for numel in whole)
        dense = sum(numel.muon for numel in whole) - experts
        sharded = plan.fsdp.strategy == "fsdp"
        once = dense / (plan.mesh.fsdp if sharded else 1) + experts / (plan.mesh.efsdp if sharded else 1)
    yield "two moments", 2 * size * held, f"{words} x 2 x {size} bytes ({dtype})"
    if once:
        yield "Muon", -once * size, f"{once:,.0f} elements of matrices have one moment only"
    rest = parts.optimizer - 2 * size * held + once * size
    if abs(rest) >= 1:
        yield (
            "the update" if rest > 0 else "tied weight",
            rest,
            "what the optimizer makes while it runs" if rest > 0 else "its second copy on this rank is not trained",
        )


def _unsharded(plan: Plan, layers: tuple[Layer, ...], moment: Moment) -> Iterator[_Entry]:
    """Gathered units, and gradients that are not reduced yet."""
    if not moment.parts.unsharded:
        return
    whole = numels(plan)
    compute, reduce = BYTES[plan.fsdp.param_dtype], BYTES[plan.fsdp.reduce_dtype]
    accumulated = plan.fsdp.defer_gradient_sync and plan.batch.accumulation_steps > 1
    unreduced = accumulated or plan.mesh.pp > 1
    every = sum(whole[layer.fqn].all for layer in layers)
    if unreduced:
        words = f"{every:,} elements x {reduce} bytes ({plan.fsdp.reduce_dtype}), reduced after the last microbatch"
        yield "whole gradients", float(reduce * every), words
    alone = plan.mesh.fsdp == 1 and plan.fsdp.param_dtype == plan.dtype
    if plan.fsdp.strategy == "ddp" or alone:
        if plan.fsdp.param_dtype != plan.dtype:
            words = (
                f"{every:,} elements x {compute} bytes ({plan.fsdp.param_dtype}), beside the weights in {plan.dtype}"
            )
            yield "copies computed with", float(compute * every), words
        if plan.mesh.dp_replicate > 1 and not unreduced:
            largest = max(layers, key=lambda layer: whole[layer.fqn].all).fqn
            words = f"{whole[largest].all:,} elements of {largest} x {reduce} bytes, on their way to other ranks"
            yield "buffer of the reduction", float(reduce * whole[largest].all), words
        return
    units = _units(plan, layers)
    stays = plan.mesh.pp > 1
    kept = [(name, size if stays or reshard is False else size / int(reshard)) for name, size, reshard in units
            if stays or reshard is not True]  # fmt: skip
    freed = sorted((unit for unit in units if not stays and unit[2] is not False), key=lambda unit: -unit[1])
    if kept:
        words = (
            f"{len(kept)} unit{'s' * (len(kept) > 1)}: {', '.join(fold(n for name, _ in kept for n in name.split()))}"
        )
        yield "units that stay gathered", sum(size for _, size in kept), f"{words}, in {plan.fsdp.param_dtype}"
    ahead = max(1, plan.fsdp.prefetch_backward)
    member = {"loss": "", "output's backward": "output"}.get(moment.name)
    if member is None:
        member = "layers." if "block" in moment.name else "tok_embeddings" if "embedding" in moment.name else ""
    in_flight = freed[:ahead] if member in ("", "output") else freed[: 1 + ahead]
    if in_flight:
        words = f"{len(in_flight)} of {in_flight[0][0]}'s size: in use and gathered ahead, in {plan.fsdp.param_dtype}"
        yield "units gathered", sum(size for _, size, _ in in_flight), words
        yield "flat buffer", freed[0][1], "that the unit ahead arrives in"
    unit = max((size for name, size, _ in units if member and member in name), default=0.0)
    if unit and not unreduced:
        words = f"{unit / compute:,.0f} elements x ({compute} computed + {reduce} reduced) bytes"
        yield "gradient of the unit", unit / compute * (compute + reduce), words


def _units(plan: Plan, layers: tuple[Layer, ...]) -> list[tuple[str, float, bool | int]]:
    """(modules, bytes when gathered, whether resharded after forward) of the rank's FSDP units."""
    whole, size = numels(plan), BYTES[plan.fsdp.param_dtype]
    grouped: dict[object, tuple[str, float, bool | int]] = {}
    for layer in layers:
        unit = next((u for u in plan.fsdp.units if any(matches(s, layer.fqn) for s in u.modules)), None)
        # One selector with `*` makes a unit of every match.
        key: object = layer.fqn if unit is not None and len(unit.modules) == 1 else id(unit)
        narrow = whole[layer.fqn].float8 if plan.float8.enable_fsdp_float8_all_gather else 0
        nbytes = size * (whole[layer.fqn].all - narrow) + narrow
        name, so_far, _ = grouped.get(key, ("", 0.0, False))
        reshard = unit.reshard_after_forward if unit is not None else False
        grouped[key] = (f"{name} {layer.fqn}".strip(), so_far + nbytes, reshard)
    return list(grouped.values())


_IN_FLIGHT = ("loss", "output's backward", "first block's backward")
"""Moments at which all microbatches in flight keep all that they keep."""


def _activations(plan: Plan, sizes: Local, rank: int, layers: tuple[Layer, ...], moment: Moment) -> Iterator[_Entry]:
    if moment.name not in _IN_FLIGHT:
        if moment.parts.activations:
            words = f"what the {moment.name} itself reads and makes; no other microbatch is in flight then"
            yield moment.name, moment.parts.activations, words
        return
    saved = _saved(plan, sizes, layers)
    per_stage: dict[int, float] = {}
    for stage, _, nbytes, count in saved:
        per_stage[stage] = per_stage.get(stage, 0.0) + nbytes * count
    flights: dict[int, int] = {}
    most = -1.0
    for point in peaks(work_of(plan.pipeline))[rank]:
        flight = dict(zip(point.stages, point.until_weight, strict=True))
        here = sum(flight[stage] * nbytes for stage, nbytes in per_stage.items())
        if here > most:
            most, flights = here, flight
    left = moment.parts.activations
    for stage, name, nbytes, count in saved:
        times = flights[stage]
        left -= nbytes * count * times
        each = f"{count} x {nbytes / 2**20:,.1f} MiB" if count > 1 else f"{nbytes / 2**20:,.1f} MiB"
        yield name, nbytes * count * times, f"{each} a microbatch x {times} microbatch{'es' * (times > 1)} in flight"
    yield (
        f"at the {moment.name}",
        left,
        "what it makes beside that, less what it has freed and what counts as communication's buffers",
    )


def _saved(plan: Plan, sizes: Local, layers: tuple[Layer, ...]) -> list[tuple[int, str, float, int]]:
    """(stage, modules and policy, bytes of one microbatch of one of them, how many) of all modules of the rank."""
    blocks = layer_blocks(plan.model)
    policies = {policy.name: policy for policy in plan.activation_checkpoint.policies}
    alike: dict[tuple[int, str, float], list[str]] = {}
    for layer in layers:
        policy = policies[layer.checkpoint]
        around = sizes.stream_bytes if policy.mode == "full" else None
        match layer.fqn:
            case "tok_embeddings":
                nbytes = total(embedding_saved(sizes)) if around is None else 0.0
            case "norm":
                nbytes = total(final_norm_saved(sizes)) if around is None else float(around)
            case "output":
                nbytes = total(output_saved(sizes)) if around is None else float(around)
            case _:
                number = int(layer.fqn.partition(".")[2])
                nbytes = total(block_saved(blocks[number], sizes, policy, number))
        alike.setdefault((layer.stage, layer.checkpoint, nbytes), []).append(layer.fqn)
    return [
        (stage, f"{', '.join(fold(names))} ({policy})", nbytes, len(names))
        for (stage, policy, nbytes), names in alike.items()
    ]


def _logits(plan: Plan, sizes: Local, parts: Parts) -> Iterator[_Entry]:
    if parts.logits:
        count = sizes.tokens * sizes.vocab
        chunks = f", in {plan.loss.chunks} chunks" if plan.loss.chunks > 1 else ""
        yield (
            "logits and loss",
            parts.logits,
            f"{sizes.tokens:,} tokens x {sizes.vocab:,} columns = {count:,} logits{chunks} x {parts.logits / count:.3g} "
            f"bytes, {loss_kernels(plan, TITAN)} loss",
        )


def _float8(plan: Plan, parts: Parts) -> Iterator[_Entry]:
    if parts.float8:
        both = "" if plan.float8.recipe == "tensorwise" else ", each along both dims"
        yield "8-bit operands", parts.float8, f"input, weight and gradient of the widest product, 1 byte each{both}"


def _communication(plan: Plan, sizes: Local, layers: tuple[Layer, ...], moment: Moment) -> Iterator[_Entry]:
    if not moment.parts.communication:
        return
    transfers = 0.0
    if plan.mesh.pp > 1:
        last = len(plan.pipeline.stages) - 1
        ends = sum((stage > 0) + (stage < last) for stage in {layer.stage for layer in layers})
        transfers = float(plan.pipeline.microbatches * ends * sizes.stream_bytes)
        words = (
            f"{plan.pipeline.microbatches} microbatches x {ends} ends of stages x {sizes.stream_bytes / 2**20:,.1f} MiB"
        )
        yield "pipeline's buffers", transfers, words
    axes = " and ".join(name for name, degree in (("context", plan.mesh.cp), ("expert", plan.mesh.ep)) if degree > 1)
    if axes:
        yield f"{axes} exchange", moment.parts.communication - transfers, "what a block sends and receives in backward"


def _stranded(plan: Plan, memory: RankMemory) -> Iterator[_Entry]:
    if plan.cluster.gpu.device != "cuda":
        return
    for field in fields(Parts):
        fullest = getattr(memory.fullest.parts, field.name)
        other = max(memory.moments, key=lambda moment: getattr(moment.parts, field.name))
        most = getattr(other.parts, field.name)
        if most > fullest:
            words = f"{most / GIB:,.2f} GiB at the {other.name}, {fullest / GIB:,.2f} at the {memory.fullest.name}"
            yield field.name, STRANDED * (most - fullest), words
