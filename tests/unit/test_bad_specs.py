"""Bad specs: each gives one clear complaint a mistake, at its place, and never a traceback."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from titan_planner.cli import main
from titan_planner.compiler import compile_spec
from titan_planner.ir.errors import SpecError
from titan_planner.spec import load_spec

GOOD = """\
spec_version: 1
model: {family: llama3, flavor: debug}
cluster: {gpu: cpu, nodes: 1, gpus_per_node: 4}
training: {steps: 20, seq_len: 256, global_batch_size: 16}
data: {source: text, path: data/sample, tokenizer: data/tokenizer.json}
"""

GPU = """\
spec_version: 1
model: {family: llama3, flavor: 8B}
cluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}
training: {steps: 20, seq_len: 8192, local_batch_size: 1}
"""


def out_of_range(change: str, field: str, value: str) -> tuple[str, str, list[tuple[str, str]]]:
    """A case: a number of the cluster that no machine has, which would make the estimate infinite."""
    before = "gpu: h100-sxm-80gb, nodes: 1," if change.startswith("gpu") else "nodes: 1,"
    text = GPU.replace(before, change % value)
    column = text.splitlines()[2].index(f"{field}: {value}") + len(f"{field}: ") + 1
    return f"{field} {value}", text, [(f"3:{column}", f"{field}` is ")]


# name, text, [(line:column or "", fragment of the message), ...]: every complaint, in order.
CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("unknown section", GOOD + "traning: {steps: 3}\n", [("6:1", "has no field `traning`")]),
    ("unknown key", GOOD.replace("steps: 20", "step: 20"), [("4:12", "`training` has no field `step`")]),
    (
        "wrong type",
        GOOD.replace("steps: 20", "steps: many"),
        [("4:19", "must be a whole number, but it is the text 'many'")],
    ),
    *(
        out_of_range(change, field, value)
        for change, field, values in (
            ("nodes: 1, efficiency: {launch_us: %s},", "launch_us", ("1e308", "-1")),
            ("nodes: 1, efficiency: {overlap_slowdown: %s},", "overlap_slowdown", ("1e308",)),
            ("nodes: 1, efficiency: {matmul: %s},", "matmul", ("1e-320", "0")),
            ("nodes: 1, efficiency: {memory: %s},", "memory", ("5e-324",)),
            ("nodes: 1, intra_node: {gb_per_s: %s},", "gb_per_s", ("5e-324", "1e308")),
            ("nodes: 1, intra_node: {link: nvlink4, latency_us: %s},", "latency_us", ("1e308",)),
            ("nodes: 1, price_per_gpu_hour: %s,", "price_per_gpu_hour", ("1e308",)),
            ("gpu: {like: h100-sxm-80gb, memory_gib: %s}, nodes: 1,", "memory_gib", ("5e-324", "1e308")),
            ("gpu: {like: h100-sxm-80gb, memory_gb_per_s: %s}, nodes: 1,", "memory_gb_per_s", ("5e-324", "1e308")),
            ("gpu: {like: h100-sxm-80gb, bf16_tflops: %s}, nodes: 1,", "bf16_tflops", ("5e-324", "1e308")),
            ("gpu: {like: h100-sxm-80gb, fp8_tflops: %s}, nodes: 1,", "fp8_tflops", ("5e-324", "1e308")),
        )
        for value in values
    ),
    ("negative", GOOD.replace("steps: 20", "steps: -5"), [("4:19", "must be at least 1")]),
    ("fraction", GOOD.replace("steps: 20", "steps: 2.5"), [("4:19", "must be a whole number, but it is 2.5")]),
    (
        "bool for a number",
        GOOD.replace("steps: 20", "steps: yes"),
        [("4:19", "must be a whole number, but it is true")],
    ),
    ("null section", GOOD + "optimizer:\n", [("6:11", "`optimizer` must be a mapping of fields, but it is null")]),
    (
        "list for a mapping",
        GOOD + "optimizer:\n  - name: AdamW\n",
        [("7:3", "must be a mapping of fields, but it is a list")],
    ),
    (
        "list of sections",
        "- spec_version: 1\n",
        [("1:1", "a spec is a mapping of sections, but this file holds a list")],
    ),
    ("single value", "hello\n", [("1:1", "this file holds a single value")]),
    ("empty", "", [("", "the spec is empty")]),
    ("only comments", "# nothing here\n", [("", "the spec is empty")]),
    ("version missing", GOOD.replace("spec_version: 1\n", ""), [("", "lacks the field `spec_version`")]),
    (
        "version from the future",
        GOOD.replace("spec_version: 1", "spec_version: 7"),
        [("1:15", "is 7, but it must be 1")],
    ),
    ("duplicate key", GOOD + "training: {steps: 3}\n", [("6:1", "`training` appears twice, first at line 4")]),
    ("tab", GOOD + "optimizer:\n\tname: AdamW\n", [("7:1", "a tab stands where YAML wants spaces")]),
    ("unclosed bracket", GOOD + "optimizer: {name: AdamW\n", [("", "not valid YAML")]),
    ("two documents", GOOD + "---\n" + GOOD, [("", "more than one YAML document")]),
    ("base 60", GOOD.replace("steps: 20", "steps: 1:30"), [("4:19", "`1:30` is a base-60 number")]),
    ("octal", GOOD.replace("steps: 20", "steps: 010"), [("4:19", "`010` is an octal number")]),
    ("infinity", GOOD + "optimizer: {lr: .inf}\n", [("6:17", "not a finite number")]),
    ("huge float", GOOD + "optimizer: {lr: 1e999}\n", [("6:17", "too large for a number")]),
    ("half a pair", GOOD + 'name: "a\\ud800"\n', [("6:7", "half of a surrogate pair")]),
    ("half a pair as key", GOOD + 'environment: {"A\\udc00": x}\n', [("6:15", "half of a surrogate pair")]),
    ("yaml tag", GOOD + "name: !!python/object:os.system x\n", [("6:7", "is not part of the spec format")]),
    ("self-containing alias", GOOD + "environment: &e {A: *e}\n", [("", "an alias contains itself")]),
    (
        "off for a word",
        GPU + "activation_checkpoint: {mode: off}\n",
        [("5:31", "is false, but it must be one of `auto`")],
    ),
    ("misspelt choice", GPU + "activation_checkpoint: {mode: ful}\n", [("5:31", "is the text 'ful'")]),
    ("unknown family", GOOD.replace("family: llama3", "family: llama33"), [("2:17", "no model family `llama33`")]),
    ("unknown flavor", GOOD.replace("flavor: debug", "flavor: 9B"), [("2:33", "has no flavor `9B`")]),
    ("no flavor", GOOD.replace(", flavor: debug", ""), [("2:8", "`model` names no flavor")]),
    ("unknown gpu", GOOD.replace("gpu: cpu", "gpu: h1000"), [("3:16", "no GPU is called `h1000`")]),
    ("no gpu", GOOD.replace("gpu: cpu, ", ""), [("3:10", "`cluster` names no GPU")]),
    ("nodes without link", GPU.replace("nodes: 1", "nodes: 2"), [("", "2 nodes need a link between them")]),
    (
        "unknown link",
        GPU.replace("nodes: 1", "nodes: 2, inter_node: ib-nrd-400"),
        [("3:53", "no link is called `ib-nrd-400`")],
    ),
    (
        "product",
        GPU + "parallelism: {data_parallel_shard_degree: 2, tensor_parallel_degree: 4, pipeline_parallel_degree: 2, "
        "data_parallel_replicate_degree: 1, context_parallel_degree: 1}\n",
        [("5:43", "= 16 ranks, but the cluster has 8 GPUs")],
    ),
    (
        "rest with remainder",
        GPU + "parallelism: {data_parallel_shard_degree: -1, tensor_parallel_degree: 3}\n",
        [("5:71", "does not make up the cluster's 8 GPUs")],
    ),
    (
        "-1 twice",
        GPU + "parallelism: {data_parallel_shard_degree: -1, tensor_parallel_degree: -1}\n",
        [("5:71", "may be used once")],
    ),
    ("degree zero", GPU + "parallelism: {tensor_parallel_degree: 0}\n", [("5:39", "`tensor_parallel_degree` is 0")]),
    ("degree -2", GPU + "parallelism: {data_parallel_shard_degree: -2}\n", [("5:43", "must be at least -1")]),
    (
        "tp does not divide KV heads",
        GPU.replace("gpus_per_node: 8", "gpus_per_node: 16")
        + "parallelism: {tensor_parallel_degree: 16, kv_head_replication: false}\n",
        [("5:39", "tp = 16 does not divide the 8 KV heads")],
    ),
    (
        "tp does not divide the sequence",
        GPU.replace("seq_len: 8192", "seq_len: 8190") + "parallelism: {tensor_parallel_degree: 4}\n",
        [("4:32", "8190 is not a multiple of tp 4 = 4")],
    ),
    (
        "sequence beyond the model",
        GPU.replace("8192", "262144"),
        [("4:32", "longer than the model's maximum of 131072")],
    ),
    (
        "batch not divisible",
        GPU.replace("local_batch_size: 1", "local_batch_size: 1, global_batch_size: 33")
        + "parallelism: {data_parallel_shard_degree: 8}\n",
        [("4:78", "the global batch 33 is not local batch 1 x 8")],
    ),
    (
        "microbatch not divisible",
        GPU.replace("local_batch_size: 1", "local_batch_size: 6")
        + "parallelism: {pipeline_parallel_degree: 2, pipeline_parallel_microbatch_size: 4, pipeline_parallel_schedule: GPipe}\n",
        [("5:79", "microbatch size 4 x 1 microbatches is not the local batch 6")],
    ),
    (
        "too few microbatches",
        GPU.replace("local_batch_size: 1", "local_batch_size: 4")
        + "parallelism: {pipeline_parallel_degree: 8, pipeline_parallel_schedule: 1F1B}\n",
        [("4:56", "1F1B needs at least as many microbatches as the 8 stages, but has 4")],
    ),
    (
        "interleaved rounds",
        GPU.replace("local_batch_size: 1", "local_batch_size: 9")
        + "parallelism: {pipeline_parallel_degree: 4, pipeline_parallel_schedule: Interleaved1F1B}\n",
        [("4:56", "runs 2 rounds over pp 4, which do not divide 9 microbatches")],
    ),
    (
        "ZBV with one stage a rank",
        GPU.replace("local_batch_size: 1", "local_batch_size: 8")
        + "parallelism: {pipeline_parallel_degree: 2, pipeline_parallel_schedule: ZBVZeroBubble, "
        "pipeline_parallel_layers_per_stage: 17}\n",
        [("5:123", "17 layers a stage make 2 stages")],
    ),
    (
        "zero bubble with reshard",
        GPU.replace("local_batch_size: 1", "local_batch_size: 8")
        + "parallelism: {pipeline_parallel_degree: 2, pipeline_parallel_schedule: ZBVZeroBubble, "
        "fsdp_reshard_after_forward: always}\n",
        [("5:115", "trains wrong without an error")],
    ),
    (
        "experts in a dense model",
        GPU + "parallelism: {expert_parallel_degree: 2}\n",
        [("5:39", "the model has no experts")],
    ),
    (
        "float8 on A100",
        GPU.replace("h100-sxm-80gb", "a100-sxm-80gb") + "float8: {recipe: tensorwise}\n",
        [("5:18", "has no Float8")],
    ),
    (
        "capacity without experts",
        GPU + "parallelism: {expert_capacity_factor: 1.5}\n",
        [("5:39", "the model has no experts")],
    ),
    (
        "capacity of nothing",
        GPU + "parallelism: {expert_capacity_factor: 0}\n",
        [("5:39", "must be greater than 0")],
    ),
    ("mxfp8 on H100", GPU + "float8: {recipe: mxfp8}\n", [("5:18", "has no MXFP8")]),
    (
        "rowwise all-gather",
        GPU + "float8: {recipe: rowwise, enable_fsdp_float8_all_gather: true}\n",
        [("5:58", "works with the recipe tensorwise only")],
    ),
    (
        "filter matches nothing",
        GPU + "float8: {recipe: tensorwise, filter_fqns: [attention.wkk]}\n",
        [("5:44", "`attention.wkk` matches no linear")],
    ),
    ("keep_latest_k 1", GOOD + "checkpoint: {keep_latest_k: 1}\n", [("6:29", "no complete checkpoint")]),
    ("interval 0", GOOD + "checkpoint: {interval: 0}\n", [("6:24", "must be at least 1")]),
    ("emulate without recipe", GPU + "float8: {recipe: none, emulate: true}\n", [("5:33", "but the recipe is none")]),
    ("nothing to compile", GPU + "compile: {components: []}\n", [("5:23", "`components` is empty")]),
    ("dataset of a text", GOOD.replace("path:", "dataset: c4, path:"), [("5:31", "not the dataset `c4`")]),
    (
        "recompute linears in full",
        GPU + "activation_checkpoint: {mode: full, per_op_sac_force_recompute_mm_shapes_by_fqns: [attention.wk]}\n",
        [("5:83", "go with the mode selective")],
    ),
    (
        "actions without pp",
        GPU + "parallelism: {pipeline_parallel_degree: 1, pipeline_parallel_schedule_actions: [F0]}\n",
        [("5:80", "but pp is 1")],
    ),
    ("rank", GOOD + "environment: {RANK: '3'}\n", [("6:14", "`RANK` is set by the launcher")]),
    ("timeout", GOOD + "comm: {init_timeout_seconds: 1000000000000000000}\n", [("6:30", "must be at most 2,592,000")]),
    ("log_freq 0", GOOD + "metrics: {log_freq: 0}\n", [("6:21", "must be at least 1")]),
    (
        "wrong key in exclude_from_loading",
        GOOD + "checkpoint: {exclude_from_loading: [data_loader]}\n",
        [("6:37", "is the text 'data_loader'")],
    ),
    ("misspelt component", GOOD + "compile: {components: [modle]}\n", [("6:24", "is the text 'modle'")]),
    ("absolute path", GOOD + "dump_folder: /data/runs\n", [("6:14", "is an absolute path")]),
    ("text without path", GOOD.replace("path: data/sample, ", ""), [("5:7", "needs `path`")]),
    (
        "optimizer pattern",
        GOOD + "optimizer: {param_groups: [{pattern: nrom}]}\n",
        [("", "`nrom` matches no parameter")],
    ),
    (
        "bad regular expression",
        GOOD + "optimizer: {param_groups: [{pattern: '('}]}\n",
        [("", "is not a regular expression")],
    ),
    (
        "memory_budget uncompiled",
        GPU + "activation_checkpoint: {mode: memory_budget}\ncompile: {enable: false}\n",
        [("5:31", "memory_budget needs the model compiled")],
    ),
    ("profiler period", GOOD + "profiling: {profile_freq: 2}\n", [("6:27", "shorter than warmup 3 + active 1")]),
    ("missing base", "extends: nowhere.yaml\n" + GOOD, [("1:10", "not a file beside this spec")]),
    (
        "hf_config missing",
        GOOD.replace("{family: llama3, flavor: debug}", "{hf_config: nowhere.json}"),
        [("2:20", "cannot be read")],
    ),
    ("both model forms", GOOD.replace("flavor: debug", "flavor: debug, hf_config: x.json"), [("", "stands beside")]),
    (
        "override impossible",
        GOOD.replace("flavor: debug", "flavor: debug, overrides: {num_heads: 7}"),
        [("2:63", "does not divide `dim` 256")],
    ),
    (
        "does not fit",
        GPU.replace("8B", "70B"),
        [("3:10", "the model does not fit")],
    ),
    (
        "batch too small for the cluster",
        GPU.replace("nodes: 1", "nodes: 16384, inter_node: ib-ndr-400").replace(
            "local_batch_size: 1", "global_batch_size: 7"
        ),
        [("4:57", "no layout of 131072 GPUs that honours the pins is legal")],
    ),
    ("absurd size", GPU.replace("nodes: 1", "nodes: 1000000000000"), [("3:38", "must be at most 1,000,000")]),
    (
        "tp over nodes",
        GPU.replace("nodes: 1", "nodes: 2, inter_node: ib-ndr-400") + "parallelism: {tensor_parallel_degree: 16}\n",
        [("5:39", "tp = 16 spans nodes of 8 GPUs")],
    ),
    (
        "tp over its limit",
        GPU + "parallelism: {tensor_parallel_degree: 8}\nlimits: {max_tp: 4}\n",
        [("5:39", "tp = 8 exceeds `limits.max_tp` 4")],
    ),
    (
        "deadline without tokens",
        GPU + "limits: {deadline_days: 30}\n",
        [("5:25", "`training.token_budget` does not say how many tokens")],
    ),
    ("deadline of 0 days", GPU + "limits: {deadline_days: 0}\n", [("5:25", "must be greater than 0")]),
    (
        "stages that leave modules out",
        GPU.replace("local_batch_size: 1", "local_batch_size: 8")
        + "parallelism: {pipeline_parallel_degree: 2, module_fqns_per_model_part: [[tok_embeddings], [layers.*]]}\n",
        [("5:72", "`norm` is in no stage")],
    ),
    (
        "units gathered ahead by DDP",
        GPU + "parallelism: {data_parallel_strategy: ddp, fsdp_prefetch_forward: 2}\n",
        [("5:67", "`data_parallel_strategy: ddp` gathers nothing")],
    ),
    (
        "float8 gathered, resharded in part",
        GOOD + "parallelism: {fsdp_reshard_after_forward: 2}\n"
        "float8: {recipe: tensorwise, emulate: true, enable_fsdp_float8_all_gather: true}\n",
        [("6:43", "cannot be resharded to 2 of 4 ranks")],
    ),
    (
        "everything at once",
        "spec_version: 1\nmodel: {family: llama3, flavr: 8B}\ncluster: {gpu: h100, nodes: none}\n"
        "training: {steps: 1e3x, local_batch_size: 0}\nmetrics: {log_freq: 0}\n",
        [
            ("2:25", "has no field `flavr`"),
            ("3:29", "must be a whole number"),
            ("4:19", "must be a whole number"),
            ("4:43", "must be at least 1"),
            ("5:21", "must be at least 1"),
        ],
    ),
    (
        "independent sections at once",
        GPU.replace("8B", "9B").replace("h100-sxm-80gb", "h1000") + "activation_checkpoint: {mode: memory_budget}\n"
        "compile: {enable: false}\ncheckpoint: {keep_latest_k: 5}\n",
        [("2:33", "has no flavor `9B`"), ("3:16", "no GPU is called `h1000`"), ("5:31", "memory_budget needs")],
    ),
]


def complaints_of(path: Path, sets: list[str] | None = None) -> SpecError:
    with pytest.raises(SpecError) as caught:
        compile_spec(load_spec(path, sets))
    return caught.value


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_spec_is_refused_at_its_place(tmp_path, text, expected, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    found = complaints_of(path).complaints
    shown = "\n".join(str(c) for c in found)
    assert len(found) == len(expected), shown
    for complaint, (where, fragment) in zip(found, expected, strict=True):
        assert fragment in complaint.message, shown
        if where:
            assert str(complaint.place) == f"{path}:{where}", shown
        assert complaint.place is not None
        assert "\n" not in complaint.message
    assert main(["validate", str(path)]) == 1
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out
    assert printed.err.count("error:") == len(expected)


def test_there_are_enough_cases():
    assert len(CASES) >= 60


def test_the_good_specs_are_good(tmp_path):
    for text in (GOOD, GPU):
        path = tmp_path / "good.yaml"
        path.write_text(text)
        compile_spec(load_spec(path))


@pytest.mark.parametrize(
    "change",
    [
        ("steps: 20", "steps: 2e1"),
        ("steps: 20", "steps: 2_0"),
        ("steps: 20", "steps: 0x14"),
        ("steps: 20", "steps: 20.0"),
    ],
)
def test_numbers_that_yaml_11_misreads_mean_what_they_say(tmp_path, change):
    path = tmp_path / "good.yaml"
    path.write_text(GOOD.replace(*change))
    assert load_spec(path).spec.training.steps == 20


def test_3e_4_is_a_number(tmp_path):
    path = tmp_path / "good.yaml"
    path.write_text(GOOD + "optimizer: {lr: 3e-4}\n")
    assert load_spec(path).spec.optimizer.lr == 3e-4


def test_byte_order_mark_crlf_and_anchors_are_fine(tmp_path):
    path = tmp_path / "good.yaml"
    text = GOOD + "x-base: &base {interval: 7}\n"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_spec(path).spec.training.steps == 20
    text = (
        GOOD.replace("training: {", "training: &t {")
        + "checkpoint:\n  <<: {interval: 9, keep_latest_k: 3}\n  interval: 7\n"
    )
    path.write_text(text)
    loaded = load_spec(path).spec.checkpoint
    assert (loaded.interval, loaded.keep_latest_k) == (7, 3)


def test_not_utf_8(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"name: \xff\xfe\n")
    assert "not UTF-8" in str(complaints_of(path))


def test_a_folder_and_a_missing_file(tmp_path):
    assert "cannot be read" in str(complaints_of(tmp_path))
    assert "cannot be read" in str(complaints_of(tmp_path / "none.yaml"))


def test_deep_nesting_and_alias_bombs_end_quickly(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("a: " + "[" * 5000 + "]" * 5000)
    assert "nested too deeply" in str(complaints_of(path))
    bomb = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
    )
    path.write_text(bomb)
    assert "expands to more than" in str(complaints_of(path))


def test_extends_merges_and_keeps_places(tmp_path):
    (tmp_path / "base.yaml").write_text(GOOD)
    path = tmp_path / "top.yaml"
    path.write_text("extends: base.yaml\ntraining: {steps: 5}\n")
    spec = load_spec(path).spec
    assert (spec.training.steps, spec.training.seq_len) == (5, 256)
    path.write_text("extends: base.yaml\ntraining:\n  steps: none\n")
    assert str(complaints_of(path).complaints[0].place) == f"{path}:3:10"
    (tmp_path / "base.yaml").write_text(GOOD.replace("steps: 20", "seqlen: 20"))
    path.write_text("extends: base.yaml\ntraining:\n  steps: 3\n")
    assert str(complaints_of(path).complaints[0].place) == f"{tmp_path / 'base.yaml'}:4:12"


def test_extends_in_a_circle(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    assert "leads back" in str(complaints_of(tmp_path / "a.yaml"))


def test_set_overrides_and_is_checked_the_same_way(tmp_path):
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    spec = load_spec(path, ["training.steps=7", "optimizer.lr=1e-3", "compile.components=[loss]"]).spec
    assert (spec.training.steps, spec.optimizer.lr, spec.compile.components) == (7, 1e-3, ("loss",))
    for option, fragment in (
        ("training.stepz=7", "has no field `stepz`"),
        ("training.steps=lots", "must be a whole number"),
        ("training.steps", "takes `section.field=value`"),
        ("=3", "takes `section.field=value`"),
        ("training.steps=[", "not valid YAML"),
        ("training.steps=", "must be a whole number"),
    ):
        error = complaints_of(path, [option])
        assert fragment in str(error), str(error)
        assert f"--set {option}" in str(error)


def test_hints_that_name_a_value_work(tmp_path):
    """The advice is checked: following it compiles."""
    path = tmp_path / "spec.yaml"
    base = textwrap.dedent(GPU)
    for bad, good in (
        (
            base.replace("seq_len: 8192", "seq_len: 8190") + "parallelism: {tensor_parallel_degree: 4}\n",
            ("8190", "8188"),
        ),
        (
            base.replace("local_batch_size: 1", "local_batch_size: 1, global_batch_size: 33")
            + "parallelism: {data_parallel_shard_degree: 8}\n",
            ("33", "32"),
        ),
        (
            base.replace("local_batch_size: 1", "local_batch_size: 9")
            + "parallelism: {pipeline_parallel_degree: 4, pipeline_parallel_schedule: Interleaved1F1B}\n",
            ("local_batch_size: 9", "local_batch_size: 8"),
        ),
    ):
        path.write_text(bad)
        hint = complaints_of(path).complaints[0].hint
        assert hint is not None
        assert good[1].split()[-1] in hint
        path.write_text(bad.replace(*good))
        compile_spec(load_spec(path))
