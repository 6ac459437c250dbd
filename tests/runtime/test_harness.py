"""The harness itself: results, errors and hangs of forked ranks."""

from __future__ import annotations

import os
import time

import pytest

from tests.harness import Rank, RanksFailed, run_ranks


def test_results_come_back_in_rank_order_and_ranks_can_talk() -> None:
    def total(rank: Rank, base: int) -> tuple[int, int]:
        import torch
        import torch.distributed as dist

        value = torch.tensor(base + rank.index)
        dist.all_reduce(value)
        return rank.index, int(value)

    assert run_ranks(total, 4, 10) == [(0, 46), (1, 46), (2, 46), (3, 46)]


def test_an_error_brings_its_traceback_and_what_was_printed() -> None:
    def fails(rank: Rank) -> None:
        print(f"hello from {rank.index}")
        if rank.index == 1:
            raise KeyError("the reason")

    with pytest.raises(RanksFailed, match="KeyError: 'the reason'") as caught:
        run_ranks(fails, 2)
    assert set(caught.value.errors) == {1}
    assert "hello from 1" in str(caught.value)


def test_exceptions_outside_of_exception_are_caught_too() -> None:
    def leaves(rank: Rank) -> None:
        raise SystemExit(3)

    with pytest.raises(RanksFailed, match="SystemExit: 3"):
        run_ranks(leaves, 1)


def test_a_rank_that_dies_says_how() -> None:
    with pytest.raises(RanksFailed, match="killed by SIGKILL"):
        run_ranks(lambda rank: os.kill(os.getpid(), 9), 1)


def test_a_hanging_rank_is_killed_and_its_stack_shown() -> None:
    def hangs(rank: Rank) -> None:
        if rank.index == 0:
            time.sleep(60)

    began = time.monotonic()
    with pytest.raises(RanksFailed, match="hung: no answer within 2 s") as caught:
        run_ranks(hangs, 2, timeout=2.0)
    assert time.monotonic() - began < 10
    assert set(caught.value.errors) == {0}
    assert "in hangs" in caught.value.output[0]


def test_no_process_is_left_behind() -> None:
    pids = run_ranks(lambda rank: os.getpid(), 2)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
