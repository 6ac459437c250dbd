"""Start a plan's ranks on this machine: torchrun, called as a library so that its own reports do not bury ours."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Sequence

from titan_planner.ir.errors import PlanError
from titan_planner.ir.plan import Plan
from titan_planner.ir.verify import load_plan
from titan_runtime.torchrun import torchrun_advice


def launch(path: str, options: Sequence[str], shutdown_seconds: int) -> int:
    """Run the plan in the file `path` with the runtime's `options`; returns the exit code of the first rank that
    failed.

    After a signal it is 128 + the signal's number, and ranks get `shutdown_seconds` to save.
    """
    try:
        plan = load_plan(path)
    except PlanError as error:
        return _refuse(str(error))
    if plan.cluster.nodes > 1:
        return _refuse(
            f"the plan `{plan.name}` needs {plan.mesh.world_size} ranks on {plan.cluster.nodes} nodes, "
            f"and titan-run starts ranks on one machine only\n    try: {torchrun_advice(plan, path)}"
        )
    if importlib.util.find_spec("torch") is None:
        from titan_runtime.__main__ import NEEDS_TORCH

        return _refuse(NEEDS_TORCH)
    # Before the ranks start: some variables, such as OMP_NUM_THREADS, are read while a process starts.
    os.environ.update(plan.job.environment)
    return _torchrun(plan, path, options, shutdown_seconds)


def _torchrun(plan: Plan, path: str, options: Sequence[str], shutdown_seconds: int) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # A rank has said in one sentence what is wrong; torchrun would add forty lines about exit codes.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    command = ["--standalone", f"--nproc-per-node={plan.mesh.world_size}", f"--shutdown-timeout={shutdown_seconds}"]
    try:
        torchrun.run(torchrun.parse_args([*command, "-m", "titan_runtime", "--plan", path, *options]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        # It could not say so itself, and the others may have had no time to find out.
        print(f"titan-run: {_killed(rank, -failure.exitcode)}", file=sys.stderr)
        # Shells know a process that a signal ended by 128 + the signal's number.
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _killed(rank: int, number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {number}"
    advice = "look for the out-of-memory killer (dmesg)" if name == "SIGKILL" else "look at what it printed last"
    return f"rank {rank} was ended by {name}, and with it the run\n    try: {advice}"


def _refuse(sentence: str) -> int:
    print(f"titan-run: {sentence}", file=sys.stderr)
    return 1
