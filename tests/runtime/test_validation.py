"""The held-out loss: one number for any split of the text, no hang, and no trace in the training."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests import plans
from tests.harness import Rank, RanksFailed, run_ranks
from titan_planner.ir.parallel import Mesh
from titan_planner.ir.plan import Plan
from titan_runtime.data import open_stream
from titan_runtime.init import initialise
from titan_runtime.modules import build
from titan_runtime.validation import _samples


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text that no batch, no rank and no sequence length divides."""
    file = tmp_path / "held_out.txt"
    file.write_text((plans.TEXT / sorted(p.name for p in plans.TEXT.iterdir())[0]).read_text("utf-8")[:2_501], "utf-8")
    return file


def validating(text: Path, grid: Mesh | None = None, steps: int = -1, freq: int = 1, **sections: object) -> Plan:
    plan = plans.on_disk(plans.tiny_plan(grid, **sections))
    held_out = replace(plan.job.validation, enable=True, path=str(text), steps=steps, freq=freq)
    return replace(plan, job=replace(plan.job, validation=held_out))


def validate(rank: Rank, plan: Plan) -> tuple[float, int, int, int]:
    from functools import partial

    from titan_runtime.apply import build_model
    from titan_runtime.loss import cross_entropy_sum
    from titan_runtime.mesh import build_mesh, data_group
    from titan_runtime.step import batch_loss
    from titan_runtime.train import open_text
    from titan_runtime.validation import Validator

    device = torch.device("cpu")
    world = build_mesh(plan.mesh, "cpu")
    module = build_model(plan, world, device)
    validator = Validator(plan, rank.index, partial(open_text, plan))
    calls = 0

    def measure(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        assert not module.training
        assert not torch.is_grad_enabled()
        return batch_loss(plan, module, cross_entropy_sum, tokens, labels)

    generator = torch.get_rng_state()
    results = [validator.run(module, measure, device, data_group(world)) for _ in range(2)]
    assert results[0].loss == results[1].loss  # the second one from kept tokens
    assert torch.equal(torch.get_rng_state(), generator)
    assert module.training
    assert all(p.grad is None for p in module.parameters())
    assert calls == 2 * validator.batches
    return results[0].loss, results[0].tokens, validator.batches, validator.samples


def by_hand(plan: Plan, text: Path) -> tuple[float, int]:
    """Every token but the first predicted once, in one forward of one sample at a time, from all tokens at once."""
    stream = open_stream("text", text, plans.TOKENIZER, 32, add_bos=True)
    tokens = torch.tensor([token for piece in stream.epoch_tokens() for token in piece])
    module = build(plan.model, seq_len=32).to_empty(device="cpu")
    initialise(module, plan.model, plan.seeds.seed)
    total = 0.0
    with torch.no_grad():
        for begin in range(0, len(tokens) - 1, 32):
            window = tokens[begin : begin + 33]
            logits = module(window[None, :-1])[0]
            total += cross_entropy(logits.double(), window[1:], reduction="sum").item()
    return total / (len(tokens) - 1), len(tokens) - 1


def test_any_split_of_the_text_gives_the_same_loss(text: Path) -> None:
    expected, count = by_hand(validating(text), text)
    assert count % 32  # the last sample is short
    for grid, local in (
        (plans.mesh(1), 1),
        (plans.mesh(1), 8),
        (plans.mesh(2), 4),
        (plans.mesh(4), 1),
        (plans.mesh(2, 2), 2),
    ):
        found = run_ranks(validate, grid.world_size, validating(text, grid, local=local))
        assert len(set(found)) == 1
        loss, tokens, batches, samples = found[0]
        assert loss == pytest.approx(expected, rel=1e-6)
        assert (tokens, samples) == (count, -(-count // 32))
        assert batches == -(-samples // (grid.dp * local))
    assert samples % 8
    assert samples % 4


def test_chunks_and_a_number_of_batches(text: Path) -> None:
    one, two = (
        run_ranks(validate, grid.world_size, validating(text, grid, steps=2, local=2))[0]
        for grid in (plans.mesh(1), plans.mesh(4))
    )
    assert one[0] == pytest.approx(two[0], rel=1e-6)
    assert one[1:] == (2 * 8 * 32, 8, 16)
    assert two[1:] == (2 * 8 * 32, 2, 16)
    plan = validating(text, plans.mesh(2), steps=2, local=4)
    chunked = run_ranks(validate, 2, replace(plan, loss=replace(plan.loss, chunks=4, z_loss=0.1)))[0]
    assert chunked[0] == pytest.approx(one[0], rel=1e-6)


class Pieces:
    """A stream of the given pieces of tokens."""

    def __init__(self, seq_len: int, *pieces: list[int]) -> None:
        self.seq_len = seq_len
        self._pieces = pieces

    def epoch_tokens(self) -> Iterator[array[int]]:
        yield from (array("q", piece) for piece in self._pieces)


@pytest.mark.parametrize(
    ("pieces", "limit", "expected"),
    [
        ([[0, 1, 2], [3], [4, 5, 6, 7]], None, [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7]]),
        ([[0, 1, 2, 3, 4, 5, 6]], None, [[0, 1, 2, 3], [3, 4, 5, 6]]),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], 2, [[0, 1, 2, 3], [3, 4, 5, 6]]),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], 9, [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7]]),
        ([[0]], None, []),
        ([[0], [1]], None, [[0, 1]]),
    ],
)
def test_every_token_but_the_first_is_a_label_once(pieces, limit, expected) -> None:
    assert [list(sample) for sample in _samples(Pieces(3, *pieces), limit)] == expected


def train_whole(rank: Rank, plan: Plan) -> int:
    from titan_runtime.train import train

    held_out = replace(plan.job.validation, path="held_out.txt")
    written = replace(plan, job=replace(plan.job, dump_folder="out", validation=held_out))
    written = replace(written, data=plans.tiny_plan().data)  # as a file would have it: relative paths
    return train(plan, rank.index, rank.world_size, rank.store, written_plan=written)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_validates_on_time_and_trains_as_if_it_did_not(text: Path, tmp_path: Path) -> None:
    job = plans.job(str(tmp_path / "with"), 5, enable=True, interval=2)
    metrics = replace(job.metrics, enable_tensorboard=True)
    plan = validating(text, plans.mesh(2), freq=2, local=4, job=replace(job, metrics=metrics))
    output: list[str] = []
    assert run_ranks(train_whole, 2, plan, process_group=False, output=output) == [0, 0]
    silent = plans.on_disk(plans.tiny_plan(plans.mesh(2), local=4, job=plans.job(str(tmp_path / "without"), 5)))
    assert run_ranks(train_whole, 2, silent, process_group=False) == [0, 0]

    found = lines(tmp_path / "with")
    losses = {line["step"]: line.pop("validation_loss") for line in found if "validation_loss" in line}
    assert sorted(losses) == [2, 4, 5]
    assert losses[5] < losses[2]
    assert found == lines(tmp_path / "without")
    assert f"step 4  validation_loss {losses[4]:.4f}  over " in output[0]
    assert "validation_loss" not in output[1]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "with" / "tb"))
    events.Reload()
    assert {e.step: e.value for e in events.Scalars("validation/loss")} == pytest.approx(losses)

    # Saved right after a validation, when gathered weights must not be left lying about; resumed, it goes on the same.
    again = replace(plan, job=replace(plan.job, checkpoint=replace(plan.job.checkpoint, load_step=4)))
    assert run_ranks(train_whole, 2, again, process_group=False) == [0, 0]
    resumed = lines(tmp_path / "with")
    assert resumed[-1].pop("validation_loss") == losses[5]
    assert resumed[-1] == found[-1]


def test_a_text_that_only_one_rank_has_otherwise_stops_all(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("another text, and shorter")

    def run(rank: Rank) -> None:
        validate(rank, validating(other if rank.index else text, plans.mesh(2), local=4))

    with pytest.raises(RanksFailed) as caught:
        run_ranks(run, 2)
    assert all("rank 1: job.validation.path: " in error for error in caught.value.errors.values())
    assert all("holds another text here than on rank 0" in error for error in caught.value.errors.values())
    missing = validating(tmp_path / "nothing", plans.mesh(2), local=4)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(validate, 2, missing)
    assert all("There is no such file or folder" in error for error in caught.value.errors.values())
