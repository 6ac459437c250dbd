"""The command lines themselves: torchrun, titan-run, what they print and how they end.

Starting torchrun takes seconds, so everything else about a run is tested on forked ranks, in the other files.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests import plans
from titan_planner.ir.plan import Plan

SCRIPTS = Path(sys.executable).parent
TIMEOUT = 120


def environment() -> dict[str, str]:
    # Ranks run in a folder of their own; what they import is the source tree or the installed package, as in this process.
    path = os.pathsep.join([str(plans.REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a run starts: with the repository's data at the relative paths that plans name."""
    (tmp_path / "data").symlink_to(plans.REPOSITORY / "data")
    return tmp_path


def write(folder: Path, plan: Plan | None = None, **checkpoint: object) -> Plan:
    settings = {"enable": True, "interval": 5, **checkpoint}
    plan = plan or plans.tiny_plan(plans.mesh(2), local=2, job=plans.job("out", 20, **settings))
    plans.write_plan(plan, folder / "plan.json")
    return plan


def torchrun(*words: str, ranks: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, "-m", "titan_runtime", "--plan", "plan.json", *words]


def titan_run(*words: str) -> list[str]:
    return [sys.executable, "-m", "titan_runtime.cli", *words]


def call(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A command in the background, in a session of its own; nothing of it is left at the end."""
    with open(folder / "printed", "w") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        for pid in [*children(process.pid), process.pid]:
            kill(pid, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    """Pids of the direct children of a process: the ranks of a launcher."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended by itself


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, (folder / "printed").read_text()
        assert time.monotonic() < deadline, (folder / "printed").read_text()
        time.sleep(0.02)


def lines(folder: Path) -> list[dict[str, float]]:
    path = folder / "out" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(folder: Path) -> int:
    path = folder / "out" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


# ------------------------------------------------------------------ runs that end early and go on


def test_all_ranks_killed_and_the_same_command_again_give_the_same_losses_digit_for_digit(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    straight = tmp_path_factory.mktemp("straight")
    (straight / "data").symlink_to(plans.REPOSITORY / "data")
    for place in (folder, straight):
        write(place)

    with started(torchrun(), folder) as process:
        wait_until(lambda: steps(folder) >= 8, process, folder)
        ranks = children(process.pid)
        assert len(ranks) == 2
        for pid in ranks:
            kill(pid, signal.SIGKILL)
        assert process.wait(TIMEOUT) != 0
    assert 8 <= steps(folder) < 20

    again = call(torchrun(), folder)
    assert again.returncode == 0, again.stderr
    assert "titan: resuming from out/checkpoint/step-" in again.stdout
    assert "titan: done: step 20, loss " in again.stdout

    # The uninterrupted run is started the other way, by titan-run.
    whole = call(titan_run("train", "plan.json"), straight)
    assert whole.returncode == 0, whole.stderr
    assert "resuming" not in whole.stdout
    assert lines(folder) == lines(straight)
    assert [line["step"] for line in lines(folder)] == list(range(1, 21))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(folder: Path, number: signal.Signals) -> None:
    write(folder, interval=1000)
    with started(titan_run("train", "plan.json", "--steps", "100000"), folder) as process:
        wait_until(lambda: steps(folder) >= 3, process, folder)
        process.send_signal(number)
        assert process.wait(TIMEOUT) == 128 + number
    printed = (folder / "printed").read_text()
    assert f"stopped by signal {int(number)} after step " in printed
    assert "Traceback" not in printed
    last = lines(folder)[-1]["step"]
    assert (folder / "out" / "checkpoint" / f"step-{last}" / ".metadata").exists()
    if number != signal.SIGTERM:
        return  # going on does not depend on the signal
    again = call(titan_run("train", "plan.json", "--steps", str(last + 1), "--no-tensorboard"), folder)
    assert again.returncode == 0, again.stderr
    assert f"resuming from out/checkpoint/step-{last}" in again.stdout
    assert [line["step"] for line in lines(folder)] == list(range(1, last + 2))


# ------------------------------------------------------------------ errors are one sentence


def one_sentence(result: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """What a failed command said on stderr; it must be one error and no traceback."""
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert sum(line.startswith(("titan:", "titan-run:")) for line in result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


def test_a_wrong_number_of_ranks_says_the_right_line_once(folder: Path) -> None:
    write(folder)
    result = call(torchrun(ranks=3), folder)
    assert result.returncode == 1
    # torchrun reports failed ranks in its own way; ours is one sentence among it.
    ours = [line for line in result.stderr.splitlines() if line.startswith("titan: ")]
    assert ours == ["titan: 3 ranks were started, but the plan `tiny` needs 2 ranks"]
    assert "    try: torchrun --standalone --nproc-per-node 2 -m titan_runtime --plan plan.json\n" in result.stderr
    assert not (folder / "out").exists()


def test_what_the_runtime_does_not_do_is_said_before_anything_is_written(folder: Path) -> None:
    plan = write(folder)
    checkpoint = replace(plan.job.checkpoint, enable=True, async_mode="async")
    plans.write_plan(replace(plan, job=replace(plan.job, checkpoint=checkpoint)), folder / "plan.json")
    said = one_sentence(call(titan_run("train", "plan.json"), folder))
    assert "`job.checkpoint.async_mode`: this version of the runtime does not do asynchronous checkpoints yet" in said
    assert not (folder / "out").exists()


def test_text_that_cannot_be_used_is_said_once_though_all_ranks_meet_it(folder: Path) -> None:
    plan = write(folder)
    records = [json.dumps({"text": "In the beginning. " * 200}) for _ in range(3)]
    (folder / "text.jsonl").write_text("\n".join([*records, "{broken", *records]))
    plans.write_plan(replace(plan, data=replace(plan.data, source="jsonl")), folder / "plan.json")
    result = call(titan_run("train", "plan.json", "--data-path", "text.jsonl"), folder)
    assert "text.jsonl:4" in one_sentence(result)
    assert steps(folder) >= 1


def test_a_missing_plan_is_one_sentence_whichever_way_it_is_started(folder: Path) -> None:
    for command in (titan_run("train", "no.json"), [sys.executable, "-m", "titan_runtime", "--plan", "no.json"]):
        assert "no.json: the plan cannot be read: No such file or directory" in one_sentence(call(command, folder))


def test_a_plan_for_many_nodes_is_left_to_torchrun(folder: Path) -> None:
    plan = write(folder)
    plans.write_plan(replace(plan, cluster=plans.cluster(2, nodes=2)), folder / "plan.json")
    said = one_sentence(call(titan_run("train", "plan.json"), folder))
    assert "needs 2 ranks on 2 nodes, and titan-run starts ranks on one machine only" in said
    assert "torchrun --nnodes 2 --nproc-per-node 1" in said


def test_without_torch_the_extra_is_named(folder: Path) -> None:
    write(folder)
    (folder / "hide.py").write_text(
        "import importlib.util, runpy, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else real(name, *rest)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_module(sys.argv[0], run_name='__main__')\n"
    )
    for words in (["titan_runtime", "--plan", "plan.json"], ["titan_runtime.cli", "train", "plan.json"]):
        said = one_sentence(call([sys.executable, "hide.py", *words], folder))
        assert "pip install 'titan-planner[runtime]'" in said


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        ({"RANK": "-1"}, "RANK is '-1', not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "RANK=2, which is none of WORLD_SIZE=2 ranks"),
        ({"WORLD_SIZE": "2"}, "try: torchrun --standalone --nproc-per-node 2 -m titan_runtime --plan plan.json"),
    ],
)
def test_a_wrong_environment_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], variables: dict, words: str
) -> None:
    from titan_runtime.__main__ import main

    write(folder)
    monkeypatch.chdir(folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["--plan", "plan.json"]) == 1
    said = capfd.readouterr().err
    assert words in said
    assert said.startswith("titan: ")
    assert "Traceback" not in said


def test_ctrl_c_while_starting_is_130_without_a_traceback(folder: Path) -> None:
    write(folder)
    (folder / "start.py").write_text(
        "import importlib.util, os, runpy, signal, sys\n"
        "real = importlib.util.find_spec\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'torch':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest)\n"
        "importlib.util.find_spec = interrupted\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_module(sys.argv[0], run_name='__main__')\n"
    )
    for words in (["titan_runtime", "--plan", "plan.json"], ["titan_runtime.cli", "train", "plan.json"]):
        result = call([sys.executable, "start.py", *words], folder)
        assert (result.returncode, result.stderr) == (130, "")


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> pid of the launcher's children."""
    found = {}
    for pid in children(launcher):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found.update({int(word[5:]): pid for word in variables if word.startswith(b"RANK=")})
    return found


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    "launcher", [titan_run("train", "plan.json"), torchrun(ranks=3)], ids=["titan-run", "torchrun"]
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_is_missing_is_named_and_the_others_end(
    folder: Path, launcher: list[str], number: signal.Signals
) -> None:
    plan = plans.tiny_plan(plans.mesh(3), local=1, total=6, job=plans.job("out", 100000))
    comm = replace(plan.job.comm, train_timeout_seconds=10)
    write(folder, replace(plan, job=replace(plan.job, comm=comm)))
    with started(launcher, folder) as process:
        wait_until(lambda: steps(folder) > 3, process, folder)
        ranks = ranks_of(process.pid)
        assert sorted(ranks) == [0, 1, 2]
        kill(ranks[1], number)
        # The launcher may wait longer: it ends a rank that minds no signal after half a minute.
        wait_until(lambda: process.poll() is not None or all(has_ended(ranks[r]) for r in (0, 2)), process, folder)
        kill(ranks[1], signal.SIGKILL)
        assert process.wait(TIMEOUT) != 0
    printed = (folder / "printed").read_text()
    ours = [line for line in printed.splitlines() if line.startswith("titan: rank ")]
    assert len(ours) == 1, printed
    assert "rank 1 gives no sign of life" in ours[0]
    # torchrun reports failed processes with a traceback of its own; none may come from a rank.
    assert "titan_runtime/" not in printed, printed
    if launcher[2] == "titan_runtime.cli":
        assert "Traceback" not in printed, printed
        assert ("titan-run: rank 1 was ended by SIGKILL" in printed) == (number == signal.SIGKILL)


# ------------------------------------------------------------------ small verbs


def test_completion_into_a_closed_pipe_is_silent(folder: Path) -> None:
    command = f"{sys.executable} -m titan_runtime.cli completion bash | true"
    result = call(["bash", "-c", f"set -o pipefail; {command}"], folder)
    assert (result.returncode, result.stderr) == (0, "")


def test_help_version_and_completion_do_not_import_torch(folder: Path) -> None:
    (folder / "watch.py").write_text(
        "import sys\n"
        "from titan_runtime.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    for words in (["--help"], ["--version"], ["train", "--help"], ["completion", "bash"]):
        result = call([sys.executable, "watch.py", *words], folder)
        assert result.returncode == 0, result.stderr
        assert "titan-run" in result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_the_options(folder: Path, shell: str) -> None:
    result = call(titan_run("completion", shell), folder)
    assert result.returncode == 0, result.stderr
    assert "dump-folder" in result.stdout


def test_wrong_usage_is_exit_code_2(folder: Path) -> None:
    for command in (titan_run("trian"), titan_run("train", "plan.json", "--step", "3"), titan_run()):
        result = call(command, folder)
        assert result.returncode == 2
        assert result.stderr.startswith("usage: titan-run")
