"""The part of a checkpoint that people read: `train.json`, with everything that is not a tensor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from titan_runtime.checkpoint.folder import write_file
from titan_runtime.errors import RunError

FILE = "train.json"
FORMAT = 1


@dataclass(slots=True)
class Progress:
    """How far a run is. `schedule_start` is the step at which the learning-rate curve began, mostly 0."""

    step: int = 0
    tokens_seen: int = 0
    schedule_start: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """What a checkpoint says of itself.

    `contents` is "full", or "model" for weights only. `data` is the loader's state. `excluded` lists the parts that the
    run began without (`exclude_from_loading`): its own checkpoints have them, so they are not left out a second time.
    """

    contents: str
    progress: Progress
    data: dict[str, Any]
    digest: str
    plan_name: str
    titan: str
    torch: str
    excluded: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        write_file(folder / FILE, json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n")


def read_record(folder: Path) -> Record:
    """The record in a checkpoint's folder. Raises RunError when there is none that this version can read."""
    path = folder / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            raise RunError(f"{path}: its format is not {FORMAT}", hint="resume with the version of Titan that wrote it")
        return _checked(Record(**{**data, "progress": Progress(**data["progress"])}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path}: this is not the record of a checkpoint ({type(error).__name__}: {error})",
            hint=f"move {folder} away; the next older checkpoint is then used",
        ) from None


def _checked(record: Record) -> Record:
    """`record`, or TypeError or ValueError for a value that no save writes."""
    for found in (record, record.progress):
        for entry in fields(found):
            value, wanted = getattr(found, entry.name), _TYPES[str(entry.type)]
            if type(value) is not wanted:
                raise TypeError(f"`{entry.name}` is {value!r}")
    if min(record.progress.step, record.progress.tokens_seen) < 0 or record.contents not in ("full", "model"):
        raise ValueError(f"step {record.progress.step}, contents {record.contents!r}")
    return record


_TYPES: dict[str, type] = {
    "int": int,
    "str": str,
    "Progress": Progress,
    "dict[str, Any]": dict,
    "list[str]": list,
}
