"""Train ``data/tokenizer.json``: the byte-level BPE of the debug model, from the text of ``data/sample``.

Deterministic: the same text and the same version of the ``tokenizers`` library give the same bytes, whatever the
machine and the number of threads. Run it again after the sample or the vocabulary changed::

    python scripts/make_tokenizer.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DATA_FOLDER = Path(__file__).resolve().parent.parent / "data"
VOCAB_SIZE = 2048  # the debug model's vocabulary, special tokens included
SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")  # ids 0, 1, 2


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE (GPT-2's word split) with exactly ``vocab_size`` entries.

    All 256 bytes are in the vocabulary from the start, so any text, in any script, can be encoded and decoded back.
    Raises :class:`ValueError` when the text is too small to give that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text only gives {tokenizer.get_vocab_size()} of {vocab_size} entries; "
            "train on more text or ask for fewer"
        )
    return tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the debug model's tokenizer from data/sample.")
    parser.add_argument("--sample", type=Path, default=DATA_FOLDER / "sample", help="folder of .txt files")
    parser.add_argument("--out", type=Path, default=DATA_FOLDER / "tokenizer.json", help="file to write")
    options = parser.parse_args()
    files = sorted(options.sample.glob("*.txt"))
    if not files:
        print(f"make_tokenizer: {options.sample} has no .txt file; run scripts/make_sample.py first", file=sys.stderr)
        return 1
    tokenizer = train_tokenizer(file.read_text(encoding="utf-8") for file in files)
    options.out.write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    print(f"{options.out}: {tokenizer.get_vocab_size()} entries from {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
