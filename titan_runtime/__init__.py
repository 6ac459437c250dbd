"""Execute a Titan plan with PyTorch, exactly as it says: `torchrun -m titan_runtime --plan plan.json`."""

from __future__ import annotations


def version() -> str:
    """The installed version of Titan, or that of a source tree that is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("titan-planner")
    except PackageNotFoundError:
        return "0+source"
