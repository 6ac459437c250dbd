"""What is refused before the first collective, and in which words."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests import plans
from tests.harness import Rank, run_ranks
from titan_planner.ir.execution import CheckpointPolicy
from titan_planner.ir.plan import Plan
from titan_runtime.capabilities import MISSING, unsupported
from titan_runtime.errors import RunError
from titan_runtime.preflight import (
    Report,
    _device_problems,
    _package_problems,
    agree,
    effective_run,
    local_report,
    memory_warnings,
    wrong_world_size,
)
from titan_runtime.torchrun import torchrun_line

GOOD = Report(digest="d" * 64, torch="2.13.0", titan="0.1.0")


def sentences(
    world_size: int, *reports: Report, silent: tuple[int, ...] = (), timeout: float = 20.0
) -> list[str | None]:
    """What every rank is told when rank r reports `reports[r]`."""

    def told(rank: Rank) -> str | None:
        if rank.index in silent:
            return None
        try:
            agree(reports[rank.index], rank.store, rank.index, rank.world_size, timedelta(seconds=timeout))
        except RunError as error:
            return str(error) if error.agreed else "not agreed"
        return None

    return run_ranks(told, world_size, process_group=False)


def test_equal_reports_pass() -> None:
    assert sentences(3, GOOD, GOOD, GOOD) == [None, None, None]


def test_a_rank_with_another_plan_is_named_on_all_ranks() -> None:
    other = replace(GOOD, digest="e" * 64)
    told = sentences(3, GOOD, GOOD, other)
    assert len(set(told)) == 1
    assert told[0] == (
        "1 of 3 ranks has another plan (rank 2: eeeeeeeeeeee) than the rest (dddddddddddd)\n"
        "    try: give every node the same plan file"
    )


def test_other_versions_are_named_too() -> None:
    told = sentences(3, replace(GOOD, torch="2.12.1"), replace(GOOD, titan="0.2.0"), GOOD)[0]
    assert "1 of 3 ranks has another torch (rank 0: 2.12.1) than the rest (2.13.0)" in told
    assert "1 of 3 ranks has another version of Titan (rank 1: 0.2.0) than the rest (0.1.0)" in told


def test_a_rank_with_other_options_is_named_with_the_option() -> None:
    plan = plans.tiny_plan(job=plans.job("out", 20))
    other = replace(plan, job=replace(plan.job, steps=21), data=replace(plan.data, path="elsewhere"))
    report, odd = (replace(GOOD, run=effective_run(p, False)) for p in (plan, other))
    told = sentences(3, report, odd, report)
    assert len(set(told)) == 1
    assert told[0] is not None
    assert "1 of 3 ranks has another `job.steps` (rank 1: 21) than the rest (20)" in told[0]
    assert "another `data.path` (rank 1: elsewhere)" in told[0]
    assert told[0].endswith("try: give every node the same options")
    assert local_report(plan, "p.json", "d", 1, 0).run == report.run


def test_a_problem_of_all_ranks_is_said_once_and_that_of_one_with_its_rank() -> None:
    broken = replace(GOOD, problems=["no"])
    assert sentences(2, broken, broken) == ["no", "no"]
    assert sentences(2, GOOD, broken) == ["rank 1: no", "rank 1: no"]
    two = sentences(3, broken, replace(GOOD, problems=["never"]), broken)
    assert two[0] == "ranks 0, 2: no\nrank 1: never"


def test_a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    told = sentences(3, GOOD, GOOD, GOOD, silent=(2,), timeout=1.0)
    assert told == ["rank 2 did not report within 1 s", "rank 2 did not report within 1 s", None]


# ------------------------------------------------------------------ the checks of one rank


def test_a_wrong_number_of_ranks_says_the_right_line() -> None:
    plan = plans.tiny_plan(plans.mesh(4))
    assert wrong_world_size(plan, "p.json", 4) == []
    assert wrong_world_size(plan, "p.json", 2) == [
        "2 ranks were started, but the plan `tiny` needs 4 ranks\n"
        "    try: torchrun --standalone --nproc-per-node 4 -m titan_runtime --plan p.json"
    ]
    assert "1 rank was started" in wrong_world_size(plan, "p.json", 1)[0]
    spread = replace(plan, cluster=plans.cluster(4, nodes=2))
    assert torchrun_line(spread, "p.json") == (
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
        "-m titan_runtime --plan p.json"
    )
    assert "on each of the 2 nodes, with HOST the name of one of them" in wrong_world_size(spread, "p.json", 4 + 1)[0]


def test_a_plan_for_gpus_needs_one_for_every_rank() -> None:
    plan = plans.tiny_plan(plans.mesh(4), cluster=plans.cluster(4, device="cuda"))
    assert "torch finds no CUDA device here" in _device_problems(plan, 0, lambda: False, lambda: 0)[0]
    assert (
        "this node has 2 GPUs, so there is none for its rank number 3"
        in _device_problems(plan, 3, lambda: True, lambda: 2)[0]
    )
    assert _device_problems(plan, 1, lambda: True, lambda: 2) == []
    assert _device_problems(plans.tiny_plan(), 0, lambda: False, lambda: 0) == []


def test_a_smaller_device_than_planned_is_a_warning() -> None:
    plan = plans.tiny_plan(cluster=plans.cluster(1, device="cuda"))
    assert memory_warnings(plan, 79.2) == []
    assert memory_warnings(plan, 40.0) == [
        "the device has 40.0 GiB of memory, but the plan was made for 80.0 GiB; it may not fit"
    ]


def test_wandb_is_asked_for_only_where_it_is_installed() -> None:
    plan = plans.tiny_plan()
    wanted = replace(plan, job=replace(plan.job, metrics=replace(plan.job.metrics, enable_wandb=True)))
    assert _package_problems(plan, lambda name: None) == []
    assert _package_problems(wanted, lambda name: object()) == []
    assert _package_problems(wanted, lambda name: None) == [
        "the plan logs to Weights & Biases, but the package wandb is not installed\n"
        "    try: pip install wandb, or start with --no-wandb"
    ]


# ------------------------------------------------------------------ capabilities


def test_the_page_lists_exactly_what_is_refused() -> None:
    page = (plans.REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    listed = page.split("## What it cannot run yet\n")[1].split("\n## ")[0]
    assert [line for line in listed.splitlines() if line.startswith("- ")] == [
        f"- `{row.address}`: {row.what}; {row.instead}" for row in MISSING
    ]


def test_names_that_this_torch_lacks_are_refused_before_the_process_group() -> None:
    plan = plans.tiny_plan()
    assert local_report(plan, "p.json", "d", 1, 0).problems == []
    compiled = replace(plan, compile=replace(plan.compile, enable=True, backend="inducter"))
    [problem] = local_report(compiled, "p.json", "d", 1, 0).problems
    assert "no compiler backend `inducter`" in problem
    policy = CheckpointPolicy(
        name="some", mode="selective", save_ops=("aten.nope.default",), recompute_every_second_matmul=False,
        force_recompute_fqns=(), memory_budget=None,
    )  # fmt: skip
    layers = tuple(replace(x, checkpoint="some") if x.fqn == "layers.0" else x for x in plan.layers)
    policies = (*plan.activation_checkpoint.policies, policy)
    saving = replace(plan, layers=layers, activation_checkpoint=replace(plan.activation_checkpoint, policies=policies))
    [problem] = local_report(saving, "p.json", "d", 1, 0).problems
    assert "saves `aten.nope.default`, which is no operator" in problem


def test_what_the_runtime_does_it_accepts() -> None:
    assert unsupported(plans.tiny_plan(plans.mesh(2, 2))) == []
    assert unsupported(plans.tiny_plan(plans.mesh(2, 2, ep=2), model=plans.tiny_moe_model())) == []


def _asks_for(address: str) -> Plan:
    """A plan that asks for what the row at `address` refuses."""
    plan = plans.tiny_plan()

    def job(**changes: Any) -> Plan:
        return replace(plan, job=replace(plan.job, **changes))

    def budget(name: str, value: float) -> CheckpointPolicy:
        return replace(plans.NO_CHECKPOINT, name=name, mode="memory_budget", memory_budget=value)

    saving = plans.job("out", 10, enable=True).checkpoint
    match address.split(".", 1):
        case ["activation_checkpoint", _]:
            policies = (plans.NO_CHECKPOINT, budget("some", 0.5), budget("more", 0.7))
            names = ("none", "some", "more", "none", "none")
            layers = tuple(replace(x, checkpoint=name) for x, name in zip(plan.layers, names, strict=True))
            ac = replace(plan.activation_checkpoint, policies=policies)
            return replace(plan, layers=layers, activation_checkpoint=ac)
        case ["layers", "checkpoint"]:
            names = ("none", "some", "none", "none", "none")
            layers = tuple(replace(x, checkpoint=name) for x, name in zip(plan.layers, names, strict=True))
            ac = replace(plan.activation_checkpoint, policies=(plans.NO_CHECKPOINT, budget("some", 0.5)))
            compiled = replace(plan.compile, enable=True, components=("model",))
            return replace(plan, layers=layers, activation_checkpoint=ac, compile=compiled)
        case ["data", _]:
            return replace(plan, data=replace(plan.data, source="huggingface", dataset="c4"))
        case ["job", "checkpoint.async_mode"]:
            return job(checkpoint=replace(saving, async_mode="async"))
        case ["job", "checkpoint.last_save_in_hf"]:
            return job(checkpoint=replace(saving, last_save_in_hf=True))
        case ["float8", field]:
            plan = plans.tiny_plan(plans.mesh(1, tp=2))
            return replace(plan, float8=replace(plan.float8, recipe="tensorwise", **{field: True}))
        case ["expert_parallel", _]:
            plan = plans.tiny_plan(plans.mesh(2, ep=2), model=plans.tiny_moe_model())
            return replace(plan, expert_parallel=replace(plan.expert_parallel, comm_backend="deepep"))
    raise AssertionError(f"no plan for {address}: add one")


@pytest.mark.parametrize("address", [row.address for row in MISSING])
def test_what_it_does_not_do_yet_it_refuses_by_address(address: str) -> None:
    found = [line for line in unsupported(_asks_for(address)) if line.startswith(f"`{address}`: ")]
    assert len(found) == 1
    assert "this version of the runtime does not do " in found[0]


def test_all_refusals_come_at_once() -> None:
    plan = replace(_asks_for("expert_parallel.comm_backend"), data=_asks_for("data.source").data)
    assert [line.split("`")[1] for line in unsupported(plan)] == ["expert_parallel.comm_backend", "data.source"]
