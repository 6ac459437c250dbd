"""The parity suite on GPUs: one process on one GPU against as many GPUs as a row has ranks; NCCL throughout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.suite import DETERMINISTIC, EXACT, ONE_WITH_EXPERTS, OTHERS, kernels, outcomes
from tests.parity.rows import Row
from tests.parity.suite import BY_NAME, Bounds, Outcome, check, check_same_bits, show


def parameters(rows: tuple[tuple[Row, Bounds], ...]) -> list:
    # `world` is what tests/gpu/conftest.py compares with the number of devices.
    return [pytest.param(row, bounds, row.ranks, id=row.name) for row, bounds in rows]


@pytest.fixture(scope="module")
def results(request) -> Iterator[dict[str, Outcome]]:
    """The outcomes of the rows that were selected and have enough devices; printed as a table at the end."""
    selected = [
        item.callspec.params["row"]
        for item in request.session.items
        if item.module is request.module
        and hasattr(item, "callspec")
        and "bounds" in item.callspec.params
        and item.get_closest_marker("skip") is None
    ]
    found = outcomes(selected)
    yield found
    show(request, selected, found)


def judge(row: Row, bounds: Bounds, results: dict[str, Outcome]) -> None:
    outcome = results[row.name]
    if outcome.lacking is not None:
        pytest.skip(outcome.lacking)
    check(outcome, bounds)


@pytest.mark.parametrize(("row", "bounds", "world"), parameters(EXACT))
def test_row(row: Row, bounds: Bounds, world: int, results) -> None:
    judge(row, bounds, results)
    if row.same_bits_as is not None:
        check_same_bits(results[row.name], results[row.same_bits_as])


@pytest.mark.parametrize(("row", "bounds", "world"), parameters(OTHERS))
def test_row_in_other_precisions(row: Row, bounds: Bounds, world: int, results) -> None:
    judge(row, bounds, results)


@pytest.mark.parametrize(("row", "world"), [pytest.param(row, row.ranks, id=row.name) for row in DETERMINISTIC])
def test_the_same_plan_has_the_same_bits(row: Row, world: int) -> None:
    first, second = (outcomes([row])[row.name] for _ in range(2))
    assert first.failure is None, first.failure
    check_same_bits(first, second)


def in_bf16(row: Row) -> Row:
    return row.over("bf16", training={"mixed_precision_param": "bfloat16"})


@pytest.mark.parametrize("world", [1])
def test_experts_in_bfloat16_use_the_grouped_product(world: int) -> None:
    assert kernels(in_bf16(ONE_WITH_EXPERTS))["aten._grouped_mm.default"] == 5 * 3  # layers, weights


@pytest.mark.parametrize("world", [2])
def test_the_ring_in_bfloat16_uses_the_flash_kernel(world: int) -> None:
    # Eight layers; a rank's own keys, and at least one piece of the other's.
    assert kernels(in_bf16(BY_NAME["cp 2 ring"]))["aten._scaled_dot_product_flash_attention.default"] >= 2 * 8
