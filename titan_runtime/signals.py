"""A polite stop: SIGTERM and Ctrl-C are noted, and the loop asks for them between two steps."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

# One press of Ctrl-C can arrive twice, from the terminal and from the launcher that passes it on.
_ECHO_SECONDS = 1.0

_HANDLED = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While entered, holds the first signal of SIGTERM and SIGINT that came, 0 before. A second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.signal = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in _HANDLED:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signal:
            self.signal, self._since = number, now
        elif number == signal.SIGINT and now - self._since > _ECHO_SECONDS:
            # Not an exception: the rank may be deep inside a collective that others have already left.
            print("titan: stopped at once by a second Ctrl-C", file=sys.stderr, flush=True)
            os._exit(128 + number)


def agree_on_flags(*flags: int) -> list[int]:
    """The largest value of each flag over all ranks. Collective, over CPU memory, so it waits for no device."""
    values = torch.tensor(flags, dtype=torch.int64, device="cpu")
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.tolist()
