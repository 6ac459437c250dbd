"""`titan-run`: the verbs of the runtime. Parses, calls, prints, and sets the exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from titan_runtime import version


def parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    from titan_runtime.overrides import add_arguments

    made = argparse.ArgumentParser(prog="titan-run", description="Run Titan plans with PyTorch.", allow_abbrev=False)
    made.add_argument("--version", action="version", version=f"titan-run {version()}")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")

    train = verbs.add_parser(
        "train",
        help="run a plan on this machine, with torchrun",
        description="Start as many ranks as the plan has on this machine and run it. Longer form: "
        "torchrun --standalone --nproc-per-node N -m titan_runtime --plan PLAN",
        epilog="exit codes: 0 all steps done; 1 an error; 2 wrong usage; 128 + N stopped by signal N after saving",
        allow_abbrev=False,
    )
    train.add_argument("plan", metavar="PLAN", help="the plan, made by `titan-plan compile`")
    train.add_argument(
        "--shutdown-seconds",
        type=int,
        default=600,
        metavar="S",
        help="after SIGTERM or Ctrl-C, how long ranks may take to finish their step and save (default 600)",
    )
    add_arguments(train)

    completion = verbs.add_parser("completion", help="print a shell's completion script")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command line `argv`."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(given)
    if arguments.verb == "completion":
        return _completion(arguments.shell)
    try:
        return _train(arguments, given)
    except KeyboardInterrupt:  # before the launcher minds signals
        return 130


def _train(arguments: argparse.Namespace, given: list[str]) -> int:
    from titan_runtime.launch import launch

    # The runtime parses its options itself, so all but the verb, the plan and the launcher's own go on as they came.
    return launch(arguments.plan, _passed_on(given, arguments.plan), arguments.shutdown_seconds)


def _passed_on(given: list[str], plan: str) -> list[str]:
    """The options of `titan-run train PLAN ...` that are the runtime's."""
    options = given[1:]
    options.remove(plan)
    kept: list[str] = []
    words = iter(options)
    for word in words:
        if word == "--shutdown-seconds":
            next(words)
        elif not word.startswith("--shutdown-seconds="):
            kept.append(word)
    return kept


def _completion(shell: str) -> int:
    try:
        import shtab
    except ImportError:
        print("titan-run: shell completion needs the package shtab\n    try: pip install shtab", file=sys.stderr)
        return 1
    try:
        print(shtab.complete(parser(), shell=shell), flush=True)
    except BrokenPipeError:
        # The reader has seen enough; the interpreter must not try to write the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
