"""The model, described once: a few values over a small closed set of layer kinds.

The planner's inventory and costs and the runtime's modules are each one `match` over these kinds. A new kind is added to
`Attention` or `FeedForward` here, and the type checker then names every `match` that does not know it yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from titan_planner.ir.errors import InvariantError
from titan_planner.ir.numbers import divisors, listing
from titan_planner.ir.record import Field, record


@record
class RopeScaling:
    """Llama 3.1's frequency-dependent stretching of rotary wavelengths for contexts beyond the original length."""

    factor: Annotated[float, Field("How far low frequencies are stretched.", ge=1)]
    low_freq_factor: Annotated[float, Field("Wavelengths above original_max_seq_len / this are stretched fully.", gt=0)]
    high_freq_factor: Annotated[float, Field("Wavelengths below original_max_seq_len / this stay as they are.", gt=0)]
    original_max_seq_len: Annotated[int, Field("Context length before stretching, in tokens.", ge=1, le=10**9)]

    def check(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise InvariantError(
                "high_freq_factor",
                f"`high_freq_factor` {self.high_freq_factor:g} must be greater than `low_freq_factor` "
                f"{self.low_freq_factor:g}",
            )


@record
class Rope:
    """Rotary position embedding over interleaved pairs (Meta's form), frequencies theta^(-2i/head_dim)."""

    theta: Annotated[float, Field("Base of the rotary frequencies.", gt=0)]
    scaling: Annotated[RopeScaling | None, Field("Long-context scaling, or null.")]


@record
class Gqa:
    """Grouped-query causal attention: wq, wk, wv, wo without biases; num_kv_heads = num_heads is multi-head attention."""

    kind: Annotated[Literal["gqa"], Field("Layer kind.")] = "gqa"
    num_heads: Annotated[int, Field("Query heads.", ge=1, le=10**6)]
    num_kv_heads: Annotated[int, Field("Key and value heads; divides num_heads.", ge=1, le=10**6)]
    head_dim: Annotated[int, Field("Elements of one head; even, for rotary pairs.", ge=2, le=10**6)]
    rope: Annotated[Rope, Field("Rotary position embedding.")]

    def check(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvariantError(
                "num_kv_heads",
                f"`num_kv_heads` {self.num_kv_heads} does not divide `num_heads` {self.num_heads}",
                f"use one of {listing(divisors(self.num_heads))}",
                rule="model-heads",
            )
        if self.head_dim % 2:
            raise InvariantError(
                "head_dim", f"`head_dim` {self.head_dim} is odd, but rotary pairs need it even", rule="model-heads"
            )


@record
class SwiGlu:
    """w2(silu(w1 x) * w3 x), no biases."""

    kind: Annotated[Literal["swiglu"], Field("Layer kind.")] = "swiglu"
    hidden_dim: Annotated[int, Field("Elements between w1/w3 and w2.", ge=1, le=10**8)]


@record
class Mlp:
    """w2(activation(w1 x)), two matrices without a gate and without biases."""

    kind: Annotated[Literal["mlp"], Field("Layer kind.")] = "mlp"
    hidden_dim: Annotated[int, Field("Elements between w1 and w2.", ge=1, le=10**8)]
    activation: Annotated[
        Literal["gelu", "relu2"],
        Field(
            "gelu: x times the normal distribution's share below x, by the error function; relu2: max(x, 0) squared."
        ),
    ]


@record
class Moe:
    """A mixture of SwiGLU experts without biases: a router sends each token to `top_k` of them; shared experts see all.

    The router scores in float32. A token's output is the sum of its experts' outputs times their scores (or of the experts'
    outputs on the scaled token), plus the shared experts'.
    """

    kind: Annotated[Literal["moe"], Field("Layer kind.")] = "moe"
    num_experts: Annotated[int, Field("Routed experts.", ge=1, le=10**6)]
    hidden_dim: Annotated[int, Field("Elements between w1/w3 and w2 of one expert.", ge=1, le=10**8)]
    top_k: Annotated[int, Field("Experts that each token goes to.", ge=1, le=10**6)]
    num_shared_experts: Annotated[
        int,
        Field(
            "Experts that see every token, computed as one layer of width hidden_dim x this; 0: none.", ge=0, le=10**4
        ),
    ]
    score_function: Annotated[
        Literal["softmax", "sigmoid"], Field("How the router's logits become scores: over all experts, or each alone.")
    ]
    score_before_experts: Annotated[bool, Field("Scores scale the experts' inputs (true) or their outputs (false).")]
    route_norm: Annotated[bool, Field("A token's chosen scores are divided by their sum.")]
    route_scale: Annotated[float, Field("Factor on the chosen scores.", gt=0)]
    num_groups: Annotated[
        int | None, Field("Group-limited routing: equal groups that experts lie in, in order; null: no groups.", ge=1)
    ]
    num_limited_groups: Annotated[
        int | None,
        Field("Groups that a token may choose from: those with the largest sums of their two best scores.", ge=1),
    ]
    load_balance_coeff: Annotated[
        float | None,
        Field("Step of the bias that balances the experts' loads and counts in choosing only; null: no bias.", gt=0),
    ]

    @property
    def shared_dim(self) -> int:
        """Width of the one layer that stands for all shared experts; 0 without them."""
        return self.hidden_dim * self.num_shared_experts

    def check(self) -> None:
        if self.top_k > self.num_experts:
            raise InvariantError(
                "top_k", f"`top_k` {self.top_k} is more than the {self.num_experts} experts", rule="model-routing"
            )
        if self.route_norm and self.top_k == 1:
            raise InvariantError(
                "route_norm",
                "`route_norm` with `top_k` 1 makes every score 1, so that the router would never learn",
                rule="model-routing",
            )
        if (self.num_groups is None) != (self.num_limited_groups is None):
            raise InvariantError(
                "num_limited_groups",
                "`num_groups` and `num_limited_groups` go together: set both or none",
                rule="model-routing",
            )
        if self.num_groups is None or self.num_limited_groups is None:
            return
        if self.num_experts % self.num_groups:
            raise InvariantError(
                "num_groups",
                f"`num_groups` {self.num_groups} does not divide the {self.num_experts} experts",
                f"use one of {listing(tuple(d for d in divisors(self.num_experts) if 2 * d <= self.num_experts))}",
                rule="model-routing",
            )
        each = self.num_experts // self.num_groups
        if each < 2:
            raise InvariantError(
                "num_groups",
                f"`num_groups` {self.num_groups} leaves {each} expert a group, but groups are judged by two",
                rule="model-routing",
            )
        if self.num_limited_groups > self.num_groups:
            raise InvariantError(
                "num_limited_groups",
                f"`num_limited_groups` {self.num_limited_groups} is more than the {self.num_groups} groups",
                rule="model-routing",
            )
        if self.num_limited_groups * each < self.top_k:
            raise InvariantError(
                "num_limited_groups",
                f"{self.num_limited_groups} groups of {each} experts are fewer than the `top_k` {self.top_k} to choose",
                rule="model-routing",
            )


Attention: TypeAlias = Gqa
FeedForward: TypeAlias = SwiGlu | Mlp | Moe


@record
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the model dim."""

    eps: Annotated[float, Field("Added under the root.", gt=0)]


@record
class Block:
    """One pre-norm transformer block: x + attention(norm x), then x + feed_forward(norm x)."""

    attention: Attention
    feed_forward: Annotated[FeedForward, Field("What follows attention: one layer for all tokens, or experts.")]
    norm: Annotated[RmsNorm, Field("Both norms of the block.")]


@record
class Blocks:
    """A run of equal blocks."""

    repeat: Annotated[int, Field("How many times the block stands here.", ge=1, le=10**4)]
    block: Block


@record
class Model:
    """A decoder-only language model: token embedding, blocks, final norm, output projection."""

    family: Annotated[str, Field("Model family, e.g. llama3.", decision=False)]
    flavor: Annotated[str, Field("Size within the family, e.g. 8B.", decision=False)]
    vocab_size: Annotated[int, Field("Rows of the embedding and of the output projection.", ge=2, le=10**8)]
    dim: Annotated[int, Field("Width of the residual stream.", ge=1, le=10**7)]
    max_seq_len: Annotated[
        int, Field("Longest sequence that the position embedding covers, in tokens.", ge=1, le=10**9)
    ]
    blocks: Annotated[tuple[Blocks, ...], Field("Runs of equal blocks, in order.", min_items=1)]
    norm: Annotated[RmsNorm, Field("Final norm.")]
    tied: Annotated[bool, Field("The output projection shares the embedding's weight.")]
    init_std: Annotated[
        float, Field("Standard deviation of linear weights; depth-scaled by 1/sqrt(2(l+1)) on wo, w2, w3.", gt=0)
    ] = 0.02

    def check(self) -> None:
        if not self.blocks:
            raise InvariantError("blocks", "`blocks` is empty, but a model has at least one block")

    @property
    def num_layers(self) -> int:
        """Number of transformer blocks."""
        return sum(run.repeat for run in self.blocks)

    def layers(self) -> Iterator[Block]:
        """The blocks one by one, in order."""
        for run in self.blocks:
            for _ in range(run.repeat):
                yield run.block
