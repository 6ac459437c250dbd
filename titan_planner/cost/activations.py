"""What a rank keeps for backward: counted tensor by tensor, as the modules of this runtime save them.

Eager blocks save what autograd saves of the modules in `titan_runtime/modules`: of a bfloat16 norm its float32 input and its
float32 result, of SwiGLU all four of its intermediate results, of attention queries, keys, values, result and the float32
log-sums. Compiled blocks save what torch's min-cut partitioner chooses: the memory-bound results are computed again from
their inputs. Fused blocks save what Megatron-LM with Transformer Engine does: like compiled ones, and of a sequence-parallel
norm's result only this rank's part (arXiv 2205.05198, section 4.2.2). tests/contract/test_saved_activations.py holds the
first two against torch.

A schedule that splits backward keeps all of it until the weights' gradients are computed: torch holds the graph until then,
and between the halves the gradients at the results of every product with a weight as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from titan_planner.cost.local import EVERY_PRODUCT, Heads, Local, heads
from titan_planner.ir.execution import CheckpointPolicy
from titan_planner.ir.fqn import matches
from titan_planner.ir.model import Attention, Block, FeedForward, Mlp, Moe, SwiGlu

MATMUL = "aten.mm.default"
REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
ALL_REDUCE = "_c10d_functional.all_reduce.default"
ALL_TO_ALL = "_c10d_functional.all_to_all_single.default"
ALL_GATHER = "_c10d_functional.all_gather_into_tensor.default"
GROUPED_MATMUL = "aten._grouped_mm.default"
SILU = "aten.silu.default"
ATTENTION = {
    "cpu": "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "cuda": "aten._scaled_dot_product_flash_attention.default",
}


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor (or several of a kind) kept for backward, of one microbatch on one rank."""

    what: str
    nbytes: float


@dataclass(frozen=True, slots=True)
class Produced:
    """The result of an op that a selective policy may keep, in the order of the forward pass."""

    op: str
    what: str
    nbytes: float
    shape: tuple[int, int] | None = None  # of a matmul's second operand: (in, out) features
    needed: bool = True  # backward reads it; a compiler drops what is kept in vain


def total(saved: tuple[Saved, ...]) -> float:
    """Bytes of all."""
    return sum(tensor.nbytes for tensor in saved)


# ------------------------------------------------------------------ a block under its policy


@functools.lru_cache(maxsize=4096)
def block_saved(block: Block, local: Local, policy: CheckpointPolicy, number: int = 0) -> tuple[Saved, ...]:
    """What one block keeps of one microbatch under `policy`. `number` is the layer's, for policies that name FQNs."""
    entering = Saved("the block's input", local.stream_bytes)
    match policy.mode:
        case "none":
            return everything(block, local)
        case "full":
            return (entering,)
        case "selective":
            return (entering, *_selected(block, local, policy, number))
        case "memory_budget":
            assert policy.memory_budget is not None
            kept = _within_budget(block, local, policy.memory_budget)
            return (entering, Saved(f"chosen by the compiler within its budget of {policy.memory_budget:g}", kept))
        case _:
            assert_never(policy.mode)


def _within_budget(block: Block, local: Local, budget: float) -> float:
    """Bytes beside the block's input that torch's compiler keeps, whose budget is a part of what lies between full and none.

    Below 1 it first makes again what can be made from what it keeps anyway, the inputs of products above all, whatever part of
    the budget that leaves unused; only if this exceeds the budget it chooses op by op
    (torch/_functorch/partitioners.py, choose_saved_values_set). A backend that does not partition knows no budget.
    """
    most = total(everything(block, local)) - local.stream_bytes
    if local.kernels == "eager":
        return most
    if budget < 1 and local.kernels == "compiled":
        without = total(everything(block, replace(local, recast=EVERY_PRODUCT))) - local.stream_bytes
        if without < budget * most:
            return without
    return budget * max(0.0, most)


@functools.lru_cache(maxsize=4096)
def everything(block: Block, local: Local) -> tuple[Saved, ...]:
    """What one block keeps when nothing is recomputed."""
    match local.kernels:
        case "eager":
            found = _eager(block, local)
        case "compiled":
            found = _compiled(block, local)
        case "fused":
            found = _fused(block, local)
        case _:
            assert_never(local.kernels)
    return (*found, *_dropout_masks(local))


@functools.lru_cache(maxsize=4096)
def backward_working(block: Block, local: Local, policy: CheckpointPolicy, number: int = 0) -> float:
    """Bytes beside `block_saved` while one block runs backward: what is computed again, and gradients in flight."""
    again = 0.0
    if policy.mode != "none":
        again = max(0.0, total(everything(block, local)) - total(block_saved(block, local, policy, number)))
    if local.recompute_attention:
        again += total(tuple(_inside_attention(heads(block.attention, local), local)))
    return again + _gradients_in_flight(block, local)


def _gradients_in_flight(block: Block, local: Local) -> float:
    """The stream's gradient, and the largest of the feed-forward's (of two products and their input), a norm's float32,
    and of materialised attention's scores the gradients after and before the softmax."""
    inside = 2 * _hidden(block.feed_forward, local) + local.tokens * local.dim * local.itemsize
    norm = (3 if local.op_by_op and not local.norm_kernel else 1) * local.stream_tokens * local.dim * 4
    scores = 2 * _scores(heads(block.attention, local), local) * local.itemsize
    return local.stream_bytes + max(inside, norm, scores)


def _scores(columns: Heads, local: Local) -> float:
    """Scores of this rank's queries; none where a kernel keeps them out of memory."""
    return local.tokens * local.seq_len * columns.heads


def _hidden(feed_forward: FeedForward, local: Local) -> float:
    """Bytes of one result between w1/w3 and w2."""
    match feed_forward:
        case SwiGlu(hidden_dim=hidden) | Mlp(hidden_dim=hidden):
            return local.tokens * hidden / local.tp * local.itemsize
        case Moe() as moe:
            routed = local.expert_rows(moe) * moe.hidden_dim / local.etp
            return max(routed, local.tokens * moe.shared_dim / local.tp) * local.itemsize
        case _:
            assert_never(feed_forward)


# ------------------------------------------------------------------ eager


def _eager(block: Block, local: Local) -> Iterator[Saved]:
    columns = heads(block.attention, local)
    yield from norm_saved("attention_norm", local)
    yield from _eager_attention(columns, local)
    yield from norm_saved("ffn_norm", local)
    match block.feed_forward:
        case SwiGlu(hidden_dim=hidden):
            yield Saved("feed_forward: input of w1 and w3", local.tokens * local.dim * local.itemsize)
            yield from _eager_swiglu("feed_forward", local.tokens * hidden / local.tp, local)
        case Mlp(hidden_dim=hidden):
            yield Saved("feed_forward: input of w1", local.tokens * local.dim * local.itemsize)
            yield from _mlp("feed_forward", local.tokens * hidden / local.tp, local)
        case Moe() as moe:
            if moe.num_shared_experts or local.itemsize == 4:
                # In float32 the router's own input is the same tensor.
                yield Saved("moe: tokens", local.tokens * local.dim * local.itemsize)
            yield from _routed(moe, local)
            if moe.num_shared_experts:
                yield from _eager_swiglu("moe.shared_experts", local.tokens * moe.shared_dim / local.tp, local)
        case _:
            assert_never(block.feed_forward)


def norm_saved(name: str, local: Local) -> Iterator[Saved]:
    """An eager RMSNorm, which computes in float32: in bfloat16 its input and weight are copies."""
    if local.norm_kernel:
        yield Saved(f"{name}: input", local.stream_bytes)
        yield Saved(f"{name}: reciprocal roots", local.stream_tokens * 4)
        return
    wide = local.stream_tokens * local.dim * 4
    yield Saved(f"{name}: input in float32", wide)
    yield Saved(f"{name}: reciprocal roots", local.stream_tokens * 4)
    yield Saved(f"{name}: normed input in float32", wide)
    if local.itemsize != 4:
        yield Saved(f"{name}: weight in float32", local.dim * 4)


def _eager_attention(columns: Heads, local: Local) -> Iterator[Saved]:
    tokens, size = local.tokens, local.itemsize
    yield Saved("attention: input of wq, wk and wv", tokens * local.dim * size)
    yield from _attention_core(columns, local)


def _attention_core(columns: Heads, local: Local) -> Iterator[Saved]:
    """Of the attention proper, with wo's input, which is its result."""
    tokens, size = local.tokens, local.itemsize
    if local.query_key_norms:
        yield Saved("attention: queries and keys before their norms", tokens * (columns.queries + columns.keys) * size)
    yield Saved("attention: rotated queries", tokens * columns.queries * size)
    yield Saved("attention: rotated keys", tokens * columns.keys * size)
    yield Saved("attention: values", tokens * columns.keys * size)
    yield Saved("attention: result", tokens * columns.queries * size)
    if not local.recompute_attention:
        yield from _inside_attention(columns, local)
    if local.cp > 1 and local.cp_method == "allgather":
        yield Saved("attention: keys and values of all context ranks", 2 * local.cp * tokens * columns.keys * size)
    if local.cp > 1 and local.cp_method == "alltoall":
        # Queries, keys and values are kept after the exchange, and the result on both sides of it.
        yield Saved("attention: result after the exchange", tokens * columns.queries * size)


def _inside_attention(columns: Heads, local: Local) -> Iterator[Saved]:
    """What lies between queries, keys and values, and the result: of all scores the softmax, and dropout's mask and result
    (arXiv 2205.05198, section 4.1: 5 bytes a score in 16 bits), or only a kernel's sums."""
    scores = _scores(columns, local)
    if not scores:
        yield Saved("attention: log-sums in float32", local.tokens * columns.heads * 4)
        return
    yield Saved("attention: softmax of the scores", scores * local.itemsize)
    if local.dropout:
        yield Saved("attention: mask of the scores' dropout", scores)
        yield Saved("attention: scores after dropout", scores * local.itemsize)


def _dropout_masks(local: Local) -> Iterator[Saved]:
    if local.dropout:
        for name in ("attention", "feed_forward"):
            yield Saved(f"{name}: mask of dropout", local.stream_tokens * local.dim)


def _eager_swiglu(name: str, hidden: float, local: Local) -> Iterator[Saved]:
    for what in ("w1's result", "w3's result", "silu of w1's", "input of w2"):
        yield Saved(f"{name}: {what}", hidden * local.itemsize)


def _mlp(name: str, hidden: float, local: Local, operand: float | None = None) -> Iterator[Saved]:
    """Without a gate: what the activation's backward reads (its argument, or relu's result), and w2's input."""
    yield Saved(f"{name}: argument of the activation", hidden * local.itemsize)
    yield Saved(f"{name}: input of w2", hidden * (local.itemsize if operand is None else operand))


def _routed(moe: Moe, local: Local) -> Iterator[Saved]:
    """Router and routed experts, which run eager in a compiled block too: their shapes depend on the data."""
    tokens, sent, rows = local.routing_tokens, local.sent_rows(moe), local.expert_rows(moe)
    dim, size = local.dim, local.itemsize
    choices = tokens * moe.top_k
    if size != 4:
        yield Saved("moe.router: tokens in float32", tokens * dim * 4)
        yield Saved("moe.router: weight in float32", moe.num_experts * dim * 4)
    yield Saved("moe.router: scores of all experts", tokens * moe.num_experts * 4)
    yield Saved("moe.router: choices", choices * 8)
    if moe.route_norm:
        yield Saved("moe.router: chosen scores and their sums", choices * 4 + tokens * 4)
    yield Saved("moe: where rows come from and go to", 2 * sent * 8)
    if moe.score_before_experts:
        yield Saved("moe: rows in float32", sent * dim * 4)
        yield Saved("moe: scores of rows", sent * 4)
    else:
        yield Saved("moe: results in float32", choices * dim * 4)
        yield Saved("moe: final scores", choices * 4)
    # Putting results in place keeps them: index_copy's backward asks for its source's shape, and torch saves all of it.
    yield Saved("moe: results by expert", sent * dim * size)
    if local.ep > 1:
        yield Saved("moe: order and results of arrived rows", rows * (8 + dim * size))
    yield Saved("moe.experts: rows", rows * dim * size)
    yield from _eager_swiglu("moe.experts", rows * moe.hidden_dim / local.etp, local)
    yield Saved("moe.experts: ends of the experts' rows", moe.num_experts / local.ep * 4)


# ------------------------------------------------------------------ compiled


def _compiled(block: Block, local: Local) -> Iterator[Saved]:
    columns = heads(block.attention, local)
    stream, size, tokens = local.stream_bytes, local.itemsize, local.tokens
    # What only casts to 8 bits read is made again, unless it was gathered.
    recast = local.recast if not local.sequence_parallel else local.recast & {"w2"}
    operand = 0.0 if "w2" in recast else float(size)
    yield Saved("the block's input", stream)
    yield Saved("attention_norm: reciprocal roots", local.stream_tokens * 4)
    if "attention" not in recast:
        yield Saved("attention: input of wq, wk and wv", tokens * local.dim * size)
    yield from _attention_core(columns, local)
    # The sum after attention is computed again from this and the block's input; a mixture's norm saves the sum itself.
    yield Saved("attention's contribution to the stream", stream)
    yield Saved("ffn_norm: reciprocal roots", local.stream_tokens * 4)
    match block.feed_forward:
        case SwiGlu(hidden_dim=hidden):
            if "feed_forward" not in recast:
                yield Saved("feed_forward: input of w1 and w3", tokens * local.dim * size)
            yield from _compiled_swiglu("feed_forward", tokens * hidden / local.tp, local, operand)
        case Mlp(hidden_dim=hidden):
            yield Saved("feed_forward: input of w1", tokens * local.dim * size)
            yield from _mlp("feed_forward", tokens * hidden / local.tp, local, operand)
        case Moe() as moe:
            if moe.num_shared_experts or size == 4:
                yield Saved("moe: tokens", tokens * local.dim * size)
            yield from _routed(moe, local)
            if moe.num_shared_experts:
                yield from _compiled_swiglu("moe.shared_experts", tokens * moe.shared_dim / local.tp, local)
        case _:
            assert_never(block.feed_forward)


def _compiled_swiglu(name: str, hidden: float, local: Local, operand: float | None = None) -> Iterator[Saved]:
    for what in ("w1's result", "w3's result"):
        yield Saved(f"{name}: {what}", hidden * local.itemsize)
    yield Saved(f"{name}: input of w2", hidden * (local.itemsize if operand is None else operand))


# ------------------------------------------------------------------ fused


def _fused(block: Block, local: Local) -> Iterator[Saved]:
    """Norms keep their input and their result as this rank holds it; a matmul gathers its input again in backward.

    In 8 bits a product's input is kept as it was cast (Transformer Engine, pytorch/module/linear.py), beside the result of
    attention, which attention's own backward reads.
    """
    operand = local.operand_bytes
    columns = heads(block.attention, local)
    for name in ("attention_norm", "ffn_norm"):
        yield Saved(f"{name}: input", local.stream_bytes)
        yield Saved(f"{name}: result, input of the matmuls", local.stream_tokens * local.dim * operand)
        yield Saved(f"{name}: reciprocal roots", local.stream_tokens * 4)
    yield from _attention_core(columns, local)
    if operand < local.itemsize:
        yield Saved("attention: input of wo in 8 bits", local.tokens * columns.queries * operand)
    match block.feed_forward:
        case SwiGlu(hidden_dim=hidden):
            yield from _compiled_swiglu("feed_forward", local.tokens * hidden / local.tp, local, operand)
        case Mlp(hidden_dim=hidden):
            yield from _mlp("feed_forward", local.tokens * hidden / local.tp, local, operand)
        case Moe() as moe:
            rows, sent = local.expert_rows(moe), local.sent_rows(moe)
            yield Saved("moe.router: scores and choices", local.routing_tokens * (moe.num_experts * 8 + moe.top_k * 12))
            yield Saved("moe.experts: rows", rows * local.dim * operand)
            yield Saved("moe.experts: results", sent * local.dim * local.itemsize)
            yield from _compiled_swiglu("moe.experts", rows * moe.hidden_dim / local.etp, local, operand)
            if moe.num_shared_experts:
                yield from _compiled_swiglu(
                    "moe.shared_experts", local.tokens * moe.shared_dim / local.tp, local, operand
                )
        case _:
            assert_never(block.feed_forward)


# ------------------------------------------------------------------ selective


def _selected(block: Block, local: Local, policy: CheckpointPolicy, number: int) -> Iterator[Saved]:
    """The results that `policy` keeps, by the rule of titan_runtime/apply/checkpointing.py."""
    recomputed = forced_shapes(block, local, policy, number)
    compiled = local.kernels != "eager"
    matmuls = 0
    for result in produced(block, local):
        if result.op == MATMUL:
            if result.shape in recomputed:
                continue
            matmuls += 1
            if policy.recompute_every_second_matmul and matmuls % 2 == 0:
                continue
        if result.op in policy.save_ops and (result.needed or not compiled):
            yield Saved(result.what, result.nbytes)


def forced_shapes(block: Block, local: Local, policy: CheckpointPolicy, number: int) -> frozenset[tuple[int, int]]:
    """(in, out) features on this rank of the linears whose matmuls are always computed again."""
    if not policy.force_recompute_fqns:
        return frozenset()
    return frozenset(
        result.shape
        for result in produced(block, local)
        if result.shape is not None
        and any(matches(s, f"layers.{number}.{result.what.split(':')[0]}") for s in policy.force_recompute_fqns)
    )


@functools.lru_cache(maxsize=4096)
def produced(block: Block, local: Local) -> tuple[Produced, ...]:
    """Results that policies are known to keep, in the order of the forward pass: matmuls, attention, collectives, silu."""
    return (*_attention_produced(block.attention, local), *_feed_forward_produced(block.feed_forward, local))


@functools.lru_cache(maxsize=4096)
def weight_gradient_inputs(block: Block, local: Local) -> float:
    """Bytes of the gradients at the results of all products with weights: a split backward holds them from `I` to `W`."""
    return sum(result.nbytes for result in produced(block, local) if result.op in (MATMUL, GROUPED_MATMUL))


def _attention_produced(attention: Attention, local: Local) -> Iterator[Produced]:
    columns, tokens, size, dim = heads(attention, local), local.tokens, local.itemsize, local.dim
    if local.sequence_parallel:
        yield Produced(ALL_GATHER, "attention: gathered input", tokens * dim * size)
    # KV heads are copied for the queries that they serve after the product.
    keys = columns.keys
    for name, out in (("wq", columns.queries), ("wk", keys), ("wv", keys)):
        yield Produced(MATMUL, f"attention.{name}: result", tokens * out * size, (dim, out))
    op = ATTENTION[local.device]
    result, sums = tokens * columns.queries * size, tokens * columns.heads * 4
    pair = 2 * tokens * keys * size
    match local.cp_method if local.cp > 1 else None:
        case None:
            pass
        case "allgather":
            yield Produced(ALL_GATHER, "attention: keys and values of all context ranks", local.cp * pair)
        case "ring":
            for step in range(1, local.cp):
                yield Produced(ALL_TO_ALL, f"attention: keys and values that arrive in step {step}", pair)
        case "alltoall":
            yield Produced(ALL_TO_ALL, "attention: queries, keys and values after the exchange", result + pair)
        case _:
            assert_never(local.cp_method)
    for share in _attention_calls(local):
        yield Produced(op, "attention: result and log-sums", share * (result + sums))
    if local.cp > 1 and local.cp_method == "alltoall":
        yield Produced(ALL_TO_ALL, "attention: result after the exchange", result)
    yield Produced(MATMUL, "attention.wo: result", tokens * dim * size, (columns.queries, dim), needed=local.tp == 1)
    yield from _leaving("attention", local, needed=True)


def _attention_calls(local: Local) -> tuple[float, ...]:
    """Calls of the attention op and the part of this rank's queries in each, on the context rank with most of them.

    See `Share.pieces` of titan_runtime/attention/share.py: besides its own keys a rank's queries meet those of each other
    rank (ring), or one or two stretches of all (allgather).
    """
    if local.cp == 1 or local.cp_method == "alltoall":
        return (1.0,)
    if local.cp_method == "ring":
        return (1.0,) * local.cp
    return (1.0, 1.0, 0.5) if local.cp_chunks == 2 and local.cp > 2 else (1.0, 1.0)


def _feed_forward_produced(feed_forward: FeedForward, local: Local) -> Iterator[Produced]:
    name = "moe" if isinstance(feed_forward, Moe) else "feed_forward"
    if local.sequence_parallel:
        yield Produced(ALL_GATHER, f"{name}: gathered input", local.tokens * local.dim * local.itemsize)
    match feed_forward:
        case SwiGlu(hidden_dim=hidden):
            yield from _swiglu_produced(name, hidden // local.tp, local)
        case Mlp(hidden_dim=hidden):
            inside, dim, size = hidden // local.tp, local.dim, local.itemsize
            yield Produced(MATMUL, f"{name}.w1: result", local.tokens * inside * size, (dim, inside))
            yield Produced(MATMUL, f"{name}.w2: result", local.tokens * dim * size, (inside, dim), needed=False)
        case Moe() as moe:
            yield from _routed_produced(moe, local)
            if moe.num_shared_experts:
                yield from _swiglu_produced("moe.shared_experts", moe.shared_dim // local.tp, local)
        case _:
            assert_never(feed_forward)
    yield from _leaving(name, local, needed=False)


def _swiglu_produced(name: str, hidden: int, local: Local) -> Iterator[Produced]:
    tokens, size, dim = local.tokens, local.itemsize, local.dim
    yield Produced(MATMUL, f"{name}.w1: result", tokens * hidden * size, (dim, hidden))
    yield Produced(SILU, f"{name}: silu of w1's", tokens * hidden * size)
    yield Produced(MATMUL, f"{name}.w3: result", tokens * hidden * size, (dim, hidden))
    yield Produced(MATMUL, f"{name}.w2: result", tokens * dim * size, (hidden, dim), needed=False)


def _routed_produced(moe: Moe, local: Local) -> Iterator[Produced]:
    tokens, rows, dim, size = local.routing_tokens, local.expert_rows(moe), local.dim, local.itemsize
    sent, hidden = local.sent_rows(moe), moe.hidden_dim // local.etp
    yield Produced(MATMUL, "moe.router.gate: result", tokens * moe.num_experts * 4, (dim, moe.num_experts))
    if local.ep > 1:
        yield Produced(ALL_TO_ALL, "moe: how many rows arrive", moe.num_experts * 8)
        yield Produced(ALL_TO_ALL, "moe: arrived rows", rows * dim * size)
    yield Produced(GROUPED_MATMUL, "moe.experts.w1: result", rows * hidden * size)
    yield Produced(SILU, "moe.experts: silu of w1's", rows * hidden * size)
    yield Produced(GROUPED_MATMUL, "moe.experts.w3: result", rows * hidden * size)
    yield Produced(GROUPED_MATMUL, "moe.experts.w2: result", rows * dim * size)
    if local.ep > 1:
        yield Produced(ALL_TO_ALL, "moe: rows that are back", sent * dim * size)


def _leaving(name: str, local: Local, *, needed: bool) -> Iterator[Produced]:
    if local.sequence_parallel:
        yield Produced(REDUCE_SCATTER, f"{name}: part of the sum", local.stream_bytes, needed=needed)
    elif local.tp > 1:
        yield Produced(ALL_REDUCE, f"{name}: sum", local.stream_bytes, needed=needed)


# ------------------------------------------------------------------ around the blocks


@functools.lru_cache(maxsize=1024)
def embedding_saved(local: Local) -> tuple[Saved, ...]:
    """Nothing but the batch itself, and under tensor parallelism the rows looked up here (int64) and which are elsewhere."""
    rows = () if local.tp == 1 else (Saved("tok_embeddings: rows and mask", local.tokens * 9),)
    mask = (Saved("tok_embeddings: mask of dropout", local.stream_tokens * local.dim),) if local.dropout else ()
    return (*rows, *mask)


@functools.lru_cache(maxsize=1024)
def final_norm_saved(local: Local) -> tuple[Saved, ...]:
    """The final norm, which is never compiled."""
    if local.kernels == "fused":
        return (Saved("norm: input", local.stream_bytes), Saved("norm: reciprocal roots", local.stream_tokens * 4))
    return tuple(norm_saved("norm", local))


@functools.lru_cache(maxsize=1024)
def output_saved(local: Local) -> tuple[Saved, ...]:
    """The output projection's input, gathered; a fused one gathers it again."""
    tokens = local.stream_tokens if local.kernels == "fused" else local.tokens
    return (Saved("output: input", tokens * local.dim * local.itemsize),)
