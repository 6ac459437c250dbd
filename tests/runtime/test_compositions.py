"""Validation, the z-loss, Muon and Float8 on meshes of every axis: the numbers of one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.harness import Rank, run_ranks
from tests.parity.rows import TIED, Row, pipeline
from tests.parity.runner import _loader, compile_row
from titan_planner.ir.inventory import muon_parameters
from titan_planner.ir.plan import Plan
from titan_runtime.apply import build_model
from titan_runtime.apply.context import shard_sequences
from titan_runtime.apply.float8 import _require_torchao, converted_linears
from titan_runtime.loss import loss_function, measured_loss
from titan_runtime.mesh import build_mesh, data_group, data_rank
from titan_runtime.optimizer import build_optimizer
from titan_runtime.step import batch_loss, train_step
from titan_runtime.train import open_text
from titan_runtime.validation import Validator

_require_torchao()  # once for all forks

HELD_OUT: dict[str, Any] = {
    "loss": {"z_loss": 0.1},
    "validation": {"enable": True, "path": "data/sample", "steps": 2},
}
MUON = {"optimizer": {"name": "Muon", "lr": 3e-3}}
FLOAT8 = {"float8": {"recipe": "rowwise", "emulate": True}}


def trained(rank: Rank, plans: list[Plan]) -> list[tuple[list[float], list[float], int]]:
    """For each plan: losses of three steps, held-out losses before and after, and the number of Float8 linears."""
    return [_trained(rank, plan) for plan in plans]


def _trained(rank: Rank, plan: Plan) -> tuple[list[float], list[float], int]:
    device = torch.device("cpu")
    world = build_mesh(plan.mesh, "cpu")
    group = data_group(world)
    module = build_model(plan, world, device)
    optimizer = build_optimizer(module, plan.optimizer, muon_parameters(plan.model))
    loss = loss_function(plan, world)
    validator = Validator(plan, rank.index, partial(open_text, plan)) if plan.job.validation.enable else None
    measure = partial(batch_loss, plan, module, measured_loss(plan, world))
    loader = _loader(plan, data_rank(plan.mesh, rank.index), plan.mesh.dp, plan.batch.local_batch_size)
    held_out = [validator.run(module, measure, device, group).loss] if validator else []
    losses = []
    for step in range(3):
        batch = shard_sequences(loader.next_batch(), plan, rank.index)
        losses.append(train_step(plan, module, optimizer, loss, batch, step + 1, step, device, group).loss)
    if validator:
        held_out.append(validator.run(module, measure, device, group).loss)
    return losses, held_out, len(converted_linears(module))


def plan_of(row: Row) -> Plan:
    from dataclasses import replace

    plan = compile_row(row)
    held_out = replace(plan.job.validation, path=plan.data.path)
    return replace(plan, job=replace(plan.job, validation=held_out))


def results(*rows: Row) -> list[tuple[list[float], list[float], int]]:
    plans = [plan_of(row) for row in rows]
    found = run_ranks(trained, plans[0].mesh.world_size, plans, timeout=120.0)
    assert all([r[:2] for r in other] == [r[:2] for r in found[0]] for other in found)
    return found[0]


def rows(sections: dict[str, Any], *which: dict[str, int]) -> list[Row]:
    return [Row(str(degrees), degrees, sections=sections) for degrees in which]


@pytest.fixture(scope="module")
def one_rank() -> dict[str, tuple[list[float], list[float], int]]:
    kinds = {"plain": {}, "held out": HELD_OUT, "muon": MUON, "float8": FLOAT8}
    found = results(*(Row(name, {"dp_shard": 1}, sections=sections) for name, sections in kinds.items()))
    return dict(zip(kinds, found, strict=True))


def test_the_z_loss_bends_training_and_validation_sees_it(one_rank) -> None:
    assert one_rank["held out"][0][0] == one_rank["plain"][0][0]
    assert one_rank["held out"][0][2] != pytest.approx(one_rank["plain"][0][2], rel=1e-5)
    before, after = one_rank["held out"][1]
    assert after < before


def test_held_out_and_training_losses_are_those_of_one_rank(one_rank) -> None:
    schedules = [
        pipeline(schedule, 2, schedule, sections=HELD_OUT) for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
    ]
    two = results(*rows(HELD_OUT, {"tp": 2}, {"cp": 2}, {"dp_shard": 2}), *schedules)
    # Validation without a backward must leave what was resharded in part where training and the optimizer look for it.
    partly = Row("resharded in part", {"dp_shard": 4}, {"fsdp_reshard_after_forward": 2}, HELD_OUT)
    four = results(*rows(HELD_OUT, {"tp": 2, "dp_shard": 2}, {"cp": 2, "tp": 2}), partly)
    for losses, held_out, _ in (*two, *four):
        assert losses == pytest.approx(one_rank["held out"][0], rel=1e-5)
        assert held_out == pytest.approx(one_rank["held out"][1], rel=1e-5)


def test_a_pipeline_that_takes_the_loss_in_chunks_validates_like_one_rank(one_rank) -> None:
    chunked = {**HELD_OUT, "loss": {"z_loss": 0.1, "chunks": 4}}
    compiled = {**chunked, "compile": {"enable": True, "backend": "aot_eager"}}
    tied = {"model": TIED}
    two = results(
        *(pipeline(schedule, 2, schedule, sections=chunked) for schedule in ("GPipe", "Interleaved1F1B", "DualPipeV")),
        pipeline("compiled", 2, "ZBVZeroBubble", sections=compiled),
    )
    four = results(pipeline("tp", 2, "1F1B", degrees={"tp": 2}, sections=chunked))
    for losses, held_out, _ in (*two, *four):
        assert losses == pytest.approx(one_rank["held out"][0], rel=1e-5)
        assert held_out == pytest.approx(one_rank["held out"][1], rel=1e-5)
    # The last stage's copy of a tied weight is as new as the first stage's.
    (_, expected, _) = results(Row("one", {"dp_shard": 1}, sections={**HELD_OUT, **tied}))[0]
    (_, found, _) = results(pipeline("tied", 2, "ZBVZeroBubble", sections={**chunked, **tied}))[0]
    assert found == pytest.approx(expected, rel=1e-5)


def test_muon_updates_whole_matrices_whatever_cuts_them(one_rank) -> None:
    found = results(*rows(MUON, {"tp": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 4}))
    for losses, _, _ in found:
        assert losses == pytest.approx(one_rank["muon"][0], rel=1e-4)
    assert one_rank["muon"][0][2] != pytest.approx(one_rank["plain"][0][2], rel=1e-3)


def test_muon_on_a_pipeline_of_which_one_rank_holds_no_matrix(one_rank) -> None:
    apart = {"module_fqns_per_model_part": [["tok_embeddings"], ["layers.0-7", "norm", "output"]]}
    (losses, _, _), *_ = results(pipeline("embedding alone", 2, "1F1B", parallelism=apart, sections=MUON))
    assert losses == pytest.approx(one_rank["muon"][0], rel=1e-4)


def test_float8_goes_with_the_other_axes(one_rank) -> None:
    linears = one_rank["float8"][2]
    assert linears == 8 * 7 + 1
    found = results(*rows(FLOAT8, {"tp": 2}, {"cp": 2}), pipeline("pp", 2, "1F1B", sections=FLOAT8))
    for losses, _, _ in found:
        # Scales in backward depend on which rows a rank has.
        assert losses == pytest.approx(one_rank["float8"][0], rel=2e-3)
        assert losses[0] != pytest.approx(one_rank["plain"][0][0], rel=1e-6)
