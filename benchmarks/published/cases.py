"""Rows with what was measured, in common units, beside the plan and the program that are to be priced."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.published.rows import MALFORMED, Row, Unusable, read_rows
from benchmarks.published.to_plan import Built, to_plan
from titan_planner.cost.flops import flops_per_token
from titan_planner.cost.program import Program
from titan_planner.ir.errors import InvariantError
from titan_planner.ir.inventory import num_active_params
from titan_planner.ir.model import Model
from titan_planner.ir.plan import Plan

FLOPS_AGREE = 0.04
"""A step time from printed FLOP/s is used where both conventions of counting attention give the same within this part."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the row measured. `step_time_s` is of a whole optimizer step, memory of one GPU."""

    step_time_s: float | None
    step_time_from: str | None  # the field that the time was taken from
    peak_mem_gib: float | None
    peak_mem_printed_gb: float | None  # printed as GB, by sources that do not say whether they are GiB
    memory_kind: Literal["allocated", "reserved", "unknown"]
    pp_rank: int | None  # whose memory it is, where not the fullest rank's
    out_of_memory: bool


@dataclass(frozen=True, slots=True)
class Peer:
    """Another planner's own prediction of the row."""

    system: str
    step_time_s: float | None
    peak_mem_gib: float | None
    error_time: float | None  # signed relative errors as it states them
    error_mem: float | None


@dataclass(frozen=True, slots=True)
class Case:
    """One row. Either `plan` and `program` are set, or `skipped` says why not."""

    row: Row
    measured: Measured
    peer: Peer | None
    plan: Plan | None = None
    program: Program | None = None
    assumptions: tuple[str, ...] = ()
    skipped: Unusable | None = None
    time_unlike: str | None = None  # why the time is not to be compared
    memory_unlike: str | None = None  # why the memory is not to be compared

    @property
    def source(self) -> str:
        """What the row was published in."""
        return self.row.source

    @property
    def quality(self) -> str:
        """A, B, C, D or ?."""
        return self.row.quality

    @property
    def has_time(self) -> bool:
        """Whether a predicted step time can be held against the row."""
        return self.plan is not None and self.time_unlike is None and self.measured.step_time_s is not None

    @property
    def has_memory(self) -> bool:
        """Whether a predicted peak memory can be held against the row."""
        return self.plan is not None and self.memory_unlike is None and self.measured.peak_mem_gib is not None

    @property
    def fitting(self) -> bool:
        """Whether efficiencies may be fitted on it: an exact or nearly exact configuration with a clean number."""
        return self.quality in ("A", "B") and self.has_time

    def tags(self) -> Mapping[str, str]:
        """What error tables group by."""
        row, plan = self.row, self.plan
        return {
            "source": self.source,
            "quality": self.quality,
            "model class": row.text("tags.arch") or ("moe" if row.section("model.moe") else "dense"),
            "GPU": plan.cluster.gpu.name if plan else row.text("hardware.gpu") or "not given",
            "parallelism": _parallelism(plan),
            "precision": row.text("tags.precision_class") or "not given",
            "recomputation": row.text("tags.recompute_class") or "not given",
            "program": self.program.name if self.program else "none",
        }


def _parallelism(plan: Plan | None) -> str:
    if plan is None:
        return "none"
    mesh = plan.mesh
    axes = ("pp", mesh.pp), ("dp", mesh.dp), ("cp", mesh.cp), ("tp", mesh.tp), ("ep", mesh.ep)
    return " x ".join(axis for axis, degree in axes if degree > 1) or "one GPU"


def load_cases(folder: str | Path) -> list[Case]:
    """Every row of the folder's files as a case, in order. Rows that cannot be expressed are among them, with the reason.

    Raises OSError when `folder` cannot be read; no row, however broken, raises anything.
    """
    return [case_of(row) for row in read_rows(Path(folder))]


def case_of(row: Row) -> Case:
    """The case of one row."""
    built: Built | None = None
    skipped: Unusable | None = None
    try:
        built = to_plan(row)
    except Unusable as error:
        skipped = error
    except InvariantError as error:
        skipped = Unusable(MALFORMED, error.message)
    except Exception as error:  # a row must never end the run; the report counts these first, as bugs of this script
        skipped = Unusable("ERROR in this script", f"{type(error).__name__}: {error}")
    plan = built.plan if built else None
    try:
        measured, peer = measured_of(row, plan), _peer(row)
    except Unusable as error:
        return Case(row, _NOTHING, None, skipped=error)
    measured, odd_time, odd_memory = _without_the_impossible(measured)
    if built is None or plan is None:
        return Case(row, measured, peer, skipped=skipped)
    return Case(
        row,
        measured,
        peer,
        plan,
        built.program,
        built.assumptions,
        time_unlike=odd_time or built.time_unlike or _time_unlike(row, measured),
        memory_unlike=odd_memory
        or built.memory_unlike
        or ("failed for a reason not given" if row.text("status") == "crash" else None),
    )


_NOTHING = Measured(None, None, None, None, "unknown", None, False)


STEP_S = (1e-6, 1e7)
"""Step times that can have been measured, in seconds."""

MEMORY_GIB = (1e-3, 1e5)
"""The same of one GPU's memory."""


def _without_the_impossible(measured: Measured) -> tuple[Measured, str | None, str | None]:
    """`measured` without numbers that nothing can have measured, and why its time and its memory are not compared then."""
    time, memory, printed = measured.step_time_s, measured.peak_mem_gib, measured.peak_mem_printed_gb
    odd_time = odd_memory = None
    if time is not None and not STEP_S[0] <= time <= STEP_S[1]:
        odd_time = f"impossible: a step of {time:g} s (from {measured.step_time_from})"
        measured = replace(measured, step_time_s=None, step_time_from=None)
    if memory is not None and not MEMORY_GIB[0] <= memory <= MEMORY_GIB[1]:
        odd_memory = f"impossible: a peak of {memory:g} GiB"
        measured = replace(measured, peak_mem_gib=None)
    if printed is not None and not MEMORY_GIB[0] <= printed <= MEMORY_GIB[1]:
        odd_memory = odd_memory or f"impossible: a peak of {printed:g} GB"
        measured = replace(measured, peak_mem_printed_gb=None)
    return measured, odd_time, odd_memory


def _time_unlike(row: Row, measured: Measured) -> str | None:
    if row.text("status") not in ("", "ok"):
        return f"status {row.text('status')}"
    if row.text("kind") == "fake_backend":
        return "no real communication"
    if row.flag("tags.launch_bound") or row.flag("launch_bound"):
        return "bound by launches"
    return None


def _peer(row: Row) -> Peer | None:
    if not row.section("peer_prediction"):
        return None
    return Peer(
        row.text("peer_prediction.system")[:40] or "peer",
        _within(row.positive("peer_prediction.step_time_s"), STEP_S),
        _within(row.positive("peer_prediction.peak_mem_gib"), MEMORY_GIB),
        row.number_at("peer_prediction.error_time"),
        row.number_at("peer_prediction.error_mem"),
    )


def _within(value: float | None, bounds: tuple[float, float]) -> float | None:
    return value if value is not None and bounds[0] <= value <= bounds[1] else None


def measured_of(row: Row, plan: Plan | None) -> Measured:
    """The row's measurements in seconds and GiB. A time that is not printed follows from throughput, FLOP/s or MFU."""
    ran = row.text("status") in ("", "ok")
    time, origin = _step_time(row, plan) if ran else (None, None)
    kind = row.text("measured.mem_kind").casefold()
    reserved, allocated = "reserved" in kind, "allocated" in kind
    memory = row.positive("measured.peak_mem_gib")
    if memory is None:
        for name in ("allocated", "reserved"):
            memory = memory or row.positive(f"measured.peak_{name}_gib")
            if memory is not None:
                reserved, allocated = name == "reserved", name == "allocated"
                break
    return Measured(
        step_time_s=time,
        step_time_from=origin,
        peak_mem_gib=memory if ran else None,
        peak_mem_printed_gb=row.positive("measured.peak_mem_printed.value") if ran and memory is None else None,
        memory_kind="unknown" if reserved == allocated else "reserved" if reserved else "allocated",
        pp_rank=row.count("measured.mem_pp_stage", minimum=0),
        out_of_memory=row.text("status") == "oom",
    )


def _step_time(row: Row, plan: Plan | None) -> tuple[float | None, str | None]:
    for path in ("measured.step_time_s",):
        found = row.positive(path)
        if found is not None:
            return found, path
    gpus = row.count("hardware.n_gpus")
    tokens = float(plan.batch.tokens_per_step) if plan else _tokens(row)
    if tokens is not None and gpus is not None:
        for path, share in (("measured.tokens_per_s_per_gpu", gpus), ("measured.total_tokens_per_s", 1)):
            rate = row.positive(path)
            if rate is not None:
                return tokens / (rate * share), path
    found = row.positive("derived.step_time_s")
    if found is not None:
        return found, "derived.step_time_s"
    return _from_flops(row, plan) if plan else (None, None)


def _tokens(row: Row) -> float | None:
    sequences, length = row.count("batch.global"), row.count("model.seq_len")
    return float(sequences * length) if sequences and length else None


def _from_flops(row: Row, plan: Plan) -> tuple[float | None, str | None]:
    """From printed model FLOP/s or MFU, where it makes no difference whether attention was counted causal or whole."""
    rate, origin = row.positive("measured.tflops_per_gpu"), "measured.tflops_per_gpu"
    flags = row.text("flags")
    if rate is None:
        share, peak = row.positive("measured.mfu"), row.positive("measured.mfu_peak_tflops")
        if peak is None and plan.float8.recipe is None:
            peak = row.positive("hardware.peak_tflops.bf16")
        if share is None or peak is None or "mfu_mismatch" in flags:
            return None, None
        rate, origin = share * peak, "measured.mfu"
    if "flops_per_token_outlier" in flags:
        return None, None
    whole, causal = model_flops_per_token(plan.model, plan.batch.seq_len)
    if re.search(r"tflop\S* (?:\w+ )?includ\w+ recomput", row.text("notes").casefold()):
        if row.text("tags.recompute_class") != "full":
            return None, None
        # The layers' forward counts twice, the output projection's once: 4 / 3 of all but the projection's.
        output = 6.0 * plan.model.vocab_size * plan.model.dim
        whole, causal = ((flops - output) * 4 / 3 + output for flops in (whole, causal))
    if whole - causal > FLOPS_AGREE * causal:
        return None, None
    tokens = plan.batch.tokens_per_step / plan.cluster.num_gpus
    return math.sqrt(whole * causal) * tokens / (rate * 1e12), origin


def model_flops_per_token(model: Model, seq_len: int) -> tuple[float, float]:
    """FLOPs of forward and backward of one token with attention counted whole, and causal (half)."""
    whole = flops_per_token(model, seq_len)
    weights = 6.0 * (num_active_params(model) - (0 if model.tied else model.vocab_size * model.dim))
    return whole, weights + (whole - weights) / 2


Efficiencies = Mapping[str, Mapping[str, float]]
"""GPU's catalogue name -> fields of its `Efficiency` to replace."""


def with_efficiencies(case: Case, values: Efficiencies) -> Case:
    """`case` on a GPU whose efficiencies are those of `values`; unchanged when they name another GPU only."""
    if case.plan is None or case.plan.cluster.gpu.name not in values:
        return case
    gpu = case.plan.cluster.gpu
    changes: dict[str, Any] = dict(values[gpu.name])
    fitted = replace(gpu.efficiency, **changes)
    cluster = replace(case.plan.cluster, gpu=replace(gpu, efficiency=fitted))
    return replace(case, plan=replace(case.plan, cluster=cluster))


def configuration(case: Case) -> tuple[object, ...] | None:
    """What a ranking of configurations holds fixed: source, software, model, hardware. None for a case without a plan."""
    if case.plan is None:
        return None
    plan, row = case.plan, case.row
    software = tuple(row.text(name) for name in ("framework", "container", "source.commit", "source.title"))
    title = re.sub(r"[\s:(].*$", "", software[3])
    return (case.source, software[:2], title, plan.model, plan.cluster.gpu.name, plan.cluster.num_gpus)
