"""Which tokens of a sequence a rank of the cp axis has, in which order, and which of another rank's it may attend to.

A sequence is cut into chunks, one a rank or, head-tail balanced, two: rank r of n has chunks r and 2n-1-r. Causal
attention costs a chunk as much as there are tokens before it, so without the second chunk the last rank would have twice
the mean work. A rank holds its chunks in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_runtime.collectives import Ranks

Piece = tuple[slice, slice]
"""Rows of queries and of keys, every one of the first after every one of the second: attention without a mask."""


@dataclass(frozen=True, slots=True)
class Share:
    """Rank `rank` of the `size` that share every sequence, in `chunks` chunks each, over the process group `group`.

    The group goes by its name because compiled code knows it by name.
    """

    rank: int
    size: int
    chunks: int
    group: str

    @property
    def ranks(self) -> Ranks:
        """The group, as collectives take it."""
        return Ranks(self.group, self.size, self.rank)

    def held(self, rank: int) -> tuple[int, ...]:
        """Numbers of the chunks that `rank` holds, ascending."""
        return (rank,) if self.chunks == 1 else (rank, 2 * self.size - 1 - rank)

    def positions(self, seq_len: int) -> Tensor:
        """Places in the sequence of this rank's tokens, int64 [seq_len / size] on the CPU."""
        length = seq_len // (self.size * self.chunks)
        starts = torch.tensor([chunk * length for chunk in self.held(self.rank)], device="cpu")
        return (starts[:, None] + torch.arange(length, device="cpu")).flatten()

    def pieces(self, other: int, local_len: int) -> list[Piece]:
        """What this rank's queries see of another rank's keys: none of it, or a rectangle without a mask.

        Of its own keys (`other == rank`) they see what ordinary causal attention over the local sequence sees, since
        the local order is the global one.
        """
        if other == self.rank:
            raise ValueError("a rank sees its own keys through a causal mask")
        length = local_len // self.chunks
        mine, theirs = self.held(self.rank), self.held(other)
        found: list[Piece] = []
        for count in range(1, self.chunks + 1):
            rows = [index for index, chunk in enumerate(mine) if sum(k < chunk for k in theirs) == count]
            if rows:  # neighbours: a later query sees at least what an earlier one does
                found.append((slice(rows[0] * length, (rows[-1] + 1) * length), slice(0, count * length)))
        return found

    def pieces_of_all(self, local_len: int) -> list[Piece]:
        """What this rank's queries see of all *other* ranks' keys in the sequence's order."""
        length = local_len // self.chunks
        first = self.held(self.rank)[0]
        found = [(slice(0, local_len), slice(0, first * length))] if first else []
        if self.chunks == 2:
            last = self.held(self.rank)[1]
            if last > first + 1:
                found.append((slice(length, local_len), slice((first + 1) * length, last * length)))
        return found

    def join(self, parts: Tensor) -> Tensor:
        """The ranks' parts [size, batch, heads, local sequence, head_dim] as [batch, heads, sequence, head_dim]."""
        chunked = parts.unflatten(3, (self.chunks, -1))  # [size, batch, heads, chunks, length, head_dim]
        ordered = (
            chunked[:, :, :, 0] if self.chunks == 1 else torch.cat((chunked[:, :, :, 0], chunked[:, :, :, 1].flip(0)))
        )
        return ordered.movedim(0, 2).flatten(2, 3)

    def split(self, whole: Tensor) -> Tensor:
        """The opposite of `join`."""
        chunked = whole.unflatten(2, (self.size * self.chunks, -1)).movedim(2, 0)
        if self.chunks == 1:
            return chunked
        return torch.stack((chunked[: self.size], chunked[self.size :].flip(0)), dim=3).flatten(3, 4)
