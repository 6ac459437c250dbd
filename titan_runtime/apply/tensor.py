"""Tensor parallelism: every rank of the tp axis holds a part of each weight matrix and computes its part of each activation.

The plan's rows say all of it: which dim of a weight is cut, in which layout an activation arrives at a module, is computed
with, results and is handed on. A row is applied by giving the module a class of its own that changes the layout on the way in
and on the way out, and that computes with this rank's part of the weight. What flows between modules is plain tensors; the
parameters are DTensors, so that data parallelism, the gradient norm and checkpoints know which part of what they are.

Layouts, all of [batch, sequence, features]: with sequence parallel the residual stream is `S(1)`, and every norm works on its
part of the sequence; attention and feed-forward gather it, and their sums over ranks are scattered along the sequence again.
Without it the stream is `R`, the same on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from titan_planner.ir.fqn import matches
from titan_planner.ir.inventory import parameters
from titan_planner.ir.model import Attention, Gqa
from titan_planner.ir.parallel import ModuleSharding
from titan_planner.ir.plan import Plan
from titan_runtime.collectives import (
    GatherForPartial,
    GatherForReplicated,
    Ranks,
    Scatter,
    Sum,
    SumGradient,
    ranks_of,
)
from titan_runtime.errors import RunError
from titan_runtime.modules.moe import MixtureOfExperts
from titan_runtime.modules.output import Loss, OutputProjection
from titan_runtime.modules.rms_norm import RMSNorm

Move = Callable[[Tensor], Tensor]
"""Takes an activation from one layout to another."""


def apply_tensor(module: nn.Module, plan: Plan, world: DeviceMesh) -> None:
    """Shard `module` (a whole model, or some stage's modules) in place over `world["tp"]` as the plan's rows say.

    Its parameters must be whole and on the meta device. FQNs stay as they are. Raises RunError for rows that do not fit
    together. Collective.
    """
    if plan.mesh.tp == 1:
        return
    _require_even_sequence(plan)
    tp = _Axis(plan, world)
    rows = dict(_rows_of(module, plan))
    for fqn, row in rows.items():
        around = [rows[fqn[:at]] for at in range(len(fqn)) if fqn[at] == "." and fqn[:at] in rows]
        inside = bool(around)
        part = module.get_submodule(fqn)
        _require_layouts(plan, part, fqn, row, inside, summed_outside=any(outer.output == "P" for outer in around))
        _shard(part, fqn, row, inside, tp)
    for fqn, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            raise RunError(
                f"sharding: no row for the axis `tp` says where the weight `{fqn}` lies",
                hint="add one, or compile the plan anew",
            )
    if plan.tensor_parallel.async_tp:
        _overlap(tp.ranks, world.device_type)


# ------------------------------------------------------------------ what a module becomes


class _Moving(nn.Module):
    """Changes the layout of the input on the way in, and of the result on the way out."""

    enter: Move | None
    leave: Move | None

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = super().forward(x if self.enter is None else self.enter(x), *args)
        return x if self.leave is None else self.leave(x)


class _HoldingAPart(nn.Module):
    """Computes with this rank's part of `weight`.

    The parameter itself stays a DTensor, which is what optimizers, checkpoints and data parallelism find among the
    module's parameters. Its gradient is complete: `sum_gradient` names the ranks that hold the same part and use it for
    something else each.
    """

    mesh: DeviceMesh
    sum_gradient: Ranks | None
    held: Tensor | None = None
    """The part, while `taken_weights` has taken it; else it is taken anew for every use."""

    @property
    def weight(self) -> Tensor:
        if self.held is not None:
            return self.held
        parameter = self._parameters["weight"]
        assert isinstance(parameter, DTensor)
        if parameter.device_mesh != self.mesh:
            return parameter  # data parallelism has it, cut further: nothing is computed with it now
        part = parameter.to_local()
        return part if self.sum_gradient is None else SumGradient.apply(part, self.sum_gradient)


def holds_parts(module: nn.Module) -> bool:
    """Whether anything in `module` computes with a part of its weight."""
    return any(isinstance(part, _HoldingAPart) for part in module.modules())


@contextmanager
def taken_weights(module: nn.Module) -> Iterator[None]:
    """Take the parts of all weights in `module` now, so that what runs within meets no DTensor."""
    holding = [part for part in module.modules() if isinstance(part, _HoldingAPart)]
    for part in holding:
        part.__dict__["held"] = part.weight
    try:
        yield
    finally:
        for part in holding:
            del part.__dict__["held"]


class _PartOfEmbedding(_HoldingAPart):
    """Looks up the tokens that this rank's rows of the table are for; all others are zero."""

    leave: Move | None
    rank: int

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = tokens - self.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = super().forward(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return found if self.leave is None else self.leave(found)


class _PartOfOutput(_HoldingAPart):
    """Logits of this rank's part of the vocabulary. They leave chunk by chunk, so that they never exist all at once."""

    enter: Move | None
    leave: Move | None

    def forward(self, x: Tensor, labels: Tensor | None = None, loss: Loss | None = None, chunks: int = 1) -> Tensor:
        return super().forward(x if self.enter is None else self.enter(x), labels, loss, chunks)

    def logits(self, x: Tensor) -> Tensor:
        found = super().logits(x)
        return found if self.leave is None else self.leave(found)


class _PartOfLinear(_Moving, _HoldingAPart):
    """A linear layer of which this rank holds some of the rows or of the columns."""


class _ReplicatedNorm(_HoldingAPart):
    """A norm whose weight all ranks hold; each may work on its own part of the sequence."""


@functools.cache
def _joined(first: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    # One class for all modules of a kind: the compiler then compiles equal blocks once.
    return type(f"{first.__name__.lstrip('_')}{kind.__name__}", (first, kind), {"__module__": __name__})


# ------------------------------------------------------------------ applying a row


class _Axis:
    """The tp axis of this run and what belongs to it."""

    def __init__(self, plan: Plan, world: DeviceMesh) -> None:
        self.size = plan.mesh.tp
        self.replicas = plan.tensor_parallel.kv_replicas
        self.mesh = world["tp"]
        self.ranks = replace(ranks_of(self.mesh), overlapped=plan.tensor_parallel.async_tp)
        self.kv_heads = frozenset(p.module for p in parameters(plan.model) if p.axes[0] == "kv_heads")
        self.attentions = tuple(block.attention for block in plan.model.layers())
        # A KV head on several ranks: the axis seen as shards x replicas. Neighbours hold the same head, for neighbours
        # have the query heads that it serves.
        self.kv_mesh = self.kv_ranks = None
        if self.replicas > 1:
            shards = self.size // self.replicas
            self.kv_mesh = self.mesh._unflatten(0, (shards, self.replicas), ("tp_kv_shard", "tp_kv_replica"))
            self.kv_ranks = ranks_of(self.kv_mesh["tp_kv_replica"])
        self.done: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight is cut once

    def holds_kv_heads(self, fqn: str) -> bool:
        """Whether several ranks hold the same part of the module's weight."""
        return self.replicas > 1 and fqn in self.kv_heads

    def cut(self, fqn: str, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        """The whole `parameter` as a DTensor cut along `dim`, None for the same on all ranks. No memory is touched."""
        if parameter in self.done:
            return self.done[parameter]
        mesh, placements, parts = self.mesh, (_placement(dim),), self.size
        if self.holds_kv_heads(fqn):
            assert self.kv_mesh is not None
            mesh, placements, parts = self.kv_mesh, (_placement(dim), Replicate()), self.size // self.replicas
        shape = list(parameter.shape)
        if dim is not None:
            if shape[dim] % parts:
                raise RunError(
                    f"sharding: `{fqn}` has {shape[dim]} elements along dim {dim}, "
                    f"which cannot be shared evenly by {parts} ranks",
                    hint="use a mesh.tp that divides it",
                )
            shape[dim] //= parts
        # Of the parameter's own type: a weight that FSDP sends in Float8 stays one that it sends in Float8.
        local = parameter.detach().new_zeros(shape)
        whole = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        self.done[parameter] = nn.Parameter(whole)
        return self.done[parameter]


def _placement(dim: int | None) -> Placement:
    return Replicate() if dim is None else Shard(dim)


def _shard(part: nn.Module, fqn: str, row: ModuleSharding, inside: bool, tp: _Axis) -> None:
    """Make `part` what its row says. `inside` says that another row's module around it brings the input and sums its
    gradient."""
    enter = None if inside else _way_in(row, tp.ranks)
    leave = _way_out(row, tp.ranks)
    match part, row.weight:
        case OutputProjection(), "S(0)":
            _become(part, _PartOfOutput, enter=enter, leave=leave)
            _hold(part, fqn, 0, tp)
        case nn.Linear(), "S(0)":
            if tp.holds_kv_heads(fqn):
                leave = _serve_queries(fqn, tp)
            _become(part, _PartOfLinear, enter=enter, leave=leave)
            _hold(part, fqn, 0, tp)
        case nn.Linear(), "S(1)":
            _become(part, _PartOfLinear, enter=None, leave=leave)
            _hold(part, fqn, 1, tp)
        case nn.Embedding(), "S(0)":
            _become(part, _PartOfEmbedding, leave=leave, rank=tp.ranks.rank)
            _hold(part, fqn, 0, tp)
        case RMSNorm(), "R":
            _become(part, _ReplicatedNorm)
            # On a part of the sequence each rank computes a part of the weight's gradient.
            _hold(part, fqn, None, tp, sum_gradient=tp.ranks if row.input_needed == "S(1)" else None)
        case nn.Linear(), "R":
            # A router: each rank routes a part of the tokens, or has a part of what its choices lead to.
            _become(part, _PartOfLinear, enter=None, leave=None)
            _hold(part, fqn, None, tp, sum_gradient=tp.ranks)
        case _:
            _become(part, _Moving, enter=enter, leave=leave)


def _become(part: nn.Module, first: type[nn.Module], **values: Any) -> None:
    part.__class__ = _joined(first, type(part))
    for name, value in values.items():
        setattr(part, name, value)


def _hold(part: nn.Module, fqn: str, dim: int | None, tp: _Axis, sum_gradient: Ranks | None = None) -> None:
    if set(part._parameters) - {"weight", "bias"} or part._parameters.get("bias") is not None:
        raise RunError(
            f"sharding: `{fqn}` has parameters other than a weight, which tensor parallelism cannot place yet"
        )
    weight = part._parameters["weight"]
    assert weight is not None
    made = tp.cut(fqn, weight, dim)
    if made.placements[0] != _placement(dim):
        raise RunError(f"sharding: `{fqn}` shares its weight with a module whose row cuts it otherwise")
    part._parameters["weight"] = made
    part.mesh = made.device_mesh  # type: ignore[assignment]
    part.sum_gradient = tp.kv_ranks if tp.holds_kv_heads(fqn) else sum_gradient  # type: ignore[assignment]


def _way_in(row: ModuleSharding, ranks: Ranks) -> Move | None:
    """What brings the input of a module in which ranks go different ways, so that its gradient comes back as a sum."""
    if row.weight == "R":
        return None
    match row.input, row.input_needed:
        case "S(1)", "R":
            return lambda x: GatherForPartial.apply(x, 1, ranks)
        case "R", "R":
            return lambda x: SumGradient.apply(x, ranks)
        case _:
            return None


def _way_out(row: ModuleSharding, ranks: Ranks) -> Move | None:
    """What hands the result on."""
    match row.output, row.output_needed:
        case "P", "R":
            return lambda x: Sum.apply(x, ranks)
        case "P", "S(1)":
            return lambda x: Scatter.apply(x, 1, ranks)
        case "S(2)", "R":
            return lambda x: GatherForReplicated.apply(x, 2, ranks)
        case _:
            return None


def _serve_queries(fqn: str, tp: _Axis) -> Move | None:
    """Bring the KV heads that a rank holds into the order of its query heads, where plain grouping would not do."""
    attention = tp.attentions[int(fqn.split(".")[1])]
    needed = kv_heads_needed(attention, tp.size, tp.replicas, tp.ranks.rank)
    held = attention.num_kv_heads * tp.replicas // tp.size
    if needed == [query * held // len(needed) for query in range(len(needed))]:
        return None
    size = attention.head_dim

    def serve(x: Tensor) -> Tensor:
        return torch.cat([x.narrow(-1, head * size, size) for head in needed], dim=-1)

    return serve


def kv_heads_needed(attention: Attention, tp: int, replicas: int, rank: int) -> list[int]:
    """Which of the KV heads that tensor rank `rank` holds serves each of its query heads."""
    match attention:
        case Gqa(num_heads=heads, num_kv_heads=kv_heads):
            mine, group, held = heads // tp, heads // kv_heads, kv_heads * replicas // tp
            return [(rank * mine + query) // group - rank // replicas * held for query in range(mine)]
        case _:
            assert_never(attention)


# ------------------------------------------------------------------ what is refused


def _rows_of(module: nn.Module, plan: Plan) -> Iterator[tuple[str, ModuleSharding]]:
    """(FQN, its row) of the modules that are here, parents first."""
    rows = [row for row in plan.sharding if row.axis == "tp"]
    for fqn, _ in module.named_modules():
        found = next((row for row in rows if matches(row.module, fqn)), None)
        if found is not None:
            yield fqn, found


_COMPUTED: tuple[tuple[type[nn.Module], str | None, str, str | None], ...] = (
    # kind, weight, input it needs, result
    (nn.Embedding, "S(0)", "R", "P"),
    (nn.Linear, "S(0)", "R", "S(2)"),
    (nn.Linear, "S(1)", "S(2)", "P"),
    (RMSNorm, "R", "R", "R"),
    (RMSNorm, "R", "S(1)", "S(1)"),
    (nn.Linear, "R", "R", "R"),
    (MixtureOfExperts, None, "R", "P"),
    (nn.Module, None, "R", None),
)


def _require_layouts(
    plan: Plan, part: nn.Module, fqn: str, row: ModuleSharding, inside: bool, summed_outside: bool
) -> None:
    """RunError unless the row is one that is computed here, and its ends meet those of the modules around it.

    `summed_outside` says that a module around it adds up what ranks have.
    """
    stream = "S(1)" if plan.tensor_parallel.sequence_parallel else "R"
    if not any(
        isinstance(part, kind) and [row.weight, row.input_needed, row.output] == computed
        for kind, *computed in _COMPUTED
    ):
        raise RunError(
            f"sharding: the row of `{row.module}` makes `{fqn}` a {type(part).__name__} with weight {row.weight}, "
            f"input {row.input_needed} and result {row.output}, which this version cannot compute",
            hint="compile the plan anew",
        )
    tokens_in, logits_out = fqn == "tok_embeddings", fqn == "output"
    arrives = "R" if tokens_in else row.input_needed if inside else stream
    if row.input != arrives:
        raise RunError(
            f"sharding: `{row.module}` expects its input as {row.input}, but it arrives as {arrives}",
            hint="compile the plan anew with sequence parallel on or off, rather than edit single rows",
        )
    if row.output is None:
        return
    loss_parallel = plan.tensor_parallel.loss_parallel
    hands_on = ("S(2)" if loss_parallel else "R") if logits_out else row.output if row.output == "S(2)" else stream
    if summed_outside:
        hands_on = row.output
    if row.output_needed != hands_on:
        raise RunError(
            f"sharding: `{row.module}` hands its result on as {row.output_needed}, but {hands_on} is needed",
            hint="compile the plan anew with sequence or loss parallel on or off, rather than edit single rows",
        )


def _require_even_sequence(plan: Plan) -> None:
    """RunError when a rank's sequence cannot be cut over tp. Reading a plan refuses that too; gloo ends the process."""
    length = plan.batch.seq_len // plan.mesh.cp
    if plan.tensor_parallel.sequence_parallel and length % plan.mesh.tp:
        raise RunError(
            f"batch.seq_len: sequence parallelism cannot share {length} tokens evenly among {plan.mesh.tp} ranks",
            hint=f"use a multiple of {plan.mesh.tp * plan.mesh.cp}, or turn sequence parallelism off",
        )


# ------------------------------------------------------------------ overlap


def _overlap(ranks: Ranks, device_type: str) -> None:
    """Let the compiler split matrix products so that they overlap with their collectives."""
    if device_type != "cuda":
        raise RunError(
            "tensor_parallel.async_tp: asynchronous tensor parallelism needs CUDA", hint="turn async_tp off in the plan"
        )
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(ranks.name)
