"""The one decorator and the one field descriptor that every type of the contract is made with."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, cast, dataclass_transform, get_args, get_origin, get_type_hints

from titan_planner.ir.errors import InvariantError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """What a field means and which values it takes: `Annotated[int, Field("Tokens per sequence.", ge=1)]`.

    `doc` becomes the description in the JSON Schema. `ge`, `gt`, `le`, `lt` bound numbers, `pattern` bounds strings
    (a regular expression that must match from the start), `min_items` bounds sequences. `decision=False` keeps the field
    out of the plan's digest: it is a place, a label or an explanation, and changes nothing that is trained.
    """

    doc: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    pattern: str | None = None
    min_items: int | None = None
    decision: bool = True


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def record(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, slotted, keyword-only dataclass whose values are checked whenever one is built.

    Number bounds declared by `Field` are checked first, then the class's own `check()` when it has one; both raise
    `InvariantError`. `dataclasses.replace` builds anew, so it checks again.
    """

    def post_init(self: Any) -> None:
        for name, field in bounded_fields(type(self)):
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                problem = out_of_bounds(value, field)
                if problem:
                    raise InvariantError(name, f"`{name}` is {value!r}, but it must be {problem}")
        check = getattr(self, "check", None)
        if check is not None:
            check()

    cls.__post_init__ = post_init  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)


def out_of_bounds(value: float, field: Field) -> str | None:
    """The bound that `value` breaks, in words ("at least 1"), or None."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if field.ge is not None and value < field.ge:
        return f"at least {field.ge:g}"
    if field.gt is not None and value <= field.gt:
        return f"greater than {field.gt:g}"
    if field.le is not None and value > field.le:
        return f"at most {field.le:g}"
    if field.lt is not None and value >= field.lt:
        return f"less than {field.lt:g}"
    return None


@functools.cache
def _hints(cls: Any) -> Mapping[str, Any]:
    return get_type_hints(cls, include_extras=True)


def field_types(cls: type) -> Mapping[str, Any]:
    """Field name -> resolved type without `Annotated`, in declaration order."""
    return _field_types(cast(Any, cls))  # Any: to mypy, the class of a frozen dataclass is not hashable


@functools.cache
def _field_types(cls: Any) -> Mapping[str, Any]:
    hints = _hints(cls)
    return {
        f.name: get_args(hints[f.name])[0] if get_origin(hints[f.name]) is Annotated else hints[f.name]
        for f in dataclasses.fields(cls)
    }


def field_descriptors(cls: type) -> Mapping[str, Field]:
    """Field name -> its `Field`, for every field of `cls` that has one."""
    return _field_descriptors(cast(Any, cls))


@functools.cache
def _field_descriptors(cls: Any) -> Mapping[str, Field]:
    hints = _hints(cls)
    found: dict[str, Field] = {}
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        if get_origin(hint) is Annotated:
            for extra in get_args(hint)[1:]:
                if isinstance(extra, Field):
                    found[f.name] = extra
    return found


def bounded_fields(cls: type) -> tuple[tuple[str, Field], ...]:
    """The fields of `cls` whose values must be numbers within bounds (every float must at least be finite)."""
    return _bounded_fields(cast(Any, cls))


@functools.cache
def _bounded_fields(cls: Any) -> tuple[tuple[str, Field], ...]:
    types = field_types(cls)
    descriptors = field_descriptors(cls)
    bounded = []
    for name, hint in types.items():
        members = get_args(hint) or (hint,)
        if int in members or float in members:
            bounded.append((name, descriptors.get(name, Field(""))))
    return tuple(bounded)
