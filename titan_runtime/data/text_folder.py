"""Plain text files, each one document."""

from __future__ import annotations

from collections.abc import Iterator

from titan_runtime.data.documents import PIECE_BYTES, DocumentSource, Piece, Position, cut
from titan_runtime.data.errors import DataError
from titan_runtime.data.files import DataFile, open_at

_COUNT_BYTES = 1024 * 1024


class TextFolder(DocumentSource):
    """A ``.txt`` or ``.txt.gz`` file, or all of them below a folder; each file is one document of UTF-8 text.

    A position is the file's index and the offset in bytes in its (decompressed) text. Files are read piece by
    piece, so their size does not matter.
    """

    kind = "text"
    suffixes = (".txt", ".txt.gz")
    position_fields = ("file", "offset")

    def pieces(self, position: Position) -> Iterator[Piece]:
        for index, file, at in self._files_from(position):
            offset = at["offset"]
            with open_at(file, offset) as stream:
                data = b""
                while True:
                    # One byte more than a piece tells whether the document goes on after it.
                    data += stream.read(PIECE_BYTES + 1 - len(data))
                    if not data:
                        break
                    size = cut(data)
                    last = size == len(data)
                    yield Piece(
                        text=_decode(data[:size], file, offset),
                        start={"file": index, "offset": offset},
                        end={"file": index + 1, "offset": 0} if last else {"file": index, "offset": offset + size},
                        begins_document=offset == 0,
                        ends_document=last,
                    )
                    if last:
                        break
                    data = data[size:]
                    offset += size


def _decode(data: bytes, file: DataFile, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise DataError(
            f"Byte {data[error.start]:#04x} at offset {at} is not UTF-8 text ({error.reason}).",
            place=f"{file.path}:{_line_number(file, at)}",
            rule="utf-8",
            fix="convert the file to UTF-8 (for example with iconv), or remove it",
        ) from error


def _line_number(file: DataFile, offset: int) -> int:
    """The 1-based line of the byte at ``offset``. Only errors need it, so nothing keeps count while reading."""
    lines = 1
    with open_at(file, 0) as stream:
        while offset > 0:
            block = stream.read(min(_COUNT_BYTES, offset))
            if not block:
                break
            lines += block.count(b"\n")
            offset -= len(block)
    return lines
