"""The terms that `explain` gives of an estimate's numbers: they add up to them, and name where each is from."""

from __future__ import annotations

import functools
from dataclasses import asdict

import pytest

from tests.unit.builders import PIPELINE, TINY, compile_text
from titan_planner.cost.reserve import reserve
from titan_planner.cost.step import step_seconds
from titan_planner.ir.plan import Plan
from titan_planner.render.derivation import derivation
from titan_planner.render.explain import explain
from titan_planner.render.memory_terms import memory_terms
from titan_planner.render.terms import parameter_terms, step_terms

DENSE = """
spec_version: 1
model: {family: llama3, flavor: %s}
cluster: {gpu: h100-sxm-80gb, nodes: %d, gpus_per_node: 8, inter_node: ib-ndr-400, price_per_gpu_hour: 2}
training: {seq_len: %d, local_batch_size: 2, token_budget: 1e12}
"""

SPECS = {
    "1B": DENSE % ("1B", 1, 4096),
    "1B, small and eager": DENSE.replace("price_per", "efficiency: {launch_us: 50}, price_per") % ("1B", 1, 64)
    + "compile: {enable: false}\n",
    "1B, budget": DENSE % ("1B", 1, 4096)
    + "compile: {enable: true}\nactivation_checkpoint: {mode: memory_budget, memory_budget: 0.5}\n",
    "1B, DDP and Muon": DENSE % ("1B", 1, 512)
    + "parallelism: {data_parallel_shard_degree: 1, data_parallel_replicate_degree: 8}\noptimizer: {name: Muon}\n",
    "8B": DENSE
    % ("8B", 2, 4096)
    + "parallelism: {tensor_parallel_degree: 4, context_parallel_degree: 2}\nactivation_checkpoint: {mode: selective}\n"
    "float8: {recipe: rowwise}\nloss: {chunks: 4}\noptimizer: {implementation: foreach}\n",
    "8B, pipeline": PIPELINE,
    "8B, split backward": PIPELINE.replace("Interleaved1F1B", "InterleavedZeroBubble").replace("selective", "full"),
    "MoE": """
spec_version: 1
model:
  family: debug_moe
  flavor: debug
  overrides: {dim: 2048, num_heads: 16, num_kv_heads: 16, moe: {num_experts: 64, hidden_dim: 1024, top_k: 6}, max_seq_len: 8192}
cluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}
training: {seq_len: 4096, local_batch_size: 4}
parallelism: {expert_parallel_degree: 8}
limits: {expert_imbalance: 2.0}
activation_checkpoint: {mode: full}
""",
    "CPU": TINY,
}


@functools.cache
def plan_of(name: str) -> Plan:
    return compile_text(SPECS[name])


@pytest.mark.parametrize("name", SPECS)
def test_terms_of_the_step_add_up_to_its_parts(name: str) -> None:
    plan = plan_of(name)
    assert plan.estimate is not None and plan.estimate.step_time is not None
    found = step_seconds(plan)
    for part, recorded in asdict(plan.estimate.step_time).items():
        terms = step_terms(plan, found, part)
        assert sum(term.amount for term in terms) == pytest.approx(recorded, rel=0.002, abs=1e-3), part
    assert sum(term.amount for term in parameter_terms(plan)) == plan.estimate.num_params


@pytest.mark.parametrize("name", SPECS)
def test_terms_of_memory_add_up_to_its_parts(name: str) -> None:
    plan = plan_of(name)
    assert plan.estimate is not None
    told = memory_terms(plan)
    assert [(stage, moment) for stage, moment, _ in told] == [(m.stage, m.moment) for m in plan.estimate.memory]
    for (_, _, parts), recorded in zip(told, plan.estimate.memory, strict=True):
        for part, terms in parts.items():
            assert sum(term.amount for term in terms) == pytest.approx(getattr(recorded, part), abs=0.002), part
        assert sum(term.amount for terms in parts.values() for term in terms) == pytest.approx(
            recorded.total_gib, abs=0.01
        )


def test_launches_and_hidden_collectives_are_among_them() -> None:
    eager = plan_of("1B, small and eager")
    assert eager.estimate is not None and eager.estimate.step_time is not None
    assert eager.estimate.step_time.launch_ms > 0
    names = [term.name for term in step_terms(plan_of("1B"), step_seconds(plan_of("1B")), "data_parallel_ms")]
    assert "hidden" in names


def test_the_output_projection_is_a_matmul_and_the_loss_is_bound_by_memory() -> None:
    plan = plan_of("8B")
    for part, name in (("matmul_ms", "norm, output, loss"), ("memory_bound_ms", "tok_embeddings")):
        assert name in dict(derivation(plan, f"step_time.{part}"))


def test_the_busiest_expert_rank_is_reckoned_with() -> None:
    facts = dict(derivation(plan_of("MoE"), "step_time.expert_parallel_ms"))
    exchanged = [words for words in facts.values() if "ranks of ep" in words]
    assert exchanged
    assert all("x 2 for the busiest expert rank" in words for words in exchanged)
    assert not any(name.endswith(" step") for name in facts), "what the optimizer waits for is told there"


@pytest.mark.parametrize("address", ["memory", "memory.0", "memory.0.reserve_gib", "fits"])
def test_every_line_of_the_reserve_is_told_with_its_source(address: str) -> None:
    plan = plan_of("1B")
    text = " ".join(explain(plan, f"estimate.{address}", width=100).split())
    lines = reserve(plan)
    assert len(lines) >= 3
    for line in lines:
        assert line.name in text
        assert line.source in text


def test_memory_is_told_in_elements_units_and_microbatches() -> None:
    facts = dict(derivation(plan_of("8B, pipeline"), "memory"))
    assert "8 microbatches in flight" in facts["stage 0 activ: layers.0-3 (selective_op)"]
    assert "x 2 x 4 bytes (float32)" in facts["stage 0 optim: two moments"]
    assert "layers.17-20" in facts["stage 0 gathered: units that stay gathered"]
    assert "ends of stages" in facts["stage 0 comm: pipeline's buffers"]


def test_every_number_of_the_estimate_has_a_derivation() -> None:
    plan = plan_of("1B")
    assert plan.estimate is not None
    told_by_others = {"bottleneck", "memory_available_gib"}
    for name in type(plan.estimate).__dataclass_fields__:
        if name not in told_by_others:
            assert list(derivation(plan, name)), name
    assert "GPU-hours x 2 = " in dict(derivation(plan, "training_cost"))["cost"]
    assert "needs a `training.token_budget`" in dict(derivation(plan_of("8B, pipeline"), "training_cost"))["cost"]
