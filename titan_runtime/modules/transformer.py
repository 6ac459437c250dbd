"""The whole decoder: embedding, blocks, final norm, output projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titan_runtime.modules.block import TransformerBlock
from titan_runtime.modules.output import Loss, OutputProjection
from titan_runtime.modules.rms_norm import RMSNorm
from titan_runtime.modules.rope import RotaryTable


class Transformer(nn.Module):
    """Token ids to logits.

    A pipeline stage holds some of the modules only: those it lacks are None, and its input is then not tokens but the
    stage before's output.

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
        if self.tied and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As any module's. A last stage's copy of a tied weight goes by the weight's one name, the embedding's."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            alone = self.tied and self.tok_embeddings is None and name == "output.weight"
            yield ("tok_embeddings.weight" if alone else name), parameter

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> Transformer:
        """As any module's, but a tied output stays tied: torch gives each of its two names memory of its own."""
        super().to_empty(device=device, recurse=recurse)
        self._tie()
        return self

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, loss: Loss | None = None, chunks: int = 1
    ) -> Tensor:
        """int64 [batch, sequence] -> logits [batch, sequence, vocab] in the dtype that the weights compute in.

        On a later stage the input, and on an earlier one the output, is the residual stream [batch, sequence, dim].

        With `labels` (as `tokens`) and `loss`, the loss instead, taken in `chunks` parts of the sequence.
        """
        tables = [rotary() for rotary in self.rotary]
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for number, block in self.layers.items():
            x = block(x, tables[self.table_of[int(number)]])
        if self.norm is not None:
            x = self.norm(x)
        return x if self.output is None else self.output(x, labels, loss, chunks)
