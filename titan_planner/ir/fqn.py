"""Selectors: how a plan names many modules in one short line.

A selector is a dotted FQN in which a segment may be `*` (any one segment) or `a-b` (any number from a to b, both
included): `layers.*.attention.wq`, `layers.0-6`, `norm`. `lm_head` is accepted for `output`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")

# TorchTitan 0.3 renamed modules; the seed's names are ours, and the newer ones are accepted wherever a user writes one.
ALIASES = {"lm_head": "output", "attention.qkv_linear.wq": "attention.wq", "attention.qkv_linear.wk": "attention.wk",
           "attention.qkv_linear.wv": "attention.wv"}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _compiled(selector: str) -> tuple[re.Pattern[str], tuple[tuple[int, int], ...]]:
    """`selector` as a pattern with one group a range, and the bounds of the ranges."""
    pieces: list[str] = []
    bounds: list[tuple[int, int]] = []
    for segment in selector.split("."):
        span = _RANGE.fullmatch(segment)
        if span:
            bounds.append((int(span[1]), int(span[2])))
        pieces.append(r"(\d{1,9})" if span else r"[^.]+" if segment == "*" else re.escape(segment))
    return re.compile(r"\.".join(pieces)), tuple(bounds)


def matches(selector: str, fqn: str) -> bool:
    """Whether `selector` names the module `fqn`."""
    pattern, bounds = _compiled(selector)
    found = pattern.fullmatch(fqn)
    if found is None:
        return False
    return all(low <= int(number) <= high for number, (low, high) in zip(found.groups(), bounds, strict=True))


def select(selector: str, fqns: Iterable[str]) -> tuple[str, ...]:
    """The members of `fqns` that `selector` names, in their order."""
    return _select(selector, tuple(fqns))


# Rules ask the same few selectors about the same names after every pass.
@functools.lru_cache(maxsize=4096)
def _select(selector: str, fqns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(fqn for fqn in fqns if matches(selector, fqn))


def fold(fqns: Iterable[str]) -> tuple[str, ...]:
    """The shortest list of selectors, in first-seen order, that names exactly `fqns`: runs of layer numbers become `a-b`."""
    groups: dict[tuple[str, str], list[int]] = {}
    order: list[tuple[str, str] | str] = []
    for fqn in fqns:
        parts = fqn.split(".")
        if len(parts) >= 2 and parts[0] == "layers" and parts[1].isdecimal():
            key = (parts[0], ".".join(parts[2:]))
            if key not in groups:
                groups[key] = []
                order.append(key)
            groups[key].append(int(parts[1]))
        else:
            order.append(fqn)
    folded: list[str] = []
    for item in order:
        if isinstance(item, str):
            folded.append(item)
            continue
        head, tail = item
        for first, last in runs(sorted(groups[item])):
            number = str(first) if first == last else f"{first}-{last}"
            folded.append(".".join(part for part in (head, number, tail) if part))
    return tuple(folded)


def runs(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Maximal runs of consecutive numbers, as (first, last), of an ascending sequence."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)


def pattern_matches(pattern: str, fqn: str) -> bool:
    """Whether a filter pattern names a linear: it is a part of the FQN, in our names or TorchTitan 0.3's."""
    return pattern in fqn or ALIASES.get(pattern, pattern) in fqn
