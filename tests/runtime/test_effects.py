"""Decisions that change no number, so that no comparison of losses sees them: each is seen in what a rank executes or sends."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.harness import Rank, run_ranks
from tests.parity.rows import Row, context, pipeline
from tests.parity.runner import _loader, compile_row
from tests.recorder import Recorder
from titan_planner.ir.plan import Plan

LAYERS = 8
MICROBATCHES = 8


def one_step(rank: Rank, plans: list[Plan]) -> list[tuple[Counter[str], Counter[str]]]:
    """Of one step of each plan, on this rank: operators executed, and collectives by kind."""
    from tests.runtime.test_apply import CountOps
    from titan_runtime.apply import build_model
    from titan_runtime.apply.context import shard_sequences
    from titan_runtime.loss import loss_function
    from titan_runtime.mesh import build_mesh, data_group, data_rank
    from titan_runtime.optimizer import build_optimizer
    from titan_runtime.step import train_step

    found = []
    for plan in plans:
        world = build_mesh(plan.mesh, "cpu")
        group = data_group(world)
        module = build_model(plan, world, torch.device("cpu"))
        optimizer = build_optimizer(module, plan.optimizer)
        share = data_rank(plan.mesh, rank.index)
        batch = next(iter(_loader(plan, share, plan.mesh.dp, plan.batch.local_batch_size)))
        batch = shard_sequences(batch, plan, rank.index)
        loss = loss_function(plan, world)
        with Recorder() as sent, CountOps() as done:
            train_step(
                plan, module, optimizer, loss, batch, step=1, schedule_step=0, device=torch.device("cpu"), group=group
            )
        assert sent.unseen() == {}
        found.append((done.counts, Counter(event.kind for event in sent.events)))
    return found


def test_a_pipeline_that_defers_reduces_gradients_once_a_step() -> None:
    def row(defer: bool) -> Row:
        return pipeline(
            "deferring", 2, "1F1B", local=2, degrees={"dp_shard": 2}, parallelism={"defer_gradient_sync": defer}
        )

    plans = [compile_row(row(defer)) for defer in (True, False)]
    assert {plan.batch.accumulation_steps for plan in plans} == {2}
    for (_, once), (_, every) in run_ranks(one_step, 4, plans, timeout=120):
        # A unit for each of the stage's four layers, and one for embedding or for norm and output.
        assert once["reduce_scatter"] == 4 + 1
        assert every["reduce_scatter"] == 2 * (4 + 1)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_every_stage_computes_its_layers_again(schedule: str) -> None:
    modes = ("none", "full", "selective")
    plans = [
        compile_row(pipeline(mode, 2, schedule, sections={"activation_checkpoint": {"mode": mode}})) for mode in modes
    ]
    for (kept, _), (full, _), (selective, _) in run_ranks(one_step, 2, plans, timeout=120):
        products = [counts["aten.mm.default"] for counts in (kept, full, selective)]
        # Of a layer's seven products six are needed again; the last one's result is not.
        assert products[1] - products[0] == (LAYERS // 2) * MICROBATCHES * 6
        assert products[0] < products[2] < products[1]


@pytest.mark.parametrize(
    ("method", "sent"),
    [
        # In every layer keys and values: once round the ring; in backward again, and their gradients twice.
        ("ring", {"ring": LAYERS * (1 + 1 + 2), "all_to_all": 0}),
        ("alltoall", {"ring": 0, "all_to_all": LAYERS * (2 + 2)}),
        ("allgather", {"ring": 0, "all_to_all": 0}),
    ],
)
def test_each_method_of_context_parallelism_sends_what_it_is_named_for(method: str, sent: dict[str, int]) -> None:
    plan = compile_row(Row(method, {"cp": 2}, context(method)))
    units = LAYERS + 2
    for [(_, kinds)] in run_ranks(one_step, 2, [plan]):
        assert {kind: kinds[kind] for kind in sent} == sent
        # FSDP shards over cp, too; what is gathered and scattered beyond its units is keys, values and their gradients.
        assert kinds["reduce_scatter"] - units == (LAYERS if method == "allgather" else 0)


@pytest.mark.parametrize(("forward", "backward"), [(0, 0), (1, 0), (0, 1), (2, 1)])
def test_units_are_gathered_ahead_as_the_plan_says(forward: int, backward: int) -> None:
    ahead = {"fsdp_prefetch_forward": forward, "fsdp_prefetch_backward": backward}
    plan = compile_row(Row("ahead", {"dp_shard": 2}, ahead))
    assert (plan.fsdp.prefetch_forward, plan.fsdp.prefetch_backward) == (forward, backward)
    order = ["tok_embeddings", *(f"layers.{n}" for n in range(LAYERS)), "norm"]
    for found in run_ranks(prefetched, 2, plan):
        assert found == {
            fqn: (order[at + 1 : at + 1 + forward], order[max(0, at - backward) : at][::-1])
            for at, fqn in enumerate(order)
        }


def prefetched(rank: Rank, plan: Plan) -> dict[str, tuple[list[str], list[str]]]:
    """Unit -> the units that it has gathered before they run, in forward and in backward."""
    from torch.distributed.fsdp import FSDPModule

    from titan_runtime.apply import build_model
    from titan_runtime.mesh import build_mesh

    module = build_model(plan, build_mesh(plan.mesh, "cpu"), torch.device("cpu"))
    names: dict[object, str] = {}
    for fqn, part in module.named_modules():
        if fqn and isinstance(part, FSDPModule):
            # `norm` and `output` are one unit with one state; it goes by the first one's name.
            names.setdefault(part._get_fsdp_state(), fqn)
    return {
        name: (
            [names[other] for other in state._states_to_forward_prefetch],
            [names[other] for other in state._states_to_backward_prefetch],
        )
        for state, name in names.items()
    }
