"""The parity suite's own rows on GPUs: in float32 as on CPUs, and selected ones in the precisions that only GPUs have.

Rows, launches and judging are `tests/parity`'s; here are the bounds, and the rows that are laid over others. `gpu` is a name
of the catalogue everywhere, so that the same code runs on CPU ranks (tests/gpu/test_rows.py).
"""

from __future__ import annotations

from typing import Any

from tests.harness import Rank, run_ranks
from tests.parity.rows import ROWS, Row, experts
from tests.parity.runner import compile_row
from tests.parity.suite import BY_NAME, Bounds, Outcome, run_suite
from titan_planner.ir.plan import Plan

GPU = "h100-sxm-80gb"
A_LAUNCH = 4
"""Rows in one launch: each makes NCCL communicators of its own, which hold device memory until the process ends, and some are
compiled for a minute."""

FLOAT32 = Bounds(loss=1e-4, norm=1e-3, weight=1e-4)
"""Against one process on the same GPU. Looser than on CPUs: cuBLAS takes other kernels, with other orders of summation, for
other shapes, and Adam amplifies what that rounds differently over ten steps."""
BF16 = Bounds(loss=2e-2, norm=2e-1, weight=None)
"""bfloat16 has 8 bits, so a relative 4e-3 a rounding; the same tiny models on CPUs stay within 5e-3 (losses)."""
FLOAT8 = Bounds(loss=4e-2, norm=3e-1, weight=None)
"""float8 e4m3 has 4 bits; emulated on CPUs the losses stay within 2e-2."""

ONE_WITH_EXPERTS = experts("experts, one rank", {"dp_shard": 1})

_BF16: dict[str, dict[str, Any]] = {"training": {"mixed_precision_param": "bfloat16"}}
_COMPILED: dict[str, dict[str, Any]] = {**_BF16, "compile": {"enable": True}}
_IN_BF16 = (
    "one rank",
    "dp 2",
    "hsdp 2x2",
    "tp 2",
    "tp 4, each of 2 KV heads on 2 ranks",
    "tp 2 x dp 2",
    "tp 2, tied weights",
    "tp 2, checkpointing selective",
    "cp 2 allgather",
    "cp 2 ring",
    "cp 2 alltoall",
    "cp 2 ring x tp 2 x dp 2",
    "pp 2 1F1B",
    "pp 2 ZBVZeroBubble",
    "pp 2, tied weights",
    "pp 2 x dp 2 x tp 2",
    "pp 2, accumulation 4 reduced once, loss in 4 chunks",
    "experts, ep 2",
    "experts, tp 2 with ep 2",
    "experts, tp 2 x dp 2 with ep 2 and etp 2",
    "experts, ep 2, checkpointing full",
)
_ALSO_COMPILED = (
    "one rank",
    "dp 2",
    "dp 2, loss in 4 chunks",
    "tp 2, checkpointing selective",
    "cp 2 ring",
    "cp 2 x tp 2",
    "pp 2 1F1B",
    "experts, ep 2",
)


def _float8(recipe: str, **more: Any) -> dict[str, dict[str, Any]]:
    return {**_COMPILED, "float8": {"recipe": recipe, "filter_fqns": ["output"], **more}}


def _with_async_tp(name: str, on: bool) -> Row:
    how = {"parallelism": {"enable_async_tensor_parallel": on}}
    return BY_NAME[name].over(f"compiled bf16, {'async' if on else 'no async'} tp", **_COMPILED, **how)


EXACT: tuple[tuple[Row, Bounds], ...] = tuple((row, FLOAT32) for row in (ONE_WITH_EXPERTS, *ROWS))
OTHERS: tuple[tuple[Row, Bounds], ...] = (
    *((row.over("bf16", **_BF16), BF16) for row in (ONE_WITH_EXPERTS, *(BY_NAME[name] for name in _IN_BF16))),
    *((row.over("compiled bf16", **_COMPILED), BF16) for row in (BY_NAME[name] for name in _ALSO_COMPILED)),
    *((_with_async_tp(name, on), BF16) for name in ("tp 2", "tp 2 x dp 2") for on in (True, False)),
    (BY_NAME["one rank"].over("float8 tensorwise", **_float8("tensorwise")), FLOAT8),
    (BY_NAME["one rank"].over("float8 rowwise", **_float8("rowwise")), FLOAT8),
    (BY_NAME["tp 2 x dp 2"].over("float8 tensorwise", **_float8("tensorwise")), FLOAT8),
    (BY_NAME["pp 2 1F1B"].over("float8 rowwise", **_float8("rowwise")), FLOAT8),
    (
        BY_NAME["dp 2"].over(
            "float8 gathered",
            **_float8("tensorwise", enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True),
        ),
        FLOAT8,
    ),
)

DETERMINISTIC = tuple(
    row.over("bf16, deterministic", training={"mixed_precision_param": "bfloat16", "deterministic": True})
    for row in (ONE_WITH_EXPERTS, BY_NAME["experts, ep 2"], BY_NAME["tp 2 x dp 2"], BY_NAME["cp 2 ring"])
)


def outcomes(rows: list[Row], gpu: str = GPU) -> dict[str, Outcome]:
    """Row name -> its outcome."""
    return run_suite(rows, gpu, A_LAUNCH)


def kernels(row: Row, gpu: str = GPU) -> dict[str, int]:
    """How often the first rank of `row` calls each operator in one forward; backward, too, must run."""
    plan = compile_row(row, gpu)
    return run_ranks(_count, row.ranks, plan, process_group=False, timeout=300)[0]


def _count(rank: Rank, plan: Plan) -> dict[str, int]:
    import torch

    from tests.runtime.test_apply import CountOps
    from titan_runtime import distributed
    from titan_runtime.apply import build_model
    from titan_runtime.mesh import build_mesh

    device = distributed.rank_device(plan.cluster.gpu)
    distributed.start(rank.store, rank.index, rank.world_size, plan.cluster.gpu, device, plan.job.comm)
    module = build_model(plan, build_mesh(plan.mesh, device.type), device)
    tokens = torch.arange(plan.batch.seq_len // plan.mesh.cp, device=device).repeat(2, 1)
    with CountOps() as count:
        result = module(tokens).float().square().mean()
    result.backward()
    return dict(count.counts)
