"""Speed and memory between two log lines, with what the plan predicted beside them."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from titan_planner.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Measurement:
    """Means over the steps since the last one; None where the plan or the device does not say.

    `data_wait` is the share of the time that this rank waited for data. `peak_memory_gib` is the most that tensors took
    on a GPU, and on a CPU the most the process ever had resident.
    """

    step_time_ms: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float | None
    mfu: float | None
    peak_memory_gib: float
    reserved_memory_gib: float | None
    data_wait: float


class Meter:
    """Counts steps and takes the time between measurements."""

    def __init__(self, plan: Plan, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._plan = plan
        self._device = device
        self._clock = clock
        self._began = clock()
        self._waited = 0.0
        self._steps = 0

    def step(self) -> None:
        """One optimizer step is done."""
        self._steps += 1

    def skip(self, seconds: float) -> None:
        """Leave out time that was no training (a checkpoint)."""
        self._began += seconds

    def measure(self, waited: float) -> Measurement:
        """Means over the steps since the last call, at least one; `waited` is the loader's running total of seconds."""
        now = self._clock()
        seconds = max(now - self._began, 1e-9)
        steps, gpus = self._steps, self._plan.mesh.world_size
        per_second = self._plan.batch.tokens_per_step * steps / seconds
        tflops = mfu = None
        if self._plan.estimate is not None:
            tflops = per_second / gpus * self._plan.estimate.flops_per_token / 1e12
            mfu = tflops / self._plan.cluster.gpu.bf16_tflops
        peak, reserved = self._memory()
        measured = Measurement(
            step_time_ms=1e3 * seconds / steps,
            tokens_per_second=per_second,
            tokens_per_second_per_gpu=per_second / gpus,
            tflops_per_gpu=tflops,
            mfu=mfu,
            peak_memory_gib=peak,
            reserved_memory_gib=reserved,
            data_wait=min(1.0, max(0.0, waited - self._waited) / seconds),
        )
        self._began, self._steps, self._waited = now, 0, waited
        return measured

    def _memory(self) -> tuple[float, float | None]:
        if self._device.type != "cuda":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return (peak if sys.platform == "darwin" else peak * 1024) / 2**30, None
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return stats["active_bytes.all.peak"] / 2**30, stats["reserved_bytes.all.peak"] / 2**30


def predictions(plan: Plan) -> dict[str, float]:
    """What the plan expects, by the names of `Measurement`'s fields; empty without an estimate."""
    estimate = plan.estimate
    if estimate is None:
        return {}
    values = {
        "step_time_ms": estimate.step_time_ms,
        "tokens_per_second_per_gpu": estimate.tokens_per_second_per_gpu,
        "mfu": estimate.mfu,
        "peak_memory_gib": estimate.peak_memory_gib if estimate.memory else None,
    }
    return {name: value for name, value in values.items() if value is not None}
