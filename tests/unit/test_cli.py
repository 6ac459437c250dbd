"""The command line: exit codes, files written whole, JSON for scripts, plain text when piped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_planner.cli import main
from titan_planner.ir.verify import load_plan

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "plans/tiny_cpu/spec.yaml")


def run(capsys, *argv: str) -> tuple[int, str, str]:
    try:
        code = main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert run(capsys, "compile", TINY, "-o", str(path))[0] == 0
    return path


def test_version_and_usage(capsys):
    assert run(capsys, "--version")[:2] == (0, "titan-plan 0.1.0\n")
    assert run(capsys)[0] == 2
    assert run(capsys, "fly")[0] == 2
    assert run(capsys, "compile")[0] == 2
    assert run(capsys, "compile", TINY, "--without", "magic")[0] == 2
    assert run(capsys, "compile", TINY, "--stop-after", "magic")[0] == 2
    assert run(capsys, "init", "--nodes", "0")[0] == 2


def test_validate(capsys, plan, tmp_path):
    assert run(capsys, "validate", TINY)[0] == 0
    assert run(capsys, "validate", str(plan))[0] == 0
    code, out, _ = run(capsys, "validate", TINY, "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    bad = tmp_path / "bad.yaml"
    bad.write_text("spec_version: 1\nmodle: 3\n")
    code, out, err = run(capsys, "validate", str(bad))
    assert (code, out) == (1, "")
    assert f"{bad}:2:1: error: the document has no field `modle`" in err
    assert "did you mean `model`?" in err
    code, out, _ = run(capsys, "validate", str(bad), "--json")
    found = json.loads(out)
    assert code == 1
    assert found["complaints"][0]["line"] in (1, 2)


def test_compile_writes_all_or_nothing(capsys, tmp_path, plan):
    before = plan.read_bytes()
    bad = tmp_path / "bad.yaml"
    bad.write_text("spec_version: 1\n")
    assert run(capsys, "compile", str(bad), "-o", str(plan))[0] == 1
    assert plan.read_bytes() == before
    code, _, err = run(capsys, "compile", TINY, "-o", str(tmp_path / "no" / "such" / "folder.json"))
    assert code == 1
    assert "cannot be written" in err
    code, _, err = run(capsys, "compile", TINY, "-o", str(tmp_path))
    assert code == 1
    assert "it is a folder" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.yaml", "plan.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a Linux device")
def test_full_disk_is_one_sentence(capsys):
    code, _, err = run(capsys, "compile", TINY, "-o", "/dev/full")
    assert code == 1
    assert "No space left on device" in err
    assert "Traceback" not in err


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, cwd=ROOT, env={**os.environ, **environment}, check=False
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a Linux device")
@pytest.mark.parametrize("verb", [f"compile {TINY}", "show plans/tiny_cpu/plan.json", "models", "hardware --json"])
def test_full_disk_behind_stdout_is_one_sentence(verb):
    done = shell(f"{sys.executable} -m titan_planner {verb} > /dev/full")
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 2
    assert b"error: the output cannot be read or written: No space left on device" in done.stderr


def test_an_ascii_terminal_is_no_error(tmp_path):
    path = tmp_path / "plan.json"
    named = f"{sys.executable} -m titan_planner compile {TINY} --set name=plané"
    assert shell(f"{named} -o {path}").returncode == 0
    written = shell(named, PYTHONIOENCODING="ascii")
    assert (written.returncode, written.stdout) == (0, path.read_bytes())
    shown = shell(f"{sys.executable} -m titan_planner show {path}", PYTHONIOENCODING="ascii")
    assert shown.returncode == 0, shown.stderr
    assert b"plan\\xe9" in shown.stdout


def test_a_spec_from_stdin():
    done = shell(f"{sys.executable} -m titan_planner compile - --set name=tiny_cpu < {TINY}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "plans/tiny_cpu/plan.json").read_bytes()
    done = shell(f"echo 'spec_version: 2' | {sys.executable} -m titan_planner validate -")
    assert done.returncode == 1
    assert b"<stdin>:1:15" in done.stderr


@pytest.mark.parametrize("option", ["foo", "=3", "a..b=1"])
def test_a_malformed_set_is_wrong_usage(capsys, option):
    code, _, err = run(capsys, "compile", TINY, "--set", option)
    assert code == 2
    assert "section.field=value" in err


def test_init_without_a_flavor_lists_them(capsys):
    code, _, err = run(capsys, "init", "--model", "llama3")
    assert code == 1
    assert "names a family without a flavor" in err
    assert "llama3:8B" in err


def test_init_for_cpus_brings_its_data(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "init", "--model", "llama3:debug", "--gpu", "cpu", "-o", "spec.yaml")[0] == 0
    assert (tmp_path / "data/tokenizer.json").exists()
    assert "6.16 million parameters" in (tmp_path / "spec.yaml").read_text()


def test_compile_to_stdout_and_dump_ir(capsys, tmp_path, plan):
    code, out, _ = run(capsys, "compile", TINY)
    assert code == 0
    assert out == plan.read_text()
    assert run(capsys, "compile", TINY, "-o", "/dev/null", "--dump-ir", str(tmp_path / "ir"))[0] == 0
    names = sorted(path.name for path in (tmp_path / "ir").iterdir())
    assert names == [
        "0-lower.json", "1-search_sharding.json", "2-partition_stages.json", "3-select_checkpointing.json",
        "4-filter_float8.json", "5-tune_runtime.json",
    ]  # fmt: skip
    assert all(load_plan(tmp_path / "ir" / name) for name in names)
    assert (tmp_path / "ir" / names[-1]).read_text() == plan.read_text()


def test_set_and_stop_after(capsys, tmp_path):
    path = tmp_path / "p.json"
    assert run(capsys, "compile", TINY, "-o", str(path), "--set", "training.steps=3", "--stop-after", "lower")[0] == 0
    assert load_plan(path).job.steps == 3


def test_show_and_explain(capsys, plan):
    code, out, _ = run(capsys, "show", str(plan))
    assert code == 0
    assert "layers.0-5 (x6)" in out
    assert "\x1b" not in out
    assert json.loads(run(capsys, "show", str(plan), "--json")[1])["name"] == "tiny_cpu"
    assert "tp = 1" in run(capsys, "explain", str(plan), "mesh.tp")[1]
    assert run(capsys, "explain", str(plan))[0] == 0
    code, _, err = run(capsys, "explain", str(plan), "mesh.tpp")
    assert code == 1
    assert "mesh.tp" in err
    assert json.loads(run(capsys, "explain", str(plan), "layers.1.attention.wk", "--json")[1])
    assert "one a rank for GPipe" in run(capsys, "explain", "pp-schedule")[1]


def test_diff(capsys, plan, tmp_path):
    other = tmp_path / "other.json"
    assert run(capsys, "compile", TINY, "-o", str(other), "--set", "optimizer.lr=1e-3")[0] == 0
    code, out, _ = run(capsys, "diff", str(plan), str(plan), "--exit-code")
    assert (code, out.strip()) == (0, "No changes.")
    code, out, _ = run(capsys, "diff", str(plan), str(other), "--exit-code")
    assert code == 1
    assert "optimizer.lr" in out
    assert run(capsys, "diff", str(plan), str(other))[0] == 0
    assert json.loads(run(capsys, "diff", str(plan), str(other), "--format", "json")[1])
    assert "|" in run(capsys, "diff", str(plan), str(other), "--format", "markdown")[1]


def test_schema_models_hardware_completion(capsys):
    assert json.loads(run(capsys, "schema", "spec")[1])["title"] == "Titan spec, version 1"
    assert "8,030,261,248" in run(capsys, "models")[1]
    assert "8,030,261,248" in run(capsys, "models", "llama3:8B")[1]
    rows = {row["model"]: row for row in json.loads(run(capsys, "models", "--json")[1])}
    assert len(rows) == 9
    assert rows["debug_moe:debugmodel"]["active"] < rows["debug_moe:debugmodel"]["params"]
    assert run(capsys, "models", "lama3")[0] == 1
    assert "989.4" in run(capsys, "hardware")[1]
    assert "source" in run(capsys, "hardware", "h100-sxm-80gb")[1]
    code, _, err = run(capsys, "hardware", "h1000")
    assert code == 1
    assert "did you mean" in err
    assert json.loads(run(capsys, "hardware", "--json")[1])["gpus"]
    for shell in ("bash", "zsh", "tcsh"):
        code, out, _ = run(capsys, "completion", shell)
        assert code == 0
        assert "explain" in out


@pytest.mark.parametrize("flavor", ["debug", "1B", "8B", "70B", "405B"])
@pytest.mark.parametrize(("gpu", "nodes"), [("h100-sxm-80gb", 64), ("cpu", 1)])
def test_init_writes_specs_that_compile(capsys, tmp_path, monkeypatch, flavor, gpu, nodes):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "spec.yaml"
    assert (
        run(capsys, "init", "--model", f"llama3:{flavor}", "--gpu", gpu, "--nodes", str(nodes), "-o", str(path))[0] == 0
    )
    code, _, err = run(capsys, "validate", str(path))
    # Large models do not fit in the memory of laptops; everything else about the spec is right.
    if gpu == "cpu" and flavor in ("8B", "70B", "405B"):
        assert code == 1
        assert "does not fit" in err
    else:
        assert code == 0, err
    assert run(capsys, "init", "-o", str(path))[0] == 1
    assert run(capsys, "init", "-o", str(path), "--force")[0] == 0


def test_init_example(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "tiny_cpu" in run(capsys, "init", "--example", "list")[1]
    assert run(capsys, "init", "--example", "tiny_cpu", "-o", "spec.yaml")[0] == 0
    assert (tmp_path / "data/tokenizer.json").exists()
    assert run(capsys, "validate", "spec.yaml")[0] == 0
    assert run(capsys, "init", "--example", "nothing")[0] == 1
    assert run(capsys, "init", "--model", "llama3:9B")[0] == 1
    assert run(capsys, "init", "--gpu", "h1000")[0] == 1


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m titan_planner.cli compile {TINY} | head -c 10"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.returncode == 0


def test_a_plan_that_may_not_fit_warns(capsys, tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(
        "spec_version: 1\nmodel: {family: llama3, flavor: 8B}\ncluster: {gpu: h100-sxm-80gb}\n"
        "training: {seq_len: 8192, local_batch_size: 4}\nparallelism: {data_parallel_shard_degree: 8}\n"
        "activation_checkpoint: {mode: none}\n"
    )
    code, _, err = run(capsys, "validate", str(path))
    assert code == 0
    assert "may not fit" in err


def test_colour_only_on_a_terminal_and_never_under_no_color():
    """A pseudo-terminal sees colour; NO_COLOR takes it away."""
    import pty

    def through_terminal(**environment: str) -> bytes:
        parent, child = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "titan_planner.cli", "models"],
            stdout=child, stderr=child, cwd=ROOT, env={**os.environ, "TERM": "xterm-256color", **environment},
        )  # fmt: skip
        os.close(child)
        output = b""
        while True:
            try:
                chunk = os.read(parent, 65536)
            except OSError:
                break
            if not chunk:
                break
            output += chunk
        process.wait()
        os.close(parent)
        return output

    environment = {key: "" for key in ("NO_COLOR", "FORCE_COLOR") if key in os.environ}
    assert b"\x1b[" in through_terminal(**environment)
    assert b"\x1b[" not in through_terminal(NO_COLOR="1")
