"""The files of a data set: found in a fixed order, opened at an offset, summarised by a digest."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from titan_runtime.data.errors import DataError

# How much of each end of a file its digest covers. A data set of a thousand shards costs 32 MiB of reading this way.
DIGEST_BYTES = 16 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a data set; ``name`` is its path below the data set's folder, ``size`` is in bytes on disk."""

    name: str
    path: Path
    size: int

    def digest(self) -> str:
        """Hex sha256 over the first and the last :data:`DIGEST_BYTES` bytes of the file."""
        digest = hashlib.sha256()
        try:
            with open(self.path, "rb") as stream:
                digest.update(stream.read(DIGEST_BYTES))
                stream.seek(max(stream.tell(), self.size - DIGEST_BYTES))
                digest.update(stream.read(DIGEST_BYTES))
        except OSError as error:
            raise unreadable(self.path, error) from error
        return digest.hexdigest()


def list_files(root: str | Path, suffixes: Sequence[str]) -> list[DataFile]:
    """The non-empty files of a data set, sorted by name.

    ``root`` is one file, which may have any name, or a folder, of which all files below it count whose names end in
    one of ``suffixes``. Names that start with a dot are left out: they are what tools leave behind.

    Raises :class:`DataError` when there is no such path, no such file, or all of them are empty.
    """
    root = Path(root)
    if root.is_file():
        found = {root.name: root}
    elif root.is_dir():
        found = {path.relative_to(root).as_posix(): path for path in _walk(root) if path.name.endswith(tuple(suffixes))}
    else:
        raise DataError(
            "There is no such file or folder.", place=str(root), rule="data-path", fix="correct the path of the data"
        )
    if not found:
        raise DataError(
            f"This folder has no file that ends in {' or '.join(suffixes)}.",
            place=str(root),
            rule="data-path",
            fix="correct the path, or choose the source that reads the files that are there",
        )
    try:
        files = [DataFile(name, path, path.stat().st_size) for name, path in sorted(found.items())]
    except OSError as error:  # a link to nowhere
        raise unreadable(Path(error.filename or root), error) from error
    files = [file for file in files if file.size > 0]
    if not files:
        raise no_text_error(root)
    return files


def no_text_error(root: Path) -> DataError:
    """The error of a data set without a single character of text."""
    return DataError(
        "This data set has no text.", place=str(root), rule="some-text", fix="add documents that have text"
    )


def unreadable(path: Path, error: BaseException, what: str = "read") -> DataError:
    """The error of a file that cannot be read (``what``: or be read as something) for the reason ``error``."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DataError(
        f"The file cannot be {what}: {reason}.",
        place=str(path),
        rule="readable",
        fix="check that the file is there, complete, undamaged and open to this user",
    )


@contextmanager
def open_at(file: DataFile, offset: int) -> Iterator[BinaryIO]:
    """Open ``file`` for reading bytes from ``offset``; a name that ends in ``.gz`` is decompressed on the way.

    ``offset`` counts decompressed bytes. Reaching it in a compressed file means decompressing what lies before it.
    Raises :class:`DataError` when the file cannot be read.
    """
    try:
        with gzip.open(file.path, "rb") if file.name.endswith(".gz") else open(file.path, "rb") as stream:
            stream.seek(offset)
            yield cast(BinaryIO, stream)
    except (OSError, EOFError, zlib.error) as error:  # the last two come from a damaged gzip file
        raise unreadable(file.path, error) from error


def _walk(root: Path) -> Iterator[Path]:
    def stop(error: OSError) -> None:  # the default is to leave the folder out in silence
        raise unreadable(Path(error.filename or root), error) from error

    for folder, subfolders, names in os.walk(root, onerror=stop):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))
