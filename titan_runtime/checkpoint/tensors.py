"""The tensors of a run under the names they have in a checkpoint.

Weights are stored under their FQNs and optimizer states under `optimizer.state.<fqn>.<moment>`, as in TorchTitan's
checkpoints. Both are independent of the mesh. Random-number states are each rank's own, `rng.<rank>.<device>`.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_runtime.apply.float8 import high_precision
from titan_runtime.optimizer import optimizer_state

OPTIMIZER = "optimizer.state."
RNG = "rng."


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The live parameters of this rank's shard and the buffers that are saved; loading into them changes the model."""
    return {
        **{fqn: high_precision(parameter.detach()) for fqn, parameter in module.named_parameters()},
        **saved_buffers(module),
    }


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """State of the model that is not trained and equal on all ranks, such as the experts' bias."""
    return {
        # Parts of a pipeline rank are numbered, and their modules have the model's names all the same.
        re.sub(r"^parts\.\d+\.", "", f"{fqn}.{name}"): buffer
        for fqn, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The live optimizer states of this rank's shard."""
    return {f"{OPTIMIZER}{name}": tensor for name, tensor in optimizer_state(module, optimizer).items()}


def rng_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Copies of this rank's generator states."""
    states = {f"{RNG}{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{RNG}{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: dict[str, Tensor], rank: int, device: torch.device) -> None:
    """Put back what `rng_tensors` copied."""
    for name, state in states.items():
        if name == f"{RNG}{rank}.cpu":
            torch.set_rng_state(state)
        elif name == f"{RNG}{rank}.cuda":
            torch.cuda.set_rng_state(state, device)


def cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies in `dtype`, sharded as they were."""
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def global_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor, of which this rank may hold a part."""
    return tuple(tensor.shape if isinstance(tensor, DTensor) else tensor.size())
