"""The hardware catalogue: GPUs, links and nodes by name, and what to suggest when a name is not in it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypeVar

from titan_planner.hardware.gpus import GPU_ALIASES, GPUS
from titan_planner.hardware.links import LINK_ALIASES, LINKS
from titan_planner.hardware.nodes import NODE_ALIASES, NODES
from titan_planner.ir.cluster import Gpu, Link, Node

__all__ = ["ALIASES", "GPUS", "LINKS", "NODES", "UnknownHardware", "find_gpu", "find_link", "find_node"]

T = TypeVar("T")

# Every short name -> catalogue name. GPUs, links and nodes share no name, so one table serves all three.
ALIASES: dict[str, str] = {**GPU_ALIASES, **LINK_ALIASES, **NODE_ALIASES}


class UnknownHardware(KeyError):
    """A name that the catalogue lacks; `suggestions` are the catalogue names closest to it, closest first."""

    def __init__(self, name: str, suggestions: Sequence[str] = (), kind: str = "hardware") -> None:
        super().__init__(name, tuple(suggestions), kind)
        self.name = name
        self.suggestions = tuple(suggestions)
        self.kind = kind

    def __str__(self) -> str:
        """One sentence; a plain `KeyError` would print a quoted tuple."""
        hint = f"; did you mean {' or '.join(f'`{s}`' for s in self.suggestions)}?" if self.suggestions else ""
        return f"no {self.kind} is called `{self.name}`{hint}"


def find_gpu(name: str) -> Gpu:
    """The GPU of that catalogue name or alias, in any case; `UnknownHardware` when there is none."""
    return _find(name, GPUS, GPU_ALIASES, "GPU")


def find_link(name: str) -> Link:
    """The link of that catalogue name or alias, in any case; `UnknownHardware` when there is none."""
    return _find(name, LINKS, LINK_ALIASES, "link")


def find_node(name: str) -> Node:
    """The node type of that catalogue name or alias, in any case; `UnknownHardware` when there is none."""
    return _find(name, NODES, NODE_ALIASES, "node")


def _find(name: str, table: Mapping[str, T], aliases: Mapping[str, str], kind: str) -> T:
    key = "-".join(name.lower().replace("_", " ").split())
    found = table.get(aliases.get(key, key))
    if found is not None:
        return found
    close = difflib.get_close_matches(key, [*table, *aliases], n=6, cutoff=0.6)
    suggestions = dict.fromkeys(aliases.get(match, match) for match in close)
    raise UnknownHardware(name, tuple(suggestions)[:3], kind)
