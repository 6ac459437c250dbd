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
    "hsdp 2x2",
    "pp 2 uneven stages",
)


def row(name: str) -> Row:
    return next(entry for entry in ROWS if entry.name == name)


def saving(name: str, folder: Path, steps: int) -> Plan:
    plan = compile_row(row(name))
    checkpoint = replace(plan.job.checkpoint, enable=True, interval=1000)
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


def test_moving_from_mesh_to_mesh_changes_nothing(tmp_path: Path) -> None:
    total = STEPS_EACH * len(CHAIN)
    expected = train_ranks(saving("one rank", tmp_path / "straight", total))
    found: list[dict[str, Any]] = []
    for number, name in enumerate(CHAIN, start=1):
        found = train_ranks(saving(name, tmp_path / "moved", STEPS_EACH * number))
        assert len(found) == STEPS_EACH * number, name
    assert len(expected) == total
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5), f"after {CHAIN[(theirs['step'] - 1) // STEPS_EACH]}"


TIED_CHAIN = (
    "tp 2, tied weights",
    "pp 2 ZBVZeroBubble, tied weights",
    "pp 2 x tp 2 DualPipeV, tied, accumulation 2, loss in 4 chunks",
    "pp 2, tied weights",
    "pp 2 x dp 2 ZBVZeroBubble, tied weights",
)


def test_a_tied_weight_that_one_rank_holds_twice_moves_along(tmp_path: Path) -> None:
    """It is saved once, with the moments of one; and the copy is loaded with it."""
    total = STEPS_EACH * len(TIED_CHAIN)
    expected = train_ranks(saving("tp 2, tied weights", tmp_path / "straight", total))
    found: list[dict[str, Any]] = []
    for number, name in enumerate(TIED_CHAIN, start=1):
        found = train_ranks(saving(name, tmp_path / "moved", STEPS_EACH * number))
    assert len(found) == total
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5), f"after {TIED_CHAIN[(theirs['step'] - 1) // STEPS_EACH]}"
