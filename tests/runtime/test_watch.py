"""What the watch says about ranks that are not there. Real killed and stopped ranks: tests/runtime/test_command_line.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.harness import Rank, RanksFailed, run_ranks
from titan_runtime.watch import Watch, claim, connect_again, said, wait_until_said

SECONDS = 2.0  # a roll call takes three eighths of it


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def watches(store: dist.TCPStore) -> Iterator[list[Watch]]:
    """Of three ranks, with a connection each; not started."""
    made = []
    for rank in range(3):
        own = connect_again(store, timedelta(seconds=20))
        assert own is not None
        made.append(Watch(own, rank, 3, SECONDS))
    yield made
    for watch in made:
        watch.end("done")


def test_a_rank_without_a_sign_of_life_is_named(watches: list[Watch]) -> None:
    watches[0].start()
    watches[1].start()
    found = watches[0].who_is_missing()
    assert found is not None
    assert found.startswith("rank 2 gives no sign of life: it was killed or stopped, or its machine is gone\n    try: ")


def test_several_are_named_together(watches: list[Watch]) -> None:
    watches[1].start()
    assert str(watches[1].who_is_missing()).startswith("ranks 0, 2 give no sign of life: they were killed")


def test_a_rank_that_ended_with_a_traceback_is_not_said_to_be_killed(watches: list[Watch]) -> None:
    for watch in watches:
        watch.start()
    watches[2].end("error")
    assert watches[0].who_is_missing() == "rank 2 ended with an error of its own, printed above"


def test_a_rank_that_lives_but_hangs_is_named(watches: list[Watch]) -> None:
    for watch in watches:
        watch.start()
    found: list[str | None] = []
    asking = [threading.Thread(target=lambda w=w: found.append(w.who_is_missing())) for w in (watches[0], watches[2])]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert "all ranks are alive, but rank 1 did not come to where the others waited" in "\n".join(map(str, found))


def test_one_that_comes_later_says_nothing_when_it_has_been_said(store: dist.TCPStore, watches: list[Watch]) -> None:
    watches[0].start()
    assert watches[0].who_is_missing() is not None
    assert not said(store)
    assert claim(store)
    assert not claim(store)
    assert said(store)
    assert watches[1].who_is_missing() is None


def test_waiting_for_a_word_ends_with_it(store: dist.TCPStore) -> None:
    speaker = threading.Timer(0.2, claim, [connect_again(store, timedelta(seconds=20))])
    speaker.start()
    wait_until_said(store)
    assert said(store)


def test_a_store_in_memory_has_no_second_connection() -> None:
    assert connect_again(dist.HashStore(), timedelta(seconds=1)) is None


def in_a_collective_that_never_returns(rank: Rank) -> None:
    """Rank 0 hosts the store and gives no sign of life; the others wait for it for ever."""
    if rank.index == 0:
        hosted = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        rank.store.set("port", str(hosted.port))
    else:
        port = int(rank.store.get("port"))
        own = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False)
        Watch(own, rank.index, rank.world_size, SECONDS).start()
    threading.Event().wait()


def test_ranks_that_wait_in_a_collective_that_never_returns_are_ended() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(in_a_collective_that_never_returns, 3, process_group=False)
    assert failure.value.errors[1] == failure.value.errors[2] == "ended without an answer: exit code 1"
    printed = failure.value.output
    # Once, by the rank that watches the silent one.
    assert "titan: rank 2: rank 0 gives no sign of life for " in printed[2]
    assert printed[1] == ""
