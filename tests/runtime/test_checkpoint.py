"""A run that was saved, killed or moved to other ranks goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import plans
from tests.harness import Rank, RanksFailed, run_ranks
from titan_planner.ir.codec import dumps
from titan_planner.ir.diff import diff
from titan_planner.ir.parallel import Mesh
from titan_planner.ir.plan import Plan
from titan_runtime.checkpoint.compatibility import require_compatible
from titan_runtime.checkpoint.folder import CheckpointFolder
from titan_runtime.errors import RunError

STEPS = 6


def saving_plan(
    folder: Path, grid: Mesh | None = None, *, steps: int = STEPS, local: int = 2, **checkpoint: Any
) -> Plan:
    settings = {"enable": True, "interval": 2, **checkpoint}
    return plans.tiny_plan(grid or plans.mesh(2), local=local, job=plans.job(str(folder), steps, **settings))


def train_ranks(plan: Plan, output: list[str] | None = None, accept_changes: bool = False) -> list[dict[str, Any]]:
    """Run the whole of `train` on forked ranks; the lines of metrics.jsonl."""
    written = replace(plan, job=replace(plan.job, dump_folder="out"))  # as a file would have it: a relative path
    run_ranks(
        train_rank,
        plan.mesh.world_size,
        plans.on_disk(plan),
        written,
        accept_changes,
        process_group=False,
        output=output,
    )
    return lines(Path(plan.job.dump_folder))


def train_rank(rank: Rank, plan: Plan, written: Plan, accept_changes: bool) -> int:
    from titan_runtime.train import train

    code = train(plan, rank.index, rank.world_size, rank.store, written_plan=written, accept_changes=accept_changes)
    assert code == 0
    return code


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def saved_steps(folder: Path) -> list[int]:
    return [entry.step for entry in reversed(CheckpointFolder(folder / "checkpoint").entries()) if entry.complete]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run of six steps on two ranks without interruption, and its folder with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train_ranks(saving_plan(folder))


# ------------------------------------------------------------------ going on


def test_a_resumed_run_has_the_same_losses_digit_for_digit(straight: tuple[Path, list], tmp_path: Path) -> None:
    train_ranks(saving_plan(tmp_path, steps=3, interval=3))
    output: list[str] = []
    resumed = train_ranks(saving_plan(tmp_path), output)
    assert "resuming from" in output[0]
    assert "(step 3)" in output[0]
    assert resumed == straight[1]
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]


def test_muon_with_bfloat16_moments_resumes_digit_for_digit(tmp_path: Path) -> None:
    values = replace(plans.tiny_plan().optimizer, name="Muon", state_dtype="bfloat16", implementation="foreach")
    whole, halves = (
        [replace(saving_plan(tmp_path / name, steps=n, interval=2), optimizer=values) for n in steps]
        for name, steps in (("whole", (4,)), ("halves", (2, 4)))
    )
    assert train_ranks(whole[0]) == [train_ranks(plan) for plan in halves][-1]


def test_lines_of_steps_after_the_checkpoint_are_made_again(straight: tuple[Path, list], tmp_path: Path) -> None:
    train_ranks(saving_plan(tmp_path, steps=5, interval=2))
    shutil.rmtree(tmp_path / "checkpoint" / "step-5")
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 6, "lo')  # a line that a kill cut short
    assert train_ranks(saving_plan(tmp_path)) == straight[1]


@pytest.mark.parametrize(
    ("grid", "local"),
    [(plans.mesh(4), 2), (plans.mesh(1), 8), (plans.mesh(2, 2), 1)],
    ids=["fsdp-4", "one", "hsdp-2x2"],
)
def test_other_ranks_go_on_from_the_same_state(
    straight: tuple[Path, list], tmp_path: Path, grid: Mesh, local: int
) -> None:
    folder, expected = straight
    copy_until(folder, tmp_path, step=4)
    resumed = train_ranks(saving_plan(tmp_path, grid, local=local))
    assert resumed[:4] == expected[:4]
    for ours, theirs in zip(resumed[4:], expected[4:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def copy_until(source: Path, target: Path, step: int) -> None:
    """Copy a run's folder as it was right after it saved `step`."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for entry in CheckpointFolder(target / "checkpoint").entries():
        if entry.step > step:
            shutil.rmtree(entry.path)


def whole_state(rank: Rank, plan: Plan) -> dict[str, torch.Tensor]:
    """All tensors that this plan restores, gathered, and the data position."""
    from titan_runtime.apply import build_model
    from titan_runtime.checkpoint import Checkpointer
    from titan_runtime.checkpoint.tensors import model_tensors, optimizer_tensors
    from titan_runtime.mesh import build_mesh
    from titan_runtime.optimizer import build_optimizer
    from titan_runtime.train import open_data

    device = torch.device("cpu")
    module = build_model(plan, build_mesh(plan.mesh, "cpu"), device)
    optimizer = build_optimizer(module, plan.optimizer)
    loader = open_data(plan, rank.index)
    progress = Checkpointer(plan, module, optimizer, loader, rank.index, device).load()
    found = model_tensors(module) | optimizer_tensors(module, optimizer)
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in found.items()}
    return {**whole, "step": torch.tensor(progress.step), "data": torch.tensor(loader.step)}


def test_every_mesh_restores_the_same_bits(straight: tuple[Path, list]) -> None:
    folder, _ = straight
    one = run_ranks(whole_state, 1, plans.on_disk(saving_plan(folder, plans.mesh(1))))[0]
    four = run_ranks(whole_state, 4, plans.on_disk(saving_plan(folder, plans.mesh(4))))[0]
    assert one.keys() == four.keys()
    assert all(torch.equal(one[name], four[name]) for name in one)
    assert one["step"] == one["data"] == 6
    assert float(one["optimizer.state.norm.weight.step"]) == 6.0
    assert float(one["optimizer.state.norm.weight.exp_avg"].abs().sum()) > 0


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    plan = plans.on_disk(saving_plan(tmp_path))

    def draw(rank: Rank, first: bool) -> list[float]:
        from titan_runtime.apply import build_model
        from titan_runtime.checkpoint import Checkpointer, Progress
        from titan_runtime.mesh import build_mesh
        from titan_runtime.optimizer import build_optimizer
        from titan_runtime.train import open_data

        device = torch.device("cpu")
        module = build_model(plan, build_mesh(plan.mesh, "cpu"), device)
        optimizer = build_optimizer(module, plan.optimizer)
        checkpoints = Checkpointer(
            plan,
            module,
            optimizer,
            open_data(plan, rank.index),
            rank.index,
            device,
            written_plan=saving_plan(Path("out")),
        )
        torch.manual_seed(100 + rank.index if first else 0)
        if first:
            torch.rand(17)
            checkpoints.save(Progress(step=1))
        else:
            assert checkpoints.load().step == 1
        return torch.rand(3).tolist()

    before, after = run_ranks(draw, 2, True), run_ranks(draw, 2, False)
    assert before == after
    assert before[0] != before[1]


def test_a_finished_run_has_nothing_to_do(straight: tuple[Path, list], tmp_path: Path) -> None:
    copy_until(straight[0], tmp_path, step=6)
    output: list[str] = []
    train_ranks(saving_plan(tmp_path), output)
    assert "nothing to do: the checkpoint is at step 6 of 6" in output[0]


# ------------------------------------------------------------------ saves that fail


def test_a_rank_killed_in_the_middle_of_a_save_costs_only_that_save(
    straight: tuple[Path, list], tmp_path: Path
) -> None:
    copy_until(straight[0], tmp_path, step=2)

    def killed(rank: Rank, plan: Plan) -> None:
        import torch.distributed.checkpoint as dcp

        real = dcp.FileSystemWriter.finish
        # Rank 0 writes the commit mark after all ranks have written their files: this is the last moment before it.
        dcp.FileSystemWriter.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        try:
            train_rank(rank, plan, replace(plan, job=replace(plan.job, dump_folder="out")), False)
        finally:
            dcp.FileSystemWriter.finish = real

    plan = saving_plan(tmp_path)
    with pytest.raises(RanksFailed, match="killed by SIGKILL"):
        run_ranks(killed, 2, plans.on_disk(plan), process_group=False)
    assert (tmp_path / "checkpoint" / "step-4.partial" / "__0_0.distcp").exists()
    assert saved_steps(tmp_path) == [2]

    output: list[str] = []
    assert train_ranks(plan, output) == straight[1]
    assert "step-2 (step 2)" in output[0]
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-2", "step-4", "step-6"]


def test_a_checkpoint_without_its_commit_mark_is_passed_over_with_a_line(
    straight: tuple[Path, list], tmp_path: Path
) -> None:
    copy_until(straight[0], tmp_path, step=4)
    (tmp_path / "checkpoint" / "step-4" / ".metadata").unlink()
    output: list[str] = []
    assert train_ranks(saving_plan(tmp_path), output) == straight[1]
    assert "step-4: its save was cut short (it has no .metadata)" in output[0]
    assert "step-2 (step 2)" in output[0]


def test_a_full_disk_stops_all_ranks_with_one_sentence_and_spares_the_last_checkpoint(
    straight: tuple[Path, list], tmp_path: Path
) -> None:
    copy_until(straight[0], tmp_path, step=2)

    def limited(rank: Rank, plan: Plan) -> str:
        from titan_runtime.train import train

        # A file may not grow beyond 200 kB: writes fail as on a full disk, with another error number.
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.raises(RunError) as caught:
            train(plan, rank.index, rank.world_size, rank.store)
        assert caught.value.agreed
        return str(caught.value)

    first, second = run_ranks(limited, 2, plans.on_disk(saving_plan(tmp_path)), process_group=False)
    assert first == second
    assert first.startswith(f"cannot write the checkpoint {tmp_path}/checkpoint/step-4.partial: ")
    assert "File too large" in first
    assert saved_steps(tmp_path) == [2]
    assert not (tmp_path / "checkpoint" / "step-4.partial").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("a file where the folder should be")
    sentence = refused(saving_plan(tmp_path))
    assert str(tmp_path / "checkpoint") in sentence
    assert "cannot write the checkpoint" in sentence


def refused(plan: Plan, accept_changes: bool = False) -> str:
    """The one sentence with which all ranks of `plan` end."""

    def rank_refused(rank: Rank) -> str:
        from titan_runtime.train import train

        with pytest.raises(RunError) as caught:
            train(plans.on_disk(plan), rank.index, rank.world_size, rank.store, accept_changes=accept_changes)
        assert caught.value.agreed
        return str(caught.value)

    sentences = run_ranks(rank_refused, plan.mesh.world_size, process_group=False)
    assert len(set(sentences)) == 1
    return sentences[0]


# ------------------------------------------------------------------ which checkpoints are kept and made


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    train_ranks(saving_plan(tmp_path, plans.mesh(1), interval=1, keep_latest_k=2))
    assert saved_steps(tmp_path) == [5, 6]
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-5", "step-6"]


def test_the_first_and_the_last_step_are_saved_when_the_plan_says(tmp_path: Path) -> None:
    train_ranks(saving_plan(tmp_path, plans.mesh(1), interval=4, enable_first_step_checkpoint=True, steps=5))
    assert saved_steps(tmp_path) == [1, 4, 5]


def test_minutes_since_the_last_save_count_too(tmp_path: Path) -> None:
    train_ranks(saving_plan(tmp_path, plans.mesh(2), interval=100, interval_minutes=1e-9, steps=3))
    assert saved_steps(tmp_path) == [1, 2, 3]


def test_a_chosen_step_is_resumed_and_later_ones_are_replaced(straight: tuple[Path, list], tmp_path: Path) -> None:
    copy_until(straight[0], tmp_path, step=6)
    before = (tmp_path / "checkpoint" / "step-4" / "train.json").stat().st_ino
    assert train_ranks(saving_plan(tmp_path, load_step=2)) == straight[1]
    assert (tmp_path / "checkpoint" / "step-4" / "train.json").stat().st_ino != before
    sentence = refused(saving_plan(tmp_path, load_step=3))
    assert "there is no checkpoint of step 3" in sentence
    assert "steps there: 2, 4, 6" in sentence


def test_a_run_from_an_earlier_step_puts_the_branch_it_leaves_aside(
    straight: tuple[Path, list], tmp_path: Path
) -> None:
    copy_until(straight[0], tmp_path, step=6)
    output: list[str] = []
    train_ranks(saving_plan(tmp_path, load_step=2, keep_latest_k=2, interval=3, steps=3), output)
    assert saved_steps(tmp_path) == [2, 3]
    assert "abandoned branch (steps 4, 6) as abandoned-step-4, abandoned-step-6 in" in output[0]
    resumed: list[str] = []
    again = train_ranks(saving_plan(tmp_path), resumed)
    assert "step-3 (step 3)" in resumed[0]
    assert [line["step"] for line in again] == [1, 2, 3, 4, 5, 6]
    # A second branch does not overwrite what the first one left.
    train_ranks(saving_plan(tmp_path, load_step=3, steps=4))
    assert {path.name for path in (tmp_path / "checkpoint").iterdir() if path.name.startswith("abandoned")} == {
        "abandoned-step-4",
        "abandoned-step-4-2",
        "abandoned-step-6",
        "abandoned-step-6-2",
    }


def test_steps_counted_anew_leave_the_old_branch_at_the_first_save(straight: tuple[Path, list], tmp_path: Path) -> None:
    copy_until(straight[0], tmp_path, step=6)
    output: list[str] = []
    train_ranks(saving_plan(tmp_path, exclude_from_loading=("train_state",), steps=3, keep_latest_k=2), output)
    assert saved_steps(tmp_path) == [2, 3]
    assert (tmp_path / "checkpoint" / "abandoned-step-6" / ".metadata").is_file()
    assert "abandoned-step-4" in output[0]
    assert [line["step"] for line in train_ranks(saving_plan(tmp_path, steps=4))] == [1, 2, 3, 4]


def test_the_checkpoint_just_saved_is_never_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3, 9):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / ".metadata").touch()
    folder.keep(1, saved=3)
    assert sorted(entry.step for entry in folder.entries()) == [3, 9]


def test_weights_alone_can_be_saved_last_and_started_from(tmp_path: Path) -> None:
    first = tmp_path / "first"
    train_ranks(saving_plan(first, interval=2, steps=3, last_save_model_only=True, export_dtype="bfloat16"))
    metadata = torch.distributed.checkpoint.FileSystemReader(first / "checkpoint" / "step-3").read_metadata()
    stored = metadata.state_dict_metadata
    assert {name for name in stored if name.startswith(("optimizer", "rng"))} == set()
    assert stored["norm.weight"].properties.dtype is torch.bfloat16

    # They cannot be resumed: the run goes on from the full checkpoint before.
    output: list[str] = []
    train_ranks(saving_plan(first, interval=2, steps=4), output)
    assert "step-3: it holds weights only and cannot be resumed" in output[0]
    assert "(step 2)" in output[0]

    # Another run starts from them, at its own step 1 and rate.
    second = tmp_path / "second"
    begun = train_ranks(
        saving_plan(second, steps=1, initial_load_path=str(first / "checkpoint" / "step-3"), interval=9), output
    )
    assert begun[0]["step"] == 1
    assert begun[0]["loss"] < lines(first)[0]["loss"] - 0.01


# ------------------------------------------------------------------ going on under another plan


def test_a_plan_that_changes_what_is_trained_is_refused_by_name(straight: tuple[Path, list], tmp_path: Path) -> None:
    copy_until(straight[0], tmp_path, step=4)
    plan = saving_plan(tmp_path)
    changed = replace(
        plan, optimizer=replace(plan.optimizer, lr=5e-3), seeds=replace(plan.seeds, seed=8), mesh=plans.mesh(1)
    )
    changed = replace(changed, cluster=plans.cluster(1), batch=replace(changed.batch, accumulation_steps=4))
    sentence = refused(changed)
    assert "differs in `optimizer.lr`, `seeds.seed`, which changes what is trained" in sentence
    assert "--accept-changes" in sentence
    output: list[str] = []
    resumed = train_ranks(changed, output, accept_changes=True)
    assert "resuming although the plan now differs in optimizer.lr, seeds.seed" in output[0]
    assert resumed[4]["lr"] == 5e-3


def test_another_batch_size_goes_on_after_the_samples_that_were_seen(
    straight: tuple[Path, list], tmp_path: Path
) -> None:
    copy_until(straight[0], tmp_path, step=2)
    record = json.loads((tmp_path / "checkpoint" / "step-2" / "train.json").read_text())
    batch, samples = record["data"]["global_batch_size"], record["data"]["stream"]["samples"]
    plan = saving_plan(tmp_path)
    larger = replace(plan, batch=replace(plan.batch, global_batch_size=3 * batch, accumulation_steps=3 * 2))
    assert "batch.global_batch_size" in refused(larger)
    resumed = train_ranks(larger, accept_changes=True)
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]
    record = json.loads((tmp_path / "checkpoint" / "step-6" / "train.json").read_text())
    assert record["data"]["stream"]["samples"] == samples + 4 * 3 * batch  # no multiple of the new batch
    train_ranks(replace(larger, job=replace(larger.job, steps=7)))
    record = json.loads((tmp_path / "checkpoint" / "step-7" / "train.json").read_text())
    assert record["data"]["stream"]["samples"] == samples + 5 * 3 * batch


@pytest.mark.parametrize("changed", ["seq_len", "text"])
def test_other_data_begin_anew_when_that_is_accepted(straight: tuple[Path, list], tmp_path: Path, changed: str) -> None:
    copy_until(straight[0], tmp_path, step=2)
    plan = saving_plan(tmp_path, steps=3)
    if changed == "seq_len":
        plan = replace(plan, batch=replace(plan.batch, seq_len=plan.batch.seq_len // 2))
    else:
        path = tmp_path / "checkpoint" / "step-2" / "train.json"
        record = json.loads(path.read_text())
        record["data"]["stream"]["fingerprint"].update(total_bytes=7, files=None)
        path.write_text(json.dumps(record))
    assert "differ" in refused(plan) or "other data" in refused(plan)
    output: list[str] = []
    train_ranks(plan, output, accept_changes=True)
    assert "the data begin anew" in output[0]
    record = json.loads((tmp_path / "checkpoint" / "step-3" / "train.json").read_text())
    assert record["data"]["stream"]["samples"] == plan.batch.global_batch_size


def test_how_the_work_is_split_may_differ(tmp_path: Path) -> None:
    before = plans.tiny_plan(plans.mesh(4))
    now = plans.tiny_plan(plans.mesh(2, 2), local=2)
    now = replace(
        now,
        fsdp=replace(now.fsdp, units=plans.units(now.model, False), defer_gradient_sync=True),
        compile=replace(now.compile, enable=True),
        loss=replace(now.loss, chunks=4),
        optimizer=replace(now.optimizer, implementation="foreach"),
    )

    def refused_for(plan: Plan) -> list[str]:
        (tmp_path / "plan.json").write_text(dumps(before))
        return require_compatible(tmp_path, plan, accept_changes=True)

    assert refused_for(now) == []
    assert diff(before, now).verdict.resume == "continues with resharding"
    assert refused_for(replace(now, fsdp=replace(now.fsdp, param_dtype="bfloat16"))) == ["fsdp.param_dtype"]
    assert refused_for(replace(now, batch=replace(now.batch, seq_len=16))) == ["batch.seq_len"]
    with pytest.raises(RunError, match=r"is of another model: `model.dim`"):
        refused_for(replace(now, model=plans.tiny_model(dim=64)))


def test_parts_left_out_of_loading_begin_anew_once(straight: tuple[Path, list], tmp_path: Path) -> None:
    copy_until(straight[0], tmp_path, step=2)
    output: list[str] = []
    plan = saving_plan(tmp_path, exclude_from_loading=("data", "lr_schedule"), steps=4, interval=1)
    resumed = train_ranks(plan, output)
    assert "without data, lr_schedule" in output[0]
    # Steps count on, the curve and the text begin anew.
    assert [line["step"] for line in resumed] == [1, 2, 3, 4]
    assert [line["lr"] for line in resumed] == [line["lr"] for line in straight[1][:2]] * 2
    record = json.loads((tmp_path / "checkpoint" / "step-4" / "train.json").read_text())
    assert record["data"]["step"] == 2
    # A checkpoint of the new run has its own data position and curve; they are not left out a second time.
    again = train_ranks(saving_plan(tmp_path, exclude_from_loading=("data", "lr_schedule"), steps=5))
    assert again[4]["lr"] == straight[1][2]["lr"]


# ------------------------------------------------------------------ damaged checkpoints


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("plan.json", b"{}", "the plan stored in"),
        ("plan.json", b"{}", "--load-step N to resume from an older step"),
        (".metadata", b"nonsense", "cannot be read"),
        ("__1_0.distcp", b"short", "cannot read the checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_one_sentence(
    straight: tuple[Path, list], tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    copy_until(straight[0], tmp_path, step=4)
    (tmp_path / "checkpoint" / "step-4" / name).write_bytes(content)
    sentence = refused(saving_plan(tmp_path))
    assert words in sentence
    assert "step-4" in sentence
    assert "try: " in sentence


@pytest.mark.parametrize("damage", ["{", '{"format": 1}', "step", "other step", "tokens"])
def test_a_damaged_record_is_passed_over_with_a_line(straight: tuple[Path, list], tmp_path: Path, damage: str) -> None:
    copy_until(straight[0], tmp_path, step=4)
    path = tmp_path / "checkpoint" / "step-4" / "train.json"
    record = json.loads(path.read_text())
    match damage:
        case "step":
            record["progress"]["step"] = "4"
        case "other step":
            record["progress"]["step"] = 12
        case "tokens":
            record["progress"]["tokens_seen"] = None
    path.write_text(damage if damage.startswith("{") else json.dumps(record))
    plan = saving_plan(tmp_path)
    folder = CheckpointFolder(tmp_path / "checkpoint")
    chosen, notes = newest(plan, folder, -1)
    assert chosen.name == "step-2"
    assert len(notes) == 1
    assert f"skipping {path.parent}: it is damaged: {path}: " in notes[0]
    with pytest.raises(RunError, match="choose another step"):
        newest(plan, folder, 4)
    shutil.rmtree(tmp_path / "checkpoint" / "step-2")
    with pytest.raises(RunError, match="mend or move it away"):  # and no run that begins anew over it
        newest(plan, folder, -1)


def newest(plan: Plan, folder: CheckpointFolder, wanted: int) -> tuple[Path, tuple[str, ...]]:
    from titan_runtime.checkpoint import Checkpointer

    nothing: Any = None
    found = Checkpointer(plan, nothing, nothing, nothing, 0, torch.device("cpu"))._newest(folder, wanted)
    assert found is not None
    return found


def test_a_checkpoint_of_another_model_is_one_sentence(straight: tuple[Path, list], tmp_path: Path) -> None:
    path = str(straight[0] / "checkpoint" / "step-6")
    wider = saving_plan(tmp_path, initial_load_path=path)
    wider = replace(wider, model=plans.tiny_model(vocab_size=plans.VOCAB + 2))
    assert "with shape [2048, 32], but the plan's model has [2050, 32]" in refused(wider)
    assert "holds no complete checkpoint" in refused(saving_plan(tmp_path, initial_load_path=str(tmp_path / "nowhere")))
