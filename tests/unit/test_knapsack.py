"""The knapsack over counts of layers: equal to brute force on small problems, and to a mixed-integer program on large ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp

from titan_planner.knapsack import Kind, Option, least_seconds


def problem(seed: int, most: int, kinds: int, options: int) -> tuple[list[Kind], list[float]]:
    """Random kinds, and budgets between what the smallest options and what the fastest need."""
    draw = random.Random(seed)
    moments = draw.randint(1, 3)
    found = []
    for _ in range(draw.randint(1, kinds)):
        choices = [Option(0.0, draw.uniform(5, 10))]
        for _ in range(draw.randint(0, options - 1)):
            choices.append(Option(draw.uniform(0.1, 3), draw.uniform(0.5, 9)))
        held = tuple(float(draw.randint(0, 6)) for _ in range(moments))
        found.append(Kind(draw.randint(1, most), held, tuple(choices)))
    budgets = []
    for p in range(moments):
        low = sum(k.count * k.held[p] * min(o.nbytes for o in k.options) for k in found)
        high = sum(k.count * k.held[p] * max(o.nbytes for o in k.options) for k in found)
        budgets.append(low + draw.uniform(-0.05, 1.05) * (high - low))
    return found, budgets


def splits(items: int, options: int) -> Iterator[tuple[int, ...]]:
    if options == 1:
        yield (items,)
        return
    for first in range(items + 1):
        for rest in splits(items - first, options - 1):
            yield (first, *rest)


def cost(kinds: list[Kind], counts: tuple[tuple[int, ...], ...], budgets: list[float]) -> float:
    """Seconds, infinite where a budget is exceeded by more than rounding."""
    for p, budget in enumerate(budgets):
        used = sum(
            kind.held[p] * sum(c * o.nbytes for c, o in zip(taken, kind.options, strict=True))
            for kind, taken in zip(kinds, counts, strict=True)
        )
        if used > budget + 1e-9 * abs(budget):
            return math.inf
    return sum(
        sum(c * o.seconds for c, o in zip(taken, k.options, strict=True))
        for k, taken in zip(kinds, counts, strict=True)
    )


@pytest.mark.parametrize("block", range(10))
def test_small_problems_equal_brute_force(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        kinds, budgets = problem(seed, most=4, kinds=2, options=3)
        every = itertools.product(*(splits(k.count, len(k.options)) for k in kinds))
        best = min(cost(kinds, counts, budgets) for counts in every)
        found = least_seconds(kinds, budgets)
        if found is None:
            assert best == math.inf, seed
            continue
        assert cost(kinds, found.counts, budgets) == pytest.approx(found.seconds, rel=1e-9), seed
        assert found.seconds == pytest.approx(best, rel=1e-9, abs=1e-12), seed


@pytest.mark.parametrize("block", range(5))
def test_large_problems_equal_a_mixed_integer_program(block: int) -> None:
    for seed in range(1000 + 40 * block, 1040 + 40 * block):
        kinds, budgets = problem(seed, most=126, kinds=2, options=4)
        found = least_seconds(kinds, budgets)
        seconds = [o.seconds for k in kinds for o in k.options]
        rows, lower, upper = [], [], []
        start = 0
        for kind in kinds:
            row = np.zeros(len(seconds))
            row[start : start + len(kind.options)] = 1
            start += len(kind.options)
            rows.append(row)
            lower.append(kind.count)
            upper.append(kind.count)
        for p, budget in enumerate(budgets):
            rows.append(np.array([kind.held[p] * o.nbytes for kind in kinds for o in kind.options]))
            lower.append(-np.inf)
            upper.append(budget)
        result = milp(
            np.array(seconds),
            constraints=LinearConstraint(np.array(rows), lower, upper),
            integrality=np.ones(len(seconds)),
            options={"mip_rel_gap": 0.0},
        )
        if found is None:
            assert not result.success, seed
            continue
        assert cost(kinds, found.counts, budgets) < math.inf, seed
        assert result.success, seed
        # HiGHS allows 1e-6 of a constraint and of integrality.
        assert found.seconds == pytest.approx(result.fun, rel=1e-5, abs=1e-6), seed


def test_what_fits_takes_nothing_and_what_cannot_fit_is_refused() -> None:
    kind = Kind(126, (8.0,), (Option(0.0, 10.0), Option(1.0, 1.0)))
    assert least_seconds([kind], [8 * 126 * 10.0]).counts == ((126, 0),)  # type: ignore[union-attr]
    assert least_seconds([kind], [8 * 126 * 1.0]).counts == ((0, 126),)  # type: ignore[union-attr]
    assert least_seconds([kind], [8 * 126 * 1.0 - 1]) is None
    # One layer more than half of what all need: as few as possible recompute.
    assert least_seconds([kind], [8 * (63 * 10.0 + 63)]).counts == ((63, 63),)  # type: ignore[union-attr]
