"""Models whose feed-forward layers have no gate: counts, placements and rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import plans
from titan_planner.cost.flops import flops_per_token
from titan_planner.cost.memory import block_activation_bytes
from titan_planner.ir.execution import KEEP_ALL
from titan_planner.ir.inventory import linear_modules, num_active_params, num_params, parameters
from titan_planner.ir.model import Blocks, Mlp, Model, SwiGlu
from titan_planner.ir.request import ModelOverrides
from titan_planner.ir.verify import verify
from titan_planner.models import MODELS, find_model, override
from titan_planner.sharding import tensor_parallel_rows

DEBUG = MODELS["debug_mlp"]["debugmodel"]
DENSE = plans.tiny_model().blocks[0].block


def with_layers(*layers: SwiGlu | Mlp) -> Model:
    """A model with one block of each."""
    return plans.tiny_model(
        blocks=tuple(Blocks(repeat=1, block=replace(DENSE, feed_forward=layer)) for layer in layers)
    )


def gelu(hidden: int = 48) -> Mlp:
    return Mlp(hidden_dim=hidden, activation="gelu")


def test_a_layer_without_a_gate_has_two_matrices() -> None:
    model = with_layers(gelu(40))
    inside = [(p.fqn, p.shape) for p in parameters(model) if "feed_forward" in p.fqn]
    assert inside == [("layers.0.feed_forward.w1.weight", (40, 32)), ("layers.0.feed_forward.w2.weight", (32, 40))]
    gated = with_layers(SwiGlu(hidden_dim=40))
    assert num_params(gated) - num_params(model) == 32 * 40
    assert num_active_params(model) == num_params(model)
    assert flops_per_token(gated, 16) - flops_per_token(model, 16) == 6 * 32 * 40


def test_it_keeps_half_of_what_a_gated_one_of_its_width_keeps() -> None:
    plan = plans.tiny_plan(local=2)
    kept = {
        layer: block_activation_bytes(plan, replace(DENSE, feed_forward=layer), KEEP_ALL)
        for layer in (gelu(48), gelu(96), SwiGlu(hidden_dim=48))
    }
    tokens = 2 * 32
    assert kept[SwiGlu(hidden_dim=48)] - kept[gelu(48)] == tokens * 48 * 2 * 4  # two tensors, float32
    assert kept[gelu(96)] == kept[SwiGlu(hidden_dim=48)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_model_of_both_kinds_has_rows_for_the_matrices_of_both(order: tuple[int, int]) -> None:
    layers = (gelu(), SwiGlu(hidden_dim=48))
    rows = tensor_parallel_rows(with_layers(*(layers[at] for at in order)), sequence_parallel=True, loss_parallel=True)
    inside = {row.module: row.weight for row in rows if "feed_forward." in row.module}
    assert inside == {
        "layers.*.feed_forward.w1": "S(0)",
        "layers.*.feed_forward.w2": "S(1)",
        "layers.*.feed_forward.w3": "S(0)",
    }
    alone = tensor_parallel_rows(with_layers(gelu()), sequence_parallel=True, loss_parallel=True)
    assert [row for row in rows if not row.module.endswith(".w3")] == list(alone)


def test_tp_must_divide_its_width() -> None:
    plan = plans.tiny_plan(plans.mesh(tp=2), model=with_layers(gelu(45)))
    rows = tensor_parallel_rows(plan.model, sequence_parallel=False, loss_parallel=False)
    complaints = {complaint.rule: complaint.message for complaint in verify(replace(plan, sharding=rows))}
    assert complaints == {"tp-dims": "tp = 2 does not divide the feed-forward width 45"}


def test_the_catalogue_has_a_small_one_whose_width_can_be_overridden() -> None:
    assert find_model("debug_mlp", "gelu") is DEBUG
    wide = override(DEBUG, ModelOverrides(hidden_dim=512))
    assert wide.blocks[0].block.feed_forward == Mlp(hidden_dim=512, activation="gelu")
    assert "layers.0.feed_forward.w3" not in linear_modules(wide)
