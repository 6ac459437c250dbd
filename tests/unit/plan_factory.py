"""Plans of real sizes for tests of diff and render, on top of the value-by-value plans of `tests/plans.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests import plans
from titan_planner.ir.execution import ActivationCheckpoint, CheckpointPolicy, Float8, SkippedLinear
from titan_planner.ir.inventory import num_params, top_level_modules
from titan_planner.ir.job import Batch
from titan_planner.ir.parallel import Mesh, ModuleSharding, Pipeline, Stage, TensorParallel
from titan_planner.ir.plan import Estimate, Layer, Plan, Remark, StageMemory
from titan_planner.ir.request import ParallelismSpec
from titan_planner.models.llama3 import FLAVORS

FULL = CheckpointPolicy(
    name="full",
    mode="full",
    save_ops=(),
    recompute_every_second_matmul=False,
    force_recompute_fqns=(),
    memory_budget=None,
)
POLICIES = ActivationCheckpoint(
    policies=(plans.NO_CHECKPOINT, FULL), preserve_rng_state=False, early_stop=True, determinism_check="default"
)

CUT = {
    "tok_embeddings": "S(0)",
    "layers.*.attention.wq": "S(0)",
    "layers.*.attention.wk": "S(0)",
    "layers.*.attention.wv": "S(0)",
    "layers.*.attention.wo": "S(1)",
    "layers.*.feed_forward.w1": "S(0)",
    "layers.*.feed_forward.w2": "S(1)",
    "layers.*.feed_forward.w3": "S(0)",
    "norm": "R",
    "output": "S(0)",
}
"""Module -> placement of its weight over tp."""


def sharding(tp: int) -> tuple[ModuleSharding, ...]:
    """Megatron's placements of weights; the layouts of activations are left out."""
    if tp == 1:
        return ()
    return tuple(
        ModuleSharding(
            module=module, axis="tp", weight=cut, input=None, input_needed=None, output=None, output_needed=None
        )
        for module, cut in CUT.items()
    )


def memory(stage: int, activations_gib: float = 10.0) -> StageMemory:
    """30 GiB beside the activations."""
    return StageMemory(
        stage=stage,
        parameters_gib=5.0,
        gradients_gib=5.0,
        optimizer_gib=10.0,
        unsharded_gib=8.0,
        activations_gib=activations_gib,
        logits_gib=2.0,
    )


def estimate(model: Any, stages: int = 1, step_time_ms: float | None = 1000.0, **values: Any) -> Estimate:
    """An estimate of 40 GiB a stage and 5000 tokens/s/GPU."""
    given: dict[str, Any] = {
        "num_params": num_params(model),
        "flops_per_token": 5.0e10,
        "flops_per_token_causal": 4.0e10,
        "memory": tuple(memory(stage) for stage in range(stages)),
        "memory_available_gib": 72.0,
        "fits": True,
        "step_time_ms": step_time_ms,
        "tokens_per_second_per_gpu": None if step_time_ms is None else 5.0e6 / step_time_ms,
        "step_time": None,
        "bottleneck": None,
        "tflops_per_gpu": None if step_time_ms is None else 400.0,
        "mfu": None if step_time_ms is None else 0.4,
        "training_days": None,
        "training_gpu_hours": None,
        "training_cost": None,
    }
    return Estimate(**{**given, **values})


def llama(
    flavor: str = "8B",
    grid: Mesh | None = None,
    *,
    checkpoint: str = "none",
    float8: bool = False,
    kv_replicas: int = 1,
    pins: ParallelismSpec | None = None,
    **sections: Any,
) -> Plan:
    """A Llama 3 plan on `grid` (8 ranks of FSDP when None): even stages, one policy for all blocks."""
    model = sections.pop("model", FLAVORS[flavor])
    grid = grid or plans.mesh(dp_shard=8)
    names = top_level_modules(model)
    stages = [min(grid.pp - 1, index * grid.pp // len(names)) for index in range(len(names))]
    plan = plans.tiny_plan(
        grid,
        model=model,
        total=grid.dp,
        batch=Batch(
            seq_len=8192,
            global_batch_size=8 * grid.dp,
            local_batch_size=8,
            microbatch_size=1 if grid.pp > 1 else 8,
            accumulation_steps=1,
        ),
        name=f"llama3_{flavor}",
        cluster=plans.cluster(grid.world_size, device="cuda", nodes=max(1, grid.world_size // 8)),
        pipeline=Pipeline(
            schedule="1F1B" if grid.pp > 1 else None,
            stages=tuple(Stage(index=rank, pp_rank=rank) for rank in range(grid.pp)),
            microbatches=8 if grid.pp > 1 else 1,
            actions=None,
        ),
        tensor_parallel=TensorParallel(
            sequence_parallel=grid.tp > 1, loss_parallel=grid.tp > 1, async_tp=False, kv_replicas=kv_replicas
        ),
        activation_checkpoint=POLICIES,
        layers=tuple(
            Layer(fqn=name, stage=stage, checkpoint=checkpoint if name.startswith("layers.") else "none")
            for name, stage in zip(names, stages, strict=True)
        ),
        sharding=sharding(grid.tp),
        job=plans.job(steps=1000, enable=True),
        estimate=estimate(model, grid.pp),
    )
    if float8:
        last = model.num_layers - 1
        linears = ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
        plan = replace(
            plan,
            float8=Float8(
                recipe="tensorwise",
                converted=tuple(f"layers.0-{last}.{linear}" for linear in linears),
                skipped=(
                    SkippedLinear(module=f"layers.0-{last}.attention.wk", reason="1024 columns are too few to gain"),
                    SkippedLinear(module=f"layers.0-{last}.attention.wv", reason="1024 columns are too few to gain"),
                    SkippedLinear(module="output", reason="the output is sensitive"),
                ),
                enable_fsdp_float8_all_gather=False,
                precompute_float8_dynamic_scale_for_fsdp=False,
                emulate=False,
            ),
        )
    if pins is not None:
        plan = replace(plan, request=replace(plan.request, parallelism=pins))
    return replace(plan, **sections)


def llama_405b() -> Plan:
    """405B on 512 GPUs: pp 8 x dp_shard 8 x tp 8, with a remark on every layer."""
    remarks = tuple(
        Remark(kind="applied", by="filter_float8", address=f"layers.{i}.attention.wq", message="converted")
        for i in range(126)
    )
    return llama("405B", plans.mesh(dp_shard=8, pp=8, tp=8), checkpoint="full", float8=True, remarks=remarks)


def with_checkpoint(plan: Plan, policies: dict[int, str]) -> Plan:
    """`plan` with other policies for some layers, by number."""
    layers = tuple(
        replace(layer, checkpoint=policies.get(int(layer.fqn.partition(".")[2]), layer.checkpoint))
        if layer.fqn.startswith("layers.")
        else layer
        for layer in plan.layers
    )
    return replace(plan, layers=layers)


def set_at(plan: Any, address: str, value: Any) -> Any:
    """`plan` with the value at a dotted address of records replaced."""
    head, _, rest = address.partition(".")
    return replace(plan, **{head: set_at(getattr(plan, head), rest, value) if rest else value})
