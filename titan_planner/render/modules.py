"""What a plan decides about each module: shape on a rank, placements, FSDP unit, checkpointing and Float8."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from titan_planner.ir.diff import expand
from titan_planner.ir.execution import CheckpointPolicy
from titan_planner.ir.inventory import Parameter, fsdp_dim, parameters, sharding_targets
from titan_planner.ir.parallel import FsdpUnit, ModuleSharding
from titan_planner.ir.plan import Layer, Plan


@dataclass(frozen=True, slots=True)
class Float8Status:
    """Whether a linear runs in Float8. `reason` says why not, where the plan says it."""

    converted: bool
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter and the largest piece of it that one rank holds between steps."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placements: tuple[tuple[str, str], ...]
    float8: Float8Status | None

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Group:
    """Top-level modules that are decided alike: a run of layers, or one other module."""

    layers: tuple[int, ...]
    fqn: str
    stages: tuple[int, ...]
    checkpoint: str
    weights: tuple[Weight, ...]


class Modules:
    """Look-ups from module names to the decisions that concern them, made once for a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.parameters = parameters(plan.model)
        self.by_module: dict[str, list[Parameter]] = {}
        self.names: dict[str, None] = {}
        for parameter in self.parameters:
            module = parameter.module
            self.by_module.setdefault(module, []).append(parameter)
            head, *rest = module.split(".")
            self.names[head] = None
            for part in rest:
                head = f"{head}.{part}"
                self.names[head] = None
        self.names["output"] = None
        self.targets = sharding_targets(plan.model)
        self.layers: Mapping[str, Layer] = {layer.fqn: layer for layer in plan.layers}
        self.linears = {
            p.module: p.shape for p in self.parameters if len(p.shape) == 2 and p.module != "tok_embeddings"
        }
        if plan.model.tied:
            self.linears["output"] = (plan.model.vocab_size, plan.model.dim)
        self.sharding: dict[str, list[ModuleSharding]] = {}
        for entry in plan.sharding:
            for name in expand(entry.module, self.targets):
                self.sharding.setdefault(name, []).append(entry)
        self._float8: dict[str, Float8Status] = {}
        for skipped in plan.float8.skipped:
            for name in expand(skipped.module, self.linears):
                self._float8.setdefault(name, Float8Status(False, skipped.reason))
        for selector in plan.float8.converted:
            for name in expand(selector, self.linears):
                self._float8[name] = Float8Status(True)
        self._units = {name: unit for unit in plan.fsdp.units for s in unit.modules for name in expand(s, self.names)}

    def float8(self, fqn: str) -> Float8Status | None:
        """The Float8 status of a linear; None for other modules."""
        return self._float8.get(fqn, Float8Status(False)) if fqn in self.linears else None

    def unit(self, fqn: str) -> FsdpUnit | None:
        """The innermost FSDP unit that holds `fqn`; None when the root unit does."""
        while fqn:
            if fqn in self._units:
                return self._units[fqn]
            fqn = fqn.rpartition(".")[0]
        return None

    def layer(self, fqn: str) -> Layer | None:
        """The `layers` entry of the top-level module that holds `fqn`."""
        parts = fqn.split(".")
        return self.layers.get(".".join(parts[: 2 if parts[0] == "layers" else 1]))

    def policy(self, fqn: str) -> CheckpointPolicy | None:
        """The checkpointing policy of the top-level module that holds `fqn`."""
        layer = self.layer(fqn)
        return self.plan.activation_checkpoint.policy(layer.checkpoint) if layer else None

    def weight(self, parameter: Parameter, name: str | None = None) -> Weight:
        """The facts about one parameter, called `name`."""
        local = list(parameter.shape)
        placements: list[tuple[str, str]] = []
        mesh = self.plan.mesh
        for entry in self.sharding.get(parameter.target, ()):
            if entry.weight is None:
                continue
            placements.append((entry.axis, entry.weight))
            if entry.weight.startswith("S("):
                dim = int(entry.weight[2:-1])
                ranks = mesh.degree(entry.axis)
                if dim < len(local):
                    if entry.axis == "tp" and parameter.axes[dim] == "kv_heads":
                        ranks //= self.plan.tensor_parallel.kv_replicas
                    local[dim] = math.ceil(local[dim] / ranks)
        shards = mesh.efsdp if parameter.is_expert else mesh.fsdp
        if self.plan.fsdp.strategy == "fsdp" and shards > 1:
            dim = fsdp_dim(parameter, mesh)
            placements.append(("fsdp" if shards == mesh.fsdp and mesh.ep == 1 else "efsdp", f"S({dim})"))
            local[dim] = math.ceil(local[dim] / shards)
        return Weight(
            name or parameter.fqn, parameter.shape, tuple(local), tuple(placements), self.float8(parameter.module)
        )

    def weights(self, fqn: str) -> list[Parameter]:
        """The parameters of `fqn` and everything below it."""
        if fqn in self.by_module:
            return self.by_module[fqn]
        return [p for p in self.parameters if p.fqn.startswith(f"{fqn}.") or p.target == fqn]

    def groups(self, wanted: Iterable[str] | None = None) -> list[Group]:
        """The top-level modules (all, or those named), with layers that are decided alike folded, in model order."""
        chosen = set(self.layers) if wanted is None else set(wanted)
        by_top: dict[str, list[Parameter]] = {}
        for parameter in self.parameters:
            top, _, rest = parameter.fqn.partition(".")
            if top == "layers":
                top = f"layers.{rest.partition('.')[0]}"
            by_top.setdefault(top, []).append(parameter)
        memo: dict[object, Weight] = {}
        found: dict[object, Group] = {}
        for fqn, layer in self.layers.items():
            if fqn not in chosen:
                continue
            is_block = fqn.startswith("layers.")
            weights = []
            for parameter in by_top.get(fqn, ()):
                name = parameter.fqn[len(fqn) + 1 :] if is_block else parameter.fqn
                module = parameter.module
                entries = tuple(id(entry) for entry in self.sharding.get(module, ()))
                key = (name, parameter.shape, entries, self._float8.get(module))
                if key not in memo:
                    memo[key] = self.weight(parameter, name)
                weights.append(memo[key])
            signature: object = (layer.checkpoint, tuple(id(weight) for weight in weights)) if is_block else fqn
            numbers = (int(fqn.partition(".")[2]),) if is_block else ()
            old = found.get(signature)
            if old is None:
                found[signature] = Group(numbers, fqn, (layer.stage,), layer.checkpoint, tuple(weights))
            else:
                stages = old.stages if layer.stage in old.stages else (*old.stages, layer.stage)
                found[signature] = Group(old.layers + numbers, old.fqn, stages, old.checkpoint, old.weights)
        return list(found.values())


def policy_words(policy: CheckpointPolicy) -> str:
    """What a checkpointing policy keeps, in words."""
    match policy.mode:
        case "none":
            return "keeps all activations"
        case "full":
            return "keeps the block's input, recomputes the rest"
        case "selective":
            kept = ", ".join(dict.fromkeys(_op_word(op, policy) for op in policy.save_ops)) or "nothing"
            forced = ", ".join(policy.force_recompute_fqns)
            return f"keeps {kept}" + (f"; always recomputes {forced}" if forced else "")
        case "memory_budget":
            return f"torch.compile keeps what fits a budget of {policy.memory_budget:g} (0 full, 1 none)"


def _op_word(op: str, policy: CheckpointPolicy) -> str:
    """`aten.mm.default` as `mm`; the kernels of attention, of which one runs, are one word."""
    word = op.removeprefix("aten.").removeprefix("_c10d_functional.").removesuffix(".default")
    if word.startswith("_scaled_dot_product"):
        return "attention"
    return "every other mm" if word == "mm" and policy.recompute_every_second_matmul else word


def reshard_words(reshard: bool | int) -> str:
    """What happens to gathered parameters after forward, in words."""
    if reshard is True:
        return "freed after forward"
    return "kept until backward" if reshard is False else f"resharded to {reshard} ranks after forward"
