"""The endless stream of tokens of a source, epoch after epoch, with a buffer and an exact place."""

from __future__ import annotations

import dataclasses
from array import array
from collections import deque
from collections.abc import Callable, Iterator

from titan_runtime.data.documents import DocumentSource, Piece, Position
from titan_runtime.data.errors import DataError
from titan_runtime.data.files import no_text_error


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a token is: number ``token_offset`` of the tokens of the piece at ``position``.

    ``epoch`` counts whole passes over the source before it, and ``documents`` the documents that ended before it,
    over all epochs.
    """

    epoch: int
    position: Position
    token_offset: int
    documents: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Segment:
    """The buffered tokens of one piece, whose first token is at ``place``, as [begin, end) token numbers."""

    place: Place
    begin: int
    end: int


class TokenStream:
    """Tokens from a place on, read piece by piece as they are needed.

    Raises :class:`DataError` from any reading method at a record that cannot be used, and keeps its place then.
    """

    def __init__(
        self, source: DocumentSource, encode: Callable[[Piece], array[int]], place: Place | None = None
    ) -> None:
        """Start at ``place``, by default at the first document; ``encode`` gives the tokens of a piece as int64.

        Raises :class:`DataError` when there is no such place in the source.
        """
        self._source = source
        self._encode = encode
        start = Place(epoch=0, position=source.start(), token_offset=0, documents=0) if place is None else place
        # What is read next: pieces come from `_pieces`, which is (re)opened at `_position`.
        self._pieces: Iterator[Piece] | None = None
        self._position = start.position
        self._epoch = start.epoch
        self._documents = start.documents
        self._epoch_has_text = False
        # What is read and not yet consumed. Tokens are numbered from the place's piece on: the first one in
        # `_tokens` has number `_base`, the next one to hand out `_cursor`. `_segments` are the pieces they belong to.
        self._tokens = array("q")
        self._base = 0
        self._cursor = 0
        self._segments: deque[_Segment] = deque()
        if start.token_offset:
            self._go_into_piece(start)

    def peek(self, count: int) -> array[int]:
        """The next ``count`` tokens, without going past them."""
        self._read_until(self._cursor + count)
        begin = self._cursor - self._base
        return self._tokens[begin : begin + count]

    def advance(self, count: int) -> None:
        """Go past ``count`` tokens.

        Also reads the token after them, so that :meth:`place` is the same whether tokens were peeked at or not.
        """
        self._read_until(self._cursor + count + 1)
        self._cursor += count

    def place(self) -> Place:
        """Where the next token is; before anything was read, where reading starts."""
        self._drop_consumed_segments()
        if not self._segments:
            return Place(self._epoch, dict(self._position), 0, self._documents)
        first = self._segments[0]
        return dataclasses.replace(
            first.place, position=dict(first.place.position), token_offset=self._cursor - first.begin
        )

    def _go_into_piece(self, place: Place) -> None:
        self._read_piece()
        first = self._segments[0] if self._segments else None
        if first is None or first.place.position != place.position or place.token_offset >= first.end:
            raise DataError(
                f"There is no token {place.token_offset} in a piece at {place.position}.",
                place=str(self._source.path),
                rule="position",
                fix="restore a state that was saved with this data, or start the data anew",
            )
        self._cursor = place.token_offset

    def _read_until(self, end: int) -> None:
        while self._base + len(self._tokens) < end:
            self._read_piece()

    def _read_piece(self) -> None:
        """Append the tokens of the next piece to the buffer, after dropping those that are consumed."""
        del self._tokens[: self._cursor - self._base]
        self._base = self._cursor
        self._drop_consumed_segments()
        try:
            piece = self._next_piece()
            tokens = self._encode(piece)
        except BaseException:
            # A generator that raised is at its end, and would look like the end of the epoch next time. Reading
            # goes on at `_position`, so the same error comes again.
            self._pieces = None
            raise
        begin = self._base + len(self._tokens)
        if tokens:
            place = Place(self._epoch, piece.start, 0, self._documents)
            self._segments.append(_Segment(place, begin, begin + len(tokens)))
            self._tokens.extend(tokens)
        self._position = piece.end
        self._epoch_has_text = True
        self._documents += piece.ends_document

    def _next_piece(self) -> Piece:
        while True:
            if self._pieces is None:
                self._pieces = self._source.pieces(self._position)
            piece = next(self._pieces, None)
            if piece is not None:
                return piece
            if not self._epoch_has_text:
                raise no_text_error(self._source.path)
            self._pieces = None
            self._epoch += 1
            self._epoch_has_text = False
            self._position = self._source.start()

    def _drop_consumed_segments(self) -> None:
        while self._segments and self._segments[0].end <= self._cursor:
            self._segments.popleft()
