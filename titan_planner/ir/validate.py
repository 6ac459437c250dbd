"""Check plain data against a JSON Schema and say every difference in one plain sentence each."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_planner.ir.schema import load_schema

if TYPE_CHECKING:
    from jsonschema import ValidationError
    from jsonschema.protocols import Validator

PathTuple = tuple[str | int, ...]

_TYPE_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "a mapping of fields",
    "array": "a list",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which data and schema differ. `at_key` says that the key itself, not its value, is the offender."""

    path: PathTuple
    message: str
    hint: str | None = None
    at_key: bool = False


def dotted(path: Iterable[str | int]) -> str:
    """`("layers", 3, "stage")` as `layers[3].stage`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


@functools.cache
def _validator(kind: str) -> Validator:
    # Imported here because jsonschema takes longer to import than the whole planner core.
    from jsonschema import Draft202012Validator

    return Draft202012Validator(load_schema(kind))


def differences(kind: str, data: Any) -> tuple[Difference, ...]:
    """Everything in `data` that the schema of `kind` ("spec" or "plan") refuses, in document order, without repeats."""
    found: dict[Difference, None] = {}
    for error in _validator(kind).iter_errors(data):
        for difference in _explain(error):
            found[difference] = None
    return tuple(found)


def surrogates(data: Any) -> Iterator[Difference]:
    """The texts and keys in `data` that are no text: lone halves of a surrogate pair, which no UTF-8 file can hold."""
    left: list[tuple[PathTuple, Any]] = [((), data)]
    while left:
        path, value = left.pop()
        if isinstance(value, str) and half_a_pair(value):
            yield Difference(path, f"`{dotted(path)}` is {show(value)}, which has {HALF_A_PAIR}", REMOVE_THE_ESCAPE)
        elif isinstance(value, list):
            left += [((*path, index), item) for index, item in reversed(list(enumerate(value)))]
        elif isinstance(value, dict):
            for key in value:
                if half_a_pair(key):
                    owner = f"`{dotted(path)}`" if path else "the document"
                    yield Difference(path, f"{owner} has the key {key!r}, which has {HALF_A_PAIR}", REMOVE_THE_ESCAPE)
            left += [((*path, key), item) for key, item in reversed(value.items()) if not half_a_pair(key)]


HALF_A_PAIR = "half of a surrogate pair in place of a character"
REMOVE_THE_ESCAPE = "remove the escape `\\ud800` to `\\udfff`, or write the character itself"


def half_a_pair(text: str) -> bool:
    """Whether `text` holds a lone surrogate."""
    return any("\ud800" <= character <= "\udfff" for character in text) if not text.isascii() else False


def unknown_fields(kind: str, data: Any) -> tuple[Difference, ...]:
    """Fields of `data` that the schema does not know, for kinds whose readers ignore them."""
    schema = load_schema(kind)
    return tuple(_unknown(data, schema, schema, ()))


def _unknown(data: Any, schema: dict[str, Any], root: dict[str, Any], path: PathTuple) -> Iterator[Difference]:
    schema = _resolve(schema, root)
    if "anyOf" in schema:
        for branch in schema["anyOf"]:
            target = _resolve(branch, root)
            if target.get("type") == ("object" if isinstance(data, dict) else "array") and not _other_kind(
                data, target
            ):
                yield from _unknown(data, target, root, path)
                return
        return
    if isinstance(data, dict) and "properties" in schema:
        for key, value in data.items():
            if key in schema["properties"]:
                yield from _unknown(value, schema["properties"][key], root, (*path, key))
            else:
                yield _unknown_field((*path, key), schema["properties"])
    elif isinstance(data, list) and "items" in schema:
        for index, item in enumerate(data):
            yield from _unknown(item, schema["items"], root, (*path, index))


def _other_kind(data: Any, schema: dict[str, Any]) -> bool:
    """Whether `schema` is of records with another `kind` than that of `data`."""
    wanted = schema.get("properties", {}).get("kind", {}).get("const")
    return isinstance(data, dict) and wanted is not None and data.get("kind", wanted) != wanted


def _resolve(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        target: dict[str, Any] = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        return target
    return schema


def _explain(error: ValidationError) -> Iterator[Difference]:
    path: PathTuple = tuple(error.absolute_path)
    name = f"`{dotted(path)}`" if path else "the document"
    value: Any = error.instance
    wanted: Any = error.validator_value
    known: Any = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
    match error.validator:
        case "additionalProperties":
            for key in value:
                if key not in known:
                    yield _unknown_field((*path, key), known)
        case "required":
            for key in wanted:
                if key not in value:
                    close = [k for k in value if k not in known and difflib.get_close_matches(str(k), [key], 1, 0.75)]
                    hint = f"`{close[0]}` looks like a misspelling of it" if close else f"add `{key}: ...`"
                    yield Difference(path, f"{name} lacks the field `{key}`", hint)
        case "type":
            yield Difference(path, f"{name} must be {_types(wanted)}, but it is {show(value)}", _type_hint(error))
        case "enum" | "const":
            allowed = wanted if error.validator == "enum" else [wanted]
            yield Difference(
                path, f"{name} is {show(value)}, but it must be {_one_of(allowed)}", _close(value, allowed)
            )
        case "minimum":
            yield Difference(path, f"{name} is {show(value)}, but it must be at least {_number(wanted)}")
        case "exclusiveMinimum":
            yield Difference(path, f"{name} is {show(value)}, but it must be greater than {_number(wanted)}")
        case "maximum":
            yield Difference(path, f"{name} is {show(value)}, but it must be at most {_number(wanted)}")
        case "exclusiveMaximum":
            yield Difference(path, f"{name} is {show(value)}, but it must be less than {_number(wanted)}")
        case "pattern":
            yield Difference(path, f"{name} is {show(value)}, but it must look like `{wanted}`")
        case "minItems":
            yield Difference(path, f"{name} has {len(value)} entries, but it needs at least {wanted}")
        case "anyOf":
            yield from _explain_any_of(error, name, path)
        case _:
            yield Difference(path, f"{name}: {error.message}")


def _explain_any_of(error: ValidationError, name: str, path: PathTuple) -> Iterator[Difference]:
    """Follow the branch that the value was meant for, judged by its type; else list what the field takes."""
    value: Any = error.instance
    kind = _json_type(value)
    root: Any = error.validator_value
    wrong_kind: dict[int, Any] = {
        int(inner.schema_path[0]): inner.validator_value
        for inner in error.context or ()
        if inner.validator == "const" and list(inner.path) == ["kind"]
    }
    if len(wrong_kind) > 1 and len(wrong_kind) == len(root):
        known, given = list(wrong_kind.values()), value["kind"]
        text = f"`{dotted((*path, 'kind'))}` is {show(given)}, but it must be {_one_of(known)}"
        yield Difference((*path, "kind"), text, _close(given, known))
        return
    for index, branch in enumerate(root):
        if index in wrong_kind and len(wrong_kind) < len(root):
            continue
        kinds = branch.get("type", "object" if "$ref" in branch else ())
        kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if kind in kinds or (kind == "integer" and "number" in kinds):
            for inner in error.context or ():
                if inner.schema_path[0] == index:
                    yield from _explain(inner)
            return
    forms: list[str] = []
    constants: list[Any] = []
    for branch in root:
        if "const" in branch or "enum" in branch:
            constants += branch.get("enum", [branch.get("const")])
        elif "$ref" in branch:
            forms.append("a mapping of fields")
        else:
            forms.append(_types(branch["type"]))
    wanted = " or ".join([_one_of(constants, prefix=not forms)] * bool(constants) + forms)
    yield Difference(path, f"{name} is {show(value)}, but it must be {wanted}", _close(value, constants))


def _unknown_field(path: PathTuple, known: Iterable[str]) -> Difference:
    *parents, key = path
    owner = f"`{dotted(parents)}`" if parents else "the document"
    names = list(known)
    close = difflib.get_close_matches(str(key), names, 1, 0.6)
    hint = f"did you mean `{close[0]}`?" if close else f"{owner} takes {_some(names)}"
    return Difference(path, f"{owner} has no field `{key}`", hint, at_key=True)


def _some(names: Sequence[str], limit: int = 12) -> str:
    listed = ", ".join(f"`{name}`" for name in names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more (see `titan-plan schema spec`)"


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, (list, tuple)) else "object"


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) and abs(bound) >= 10_000 else f"{bound:g}"


def _types(wanted: str | Sequence[str]) -> str:
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    return " or ".join(_TYPE_WORDS[name] for name in names)


def _one_of(values: Sequence[Any], prefix: bool = True) -> str:
    if len(values) == 1:
        return show_constant(values[0])
    listed = ", ".join(show_constant(value) for value in values)
    return f"one of {listed}" if prefix else listed


def show_constant(value: Any) -> str:
    """A constant as a user would write it."""
    return f"`{value}`" if isinstance(value, str) else show(value)


def show(value: Any) -> str:
    """A value in words, short enough for a sentence."""
    match value:
        case None:
            return "null (empty)"
        case bool():
            return "true" if value else "false"
        case str():
            return f"the text {value[:60]!r}" + ("..." if len(value) > 60 else "")
        case int():
            # A number of thousands of digits is legal YAML, but Python refuses to print it.
            return str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
        case float():
            return repr(value)
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return "a mapping of fields"


def _close(value: Any, allowed: Sequence[Any]) -> str | None:
    words = [word for word in allowed if isinstance(word, str)]
    if isinstance(value, bool):
        return "YAML reads on, off, yes and no as true or false: put the word in quotes if you mean the word"
    if not isinstance(value, str):
        return None
    folded = {word.casefold(): word for word in words}
    close = difflib.get_close_matches(value.casefold(), list(folded), 1, 0.6)
    return f"did you mean `{folded[close[0]]}`?" if close else None


def _type_hint(error: ValidationError) -> str | None:
    value: Any = error.instance
    wanted: Any = error.validator_value
    kinds = [wanted] if isinstance(wanted, str) else list(wanted)
    if isinstance(value, bool) and "string" in kinds:
        return "YAML reads on, off, yes and no as true or false: put the word in quotes if you mean the word"
    if isinstance(value, (int, float)) and "string" in kinds:
        return f"put it in quotes: '{value}'"
    if isinstance(value, str) and ("integer" in kinds or "number" in kinds):
        return "write a plain number, without unit or quotes"
    if value is None and "object" in kinds:
        return "indent its fields below it, or remove the line"
    if isinstance(value, (list, tuple)) and "object" in kinds:
        return "write `field: value` lines, without dashes"
    if isinstance(value, str) and "array" in kinds:
        return f"write a list: [{value[:40]}]"
    return None
