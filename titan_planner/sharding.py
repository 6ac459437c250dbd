"""From logical axes to placements: one table says which axes tensor parallelism shards; rows and local shapes follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from titan_planner.ir.inventory import LogicalAxis, Parameter, feed_forward_name
from titan_planner.ir.model import Attention, FeedForward, Gqa, Mlp, Model, Moe, SwiGlu
from titan_planner.ir.parallel import Mesh, ModuleSharding

TP_AXES: frozenset[LogicalAxis] = frozenset({"vocab", "heads", "kv_heads", "mlp"})
"""Logical axes whose weight dim is sharded over tp; all others are replicated (Megatron-LM, arXiv 1909.08053)."""


def tp_dim(parameter: Parameter) -> int | None:
    """The dim of `parameter` that tp (for an expert: etp) shards, or None when it is replicated."""
    return next((dim for dim, axis in enumerate(parameter.axes) if axis in TP_AXES), None)


def local_shape(parameter: Parameter, mesh: Mesh, kv_replicas: int = 1) -> tuple[int, ...]:
    """Shape on one rank before FSDP shards it, in elements; `kv_replicas` tensor ranks hold the same KV heads.

    Experts are cut over ep, and inside over etp where others are over tp.
    """
    shape = list(parameter.shape)
    dim = tp_dim(parameter)
    if parameter.is_expert:
        shape[0] //= mesh.ep
    if dim is not None:
        parts = mesh.etp if parameter.is_expert else mesh.tp
        shape[dim] //= parts // kv_replicas if parameter.axes[dim] == "kv_heads" else parts
    return tuple(shape)


def tensor_parallel_rows(model: Model, *, sequence_parallel: bool, loss_parallel: bool) -> tuple[ModuleSharding, ...]:
    """Megatron's plan for every kind of module of `model`; activations are [batch, sequence, features]."""
    stream = "S(1)" if sequence_parallel else "R"
    rows = [_row("tok_embeddings", "S(0)", input="R", output="P", output_needed=stream)]
    # A row names the modules of all layers that have them, so layers of several kinds add up.
    for attention in {type(run.block.attention): run.block.attention for run in model.blocks}.values():
        rows += _attention("layers.*.attention", attention, stream)
    rows.insert(1, _row("layers.*.attention_norm", "R", input=stream, output=stream))
    rows.append(_row("layers.*.ffn_norm", "R", input=stream, output=stream))
    for name, feed_forward in _feed_forwards(model).items():
        rows += _feed_forward(f"layers.*.{name}", feed_forward, stream)
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


def expert_rows(model: Model, mesh: Mesh) -> tuple[ModuleSharding, ...]:
    """Placements of the experts' weights over ep (whole experts) and etp (inside an expert, as tp cuts a SwiGLU)."""
    rows: list[ModuleSharding] = []
    if not any(isinstance(run.block.feed_forward, Moe) for run in model.blocks):
        return ()
    for axis, dims in (("ep", {"w1": 0, "w2": 0, "w3": 0}), ("etp", {"w1": 1, "w2": 2, "w3": 1})):
        if mesh.degree(axis) > 1:
            rows += [_expert_row(name, axis, dim) for name, dim in dims.items()]
    return tuple(rows)


def _expert_row(name: str, axis: str, dim: int) -> ModuleSharding:
    assert axis in ("ep", "etp")
    return ModuleSharding(
        module=f"layers.*.moe.experts.{name}",
        axis=axis,  # type: ignore[arg-type]
        weight=f"S({dim})",
        input=None,
        input_needed=None,
        output=None,
        output_needed=None,
    )


def _feed_forwards(model: Model) -> dict[str, FeedForward]:
    """The feed-forward layers by the name that blocks call them, of each name the one with the most parts.

    That is a gated layer before one without a gate, and of a mixture one with shared experts before one without.
    """
    found: dict[str, FeedForward] = {}
    for run in model.blocks:
        layer = run.block.feed_forward
        name = feed_forward_name(layer)
        if name not in found or isinstance(layer, SwiGlu) or (isinstance(layer, Moe) and layer.num_shared_experts):
            found[name] = layer
    return found


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
            yield from _swiglu(name, output="P", output_needed=stream)
        case Mlp():
            yield _row(name, None, input=stream, input_needed="R")
            yield from _two_matrices(name, output="P", output_needed=stream)
        case Moe():
            # Routed and shared parts of every rank are summed once, on leaving the layer.
            yield _row(name, None, input=stream, input_needed="R", output="P", output_needed=stream)
            yield _row(f"{name}.router.gate", "R", input="R", output="R")
            if feed_forward.num_shared_experts:
                yield from _swiglu(f"{name}.shared_experts", output="P", output_needed="P")
        case _:
            assert_never(feed_forward)


def _swiglu(name: str, output: str, output_needed: str) -> Iterator[ModuleSharding]:
    yield from _two_matrices(name, output, output_needed)
    yield _row(f"{name}.w3", "S(0)", input="R", output="S(2)")


def _two_matrices(name: str, output: str, output_needed: str) -> Iterator[ModuleSharding]:
    yield _row(f"{name}.w1", "S(0)", input="R", output="S(2)")
    yield _row(f"{name}.w2", "S(1)", input="S(2)", output=output, output_needed=output_needed)


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
