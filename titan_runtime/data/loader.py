"""Batches of tensors for one data-parallel rank, out of the one global stream of samples."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from titan_runtime.data.errors import DataError
from titan_runtime.data.packing import PackedStream
from titan_runtime.data.prefetch import Prefetcher

IGNORE_INDEX = -100
"""The label of a position that does not count in the loss (the default ``ignore_index`` of PyTorch's losses)."""

STATE_FORMAT = 1


class Microbatch(NamedTuple):
    """What one forward pass of one rank sees.

    ``tokens`` and ``labels`` are int64 on the CPU, each [local_batch_size, seq_len]; ``labels[b, s]`` is the token
    that follows ``tokens[b, s]``. A label may be :data:`IGNORE_INDEX`; a packed stream gives none of these.
    """

    tokens: torch.Tensor
    labels: torch.Tensor


class _Batch(NamedTuple):
    microbatches: list[Microbatch]
    stream_state: dict[str, Any]  # after the whole global batch


class _BatchReader:
    """Reads one rank's slice of each global batch. Knows nothing of the loader, so that a thread can own it."""

    def __init__(self, stream: PackedStream, *, before: int, own: int, after: int, local_batch_size: int) -> None:
        self.stream = stream
        self._before, self._own, self._after = before, own, after
        self._local_batch_size = local_batch_size

    def read(self) -> _Batch:
        self.stream.skip(self._before)
        window = torch.frombuffer(self.stream.take(self._own), dtype=torch.int64)
        self.stream.skip(self._after)
        shape = (-1, self._local_batch_size, self.stream.seq_len)
        # Inputs and labels overlap in the window: a copy, so that masking a label does not change a token.
        tokens, labels = window[:-1].clone().view(shape), window[1:].view(shape)
        return _Batch([Microbatch(*pair) for pair in zip(tokens, labels, strict=True)], self.stream.state())


class DataLoader:
    """The batches of data-parallel rank ``dp_rank`` of ``dp_degree``.

    The global batch of step ``t`` is samples ``[t * G, (t + 1) * G)`` of the stream, with ``G`` the global batch
    size, whatever the parallelism. Rank ``r`` gets the ``r``-th of ``dp_degree`` equal, contiguous slices of it, as
    ``accumulation_steps`` microbatches of ``local_batch_size`` samples. Every rank runs the whole stream and drops
    the samples of the others. Ranks that differ only in other dimensions (tensor, pipeline, context) use the same
    ``dp_rank`` and get the same batches.

    A background thread reads ahead; use the loader as a context manager or call :meth:`close` to end it. (It also
    ends with the loader and with the program.) The loader owns the stream: nothing else may use it.

    Attributes:
        step: number of whole batches (of this loader's size) consumed since the stream's first sample.
        accumulation_steps: microbatches in a batch.
        wait_s: seconds that the consumer has waited for batches, over the loader's life.
    """

    def __init__(
        self,
        stream: PackedStream,
        *,
        global_batch_size: int,
        dp_rank: int,
        dp_degree: int,
        local_batch_size: int,
        prefetch: int = 2,
    ) -> None:
        """Start at the stream's place, which must be between two global batches.

        Args:
            stream: the samples.
            global_batch_size: samples in an optimizer step, over all ranks; a multiple of
                ``dp_degree * local_batch_size``.
            dp_rank: this rank's place in the data-parallel dimension.
            dp_degree: size of the data-parallel dimension.
            local_batch_size: samples in a microbatch.
            prefetch: batches to read ahead in the background; 0 reads each batch when it is asked for.

        Raises :class:`DataError` when these numbers do not fit together.
        """
        for name, value, least in (
            ("global_batch_size", global_batch_size, 1),
            ("dp_degree", dp_degree, 1),
            ("dp_rank", dp_rank, 0),
            ("local_batch_size", local_batch_size, 1),
            ("prefetch", prefetch, 0),
        ):
            if type(value) is not int or value < least:
                raise DataError(
                    f"{name} is {value!r}, not an integer of at least {least}.",
                    place=name,
                    rule="positive",
                    fix=f"give {name} as an integer of at least {least}",
                )
        if dp_rank >= dp_degree:
            raise DataError(
                f"dp_rank {dp_rank} is none of {dp_degree} ranks.",
                place="dp_rank",
                rule="rank",
                fix=f"give a rank from 0 to {dp_degree - 1}",
            )
        if global_batch_size % (dp_degree * local_batch_size):
            raise DataError(
                f"The global batch of {global_batch_size} samples does not split into {dp_degree} ranks with "
                f"microbatches of {local_batch_size}.",
                place="global_batch_size",
                rule="divisible",
                fix=f"make global_batch_size a multiple of {dp_degree * local_batch_size}",
            )
        self._global_batch_size = global_batch_size
        own = global_batch_size // dp_degree
        before = own * dp_rank
        self.accumulation_steps = own // local_batch_size
        self.wait_s = 0.0
        self.step = 0
        self._offset = 0  # of the first sample of all batches, when a part of the run had another batch size
        self._stream_state: dict[str, Any] = {}
        self._reader = _BatchReader(
            stream,
            before=before,
            own=own,
            after=global_batch_size - before - own,
            local_batch_size=local_batch_size,
        )
        self._depth = prefetch
        self._prefetcher: Prefetcher[_Batch] | None = None
        self._stop_thread: weakref.finalize[..., DataLoader] | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._begin_at(stream.state())

    def next_batch(self) -> list[Microbatch]:
        """This rank's microbatches of the next step, ``accumulation_steps`` of them.

        Raises :class:`DataError` at a record that cannot be used; the loader then stays at the step before, and
        raises the same error again until another state is loaded.
        """
        if self._closed:
            raise DataError("The data loader is closed.", place="DataLoader", rule="closed", fix="make a new loader")
        if self._error is not None:
            raise self._error
        began = time.perf_counter()
        try:
            batch = self._next()
        except BaseException as error:
            # The stream may be inside a global batch now; reading on would give samples of two steps as one. Only
            # an interrupt of the wait for the background thread does no harm.
            if isinstance(error, Exception) or self._depth == 0:
                self._error = error
            raise
        finally:
            self.wait_s += time.perf_counter() - began
        self.step += 1
        self._stream_state = batch.stream_state
        return batch.microbatches

    def __iter__(self) -> Iterator[list[Microbatch]]:
        return self

    def __next__(self) -> list[Microbatch]:
        return self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """A JSON-able record of the boundary after the last batch consumed (read ahead or not).

        It is the same on all ranks and for any ``dp_degree``, ``local_batch_size`` and ``prefetch``.
        """
        return {
            "format": STATE_FORMAT,
            "step": self.step,
            "global_batch_size": self._global_batch_size,
            **({"offset": self._offset} if self._offset else {}),
            "stream": copy.deepcopy(self._stream_state),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, other_batch_size: bool = False) -> None:
        """Go to a boundary saved by :meth:`state_dict` of any rank, under any data-parallel degree.

        With ``other_batch_size`` it may be of another global batch size: the place is counted in samples, and the next
        batch begins with the first sample not consumed yet. Raises :class:`DataError` when the state is none, or
        belongs to other data or (without ``other_batch_size``) another global batch size. The loader is then where it
        was.
        """
        if (
            not isinstance(state, Mapping)
            or state.get("format") != STATE_FORMAT
            or not isinstance(state.get("stream"), Mapping)
        ):
            raise DataError(
                "This is not the state of a data loader in a form that this version can read.",
                place="data state",
                rule="state",
                fix="restore a state that was saved by this version",
            )
        if not other_batch_size and state.get("global_batch_size") != self._global_batch_size:
            raise DataError(
                f"The state was saved with a global batch of {state.get('global_batch_size')!r} samples and the "
                f"loader has one of {self._global_batch_size}.",
                place="data state",
                rule="same-data",
                fix=f"go on with global_batch_size = {state.get('global_batch_size')!r}, or start the data anew",
            )
        self._end_thread()
        try:
            self._reader.stream.restore(state["stream"])
            # After another batch size a batch may begin anywhere; the state says where, so that damage is still seen.
            other = state.get("global_batch_size") != self._global_batch_size
            self._begin_at(state["stream"], state["stream"]["samples"] if other else state.get("offset", 0))
        except DataError:
            # The stream may have been read ahead: back to the boundary the consumer is at.
            self._reader.stream.restore(self._stream_state)
            raise
        self._error = None

    def close(self) -> None:
        """End the background thread. The state can still be read; no more batches can."""
        self._closed = True
        self._end_thread()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _begin_at(self, stream_state: Mapping[str, Any], offset: int = 0) -> None:
        """Go on at a place that is a whole number of batches after sample `offset`."""
        samples = stream_state["samples"]
        if type(offset) is not int or (samples - offset) % self._global_batch_size:
            raise DataError(
                f"The stream is at sample {samples}, inside a global batch of {self._global_batch_size}.",
                place="global_batch_size",
                rule="step-boundary",
                fix="start at a sample between two global batches",
            )
        self._offset = offset % self._global_batch_size
        self.step = samples // self._global_batch_size
        self._stream_state = copy.deepcopy(dict(stream_state))

    def _next(self) -> _Batch:
        if self._depth == 0:
            return self._reader.read()
        if self._prefetcher is None:
            # Started at the first batch: a state is usually loaded before it.
            self._prefetcher = Prefetcher(self._reader.read, self._depth)
            self._stop_thread = weakref.finalize(self, self._prefetcher.close)
        return self._prefetcher.get()

    def _end_thread(self) -> None:
        if self._stop_thread is not None:
            self._stop_thread()  # runs once; the finalizer is then dead
        self._prefetcher = self._stop_thread = None
