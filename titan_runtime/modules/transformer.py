"""The whole decoder: embedding, blocks, final norm, output projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from titan_runtime.modules.block import TransformerBlock
from titan_runtime.modules.output import Loss, OutputProjection
from titan_runtime.modules.rms_norm import RMSNorm
from titan_runtime.modules.rope import RotaryTable


class Transformer(nn.Module):
    """Token ids to logits.

    `layers` is keyed by the layer's number, so that a layer keeps its FQN when a pipeline stage holds only some of
    them. Blocks with the same rotary embedding read one table; `table_of[n]` says which one layer n reads.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        blocks: Sequence[TransformerBlock],
        tables: Sequence[RotaryTable],
        table_of: Sequence[int],
        norm_eps: float,
        tied: bool,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.rotary = nn.ModuleList(tables)
        self.table_of = tuple(table_of)
        self.layers = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.norm = RMSNorm(dim, norm_eps)
        self.output = OutputProjection(dim, vocab_size)
        self.tied = tied
        self._tie()

    def _tie(self) -> None:
        if self.tied:
            self.output.weight = self.tok_embeddings.weight

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> Transformer:
        """As any module's, but a tied output stays tied: torch gives each of its two names memory of its own."""
        super().to_empty(device=device, recurse=recurse)
        self._tie()
        return self

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, loss: Loss | None = None, chunks: int = 1
    ) -> Tensor:
        """int64 [batch, sequence] -> logits [batch, sequence, vocab] in the dtype that the weights compute in.

        With `labels` (as `tokens`) and `loss`, the loss instead, taken in `chunks` parts of the sequence.
        """
        tables = [rotary() for rotary in self.rotary]
        x = self.tok_embeddings(tokens)
        for number, block in self.layers.items():
            x = block(x, tables[self.table_of[int(number)]])
        return self.output(self.norm(x), labels, loss, chunks)
