"""Cross-entropy, summed over this rank's valid tokens and divided by the valid tokens of the whole step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from titan_planner.ir.plan import Plan
from titan_runtime.collectives import Ranks, all_reduce, ranks_of
from titan_runtime.modules.output import Loss

IGNORE = -100
"""A label that is not predicted and not counted."""


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over valid labels of -log softmax(logits)[label], a float32 scalar.

    `logits` is [batch, sequence, vocab] of any float dtype, widened to float32 here; `labels` is int64 [batch,
    sequence].
    """
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def loss_function(plan: Plan, world: DeviceMesh) -> Loss:
    """The plan's loss, (logits, labels) -> a sum over this rank's tokens; with loss parallel, logits are this rank's part.

    The z-loss, `plan.loss.z_loss` * sum over valid tokens of logsumexp(logits)^2, bends the gradient and not the value: the
    loss that a run reports stays the cross-entropy, comparable with validation and with runs of another weight.
    """
    weight = plan.loss.z_loss
    if plan.mesh.tp == 1 or not plan.tensor_parallel.loss_parallel:
        return with_z_loss(weight) if weight else cross_entropy_sum
    ranks = ranks_of(world["tp"])

    def sharded(logits: Tensor, labels: Tensor) -> Tensor:
        return sharded_cross_entropy_sum(logits, labels, ranks, weight)

    return sharded


def measured_loss(plan: Plan, world: DeviceMesh) -> Loss:
    """The plan's loss without what only bends gradients: for validation."""
    return loss_function(replace(plan, loss=replace(plan.loss, z_loss=0.0)), world)


def with_z_loss(weight: float) -> Loss:
    """`cross_entropy_sum` with the gradient of the z-loss added."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        penalty = z_loss(logits.float().logsumexp(dim=-1), labels, weight)
        return cross_entropy_sum(logits, labels) + penalty

    return loss


def z_loss(log_sums: Tensor, labels: Tensor, weight: float) -> Tensor:
    """Zero, with the gradient of weight * sum over valid labels of log_sums^2."""
    penalty = weight * torch.where(labels != IGNORE, log_sums.square(), 0.0).sum()
    return penalty - penalty.detach()


def sharded_cross_entropy_sum(logits: Tensor, labels: Tensor, ranks: Ranks, z_weight: float = 0.0) -> Tensor:
    """`cross_entropy_sum` of logits of which each of `ranks` holds a part of the vocabulary; the same on all of them.

    Only three numbers a token cross between ranks, where gathered logits would be the whole vocabulary.
    """
    wanted = labels.flatten()
    each, log_sums = ShardedCrossEntropy.apply(logits.flatten(0, 1), wanted, ranks)
    total = torch.where(wanted != IGNORE, each, 0.0).sum()
    return total + z_loss(log_sums, wanted, z_weight) if z_weight else total


class ShardedCrossEntropy(Function):
    """Per token: -log softmax(logits)[label] and log(sum(exp(logits))), float32, equal on all ranks. Collective.

    `logits` is [tokens, part of the vocabulary]; `labels` number the whole vocabulary. For an ignored label the first
    result means nothing, and must get no gradient. Gradients come in equal on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
        size = logits.shape[-1]
        local = labels - ranks.rank * size
        here = (local >= 0) & (local < size)
        local = local.masked_fill(~here, 0)
        wide = logits.float()
        peak = all_reduce(wide.amax(-1), ranks, "max")
        wide = wide - peak.unsqueeze(-1)  # from here on in place: `wide` is this function's own
        picked = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        # Both sums in one message. Of the ranks, only one has a token's label.
        total, picked = all_reduce(torch.stack((wide.exp_().sum(-1), picked)), ranks).unbind()
        # Not their logarithm alone: rounded to float32 where logits are large, it would bend all of a token's gradient.
        ctx.save_for_backward(logits, peak, total, local, here)
        return total.log() - picked, total.log() + peak

    @staticmethod
    def backward(ctx: Any, to_loss: Tensor, to_log_sum: Tensor) -> tuple[Tensor, None, None]:
        logits, peak, total, local, here = ctx.saved_tensors
        gradient = (logits.float() - peak.unsqueeze(-1)).exp_()
        gradient *= ((to_loss + to_log_sum) / total).unsqueeze(-1)
        gradient.scatter_add_(-1, local.unsqueeze(-1), torch.where(here, -to_loss, 0.0).unsqueeze(-1))
        return gradient.to(logits.dtype), None, None


def count_valid(labels: list[Tensor], device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """Labels of all ranks of `group` and all microbatches that are predicted, int64 scalar on `device`. Collective.

    Dividing every rank's sum by this one number makes the gradient that of the mean over the global batch, however
    unevenly ignored labels fall on ranks and microbatches; an average of averages would not be.
    """
    count = torch.stack([(label != IGNORE).sum() for label in labels]).sum().to(device)
    dist.all_reduce(count, group=group)
    return count
