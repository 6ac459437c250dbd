"""Who is still there: ranks give signs of life through the launch's store, so that the one that is missing can be named.

A rank that was killed, stopped, or lost with its machine cannot say so itself, and what its peers see is a broken or silent
connection to *somebody*. So a thread of every rank counts a number up in the store, and looks at the next rank's. Whoever
finds a number that stands still, or loses a connection, calls the roll: all numbers now, and all numbers a little later.

This works for every backend, also where a collective that waits in vain never returns to Python.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from titan_runtime.agreement import name_ranks

_SAID = "titan/said"
_BEAT_SECONDS = 2.0
_SPARE_SECONDS = 10.0
"""How long before the collectives' timeout a silent rank is given up: time to call the roll and to say who it is."""
_LEAST_SECONDS = 5.0


def claim(store: dist.Store) -> bool:
    """Whether this rank is the first to say what is wrong, and should."""
    try:
        return store.add(_SAID, 1) == 1
    except RuntimeError:
        return True  # the store is gone with its host: say it rather than say nothing


def said(store: dist.Store) -> bool:
    """Whether some rank has said what is wrong."""
    try:
        return bool(store.check([_SAID]))
    except RuntimeError:
        return False


def wait_until_said(store: dist.Store) -> None:
    """Return when some rank has said what is wrong, or cannot be expected to.

    A launcher ends all ranks as soon as one has ended, the one that is about to speak too.
    """
    try:
        store.wait([_SAID], timedelta(seconds=_SPARE_SECONDS))
    except RuntimeError:
        return  # it is gone, or the store with it


def connect_again(store: dist.Store, timeout: timedelta) -> dist.Store | None:
    """A connection of one's own to the same store, None for one that is not on a network.

    One connection serves one call at a time, and the start of a process group waits in it for a slow peer: signs of life
    must not wait with it.
    """
    if not isinstance(store, dist.TCPStore):
        return None
    return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)


class Watch:
    """This rank's signs of life, and its eye on the next rank. `seconds` is how long collectives wait at present."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
        self._base = store
        self._store = dist.PrefixStore("titan/watch", store)
        self._rank = rank
        self._world_size = world_size
        self._seconds = seconds
        self._watched = (rank + 1) % world_size
        self._beats, self._since = -1, time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="titan-watch", daemon=True)

    def start(self) -> None:
        """Begin to give signs of life."""
        self._thread.start()

    def allow(self, seconds: float) -> None:
        """Collectives wait that long from now on."""
        self._seconds = seconds

    def end(self, how: str) -> None:
        """This rank goes, for a reason of its own (`how`: "done" or "error"): nobody shall miss it."""
        self._stopped.set()
        try:
            self._store.set(f"ended/{self._rank}", how)
        except RuntimeError:
            return  # the store is gone, and with it whoever could have asked

    def who_is_missing(self) -> str | None:
        """A sentence about the ranks that are not there any more; None when another rank has said it meanwhile.

        Takes a few seconds, and returns in any case.
        """
        found: list[str | None] = []
        caller = threading.Thread(target=lambda: found.append(self._ask()), daemon=True)
        caller.start()
        # The second wait of `_ask` comes after its first one, and each reads a store that may answer slowly.
        caller.join(4 * self._roll_seconds() + 5.0)
        return found[0] if found else _NO_STORE

    def _ask(self) -> str | None:
        try:
            self._store.set(f"left/{self._rank}", "")
            if self._store.add("called", 1) > 1:
                # One rank calls for all: hundreds that read hundreds of numbers would be slow to answer themselves.
                until = time.monotonic() + 2 * self._roll_seconds()
                while time.monotonic() < until:
                    if said(self._base):
                        return None
                    time.sleep(0.1)
            return self._sentence(self._roll())
        except RuntimeError:
            return _NO_STORE

    def _sentence(self, silent: list[int]) -> str:
        failed = [rank for rank in silent if self._ended(rank) == "error"]
        lost = [rank for rank in silent if self._ended(rank) is None]
        if lost:
            return _gone(lost)
        if failed:
            return f"{name_ranks(failed)} ended with an error of {'its' if len(failed) == 1 else 'their'} own, printed above"
        late = [
            rank
            for rank in range(self._world_size)
            if not self._store.check([f"left/{rank}"]) and self._ended(rank) is None
        ]
        if not late:
            return "all ranks are alive, but connections between them broke\n    try: look at the network between the nodes"
        return (
            f"all ranks are alive, but {name_ranks(late)} did not come to where the others waited\n"
            f"    try: look at what {name_ranks(late)} {'does' if len(late) == 1 else 'do'} "
            "(py-spy dump --pid), or raise `comm` timeouts when it is slow work"
        )

    def _roll(self) -> list[int]:
        """The ranks that give no sign of life, or have ended."""
        before = {rank: self._count(rank) for rank in range(self._world_size) if rank != self._rank}
        until = time.monotonic() + self._roll_seconds()
        while before and time.monotonic() < until:
            time.sleep(self._interval() / 2)
            before = {rank: count for rank, count in before.items() if self._count(rank) == count}
        return sorted(before)

    def _count(self, rank: int) -> int:
        return int(self._store.add(f"beat/{rank}", 0))  # `get` would wait for a rank that has not begun

    def _ended(self, rank: int) -> str | None:
        key = f"ended/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _interval(self) -> float:
        return min(_BEAT_SECONDS, self._seconds / 8)

    def _roll_seconds(self) -> float:
        return 3 * self._interval()

    def _patience(self) -> float:
        return max(_LEAST_SECONDS, self._seconds / 2, self._seconds - _SPARE_SECONDS)

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(self._interval()):
                self._store.add(f"beat/{self._rank}", 1)
                if self._store.check(["over"]):
                    _end()
                self._look()
        except RuntimeError:
            # The store is gone. Its host may just have ended as this rank is about to; if not, this one waits in vain.
            if not self._stopped.wait(self._patience()):
                _say(self._rank, _NO_STORE)
                _end()

    def _look(self) -> None:
        """Give the run up when the watched rank has been silent for too long."""
        beats, now = self._count(self._watched), time.monotonic()
        if beats != self._beats:
            self._beats, self._since = beats, now
        if now - self._since < self._patience():
            return
        if self._ended(self._watched) is not None:
            self._watched = (self._watched + 1) % self._world_size
            self._beats, self._since = -1, now
            return
        lost = [rank for rank in self._roll() if self._ended(rank) is None]
        if self._stopped.is_set():
            return
        if not lost:
            self._since = time.monotonic()
            return
        if claim(self._base):
            _say(self._rank, f"{_gone(lost, now - self._since)}")
        self._store.set("over", "")
        _end()


_NO_STORE = (
    "the launch's store does not answer, so its host, the machine of rank 0, is gone\n"
    "    try: look at what rank 0 and its launcher printed last"
)


def _gone(ranks: list[int], seconds: float | None = None) -> str:
    one = len(ranks) == 1
    since = "" if seconds is None else f" for {seconds:.0f} s"
    return (
        f"{name_ranks(ranks)} {'gives' if one else 'give'} no sign of life{since}: "
        f"{'it was' if one else 'they were'} killed or stopped, or {'its machine is' if one else 'their machines are'} gone\n"
        f"    try: look on the machine of {name_ranks(ranks)} for the out-of-memory killer (dmesg) and for a stopped process"
    )


def _say(rank: int, sentence: str) -> None:
    print(f"titan: rank {rank}: {sentence}", file=sys.stderr, flush=True)


def _end() -> NoReturn:
    """End this process though its main thread waits in a collective that will not return."""
    sys.stdout.flush()
    os._exit(1)
