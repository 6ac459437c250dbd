"""Plain aligned text: columns as wide as their cells, one of them cut where the page is too narrow."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[\d+m")


@dataclass(frozen=True, slots=True)
class Style:
    """How words are emphasised. Plain text when `ansi` is false; a subclass may emphasise otherwise."""

    ansi: bool = False

    def bold(self, text: str) -> str:
        """A heading or a name."""
        return self._wrap(1, text)

    def dim(self, text: str) -> str:
        """A remark beside the matter."""
        return self._wrap(2, text)

    def red(self, text: str) -> str:
        """Wrong, or worth stopping at."""
        return self._wrap(31, text)

    def green(self, text: str) -> str:
        """Good."""
        return self._wrap(32, text)

    def yellow(self, text: str) -> str:
        """Worth a second look."""
        return self._wrap(33, text)

    def cyan(self, text: str) -> str:
        """A value."""
        return self._wrap(36, text)

    def _wrap(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.ansi and text else text


PLAIN = Style()
_NARROWEST = 8


def width_of(text: str) -> int:
    """Columns that `text` takes on a terminal."""
    return len(_ANSI.sub("", text)) if "\x1b" in text else len(text)


def cut(text: str, width: int) -> str:
    """`text` if it fits into `width` columns, else its beginning and `...`; emphasis is lost where it is cut."""
    if width_of(text) <= width:
        return text
    return _ANSI.sub("", text)[: max(0, width - 3)].rstrip() + "..."


def table(
    rows: Sequence[Sequence[str]],
    *,
    indent: int = 2,
    right: Sequence[int] = (),
    width: int | None = None,
    flex: int | None = None,
) -> list[str]:
    """Lines of aligned columns, two spaces apart and as wide as they need; those in `right` are right-aligned.

    Where that is wider than `width`, the column `flex` (the last one when None) is cut to what is left. A row with
    fewer cells than others ends with a cell that may run on to the end of the page.
    """
    columns = max((len(row) for row in rows), default=0)
    if columns == 0:
        return []
    counted = [row if len(row) == columns else row[:-1] for row in rows]
    widths = [max((width_of(row[i]) for row in counted if i < len(row)), default=0) for i in range(columns)]
    if width is not None:
        flexible = columns - 1 if flex is None else flex
        excess = indent + sum(widths) + 2 * (columns - 1) - width
        widths[flexible] -= max(0, min(excess, widths[flexible] - _NARROWEST))
    lines = []
    for row, aligned in zip(rows, counted, strict=True):
        cells = []
        for i, cell in enumerate(aligned):
            shown = cut(cell, widths[i])
            pad = " " * (widths[i] - width_of(shown))
            cells.append(pad + shown if i in right else shown + pad)
        line = (" " * indent + "  ".join([*cells, *row[len(aligned) :]])).rstrip()
        lines.append(cut(line, width) if width else line)
    return lines


def pairs(rows: Sequence[tuple[str, str]], *, width: int, indent: int = 2) -> list[str]:
    """Labels with texts of any length beside them, wrapped under themselves."""
    label_width = max((len(label) for label, _ in rows), default=0)
    lines = []
    for label, text in rows:
        room = max(_NARROWEST, width - indent - label_width - 2)
        parts = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
        lines.append((" " * indent + f"{label:<{label_width}}  {parts[0]}").rstrip())
        lines += [" " * (indent + label_width + 2) + part for part in parts[1:]]
    return lines
