"""Run a row of the parity suite on its ranks, and the same training in one plain process."""

from __future__ import annotations

import json
import math
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from tests.harness import Rank
from tests.parity.rows import Row
from titan_planner.compiler import compile_spec
from titan_planner.ir.inventory import parameters
from titan_planner.ir.plan import Plan
from titan_planner.spec import load_spec
from titan_runtime import distributed
from titan_runtime.apply import build_model
from titan_runtime.apply.compile import compiled_loss
from titan_runtime.apply.context import shard_sequences
from titan_runtime.apply.float8 import float8_problems
from titan_runtime.data import DataLoader, open_stream
from titan_runtime.distributed import rank_device
from titan_runtime.init import initialise
from titan_runtime.loss import loss_function
from titan_runtime.lr_schedule import lr_factor
from titan_runtime.mesh import build_mesh, data_group, data_rank
from titan_runtime.modules import build
from titan_runtime.modules.moe import MixtureOfExperts
from titan_runtime.optimizer import build_optimizer
from titan_runtime.step import train_step
from titan_runtime.train import _seed as seed_everything

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10


@dataclass
class Curve:
    """Losses and gradient norms of every step, and the final weights (whole, by FQN) that this rank knows.

    `biases` are the experts', which no optimizer moves.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]


@dataclass
class Lacking:
    """Why this device cannot run a plan at all: it has no Float8, say."""

    reason: str


def compile_row(row: Row, gpu: str = "cpu") -> Plan:
    """The row's plan, as `titan-plan compile` makes it, with data paths that work from any folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(yaml.safe_dump(row.spec(gpu)))
        plan = compile_spec(load_spec(path))
    data = replace(plan.data, path=str(ROOT / "data/sample"), tokenizer=str(ROOT / "data/tokenizer.json"))
    return replace(plan, data=data)


def _loader(plan: Plan, dp_rank: int, dp_degree: int, local: int) -> DataLoader:
    assert plan.data.path is not None
    assert plan.data.tokenizer is not None
    stream = open_stream("text", plan.data.path, plan.data.tokenizer, plan.batch.seq_len)
    return DataLoader(
        stream,
        global_batch_size=plan.batch.global_batch_size,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
        local_batch_size=local,
        prefetch=0,
    )


def _masked(labels: Tensor, first_sample: int) -> Tensor:
    """Sample number n of the global batch keeps its first 4 n + 1 labels."""
    labels = labels.clone()
    for row in range(len(labels)):
        labels[row, 4 * (first_sample + row) + 1 :] = -100
    return labels


def references(rank: Rank, wanted: list[tuple[Plan, bool]]) -> list[Curve]:
    """The curves of `reference` for several plans, on this one rank's device."""
    return [reference(plan, masked, rank_device(plan.cluster.gpu)) for plan, masked in wanted]


def reference(plan: Plan, masked: bool, device: torch.device) -> Curve:
    """One process, one forward a step, no FSDP, torch's own AdamW, clipping by hand."""
    module = build(plan.model, seq_len=plan.batch.seq_len).to_empty(device=device)
    initialise(module, plan.model, plan.seeds.seed)
    values = plan.optimizer
    undecayed = [p for fqn, p in module.named_parameters() if _no_decay(plan, fqn)]
    decayed = [p for fqn, p in module.named_parameters() if not _no_decay(plan, fqn)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}],
        lr=values.lr,
        betas=(values.beta1, values.beta2),
        eps=values.eps,
        weight_decay=values.weight_decay,
    )
    curve = Curve([], [], {}, {})
    whole = plan.batch.global_batch_size
    for step, [(tokens, labels)] in zip(range(STEPS), _loader(plan, 0, 1, whole), strict=False):
        labels = _masked(labels, 0) if masked else labels
        tokens, labels = tokens.to(device), labels.to(device)
        loss = cross_entropy(module(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in module.parameters() if p.grad is not None))
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, values.max_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = values.lr * lr_factor(plan.lr_schedule, step)
        optimizer.step()
        optimizer.zero_grad()
        _balance_experts(module)
        curve.losses.append(loss.item())
        curve.norms.append(norm)
    curve.weights = {fqn: parameter.detach().cpu() for fqn, parameter in module.named_parameters()}
    curve.biases = _biases(module)
    return curve


def _biases(module: nn.Module) -> dict[str, Tensor]:
    return {fqn: buffer.cpu() for fqn, buffer in module.named_buffers() if fqn.endswith("expert_bias")}


def _no_decay(plan: Plan, fqn: str) -> bool:
    return any(group.weight_decay == 0 and re.search(group.pattern, fqn) for group in plan.optimizer.param_groups)


@torch.no_grad()
def _balance_experts(module: nn.Module) -> None:
    """The bias of every mixture one step towards even loads, by hand."""
    for part in module.modules():
        if isinstance(part, MixtureOfExperts) and part.moe.load_balance_coeff is not None:
            assert part.expert_bias is not None
            load = part.tokens_per_expert.double()
            step = part.moe.load_balance_coeff * torch.sign(load.mean() - load)
            part.expert_bias += (step - step.mean()).float()
            part.tokens_per_expert.zero_()


def run_rows(rank: Rank, plans: list[tuple[Plan, bool]]) -> list[Curve | Lacking]:
    """Several plans of one world size one after the other, on this rank, which has no process group yet."""
    gpu, comm = plans[0][0].cluster.gpu, plans[0][0].job.comm
    distributed.start(rank.store, rank.index, rank.world_size, gpu, rank_device(gpu), comm)
    return [run_row(rank, plan, masked) for plan, masked in plans]


def run_row(rank: Rank, plan: Plan, masked: bool) -> Curve | Lacking:
    """The runtime's own parts on one of several ranks."""
    device = rank_device(plan.cluster.gpu)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    lacking = float8_problems(plan, True, capability)
    if lacking:
        return Lacking(lacking[0])
    seed_everything(plan, rank.index)
    world = build_mesh(plan.mesh, device.type)
    torch.compiler.reset()  # code compiled for a former plan's budget would fit this one's modules
    group = data_group(world)
    module: nn.Module = build_model(plan, world, device)
    names = [parameter.fqn for parameter in parameters(plan.model)]
    optimizer = build_optimizer(module, plan.optimizer, whole=names)
    loss = compiled_loss(loss_function(plan, world), plan)
    share = data_rank(plan.mesh, rank.index)
    local, accumulation = plan.batch.local_batch_size, plan.batch.accumulation_steps
    curve = Curve([], [], {}, {})
    for step, batch in zip(range(STEPS), _loader(plan, share, plan.mesh.dp, local), strict=False):
        if masked:
            batch = [
                (tokens, _masked(labels, (share * accumulation + number) * local))
                for number, (tokens, labels) in enumerate(batch)
            ]
        batch = shard_sequences(batch, plan, rank.index)
        result = train_step(
            plan, module, optimizer, loss, batch, step=step + 1, schedule_step=step, device=device, group=group
        )
        curve.losses.append(result.loss)
        curve.norms.append(result.grad_norm)
    for fqn, parameter in module.named_parameters():
        tensor = parameter.detach()
        curve.weights[fqn] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
    curve.biases = _biases(module)
    return curve


def worst(found: list[float], wanted: list[float]) -> float:
    """Largest relative difference."""
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, wanted, strict=True))


def key_of_reference(row: Row) -> str:
    """Rows with equal keys have the same reference: only model, optimizer and mask matter to one process."""
    spec = row.spec()
    return json.dumps([spec["model"], spec["optimizer"], row.masked], sort_keys=True)
