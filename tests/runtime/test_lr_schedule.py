"""The learning-rate curve at the steps where something happens."""

from __future__ import annotations

import math

import pytest

from titan_planner.ir.job import LrSchedule
from titan_runtime.lr_schedule import lr_factor


def curve(**changes: object) -> LrSchedule:
    values = {"warmup_steps": 4, "total_steps": 20, "decay_steps": 5, "decay_type": "linear", "min_lr_factor": 0.0}
    return LrSchedule(**{**values, **changes})


def test_warmup_starts_above_zero_and_reaches_one_when_it_is_over() -> None:
    assert [lr_factor(curve(), step) for step in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_the_stable_part_is_one() -> None:
    assert {lr_factor(curve(), step) for step in range(4, 15)} == {1.0}


def test_linear_decay_moves_in_the_last_step_and_is_zero_only_after_it() -> None:
    assert [lr_factor(curve(), step) for step in range(15, 22)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])


def test_decay_ends_at_the_least_factor() -> None:
    schedule = curve(min_lr_factor=0.1)
    assert [lr_factor(schedule, step) for step in (15, 17, 19, 20, 99)] == pytest.approx([1.0, 0.64, 0.28, 0.1, 0.1])


@pytest.mark.parametrize(
    ("shape", "middle"),
    [("linear", 0.6), ("sqrt", 1 - math.sqrt(0.4)), ("cosine", 0.5 * (1 + math.cos(0.4 * math.pi)))],
)
def test_shapes_of_decay(shape: str, middle: float) -> None:
    schedule = curve(decay_type=shape)
    assert lr_factor(schedule, 15) == 1.0
    assert lr_factor(schedule, 17) == pytest.approx(middle)
    factors = [lr_factor(schedule, step) for step in range(15, 21)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == 0.0


def test_without_warmup_the_first_step_has_the_full_rate_and_without_decay_the_last_has() -> None:
    schedule = curve(warmup_steps=0, decay_steps=0)
    assert [lr_factor(schedule, step) for step in (0, 19)] == [1.0, 1.0]


def test_a_curve_that_is_all_warmup_and_decay() -> None:
    schedule = curve(warmup_steps=2, decay_steps=2, total_steps=4)
    assert [lr_factor(schedule, step) for step in range(5)] == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5, 0.0])
