"""Update rules that torch does not have: Adam with moments in another dtype than the parameters', and Muon on shards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

WIDE_ELEMENTS = 1 << 25
"""Elements whose moments are widened at a time: 2 x 128 MiB of float32 beside the parameters."""

_NEWTON_SCHULZ = {"ns_coefficients": (DEFAULT_A, DEFAULT_B, DEFAULT_C), "ns_steps": DEFAULT_NS_STEPS, "eps": EPS}


class WideAdam(torch.optim.Optimizer):
    """Adam or (`decoupled`) AdamW that keeps its moments in `state_dtype` and computes in float32.

    In every step, for gradient g and moments m and v as stored:

        m' = float32(m) + (1 - beta1) (g - float32(m))          stored as state_dtype(m'), rounded to nearest
        v' = beta2 float32(v) + (1 - beta2) g^2                 stored as state_dtype(v')
        p' = p (1 - lr weight_decay) - lr / (1 - beta1^t) m' / (sqrt(v' / (1 - beta2^t)) + eps)

    The update uses m' and v' before they are rounded, so rounding touches only what is remembered. `bucket_elements` are
    computed at a time with torch's foreach operators; 0 takes one parameter after the other.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: torch.dtype,
        decoupled: bool,
        bucket_elements: int = WIDE_ELEMENTS,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": 0.0,
                "state_dtype": state_dtype,
                "decoupled": decoupled,
                "bucket_elements": bucket_elements,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for bucket in _buckets(group):
                for parameter in bucket:
                    if not self.state[parameter]:
                        fill_state(self.state[parameter], parameter, group)
                    self.state[parameter]["step"] += 1
                _wide_adam(bucket, [self.state[parameter] for parameter in bucket], group)


def _buckets(group: Mapping[str, Any]) -> Iterator[list[Tensor]]:
    """The group's parameters that have gradients, in order, in lists of about `bucket_elements`."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        count = local(parameter).numel()
        if bucket and size + count > group["bucket_elements"]:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += count
    if bucket:
        yield bucket


def _wide_adam(parameters: list[Tensor], states: list[dict[str, Tensor]], group: Mapping[str, Any]) -> None:
    held = [(p, state) for p, state in zip(parameters, states, strict=True) if local(p).numel()]
    if not held:
        return  # this rank's shards are empty
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    steps = [float(state["step"]) for _, state in held]
    stored = [local(p) for p, _ in held]
    weights = [weight.float() for weight in stored]  # the same memory when they are float32 already
    gradients = [local(p.grad).float() for p, _ in held]
    first = [local(state["exp_avg"]) for _, state in held]
    second = [local(state["exp_avg_sq"]) for _, state in held]
    m, v = ([moment.float() for moment in moments] for moments in (first, second))
    if decay and group["decoupled"]:
        torch._foreach_mul_(weights, 1 - lr * decay)
    elif decay:
        gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
    torch._foreach_lerp_(m, gradients, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
    root = torch._foreach_sqrt(v)
    torch._foreach_div_(root, [math.sqrt(1 - beta2**t) for t in steps])
    torch._foreach_add_(root, group["eps"])
    torch._foreach_addcdiv_(weights, m, root, [-lr / (1 - beta1**t) for t in steps])
    for kept, computed in ((first, m), (second, v), (stored, weights)):
        if kept[0].dtype is not torch.float32:
            torch._foreach_copy_(kept, computed)


class ShardedMuon(torch.optim.Optimizer):
    """Muon, as torch.optim.Muon computes it, on parameters that may be sharded.

    Nesterov momentum, then five Newton-Schulz steps in bfloat16 towards the nearest orthogonal matrix, times 0.2
    sqrt(max(rows, columns)), which gives an update the size of AdamW's, so that one learning rate serves both.

    Newton-Schulz multiplies the whole matrix with itself. A sharded momentum is therefore gathered, every rank
    computes the same whole update, and applies its part of it: the same bits on any mesh, for one all-gather and one
    redundant computation of each matrix.

    A parameter of three dims stacks matrices, one an expert, each of which is orthogonalised by itself. Ranks that hold
    whole experts need nothing of each other.
    """

    def __init__(self, params: Any, *, lr: float, momentum: float, state_dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "state_dtype": state_dtype})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective over the ranks that share one."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    fill_state(state, parameter, group)
                kept, gradient = local(state["momentum_buffer"]), local(parameter.grad).float()
                wide = kept.float()
                wide.lerp_(gradient, 1 - momentum)
                update = gradient.lerp(wide, momentum)
                if kept.dtype is not torch.float32:
                    kept.copy_(wide)
                direction = _direction(update, parameter)
                scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
                weight = local(parameter)
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(direction.to(weight.device), alpha=-lr * scale)


def _direction(update: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of the orthogonal matrices nearest to those of which it has the part `update`. Collective."""
    if not isinstance(parameter, DTensor):
        return _orthogonal(update)
    mesh = parameter.device_mesh
    update = update.to(mesh.device_type)
    if parameter.dim() == 3 and not any(p.is_shard(dim) for p in parameter.placements for dim in (1, 2)):
        return _orthogonal(update)
    whole = _orthogonal(like(update, parameter).full_tensor())
    # Each rank has the whole, so each cuts its own part: no rank is a source.
    return distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None).to_local()


def _orthogonal(matrices: Tensor) -> Tensor:
    if matrices.dim() == 2:
        return _zeropower_via_newtonschulz(matrices, **_NEWTON_SCHULZ)
    # One by one: a batched product may round otherwise for another number of experts, that is on another mesh.
    found = torch.empty_like(matrices, dtype=torch.bfloat16)
    for place, matrix in enumerate(matrices):
        found[place] = _zeropower_via_newtonschulz(matrix, **_NEWTON_SCHULZ)
    return found


class Together(torch.optim.Optimizer):
    """Several optimizers of different parameters as one: their groups, their states, one step."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        # The very groups and one dict of states for all: a rate set here is a rate set there.
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.state = defaultdict(dict)
        for part in parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of each."""
        for part in self.parts:
            part.step()


def fill_state(state: dict[str, Tensor], parameter: Tensor, group: Mapping[str, Any]) -> None:
    """The state that the first step of `parameter`'s optimizer starts from, as it would make it itself."""
    dtype = group.get("state_dtype", parameter.dtype)
    if "momentum" in group:
        state["momentum_buffer"] = zeros_like(parameter, dtype)
        return
    # A fused Adam keeps the step count on the parameter's device.
    device = parameter.device if group.get("fused") else "cpu"
    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    for moment in ("exp_avg", "exp_avg_sq"):
        state[moment] = zeros_like(parameter, dtype)


def zeros_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros spread over ranks as `parameter` is."""
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)


def local(tensor: Tensor) -> Tensor:
    """The memory of this rank's part of `tensor`: writing to it changes `tensor`."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    # FSDP's Float8 all-gather wraps weights, which are ordinary memory inside.
    return getattr(part, "_tensor", part)


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """`part` as this rank's part of a tensor of the shape and placements of `tensor`."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
