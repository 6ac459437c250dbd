"""Training data: documents from files, tokens from documents, samples from tokens, batches from samples.

    >>> stream = open_stream("text", "data/sample", "data/tokenizer.json", seq_len=256)
    >>> with DataLoader(stream, global_batch_size=8, dp_rank=0, dp_degree=2, local_batch_size=2) as loader:
    ...     for tokens, labels in loader.next_batch():
    ...         ...

Everything but :class:`DataLoader` works without PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titan_runtime.data.documents import DocumentSource, Piece, Position
from titan_runtime.data.entropy import entropy_nats, unigram_counts, unigram_entropy_nats
from titan_runtime.data.errors import DataError
from titan_runtime.data.factory import SOURCES, open_source, open_stream
from titan_runtime.data.json_lines import JsonLines
from titan_runtime.data.packing import PackedStream
from titan_runtime.data.parquet_files import ParquetFiles
from titan_runtime.data.text_folder import TextFolder
from titan_runtime.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from titan_runtime.data.loader import IGNORE_INDEX, DataLoader, Microbatch

__all__ = [
    "IGNORE_INDEX",
    "SOURCES",
    "DataError",
    "DataLoader",
    "DocumentSource",
    "JsonLines",
    "Microbatch",
    "PackedStream",
    "ParquetFiles",
    "Piece",
    "Position",
    "TextFolder",
    "Tokenizer",
    "entropy_nats",
    "load_tokenizer",
    "open_source",
    "open_stream",
    "unigram_counts",
    "unigram_entropy_nats",
]


def __getattr__(name: str) -> Any:
    # The loader is the only part that needs PyTorch, which takes seconds to import.
    if name in ("DataLoader", "IGNORE_INDEX", "Microbatch"):
        from titan_runtime.data import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
