"""The command line changes the run, never a decision."""

from __future__ import annotations

import argparse

import pytest

from tests import plans
from titan_planner.ir.codec import digest
from titan_runtime.errors import RunError
from titan_runtime.overrides import add_arguments, apply_overrides


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_options_change_the_job_and_paths_and_keep_the_digest() -> None:
    plan = plans.tiny_plan()
    words = (
        "--steps 3 --dump-folder d --log-freq 2 --tensorboard --checkpoint --checkpoint-interval 4 --keep-latest-k 5"
    )
    words += " --load-step 6 --profile --data-path t --tokenizer k"
    changed = apply_overrides(plan, parsed(*words.split()))
    job = changed.job
    assert (job.steps, job.dump_folder, job.metrics.log_freq, job.metrics.enable_tensorboard) == (3, "d", 2, True)
    saves = job.checkpoint
    assert (saves.enable, saves.interval, saves.keep_latest_k, saves.load_step) == (True, 4, 5, 6)
    assert (job.profiling.enable_profiling, changed.data.path, changed.data.tokenizer) == (True, "t", "k")
    assert digest(changed) == digest(plan)
    assert apply_overrides(plan, parsed()) == plan


def test_switches_can_turn_things_off() -> None:
    plan = apply_overrides(plans.tiny_plan(), parsed("--tensorboard", "--checkpoint"))
    off = apply_overrides(plan, parsed("--no-tensorboard", "--no-checkpoint"))
    assert (off.job.metrics.enable_tensorboard, off.job.checkpoint.enable) == (False, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "`steps` is 0, but it must be at least 1"),
        (["--keep-latest-k", "1"], "`keep_latest_k` is 1, but a failed save would then leave no complete checkpoint"),
        (["--log-freq", "-1"], "`log_freq` is -1, but it must be at least 1"),
    ],
)
def test_values_are_checked_as_in_a_plan(words: list[str], message: str) -> None:
    with pytest.raises(RunError, match=f"on the command line: {message}"):
        apply_overrides(plans.tiny_plan(), parsed(*words))


def test_validation_can_be_pointed_elsewhere_and_needs_a_text() -> None:
    plan = plans.tiny_plan()
    changed = apply_overrides(plan, parsed("--validation", "--validation-path", "held_out", "--wandb"))
    assert (changed.job.validation.enable, changed.job.validation.path) == (True, "held_out")
    assert changed.job.metrics.enable_wandb
    with pytest.raises(RunError, match="validation is on, but names no text"):
        apply_overrides(plan, parsed("--validation"))
