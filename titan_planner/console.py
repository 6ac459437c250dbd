"""Where text meets the terminal: `rich` on a terminal, plain text when piped, NO_COLOR honoured."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from titan_planner.ir.errors import Complaint
from titan_planner.render.tables import Style, table


def style_for(stream: TextIO) -> Style:
    """Emphasis for a terminal, none for anything else or under NO_COLOR."""
    return Style(ansi=_is_terminal(stream) and not os.environ.get("NO_COLOR"))


def width_for(stream: TextIO, default: int = 100) -> int:
    """Columns of the terminal; `default` for anything else."""
    if not _is_terminal(stream):
        return default
    import shutil

    return max(60, shutil.get_terminal_size((default, 24)).columns)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def emit(text: str) -> None:
    """Print `text`, which may carry the emphasis of `style_for(sys.stdout)`."""
    if style_for(sys.stdout).ansi:
        from rich.console import Console
        from rich.text import Text

        # soft_wrap: the layout is ours already; rich adds what the terminal can show.
        Console().print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True, highlight=False)
    else:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")


def emit_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table: with rules and colour on a terminal, aligned columns when piped."""
    if style_for(sys.stdout).ansi:
        from rich.console import Console
        from rich.table import Table

        pretty = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
        for index, name in enumerate(head):
            pretty.add_column(name, justify="right" if index in right else "left", no_wrap=index == 0)
        for row in rows:
            pretty.add_row(*row)
        Console().print(pretty)
        return
    lines = [title, *table([head, *rows], right=right)]
    sys.stdout.write("\n".join(lines) + "\n")


def complain(complaints: Iterable[Complaint]) -> None:
    """Print complaints on stderr: place, sentence, rule, and what to try."""
    style = style_for(sys.stderr)
    for complaint in complaints:
        place = f"{complaint.place}: " if complaint.place else ""
        rule = style.dim(f" [{complaint.rule}]") if complaint.rule else ""
        sys.stderr.write(f"{style.bold(place)}{style.red('error:')} {complaint.message}{rule}\n")
        if complaint.hint:
            sys.stderr.write(f"    {style.cyan('try:')} {complaint.hint}\n")


def note(message: str, hint: str | None = None) -> None:
    """Print a warning on stderr."""
    style = style_for(sys.stderr)
    sys.stderr.write(f"{style.yellow('warning:')} {message}\n")
    if hint:
        sys.stderr.write(f"    {style.cyan('try:')} {hint}\n")
