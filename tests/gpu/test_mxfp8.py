"""MXFP8 on a GPU that has it: the real kernels compute what the emulation does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import plans
from tests.harness import Rank, run_ranks
from titan_planner.ir.model import Block, Blocks, Gqa, RmsNorm, Rope, SwiGlu
from titan_planner.ir.plan import Plan
from titan_runtime.apply.float8 import apply_float8, converted_linears, float8_problems
from titan_runtime.init import initialise
from titan_runtime.modules import build

LINEARS = ("layers.0.attention.wq", "layers.0.feed_forward.w1", "layers.0.feed_forward.w2", "output")


def mxfp8_plan(emulate: bool) -> Plan:
    """Linears of 128 and 256 rows and columns, as the kernels' tiles are."""
    attention = Gqa(num_heads=4, num_kv_heads=4, head_dim=32, rope=Rope(theta=10000.0, scaling=None))
    block = Block(attention=attention, feed_forward=SwiGlu(hidden_dim=256), norm=RmsNorm(eps=1e-5))
    plan = plans.tiny_plan(model=plans.tiny_model(dim=128, blocks=(Blocks(repeat=1, block=block),)))
    return replace(plan, float8=replace(plan.float8, recipe="mxfp8", converted=LINEARS, emulate=emulate))


@pytest.mark.parametrize("world", [1])
def test_real_kernels_compute_what_the_emulation_does(world: int) -> None:
    found = run_ranks(products, world, process_group=False)[0]
    if isinstance(found, str):
        pytest.skip(found)
    emulated, real = found
    for a, b in zip(emulated, real, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2 * a.abs().max().item())


def products(rank: Rank) -> tuple[list[torch.Tensor], list[torch.Tensor]] | str:
    """Result, and gradients of input and weight, of every linear: emulated and real; or why this GPU cannot."""
    lacking = float8_problems(mxfp8_plan(False), True, torch.cuda.get_device_capability())
    if lacking:
        return lacking[0]
    emulated, real = [], []
    for emulate, found in ((True, emulated), (False, real)):
        plan = mxfp8_plan(emulate)
        module = build(plan.model, seq_len=32).to_empty(device="cuda")
        initialise(module, plan.model, seed=0)
        module.to(torch.bfloat16)
        apply_float8(module, plan)
        assert converted_linears(module) == set(LINEARS)
        for fqn in LINEARS:
            part = module.get_submodule(fqn)
            generator = torch.Generator("cuda").manual_seed(1)
            x = torch.randn(4, 32, part.in_features, generator=generator, device="cuda", dtype=torch.bfloat16)
            x.requires_grad_()
            out = part(x)
            out.square().mean().backward()
            found += [t.float().cpu() for t in (out.detach(), x.grad, part.weight.grad)]
    return emulated, real
