"""Compiling: pins honoured, automatic choices explained, same bytes every time, torch never imported, wide arrows only."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from titan_planner.compiler import PassBroke, compile_spec, pass_names, select_passes
from titan_planner.ir.codec import decode, digest, dumps, encode
from titan_planner.ir.errors import SpecError
from titan_planner.ir.fqn import fold, matches, select
from titan_planner.ir.inventory import linear_modules, num_params, parameters
from titan_planner.ir.model import RopeScaling
from titan_planner.ir.plan import Plan
from titan_planner.ir.record import InvariantError
from titan_planner.ir.schema import SCHEMA_FILES, schema_text
from titan_planner.ir.verify import verify
from titan_planner.models import MODELS
from titan_planner.passes import PASSES
from titan_planner.spec import load_spec

from .builders import PIPELINE, TINY, compile_text

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "plans").glob("*/spec.yaml"))

LLAMA = """\
spec_version: 1
model: {family: llama3, flavor: FLAVOR}
cluster: {gpu: GPU, nodes: NODES, gpus_per_node: 8, inter_node: ib-ndr-400}
training: {seq_len: 8192, TRAINING}
"""


def llama(flavor="8B", gpu="h100-sxm-80gb", nodes=1, training="local_batch_size: 1", more="") -> Plan:
    text = (
        LLAMA.replace("FLAVOR", flavor).replace("GPU", gpu).replace("NODES", str(nodes)).replace("TRAINING", training)
    )
    return compile_text(text + more)


@pytest.mark.parametrize(
    ("flavor", "count"),
    [
        ("debugmodel", 6_163_712),
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_parameter_counts_are_exact(flavor, count):
    model = MODELS["llama3"][flavor]
    assert num_params(model) == count
    assert sum(p.numel for p in parameters(model)) == count


def test_llama_3_2_scales_by_32_and_3_1_by_8():
    scaling = {name: model.blocks[0].block.attention.rope.scaling for name, model in MODELS["llama3"].items()}
    assert all(isinstance(s, RopeScaling) for s in scaling.values())
    assert {name: s.factor for name, s in scaling.items() if s} == {
        "debugmodel": 8.0, "1B": 32.0, "3B": 32.0, "8B": 8.0, "70B": 8.0, "405B": 8.0,
    }  # fmt: skip


def test_pins_are_honoured():
    plan = llama(
        nodes=8,
        training="local_batch_size: 16, global_batch_size: 64",
        more="parallelism: {pipeline_parallel_degree: 2, tensor_parallel_degree: 4, context_parallel_degree: 2, "
        "data_parallel_replicate_degree: 2, data_parallel_shard_degree: -1, pipeline_parallel_schedule: GPipe}\n"
        "activation_checkpoint: {mode: selective, selective_ac_option: 2}\ncompile: {enable: false}\n",
    )
    mesh = plan.mesh
    assert (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp) == (2, 2, 2, 2, 4)
    assert plan.pipeline.schedule == "GPipe"
    assert plan.pipeline.microbatches == 16
    assert (plan.batch.global_batch_size, plan.batch.accumulation_steps) == (64, 1)
    assert [layer.checkpoint for layer in plan.layers[1:5]] == ["full", "none", "full", "none"]
    assert not plan.compile.enable


def test_seed_workflow_meshes():
    plan = llama("70B", nodes=32, training="global_batch_size: 512",
                 more="parallelism: {data_parallel_shard_degree: 32, tensor_parallel_degree: 8}\n")  # fmt: skip
    assert plan.mesh.world_size == 256
    assert plan.batch.local_batch_size * plan.batch.accumulation_steps * 32 == 512
    # Norms and embeddings replicate over tp, projections split: one row a kind of module.
    assert {row.module for row in plan.sharding} >= {"layers.*.attention.wq", "output", "tok_embeddings"}


def test_auto_takes_the_least_model_parallelism_that_fits():
    small = llama("8B", nodes=1)
    assert (small.mesh.tp, small.mesh.pp) == (1, 1)
    assert small.estimate is not None
    assert small.estimate.fits
    # 70B on 16 GPUs: 16 bytes a parameter are 65.7 GiB a GPU, so no sharding of the state helps; it is flagged or split.
    big = llama("70B", nodes=8)
    assert big.estimate is not None
    assert big.estimate.fits


def test_a_model_that_cannot_fit_says_how_many_nodes_it_needs():
    from titan_planner.ir.errors import SpecError

    with pytest.raises(SpecError) as caught:
        llama("70B", nodes=1)
    assert "does not fit" in str(caught.value)
    hint = caught.value.complaints[0].hint
    assert hint is not None
    nodes = int(hint.split("about ")[1].split()[0])
    assert llama("70B", nodes=nodes).mesh.world_size == nodes * 8


def test_split_backward_never_gets_selective_checkpointing():
    more = "parallelism: {pipeline_parallel_degree: 4, pipeline_parallel_schedule: ZBVZeroBubble}\n"
    plan = llama("70B", nodes=8, training="local_batch_size: 16", more=more)
    assert {layer.checkpoint for layer in plan.layers if layer.fqn.startswith("layers.")} == {"full"}


def test_kv_heads_are_replicated_when_tp_exceeds_them():
    plan = llama(nodes=2, more="parallelism: {tensor_parallel_degree: 16}\nlimits: {keep_tp_in_node: false}\n")
    assert plan.tensor_parallel.kv_replicas == 2


def test_float8_lists_every_linear_once():
    plan = compile_text(PIPELINE)
    linears = linear_modules(plan.model)
    converted = [fqn for selector in plan.float8.converted for fqn in select(selector, linears)]
    skipped = [fqn for entry in plan.float8.skipped for fqn in select(entry.module, linears)]
    assert sorted(converted + skipped) == sorted(linears)
    assert "output" in skipped
    # 8B under tp 4: wq is 1024 x 4096 on a rank, below torchao's tensorwise threshold; w1 is 3584 x 4096, above it.
    assert "layers.0.attention.wq" in skipped
    assert "layers.0.feed_forward.w1" in converted


def test_float8_is_off_unless_asked_for():
    assert llama().float8.recipe is None
    assert llama(more="float8: auto\n").float8.recipe == "tensorwise"
    assert llama(gpu="a100-sxm-80gb", more="float8: auto\n").float8.recipe is None


def test_lm_head_is_an_alias_of_output():
    plan = llama(more="float8: {recipe: tensorwise, filter_fqns: [lm_head]}\n")
    assert [entry.module for entry in plan.float8.skipped] == ["output"]


@pytest.mark.parametrize("stop", ["lower", *pass_names()])
def test_every_prefix_of_the_passes_is_a_valid_plan(tmp_path, stop):
    path = tmp_path / "spec.yaml"
    path.write_text(PIPELINE)
    plan = compile_spec(load_spec(path), select_passes(stop_after=stop))
    assert verify(plan) == ()
    assert plan.estimate is not None


@pytest.mark.parametrize("without", pass_names())
def test_every_pass_can_be_left_out(tmp_path, without):
    path = tmp_path / "spec.yaml"
    path.write_text(PIPELINE)
    plan = compile_spec(load_spec(path), select_passes(without=[without]))
    assert verify(plan) == ()
    assert without not in {remark.by for remark in plan.remarks}


BUDGET = "activation_checkpoint: {mode: memory_budget, memory_budget: 0.3}\n"


@pytest.mark.parametrize("asked", ["", "compile: {enable: true}\n"])
@pytest.mark.parametrize("text", [TINY, PIPELINE.replace("activation_checkpoint: {mode: selective}\n", "")])
def test_a_memory_budget_compiles_with_any_passes(tmp_path, text, asked):
    """It needs the model compiled from the pass that sets it on, whoever decides on compilation otherwise."""
    path = tmp_path / "spec.yaml"
    path.write_text(text + asked + BUDGET)
    chosen = [select_passes(stop_after=stop) for stop in ("lower", *pass_names())]
    chosen += [select_passes(without=[name]) for name in pass_names()]
    for passes in chosen:
        plan = compile_spec(load_spec(path), passes)
        assert verify(plan) == ()
        assert plan.compile.enable
    whole = compile_spec(load_spec(path))
    assert {layer.checkpoint for layer in whole.layers if layer.fqn.startswith("layers.")} == {"memory_budget"}


def test_a_pass_that_breaks_a_plan_is_named(tmp_path):
    def saboteur(plan: Plan, ctx: object) -> Plan:
        return replace(plan, layers=plan.layers[:-1])

    path = tmp_path / "spec.yaml"
    path.write_text(TINY)
    with pytest.raises(PassBroke, match=r"`saboteur` returned an invalid plan.*plan-layers"):
        compile_spec(load_spec(path), (saboteur,))


def test_passes_have_help_texts():
    for entry in PASSES:
        assert entry.__doc__
        assert entry.__doc__.strip().splitlines()[0].endswith(".")


# ------------------------------------------------------------------ codec and schema


def test_codec_round_trip():
    plan = compile_text(PIPELINE)
    assert decode(Plan, json.loads(dumps(plan))) == plan
    assert decode(Plan, encode(plan)) == plan


@pytest.mark.parametrize("kind", list(SCHEMA_FILES))
def test_committed_schemas_are_generated_from_the_types(kind):
    committed = (ROOT / "schemas" / SCHEMA_FILES[kind]).read_text()
    assert committed == schema_text(kind), "run `make schemas`"


def test_every_field_of_the_schemas_is_described():
    def walk(node, path):
        for name, entry in node.get("properties", {}).items():
            target = entry if "description" in entry or "$ref" not in entry else None
            assert target is not None or "$ref" in entry, f"{path}.{name} has no description"
            if "$ref" not in entry:
                assert entry.get("description"), f"{path}.{name} has no description"

    for kind in SCHEMA_FILES:
        schema = json.loads(schema_text(kind))
        walk(schema, kind)
        for name, definition in schema["$defs"].items():
            assert definition.get("description"), name
            walk(definition, name)


def test_records_check_themselves_when_replaced():
    plan = compile_text(TINY)
    with pytest.raises(InvariantError, match="at least 1"):
        replace(plan.mesh, tp=0)
    with pytest.raises(InvariantError, match="finite"):
        replace(plan.optimizer, lr=float("nan"))


def test_equal_plans_have_one_digest_and_decisions_change_it():
    plan = compile_text(TINY)
    assert digest(plan) == digest(compile_text(TINY))
    assert digest(replace(plan, seeds=replace(plan.seeds, seed=1))) != digest(plan)
    assert digest(replace(plan, name="other", remarks=())) == digest(plan)


# ------------------------------------------------------------------ selectors


def test_selectors():
    assert matches("layers.*.attention.wq", "layers.17.attention.wq")
    assert matches("layers.3-5", "layers.4")
    assert not matches("layers.3-5", "layers.6")
    assert not matches("layers.*", "layers.1.attention")
    assert fold(["norm", "layers.0", "layers.1", "layers.3"]) == ("norm", "layers.0-1", "layers.3")
    assert fold([f"layers.{i}.attention.wq" for i in range(4)]) == ("layers.0-3.attention.wq",)


# ------------------------------------------------------------------ golden plans and determinism


@pytest.mark.parametrize("spec", EXAMPLES, ids=lambda path: path.parent.name)
def test_golden_plan(spec):
    """The committed plan is what the spec compiles to; `make goldens` writes them anew for review."""
    from titan_planner.render.explain import explain

    plan = compile_spec(load_spec(spec))
    assert dumps(plan) == (spec.parent / "plan.json").read_text(encoding="utf-8")
    assert explain(plan).rstrip() + "\n" == (spec.parent / "explain.txt").read_text(encoding="utf-8")


def test_there_are_goldens_of_the_seed_workflows():
    assert {path.parent.name for path in EXAMPLES} >= {
        "tiny_cpu", "llama3_8b_8xh100", "llama3_70b_256xh100", "llama3_405b_512xh100",
    }  # fmt: skip


def test_example_specs_complete_in_editors():
    for spec in EXAMPLES:
        first = spec.read_text().splitlines()[0]
        assert first.startswith("# yaml-language-server: $schema=")
        assert (spec.parent / first.split("=", 1)[1]).resolve() == ROOT / "schemas" / SCHEMA_FILES["spec"]


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["llama3_405b_512xh100", "tiny_cpu"])
def test_same_bytes_under_any_hash_seed(name):
    code = f"from titan_planner.cli import main; main(['compile', 'plans/{name}/spec.yaml'])"
    outputs = {run_python(code, PYTHONHASHSEED=seed) for seed in ("0", "1", "31337")}
    assert outputs == {(ROOT / "plans" / name / "plan.json").read_text()}


def test_the_planner_never_imports_torch():
    code = """
import sys, pkgutil, importlib, titan_planner
from titan_planner.cli import main
main(['compile', 'plans/llama3_405b_512xh100/spec.yaml', '-o', '/dev/null'])
for module in pkgutil.walk_packages(titan_planner.__path__, 'titan_planner.'):
    importlib.import_module(module.name)
print(sorted(name for name in ('torch', 'numpy', 'titan_runtime') if name in sys.modules))
"""
    assert run_python(code).splitlines()[-1] == "[]"


# ------------------------------------------------------------------ arrows


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_contract_imports_only_itself_and_the_standard_library():
    for path in (ROOT / "titan_planner" / "ir").glob("*.py"):
        for name in imports_of(path):
            top = name.split(".")[0]
            allowed = top in sys.stdlib_module_names or name.startswith("titan_planner.ir") or name == "titan_planner"
            assert allowed or (top == "jsonschema" and path.name == "validate.py"), f"{path.name} imports {name}"


def test_the_runtime_imports_nothing_of_the_planner_but_the_contract():
    for path in (ROOT / "titan_runtime").rglob("*.py"):
        for name in imports_of(path):
            if name.split(".")[0] == "titan_planner":
                assert name.startswith("titan_planner.ir") or name == "titan_planner", f"{path} imports {name}"
                assert name != "titan_planner.ir.request", f"{path} imports the spec"


def test_planner_arrows():
    """Passes do not import each other; cost knows no pass; only cli and console print; render is not used below cli."""
    package = ROOT / "titan_planner"
    names = set(pass_names())
    for path in package.rglob("*.py"):
        found = imports_of(path)
        inside = path.relative_to(package).as_posix()
        assert not any(name.split(".")[0] in ("torch", "titan_runtime") for name in found), inside
        if inside.startswith("passes/") and inside != "passes/__init__.py":
            others = {f"titan_planner.passes.{name}" for name in names - {path.stem}}
            assert not found & others, inside
        if inside.startswith("cost/"):
            assert not any(name.startswith(("titan_planner.passes", "titan_planner.compiler")) for name in found), (
                inside
            )
        if inside not in ("cli.py", "console.py"):
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            assert not any(isinstance(c.func, ast.Name) and c.func.id == "print" for c in calls), inside
        if not inside.startswith("render/") and inside not in ("cli.py", "console.py"):
            assert not any(name.startswith("titan_planner.render") for name in found), inside


def test_linears_to_recompute_become_selectors():
    asked = "activation_checkpoint: {mode: selective, per_op_sac_force_recompute_mm_shapes_by_fqns: [attention.wk]}\n"
    assert compile_text(TINY + asked).activation_checkpoint.policies[1].force_recompute_fqns == (
        "layers.0-5.attention.wk",
    )


def test_what_no_pass_reads_yet_is_said():
    def missed(text: str) -> list[str]:
        return [
            remark.address for remark in compile_text(text).remarks if remark.by == "lower" and remark.kind == "missed"
        ]

    assert missed(TINY) == missed(TINY + "objective: max_throughput\n") == []
    assert missed(TINY + "objective: min_cost\n") == ["request.objective"]
    assert missed(TINY.replace("steps: 20", "steps: 20, token_budget: 1e9")) == []


def test_ddp_replicates_over_the_free_ranks():
    mesh = compile_text(TINY + "parallelism: {data_parallel_strategy: ddp}\n").mesh
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.tp, mesh.pp, mesh.cp) == (4, 1, 1, 1, 1)
    mesh = compile_text(TINY + "parallelism: {data_parallel_strategy: ddp, tensor_parallel_degree: 2}\n").mesh
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.tp) == (2, 1, 2)


@pytest.mark.parametrize(("schedule", "moments"), [("Interleaved1F1B", 2), ("ZBVZeroBubble", 1)])
def test_a_tied_weight_that_one_rank_holds_twice_has_one_pair_of_moments(schedule, moments):
    pins = f"{{pipeline_parallel_degree: 8, pipeline_parallel_schedule: {schedule}}}"
    plan = llama("1B", training="local_batch_size: 16", more=f"parallelism: {pins}\n")
    assert plan.estimate is not None
    memory = plan.estimate.memory
    weight = plan.model.vocab_size * plan.model.dim * 4 / 2**30
    both = 2 * sum(stage.parameters_gib for stage in memory)
    assert sum(stage.optimizer_gib for stage in memory) == pytest.approx(both - 2 * weight * (2 - moments), abs=0.02)


def test_units_gathered_ahead_are_pinned_and_explained(tmp_path) -> None:
    sets = ["parallelism.fsdp_prefetch_forward=2", "parallelism.fsdp_prefetch_backward=1"]
    plan = compile_text(TINY, sets)
    assert (plan.fsdp.prefetch_forward, plan.fsdp.prefetch_backward) == (2, 1)
    assert compile_text(TINY).fsdp.prefetch_forward == 0
    with pytest.raises(SpecError, match="`data_parallel_strategy: ddp` gathers nothing"):
        compile_text(TINY, [*sets, "parallelism.data_parallel_strategy=ddp"])
