"""A mixture of experts: a router, stacked experts that one grouped product takes, and shared experts.

No word about ranks: where experts are spread over ranks, `apply/experts.py` puts the exchange of tokens around
`GroupedExperts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from titan_planner.ir.model import Moe
from titan_runtime.modules.swiglu import SwiGLU


class Router(nn.Module):
    """Scores experts in float32, whatever dtype the rest computes in, and chooses `top_k` for every token."""

    def __init__(self, dim: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.gate = nn.Linear(dim, moe.num_experts, bias=False)

    def forward(self, x: Tensor, bias: Tensor | None = None, round_robin: bool = False) -> tuple[Tensor, Tensor]:
        """[tokens, dim] -> (scores float32, experts int64), both [tokens, top_k].

        `bias` [experts] counts in choosing only; the scores stay without it. `round_robin` deals tokens out instead of
        choosing, so that all experts have equally many: for measurements of speed.
        """
        moe = self.moe
        # Not self.gate(x): in bfloat16 near ties would be decided by rounding.
        logits = linear(x.float(), self.gate.weight.float())
        scores = torch.sigmoid(logits) if moe.score_function == "sigmoid" else torch.softmax(logits, dim=-1)
        if round_robin:
            turn = torch.arange(len(x) * moe.top_k, device=x.device)
            chosen = (turn % moe.num_experts).view(len(x), moe.top_k)
        else:
            chosen = self.choose(scores.detach(), bias)
        weights = scores.gather(1, chosen)
        if moe.route_norm:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * moe.route_scale, chosen

    def choose(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """The experts of every token, best first, [tokens, top_k]."""
        moe = self.moe
        judged = scores if bias is None else scores + bias
        if moe.num_groups is not None and moe.num_limited_groups is not None:
            grouped = judged.unflatten(1, (moe.num_groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(moe.num_limited_groups, dim=-1).indices
            groups = torch.arange(moe.num_groups, device=best.device)
            allowed = (best.unsqueeze(-1) == groups).any(dim=1)
            judged = grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(1)
        return judged.topk(moe.top_k, dim=-1).indices


GroupedProduct: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows by expert [rows, k], weights [experts, n, k], where each expert's rows end int32 [experts]) -> [rows, n]."""


class GroupedExperts(nn.Module):
    """SwiGLU experts with their weights stacked along the first dim."""

    def __init__(self, dim: int, moe: Moe) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(moe.num_experts, moe.hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(moe.num_experts, dim, moe.hidden_dim))
        self.w3 = nn.Parameter(torch.empty(moe.num_experts, moe.hidden_dim, dim))
        # A decision about this run, which `apply/float8.py` sets from the plan; None for torch's product.
        self.product: GroupedProduct | None = None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """[rows, dim] in order of experts, `counts` [experts] rows each -> [rows, dim] in the same order."""
        return run_experts(x, counts, self.w1, self.w2, self.w3, self.product)

    def extra_repr(self) -> str:
        return f"{self.w1.shape[0]} experts, {self.w1.shape[2]} -> {self.w1.shape[1]}"


def run_experts(
    x: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, product: GroupedProduct | None = None
) -> Tensor:
    """w2[e](silu(w1[e] x) * w3[e] x) for the rows x of every expert e; as `GroupedExperts`."""
    x = x.to(w1.dtype)
    # Not without any row: torch 2.13's grouped product cannot differentiate that.
    if len(x) and (product is not None or grouped_product_works(x, w1, w2)):
        grouped = product or _grouped
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = silu(grouped(x, w1, ends)) * grouped(x, w3, ends)
        return grouped(hidden, w2, ends)
    parts = x.split(counts.tolist())
    # An expert without rows is computed as well: its weights need a gradient, of zeros, as on every other rank.
    return torch.cat(
        [
            linear(silu(linear(part, up)) * linear(part, gate), down)
            for part, up, gate, down in zip(parts, w1, w3, w2, strict=True)
        ]
    )


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def grouped_product_works(x: Tensor, *weights: Tensor) -> bool:
    """Whether torch's grouped product takes these operands: rows of 16 bytes' multiples, and on a GPU bfloat16 only."""
    if x.device.type not in ("cpu", "cuda"):
        return False
    if x.device.type == "cuda" and (
        x.dtype is not torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (8, 0)
    ):
        return False
    return all(size * weight.element_size() % 16 == 0 for weight in weights for size in weight.shape[1:])


class MixtureOfExperts(nn.Module):
    """Routed experts, weighted by the router's scores, plus shared experts that see every token.

    `tokens_per_expert` [experts] counts the choices of this rank since it was last emptied, exactly once each: neither
    recomputation in backward nor a forward without gradients counts. `dropped` counts the choices that a capacity cut
    off. `expert_bias` is state of the run: it is saved, and moves before every optimizer step (see `experts.py`).
    """

    def __init__(self, dim: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.router = Router(dim, moe)
        self.experts = GroupedExperts(dim, moe)
        self.shared_experts = SwiGLU(dim, moe.shared_dim) if moe.num_shared_experts else None
        # Decisions about this run, which `apply/experts.py` sets from the plan.
        self.capacity_factor: float | None = None
        self.force_load_balance = False
        # (i, n): of the tokens only the i-th of n parts is routed here, and the other rows of the routed result are zero.
        self.token_part: tuple[int, int] | None = None
        balanced = moe.load_balance_coeff is not None
        self.register_buffer("expert_bias", torch.empty(moe.num_experts, dtype=torch.float32) if balanced else None)
        self.expert_bias: Tensor | None
        counts = torch.empty(moe.num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.register_buffer("dropped", torch.empty((), dtype=torch.int64), persistent=False)
        self.tokens_per_expert: Tensor
        self.dropped: Tensor

    def reset(self) -> None:
        """Fill the buffers of a module whose memory was allocated but holds anything."""
        self.tokens_per_expert.zero_()
        self.dropped.zero_()
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] -> [batch, sequence, dim]."""
        tokens = x.flatten(0, 1)
        if self.token_part is None:
            out = self._route(tokens)
        else:
            number, parts = self.token_part
            split = tokens.tensor_split(parts)
            before = sum(len(part) for part in split[:number])
            out = self._route(split[number])
            out = pad(out, (0, 0, before, len(tokens) - before - len(out)))
        if self.shared_experts is not None:
            out = out + self.shared_experts(tokens)
        return out.view_as(x)

    def _route(self, tokens: Tensor) -> Tensor:
        scores, chosen = self.router(tokens, self.expert_bias, self.force_load_balance)
        return self._routed(tokens, scores, chosen)

    def _routed(self, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Sum over the chosen experts, [tokens, dim]. Choice number t * top_k + i is the i-th one of token t."""
        moe = self.moe
        # Stable: an expert's rows stay in the order of tokens, so that which are cut off is no accident.
        by_expert, order = chosen.flatten().sort(stable=True)
        # Not bincount, which would make the host wait for the device.
        experts = torch.arange(moe.num_experts, device=by_expert.device)
        ends = torch.searchsorted(by_expert, experts, right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        self._count(self.tokens_per_expert, counts)
        if self.capacity_factor is not None:
            order, counts = self._cut(by_expert, order, counts, len(tokens))
        rows = tokens[order // moe.top_k]
        if moe.score_before_experts:
            rows = (rows.float() * scores.flatten()[order].unsqueeze(1)).type_as(rows)
        done = self.experts(rows, counts)
        # Put back by choice and summed over each token's choices in one order: adding rows into place would depend on
        # theirs. A choice that was cut off leaves zeros.
        back = done.new_zeros(chosen.numel(), done.shape[1]).index_copy(0, order, done).unflatten(0, chosen.shape)
        if not moe.score_before_experts:
            back = back.float() * scores.unsqueeze(-1)
        return back.sum(dim=1, dtype=torch.float32).type_as(tokens)

    def _cut(self, by_expert: Tensor, order: Tensor, counts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Leave every expert at most `capacity_factor` times the mean load of these tokens, the first ones; count the rest."""
        assert self.capacity_factor is not None
        capacity = math.ceil(self.capacity_factor * tokens * self.moe.top_k / self.moe.num_experts)
        first = counts.cumsum(0) - counts
        place = torch.arange(len(by_expert), device=by_expert.device) - first[by_expert]
        kept = order[place < capacity]
        self._count(self.dropped, torch.as_tensor(len(order) - len(kept), device=counts.device))
        return kept, counts.clamp(max=capacity)

    def _count(self, total: Tensor, more: Tensor) -> None:
        # Inside a backward pass this forward is a recomputation, and what it sees has been counted.
        if self.training and torch.is_grad_enabled() and not in_backward():
            with torch.no_grad():
                total += more


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1
