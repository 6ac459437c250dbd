"""Cross-entropy, summed over this rank's valid tokens and divided by the valid tokens of the whole step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from titan_planner.ir.execution import Loss

IGNORE = -100
"""A label that is not predicted and not counted."""


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over valid labels of -log softmax(logits)[label], a float32 scalar.

    `logits` is [batch, sequence, vocab] of any float dtype, widened to float32 here; `labels` is int64 [batch,
    sequence].
    """
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def training_loss(settings: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    """What a plan trains on: the cross-entropy sum, with the gradient of the z-loss where the plan gives it a weight.

    The z-loss is weight * sum over valid tokens of logsumexp(logits)^2. It bends the gradient and not the value: the loss
    that a run reports stays the cross-entropy, comparable with validation and with runs of another weight.
    """
    weight = settings.z_loss
    if weight == 0:
        return cross_entropy_sum

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        log_partition = logits.float().logsumexp(dim=-1)
        penalty = weight * (log_partition.square() * (labels != IGNORE)).sum()
        return cross_entropy_sum(logits, labels) + (penalty - penalty.detach())

    return loss


def count_valid(labels: list[Tensor], device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """Labels of all ranks of `group` and all microbatches that are predicted, int64 scalar on `device`. Collective.

    Dividing every rank's sum by this one number makes the gradient that of the mean over the global batch, however
    unevenly ignored labels fall on ranks and microbatches; an average of averages would not be.
    """
    count = torch.stack([(label != IGNORE).sum() for label in labels]).sum().to(device)
    dist.all_reduce(count, group=group)
    return count
