"""The table of capabilities: every pair of features compiles or is refused as the table says, and the pages are current."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import plans
from titan_planner.cli import main
from titan_planner.compiler import compile_spec, find_or_read_model
from titan_planner.ir import capabilities
from titan_planner.ir.capabilities import ROWS, needs, together, verdict
from titan_planner.ir.errors import SpecError
from titan_planner.ir.features import EXCLUSIVE, FEATURES, Asked
from titan_planner.ir.parallel import SCHEDULES
from titan_planner.ir.plan import Plan
from titan_planner.ir.verify import verify
from titan_planner.machines import resolve_cluster
from titan_planner.models import MODELS
from titan_planner.passes import PASSES
from titan_planner.render.capabilities import model_capabilities, page, tp_degrees
from titan_planner.rules import known_rules
from titan_planner.spec import load_spec
from titan_runtime.capabilities import MISSING

from .builders import MOE, PIPELINE, TINY, compile_text
from .test_damaged_plans import EDITS

ROOT = Path(__file__).resolve().parents[2]

BASE: dict[str, Any] = {
    "spec_version": 1,
    "model": {"family": "llama3", "flavor": "debug", "overrides": {"num_layers": 8}},
    # A GPU that has everything, so that only combinations are refused.
    "cluster": {"gpu": "b200-180gb", "nodes": 1},
    "training": {"steps": 10, "seq_len": 256, "local_batch_size": 8},
    "parallelism": dict.fromkeys(
        ("pipeline_parallel_degree", "data_parallel_replicate_degree", "data_parallel_shard_degree",
         "context_parallel_degree", "tensor_parallel_degree", "expert_parallel_degree", "expert_tensor_parallel_degree"), 1
    ) | {"enable_async_tensor_parallel": False},
    "activation_checkpoint": {"mode": "none"},
    "compile": {"enable": False},
    "data": {"source": "text", "path": "data/sample", "tokenizer": "data/tokenizer.json"},
}  # fmt: skip


def pins(**values: Any) -> dict[str, Any]:
    """Pins of the section parallelism."""
    return {"parallelism": values}


COMPILED = {"compile": {"enable": True, "components": ["model"]}}
TP = pins(tensor_parallel_degree=2)
MODEL_OF = {
    "swiglu": BASE["model"],
    "mlp": {"family": "debug_mlp", "flavor": "debug", "overrides": {"num_layers": 8}},
    "moe": {"family": "debug_moe", "flavor": "debug", "overrides": {}},
}

# feature -> what turns it on, and what else that uses.
ON: dict[str, tuple[list[dict[str, Any]], set[str]]] = {
    **{name: ([], set()) for name in MODEL_OF},
    "tied": ([{"model": {"overrides": {"tied": True}}}], set()),
    "pp": ([pins(pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B")], {"1F1B"}),
    "dp_replicate": ([pins(data_parallel_replicate_degree=2)], set()),
    "dp_shard": ([pins(data_parallel_shard_degree=2)], set()),
    "ddp": ([pins(data_parallel_replicate_degree=2, data_parallel_strategy="ddp")], {"dp_replicate"}),
    "cp": ([pins(context_parallel_degree=2)], set()),
    "tp": ([TP], set()),
    "ep": ([TP, pins(expert_parallel_degree=2)], {"tp"}),
    "etp": ([TP, pins(expert_tensor_parallel_degree=2)], {"tp"}),
    **{
        name: ([pins(pipeline_parallel_degree=2, pipeline_parallel_schedule=name)], {"pp"}) for name in SCHEDULES
    },
    "keep_all": ([{"activation_checkpoint": {"mode": "none"}}], set()),
    "full": ([{"activation_checkpoint": {"mode": "full"}}], set()),
    "selective": ([{"activation_checkpoint": {"mode": "selective"}}], set()),
    "memory_budget": ([{"activation_checkpoint": {"mode": "memory_budget"}}, COMPILED], {"compiled_model"}),
    "compiled_model": ([COMPILED], set()),
    "compiled_loss": ([{"compile": {"enable": True, "components": ["model", "loss"]}}], {"compiled_model"}),
    **{
        name: ([{"float8": {"recipe": name}}], set())
        for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
    },
    "float8_all_gather": ([{"float8": {"enable_fsdp_float8_all_gather": True}}], set()),
    "float8_scales": (
        [{"float8": {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}}],
        {"float8_all_gather"},
    ),
    "float8_experts": ([{"float8": {"grouped_mm_fqns": ["experts"]}}], {"moe"}),
    "emulate": ([{"float8": {"emulate": True}}], set()),
    "auto_filter": ([{"float8": {"filter_fqns": ["auto_filter_small_kn"]}}], set()),
    "whole_stream": ([TP, pins(enable_sequence_parallel=False)], {"tp"}),
    "async_tp": ([TP, COMPILED, pins(enable_async_tensor_parallel=True)], {"tp", "compiled_model"}),
    **{
        f"cp_{name}": ([pins(context_parallel_degree=2, context_parallel_method=name)], {"cp"})
        for name in ("allgather", "ring", "alltoall")
    },
    "ptrr": ([pins(context_parallel_degree=2, context_parallel_load_balancer="ptrr")], {"cp"}),
    "reshard": ([pins(data_parallel_shard_degree=2, fsdp_reshard_after_forward="always")], {"dp_shard"}),
    "partial_reshard": ([pins(data_parallel_shard_degree=4, fsdp_reshard_after_forward=2)], {"dp_shard", "reshard"}),
    "cpu_offload": ([{"training": {"enable_cpu_offload": True}}], set()),
    **{
        name: ([TP, pins(expert_parallel_degree=2, expert_parallel_comm_backend=name)], {"ep", "tp"})
        for name in ("deepep", "hybridep")
    },
    "capacity_factor": ([pins(expert_capacity_factor=1.5)], set()),
    "force_load_balance": ([pins(moe_force_load_balance=True)], set()),
}  # fmt: skip
OF_EXPERTS = {"ep", "etp", "deepep", "hybridep", "capacity_factor", "force_load_balance", "float8_experts"}
RECIPE_OF = {"float8_all_gather": "tensorwise", "float8_scales": "tensorwise", "float8_experts": "mxfp8", "emulate": "tensorwise",
             "auto_filter": "tensorwise"}  # fmt: skip


def laid(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`base` with the mappings of `more` laid over it; of two degrees the larger one."""
    for name, value in more.items():
        if isinstance(value, dict):
            base[name] = laid(dict(base.get(name, {})), value)
        elif name.endswith("_degree"):
            base[name] = max(value, base.get(name, 1))
        else:
            base[name] = value
    return base


def combined(a: str, b: str) -> tuple[dict[str, Any], set[str]]:
    """A spec with both features and little else, and the features it has."""
    spec = copy.deepcopy(BASE)
    uses = {a, b, "gqa"} | ON[a][1] | ON[b][1]
    kind = next((name for name in (a, b) if name in MODEL_OF), "moe" if {a, b} & OF_EXPERTS else "swiglu")
    spec["model"] = copy.deepcopy(MODEL_OF[kind])
    recipes = [name for name in (a, b) if name in FEATURES and FEATURES[name].at == "float8.recipe"]
    recipe = next(iter(recipes), None) or next((RECIPE_OF[name] for name in (a, b) if name in RECIPE_OF), None)
    if recipe:
        laid(spec, {"float8": {"recipe": recipe}})
        uses.add(recipe)
    for change in (*ON[a][0], *ON[b][0]):
        laid(spec, change)
    # A schedule stands in for the plain pipeline, and one float8 recipe for all its options.
    schedules = [name for name in (a, b) if name in SCHEDULES]
    if schedules:
        spec["parallelism"]["pipeline_parallel_schedule"] = schedules[0]
        uses -= set(SCHEDULES) - set(schedules)
    if "sequence_parallel" not in (a, b) and "tp" in uses and "whole_stream" not in uses:
        uses |= {"sequence_parallel", "loss_parallel"}
    spec["cluster"]["gpus_per_node"] = 1
    for name in (
        "pipeline_parallel",
        "data_parallel_replicate",
        "data_parallel_shard",
        "context_parallel",
        "tensor_parallel",
    ):
        spec["cluster"]["gpus_per_node"] *= spec["parallelism"][f"{name}_degree"]
    return spec, uses | {kind}


PASSES_OF_PINS = [entry for entry in PASSES if entry.__name__ not in ("search_sharding", "partition_stages")]
"""Everything that those choose is pinned here, and there are a thousand pairs."""


def compiled(tmp_path: Path, spec: dict[str, Any]) -> Plan:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return compile_spec(load_spec(path), PASSES_OF_PINS)


def outcome(tmp_path: Path, spec: dict[str, Any]) -> tuple[Plan | None, set[str | None], str]:
    """The plan, or the rules that refuse it and what they say."""
    try:
        return compiled(tmp_path, spec), set(), ""
    except SpecError as error:
        return None, {complaint.rule for complaint in error.complaints}, str(error)


@pytest.mark.parametrize("a", ON)
def test_every_pair_is_refused_or_compiles_as_the_table_says(tmp_path, a):
    for b in itertools.islice(ON, list(ON).index(a) + 1, None):
        if any(a in group and b in group for group in EXCLUSIVE) or {a, b} <= set(SCHEDULES) | {"pp"}:
            continue
        if FEATURES[a].at == FEATURES[b].at == "activation_checkpoint.policies":
            continue  # a spec pins one mode
        spec, uses = combined(a, b)
        rows = [row for pair in itertools.combinations(sorted(uses), 2) if (row := verdict(*pair)) is not None]
        forbidden = {row.rule for row in rows if row.verdict == "not with"}
        forbidden |= {need.rule for x, y in itertools.permutations(uses, 2) if together(x, y) == "no" and verdict(x, y) is None
                      for need in needs(x)}  # fmt: skip
        by_numbers = {row.rule for row in rows if row.verdict == "by numbers"}
        plan, refused, said = outcome(tmp_path, spec)
        if plan is None:
            assert refused & (forbidden or by_numbers), f"{a} with {b}: {said}"
            assert refused <= forbidden | by_numbers, f"{a} with {b}: {said}"
            continue
        assert not forbidden, f"{a} with {b} compiles, but {forbidden} forbids it"
        missing = [name for name in (a, b) if not FEATURES[name].used(plan)]
        # A filter may leave nothing to convert, and then no option of Float8 is on.
        assert not missing or plan.float8.recipe is None, f"{a} with {b} compiles without {missing}"


def test_what_spec_and_plan_say_of_a_feature_agrees(tmp_path):
    """`pinned` promises what `used` then finds."""
    for name in ON:
        spec, uses = combined(name, name)
        if any(together(*pair) == "no" for pair in itertools.combinations(sorted(uses), 2)):
            continue
        path = tmp_path / "spec.yaml"
        path.write_text(yaml.safe_dump(spec))
        loaded = load_spec(path)
        cluster, _ = resolve_cluster(loaded.spec.cluster)
        asked = Asked(loaded.spec, loaded.spec.request(), find_or_read_model(loaded.spec, tmp_path), cluster)
        plan = compile_spec(loaded)
        for feature in FEATURES.values():
            promised = feature.pinned(asked)
            assert promised is None or promised is feature.used(plan), f"{feature.name} of {name}"


NEEDS = [row for row in ROWS if row.verdict == "needs"]
WITHOUT: dict[tuple[str, str], dict[str, Any]] = {
    ("async_tp", "tp"): pins(tensor_parallel_degree=1),
    ("async_tp", "compiled_model"): {"compile": {"enable": False}},
    ("async_tp", "cuda"): {"cluster": {"gpu": "cpu"}},
    ("async_tp", "tp_in_node"): {"cluster": {"gpus_per_node": 1, "nodes": 2, "inter_node": "ib-ndr-400"},
                                 "limits": {"keep_tp_in_node": False}},
    ("cpu_offload", "cuda"): {"cluster": {"gpu": "cpu"}},
    ("memory_budget", "compiled_model"): {"compile": {"enable": False}},
    ("float8_all_gather", "tensorwise"): {"float8": {"recipe": "rowwise"}},
    ("float8_scales", "float8_all_gather"): {"float8": {"enable_fsdp_float8_all_gather": False}},
    ("float8_experts", "mxfp8"): {"float8": {"recipe": "tensorwise"}},
    **{(name, "ep"): pins(expert_parallel_degree=1) for name in ("deepep", "hybridep")},
    **{(name, "nvidia"): {"cluster": {"gpu": "mi300x-192gb"}} for name in ("deepep", "hybridep")},
    **{(name, "gpu_float8"): {"cluster": {"gpu": "a100-sxm-80gb"}} for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")},
    ("mxfp8", "gpu_mxfp8"): {"cluster": {"gpu": "h100-sxm-80gb"}},
}  # fmt: skip


@pytest.mark.parametrize("row", NEEDS, ids=lambda row: f"{row.feature} needs {row.others[0]}")
def test_what_is_needed_is_asked_for(tmp_path, row):
    """Without what it needs a feature is refused, with the row's rule at a place of the spec."""
    if row.feature in ("sequence_parallel", "loss_parallel"):
        # The planner never makes them without tensor parallelism; only an edited plan has them.
        tiny = compile_text(TINY)
        edited = replace(tiny, tensor_parallel=replace(tiny.tensor_parallel, **{row.feature: True}))
        assert [(c.rule, c.address) for c in verify(edited)] == [("tp-options", f"tensor_parallel.{row.feature}")]
        return
    spec, _ = combined(row.feature, row.feature)
    if row.feature in OF_EXPERTS:
        spec["model"] = copy.deepcopy(MODEL_OF["moe"])
    for section, changes in WITHOUT[row.feature, row.others[0]].items():
        spec[section] = {**spec.get(section, {}), **changes}
    if row.others == ("tp",):
        spec["cluster"]["gpus_per_node"] = 1
    with pytest.raises(SpecError) as caught:
        compiled(tmp_path, spec)
    hit = [complaint for complaint in caught.value.complaints if complaint.rule == row.rule]
    assert hit, str(caught.value)
    assert all(complaint.place is not None and complaint.place.line for complaint in hit)


def test_rows_name_features_and_rules_that_exist():
    for row in ROWS:
        assert {row.feature, *row.others} <= set(FEATURES), row
        assert row.rule in known_rules(), row
        if row.verdict == "by numbers":
            assert any(case[4] == row.rule for case in EDITS), f"{row.rule} never decides"
    # The exclusive groups are what records can hold one of.
    assert {name for group in EXCLUSIVE for name in group} <= set(FEATURES)


def test_rules_look_the_table_up(monkeypatch):
    """Without its rows a rule says nothing: there is no second copy of the truth."""
    plan = compile_text(PIPELINE)
    uncompiled = replace(plan, compile=replace(plan.compile, enable=False))
    assert [complaint.rule for complaint in verify(uncompiled)] == ["tp-options"]
    monkeypatch.setattr(capabilities, "rows_of", lambda rule: ())
    assert verify(uncompiled) == ()


# ------------------------------------------------------------------ the runtime


def test_the_runtime_refuses_what_the_table_says_it_does():
    by_address = {row.address: row for row in MISSING}
    features = [feature for feature in FEATURES.values() if not feature.runs]
    assert {feature.at for feature in features} == set(by_address)
    tiny = plans.tiny_plan()
    for plan in (tiny, compile_text(TINY), compile_text(MOE), compile_text(PIPELINE), *_unusual(tiny)):
        for address, row in by_address.items():
            said = any(
                feature.used(plan) for feature in features if feature.at == address and _runs_there(feature, plan)
            )
            assert said is row.asks(plan), address


def _runs_there(feature: Any, plan: Plan) -> bool:
    """Token dispatch matters to the runtime where there are tokens to dispatch."""
    return feature.name not in ("deepep", "hybridep") or plan.mesh.ep > 1


def _unusual(tiny: Plan) -> list[Plan]:
    def budget(name: str, value: float) -> Any:
        return replace(plans.NO_CHECKPOINT, name=name, mode="memory_budget", memory_budget=value)

    def with_policies(names: tuple[str, ...], enable: bool) -> Plan:
        policies = (plans.NO_CHECKPOINT, budget("some", 0.5), budget("more", 0.7))
        layers = tuple(replace(layer, checkpoint=name) for layer, name in zip(tiny.layers, names, strict=True))
        checkpoint = replace(tiny.activation_checkpoint, policies=policies)
        how = replace(tiny.compile, enable=enable, components=("model",))
        return replace(tiny, layers=layers, activation_checkpoint=checkpoint, compile=how)

    moe = compile_text(MOE)
    saving = replace(tiny.job.checkpoint, enable=True)
    return [
        with_policies(("none", "some", "more", "none", "none"), True),
        with_policies(("none", "some", "none", "none", "none"), True),
        with_policies(("none", "some", "none", "none", "none"), False),
        with_policies(("none", "some", "some", "none", "none"), True),
        *(
            replace(moe, expert_parallel=replace(moe.expert_parallel, comm_backend=name))  # type: ignore[arg-type]
            for name in ("deepep", "hybridep")
        ),
        replace(tiny, data=replace(tiny.data, source="huggingface", dataset="c4", path=None)),
        replace(tiny, job=replace(tiny.job, checkpoint=replace(saving, async_mode="async"))),
        replace(tiny, job=replace(tiny.job, checkpoint=replace(saving, enable=False, async_mode="async"))),
        replace(tiny, job=replace(tiny.job, checkpoint=replace(saving, last_save_in_hf=True))),
    ]


# ------------------------------------------------------------------ what is printed


def test_the_page_is_current():
    assert (ROOT / "docs" / "capabilities.md").read_text(encoding="utf-8") == page(), "run `make docs`"


@pytest.mark.parametrize(
    ("name", "plain", "copies"),
    [
        ("llama3:8B", [1, 2, 4, 8], {16: 2, 32: 4}),
        ("llama3:405B", [1, 2, 4, 8], {16: 2, 32: 4, 64: 8, 128: 16}),
        ("llama3:3B", [1, 2, 4, 8], {}),
        ("debug_moe:debugmodel", [1, 2, 4, 8, 16], {}),
    ],
)
def test_tensor_degrees(name, plain, copies):
    family, flavor = name.split(":")
    found = tp_degrees(MODELS[family][flavor])
    assert [tp for tp, count in found.items() if count == 1] == plain
    assert {tp: count for tp, count in found.items() if count > 1} == copies


def test_listed_degrees_compile_and_others_do_not(tmp_path):
    text = "spec_version: 1\nmodel: {family: llama3, flavor: 3B}\ncluster: {gpu: h100-sxm-80gb, gpus_per_node: %d}\n"
    text += "training: {seq_len: 6144, local_batch_size: 1}\nparallelism: {tensor_parallel_degree: %d}\n"
    listed = model_capabilities(MODELS["llama3"]["3B"])["tp"]
    for tp in (1, 2, 3, 4, 6, 8, 12, 24):
        path = tmp_path / "spec.yaml"
        path.write_text(text % (tp, tp))
        if tp in listed:
            compile_spec(load_spec(path))
        else:
            with pytest.raises(SpecError):
                compile_spec(load_spec(path))


def test_models_prints_capabilities(capsys):
    assert main(["models", "llama3:8B"]) == 0
    shown = capsys.readouterr().out
    for fragment in (
        "with KV heads replicated 16 (2 ranks a head)",
        "[pp-split-backward-selective]",
        "b200-180gb",
        "ZBVZeroBubble",
    ):
        assert fragment in shown
    assert main(["models", "llama3:8B", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["capabilities"]
    assert said["tp"] == [1, 2, 4, 8]
    assert said["refused"]["ep"] == "ep-region"
    assert "h100-sxm-80gb" in said["float8"]["tensorwise"]["gpus"]
    assert "h100-sxm-80gb" not in said["float8"]["mxfp8"]["gpus"]
    assert said["checkpointing"]["selective"]["not_with"]["DualPipeV"] == "pp-split-backward-selective"
    assert main(["models", "debug_moe"]) == 0
    assert "ep x etp dividing" in capsys.readouterr().out
    assert main(["models", "debug_moe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["capabilities"]["ep"] == [1, 2, 4, 8]
