"""What `make demo` runs: compile, explain, train on real text, kill every rank, resume, and check what was promised."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("outputs/demo")
PLAN = OUT / "plan.json"
BIN = Path(sys.executable).parent
KILL_AFTER_STEP = 33


def say(text: str) -> None:
    """A heading of the demo."""
    print(f"\n=== {text}", flush=True)


def run(*command: str) -> None:
    """Run one command as a user would, and show it."""
    print(f"$ {' '.join(command)}", flush=True)
    done = subprocess.run([str(BIN / command[0]), *command[1:]], check=False)
    if done.returncode:
        sys.exit(f"the demo stops: `{command[0]}` exited with {done.returncode}")


def torchrun(folder: Path) -> tuple[str, ...]:
    """The command line that trains the plan into `folder`."""
    ranks = str(json.loads(PLAN.read_text())["cluster"]["gpus_per_node"])
    arguments = ("-m", "titan_runtime", "--plan", str(PLAN), "--dump-folder", str(folder))
    return ("torchrun", "--standalone", "--nproc-per-node", ranks, *arguments)


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm), every digit, from the run's step log."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return {}
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the last line of a killed run may be cut
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows}


def descendants(pid: int) -> list[int]:
    """The process `pid` and everything it started."""
    listing = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = [pid]
    for process in found:
        found.extend(children.get(process, ()))
    return found


def train_and_kill(folder: Path) -> int:
    """Train until step KILL_AFTER_STEP, then `kill -9` the launcher and all ranks. The last step that was logged."""
    command = torchrun(folder)
    print(f"$ {' '.join(command)}", flush=True)
    process = subprocess.Popen([str(BIN / command[0]), *command[1:]])
    try:
        while max(losses(folder), default=0) < KILL_AFTER_STEP:
            if process.poll() is not None:
                sys.exit(f"the demo stops: the run ended with {process.returncode} before it could be killed")
            time.sleep(0.1)
    finally:
        for pid in reversed(descendants(process.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself in the meantime
    process.wait()
    return max(losses(folder))


def last_scalar(folder: Path, tag: str) -> float:
    """The newest value of a TensorBoard scalar, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    if tag not in events.Tags()["scalars"]:
        sys.exit(f"the demo stops: TensorBoard's reader finds no scalar `{tag}`; it finds {events.Tags()['scalars']}")
    return float(events.Scalars(tag)[-1].value)


def check(claim: str, holds: bool) -> bool:
    """Print one promise and whether it was kept."""
    print(f"  {'yes' if holds else 'NO '}  {claim}", flush=True)
    return holds


def main() -> int:
    """Run the demo. 0 when every promise was kept."""
    os.chdir(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    whole, killed = OUT / "whole", OUT / "killed"

    say("A spec becomes a plan")
    print(Path("plans/tiny_cpu/spec.yaml").read_text())
    run("titan-plan", "compile", "plans/tiny_cpu/spec.yaml", "-o", str(PLAN))
    say("The plan, and why")
    run("titan-plan", "show", str(PLAN))
    run("titan-plan", "explain", str(PLAN))

    say("Training on real text with 4 ranks")
    run(*torchrun(whole))

    say("The same run again, but every rank is killed on the way")
    reached = train_and_kill(killed)
    saved = sorted(int(path.name.split("-")[1]) for path in (killed / "checkpoint").glob("step-*"))
    print(f"kill -9 after step {reached}; complete checkpoints: {saved}", flush=True)
    say("The same command once more resumes")
    run(*torchrun(killed))

    say("What was promised")
    from titan_runtime.data import load_tokenizer, open_stream
    from titan_runtime.data.entropy import unigram_entropy_nats

    plan = json.loads(PLAN.read_text())
    vocab = plan["model"]["vocab_size"]
    tokenizer = load_tokenizer(plan["data"]["tokenizer"])
    stream = open_stream("text", plan["data"]["path"], plan["data"]["tokenizer"], plan["batch"]["seq_len"])
    entropy = unigram_entropy_nats(stream, tokenizer.vocab_size)
    uninterrupted, resumed = losses(whole), losses(killed)
    first, last = uninterrupted[1][0], uninterrupted[max(uninterrupted)][0]
    equal = [step for step in uninterrupted if resumed.get(step) == uninterrupted[step]]
    print(f"  ln(vocabulary of {vocab}) = {math.log(vocab):.4f} nats, unigram entropy of the text = {entropy:.4f} nats")
    print(f"  loss at step 1 = {first:.4f}, at step {max(uninterrupted)} = {last:.4f}")
    kept = [
        check("the loss starts near ln(vocabulary) (within 1 nat)", abs(first - math.log(vocab)) < 1.0),
        check("it ends clearly below the unigram entropy (by 0.5 nat or more)", last < entropy - 0.5),
        check("TensorBoard's reader shows the same last loss", abs(last_scalar(whole, "training/loss") - last) < 1e-5),
        check(
            f"killed after step {reached} and resumed from step {saved[-1]}: all {len(uninterrupted)} losses and gradient "
            "norms equal the uninterrupted run's, digit for digit",
            len(equal) == len(uninterrupted) == len(resumed),
        ),
    ]
    print(f"\nLook around: {OUT}/, or `tensorboard --logdir {OUT}`")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
