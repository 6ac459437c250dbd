"""Rules as data: every id that a complaint can carry is known, explained and broken by something; all violations come at once."""

from __future__ import annotations

import ast
import copy
import json
import re
from pathlib import Path

import pytest

from titan_planner.cli import main
from titan_planner.compiler import compile_spec
from titan_planner.ir.codec import encode
from titan_planner.ir.errors import PlanError, SpecError
from titan_planner.ir.plan import Plan
from titan_planner.ir.record import field_types
from titan_planner.ir.rules import INVARIANTS, RULES
from titan_planner.ir.verify import load_plan
from titan_planner.rules import SPEC_RULES, is_spec_address, known_rules
from titan_planner.spec import load_spec

from .test_bad_specs import CASES, GPU
from .test_damaged_plans import EDITS

ROOT = Path(__file__).resolve().parents[2]
KNOWN = known_rules()


def named_ids(path: Path) -> set[str]:
    """Ids of rules that a module's source names: `rule="..."`, `_rule("...")`, entries of registries and the table."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        found |= {
            keyword.value.value
            for keyword in node.keywords
            if keyword.arg == "rule" and isinstance(keyword.value, ast.Constant) and keyword.value.value is not None
        }
        position = {
            "_rule": 0,
            "Invariant": 0,
            "SpecRule": 0,
            "Row": 3,
            "_by_table": 1,
            "InfeasibleStages": 3,
            "_unmatched": 3,
        }
        at = position.get(name)
        if at is not None and len(node.args) > at and isinstance(node.args[at], ast.Constant):
            found.add(node.args[at].value)
    return found


def test_every_id_in_the_source_is_known():
    sources = (ROOT / "titan_planner").rglob("*.py")
    named = {rule: path for path in sources for rule in named_ids(path)}
    assert len(named) >= 50
    assert {rule: path for rule, path in named.items() if rule not in KNOWN} == {}
    assert set(KNOWN) == set(named)


def test_every_complaint_of_bad_specs_and_plans_names_a_known_rule(tmp_path):
    """And ids are written in one way."""
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule) for rule in KNOWN)
    seen: set[str | None] = set()
    for index, (_, text, _) in enumerate(CASES):
        path = tmp_path / f"{index}.yaml"
        path.write_text(text)
        with pytest.raises(SpecError) as caught:
            compile_spec(load_spec(path))
        seen |= {complaint.rule for complaint in caught.value.complaints}
    assert seen - {None} <= set(KNOWN)
    # What only a spec can break is broken by one.
    broken = seen | {case[4] for case in EDITS}
    assert {rule.id for rule in (*SPEC_RULES, *INVARIANTS)} <= broken


@pytest.mark.parametrize("rule", KNOWN.values(), ids=list(KNOWN))
def test_every_rule_says_what_why_and_where(rule, capsys):
    assert rule.statement.endswith(".") and rule.statement[:-1].strip()
    assert rule.doc.endswith(".") and 40 < len(rule.doc) < 400
    assert rule.spec or rule.plan
    assert all(is_spec_address(address) for address in rule.spec)
    for address in rule.plan:
        record = Plan
        for name in address.split(".")[:1]:
            assert name in field_types(record), address
    assert main(["explain", rule.id]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{rule.id}: {rule.statement}")
    assert " ".join(rule.doc.split()[:4]) in shown
    assert all(f"`{address}`" in shown for address in rule.spec)
    assert main(["explain", rule.id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["doc"] == rule.doc


def test_ids_are_unique():
    ids = [rule.id for rule in (*RULES, *INVARIANTS, *SPEC_RULES)]
    assert len(ids) == len(set(ids)) == len(KNOWN)


def test_violations_are_where_their_rules_say(tmp_path):
    """The address of a complaint lies at or below one that its rule names."""
    for name, plan, change, _, rule in EDITS:
        if rule is None:
            continue
        data = copy.deepcopy(encode(plan))
        change(data)
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(data))
        with pytest.raises(PlanError) as caught:
            load_plan(path)
        for complaint in caught.value.complaints:
            if complaint.rule is not None:
                at = KNOWN[complaint.rule].plan
                near = any(complaint.address == a or complaint.address.startswith((f"{a}.", f"{a}[")) for a in at)
                assert near, f"{name}: {complaint.rule} complains at {complaint.address}, but names {at}"


def test_a_misspelt_rule_is_suggested(capsys):
    assert main(["explain", "pp-scedule"]) == 1
    assert "did you mean `pp-schedule`" in capsys.readouterr().err
    assert main(["explain", "nowhere.json"]) == 1
    assert "cannot be read" in capsys.readouterr().err


# ------------------------------------------------------------------ all at once


def complaints(tmp_path: Path, text: str) -> dict[str, set[str]]:
    """Place -> rules of the complaints about a spec."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        compile_spec(load_spec(path))
    found: dict[str, set[str]] = {}
    for complaint in caught.value.complaints:
        assert complaint.place is not None
        found.setdefault(str(complaint.place).removeprefix(f"{path}:"), set()).add(complaint.rule or "none")
    return found


A100 = GPU.replace("h100-sxm-80gb", "a100-sxm-80gb")


@pytest.mark.parametrize(
    ("tp", "rule"),
    [
        (3, "mesh-world"),  # no mesh of 8 GPUs has it, so that no plan can be made to look for the rest in
        (16, "mesh-world"),
    ],
)
def test_independent_errors_of_all_kinds_come_at_once(tmp_path, tp, rule):
    text = A100.replace("local_batch_size: 1", "local_batch_size: 6, global_batch_size: 33") + (
        f"parallelism: {{tensor_parallel_degree: {tp}, pipeline_parallel_degree: 2, pipeline_parallel_schedule: DualPipeV,\n"
        "              fsdp_reshard_after_forward: always, context_parallel_load_balancer: ptrr, context_parallel_degree: 2}\n"
        "activation_checkpoint: {mode: selective}\n"
        "float8: {recipe: rowwise, enable_fsdp_float8_all_gather: true, filter_fqns: [attention.wkk]}\n"
        "optimizer: {state_dtype: bfloat16}\n"
        "limits: {deadline_days: 3}\n"
        "validation: {enable: true}\n"
    )
    assert complaints(tmp_path, text) == {
        "5:39": {rule},
        "4:78": {"batch-product"},
        "6:43": {"pp-split-backward-reshard"},
        "6:83": {"cp-balance"},
        "7:31": {"pp-split-backward-selective"},
        "8:18": {"float8-hardware"},
        "8:58": {"float8-hardware"},
        "8:78": {"float8-filter"},
        "9:12": {"optimizer-state"},
        "10:25": {"limit-deadline"},
        "11:13": {"job-validation"},
    }


def test_what_fails_on_a_legal_mesh_comes_with_the_rest(tmp_path):
    """A degree that divides the GPUs but not the heads, a schedule with too small a batch, Float8, checkpointing."""
    text = A100.replace("gpus_per_node: 8", "gpus_per_node: 12").replace(
        "local_batch_size: 1", "local_batch_size: 2"
    ) + (
        "parallelism: {tensor_parallel_degree: 3, pipeline_parallel_degree: 4, pipeline_parallel_schedule: 1F1B}\n"
        "activation_checkpoint: {mode: memory_budget}\ncompile: {enable: false}\nfloat8: {recipe: tensorwise}\n"
    )
    found = complaints(tmp_path, text)
    assert found["5:39"] == {"tp-heads", "tp-dims"}
    assert found["4:56"] == {"pp-microbatches"}
    assert found["6:31"] == {"ac-layers"}
    assert found["8:18"] == {"float8-hardware"}
    assert set().union(*found.values()) == {
        "tp-heads", "tp-dims", "seq-split", "pp-microbatches", "ac-layers", "float8-hardware",
    }  # fmt: skip


def test_stages_that_cannot_be_had_hide_nothing(tmp_path):
    text = GPU.replace("local_batch_size: 1", "local_batch_size: 4, global_batch_size: 6") + (
        "parallelism: {pipeline_parallel_degree: 8, pipeline_parallel_schedule: Interleaved1F1B,\n"
        "              module_fqns_per_model_part: [[tok_embeddings], [layers.*]]}\n"
        "loss: {chunks: 7}\n"
    )
    assert complaints(tmp_path, text) == {"6:43": {"pp-listed"}, "4:78": {"batch-product"}, "7:16": {"loss-chunks"}}


def test_nothing_is_said_that_another_degree_would_mend(tmp_path):
    """Where no mesh can be had, rules that follow from open degrees are left out."""
    for more, wrong in (
        ("tensor_parallel_degree: 3, fsdp_reshard_after_forward: 4", "5:39"),
        ("tensor_parallel_degree: 3, pipeline_parallel_degree: 4", "5:39"),
    ):
        text = GPU.replace("local_batch_size: 1", "global_batch_size: 9") + f"parallelism: {{{more}}}\n"
        assert complaints(tmp_path, text) == {wrong: {"mesh-world"}}
    moe = GPU.replace("llama3, flavor: 8B", "debug_moe, flavor: debug").replace("seq_len: 8192", "seq_len: 2048")
    text = moe + "parallelism: {expert_parallel_degree: 4, tensor_parallel_degree: 3}\n"
    assert complaints(tmp_path, text) == {"5:66": {"mesh-world"}}
    text = moe + "parallelism: {expert_parallel_degree: 3, tensor_parallel_degree: 3}\n"
    assert complaints(tmp_path, text) == {"5:66": {"mesh-world"}, "5:39": {"ep-region"}}


# ------------------------------------------------------------------ tp and KV heads, limits


def one_complaint(tmp_path: Path, text: str, rule: str) -> tuple[str, str]:
    """Message and hint of the one complaint under `rule`."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        compile_spec(load_spec(path))
    [found] = [complaint for complaint in caught.value.complaints if complaint.rule == rule]
    assert found.hint is not None
    return found.message, found.hint


@pytest.mark.parametrize(
    ("flavor", "kv_heads", "tp", "per_node", "plain", "copied"),
    [
        ("8B", 8, 16, 16, "1, 2, 4, 8", "16, 32"),
        ("70B", 8, 16, 16, "1, 2, 4, 8", "16, 32, 64"),
        ("405B", 8, 32, 32, "1, 2, 4, 8", "16, 32, 64, 128"),
        ("8B", 4, 8, 8, "1, 2, 4", "8, 16, 32"),  # as many as Qwen3-30B-A3B has
        ("8B", 2, 4, 8, "1, 2", "4, 8, 16, 32"),  # as many as Qwen3.5 has
    ],
)
def test_tp_that_does_not_divide_the_kv_heads(tmp_path, flavor, kv_heads, tp, per_node, plain, copied):
    """Refused with the right numbers where KV heads are not to be replicated; both of the ways out compile."""
    nodes = {"8B": 1, "70B": 4, "405B": 16}[flavor] * 16 // per_node
    text = (
        f"spec_version: 1\nmodel: {{family: llama3, flavor: {flavor}, overrides: {{num_kv_heads: {kv_heads}}}}}\n"
        f"cluster: {{gpu: h100-sxm-80gb, nodes: {nodes}, gpus_per_node: {per_node}, inter_node: ib-ndr-400}}\n"
        "training: {steps: 20, seq_len: 8192, local_batch_size: 1}\n"
        f"parallelism: {{tensor_parallel_degree: {tp}, kv_head_replication: false}}\n"
    )
    message, hint = one_complaint(tmp_path, text, "tp-heads")
    assert message == f"tp = {tp} does not divide the {kv_heads} KV heads"
    assert (
        hint
        == f"use one of {plain}, or one of {copied} with KV heads replicated (`kv_head_replication: true` in a spec)"
    )
    path = tmp_path / "good.yaml"
    path.write_text(text.replace("kv_head_replication: false", "kv_head_replication: true"))
    plan = compile_spec(load_spec(path))
    assert (plan.mesh.tp, plan.tensor_parallel.kv_replicas) == (tp, tp // kv_heads)
    largest = int(plain.split(", ")[-1])
    path.write_text(text.replace(f"tensor_parallel_degree: {tp}", f"tensor_parallel_degree: {largest}"))
    plan = compile_spec(load_spec(path))
    assert (plan.mesh.tp, plan.tensor_parallel.kv_replicas) == (largest, 1)


def test_the_search_replicates_no_kv_heads_against_the_spec(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(
        GPU.replace("gpus_per_node: 8", "gpus_per_node: 16")
        + "parallelism: {data_parallel_shard_degree: 1, data_parallel_replicate_degree: 1, context_parallel_degree: 1,\n"
        "              pipeline_parallel_degree: 1, kv_head_replication: false}\n"
    )
    with pytest.raises(SpecError, match="tp = 16 does not divide the 8 KV heads"):
        compile_spec(load_spec(path))


def test_the_rest_that_tp_takes_is_held_to_the_limits(tmp_path):
    text = GPU.replace("nodes: 1", "nodes: 2, inter_node: ib-ndr-400") + (
        "parallelism: {tensor_parallel_degree: -1, data_parallel_shard_degree: 1, data_parallel_replicate_degree: 1,\n"
        "              context_parallel_degree: 1, pipeline_parallel_degree: 1}\n"
    )
    message, hint = one_complaint(tmp_path, text, "limit-tp")
    assert message == "tp = 16 spans nodes of 8 GPUs, which `limits.keep_tp_in_node` forbids"
    assert "use one of 1, 2, 4, 8" in hint
    path = tmp_path / "good.yaml"
    path.write_text(text + "limits: {keep_tp_in_node: false}\n")
    assert compile_spec(load_spec(path)).mesh.tp == 16


def test_a_deadline_needs_a_number_of_tokens(tmp_path):
    message, hint = one_complaint(tmp_path, GPU + "limits: {deadline_days: 2.5}\n", "limit-deadline")
    assert message.startswith("`deadline_days` is 2.5, but `training.token_budget`")
    path = tmp_path / "good.yaml"
    budget = re.search(r"token_budget: \S+(?=})", hint)
    assert budget is not None
    path.write_text(GPU.replace("steps: 20", f"steps: 20, {budget[0]}") + "limits: {deadline_days: 2.5}\n")
    plan = compile_spec(load_spec(path))
    assert (plan.request.limits.deadline_days, plan.job.token_budget) == (2.5, 15e12)


def test_dispatch_is_left_out_where_nothing_is_dispatched(tmp_path):
    """`ep` left open comes out as 1 here, and a pinned dispatch then has nothing to send."""
    path = tmp_path / "spec.yaml"
    text = GPU.replace("llama3, flavor: 8B", "debug_moe, flavor: debug").replace("seq_len: 8192", "seq_len: 2048")
    path.write_text(text + "parallelism: {expert_parallel_comm_backend: deepep}\n")
    plan = compile_spec(load_spec(path))
    assert (plan.mesh.ep > 1) == (plan.expert_parallel.comm_backend == "deepep")
    path.write_text(text + "parallelism: {expert_parallel_comm_backend: deepep, expert_parallel_degree: 8}\n")
    assert compile_spec(load_spec(path)).expert_parallel.comm_backend == "deepep"
