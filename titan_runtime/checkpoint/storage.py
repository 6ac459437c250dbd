"""Tensors to and from a folder by torch's distributed checkpoint (DCP), with failures as sentences on all ranks."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titan_runtime.agreement import together
from titan_runtime.checkpoint.tensors import global_shape
from titan_runtime.errors import RunError, reason


def write_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write every rank's part into `folder`, synced, `.metadata` last. Collective; RunError on all ranks or none."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    writer.fs = _FrankFileSystem()
    try:
        dcp.save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:  # derives from BaseException: `except Exception` would miss it
        raise RunError(f"cannot write the checkpoint {folder}: {_reasons(error)}", agreed=True) from error


def read_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Read into `tensors` in place, each rank its part, under whatever mesh they were written.

    Collective; RunError on all ranks when a tensor is not there, has another shape, or cannot be read.
    """
    together(lambda: check_present(tensors, read_metadata(folder), folder), "read the checkpoint")
    try:
        dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(folder))
    except CheckpointException as error:
        raise RunError(
            f"cannot read the checkpoint {folder}: {_reasons(error)}",
            hint="move it away; the next older checkpoint is then used",
            agreed=True,
        ) from error


def read_metadata(folder: Path) -> Metadata:
    """What DCP wrote about the tensors in `folder`. Raises RunError when it is damaged."""
    try:
        return dcp.FileSystemReader(folder).read_metadata()
    except Exception as error:  # unpickling a damaged file can raise anything
        raise RunError(
            f"{folder / '.metadata'} cannot be read: {reason(error)}",
            hint="move the folder away; the next older checkpoint is then used",
        ) from None


def check_present(tensors: dict[str, Tensor], metadata: Metadata, folder: Path) -> None:
    """RunError for the first tensors that the checkpoint lacks or holds in another shape."""
    stored: dict[str, Any] = metadata.state_dict_metadata
    missing = [name for name in tensors if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RunError(
            f"the checkpoint {folder} lacks `{missing[0]}`{more}", hint="use the checkpoint of the same model"
        )
    for name, tensor in tensors.items():
        entry = stored[name]
        shape = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if shape != global_shape(tensor):
            raise RunError(
                f"the checkpoint {folder} holds `{name}` with shape {'unknown' if shape is None else list(shape)}, "
                f"but the plan's model has {list(global_shape(tensor))}",
                hint="use the checkpoint of the same model",
            )


class _FrankFileSystem(FileSystem):
    """Says why a write failed. torch's archive writer turns "No space left on device" into "unexpected pos 704 vs 598"."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open `path`; an error that a write to it met is raised in place of what came of it."""
        with super().create_stream(path, mode) as stream:
            frank = _FrankStream(stream)
            try:
                yield frank  # type: ignore[misc]
            except Exception:  # whatever torch's writer makes of a failed write; any other goes on as it is
                if frank.error is not None:
                    raise frank.error from None
                raise


class _FrankStream:
    """A stream that remembers the first error of a write."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._stream.write(data)  # type: ignore[attr-defined,no-any-return]
        except OSError as error:
            self.error = self.error or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _reasons(error: CheckpointException) -> str:
    """The first failure of the ranks, with its rank when not all failed."""
    rank, (failure, _) = min(error.failures.items())
    kind = "" if isinstance(failure, OSError) else f"{type(failure).__name__}: "
    return f"{kind}{reason(failure)} (rank {rank})"
