"""`metrics.jsonl`: one JSON object for every step, with all digits, for programs and for exact comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from titan_runtime.errors import reason, warn


class StepLog:
    """Appends a line a step. Opened at a step, it first drops the lines of later steps: they will be made again."""

    def __init__(self, path: Path, step: int) -> None:
        """Open `path` for a run that is at `step`; the folder is made when missing. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if line["step"] <= step]
        # Rewritten beside and moved over: a kill in between leaves the old file or the new one.
        beside = path.with_name(f"{path.name}.new")
        beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(beside, path)
        self._path, self._stopped = path, False
        self._stream: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens_seen: int,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Add the line of one step, with `more` numbers. Floats have as many digits as tell them apart from any other."""
        line = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_seen": tokens_seen,
            **(more or {}),
        }
        self.append(step, line)

    def append(self, step: int, line: Mapping[str, object]) -> None:
        """Add `line`, which is about `step`."""
        if self._stopped:
            return
        try:
            self._stream.write(json.dumps({"step": step, **line}) + "\n")
            self._stream.flush()
        except OSError as error:
            self._stop(step, error)

    def close(self) -> None:
        """No more lines."""
        try:
            self._stream.close()
        except OSError as error:
            self._stop(None, error)

    def _stop(self, step: int | None, error: OSError) -> None:
        """A log must not end a run: say once that it is incomplete, and go on without it."""
        if not self._stopped:
            where = f" from step {step} on" if step is not None else ""
            warn(f"{self._path}: {reason(error)}; it has no more lines{where}, training goes on")
        self._stopped = True


def _lines(path: Path) -> list[dict[str, float]]:
    """The readable lines of a log; one that a kill cut short or a disk spoiled is left out."""
    if not path.exists():
        return []
    found = []
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text.decode("utf-8"))
        except ValueError:  # not UTF-8, or not JSON
            continue
        if isinstance(line, dict) and type(line.get("step")) is int:
            found.append(line)
    return found
