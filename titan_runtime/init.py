"""Initial weights that depend on the seed and the parameter's name only, so that any mesh starts from the same ones.

DTensor's own random operators give every rank of a CPU mesh the *same* values, so weights are drawn here by hand. A
parameter is cut into blocks of whole rows, of a size that depends on its shape alone, and every block has a generator
of its own. A rank draws the blocks that its slice touches and no others, so the work shrinks with the number of ranks
and no rank ever holds more than one block beside its own slice.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Not in torch.distributed.tensor's public names, but the function that DTensor and its checkpoints are cut with.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_planner.ir.inventory import Init, Parameter, parameters
from titan_planner.ir.model import Model
from titan_runtime.modules.moe import MixtureOfExperts
from titan_runtime.modules.rope import RotaryTable

BLOCK_ELEMENTS = 1 << 22
"""Elements drawn from one generator: 16 MiB in float32. Part of what a seed means; changing it changes all weights."""


def initialise(module: nn.Module, model: Model, seed: int) -> None:
    """Fill every parameter and buffer of `module`, whose memory is allocated but holds anything.

    `module` may hold some of the model's parameters only (a pipeline stage), plain or as DTensors.
    Raises ValueError for a parameter that the model's inventory does not know.
    """
    inventory = {parameter.fqn: parameter for parameter in parameters(model)}
    with torch.no_grad():
        # A tied output shares its tensor with the embedding; `named_parameters` yields it once, by the embedding's
        # name.
        for fqn, tensor in module.named_parameters():
            if fqn not in inventory:
                raise ValueError(f"the module has a parameter {fqn!r} that the model's inventory lacks")
            _fill(tensor, inventory[fqn], seed)
        for part in module.modules():
            if isinstance(part, RotaryTable | MixtureOfExperts):
                part.reset()


def _fill(tensor: Tensor, parameter: Parameter, seed: int) -> None:
    if tuple(tensor.shape) != parameter.shape:
        raise ValueError(f"{parameter.fqn} has shape {tuple(tensor.shape)}, the inventory says {parameter.shape}")
    shape, offset = parameter.shape, (0,) * len(parameter.shape)
    local = tensor
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if local.numel() == 0:  # fewer rows than ranks: some ranks hold nothing
        return
    columns = tuple(slice(start, start + size) for start, size in zip(offset[1:], shape[1:], strict=True))
    for first, rows in row_blocks(parameter.shape):
        begin, end = max(first, offset[0]), min(first + rows, offset[0] + shape[0])
        if begin < end:
            block = draw(parameter, seed, first, rows)
            local[begin - offset[0] : end - offset[0]].copy_(block[(slice(begin - first, end - first), *columns)])


def row_blocks(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first row, number of rows) of every block of a parameter of that shape."""
    rows = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    return [(first, min(rows, shape[0] - first)) for first in range(0, shape[0], rows)]


def draw(parameter: Parameter, seed: int, first: int, rows: int) -> Tensor:
    """Rows `first` to `first + rows` of the full parameter, float32 on the CPU."""
    block = torch.empty(rows, *parameter.shape[1:], dtype=torch.float32, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(_block_seed(seed, parameter.fqn, first))
    return _distribution(block, parameter.init, generator)


def _distribution(block: Tensor, init: Init, generator: torch.Generator) -> Tensor:
    if init.kind == "ones":
        return block.fill_(1.0)
    if math.isinf(init.cut):
        return block.normal_(0.0, init.std, generator=generator)
    bound = init.cut * init.std
    return nn.init.trunc_normal_(block, 0.0, init.std, -bound, bound, generator=generator)


def _block_seed(seed: int, fqn: str, first: int) -> int:
    # The CPU generator uses 32 bits of a seed, so 32 bits of the hash are all there is to give.
    return int.from_bytes(hashlib.sha256(f"{seed}/{fqn}/{first}".encode()).digest()[:4], "big")
