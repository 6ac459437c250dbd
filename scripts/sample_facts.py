"""Print the measured facts about ``data/sample`` that ``data/README.md`` states::

PYTHONPATH=. python scripts/sample_facts.py
"""

from __future__ import annotations

import math
from pathlib import Path

from titan_runtime.data import entropy_nats, open_stream, unigram_counts

DATA_FOLDER = Path(__file__).resolve().parent.parent / "data"


def main() -> None:
    stream = open_stream("text", DATA_FOLDER / "sample", DATA_FOLDER / "tokenizer.json", seq_len=1)
    vocab_size = stream.tokenizer.vocab_size
    files = [file.path.read_bytes() for file in stream.source.files]
    size = sum(map(len, files))
    lines = sum(data.count(b"\n") for data in files)
    counts = unigram_counts(stream, vocab_size)
    text_tokens = sum(counts) - counts[stream.tokenizer.eos_id]
    print(f"files: {len(files)}")
    print(f"bytes: {size}")
    print(f"lines: {lines}")
    print(f"tokens of an epoch: {sum(counts)}")
    print(f"bytes per token: {size / text_tokens:.3f}")
    print(f"tokens that occur: {sum(1 for count in counts if count)} of {vocab_size}")
    print(f"unigram entropy: {entropy_nats(counts):.4f} nats")
    print(f"log of the vocabulary: {math.log(vocab_size):.4f} nats")


if __name__ == "__main__":
    main()
