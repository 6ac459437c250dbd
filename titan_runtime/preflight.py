"""Everything that can be known to fail before the first collective, checked on every rank and said once.

A rank that fails alone would leave the others waiting for it in a collective until a timeout. So ranks first report to
each other through the launch's key-value store, which needs no process group, and the first rank gives the verdict for
all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING

from titan_planner.ir.codec import encode
from titan_planner.ir.plan import Plan
from titan_runtime.agreement import name_ranks, one_sentence
from titan_runtime.capabilities import unsupported
from titan_runtime.errors import RunError
from titan_runtime.torchrun import torchrun_advice

if TYPE_CHECKING:
    import torch.distributed as dist

MEMORY_TOLERANCE = 0.05
"""How much smaller than planned device memory may be without a warning: drivers and virtual machines keep some."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank says about itself. `problems` are sentences; the other fields must be equal on all ranks.

    `run` is the run as the command line has it, beyond the plan's decisions: field -> value.
    """

    digest: str
    torch: str
    titan: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    run: dict[str, str] = field(default_factory=dict)


def local_report(
    plan: Plan, path: str, digest: str, world_size: int, local_rank: int, accept_changes: bool = False
) -> Report:
    """The checks that a rank makes alone. Imports torch, but touches no other rank."""
    import torch

    from titan_runtime import version
    from titan_runtime.apply.float8 import float8_problems

    problems = wrong_world_size(plan, path, world_size)
    warnings: list[str] = []
    if not problems:
        problems += unsupported(plan)
        problems += _device_problems(plan, local_rank, torch.cuda.is_available, torch.cuda.device_count)
        problems += _package_problems(plan, find_spec)
        problems += _torch_problems(plan)
        if not problems:
            on_gpu = plan.cluster.gpu.device == "cuda"
            capability = torch.cuda.get_device_capability(local_rank) if on_gpu else None
            problems += float8_problems(plan, find_spec("torchao") is not None, capability)
        if not problems and plan.cluster.gpu.device == "cuda":
            gib = torch.cuda.get_device_properties(local_rank).total_memory / 2**30
            warnings += memory_warnings(plan, gib)
    return Report(digest, torch.__version__, version(), problems, warnings, effective_run(plan, accept_changes))


def wrong_world_size(plan: Plan, path: str, world_size: int) -> list[str]:
    """One sentence with the line to use when the number of started ranks is not the plan's."""
    wanted = plan.mesh.world_size
    if world_size == wanted:
        return []
    started = "1 rank was started" if world_size == 1 else f"{world_size} ranks were started"
    needs = "1 rank" if wanted == 1 else f"{wanted} ranks"
    return [f"{started}, but the plan `{plan.name}` needs {needs}\n    try: {torchrun_advice(plan, path)}"]


def _device_problems(
    plan: Plan, local_rank: int, cuda_is_available: Callable[[], bool], device_count: Callable[[], int]
) -> list[str]:
    gpu = plan.cluster.gpu
    if gpu.device != "cuda":
        return []
    if not cuda_is_available():
        return [
            f"the plan is made for `{gpu.name}`, but torch finds no CUDA device here\n"
            "    try: start it on a machine with GPUs, or compile the spec for `cluster: {gpu: cpu}`"
        ]
    if local_rank >= device_count():
        return [
            f"this node has {device_count()} GPUs, so there is none for its rank number {local_rank}\n"
            f"    try: start at most {device_count()} ranks on each node, one a GPU"
        ]
    return []


def _torch_problems(plan: Plan) -> list[str]:
    """Names in the plan that mean nothing to this torch: operators to save, and the compiler's backend."""
    from titan_runtime.apply.checkpointing import resolve_op
    from titan_runtime.apply.compile import require_backend

    used = {layer.checkpoint for layer in plan.layers}
    try:
        for policy in plan.activation_checkpoint.policies:
            for name in policy.save_ops if policy.name in used else ():
                resolve_op(policy.name, name)
        if plan.compile.enable:
            require_backend(plan.compile.backend)
    except RunError as error:
        return [str(error)]
    return []


def _package_problems(plan: Plan, find: Callable[[str], object | None]) -> list[str]:
    """Packages that the plan needs, that are no dependency of Titan, and that `find` does not find."""
    if not plan.job.metrics.enable_wandb or find("wandb") is not None:
        return []
    return [
        "the plan logs to Weights & Biases, but the package wandb is not installed\n"
        "    try: pip install wandb, or start with --no-wandb"
    ]


def memory_warnings(plan: Plan, device_gib: float) -> list[str]:
    """A sentence when the device's memory is clearly less than the plan was made for. It may still fit, so no error."""
    planned = plan.cluster.gpu.memory_gib
    if device_gib >= planned * (1 - MEMORY_TOLERANCE):
        return []
    return [
        f"the device has {device_gib:.1f} GiB of memory, but the plan was made for {planned:.1f} GiB; it may not fit"
    ]


def agree(report: Report, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Exchange reports; raise the same RunError on every rank when any has a problem or differs from the others."""
    # Imported here so that the checks above can be used without torch.
    import torch.distributed as dist

    store = dist.PrefixStore("titan/preflight", store)
    store.set_timeout(timeout)
    store.set(f"report/{rank}", json.dumps(asdict(report)))
    reports: dict[int, Report] = {}
    if rank == 0:
        reports, silent = _collect(store, world_size, timeout)
        verdict = _verdict(reports, silent, timeout)
        store.set("verdict", json.dumps(verdict))
        for line in _warnings(reports):
            print(f"titan: warning: {line}", file=sys.stderr, flush=True)
    else:
        try:
            # The first rank waits for all others before it speaks, so this wait is longer than its own.
            store.wait(["verdict"], timeout + timedelta(seconds=30))
        except RuntimeError as error:
            raise RunError(f"rank 0 gave no answer within {timeout.total_seconds():.0f} s") from error
        verdict = json.loads(store.get("verdict"))
    if verdict is not None:
        _leave_together(store, rank, sorted(reports))
        raise RunError(verdict, agreed=True)


def _leave_together(store: dist.Store, rank: int, present: list[int]) -> None:
    """Let every rank read the verdict before the one that may host the store is gone with it."""
    store.set(f"read/{rank}", "")
    try:
        if rank == 0:
            store.wait([f"read/{other}" for other in present], timedelta(seconds=10))
    except RuntimeError:
        return  # a rank that is gone already reads nothing


def _collect(store: dist.Store, world_size: int, timeout: timedelta) -> tuple[dict[int, Report], list[int]]:
    reports: dict[int, Report] = {}
    silent: list[int] = []
    for rank in range(world_size):
        # Stores tell of a timeout by DistError or by its base, RuntimeError, depending on their kind.
        try:
            # Once one rank has used up the time, others have had it too.
            store.wait([f"report/{rank}"], timeout if not silent else timedelta(milliseconds=100))
            reports[rank] = Report(**json.loads(store.get(f"report/{rank}")))
        except RuntimeError:
            silent.append(rank)
    return reports, silent


def _verdict(reports: dict[int, Report], silent: list[int], timeout: timedelta) -> str | None:
    """What is wrong, as one text, or None."""
    lines = []
    world = len(reports) + len(silent)
    problems: list[str | None] = [
        "\n".join(reports[rank].problems) or None if rank in reports else None for rank in range(world)
    ]
    if any(problems):
        lines.append(one_sentence(problems))
    if silent:
        lines.append(f"{name_ranks(silent)} did not report within {timeout.total_seconds():.0f} s")
    if not lines:
        for name, what, fix in (
            ("digest", "another plan", "give every node the same plan file"),
            ("torch", "another torch", "install the same torch on every node"),
            ("titan", "another version of Titan", "install the same version on every node"),
        ):
            line = _differences({rank: getattr(report, name) for rank, report in reports.items()}, what)
            if line:
                lines.append(f"{line}\n    try: {fix}")
        if not lines:
            lines += _other_runs(reports)
    return "\n".join(lines) or None


def effective_run(plan: Plan, accept_changes: bool) -> dict[str, str]:
    """What the command line may have changed, as short text, for comparison between ranks."""
    found = {"--accept-changes": str(accept_changes)}

    def walk(address: str, value: object) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{address}.{name}", inner)
        else:
            found[address] = value if isinstance(value, str) else json.dumps(value)

    walk("job", encode(plan.job))
    walk("data", encode(plan.data))
    return found


def _other_runs(reports: dict[int, Report]) -> list[str]:
    names = dict.fromkeys(name for report in reports.values() for name in report.run)
    found = [
        _differences({rank: report.run.get(name, "none") for rank, report in reports.items()}, f"another `{name}`", 200)
        for name in names
    ]
    lines = [line for line in found if line]
    return [*lines, "    try: give every node the same options"] if lines else []


def _differences(values: dict[int, str], what: str, width: int = 12) -> str | None:
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    if len(groups) == 1:
        return None
    # The largest group is taken to be right; among equals the one with the lowest rank.
    right = max(groups, key=lambda value: (len(groups[value]), -groups[value][0]))
    others = "; ".join(f"{name_ranks(ranks)}: {value[:width]}" for value, ranks in groups.items() if value != right)
    count = sum(len(ranks) for value, ranks in groups.items() if value != right)
    have = "has" if count == 1 else "have"
    return f"{count} of {len(values)} ranks {have} {what} ({others}) than the rest ({right[:width]})"


def _warnings(reports: dict[int, Report]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank, report in reports.items():
        for line in report.warnings:
            ranks.setdefault(line, []).append(rank)
    return [f"{name_ranks(where)}: {line}" if len(where) < len(reports) else line for line, where in ranks.items()]
