"""Values made ahead of their use by a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Calls ``produce`` in one background thread and hands out its results in order, at most ``depth`` ahead.

    An exception of ``produce`` ends the thread and is raised by :meth:`get` in its turn, after the results before
    it, and again on every later call.
    """

    def __init__(self, produce: Callable[[], T], depth: int) -> None:
        """Start the thread; ``depth`` is at least 1."""
        self._produce = produce
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="titan-data-prefetch", daemon=True)
        self._thread.start()

    def get(self) -> T:
        """The next result; waits for it. Must not be called after :meth:`close`."""
        if self._error is None:
            value, self._error = self._ready.get()
        if self._error is not None:
            raise self._error
        return value  # type: ignore[return-value]  # a result comes with no error

    def close(self) -> None:
        """End the thread, after the call of ``produce`` that it is in; results not taken are lost."""
        self._closed.set()
        # Room for the result the thread may be waiting to hand over; it looks at `_closed` before the next one.
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        # The garbage collector may call this in the thread itself.
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                item: tuple[T | None, BaseException | None] = (self._produce(), None)
            except BaseException as error:  # whatever it is, the consumer has to see it
                item = (None, error)
            self._ready.put(item)
            if item[1] is not None:
                return
