"""Plain aligned text: columns as wide as their cells, the last one cut at the width of the page."""

from __future__ import annotations

import re
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


def width_of(text: str) -> int:
    """Columns that `text` takes on a terminal."""
    return len(_ANSI.sub("", text)) if "\x1b" in text else len(text)


def cut(text: str, width: int) -> str:
    """`text` if it fits into `width` columns, else its beginning and `...`; emphasis is lost where it is cut."""
    if width_of(text) <= width:
        return text
    return _ANSI.sub("", text)[: max(0, width - 3)].rstrip() + "..."


def table(
    rows: Sequence[Sequence[str]], *, indent: int = 2, right: Sequence[int] = (), width: int | None = None
) -> list[str]:
    """Lines of aligned columns, two spaces apart and as wide as they need; those in `right` are right-aligned."""
    if not rows:
        return []
    columns = max(len(row) for row in rows)
    widths = [max((width_of(row[i]) for row in rows if i < len(row)), default=0) for i in range(columns)]
    lines = []
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            pad = " " * (widths[i] - width_of(cell))
            cells.append(pad + cell if i in right else cell + pad)
        line = (" " * indent + "  ".join(cells)).rstrip()
        lines.append(cut(line, width) if width else line)
    return lines
