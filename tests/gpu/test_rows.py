"""The rows can be checked anywhere: a plan that no longer passes its rules would only be noticed on a GPU.

So can the code that launches and judges them, on CPU ranks.
"""

from __future__ import annotations

import pytest

from tests.gpu import suite
from tests.gpu.rows import ROWS, Row
from tests.parity.rows import Row as ParityRow
from tests.parity.runner import compile_row
from tests.parity.suite import BY_NAME, CPU, check, check_same_bits
from titan_planner.ir.verify import verify
from titan_runtime.capabilities import unsupported


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_plan_is_legal_and_supported(row: Row) -> None:
    assert verify(row.plan) == ()
    assert unsupported(row.plan) == []


@pytest.mark.parametrize(
    "row", [*(row for row, _ in (*suite.EXACT, *suite.OTHERS)), *suite.DETERMINISTIC], ids=lambda row: row.name
)
def test_the_parity_rows_compile_for_gpus(row: ParityRow) -> None:
    plan = compile_row(row, suite.GPU)
    assert plan.cluster.gpu.device == "cuda"
    assert unsupported(plan) == []
    wanted = row.sections.get("training", {}).get("mixed_precision_param", "float32")
    assert plan.fsdp.param_dtype == wanted
    assert plan.compile.enable == row.sections.get("compile", {}).get("enable", False)
    assert (plan.float8.recipe is not None) == ("float8" in row.sections)
    assert plan.float8.emulate is False
    assert plan.tensor_parallel.async_tp <= plan.compile.enable


def test_rows_of_the_parity_suite_are_all_there_and_names_are_unique() -> None:
    exact, others = ([row.name for row, _ in rows] for rows in (suite.EXACT, suite.OTHERS))
    assert set(exact) == {*BY_NAME, suite.ONE_WITH_EXPERTS.name}
    assert len({*exact, *others}) == len(exact) + len(others)


def test_the_code_that_runs_them_on_gpus_runs_them_on_cpu_ranks() -> None:
    ring, experts = BY_NAME["cp 2 ring"], BY_NAME["experts, ep 2"]
    in_bf16 = experts.over("bf16", training={"mixed_precision_param": "bfloat16"})
    found = suite.outcomes([ring, in_bf16], gpu="cpu")
    check(found[ring.name], CPU)
    check(found[in_bf16.name], suite.BF16)
    with pytest.raises(AssertionError):
        check(found[in_bf16.name], CPU)


def test_deterministic_rows_are_compared_to_the_bit_on_cpu_ranks() -> None:
    row = suite.DETERMINISTIC[0]
    first, second = (suite.outcomes([row], gpu="cpu")[row.name] for _ in range(2))
    check_same_bits(first, second)


def test_kernels_are_counted_on_cpu_ranks() -> None:
    bf16 = {"mixed_precision_param": "bfloat16"}
    found = suite.kernels(suite.ONE_WITH_EXPERTS.over("bf16", training=bf16), gpu="cpu")
    assert found["aten._grouped_mm.default"] == 5 * 3
    found = suite.kernels(BY_NAME["cp 2 ring"].over("bf16", training=bf16), gpu="cpu")
    assert found["aten._scaled_dot_product_flash_attention_for_cpu.default"] >= 2 * 8
