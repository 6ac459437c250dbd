"""The features that a plan uses or does not, by name: layer kinds, axes, schedules, checkpointing, recipes, machines.

`capabilities.py` says which of them go together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from titan_planner.ir.actions import parse_actions
from titan_planner.ir.cluster import Cluster
from titan_planner.ir.errors import InvariantError
from titan_planner.ir.model import Gqa, Mlp, Model, Moe
from titan_planner.ir.parallel import SCHEDULES, SPLIT_BACKWARD_SCHEDULES
from titan_planner.ir.plan import Plan
from titan_planner.ir.request import DEGREE_FIELDS, Request, Spec

Group: TypeAlias = Literal[
    "model",
    "attention",
    "parallelism",
    "option",
    "schedule",
    "checkpointing",
    "compile",
    "quantisation",
    "machine",
    "job",
]
AUTO_FILTER = "auto_filter_small_kn"
"""The word in `float8.filter_fqns` that stands for torchao's thresholds."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A spec with what is known of its model and machines; None where they cannot be looked up."""

    spec: Spec
    request: Request
    model: Model | None
    cluster: Cluster | None


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a plan uses or not.

    `at` is the address of a plan that turns it on. `pinned` says of a spec whether every plan it gets has the feature (True),
    none has it (False), or the planner is free (None). What has `runs` false may stand in a plan, but the runtime refuses it.
    `of_model` is given where the model alone decides.
    """

    name: str
    group: Group
    what: str
    at: str
    used: Callable[[Plan], bool]
    pinned: Callable[[Asked], bool | None] = lambda asked: None
    runs: bool = True
    of_model: Callable[[Model], bool] | None = None


# ------------------------------------------------------------------ what a plan or a spec uses


def mixtures(model: Model) -> tuple[Moe, ...]:
    """The mixtures of experts among the kinds of layers of `model`."""
    return tuple(run.block.feed_forward for run in model.blocks if isinstance(run.block.feed_forward, Moe))


def splits_backward(plan: Plan) -> str | None:
    """Name of what makes the pipeline split backwards into gradients of inputs and of weights; None if it does not."""
    pipe = plan.pipeline
    if pipe.actions is None or plan.mesh.pp == 1:
        return pipe.schedule if pipe.schedule in SPLIT_BACKWARD_SCHEDULES else None
    try:
        order = parse_actions(pipe.actions, tuple(stage.pp_rank for stage in pipe.stages), pipe.microbatches)
    except InvariantError:
        return None  # `pp-actions` says what is wrong with it
    return "a table of actions with I and W" if order.splits_backward else None


def modes(plan: Plan) -> frozenset[str]:
    """The checkpointing modes that top-level modules of `plan` use."""
    used = {layer.checkpoint for layer in plan.layers}
    return frozenset(policy.mode for policy in plan.activation_checkpoint.policies if policy.name in used)


def memory_budgets(plan: Plan) -> frozenset[float]:
    """The different activation budgets that layers of `plan` ask for."""
    used = {layer.checkpoint for layer in plan.layers}
    return frozenset(
        p.memory_budget for p in plan.activation_checkpoint.policies if p.name in used and p.memory_budget is not None
    )


def _keeps_a_block(plan: Plan) -> bool:
    """Whether a block (blocks are what is compiled) keeps all its activations."""
    keep = {policy.name for policy in plan.activation_checkpoint.policies if policy.mode == "none"}
    return any(layer.checkpoint in keep for layer in plan.layers if layer.fqn.startswith("layers."))


def _compiled(plan: Plan, component: str) -> bool:
    return plan.compile.enable and component in plan.compile.components


def _asked_compiled(asked: Asked, component: str) -> bool | None:
    given = asked.request.compile
    if given.enable is False or component not in given.components:
        return False
    # A memory budget is the compiler's to keep, so who asks for one asks for it.
    return True if given.enable is True or asked.request.activation_checkpoint.mode == "memory_budget" else None


def _partly_resharded(plan: Plan) -> bool:
    # `true == 1` in Python, so the type is asked first.
    return any(
        not isinstance(unit.reshard_after_forward, bool) and unit.reshard_after_forward != plan.mesh.fsdp
        for unit in plan.fsdp.units
    )


def _asked_resharded(asked: Asked) -> bool | None:
    pin = asked.request.parallelism.fsdp_reshard_after_forward
    if asked.request.parallelism.data_parallel_strategy == "ddp":
        return False
    return None if pin in ("auto", "default") else pin != "never"


def _in_node(cluster: Cluster, tp: int) -> bool:
    return cluster.nodes == 1 or cluster.gpus_per_node % tp == 0


def degree_pin(asked: Asked, axis: str) -> int | None:
    """The degree of a mesh axis that a spec pins; None where it leaves it open."""
    names = {**DEGREE_FIELDS, "ep": "expert_parallel_degree", "etp": "expert_tensor_parallel_degree"}
    value = getattr(asked.request.parallelism, names[axis])
    return value if isinstance(value, int) and value > 0 else None


def _above_one(asked: Asked, axis: str) -> bool | None:
    degree = degree_pin(asked, axis)
    return None if degree is None else degree > 1


def _both(*parts: bool | None) -> bool | None:
    """Three-valued `and`."""
    return False if False in parts else None if None in parts else True


def _sequence_pin(asked: Asked, on: bool) -> bool | None:
    pin = asked.request.parallelism.enable_sequence_parallel
    return _both(_above_one(asked, "tp"), None if pin == "auto" else pin is on)


def _schedule_pin(asked: Asked, name: str) -> bool | None:
    pins = asked.request.parallelism
    if pins.pipeline_parallel_schedule_actions is not None:
        return False
    pinned = None if pins.pipeline_parallel_schedule == "auto" else pins.pipeline_parallel_schedule == name
    return _both(_above_one(asked, "pp"), pinned)


def _split_actions_pin(asked: Asked) -> bool | None:
    rows = asked.request.parallelism.pipeline_parallel_schedule_actions
    return _both(_above_one(asked, "pp"), rows is not None and any(re.search(r"\d[IW]\d", row) for row in rows))


def _mode_pin(asked: Asked, mode: str) -> bool | None:
    given = asked.request.activation_checkpoint
    if given.mode == "auto":
        return None
    # Every n-th layer in full is written as a selective option, as in TorchTitan.
    actual = "full" if given.mode == "selective" and given.selective_ac_option != "op" else given.mode
    return actual == mode


def _recipe_pin(asked: Asked, recipe: str) -> bool | None:
    given = asked.request.float8.recipe
    return None if given == "auto" else given == recipe


def _float8_pin(asked: Asked, option: object) -> bool | None:
    """Whether an option of Float8 is on, given as true, false, or auto; without a recipe none is."""
    return _both(asked.request.float8.recipe != "none", None if option == "auto" else bool(option))


# ------------------------------------------------------------------ features


def _of_model(name: str, what: str, holds: Callable[[Model], bool], group: Group = "model") -> Feature:
    return Feature(
        name,
        group,
        what,
        "model",
        lambda plan: holds(plan.model),
        lambda asked: None if asked.model is None else holds(asked.model),
        of_model=holds,
    )


def _of_cluster(name: str, what: str, holds: Callable[[Cluster], bool]) -> Feature:
    return Feature(
        name,
        "machine",
        what,
        "cluster.gpu",
        lambda plan: holds(plan.cluster),
        lambda asked: None if asked.cluster is None else holds(asked.cluster),
    )


def _axis(name: str, what: str) -> Feature:
    return Feature(
        name,
        "parallelism",
        what,
        f"mesh.{name}",
        lambda plan: plan.mesh.degree(name) > 1,
        lambda asked: _above_one(asked, name),
    )


def _method(name: Literal["allgather", "ring", "alltoall"], what: str) -> Feature:
    def pinned(asked: Asked) -> bool | None:
        pin = asked.request.parallelism.context_parallel_method
        return _both(_above_one(asked, "cp"), None if pin == "auto" else pin == name)

    return Feature(
        f"cp_{name}",
        "option",
        what,
        "context_parallel.method",
        lambda plan: plan.mesh.cp > 1 and plan.context_parallel.method == name,
        pinned,
    )


def _backend(name: Literal["deepep", "hybridep"], what: str) -> Feature:
    return Feature(
        name,
        "option",
        what,
        "expert_parallel.comm_backend",
        lambda plan: plan.expert_parallel.comm_backend == name,
        lambda asked: asked.request.parallelism.expert_parallel_comm_backend == name,
        runs=False,
    )


def _schedule(name: str, what: str) -> Feature:
    return Feature(
        name,
        "schedule",
        what,
        "pipeline.schedule",
        lambda plan: plan.mesh.pp > 1 and plan.pipeline.actions is None and plan.pipeline.schedule == name,
        lambda asked: _schedule_pin(asked, name),
    )


def _mode(name: Literal["none", "full", "selective", "memory_budget"], what: str) -> Feature:
    return Feature(
        "keep_all" if name == "none" else name,
        "checkpointing",
        what,
        "activation_checkpoint.policies",
        (lambda plan: _keeps_a_block(plan)) if name == "none" else (lambda plan: name in modes(plan)),
        lambda asked: _mode_pin(asked, name),
    )


def _component(name: Literal["model", "loss"], what: str) -> Feature:
    return Feature(
        f"compiled_{name}",
        "compile",
        what,
        "compile.components",
        lambda plan: _compiled(plan, name),
        lambda asked: _asked_compiled(asked, name),
    )


def _recipe(name: str, what: str) -> Feature:
    return Feature(
        name,
        "quantisation",
        what,
        "float8.recipe",
        lambda plan: plan.float8.recipe == name,
        lambda asked: _recipe_pin(asked, name),
    )


_ALL: tuple[Feature, ...] = (
    _of_model("swiglu", "dense model, gated layers", lambda m: not mixtures(m) and not _has_mlp(m)),
    _of_model("mlp", "dense model, layers without a gate", lambda m: not mixtures(m) and _has_mlp(m)),
    _of_model("moe", "mixture of experts", lambda m: bool(mixtures(m))),
    _of_model("tied", "output shares the embedding's weight", lambda m: m.tied),
    _of_model(
        "gqa",
        "grouped-query (or multi-head) causal attention",
        lambda m: any(isinstance(run.block.attention, Gqa) for run in m.blocks),
        "attention",
    ),
    _axis("pp", "pipeline parallel"),
    _axis("dp_replicate", "replicas of the sharded model (HSDP)"),
    _axis("dp_shard", "sharded data parallel (FSDP)"),
    Feature(
        "ddp",
        "parallelism",
        "replicated data parallel (DDP)",
        "fsdp.strategy",
        lambda plan: plan.fsdp.strategy == "ddp",
        lambda asked: asked.request.parallelism.data_parallel_strategy == "ddp",
    ),
    _axis("cp", "context parallel"),
    _axis("tp", "tensor parallel"),
    _axis("ep", "expert parallel"),
    _axis("etp", "tensor parallel inside experts"),
    *(_schedule(name, facts.what) for name, facts in SCHEDULES.items()),
    Feature(
        "split_actions",
        "schedule",
        "a table of actions that splits backward (I and W)",
        "pipeline.actions",
        lambda plan: plan.mesh.pp > 1 and plan.pipeline.actions is not None and splits_backward(plan) is not None,
        _split_actions_pin,
    ),
    _mode("none", "blocks keep all activations"),
    _mode("full", "blocks recomputed whole, all or every n-th"),
    _mode("selective", "blocks recomputed by op"),
    _mode("memory_budget", "the compiler keeps a share of the activations"),
    _component("model", "blocks compiled (of experts what is around the routing)"),
    _component("loss", "loss compiled"),
    _recipe("tensorwise", "Float8, one scale a tensor"),
    _recipe("rowwise", "Float8, one scale a row"),
    _recipe("rowwise_with_gw_hp", "Float8, one scale a row, gradients of weights in bfloat16"),
    _recipe("mxfp8", "MXFP8, one scale for 32 elements"),
    Feature(
        "float8_all_gather",
        "quantisation",
        "FSDP gathers weights in Float8",
        "float8.enable_fsdp_float8_all_gather",
        lambda plan: plan.float8.enable_fsdp_float8_all_gather,
        lambda asked: _float8_pin(asked, asked.request.float8.enable_fsdp_float8_all_gather),
    ),
    Feature(
        "float8_scales",
        "quantisation",
        "scales of all weights computed in one step",
        "float8.precompute_float8_dynamic_scale_for_fsdp",
        lambda plan: plan.float8.precompute_float8_dynamic_scale_for_fsdp,
        lambda asked: _float8_pin(asked, asked.request.float8.precompute_float8_dynamic_scale_for_fsdp),
    ),
    Feature(
        "float8_experts",
        "quantisation",
        "experts' grouped products in 8 bits",
        "float8.experts",
        lambda plan: bool(plan.float8.experts),
        lambda asked: _float8_pin(asked, bool(asked.request.float8.grouped_mm_fqns)),
    ),
    Feature(
        "emulate",
        "quantisation",
        "8-bit numerics emulated in high precision",
        "float8.emulate",
        lambda plan: plan.float8.emulate,
        lambda asked: asked.request.float8.emulate,
    ),
    Feature(
        "auto_filter",
        "quantisation",
        "linears filtered by torchao's thresholds",
        "request.float8.filter_fqns",
        lambda plan: AUTO_FILTER in plan.request.float8.filter_fqns,
        lambda asked: _float8_pin(asked, AUTO_FILTER in asked.request.float8.filter_fqns),
    ),
    Feature(
        "sequence_parallel",
        "option",
        "norms and residual stream sharded on the sequence",
        "tensor_parallel.sequence_parallel",
        lambda plan: plan.tensor_parallel.sequence_parallel,
        lambda asked: _sequence_pin(asked, True),
    ),
    Feature(
        "whole_stream",
        "option",
        "tensor parallel without sequence parallel",
        "tensor_parallel.sequence_parallel",
        lambda plan: plan.mesh.tp > 1 and not plan.tensor_parallel.sequence_parallel,
        lambda asked: _sequence_pin(asked, False),
    ),
    Feature(
        "loss_parallel",
        "option",
        "cross-entropy on logits sharded over the vocabulary",
        "tensor_parallel.loss_parallel",
        lambda plan: plan.tensor_parallel.loss_parallel,
        lambda asked: _both(_above_one(asked, "tp"), not asked.request.parallelism.disable_loss_parallel),
    ),
    Feature(
        "async_tp",
        "option",
        "matmuls overlap with tensor-parallel collectives",
        "tensor_parallel.async_tp",
        lambda plan: plan.tensor_parallel.async_tp,
        lambda asked: (
            None
            if asked.request.parallelism.enable_async_tensor_parallel == "auto"
            else asked.request.parallelism.enable_async_tensor_parallel
        ),
    ),
    _method("allgather", "keys and values gathered"),
    _method("ring", "keys and values passed around"),
    _method("alltoall", "heads exchanged for tokens (Ulysses)"),
    Feature(
        "ptrr",
        "option",
        "sequence balanced by FlexAttention's block masks",
        "context_parallel.load_balance",
        lambda plan: plan.mesh.cp > 1 and plan.context_parallel.load_balance == "ptrr",
        lambda asked: _both(
            _above_one(asked, "cp"), asked.request.parallelism.context_parallel_load_balancer == "ptrr"
        ),
    ),
    Feature(
        "reshard",
        "option",
        "FSDP units freed after forward, wholly or in part",
        "fsdp.units",
        lambda plan: any(unit.reshard_after_forward is not False for unit in plan.fsdp.units),
        _asked_resharded,
    ),
    Feature(
        "partial_reshard",
        "option",
        "FSDP units resharded to some of their ranks after forward",
        "fsdp.units",
        _partly_resharded,
        lambda asked: None if isinstance(asked.request.parallelism.fsdp_reshard_after_forward, int) else False,
    ),
    Feature(
        "cpu_offload",
        "option",
        "parameters, gradients and optimizer states in host memory",
        "fsdp.cpu_offload",
        lambda plan: plan.fsdp.cpu_offload,
        lambda asked: asked.spec.training.enable_cpu_offload,
    ),
    _backend("deepep", "token dispatch by DeepEP"),
    _backend("hybridep", "token dispatch by HybridEP"),
    Feature(
        "capacity_factor",
        "option",
        "experts drop tokens beyond a capacity",
        "expert_parallel.capacity_factor",
        lambda plan: plan.expert_parallel.capacity_factor is not None,
        lambda asked: asked.request.parallelism.expert_capacity_factor is not None,
    ),
    Feature(
        "force_load_balance",
        "option",
        "round-robin routing",
        "expert_parallel.force_load_balance",
        lambda plan: plan.expert_parallel.force_load_balance,
        lambda asked: asked.request.parallelism.moe_force_load_balance,
    ),
    _of_cluster("cuda", "CUDA (or ROCm) devices", lambda c: c.gpu.device == "cuda"),
    _of_cluster("nvidia", "NVIDIA GPUs", lambda c: c.gpu.vendor == "nvidia"),
    _of_cluster("gpu_float8", "GPUs with Float8", lambda c: c.gpu.float8),
    _of_cluster("gpu_mxfp8", "GPUs with MXFP8", lambda c: c.gpu.mxfp8),
    Feature(
        "tp_in_node",
        "machine",
        "tensor ranks inside one node",
        "mesh.tp",
        lambda plan: _in_node(plan.cluster, plan.mesh.tp),
        lambda asked: (
            None
            if asked.cluster is None or degree_pin(asked, "tp") is None
            else _in_node(asked.cluster, degree_pin(asked, "tp") or 1)
        ),
    ),
    Feature(
        "several_budgets",
        "checkpointing",
        "different memory budgets in one plan",
        "activation_checkpoint.policies",
        lambda plan: len(memory_budgets(plan)) > 1,
        runs=False,
    ),
    Feature(
        "budget_beside_keep_all",
        "checkpointing",
        "compiled blocks with a memory budget beside blocks that keep everything",
        "layers.checkpoint",
        lambda plan: _compiled(plan, "model") and bool(memory_budgets(plan)) and _keeps_a_block(plan),
        runs=False,
    ),
    Feature(
        "streamed_data",
        "job",
        "text streamed from Hugging Face",
        "data.source",
        lambda plan: plan.data.source == "huggingface",
        lambda asked: asked.spec.data.source == "huggingface",
        runs=False,
    ),
    Feature(
        "async_checkpoint",
        "job",
        "checkpoints written beside training",
        "job.checkpoint.async_mode",
        lambda plan: plan.job.checkpoint.enable and plan.job.checkpoint.async_mode != "disabled",
        lambda asked: asked.spec.checkpoint.enable and asked.spec.checkpoint.async_mode != "disabled",
        runs=False,
    ),
    Feature(
        "hf_export",
        "job",
        "final weights in Hugging Face's format",
        "job.checkpoint.last_save_in_hf",
        lambda plan: plan.job.checkpoint.enable and plan.job.checkpoint.last_save_in_hf,
        lambda asked: asked.spec.checkpoint.enable and asked.spec.checkpoint.last_save_in_hf,
        runs=False,
    ),
)


def _has_mlp(model: Model) -> bool:
    return any(isinstance(run.block.feed_forward, Mlp) for run in model.blocks)


FEATURES: Mapping[str, Feature] = {feature.name: feature for feature in _ALL}
"""All features by name, in the order in which they are shown."""

EXCLUSIVE: tuple[frozenset[str], ...] = (
    frozenset({"swiglu", "mlp", "moe"}),
    frozenset({*SCHEDULES, "split_actions"}),
    frozenset({"tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"}),
    frozenset({"cp_allgather", "cp_ring", "cp_alltoall"}),
    frozenset({"deepep", "hybridep"}),
    frozenset({"sequence_parallel", "whole_stream"}),
)
"""Features of which a plan has one at most."""
