"""One optimizer step: forward and backward of every microbatch, the global gradient norm, clipping, the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_planner.ir.plan import Plan
from titan_runtime.apply.float8 import after_update
from titan_runtime.apply.fsdp import set_last_microbatch
from titan_runtime.apply.pipeline import Pipeline
from titan_runtime.clip import clip_, global_norm
from titan_runtime.errors import RunError
from titan_runtime.experts import ExpertCounts, ExpertLoad
from titan_runtime.loss import count_valid
from titan_runtime.lr_schedule import lr_factor
from titan_runtime.modules.output import Loss
from titan_runtime.optimizer import set_lr


def batch_loss(plan: Plan, module: nn.Module, loss: Loss, tokens: Tensor, labels: Tensor) -> Tensor:
    """`loss` of `module` on one microbatch, summed over its tokens, in the plan's chunks.

    A pipeline gives no gradients here (its schedule makes them), and zero on ranks that lack the last stage.
    """
    if isinstance(module, Pipeline):
        return module.evaluate(loss, tokens, labels)
    if plan.loss.chunks == 1:
        return loss(module(tokens), labels)
    return module(tokens, labels, loss, plan.loss.chunks)


def _forward_backward(
    plan: Plan,
    module: nn.Module,
    loss: Loss,
    microbatches: Sequence[tuple[Tensor, Tensor]],
    valid: Tensor,
    device: torch.device,
) -> Tensor:
    """Gradients of all microbatches; this rank's part of the loss, a float32 scalar."""
    total = torch.zeros((), dtype=torch.float32, device=device)
    for number, (tokens, labels) in enumerate(microbatches, start=1):
        set_last_microbatch(module, plan.fsdp, last=number == len(microbatches))
        share = batch_loss(plan, module, loss, tokens.to(device), labels.to(device)) / valid
        share.backward()
        total += share.detach()
    return total


@dataclass(frozen=True, slots=True)
class StepResult:
    """The loss is the mean over all valid tokens of the global batch, the norm that of its gradient before clipping."""

    loss: float
    grad_norm: float
    lr: float
    experts: ExpertLoad | None = None


def train_step(
    plan: Plan,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    microbatches: Sequence[tuple[Tensor, Tensor]],
    step: int,
    schedule_step: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> StepResult:
    """Do step number `step` (from 1) on this rank's microbatches, pairs of tokens and labels [local batch, sequence].

    `loss` sums over tokens, `schedule_step` (from 0) is the place on the learning-rate curve, `group` the ranks that
    see different samples. Collective. Raises RunError on all ranks, before the weights change, when loss or norm is not
    finite.
    """
    valid = count_valid([labels for _, labels in microbatches], device, group)
    if isinstance(module, Pipeline):
        total = module.forward_backward(loss, microbatches, valid)
        # Only the last stage knows the loss; every rank logs it, and every rank must see that it is finite.
        dist.all_reduce(total, group=module.group)
        counted, stages = module.counted_parameters(), module.group
    else:
        total = _forward_backward(plan, module, loss, microbatches, valid, device)
        counted, stages = list(module.parameters()), None
    dist.all_reduce(total, group=group)

    norm = global_norm([parameter.grad for parameter in counted if parameter.grad is not None], stages)
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    # The one point of a step where the host waits for the device. It has to come before the update: afterwards a bad
    # gradient is in the weights and in the next checkpoint. Both numbers are the same bits on every rank.
    counts = ExpertCounts(plan, module, group, stages)
    mean_loss, grad_norm, *loads = torch.cat((torch.stack((total.double(), norm)), counts.numbers(device))).tolist()
    if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
        raise RunError(
            f"step {step}: the loss is {mean_loss} and the gradient norm {grad_norm}; "
            f"stopped before the update, so the weights are those of step {step - 1}",
            hint="look at the data of this step, lower optimizer.lr, or lengthen the warmup",
            agreed=True,
        )
    clip_(gradients, norm, plan.optimizer.max_norm)
    counts.update_bias()

    lr = plan.optimizer.lr * lr_factor(plan.lr_schedule, schedule_step)
    set_lr(optimizer, lr)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    after_update(module, plan)
    if isinstance(module, Pipeline):
        module.after_change()
    return StepResult(loss=mean_loss, grad_norm=grad_norm, lr=lr, experts=counts.report(loads))
