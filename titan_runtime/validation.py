"""Validation: the mean cross-entropy over every token of a held-out text, the same number on any mesh, and never a hang.

The text is one global list of samples, cut as for training, the last one padded with labels that do not count. Ranks
deal it out among themselves, each padding what it lacks with samples that do not count, so that all of them run the same
number of batches by construction: the number is counted once, by the first rank, and not found out by running dry.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_planner.ir.plan import Plan
from titan_runtime.agreement import on_first_rank, together
from titan_runtime.apply.context import shard_sequences
from titan_runtime.apply.fsdp import reshard
from titan_runtime.apply.pipeline import Pipeline
from titan_runtime.data import PackedStream
from titan_runtime.errors import RunError
from titan_runtime.loss import IGNORE
from titan_runtime.mesh import data_rank

KEPT_TOKENS = 1 << 22
"""A rank whose share of the text has no more tokens than this keeps them (64 MiB) instead of tokenising at every turn."""


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """`loss` is the mean over `tokens` predicted tokens, all ranks together."""

    loss: float
    tokens: int
    seconds: float


class Validator:
    """The held-out text of a plan, and the loss on it."""

    def __init__(self, plan: Plan, rank: int, open_text: Callable[[str], PackedStream]) -> None:
        """Open and count the text. Collective; RunError on all ranks when any cannot read it or holds another text."""
        settings = plan.job.validation
        path = settings.path
        assert path is not None  # a rule of plans
        self._stream = together(lambda: open_text(path), "open the validation text")
        fingerprint = self._stream.source.fingerprint()
        first = on_first_rank(lambda: fingerprint, "open the validation text")
        together(lambda: _require_same(fingerprint, first, path), "open the validation text")

        self._plan, self._rank = plan, rank
        self._local, self._seq_len = plan.batch.local_batch_size, plan.batch.seq_len
        self._dp, self._share = plan.mesh.dp, data_rank(plan.mesh, rank)
        # A batch is as large as one of training whatever the mesh, so that `steps` means the same text on any.
        limit = settings.steps * plan.batch.global_batch_size if settings.steps > 0 else None
        self.samples = on_first_rank(lambda: _count(self._stream, limit, path), "read the validation text")
        self.batches = -(-self.samples // (self._dp * self._local))
        """Forward passes of every rank in one validation."""
        self.runs = 0
        self._freq, self._last = settings.freq, plan.job.steps
        keep = self.batches * self._local * self._seq_len <= KEPT_TOKENS
        self._kept: list[tuple[Tensor, Tensor]] | None = [] if keep else None

    def due(self, step: int) -> bool:
        """Whether to validate after `step`: every `freq` steps and after the last one."""
        return step % self._freq == 0 or step == self._last

    def run(
        self,
        module: nn.Module,
        summed_loss: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> ValidationResult:
        """The loss of `module` on the text. Collective. Weights, gradients and generators stay as they are.

        `summed_loss` maps tokens and labels to the sum of the cross-entropy over valid labels.
        """
        began = time.perf_counter()
        was_training = module.training
        module.eval()
        # In double: the sum of many batches must not depend on how the text was dealt out.
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        try:
            with torch.no_grad():
                for tokens, labels in self._own_batches():
                    sums[0] += summed_loss(tokens.to(device), labels.to(device)).double()
                    sums[1] += (labels != IGNORE).sum().to(device)
        finally:
            module.train(was_training)
            # No backward frees what a unit keeps for it; a checkpoint would find whole weights where it looks for shards.
            reshard(module)
        if isinstance(module, Pipeline):
            dist.all_reduce(sums[0], group=module.group)  # the last stage's; the tokens were counted by all
        dist.all_reduce(sums, group=group)
        self.runs += 1
        total, count = sums.tolist()
        return ValidationResult(total / count, int(count), time.perf_counter() - began)

    def _own_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share, exactly `batches` of them."""
        if self._kept:
            yield from self._kept
            return
        samples = _samples(self._stream, self.samples)
        for _ in range(self.batches):
            group = [next(samples, None) for _ in range(self._dp * self._local)]
            own = group[self._share * self._local : (self._share + 1) * self._local]
            (batch,) = shard_sequences([_microbatch(own, self._seq_len)], self._plan, self._rank)
            if self._kept is not None:
                self._kept.append(batch)
            yield batch


def _samples(stream: PackedStream, limit: int | None) -> Iterator[array[int]]:
    """The samples of one pass over the text, in order: `seq_len + 1` tokens each, the last one any number above 1."""
    made, tokens = 0, array("q")
    for piece in stream.epoch_tokens():
        tokens.extend(piece)
        begin = 0
        while begin + stream.seq_len < len(tokens):
            if made == limit:
                return
            yield tokens[begin : begin + stream.seq_len + 1]
            begin, made = begin + stream.seq_len, made + 1
        del tokens[:begin]
    if len(tokens) > 1 and made != limit:
        yield tokens


def _count(stream: PackedStream, limit: int | None, path: str) -> int:
    count = sum(1 for _ in _samples(stream, limit))
    if count == 0:
        raise RunError(f"job.validation.path: {path} holds fewer than two tokens", hint="name a longer text")
    return count


def _microbatch(samples: list[array[int] | None], seq_len: int) -> tuple[Tensor, Tensor]:
    """Samples as tensors; what is short or missing is filled with token 0 and labels that do not count."""
    tokens = torch.zeros(len(samples), seq_len, dtype=torch.int64)
    labels = torch.full((len(samples), seq_len), IGNORE, dtype=torch.int64)
    for row, sample in enumerate(samples):
        if sample is not None:
            window = torch.tensor(sample, dtype=torch.int64)
            tokens[row, : len(window) - 1] = window[:-1]
            labels[row, : len(window) - 1] = window[1:]
    return tokens, labels


def _require_same(own: object, first: object, path: str) -> None:
    if own != first:
        raise RunError(
            f"job.validation.path: {path} holds another text here than on rank 0", hint="give every node the same text"
        )
