"""The loop and what surrounds it: signals, garbage, profiles, inputs that do not fit."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import plans
from tests.harness import Rank, RanksFailed, run_ranks
from titan_planner.ir.job import Profiling
from titan_planner.ir.plan import Plan
from titan_runtime.errors import RunError
from titan_runtime.signals import StopRequest, agree_on_flags
from titan_runtime.train import manual_gc, open_data


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    plan = plans.tiny_plan(plans.mesh(2), local=4, job=plans.job(str(tmp_path), 1000, enable=True, interval=1000))

    def run(rank: Rank) -> int:
        from titan_runtime import step, train

        real = step.train_step

        def interrupted(*args, **keywords):
            if rank.index == 1 and keywords["step"] == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*args, **keywords)

        train.train_step = interrupted
        return train.train(plans.on_disk(plan), rank.index, rank.world_size, rank.store)

    output: list[str] = []
    assert run_ranks(run, 2, process_group=False, output=output) == [143, 143]
    assert "stopped by signal 15 after step 3 of 1000; saved; the same command goes on from here" in output[0]
    assert (tmp_path / "checkpoint" / "step-3" / ".metadata").exists()


def test_the_first_signal_is_held_its_echo_ignored_and_a_second_interrupt_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGINT)
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    with StopRequest() as stop:
        assert stop.signal == 0
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT
        now[0] += 0.5
        signal.raise_signal(signal.SIGINT)  # the launcher passes on what the terminal has sent already
        assert ended == []
        now[0] += 5.0
        signal.raise_signal(signal.SIGTERM)
        assert ended == []
        signal.raise_signal(signal.SIGINT)
        assert ended == [130]
    assert signal.getsignal(signal.SIGINT) is before


def test_ranks_agree_on_the_largest_flag() -> None:
    assert run_ranks(lambda rank: agree_on_flags(rank.index * 5, 1 - rank.index), 2) == [[5, 1], [5, 1]]


def test_garbage_is_collected_at_the_same_steps_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr("gc.collect", lambda generation=2: collected.append(generation))
    with manual_gc() as collect:
        assert not gc.isenabled()
        for step in range(1, 121):
            collect(step)
    assert gc.isenabled()
    assert collected == [2, 1, 1]


def test_traces_are_written_as_planned(tmp_path: Path) -> None:
    profiling = Profiling(
        enable_profiling=True,
        save_traces_folder="traces",
        profile_freq=3,
        profiler_active=1,
        profiler_warmup=1,
        enable_memory_snapshot=False,
    )
    plan = plans.tiny_plan(plans.mesh(2), local=4, job=replace(plans.job(str(tmp_path), 7), profiling=profiling))
    run_ranks(train_whole, 2, plan, process_group=False)
    written = sorted(path.relative_to(tmp_path / "traces").as_posix() for path in tmp_path.rglob("rank-*.json"))
    assert written == [f"step-{step}/rank-{rank}.json" for step in (3, 6) for rank in (0, 1)]
    events = json.loads((tmp_path / "traces" / "step-3" / "rank-0.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def train_whole(rank: Rank, plan: Plan) -> int:
    from titan_runtime.train import train

    return train(plans.on_disk(plan), rank.index, rank.world_size, rank.store)


def test_deterministic_runs_are_equal_and_the_option_reaches_torch(tmp_path: Path) -> None:
    def run(rank: Rank, folder: str) -> bool:
        import torch

        plan = plans.tiny_plan(plans.mesh(2), local=4, job=plans.job(folder, 3))
        train_whole(rank, replace(plan, seeds=replace(plan.seeds, deterministic=True)))
        return torch.are_deterministic_algorithms_enabled()

    for name in ("a", "b"):
        assert run_ranks(run, 2, str(tmp_path / name), process_group=False) == [True, True]
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == (tmp_path / "b" / "metrics.jsonl").read_text()


def test_a_curve_that_ends_before_the_run_is_mentioned(tmp_path: Path) -> None:
    plan = plans.tiny_plan(job=plans.job(str(tmp_path), 3))
    plan = replace(plan, lr_schedule=replace(plan.lr_schedule, warmup_steps=0, decay_steps=0, total_steps=2))
    output: list[str] = []
    run_ranks(train_whole, 1, plan, process_group=False, output=output)
    assert "note: the learning-rate curve ends at step 2; later steps train with 0" in output[0]


# ------------------------------------------------------------------ inputs that do not fit


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    plan = plans.on_disk(plans.tiny_plan(model=plans.tiny_model(vocab_size=2000)))
    with pytest.raises(RunError, match="has ids up to 2047, but the model's embedding has 2000 rows"):
        open_data(plan, 0)


@pytest.mark.parametrize(("field", "option"), [("path", "--data-path"), ("tokenizer", "--tokenizer")])
def test_an_unset_path_names_the_option(field: str, option: str) -> None:
    plan = plans.on_disk(plans.tiny_plan())
    with pytest.raises(RunError, match=f"`data.{field}` is not set") as caught:
        open_data(replace(plan, data=replace(plan.data, **{field: None})), 0)
    assert caught.value.hint == f"start with {option} PATH"


def test_a_folder_that_cannot_be_made_is_one_sentence_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plan = plans.tiny_plan(plans.mesh(2), local=4, job=plans.job(str(tmp_path / "file" / "out"), 3))
    with pytest.raises(RanksFailed) as caught:
        run_ranks(train_whole, 2, plan, process_group=False)
    for text in caught.value.errors.values():
        assert "RunError: " in text
        assert "file/out" in text
        assert "Not a directory" in text


def test_what_only_one_rank_lacks_is_said_with_its_rank(tmp_path: Path) -> None:
    plan = plans.tiny_plan(plans.mesh(2), local=4, job=plans.job(str(tmp_path), 3))

    def run(rank: Rank) -> str:
        from titan_runtime.train import train

        mine = plans.on_disk(plan)
        if rank.index == 1:
            mine = replace(mine, data=replace(mine.data, path=str(tmp_path / "nothing")))
        with pytest.raises(RunError) as caught:
            train(mine, rank.index, rank.world_size, rank.store)
        return str(caught.value)

    first, second = run_ranks(run, 2, process_group=False)
    assert first == second
    assert first.startswith(f"rank 1: {tmp_path}/nothing: There is no such file or folder.")


def test_a_second_run_in_the_same_folder_is_one_sentence_and_a_killed_one_leaves_it(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    program = (
        "import sys, time; from pathlib import Path; from titan_runtime.lock import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(100)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        plan = plans.on_disk(plans.tiny_plan(plans.mesh(2), local=2, job=plans.job(str(folder), 1)))

        def start(rank: Rank) -> str:
            from titan_runtime.errors import RunError
            from titan_runtime.train import train

            try:
                train(plan, rank.index, rank.world_size, rank.store)
            except RunError as error:
                return str(error) if error.agreed else "not agreed"
            return "done"

        told = run_ranks(start, 2, process_group=False)
        assert told[0] == told[1]
        assert told[0].startswith(f"{folder} is in use by another run (process {holder.pid} on ")
        assert "another --dump-folder" in told[0]
    finally:
        holder.kill()  # SIGKILL
        holder.wait()
    assert run_ranks(start, 2, process_group=False) == ["done", "done"]
