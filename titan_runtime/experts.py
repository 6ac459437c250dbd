"""The loads of the experts in one step: what was dropped, how uneven they are, and the bias that evens them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_planner.ir.model import Moe
from titan_planner.ir.plan import Plan
from titan_runtime.apply.experts import COUNTED_OVER, mixtures


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

    def __init__(
        self,
        plan: Plan,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        """`group` are the ranks that see different tokens, `stages` those of a pipeline, which hold different layers.

        Collective, except for a model without experts.
        """
        self._layers = [n for n, block in enumerate(plan.model.layers()) if isinstance(block.feed_forward, Moe)]
        self._stages = stages
        self._parts = {layer_of(fqn): part for fqn, part in mixtures(module)}
        self._counts: dict[int, Tensor] = {}
        if not self._parts:
            return
        # One all-reduce for all layers. Whole numbers, so that the sums are exact and the same on every rank.
        held = [torch.cat((part.tokens_per_expert, part.dropped.unsqueeze(0))) for part in self._parts.values()]
        total = torch.cat(held)
        dist.all_reduce(total, group=group)
        over = COUNTED_OVER.get(next(iter(self._parts.values())))
        if over is not None:
            dist.all_reduce(total, group=over)
        self._counts = dict(zip(self._parts, total.split([len(h) for h in held]), strict=True))
        for part in self._parts.values():
            part.tokens_per_expert.zero_()
            part.dropped.zero_()

    def numbers(self, device: torch.device) -> Tensor:
        """The imbalance of every layer of the model, then the choices dropped in all; float64, still on the device."""
        if not self._layers:
            return torch.zeros(0, dtype=torch.float64, device=device)
        found = torch.zeros(len(self._layers) + 1, dtype=torch.float64, device=device)
        for place, layer in enumerate(self._layers):
            if layer in self._counts:
                load = self._counts[layer][:-1].double()
                found[place] = load.max() / load.mean().clamp(min=1e-9)
                found[-1] += self._counts[layer][-1]
        if self._stages is not None:  # each layer is on one of them, where all others have zero
            dist.all_reduce(found, group=self._stages)
        return found

    def report(self, numbers: Sequence[float]) -> ExpertLoad | None:
        """What `numbers` said, now on the host; None for a model without experts."""
        if not self._layers:
            return None
        imbalance = {str(layer): value for layer, value in zip(self._layers, numbers[:-1], strict=True)}
        return ExpertLoad(imbalance, int(numbers[-1]))

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the bias of every layer one step towards even loads: up for experts below the mean, down for those above.

        Steps are the sign times the layer's coefficient, less their mean, so that a bias has no drift of its own
        (auxiliary-loss-free balancing, arXiv 2408.15664, as DeepSeek V3 uses it).
        """
        for layer, part in self._parts.items():
            if part.expert_bias is not None and part.moe.load_balance_coeff is not None:
                part.expert_bias += bias_step(self._counts[layer][:-1], part.moe.load_balance_coeff)


def layer_of(fqn: str) -> int:
    """The number of the layer that holds the mixture `fqn`, of a whole model or of a pipeline rank's parts."""
    return int(fqn.split("layers.")[1].split(".")[0])


def bias_step(counts: Tensor, coefficient: float) -> Tensor:
    """The change of an expert bias after a step in which experts were chosen `counts` times, float32."""
    load = counts.float()
    step = coefficient * torch.sign(load.mean() - load)
    return step - step.mean()
