"""The spec that `titan-plan init` writes: commented, complete enough to edit, and valid as it stands."""

from __future__ import annotations

from pathlib import Path

from titan_planner.ir.cluster import Gpu
from titan_planner.ir.inventory import num_params
from titan_planner.ir.model import Model
from titan_planner.ir.schema import SCHEMA_FILES, bundled

EXAMPLES_WITH_DATA = ("tiny_cpu",)
"""Examples that train on the sample text, which is copied beside them."""


def examples() -> dict[str, Path]:
    """Name -> spec file of every worked example that ships with the project."""
    return {path.parent.name: path for path in sorted(bundled("plans").glob("*/spec.yaml"))}


def starter_spec(model: Model, gpu: Gpu, gpus_per_node: int, nodes: int, inter_node: str) -> str:
    """A commented spec for `model` on `nodes` x `gpus_per_node` of `gpu`."""
    count = num_params(model)
    size = f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"
    on_cpu = gpu.device == "cpu"
    seq_len = min(256 if on_cpu else 8192, model.max_seq_len)
    data = (
        "data: {source: text, path: data/sample, tokenizer: data/tokenizer.json}"
        if on_cpu
        else "data: {source: huggingface, dataset: c4}"
    )
    link = (
        f"\n  inter_node: {{link: {inter_node}, per_gpu: true}}   # `titan-plan hardware` lists links"
        if nodes > 1
        else ""
    )
    assets = (
        "" if on_cpu else f"\n  hf_assets_path: ./assets/hf/{model.flavor}   # tokenizer, and weights if there are any"
    )
    return f"""\
# yaml-language-server: $schema={bundled("schemas", SCHEMA_FILES["spec"]).as_uri()}
# A Titan spec. Every decision is `auto` unless pinned. Compile it with `titan-plan compile THIS_FILE -o plan.json`,
# read the plan with `titan-plan show plan.json`, and train with `titan-run train plan.json`.
spec_version: 1

model:                       # {size} parameters; `titan-plan models` lists families and flavors
  family: {model.family}
  flavor: {model.flavor}{assets}
  # overrides: {{max_seq_len: {model.max_seq_len}}}

cluster:
  gpu: {gpu.name}   # `titan-plan hardware` lists GPUs; numbers of your own: {{like: {gpu.name}, memory_gib: 80}}
  gpus_per_node: {gpus_per_node}
  nodes: {nodes}{link}

training:
  steps: 1000
  seq_len: {seq_len}              # tokens per sequence, at most {model.max_seq_len}
  local_batch_size: auto     # sequences per data-parallel rank and accumulation step
  global_batch_size: auto    # sequences per optimizer step; auto = local x data-parallel ranks
  max_norm: 1.0              # gradient clipping; 0 turns it off

optimizer: {{name: AdamW, lr: 3.0e-4, weight_decay: 0.1}}
lr_scheduler: {{warmup_steps: 100, decay_ratio: 0.3, decay_type: cosine, min_lr_factor: 0.1}}
{data}

parallelism: auto            # or pin degrees, e.g. {{tensor_parallel_degree: 8, data_parallel_shard_degree: -1}}
activation_checkpoint: auto  # or {{mode: none | selective | full}}
# float8: {{recipe: tensorwise, filter_fqns: [output, auto_filter_small_kn]}}   # changes numerics, so it is off unless asked for
compile: auto

checkpoint: {{enable: true, interval: 500, keep_latest_k: 10}}
metrics: {{log_freq: 10, enable_tensorboard: true}}
"""
