"""Rows of published measurements for tests, made up here in the published format."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from benchmarks.published.rows import Row

TITAN_ROW: dict[str, Any] = {
    "id": "made-up-fsdp",
    "source": {"title": "A made-up table", "repo": "nobody/nothing"},
    "task": "pretrain",
    "kind": "measured",
    "status": "ok",
    "quality": "A",
    "model": {
        "name": "Llama 3 8B",
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "vocab": 128256,
        "activation": "swiglu",
        "seq_len": 8192,
    },
    "hardware": {
        "gpu": "H100-SXM 80GB",
        "mem_gb": 80,
        "peak_tflops": {"bf16": 989, "fp8": 1979},
        "gpus_per_node": 8,
        "n_gpus": 16,
        "nodes": 2,
        "interconnect": "NVLink intra-node; 400 Gb/s InfiniBand per GPU",
    },
    "precision": "bf16",
    "parallelism": {
        "dp_replicate": 1, "dp_shard": 16, "dp": 16, "zero_stage": 3, "tp": 1, "sp": False, "pp": 1, "vpp": None,
        "pp_schedule": None, "cp": 1, "ep": None, "etp": None,
    },
    "batch": {"micro": 1, "global": 32, "grad_accum": 2},
    "recompute": "selective op (per-op SAC)",
    "compile": True,
    "overlap": {"reshard_after_forward": "default"},
    "measured": {
        "tokens_per_s_per_gpu": 6000, "tflops_per_gpu": None, "mfu": None, "step_time_s": None, "peak_mem_gib": 48.0,
        "mem_kind": "peak reserved",
    },
    "tags": {"arch": "dense", "precision_class": "bf16", "recompute_class": "selective"},
    "notes": None,
}  # fmt: skip

MEGATRON_ROW: dict[str, Any] = {
    **TITAN_ROW,
    "id": "made-up-megatron",
    "model": {
        "name": "GPT 22B", "layers": 48, "hidden": 6144, "heads": 64, "kv_heads": 64, "ffn": 24576, "vocab": 50257,
        "activation": "gelu", "gated": False, "seq_len": 2048,
    },
    "hardware": {
        "gpu": "A100-SXM 80GB", "mem_gb": 80, "peak_tflops": {"bf16": 312}, "gpus_per_node": 8, "n_gpus": 64, "nodes": 8,
        "interconnect": None,
    },
    "parallelism": {
        "dp_replicate": None, "dp_shard": None, "dp": 4, "zero_stage": 1, "tp": 4, "sp": True, "pp": 4, "vpp": 3,
        "pp_schedule": None, "cp": 1, "ep": None, "etp": None,
    },
    "batch": {"micro": 2, "global": 128, "grad_accum": 16},
    "recompute": "full (every layer)",
    "compile": False,
    "overlap": None,
    "measured": {"step_time_s": 9.0, "peak_mem_gib": None},
    "tags": {"arch": "dense", "precision_class": "bf16", "recompute_class": "full"},
}  # fmt: skip

MOE: dict[str, Any] = {"experts": 16, "top_k": 2, "expert_ffn": 2048, "shared_experts": 1, "dense_layers": 2}


def row(base: dict[str, Any] = TITAN_ROW, **changes: Any) -> Row:
    """`base` with values replaced; keys are paths with `__` for the dots: `row(model__layers=2)`."""
    data = copy.deepcopy(base)
    for path, value in changes.items():
        at = data
        *parts, last = path.split("__")
        for part in parts:
            if not isinstance(at.get(part), dict):
                at[part] = {}
            at = at[part]
        at[last] = value
    return Row(str(data.get("id")), "made_up.yaml", 0, data)


def write(folder: Path, name: str, *entries: Any) -> Path:
    """A file of rows in `folder`."""
    path = folder / name
    path.write_text(yaml.safe_dump([e.data if isinstance(e, Row) else e for e in entries]), encoding="utf-8")
    return path
