"""Memory of logits and cross-entropy on one rank: what is kept for backward, and the most that is alive at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

from titan_planner.cost.local import Local


@dataclass(frozen=True, slots=True)
class LossBytes:
    """Bytes of one microbatch: `kept` from the loss's forward to its backward, `peak` within one of the two,
    `handed_on` the gradient of the logits that the output projection's backward starts with."""

    kept: float
    peak: float
    handed_on: float


def loss_bytes(
    local: Local,
    kernels: Literal["eager", "compiled", "fused"],
    *,
    loss_parallel: bool,
    chunks: int,
    z_loss: bool,
    logits_held: bool,
) -> LossBytes:
    """`chunks` parts of the sequence take their turn; `logits_held` says that a pipeline's stage keeps its output.

    Bytes a logit, n being a logit's own: eager cross-entropy keeps log_softmax's float32 result (4), and its backward has
    that, nll_loss's gradient and log_softmax's gradient at once (12). With the z-loss the widened logits are there too (4
    more). Loss parallel keeps the logits (n); forward and backward each have two float32 copies beside them (n + 8).
    Compiled, the logits are kept and the gradient is written at once (2 n); a scatter makes the loss-parallel gradient
    float32 first (n + 4 + n). A fused kernel writes the gradient over the logits.
    """
    size = local.itemsize
    logits = local.tokens * local.vocab
    each = 4.0 * local.tokens
    kept: float
    peak: float
    match kernels:
        case "eager" if loss_parallel:
            # Per token: peak, total with its twin in one storage, label (int64), and two masks.
            small = 4 + 8 + 8 + 1 + 1
            kept = size * logits + small * local.tokens + (each + local.tokens if z_loss else 0.0)
            peak = (size + 8) * logits
        case "eager":
            kept = 4 * logits
            peak = 12 * logits
            if z_loss:
                kept += 4 * logits + each + local.tokens
                peak += 4 * logits
            if logits_held:
                kept += size * logits
                peak += size * logits
        case "compiled":
            kept = size * logits + 2 * each
            peak = (2 * size + (4 if loss_parallel else 0)) * logits
        case "fused":
            kept = size * logits + each
            peak = kept
        case _:
            assert_never(kernels)
    if chunks > 1:
        # Every chunk is computed again when its turn comes in backward: nothing but the projection's input is kept.
        return LossBytes(kept=0.0, peak=peak / chunks, handed_on=size * logits / chunks)
    return LossBytes(kept=kept, peak=max(peak, kept), handed_on=size * logits)
