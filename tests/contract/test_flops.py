"""The planner's FLOPs are what torch counts on the real modules, exactly.

torch's counter sees different programs on different devices, which is why its totals differ: on "meta" attention falls back
to two batched products (and four in backward, the scores being kept), while on a CPU, real or fake, it is one flash kernel
for which the counter has no formula, so that it counts nothing. Here the kernel is given torch's own formula for flash
attention: two products forward, and five backward, since it computes the scores again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from tests.plans import tiny_model, tiny_moe_model, tiny_plan
from titan_planner.cost.compute import recomputed
from titan_planner.cost.flops import flops_per_token, flops_per_token_causal
from titan_planner.cost.ops import Matmul, Mixing, Op, Shape, block_ops
from titan_planner.cost.stage import kernels_of
from titan_planner.ir.execution import KEEP_ALL
from titan_planner.ir.inventory import parameters
from titan_planner.ir.model import Block, Blocks, Gqa, Model, Moe, RmsNorm, Rope, SwiGlu
from titan_planner.passes.select_checkpointing import FULL, SAVE_OPS
from titan_runtime.apply.checkpointing import apply_checkpointing
from titan_runtime.modules import build

SEQUENCES, LENGTH = 2, 64


def _flash(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    # The kernel serves grouped queries, torch's formula wants equal heads.
    return sdpa_flop_count(q, (*q[:2], *k[2:]), (*q[:2], *v[2:]))


def _flash_backward(gradient: Any, q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(gradient, q, (*q[:2], *k[2:]), (*q[:2], *v[2:]))


def _grouped(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    # [rows, k] x [groups, k, n], or for weights [n, rows] x [rows, k]: every row meets one group.
    return 2 * a[0] * a[1] * b[-1]


FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    torch.ops.aten._grouped_mm: _grouped,
}


def model(attention: Gqa, feed_forward: SwiGlu | Moe, dim: int = 64, layers: int = 2, vocab: int = 96) -> Model:
    block = Block(attention=attention, feed_forward=feed_forward, norm=RmsNorm(eps=1e-5))
    return Model(
        family="test",
        flavor="test",
        vocab_size=vocab,
        dim=dim,
        max_seq_len=LENGTH,
        blocks=(Blocks(repeat=layers, block=block),),
        norm=RmsNorm(eps=1e-5),
        tied=False,
    )


def gqa(heads: int, kv_heads: int, head_dim: int) -> Gqa:
    return Gqa(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope=Rope(theta=1e4, scaling=None))


def moe(**changes: Any) -> Moe:
    base = Moe(
        num_experts=4,
        hidden_dim=48,
        top_k=2,
        num_shared_experts=1,
        score_function="sigmoid",
        score_before_experts=False,
        route_norm=False,
        route_scale=1.0,
        num_groups=None,
        num_limited_groups=None,
        load_balance_coeff=None,
    )
    return replace(base, **changes)


def count(module: nn.Module, vocab: int, device: str) -> tuple[int, int]:
    """(forward, backward) FLOPs that torch counts."""
    tokens = torch.zeros((SEQUENCES, LENGTH), dtype=torch.int64, device=device)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        out = module(tokens)
        forward = counter.get_total_flops()
        out.float().sum().backward()
    return forward, counter.get_total_flops() - forward


def filled(described: Model) -> nn.Module:
    module = build(described, seq_len=LENGTH, device="cpu")
    for tensor in [*module.parameters(), *module.buffers()]:
        nn.init.zeros_(tensor) if not tensor.is_floating_point() else nn.init.normal_(tensor, std=0.02)
    return module


CASES = {
    "tiny": model(gqa(4, 2, 16), SwiGlu(hidden_dim=96)),
    "head dim of its own": model(gqa(4, 4, 24), SwiGlu(hidden_dim=80)),
    "medium": model(gqa(16, 4, 32), SwiGlu(hidden_dim=1408), dim=512, layers=3, vocab=2048),
}


@pytest.mark.parametrize("name", CASES)
def test_model_flops_are_what_the_math_path_computes(name: str) -> None:
    """Attention not halved, scores not computed again: the convention of PaLM and TorchTitan is the "meta" program."""
    described = CASES[name]
    forward, backward = count(build(described, seq_len=LENGTH), described.vocab_size, "meta")
    # That convention takes norms' weights for matrices too: 6 a weight that no product has.
    norms = 6 * sum(math.prod(p.shape) for p in parameters(described) if p.axes == ("norm",))
    assert forward + backward == (flops_per_token(described, LENGTH) - norms) * SEQUENCES * LENGTH
    assert backward == 2 * forward


def test_the_causal_convention_counts_the_pairs_that_the_mask_leaves() -> None:
    described = CASES["tiny"]
    pairs = sum(1 for q in range(LENGTH) for k in range(LENGTH) if k <= q)
    per_sequence = flops_per_token(described, LENGTH) * LENGTH
    attention = 12 * 2 * 4 * 16 * LENGTH**2  # 12 x layers x heads x head_dim x length^2
    wanted = per_sequence - attention + attention * pairs / LENGTH**2
    assert flops_per_token_causal(described, LENGTH) * LENGTH == pytest.approx(wanted, rel=1e-12)


def planned(ops: tuple[Op, ...]) -> tuple[float, float]:
    """(forward, backward) FLOPs of a list of ops, attention not halved as the counter does."""
    products = sum(op.flops for op in ops if isinstance(op, Matmul))
    mixing = sum(op.flops * 2 * LENGTH / (LENGTH + 1) for op in ops if isinstance(op, Mixing))
    return products + mixing, 2 * products + 2.5 * mixing


def head_flops(described: Model) -> float:
    return 2.0 * SEQUENCES * LENGTH * described.dim * described.vocab_size


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_ops_of_a_rank_are_those_of_its_local_modules(kind: str, tp: int) -> None:
    """Every forward and backward product of a tensor rank's share, with KV heads replicated at tp 4."""
    whole = gqa(8, 2, 16)
    replicas = max(1, tp // whole.num_kv_heads)
    layer: SwiGlu | Moe = SwiGlu(hidden_dim=192) if kind == "dense" else moe(hidden_dim=192)
    local_layer: SwiGlu | Moe = SwiGlu(hidden_dim=192 // tp) if kind == "dense" else moe(hidden_dim=192 // tp)
    local = model(gqa(8 // tp, 2 * replicas // tp, 16), local_layer)
    shape = Shape(
        tokens=SEQUENCES * LENGTH, seq_len=LENGTH, tp=tp, etp=tp, kv_replicas=replicas, sequence_parallel=tp > 1
    )
    ops = block_ops(Block(attention=whole, feed_forward=layer, norm=RmsNorm(eps=1e-5)), 64, shape)
    forward, backward = planned(ops)
    counted = count(filled(local), local.vocab_size, "cpu")
    assert counted == (2 * forward + head_flops(local), 2 * backward + 2 * head_flops(local))


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_recomputation_is_what_backward_runs_again(kind: str, mode: str) -> None:
    described = tiny_model(max_seq_len=LENGTH) if kind == "llama" else tiny_moe_model()
    policy = {
        "none": KEEP_ALL,
        "full": FULL,
        "selective": replace(
            KEEP_ALL, name="op", mode="selective", save_ops=SAVE_OPS, recompute_every_second_matmul=True
        ),
    }[mode]
    plan = tiny_plan(model=described)
    plan = replace(
        plan,
        activation_checkpoint=replace(plan.activation_checkpoint, policies=(policy,)),
        layers=tuple(
            replace(layer, checkpoint=policy.name if layer.fqn.startswith("layers.") else "keep")
            for layer in plan.layers
        ),
    )
    plan = replace(
        plan,
        activation_checkpoint=replace(plan.activation_checkpoint, policies=(replace(KEEP_ALL, name="keep"), policy)),
    )
    module = filled(described)
    before = count(module, described.vocab_size, "cpu")
    apply_checkpointing(module, plan)
    after = count(module, described.vocab_size, "cpu")
    shape = Shape(tokens=SEQUENCES * LENGTH, seq_len=LENGTH, fusion="eager")
    again = sum(
        planned(recomputed(block_ops(block, described.dim, shape), policy, kernels_of(plan)))[0]
        for block in described.layers()
    )
    assert after[0] == before[0]
    assert after[1] - before[1] == again
