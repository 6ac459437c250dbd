"""Sizes of one microbatch on one rank: what tensor, sequence, context and expert parallelism leave of every activation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

from titan_planner.cost.program import Program
from titan_planner.ir.execution import Float8
from titan_planner.ir.fqn import matches
from titan_planner.ir.model import Attention, Gqa, Moe
from titan_planner.ir.plan import Plan

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element."""

BALANCED = 1.0
"""Expert imbalance: every rank gets as many tokens as the mean. Real routing exceeds it; see `worst_imbalance`."""


Product: TypeAlias = Literal["attention", "feed_forward", "w2"]
"""A product's input: of wq, wk and wv; of w1 and w3; of w2."""

_LINEARS: dict[Product, tuple[str, ...]] = {
    "attention": ("attention.wq", "attention.wk", "attention.wv"),
    "feed_forward": ("feed_forward.w1", "feed_forward.w3"),
    "w2": ("feed_forward.w2",),
}
EVERY_PRODUCT: frozenset[Product] = frozenset(_LINEARS)


@dataclass(frozen=True, slots=True)
class Local:
    """What a rank computes with. Token counts are of one microbatch."""

    dim: int
    vocab: int  # columns of the logits that this rank holds
    tokens: int  # inside attention and feed-forward: gathered over tp
    stream_tokens: int  # of the residual stream: cut over tp with sequence parallel
    itemsize: int  # bytes of an activation
    tp: int
    sequence_parallel: bool
    kv_replicas: int
    cp: int
    cp_method: Literal["allgather", "ring", "alltoall"]
    cp_chunks: int  # 2 when every rank has an early and a late part of the sequence
    ep: int
    etp: int
    kernels: Literal["eager", "compiled", "fused"]  # who decides what is kept
    op_by_op: bool  # every op of a block writes its result to memory
    seq_len: int  # keys that a query of materialised attention has a score for, 0 where a kernel keeps no scores
    recompute_attention: bool  # attention's forward runs again in backward, so that nothing inside it is kept
    dropout: bool
    operand_bytes: (
        float  # of an element that fused kernels keep as a product's input: 8 bits where the product is in 8 bits
    )
    recast: frozenset[Product]  # whose inputs a compiled backward casts again instead of keeping them
    query_key_norms: bool
    norm_kernel: bool  # eager norms keep their input as it is
    capacity_factor: float | None
    imbalance: float  # rows that the busiest expert rank gets over the mean
    device: Literal["cuda", "cpu"]

    @property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream in the dtype computed in."""
        return self.stream_tokens * self.dim * self.itemsize

    @property
    def routing_tokens(self) -> float:
        """Tokens that this rank routes: whole experts under tensor parallelism share them out over tp."""
        return self.tokens / (self.tp if self.tp > 1 and self.etp == 1 else 1)

    def sent_rows(self, moe: Moe) -> float:
        """Rows that leave this rank for experts; a capacity cuts off what exceeds it, at most."""
        rows = self.routing_tokens * moe.top_k
        return rows if self.capacity_factor is None else rows * min(1.0, self.capacity_factor)

    def expert_rows(self, moe: Moe) -> float:
        """Rows that this rank's experts compute; `imbalance` times the mean over the ep ranks, as far as can be."""
        return self.sent_rows(moe) * _bounded(moe, self.ep, self.capacity_factor, self.imbalance)


def local(plan: Plan, program: Program, imbalance: float) -> Local:
    """The sizes of `plan` run by `program`. `imbalance` is 1 when experts' loads are balanced."""
    mesh, tensor = plan.mesh, plan.tensor_parallel
    sequence_parallel = tensor.sequence_parallel and mesh.tp > 1
    tokens = plan.batch.microbatch_size * plan.batch.seq_len // mesh.cp
    return Local(
        dim=plan.model.dim,
        vocab=plan.model.vocab_size // (mesh.tp if tensor.loss_parallel else 1),
        tokens=tokens,
        stream_tokens=tokens // (mesh.tp if sequence_parallel else 1),
        itemsize=BYTES[plan.fsdp.param_dtype],
        tp=mesh.tp,
        sequence_parallel=sequence_parallel,
        kv_replicas=tensor.kv_replicas,
        cp=mesh.cp,
        cp_method=plan.context_parallel.method,
        cp_chunks=2 if plan.context_parallel.load_balance == "headtail" else 1,
        ep=mesh.ep,
        etp=mesh.etp,
        kernels=kernels(plan, program),
        op_by_op=kernels(plan, program) == "eager" or (program.kernels == "plan" and not fuses(plan)),
        seq_len=plan.batch.seq_len if program.attention == "materialised" else 0,
        recompute_attention=program.recompute_attention,
        dropout=program.dropout,
        operand_bytes=_operand_bytes(plan),
        recast=_recast(plan.float8, plan.model.num_layers // 2),
        query_key_norms=program.query_key_norms,
        norm_kernel=program.norm_kernel,
        capacity_factor=plan.expert_parallel.capacity_factor,
        imbalance=imbalance,
        device=plan.cluster.gpu.device,
    )


@functools.lru_cache(maxsize=64)
def _recast(float8: Float8, number: int) -> frozenset[Product]:
    """Inputs that only casts to 8 bits read in backward, as block `number` has them: all that read one must be converted, and
    compute the weight's gradient in 8 bits. MXFP8's casts are kernels of their own, which compilers do not look into."""
    if float8.recipe not in ("tensorwise", "rowwise"):
        return frozenset()
    return frozenset(
        product
        for product, linears in _LINEARS.items()
        if all(any(matches(s, f"layers.{number}.{linear}") for s in float8.converted) for linear in linears)
    )


def _operand_bytes(plan: Plan) -> float:
    match plan.float8.recipe:
        case None:
            return BYTES[plan.fsdp.param_dtype]
        case "mxfp8":
            return 1 + 1 / 32  # a scale of one byte for 32 elements
        case "tensorwise" | "rowwise" | "rowwise_with_gw_hp":
            return 1.0
        case _:
            assert_never(plan.float8.recipe)


def kernels(plan: Plan, program: Program) -> Literal["eager", "compiled", "fused"]:
    """Who decides what blocks keep: as compiled ones with every backend that partitions forward and backward."""
    if program.kernels != "plan":
        return program.kernels
    partitioned = plan.compile.enable and plan.compile.backend not in _KEEP_AS_EAGER
    return "compiled" if partitioned and "model" in plan.compile.components else "eager"


def loss_kernels(plan: Plan, program: Program) -> Literal["eager", "compiled", "fused"]:
    """Whose loss it is that memory is counted of. Composer's, timed as eager, is a kernel (llm-foundry's `fused_crossentropy`)."""
    if program.kernels != "plan":
        return program.kernels
    return "compiled" if fuses(plan) and "loss" in plan.compile.components else "eager"


_KEEP_AS_EAGER = frozenset(
    {"eager", "eager_debug", "eager_noexcept", "pre_dispatch_eager", "aot_eager_default_partitioner", "cudagraphs"}
)
"""Backends that leave autograd's choice, or torch's default partitioner's, which is the same."""

_RUN_OP_BY_OP = _KEEP_AS_EAGER | {
    "aot_eager",
    "aot_eager_decomp_partition",
    "aot_eager_decomp_partition_crossref",
    "aot_eager_decomp_partition_with_mode",
}
"""Backends that generate no code (torch 2.13, torch/_dynamo/backends/debugging.py and cudagraphs.py)."""


def fuses(plan: Plan) -> bool:
    """Whether what the plan compiles becomes kernels that do the work of several ops. Unknown backends are believed to."""
    return plan.compile.enable and plan.compile.backend not in _RUN_OP_BY_OP


def imbalance_of(plan: Plan) -> float:
    """Rows of the busiest expert rank over the mean: what the request expects, 1 where routing is forced even."""
    return 1.0 if plan.expert_parallel.force_load_balance else plan.request.limits.expert_imbalance


def worst_imbalance(moe: Moe, ep: int) -> float:
    """Rows over the mean when every token goes to experts of one rank, as many of them as it has."""
    here = moe.num_experts // ep
    return ep * min(moe.top_k, here) / moe.top_k


def effective_imbalance(plan: Plan, moe: Moe, asked: float) -> float:
    """Rows of the busiest expert rank over the mean of the rows that are sent, where `asked` is what the user expects.

    No rank gets more than its share of the choices (`worst_imbalance`), nor its experts more than the capacity: each at most
    `capacity_factor` times the mean load before any is cut off. A factor below 1 leaves balanced experts full, so that
    nobody exceeds the mean of what is still sent. 1 where every rank has all experts.
    """
    return _bounded(moe, plan.mesh.ep, plan.expert_parallel.capacity_factor, asked)


def _bounded(moe: Moe, ep: int, capacity_factor: float | None, asked: float) -> float:
    if ep == 1:
        return 1.0
    most = worst_imbalance(moe, ep)
    return min(asked, most) if capacity_factor is None else min(asked, most, max(1.0, capacity_factor))


@dataclass(frozen=True, slots=True)
class Heads:
    """Columns of a rank's attention: elements a token of queries, and of keys or values, and query heads."""

    queries: int
    keys: int
    heads: int


@functools.lru_cache(maxsize=1024)
def heads(attention: Attention, local: Local) -> Heads:
    """The columns of the rank that has most. Where KV heads do not simply serve equal groups, they are copied for each query."""
    match attention:
        case Gqa() as gqa:
            mine = gqa.num_heads // local.tp
            held = max(1, gqa.num_kv_heads * local.kv_replicas // local.tp)
            group = gqa.num_heads // gqa.num_kv_heads
            plain = all(
                (rank * mine + query) // group - rank // local.kv_replicas * held == query * held // mine
                for rank in range(local.tp)
                for query in range(mine)
            )
            return Heads(mine * gqa.head_dim, (held if plain else mine) * gqa.head_dim, mine)
        case _:
            assert_never(attention)
