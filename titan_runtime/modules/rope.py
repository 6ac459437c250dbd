"""Rotary position embedding over interleaved pairs, with Llama 3.1's scaling of long wavelengths."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from titan_planner.ir.model import Rope, RopeScaling


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle per position of each pair, float64 [head_dim / 2]: theta^(-2i/head_dim), stretched where the plan says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    plain = rope.theta**-exponents
    return plain if rope.scaling is None else _stretch(plain, rope.scaling)


def _stretch(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: wavelengths beyond the original context are stretched, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / plain
    low = scaling.original_max_seq_len / scaling.low_freq_factor
    high = scaling.original_max_seq_len / scaling.high_freq_factor
    blend = (scaling.original_max_seq_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * plain / scaling.factor + blend * plain
    return torch.where(wavelengths > low, plain / scaling.factor, torch.where(wavelengths < high, plain, between))


def rotary_table(rope: Rope, head_dim: int, length: int) -> Tensor:
    """Cosine and sine of every angle, float32 [length, head_dim / 2, 2], rounded from float64."""
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequencies(rope, head_dim))
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn each pair (x[2i], x[2i+1]) of [batch, sequence, heads, head_dim] by its position's angle, in float32.

    `table` covers at least the sequence; it is cut to the length of `x`.
    """
    cos, sin = table[: x.shape[1]].unsqueeze(1).unbind(-1)  # [sequence, 1, head_dim / 2] each
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(x)


class RotaryTable(nn.Module):
    """Holds the table on the module's device. It is no weight: not saved, not trained, not sharded."""

    def __init__(self, rope: Rope, head_dim: int, length: int) -> None:
        super().__init__()
        self.rope = rope
        self.head_dim = head_dim
        self.length = length
        self.positions: Tensor | None = None
        self.register_buffer("table", torch.empty(length, head_dim // 2, 2, dtype=torch.float32), persistent=False)
        self.table: Tensor

    def keep(self, positions: Tensor) -> None:
        """Hold the rows of `positions` only, in that order: this rank's part of a sequence. Comes before `reset`."""
        self.positions = positions
        self.table = self.table.new_empty(len(positions), *self.table.shape[1:])

    def reset(self) -> None:
        """Fill the table. Modules are built on the meta device, and `to_empty` leaves whatever was in memory."""
        whole = rotary_table(self.rope, self.head_dim, self.length)
        self.table.copy_(whole if self.positions is None else whole[self.positions])

    def forward(self) -> Tensor:
        """The table, float32 [positions, head_dim / 2, 2]."""
        return self.table

    def extra_repr(self) -> str:
        return f"length={self.length}, head_dim={self.head_dim}, theta={self.rope.theta:g}"
