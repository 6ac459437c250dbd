"""JSON Schemas of the spec and the plan, generated from the record types; and where the committed copies are."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from titan_planner.ir.codec import encode
from titan_planner.ir.record import Field, field_descriptors, field_types

SCHEMA_FILES = {"spec": "spec.v1.schema.json", "plan": "plan.v1.schema.json"}


def schema_of(cls: type, *, strict: bool, title: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of `cls` with every record it refers to under `$defs`.

    `strict` forbids unknown fields. A field is required when it has no default.
    """
    definitions: dict[str, Any] = {}
    root = _record(cls, definitions, strict)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **root,
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }


def _record(cls: type, definitions: dict[str, Any], strict: bool) -> dict[str, Any]:
    hints = field_types(cls)
    labels = field_descriptors(cls)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for field in dataclasses.fields(cls):
        label = labels.get(field.name, Field(""))
        entry = _type(hints[field.name], label, definitions, strict)
        if label.doc:
            entry = {"description": label.doc, **entry}
        if field.default is not dataclasses.MISSING:
            entry["default"] = encode(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            entry["default"] = encode(field.default_factory())
        else:
            required.append(field.name)
        properties[field.name] = entry
    result: dict[str, Any] = {
        "type": "object",
        "description": inspect.cleandoc(cls.__doc__ or ""),
        "properties": properties,
    }
    if required:
        result["required"] = required
    if strict:
        result["additionalProperties"] = False
    return result


def _type(hint: Any, label: Field, definitions: dict[str, Any], strict: bool) -> dict[str, Any]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(get_args(hint), label, definitions, strict)
    if origin is Literal:
        values = list(get_args(hint))
        return {"const": values[0]} if len(values) == 1 else {"enum": values}
    if origin is tuple:
        array: dict[str, Any] = {"type": "array", "items": _type(get_args(hint)[0], _bare(label), definitions, strict)}
        if label.min_items is not None:
            array["minItems"] = label.min_items
        return array
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _type(get_args(hint)[1], Field(""), definitions, strict)}
    if hint is type(None):
        return {"type": "null"}
    if hint is bool:
        return {"type": "boolean"}
    if hint is str:
        return {"type": "string", "pattern": label.pattern} if label.pattern else {"type": "string"}
    if hint is int:
        return {"type": "integer", **_bounds(label)}
    if hint is float:
        return {"type": "number", **_bounds(label)}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # reserved before the descent, so that recursion would end
            definitions[hint.__name__] = _record(hint, definitions, strict)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    raise TypeError(f"no JSON Schema for {hint!r}")


def _union(members: tuple[Any, ...], label: Field, definitions: dict[str, Any], strict: bool) -> dict[str, Any]:
    simple = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    if all(member in simple for member in members):
        merged: dict[str, Any] = {"type": [simple[member] for member in members]}
        if int in members or float in members:
            merged |= _bounds(label)
        if str in members and label.pattern:
            merged["pattern"] = label.pattern
        return merged
    constants = [value for member in members if get_origin(member) is Literal for value in get_args(member)]
    branches = [{"enum": constants} if len(constants) > 1 else {"const": constants[0]}] if constants else []
    branches += [_type(member, label, definitions, strict) for member in members if get_origin(member) is not Literal]
    return {"anyOf": branches}


def _bounds(label: Field) -> dict[str, Any]:
    names = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    return {word: getattr(label, name) for name, word in names.items() if getattr(label, name) is not None}


def _bare(label: Field) -> Field:
    return dataclasses.replace(label, min_items=None)


def generate(kind: str) -> dict[str, Any]:
    """The schema of "spec" or "plan" from the types as they are now."""
    # Imported here: the runtime reads plans and never needs the spec's types, and neither does a reader of the other kind.
    if kind == "spec":
        from titan_planner.ir.request import Spec

        return schema_of(Spec, strict=True, title="Titan spec, version 1")
    from titan_planner.ir.plan import Plan

    return schema_of(Plan, strict=False, title="Titan plan, version 1")


def schema_text(kind: str) -> str:
    """The text of the committed schema file."""
    return json.dumps(generate(kind), indent=2, ensure_ascii=False) + "\n"


def bundled(*parts: str) -> Path:
    """A file that ships with the project: beside the sources in a checkout, inside the package in a wheel."""
    package = Path(__file__).resolve().parent.parent
    for root in (package / "_bundled", package.parent):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise FileNotFoundError(f"the installation lacks {'/'.join(parts)}; reinstall titan-planner")


@functools.cache
def load_schema(kind: str) -> dict[str, Any]:
    """The committed schema, which a test holds equal to `generate(kind)`."""
    loaded: dict[str, Any] = json.loads(bundled("schemas", SCHEMA_FILES[kind]).read_text(encoding="utf-8"))
    return loaded
