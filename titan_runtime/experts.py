"""The loads of the experts in one step: what was dropped, how uneven they are, and the bias that evens them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_runtime.apply.experts import mixtures


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """`imbalance`: layer -> load of the fullest expert over the mean load, 1 when even. `dropped`: choices cut off."""

    imbalance: dict[str, float]
    dropped: int

    def numbers(self) -> dict[str, float]:
        """The same under the names of the logs."""
        found = {f"expert_imbalance/{layer}": value for layer, value in self.imbalance.items()}
        return {**found, "dropped_tokens": self.dropped}


class ExpertCounts:
    """How often each expert was chosen on all ranks since the last step, layer by layer; taking it empties the counters."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """`group` are the ranks that see different tokens. Collective over it, except for a module without experts."""
        self._parts = list(mixtures(module))
        self._counts: list[Tensor] = []
        if not self._parts:
            return
        # One all-reduce for all layers. Whole numbers, so that the sums are exact and the same on every rank.
        held = [torch.cat((part.tokens_per_expert, part.dropped.unsqueeze(0))) for _, part in self._parts]
        total = torch.cat(held)
        dist.all_reduce(total, group=group)
        self._counts = list(total.split([len(h) for h in held]))
        for _, part in self._parts:
            part.tokens_per_expert.zero_()
            part.dropped.zero_()

    def numbers(self) -> Tensor:
        """The imbalance of every layer, then the choices dropped in all; float64, still on the device."""
        if not self._counts:
            return torch.zeros(0, dtype=torch.float64)
        loads = [counts[:-1].double() for counts in self._counts]
        uneven = [load.max() / load.mean().clamp(min=1e-9) for load in loads]
        return torch.stack([*uneven, torch.stack([counts[-1] for counts in self._counts]).sum().double()])

    def report(self, numbers: Sequence[float]) -> ExpertLoad | None:
        """What `numbers` said, now on the host; None for a module without experts."""
        if not self._parts:
            return None
        layers = [fqn.split(".")[1] for fqn, _ in self._parts]
        return ExpertLoad(dict(zip(layers, numbers[:-1], strict=True)), int(numbers[-1]))

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the bias of every layer one step towards even loads: up for experts below the mean, down for those above.

        Steps are the sign times the layer's coefficient, less their mean, so that a bias has no drift of its own
        (auxiliary-loss-free balancing, arXiv 2408.15664, as DeepSeek V3 uses it).
        """
        for (_, part), counts in zip(self._parts, self._counts, strict=True):
            if part.expert_bias is not None and part.moe.load_balance_coeff is not None:
                part.expert_bias += bias_step(counts[:-1], part.moe.load_balance_coeff)


def bias_step(counts: Tensor, coefficient: float) -> Tensor:
    """The change of an expert bias after a step in which experts were chosen `counts` times, float32."""
    load = counts.float()
    step = coefficient * torch.sign(load.mean() - load)
    return step - step.mean()
