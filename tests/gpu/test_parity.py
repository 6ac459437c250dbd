"""On GPUs a plan has the losses of one CPU process in float32, as far as its precision allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import plans
from tests.gpu.rows import ROWS, Row, bf16, gpu_plan, section
from tests.harness import Rank, run_ranks
from tests.runtime.test_parity import Curve, parity_plan, reference, run
from titan_planner.ir.plan import Plan


def on_gpu(rank: Rank, plan: Plan) -> Curve | str:
    """What `run` does on a CPU, with NCCL; or why this GPU cannot."""
    import torch

    from titan_runtime import distributed
    from titan_runtime.apply.float8 import float8_problems

    capability = torch.cuda.get_device_capability(rank.index) if plan.cluster.gpu.device == "cuda" else None
    lacking = float8_problems(plan, True, capability)
    if lacking:
        return lacking[0]
    device = distributed.rank_device(plan.cluster.gpu)
    distributed.start(rank.store, rank.index, rank.world_size, plan.cluster.gpu, device, plan.job.comm)
    return run(rank, plan, False)


def curves(plan: Plan) -> list[Curve]:
    found = run_ranks(on_gpu, plan.mesh.world_size, plans.on_disk(plan), process_group=False, timeout=300.0)
    if isinstance(found[0], str):
        pytest.skip(found[0])
    return found


@pytest.fixture(scope="module")
def expected() -> Curve:
    return reference(parity_plan())


@pytest.mark.parametrize(("row", "world"), [pytest.param(row, row.world, id=row.name) for row in ROWS])
def test_losses_are_those_of_one_cpu_process(row: Row, world: int, expected: Curve) -> None:
    found = curves(row.plan)
    assert all(curve.losses == found[0].losses for curve in found)
    assert found[0].losses == pytest.approx(expected.losses, rel=row.tolerance)
    assert found[0].losses[-1] < found[0].losses[0] - 0.2


@pytest.mark.parametrize("world", [1, 2])
def test_the_same_plan_has_the_same_bits(world: int) -> None:
    plan = gpu_plan(plans.mesh(world), 4, bf16, section("seeds", deterministic=True))
    first, second = (run_ranks(trained, world, plans.on_disk(plan), process_group=False)[0] for _ in range(2))
    assert first == second


def trained(rank: Rank, plan: Plan) -> list[float]:
    import torch

    from titan_runtime.train import _seed

    _seed(plan, rank.index)
    assert torch.are_deterministic_algorithms_enabled()
    return on_gpu(rank, plan).losses


@pytest.mark.parametrize("world", [1, 2])
def test_muon_on_a_gpu_is_near_muon_on_a_cpu(world: int) -> None:
    plan = gpu_plan(plans.mesh(world), 4, section("optimizer", name="Muon"))
    on_cpu = replace(plan, cluster=plans.cluster(world))
    wanted = run_ranks(run, world, plans.on_disk(on_cpu), False)[0]
    assert curves(plan)[0].losses == pytest.approx(wanted.losses, rel=2e-3)


@pytest.mark.parametrize("world", [1])
def test_offloaded_weights_and_moments_are_in_host_memory(world: int) -> None:
    def places(rank: Rank, plan: Plan) -> set[str]:
        import torch

        from titan_runtime import distributed

        device = distributed.rank_device(plan.cluster.gpu)
        distributed.start(rank.store, rank.index, rank.world_size, plan.cluster.gpu, device, plan.job.comm)
        found: set[str] = set()

        def look(module: torch.nn.Module) -> None:
            found.update(p.to_local().device.type for p in module.parameters())
            assert all(table.table.device.type == "cuda" for table in module.rotary)

        run(rank, plan, False, look)
        return found

    plan = gpu_plan(plans.mesh(world), 4, section("fsdp", cpu_offload=True))
    assert run_ranks(places, world, plans.on_disk(plan), process_group=False)[0] == {"cpu"}
