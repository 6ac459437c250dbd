"""The product's core promise: any mesh trains the same model. Prints its table: row, ranks, largest relative errors.

Tolerances (`suite.CPU`): losses and gradient norms of all 10 steps within a relative 1e-5 of one plain process, in float32,
weights within 1e-5 in the mean, and the experts' biases within 1e-6. Rows that recompute activations equal the row that
keeps them to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.harness import RanksFailed, run_ranks
from tests.parity.rows import MORE, ROWS, Row
from tests.parity.runner import compile_row, run_rows
from tests.parity.suite import BY_NAME, CPU, Outcome, check, check_same_bits, run_suite, show
from titan_planner.ir.verify import verify


@pytest.fixture(scope="module")
def results(request) -> Iterator[dict[str, Outcome]]:
    """The outcomes of the rows that were selected (`-k`); printed as a table at the end."""
    selected = {
        item.callspec.params["row"].name
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec") and "row" in item.callspec.params
    }
    found = run_suite([row for row in ROWS if row.name in selected])
    yield found
    show(request, ROWS, found)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (row.name in MORE)) for row in ROWS]
)
def test_row(row: Row, results) -> None:
    check(results[row.name], CPU)
    if row.same_bits_as is not None:
        check_same_bits(results[row.name], results[row.same_bits_as])


def test_split_backward_with_resharding_would_lose_every_weight_gradient() -> None:
    """Why the rule pp-split-backward-reshard exists, and that the runtime would notice if the rule were passed by."""
    row = BY_NAME["pp 2 x dp 2 ZBVZeroBubble"]
    plan = compile_row(row)
    units = tuple(replace(unit, reshard_after_forward=True) for unit in plan.fsdp.units)
    resharding = replace(plan, fsdp=replace(plan.fsdp, units=units))
    assert "pp-split-backward-reshard" in {complaint.rule for complaint in verify(resharding)}
    with pytest.raises(RanksFailed, match="ZBVZeroBubble computed no gradient of layers"):
        run_ranks(run_rows, row.ranks, [(resharding, False)], timeout=60, process_group=False)


def test_every_row_that_is_marked_slow_exists() -> None:
    assert {row.name for row in ROWS} >= MORE
