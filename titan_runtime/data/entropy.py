"""The entropy of the tokens' frequencies: the loss that a model reaches which knows only how often each token comes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from titan_runtime.data.errors import DataError
from titan_runtime.data.packing import PackedStream


def unigram_counts(stream_or_tokens: PackedStream | Iterable[int], vocab_size: int) -> list[int]:
    """How often each token id in [0, vocab_size) comes, in one epoch of a stream or among the given tokens.

    A stream is left where it is. Raises :class:`DataError` when an id is outside the vocabulary.
    """
    counter: Counter[int] = Counter()
    if isinstance(stream_or_tokens, PackedStream):
        for tokens in stream_or_tokens.epoch_tokens():
            counter.update(tokens)
    elif hasattr(stream_or_tokens, "tolist"):  # a one-dimensional tensor, whose elements do not compare as integers
        counter.update(stream_or_tokens.tolist())
    else:
        counter.update(stream_or_tokens)
    counts = [0] * vocab_size
    for token, count in counter.items():
        if not 0 <= token < vocab_size:
            raise DataError(
                f"Token {token} is outside the vocabulary of {vocab_size}.",
                place="vocab_size",
                rule="vocabulary",
                fix="give the vocab_size of the tokenizer",
            )
        counts[token] = count
    return counts


def unigram_entropy_nats(stream_or_tokens: PackedStream | Iterable[int], vocab_size: int) -> float:
    """The entropy, in nats, of the distribution of tokens in one epoch of a stream, or among the given tokens.

    A model's cross entropy on the same tokens goes below it only by using the context. It is at most
    ``log(vocab_size)``, the loss of a model that knows nothing. A stream is left where it is.

    Raises :class:`DataError` when there is no token, or an id is outside the vocabulary.
    """
    return entropy_nats(unigram_counts(stream_or_tokens, vocab_size))


def entropy_nats(counts: Sequence[int]) -> float:
    """The entropy, in nats, of the distribution that comes with these counts.

    Raises :class:`DataError` when all of them are 0.
    """
    total = sum(counts)
    if total == 0:
        raise DataError("There are no tokens.", rule="some-text", fix="give at least one token")
    return math.fsum(-count / total * math.log(count / total) for count in counts if count)
