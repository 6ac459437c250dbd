"""The rows can be checked anywhere: a plan that no longer passes its rules would only be noticed on a GPU."""

from __future__ import annotations

import pytest

from tests.gpu.rows import ROWS, Row
from titan_planner.ir.verify import verify
from titan_runtime.capabilities import unsupported


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_plan_is_legal_and_supported(row: Row) -> None:
    assert verify(row.plan) == ()
    assert unsupported(row.plan) == []
