"""What the command line may change about a run: its length, its output and where its data lie. Never a decision."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TypeVar

from titan_planner.ir.codec import digest
from titan_planner.ir.errors import InvariantError
from titan_planner.ir.plan import Plan
from titan_runtime.errors import RunError

Record = TypeVar("Record")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `apply_overrides` reads."""
    job = parser.add_argument_group("the run (none of these changes what is trained)")
    job.add_argument("--steps", type=int, metavar="N", help="train until this step")
    job.add_argument("--dump-folder", metavar="DIR", help="root of everything the run writes")
    job.add_argument("--log-freq", type=int, metavar="N", help="steps between log lines")
    job.add_argument("--tensorboard", action=argparse.BooleanOptionalAction, help="write TensorBoard scalars")
    job.add_argument("--wandb", action=argparse.BooleanOptionalAction, help="also log to Weights & Biases")
    job.add_argument(
        "--checkpoint", action=argparse.BooleanOptionalAction, help="save checkpoints and resume from them"
    )
    job.add_argument("--checkpoint-interval", type=int, metavar="N", help="steps between checkpoints")
    job.add_argument("--keep-latest-k", type=int, metavar="K", help="checkpoints kept; 0 keeps all")
    job.add_argument("--load-step", type=int, metavar="N", help="resume from this step; -1 is the latest")
    job.add_argument(
        "--validation", action=argparse.BooleanOptionalAction, help="measure the loss on the held-out text"
    )
    job.add_argument("--profile", action=argparse.BooleanOptionalAction, help="record torch.profiler traces")
    data = parser.add_argument_group("where things are")
    data.add_argument("--data-path", metavar="PATH", help="file or folder of the training text")
    data.add_argument("--validation-path", metavar="PATH", help="file or folder of the held-out text")
    data.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, or a folder with one")
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume although the plan differs from the checkpoint's in more than how the work is split",
    )


def apply_overrides(plan: Plan, arguments: argparse.Namespace) -> Plan:
    """`plan` with what the command line says; RunError for a value that the plan's field does not take."""
    changes = {name: value for name, value in vars(arguments).items() if value is not None}
    try:
        checkpoint = _replace(
            plan.job.checkpoint,
            changes,
            checkpoint="enable",
            checkpoint_interval="interval",
            keep_latest_k="keep_latest_k",
            load_step="load_step",
        )
        metrics = _replace(
            plan.job.metrics, changes, log_freq="log_freq", tensorboard="enable_tensorboard", wandb="enable_wandb"
        )
        profiling = _replace(plan.job.profiling, changes, profile="enable_profiling")
        job = _replace(plan.job, changes, steps="steps", dump_folder="dump_folder")
        validation = _replace(plan.job.validation, changes, validation="enable", validation_path="path")
        job = replace(job, checkpoint=checkpoint, metrics=metrics, profiling=profiling, validation=validation)
        if validation.enable and validation.path is None:
            raise RunError("validation is on, but names no text", hint="add --validation-path PATH")
        changed = replace(plan, job=job, data=_replace(plan.data, changes, data_path="path", tokenizer="tokenizer"))
    except InvariantError as error:
        raise RunError(f"on the command line: {error.message}", hint=error.hint) from None
    if digest(changed) != digest(plan):
        raise AssertionError("an option of the command line changed a decision of the plan")
    return changed


def _replace(record: Record, changes: dict[str, object], **fields: str) -> Record:
    """`record` with those of its fields replaced whose option is among `changes`; `fields` is option -> field."""
    return replace(record, **{field: changes[option] for option, field in fields.items() if option in changes})  # type: ignore[type-var]
