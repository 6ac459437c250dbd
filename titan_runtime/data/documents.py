"""Documents as a stream of pieces: what a source yields, and where a long document is cut.

A source yields the text of its documents in a fixed order, from any position on. A position is a small record of
integers that says where a piece starts; a source can go to it without reading the text before it (in a compressed
file it has to be decompressed). A document longer than :data:`PIECE_BYTES` comes in several pieces, so that neither
reading it nor returning into its middle costs more than one piece of tokenising.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_runtime.data.errors import DataError
from titan_runtime.data.files import DataFile, list_files
from titan_runtime.data.fingerprint import fingerprint_files

# Tokenisers are at their fastest up to about this size; twice as much text in one call takes more than twice the time.
PIECE_BYTES = 64 * 1024

Position = dict[str, int]

_WHITESPACE = b" \t\n\r\v\f"


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A document or a part of one, at most :data:`PIECE_BYTES` bytes of UTF-8 and never empty.

    ``start`` is the piece's position and ``end`` the position from which reading goes on after it.
    """

    text: str
    start: Position
    end: Position
    begins_document: bool
    ends_document: bool


class DocumentSource(abc.ABC):
    """Documents from a file or from all files of one kind below a folder, in the order of the files' names.

    Documents without text are skipped. Subclasses say how a file is read.
    """

    kind: str
    suffixes: tuple[str, ...]
    position_fields: tuple[str, ...]  # the first one is "file": the index into `files`

    def __init__(self, path: str | Path) -> None:
        """Find the files. Raises :class:`DataError` when there are none that have content."""
        self.path = Path(path)
        self.files: list[DataFile] = list_files(self.path, self.suffixes)

    @abc.abstractmethod
    def pieces(self, position: Position) -> Iterator[Piece]:
        """Yield the pieces from ``position`` to the end of the last file.

        ``position`` is :meth:`start`, or the ``start`` or ``end`` of a piece. Raises :class:`DataError` at a record
        that cannot be used.
        """

    def start(self) -> Position:
        """The position of the first document."""
        return dict.fromkeys(self.position_fields, 0)

    def check_position(self, position: object) -> Position:
        """Return ``position`` if it has the form of this source's positions, else raise :class:`DataError`."""
        if (
            not isinstance(position, dict)
            or set(position) != set(self.position_fields)
            or not all(type(value) is int and value >= 0 for value in position.values())
            or position["file"] > len(self.files)
        ):
            raise DataError(
                f"The position {position!r} is none of a {self.kind!r} source with {len(self.files)} files.",
                place=str(self.path),
                rule="position",
                fix="restore a state that was saved with this data",
            )
        return dict(position)

    def fingerprint(self) -> dict[str, Any]:
        """A JSON-able record that is equal for the same data and, but for a change deep inside a file, only then."""
        return {"kind": self.kind, "piece_bytes": PIECE_BYTES, **fingerprint_files(self.files)}

    def _files_from(self, position: Position) -> Iterator[tuple[int, DataFile, Position]]:
        """Yield (index, file, position in it) from the file of ``position`` to the last one."""
        for index in range(position["file"], len(self.files)):
            at = position if index == position["file"] else {**self.start(), "file": index}
            yield index, self.files[index], at


class RecordSource(DocumentSource):
    """Files of records, each of which is one document: the text in its field `text_field`."""

    def __init__(self, path: str | Path, *, text_field: str = "text") -> None:
        super().__init__(path)
        self.text_field = _require_text_field(text_field)

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "text_field": self.text_field}

    @staticmethod
    def _record(data: bytes, first_byte: int, here: Position, after: Position) -> Iterator[Piece]:
        """The pieces from ``first_byte`` on of the record with the text ``data``.

        Its position is ``here``, without the byte, and the next one's is ``after``.
        """
        for start, end in split_text(data, first_byte):
            last = end == len(data)
            yield Piece(
                text=data[start:end].decode("utf-8"),
                start={**here, "byte": start},
                end=after if last else {**here, "byte": end},
                begins_document=start == 0,
                ends_document=last,
            )


def cut(data: bytes, start: int = 0) -> int:
    """Where the piece of UTF-8 text that starts at ``start`` ends.

    This is ``len(data)`` if no more than :data:`PIECE_BYTES` are left. Otherwise it is after a line end, and if
    there is none in reach before a space, and failing that between two characters. The first choice is a line end
    between two visible characters, and the space is left to the next piece, since byte-level tokenizers split the
    text there anyway: cutting it then does not change the tokens.
    """
    if len(data) - start <= PIECE_BYTES:
        return len(data)
    stop = start + PIECE_BYTES  # data[stop] exists
    at = _last_between_visible(data, b"\n", start, stop)
    if at is None:
        at = data.rfind(b"\n", start, stop)
        at = None if at < 0 else at
    if at is not None:
        return at + 1
    at = _last_between_visible(data, b" ", start, stop)
    if at is not None:
        return at
    end = stop
    while end > stop - 4 and data[end] & 0xC0 == 0x80:  # the second to fourth byte of a character
        end -= 1
    return end


def split_text(data: bytes, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) in bytes of the pieces of one document's UTF-8 text, from ``start`` on."""
    while start < len(data):
        end = cut(data, start)
        yield start, end
        start = end


def encode_record(text: object, *, place: str, text_field: str) -> bytes:
    """The text of a record as UTF-8; raises :class:`DataError` when it is not a string of Unicode characters."""
    if not isinstance(text, str):
        raise DataError(
            f"The field {text_field!r} is of type {type(text).__name__}, not a string.",
            place=place,
            rule="text-field",
            fix="correct or remove the record, or name the field that holds the text",
        )
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"The text has half of a surrogate pair at character {error.start}, which is no Unicode text.",
            place=place,
            rule="utf-8",
            fix="correct or remove the record",
        ) from error


def _require_text_field(text_field: str) -> str:
    """Return ``text_field`` if it can be the name of a field, else raise :class:`DataError`."""
    if not isinstance(text_field, str) or not text_field:
        raise DataError(
            f"The name of the text field is {text_field!r}, not a name.",
            place="text_field",
            rule="text-field",
            fix='give the name of the field that holds the text, as in "text"',
        )
    return text_field


def _last_between_visible(data: bytes, byte: bytes, start: int, stop: int) -> int | None:
    """Index of the last ``byte`` in data[start + 1:stop] with no whitespace on either side; None if there is none."""
    at = data.rfind(byte, start + 1, stop)
    while at >= 0:
        if data[at - 1] not in _WHITESPACE and data[at + 1] not in _WHITESPACE:
            return at
        at = data.rfind(byte, start + 1, at)
    return None
