"""Parquet files: one row is one document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_runtime.data.documents import Piece, Position, RecordSource, encode_record
from titan_runtime.data.errors import DataError
from titan_runtime.data.files import DataFile, unreadable

# Rows decoded at a time: row groups of web text reach gigabytes, a batch of rows does not.
_BATCH_ROWS = 512


class ParquetFiles(RecordSource):
    """A ``.parquet`` file, or all of them below a folder; the text is in the string column ``text_field``.

    A position is the file's index, the row group, the row in it, and the offset in bytes in the row's text. Only
    that column is read, and only from the row group of the position on. Rows with an empty text are skipped.
    """

    kind = "parquet"
    suffixes = (".parquet",)
    position_fields = ("file", "row_group", "row", "byte")

    def __init__(self, path: str | Path, *, text_field: str = "text") -> None:
        super().__init__(path, text_field=text_field)
        _import_pyarrow()  # fail here rather than at the first batch, which may be read in another thread

    def pieces(self, position: Position) -> Iterator[Piece]:
        for index, file, at in self._files_from(position):
            first_row, first_byte = at["row"], at["byte"]
            for row_group, row, rows_before, value in self._rows(file, at["row_group"], first_row):
                place = f"{file.path}: row {rows_before + row + 1}"
                data = encode_record(value, place=place, text_field=self.text_field)
                here = {"file": index, "row_group": row_group, "row": row}
                after = {**here, "row": row + 1, "byte": 0}
                yield from self._record(data, first_byte, here, after)
                first_byte = 0

    def _rows(self, file: DataFile, first_group: int, first_row: int) -> Iterator[tuple[int, int, int, object]]:
        """Yield (row group, row in it, rows of the file before the group, value of the text column)."""
        pyarrow, parquet = _import_pyarrow()
        try:
            with parquet.ParquetFile(file.path) as reader:
                self._check_column(pyarrow, reader.schema_arrow, file)
                rows_before = sum(reader.metadata.row_group(group).num_rows for group in range(first_group))
                for group in range(first_group, reader.num_row_groups):
                    skip = first_row if group == first_group else 0
                    row = 0
                    for batch in reader.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[self.text_field]):
                        column = batch.column(0)
                        if skip < row + len(column):
                            begin = max(skip - row, 0)
                            values = _values(column.slice(begin), f"{file.path}", rows_before + row + begin)
                            for number, value in enumerate(values, start=row + begin):
                                yield group, number, rows_before, value
                        row += len(column)
                    rows_before += row
        except (OSError, pyarrow.ArrowException) as error:
            raise unreadable(file.path, error, "read as Parquet") from error

    def _check_column(self, pyarrow: Any, schema: Any, file: DataFile) -> None:
        if self.text_field not in schema.names:
            raise DataError(
                f"The file has no column {self.text_field!r}; it has {', '.join(map(repr, schema.names))}.",
                place=str(file.path),
                rule="text-field",
                fix="name the column that holds the text",
            )
        column = schema.field(self.text_field).type
        value = column.value_type if pyarrow.types.is_dictionary(column) else column
        types = pyarrow.types
        if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
            raise DataError(
                f"The column {self.text_field!r} is of type {column}, not string.",
                place=str(file.path),
                rule="text-field",
                fix="name a string column, or write the text as one",
            )


def _values(column: Any, path: str, rows_before: int) -> list[object]:
    """The column as Python values; raises :class:`DataError` at a row whose bytes are not UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError as error:
        for row in range(len(column)):
            try:
                column[row].as_py()
            except UnicodeDecodeError:
                raise DataError(
                    f"The text is not UTF-8 ({error.reason}).",
                    place=f"{path}: row {rows_before + row + 1}",
                    rule="utf-8",
                    fix="correct or remove the row",
                ) from error
        raise


def _import_pyarrow() -> tuple[Any, Any]:
    """The modules ``pyarrow`` and ``pyarrow.parquet``, imported only by those who read Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "Reading Parquet files needs the package pyarrow, which is not installed.",
            rule="pyarrow",
            fix="pip install pyarrow, or convert the data to JSON Lines",
        ) from error
    return pyarrow, pyarrow.parquet
