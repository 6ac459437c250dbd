"""The output projection, which can take the loss in chunks of the sequence so that logits never exist all at once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

Loss = Callable[[Tensor, Tensor], Tensor]


class OutputProjection(nn.Linear):
    """A linear layer without bias from the residual stream to the vocabulary."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(  # type: ignore[override]
        self, x: Tensor, labels: Tensor | None = None, loss: Loss | None = None, chunks: int = 1
    ) -> Tensor:
        """[batch, sequence, dim] -> logits [batch, sequence, vocab], or with `labels` and `loss` their loss, a scalar.

        `loss` must be a sum over tokens. Each of the `chunks` parts of the sequence computes its logits again in
        backward, so that only one part's logits are in memory at any time; the price is one more product with the
        vocabulary.
        """
        if labels is None or loss is None:
            return self.logits(x)

        def part(hidden: Tensor, wanted: Tensor) -> Tensor:
            return loss(self.logits(hidden), wanted)

        # All in one call of this module: hooks around it (FSDP's, which gather the weight) must run once, not once a
        # chunk.
        parts = zip(x.chunk(chunks, dim=1), labels.chunk(chunks, dim=1), strict=True)
        losses = [checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False) for pair in parts]
        total = losses[0]
        for more in losses[1:]:
            total = total + more
        return total

    def logits(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] -> [batch, sequence, vocab]."""
        return linear(x, self.weight)
