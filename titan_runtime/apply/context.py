"""Context parallelism: the ranks of the cp axis share every sequence, and their attention reaches all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_planner.ir.plan import Plan
from titan_runtime.attention import Share, allgather_attention, alltoall_attention, ring_attention
from titan_runtime.errors import RunError
from titan_runtime.modules.rope import RotaryTable


def apply_context(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Let `module` compute on this rank's part of every sequence; `mesh` is the 1-D `cp`. FQNs stay as they are.

    Two things depend on the rest of the sequence: rotary tables, which get the rows of this rank's true positions, and
    the attention of every block, which is exchanged. All else works token by token.
    """
    if plan.mesh.cp == 1:
        return
    share = sequence_share(plan, mesh.get_local_rank(), mesh.get_group().group_name)
    attention = _attention(plan, share)
    for part in module.modules():
        if isinstance(part, RotaryTable):
            part.keep(share.positions(plan.batch.seq_len))
        elif hasattr(part, "inner_attention"):
            part.inner_attention = attention


def _attention(plan: Plan, share: Share) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    match plan.context_parallel.method:
        case "allgather":
            method = allgather_attention
        case "ring":
            method = ring_attention
        case "alltoall":
            method = alltoall_attention
        case _:
            assert_never(plan.context_parallel.method)
    return partial(method, share=share)


def sequence_share(plan: Plan, cp_rank: int, group: str = "") -> Share:
    """The part of every sequence that belongs to rank `cp_rank` of the cp axis. `group` is for its attention only."""
    balance, cp, seq_len = plan.context_parallel.load_balance, plan.mesh.cp, plan.batch.seq_len
    if balance == "ptrr":
        raise RunError(
            "context_parallel.load_balance: `ptrr` sorts the block masks of FlexAttention, and no layer kind has any",
            hint="use headtail",
        )
    chunks = 2 if balance == "headtail" else 1
    if seq_len % (cp * chunks):
        raise RunError(
            f"batch.seq_len: {seq_len} tokens cannot be cut into {cp * chunks} equal chunks for {cp} context ranks",
            hint=f"use a multiple of {cp * chunks}",
        )
    return Share(cp_rank, cp, chunks, group)


def shard_sequences(
    microbatches: Sequence[tuple[Tensor, Tensor]], plan: Plan, rank: int
) -> list[tuple[Tensor, Tensor]]:
    """Of every microbatch (tokens and labels [batch, sequence]) the part that belongs to global rank `rank`.

    All ranks of the cp axis read the same samples, and each keeps its own positions. Labels are those of the whole
    sequence, already shifted, so that a token at the end of a part has its successor as label.
    """
    if plan.mesh.cp == 1:
        return list(microbatches)
    mine = sequence_share(plan, plan.mesh.coordinates(rank)["cp"]).positions(plan.batch.seq_len)
    return [(tokens[:, mine], labels[:, mine]) for tokens, labels in microbatches]
