"""Damaged and hand-edited plans: one clear complaint each, exit code 1, never a traceback; legal edits are accepted."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from titan_planner.cli import main
from titan_planner.ir.codec import digest, dumps, encode
from titan_planner.ir.errors import PlanError
from titan_planner.ir.job import Batch, Checkpoint, Comm, Job, LrSchedule, Metrics, Profiling, Validation
from titan_planner.ir.record import bounded_fields
from titan_planner.ir.request import (
    CheckpointSpec,
    CommSpec,
    LrSchedulerSpec,
    MetricsSpec,
    ProfilingSpec,
    ValidationSpec,
)
from titan_planner.ir.rules import INVARIANTS, RULES
from titan_planner.ir.verify import load_plan, load_plan_with_notes

from .builders import MOE, PIPELINE, TINY, compile_text

TINY_PLAN = compile_text(TINY)
PIPELINE_PLAN = compile_text(PIPELINE)
MOE_PLAN = compile_text(MOE)
TIED_PLAN = compile_text(TINY.replace("flavor: debug", "flavor: debug, overrides: {tied: true}"))
FIRST, SPLIT, LAST = "0F0,0F1,0B0,0B1", "0F0,0F1,0I0,0W0,0I1,0W1", "1F0,1B0,1F1,1B1"
ACTIONS_PLAN = compile_text(
    TINY.replace("global_batch_size: 16", "global_batch_size: 4, local_batch_size: 2")
    + f"parallelism: {{pipeline_parallel_degree: 2, pipeline_parallel_schedule_actions: ['{FIRST}', '{LAST}']}}\n"
)

Edit = Callable[[dict[str, Any]], Any]


def edit(path: str, value: Any) -> Edit:
    """Set the value at a dotted path (numbers are list indices)."""

    def apply(data: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target: Any = data
        for part in parents:
            target = target[int(part) if part.isdecimal() else part]
        target[int(last) if last.isdecimal() else last] = value

    return apply


def drop(path: str) -> Edit:
    def apply(data: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target: Any = data
        for part in parents:
            target = target[int(part) if part.isdecimal() else part]
        del target[int(last) if last.isdecimal() else last]

    return apply


def rename(path: str, new: str) -> Edit:
    def apply(data: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target: Any = data
        for part in parents:
            target = target[part]
        target[new] = target.pop(last)

    return apply


FREE_TEXT: list[tuple[str, bytes, str]] = [
    ("empty", b"", "the plan is empty"),
    ("blank", b" \n", "the plan is empty"),
    ("truncated", dumps(TINY_PLAN).encode()[:900], "not valid JSON"),
    ("not JSON", b"hello", "not valid JSON"),
    ("a spec", TINY.encode(), "not valid JSON"),
    ("a list", b"[1, 2]", "a plan is a JSON object"),
    ("a number", b"3", "a plan is a JSON object"),
    ("another object", b'{"a": 1}', "no `plan_version`"),
    ("NaN", dumps(TINY_PLAN).replace("0.0008", "NaN").encode(), "is not a number that a plan can hold"),
    ("1e999", dumps(TINY_PLAN).replace("0.0008", "1e999").encode(), "too large for a number"),
    ("huge integer", dumps(TINY_PLAN).replace('"steps": 20', '"steps": ' + "9" * 5000).encode(), "not valid JSON"),
    ("binary", b"\x80\x00\xff", "not UTF-8"),
    ("too deep", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    (
        "key twice",
        dumps(TINY_PLAN).replace('"name": "tiny"', '"name": "tiny", "name": "other"').encode(),
        "appears twice",
    ),
]

# name, plan, edit, fragment of the complaint, id of the rule or None
EDITS: list[tuple[str, Any, Edit, str, str | None]] = [
    ("other major", TINY_PLAN, edit("plan_version", "2.0"), "this Titan reads version 1.x", None),
    ("odd version", TINY_PLAN, edit("plan_version", 1), "`plan_version` must be text", None),
    ("half a pair", TINY_PLAN, edit("layers.0.fqn", "a\ud800"), "`layers[0].fqn` is the text 'a\\ud800'", None),
    ("half a pair as key", TINY_PLAN, edit("job.environment", {"\ud800": ""}), "`job.environment` has the key '\\ud800'", None),
    ("misspelt field", TINY_PLAN, rename("fsdp.param_dtype", "param_dtyp"), "`fsdp` lacks the field `param_dtype`", None),
    ("field removed", TINY_PLAN, drop("optimizer.lr"), "`optimizer` lacks the field `lr`", None),
    ("section removed", TINY_PLAN, drop("mesh"), "lacks the field `mesh`", None),
    ("section null", TINY_PLAN, edit("mesh", None), "`mesh` must be a mapping of fields", None),
    ("wrong type", TINY_PLAN, edit("mesh.tp", "two"), "`mesh.tp` must be a whole number", None),
    ("zero degree", TINY_PLAN, edit("mesh.tp", 0), "`mesh.tp` is 0, but it must be at least 1", None),
    ("negative lr", TINY_PLAN, edit("optimizer.lr", -1), "must be greater than 0", None),
    ("timeout", TINY_PLAN, edit("job.comm.init_timeout_seconds", 10**18), "must be at most 2,592,000", None),
    ("steps", TINY_PLAN, edit("job.steps", 10**18), "must be at most 1,000,000,000", None),
    ("minutes", TINY_PLAN, edit("job.checkpoint.interval_minutes", 1e300), "must be at most 1,000,000", None),
    ("unknown dtype", TINY_PLAN, edit("dtype", "float16"), "`dtype` is the text 'float16'", None),
    ("unknown kind", TINY_PLAN, edit("model.blocks.0.block.attention.kind", "mha"), "but it must be `gqa`", None),
    ("odd heads", TINY_PLAN, edit("model.blocks.0.block.attention.num_kv_heads", 3),
     "does not divide `num_heads` 16", "model-heads"),
    ("no blocks", TINY_PLAN, edit("model.blocks", []), "needs at least 1", None),
    ("decay too long", TINY_PLAN, edit("lr_schedule.decay_steps", 9999), "exceed the curve's `total_steps`", "lr-curve"),
    ("keep one", TINY_PLAN, edit("job.checkpoint.keep_latest_k", 1), "no complete checkpoint", "checkpoint-keep"),
    ("tp by hand", TINY_PLAN, edit("mesh.tp", 2), "= 8 ranks, but the cluster has 4 GPUs", "mesh-world"),
    ("cluster by hand", TINY_PLAN, edit("cluster.nodes", 2), "but the cluster has 8 GPUs", "mesh-world"),
    ("layer removed", TINY_PLAN, drop("layers.3"), "`layers` lacks `layers.2`", "plan-layers"),
    ("layer twice", TINY_PLAN, edit("layers.3.fqn", "layers.1"), "lacks `layers.2`", "plan-layers"),
    ("layers swapped", TINY_PLAN, lambda d: d["layers"].reverse(), "not in the model's order", "plan-layers"),
    ("undefined policy", TINY_PLAN, edit("layers.1.checkpoint", "sometimes"), "which is not defined", "plan-policies"),
    (
        "policy twice",
        PIPELINE_PLAN,
        lambda d: d["activation_checkpoint"]["policies"].append(d["activation_checkpoint"]["policies"][0]),
        "is defined 2 times",
        "plan-policies",
    ),
    ("stage too high", PIPELINE_PLAN, edit("layers.34.stage", 99), "but there are 8 stages", "plan-stage-order"),
    ("stages not in order", PIPELINE_PLAN, edit("layers.5.stage", 7), "contiguous modules in order", "plan-stage-order"),
    ("stage empty", PIPELINE_PLAN, lambda d: [layer.update(stage=max(1, layer["stage"])) for layer in d["layers"]],
     "stage 0 holds no module", "plan-stage-order"),
    ("stage numbers", PIPELINE_PLAN, edit("pipeline.stages.1.index", 5), "the stage indices are", "plan-stages"),
    ("stages uneven", PIPELINE_PLAN, edit("pipeline.stages.1.pp_rank", 0), "must hold equally many each", "plan-stages"),
    (
        "stages misplaced",
        PIPELINE_PLAN,
        lambda d: (d["pipeline"]["stages"][1].update(pp_rank=2), d["pipeline"]["stages"][2].update(pp_rank=1)),
        "places stage s on rank s modulo 4",
        "pp-schedule",
    ),
    ("schedule for one stage", PIPELINE_PLAN, edit("pipeline.schedule", "1F1B"), "needs exactly 1 stage a rank", "pp-schedule"),
    ("V placement", PIPELINE_PLAN, edit("pipeline.schedule", "ZBVZeroBubble"), "places stage s on rank min", "pp-schedule"),
    ("schedule without pp", TINY_PLAN, edit("pipeline.schedule", "1F1B"), "but pp is 1", "pp-schedule"),
    ("no schedule", PIPELINE_PLAN, edit("pipeline.schedule", None), "neither a schedule nor", "pp-schedule"),
    (
        "partial reshard with tp",
        PIPELINE_PLAN,
        lambda d: (d["mesh"].update(tp=2, dp_shard=4), d["fsdp"]["units"][1].update(reshard_after_forward=2)),
        "cannot reshard to 2 of 4 ranks together with tp = 2",
        "tp-partial-reshard",
    ),
    (
        "partial reshard of experts",
        MOE_PLAN,
        lambda d: (d["mesh"].update(dp_shard=8), d["cluster"].update(gpus_per_node=8),
                   d["batch"].update(local_batch_size=1, microbatch_size=1, accumulation_steps=1),
                   d["fsdp"]["units"][1].update(reshard_after_forward=2)),
        "cannot reshard experts to 2 of the 4 ranks",
        "experts-partial-reshard",
    ),
    (
        "partial reshard of parts of experts",
        MOE_PLAN,
        lambda d: (d["mesh"].update(dp_shard=16, ep=1), d["cluster"].update(gpus_per_node=16), d.update(sharding=[]),
                   d["batch"].update(global_batch_size=16, local_batch_size=1, microbatch_size=1, accumulation_steps=1),
                   d["fsdp"]["units"][1].update(reshard_after_forward=2)),
        "cannot reshard experts to 2 of the 16 ranks",
        "experts-partial-reshard",
    ),
    (
        "split backward with reshard",
        PIPELINE_PLAN,
        lambda d: (
            d["pipeline"].update(schedule="InterleavedZeroBubble"),
            d["fsdp"]["units"][1].update(reshard_after_forward=True),
        ),
        "trains wrong without an error",
        "pp-split-backward-reshard",
    ),
    (
        "split backward, selective",
        PIPELINE_PLAN,
        edit("pipeline.schedule", "InterleavedZeroBubble"),
        "runs backward twice over a stage",
        "pp-split-backward-selective",
    ),
    (
        "microbatches",
        PIPELINE_PLAN,
        lambda d: (d["pipeline"].update(microbatches=9), d["batch"].update(local_batch_size=9, global_batch_size=18)),
        "do not divide 9 microbatches",
        "pp-microbatches",
    ),
    ("microbatch size", PIPELINE_PLAN, edit("batch.microbatch_size", 3), "is not the local batch 16", "batch-micro"),
    ("microbatches without pp", TINY_PLAN, edit("pipeline.microbatches", 4), "without a pipeline", "batch-micro"),
    ("global batch", TINY_PLAN, edit("batch.global_batch_size", 17), "the global batch 17 is not", "batch-product"),
    ("long sequence", TINY_PLAN, edit("batch.seq_len", 200_000), "longer than the model's maximum", "seq-max"),
    ("sequence split", PIPELINE_PLAN, edit("batch.seq_len", 8190), "is not a multiple of tp 4", "seq-split"),
    (
        "heads",
        PIPELINE_PLAN,
        lambda d: d["model"]["blocks"][0]["block"]["attention"].update(num_heads=30, num_kv_heads=30),
        "does not divide the 30 query heads",
        "tp-heads",
    ),
    ("kv replicas", PIPELINE_PLAN, edit("tensor_parallel.kv_replicas", 3), "held 3 times each", "tp-heads"),
    ("vocabulary", PIPELINE_PLAN, edit("model.vocab_size", 128255), "does not divide the vocabulary of 128255", "tp-dims"),
    ("sequence parallel alone", TINY_PLAN, edit("tensor_parallel.sequence_parallel", True), "but tp is 1", "tp-options"),
    (
        "async without compile",
        PIPELINE_PLAN,
        edit("compile.enable", False),
        "async tensor parallelism needs the model compiled",
        "tp-options",
    ),
    ("sharding unknown", PIPELINE_PLAN, edit("sharding.0.module", "embeddings"), "matches no module", "sharding-rows"),
    ("sharding twice", PIPELINE_PLAN, edit("sharding.5.module", "layers.*.attention.wq"), "is placed twice", "sharding-rows"),
    ("sharding dim", PIPELINE_PLAN, edit("sharding.3.weight", "S(2)"), "has no weight dim 2", "sharding-rows"),
    ("sharding gone", PIPELINE_PLAN, edit("sharding", []), "no module is placed on the axis `tp`", "sharding-rows"),
    ("sharding text", PIPELINE_PLAN, edit("sharding.0.weight", "Shard(0)"), "must look like", None),
    ("ep without experts", TINY_PLAN, edit("mesh.ep", 2), "the model has no experts", "ep-region"),
    ("ep of experts", MOE_PLAN, edit("mesh.ep", 3), "does not divide the 8 experts", "ep-region"),
    ("ep of the region", MOE_PLAN, edit("mesh.ep", 8), "does not divide dp_shard x cp x tp = 4", "ep-region"),
    ("experts not placed", MOE_PLAN, drop("sharding.1"), "`layers.1.moe.experts.w2` is not placed", "ep-experts"),
    ("expert dim", MOE_PLAN, edit("sharding.0.weight", "S(3)"), "has no weight dim 3", "sharding-rows"),
    ("experts to 4", MOE_PLAN, edit("fsdp.units.1.reshard_after_forward", 4), "does not divide the 2 ranks", "fsdp-units"),
    ("weight as unit", MOE_PLAN, edit("fsdp.units.1.modules.0", "layers.*.moe.experts.w1"), "no module", "fsdp-units"),
    ("unit in selective", PIPELINE_PLAN, edit("fsdp.units.0.modules.0", "layers.3.feed_forward"), "FSDP unit inside of",
     "ac-nested-units"),
    ("unknown layer kind", MOE_PLAN, edit("model.blocks.1.block.feed_forward.kind", "mo"), "one of `swiglu`, `mlp`, `moe`", None),
    ("field of a kind", MOE_PLAN, drop("model.blocks.1.block.feed_forward.top_k"), "lacks the field `top_k`", None),
    ("too many chosen", MOE_PLAN, edit("model.blocks.1.block.feed_forward.top_k", 9), "more than the 8 experts", "model-routing"),
    ("router in float8", MOE_PLAN, lambda d: d["float8"].update(
        recipe="tensorwise", emulate=True, converted=["layers.*.moe.router.gate"]), "is a router", "float8-linears"),
    ("etp", PIPELINE_PLAN, edit("mesh.etp", 2), "is neither 1 nor tp = 4", "ep-region"),
    ("unit unknown", TINY_PLAN, edit("fsdp.units.0.modules.0", "embed"), "matches no module", "fsdp-units"),
    ("unit twice", TINY_PLAN, edit("fsdp.units.0.modules.0", "norm"), "is in the FSDP units 0 and 2", "fsdp-units"),
    ("tied apart", TIED_PLAN, edit("fsdp.units.1.modules", ["norm", "output"]), "has only one of them", "fsdp-tied"),
    ("reshard to 3", TINY_PLAN, edit("fsdp.units.1.reshard_after_forward", 3), "does not divide the 4 ranks", "fsdp-units"),
    ("reshard to 1", TINY_PLAN, edit("fsdp.units.1.reshard_after_forward", 1), "needs at least 2 ranks", "fsdp-units"),
    ("ddp with shards", TINY_PLAN, edit("fsdp.strategy", "ddp"), "DDP replicates parameters", "fsdp-units"),
    ("checkpointed norm", PIPELINE_PLAN, edit("layers.33.checkpoint", "selective_op"), "only blocks can be", "ac-layers"),
    ("float8 unknown", PIPELINE_PLAN, edit("float8.converted.0", "layers.*.attention.wz"), "matches no linear", "float8-linears"),
    (
        "float8 both",
        PIPELINE_PLAN,
        lambda d: d["float8"]["skipped"].append({"module": "layers.0.feed_forward.w1", "reason": "?"}),
        "both converted and skipped",
        "float8-linears",
    ),
    ("float8 without recipe", PIPELINE_PLAN, edit("float8.recipe", None), "`recipe` is null", "float8-options"),
    ("actions without pp", TINY_PLAN, edit("pipeline.actions", ["F0"]), "a table of actions is given, but pp is 1", "pp-schedule"),
    ("actions of too few ranks", PIPELINE_PLAN, edit("pipeline.actions", ["0F0"]),
     "1 rows of actions for 4 pipeline ranks", "pp-actions"),
    *(
        (f"actions: {name}", ACTIONS_PLAN, edit("pipeline.actions", rows), fragment, "pp-actions")
        for name, rows, fragment in (
            ("backward twice", ["0F0,0F1,0B0,0B1,0B1", LAST], "0B1 is twice in row 0"),
            ("backward twice everywhere", ["0F0,0F1,0B0,0B1,0B1", LAST + ",1B1"], "0B1 is twice in row 0"),
            ("backward whole and split", ["0F0,0F1,0B0,0I0,0W0,0B1", LAST], "0I0 in row 0 repeats a backward"),
            ("weights twice", ["0F0,0F1,0I0,0W0,0W0,0B1", LAST], "0W0 is twice in row 0"),
            ("forward twice", ["0F0,0F0,0F1,0B0,0B1", LAST], "0F0 is twice in row 0"),
            ("rows swapped", [LAST, FIRST], "1F0 is in row 0, but pipeline rank 0 does not hold stage 1"),
            ("microbatch dropped", ["0F0,0B0", "1F0,1B0"], "row 0 lacks 0F1"),
            ("backward dropped", ["0F0,0F1,0B0", LAST], "row 0 lacks 0B1 or 0I1"),
            ("weights dropped", ["0F0,0F1,0I0,0W0,0I1", LAST], "row 0 lacks 0B1 or 0W1"),
            ("weights before inputs", ["0F0,0F1,0W0,0I0,0B1", LAST], "0W0 in row 0 comes before 0I0"),
            ("row dropped", [FIRST], "1 rows of actions for 2 pipeline ranks"),
            ("row too many", [FIRST, LAST, ""], "3 rows of actions for 2 pipeline ranks"),
            ("garbage", ["hello", LAST], "`hello` in row 0 is no action"),
            ("empty", ["", ""], "row 0 lacks 0F0"),
            ("no rows", [], "0 rows of actions for 2 pipeline ranks"),
            ("transfers", [FIRST, "1RECV_F0," + LAST], "`1RECV_F0` in row 1 is no action"),
            ("no such microbatch", [FIRST + ",0F7", LAST], "names microbatch 7, but there are 2"),
            ("deadlock", ["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"], "wait for each other for ever"),
        )
    ),
    (
        "actions that split backward, reshard",
        ACTIONS_PLAN,
        lambda d: (d["pipeline"].update(actions=[SPLIT, LAST]), d["fsdp"]["units"][1].update(reshard_after_forward=True)),
        "a table of actions with I and W with FSDP units that reshard",
        "pp-split-backward-reshard",
    ),
    (
        "actions that split backward, selective",
        ACTIONS_PLAN,
        lambda d: (d["pipeline"].update(actions=[SPLIT, LAST]),
                   d["activation_checkpoint"].update(policies=encode(PIPELINE_PLAN)["activation_checkpoint"]["policies"]),
                   d["layers"][1].update(checkpoint="selective_op")),
        "a table of actions with I and W runs backward twice",
        "pp-split-backward-selective",
    ),
    ("emulated nothing", TINY_PLAN, edit("float8.emulate", True), "`emulate` is on, but `recipe` is null", "float8-options"),
    ("recompute, not selective", TINY_PLAN, edit("activation_checkpoint.policies.0.recompute_every_second_matmul", True),
     "goes with mode selective only, but the mode is none", "ac-options"),
    ("linears, not selective", TINY_PLAN, edit("activation_checkpoint.policies.0.force_recompute_fqns", ["output"]),
     "`force_recompute_fqns` goes with mode selective only", "ac-options"),
    ("recompute unknown", PIPELINE_PLAN, edit("activation_checkpoint.policies.1.force_recompute_fqns", ["layers.*.wk"]),
     "`layers.*.wk` matches no linear", "ac-recompute"),
    ("odd op", PIPELINE_PLAN, edit("activation_checkpoint.policies.1.save_ops", ["aten.mm"]), "must look like", None),
    ("compile nothing", PIPELINE_PLAN, edit("compile.components", []), "`components` is empty", "compile-components"),
    ("dataset of a text", TINY_PLAN, edit("data.dataset", "c4"), "reads `path`, not the dataset `c4`", "data-source"),
    ("capacity", TINY_PLAN, edit("expert_parallel.capacity_factor", 1.0), "model has no experts", "ep-options"),
    ("dispatch without ep", MOE_PLAN, lambda d: (d["mesh"].update(ep=1), d.update(sharding=[]),
                                                 d["expert_parallel"].update(comm_backend="deepep")),
     "sends tokens between expert ranks, but ep is 1", "ep-options"),
    ("dispatch inside experts", MOE_PLAN, lambda d: (d["mesh"].update(etp=2, tp=2), d["expert_parallel"].update(
        comm_backend="hybridep"), d["cluster"].update(gpus_per_node=8)), "whole experts, but etp is 2", "ep-options"),
    ("dispatch on a CPU", MOE_PLAN, edit("expert_parallel.comm_backend", "deepep"), "for NVIDIA GPUs, which cpu", "ep-options"),
    ("etp of a dense model", PIPELINE_PLAN, edit("mesh.etp", 4), "etp = 4, but the model has no experts", "ep-region"),
    (
        "too many rows of experts",
        MOE_PLAN,
        lambda d: (d["cluster"]["gpu"].update(device="cuda"), d["model"].update(max_seq_len=2**20),
                   d["batch"].update(seq_len=2**20, local_batch_size=4, global_batch_size=16, microbatch_size=4,
                                     accumulation_steps=1)),
        "8,388,608 rows of 256 elements, 2,147,483,648 in all",
        "ep-rows",
    ),
    (
        "async without sequence parallel",
        PIPELINE_PLAN,
        edit("tensor_parallel.sequence_parallel", False),
        "without sequence parallel there are none",
        "tp-options",
    ),
    (
        "async over nodes",
        PIPELINE_PLAN,
        lambda d: d["cluster"].update(nodes=16, gpus_per_node=2),
        "tp = 4 spans nodes of 2 GPUs",
        "tp-options",
    ),
    ("async on a CPU", PIPELINE_PLAN, edit("cluster.gpu.device", "cpu"), "device is cpu", "tp-options"),
    ("scales ahead without the all-gather", PIPELINE_PLAN,
     edit("float8.precompute_float8_dynamic_scale_for_fsdp", True), "go with the Float8 all-gather only", "float8-hardware"),
    ("groups of experts", MOE_PLAN, lambda d: d["model"]["blocks"][1]["block"]["feed_forward"].update(
        num_groups=3, num_limited_groups=1), "`num_groups` 3 does not divide the 8 experts", "model-routing"),
    ("groups of one", MOE_PLAN, lambda d: d["model"]["blocks"][1]["block"]["feed_forward"].update(
        num_groups=8, num_limited_groups=2), "leaves 1 expert a group", "model-routing"),
    ("profiler period", TINY_PLAN, edit("job.profiling.profile_freq", 2), "shorter than warmup 3", "profiling-period"),
    ("forced balance", TINY_PLAN, edit("expert_parallel.force_load_balance", True), "model has no experts", "ep-options"),
    ("float8 hardware", PIPELINE_PLAN, edit("cluster.gpu.float8", False), "has no Float8", "float8-hardware"),
    (
        "float8 experts unknown",
        MOE_PLAN,
        lambda d: d["float8"].update(recipe="mxfp8", emulate=True, experts=["layers.0.moe.experts"]),
        "matches no experts",
        "float8-experts",
    ),
    (
        "float8 experts of a dense model",
        TINY_PLAN,
        lambda d: d["float8"].update(recipe="mxfp8", emulate=True, experts=["layers.*.moe.experts"]),
        "has no experts to compute in 8 bits",
        "float8-experts",
    ),
    ("mxfp8 hardware", PIPELINE_PLAN, edit("float8.recipe", "mxfp8"), "has no MXFP8", "float8-hardware"),
    ("float8 dims", PIPELINE_PLAN, edit("model.dim", 4088), "but Float8 needs multiples of 16", "float8-linears"),
    (
        "float8 tokens",
        PIPELINE_PLAN,
        lambda d: d["batch"].update(seq_len=8188),
        "8188 tokens, but Float8 needs a multiple of 16",
        "float8-tokens",
    ),
    (
        "float8 chunks",
        PIPELINE_PLAN,
        lambda d: (d["float8"]["converted"].append("output"), d["float8"].update(skipped=[]), d["loss"].update(chunks=1024)),
        "`output` sees 8192 tokens in 1024 chunks",
        "float8-tokens",
    ),
    (
        "float8 all-gather of odd rows",
        TINY_PLAN,
        lambda d: (d["float8"].update(recipe="tensorwise", converted=["output"], emulate=True,
                                      enable_fsdp_float8_all_gather=True),
                   d["mesh"].update(dp_shard=3), d["cluster"].update(gpus_per_node=3),
                   d["batch"].update(global_batch_size=15, accumulation_steps=5, local_batch_size=1, microbatch_size=1)),
        "rows do not divide over the 3 ranks",
        "float8-all-gather",
    ),
    (
        "float8 all-gather of a tied output",
        TINY_PLAN,
        lambda d: (d["float8"].update(recipe="tensorwise", converted=["output"], emulate=True,
                                      enable_fsdp_float8_all_gather=True), d["model"].update(tied=True)),
        "its weight is the embedding's",
        "float8-all-gather",
    ),
    (
        "float8 all-gather resharded in part",
        TINY_PLAN,
        lambda d: (d["float8"].update(recipe="tensorwise", converted=["layers.*.feed_forward.w1"], emulate=True,
                                      enable_fsdp_float8_all_gather=True),
                   d["fsdp"]["units"][1].update(reshard_after_forward=2)),
        "like that of `layers.0.feed_forward.w1`, cannot be resharded to 2 of 4 ranks",
        "float8-all-gather",
    ),
    (
        "float8 all-gather without fsdp",
        TINY_PLAN,
        lambda d: (d["float8"].update(recipe="tensorwise", converted=["output"], emulate=True,
                                      enable_fsdp_float8_all_gather=True), d["fsdp"].update(strategy="ddp")),
        "gathers no weights",
        "float8-all-gather",
    ),
    ("chunks", TINY_PLAN, edit("loss.chunks", 3), "3 chunks do not divide", "loss-chunks"),
    (
        "pattern",
        TINY_PLAN,
        edit("optimizer.param_groups", [{"pattern": "nothing", "lr_scale": 1.0, "weight_decay": None}]),
        "matches no parameter",
        "optimizer-groups",
    ),
    (
        "pattern behind a wider one",
        TINY_PLAN,
        edit("optimizer.param_groups", [{"pattern": pattern, "lr_scale": 1.0, "weight_decay": None}
                                        for pattern in ("attention", "^norm", "attention_norm|wq|^norm")]),
        "`attention_norm|wq|^norm` has no effect: earlier patterns claim all",
        "optimizer-groups",
    ),
    (
        "fused in two dtypes",
        TINY_PLAN,
        edit("optimizer.state_dtype", "bfloat16"),
        "keeps moments in the parameters' float32",
        "optimizer-state",
    ),
    (
        "a moment that never decays",
        TINY_PLAN,
        lambda d: d["optimizer"].update(state_dtype="bfloat16", implementation="foreach", beta2=0.999),
        "rounds back to what it was",
        "optimizer-state",
    ),
    ("offload on a CPU", TINY_PLAN, edit("fsdp.cpu_offload", True), "in host memory already", "fsdp-offload"),
    (
        "offload with ddp",
        PIPELINE_PLAN,
        lambda d: d["fsdp"].update(cpu_offload=True, strategy="ddp"),
        "keeps every parameter on the GPU",
        "fsdp-offload",
    ),
    (
        "snapshots on a CPU",
        TINY_PLAN,
        edit("job.profiling.enable_memory_snapshot", True),
        "snapshots are of CUDA's allocator",
        "job-memory-snapshot",
    ),
    ("no path", TINY_PLAN, edit("data.path", None), "names no path", "data-source"),
    ("absolute path", TINY_PLAN, edit("data.path", "/etc"), "is an absolute path", "paths-relative"),
    ("validation", TINY_PLAN, edit("job.validation.enable", True), "names no text", "job-validation"),
    (
        "validation of nothing",
        TINY_PLAN,
        lambda d: d["job"]["validation"].update(enable=True, path="data/sample", steps=0),
        "takes 0 batches",
        "job-validation",
    ),
    ("environment", TINY_PLAN, edit("job.environment", {"A B": "1"}), "not the name of an environment", "job-environment"),
    ("environment value", TINY_PLAN, edit("job.environment", {"A": "1\0"}), "the value of the environment variable `A`",
     "job-environment"),
    *((f"environment {name}", TINY_PLAN, edit("job.environment", {name: "1"}), f"`{name}` is set by the launcher",
       "job-environment") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                                       "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")),
    (
        "ulysses",
        PIPELINE_PLAN,
        lambda d: (d["mesh"].update(cp=16, dp_shard=1), d["cluster"].update(nodes=32),
                   d["context_parallel"].update(method="alltoall"), d["batch"].update(global_batch_size=16)),
        "splits 8 KV heads over cp 16 x tp 4",
        "cp-heads",
    ),
    (
        "ptrr",
        TINY_PLAN,
        lambda d: (d["mesh"].update(cp=2, dp_shard=2), d["context_parallel"].update(load_balance="ptrr")),
        "the balance ptrr sorts the block masks of FlexAttention",
        "cp-balance",
    ),
]  # fmt: skip


def read_error(path) -> PlanError:
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    return caught.value


@pytest.mark.parametrize(("content", "fragment"), [case[1:] for case in FREE_TEXT], ids=[case[0] for case in FREE_TEXT])
def test_damaged_file(tmp_path, content, fragment, capsys):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert fragment in str(read_error(path))
    assert main(["show", str(path)]) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "change", "fragment", "rule"), [case[1:] for case in EDITS], ids=[case[0] for case in EDITS]
)
def test_edited_plan(tmp_path, plan, change, fragment, rule, capsys):
    data = copy.deepcopy(encode(plan))
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    error = read_error(path)
    hit = [c for c in error.complaints if fragment in c.message]
    assert hit, str(error)
    assert all("\n" not in c.message and str(path) in str(c.place) for c in error.complaints)
    assert hit[0].rule == rule
    assert main(["validate", str(path)]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_every_rule_has_a_plan_that_breaks_it():
    broken = {case[4] for case in EDITS if case[4]}
    assert {rule.id for rule in RULES} <= broken
    assert broken <= {rule.id for rule in (*RULES, *INVARIANTS)}


def test_legal_edits_are_accepted_and_change_the_digest(tmp_path):
    data = encode(TINY_PLAN)
    data["optimizer"]["lr"] = 0.001
    data["fsdp"]["units"][1]["reshard_after_forward"] = 2
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert digest(load_plan(path)) != digest(TINY_PLAN)


def test_job_and_labels_do_not_change_the_digest(tmp_path):
    data = encode(TINY_PLAN)
    data["job"]["steps"] = 7
    data["job"]["dump_folder"] = "elsewhere"
    data["data"]["path"] = "other/place"
    data["name"] = "another"
    data["remarks"] = []
    data["estimate"] = None
    data["cluster"]["gpu"]["source"] = "hearsay"
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert digest(load_plan(path)) == digest(TINY_PLAN)


def test_unknown_fields_of_the_same_major_are_ignored_with_a_note(tmp_path):
    data = encode(TINY_PLAN)
    data["plan_version"] = "1.9"
    data["quantum"] = {"entangle": True}
    data["mesh"]["warp"] = 4
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    plan, notes = load_plan_with_notes(path)
    assert digest(plan) == digest(TINY_PLAN)
    assert [note.address for note in notes] == ["mesh.warp", "quantum"]


def test_missing_file_and_folder(tmp_path):
    assert "cannot be read" in str(read_error(tmp_path / "none.json"))
    assert "cannot be read" in str(read_error(tmp_path))


def test_there_are_enough_cases():
    assert len(EDITS) + len(FREE_TEXT) >= 60


def test_every_time_and_count_of_the_job_is_bounded():
    """A timeout or a number of steps of 10**18 would crash the runtime in `timedelta` or never end."""
    for record in (Job, Checkpoint, Comm, Metrics, Profiling, Validation, LrSchedule, Batch):
        for name, field in bounded_fields(record):
            assert name == "token_budget" or field.le is not None, f"{record.__name__}.{name}"
    for record in (CheckpointSpec, CommSpec, MetricsSpec, ProfilingSpec, ValidationSpec, LrSchedulerSpec):
        for name, field in bounded_fields(record):
            assert field.le is not None, f"{record.__name__}.{name}"
