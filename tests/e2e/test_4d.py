"""All axes at once: pipeline x data x context x tensor on sixteen ranks, real text, torchrun, a checkpoint and a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import plans
from tests.runtime.test_command_line import call, torchrun

PLAN = plans.REPOSITORY / "plans" / "tiny_4d_cpu" / "plan.json"
FIRST, LAST = 5, 10


@pytest.mark.slow
def test_sixteen_ranks_learn_save_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = json.loads(PLAN.read_text())
    assert {axis: plan["mesh"][axis] for axis in ("pp", "dp_shard", "cp", "tp")} == dict.fromkeys(
        ("pp", "dp_shard", "cp", "tp"), 2
    )
    (tmp_path / "data").symlink_to(plans.REPOSITORY / "data")
    (tmp_path / "plan.json").symlink_to(PLAN)
    # Sixteen interpreters share few cores.
    monkeypatch.setattr("tests.runtime.test_command_line.TIMEOUT", 600)
    options = ["--dump-folder", "out", "--checkpoint-interval", "1000", "--no-tensorboard"]
    metrics = tmp_path / "out" / "metrics.jsonl"

    first = call(torchrun("--steps", str(FIRST), *options, ranks=16), tmp_path)
    assert first.returncode == 0, first.stderr
    assert (tmp_path / "out" / "checkpoint" / f"step-{FIRST}" / ".metadata").exists()
    before = metrics.read_text().splitlines()
    assert len(before) == FIRST

    again = call(torchrun("--steps", str(LAST), *options, ranks=16), tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"titan: resuming from out/checkpoint/step-{FIRST}" in again.stdout
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, LAST + 1))
    assert metrics.read_text().splitlines()[:FIRST] == before
    losses = [line["loss"] for line in lines]
    assert losses[-1] < losses[FIRST - 1] < losses[0]
    assert losses[-1] < losses[0] - 0.5
    # Weights that were not restored would begin again at the first loss.
    assert losses[FIRST] < (losses[0] + losses[FIRST - 1]) / 2
