"""The product's core promise: any mesh trains the same model. Prints its table: row, ranks, largest relative errors.

Tolerances: losses and gradient norms of all 10 steps within a relative 1e-5 of one plain process, in float32. Weights
within 1e-5 in the mean; single elements may differ by up to a step of the optimizer, because Adam divides by the root of
the squared gradient: where a gradient is nearly zero, a rounding error in it is a full step of at most lr either way.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from tests.harness import RanksFailed, run_ranks
from tests.parity.rows import ROWS, Row
from tests.parity.runner import Curve, compile_row, key_of_reference, reference, run_rows, worst
from titan_planner.ir.verify import verify

LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def results(request) -> dict[str, tuple[Curve, list[Curve]] | str]:
    """Row -> (the reference, every rank's curve), or what went wrong. One launch of ranks for each world size.

    Only rows that were selected (`-k`) are run.
    """
    selected = {
        item.callspec.params["row"].name
        for item in request.session.items
        if hasattr(item, "callspec") and "row" in item.callspec.params
    }
    references: dict[str, Curve] = {}
    by_ranks: dict[int, list[Row]] = defaultdict(list)
    found: dict[str, tuple[Curve, list[Curve]] | str] = {}
    for row in ROWS:
        if row.name in selected:
            by_ranks[row.ranks].append(row)
    for ranks, rows in by_ranks.items():
        plans = [(compile_row(row), row.masked) for row in rows]
        for (plan, masked), row in zip(plans, rows, strict=True):
            key = key_of_reference(row)
            if key not in references:
                references[key] = reference(plan, masked)
        try:
            curves = run_ranks(run_rows, ranks, plans, timeout=600)
        except RanksFailed:
            # One row broke the launch: run them alone, so that each says for itself.
            curves = [[] for _ in range(ranks)]
            for number, plan in enumerate(plans):
                try:
                    for rank, alone in enumerate(run_ranks(run_rows, ranks, [plan], timeout=120)):
                        curves[rank].append(alone[0])
                except RanksFailed as failure:
                    found[rows[number].name] = str(failure)
                    for rank in range(ranks):
                        curves[rank].append(None)
        for number, row in enumerate(rows):
            if row.name not in found:
                found[row.name] = (references[key_of_reference(row)], [curve[number] for curve in curves])
    return found


@pytest.fixture(scope="module", autouse=True)
def table(results, request):
    """Print the table at the end, past pytest's capturing."""
    yield
    lines = [f"{'row':58} {'ranks':>5} {'loss':>9} {'norm':>9} {'weights':>9}"]
    for row in ROWS:
        if row.name not in results:
            continue
        outcome = results[row.name]
        if isinstance(outcome, str):
            lines.append(f"{row.name:58} {row.ranks:5}  failed")
            continue
        expected, curves = outcome
        loss = worst(curves[0].losses, expected.losses)
        norm = worst(curves[0].norms, expected.norms)
        weights = max(mean_difference(curve, expected) for curve in curves)
        lines.append(f"{row.name:58} {row.ranks:5} {loss:9.1e} {norm:9.1e} {weights:9.1e}")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join(lines))


def mean_difference(curve: Curve, expected: Curve) -> float:
    """Largest mean absolute difference of a weight, over this rank's weights."""
    return max((w - expected.weights[fqn]).abs().mean().item() for fqn, w in curve.weights.items())


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_row(row: Row, results) -> None:
    outcome = results[row.name]
    assert not isinstance(outcome, str), outcome
    expected, curves = outcome
    for curve in curves:
        assert curve.losses == curves[0].losses, "every rank logs the loss"
        assert curve.norms == curves[0].norms
    assert worst(curves[0].losses, expected.losses) <= LOSS_TOLERANCE
    assert worst(curves[0].norms, expected.norms) <= LOSS_TOLERANCE
    assert min(expected.norms) > 0.3, "every step clips"
    assert expected.losses[-1] < expected.losses[0] - 0.3, "the reference learns"
    held = set().union(*(curve.weights.keys() for curve in curves))
    assert held == expected.weights.keys()
    for curve in curves:
        assert mean_difference(curve, expected) <= WEIGHT_TOLERANCE
        for fqn, weight in curve.weights.items():
            torch.testing.assert_close(weight, expected.weights[fqn], rtol=1e-3, atol=6e-3, msg=fqn)


def test_split_backward_with_resharding_would_lose_every_weight_gradient() -> None:
    """Why the rule pp-split-backward-reshard exists, and that the runtime would notice if the rule were passed by."""
    row = next(row for row in ROWS if row.name == "pp 2 x dp 2 ZBVZeroBubble")
    plan = compile_row(row)
    units = tuple(replace(unit, reshard_after_forward=True) for unit in plan.fsdp.units)
    resharding = replace(plan, fsdp=replace(plan.fsdp, units=units))
    assert "pp-split-backward-reshard" in {complaint.rule for complaint in verify(resharding)}
    with pytest.raises(RanksFailed, match="ZBVZeroBubble computed no gradient of layers"):
        run_ranks(run_rows, row.ranks, [(resharding, False)], timeout=60)
