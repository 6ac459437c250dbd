"""Mixtures of experts in plans: what they hold, cost and are cut into, and what is said about them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests import plans
from titan_planner.cli import main
from titan_planner.cost.flops import flops_per_token
from titan_planner.cost.memory import block_activation_bytes, module_numel, sharded_numel
from titan_planner.ir.codec import decode, encode
from titan_planner.ir.diff import diff
from titan_planner.ir.errors import InvariantError, SpecError
from titan_planner.ir.inventory import (
    buffers,
    fsdp_dim,
    linear_modules,
    module_names,
    muon_parameters,
    num_active_params,
    num_params,
    parameters,
)
from titan_planner.ir.model import Block, Blocks, Gqa, Model, Moe, RmsNorm, Rope, SwiGlu
from titan_planner.ir.parallel import ExpertParallel
from titan_planner.ir.plan import Plan
from titan_planner.ir.request import ModelOverrides, MoeOverrides
from titan_planner.ir.validate import unknown_fields
from titan_planner.ir.verify import verify
from titan_planner.models import MODELS, find_model, override
from titan_planner.render.asked import Asked, asked
from titan_planner.render.show import show
from titan_planner.sharding import expert_rows, local_shape, tensor_parallel_rows

from .builders import MOE, compile_text

DEBUG = MODELS["debug_moe"]["debugmodel"]
PLAN = compile_text(MOE)


def llama4_scout() -> Model:
    """The text part of Llama 4 17B x 16E, whose counts are published."""
    attention = Gqa(num_heads=40, num_kv_heads=8, head_dim=128, rope=Rope(theta=500000.0, scaling=None))
    mixture = plans.moe(num_experts=16, hidden_dim=8192, top_k=1, route_norm=False, score_before_experts=True)
    block = Block(attention=attention, feed_forward=mixture, norm=RmsNorm(eps=1e-5))
    return replace(DEBUG, vocab_size=202048, dim=5120, blocks=(Blocks(repeat=48, block=block),))


# ------------------------------------------------------------------ the description


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"top_k": 9}, "more than the 8 experts"),
        ({"top_k": 1}, "the router would never learn"),
        ({"num_groups": 4}, "go together"),
        ({"num_limited_groups": 1}, "go together"),
        ({"num_groups": 3, "num_limited_groups": 1}, "does not divide the 8 experts"),
        ({"num_groups": 8, "num_limited_groups": 2}, "judged by two"),
        ({"num_groups": 4, "num_limited_groups": 5}, "more than the 4 groups"),
        ({"num_groups": 4, "num_limited_groups": 1, "top_k": 3}, "fewer than the `top_k` 3"),
        ({"load_balance_coeff": 0.0}, "greater than 0"),
        ({"num_experts": 0}, "at least 1"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(changes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(InvariantError, match=fragment):
        plans.moe(**changes)


def test_a_model_of_several_kinds_survives_the_codec() -> None:
    assert decode(Model, encode(DEBUG)) == DEBUG
    assert unknown_fields("plan", encode(PLAN)) == ()


def test_a_field_of_another_kind_is_unknown() -> None:
    data = encode(PLAN)
    data["model"]["blocks"][0]["block"]["feed_forward"]["top_k"] = 2
    assert [entry.path[-1] for entry in unknown_fields("plan", data)] == ["top_k"]


# ------------------------------------------------------------------ counts


def test_counts_are_those_written_out() -> None:
    attention, norms, dense, outer = 4 * 256 * 256, 2 * 256, 3 * 768 * 256, 2 * 2048 * 256 + 256
    expert, router, shared = 3 * 256 * 256, 8 * 256, 3 * 256 * 256
    assert num_params(DEBUG) == outer + 6 * (attention + norms) + dense + 5 * (8 * expert + router + shared)
    assert num_params(DEBUG) == sum(p.numel for p in parameters(DEBUG)) == 12_072_192
    assert num_active_params(DEBUG) == num_params(DEBUG) - 5 * 6 * expert
    assert flops_per_token(DEBUG, 128) == 6 * (num_active_params(DEBUG) - 2048 * 256) + 6 * 6 * 16 * 2 * 16 * 128


def test_counts_are_those_published() -> None:
    assert num_params(llama4_scout()) / 1e9 == pytest.approx(107.77, abs=0.005)
    assert num_active_params(llama4_scout()) / 1e9 == pytest.approx(17.17, abs=0.005)


def test_names_and_shapes() -> None:
    shapes = {p.fqn: p.shape for p in parameters(DEBUG) if p.fqn.startswith("layers.1.moe")}
    assert shapes == {
        "layers.1.moe.router.gate.weight": (8, 256),
        "layers.1.moe.experts.w1": (8, 256, 256),
        "layers.1.moe.experts.w2": (8, 256, 256),
        "layers.1.moe.experts.w3": (8, 256, 256),
        "layers.1.moe.shared_experts.w1.weight": (256, 256),
        "layers.1.moe.shared_experts.w2.weight": (256, 256),
        "layers.1.moe.shared_experts.w3.weight": (256, 256),
    }
    assert [(b.fqn, b.shape) for b in buffers(DEBUG)] == [(f"layers.{i}.moe.expert_bias", (8,)) for i in range(1, 6)]
    names = module_names(DEBUG)
    assert "layers.1.moe.experts" in names and "layers.1.moe.experts.w1" not in names
    assert "layers.0.feed_forward.w1" in names and "layers.1.feed_forward" not in names
    assert not any("experts." in name and "shared" not in name for name in linear_modules(DEBUG))


# ------------------------------------------------------------------ layouts


def test_the_compiled_plan_spreads_the_experts() -> None:
    assert (PLAN.mesh.dp_shard, PLAN.mesh.ep, PLAN.mesh.efsdp) == (4, 2, 2)
    assert [(row.module, row.axis, row.weight) for row in PLAN.sharding] == [
        (f"layers.*.moe.experts.{name}", "ep", "S(0)") for name in ("w1", "w2", "w3")
    ]
    assert verify(PLAN) == ()


def test_the_compiled_plan_cuts_experts_inside_where_that_is_pinned() -> None:
    pins = "expert_parallel_degree: 2, tensor_parallel_degree: 2, expert_tensor_parallel_degree: 2"
    plan = compile_text(MOE.replace("expert_parallel_degree: 2", pins))
    assert (plan.mesh.dp_shard, plan.mesh.efsdp) == (2, 1)
    assert [row.weight for row in plan.sharding if row.axis == "etp"] == ["S(1)", "S(2)", "S(1)"]
    assert verify(plan) == ()
    rows = tuple(replace(row, weight="S(0)") if row.axis == "etp" else row for row in plan.sharding)
    assert [complaint.rule for complaint in verify(replace(plan, sharding=rows))] == ["ep-experts"]
    line = next(line for line in show(plan, 120).splitlines() if "moe.experts.w2" in line)
    assert line.split() == [
        "moe.experts.w2",
        "[8,",
        "256,",
        "256]",
        "->",
        "[4,",
        "256,",
        "128]",
        "ep",
        "S(0)",
        "etp",
        "S(2)",
    ]


@pytest.mark.parametrize(
    ("degree", "fragment"), [(3, "does not divide dp_shard x cp x tp"), (8, "does not divide dp_shard x cp x tp")]
)
def test_an_ep_that_does_not_fit_is_refused_at_its_place(degree: int, fragment: str) -> None:
    with pytest.raises(SpecError) as caught:
        compile_text(MOE.replace("expert_parallel_degree: 2", f"expert_parallel_degree: {degree}"))
    assert fragment in caught.value.complaints[0].message
    assert caught.value.complaints[0].address == "parallelism.expert_parallel_degree"


def test_ep_is_refused_where_there_are_no_experts() -> None:
    with pytest.raises(SpecError, match="the model has no experts"):
        compile_text(MOE.replace("debug_moe", "llama3"))


def test_options_of_routing_are_pinned_by_the_spec() -> None:
    assert (PLAN.expert_parallel.capacity_factor, PLAN.expert_parallel.force_load_balance) == (None, False)
    pins = "expert_capacity_factor: 1.25, moe_force_load_balance: true, expert_parallel_comm_backend: deepep"
    gpus = MOE.replace("gpu: cpu", "gpu: h100-sxm-80gb")
    plan = compile_text(gpus.replace("expert_parallel_degree: 2", f"expert_parallel_degree: 2, {pins}"))
    assert plan.expert_parallel == ExpertParallel(comm_backend="deepep", capacity_factor=1.25, force_load_balance=True)
    assert verify(plan) == ()
    assert asked(plan, "expert_parallel.capacity_factor") == Asked("parallelism.expert_capacity_factor", 1.25, "pinned")
    assert asked(PLAN, "expert_parallel.force_load_balance") == Asked(
        "parallelism.moe_force_load_balance", False, "default"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expert_capacity_factor", "1.5"),
        ("moe_force_load_balance", "true"),
        ("expert_parallel_comm_backend", "hybridep"),
    ],
)
def test_options_of_routing_are_refused_where_there_are_no_experts(name: str, value: str) -> None:
    with pytest.raises(SpecError, match="the model has no experts") as caught:
        compile_text(
            MOE.replace("debug_moe", "llama3").replace("expert_parallel_degree: 2", f"{name}: {value}"),
        )
    assert caught.value.complaints[0].address == f"parallelism.{name}"


def test_what_checkpointing_keeps_of_experts_is_counted() -> None:
    block = list(DEBUG.layers())[1]
    plan = compile_text(MOE + "activation_checkpoint: {mode: selective}\n")
    policy = plan.activation_checkpoint.policy("selective_op")
    assert policy is not None
    assert "aten._grouped_mm.default" in policy.save_ops
    without = replace(policy, save_ops=tuple(op for op in policy.save_ops if "grouped" not in op))
    sent = plan.batch.microbatch_size * plan.batch.seq_len * block.feed_forward.top_k
    # The outputs of w1 and w3 are as wide as an expert, that of w2 as the model; float32.
    kept = sent * 4 * (2 * block.feed_forward.hidden_dim + DEBUG.dim)
    assert block_activation_bytes(plan, block, policy) - block_activation_bytes(plan, block, without) == kept


def test_muon_keeps_one_moment_of_experts_on_the_ranks_that_share_them() -> None:
    adam, muon = (compile_text(MOE + f"optimizer: {{name: {name}}}\n") for name in ("AdamW", "Muon"))
    assert adam.estimate is not None
    assert muon.estimate is not None
    held = sum(sharded_numel(adam).values())
    matrices = muon_parameters(DEBUG)
    once = sum(
        p.numel / (adam.mesh.ep * adam.mesh.efsdp if p.is_expert else adam.mesh.fsdp)
        for p in parameters(DEBUG)
        if p.fqn in matrices
    )
    assert adam.estimate.memory[0].optimizer_gib == pytest.approx(2 * held * 4 / 2**30, abs=6e-4)
    assert muon.estimate.memory[0].optimizer_gib == pytest.approx((2 * held - once) * 4 / 2**30, abs=6e-4)


def test_tensor_parallel_rows_name_modules_that_exist_and_every_weight() -> None:
    for model in (DEBUG, replace(DEBUG, blocks=DEBUG.blocks[1:]), MODELS["llama3"]["debugmodel"]):
        mesh = plans.mesh(2, tp=2, ep=2, etp=2)
        rows = tensor_parallel_rows(model, sequence_parallel=True, loss_parallel=True) + expert_rows(model, mesh)
        plan = replace(plans.tiny_plan(plans.mesh(2), model=model), mesh=mesh, sharding=rows)
        broken = [c for c in verify(replace(plan, cluster=plans.cluster(4))) if c.rule == "sharding-rows"]
        assert broken == []
        axes = {row.module.replace("layers.*.", ""): row.axis for row in rows}
        for parameter in parameters(model):
            assert parameter.target.split(".", 2)[-1] in axes or parameter.target in axes, parameter.fqn


@pytest.mark.parametrize(
    ("degrees", "w1", "gate", "shared"),
    [
        ({"dp_shard": 4, "ep": 2}, (4, 256, 256), (8, 256), (256, 256)),
        ({"dp_shard": 2, "tp": 2}, (8, 256, 256), (8, 256), (128, 256)),
        ({"dp_shard": 2, "tp": 2, "ep": 4}, (2, 256, 256), (8, 256), (128, 256)),
        ({"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}, (4, 128, 256), (8, 256), (128, 256)),
    ],
)
def test_local_shapes(
    degrees: dict[str, int], w1: tuple[int, ...], gate: tuple[int, ...], shared: tuple[int, ...]
) -> None:
    shapes = {p.fqn: local_shape(p, plans.mesh(**degrees)) for p in parameters(DEBUG)}
    assert shapes["layers.1.moe.experts.w1"] == w1
    assert shapes["layers.1.moe.router.gate.weight"] == gate
    assert shapes["layers.1.moe.shared_experts.w1.weight"] == shared


def test_experts_are_sharded_inside_where_they_are_fewer_than_ranks() -> None:
    w1, norm = (p for p in parameters(DEBUG) if p.fqn in ("layers.1.moe.experts.w1", "layers.1.ffn_norm.weight"))
    assert [fsdp_dim(w1, plans.mesh(ranks)) for ranks in (1, 2, 8, 16, 256)] == [0, 0, 0, 1, 1]
    assert fsdp_dim(w1, plans.mesh(512)) == 0  # torch cuts other dims evenly only
    assert fsdp_dim(w1, plans.mesh(16, ep=8)) == 1
    assert fsdp_dim(norm, plans.mesh(512)) == 0


def test_every_rank_holds_its_share_of_the_weights() -> None:
    for plan in (PLAN, replace(PLAN, mesh=plans.mesh(4)), replace(PLAN, mesh=plans.mesh(2, 2, ep=2))):
        held = sum(sharded_numel(plan).values()) * plan.mesh.world_size / plan.mesh.dp_replicate
        assert held == pytest.approx(num_params(DEBUG))
    assert module_numel(PLAN)["layers.1"] < module_numel(replace(PLAN, mesh=plans.mesh(4)))["layers.1"]


def test_activations_grow_with_the_experts_that_a_token_meets() -> None:
    policy = PLAN.activation_checkpoint.policies[0]

    def kept(**changes: Any) -> float:
        block = DEBUG.blocks[1].block
        assert isinstance(block.feed_forward, Moe)
        return block_activation_bytes(PLAN, replace(block, feed_forward=replace(block.feed_forward, **changes)), policy)

    # Eager float32 on a CPU, dim and hidden 256. A choice keeps its row and two copies of its result (one float32 anyway),
    # four results inside the expert, three numbers of where it goes (int64, one more with ep), and two scores.
    tokens = PLAN.batch.microbatch_size * PLAN.batch.seq_len
    assert PLAN.fsdp.param_dtype == "float32" and PLAN.mesh.ep == 2
    choice = 4 * 256 * (1 + 2 + 4) + 4 * 256 + 8 * 4 + 4 * 2
    assert kept(top_k=3) - kept(top_k=2) == tokens * choice
    assert kept(num_shared_experts=2) - kept(num_shared_experts=1) == tokens * 4 * 4 * 256
    # Of more experts only the router's scores grow, and the ends of the rows of those that are here.
    assert kept(num_experts=64) - kept(num_experts=8) == tokens * 4 * 56 + 4 * 56 / 2


# ------------------------------------------------------------------ what is said


def test_float8_leaves_routers_and_experts_alone_and_says_why() -> None:
    plan = compile_text(MOE + "float8: {recipe: tensorwise, emulate: true}\n")
    assert not any("router" in name or ".experts" in name for name in plan.float8.converted)
    assert any("shared_experts" in name for name in plan.float8.converted)
    reasons = {skipped.module: skipped.reason for skipped in plan.float8.skipped}
    assert reasons["layers.1-5.moe.router.gate"] == "routers compute in float32"
    said = {remark.address: remark.message for remark in plan.remarks if remark.by == "filter_float8"}
    assert said["layers.1-5.moe.experts"] == "no Float8: experts are grouped products over stacked weights, not linears"


MXFP8 = MOE.replace("global_batch_size: 8", "global_batch_size: 8, mixed_precision_param: bfloat16")


def test_experts_are_converted_where_the_spec_names_them() -> None:
    plan = compile_text(MXFP8 + "float8: {recipe: mxfp8, emulate: true, grouped_mm_fqns: [layers.2., layers.5.]}\n")
    assert plan.float8.experts == ("layers.2.moe.experts", "layers.5.moe.experts")
    assert verify(plan) == ()
    kept = [r.address for r in plan.remarks if r.kind == "missed" and "grouped_mm_fqns does not name" in r.message]
    assert kept == ["layers.1.moe.experts", "layers.3-4.moe.experts"]
    assert "experts of 2 layers" in show(plan, 160)
    wide = compile_text(MOE + "float8: {recipe: mxfp8, emulate: true, grouped_mm_fqns: [experts]}\n")
    assert wide.float8.experts == ()
    assert any("in float32" in r.message for r in wide.remarks if r.address == "layers.1-5.moe.experts")


@pytest.mark.parametrize(
    ("section", "address", "fragment"),
    [
        ("recipe: tensorwise, grouped_mm_fqns: [experts]", "float8.grouped_mm_fqns", "in the recipe mxfp8 only"),
        ("recipe: mxfp8, grouped_mm_fqns: [exprts]", "float8.grouped_mm_fqns[0]", "`exprts` matches no experts"),
    ],
)
def test_experts_that_cannot_be_converted_are_refused(section: str, address: str, fragment: str) -> None:
    with pytest.raises(SpecError, match=fragment) as caught:
        compile_text(MXFP8 + f"float8: {{{section}, emulate: true}}\n")
    assert caught.value.complaints[0].address == address


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"recipe": "rowwise"}, "in the recipe mxfp8 only, not rowwise"),
        ({"experts": ("layers.0.moe.experts",)}, "matches no experts"),
        ({}, "grouped products take bfloat16"),
    ],
)
def test_plans_whose_experts_cannot_be_converted_are_refused(changes: dict[str, Any], fragment: str) -> None:
    float8 = replace(
        PLAN.float8, **{"recipe": "mxfp8", "emulate": True, "experts": ("layers.1.moe.experts",), **changes}
    )
    assert PLAN.fsdp.param_dtype == "float32"
    found = [c for c in verify(replace(PLAN, float8=float8)) if c.rule == "float8-experts"]
    assert len(found) == 1
    assert re.search(fragment, found[0].message)


def test_show_tells_how_experts_are_cut() -> None:
    line = next(line for line in show(PLAN, 120).splitlines() if "moe.experts.w1" in line)
    assert line.split() == [
        "moe.experts.w1",
        "[8,",
        "256,",
        "256]",
        "->",
        "[2,",
        "256,",
        "256]",
        "ep",
        "S(0)",
        "efsdp",
        "S(0)",
    ]


@pytest.mark.parametrize(
    "target",
    ["layers.1.moe.experts", "layers.1.moe.experts.w1", "layers.1.moe.router.gate", "layers.0", "layers.1", "mesh.ep",
     "model.layers.3", "model.blocks[1].block.feed_forward.top_k", "expert_parallel.capacity_factor", "sharding[0]"],
)  # fmt: skip
def test_explain_knows_every_part(target: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = plans.write_plan(PLAN, tmp_path / "plan.json")
    assert main(["explain", str(path), target]) == 0
    assert target.split(".")[-1].split("[")[0] in capsys.readouterr().out


def test_a_diff_tells_a_change_of_routing_from_a_change_of_weights() -> None:
    def changed(**changes: Any) -> Plan:
        dense, mixed = DEBUG.blocks
        layer = replace(mixed.block.feed_forward, **changes)
        return replace(
            PLAN, model=replace(DEBUG, blocks=(dense, replace(mixed, block=replace(mixed.block, feed_forward=layer))))
        )

    assert {c.consequence for c in diff(PLAN, changed(top_k=3)).changes} == {"numerics"}
    assert {c.consequence for c in diff(PLAN, changed(num_experts=16)).changes} == {"model"}
    dense_only = replace(PLAN, model=replace(DEBUG, blocks=(replace(DEBUG.blocks[0], repeat=6),)))
    assert "model" in {c.consequence for c in diff(PLAN, dense_only).changes}


def test_routing_is_overridden_in_every_layer_with_experts() -> None:
    text = MOE.replace(
        "flavor: debug}",
        "flavor: debug, overrides: {moe: {num_experts: 16, top_k: 4, num_groups: 4, num_limited_groups: 2, "
        "score_function: softmax, score_before_experts: true, route_norm: false, route_scale: 2.5, "
        "num_shared_experts: 0, hidden_dim: 128, load_balance_coeff: none}}}",
    )
    layers = [block.feed_forward for block in compile_text(text).model.layers()]
    assert isinstance(layers[0], SwiGlu)
    assert set(layers[1:]) == {
        Moe(
            num_experts=16,
            hidden_dim=128,
            top_k=4,
            num_shared_experts=0,
            score_function="softmax",
            score_before_experts=True,
            route_norm=False,
            route_scale=2.5,
            num_groups=4,
            num_limited_groups=2,
            load_balance_coeff=None,
        )
    }


def test_groups_can_be_taken_away() -> None:
    grouped = override(
        find_model("debug_moe", "debug"), ModelOverrides(moe=MoeOverrides(num_groups=4, num_limited_groups=2))
    )
    plain = override(grouped, ModelOverrides(moe=MoeOverrides(num_groups="none")))
    assert plain == find_model("debug_moe", "debug")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("{family: llama3, flavor: debug, overrides: {moe: {top_k: 1}}}", "the model has none"),
        ("{family: debug_moe, flavor: debug, overrides: {moe: {top_k: 9}}}", "`top_k` 9 is more than the 8 experts"),
        (
            "{family: debug_moe, flavor: debug, overrides: {moe: {num_groups: 3, num_limited_groups: 2}}}",
            "does not divide",
        ),
    ],
)
def test_an_impossible_routing_is_said_at_its_place(model: str, words: str) -> None:
    text = MOE.replace("{family: debug_moe, flavor: debug}", model).replace("{expert_parallel_degree: 2}", "auto")
    with pytest.raises(SpecError, match=words) as failure:
        compile_text(text)
    assert "spec.yaml:3:" in str(failure.value)


def test_an_override_of_the_width_is_of_dense_layers() -> None:
    wide = override(find_model("debug_moe", "debug"), ModelOverrides(hidden_dim=512))
    assert [run.block.feed_forward.hidden_dim for run in wide.blocks] == [512, 256]
