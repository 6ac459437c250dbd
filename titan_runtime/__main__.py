"""`torchrun -m titan_runtime --plan plan.json`: check that the plan can run here, then run it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from titan_planner.ir.codec import digest
from titan_planner.ir.errors import PlanError
from titan_planner.ir.plan import Plan
from titan_planner.ir.verify import load_plan
from titan_runtime import version
from titan_runtime.errors import RunError, user_errors
from titan_runtime.overrides import add_arguments, apply_overrides

if TYPE_CHECKING:
    import torch.distributed as dist

NEEDS_TORCH = "titan_runtime needs PyTorch, which is not installed\n    try: pip install 'titan-planner[runtime]'"

_PREFLIGHT_SECONDS = 300
"""How long ranks wait for each other to start when the plan, which has a number of its own, could not be read."""


def parser() -> argparse.ArgumentParser:
    """The options of the runtime."""
    made = argparse.ArgumentParser(
        prog="torchrun -m titan_runtime",
        description="Execute a Titan plan with PyTorch, exactly as it says.",
        epilog="exit codes: 0 all steps done; 1 an error, said in one sentence; 2 wrong usage; "
        "128 + N stopped by signal N after saving (the same command goes on)",
        allow_abbrev=False,
    )
    made.add_argument("--plan", required=True, metavar="FILE", help="the plan, made by `titan-plan compile`")
    made.add_argument("--version", action="version", version=f"titan {version()}")
    add_arguments(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank. Returns the exit code; exceptions that are no user's error come out with their traceback."""
    arguments = parser().parse_args(argv)
    rank, world_size, local_rank = _place(os.environ)
    written, plan, problem = _load(arguments)
    if plan is not None:
        # Before torch is imported: allocators and communication libraries read their variables when they start.
        os.environ.update(plan.job.environment)
    if importlib.util.find_spec("torch") is None:
        if local_rank == 0:
            print(f"titan: {NEEDS_TORCH}", file=sys.stderr)
        return 1
    seconds = _PREFLIGHT_SECONDS if plan is None else plan.job.comm.init_timeout_seconds
    store: dist.Store | None = None
    try:
        store = _store(rank, world_size, timedelta(seconds=seconds))
        return _run(arguments, written, plan, problem, store, rank, world_size, local_rank)
    except user_errors() as error:
        _say(error, store, rank, world_size)
        if isinstance(error, RunError) and error.agreed:
            _stop()
        # Else other ranks may be inside a collective that never ends; to leave the group would be to wait for them.
        return 1
    except Exception:
        # When another rank has said what is wrong, its end is why this rank's collectives break: no second story.
        if store is not None and _said(store):
            return 1
        raise


def _run(
    arguments: argparse.Namespace,
    written: Plan | None,
    plan: Plan | None,
    problem: str | None,
    store: dist.Store,
    rank: int,
    world_size: int,
    local_rank: int,
) -> int:
    import torch

    from titan_runtime import distributed
    from titan_runtime.preflight import Report, agree, local_report

    if plan is None:
        report = Report("", torch.__version__, version(), [problem or "the plan cannot be read"])
        seconds = _PREFLIGHT_SECONDS
    else:
        report = local_report(plan, arguments.plan, digest(plan), world_size, local_rank, arguments.accept_changes)
        seconds = plan.job.comm.init_timeout_seconds
    agree(report, store, rank, world_size, timedelta(seconds=seconds))
    assert plan is not None  # a rank without a plan has a problem, and then `agree` raises

    from titan_runtime.train import train

    code = train(plan, rank, world_size, store, written_plan=written, accept_changes=arguments.accept_changes)
    distributed.stop()
    return code


def _place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world size, rank on this node), as torchrun says, or those of a single process started without it."""
    return tuple(int(environment.get(name, default)) for name, default in _PLACE)  # type: ignore[return-value]


_PLACE = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def _load(arguments: argparse.Namespace) -> tuple[Plan | None, Plan | None, str | None]:
    """(the plan as its file has it, the plan to run, what is wrong instead)."""
    try:
        written = load_plan(arguments.plan)
        return written, apply_overrides(written, arguments), None
    except (PlanError, RunError) as error:
        return None, None, str(error)


def _store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    from titan_runtime.distributed import rendezvous_store

    try:
        return rendezvous_store(rank, world_size, timeout)
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"rank {rank} cannot reach the launch's store: {str(error).splitlines()[0]}",
            hint="start all ranks with torchrun, which sets MASTER_ADDR and MASTER_PORT",
        ) from error


def _say(error: Exception, store: dist.Store | None, rank: int, world_size: int) -> None:
    """Print a user's error once: by the first rank when all have it, else by the first rank to come here."""
    if isinstance(error, RunError) and error.agreed:
        if rank == 0:
            print(f"titan: {error}", file=sys.stderr, flush=True)
        return
    if store is None or _claim(store):
        where = f"rank {rank}: " if world_size > 1 else ""
        print(f"titan: {where}{error}", file=sys.stderr, flush=True)


_SAID = "titan/said"


def _claim(store: dist.Store) -> bool:
    try:
        return store.add(_SAID, 1) == 1
    except RuntimeError:
        return True  # the store is gone with its host: say it rather than say nothing


def _said(store: dist.Store) -> bool:
    try:
        return bool(store.check([_SAID]))
    except RuntimeError:
        return False


def _stop() -> None:
    from titan_runtime import distributed

    distributed.stop()


def _end(code: int) -> NoReturn:
    """End this process without tearing the interpreter down.

    Everything is closed and written by now. What is left are threads of communication libraries, and taking them down
    with the interpreter has been seen to abort (exit code 134) after a rank had already said that all was well, or what
    was not.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main())
