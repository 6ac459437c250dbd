"""Model code for one device: plain modules, no word about ranks. `build` makes them from a plan's model."""

from titan_runtime.modules.build import build
from titan_runtime.modules.transformer import Transformer

__all__ = ["Transformer", "build"]
