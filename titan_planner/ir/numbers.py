"""Divisors, and how legal values are listed in a sentence."""

from __future__ import annotations

import math


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive `number`, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(small + [number // d for d in reversed(small) if d * d != number])


def listing(values: tuple[int, ...], limit: int = 8) -> str:
    """The largest `limit` of ascending `values`, as words."""
    shown = ", ".join(str(v) for v in values[-limit:])
    return shown if len(values) <= limit else f"..., {shown}"
