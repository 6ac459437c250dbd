"""Measurements in common units, errors, rankings, and the script over a folder of made-up rows."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import report
from benchmarks.published.cases import Case, case_of, load_cases, model_flops_per_token, with_efficiencies
from benchmarks.published_accuracy import main
from tests.unit.published_rows import MEGATRON_ROW, row, write
from titan_planner.cost.estimate import estimate
from titan_planner.ir.inventory import num_params

TOKENS = 32 * 8192
SVG = "{http://www.w3.org/2000/svg}"
EMPTY = {"measured__tokens_per_s_per_gpu": None, "measured__peak_mem_gib": None}

# ------------------------------------------------------------------ what was measured


def time_of(**changes: Any) -> tuple[float | None, str | None]:
    """(step time, where it comes from) of a row with these changes."""
    measured = case_of(row(**{**EMPTY, **changes})).measured
    return measured.step_time_s, measured.step_time_from


def test_step_time_comes_from_the_most_direct_number() -> None:
    rate = {"measured__tokens_per_s_per_gpu": 6000}
    assert time_of(measured__step_time_s=2.5, **rate) == (2.5, "measured.step_time_s")
    assert time_of(**rate) == (pytest.approx(TOKENS / (16 * 6000)), "measured.tokens_per_s_per_gpu")
    assert time_of(measured__total_tokens_per_s=96000) == (pytest.approx(TOKENS / 96000), "measured.total_tokens_per_s")
    assert time_of(derived__step_time_s=3.5) == (3.5, "derived.step_time_s")
    assert time_of() == (None, None)


def test_step_time_from_flops_only_where_both_conventions_agree() -> None:
    # 8192 tokens of attention are 8 % of an 8B model's FLOPs: whole or causal makes a difference.
    assert time_of(measured__tflops_per_gpu=400) == (None, None)
    short = {"model__seq_len": 2048, "measured__tflops_per_gpu": 400}
    case = case_of(row(**{**EMPTY, **short}))
    assert case.plan is not None
    whole, causal = model_flops_per_token(case.plan.model, 2048)
    assert causal < whole < 1.04 * causal
    seconds = case.measured.step_time_s
    assert seconds is not None
    assert causal < seconds * 400e12 * 16 / (32 * 2048) < whole
    by_share = {"model__seq_len": 2048, "measured__mfu": 400 / 989, "measured__mfu_peak_tflops": 989}
    assert time_of(**by_share) == (pytest.approx(seconds), "measured.mfu")
    # The peak that a share is of is not known in 8 bits.
    unknown = {"model__seq_len": 2048, "measured__mfu": 0.4, "precision": "fp8 rowwise"}
    assert time_of(**unknown) == (None, None)
    assert time_of(**short, flags=["flops_per_token_outlier: ..."]) == (None, None)


def test_flops_that_count_recomputation() -> None:
    changes: dict[str, Any] = {
        **EMPTY,
        "model__seq_len": 2048,
        "measured__tflops_per_gpu": 400,
        "recompute": "full",
        "tags__recompute_class": "full",
    }
    without = case_of(row(**changes)).measured.step_time_s
    counted = case_of(row(**changes, notes="TFLOP/s INCLUDES recomputation FLOPs")).measured.step_time_s
    assert without is not None
    assert counted is not None
    assert 1.28 < counted / without < 4 / 3
    selective = {**changes, "recompute": "selective op", "tags__recompute_class": "selective"}
    assert case_of(row(**selective, notes="TFLOP/s includes recomputation")).measured.step_time_s is None


def test_flops_of_a_token_with_attention_whole_and_causal() -> None:
    case = case_of(row())
    assert case.plan is not None
    model = case.plan.model
    whole, causal = model_flops_per_token(model, 8192)
    weights = 6 * (num_params(model) - model.vocab_size * model.dim)
    assert whole - weights == 12 * 32 * 32 * 128 * 8192
    assert whole - causal == causal - weights


def test_memory_and_its_kind() -> None:
    assert case_of(row()).measured.memory_kind == "reserved"
    allocated = case_of(row(measured__mem_kind="torch max_memory_allocated")).measured
    assert (allocated.peak_mem_gib, allocated.memory_kind) == (48.0, "allocated")
    either = case_of(row(measured__mem_kind="max_memory_reserved or max_memory_allocated")).measured
    assert either.memory_kind == "unknown"
    parts = case_of(
        row(measured__peak_mem_gib=None, measured__peak_allocated_gib=40.0, measured__mem_kind=None)
    ).measured
    assert (parts.peak_mem_gib, parts.memory_kind) == (40.0, "allocated")
    printed = case_of(row(measured__peak_mem_gib=None, measured__peak_mem_printed={"value": 47, "unit": "GB"})).measured
    assert (printed.peak_mem_gib, printed.peak_mem_printed_gb) == (None, 47)


def test_rows_that_failed_have_no_numbers() -> None:
    failed = case_of(row(status="oom"))
    assert failed.measured.out_of_memory
    assert (failed.measured.step_time_s, failed.measured.peak_mem_gib) == (None, None)
    assert not failed.has_time and not failed.has_memory
    crashed = case_of(row(status="crash"))
    assert not crashed.measured.out_of_memory
    assert not crashed.has_time


def test_times_and_memory_that_cannot_be_compared() -> None:
    small = case_of(row(tags__launch_bound=True))
    assert (small.has_time, small.has_memory, small.time_unlike) == (False, True, "bound by launches")
    fake = case_of(row(kind="fake_backend"))
    assert (fake.has_time, fake.has_memory) == (False, True)
    assert case_of(row()).fitting
    assert not case_of(row(quality="D")).fitting


@pytest.mark.parametrize(
    ("changes", "of", "why"),
    [
        ({"measured__step_time_s": 1e-320}, "step_time", "a step of "),
        ({"measured__step_time_s": 1e300}, "step_time", "a step of 1e+300 s (from measured.step_time_s)"),
        ({"measured__tokens_per_s_per_gpu": 1e-320}, "step_time", "a step of inf s"),
        ({"measured__tokens_per_s_per_gpu": 1e308}, "step_time", "a step of 0 s"),
        ({"measured__peak_mem_gib": 1e-320}, "peak_mem", "a peak of "),
        ({"measured__peak_mem_gib": None, "measured__peak_mem_printed": {"value": 1e300}}, "peak_mem", "1e+300 GB"),
    ],
)
def test_numbers_that_nothing_measured_are_listed_with_the_reason(changes: dict[str, Any], of: str, why: str) -> None:
    record = report.record_of(case_of(row(**changes)))
    assert why in record["not_compared"][of]
    assert record["error"][of] is None
    summary = report.summarise([record])
    json.dumps([record, summary], allow_nan=False)
    assert "impossible: " in report.text_report(summary, [record])


def test_a_row_without_a_class_counts_in_the_headline_of_its_model() -> None:
    dense = report.record_of(case_of(row(tags__arch=None)))
    assert dense["error"]["step_time"] is not None
    found = report.summarise([dense])["targets"]
    assert (found["step time, dense, quality A"]["rows"], found["step time, MoE, quality A"]["rows"]) == (1, 0)
    assert case_of(row(tags__arch=None, model__moe={"experts": 8, "top_k": 2})).tags()["model class"] == "moe"


# ------------------------------------------------------------------ predictions and errors


def test_a_record_holds_both_and_their_error() -> None:
    case = case_of(row())
    record = report.record_of(case)
    assert case.plan is not None and case.program is not None
    priced = estimate(case.plan, case.program)
    assert priced.step_time_ms is not None
    assert record["predicted"]["step_time_s"] == priced.step_time_ms / 1000
    assert record["error"]["step_time"] == pytest.approx(
        priced.step_time_ms / 1000 / case.measured.step_time_s - 1, abs=1e-6
    )
    assert record["error"]["peak_mem"] == pytest.approx(record["predicted"]["peak_mem_gib"] / 48 - 1, abs=1e-4)
    assert record["executable"] is True
    assert record["skipped"] is None
    assert record["tags"]["parallelism"] == "dp"
    assert json.loads(json.dumps(record)) == record
    megatron = report.record_of(case_of(row(MEGATRON_ROW)))
    assert megatron["executable"] is False
    assert megatron["tags"]["parallelism"] == "pp x dp x tp"
    skipped = report.record_of(case_of(row(task="lora")))
    assert (skipped["skipped"], skipped["predicted"]) == ("not a pre-training step: task lora", None)


def test_memory_of_one_pipeline_rank_is_compared_with_that_ranks() -> None:
    case = case_of(row(MEGATRON_ROW, parallelism__vpp=1))
    assert case.plan is not None and case.program is not None
    priced = estimate(case.plan, case.program)
    each = [report.comparable_gib(priced, case.plan, "reserved", rank) for rank in range(4)]
    assert report.comparable_gib(priced, case.plan, "reserved", None) == max(each)
    assert len(set(each)) > 1
    assert case_of(row(MEGATRON_ROW, measured__mem_pp_stage=3)).measured.pp_rank == 3


def fake(id: str, predicted: float, measured: float | None, /, **changes: Any) -> report.Record:
    """A record with these step times."""
    tags = dict.fromkeys(report.TABLES, "x") | {"quality": "A", "model class": "dense"}
    found: report.Record = {
        "id": id, "status": "ok", "tags": tags, "skipped": None, "skipped_kind": None, "executable": True, "peer": None,
        "predicted": {"step_time_s": predicted, "peak_mem_gib": 1.0, "fits": True, "tokens_per_s_per_gpu": 100 / predicted},
        "measured": {"step_time_s": measured, "peak_mem_gib": None, "out_of_memory": False},
        "error": {"step_time": None if measured is None else predicted / measured - 1, "peak_mem": None},
        "not_compared": {}, "group": "g",
    }  # fmt: skip
    return {**found, **changes}


def test_statistics() -> None:
    records = [fake(str(n), 1.0 + error, 1.0) for n, error in enumerate((-0.2, 0.1, 0.05, -0.3, 0.1))]
    found = report.statistics_of(report.errors(records, "step_time"))
    assert found["rows"] == 5
    assert found["median_abs"] == pytest.approx(0.1)
    assert found["mean"] == pytest.approx(-0.05)
    assert (found["p90_abs"], found["worst_abs"]) == (pytest.approx(0.3), pytest.approx(0.3))
    assert report.statistics_of([]) == {"rows": 0}


def test_spearman() -> None:
    assert report.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert report.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert report.spearman([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert report.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)
    assert report.spearman([1, 1, 1], [1, 2, 3]) == 0


def test_ranking_is_of_configurations_within_a_group() -> None:
    records = [fake(str(n), n, n * 1.5) for n in (1, 2, 3, 4, 5)]
    records += [fake("repeat", 5, 7.3)]
    records += [fake(f"other {n}", n, n, group="small") for n in (1, 2, 3)]
    found = report.ranking(records)
    assert found["groups"] == 1, "three configurations are too few"
    assert found["each"][0]["configurations"] == 5
    assert found["median"] == 1
    records[4] = fake("5", 5, 1.0)
    assert report.ranking(records)["median"] < 1


def test_an_out_of_memory_that_is_said_to_fit_is_named() -> None:
    failed = {"measured": {"step_time_s": None, "peak_mem_gib": None, "out_of_memory": True}, "status": "oom"}
    wrong, right = fake("wrong", 1.0, None, **failed), fake("right", 1.0, None, **failed)
    right["predicted"] = {**right["predicted"], "fits": False}
    ran = fake("ran", 1.0, 1.0)
    ran["predicted"] = {**ran["predicted"], "fits": False}
    found = report.summarise([wrong, right, ran])
    assert found["out_of_memory"] == {"rows": 2, "said_to_fit": ["wrong"]}
    assert found["measured_but_said_not_to_fit"] == ["ran"]
    assert "2 rows ran out of memory; 1 of them are said to fit: wrong" in report.text_report(
        found, [wrong, right, ran]
    )


def test_peers_stand_beside() -> None:
    theirs = {"system": "other", "step_time_s": 2.5, "peak_mem_gib": 50.0, "error_time": 9.9, "error_mem": None}
    record = report.record_of(case_of(row(measured__step_time_s=2.0, peer_prediction=theirs)))
    assert record["peer"]["error"] == {"step_time": 0.25, "peak_mem": pytest.approx(50 / 48 - 1, abs=1e-6)}
    stated = {**theirs, "step_time_s": None, "error_time": -0.07}
    assert report.record_of(case_of(row(peer_prediction=stated)))["peer"]["error"]["step_time"] == -0.07
    summary = report.summarise([record])
    assert summary["peers"]["other"]["step_time"]["theirs"]["median_abs"] == 0.25
    text = report.text_report(summary, [record])
    assert "## Beside other: the same rows" in text
    assert "+25.0%" in text


def test_efficiencies_change_the_prediction_of_their_gpu_only() -> None:
    case = case_of(row())
    before = report.record_of(case)["predicted"]["step_time_s"]
    assert report.record_of(case, {"h100-sxm-80gb": {"matmul": 0.3}})["predicted"]["step_time_s"] > 1.2 * before
    assert report.record_of(case, {"a100-sxm-80gb": {"matmul": 0.3}})["predicted"]["step_time_s"] == before
    assert with_efficiencies(case_of(row(task="lora")), {"h100-sxm-80gb": {"matmul": 0.3}}).plan is None


def test_a_source_is_predicted_without_its_own_rows(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path, f"{name}.yaml", row(id=name), row(id=f"{name} bad", quality="D"))
    seen: list[list[str]] = []

    def fit(cases: Any) -> dict[str, dict[str, float]]:
        seen.append([case.row.id for case in cases])
        return {"h100-sxm-80gb": {"matmul": 0.3 if case_names(cases) == {"two"} else 0.9}}

    def case_names(cases: list[Case]) -> set[str]:
        return {case.source for case in cases}

    found = report.leave_one_source_out(load_cases(tmp_path), fit)
    assert seen == [["two"], ["one"]]
    first, second = (found[name][0]["predicted"]["step_time_s"] for name in ("one", "two"))
    assert first > 1.2 * second


# ------------------------------------------------------------------ the script


def test_the_script_over_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = tmp_path / "rows", tmp_path / "out"
    rows.mkdir()
    write(rows, "first.yaml", *(row(id=f"fsdp {n}", batch__global=16 * n, batch__grad_accum=n) for n in range(1, 6)))
    write(
        rows,
        "second.yaml",
        row(MEGATRON_ROW, id="megatron"),
        row(task="sft", id="tuned"),
        "no row",
        row(status="oom", id="oom"),
    )
    arguments = ["--rows", str(rows), "--json", str(out / "r.json"), "--report", str(out / "r.md"), "--plots", str(out)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text == (out / "r.md").read_text()
    assert "9 rows: 7 expressed as plans (6 of them this runtime could execute), 2 skipped" in text
    assert "not a pre-training step" in text
    assert "step time by GPU" in text
    data = json.loads((out / "r.json").read_text())
    assert [entry["id"] for entry in data["rows"]] == [
        *(f"fsdp {n}" for n in range(1, 6)),
        "megatron",
        "tuned",
        "second[2]",
        "oom",
    ]
    assert data["summary"]["rows"] == 9
    assert data["summary"]["ranking"]["groups"] == 1
    for entry in data["rows"]:
        assert (entry["skipped"] is None) == (entry["predicted"] is not None)
        assert {"step_time_s", "peak_mem_gib"} <= entry["measured"].keys()
    for quantity in report.QUANTITIES:
        drawn = ElementTree.parse(out / f"published_{quantity}.svg").getroot()
        titled = [mark for mark in drawn.iter(f"{SVG}circle") if mark.find(f"{SVG}title") is not None]
        assert len(titled) == sum(entry["error"][quantity] is not None for entry in data["rows"])


def test_the_script_takes_calibrations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = tmp_path / "rows", tmp_path / "r.json"
    rows.mkdir()
    write(rows, "first.yaml", row())
    write(rows, "second.yaml", row())
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps({"h100-sxm-80gb": {"matmul": 0.3}}))

    def times(*extra: str) -> list[float]:
        assert main(["--rows", str(rows), "--json", str(out), *extra]) == 0
        return [entry["predicted"]["step_time_s"] for entry in json.loads(out.read_text())["rows"]]

    plain = times()
    assert times("--calibration", str(slow)) > plain
    mixed = times("--calibration", f"second={slow}")
    assert mixed[0] == plain[0] and mixed[1] > plain[1]
    capsys.readouterr()
    for text, complaint in (
        ('{"h1000": {}}', "there is no GPU `h1000`"),
        ('{"h100-sxm-80gb": {"speed": 1}}', "`speed` is no efficiency"),
        ("[1]", "holds no mapping of GPUs"),
        ("{", "bad.json"),
    ):
        bad = tmp_path / "bad.json"
        bad.write_text(text)
        assert main(["--rows", str(rows), "--calibration", str(bad)]) == 2
        assert complaint in capsys.readouterr().err
    assert main(["--rows", str(tmp_path / "nowhere")]) == 2


def test_the_script_runs_from_any_folder(tmp_path: Path) -> None:
    write(tmp_path, "rows.yaml", row())
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "published_accuracy.py"
    done = subprocess.run(
        [sys.executable, str(script), "--rows", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 rows: 1 expressed as plans" in done.stdout


def test_an_empty_folder_is_reported_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", str(tmp_path), "--plots", str(tmp_path / "plots")]) == 0
    assert "0 rows: 0 expressed" in capsys.readouterr().out
    assert not (tmp_path / "plots").exists()
