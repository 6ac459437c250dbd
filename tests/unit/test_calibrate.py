"""Efficiencies found again from step times, and a run's own speed that changes the next plan."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.builders import compile_text
from titan_planner.calibrate import BOUNDS, TIED, Measured, calibrate_cluster, fit, predicted, with_efficiency
from titan_planner.cli import main
from titan_planner.compiler import compile_spec
from titan_planner.hardware import find_gpu
from titan_planner.hardware.efficiencies import PRIORS
from titan_planner.hardware.fitted import FITTED
from titan_planner.ir.codec import digest, dumps
from titan_planner.ir.errors import PlanError
from titan_planner.ir.plan import Plan
from titan_planner.render.cluster_file import cluster_file
from titan_planner.runs import read_run
from titan_planner.spec import load_spec

SPEC = """
spec_version: 1
model: {family: llama3, flavor: 8B}
cluster: {node: dgx-h100}
training: {seq_len: 8192, local_batch_size: 1, global_batch_size: %d}
parallelism: {tensor_parallel_degree: %d}
activation_checkpoint: {mode: %s}
compile: {enable: %s}
"""


def plans() -> list[Plan]:
    return [
        compile_text(SPEC % (8 // tp, tp, mode, compiled))
        for tp in (1, 8)
        for mode in ("selective", "full")
        for compiled in ("true", "false")
    ]


def test_known_efficiencies_are_found_again() -> None:
    prior = PRIORS["h100-sxm-80gb"]
    truth = replace(prior, matmul=0.55, attention=0.46, attention_backward=0.368, memory=0.80, intra_node=0.62)
    runs = []
    for index, plan in enumerate(plans()):
        run = Measured(str(index), plan, 1.0)
        runs.append(replace(run, step_seconds=predicted(run, truth)))
    found = fit(runs, prior)
    assert max(abs(error) for error in found.before) > 0.08
    assert max(abs(error) for error in found.after) < 0.02
    assert found.efficiency.matmul == pytest.approx(0.55, rel=0.05)
    for name, (low, high) in BOUNDS.items():
        if name not in TIED:
            assert low <= getattr(found.efficiency, name) <= high


def test_one_run_moves_what_its_step_depends_on_and_nothing_else() -> None:
    plan = plans()[0]
    prior = PRIORS["h100-sxm-80gb"]
    run = Measured("one", plan, 1.2 * predicted(Measured("", plan, 1.0), prior))
    found = fit([run], prior)
    assert abs(found.after[0]) < 0.06 < abs(found.before[0])
    assert found.efficiency.matmul < prior.matmul
    # No 8-bit product runs, and one node needs no network.
    assert found.efficiency.matmul_float8 == pytest.approx(prior.matmul_float8, rel=1e-3)
    assert found.efficiency.inter_node == pytest.approx(prior.inter_node, rel=1e-3)


def test_every_fitted_number_is_physically_possible() -> None:
    assert set(FITTED) <= set(PRIORS)
    for gpu, values in FITTED.items():
        assert find_gpu(gpu).efficiency == values
        assert "published rows" in values.source
        for name, (low, high) in BOUNDS.items():
            assert low - 1e-4 <= getattr(values, name) <= high + 1e-4, (gpu, name)


def finished_run(folder: Path, plan: Plan, step_ms: float) -> Path:
    """A folder as the runtime leaves it: the plan, and lines of speed of which one is of another plan, one cut short."""
    folder.mkdir()
    (folder / "plan.json").write_text(dumps(plan))
    named = digest(plan)
    lines = [json.dumps({"step": 10 * n, "plan": named, "step_time_ms": step_ms + n, "peak_memory_gib": 50.0 + n})
             for n in (-1, 0, 1)]  # fmt: skip
    other = json.dumps({"step": 5, "plan": "another", "step_time_ms": 1.0})
    (folder / "speed.jsonl").write_text("\n".join([other, *lines, '{"step": 40, "pl']))
    return folder


def test_a_run_is_its_median_under_its_plan(tmp_path: Path) -> None:
    run = read_run(finished_run(tmp_path / "run", plans()[0], 2000.0))
    assert (run.measurements, run.step_seconds, run.peak_memory_gib) == (3, 2.0, 51.0)


def test_the_next_compile_uses_what_a_run_has_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plans()[0]
    assert plan.estimate is not None
    assert plan.estimate.step_time_ms is not None
    folder = finished_run(tmp_path / "run", plan, 1.15 * plan.estimate.step_time_ms)
    target = tmp_path / "my-cluster.yaml"
    assert main(["calibrate", str(folder), "--cluster", str(target)]) == 0
    said = capsys.readouterr().out
    assert "matmul" in said
    assert f"extends: {target}" in said

    before, after = tmp_path / "before.json", tmp_path / "after.json"
    spec = tmp_path / "spec.yaml"
    text = (SPEC % (8, 1, "selective", "true")).replace("cluster: {node: dgx-h100}\n", "")
    spec.write_text(f"extends: my-cluster.yaml\n{text}")
    assert main(["compile", str(spec), "-o", str(after)]) == 0
    before.write_text(dumps(plan))
    capsys.readouterr()
    assert main(["diff", str(before), str(after), "--json"]) == 0
    moved = json.loads(capsys.readouterr().out)["estimate"]["step_time_ms"]
    assert 8 < moved["percent"] < 17
    # It may be written again, by a run under the calibrated plan.
    assert main(["calibrate", str(folder), "--cluster", str(target), "--json"]) == 0
    assert "efficiency" in json.loads(capsys.readouterr().out)


CLUSTERS = {
    "catalogue": "{node: dgx-h100}",
    "network": "{gpu: h100-sxm-80gb, nodes: 2, inter_node: {link: ib-ndr-400, latency_us: 9.0}, price_per_gpu_hour: 2.5}",
    "own GPU": "{gpu: {like: h100-sxm-80gb, name: my-h100, memory_gib: 90, bf16_tflops: 800}, gpus_per_node: 4}",
    "own GPU with another's name": "{gpu: {like: a100-sxm-80gb, name: h100-sxm-80gb}}",
    "own links": "{gpu: a100-sxm-80gb, nodes: 2, intra_node: {gb_per_s: 100, latency_us: 2, per_gpu: false}, "
    "inter_node: {gb_per_s: 1.5e-3}}",
    "own efficiencies": "{node: dgx-h100, efficiency: {attention: 0.5, attention_backward: 0.2, launch_us: 0}}",
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_a_run_as_predicted_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: str) -> None:
    """The file is the whole cluster: what NVLink's switches add in follows from the link's name."""
    text = SPEC.replace("{node: dgx-h100}", cluster) % (64, 4, "selective", "true")
    plan = compile_text(text)
    run = finished_run(tmp_path / "run", plan, 1e3 * predicted(Measured("", plan, 1.0), plan.cluster.gpu.efficiency))
    target = tmp_path / "my-cluster.yaml"
    assert main(["calibrate", str(run), "--cluster", str(target)]) == 0
    spec = tmp_path / "spec.yaml"
    spec.write_text("extends: my-cluster.yaml\n" + text.replace(f"cluster: {cluster}\n", ""))
    again = compile_spec(load_spec(spec))
    assert plan.estimate is not None
    assert again.estimate == plan.estimate
    sourceless = [
        replace(
            c,
            gpu=replace(c.gpu, source="", efficiency=replace(c.gpu.efficiency, source="")),
            intra_node=replace(c.intra_node, source=""),
            inter_node=replace(c.inter_node, source=""),
        )
        for c in (plan.cluster, again.cluster)
    ]
    assert sourceless[0] == sourceless[1]
    assert "warning" not in capsys.readouterr().out


def test_a_gpu_that_no_spec_can_name_is_refused() -> None:
    plan = plans()[0]
    odd = replace(plan.cluster, gpu=replace(plan.cluster.gpu, compute_units=7))
    with pytest.raises(PlanError, match="no spec can name it"):
        cluster_file(odd)


@pytest.mark.parametrize("value", ["Infinity", "NaN", "5e-324", "1" + "0" * 400, "true", "-3", '"1"', "1e300"])
def test_no_step_time_is_no_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    run = finished_run(tmp_path / "run", plans()[0], 2000.0)
    good = (run / "speed.jsonl").read_text()
    line = f'{{"plan": "{digest(plans()[0])}", "step_time_ms": {value}, "peak_memory_gib": {value}}}\n'
    (run / "speed.jsonl").write_text(line)
    assert main(["calibrate", str(run), "--cluster", str(tmp_path / "c.yaml")]) == 1
    said = capsys.readouterr().err
    assert "has no step time that could be one" in said
    assert "Traceback" not in said
    assert len(said) < 600
    # Beside true measurements it counts for nothing.
    (run / "speed.jsonl").write_text(line + good)
    assert (read_run(run).step_seconds, read_run(run).peak_memory_gib) == (2.0, 51.0)


def test_what_a_fit_does_not_explain_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plans()[0]
    assert plan.estimate is not None
    assert plan.estimate.step_time_ms is not None
    run = finished_run(tmp_path / "run", plan, 20 * plan.estimate.step_time_ms)
    arguments = ["calibrate", str(run), "--cluster", str(tmp_path / "c.yaml")]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "warning: " + str(run) + " is still off by -" in said
    assert "matmul is 0.2, the least that is physically possible" in said
    assert main([*arguments, "--json"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert any("still off" in warning for warning in warnings)
    assert any(warning.startswith("matmul is") for warning in warnings)


def test_a_file_of_the_users_own_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished_run(tmp_path / "run", plans()[0], 2000.0)
    mine = tmp_path / "mine.yaml"
    mine.write_text("cluster: {node: dgx-h100}  # do not touch\n")
    assert main(["calibrate", str(folder), "--cluster", str(mine)]) == 1
    assert "was not written by `titan-plan calibrate`" in capsys.readouterr().err
    assert "do not touch" in mine.read_text()


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ("plan.json", "has no plan.json"),
        ("speed.jsonl", "has no speed.jsonl"),
        ("lines", "no measurement under the plan"),
    ],
)
def test_a_folder_without_what_is_needed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lacks: str, words: str
) -> None:
    folder = finished_run(tmp_path / "run", plans()[0], 2000.0)
    if lacks == "lines":
        (folder / "speed.jsonl").write_text('{"plan": "another", "step_time_ms": 3}\n')
    else:
        (folder / lacks).unlink()
    assert main(["calibrate", str(folder), "--cluster", str(tmp_path / "c.yaml")]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "c.yaml").exists()


def test_runs_of_different_clusters_are_not_fitted_together(tmp_path: Path) -> None:
    here = plans()[0]
    there = replace(here, cluster=replace(here.cluster, gpu=find_gpu("a100-sxm-80gb")))
    runs = [read_run(finished_run(tmp_path / name, plan, 2000.0)) for name, plan in (("a", here), ("b", there))]
    with pytest.raises(PlanError, match="another cluster"):
        calibrate_cluster(runs)


def test_other_efficiencies_change_nothing_but_the_estimate() -> None:
    plan = plans()[0]
    changed = with_efficiency(plan, replace(plan.cluster.gpu.efficiency, matmul=0.3))
    assert digest(changed) == digest(plan)


def test_without_scipy_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    folder = finished_run(tmp_path / "run", plans()[0], 2000.0)
    assert main(["calibrate", str(folder), "--cluster", str(tmp_path / "c.yaml")]) == 1
    said = capsys.readouterr().err
    assert "fitting needs SciPy" in said
    assert "titan-planner[calibrate]" in said
