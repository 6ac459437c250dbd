"""Read YAML into plain values that remember where each one stands, and refuse what YAML would silently misread.

Scalars follow YAML 1.1 as PyYAML does, with four differences that users expect: `3e-4` is a number, dates stay text,
base-60 numbers (`1:30`) and octal ones (`010`) are refused instead of becoming 90 and 8.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from titan_planner.ir.errors import Complaint, Place, SpecError
from titan_planner.ir.validate import HALF_A_PAIR, REMOVE_THE_ESCAPE, half_a_pair

PathTuple = tuple[str | int, ...]

STDIN = Path("-")
"""The path that means standard input."""

_MAX_BYTES = 4 * 2**20
_MAX_NODES = 100_000
_MAX_DEPTH = 60

_FLOAT = re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+|[-+]?\.\d[\d_]*([eE][-+]?\d+)?|[-+]?\d[\d_]*\.[\d_]*")
_BASE_60 = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.\d*)?")
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_INT = re.compile(r"[-+]?(0|[1-9][\d_]*|0x[0-9a-fA-F_]+|0b[01_]+)")
_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}
_SCALAR_TAGS = {"str", "int", "float", "bool", "null", "timestamp", "value"}
_NULLS = {"", "~", "null", "Null", "NULL"}


@dataclass(slots=True)
class Document:
    """Plain data, and the place of every key and value in it, by path."""

    data: Any
    values: dict[PathTuple, Place] = field(default_factory=dict)
    keys: dict[PathTuple, Place] = field(default_factory=dict)

    def place(self, path: PathTuple, at_key: bool = False) -> Place | None:
        """Where the value (or its key) at `path` stands; else where its nearest existing parent does."""
        table = self.keys if at_key else self.values
        while path not in table and path not in self.values and path:
            path = path[:-1]
        return table.get(path) or self.keys.get(path) or self.values.get(path)

    def overlay(self, top: Document) -> Document:
        """This document with `top` laid over it: mappings merge, everything else is replaced."""
        merged = Document(None, dict(self.values), dict(self.keys))
        merged.data = _merge(self.data, top.data, (), merged, top)
        return merged


def _merge(low: Any, high: Any, path: PathTuple, into: Document, top: Document) -> Any:
    if isinstance(low, dict) and isinstance(high, dict):
        result = dict(low)
        for key, value in high.items():
            at = (*path, key)
            result[key] = _merge(low[key], value, at, into, top) if key in low else value
            if key not in low or not (isinstance(low[key], dict) and isinstance(value, dict)):
                _copy_places(at, into, top)
        return result
    return high


def _copy_places(path: PathTuple, into: Document, top: Document) -> None:
    for mine, theirs in ((into.values, top.values), (into.keys, top.keys)):
        for old in [p for p in mine if p[: len(path)] == path]:
            del mine[old]
        mine.update({p: place for p, place in theirs.items() if p[: len(path)] == path})


def read_yaml(path: Path, shown: str | None = None) -> Document:
    """The document in the file `path` (`-` is standard input); complaints call the file `shown`. Raises `SpecError`."""
    name = shown or str(path)
    try:
        if path == STDIN:
            content = sys.stdin.buffer.read(_MAX_BYTES + 1)
            size = len(content)
        else:
            size = path.stat().st_size
            content = path.read_bytes() if size <= _MAX_BYTES else b""
        if size > _MAX_BYTES:
            raise SpecError(Complaint("the file is larger than 4 MiB, so it is no spec", "", Place(name)))
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            Complaint(f"the file is not UTF-8 text (byte {error.start})", "", Place(name), "save it as UTF-8")
        ) from None
    except OSError as error:
        raise SpecError(
            Complaint(f"the spec cannot be read: {error.strerror or error}", "", Place(name), "check the path")
        ) from None
    except ValueError as error:
        raise SpecError(Complaint(f"the spec cannot be read: {error}", "", None, "check the path")) from None
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str) -> Document:
    """The document in `text`; `name` is what complaints call it. Raises `SpecError`."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise SpecError(_syntax_error(error, name)) from None
    except yaml.YAMLError as error:
        at = getattr(error, "position", None)
        place = Place(name, text.count("\n", 0, at) + 1 if isinstance(at, int) else None)
        detail = getattr(error, "reason", None) or str(error)
        raise SpecError(
            Complaint(
                f"the file is not YAML: {detail}", "", place, "remove control characters, or save it as plain text"
            )
        ) from None
    except RecursionError:
        raise SpecError(
            Complaint("the YAML is nested too deeply", "", Place(name), f"use at most {_MAX_DEPTH} levels")
        ) from None
    except ValueError as error:  # e.g. an escape such as "\UFFFFFFFF" that names no character
        raise SpecError(
            Complaint(f"the file is not YAML: {error}", "", Place(name), "fix the escape sequence")
        ) from None
    if root is None:
        raise SpecError(Complaint("the spec is empty", "", Place(name), "`titan-plan init` writes one to start from"))
    return _Builder(name).document(root)


def _syntax_error(error: yaml.MarkedYAMLError, name: str) -> Complaint:
    mark = error.problem_mark or error.context_mark
    place = Place(name, mark.line + 1, mark.column + 1) if mark else Place(name)
    problem = error.problem or "it cannot be parsed"
    if "'\\t'" in problem:
        return Complaint("a tab stands where YAML wants spaces", "", place, "indent with spaces")
    if "but found another document" in str(error) or "expected a single document" in (error.context or ""):
        return Complaint(
            "the file holds more than one YAML document", "", place, "remove the line `---` and what follows"
        )
    if "mapping values are not allowed" in problem:
        return Complaint(
            "a second `:` stands on this line, or the line above lacks one",
            "",
            place,
            "write one `key: value` a line, and put text with `: ` in quotes",
        )
    context = f" {error.context}" if error.context else ""
    return Complaint(
        f"the file is not valid YAML: {problem}{context}", "", place, "check indentation, brackets and quotes"
    )


class _Builder:
    """Turns a node graph into plain data. Collects every complaint of one document before raising."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.complaints: list[Complaint] = []
        self.document_: Document = Document(None)
        self.nodes = 0

    def document(self, root: yaml.Node) -> Document:
        self.document_.data = self.build(root, (), ())
        if self.complaints:
            raise SpecError(self.complaints)
        return self.document_

    def place(self, node: yaml.Node) -> Place:
        return Place(self.name, node.start_mark.line + 1, node.start_mark.column + 1)

    def complain(self, node: yaml.Node, path: PathTuple, message: str, hint: str | None = None) -> None:
        address = ".".join(str(part) for part in path)
        self.complaints.append(Complaint(message, address, self.place(node), hint))

    def build(self, node: yaml.Node, path: PathTuple, parents: tuple[int, ...]) -> Any:
        # Aliases share nodes: counting visits bounds "billion laughs", and `parents` finds a node inside itself.
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise SpecError(
                Complaint(
                    f"the spec expands to more than {_MAX_NODES} values", "", self.place(node), "remove nested aliases"
                )
            )
        if id(node) in parents or len(parents) > _MAX_DEPTH:
            problem = "an alias contains itself" if id(node) in parents else "the YAML is nested too deeply"
            raise SpecError(Complaint(problem, "", self.place(node), "write the values out"))
        inside = (*parents, id(node))
        self.document_.values[path] = self.place(node)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path, inside)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, i), inside) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self.scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: PathTuple, parents: tuple[int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, Place] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.complain(key_node, path, "a key is a list or mapping", "use a plain word as the key")
                continue
            key = key_node.value
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if half_a_pair(key):
                self.complain(key_node, path, f"the key {key!r} has {HALF_A_PAIR}", REMOVE_THE_ESCAPE)
                continue
            if key in first:
                self.complain(
                    key_node,
                    (*path, key),
                    f"the key `{key}` appears twice, first at line {first[key].line}",
                    "keep one of them",
                )
                continue
            first[key] = self.place(key_node)
            self.document_.keys[(*path, key)] = first[key]
            result[key] = self.build(value_node, (*path, key), parents)
        for key, value_node, owner in self.merged(node, path, parents):
            if key not in result:
                self.document_.keys[(*path, key)] = self.place(owner)
                result[key] = self.build(value_node, (*path, key), parents)
        return result

    def merged(
        self, node: yaml.MappingNode, path: PathTuple, parents: tuple[int, ...]
    ) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """What `<<: *anchor` (or a list of anchors) brings in; earlier ones win."""
        for key_node, value_node in node.value:
            if key_node.tag != "tag:yaml.org,2002:merge":
                continue
            sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for source in sources:
                if not isinstance(source, yaml.MappingNode):
                    self.complain(key_node, path, "`<<` merges mappings only", "point it at an anchored mapping")
                    continue
                if id(source) in parents:
                    raise SpecError(
                        Complaint("an alias contains itself", "", self.place(key_node), "write the values out")
                    )
                for inner_key, inner_value in source.value:
                    usable = isinstance(inner_key, yaml.ScalarNode) and not half_a_pair(inner_key.value)
                    if usable and inner_key.tag != "tag:yaml.org,2002:merge":
                        yield inner_key.value, inner_value, inner_key
                yield from self.merged(source, path, (*parents, id(source)))

    def scalar(self, node: yaml.ScalarNode, path: PathTuple) -> Any:
        text: str = node.value
        tag: str = node.tag
        if half_a_pair(text):
            self.complain(node, path, f"the text {text[:60]!r} has {HALF_A_PAIR}", REMOVE_THE_ESCAPE)
            return None
        if tag.removeprefix("tag:yaml.org,2002:") not in _SCALAR_TAGS:
            self.complain(node, path, f"the tag `{tag}` is not part of the spec format", "remove it")
            return None
        if node.style in ("'", '"', "|", ">"):
            return text
        try:
            return self.plain(node, text, path)
        except ValueError as error:
            self.complain(node, path, f"`{text[:40]}` is no number that can be used: {error}", "write a shorter number")
            return None

    def plain(self, node: yaml.ScalarNode, text: str, path: PathTuple) -> Any:
        if _BASE_60.fullmatch(text):
            self.complain(
                node,
                path,
                f"`{text}` is a base-60 number in YAML",
                f"write the plain number, or '{text}' in quotes for text",
            )
            return None
        if _OCTAL.fullmatch(text) and text.strip("+-0_"):
            self.complain(
                node,
                path,
                f"`{text}` is an octal number in YAML",
                f"write {text.lstrip('+-0')}, or '{text}' in quotes for text",
            )
            return None
        if _INT.fullmatch(text):
            return int(text.replace("_", ""), 0)
        if _FLOAT.fullmatch(text):
            value = float(text.replace("_", ""))
            if math.isinf(value):
                self.complain(node, path, f"`{text[:40]}` is too large for a number", "use a finite number")
                return None
            return value
        if text.casefold() in (".inf", "+.inf", "-.inf", ".nan"):
            self.complain(node, path, f"`{text}` is not a finite number", "use a finite number")
            return None
        if text.casefold() in _BOOLS and node.tag == "tag:yaml.org,2002:bool":
            return _BOOLS[text.casefold()]
        if text in _NULLS:
            return None
        return text


def assignments(options: list[str]) -> Document:
    """`--set section.field=value` options as a document whose places are the options. Values are YAML."""
    result = Document({})
    complaints: list[Complaint] = []
    for option in options:
        place = Place(f"--set {option}")
        address, equals, text = option.partition("=")
        parts = tuple(address.strip().split("."))
        if not equals or not all(parts):
            complaints.append(
                Complaint("`--set` takes `section.field=value`", "", place, "e.g. --set training.steps=20")
            )
            continue
        value: Any = None
        if text.strip():
            parsed = parse_yaml(text, f"--set {option}")
            value = parsed.data
        nested: Any = value
        for part in reversed(parts):
            nested = {part: nested}
        layer = Document(nested)
        for end in range(len(parts) + 1):
            layer.values[parts[:end]] = place
            layer.keys[parts[:end]] = place
        layer.values.update({(*parts, *path): place for path in _paths(value)})
        result = result.overlay(layer)
        result.values.setdefault((), place)
    if complaints:
        raise SpecError(complaints)
    return result


def _paths(value: Any, path: PathTuple = ()) -> Iterator[PathTuple]:
    yield path
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(enumerate(value))
    for key, inner in items:
        yield from _paths(inner, (*path, key))
