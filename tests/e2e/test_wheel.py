"""The built wheel, installed alone in an empty environment, works from any folder and brings no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin folder of a fresh environment that holds the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("titan_planner-*.whl")
    run(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    bin_folder = folder / "env" / "bin"
    constraints = ROOT / "constraints.txt"
    run(bin_folder / "python", "-m", "pip", "install", "--quiet", "-c", constraints, wheel, cwd=folder)
    return bin_folder


def test_wheel(installed, tmp_path):
    listed = run(installed / "python", "-m", "pip", "list", "--format", "freeze", cwd=tmp_path).stdout.lower()
    assert "torch" not in listed
    assert "numpy" not in listed
    plan = installed / "titan-plan"
    assert run(plan, "--version", cwd=tmp_path).stdout.startswith("titan-plan ")
    run(plan, "init", "--example", "llama3_405b_512xh100", "-o", "spec.yaml", cwd=tmp_path)
    run(plan, "compile", "spec.yaml", "-o", "plan.json", cwd=tmp_path)
    golden = (ROOT / "plans/llama3_405b_512xh100/plan.json").read_text()
    assert (tmp_path / "plan.json").read_text() == golden
    assert "layers.0-125" in run(plan, "show", "plan.json", cwd=tmp_path).stdout
    assert run(plan, "diff", "plan.json", "plan.json", cwd=tmp_path).stdout.strip() == "No changes."
    assert "8,030,261,248" in run(plan, "models", cwd=tmp_path).stdout
    run(plan, "hardware", cwd=tmp_path)
    run(plan, "schema", "spec", "-o", "schema.json", cwd=tmp_path)
    run(plan, "init", "--example", "tiny_cpu", "-o", "tiny.yaml", cwd=tmp_path)
    assert (tmp_path / "data/sample").is_dir()
    run(plan, "compile", "tiny.yaml", "-o", "tiny.json", cwd=tmp_path)
    assert "titan-run" in run(installed / "titan-run", "--help", cwd=tmp_path).stdout
    refused = run(installed / "titan-run", "train", "tiny.json", cwd=tmp_path, code=1)
    assert "titan-planner[runtime]" in refused.stderr
    assert "Traceback" not in refused.stderr
