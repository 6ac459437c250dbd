"""Read and check a plan: text -> JSON -> schema -> records -> rules, with every complaint at once."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from titan_planner.ir.codec import DecodeError, decode
from titan_planner.ir.errors import Complaint, Place, PlanError
from titan_planner.ir.plan import PLAN_VERSION, Plan
from titan_planner.ir.rules import RULES
from titan_planner.ir.validate import differences, dotted, surrogates, unknown_fields

_MAX_BYTES = 256 * 2**20


def verify(plan: Plan, without: Collection[str] = ()) -> tuple[Complaint, ...]:
    """All rules that `plan` breaks, but for those called in `without`.

    Structural ones are reported alone, because the others would only echo them.
    """
    for structural in (True, False):
        found = tuple(
            Complaint(violation.message, violation.address, hint=violation.hint, rule=rule.id)
            for rule in RULES
            if rule.structural is structural and rule.id not in without
            for violation in rule.check(plan)
        )
        if found:
            return found
    return ()


def load_plan(path: str | Path) -> Plan:
    """The plan in the file `path`, validated and verified. Raises `PlanError`."""
    plan, _ = load_plan_with_notes(path)
    return plan


def load_plan_with_notes(path: str | Path) -> tuple[Plan, tuple[Complaint, ...]]:
    """As `load_plan`, with a complaint for each unknown field that was ignored (a newer minor version, or a misspelling)."""
    place = Place(str(path))
    return parse_plan(_read(Path(path), place), place)


def parse_plan(text: str, place: Place) -> tuple[Plan, tuple[Complaint, ...]]:
    """The plan in `text`; `place` names its file in complaints."""
    data = _parse_json(text, place)
    broken_text = list(surrogates(data))
    if broken_text:
        raise PlanError([Complaint(d.message, dotted(d.path), place, d.hint) for d in broken_text])
    _check_version(data, place)
    found = differences("plan", data)
    if found:
        raise PlanError([Complaint(d.message, dotted(d.path), place, d.hint) for d in found])
    try:
        plan = decode(Plan, data)
    except DecodeError as error:
        raise PlanError(Complaint(error.message, error.field, place, error.hint, error.rule)) from None
    broken = verify(plan)
    if broken:
        raise PlanError([Complaint(c.message, c.address, place, c.hint, c.rule) for c in broken])
    notes = tuple(
        Complaint(f"{d.message}; it is ignored", dotted(d.path), place, d.hint) for d in unknown_fields("plan", data)
    )
    return plan, notes


def _read(path: Path, place: Place) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise PlanError(Complaint("the file is larger than 256 MiB, so it is no plan", "", place))
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(
            Complaint(f"the file is not UTF-8 text (byte {error.start})", "", place, "compile the plan anew")
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise PlanError(Complaint(f"the plan cannot be read: {reason}", "", place, "check the path")) from None
    except ValueError as error:  # a path with a NUL byte
        raise PlanError(Complaint(f"the plan cannot be read: {error}", "", None, "check the path")) from None


def _parse_json(text: str, place: Place) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise PlanError(Complaint(f"the field `{twice}` appears twice in one object", twice, place, "keep one"))
        return result

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise PlanError(Complaint(f"`{text[:40]}` is too large for a number", "", place, "use a finite number"))
        return value

    def constant(text: str) -> float:
        raise PlanError(Complaint(f"`{text}` is not a number that a plan can hold", "", place, "use a finite number"))

    if not text.strip():
        raise PlanError(Complaint("the plan is empty", "", place, "compile it anew"))
    try:
        return json.loads(text, object_pairs_hook=unique, parse_float=number, parse_constant=constant)
    except json.JSONDecodeError as error:
        at = Place(place.file, error.lineno, error.colno)
        hint = "this looks like a spec: compile it first" if _looks_like_spec(text) else "compile the plan anew"
        raise PlanError(Complaint(f"the plan is not valid JSON: {error.msg}", "", at, hint)) from None
    except RecursionError:
        raise PlanError(Complaint("the JSON is nested too deeply to be a plan", "", place)) from None
    except ValueError as error:  # integers of more than 4,300 digits
        raise PlanError(Complaint(f"the plan is not valid JSON: {error}", "", place)) from None


def _looks_like_spec(text: str) -> bool:
    return "spec_version:" in text


def _check_version(data: Any, place: Place) -> None:
    if not isinstance(data, dict):
        raise PlanError(Complaint("a plan is a JSON object, but this is not one", "", place, "compile the plan anew"))
    version = data.get("plan_version")
    if version is None:
        raise PlanError(
            Complaint(
                "the file has no `plan_version`, so it is no Titan plan", "plan_version", place, "compile the plan anew"
            )
        )
    major = str(version).split(".", 1)[0]
    ours = PLAN_VERSION.split(".", 1)[0]
    if isinstance(version, str) and major.isdecimal() and major != ours:
        raise PlanError(
            Complaint(
                f"this plan has format version {version[:20]}, but this Titan reads version {ours}.x",
                "plan_version",
                place,
                "compile the spec anew with this version, or install the Titan that wrote the plan",
            )
        )
