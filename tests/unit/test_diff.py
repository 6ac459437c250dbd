"""What changes between two plans, what that means for a running job, and that no field of the plan is forgotten."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest

from tests import plans
from tests.unit.plan_factory import FULL, POLICIES, estimate, llama, llama_405b, set_at, with_checkpoint
from titan_planner.ir.codec import decode, digest, encode
from titan_planner.ir.diff import (
    CONSEQUENCES,
    KEYS,
    LOUDEST_FIRST,
    Change,
    consequence_of,
    diff,
    expand,
    leaf_patterns,
)
from titan_planner.ir.execution import SkippedLinear
from titan_planner.ir.fqn import select
from titan_planner.ir.inventory import linear_modules
from titan_planner.ir.job import ParamGroup
from titan_planner.ir.model import Blocks
from titan_planner.ir.parallel import FsdpUnit
from titan_planner.ir.plan import Plan, Remark
from titan_planner.ir.record import field_descriptors, field_types

LEAVES = tuple(leaf_patterns(Plan))

# Sections in which every field has the same consequence by its nature, whatever is added to them.
WHOLE_SECTIONS = {
    "cluster.**",
    "request.**",
    "estimate.**",
    "remarks.**",
    "job.checkpoint.**",
    "job.metrics.**",
    "job.profiling.**",
    "job.comm.**",
    "job.validation.**",
}


def only(plan_a: Plan, plan_b: Plan) -> Change:
    """The one change that matters between two plans."""
    changes = [change for change in diff(plan_a, plan_b).changes if change.consequence != "none"]
    assert len(changes) == 1, [change.address for change in changes]
    return changes[0]


# ------------------------------------------------------------------ the table


def test_every_leaf_of_the_plan_has_an_explicit_consequence() -> None:
    forgotten = []
    for leaf in LEAVES:
        try:
            row = consequence_of(leaf)
        except KeyError:
            forgotten.append(leaf)
            continue
        if row[0] != leaf and row[0] not in WHOLE_SECTIONS:
            forgotten.append(f"{leaf} only by {row[0]}")
    assert forgotten == []
    assert len(LEAVES) > 150


def test_a_new_field_is_noticed() -> None:
    with pytest.raises(KeyError):
        consequence_of("mesh.a_new_axis")
    with pytest.raises(KeyError):
        consequence_of("optimizer.a_new_option")
    with pytest.raises(KeyError):
        consequence_of("a_new_section.anything")


def test_every_row_of_the_table_decides_some_leaf_and_stands_once() -> None:
    winners = {consequence_of(leaf)[0] for leaf in LEAVES}
    assert [row[0] for row in CONSEQUENCES if row[0] not in winners] == []
    assert len({row[0] for row in CONSEQUENCES}) == len(CONSEQUENCES)
    assert all(why and not why.endswith(".") for _, _, why in CONSEQUENCES)


def test_the_most_specific_pattern_wins() -> None:
    assert consequence_of("cluster.gpu.name")[1] == "job"
    assert consequence_of("cluster.gpu.bf16_tflops")[1] == "none"
    assert consequence_of("job.checkpoint.enable")[0] == "job.checkpoint.enable"
    assert consequence_of("job.checkpoint.interval")[0] == "job.checkpoint.**"


@pytest.mark.parametrize(
    ("leaf", "consequence"),
    [
        ("model.vocab_size", "model"),
        ("model.blocks.*.block.attention.rope.theta", "numerics"),
        ("model.max_seq_len", "speed"),
        ("batch.global_batch_size", "numerics"),
        ("batch.local_batch_size", "speed"),
        ("batch.accumulation_steps", "speed"),
        ("batch.microbatch_size", "speed"),
        ("pipeline.schedule", "speed"),
        ("pipeline.stages.*.pp_rank", "reshard"),
        ("layers.*.stage", "reshard"),
        ("layers.*.checkpoint", "speed"),
        ("mesh.dp_shard", "reshard"),
        ("sharding.*.weight", "reshard"),
        ("fsdp.param_dtype", "numerics"),
        ("fsdp.units.*.reshard_after_forward", "speed"),
        ("tensor_parallel.async_tp", "speed"),
        ("tensor_parallel.kv_replicas", "reshard"),
        ("float8.recipe", "numerics"),
        ("compile.enable", "speed"),
        ("lr_schedule.total_steps", "numerics"),
        ("job.steps", "job"),
        ("seeds.seed", "numerics"),
        ("optimizer.implementation", "speed"),
        ("data.dataset", "numerics"),
        ("data.path", "job"),
        ("name", "none"),
        ("remarks.*.message", "none"),
        ("estimate", "none"),
    ],
)
def test_consequences_that_are_easy_to_get_wrong(leaf: str, consequence: str) -> None:
    assert consequence_of(leaf)[1] == consequence


def _decision_leaves(cls: type, prefix: str = "", decided: bool = True) -> Iterator[tuple[str, bool]]:
    labels = field_descriptors(cls)
    for name, hint in field_types(cls).items():
        mine = decided and (name not in labels or labels[name].decision)
        at = f"{prefix}.{name}" if prefix else name
        records = [t for t in (hint, *get_args(hint)) if isinstance(t, type) and dataclasses.is_dataclass(t)]
        for member in records:
            star = ".*" if getattr(hint, "__origin__", None) is tuple else ""
            yield from _decision_leaves(member, at + star, mine)
        if not records:
            yield at, mine


def test_the_table_and_the_digest_agree_on_what_decides_training() -> None:
    """What the digest covers has a consequence for training, and what it leaves out has none."""
    no_consequence = {leaf for leaf, decides in _decision_leaves(Plan) if decides and consequence_of(leaf)[1] == "none"}
    assert no_consequence == {"float8.skipped.*.module"}  # `float8.converted` says it already
    training = [
        leaf
        for leaf, decides in _decision_leaves(Plan)
        if not decides and leaf not in ("job.environment",) and consequence_of(leaf)[1] not in ("job", "none")
    ]
    assert training == []


# ------------------------------------------------------------------ the required cases


def test_equal_plans_have_no_changes() -> None:
    plan = llama()
    found = diff(plan, llama())
    assert found.same
    assert found.changes == ()
    assert found.verdict.resume == "continues exactly"
    assert found.verdict.conditions == ()


def test_another_learning_rate_is_numerics() -> None:
    a = llama()
    b = set_at(a, "optimizer.lr", 3e-4)
    change = only(a, b)
    assert (change.address, change.before, change.after) == ("optimizer.lr", 1e-2, 3e-4)
    assert change.consequence == "numerics"
    found = diff(a, b)
    assert found.verdict.resume == "different numerics (needs --accept-changes)"
    assert "`optimizer.lr`" in found.verdict.reason
    assert not found.same


def test_another_tensor_degree_is_a_reshard() -> None:
    a = llama(grid=plans.mesh(dp_shard=8))
    b = llama(grid=plans.mesh(dp_shard=4, tp=2), batch=a.batch)
    found = diff(a, b)
    assert found.verdict.resume == "continues with resharding"
    assert {change.address for change in found.of("reshard")} >= {"mesh.tp", "mesh.dp_shard", "sharding.norm[tp]"}
    assert found.of("numerics") == found.of("model") == ()
    added = next(c for c in found.changes if c.address == "sharding.layers.*.attention.wo[tp]")
    assert (added.kind, added.before, added.after["weight"]) == ("added", None, "S(1)")


def test_another_checkpointing_policy_is_speed_and_its_layers_are_folded() -> None:
    change = only(llama(), llama(checkpoint="full"))
    assert (change.address, change.before, change.after) == ("layers.0-31.checkpoint", "none", "full")
    assert (change.consequence, change.count) == ("speed", 32)
    assert diff(llama(), llama(checkpoint="full")).verdict.resume == "continues exactly"


def test_another_model_is_incompatible_and_outweighs_all_else() -> None:
    a = llama()
    attention = replace(a.model.blocks[0].block.attention, num_kv_heads=16)
    block = replace(a.model.blocks[0].block, attention=attention)
    b = replace(a, model=replace(a.model, blocks=(Blocks(repeat=32, block=block),)))
    b = set_at(set_at(b, "optimizer.lr", 1e-4), "job.dump_folder", "elsewhere")
    found = diff(a, b)
    assert found.verdict.resume == "incompatible"
    assert [change.consequence for change in found.changes] == ["model", "numerics", "job"]
    assert found.changes[0].address == "model.blocks.0.block.attention.num_kv_heads"
    assert found.verdict.conditions == ()  # nothing helps


# ------------------------------------------------------------------ subtle cases


def test_cutting_the_same_global_batch_otherwise_is_speed_only() -> None:
    a = llama()
    batch = replace(a.batch, local_batch_size=2, microbatch_size=2, accumulation_steps=4)
    found = diff(a, replace(a, batch=batch))
    assert [change.consequence for change in found.changes] == ["speed"] * 3
    assert found.changes[0].note == "the global batch stays"
    larger = replace(a.batch, global_batch_size=128, accumulation_steps=2)
    assert diff(a, replace(a, batch=larger)).verdict.resume.startswith("different numerics")


def test_training_longer_is_the_jobs_affair_but_a_longer_curve_is_numerics() -> None:
    a = llama()
    assert only(a, set_at(a, "job.steps", 2000)).consequence == "job"
    assert only(a, set_at(a, "lr_schedule.total_steps", 40)).consequence == "numerics"


def test_labels_and_explanations_change_nothing() -> None:
    a = llama()
    remark = Remark(kind="missed", by="search_sharding", address="mesh.tp", message="tp spans nodes")
    b = replace(a, name="other", remarks=(remark,), estimate=None)
    found = diff(a, b)
    assert found.same
    assert {change.consequence for change in found.changes} == {"none"}
    assert {change.address for change in found.changes} == {"name", "remarks.mesh.tp[search_sharding]", "estimate"}


def test_a_skipped_linear_is_an_explanation_although_the_digest_covers_it() -> None:
    a = llama(float8=True)
    skipped = (*a.float8.skipped[:-1], SkippedLinear(module="output", reason="another reason"))
    assert diff(a, set_at(a, "float8.skipped", skipped)).same
    found = diff(a, set_at(a, "float8.skipped", a.float8.skipped[:-1]))
    assert [change.consequence for change in found.changes] == ["none"]
    assert not found.same  # the digest differs
    assert found.verdict.resume == "continues exactly"


def test_the_same_float8_linears_in_other_words_change_nothing() -> None:
    a = llama(float8=True)
    words = ("layers.0-9.attention.wq", "layers.10-31.attention.wq", *a.float8.converted[1:])
    change = diff(a, set_at(a, "float8.converted", words)).changes[0]
    assert (change.consequence, change.note) == ("none", "the same linears, selected in other words")


def test_other_float8_linears_are_counted() -> None:
    a = llama(float8=True)
    change = only(a, set_at(a, "float8.converted", ("layers.4-31.attention.wq", *a.float8.converted[1:], "output")))
    assert change.consequence == "numerics"
    assert change.note == "converts 1: output; no longer converts 4: layers.0-3.attention.wq"


def test_runs_of_equal_blocks_may_be_written_otherwise() -> None:
    a = llama()
    run = a.model.blocks[0]
    b = replace(a, model=replace(a.model, blocks=(replace(run, repeat=10), replace(run, repeat=22))))
    change = diff(a, b).changes[0]
    assert (change.address, change.consequence) == ("model.blocks", "none")
    assert digest(a) != digest(b)


def test_one_changed_block_among_many_is_named_by_its_layers() -> None:
    a = llama()
    run = a.model.blocks[0]
    wide = replace(run.block, feed_forward=replace(run.block.feed_forward, hidden_dim=16384))
    runs = (replace(run, repeat=3), Blocks(repeat=2, block=wide), replace(run, repeat=27))
    change = only(a, replace(a, model=replace(a.model, blocks=runs)))
    assert change.address == "model.layers.3-4.feed_forward.hidden_dim"
    assert (change.before, change.after, change.consequence) == (14336, 16384, "model")


def test_layers_that_come_are_model_changes() -> None:
    a = llama()
    model = replace(a.model, blocks=(replace(a.model.blocks[0], repeat=34),))
    found = diff(a, llama(model=model))
    assert [(c.address, c.kind) for c in found.of("model")] == [
        ("model.blocks.0.repeat", "changed"),
        ("layers.32-33", "added"),
    ]


def test_entries_of_lists_are_matched_by_key_not_by_position() -> None:
    a = llama()
    units = (FsdpUnit(modules=("norm",), reshard_after_forward=True), *a.fsdp.units)
    change = only(a, set_at(a, "fsdp.units", units))
    assert (change.address, change.kind, change.consequence) == ("fsdp.units.norm", "added", "speed")
    keep = (*a.fsdp.units[:-1], replace(a.fsdp.units[-1], reshard_after_forward=False))
    change = only(a, set_at(a, "fsdp.units", keep))
    assert (change.address, change.before, change.after) == ("fsdp.units.layers.*.reshard_after_forward", True, False)


def test_a_policys_content_is_compared_by_its_name() -> None:
    a = llama(checkpoint="full")
    selective = replace(FULL, mode="selective", save_ops=("aten.mm.default",))
    b = replace(a, activation_checkpoint=replace(POLICIES, policies=(selective, POLICIES.policies[0])))
    found = diff(a, b)
    assert [(c.address, c.consequence) for c in found.changes] == [
        ("activation_checkpoint.policies.full.mode", "speed"),
        ("activation_checkpoint.policies.full.save_ops", "speed"),
        ("activation_checkpoint.policies", "none"),  # their order
    ]


def test_the_order_of_parameter_groups_is_numerics_and_that_of_fsdp_units_is_not() -> None:
    groups = tuple(ParamGroup(pattern=pattern, lr_scale=1.0, weight_decay=0.0) for pattern in ("norm", "wq"))
    a = set_at(llama(), "optimizer.param_groups", groups)
    change = only(a, set_at(a, "optimizer.param_groups", groups[::-1]))
    assert (change.address, change.before, change.after) == ("optimizer.param_groups", ["norm", "wq"], ["wq", "norm"])
    assert change.consequence == "numerics"
    assert only(a, set_at(a, "fsdp.units", a.fsdp.units[::-1])).consequence == "speed"


def test_groups_with_the_same_pattern_are_told_apart() -> None:
    groups = tuple(ParamGroup(pattern="norm", lr_scale=scale, weight_decay=None) for scale in (1.0, 2.0))
    a = set_at(llama(), "optimizer.param_groups", groups)
    change = only(a, set_at(a, "optimizer.param_groups", (groups[0], replace(groups[1], lr_scale=3.0))))
    assert change.address == "optimizer.param_groups.norm#2.lr_scale"


def test_environment_variables_come_go_and_change() -> None:
    a = set_at(llama(), "job.environment", {"A": "1", "B": "1"})
    b = set_at(a, "job.environment", {"B": "2", "C": "1"})
    found = [(change.address, change.kind) for change in diff(a, b).changes]
    assert found == [
        ("job.environment.A", "removed"),
        ("job.environment.B", "changed"),
        ("job.environment.C", "added"),
    ]


def test_environment_variables_that_may_switch_numerics_are_a_condition() -> None:
    a = set_at(llama(), "job.environment", {"KEPT": "1"})
    b = set_at(a, "job.environment", {"KEPT": "1", "NCCL_ALGO": "Ring", "PYTORCH_CUDA_ALLOC_CONF": "x:True"})
    (condition,) = diff(a, b).verdict.conditions
    assert condition.startswith("`NCCL_ALGO` must not switch numerics")


def test_rope_scaling_that_comes_or_goes_is_one_change() -> None:
    a = llama()
    run = a.model.blocks[0]
    attention = run.block.attention
    plain = replace(attention, rope=replace(attention.rope, scaling=None))
    runs = (replace(run, block=replace(run.block, attention=plain)),)
    change = only(a, set_at(a, "model.blocks", runs))
    assert change.address == "model.blocks.0.block.attention.rope.scaling"
    assert (change.before["factor"], change.after) == (8.0, None)


def test_layers_that_are_no_run_are_folded_run_by_run() -> None:
    a = llama()
    found = diff(a, with_checkpoint(a, dict.fromkeys((0, 1, 2, 7, 9, 10), "full")))
    assert [(c.address, c.count) for c in found.changes] == [
        ("layers.0-2.checkpoint", 3),
        ("layers.7.checkpoint", 1),
        ("layers.9-10.checkpoint", 2),
    ]


# ------------------------------------------------------------------ what a resume needs


def test_a_moved_folder_data_and_tokenizer_are_conditions() -> None:
    a = llama()
    found = diff(a, set_at(set_at(a, "job.dump_folder", "new/"), "data.path", "data/other"))
    assert found.verdict.resume == "continues exactly"
    move, content = found.verdict.conditions
    assert "from `out/checkpoint` to `new/checkpoint`" in move
    assert content.startswith("`data.path` must hold the same content")


def test_there_is_nothing_to_resume_from_when_the_first_plan_saves_nothing() -> None:
    a = llama(job=plans.job(enable=False))
    b = set_at(a, "optimizer.implementation", "foreach")
    assert any("nothing to resume from" in words for words in diff(a, b).verdict.conditions)
    assert diff(a, a).verdict.conditions == ()


def test_going_on_past_a_weights_only_save_is_warned_of() -> None:
    a = llama(job=plans.job(steps=1000, enable=True, last_save_model_only=True))
    (condition,) = diff(a, set_at(a, "job.steps", 2000)).verdict.conditions
    assert "before step 1000" in condition
    assert diff(a, set_at(a, "job.steps", 500)).verdict.conditions == ()


def test_parts_that_are_not_loaded_are_named() -> None:
    a = llama()
    job = plans.job(steps=1000, enable=True, exclude_from_loading=("optimizer",), load_step=500)
    back, anew = diff(a, replace(a, job=job)).verdict.conditions
    assert "back to step 500" in back
    assert "optimizer start anew" in anew


# ------------------------------------------------------------------ the estimate


def test_the_estimates_change_in_numbers() -> None:
    a = llama()
    b = replace(a, estimate=estimate(a.model, step_time_ms=800.0, fits=False))
    deltas = {delta.name: delta for delta in diff(a, b).estimate}
    assert (deltas["step_time_ms"].delta, deltas["step_time_ms"].percent) == (-200.0, -20.0)
    assert deltas["tokens_per_second_per_gpu"].percent == pytest.approx(25.0)
    assert (deltas["peak_memory_gib"].before, deltas["peak_memory_gib"].delta) == (40.0, 0.0)
    assert (diff(a, b).before.fits, diff(a, b).after.fits) == (True, False)


def test_an_estimate_that_is_lacking_gives_no_difference() -> None:
    a = llama()
    for b in (replace(a, estimate=None), replace(a, estimate=estimate(a.model, step_time_ms=None))):
        deltas = {delta.name: delta for delta in diff(a, b).estimate}
        assert deltas["step_time_ms"].before == 1000.0
        assert deltas["step_time_ms"].after is deltas["step_time_ms"].delta is deltas["step_time_ms"].percent is None


# ------------------------------------------------------------------ nothing is lost


def _scalars(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _scalars(part, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _scalars(part, (*path, index))
    else:
        yield path, value


def _other(value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, value * 2, value - 1)
        case float():
            yield from (value * 2, value / 2)
        case str():
            yield value + "x"
        case None:
            yield from (0.5, "x")


def test_any_single_edit_of_the_file_is_seen_and_agrees_with_the_digest() -> None:
    """Each scalar of a plan's JSON is changed in turn: the diff shows it, and is `same` only when the digest is."""
    remarks = (Remark(kind="applied", by="p", address="mesh.tp", message="m"),)
    plan = llama("1B", plans.mesh(dp_shard=2, tp=2), float8=True, remarks=remarks)
    data = encode(plan)
    edits = 0
    for path, value in _scalars(data):
        for other in _other(value):
            copy = encode(plan)
            target: Any = copy
            for part in path[:-1]:
                target = target[part]
            target[path[-1]] = other
            try:
                edited = decode(Plan, copy)
            except ValueError:  # an invariant or bound forbids this value
                continue
            if edited == plan:
                continue
            found = diff(plan, edited)
            assert found.changes, path
            if digest(edited) != digest(plan):
                assert not found.same, path
            edits += 1
            break
    assert edits > 250


def test_a_diff_read_backwards_says_the_opposite() -> None:
    a, b = llama(), llama_405b()
    forward, backward = diff(a, b), diff(b, a)
    flip = {"added": "removed", "removed": "added", "changed": "changed"}
    assert {(c.address, str(c.before), str(c.after), c.kind) for c in forward.changes} == {
        (c.address, str(c.after), str(c.before), flip[c.kind]) for c in backward.changes
    }


def test_changes_are_ordered_loudest_first() -> None:
    found = [change.consequence for change in diff(llama(), llama_405b()).changes]
    assert found == sorted(found, key=LOUDEST_FIRST.index)
    assert set(found) >= {"model", "numerics", "reshard", "speed", "none"}


def test_every_list_of_records_is_matched_by_a_key() -> None:
    lists = {leaf.removesuffix(".*") for leaf in LEAVES if leaf.endswith(".*")} - {"job.environment"}
    assert lists - set(KEYS) == {"model.blocks"}


@pytest.mark.parametrize(
    "selector",
    [
        "layers.0-3.attention.wq",
        "layers.7.attention.wk",
        "layers.*.feed_forward.w2",
        "layers.5-900.attention.wo",
        "layers.0-999999999.attention.wo",
        "layers.0-3.*.wq",
        "output",
        "nothing",
        "layers.99.attention.wq",
    ],
)
def test_expand_selects_what_a_selector_means(selector: str) -> None:
    names = linear_modules(llama().model)
    assert expand(selector, names) == select(selector, names)
