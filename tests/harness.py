"""Run a function on several ranks at once: forked from one process that has imported torch already.

    def check(rank, degree):
        ...collectives...
        return rank.index

    results = run_ranks(check, 4, degree)          # [0, 1, 2, 3]

A fork shares the parent's imported modules, so four ranks are up in 0.2 s where torchrun needs 5. Ranks meet over gloo
and a file store in a folder of their own. `fn` gets a `Rank` and the given arguments, by fork and not by pickle, so
closures and test classes will do; its result is pickled back. What a rank prints goes to a file and is shown when
something fails.

An exception on any rank becomes a `RanksFailed` with every failed rank's traceback. When one rank has failed, the
others get `GRACE_SECONDS` to end, and a rank that has not ended after `timeout` seconds is killed and reported with its
stack, so a hanging collective costs no more than the timeout. Use torchrun itself only for what a command line does.

Keep the parent free of threads: run with OMP_NUM_THREADS=1 (tests/conftest.py sees to it) and do not compile in it.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

GRACE_SECONDS = 5.0
"""How long ranks may go on after another one has failed: enough to see the broken connection and say so."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's place, and a store that all ranks of the call share."""

    index: int
    world_size: int
    store: Any


class RanksFailed(AssertionError):
    """Some ranks raised or hung. `errors` maps each of them to its traceback, or to a word about how it ended."""

    def __init__(self, errors: dict[int, str], output: dict[int, str]) -> None:
        self.errors = errors
        self.output = output
        parts = []
        for rank, text in sorted(errors.items()):
            printed = output.get(rank, "").strip()
            shown = f"\n--- printed ---\n{printed[-4000:]}" if printed else ""
            parts.append(f"--- rank {rank} ---\n{text.rstrip()}{shown}")
        super().__init__("\n".join(parts))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    process_group: bool = True,
    output: list[str] | None = None,
) -> list[Any]:
    """`fn(rank, *args)` on `world_size` ranks; the results in rank order.

    With `process_group` the default group exists already (gloo); without it `fn` makes its own from `rank.store`. What
    the ranks printed is appended to `output`, one text a rank. Raises RanksFailed.
    """
    import torch.distributed  # before the fork, once for all ranks  # noqa: F401

    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    children: dict[int, tuple[int, int]] = {}  # rank -> (pid, read end of its pipe)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        for index in range(world_size):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read)
                _child(fn, index, world_size, args, folder, write, timeout, process_group)
            os.close(write)
            children[index] = (pid, read)
        answers, errors = _collect(children, timeout)
        printed = {index: _read(folder / f"output-{index}") for index in range(world_size)}
        if output is not None:
            output.extend(printed[index] for index in range(world_size))
        for index, (kind, value) in answers.items():
            if kind == "error":
                errors[index] = value
        if errors:
            raise RanksFailed(errors, printed)
        return [answers[index][1] for index in range(world_size)]
    finally:
        for pid, read in children.values():
            os.close(read)
            _kill(pid)
        shutil.rmtree(folder, ignore_errors=True)


def _child(
    fn: Callable[..., Any],
    index: int,
    world_size: int,
    args: tuple[Any, ...],
    folder: Path,
    write: int,
    timeout: float,
    process_group: bool,
) -> NoReturn:
    """Everything a forked rank does. It never returns into the test that forked it."""
    code = 0
    try:
        answer = _run(fn, index, world_size, args, folder, timeout, process_group)
    except BaseException:  # SystemExit and DCP's CheckpointException too
        answer, code = pickle.dumps(("error", traceback.format_exc())), 1
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(write, "wb") as pipe:
        pipe.write(answer)
    os._exit(code)


def _run(
    fn: Callable[..., Any],
    index: int,
    world_size: int,
    args: tuple[Any, ...],
    folder: Path,
    timeout: float,
    process_group: bool,
) -> bytes:
    import torch
    import torch.distributed as dist

    out = os.open(folder / f"output-{index}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    # pytest has put objects of its own in their place, which the fork inherits.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.dump_traceback_later(max(timeout - 1.0, 0.5), file=sys.stderr)
    os.environ.update(RANK=str(index), WORLD_SIZE=str(world_size), LOCAL_RANK=str(index))
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    if process_group:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("harness", store),
            rank=index,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        dist.barrier()  # all are connected: a rank that fails at once must not break another one's start
    result = fn(Rank(index, world_size, dist.PrefixStore("test", store)), *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return pickle.dumps(("result", result))


def _collect(children: dict[int, tuple[int, int]], timeout: float) -> tuple[dict[int, tuple[str, Any]], dict[int, str]]:
    """Answers of the ranks that gave one, and a word about each that gave none."""
    deadline = time.monotonic() + timeout
    waiting = {read: index for index, (_, read) in children.items()}
    received: dict[int, bytearray] = {index: bytearray() for index in children}
    answers: dict[int, tuple[str, Any]] = {}
    errors: dict[int, str] = {}
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(list(waiting), [], [], left)
        for read in ready:
            chunk = os.read(read, 1 << 20)
            index = waiting[read]
            received[index] += chunk
            if chunk:
                continue
            del waiting[read]
            if received[index]:
                answers[index] = pickle.loads(received[index])
            else:
                errors[index] = f"ended without an answer: {_how(children[index][0])}"
            if index in errors or answers[index][0] == "error":
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    failed = bool(errors) or any(kind == "error" for kind, _ in answers.values())
    word = "stopped because another rank had failed" if failed else f"hung: no answer within {timeout:.0f} s"
    for index in waiting.values():
        errors[index] = word
        _kill(children[index][0])
    return answers, errors


def _how(pid: int) -> str:
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _kill(pid: int) -> None:
    """End a child that may have ended already, and let the kernel forget it."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return  # it has been waited for


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
