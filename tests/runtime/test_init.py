"""Initial weights depend on the seed and the name, and on nothing about ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests import plans
from tests.harness import Rank, run_ranks
from titan_planner.ir.inventory import Init, Parameter, parameters
from titan_planner.ir.model import Blocks
from titan_planner.ir.parallel import Mesh
from titan_planner.ir.plan import Plan
from titan_planner.models import MODELS
from titan_runtime import init
from titan_runtime.init import draw, row_blocks
from titan_runtime.modules import build


def whole_weights(rank: Rank, plan: Plan) -> dict[str, torch.Tensor]:
    """The full initial weights, gathered from all ranks' shards."""
    from titan_runtime.apply import build_model
    from titan_runtime.mesh import build_mesh

    module = build_model(plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))
    return {
        fqn: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for fqn, tensor in ((fqn, parameter.detach()) for fqn, parameter in module.named_parameters())
    }


@pytest.mark.parametrize("grid", [plans.mesh(2), plans.mesh(4), plans.mesh(2, 2), plans.mesh(1, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_every_mesh_starts_from_the_same_weights(grid: Mesh, tied: bool) -> None:
    model = plans.tiny_model(tied=tied, vocab_size=plans.VOCAB + 3)  # rows that no number of ranks divides
    alone = build(model, seq_len=8).to_empty(device="cpu")
    init.initialise(alone, model, seed=7)
    expected = {fqn: parameter.detach() for fqn, parameter in alone.named_parameters()}
    for weights in run_ranks(whole_weights, grid.world_size, plans.tiny_plan(grid, model=model)):
        assert weights.keys() == expected.keys()
        for fqn, weight in weights.items():
            assert torch.equal(weight, expected[fqn]), fqn


def test_a_tensor_of_several_blocks_is_the_same_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 1000)  # inherited by the forked ranks
    model = plans.tiny_model()
    alone = build(model, seq_len=8).to_empty(device="cpu")
    init.initialise(alone, model, seed=7)
    weights = run_ranks(whole_weights, 2, plans.tiny_plan(plans.mesh(2)))[0]
    for fqn, parameter in alone.named_parameters():
        assert torch.equal(weights[fqn], parameter.detach()), fqn


def test_blocks_cover_all_rows_once() -> None:
    for shape in ((7,), (3, 5), (128256, 16384), (1, 1 << 24), (0, 4)):
        blocks = row_blocks(shape)
        assert sum(rows for _, rows in blocks) == shape[0]
        assert all(a + rows == b for (a, rows), (b, _) in pairwise(blocks))


def test_weights_have_the_planned_spread() -> None:
    for parameter in parameters(plans.tiny_model()):
        values = torch.cat([draw(parameter, 7, first, rows) for first, rows in row_blocks(parameter.shape)])
        assert tuple(values.shape) == parameter.shape
        if parameter.init.kind == "ones":
            assert bool((values == 1).all())
            continue
        expected = parameter.init.std * (1.0 if math.isinf(parameter.init.cut) else 0.98658)  # cut at 3 deviations
        error = 5 / math.sqrt(2 * values.numel())  # five standard errors of a standard deviation
        assert values.std().item() == pytest.approx(expected, rel=error), parameter.fqn
        assert values.abs().max().item() <= parameter.init.cut * parameter.init.std


def test_seed_and_name_and_block_each_change_the_values() -> None:
    parameter = Parameter("a.weight", (4, 4), ("embed", "embed"), Init("normal", 1.0))
    other = Parameter("b.weight", (4, 4), ("embed", "embed"), Init("normal", 1.0))
    first = draw(parameter, 0, 0, 2)
    assert torch.equal(first, draw(parameter, 0, 0, 2))
    for changed in (draw(parameter, 1, 0, 2), draw(other, 0, 0, 2), draw(parameter, 0, 2, 2)):
        assert not torch.equal(first, changed)


def test_these_are_the_weights_of_seed_7() -> None:
    """A run's weights are part of what its seed means: they must not change from one version to the next."""
    first = parameters(plans.tiny_model())[0]
    values = draw(first, 7, *row_blocks(first.shape)[0])[0, :4].tolist()
    assert values == pytest.approx(EMBEDDING_OF_SEED_7, abs=1e-6)


EMBEDDING_OF_SEED_7 = [-0.12803435, -0.76212567, -0.04424242, -0.17400149]


@pytest.mark.parametrize("flavor", list(MODELS["llama3"]))
def test_an_untrained_model_knows_nothing_more_and_nothing_less(flavor: str) -> None:
    """The first loss is near ln(vocabulary) at every flavor's width and tying, cut to two layers and a small vocabulary."""
    whole = MODELS["llama3"][flavor]
    width = min(whole.dim, 2048)
    block = whole.blocks[0].block
    attention = replace(block.attention, num_heads=8, num_kv_heads=4, head_dim=width // 8)
    feed_forward = replace(block.feed_forward, hidden_dim=2 * width)
    blocks = (Blocks(repeat=2, block=replace(block, attention=attention, feed_forward=feed_forward)),)
    model = replace(whole, dim=width, vocab_size=4096, blocks=blocks)
    module = build(model, seq_len=64).to_empty(device="cpu")
    init.initialise(module, model, seed=3)
    tokens = torch.randint(4096, (2, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(4096), abs=1.0)
