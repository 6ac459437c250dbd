"""Memory of the fullest rank of every stage: parameters, gradients and optimizer counted; activations by a coarse closed form.

What is counted is exact for this runtime. Activations use the closed form for a Llama block with flash attention (bf16,
bytes per layer, T local tokens): 8 T h + 4 T a d + 4 T k d + 4 T a + 8 T f, all over tp with sequence parallel; real eager
modules keep up to 37 % more (fp32 norms, rotary copies). The allocator's reserve is the spec's `memory_headroom`.
"""

from __future__ import annotations

import math
from typing import assert_never

from titan_planner.ir.execution import KEEP_ALL, CheckpointPolicy
from titan_planner.ir.fqn import matches
from titan_planner.ir.inventory import Parameter, muon_parameters, parameters
from titan_planner.ir.model import Block, Gqa, Mlp, Moe, SwiGlu
from titan_planner.ir.plan import Plan, StageMemory
from titan_planner.schedules import microbatches_in_flight
from titan_planner.sharding import local_shape

GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Eager fp32 cross-entropy at the loss, measured bytes per local logit; fused or compiled about half of it.
_LOGIT_BYTES_EAGER, _LOGIT_BYTES_COMPILED = 12.3, 6.0


def module_numel(plan: Plan) -> dict[str, int]:
    """Elements that one tensor rank holds of every top-level module, before FSDP shards them."""
    found = {layer.fqn: 0 for layer in plan.layers}
    for parameter in parameters(plan.model):
        found[top_level(parameter)] += _local_numel(plan, parameter)
    if plan.model.tied and plan.layers[0].stage != plan.layers[-1].stage:
        # The last stage needs its own copy of the tied weight.
        found["output"] = found["tok_embeddings"]
    return found


def _sharded_numel_with_one_moment(plan: Plan) -> dict[str, float]:
    """Elements of every top-level module on a rank for which the optimizer keeps one moment and not two."""
    found = {layer.fqn: 0.0 for layer in plan.layers}
    if plan.optimizer.name == "Muon":
        matrices = muon_parameters(plan.model)
        for parameter in parameters(plan.model):
            if parameter.fqn in matrices:
                shards = plan.mesh.efsdp if parameter.is_expert else plan.mesh.fsdp
                local = _local_numel(plan, parameter)
                found[top_level(parameter)] += local / shards if plan.fsdp.strategy == "fsdp" else local
    return found


def _local_numel(plan: Plan, parameter: Parameter) -> int:
    return math.prod(local_shape(parameter, plan.mesh, plan.tensor_parallel.kv_replicas))


def sharded_numel(plan: Plan) -> dict[str, float]:
    """Elements of every top-level module that a rank holds between steps; experts are sharded over ranks of their own."""
    found: dict[str, float] = {fqn: float(count) for fqn, count in module_numel(plan).items()}
    if plan.fsdp.strategy != "fsdp":
        return found
    found = {fqn: count / plan.mesh.fsdp for fqn, count in found.items()}
    if plan.mesh.efsdp != plan.mesh.fsdp:
        for parameter in parameters(plan.model):
            if parameter.is_expert:
                local = _local_numel(plan, parameter)
                found[top_level(parameter)] += local / plan.mesh.efsdp - local / plan.mesh.fsdp
    return found


def top_level(parameter: Parameter) -> str:
    """The stage-able module that owns `parameter`: `layers.3.attention.wq.weight` -> `layers.3`."""
    parts = parameter.fqn.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def stage_memory(plan: Plan) -> tuple[StageMemory, ...]:
    """Memory of the fullest rank of each pipeline *rank*, reported at its first stage; GiB."""
    numel, sharded = module_numel(plan), sharded_numel(plan)
    once = _sharded_numel_with_one_moment(plan)
    # Equal layers cost the same, so activations are computed once per (kind of block, policy).
    cached: dict[tuple[int, str], float] = {}
    blocks = list(plan.model.layers())
    found = []
    for rank in range(plan.mesh.pp):
        stages = [stage.index for stage in plan.pipeline.stages if stage.pp_rank == rank]
        layers = [layer for layer in plan.layers if layer.stage in stages]
        held = microbatches_in_flight(
            plan.pipeline.schedule, plan.mesh.pp, rank, plan.pipeline.microbatches, len(stages)
        )
        activations = 0.0
        for layer in layers:
            if layer.fqn.startswith("layers."):
                block = blocks[int(layer.fqn.split(".")[1])]
                key = (id(block), layer.checkpoint)
                if key not in cached:
                    policy = plan.activation_checkpoint.policy(layer.checkpoint)
                    assert policy is not None
                    cached[key] = block_activation_bytes(plan, block, policy)
                activations += cached[key]
        local = sum(sharded[layer.fqn] for layer in layers)
        # Where one rank holds a tied weight twice, only the first stage's is trained.
        twice = plan.model.tied and stages[0] == 0 and len(stages) > 1 and layers[-1].fqn == "output"
        trained = local - (sharded["output"] if twice else 0.0)
        found.append(
            StageMemory(
                stage=stages[0],
                parameters_gib=_gib(local * _BYTES[plan.dtype]),
                gradients_gib=_gib(local * _BYTES[plan.dtype]),
                optimizer_gib=_gib(
                    (2 * trained - sum(once[layer.fqn] for layer in layers)) * _BYTES[plan.optimizer.state_dtype]
                ),
                unsharded_gib=_gib(_unsharded_bytes(plan, [layer.fqn for layer in layers], numel)),
                activations_gib=_gib(activations * held + _working_bytes(plan, blocks)),
                logits_gib=_gib(_logit_bytes(plan) if any(layer.fqn == "output" for layer in layers) else 0.0),
            )
        )
    return tuple(found)


def _gib(count: float) -> float:
    # Rounded to what is believed, so that bytes of a plan are the same on every machine.
    return round(count / GIB, 3)


def local_tokens(plan: Plan) -> int:
    """Tokens of one microbatch on one context rank."""
    return plan.batch.microbatch_size * plan.batch.seq_len // plan.mesh.cp


def block_activation_bytes(plan: Plan, block: Block, policy: CheckpointPolicy) -> float:
    """Bytes that one block keeps for backward of one microbatch on one rank."""
    tokens = local_tokens(plan)
    stream = tokens * plan.model.dim / (plan.mesh.tp if plan.tensor_parallel.sequence_parallel else 1)
    match block.attention:
        case Gqa() as gqa:
            q = tokens * gqa.num_heads * gqa.head_dim / plan.mesh.tp
            kv = tokens * gqa.num_kv_heads * gqa.head_dim * plan.tensor_parallel.kv_replicas / plan.mesh.tp
            lse = tokens * gqa.num_heads / plan.mesh.tp
        case _:
            assert_never(block.attention)
    routed = experts = 0.0
    match block.feed_forward:
        case SwiGlu(hidden_dim=hidden):
            mlp = tokens * hidden / plan.mesh.tp
        case Mlp(hidden_dim=hidden):
            # Two tensors of the hidden width (what the activation and w2 read) where a gated layer keeps four.
            mlp = tokens * hidden / plan.mesh.tp / 2
        case Moe() as moe:
            # With the experts' loads balanced. Each token is copied for every expert that it goes to, there and back.
            sent = tokens * moe.top_k
            mlp = tokens * moe.shared_dim / plan.mesh.tp
            experts = sent * moe.hidden_dim / plan.mesh.etp
            routed = sent * plan.model.dim
        case _:
            assert_never(block.feed_forward)
    if policy.mode == "full":
        return 2 * stream
    everything = 8 * stream + 4 * q + 4 * kv + 4 * lse + 8 * (mlp + experts) + 4 * routed
    if policy.mode == "none":
        return everything
    if policy.mode == "selective":
        # The block's input, attention's output with its statistics, and every second of the seven matmuls' outputs.
        # Experts' three grouped products are not counted among those: all of them are kept.
        matmuls = 2 * q + 4 * kv + 4 * stream + 4 * mlp
        grouped = 4 * experts + 2 * routed if "aten._grouped_mm.default" in policy.save_ops else 0.0
        kept = matmuls / 2 if policy.recompute_every_second_matmul else matmuls
        return 2 * stream + 2 * q + 4 * lse + kept + grouped
    assert policy.memory_budget is not None
    return 2 * stream + policy.memory_budget * (everything - 2 * stream)


def _working_bytes(plan: Plan, blocks: list[Block]) -> float:
    """One block's activations are whole while it runs backward, whatever the policy keeps before."""
    return max(block_activation_bytes(plan, block, KEEP_ALL) for block in {id(b): b for b in blocks}.values())


def _unsharded_bytes(plan: Plan, fqns: list[str], numel: dict[str, int]) -> float:
    """Gathered parameters and unreduced gradients: two units in flight, or all that are not resharded."""
    if plan.fsdp.strategy == "ddp" or (plan.mesh.fsdp == 1 and plan.fsdp.param_dtype == plan.dtype):
        return 0.0
    units: list[tuple[int, bool]] = []
    for fqn in fqns:
        unit = next((u for u in plan.fsdp.units if any(matches(s, fqn) for s in u.modules)), None)
        units.append((numel[fqn], unit is not None and unit.reshard_after_forward is not False))
    size = _BYTES[plan.fsdp.param_dtype]
    largest = max((count for count, _ in units), default=0)
    kept = sum(count for count, resharded in units if not resharded)
    freed = sorted((count for count, resharded in units if resharded), reverse=True)[:2]
    return kept * size + sum(freed) * size + largest * _BYTES[plan.fsdp.reduce_dtype]


def _logit_bytes(plan: Plan) -> float:
    compiled = plan.compile.enable and "loss" in plan.compile.components
    each = _LOGIT_BYTES_COMPILED if compiled else _LOGIT_BYTES_EAGER
    vocab = plan.model.vocab_size / (plan.mesh.tp if plan.tensor_parallel.loss_parallel else 1)
    return local_tokens(plan) * vocab * each / plan.loss.chunks
