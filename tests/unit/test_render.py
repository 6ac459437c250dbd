"""What people read: a plan on a page, the explanation of an address, and a diff as text, Markdown and JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from typing import Any

import pytest

from tests import plans
from tests.unit.plan_factory import estimate, llama, llama_405b, set_at, with_checkpoint
from titan_planner.ir.diff import diff, keyed
from titan_planner.ir.errors import PlanError
from titan_planner.ir.execution import Loss
from titan_planner.ir.job import ParamGroup
from titan_planner.ir.plan import Plan, Remark
from titan_planner.ir.record import field_types
from titan_planner.ir.request import DEGREE_FIELDS, LossSpec, ParallelismSpec
from titan_planner.render import asked, values
from titan_planner.render import diff as render
from titan_planner.render.explain import explain, explain_json, explanation, related
from titan_planner.render.modules import Modules, policy_words
from titan_planner.render.show import show, show_json
from titan_planner.render.tables import PLAIN, Style, cut, pairs, table

ANSI = re.compile(r"\x1b\[\d+m")

REMARKS = (
    Remark(kind="applied", by="search_sharding", address="mesh.tp", message="tp = 8: 812 ms; tp = 4 needs 850 ms"),
    Remark(kind="analysis", by="search_sharding", address="mesh", message="12 legal layouts"),
    Remark(kind="missed", by="search_sharding", address="mesh.cp", message="cp = 2 is slower"),
    Remark(kind="applied", by="select_checkpointing", address="layers.0-9", message="full: 3 GiB saved"),
    Remark(kind="missed", by="filter_float8", address="layers.*.attention.wk", message="too small to gain"),
    Remark(kind="applied", by="filter_float8", address="float8", message="160 linears converted"),
)


def line_with(text: str, words: str) -> str:
    """The one line of `text` that holds `words`, spaces collapsed."""
    found = [" ".join(line.split()) for line in text.splitlines() if words in line]
    assert len(found) == 1, (words, found)
    return found[0]


# ------------------------------------------------------------------ diff as text


def test_equal_plans_read_no_changes() -> None:
    assert render.text(diff(llama(), llama())) == "No changes."
    assert render.markdown(diff(llama(), llama())) == "**No changes.**"
    assert render.json_value(diff(llama(), llama()))["changes"] == []


def test_plans_that_differ_in_labels_only_read_no_changes_too() -> None:
    found = render.text(diff(llama(), llama(name="other", remarks=REMARKS)))
    assert found.splitlines()[:2] == ["No changes.", "Only explanations differ: name, remarks (6)."]


def test_the_diff_of_a_learning_rate_word_for_word() -> None:
    a = llama()
    b = replace(set_at(a, "optimizer.lr", 3e-4), estimate=estimate(a.model, step_time_ms=950.0))
    found = diff(a, b)
    assert render.text(found) == (
        f"llama3_8B {found.before.digest[:12]} -> llama3_8B {found.after.digest[:12]}\n"
        "\n"
        "numerics: the checkpoint loads, but training goes on differently\n"
        "  optimizer.lr  0.01 -> 0.0003  other updates\n"
        "\n"
        "none: nothing that runs\n"
        "  estimate (2)\n"
        "\n"
        "estimate\n"
        "  step time     1,000.0 ms  ->   950.0 ms  -5.0 %\n"
        "  tokens/s/GPU       5,000  ->      5,263  +5.3 %\n"
        "  MFU               40.0 %  ->     40.0 %    same\n"
        "  peak memory    40.00 GiB  ->  40.00 GiB    same\n"
        "\n"
        "verdict: different numerics (needs --accept-changes)\n"
        "  the checkpoint loads, but training goes on differently: `optimizer.lr`"
    )


def test_the_loudest_consequence_comes_first() -> None:
    a = llama()
    b = set_at(set_at(set_at(llama(checkpoint="full"), "optimizer.lr", 1e-4), "job.steps", 9), "model.tied", True)
    text = render.text(diff(a, b))
    heads = [
        line.partition(":")[0] for line in text.splitlines() if re.match(r"(model|numerics|speed|job|verdict): ", line)
    ]
    assert heads == ["model", "numerics", "speed", "job", "verdict"]


def test_every_second_layer_is_one_line() -> None:
    a = llama()
    text = render.text(diff(a, with_checkpoint(a, dict.fromkeys(range(0, 32, 2), "full"))))
    assert line_with(text, "checkpoint ") == (
        "layers.0,2..30.checkpoint (16 layers) none -> full memory against recomputation"
    )


def test_long_lists_are_cut_unless_all_is_asked_for() -> None:
    a = llama()
    b = with_checkpoint(a, {})
    layers = tuple(replace(layer, stage=i) for i, layer in enumerate(b.layers))  # 35 stages: no two layers alike
    found = diff(a, replace(b, layers=layers))
    assert "layers  ... and 26 more like these" in re.sub(r" {3,}", "  ", render.text(found))
    full = render.text(found, full=True)
    assert "more like these" not in full
    assert full.count(" -> ") == 1 + 34 + 4  # header, 34 stages (the first keeps 0), four numbers of the estimate
    assert len(render.json_value(found)["changes"]) == 34


def test_what_leaves_and_joins_a_list_is_shown_not_the_list() -> None:
    a = llama(float8=True)
    b = set_at(a, "float8.converted", (*a.float8.converted[1:], "output"))
    line = line_with(render.text(diff(a, b)), "float8.converted ")
    assert line.startswith("float8.converted -layers.0-31.attention.wq +output converts 1: output; no longer conv")


def test_a_plan_that_does_not_fit_is_said_so() -> None:
    a = llama()
    b = replace(a, estimate=estimate(a.model, fits=False), compile=replace(a.compile, enable=True))
    assert "the second plan does not fit in memory" in render.text(diff(a, b))
    assert "the first plan did not fit in memory; the second does" in render.text(diff(b, a))
    assert "**the second plan does not fit in memory by its own estimate**" in render.markdown(diff(a, b))


def test_a_lacking_estimate_reads_unknown() -> None:
    a = llama()
    b = replace(set_at(a, "optimizer.lr", 1e-4), estimate=None)
    assert line_with(render.text(diff(a, b)), "step time") == "step time 1,000.0 ms -> unknown"
    assert "estimate\n" not in render.text(diff(replace(a, estimate=None), b))


def test_conditions_of_a_resume_follow_the_verdict() -> None:
    a = llama()
    text = render.text(diff(a, set_at(a, "job.dump_folder", "new")))
    assert text.splitlines()[-1].startswith("  but move the checkpoints from `out/checkpoint` to `new/checkpoint`")
    assert "- but move the checkpoints" in render.markdown(diff(a, set_at(a, "job.dump_folder", "new")))


# ------------------------------------------------------------------ diff as Markdown and JSON


def test_markdown_is_one_table_a_consequence() -> None:
    text = render.markdown(diff(llama(), llama(grid=plans.mesh(dp_shard=4, tp=2))))
    assert "**A running job resumes with different numerics (needs `--accept-changes`)**" in text
    assert "| `mesh.tp` | `1` → `2` | matrices are cut otherwise |" in text
    assert "#### reshard: the checkpoint is laid out anew" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({re.sub(r"\\\|", "", line).count("|") for line in block.splitlines()}) == 1


def test_markdown_survives_pipes_backticks_and_newlines() -> None:
    groups = (ParamGroup(pattern="norm|`bias`", lr_scale=1.0, weight_decay=0.0),)
    a = llama()
    b = set_at(set_at(a, "optimizer.param_groups", groups), "job.environment", {"A": "1\n| 2 |"})
    rows = [line for line in render.markdown(diff(a, b)).splitlines() if line.startswith("| `")]
    assert any("`` optimizer.param_groups.norm\\|`bias` ``" in row for row in rows)
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 4


def test_the_json_of_a_diff_lacks_nothing_and_is_plain() -> None:
    found = diff(llama(), llama_405b())
    data = json.loads(json.dumps(render.json_value(found)))
    assert len(data["changes"]) == len(found.changes) > 40
    assert data["verdict"]["resume"] == "incompatible"
    assert data["before"]["digest"] == found.before.digest
    assert set(data["changes"][0]) == {"address", "kind", "before", "after", "consequence", "note", "count"}
    assert data["estimate"]["step_time_ms"] == {"before": 1000.0, "after": 1000.0, "delta": 0.0, "percent": 0.0}


# ------------------------------------------------------------------ show


def test_show_says_what_405b_is_on_512_gpus() -> None:
    text = show(llama_405b())
    assert line_with(text, "  model  ") == "model llama3 405B: 126 layers of width 16384, 405.9B parameters"
    assert line_with(text, "cluster  ") == "cluster 64 x 8 test-gpu = 512 GPUs, memory inside, memory between nodes"
    assert "  mesh     pp8 x dp_shard8 x tp8 = 512\n" in text
    assert line_with(text, "tokens a step") == "batch 64 x 8192 = 524.3K tokens a step"
    assert line_with(text, "(x126)").startswith("layers.0-125 (x126) checkpoint full stages 0-7")
    assert line_with(text, "attention.wq ") == (
        "attention.wq [16384, 16384] -> [256, 16384] tp S(0) fsdp S(0) float8 tensorwise"
    )
    assert line_with(text, "feed_forward.w2 ") == (
        "feed_forward.w2 [16384, 53248] -> [2048, 6656] tp S(1) fsdp S(0) float8 tensorwise"
    )
    assert line_with(text, "attention.wk     ") == (
        "attention.wk [1024, 16384] -> [16, 16384] tp S(0) fsdp S(0) high precision"
    )
    assert line_with(text, "attention_norm") == "attention_norm [16384] -> [2048] fsdp S(0)"
    assert line_with(text, "  output  [") == (
        "output [128256, 16384] -> [2004, 16384] tp S(0) fsdp S(0) high precision stage 7"
    )
    assert line_with(text, "  float8  ") == "float8 tensorwise, 630 of 883 linears auto"
    assert line_with(text, "remarks:") == "remarks: 126 applied, 0 missed, 0 analysis (titan-plan explain)"


def test_show_has_a_row_for_every_stage_with_its_memory() -> None:
    lines = show(llama_405b()).split("stages  memory")[1].splitlines()
    assert lines[1].split() == [
        "stage",
        "rank",
        "modules",
        *["weights", "grads", "optim", "gathered", "activ", "logits", "total"],
    ]
    assert " ".join(lines[2].split()) == "0 0 tok_embeddings, layers.0-15 5.00 5.00 10.00 8.00 10.00 2.00 40.00"
    assert " ".join(lines[9].split()) == "7 7 layers.112-125, norm, output 5.00 5.00 10.00 8.00 10.00 2.00 40.00"


def test_ranks_that_share_a_kv_head_hold_more_of_wk_than_of_wq() -> None:
    # 8 KV heads of 128 over tp = 16, each head on 2 ranks: 1024 / (16 / 2) = 128 rows, and wq 16384 / 16 = 1024.
    plan = llama("405B", plans.mesh(tp=16, pp=4), kv_replicas=2)
    text = show(plan)
    assert line_with(text, "attention.wk ").startswith("attention.wk [1024, 16384] -> [128, 16384]")
    assert line_with(text, "attention.wq ").startswith("attention.wq [16384, 16384] -> [1024, 16384]")


def test_local_shapes_round_up_when_ranks_do_not_divide_them() -> None:
    text = show(llama("1B", plans.mesh(dp_shard=3)))
    assert line_with(text, "tok_embeddings  [").startswith("tok_embeddings [128256, 2048] -> [42752, 2048]")
    assert line_with(text, "attention.wq ").startswith("attention.wq [2048, 2048] -> [683, 2048]")


def test_replicated_data_parallelism_shards_nothing() -> None:
    plan = llama(grid=plans.mesh(dp_replicate=8))
    plan = replace(plan, fsdp=replace(plan.fsdp, strategy="ddp", units=()))
    text = show(plan)
    assert line_with(text, "attention.wq ") == "attention.wq [4096, 4096] -> [4096, 4096]"
    assert "DDP over 8 ranks" in text


def test_a_tied_output_owns_no_weight() -> None:
    assert "output  tied to tok_embeddings" in show(llama("1B"))


def test_layers_decided_otherwise_are_shown_apart() -> None:
    text = show(with_checkpoint(llama(), dict.fromkeys(range(4), "full")))
    assert line_with(text, "layers.0-3 (x4)") == "layers.0-3 (x4) checkpoint full stage 0"
    assert line_with(text, "layers.4-31 (x28)") == "layers.4-31 (x28) no checkpointing stage 0"
    assert line_with(text, "  checkpointing  ") == "checkpointing layers.0-3 full, layers.4-31 none auto"


def test_show_tells_pinned_from_chosen() -> None:
    pins = ParallelismSpec(tensor_parallel_degree=2)
    text = show(llama(grid=plans.mesh(dp_shard=4, tp=2), pins=pins))
    assert re.search(r"^  mesh  .*  partly$", text, re.MULTILINE)
    assert re.search(r"^  compile .*  auto$", text, re.MULTILINE)
    degrees: dict[str, Any] = dict.fromkeys(DEGREE_FIELDS.values(), 1)
    everything = ParallelismSpec(**degrees)
    assert re.search(r"^  mesh  .*  pinned$", show(llama(pins=everything)), re.MULTILINE)


def test_decisions_in_words() -> None:
    plan = llama(grid=plans.mesh(dp_replicate=2, dp_shard=4, cp=2, tp=16, pp=2), kv_replicas=2)
    fsdp = replace(plan.fsdp, prefetch_forward=1, prefetch_backward=2, defer_gradient_sync=True, cpu_offload=True)
    plan = replace(
        plan,
        fsdp=fsdp,
        tensor_parallel=replace(plan.tensor_parallel, loss_parallel=False, async_tp=True),
        compile=replace(plan.compile, enable=True),
        loss=Loss(kind="cross_entropy", chunks=4, z_loss=1e-4),
        seeds=replace(plan.seeds, seed=3),
    )
    words = {row["name"]: row["value"] for row in show_json(plan)["decisions"]}
    assert words == {
        "mesh": "pp2 x dp_replicate2 x dp_shard4 x cp2 x tp16 = 512",
        "batch": "8 local x 8 data-parallel x 1 accumulation = 64",
        "pipeline": "1F1B, 2 stages, 8 microbatches of 1",
        "data parallel": "FSDP over 8 ranks, replicated 2 times, layers freed after forward, prefetch 1/2, "
        "gradients reduced once a step, offloaded to host memory",
        "tensor parallel": "sequence parallel, logits gathered, async, each KV head on 2 ranks",
        "context parallel": "allgather, balanced by none",
        "checkpointing": "none in all layers",
        "float8": "off",
        "compile": "model and loss with inductor",
        "loss": "cross-entropy in 4 chunks, z-loss 0.0001",
        "precision": "weights float32, compute float32, gradients reduced in float32",
        "optimizer": "AdamW lr 0.01, betas 0.9 0.95, decay 0.1, clip 1, fused, float32 moments",
        "lr schedule": "2 warmup, 13 stable, 5 linear decay to 0",
        "data": "text data/sample",
        "run": "1000 steps, seed 3, saves every 5 steps",
    }


def test_decisions_that_do_not_arise_are_left_out() -> None:
    words = {row["name"]: row["value"] for row in show_json(llama(grid=plans.mesh()))["decisions"]}
    assert words["data parallel"] == "one rank holds all"
    assert not {"pipeline", "tensor parallel", "context parallel", "expert parallel"} & set(words)
    assert "keeps the block's input" in show(llama(checkpoint="full"), 140)


def test_show_prices_the_token_budget() -> None:
    plan = llama()
    plan = set_at(plan, "job.token_budget", 1e12)
    plan = replace(plan, cluster=replace(plan.cluster, price_per_gpu_hour=2.0))
    priced = estimate(plan.model, training_days=289.4, training_gpu_hours=55_560.0, training_cost=111_100.0)
    assert line_with(show(replace(plan, estimate=priced)), "whole training") == (
        "whole training 1.00T tokens: 289.4 days, 55.56K GPU-hours, 111.1K in the currency of the price"
    )
    assert show_json(replace(plan, estimate=priced))["estimate"]["training_days"] == 289.4
    assert "whole training" not in show(replace(plan, estimate=estimate(plan.model, step_time_ms=None)))


@pytest.mark.parametrize("width", [72, 80, 100, 140])
def test_no_line_is_wider_than_the_page(width: int) -> None:
    plan = replace(llama_405b(), remarks=REMARKS)
    texts = [show(plan, width), explain(plan, width=width)]
    texts += [
        explain(plan, address, width=width) for address in ("mesh", "layers.17", "float8", "job", "request", "model")
    ]
    for text in texts:
        assert max(map(len, text.splitlines())) <= width


def test_a_plan_without_estimate_is_shown() -> None:
    text = show(llama(estimate=None))
    assert "none: the plan was not priced" in text
    assert "GiB" not in text
    assert show_json(llama(estimate=None))["estimate"] is None


def test_show_json_is_plain_and_has_the_numbers() -> None:
    data = json.loads(json.dumps(show_json(llama_405b())))
    assert data["model"]["num_params"] == 405_853_388_800
    assert data["mesh"]["text"] == "pp8 x dp_shard8 x tp8 = 512"
    layers = data["modules"][1]
    assert (layers["modules"], layers["count"], layers["stages"]) == (["layers.0-125"], 126, list(range(8)))
    wk = next(parameter for parameter in layers["parameters"] if parameter["name"] == "attention.wk.weight")
    assert wk == {
        "name": "attention.wk.weight",
        "shape": [1024, 16384],
        "local_shape": [16, 16384],
        "placements": {"tp": "S(0)", "fsdp": "S(0)"},
        "float8": {"converted": False, "reason": "1024 columns are too few to gain"},
    }
    assert data["stages"][7]["memory"]["total_gib"] == 40.0
    assert data["stages"][7]["modules"] == ["layers.112-125", "norm", "output"]


# ------------------------------------------------------------------ explain


def test_the_whole_record_is_grouped_by_pass() -> None:
    lines = explain(llama(remarks=REMARKS)).splitlines()
    assert [line for line in lines if line and not line.startswith(" ")] == [
        "search_sharding",
        "select_checkpointing",
        "filter_float8",
    ]
    assert explain(llama()) == "The plan has no remarks."


def test_remarks_that_say_the_same_of_many_layers_are_one() -> None:
    text = explain(llama_405b())
    assert text.splitlines() == ["filter_float8", "  applied   layers.0-125.attention.wq", "            converted"]


@pytest.mark.parametrize(
    ("address", "indices"),
    [
        ("mesh.tp", [0, 1]),  # itself and the section above
        ("mesh", [0, 1, 2]),  # and all below
        ("layers.3", [3, 4]),  # a range, and a selector below
        ("layers.17", [4]),
        ("layers.3.attention.wk", [3, 4]),
        ("layers.17.attention.wq", []),
        ("layers.5-20.attention.wk", [3, 4]),
        ("float8.recipe", [5]),
        ("optimizer.lr", []),
    ],
)
def test_remarks_of_an_address(address: str, indices: list[int]) -> None:
    plan = llama(grid=plans.mesh(tp=8), remarks=REMARKS)
    assert explanation(plan, address).remarks == tuple(REMARKS[i] for i in indices)


@pytest.mark.parametrize(
    ("a", "b", "meets"),
    [
        ("mesh.tp", "mesh.tp", True),
        ("mesh.tp", "mesh", True),
        ("mesh.tp", "mesh.pp", False),
        ("mesh.t", "mesh.tp", False),
        ("layers.7", "layers.0-9.attention", True),
        ("layers.17", "layers.0-9", False),
        ("layers.1", "layers.10", False),
        ("layers.5-20", "layers.18-40.attention.wq", True),
        ("layers.*.attention.wk", "layers.3.attention.wk", True),
        ("lm_head", "output", True),
        ("fsdp.units[3].modules", "fsdp.units", True),
        ("optimizer", "", True),  # a remark about the whole plan
    ],
)
def test_addresses_meet(a: str, b: str, meets: bool) -> None:
    assert related(a, b) is meets
    assert related(b, a) is meets


def test_a_value_is_explained_with_meaning_pin_and_consequence() -> None:
    plan = llama(
        grid=plans.mesh(dp_shard=4, tp=2),
        pins=ParallelismSpec(tensor_parallel_degree=2, data_parallel_shard_degree=-1),
        remarks=REMARKS,
    )
    text = explain(plan, "mesh.tp")
    assert text.splitlines()[0] == "mesh.tp = 2"
    assert line_with(text, "meaning") == "meaning Ranks that share every weight matrix (tensor parallel)."
    assert line_with(text, "asked") == "asked pinned to 2 (parallelism.tensor_parallel_degree)"
    assert line_with(text, "changing it") == "changing it reshards checkpoints"
    assert line_with(text, "ranks of tp") == "ranks of tp 2 ranks, 1 apart, inside one node (memory)"
    assert "tp = 8: 812 ms; tp = 4 needs 850 ms" in text
    assert line_with(explain(plan, "mesh.dp_shard"), "asked") == (
        "asked pinned to -1, the rest (parallelism.data_parallel_shard_degree)"
    )
    assert line_with(explain(plan, "mesh.cp"), "asked") == "asked auto (parallelism.context_parallel_degree)"
    assert line_with(explain(plan, "optimizer.lr"), "changing it") == "changing it changes numerics"


def test_ranks_of_an_axis_are_counted_over_nodes() -> None:
    text = explain(llama_405b(), "mesh")
    assert line_with(text, "ranks of pp") == "ranks of pp 8 ranks, 64 apart, over 8 nodes (memory)"
    assert line_with(text, "ranks of dp_shard") == "ranks of dp_shard 8 ranks, 8 apart, over 8 nodes (memory)"
    assert line_with(text, "ranks of tp") == "ranks of tp 8 ranks, 1 apart, inside one node (memory)"


def test_a_linear_is_explained_with_shape_sharding_policy_and_float8_reason() -> None:
    text = explain(llama_405b(), "layers.17.attention.wk")
    assert text.splitlines()[0] == "layers.17.attention.wk  linear 16384 -> 1024"
    assert line_with(text, "weight  ") == "weight [1024, 16384] -> [16, 16384] on a rank tp S(0) fsdp S(0)"
    assert line_with(text, "stage  ") == "stage 1, on pipeline rank 1"
    assert line_with(text, "fsdp  ") == "fsdp unit layers.*, freed after forward, sharded over 8 ranks"
    assert (
        "checkpoint full: keeps the block's input, recomputes the rest; asked: auto (activation_checkpoint.mode)"
        in " ".join(text.split())
    )
    assert line_with(text, "float8 ") == "float8 high precision: 1024 columns are too few to gain"
    assert line_with(explain(llama_405b(), "layers.17.attention.wq"), "float8  ") == "float8 tensorwise"


def test_a_block_is_explained_with_all_its_weights() -> None:
    text = explain(llama_405b(), "layers.17")
    assert line_with(text, "parameters") == "parameters 3.19B"
    assert line_with(text, "attention.wo ") == (
        "attention.wo [16384, 16384] -> [2048, 2048] tp S(1) fsdp S(0) float8 tensorwise"
    )
    data = explain_json(llama_405b(), "layers.17")
    assert len(data["modules"][0]["parameters"]) == 9


def test_modules_of_a_selector_that_are_alike_are_told_once() -> None:
    plan = with_checkpoint(llama_405b(), {3: "none"})
    found = explanation(plan, "layers.2-5.attention.wq")
    assert [topic.title for topic in found.topics] == [
        "layers.2.attention.wq, layers.4-5.attention.wq  linear 16384 -> 16384",
        "layers.3.attention.wq  linear 16384 -> 16384",
    ]
    everything = explanation(llama_405b(), "layers")
    assert [topic.title for topic in everything.topics] == ["layers.0-125"]
    assert dict(everything.topics[0].facts)["stages"] == "0-7, on pipeline ranks 0-7"


def test_the_policy_and_stage_of_a_layer_are_values() -> None:
    plan = with_checkpoint(llama_405b(), {3: "none"})
    leaves = explanation(plan, "layers.0-5.checkpoint").leaves
    assert [(leaf.address, leaf.value) for leaf in leaves] == [
        ("layers.0-2.checkpoint", "full"),
        ("layers.4-5.checkpoint", "full"),
        ("layers.3.checkpoint", "none"),
    ]
    assert explain(plan, "norm.stage").splitlines()[0] == "norm.stage = 7"


def test_what_a_spec_calls_a_decision_is_understood() -> None:
    plan = llama_405b()
    for address, mine in [
        ("parallelism.tensor_parallel_degree", "mesh.tp"),
        ("training.seq_len", "batch.seq_len"),
        ("lr_scheduler.warmup_steps", "lr_schedule.warmup_steps"),
        ("checkpoint.interval", "job.checkpoint.interval"),
        ("activation_checkpoint.mode", "activation_checkpoint"),
        ("request.parallelism.tensor_parallel_degree", "request.parallelism.tensor_parallel_degree"),
    ]:
        assert explanation(plan, address).address == mine


def test_aliases_of_modules_are_understood() -> None:
    plan = llama_405b()
    assert explain(plan, "lm_head") == explain(plan, "output")
    assert explain(plan, "layers.3.attention.qkv_linear.wk") == explain(plan, "layers.3.attention.wk")
    assert explain(plan, "layers.3.attention.wk.weight") == explain(plan, "layers.3.attention.wk")
    assert explain(plan, "layers[3].stage") == explain(plan, "layers.2.stage")  # entry 0 is the embedding
    assert explain(plan, "fsdp.units[0]") != explain(plan, "fsdp.units[1]")


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("tp", "did you mean `mesh.tp`?"),
        ("mesh.tpp", "`mesh.tp`"),
        ("wk", "`layers.0.attention.wk`"),
        ("layers.3.attention.wz", "`layers.3.attention.wv`"),
        ("layers.200.attention.wk", "ask for `layers.125.attention.wk`"),
        ("layers.126", "ask for `layers.125`"),
        ("optimizer.learning_rate", "`optimizer` has name, lr, "),
        ("optimiser.lr", "`optimizer.lr`"),
        ("gibberish", "an address is a module"),
        ("model.layers.126", "an address is a module"),
        ("layers[129]", ""),
        ("  ", "an address is a module"),
        ("mesh.tp.more", ""),
        ("layers.-1", ""),
    ],
)
def test_an_unknown_address_is_an_error_with_a_way_out(address: str, hint: str) -> None:
    with pytest.raises(PlanError) as raised:
        explain(llama_405b(), address)
    (complaint,) = raised.value.complaints
    assert complaint.address == address
    assert complaint.hint is not None
    assert hint in complaint.hint


def test_an_address_that_only_a_remark_speaks_of_is_explained() -> None:
    remark = Remark(kind="analysis", by="search_sharding", address="bubble", message="7 % of the step")
    plan = llama(remarks=(remark,))
    assert "7 % of the step" in explain(plan, "bubble")
    with pytest.raises(PlanError):
        explain(plan, "bubble.more")


def _addresses(value: Any, address: str = "", pattern: str = "") -> Iterator[str]:
    if address:
        yield address
    if is_dataclass(value):
        for name in field_types(type(value)):
            at = f"{address}.{name}" if address else name
            yield from _addresses(getattr(value, name), at, f"{pattern}.{name}" if pattern else name)
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for key, item in keyed(value, pattern).items():
            yield from _addresses(item, f"{address}.{key}", f"{pattern}.*")


def test_every_address_of_a_plan_can_be_explained() -> None:
    plan = llama("1B", plans.mesh(dp_shard=2, tp=2), float8=True, remarks=REMARKS)
    addresses = [address for address in _addresses(plan) if not address.startswith("layers.layers")]
    assert len(addresses) > 300
    for address in addresses:
        assert explain(plan, address)


def test_every_address_of_a_diff_can_be_explained() -> None:
    a, b = llama(), llama_405b()
    run = b.model.blocks[0]
    b = replace(b, model=replace(b.model, blocks=(replace(run, repeat=100), replace(run, repeat=26))))
    for change in diff(a, b).changes:
        if change.kind != "removed":
            assert explain(b, change.address), change.address


def test_explanations_are_plain_data() -> None:
    plan = llama("405B", plans.mesh(dp_shard=8, pp=8, tp=8), float8=True, remarks=REMARKS)
    for address in (None, "mesh.tp", "layers.17", "float8", "estimate", "batch", "fsdp.units", "job.environment"):
        data = explain_json(plan, address)
        assert json.loads(json.dumps(data)) == data
    value = explain_json(plan, "mesh.tp")["values"][0]
    assert value["asked"] == {"address": "parallelism.tensor_parallel_degree", "value": "auto", "how": "auto"}
    assert (value["value"], value["consequence"]) == (8, "reshard")


def test_sections_that_decide_about_a_module_are_pointed_to() -> None:
    plan = llama(grid=plans.mesh(tp=8), remarks=REMARKS, float8=True)
    assert explanation(plan, "layers.17.attention.wq").see_also == ("float8", "mesh.tp")
    assert explanation(plan, "layers.17.attention_norm").see_also == ()


# ------------------------------------------------------------------ what was asked


def test_every_pin_names_a_field_of_the_request_and_of_the_plan() -> None:
    plan = llama()
    for address, request in asked.PINS.items():
        found = asked.asked(plan, address)
        assert found is not None
        assert found.address == request
        if "*" not in address:
            assert explanation(plan, address).leaves or address in ("fsdp.units", "float8.skipped")
    assert asked.asked(plan, "optimizer.lr") is None


def test_auto_pinned_and_default_are_told_apart() -> None:
    plan = llama(loss=Loss(kind="cross_entropy", chunks=4, z_loss=0.0))
    assert asked.asked(plan, "loss.chunks") == asked.Asked("loss.chunks", "auto", "auto")
    assert asked.asked(plan, "loss.z_loss") == asked.Asked("loss.z_loss", 0.0, "default")
    pinned = replace(plan, request=replace(plan.request, loss=LossSpec(chunks=4), global_batch_size=-1))
    assert asked.asked(pinned, "loss.chunks") == asked.Asked("loss.chunks", 4, "pinned")
    assert asked.asked(pinned, "batch.global_batch_size") == asked.Asked("global_batch_size", -1, "auto")
    assert asked.summary(pinned, ("loss.chunks", "compile.enable")) == "partly"
    assert asked.summary(pinned, ("optimizer.lr",)) == ""


# ------------------------------------------------------------------ tables, values, style


def test_tables_align_cut_and_let_short_rows_run_on() -> None:
    assert table([("a", "1"), ("bbb", "22")], right=(1,)) == ["  a     1", "  bbb  22"]
    assert table([("a", "x" * 30, "z")], width=20, flex=1) == ["  a  " + "x" * 9 + "...  z"]
    assert table([("a", "1", "z"), ("b", "a long cell")]) == ["  a  1  z", "  b  a long cell"]
    assert table([]) == []


def test_pairs_wrap_under_their_text() -> None:
    assert pairs([("k", "aaaa bbbb cccc")], width=14) == ["  k  aaaa bbbb", "     cccc"]
    assert pairs([], width=10) == []


def test_emphasis_takes_no_room_and_is_absent_when_plain() -> None:
    loud = Style(ansi=True)
    assert PLAIN.red("x") == "x"
    assert loud.red("x") == "\x1b[31mx\x1b[0m"
    assert loud.red("") == ""
    assert cut(loud.bold("abc"), 3) == loud.bold("abc")
    plan = replace(llama_405b(), remarks=REMARKS)
    a = llama()
    pages: list[Callable[[Style], str]] = [
        lambda style: show(plan, style=style),
        lambda style: explain(plan, style=style),
        lambda style: explain(plan, "mesh", style=style),
        lambda style: explain(plan, "layers.17.attention.wk", style=style),
        lambda style: render.text(diff(a, set_at(a, "optimizer.lr", 1.0)), style=style),
        lambda style: render.text(diff(a, plan), style=style),
    ]
    for page in pages:
        assert "\x1b" not in page(PLAIN)
        assert "\x1b" in page(loud)
        assert ANSI.sub("", page(loud)) == page(PLAIN)


@pytest.mark.parametrize(
    ("number", "words"),
    [(512, "512"), (131072, "131.1K"), (8_030_261_248, "8.03B"), (405_853_388_800, "405.9B"), (15e12, "15.00T")],
)
def test_counts_are_short(number: float, words: str) -> None:
    assert values.count(number) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (True, "true"),
        ("", '""'),
        (0.0003, "0.0003"),
        (5e6, "5000000.0"),
        (2.5e12, "2.5e+12"),
        (405_853_388_800, "405853388800"),
        ([], "[]"),
        ([1, None, "a"], "[1, null, a]"),
        ({"stage": 3, "reshard": False, "nothing": None, "none": []}, "stage 3, reshard false"),
    ],
)
def test_values_are_written_as_people_would(value: Any, words: str) -> None:
    assert values.value(value) == words


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([0, 1, 2, 3], "0-3"),
        ([5], "5"),
        ([0, 2, 4, 6], "0,2..6"),
        ([0, 1, 5], "0-1, 5"),
        ([0, 2, 5, 9, 11, 14], "0, 2, 5 .. 14"),
    ],
)
def test_numbers_are_folded(numbers: list[int], words: str) -> None:
    assert values.numbers(numbers) == words


def test_a_mesh_names_only_the_axes_it_has() -> None:
    assert values.mesh(plans.mesh()) == "one rank = 1"
    assert values.mesh(plans.mesh(dp_shard=2, dp_replicate=2, cp=2)) == "dp_replicate2 x dp_shard2 x cp2 = 8"
    assert values.mesh(plans.mesh(dp_shard=4, ep=2)) == "dp_shard4 = 4, ep2"


def test_policies_are_told_in_words() -> None:
    selective = replace(
        plans.NO_CHECKPOINT,
        name="op",
        mode="selective",
        save_ops=("aten.mm.default", "aten._scaled_dot_product_flash_attention.default", "aten.max.default"),
        recompute_every_second_matmul=True,
        force_recompute_fqns=("moe.router",),
    )
    assert policy_words(selective) == "keeps every other mm, attention, max; always recomputes moe.router"


def test_modules_know_their_innermost_fsdp_unit() -> None:
    plan = llama()
    inner = replace(plan.fsdp.units[0], modules=("layers.3.feed_forward",), reshard_after_forward=2)
    modules = Modules(replace(plan, fsdp=replace(plan.fsdp, units=(*plan.fsdp.units, inner))))
    assert modules.unit("layers.3.feed_forward.w1") is inner
    unit = modules.unit("layers.3.attention.wq")
    assert unit is not None
    assert unit.modules == ("layers.*",)
    assert Modules(replace(plan, fsdp=replace(plan.fsdp, units=()))).unit("norm") is None


def test_rendering_imports_neither_torch_nor_rich() -> None:
    code = (
        "import sys; import titan_planner.render.show, titan_planner.render.explain, titan_planner.render.diff; "
        "print([name for name in ('torch', 'rich', 'yaml', 'jsonschema') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_same_plan_is_rendered_the_same() -> None:
    def page(plan: Plan) -> str:
        return show(plan) + explain(plan) + explain(plan, "layers.3") + render.text(diff(llama(), plan), full=True)

    assert page(llama_405b()) == page(llama_405b())
