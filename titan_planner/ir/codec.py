"""The one codec: records to canonical JSON and back. Same value, same bytes, on every machine."""

from __future__ import annotations

import functools
import hashlib
import json
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from titan_planner.ir.errors import InvariantError
from titan_planner.ir.record import field_descriptors, field_types

T = TypeVar("T")

_WIDTH = 120


class DecodeError(InvariantError):
    """An invariant was broken while decoding; `field` is the dotted address from the root of the document."""


def encode(value: Any) -> Any:
    """`value` as plain dicts, lists and scalars, fields in declaration order."""
    if hasattr(type(value), "__dataclass_fields__"):
        return {name: encode(getattr(value, name)) for name in field_types(type(value))}
    if isinstance(value, Mapping):
        return {key: encode(value[key]) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def decode(cls: type[T], data: Any, address: str = "") -> T:
    """Build `cls` from plain data that its JSON Schema has accepted. Unknown fields are ignored.

    Raises `DecodeError` with the dotted address where a record's own invariant is broken.
    """
    kwargs = {}
    for name, hint in field_types(cls).items():
        if name in data:
            kwargs[name] = decode_value(hint, data[name], f"{address}.{name}" if address else name)
    try:
        return cls(**kwargs)
    except DecodeError:
        raise
    except InvariantError as error:
        at = f"{address}.{error.field}" if address else error.field
        raise DecodeError(at, error.message, error.hint, error.rule) from error


def decode_value(hint: Any, value: Any, address: str) -> Any:
    """`value` as the type `hint`; see `decode`."""
    kind, members = _shape(hint)
    if kind == "record":
        return decode(hint, value, address)
    if kind == "tuple":
        return tuple(decode_value(members[0], item, f"{address}[{i}]") for i, item in enumerate(value))
    if kind == "mapping":
        return {key: decode_value(members[1], value[key], f"{address}.{key}") for key in sorted(value)}
    if kind == "union":
        return decode_value(choose(members, value), value, address)
    if kind == "int" and isinstance(value, float):
        return int(value)
    if kind == "float" and isinstance(value, int):
        return float(value)
    return value


@functools.cache
def _shape(hint: Any) -> tuple[str, tuple[Any, ...]]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return "union", get_args(hint)
    if origin is tuple:
        return "tuple", get_args(hint)
    if origin is not None and origin is not Literal and issubclass(origin, Mapping):
        return "mapping", get_args(hint)
    if isinstance(hint, type):
        if hasattr(hint, "__dataclass_fields__"):
            return "record", ()
        if hint in (int, float):
            return hint.__name__, ()
    return "plain", ()


def choose(members: tuple[Any, ...], value: Any) -> Any:
    """The member of a union that `value`, already accepted by the schema, belongs to. Records are told apart by `kind`."""
    if value is None:
        return type(None)
    for member in members:
        if get_origin(member) is Literal and any(value == a and type(value) is type(a) for a in get_args(member)):
            return member
    for member in members:
        kind, _ = _shape(member)
        if kind == "record" and isinstance(value, Mapping):
            tag = field_types(member).get("kind")
            if tag is None or value.get("kind") in get_args(tag):
                return member
        if kind == "tuple" and isinstance(value, (list, tuple)):
            return member
        if kind == "mapping" and isinstance(value, Mapping):
            return member
        if member is bool and isinstance(value, bool):
            return member
        if member is str and isinstance(value, str):
            return member
        if member in (int, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
            return member
    raise DecodeError("", f"{value!r} is none of the forms this field takes")


def dumps(value: Any) -> str:
    """Canonical text: declaration order, short values on one line, floats as Python's shortest repr, final newline."""
    return _layout(encode(value), 0) + "\n"


def _layout(value: Any, depth: int) -> str:
    flat = _flat(value)
    if len(flat) + 2 * depth <= _WIDTH and not (depth < 1 and value):
        return flat
    pad = "  " * (depth + 1)
    if isinstance(value, dict) and value:
        items = [f"{pad}{json.dumps(key)}: {_layout(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + "  " * depth + "}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(pad + _layout(item, depth + 1) for item in value) + "\n" + "  " * depth + "]"
    return flat


def _flat(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


def decisions(value: Any) -> Any:
    """`value` encoded without the fields that are no decision (`Field(decision=False)`), at every depth."""
    if hasattr(type(value), "__dataclass_fields__"):
        labels = field_descriptors(type(value))
        return {
            name: decisions(getattr(value, name))
            for name in field_types(type(value))
            if name not in labels or labels[name].decision
        }
    if isinstance(value, Mapping):
        return {key: decisions(value[key]) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        return [decisions(item) for item in value]
    return value


def digest(plan: Any) -> str:
    """SHA-256 of the canonical text of the decisions, as 64 hex digits. Same digest, same training."""
    text = json.dumps(decisions(plan), ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
