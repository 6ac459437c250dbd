"""A packed stream from the names in a configuration."""

from __future__ import annotations

from pathlib import Path

from titan_runtime.data.documents import DocumentSource
from titan_runtime.data.errors import DataError
from titan_runtime.data.json_lines import JsonLines
from titan_runtime.data.packing import PackedStream
from titan_runtime.data.parquet_files import ParquetFiles
from titan_runtime.data.text_folder import TextFolder
from titan_runtime.data.tokenizer import load_tokenizer

SOURCES = ("text", "jsonl", "parquet")


def open_source(source: str, path: str | Path, text_field: str = "text") -> DocumentSource:
    """The documents of kind ``source`` (one of :data:`SOURCES`) in a file or folder.

    ``text_field`` names the field or column that holds the text; plain text has none and ignores it.
    Raises :class:`DataError` for another kind, or when there is nothing to read.
    """
    if source == TextFolder.kind:
        return TextFolder(path)
    if source == JsonLines.kind:
        return JsonLines(path, text_field=text_field)
    if source == ParquetFiles.kind:
        return ParquetFiles(path, text_field=text_field)
    raise DataError(
        f"There is no data source {source!r}.",
        place="source",
        rule="source",
        fix=f"choose one of {', '.join(map(repr, SOURCES))}",
    )


def open_stream(
    source: str,
    path: str | Path,
    tokenizer_path: str | Path,
    seq_len: int,
    text_field: str = "text",
    add_bos: bool = False,
) -> PackedStream:
    """The endless stream of samples of the documents in a file or folder.

    Args:
        source: ``"text"``, ``"jsonl"`` or ``"parquet"``.
        path: a file, or a folder of which all files of that kind are read in the order of their names.
        tokenizer_path: a ``tokenizer.json`` or a folder that holds one.
        seq_len: tokens in a sample.
        text_field: the field or column that holds the text (JSON Lines and Parquet).
        add_bos: put the tokenizer's bos before each document, if it has one.

    Raises :class:`DataError` when one of these cannot be used.
    """
    return PackedStream(open_source(source, path, text_field), load_tokenizer(tokenizer_path), seq_len, add_bos=add_bos)
