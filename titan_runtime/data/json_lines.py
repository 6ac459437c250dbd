"""JSON Lines files: one JSON object a line, each one document."""

from __future__ import annotations

import json
from collections.abc import Iterator

from titan_runtime.data.documents import Piece, Position, RecordSource, encode_record
from titan_runtime.data.errors import DataError
from titan_runtime.data.files import DataFile, open_at

# A record has to be read whole. This is far above any real document and keeps a file that has no lines at all, such
# as a binary one with the wrong name, from filling the memory.
MAX_LINE_BYTES = 256 * 1024 * 1024


class JsonLines(RecordSource):
    """A ``.jsonl`` or ``.jsonl.gz`` file, or all of them below a folder; the text is in field ``text_field``.

    A position is the file's index, the line's offset in bytes in the (decompressed) file, the number of lines
    before it, and the offset in bytes in the record's text. Blank lines and records with an empty text are skipped.
    """

    kind = "jsonl"
    suffixes = (".jsonl", ".jsonl.gz")
    position_fields = ("file", "offset", "line", "byte")

    def pieces(self, position: Position) -> Iterator[Piece]:
        for index, file, at in self._files_from(position):
            offset, line, first_byte = at["offset"], at["line"], at["byte"]
            with open_at(file, offset) as stream:
                while raw := stream.readline(MAX_LINE_BYTES + 1):
                    here = {"file": index, "offset": offset, "line": line}
                    after = {"file": index, "offset": offset + len(raw), "line": line + 1, "byte": 0}
                    data = self._text(raw, file, line + 1)
                    yield from self._record(data, first_byte, here, after)
                    first_byte = 0
                    offset += len(raw)
                    line += 1

    def _text(self, raw: bytes, file: DataFile, number: int) -> bytes:
        """The UTF-8 text of the record in line ``number``; empty for a blank line."""
        place = f"{file.path}:{number}"
        if len(raw) > MAX_LINE_BYTES:
            raise DataError(
                f"The line is longer than {MAX_LINE_BYTES} bytes.",
                place=place,
                rule="json-lines",
                fix="write one JSON object a line, or choose the source that reads this kind of file",
            )
        if raw.isspace():
            return b""
        try:
            record = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"Byte {raw[error.start]:#04x} at column {error.start + 1} is not UTF-8 text ({error.reason}).",
                place=place,
                rule="utf-8",
                fix="convert the file to UTF-8, or correct or remove the line",
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"The line is not valid JSON: {error}.",
                place=place,
                rule="json-lines",
                fix="correct or remove the line; each line has to be one whole JSON object",
            ) from error
        if not isinstance(record, dict):
            raise DataError(
                f"The line is a JSON {type(record).__name__}, not an object.",
                place=place,
                rule="json-lines",
                fix=f'write each document as an object, as in {{"{self.text_field}": "..."}}',
            )
        if self.text_field not in record:
            has = ", ".join(repr(name) for name in list(record)[:8]) or "no field"
            raise DataError(
                f"The record has no field {self.text_field!r}; it has {has}.",
                place=place,
                rule="text-field",
                fix="correct or remove the record, or name the field that holds the text",
            )
        return encode_record(record[self.text_field], place=place, text_field=self.text_field)
