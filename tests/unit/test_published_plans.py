"""Published rows become plans and programs, or say why not."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published.cases import case_of, load_cases
from benchmarks.published.hardware import cluster_of, find_published_gpu
from benchmarks.published.rows import Row, Unusable, read_rows
from benchmarks.published.to_plan import Built, to_plan
from tests.unit.published_rows import MEGATRON_ROW, MOE, TITAN_ROW, row, write
from titan_planner.cost.program import (
    COMPOSER,
    DDP_MIXED,
    DEEPSPEED_ZERO1,
    FUSED_FSDP,
    MEGATRON,
    NEMO,
    TITAN,
    XLA_FSDP,
    Program,
)
from titan_planner.ir.model import Mlp, Moe, SwiGlu
from titan_planner.ir.verify import verify


def why(entry: Row) -> str:
    """Why the row is skipped."""
    with pytest.raises(Unusable) as caught:
        to_plan(entry)
    return str(caught.value)


def policies(built: Built) -> list[str]:
    """The modes of the blocks' checkpointing, in order."""
    found = []
    for layer in built.plan.layers[1:-2]:
        policy = built.plan.activation_checkpoint.policy(layer.checkpoint)
        assert policy is not None
        found.append(policy.mode)
    return found


# ------------------------------------------------------------------ whole rows


def test_an_fsdp_row_is_this_runtimes_plan() -> None:
    built = to_plan(row())
    plan = built.plan
    assert built.program == TITAN
    assert not verify(plan)
    assert (plan.mesh.dp_shard, plan.mesh.world_size) == (16, 16)
    assert (plan.batch.local_batch_size, plan.batch.accumulation_steps, plan.batch.global_batch_size) == (1, 2, 32)
    assert (plan.dtype, plan.fsdp.param_dtype, plan.fsdp.reduce_dtype) == ("float32", "bfloat16", "float32")
    assert plan.compile.enable
    assert set(policies(built)) == {"selective"}
    assert (plan.cluster.gpu.name, plan.cluster.nodes, plan.cluster.inter_node.name) == (
        "h100-sxm-80gb",
        2,
        "ib-ndr-400",
    )
    block = plan.model.blocks[0].block
    assert (block.attention.num_kv_heads, block.attention.head_dim, block.feed_forward) == (
        8,
        128,
        SwiGlu(hidden_dim=14336),
    )
    assert plan.request.limits.memory_headroom == 0


def test_a_megatron_row_is_its_layout_under_megatrons_program() -> None:
    built = to_plan(row(MEGATRON_ROW))
    plan = built.plan
    assert built.program == MEGATRON
    assert not built.program.executable
    assert not verify(plan)
    assert (plan.mesh.pp, plan.mesh.tp, plan.mesh.dp_shard) == (4, 4, 4)
    assert plan.pipeline.schedule == "Interleaved1F1B"
    assert [sum(layer.stage == s and "layers." in layer.fqn for layer in plan.layers) for s in range(12)] == [4] * 12
    assert (plan.pipeline.microbatches, plan.batch.microbatch_size, plan.batch.local_batch_size) == (16, 2, 32)
    assert plan.tensor_parallel.sequence_parallel
    assert plan.model.vocab_size == 50688, "padded to a multiple of 128 x tp"
    assert plan.model.tied, "as GPT"
    assert plan.model.blocks[0].block.feed_forward == Mlp(hidden_dim=24576, activation="gelu")
    assert set(policies(built)) == {"full"}
    assert plan.cluster.inter_node.name == "ib-hdr-200"
    assert "network ib-hdr-200" in built.assumptions


# ------------------------------------------------------------------ programs


@pytest.mark.parametrize(
    ("entry", "program"),
    [
        (row(), TITAN),
        (row(parallelism__zero_stage=None), TITAN),
        (row(framework="Megatron-FSDP"), FUSED_FSDP),
        (row(overlap__kernels="TE + DeepEP"), FUSED_FSDP),
        (row(framework="MaxText (JAX)"), XLA_FSDP),
        (row(MEGATRON_ROW), MEGATRON),
        (row(MEGATRON_ROW, container="26.02"), NEMO),
        (row(MEGATRON_ROW, framework="NeMo / Megatron-Core"), NEMO),
        (row(MEGATRON_ROW, parallelism__zero_stage=0), DDP_MIXED),
        (row(MEGATRON_ROW, precision="fp16 (fp16 gradient accumulation)"), DEEPSPEED_ZERO1),
        (row(MEGATRON_ROW, parallelism__zero_stage=None), MEGATRON),
        (
            row(MEGATRON_ROW, parallelism__zero_stage=None, precision="fp16", tags__precision_class="fp16"),
            replace(DDP_MIXED, attention="materialised"),
        ),
        (row(precision="bf16 (amp)", compile=False), COMPOSER),
    ],
)
def test_the_program_follows_from_what_the_row_says(entry: Row, program: Program) -> None:
    assert to_plan(entry).program == program


def test_weights_that_stay_gathered_are_zero_2_of_fsdp() -> None:
    built = to_plan(row(parallelism__zero_stage=2, overlap__reshard_after_forward="never"))
    assert built.program == TITAN
    assert {unit.reshard_after_forward for unit in built.plan.fsdp.units} == {False}
    assert to_plan(row(parallelism__zero_stage=2, overlap=None)).program.data_policy == "zero2"


def test_overlap_and_graphs() -> None:
    told = {"tp_overlap": True, "grad_reduce_overlap": False, "param_gather_overlap": False, "cuda_graphs": True}
    program = to_plan(row(MEGATRON_ROW, overlap=told)).program
    assert (program.overlap_tensor, program.overlap_gradients, program.overlap_weights, program.graphs) == (
        True,
        False,
        False,
        True,
    )
    assert not to_plan(row(MEGATRON_ROW, overlap={"cuda_graph_impl": "none"})).program.graphs
    tp = row(parallelism__tp=2, parallelism__dp=8, parallelism__dp_shard=8, parallelism__sp=True, batch__grad_accum=4,
             overlap={"async_tp": True})  # fmt: skip
    assert to_plan(tp).plan.tensor_parallel.async_tp


def test_the_optimizers_group_is_a_shard_group() -> None:
    mesh = to_plan(row(MEGATRON_ROW, parallelism__optimizer_shard_group="2")).plan.mesh
    assert (mesh.dp_replicate, mesh.dp_shard) == (2, 2)
    assert to_plan(row(MEGATRON_ROW, parallelism__optimizer_shard_group="all dp")).plan.mesh.dp_shard == 4


# ------------------------------------------------------------------ precision and recomputation


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("bf16 (fp32 gradients, no fp8)", None),
        ("fp8 tensorwise dynamic", "tensorwise"),
        ("fp8 (Transformer Engine; recipe not printed)", "tensorwise"),
        ("fp8 rowwise_with_gw_hp", "rowwise_with_gw_hp"),
        ("fp8 rowwise", "rowwise"),
        ("fp8 blockwise", "rowwise"),
    ],
)
def test_recipes(text: str, recipe: str | None) -> None:
    plan = to_plan(row(precision=text, tags__precision_class="")).plan
    assert plan.float8.recipe == recipe
    assert bool(plan.float8.converted) == (recipe is not None)
    assert not any("output" in selector for selector in plan.float8.converted)


def test_float8_details_of_the_text() -> None:
    gathered = to_plan(row(precision="fp8 tensorwise + fp8 FSDP all-gather")).plan.float8
    assert gathered.enable_fsdp_float8_all_gather
    all_of_them = to_plan(row(precision="fp8 rowwise (all linears)")).plan.float8
    assert "output" in all_of_them.converted
    without = to_plan(row(precision="fp8 rowwise without wk,wv")).plan.float8
    assert any("wk" in entry.module for entry in without.skipped)


def test_precisions_that_cannot_be_priced() -> None:
    assert why(row(precision="nvfp4")).startswith("precision has no recipe yet")
    assert why(row(precision="fp8 rowwise", hardware__gpu="A100-SXM 80GB")).startswith(
        "breaks the rule float8-hardware"
    )
    assert why(row(precision="mxfp8")).startswith("breaks the rule float8-hardware")
    assert why(row(precision="not captured", tags__precision_class="")) == "not published: precision"


def test_low_precision_weights_and_moments() -> None:
    plan = to_plan(row(precision="bf16 + bf16 master weights")).plan
    assert (plan.dtype, plan.optimizer.state_dtype, plan.fsdp.reduce_dtype) == ("bfloat16", "bfloat16", "bfloat16")
    moments = to_plan(row(optimizer="fused_opt_states_bf16")).plan
    assert (moments.dtype, moments.optimizer.state_dtype, moments.optimizer.implementation) == (
        "float32",
        "bfloat16",
        "foreach",
    )
    assert to_plan(row(overlap={"fsdp_mp_mode": "PURE"})).plan.fsdp.reduce_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("recompute", "tag", "modes"),
    [
        ("none", "none", {"none"}),
        ("full (every layer)", "full", {"full"}),
        ("selective op", "selective", {"selective"}),
        ("selective (every 4th layer)", "selective", {"full", "none"}),
        ("compiler memory budget 0.85", "budget", {"memory_budget"}),
    ],
)
def test_recomputation_of_a_torch_program(recompute: str, tag: str, modes: set[str]) -> None:
    built = to_plan(row(recompute=recompute, tags__recompute_class=tag))
    assert set(policies(built)) == modes
    if "4th" in recompute:
        assert policies(built).count("full") == 8
    if tag == "budget":
        assert built.plan.activation_checkpoint.policies[-1].memory_budget == 0.85


def test_megatrons_recomputation() -> None:
    core = to_plan(row(MEGATRON_ROW, recompute="selective (attention core)", tags__recompute_class="selective"))
    assert set(policies(core)) == {"none"}
    assert core.memory_unlike is None
    modules = {"recompute_modules": ["layernorm", "moe_act"]}
    cheap = to_plan(row(MEGATRON_ROW, recompute=modules, tags__recompute_class="selective"))
    assert set(policies(cheap)) == {"none"}
    assert cheap.memory_unlike == "recomputation of single modules"
    some = {"granularity": "full", "method": "block", "num_layers": 3}
    first = to_plan(row(MEGATRON_ROW, recompute=some, tags__recompute_class="full"))
    assert policies(first) == ["full", "full", "full", "none"] * 12
    mlp = {"recompute_modules": ["mlp"]}
    assert why(row(MEGATRON_ROW, recompute=mlp, tags__recompute_class="selective")).startswith("recomputation cannot")
    assert why(row(recompute="full except saved matmuls", tags__recompute_class="full")).startswith(
        "recomputation cannot"
    )


def test_unpublished_recomputation_is_the_least_that_fits() -> None:
    small = to_plan(row(recompute=None, tags__recompute_class="unknown", model__layers=4))
    assert set(policies(small)) == {"none"}
    large = to_plan(
        row(recompute=None, tags__recompute_class="unknown", batch__micro=8, batch__global=256, model__layers=64)
    )
    assert set(policies(large)) == {"full"}
    assert "recomputation full: the least that fits" in large.assumptions


# ------------------------------------------------------------------ models


def test_mixtures_of_experts() -> None:
    mixed = to_plan(row(model__moe=MOE, tags__arch="moe", parallelism__ep=8, overlap={"dispatcher": "DeepEP"}))
    runs = mixed.plan.model.blocks
    assert [run.repeat for run in runs] == [2, 30]
    assert isinstance(runs[0].block.feed_forward, SwiGlu)
    moe = runs[1].block.feed_forward
    assert isinstance(moe, Moe)
    assert (moe.num_experts, moe.top_k, moe.hidden_dim, moe.shared_dim) == (16, 2, 2048, 2048)
    assert (mixed.plan.mesh.ep, mixed.plan.expert_parallel.comm_backend) == (8, "deepep")
    assert not mixed.plan.expert_parallel.force_load_balance
    balanced = row(model__moe=MOE, tags__arch="moe", notes="expert routing force-balanced, dropless")
    assert to_plan(balanced).plan.expert_parallel.force_load_balance
    second = {**MOE, "dense_layers": 16, "note": "MoE on every second layer"}
    kinds = [type(b.feed_forward) for b in to_plan(row(model__moe=second)).plan.model.layers()]
    assert kinds == [SwiGlu, Moe] * 16
    grouped = row(MEGATRON_ROW, model__moe={**MOE, "dense_layers": 0}, model__gated=True, model__activation="swiglu",
                  precision="fp8", hardware__gpu="H100-SXM", parallelism__ep=2)  # fmt: skip
    assert any("experts" in selector for selector in to_plan(grouped).plan.float8.converted)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (row(model__attention={"type": "MLA", "kv_lora_rank": 512}), "no layer kind yet: attention MLA"),
        (row(model__attention={"type": "GQA", "note": "sliding-window 128"}), "no layer kind yet: sliding-window"),
        (row(tags__arch="hybrid_or_other"), "no layer kind yet: hybrid of attention and other mixers"),
        (row(model__mtp_layers=1), "no layer kind yet: multi-token prediction"),
        (row(model__moe=MOE, model__gated=False), "no layer kind yet: experts without a gate"),
        (row(model__moe={**MOE, "experts": None}), "not published: model.moe.experts"),
        (row(model__layers=None, model__vocab=None), "not published: model.layers"),
        (row(model__ffn=None), "not published: model.ffn"),
        (row(hardware__n_gpus=None), "not published: hardware.n_gpus"),
        (row(hardware__gpu="V100-SXM3 32GB"), "GPU not in the catalogue: V100-SXM3 32GB"),
        (row(parallelism__dp=8), "degrees do not make up the GPUs"),
        (row(parallelism__tp=None, parallelism__pp=None), "not published: parallelism.tp, parallelism.pp"),
        (row(batch={"micro": None, "global": None}), "not published: batch.micro, batch.global"),
        (row(batch={"micro": 3, "global": 32}), "batch does not divide"),
        (row(task="lora"), "not a pre-training step: task lora"),
        (row(task="micro:gemm"), "not a pre-training step: task micro:gemm"),
        (row(kind="analytic"), "not a measurement: kind analytic"),
        (row(overlap={"cpu_offloading_num_layers": 20}), "activations in host memory"),
        (row(model__layers=-3), "malformed row: `model.layers` is -3"),
        (row(model__layers="many"), "malformed row: `model.layers` is `many`"),
        (row(model__heads=7), "malformed row"),
        (row(MEGATRON_ROW, parallelism__pp_schedule="DualPipe"), "schedule has no counterpart: DualPipe"),
        (row(MEGATRON_ROW, parallelism__vpp=None,
             parallelism__pp_schedule="interleaved 1F1B (interleaving degree not printed)"), "not published: parallelism.vpp"),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_says_why(entry: Row, reason: str) -> None:
    assert why(entry).startswith(reason)


def test_whether_a_weight_is_tied() -> None:
    assert not to_plan(row()).plan.model.tied
    assert to_plan(row(model__tie_embeddings=True)).plan.model.tied
    small = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192}
    changes = {f"model__{name}": value for name, value in small.items()}
    assert to_plan(row(**changes, model__name="Llama 3.2 1B")).plan.model.tied, "1.24 billion with, 1.50 without"
    assert to_plan(row(**changes, model__name="?", model__params_total=1.236e9)).plan.model.tied
    assert not to_plan(row(model__name="Llama 3 70B dimensions, cut")).plan.model.tied, "the name is of another size"


def test_a_ratio_gives_the_width_of_the_feed_forward_layer() -> None:
    built = to_plan(row(model__ffn=None, model__mlp_ratio="8/3"))
    assert built.plan.model.blocks[0].block.feed_forward == SwiGlu(hidden_dim=11008)


# ------------------------------------------------------------------ pipelines and batches


def stages(entry: Row) -> list[int]:
    """Layers of each stage."""
    plan = to_plan(entry).plan
    return [sum(x.stage == s.index and x.fqn.startswith("layers.") for x in plan.layers) for s in plan.pipeline.stages]


def test_stages() -> None:
    assert stages(row(MEGATRON_ROW, model__layers=46, parallelism__vpp=3)) == [3, *[4] * 10, 3]
    assert stages(row(MEGATRON_ROW, model__layers=10, parallelism__vpp=3)) == [0, *[1] * 10, 0]
    assert stages(row(MEGATRON_ROW, model__layers=6, parallelism__vpp=1)) == [1, 2, 2, 1]
    assert stages(row(MEGATRON_ROW, model__layers=9, parallelism__vpp=1)) == [3, 2, 2, 2]
    laid_out = row(MEGATRON_ROW, model__layers=8, parallelism__vpp=1, parallelism__pp_layout="Et|(tt|)*2tttL")
    assert stages(laid_out) == [1, 2, 2, 3]


@pytest.mark.parametrize(
    ("text", "vpp", "schedule"),
    [
        (None, 1, "1F1B"),
        (None, 3, "Interleaved1F1B"),
        ("1F1B (DeepSpeed)", 1, "1F1B"),
        ("interleaved 1F1B", 3, "Interleaved1F1B"),
        ("GPipe", None, "GPipe"),
        ("Looped BFS", 2, "LoopedBFS"),
        ("ZBV", None, "ZBVZeroBubble"),
        ("DualPipeV", None, "DualPipeV"),
        ("InterleavedZeroBubble", 2, "InterleavedZeroBubble"),
    ],
)
def test_schedules(text: str | None, vpp: int | None, schedule: str) -> None:
    changes: dict[str, Any] = {
        "parallelism__pp_schedule": text,
        "parallelism__vpp": vpp,
        "overlap": {"reshard_after_forward": "never"},
    }
    assert to_plan(row(MEGATRON_ROW, **changes)).plan.pipeline.schedule == schedule


def test_few_microbatches_run_in_gpipes_order() -> None:
    few = to_plan(row(MEGATRON_ROW, parallelism__vpp=1, batch__grad_accum=2, batch__global=16))
    assert (few.plan.pipeline.schedule, few.plan.pipeline.microbatches) == ("GPipe", 2)


def test_a_recipe_for_performance_interleaves() -> None:
    nemo = row(MEGATRON_ROW, parallelism__vpp=None, framework="NeMo")
    plan = to_plan(nemo).plan
    assert (plan.pipeline.schedule, len(plan.pipeline.stages)) == ("Interleaved1F1B", 24)
    assert to_plan(row(MEGATRON_ROW, parallelism__vpp=None)).plan.pipeline.schedule == "1F1B"


def test_batches_are_completed() -> None:
    def batch(**given: Any) -> tuple[int, int, int]:
        found = to_plan(row(batch=given)).plan.batch
        return found.microbatch_size, found.local_batch_size, found.accumulation_steps

    assert batch(micro=2, **{"global": 64}) == (2, 2, 2)
    assert batch(micro=2, grad_accum=2) == (2, 2, 2)
    assert batch(grad_accum=2, **{"global": 64}) == (2, 2, 2)
    assert batch(micro=2) == (2, 2, 1)
    assert batch(local=2) == (2, 2, 1)
    assert batch(micro=2, grad_accum=7, **{"global": 64}) == (2, 2, 2), "printed batches win over printed steps"
    pipeline = row(MEGATRON_ROW, parallelism__vpp=1, batch={"micro": None, "global": 128, "local": 16})
    found = to_plan(pipeline).plan
    assert (found.pipeline.microbatches, found.batch.microbatch_size, found.batch.accumulation_steps) == (16, 1, 2)


def test_context_parallelism() -> None:
    titan = row(parallelism__cp=2, parallelism__dp=8, parallelism__dp_shard=8, batch__grad_accum=4)
    assert to_plan(titan).plan.context_parallel.method == "allgather"
    assert to_plan(titan).plan.mesh.fsdp == 16, "weights are sharded over dp_shard x cp"
    megatron = row(MEGATRON_ROW, parallelism__cp=2, parallelism__dp=2, batch__grad_accum=32)
    assert to_plan(megatron).plan.context_parallel.method == "ring"
    a2a = row(MEGATRON_ROW, parallelism__cp=2, parallelism__dp=2, batch__grad_accum=32, overlap={"cp_comm_type": "a2a"})
    assert to_plan(a2a).plan.context_parallel.method == "alltoall"


# ------------------------------------------------------------------ hardware


@pytest.mark.parametrize(
    ("text", "memory", "name"),
    [
        ("H100-SXM 80GB", 80, "h100-sxm-80gb"),
        ("H100-SXM 96GB HBM2e, 500 W power limit", 96, "h100-sxm-96gb-hbm2e"),
        ("NVIDIA H100 80GB HBM3", None, "h100-sxm-80gb"),
        ("H100 PCIe", 80, "h100-pcie-80gb"),
        ("H100 NVL", 94, "h100-nvl-94gb"),
        ("A100-SXM 40GB", 40, "a100-sxm-40gb"),
        ("A100", None, "a100-sxm-40gb"),
        ("A100-PCIe 80GB", 80, "a100-pcie-80gb"),
        ("GB200 NVL72 (per GPU)", 186, "gb200-186gb"),
        ("GB300 NVL72 (per GPU)", 288, "gb300-288gb"),
        ("B200 (DGX/HGX)", 180, "b200-180gb"),
        ("B300 (DGX/HGX)", 288, "b300-288gb"),
        ("H200-SXM 141GB", 141, "h200-sxm-141gb"),
        ("MI300X 192GB", 192, "mi300x-192gb"),
        ("H800", None, "h800-sxm-80gb"),
        ("RTX 4090", 24, "rtx-4090-24gb"),
    ],
)
def test_gpus_by_free_text(text: str, memory: float | None, name: str) -> None:
    assert find_published_gpu(text, memory).name == name


@pytest.mark.parametrize(
    ("gpu", "text", "gb_per_s", "per_gpu"),
    [
        ("H100-SXM", "CX7 400 Gb/s IB per GPU", 50.0, True),
        ("A100-SXM 80GB", "8 x 200 Gb/s HDR InfiniBand per node (Selene); NVLink/NVSwitch intra-node", 25.0, True),
        ("A100-SXM 80GB", "1600 Gb/s node-to-node RoCE", 25.0, True),
        ("A100-SXM 80GB", "4 x 100 Gb/s RoCE per node; 8-GPU NVLink nodes", 50.0, False),
        ("A100-SXM 80GB", "Omni-Path, 4 x 100 Gb/s links per node; NVLink intra-node", 50.0, False),
        ("A100-SXM 80GB", "400 Gb/s inter-node", 50.0, False),
        ("H100-SXM", "3.2 Tb/s inter-node", 50.0, True),
        ("H100-SXM", "InfiniBand 8 x 50 GB/s per node; NVLink 4", 50.0, True),
        ("B300", "NVLink 8-GPU node; one 800 Gb/s XDR InfiniBand NIC per GPU", 100.0, True),
        ("H100-SXM", "NVSwitch intranode, 900 GB/s intra-node", 50.0, True),
        ("H100-SXM", "400 Gb/s (Meta) or 3.2 Tb/s InfiniBand (IBM), which is not stated", 50.0, True),
        ("H100-SXM", None, 50.0, True),
        ("A100-SXM 40GB", "not printed", 25.0, True),
        ("H100-SXM", "AWS EFA-class cluster", 50.0, True),
    ],
)
def test_networks_by_free_text(gpu: str, text: str | None, gb_per_s: float, per_gpu: bool) -> None:
    link = cluster_of(row(hardware__gpu=gpu, hardware__mem_gb=None, hardware__interconnect=text), []).inter_node
    assert (link.gb_per_s, link.per_gpu) == (gb_per_s, per_gpu)


def test_a_rack_is_one_node() -> None:
    rack = {"hardware__gpu": "GB200 NVL72 (per GPU)", "hardware__mem_gb": 186, "hardware__gpus_per_node": 4}
    assert cluster_of(row(**rack, hardware__n_gpus=256), []).gpus_per_node == 64
    small = cluster_of(row(**rack, hardware__n_gpus=8), [])
    assert (small.gpus_per_node, small.nodes) == (8, 1)
    assert cluster_of(row(hardware__n_gpus=4), []).gpus_per_node == 4
    assert cluster_of(row(hardware__mem_bw_tb_s=2.0), []).gpu.memory_gb_per_s == 2000


# ------------------------------------------------------------------ whatever a row holds


ODD: tuple[Any, ...] = (
    None,
    "",
    "odd",
    -1,
    0,
    1.5,
    10**7,
    10**14,
    float("nan"),
    True,
    [],
    {},
    [1, 2],
    {"a": 1},
    "8",
    "\x00",
)


def leaves(data: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of everything in nested mappings, sections included."""
    found = [path] if path else []
    if isinstance(data, dict):
        for name, value in data.items():
            found += leaves(value, (*path, name))
    return found


@pytest.mark.parametrize("base", [TITAN_ROW, MEGATRON_ROW], ids=["fsdp", "megatron"])
def test_no_value_anywhere_ends_the_run(base: dict[str, Any]) -> None:
    base = {**base, "peer_prediction": {"system": "x", "step_time_s": 1.0}, "framework": "x", "flags": ["x"]}
    base = copy.deepcopy(
        {**base, "model": {**base["model"], "moe": dict(MOE), "layers": 4}, "tags": {**base["tags"], "arch": "moe"}}
    )
    for path in leaves(base):
        for value in ODD:
            data = copy.deepcopy(base)
            at = data
            for part in path[:-1]:
                at = at[part]
            at[path[-1]] = value
            found = case_of(Row("odd", "odd.yaml", 0, data))
            assert (found.plan is None) != (found.skipped is None)
            assert found.skipped is None or not found.skipped.kind.startswith("ERROR"), (path, value, found.skipped)
        without = copy.deepcopy(base)
        at = without
        for part in path[:-1]:
            at = at[part]
        del at[path[-1]]
        found = case_of(Row("odd", "odd.yaml", 0, without))
        assert found.skipped is None or not found.skipped.kind.startswith("ERROR"), (path, found.skipped)


def test_files_that_hold_no_rows_are_listed(tmp_path) -> None:
    write(tmp_path, "good.yaml", row())
    (tmp_path / "broken.yaml").write_text("- {a: [", encoding="utf-8")
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "scalar.yaml").write_text("just text", encoding="utf-8")
    (tmp_path / "mixed.yaml").write_text("- 3\n- {task: pretrain}\n", encoding="utf-8")
    (tmp_path / "empty.yaml").write_text("", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no rows", encoding="utf-8")
    cases = {(case.row.file, case.row.number): case for case in load_cases(tmp_path)}
    assert cases["good.yaml", 0].plan is not None
    reasons = {file: str(case.skipped) for (file, _), case in cases.items() if case.skipped}
    assert reasons.keys() == {"broken.yaml", "binary.yml", "scalar.yaml", "mixed.yaml"}
    assert all(reason.startswith(("malformed row", "not published")) for reason in reasons.values())
    with pytest.raises(NotADirectoryError):
        read_rows(tmp_path / "nowhere")
