"""Read rows of published measurements. A row that is no row is kept and says what is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class Unusable(Exception):
    """A row, or a part of it, that cannot be used: `kind` is short and countable, `detail` says what exactly."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail


MALFORMED = "malformed row"
NOT_PUBLISHED = "not published"


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of a file. Values are read by dotted paths; null, absent and empty all mean not published (None)."""

    id: str
    file: str  # name of the file that holds it
    number: int  # position in the file, from 0
    data: Mapping[str, Any]
    problem: str | None = None  # why it is no row at all

    def value(self, path: str) -> Any:
        """Whatever stands at `path`, or None."""
        found: Any = self.data
        for part in path.split("."):
            if not isinstance(found, Mapping):
                return None
            found = found.get(part)
        return found

    def section(self, path: str) -> Mapping[str, Any]:
        """The mapping at `path`; empty when there is none."""
        found = self.value(path)
        return found if isinstance(found, Mapping) else {}

    def number_at(self, path: str) -> float | None:
        """The finite number at `path`. `Unusable` when something else stands there."""
        found = self.value(path)
        if found is None or found == "":
            return None
        try:
            number = math.nan if isinstance(found, bool) else float(found)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise Unusable(MALFORMED, f"`{path}` is {_shown(found)}, not a number")
        return number

    def positive(self, path: str) -> float | None:
        """The number greater than 0 at `path`. `Unusable` when another value stands there."""
        number = self.number_at(path)
        if number is not None and number <= 0:
            raise Unusable(MALFORMED, f"`{path}` is {number:g}, but must be greater than 0")
        return number

    def count(self, path: str, minimum: int = 1) -> int | None:
        """The whole number of at least `minimum` at `path`. `Unusable` when another value stands there."""
        number = self.number_at(path)
        if number is None:
            return None
        if number != int(number) or number < minimum or number > 10**13:
            raise Unusable(MALFORMED, f"`{path}` is {number:g}, not a whole number of at least {minimum}")
        return int(number)

    def required(self, *paths: str) -> tuple[int, ...]:
        """The counts at `paths`. `Unusable` names those that are not published."""
        found = [self.count(path) for path in paths]
        missing = [path for path, value in zip(paths, found, strict=True) if value is None]
        if missing:
            raise Unusable(NOT_PUBLISHED, ", ".join(missing))
        return tuple(value for value in found if value is not None)

    def flag(self, path: str) -> bool | None:
        """True or false at `path`; None for anything else, texts included."""
        found = self.value(path)
        return found if isinstance(found, bool) else None

    def text(self, path: str) -> str:
        """What stands at `path` as text; mappings and lists as JSON, nothing as the empty text."""
        found = self.value(path)
        if found is None:
            return ""
        return found if isinstance(found, str) else json.dumps(found, default=str)

    @property
    def source(self) -> str:
        """What the row was published in: the title without what differs between its tables, or the file."""
        return Path(self.file).stem

    @property
    def quality(self) -> str:
        """A, B, C or D; `?` where the row gives none."""
        found = self.text("quality").strip().upper()
        return found if found in ("A", "B", "C", "D") else "?"


def _shown(value: object) -> str:
    shown = str(value)
    return f"`{shown[:40]}`"


def read_rows(folder: Path) -> tuple[Row, ...]:
    """All rows of the YAML files in `folder`, in order of file names. Raises OSError when it is no folder that can be read.

    A file that is no YAML list, and an entry that is no mapping, become rows with a `problem`.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder")
    files = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file())
    return tuple(row for path in files for row in _read(path))


# The C loader is ten times faster, and not everywhere.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _read(path: Path) -> Iterator[Row]:
    try:
        entries = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield Row(path.stem, path.name, 0, {}, f"the file cannot be read: {first}")
        return
    if entries is None:
        return
    if not isinstance(entries, list):
        yield Row(path.stem, path.name, 0, {}, "the file holds no list of rows")
        return
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            yield Row(f"{path.stem}[{number}]", path.name, number, {}, f"the entry is {_shown(entry)}, not a mapping")
            continue
        name = entry.get("id")
        yield Row(str(name) if name not in (None, "") else f"{path.stem}[{number}]", path.name, number, entry)
