"""Launch rows, compare them with one plain process, and print the table; on CPU ranks and on GPUs by the same code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch

from tests.harness import RanksFailed, run_ranks
from tests.parity.rows import ROWS, Row
from tests.parity.runner import Curve, Lacking, compile_row, key_of_reference, references, run_rows, worst

BY_NAME = {row.name: row for row in ROWS}


@dataclass(frozen=True)
class Bounds:
    """How far a row may be from one process: relative for losses and norms, mean absolute for weights.

    Single elements of weights may differ by up to a step of the optimizer (`element`), because Adam divides by the root of
    the squared gradient: where a gradient is nearly zero, a rounding error in it is a full step of at most lr either way.
    None leaves weights unjudged: for precisions whose every step differs.
    """

    loss: float
    norm: float
    weight: float | None
    element: float = 6e-3


CPU = Bounds(loss=1e-5, norm=1e-5, weight=1e-5)
"""float32 on CPU ranks."""


@dataclass
class Outcome:
    """What one process did, and what every rank of the row did; or why there is no such thing."""

    expected: Curve
    curves: list[Curve]
    failure: str | None = None
    lacking: str | None = None


def run_suite(rows: Iterable[Row], gpu: str = "cpu", a_launch: int = 25) -> dict[str, Outcome]:
    """Row name -> its outcome on `gpu` of the catalogue. One launch of ranks for up to `a_launch` rows of a world size.

    Also runs the rows that the given ones must equal to the bit.
    """
    wanted = {row.name: row for row in rows}
    wanted |= {row.same_bits_as: BY_NAME[row.same_bits_as] for row in wanted.values() if row.same_bits_as}
    by_ranks: dict[int, list[Row]] = defaultdict(list)
    for row in wanted.values():
        by_ranks[row.ranks].append(row)
    plans = {name: (compile_row(row, gpu), row.masked) for name, row in wanted.items()}
    plain = {key_of_reference(row): plans[name] for name, row in wanted.items()}
    [curves] = run_ranks(references, 1, list(plain.values()), timeout=600, process_group=False)
    expected = dict(zip(plain, curves, strict=True))
    found: dict[str, Outcome] = {}
    for ranks, group in by_ranks.items():
        for first in range(0, len(group), a_launch):
            part = group[first : first + a_launch]
            for row, outcome in zip(part, _launch(ranks, [plans[row.name] for row in part]), strict=True):
                found[row.name] = Outcome(expected[key_of_reference(row)], [])
                if isinstance(outcome, str):
                    found[row.name].failure = outcome
                elif isinstance(outcome, Lacking):
                    found[row.name].lacking = outcome.reason
                else:
                    found[row.name].curves = outcome
    return found


def _launch(ranks: int, plans: list) -> list[list[Curve] | Lacking | str]:
    """Of every plan the curves of all ranks, or what it lacks, or how it failed."""
    try:
        by_rank = run_ranks(run_rows, ranks, plans, timeout=180 + 30 * len(plans), process_group=False)
    except RanksFailed as failure:
        if len(plans) == 1:
            return [str(failure)]
        # One row broke the launch: run them alone, so that each says for itself.
        return [outcome for plan in plans for outcome in _launch(ranks, [plan])]
    by_row = [list(curves) for curves in zip(*by_rank, strict=True)]
    return [next((one for one in curves if isinstance(one, Lacking)), curves) for curves in by_row]


def check(outcome: Outcome, bounds: Bounds) -> None:
    """Assert that all ranks did what one process does."""
    assert outcome.failure is None, outcome.failure
    expected, curves = outcome.expected, outcome.curves
    for curve in curves:
        assert curve.losses == curves[0].losses, "every rank logs the loss"
        assert curve.norms == curves[0].norms
    assert worst(curves[0].losses, expected.losses) <= bounds.loss
    assert worst(curves[0].norms, expected.norms) <= bounds.norm
    assert min(expected.norms) > 0.3, "every step clips"
    assert expected.losses[-1] < expected.losses[0] - 0.3, "the reference learns"
    assert set().union(*(curve.weights.keys() for curve in curves)) == expected.weights.keys()
    assert set().union(*(curve.biases.keys() for curve in curves)) == expected.biases.keys()
    if bounds.weight is None:
        return
    for curve in curves:
        assert mean_difference(curve, expected) <= bounds.weight
        for fqn, weight in curve.weights.items():
            torch.testing.assert_close(weight, expected.weights[fqn], rtol=1e-3, atol=bounds.element, msg=fqn)
        for fqn, bias in curve.biases.items():
            assert expected.biases[fqn].abs().max() > 1e-3, "the bias moves"
            # Its steps are of a fixed size, whichever way: one wrong count would show as a whole step.
            torch.testing.assert_close(bias, expected.biases[fqn], rtol=0.0, atol=1e-6, msg=fqn)


def check_same_bits(outcome: Outcome, other: Outcome) -> None:
    """Assert that two rows had the same numbers to the last bit."""
    assert other.failure is None, other.failure
    for mine, theirs in zip(outcome.curves, other.curves, strict=True):
        assert (mine.losses, mine.norms) == (theirs.losses, theirs.norms)
        assert mine.weights.keys() == theirs.weights.keys()
        assert mine.biases.keys() == theirs.biases.keys()
        for fqn, tensor in {**mine.weights, **mine.biases}.items():
            assert torch.equal(tensor, {**theirs.weights, **theirs.biases}[fqn]), fqn


def mean_difference(curve: Curve, expected: Curve) -> float:
    """Largest mean absolute difference of a weight, over this rank's weights."""
    return max((w - expected.weights[fqn]).abs().mean().item() for fqn, w in curve.weights.items())


def show(request: pytest.FixtureRequest, rows: Iterable[Row], outcomes: dict[str, Outcome]) -> None:
    """Print the table past pytest's capturing."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n" + table(rows, outcomes))


def table(rows: Iterable[Row], outcomes: dict[str, Outcome]) -> str:
    """The suite's table: row, ranks, largest relative errors of losses and norms, mean error of weights."""
    lines = [f"{'row':62} {'ranks':>5} {'loss':>9} {'norm':>9} {'weights':>9}"]
    for row in rows:
        outcome = outcomes.get(row.name)
        if outcome is None:
            continue
        if not outcome.curves:
            lines.append(f"{row.name:62} {row.ranks:5}  {outcome.lacking or 'failed'}")
            continue
        loss = worst(outcome.curves[0].losses, outcome.expected.losses)
        norm = worst(outcome.curves[0].norms, outcome.expected.norms)
        weights = max(mean_difference(curve, outcome.expected) for curve in outcome.curves)
        lines.append(f"{row.name:62} {row.ranks:5} {loss:9.1e} {norm:9.1e} {weights:9.1e}")
    return "\n".join(lines)
