"""`torchrun -m titan_runtime --plan plan.json`: check that the plan can run here, then run it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

if __name__ == "__main__":
    # Until the loop takes Ctrl-C as a wish to save there is nothing to save: end, and not with a traceback of imports.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))

from titan_planner.ir.codec import digest
from titan_planner.ir.errors import PlanError
from titan_planner.ir.plan import Plan
from titan_planner.ir.verify import load_plan
from titan_runtime import version
from titan_runtime.errors import LostConnection, RunError, naming_lost_connections, user_errors
from titan_runtime.overrides import add_arguments, apply_overrides
from titan_runtime.torchrun import torchrun_advice

if TYPE_CHECKING:
    import torch.distributed as dist

    from titan_runtime.watch import Watch

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
    written, plan, problem = _load(arguments)
    try:
        rank, world_size, local_rank = _place(os.environ)
        _require_launcher(os.environ, world_size, plan, arguments.plan)
    except RunError as error:
        print(f"titan: {error}", file=sys.stderr)
        return 1
    if plan is not None:
        # Before torch is imported: allocators and communication libraries read their variables when they start.
        os.environ.update(plan.job.environment)
    if importlib.util.find_spec("torch") is None:
        if local_rank == 0:
            print(f"titan: {NEEDS_TORCH}", file=sys.stderr)
        return 1
    seconds = _PREFLIGHT_SECONDS if plan is None else plan.job.comm.init_timeout_seconds
    from titan_runtime.watch import Watch, connect_again, said

    store: dist.Store | None = None
    watch: Watch | None = None
    try:
        store = _store(rank, world_size, timedelta(seconds=seconds))
        own = connect_again(store, timedelta(seconds=seconds)) if world_size > 1 else None
        watch = None if own is None else Watch(own, rank, world_size, seconds)
        code = _run(arguments, written, plan, problem, store, watch, rank, world_size, local_rank)
        if watch is not None:
            watch.end("done")
        return code
    except user_errors() as error:
        _say(error, store, rank, world_size)
        if watch is not None:
            watch.end("error")
        if isinstance(error, RunError) and error.agreed:
            _stop()
        # Else other ranks may be inside a collective that never ends; to leave the group would be to wait for them.
        return 1
    except LostConnection as error:
        _say_lost(error, store, watch, rank)
        return 1
    except Exception:  # a bug: it goes on, with its traceback, unless it is another rank's
        # When another rank has said what is wrong, its end is why this rank's collectives break: no second story.
        if store is not None and said(store):
            return 1
        if watch is not None:
            watch.end("error")
        raise


def _run(
    arguments: argparse.Namespace,
    written: Plan | None,
    plan: Plan | None,
    problem: str | None,
    store: dist.Store,
    watch: Watch | None,
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
    if watch is not None:
        watch.start()

    from titan_runtime.train import train

    with naming_lost_connections(lambda: "before or after training"):
        code = train(
            plan,
            rank,
            world_size,
            store,
            written_plan=written,
            accept_changes=arguments.accept_changes,
            watch=watch,
        )
    distributed.stop()
    return code


def _place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world size, rank on this node), as torchrun says, or those of a single process started without it."""
    found = {name: environment.get(name, default) for name, default in _PLACE}
    for name, text in found.items():
        if not (text.isascii() and text.isdigit()):
            raise RunError(f"the environment variable {name} is {text!r}, not a number", hint=_UNSET)
    rank, world_size, local_rank = (int(text) for text in found.values())
    if rank >= world_size:
        raise RunError(f"the environment has RANK={rank}, which is none of WORLD_SIZE={world_size} ranks", hint=_UNSET)
    return rank, world_size, local_rank


def _require_launcher(environment: Mapping[str, str], world_size: int, plan: Plan | None, path: str) -> None:
    """RunError when there are other ranks and no way to find them: waiting for them would be in vain."""
    if world_size > 1 and "MASTER_ADDR" not in environment:
        advice = "start all ranks with torchrun" if plan is None else torchrun_advice(plan, path)
        raise RunError(f"WORLD_SIZE is {world_size}, but MASTER_ADDR does not say where the ranks meet", hint=advice)


_UNSET = "start all ranks with torchrun, which sets it, or unset RANK, WORLD_SIZE and LOCAL_RANK"
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
    from titan_runtime.watch import claim, wait_until_said

    if isinstance(error, RunError) and error.agreed:
        if rank == 0:
            print(f"titan: {error}", file=sys.stderr, flush=True)
            if store is not None:
                claim(store)
        elif store is not None:
            wait_until_said(store)
        return
    if store is None or claim(store):
        where = f"rank {rank}: " if world_size > 1 else ""
        print(f"titan: {where}{error}", file=sys.stderr, flush=True)


def _say_lost(error: LostConnection, store: dist.Store | None, watch: Watch | None, rank: int) -> None:
    """Print which rank is missing, once; nothing when a rank has said before why it ended."""
    from titan_runtime.watch import claim, said

    # The launcher, too, has seen that a rank is gone, and asks the others to end; this one does, once it knows which.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if store is not None and said(store):
        return
    missing = "another rank has ended" if watch is None else watch.who_is_missing()
    if missing is not None and (store is None or claim(store)):
        print(f"titan: rank {rank} {error}: {missing}", file=sys.stderr, flush=True)


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
