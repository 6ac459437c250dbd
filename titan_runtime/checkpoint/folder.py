"""The folder of a run's checkpoints: which are complete, and how a new one appears all at once or not at all.

A checkpoint is written into `step-N.partial` and renamed to `step-N` when all of it is on disk. Its `.metadata` is
written last, so a folder without one is the rest of a save that was cut short (as plain copies of a checkpoint can be
too).
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step-(\d{1,15})")
_LEFTOVER = re.compile(r"step-\d+\.(partial|replaced|deleted)")

COMMIT_MARK = ".metadata"


@dataclass(frozen=True, slots=True)
class Entry:
    """One `step-N` folder."""

    step: int
    path: Path

    @property
    def complete(self) -> bool:
        """Whether the save that made it came to its end."""
        return (self.path / COMMIT_MARK).is_file()


class CheckpointFolder:
    """The entries of one folder. Only one rank may change it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def entries(self) -> list[Entry]:
        """All `step-N` folders, complete or not, newest step first; none when the folder does not exist."""
        if not self.root.is_dir():
            return []
        found = [
            (match, path) for path in self.root.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()
        ]
        return sorted((Entry(int(match[1]), path) for match, path in found), key=lambda entry: -entry.step)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is or will be."""
        return self.root / f"step-{step}"

    def partial(self, step: int) -> Path:
        """Where the checkpoint of `step` is written."""
        return self.root / f"step-{step}.partial"

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into; what earlier runs left half done is removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        for path in self.root.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
        partial = self.partial(step)
        partial.mkdir()
        return partial

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def publish(self, step: int) -> None:
        """Make the finished checkpoint of `step` appear under its name, in place of an older one of the same step."""
        final = self.path(step)
        replaced = self.root / f"step-{step}.replaced"
        _sync(self.partial(step))
        if final.exists():
            final.rename(replaced)
        self.partial(step).rename(final)
        _sync(self.root)
        if replaced.exists():
            shutil.rmtree(replaced)

    def set_aside(self, after: int, upto: int | None = None) -> list[tuple[int, Path]]:
        """Rename the checkpoints of the steps after `after` (and up to `upto`), so that no run takes them for its own.

        Returns their steps, in order, and what they are called now.
        """
        moved = []
        for entry in reversed(self.entries()):
            if entry.step <= after or (upto is not None and entry.step > upto):
                continue
            name, count = f"abandoned-{entry.path.name}", 1
            while (self.root / name).exists():
                count += 1
                name = f"abandoned-{entry.path.name}-{count}"
            entry.path.rename(self.root / name)
            moved.append((entry.step, self.root / name))
        return moved

    def keep(self, latest: int, saved: int) -> None:
        """Remove the oldest complete checkpoints up to that of step `saved` until `latest` are left; 0 keeps all.

        `saved` is the newest of this run's history and never removed; what lies after it belongs to no history of it.
        """
        complete = [entry for entry in self.entries() if entry.complete and entry.step <= saved]
        for entry in complete[latest:] if latest else []:
            # Renamed first: a removal that is cut short must not leave a damaged checkpoint under a good name.
            doomed = entry.path.with_name(f"{entry.path.name}.deleted")
            entry.path.rename(doomed)
            shutil.rmtree(doomed)


def write_file(path: Path, text: str) -> None:
    """Write `text` and wait until it is on disk."""
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    """Wait until the names in `folder` are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
