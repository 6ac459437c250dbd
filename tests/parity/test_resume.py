"""A run that is moved from mesh to mesh at every checkpoint trains as if it had never been moved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Rank, run_ranks
from tests.parity.rows import ROWS, Row
from tests.parity.runner import compile_row
from titan_planner.ir.plan import Plan

STEPS_EACH = 2
CHAIN = (
    "one rank",
    "pp 2 1F1B",
    "dp 2",
    "pp 2 x dp 2 ZBVZeroBubble",
    "pp 4 Interleaved1F1B",
    "cp 2 x dp 2, ignored labels unequal",
    "tp 4, each of 2 KV heads on 2 ranks",
    "hsdp 2x2",
    "pp 2 uneven stages",
)


def row(name: str) -> Row:
    return next(entry for entry in ROWS if entry.name == name)


def saving(name: str, folder: Path, steps: int) -> Plan:
    plan = compile_row(row(name))
    checkpoint = replace(plan.job.checkpoint, enable=True, interval=1000)
    # A curve that is longer than any chain: with a learning rate of 0 every mesh would have the same weights.
    plan = replace(plan, lr_schedule=replace(plan.lr_schedule, total_steps=100))
    return replace(plan, job=replace(plan.job, steps=steps, dump_folder=str(folder), checkpoint=checkpoint))


def train_rank(rank: Rank, plan: Plan, written: Plan) -> int:
    from titan_runtime.train import train

    return train(plan, rank.index, rank.world_size, rank.store, written_plan=written)


def train_ranks(plan: Plan) -> list[dict[str, Any]]:
    # What a checkpoint stores is the plan as its file has it: with relative paths.
    written = replace(plan, data=replace(plan.data, path="data", tokenizer="tokenizer.json"))
    written = replace(written, job=replace(plan.job, dump_folder="out"))
    assert run_ranks(train_rank, plan.mesh.world_size, plan, written, process_group=False, timeout=120)
    folder = Path(plan.job.dump_folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def move(chain: tuple[str, ...], folder: Path) -> None:
    """Assert that a run which changes its mesh every two steps equals one that stays on the first."""
    total = STEPS_EACH * len(chain)
    expected = train_ranks(saving(chain[0], folder / "straight", total))
    found: list[dict[str, Any]] = []
    for number, name in enumerate(chain, start=1):
        found = train_ranks(saving(name, folder / "moved", STEPS_EACH * number))
        assert len(found) == STEPS_EACH * number, name
    assert len(expected) == total
    assert min(line["lr"] for line in expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5), f"after {chain[(theirs['step'] - 1) // STEPS_EACH]}"


def test_moving_from_mesh_to_mesh_changes_nothing(tmp_path: Path) -> None:
    move(CHAIN, tmp_path)


TIED_CHAIN = (
    "tp 2, tied weights",
    "pp 2 ZBVZeroBubble, tied weights",
    "pp 2 x tp 2 DualPipeV, tied, accumulation 2, loss in 4 chunks",
    "pp 2, tied weights",
    "pp 2 x dp 2 ZBVZeroBubble, tied weights",
)


def test_a_tied_weight_that_one_rank_holds_twice_moves_along(tmp_path: Path) -> None:
    """It is saved once, with the moments of one; and the copy is loaded with it."""
    move(TIED_CHAIN, tmp_path)


# Twelve steps in all: in step 13 two scores are so nearly equal that runs which never move choose differently, too.
EXPERTS_CHAIN = (
    "experts, dp 2",
    "experts, tp 2 with ep 2",
    "experts, ep 4",
    "experts, tp 2 x dp 2 with ep 2 and etp 2",
    "experts, pp 2 x tp 2 with ep 2",
    "experts, cp 2 x dp 2 with ep 2",
)


def test_experts_and_their_biases_move_along(tmp_path: Path) -> None:
    """Cut by experts, cut inside, whole, and on two stages: weights, moments, biases and what is logged of them."""
    move(EXPERTS_CHAIN, tmp_path)
