"""Elements that a rank holds of every top-level module are those of the built, cut and sharded modules.

Ranks beyond the one at hand are those of torch's fake process group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from tests.contract.test_saved_activations import llama, planned
from tests.harness import run_ranks
from tests.plans import mesh, tiny_moe_model
from titan_planner.cost.memory import module_numel, sharded_numel
from titan_planner.ir.plan import Plan


def built(rank: Any, plans: Sequence[Plan]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Of the first rank of each plan: elements by top-level module before FSDP shards them, and after."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from titan_runtime.apply import build_model
    from titan_runtime.apply.experts import apply_experts
    from titan_runtime.apply.tensor import apply_tensor
    from titan_runtime.mesh import build_expert_mesh, build_mesh
    from titan_runtime.modules import build

    def counted(module: torch.nn.Module) -> dict[str, int]:
        found: Counter[str] = Counter()
        for name, parameter in module.named_parameters():
            parts = name.split(".")
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            found[".".join(parts[:2]) if parts[0] == "layers" else parts[0]] += local.numel()
        return dict(found)

    results = []
    for plan in plans:
        size = plan.mesh.world_size
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            world = build_mesh(plan.mesh, "cpu")
            cut = build(plan.model, seq_len=plan.batch.seq_len)
            apart = plan.mesh.ep * plan.mesh.tp > 1 and plan.model.family == "debug_moe"
            apply_experts(cut, plan, world, build_expert_mesh(plan.mesh, "cpu") if apart else None)
            apply_tensor(cut, plan, world)
            whole = build_model(plan, world, torch.device("cpu"))
            results.append((counted(cut), counted(whole)))
        finally:
            dist.destroy_process_group()
    return results


def test_parameters_of_a_rank_are_exact() -> None:
    """tp 1, 2 and 4 (KV heads twice), with and without FSDP, HSDP, and experts on ranks of their own."""
    small, medium, experts = llama("tiny"), llama("medium"), tiny_moe_model(hidden_dim=32)
    plans = [
        planned(small, dtype="float32"),
        *(planned(model, mesh(tp=tp), dtype="float32") for model in (small, medium) for tp in (2, 4)),
        planned(small, mesh(tp=8), dtype="float32", kv_replicas=2),
        planned(medium, mesh(dp_shard=4, tp=2), dtype="float32"),
        planned(medium, mesh(dp_shard=2, dp_replicate=2, cp=2), dtype="float32"),
        planned(experts, mesh(dp_shard=4, ep=2), dtype="float32"),
        planned(experts, mesh(dp_shard=2, tp=2, ep=2, etp=2), dtype="float32"),
        planned(experts, mesh(dp_shard=2, tp=2, ep=4), dtype="float32"),
    ]
    wrong = []
    for plan, (cut, held) in zip(plans, run_ranks(built, 1, plans, process_group=False, timeout=120.0)[0], strict=True):
        expected, sharded = module_numel(plan), sharded_numel(plan)
        for name, count in cut.items():
            if expected[name] != count:
                wrong.append(f"{plan.mesh}: {name} has {count} elements, counted {expected[name]}")
        for name, count in held.items():
            # The first rank has the rows that do not divide; counted is the mean over ranks.
            if not 0 <= count - sharded[name] <= 0.02 * count + plan.model.dim:
                wrong.append(f"{plan.mesh}: {name} keeps {count} elements, counted {sharded[name]:.1f}")
    assert not wrong, "\n".join(wrong)
