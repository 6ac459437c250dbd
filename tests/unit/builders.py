"""Specs and plans that tests start from."""

from __future__ import annotations

import tempfile
from pathlib import Path

from titan_planner.compiler import compile_spec
from titan_planner.ir.plan import Plan
from titan_planner.spec import load_spec

TINY = """\
spec_version: 1
name: tiny
model: {family: llama3, flavor: debug}
cluster: {gpu: cpu, nodes: 1, gpus_per_node: 4}
training: {steps: 20, seq_len: 256, global_batch_size: 16}
data: {source: text, path: data/sample, tokenizer: data/tokenizer.json}
"""

PIPELINE = """\
spec_version: 1
name: pipeline
model: {family: llama3, flavor: 8B}
cluster: {gpu: h100-sxm-80gb, nodes: 4, gpus_per_node: 8, inter_node: ib-ndr-400}
training: {steps: 20, seq_len: 8192, local_batch_size: 16}
parallelism: {pipeline_parallel_degree: 4, tensor_parallel_degree: 4, data_parallel_shard_degree: -1,
              pipeline_parallel_schedule: Interleaved1F1B}
activation_checkpoint: {mode: selective}
float8: {recipe: tensorwise, filter_fqns: [output, auto_filter_small_kn]}
"""

MOE = """\
spec_version: 1
name: moe
model: {family: debug_moe, flavor: debug}
cluster: {gpu: cpu, nodes: 1, gpus_per_node: 4}
training: {steps: 20, seq_len: 128, global_batch_size: 8}
parallelism: {expert_parallel_degree: 2}
data: {source: text, path: data/sample, tokenizer: data/tokenizer.json}
"""


def compile_text(text: str, sets: list[str] | None = None) -> Plan:
    """The plan of a spec given as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(text, encoding="utf-8")
        return compile_spec(load_spec(path, sets))
