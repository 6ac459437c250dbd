"""YAML -> Spec: `extends`, `--set`, the schema and the types, with file:line:column on every complaint, all at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_planner.ir.codec import DecodeError, decode, decode_value
from titan_planner.ir.errors import Complaint, Place, SpecError
from titan_planner.ir.record import field_types
from titan_planner.ir.request import Spec
from titan_planner.ir.validate import Difference, differences, dotted
from titan_planner.yaml_source import STDIN, Document, PathTuple, assignments, read_yaml

_MAX_EXTENDS = 20


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """A spec with the places its values came from and the folder that its own paths are relative to."""

    spec: Spec
    document: Document
    folder: Path
    name: str

    def place(self, address: str, at_key: bool = False) -> Place | None:
        """Where the value at a dotted address stands in the user's files."""
        return self.document.place(path_of(address), at_key)

    def is_set(self, address: str) -> bool:
        """Whether the user wrote the value at `address`."""
        return path_of(address) in self.document.values


def path_of(address: str) -> PathTuple:
    """`a.b[2].c` as ("a", "b", 2, "c")."""
    parts: list[str | int] = []
    for piece in address.split(".") if address else []:
        name, *indices = piece.replace("]", "").split("[")
        if name:
            parts.append(name)
        parts.extend(int(index) for index in indices)
    return tuple(parts)


def load_spec(path: str | Path, sets: list[str] | None = None) -> LoadedSpec:
    """The spec in the file `path`, with what it extends below it and the `--set` options on top. Raises `SpecError`."""
    path = Path(path)
    document = _with_bases(path, "<stdin>" if path == STDIN else str(path), ())
    if sets:
        document = document.overlay(assignments(sets))
    return LoadedSpec(_decode(document, str(path)), document, path.parent, _default_name(path))


def _default_name(path: Path) -> str:
    # plans/NAME/spec.yaml is named after its folder: `spec` would say nothing.
    if path == STDIN:
        return "stdin"
    name = path.resolve().parent.name if path.stem == "spec" else path.stem
    return name.encode("utf-8", "backslashreplace").decode("utf-8")  # file names need not be UTF-8, plans must


def _with_bases(path: Path, shown: str, below: tuple[Path, ...]) -> Document:
    document = read_yaml(path, shown)
    if not isinstance(document.data, dict):
        kind = "a list" if isinstance(document.data, list) else "a single value"
        raise SpecError(
            Complaint(
                f"a spec is a mapping of sections, but this file holds {kind}",
                "",
                Place(shown, 1, 1),
                "write `section: value` lines without dashes; `titan-plan init` shows one",
            )
        )
    base = document.data.pop("extends", None)
    if base is None:
        return document
    place = document.place(("extends",))
    if not isinstance(base, str) or not base:
        raise SpecError(Complaint("`extends` must name one YAML file", "extends", place, "write `extends: other.yaml`"))
    resolved = path.resolve()
    if resolved in below or len(below) >= _MAX_EXTENDS:
        raise SpecError(
            Complaint(
                f"`extends: {base}` leads back to a file that extends this one", "extends", place, "break the circle"
            )
        )
    target = path.parent / base
    if not target.is_file():
        raise SpecError(
            Complaint(
                f"`extends` names `{base}`, which is not a file beside this spec",
                "extends",
                place,
                "the path is relative to the spec that names it",
            )
        )
    return _with_bases(target, str(target), (*below, resolved)).overlay(document)


def _decode(document: Document, shown: str) -> Spec:
    found = differences("spec", document.data)
    if found:
        raise SpecError([_complaint(d, document, shown) for d in sorted(found, key=lambda d: _order(d, document))])
    try:
        return decode(Spec, document.data)
    except DecodeError as error:
        raise SpecError(_collect_invariants(document, error)) from None


def _collect_invariants(document: Document, first: DecodeError) -> list[Complaint]:
    """A record stops at its first broken invariant; the other sections are tried too, so that all are reported at once."""
    complaints: dict[str, Complaint] = {}
    broken = [first]
    for name, hint in field_types(Spec).items():
        if name in document.data:
            try:
                decode_value(hint, document.data[name], name)
            except DecodeError as error:
                broken.append(error)
    for entry in broken:
        place = document.place(path_of(entry.field))
        complaints[entry.field] = Complaint(entry.message, entry.field, place, entry.hint, entry.rule)
    return list(complaints.values())


def _complaint(difference: Difference, document: Document, shown: str) -> Complaint:
    place = document.place(difference.path, difference.at_key) or Place(shown)
    return Complaint(difference.message, dotted(difference.path), place, difference.hint)


def _order(difference: Difference, document: Document) -> tuple[Any, ...]:
    place = document.place(difference.path, difference.at_key)
    return (place.line or 0, place.column or 0) if place else (0, 0)
