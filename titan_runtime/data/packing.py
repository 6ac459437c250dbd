"""Documents packed into samples of equal length: one endless stream with an exact position.

The token stream of an epoch is, for each document in the source's order, ``[bos] + tokens + [eos]``; the endless
stream repeats it epoch after epoch. Sample ``i`` is the window ``[i * seq_len, i * seq_len + seq_len + 1)`` of the
endless stream: its first ``seq_len`` tokens are the inputs and its last ``seq_len`` the labels, so that every token
is a label once (but for the very first) and samples run across documents and epochs without padding.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from titan_runtime.data.documents import DocumentSource, Piece
from titan_runtime.data.errors import DataError
from titan_runtime.data.files import no_text_error
from titan_runtime.data.fingerprint import difference
from titan_runtime.data.token_stream import Place, TokenStream
from titan_runtime.data.tokenizer import Tokenizer

STATE_FORMAT = 1

_COUNTERS = ("samples", "documents", "epoch", "token_offset")
_STATE_FIELDS = {"format", "seq_len", "add_bos", "position", "fingerprint", *_COUNTERS}


class PackedStream:
    """The endless stream of samples of a source, tokenised and packed.

    The unit of counting is the *global sample*: the stream knows nothing of ranks, batches or steps. It is used by
    one thread at a time.

    Attributes:
        source, tokenizer, seq_len, add_bos: as given.
        samples: number of samples taken or skipped since the first sample of the first epoch.
    """

    def __init__(self, source: DocumentSource, tokenizer: Tokenizer, seq_len: int, *, add_bos: bool = False) -> None:
        """Start at the first document.

        Args:
            source: where the documents come from.
            tokenizer: gives the tokens, and the eos that ends each document.
            seq_len: tokens in a sample.
            add_bos: put the tokenizer's bos before each document, if it has one.

        Raises :class:`DataError` when ``seq_len`` is no positive integer or a file of the source cannot be read.
        """
        if type(seq_len) is not int or seq_len < 1:
            raise DataError(
                f"The sequence length is {seq_len!r}, not a positive integer.",
                place="seq_len",
                rule="positive",
                fix="give the number of tokens in a sample, as in 4096",
            )
        self.source = source
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.add_bos = add_bos
        self.samples = 0
        self._bos_id = tokenizer.bos_id if add_bos else None
        self._fingerprint = {
            **source.fingerprint(),
            "tokenizer_sha256": tokenizer.sha256,
            "bos_id": self._bos_id,
            "eos_id": tokenizer.eos_id,
        }
        self._tokens = TokenStream(source, self._encode)

    def next_sample(self) -> array[int]:
        """The ``seq_len + 1`` token ids of the next sample (inputs: all but the last, labels: all but the first)."""
        return self.take(1)

    def take(self, count: int) -> array[int]:
        """The ``count * seq_len + 1`` token ids of the next ``count`` samples, which overlap in one token each.

        Inputs of the k-th of them are ``[k * seq_len, (k + 1) * seq_len)``, its labels one further. The array holds
        int64 and belongs to the caller. Raises :class:`DataError` at a record that cannot be used; the stream then
        stays where it was.
        """
        window = self._tokens.peek(count * self.seq_len + 1)
        self._tokens.advance(count * self.seq_len)
        self.samples += count
        return window

    def skip(self, count: int) -> None:
        """Go past ``count`` samples. Their text has to be tokenised, but their tokens are not kept."""
        for _ in range(count):  # one by one, so that an error leaves the stream between two samples
            self._tokens.advance(self.seq_len)
            self.samples += 1

    def __iter__(self) -> Iterator[array[int]]:
        return self

    def __next__(self) -> array[int]:
        return self.next_sample()

    def epoch_tokens(self) -> Iterator[array[int]]:
        """Yield the tokens of one epoch, piece by piece, from its start; does not move the stream."""
        empty = True
        for piece in self.source.pieces(self.source.start()):
            empty = False
            yield self._encode(piece)
        if empty:
            raise no_text_error(self.source.path)

    def state(self) -> dict[str, Any]:
        """A small JSON-able record of where the next sample starts, and of the data it belongs to.

        ``position`` is that of the piece the sample's first token comes from and ``token_offset`` the number of the
        piece's tokens before it; ``samples`` and ``documents`` count what lies before it over all epochs.
        """
        place = self._tokens.place()
        return {
            "format": STATE_FORMAT,
            "seq_len": self.seq_len,
            "add_bos": self.add_bos,
            "samples": self.samples,
            "documents": place.documents,
            "epoch": place.epoch,
            "position": place.position,
            "token_offset": place.token_offset,
            "fingerprint": copy.deepcopy(self._fingerprint),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where :meth:`state` was taken, in a stream over the same data made in the same way.

        Costs the tokenising of one piece. Raises :class:`DataError`, and leaves the stream where it was, when the
        state is none or belongs to other data, another tokenizer or another way of packing.
        """
        self._check_state(state)
        place = Place(
            epoch=state["epoch"],
            position=self.source.check_position(state["position"]),
            token_offset=state["token_offset"],
            documents=state["documents"],
        )
        self._tokens = TokenStream(self.source, self._encode, place)
        self.samples = state["samples"]

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if (
            not isinstance(state, Mapping)
            or state.get("format") != STATE_FORMAT
            or not state.keys() >= _STATE_FIELDS
            or not isinstance(state["fingerprint"], Mapping)
            or not all(type(state[name]) is int and state[name] >= 0 for name in _COUNTERS)
        ):
            raise DataError(
                "This is not the state of a packed stream in a form that this version can read.",
                place="data state",
                rule="state",
                fix="restore a state that was saved by this version",
            )
        for name, now in (("seq_len", self.seq_len), ("add_bos", self.add_bos)):
            if state[name] != now:
                raise DataError(
                    f"The state was saved with {name} = {state[name]!r} and the stream has {name} = {now!r}.",
                    place="data state",
                    rule="same-data",
                    fix=f"go on with {name} = {state[name]!r}, or start the data anew",
                )
        differs = difference(state["fingerprint"], self._fingerprint)
        if differs is not None:
            raise DataError(
                f"The state belongs to other data: {differs}.",
                place="data state",
                rule="same-data",
                fix=f"go on with the data and tokenizer of the saved run instead of {self.source.path}, "
                "or start the data anew",
            )

    def _encode(self, piece: Piece) -> array[int]:
        tokens = array("q")
        if piece.begins_document and self._bos_id is not None:
            tokens.append(self._bos_id)
        tokens.fromlist(self.tokenizer.encode(piece.text))
        if piece.ends_document:
            tokens.append(self.tokenizer.eos_id)
        return tokens
