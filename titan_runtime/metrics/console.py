"""What a person sees: one line each few steps, from the first rank."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from titan_runtime.metrics.meter import Measurement

_DIM, _BOLD, _CYAN, _END = "\033[2m", "\033[1m", "\033[36m", "\033[0m"


class Console:
    """Prints with the prefix `titan:` on the first rank only. Coloured on a terminal unless NO_COLOR is set."""

    def __init__(self, rank: int, stream: TextIO | None = None) -> None:
        self._silent = rank != 0
        self._stream = stream or sys.stdout
        self._colour = self._stream.isatty() and not os.environ.get("NO_COLOR")

    def say(self, text: str) -> None:
        """Print `text`, every line with the prefix."""
        if self._silent:
            return
        prefix = self._paint("titan:", _DIM)
        for line in text.splitlines():
            print(prefix, line, file=self._stream, flush=True)

    def step(
        self,
        step: int,
        last: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens_seen: int,
        measured: Measurement,
        predicted: dict[str, float],
    ) -> None:
        """The line of one step: what training did, how fast, and in brackets what the plan predicted."""
        self.say(
            "  ".join(
                [
                    self._paint(f"step {step:>{len(str(last))}}", _CYAN),
                    self._paint(f"loss {loss:.4f}", _BOLD),
                    f"grad_norm {grad_norm:.4f}",
                    f"lr {lr:.2e}",
                    *speed_parts(measured, predicted),
                    f"tokens {tokens_seen:,}",
                ]
            )
        )

    def validation(self, step: int, last: int, loss: float, tokens: int, seconds: float) -> None:
        """The line of one validation."""
        self.say(
            f"{self._paint(f'step {step:>{len(str(last))}}', _CYAN)}  "
            f"{self._paint(f'validation_loss {loss:.4f}', _BOLD)}  over {tokens:,} held-out tokens in {seconds:.1f} s"
        )

    def _paint(self, text: str, code: str) -> str:
        return f"{code}{text}{_END}" if self._colour else text


def speed_parts(measured: Measurement, predicted: dict[str, float]) -> list[str]:
    """The measured numbers in words, `(plan X)` behind those that the plan predicts."""

    def plan(name: str, form: str) -> str:
        return f" (plan {form.format(predicted[name])})" if name in predicted else ""

    parts = [
        f"step_time {measured.step_time_ms:,.0f} ms" + plan("step_time_ms", "{:,.0f} ms"),
        f"tok/s {measured.tokens_per_second:,.0f}",
        f"tok/s/rank {measured.tokens_per_second_per_gpu:,.0f}" + plan("tokens_per_second_per_gpu", "{:,.0f}"),
    ]
    if measured.tflops_per_gpu is not None and measured.mfu is not None:
        parts.append(f"TFLOP/s/rank {measured.tflops_per_gpu:.3g}")
        parts.append(f"mfu {measured.mfu:.1%}" + plan("mfu", "{:.1%}"))
    if measured.reserved_memory_gib is None:
        # On a CPU all that can be told is the whole process, interpreter and libraries included; a plan counts tensors.
        parts.append(f"rss {measured.peak_memory_gib:.2f} GiB" + plan("peak_memory_gib", "{:.2f} GiB of tensors"))
    else:
        parts.append(f"memory {measured.peak_memory_gib:.2f} GiB" + plan("peak_memory_gib", "{:.2f} GiB"))
    parts.append(f"data_wait {measured.data_wait:.1%}")
    return parts
