"""Ranks that share every sequence attend as one rank does, and train what one rank trains.

Attention is compared with torch's own on whole sequences, forward and gradients; whole runs with the one-process
reference of test_parity. Several cases share a launch of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.harness import Rank, run_ranks
from titan_runtime.attention import Share, allgather_attention, alltoall_attention, blockwise, ring_attention

METHODS: dict[str, Callable[[Tensor, Tensor, Tensor, Share], Tensor]] = {
    "allgather": allgather_attention,
    "ring": ring_attention,
    "alltoall": alltoall_attention,
}
CHUNKS = {"none": 1, "headtail": 2}


# ------------------------------------------------------------------ who has what


@pytest.mark.parametrize(("size", "chunks"), product((1, 2, 3, 4, 8), (1, 2)))
def test_parts_cover_the_sequence_once_and_ranks_see_exactly_what_came_before(size: int, chunks: int) -> None:
    seq_len, local = 4 * size * chunks, 4 * chunks
    shares = [Share(rank, size, chunks, "") for rank in range(size)]
    places = [share.positions(seq_len) for share in shares]
    assert sorted(torch.cat(places).tolist()) == list(range(seq_len))
    for rank, share in enumerate(shares):
        assert places[rank].tolist() == sorted(places[rank].tolist())
        everyone = torch.zeros(local, seq_len, dtype=torch.int64)
        for rows, seen in share.pieces_of_all(local):
            everyone[rows, seen] += 1
        everyone[:, places[rank]] += torch.ones(local, local, dtype=torch.int64).tril()
        assert torch.equal(everyone, (places[rank][:, None] >= torch.arange(seq_len)).long())
        for other in set(range(size)) - {rank}:
            seen_of_it = torch.zeros(local, local, dtype=torch.int64)
            for rows, seen in share.pieces(other, local):
                seen_of_it[rows, seen] += 1
            assert torch.equal(seen_of_it, (places[rank][:, None] >= places[other]).long())


def test_head_and_tail_give_every_rank_the_same_work() -> None:
    def work(rank: int, chunks: int) -> int:
        share = Share(rank, 4, chunks, "")
        return sum((r.stop - r.start) * (s.stop - s.start) for r, s in share.pieces_of_all(8))

    assert [work(rank, 1) for rank in range(4)] == [0, 64, 128, 192]
    assert [work(rank, 2) for rank in range(4)] == [96, 96, 96, 96]


@pytest.mark.parametrize(("size", "chunks"), product((2, 4), (1, 2)))
def test_joining_and_splitting_follow_the_positions(size: int, chunks: int) -> None:
    whole = torch.arange(2 * 3 * 16 * 5).view(2, 3, 16, 5)
    shares = [Share(rank, size, chunks, "") for rank in range(size)]
    parts = torch.stack([whole[:, :, share.positions(16)] for share in shares])
    assert torch.equal(shares[0].split(whole), parts)
    assert torch.equal(shares[0].join(parts), whole)


# ------------------------------------------------------------------ blocks of keys


def attention_inputs(heads: int, kv_heads: int, seq_len: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the result, the same on every rank; large enough scores that softmax is not flat."""
    generator = torch.Generator().manual_seed(heads)
    shapes = ((2, heads, seq_len, 8), (2, kv_heads, seq_len, 8), (2, kv_heads, seq_len, 8), (2, heads, seq_len, 8))
    return [2 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Result and gradients of q, k and v of torch's attention over the whole sequence."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("kernel", ["cpu", "portable"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_and_its_gradient(kernel: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "_kernel", lambda q: kernel)
    q, k, v, grad = attention_inputs(4, 2, 12, torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    expected = scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    with torch.no_grad():
        out, lse = blockwise.attend(q, k, v, causal=causal)
        found = blockwise.attend_backward(grad, q, k, v, out, lse, causal=causal)
    torch.testing.assert_close(out, expected.detach())
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_causal_rectangle_is_refused() -> None:
    q, k, v, _ = attention_inputs(4, 2, 12, torch.float32)
    with pytest.raises(ValueError, match="a causal block of 6 queries and 12 keys"):
        blockwise.attend(q[:, :, :6], k, v, causal=True)


# ------------------------------------------------------------------ attention over ranks


def attend_shared(rank: Rank, dtype: torch.dtype, kernel: str | None) -> dict[str, list[float]]:
    """The largest differences from plain attention: of the result and of the three gradients, relative to their size."""
    if kernel:
        blockwise._kernel = lambda q: kernel
    worst = {}
    for (name, method), (balance, chunks), (heads, kv_heads) in product(
        METHODS.items(), CHUNKS.items(), ((4, 4), (8, 4))
    ):
        share = Share(rank.index, rank.world_size, chunks, dist.group.WORLD.group_name)
        *qkv, grad = attention_inputs(heads, kv_heads, 48, dtype)
        mine = share.positions(48)
        leaves = [t[:, :, mine].requires_grad_() for t in qkv]
        out = method(*leaves, share)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad[:, :, mine])]
        expected = plain_attention(*(t.double() for t in (*qkv, grad)))
        worst[f"{name} {balance} {heads}/{kv_heads}"] = [
            ((ours.double() - whole[:, :, mine]).abs().max() / whole.abs().max()).item()
            for ours, whole in zip(found, expected, strict=True)
        ]
    return worst


@pytest.mark.parametrize(
    ("size", "dtype", "kernel", "tolerance"),
    [
        pytest.param(2, torch.float32, None, 2e-6, id="2-ranks"),
        pytest.param(4, torch.float32, None, 2e-6, id="4-ranks"),
        pytest.param(4, torch.float64, "portable", 1e-13, id="4-ranks-portable-float64"),
        pytest.param(4, torch.bfloat16, None, 2e-2, id="4-ranks-bfloat16"),
    ],
)
def test_every_method_is_plain_attention(size: int, dtype: torch.dtype, kernel: str | None, tolerance: float) -> None:
    for worst in run_ranks(attend_shared, size, dtype, kernel):
        assert len(worst) == 12
        for case, differences in worst.items():
            assert max(differences) < tolerance, (case, differences)
