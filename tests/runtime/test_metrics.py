"""Numbers of a run: how they are computed, and where they are written."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import plans
from titan_planner.ir.plan import Estimate, Plan, StageMemory
from titan_runtime.metrics import Console, Measurement, Meter, ScalarWriter, StepLog, WandbWriter
from titan_runtime.metrics.console import speed_parts
from titan_runtime.metrics.meter import predictions


def estimated(**changes: object) -> Plan:
    memory = StageMemory(
        stage=0,
        parameters_gib=1.0,
        gradients_gib=1.0,
        optimizer_gib=2.0,
        unsharded_gib=0.5,
        activations_gib=3.0,
        logits_gib=0.5,
    )
    values = {
        "num_params": 146_592,
        "flops_per_token": 1e6,
        "flops_per_token_causal": 9e5,
        "step_time": None,
        "bottleneck": None,
        "tflops_per_gpu": None,
        "training_days": None,
        "training_gpu_hours": None,
        "training_cost": None,
        "memory": (memory,),
        "memory_available_gib": 10.0,
        "fits": True,
        "step_time_ms": 200.0,
        "tokens_per_second_per_gpu": 600.0,
        "mfu": 0.4,
    }
    return plans.tiny_plan(plans.mesh(2), local=4, estimate=Estimate(**{**values, **changes}))


def test_speed_is_tokens_of_all_ranks_over_wall_time() -> None:
    times = iter([100.0, 104.0, 105.0])
    meter = Meter(estimated(), torch.device("cpu"), clock=lambda: next(times))
    for _ in range(10):
        meter.step()
    measured = meter.measure(waited=0.4)
    assert measured.step_time_ms == 400.0
    assert measured.tokens_per_second == 10 * 256 / 4
    assert measured.tokens_per_second_per_gpu == 320.0
    assert measured.tflops_per_gpu == pytest.approx(320 * 1e6 / 1e12)
    assert measured.mfu == pytest.approx(320e6 / 0.1e12)
    assert measured.data_wait == pytest.approx(0.1)
    assert measured.peak_memory_gib > 0.05
    meter.step()
    assert meter.measure(waited=0.9).data_wait == pytest.approx(0.5)


def test_time_of_a_checkpoint_is_no_training_time() -> None:
    times = iter([0.0, 12.0])
    meter = Meter(estimated(), torch.device("cpu"), clock=lambda: next(times))
    meter.step()
    meter.skip(10.0)
    assert meter.measure(0.0).step_time_ms == 2000.0


MEASURED = Measurement(
    step_time_ms=250.0,
    tokens_per_second=1000.0,
    tokens_per_second_per_gpu=500.0,
    tflops_per_gpu=0.05,
    mfu=0.5,
    peak_memory_gib=9.0,
    reserved_memory_gib=None,
    data_wait=0.01,
)


def test_the_line_shows_the_plans_prediction_beside_the_measurement() -> None:
    stream = io.StringIO()
    Console(0, stream).step(7, 100, 2.5, 0.25, 3e-4, 1792, MEASURED, predictions(estimated()))
    assert stream.getvalue() == (
        "titan: step   7  loss 2.5000  grad_norm 0.2500  lr 3.00e-04  step_time 250 ms (plan 200 ms)  tok/s 1,000  "
        "tok/s/rank 500 (plan 600)  TFLOP/s/rank 0.05  mfu 50.0% (plan 40.0%)  rss 9.00 GiB (plan 8.00 GiB of tensors)  "
        "data_wait 1.0%  tokens 1,792\n"
    )


def test_on_a_gpu_memory_is_that_of_tensors() -> None:
    parts = speed_parts(replace(MEASURED, reserved_memory_gib=9.5), predictions(estimated()))
    assert "memory 9.00 GiB (plan 8.00 GiB)" in parts


def test_what_the_plan_does_not_predict_is_left_out() -> None:
    unpriced = estimated(step_time_ms=None, tokens_per_second_per_gpu=None, mfu=None)
    assert predictions(unpriced) == {"peak_memory_gib": 8.0}
    assert predictions(plans.tiny_plan()) == {}
    bare = speed_parts(replace(MEASURED, tflops_per_gpu=None, mfu=None), {})
    assert not any("plan" in part or "mfu" in part for part in bare)


def test_only_the_first_rank_speaks_and_colour_needs_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def said(rank: int, stream: io.StringIO) -> str:
        Console(rank, stream).say("hello")
        return stream.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert said(1, io.StringIO()) == ""
    assert said(0, io.StringIO()) == "titan: hello\n"
    assert "\033[" in said(0, Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert said(0, Terminal()) == "titan: hello\n"


def test_the_step_log_keeps_all_digits_and_drops_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    values = {"loss": 0.1 + 0.2, "grad_norm": 1 / 3, "lr": 1e-3, "tokens_seen": 256}
    log = StepLog(path, 0)
    for step in (1, 2, 3):
        log.write(step=step, **values)
    log.close()
    with open(path, "a") as stream:
        stream.write('{"step": 4, "loss"')
    StepLog(path, 2).close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found == [{"step": 1, **values}, {"step": 2, **values}]
    StepLog(path, 0).close()
    assert path.read_text() == ""


def test_scalars_can_be_read_by_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan = estimated()
    metrics = replace(plan.job.metrics, enable_tensorboard=True)
    plan = replace(plan, job=replace(plan.job, dump_folder=str(tmp_path), metrics=metrics))
    writer = ScalarWriter(plan, rank=0, step=0)
    for step, loss in ((5, 3.0), (10, 2.0)):
        writer.write(step, loss, 0.1, 1e-3, 99, MEASURED, predictions(plan))
    writer.close()
    assert ScalarWriter(plan, rank=1, step=0)._writer is None
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("training/loss")] == [(5, 3.0), (10, 2.0)]
    tags = set(events.Tags()["scalars"])
    assert {"measured/mfu", "measured/step_time_ms", "plan/mfu", "plan/peak_memory_gib", "training/lr"} <= tags
    assert "measured/reserved_memory_gib" not in tags


def test_a_full_disk_ends_the_logs_with_one_warning_each_and_not_the_run(tmp_path: Path) -> None:
    program = f"""
import resource
from dataclasses import replace
from pathlib import Path
from tests import plans
from titan_runtime.metrics import Measurement, ScalarWriter, StepLog
folder = Path({str(tmp_path)!r})
plan = plans.tiny_plan(job=plans.job(str(folder), 1))
plan = replace(plan, job=replace(plan.job, metrics=replace(plan.job.metrics, enable_tensorboard=True)))
log, scalars = StepLog(folder / "metrics.jsonl", 0), ScalarWriter(plan, 0, 0)
measured = Measurement(*[1.0] * len(Measurement.__dataclass_fields__))
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
for step in range(1, 50):
    log.write(step=step, loss=1.0, grad_norm=1.0, lr=1.0, tokens_seen=1)
    scalars.write(step, 1.0, 1.0, 1.0, 1, measured, {{}})
    scalars.validation(step, 1.0)
log.close()
scalars.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=plans.REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    said = sorted(line for line in done.stderr.splitlines() if line.startswith("titan: warning: "))
    assert len(said) == 2, done.stderr
    assert "it has no more lines from step 5 on, training goes on" in "".join(said)
    assert "it has no more scalars, training goes on" in "".join(said)
    StepLog(tmp_path / "metrics.jsonl", 100).close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe{"step": 2}\n[]\n{"step": "3"}\n{"step": 4}\n{"st')
    StepLog(path, 9).close()
    assert path.read_text() == '{"step": 1}\n{"step": 4}\n'


def test_every_rank_writes_its_own_scalars_when_the_plan_says(tmp_path: Path) -> None:
    plan = estimated()
    metrics = replace(plan.job.metrics, enable_tensorboard=True, save_for_all_ranks=True)
    plan = replace(plan, job=replace(plan.job, dump_folder=str(tmp_path), metrics=metrics))
    for rank in (0, 1):
        ScalarWriter(plan, rank, step=0).close()
    assert sorted(path.name for path in (tmp_path / "tb").iterdir()) == ["rank_0", "rank_1"]


def test_wandb_is_told_what_the_log_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    told: list[object] = []
    run = SimpleNamespace(log=lambda values, step: told.append((step, values)), finish=lambda: told.append("finished"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: told.append(options) or run))
    plan = estimated()
    plan = replace(plan, job=replace(plan.job, metrics=replace(plan.job.metrics, enable_wandb=True)))
    for writer in (WandbWriter(plan, rank=1), WandbWriter(estimated(), rank=0)):
        writer.write(1, MEASURED, loss=3.0)
        writer.close()
    assert told == []
    writer = WandbWriter(plan, rank=0)
    writer.write(5, MEASURED, loss=3.0)
    writer.validation(5, 3.5)
    writer.close()
    assert told[0]["name"] == plan.name
    assert (told[1][0], told[1][1]["training/loss"]) == (5, 3.0)
    assert told[1][1]["measured/step_time_ms"] == MEASURED.step_time_ms
    assert told[2:] == [(5, {"validation/loss": 3.5}), "finished"]


def test_memory_snapshots_are_written_on_time_and_when_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from titan_runtime.profiling import memory_snapshots

    recording: list[object] = []
    monkeypatch.setattr(
        "torch.cuda.memory._record_memory_history", lambda enabled="all", **options: recording.append(enabled)
    )
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    plan = plans.tiny_plan(job=plans.job(str(tmp_path)))
    with memory_snapshots(plan, 0) as after:
        after(4)
    assert recording == []
    profiling = replace(plan.job.profiling, enable_memory_snapshot=True)  # every 4 steps
    plan = replace(plan, job=replace(plan.job, profiling=profiling))

    def run() -> None:
        with memory_snapshots(plan, 3) as after:
            for step in range(1, 10):
                after(step)
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        run()
    written = {path.parent.name for path in (tmp_path / "traces").rglob("rank-3.memory.pickle")}
    assert written == {"step-4", "step-8", "out-of-memory"}
    assert recording == ["all", None]
