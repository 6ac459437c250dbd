"""Every parameter of a model: FQN, global shape, logical axes and initialisation. The built torch module must equal it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, assert_never

from titan_planner.ir.model import Attention, Block, FeedForward, Gqa, Model, SwiGlu

LogicalAxis: TypeAlias = Literal["vocab", "embed", "heads", "kv_heads", "mlp", "norm"]


@dataclass(frozen=True, slots=True)
class Init:
    """How a full parameter is filled: `ones`, or a normal of standard deviation `std` cut at `cut` standard deviations."""

    kind: Literal["ones", "normal"]
    std: float = 0.0
    cut: float = math.inf


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight. `shape` is global (unsharded), in elements; `axes` names what each dim means."""

    fqn: str
    shape: tuple[int, ...]
    axes: tuple[LogicalAxis, ...]
    init: Init

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """FQN of the module that owns the weight."""
        return self.fqn.rsplit(".", 1)[0]


# Llama 3's linear weights are truncated at 2 in *absolute value* in the reference initialisation, which at std 0.02 is
# 100 standard deviations: no truncation in effect. Only the output projection is really cut, at three deviations.
_OUTPUT_CUT = 3.0


@functools.lru_cache(maxsize=16)
def parameters(model: Model) -> tuple[Parameter, ...]:
    """All parameters of `model` in module order. A tied output projection owns none: it reads `tok_embeddings.weight`."""
    found = [
        Parameter("tok_embeddings.weight", (model.vocab_size, model.dim), ("vocab", "embed"), Init("normal", 1.0)),
    ]
    for index, block in enumerate(model.layers()):
        found.extend(_block(f"layers.{index}", index, block, model))
    found.append(Parameter("norm.weight", (model.dim,), ("norm",), Init("ones")))
    if not model.tied:
        output = Init("normal", model.dim**-0.5, _OUTPUT_CUT)
        found.append(Parameter("output.weight", (model.vocab_size, model.dim), ("vocab", "embed"), output))
    return tuple(found)


def _block(prefix: str, index: int, block: Block, model: Model) -> Iterator[Parameter]:
    plain = Init("normal", model.init_std)
    # The residual branches shrink with depth: 0.02 / sqrt(2 (l + 1)), as in TorchTitan's Llama 3.
    deep = Init("normal", model.init_std / math.sqrt(2 * (index + 1)))
    yield from _attention(f"{prefix}.attention", block.attention, model.dim, plain, deep)
    yield from _feed_forward(f"{prefix}.feed_forward", block.feed_forward, model.dim, plain, deep)
    yield Parameter(f"{prefix}.attention_norm.weight", (model.dim,), ("norm",), Init("ones"))
    yield Parameter(f"{prefix}.ffn_norm.weight", (model.dim,), ("norm",), Init("ones"))


def _attention(prefix: str, attention: Attention, dim: int, plain: Init, deep: Init) -> Iterator[Parameter]:
    match attention:
        case Gqa():
            queries = attention.num_heads * attention.head_dim
            keys = attention.num_kv_heads * attention.head_dim
            yield Parameter(f"{prefix}.wq.weight", (queries, dim), ("heads", "embed"), plain)
            yield Parameter(f"{prefix}.wk.weight", (keys, dim), ("kv_heads", "embed"), plain)
            yield Parameter(f"{prefix}.wv.weight", (keys, dim), ("kv_heads", "embed"), plain)
            yield Parameter(f"{prefix}.wo.weight", (dim, queries), ("embed", "heads"), deep)
        case _:
            assert_never(attention)


def _feed_forward(prefix: str, feed_forward: FeedForward, dim: int, plain: Init, deep: Init) -> Iterator[Parameter]:
    match feed_forward:
        case SwiGlu():
            hidden = feed_forward.hidden_dim
            yield Parameter(f"{prefix}.w1.weight", (hidden, dim), ("mlp", "embed"), plain)
            yield Parameter(f"{prefix}.w2.weight", (dim, hidden), ("embed", "mlp"), deep)
            yield Parameter(f"{prefix}.w3.weight", (hidden, dim), ("mlp", "embed"), deep)
        case _:
            assert_never(feed_forward)


@functools.lru_cache(maxsize=16)
def num_params(model: Model) -> int:
    """Number of trained elements; a tied weight counts once."""
    # Equal blocks have equal counts, so one block of each run is enough.
    total = model.vocab_size * model.dim * (1 if model.tied else 2) + model.dim
    for run in model.blocks:
        total += run.repeat * sum(p.numel for p in _block("", 0, run.block, model))
    return total


@functools.lru_cache(maxsize=16)
def muon_parameters(model: Model) -> frozenset[str]:
    """FQNs of the parameters that Muon takes: matrices between hidden states. Embedding, output, norms are AdamW's."""
    return frozenset(p.fqn for p in parameters(model) if len(p.shape) == 2 and "vocab" not in p.axes)


@functools.lru_cache(maxsize=16)
def top_level_modules(model: Model) -> tuple[str, ...]:
    """The modules that pipeline stages are made of, in order: embedding, every block, final norm, output projection."""
    return ("tok_embeddings", *(f"layers.{i}" for i in range(model.num_layers)), "norm", "output")


def linear_modules(model: Model) -> Mapping[str, tuple[int, int]]:
    """Linear layers, FQN -> (N = out features, K = in features), output projection included, in module order."""
    return _linear_modules(model)


@functools.lru_cache(maxsize=16)
def _linear_modules(model: Model) -> Mapping[str, tuple[int, int]]:
    linears: dict[str, tuple[int, int]] = {}
    for parameter in parameters(model):
        if len(parameter.shape) == 2 and parameter.module != "tok_embeddings":
            linears[parameter.module] = (parameter.shape[0], parameter.shape[1])
    if model.tied:
        linears["output"] = (model.vocab_size, model.dim)
    return MappingProxyType(linears)  # cached, so nobody may change it


@functools.lru_cache(maxsize=16)
def module_names(model: Model) -> tuple[str, ...]:
    """Every module FQN that a selector may name, parents before children."""
    names: dict[str, None] = {}
    for parameter in parameters(model):
        parts = parameter.module.split(".")
        for end in range(1, len(parts) + 1):
            names[".".join(parts[:end])] = None
    names["output"] = None
    return tuple(names)
