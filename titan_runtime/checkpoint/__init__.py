"""Saving a run and going on with it: the same losses, digit for digit, as if nothing had happened."""

from titan_runtime.checkpoint.checkpointer import Checkpointer
from titan_runtime.checkpoint.record import Progress

__all__ = ["Checkpointer", "Progress"]
