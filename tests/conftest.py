"""Fixtures of all tests. Torch is not imported here: the planner's tests must not pay for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

# Before any test imports torch: the harness forks, and a fork must not have lost threads of a pool.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """`tests.harness.run_ranks`: run a function on forked ranks. Torch is imported when the first test asks for it."""
    from tests.harness import run_ranks

    return run_ranks
