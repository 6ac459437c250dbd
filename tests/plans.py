"""Small plans for tests of the runtime, built value by value so that nothing of the planner has to work for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_planner.ir.cluster import Cluster, Efficiency, Gpu, Link
from titan_planner.ir.codec import dumps
from titan_planner.ir.execution import ActivationCheckpoint, CheckpointPolicy, Compile, Float8, Loss
from titan_planner.ir.inventory import top_level_modules
from titan_planner.ir.job import (
    Batch,
    Checkpoint,
    Comm,
    Data,
    Job,
    LrSchedule,
    Metrics,
    Optimizer,
    Profiling,
    Seeds,
    Validation,
)
from titan_planner.ir.model import Block, Blocks, Gqa, Model, Moe, RmsNorm, Rope, SwiGlu
from titan_planner.ir.parallel import (
    ContextParallel,
    ExpertParallel,
    Fsdp,
    FsdpUnit,
    Mesh,
    Pipeline,
    Stage,
    TensorParallel,
)
from titan_planner.ir.plan import PLAN_VERSION, Layer, Plan
from titan_planner.ir.request import (
    ActivationCheckpointSpec,
    CompileSpec,
    Float8Spec,
    LimitsSpec,
    LossSpec,
    ParallelismSpec,
    Request,
)
from titan_planner.sharding import expert_rows

VOCAB = 2048
REPOSITORY = Path(__file__).resolve().parent.parent
TEXT = REPOSITORY / "data" / "sample"
TOKENIZER = REPOSITORY / "data" / "tokenizer.json"

EFFICIENCY = Efficiency(
    matmul=0.7,
    matmul_float8=0.6,
    attention=0.5,
    attention_backward=0.4,
    memory=0.9,
    intra_node=0.8,
    inter_node=0.8,
    overlap_slowdown=0.1,
    launch_us=5.0,
    source="test",
)

NO_CHECKPOINT = CheckpointPolicy(
    name="none",
    mode="none",
    save_ops=(),
    recompute_every_second_matmul=False,
    force_recompute_fqns=(),
    memory_budget=None,
)


def tiny_model(**changes: Any) -> Model:
    """Two blocks of width 32 over the repository's tokenizer: 0.15 million parameters."""
    attention = Gqa(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(theta=10000.0, scaling=None))
    block = Block(attention=attention, feed_forward=SwiGlu(hidden_dim=48), norm=RmsNorm(eps=1e-5))
    model = Model(
        family="llama3",
        flavor="tiny",
        vocab_size=VOCAB,
        dim=32,
        max_seq_len=128,
        blocks=(Blocks(repeat=2, block=block),),
        norm=RmsNorm(eps=1e-5),
        tied=False,
    )
    return replace(model, **changes)


def moe(**changes: Any) -> Moe:
    """Eight experts, of which each token meets two and a shared one; routed as in DeepSeek V3."""
    layer = Moe(
        num_experts=8,
        hidden_dim=24,
        top_k=2,
        num_shared_experts=1,
        score_function="sigmoid",
        score_before_experts=False,
        route_norm=True,
        route_scale=1.5,
        num_groups=None,
        num_limited_groups=None,
        load_balance_coeff=1e-3,
    )
    return replace(layer, **changes)


def tiny_moe_model(**changes: Any) -> Model:
    """`tiny_model` with a dense first block and two blocks of `moe(**changes)`."""
    dense = tiny_model().blocks[0].block
    mixed = Blocks(repeat=2, block=replace(dense, feed_forward=moe(**changes)))
    return tiny_model(blocks=(Blocks(repeat=1, block=dense), mixed), family="debug_moe")


def cluster(ranks: int, device: str = "cpu", nodes: int = 1) -> Cluster:
    """`ranks` CPU ranks (or GPUs that no test has) on `nodes` nodes."""
    gpu = Gpu(
        name="cpu" if device == "cpu" else "test-gpu",
        vendor="cpu" if device == "cpu" else "nvidia",
        memory_gib=1.0 if device == "cpu" else 80.0,
        memory_gb_per_s=10.0,
        bf16_tflops=0.1,
        fp8_tflops=None,
        fp4_tflops=None,
        compute_units=1,
        compute_capability=None,
        float8=False,
        mxfp8=False,
        nvfp4=False,
        intra_node_link="memory",
        backend="gloo" if device == "cpu" else "nccl",
        device=device,
        efficiency=EFFICIENCY,
        source="test",
    )
    link = Link(name="memory", gb_per_s=10.0, latency_us=1.0, per_gpu=False, source="test")
    return Cluster(
        gpu=gpu,
        gpus_per_node=ranks // nodes,
        nodes=nodes,
        intra_node=link,
        inter_node=link,
        price_per_gpu_hour=None,
    )


def mesh(dp_shard: int = 1, dp_replicate: int = 1, **others: int) -> Mesh:
    """A mesh whose other degrees are 1."""
    degrees = {"pp": 1, "cp": 1, "tp": 1, "ep": 1, "etp": 1, **others}
    return Mesh(dp_replicate=dp_replicate, dp_shard=dp_shard, **degrees)


def job(folder: str = "out", steps: int = 10, **checkpoint: Any) -> Job:
    """A job that writes into `folder`; keyword arguments are fields of its Checkpoint."""
    settings = {
        "enable": False,
        "folder": "checkpoint",
        "interval": 5,
        "interval_minutes": None,
        "keep_latest_k": 0,
        "async_mode": "disabled",
        "enable_first_step_checkpoint": False,
        "last_save_model_only": False,
        "last_save_in_hf": False,
        "export_dtype": "float32",
        "initial_load_path": None,
        "initial_load_model_only": True,
        "load_step": -1,
        "exclude_from_loading": (),
        **checkpoint,
    }
    return Job(
        steps=steps,
        dump_folder=folder,
        checkpoint=Checkpoint(**settings),
        metrics=Metrics(
            log_freq=5,
            enable_tensorboard=False,
            save_tb_folder="tb",
            save_for_all_ranks=False,
            enable_wandb=False,
        ),
        profiling=Profiling(
            enable_profiling=False,
            save_traces_folder="traces",
            profile_freq=4,
            profiler_active=1,
            profiler_warmup=1,
            enable_memory_snapshot=False,
        ),
        comm=Comm(init_timeout_seconds=60, train_timeout_seconds=60, trace_buf_size=0),
        validation=Validation(enable=False, path=None, freq=1, steps=1),
        environment={},
        token_budget=None,
    )


def units(model: Model, reshard: bool | int = True) -> tuple[FsdpUnit, ...]:
    """One unit a block, the embedding, and norm and output together; a tied output goes with the embedding."""
    if model.tied:
        outer = [FsdpUnit(modules=("tok_embeddings", "output"), reshard_after_forward=reshard)]
    else:
        outer = [
            FsdpUnit(modules=("tok_embeddings",), reshard_after_forward=reshard),
            FsdpUnit(modules=("norm", "output"), reshard_after_forward=False),
        ]
    return (*outer, FsdpUnit(modules=("layers.*",), reshard_after_forward=reshard))


def tiny_plan(
    grid: Mesh | None = None, *, model: Model | None = None, local: int = 1, total: int = 8, **sections: Any
) -> Plan:
    """A plan of `total` sequences of 32 tokens a step, `local` at a time on each rank of `grid`.

    Keyword arguments replace whole sections (`optimizer=...`, `job=...`).
    """
    grid = grid or mesh()
    model = model or tiny_model()
    values: dict[str, Any] = {
        "plan_version": PLAN_VERSION,
        "name": "tiny",
        "description": "",
        "model": model,
        "cluster": cluster(grid.world_size),
        "mesh": grid,
        "batch": Batch(
            seq_len=32,
            global_batch_size=total,
            local_batch_size=local,
            microbatch_size=local,
            accumulation_steps=total // (local * grid.dp),
        ),
        "pipeline": Pipeline(schedule=None, stages=(Stage(index=0, pp_rank=0),), microbatches=1, actions=None),
        "fsdp": Fsdp(
            strategy="fsdp",
            units=units(model),
            param_dtype="float32",
            reduce_dtype="float32",
            defer_gradient_sync=False,
            prefetch_forward=0,
            prefetch_backward=0,
            cpu_offload=False,
        ),
        "tensor_parallel": TensorParallel(sequence_parallel=False, loss_parallel=False, async_tp=False, kv_replicas=1),
        "context_parallel": ContextParallel(method="allgather", load_balance="none"),
        "expert_parallel": ExpertParallel(comm_backend="standard", capacity_factor=None, force_load_balance=False),
        "activation_checkpoint": ActivationCheckpoint(
            policies=(NO_CHECKPOINT,), preserve_rng_state=False, early_stop=True, determinism_check="default"
        ),
        "float8": Float8(
            recipe=None,
            converted=(),
            skipped=(),
            enable_fsdp_float8_all_gather=False,
            precompute_float8_dynamic_scale_for_fsdp=False,
            emulate=False,
        ),
        "compile": Compile(enable=False, components=("model", "loss"), backend="inductor"),
        "loss": Loss(kind="cross_entropy", chunks=1, z_loss=0.0),
        "layers": tuple(Layer(fqn=fqn, stage=0, checkpoint="none") for fqn in top_level_modules(model)),
        "sharding": expert_rows(model, grid),
        "dtype": "float32",
        "optimizer": Optimizer(
            name="AdamW",
            lr=1e-2,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            implementation="fused",
            state_dtype="float32",
            max_norm=1.0,
            param_groups=(),
        ),
        "lr_schedule": LrSchedule(
            warmup_steps=2, total_steps=20, decay_steps=5, decay_type="linear", min_lr_factor=0.0
        ),
        "data": Data(
            source="text",
            dataset=None,
            path="data/sample",
            tokenizer="data/tokenizer.json",
            text_field="text",
            add_bos=True,
        ),
        "seeds": Seeds(seed=7, deterministic=False),
        "job": job(),
        "request": Request(
            local_batch_size="auto",
            global_batch_size="auto",
            parallelism=ParallelismSpec(),
            activation_checkpoint=ActivationCheckpointSpec(),
            float8=Float8Spec(),
            compile=CompileSpec(),
            loss=LossSpec(),
            objective="max_throughput",
            limits=LimitsSpec(),
        ),
        "estimate": None,
        "remarks": (),
    }
    return Plan(**{**values, **sections})


def on_disk(plan: Plan) -> Plan:
    """`plan` with absolute paths of the repository's text and tokenizer: legal in memory, never in a file."""
    return replace(plan, data=replace(plan.data, path=str(TEXT), tokenizer=str(TOKENIZER)))


def write_plan(plan: Plan, path: Path) -> Path:
    """Write `plan` to `path`."""
    path.write_text(dumps(plan), encoding="utf-8")
    return path
