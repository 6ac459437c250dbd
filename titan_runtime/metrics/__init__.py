"""What a run measures and where the numbers go: console, `metrics.jsonl` and TensorBoard."""

from titan_runtime.metrics.console import Console
from titan_runtime.metrics.meter import Measurement, Meter
from titan_runtime.metrics.step_log import StepLog
from titan_runtime.metrics.tensorboard import ScalarWriter
from titan_runtime.metrics.wandb import WandbWriter

__all__ = ["Console", "Measurement", "Meter", "ScalarWriter", "StepLog", "WandbWriter"]
