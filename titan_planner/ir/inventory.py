"""Every parameter of a model: FQN, global shape, logical axes and initialisation. The built torch module must equal it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, assert_never

from titan_planner.ir.model import Attention, Block, FeedForward, Gqa, Mlp, Model, Moe, SwiGlu
from titan_planner.ir.parallel import Mesh

LogicalAxis: TypeAlias = Literal["vocab", "embed", "heads", "kv_heads", "mlp", "norm", "experts", "router"]


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

    @property
    def target(self) -> str:
        """What a sharding row calls it: its module, or the weight itself where a module holds several (experts)."""
        return self.fqn.removesuffix(".weight")

    @property
    def is_expert(self) -> bool:
        """Whether it stacks the weights of all routed experts of a layer."""
        return self.axes[0] == "experts"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor that is state of the run but not trained: float32, equal on all ranks, saved in checkpoints."""

    fqn: str
    shape: tuple[int, ...]


# Llama 3's linear weights are truncated at 2 in *absolute value* in the reference initialisation, which at std 0.02 is
# 100 standard deviations: no truncation in effect. Only the output projection is really cut, at three deviations.
_OUTPUT_CUT = 3.0


@functools.lru_cache(maxsize=16)
def parameters(model: Model) -> tuple[Parameter, ...]:
    """All parameters of `model` in module order. A tied output projection owns none: it reads `tok_embeddings.weight`."""
    output = Init("normal", model.dim**-0.5, _OUTPUT_CUT)
    # A tied weight is the output projection too, and logits of weights of deviation 1 would be sqrt(dim) times too large.
    embedding = output if model.tied else Init("normal", 1.0)
    found = [Parameter("tok_embeddings.weight", (model.vocab_size, model.dim), ("vocab", "embed"), embedding)]
    for index, block in enumerate(model.layers()):
        found.extend(_block(f"layers.{index}", index, block, model))
    found.append(Parameter("norm.weight", (model.dim,), ("norm",), Init("ones")))
    if not model.tied:
        found.append(Parameter("output.weight", (model.vocab_size, model.dim), ("vocab", "embed"), output))
    return tuple(found)


def _block(prefix: str, index: int, block: Block, model: Model) -> Iterator[Parameter]:
    plain = Init("normal", model.init_std)
    # The residual branches shrink with depth: 0.02 / sqrt(2 (l + 1)), as in TorchTitan's Llama 3.
    deep = Init("normal", model.init_std / math.sqrt(2 * (index + 1)))
    yield from _attention(f"{prefix}.attention", block.attention, model.dim, plain, deep)
    yield from _feed_forward(prefix, block.feed_forward, model.dim, plain, deep)
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


def feed_forward_name(feed_forward: FeedForward) -> str:
    """What a block calls its feed-forward layer."""
    match feed_forward:
        case SwiGlu() | Mlp():
            return "feed_forward"
        case Moe():
            return "moe"
        case _:
            assert_never(feed_forward)


def _feed_forward(block: str, feed_forward: FeedForward, dim: int, plain: Init, deep: Init) -> Iterator[Parameter]:
    prefix = f"{block}.{feed_forward_name(feed_forward)}"
    match feed_forward:
        case SwiGlu():
            yield from _swiglu(prefix, feed_forward.hidden_dim, dim, plain, deep)
        case Mlp(hidden_dim=hidden):
            yield Parameter(f"{prefix}.w1.weight", (hidden, dim), ("mlp", "embed"), plain)
            yield Parameter(f"{prefix}.w2.weight", (dim, hidden), ("embed", "mlp"), deep)
        case Moe():
            count, hidden = feed_forward.num_experts, feed_forward.hidden_dim
            yield Parameter(f"{prefix}.router.gate.weight", (count, dim), ("router", "embed"), deep)
            yield Parameter(f"{prefix}.experts.w1", (count, hidden, dim), ("experts", "mlp", "embed"), plain)
            yield Parameter(f"{prefix}.experts.w2", (count, dim, hidden), ("experts", "embed", "mlp"), deep)
            yield Parameter(f"{prefix}.experts.w3", (count, hidden, dim), ("experts", "mlp", "embed"), deep)
            if feed_forward.num_shared_experts:
                yield from _swiglu(f"{prefix}.shared_experts", feed_forward.shared_dim, dim, plain, deep)
        case _:
            assert_never(feed_forward)


def _swiglu(prefix: str, hidden: int, dim: int, plain: Init, deep: Init) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}.w1.weight", (hidden, dim), ("mlp", "embed"), plain)
    yield Parameter(f"{prefix}.w2.weight", (dim, hidden), ("embed", "mlp"), deep)
    yield Parameter(f"{prefix}.w3.weight", (hidden, dim), ("mlp", "embed"), deep)


@functools.lru_cache(maxsize=16)
def buffers(model: Model) -> tuple[Buffer, ...]:
    """All tensors of `model` that a checkpoint holds beside the parameters, in module order."""
    found = []
    for index, block in enumerate(model.layers()):
        match block.feed_forward:
            case Moe(load_balance_coeff=float()) as moe:
                found.append(Buffer(f"layers.{index}.moe.expert_bias", (moe.num_experts,)))
            case Moe() | Mlp() | SwiGlu():
                pass
            case _:
                assert_never(block.feed_forward)
    return tuple(found)


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
    """FQNs of the parameters that Muon takes: matrices between hidden states, those of experts stacked.

    Embedding, output, routers and norms are AdamW's.
    """
    return frozenset(
        p.fqn for p in parameters(model) if len(p.shape) >= 2 and "vocab" not in p.axes and not is_router(p.module)
    )


@functools.lru_cache(maxsize=16)
def num_active_params(model: Model) -> int:
    """Trained elements that one token meets: of the routed experts only the `top_k` that it goes to."""
    idle = 0
    for run in model.blocks:
        match run.block.feed_forward:
            case Moe() as moe:
                idle += run.repeat * (moe.num_experts - moe.top_k) * 3 * moe.hidden_dim * model.dim
            case SwiGlu() | Mlp():
                pass
            case _:
                assert_never(run.block.feed_forward)
    return num_params(model) - idle


@functools.lru_cache(maxsize=16)
def top_level_modules(model: Model) -> tuple[str, ...]:
    """The modules that pipeline stages are made of, in order: embedding, every block, final norm, output projection."""
    return ("tok_embeddings", *(f"layers.{i}" for i in range(model.num_layers)), "norm", "output")


def linear_modules(model: Model) -> Mapping[str, tuple[int, int]]:
    """Linear layers, FQN -> (N = out features, K = in features), output projection included, in module order.

    Routed experts are not among them: they are stacks of weights that one grouped product takes.
    """
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
def expert_modules(model: Model) -> Mapping[str, tuple[int, int]]:
    """Modules of stacked experts, FQN -> (elements inside an expert, width of the residual stream), in module order."""
    return MappingProxyType(
        {p.module: (p.shape[1], p.shape[2]) for p in parameters(model) if p.is_expert and p.axes[1] == "mlp"}
    )


def fsdp_dim(parameter: Parameter, mesh: Mesh) -> int:
    """The dim of `parameter` that FSDP shards: 0, but of stacked experts that are too few to share out, the next one.

    Sharded by whole experts, ranks beyond their number would hold nothing while the others hold too much.
    """
    if not parameter.is_expert or (parameter.shape[0] // mesh.ep) % mesh.efsdp == 0:
        return 0
    inner = parameter.shape[1] // (mesh.etp if parameter.axes[1] == "mlp" else 1)
    return 1 if inner % mesh.efsdp == 0 else 0  # torch shards dims other than 0 evenly only


def is_router(fqn: str) -> bool:
    """Whether the linear `fqn` is a router's, which computes in float32 whatever the rest does."""
    return fqn.endswith(".router.gate")


@functools.lru_cache(maxsize=16)
def sharding_targets(model: Model) -> Mapping[str, int]:
    """What sharding rows may name -> number of dims of its weight, 0 for a module that owns none, in module order."""
    found = dict.fromkeys(module_names(model), 0)
    found.update({parameter.target: len(parameter.shape) for parameter in parameters(model)})
    if model.tied:
        found["output"] = 2  # it owns no parameter, and still has a weight
    return MappingProxyType(found)


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
