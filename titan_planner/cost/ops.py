"""What one block computes for one microbatch on one rank: matmuls, attention, and the bytes of everything else.

Shapes are local: after tensor, context and expert parallelism. The list is the forward pass in the order in which it runs;
what backward and recomputation cost follows from it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

from titan_planner.cost.local import effective_imbalance, fuses, imbalance_of
from titan_planner.cost.program import TITAN, Program
from titan_planner.ir.model import Attention, Block, FeedForward, Gqa, Mlp, Moe, SwiGlu
from titan_planner.ir.plan import Plan
from titan_planner.ir.rules import mixtures

Fusion: TypeAlias = Literal["eager", "compiled", "fused"]

ELEMENT_BYTES = 2
"""What the tables below count by: bfloat16."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A microbatch on one rank, and the degrees that cut a block's work."""

    tokens: int  # of one microbatch on one context rank
    seq_len: int  # of the whole sequence
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    kv_replicas: int = 1
    sequence_parallel: bool = False
    fusion: Fusion = "compiled"
    load: float = 1.0  # rows of the busiest expert rank over what tokens x top_k make in the mean
    causal_skew: float = 1.0  # pairs of the rank that has most of them over the mean
    element_bytes: int = 2  # of activations

    @property
    def stream_tokens(self) -> float:
        """Tokens of the residual stream that a rank holds between the parallel regions."""
        return self.tokens / self.tp if self.sequence_parallel else float(self.tokens)


@dataclass(frozen=True, slots=True)
class Matmul:
    """`groups` products [m, k] x [k, n], one after the other or as one grouped kernel; `m` is the rows of all groups."""

    name: str  # FQN below the block, e.g. attention.wq
    m: float
    n: int
    k: int
    groups: int = 1
    wide: bool = False  # computed in float32 whatever the rest does: routers

    @property
    def flops(self) -> float:
        """FLOPs of one forward; backward has twice as many."""
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Mixing:
    """Attention itself: softmax(q k^T) v over `pairs` of query and key per head."""

    pairs: float  # query-key pairs that are computed, of all sequences of the microbatch on this rank
    heads: float
    qk_dim: int
    v_dim: int

    @property
    def flops(self) -> float:
        """FLOPs of one forward, masked pairs left out."""
        return 2.0 * self.pairs * self.heads * (self.qk_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Memory-bound work: bytes read and written, and the kernels launched for it."""

    name: str
    forward_bytes: float
    backward_bytes: float
    forward_kernels: int
    backward_kernels: int


Op: TypeAlias = Matmul | Mixing | Elementwise


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Bytes per element moved by one memory-bound op, forward and backward, and its kernels."""

    forward: float
    backward: float
    forward_kernels: int = 1
    backward_kernels: int = 1


# Bytes moved per element of the op's input (bf16 = 2 bytes a read or a write). Eager: one kernel per line of our modules,
# float32 in norm and rope (titan_runtime/modules): e.g. the norm reads 2 writes 4 (widen), reads 4 writes 4 (square), reads
# 4 (mean), reads 4 writes 4 (scale), reads 4 writes 4 (weight), reads 4 writes 2 (narrow) = 40. Compiled and fused: one
# pass over inputs and outputs; backward reads the gradient and what was saved, writes the gradient.
_NORM: dict[Fusion, _Traffic] = {
    "eager": _Traffic(40, 76, 7, 14),
    "compiled": _Traffic(4, 10, 1, 2),
    "fused": _Traffic(4, 8, 1, 2),
}
_RESIDUAL: dict[Fusion, _Traffic] = {
    "eager": _Traffic(6, 6, 1, 1),
    "compiled": _Traffic(4, 2, 0, 0),  # the sum is one more input of the next norm's kernel
    "fused": _Traffic(6, 4, 1, 1),
}
_ROPE: dict[Fusion, _Traffic] = {
    "eager": _Traffic(36, 40, 8, 10),
    "compiled": _Traffic(4, 4, 1, 1),
    "fused": _Traffic(4, 4, 1, 1),
}
# SwiGLU per element of the hidden dim: silu(a) * b of two inputs.
_GATE: dict[Fusion, _Traffic] = {
    "eager": _Traffic(10, 18, 2, 3),
    "compiled": _Traffic(6, 12, 1, 1),
    "fused": _Traffic(6, 10, 1, 1),
}
# One activation per element of the hidden dim; eager GELU and squared ReLU are one and two kernels.
_ACTIVATION: dict[Fusion, _Traffic] = {
    "eager": _Traffic(6, 8, 2, 2),
    "compiled": _Traffic(4, 6, 1, 1),
    "fused": _Traffic(4, 6, 1, 1),
}
# Sorting tokens by expert, scattering them back and weighting them, per element of a routed row.
_ROUTE: dict[Fusion, _Traffic] = {
    "eager": _Traffic(20, 24, 12, 12),
    "compiled": _Traffic(14, 18, 8, 8),
    "fused": _Traffic(10, 12, 4, 4),
}


def _elementwise(name: str, traffic: dict[Fusion, _Traffic], shape: Shape, elements: float) -> Elementwise:
    row = traffic[shape.fusion]
    elements *= shape.element_bytes / ELEMENT_BYTES
    return Elementwise(name, row.forward * elements, row.backward * elements, row.forward_kernels, row.backward_kernels)


@functools.lru_cache(maxsize=4096)
def block_ops(block: Block, dim: int, shape: Shape) -> tuple[Op, ...]:
    """Forward of one block, in order."""
    stream = shape.stream_tokens * dim
    return (
        _elementwise("attention_norm", _NORM, shape, stream),
        *_attention_ops(block.attention, dim, shape),
        _elementwise("attention_residual", _RESIDUAL, shape, stream),
        _elementwise("ffn_norm", _NORM, shape, stream),
        *_feed_forward_ops(block.feed_forward, dim, shape),
        _elementwise("ffn_residual", _RESIDUAL, shape, stream),
    )


def causal_pairs(tokens: int, seq_len: int) -> float:
    """Query-key pairs under the causal mask for `tokens` queries spread evenly over sequences of `seq_len`."""
    return tokens * (seq_len + 1) / 2


def _attention_ops(attention: Attention, dim: int, shape: Shape) -> tuple[Op, ...]:
    match attention:
        case Gqa():
            heads = attention.num_heads // shape.tp
            kv_heads = attention.num_kv_heads * shape.kv_replicas // shape.tp
            q, kv = heads * attention.head_dim, kv_heads * attention.head_dim
            projections: tuple[Op, ...] = (
                Matmul("attention.wq", shape.tokens, q, dim),
                Matmul("attention.wk", shape.tokens, kv, dim),
                Matmul("attention.wv", shape.tokens, kv, dim),
            )
            if shape.fusion == "fused":
                # Transformer Engine and Megatron project q, k and v in one matmul.
                projections = (Matmul("attention.wq", shape.tokens, q + 2 * kv, dim),)
            return (
                *projections,
                _elementwise("rope", _ROPE, shape, float(shape.tokens * (q + kv))),
                Mixing(
                    causal_pairs(shape.tokens, shape.seq_len) * shape.causal_skew,
                    heads,
                    attention.head_dim,
                    attention.head_dim,
                ),
                Matmul("attention.wo", shape.tokens, dim, q),
            )
        case _:
            assert_never(attention)


def _feed_forward_ops(feed_forward: FeedForward, dim: int, shape: Shape) -> tuple[Op, ...]:
    match feed_forward:
        case SwiGlu(hidden_dim=hidden):
            return _swiglu_ops("feed_forward", dim, hidden // shape.tp, shape)
        case Mlp(hidden_dim=hidden):
            local = hidden // shape.tp
            return (
                Matmul("feed_forward.w1", shape.tokens, local, dim),
                _elementwise("feed_forward.activation", _ACTIVATION, shape, float(shape.tokens * local)),
                Matmul("feed_forward.w2", shape.tokens, dim, local),
            )
        case Moe() as moe:
            # Without expert-tensor parallelism the ranks of tp route parts of the tokens each.
            own = shape.tokens / (shape.tp if shape.etp < shape.tp else 1)
            rows = own * moe.top_k * shape.load
            local, hidden = moe.num_experts // shape.ep, moe.hidden_dim // shape.etp
            ops: tuple[Op, ...] = (
                Matmul("moe.router.gate", shape.tokens, moe.num_experts, dim, wide=True),
                _elementwise("moe.route", _ROUTE, shape, rows * dim),
            )
            ups: tuple[Op, ...] = (
                Matmul("moe.experts.w1", rows, hidden, dim, groups=local),
                Matmul("moe.experts.w3", rows, hidden, dim, groups=local),
            )
            if shape.fusion == "fused":
                ups = (Matmul("moe.experts.w1", rows, 2 * hidden, dim, groups=local),)
            ops += (
                *ups,
                _elementwise("moe.gate", _GATE, shape, rows * hidden),
                Matmul("moe.experts.w2", rows, dim, hidden, groups=local),
            )
            if moe.num_shared_experts:
                ops += _swiglu_ops("moe.shared_experts", dim, moe.shared_dim // shape.tp, shape)
            return ops
        case _:
            assert_never(feed_forward)


def _swiglu_ops(name: str, dim: int, hidden: int, shape: Shape) -> tuple[Op, ...]:
    gate = _elementwise(f"{name}.gate", _GATE, shape, float(shape.tokens * hidden))
    down = Matmul(f"{name}.w2", shape.tokens, dim, hidden)
    if shape.fusion == "fused":
        return (Matmul(f"{name}.w1", shape.tokens, 2 * hidden, dim), gate, down)
    return (
        Matmul(f"{name}.w1", shape.tokens, hidden, dim),
        Matmul(f"{name}.w3", shape.tokens, hidden, dim),
        gate,
        down,
    )


def fusion_of(plan: Plan, program: Program = TITAN) -> Fusion:
    """Who fuses the memory-bound ops of blocks. Compiler backends for debugging fuse nothing."""
    if program.kernels != "plan":
        return program.kernels
    return "compiled" if fuses(plan) and "model" in plan.compile.components else "eager"


def expert_load(plan: Plan) -> tuple[float, float]:
    """(rows that the busiest expert rank computes, rows that it receives over those sent to it) over even shares.

    The request's imbalance, 1 where routing is forced even or where all experts are on one rank; never more than
    the rank's experts can be chosen for, nor than a capacity lets them take.
    """
    asked = imbalance_of(plan)
    received = max((effective_imbalance(plan, layer, asked) for layer in mixtures(plan.model)), default=1.0)
    # What is sent is cut to the capacity already (`collectives.expert_rows_sent`).
    capacity = plan.expert_parallel.capacity_factor
    return received * (1.0 if capacity is None else min(1.0, capacity)), received


def shape_of(plan: Plan, program: Program = TITAN) -> Shape:
    """The microbatch of one rank of `plan`: the one with most to do, where ranks differ."""
    mesh, context = plan.mesh, plan.context_parallel
    # Without a pipeline one forward takes the whole local batch.
    sequences = plan.batch.microbatch_size if mesh.pp > 1 else plan.batch.local_batch_size
    # Contiguous parts: the last of cp ranks has (2 cp - 1) / cp of the mean pairs. Ulysses' ranks have whole sequences.
    skewed = mesh.cp > 1 and context.load_balance == "none" and context.method != "alltoall"
    return Shape(
        tokens=sequences * plan.batch.seq_len // mesh.cp,
        seq_len=plan.batch.seq_len,
        tp=mesh.tp,
        cp=mesh.cp,
        ep=mesh.ep,
        etp=mesh.etp,
        kv_replicas=plan.tensor_parallel.kv_replicas,
        sequence_parallel=plan.tensor_parallel.sequence_parallel,
        fusion=fusion_of(plan, program),
        load=expert_load(plan)[0],
        causal_skew=(2 * mesh.cp - 1) / mesh.cp if skewed else 1.0,
        element_bytes=4 if plan.fsdp.param_dtype == "float32" else ELEMENT_BYTES,
    )
