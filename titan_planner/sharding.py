"""From logical axes to placements: one table says which axes tensor parallelism shards; rows and local shapes follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from titan_planner.ir.inventory import LogicalAxis, Parameter
from titan_planner.ir.model import Attention, FeedForward, Gqa, Model, SwiGlu
from titan_planner.ir.parallel import ModuleSharding

TP_AXES: frozenset[LogicalAxis] = frozenset({"vocab", "heads", "kv_heads", "mlp"})
"""Logical axes whose weight dim is sharded over tp; all others are replicated (Megatron-LM, arXiv 1909.08053)."""


def tp_dim(parameter: Parameter) -> int | None:
    """The dim of `parameter` that tp shards, or None when it is replicated."""
    return next((dim for dim, axis in enumerate(parameter.axes) if axis in TP_AXES), None)


def local_shape(parameter: Parameter, tp: int, kv_replicas: int = 1) -> tuple[int, ...]:
    """Shape on one tensor rank, in elements; `kv_replicas` ranks hold the same KV heads."""
    dim = tp_dim(parameter)
    if dim is None or tp == 1:
        return parameter.shape
    parts = tp // kv_replicas if parameter.axes[dim] == "kv_heads" else tp
    return tuple(size // parts if d == dim else size for d, size in enumerate(parameter.shape))


def tensor_parallel_rows(model: Model, *, sequence_parallel: bool, loss_parallel: bool) -> tuple[ModuleSharding, ...]:
    """Megatron's plan for every kind of module of `model`; activations are [batch, sequence, features]."""
    stream = "S(1)" if sequence_parallel else "R"
    rows = [_row("tok_embeddings", "S(0)", input="R", output="P", output_needed=stream)]
    kinds: dict[tuple[type, type], None] = {
        (type(run.block.attention), type(run.block.feed_forward)): None for run in model.blocks
    }
    assert len(kinds) == 1, "rows are written once for all layers, so the layers must be of one kind"
    block = model.blocks[0].block
    norm = _row("layers.*.attention_norm", "R", input=stream, output=stream)
    rows += [norm, *_attention("layers.*.attention", block.attention, stream)]
    rows += [_row("layers.*.ffn_norm", "R", input=stream, output=stream)]
    rows += list(_feed_forward("layers.*.feed_forward", block.feed_forward, stream))
    rows.append(_row("norm", "R", input=stream, output=stream))
    # Loss parallel leaves the logits sharded over the vocabulary; without it they are gathered.
    rows.append(
        _row(
            "output",
            "S(0)",
            input=stream,
            input_needed="R",
            output="S(2)",
            output_needed="S(2)" if loss_parallel else "R",
        )
    )
    return tuple(rows)


def _attention(name: str, attention: Attention, stream: str) -> Iterator[ModuleSharding]:
    match attention:
        case Gqa():
            yield _row(name, None, input=stream, input_needed="R")
            for projection in ("wq", "wk", "wv"):
                yield _row(f"{name}.{projection}", "S(0)", input="R", output="S(2)")
            yield _row(f"{name}.wo", "S(1)", input="S(2)", output="P", output_needed=stream)
        case _:
            assert_never(attention)


def _feed_forward(name: str, feed_forward: FeedForward, stream: str) -> Iterator[ModuleSharding]:
    match feed_forward:
        case SwiGlu():
            yield _row(name, None, input=stream, input_needed="R")
            yield _row(f"{name}.w1", "S(0)", input="R", output="S(2)")
            yield _row(f"{name}.w2", "S(1)", input="S(2)", output="P", output_needed=stream)
            yield _row(f"{name}.w3", "S(0)", input="R", output="S(2)")
        case _:
            assert_never(feed_forward)


def _row(
    module: str,
    weight: str | None,
    *,
    input: str,
    input_needed: str | None = None,
    output: str | None = None,
    output_needed: str | None = None,
) -> ModuleSharding:
    return ModuleSharding(
        module=module,
        axis="tp",
        weight=weight,
        input=input,
        input_needed=input_needed or input,
        output=output,
        output_needed=output_needed or output,
    )
