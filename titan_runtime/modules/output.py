"""The output projection, which can take the loss in chunks of the sequence so that logits never exist all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

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

        # All in one call of this module: hooks around it (FSDP's, which gather the weight) must run once, not once a
        # chunk. The parameter itself and not `self.weight`, which may be a part or a cast of it.
        return ChunkedLoss.apply(x, self._parameters["weight"], labels, self, loss, chunks)

    def logits(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] -> [batch, sequence, vocab]."""
        return linear(x, self.weight)


class ChunkedLoss(Function):
    """The loss of an output projection, a sum over tokens, whose backward computes each chunk's logits again.

    Not checkpoints, one a chunk: a pipeline schedule that splits backward keeps the gradient of every operator in which
    the way to the inputs and the way to the weights meet, from one half to the other. That would be the product with the
    vocabulary, and the gradients of all logits. Here it is this function, whose gradient is one number.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, head: OutputProjection, loss: Loss, chunks: int
    ) -> Tensor:
        """`weight` is the head's parameter, named here so that it gets its gradient."""
        ctx.save_for_backward(x, labels)
        ctx.head, ctx.loss, ctx.chunks = head, loss, chunks
        parts = zip(x.chunk(chunks, dim=1), labels.chunk(chunks, dim=1), strict=True)
        return torch.stack([loss(head.logits(hidden), wanted) for hidden, wanted in parts]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, labels = ctx.saved_tensors
        to_x, to_weight = _asked_for(ctx)
        weight = ctx.head._parameters["weight"]
        rows: list[Tensor] = []
        total: Tensor | None = None
        for hidden, wanted in zip(x.chunk(ctx.chunks, dim=1), labels.chunk(ctx.chunks, dim=1), strict=True):
            with torch.enable_grad():
                hidden = hidden.detach().requires_grad_(to_x)
                value = ctx.loss(ctx.head.logits(hidden), wanted)
            found = list(torch.autograd.grad(value, [hidden] * to_x + [weight] * to_weight, gradient))
            if to_x:
                rows.append(found.pop(0))
            if to_weight:
                total = found[0] if total is None else total.add_(found[0])
        return torch.cat(rows, dim=1) if to_x else None, total, None, None, None, None


def _asked_for(ctx: Any) -> tuple[bool, bool]:
    """Whether this backward pass goes on to the input, and to the weight; a pipeline may go to one at a time.

    `ctx.needs_input_grad` is what forward knew.
    """
    (to_input, _), (to_weight, _) = ctx.next_functions[:2]
    wants_input = to_input is not None and torch._C._will_engine_execute_node(to_input)
    if not wants_input:  # then it is the weight; and torch cannot be asked about a leaf that `autograd.grad` is for
        return False, True
    return True, to_weight is not None and torch._C._will_engine_execute_node(to_weight)
