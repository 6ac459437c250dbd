"""The rows of the parity suite: what each plan pins, and on how many ranks it runs.

Every plan comes from `titan-plan compile` of a spec with the pins below; all train the same model on the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from titan_planner.ir.parallel import SPLIT_BACKWARD_SCHEDULES

SPEC: dict[str, Any] = {
    "spec_version": 1,
    "name": "parity",
    "model": {
        "family": "llama3",
        "flavor": "debug",
        "overrides": {"dim": 64, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 128},
    },
    "cluster": {"gpu": "cpu", "nodes": 1},
    # Norms lie between 0.5 and 2, so every step clips. Precision and compilation are what a CPU gets anyway, said for GPUs.
    "training": {
        "steps": 10,
        "seq_len": 32,
        "global_batch_size": 8,
        "max_norm": 0.3,
        "seed": 11,
        "mixed_precision_param": "float32",
    },
    "compile": {"enable": False},
    "optimizer": {"name": "AdamW", "lr": 3e-3},
    "lr_scheduler": {"warmup_steps": 3, "decay_ratio": 0.3},
    "data": {"source": "text", "path": "data/sample", "tokenizer": "data/tokenizer.json"},
    "activation_checkpoint": {"mode": "none"},
}

DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}


@dataclass(frozen=True)
class Row:
    """One plan of the suite. `degrees` are pinned (others are 1); `sections` are laid over the spec."""

    name: str
    degrees: dict[str, int]
    parallelism: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    masked: bool = False
    """Ignore labels unevenly over samples, so that ranks have different numbers of valid tokens."""
    same_bits_as: str | None = None
    """A row whose numbers this one must have to the last bit."""

    @property
    def ranks(self) -> int:
        """World size."""
        product = 1
        for degree in self.degrees.values():
            product *= degree
        return product

    def over(self, what: str, **sections: dict[str, Any]) -> Row:
        """This row with more fields of some sections, under a name that says `what`."""
        laid = {name: {**self.sections.get(name, {}), **section} for name, section in sections.items()}
        parallelism = {**self.parallelism, **laid.pop("parallelism", {})}
        return replace(
            self,
            name=f"{self.name}, {what}",
            parallelism=parallelism,
            sections={**self.sections, **laid},
            same_bits_as=None,
        )

    def spec(self, gpu: str = "cpu") -> dict[str, Any]:
        """The spec to compile, for one node of GPUs (or CPU ranks) of the catalogue."""
        spec = {name: dict(value) if isinstance(value, dict) else value for name, value in SPEC.items()}
        spec["cluster"] = {**spec["cluster"], "gpu": gpu, "gpus_per_node": self.ranks}
        pins = {DEGREES[axis]: self.degrees.get(axis, 1) for axis in DEGREES}
        spec["parallelism"] = {**pins, **self.parallelism}
        for name, section in self.sections.items():
            spec[name] = {**spec.get(name, {}), **section}
        return spec


def pipeline(name: str, pp: int, schedule: str, local: int = 8, **more: Any) -> Row:
    """A pipeline of one sequence a microbatch."""
    degrees = {"pp": pp, **more.pop("degrees", {})}
    parallelism = {"pipeline_parallel_schedule": schedule, **more.pop("parallelism", {})}
    sections = {"training": {"local_batch_size": local}, **more.pop("sections", {})}
    return Row(name, degrees, parallelism, sections, **more)


TIED: dict[str, Any] = {**SPEC["model"], "overrides": {**SPEC["model"]["overrides"], "tied": True}}


def chunked(chunks: int, **more: Any) -> dict[str, Any]:
    """Sections of a row whose loss is taken in `chunks` parts of the sequence."""
    return {"loss": {"chunks": chunks}, **more}


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

# 1F1B by hand: two stages, four microbatches of two sequences.
ACTIONS = ["0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3", "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"]

UNEVEN = [
    ["tok_embeddings", "layers.0"],
    ["layers.1-7", "norm", "output"],
]


def context(method: str, balance: str = "headtail") -> dict[str, str]:
    """Pins of a context-parallel row."""
    return {"context_parallel_method": method, "context_parallel_load_balancer": balance}


MOE: dict[str, Any] = {"family": "debug_moe", "flavor": "debugmodel", "overrides": {}}
MLP: dict[str, Any] = {"family": "debug_mlp", "flavor": "debugmodel", "overrides": {"num_layers": 2}}
RELU2: dict[str, Any] = {**MLP, "flavor": "relu2"}


def experts(name: str, degrees: dict[str, int], ep: int = 1, same_bits_as: str | None = None, **sections: Any) -> Row:
    """A model with experts, `ep` ranks sharing them."""
    return Row(name, degrees, {"expert_parallel_degree": ep}, {"model": MOE, **sections}, same_bits_as=same_bits_as)


COMPILED: dict[str, Any] = {"compile": {"enable": True, "backend": "aot_eager"}}


def recomputed(mode: str, **options: Any) -> dict[str, Any]:
    """Sections of a row that recomputes activations."""
    return {"activation_checkpoint": {"mode": mode, **options}}


ROWS: tuple[Row, ...] = (
    Row("one rank", {"dp_shard": 1}, sections={"training": {"local_batch_size": 2}}),
    Row("dp 2", {"dp_shard": 2}),
    Row("dp 4", {"dp_shard": 4}),
    Row("hsdp 2x2", {"dp_replicate": 2, "dp_shard": 2}),
    Row("dp 2, accumulation 4", {"dp_shard": 2}, sections={"training": {"local_batch_size": 1}}),
    Row("dp 2, ignored labels unequal", {"dp_shard": 2}, masked=True),
    *(pipeline(f"pp 2 {schedule}", 2, schedule) for schedule in SCHEDULES),
    *(pipeline(f"pp 4 {schedule}", 4, schedule) for schedule in SCHEDULES),
    pipeline("pp 2 uneven stages", 2, "1F1B", parallelism={"module_fqns_per_model_part": UNEVEN}),
    pipeline(
        "pp 2 actions of the plan", 2, "1F1B",
        parallelism={"pipeline_parallel_schedule_actions": ACTIONS, "pipeline_parallel_microbatch_size": 2},
    ),
    pipeline("pp 2, accumulation 2", 2, "1F1B", local=4),
    pipeline("pp 2, accumulation 4, gradients reduced once", 2, "1F1B", local=2,
             parallelism={"defer_gradient_sync": True}),
    pipeline("pp 2, ignored labels unequal", 2, "1F1B", masked=True),
    pipeline("pp 2, tied weights", 2, "1F1B", sections={"model": TIED}),
    # A pattern that only one stage's parameters match, and one that all stages' do.
    pipeline("pp 2, no decay on norms and embedding", 2, "1F1B", sections={"optimizer": {"weight_decay": 0.5, "param_groups": [
        {"pattern": "tok_embeddings", "weight_decay": 0.0}, {"pattern": "norm", "weight_decay": 0.0}]}}),
    pipeline("pp 2 x dp 2 1F1B", 2, "1F1B", local=4, degrees={"dp_shard": 2}),
    pipeline("pp 2 x dp 2 Interleaved1F1B, reshard always", 2, "Interleaved1F1B", local=4, degrees={"dp_shard": 2},
             parallelism={"fsdp_reshard_after_forward": "always"}),
    pipeline("pp 2 x dp 2 ZBVZeroBubble", 2, "ZBVZeroBubble", local=4, degrees={"dp_shard": 2}),
    pipeline("pp 2 x dp 2 DualPipeV", 2, "DualPipeV", local=4, degrees={"dp_shard": 2}),
    pipeline("pp 2 x dp 2 InterleavedZeroBubble", 2, "InterleavedZeroBubble", local=4, degrees={"dp_shard": 2}),
    pipeline("pp 2 x hsdp 2x2", 2, "1F1B", local=2, degrees={"dp_replicate": 2, "dp_shard": 2}),
    *(Row(f"cp 2 {method}", {"cp": 2}, context(method)) for method in ("allgather", "ring", "alltoall")),
    Row("cp 2 ring, not balanced", {"cp": 2}, context("ring", "none")),
    *(Row(f"cp 4 {method}", {"cp": 4}, context(method)) for method in ("allgather", "ring")),
    Row("cp 4 alltoall, 4 KV heads", {"cp": 4}, context("alltoall"), {"model": {
        **SPEC["model"], "overrides": {**SPEC["model"]["overrides"], "num_kv_heads": 4}}}),
    Row("cp 2 x dp 2, ignored labels unequal", {"cp": 2, "dp_shard": 2}, masked=True),
    Row("cp 2 x hsdp 2x2", {"cp": 2, "dp_shard": 2, "dp_replicate": 2}),
    pipeline("pp 2 x cp 2 x dp 2", 2, "1F1B", local=4, degrees={"cp": 2, "dp_shard": 2}),
    pipeline("pp 2 Interleaved1F1B x cp 2", 2, "Interleaved1F1B", degrees={"cp": 2}, parallelism=context("ring")),
    Row("tp 2", {"tp": 2}),
    Row("tp 4, each of 2 KV heads on 2 ranks", {"tp": 4}),
    Row("tp 2, no sequence parallel", {"tp": 2}, {"enable_sequence_parallel": False}),
    Row("tp 2, no loss parallel", {"tp": 2}, {"disable_loss_parallel": True}),
    Row("tp 2, ignored labels unequal", {"tp": 2}, masked=True),
    Row("tp 2, tied weights", {"tp": 2}, sections={"model": TIED}),
    Row("tp 2, checkpointing selective", {"tp": 2}, sections={"activation_checkpoint": {"mode": "selective"}},
        same_bits_as="tp 2"),
    Row("tp 2 x dp 2", {"tp": 2, "dp_shard": 2}),
    Row("tp 2 x dp 2, accumulation 4", {"tp": 2, "dp_shard": 2}, sections={"training": {"local_batch_size": 1}}),
    Row("tp 2 x hsdp 2x2", {"tp": 2, "dp_shard": 2, "dp_replicate": 2}),
    Row("cp 2 x tp 2", {"cp": 2, "tp": 2}),
    Row("cp 2 ring x tp 2 x dp 2", {"cp": 2, "tp": 2, "dp_shard": 2}, context("ring")),
    pipeline("pp 2 x tp 2", 2, "1F1B", degrees={"tp": 2}),
    pipeline("pp 2 x tp 2, tied weights", 2, "1F1B", degrees={"tp": 2}, sections={"model": TIED}),
    pipeline("pp 2 x dp 2 x tp 2", 2, "1F1B", local=4, degrees={"dp_shard": 2, "tp": 2}),
    pipeline("pp 2 ZBVZeroBubble x dp 2 x tp 2", 2, "ZBVZeroBubble", local=4, degrees={"dp_shard": 2, "tp": 2}),
    pipeline("pp 2 x cp 2 x tp 2", 2, "Interleaved1F1B", degrees={"cp": 2, "tp": 2}),
    Row("no gate, dp 2", {"dp_shard": 2}, sections={"model": MLP}),
    Row("no gate, tp 2", {"tp": 2}, sections={"model": MLP}),
    Row("no gate and squared ReLU, tp 2 x dp 2", {"tp": 2, "dp_shard": 2}, sections={"model": RELU2}),
    Row("dp 2, loss in 4 chunks", {"dp_shard": 2}, sections=chunked(4)),
    *(pipeline(f"pp 2 {schedule}, loss in 4 chunks", 2, schedule, sections=chunked(4))
      for schedule in ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")),
    pipeline(
        "pp 2 actions of the plan, loss in 4 chunks", 2, "1F1B", sections=chunked(4),
        parallelism={"pipeline_parallel_schedule_actions": ACTIONS, "pipeline_parallel_microbatch_size": 2},
    ),
    pipeline("pp 2 x dp 2, reshard always, loss in 4 chunks", 2, "1F1B", local=4, degrees={"dp_shard": 2},
             parallelism={"fsdp_reshard_after_forward": "always"}, sections=chunked(4)),
    pipeline("pp 2 x dp 2 ZBVZeroBubble, loss in 4 chunks", 2, "ZBVZeroBubble", local=4, degrees={"dp_shard": 2},
             sections=chunked(4)),
    pipeline("pp 2, accumulation 4 reduced once, loss in 4 chunks", 2, "1F1B", local=2,
             parallelism={"defer_gradient_sync": True}, sections=chunked(4), masked=True),
    pipeline("pp 2 x tp 2, loss in 4 chunks", 2, "1F1B", degrees={"tp": 2}, sections=chunked(4)),
    pipeline("pp 2 x tp 2 InterleavedZeroBubble, loss in 4 chunks", 2, "InterleavedZeroBubble", degrees={"tp": 2},
             sections=chunked(4)),
    pipeline("pp 2 x tp 2, no loss parallel, loss in 4 chunks", 2, "1F1B", degrees={"tp": 2},
             parallelism={"disable_loss_parallel": True}, sections=chunked(4)),
    pipeline("pp 2 x tp 2 DualPipeV, accumulation 2, loss in 4 chunks", 2, "DualPipeV", local=4, degrees={"tp": 2},
             sections=chunked(4)),
    pipeline("pp 2 x cp 2, loss in 4 chunks", 2, "1F1B", degrees={"cp": 2}, sections=chunked(4)),
    *(pipeline(f"pp 2 {schedule}, tied weights", 2, schedule, sections={"model": TIED})
      for schedule in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")),
    pipeline("pp 4 ZBVZeroBubble, tied weights", 4, "ZBVZeroBubble", sections={"model": TIED}),
    pipeline("pp 2 x dp 2 ZBVZeroBubble, tied weights", 2, "ZBVZeroBubble", local=4, degrees={"dp_shard": 2},
             sections={"model": TIED}),
    pipeline("pp 2 x tp 2 DualPipeV, tied, accumulation 2, loss in 4 chunks", 2, "DualPipeV", local=4,
             degrees={"tp": 2}, parallelism={"defer_gradient_sync": True}, sections=chunked(4, model=TIED)),
    pipeline("pp 2 x tp 2 ZBVZeroBubble, tied weights", 2, "ZBVZeroBubble", degrees={"tp": 2},
             sections={"model": TIED}),
    pipeline("pp 2, tied weights, loss in 4 chunks", 2, "1F1B", sections=chunked(4, model=TIED)),
    experts("experts, dp 2", {"dp_shard": 2}),
    experts("experts, ep 2", {"dp_shard": 2}, 2),
    experts("experts, ep 4", {"dp_shard": 4}, 4),
    experts("experts, ep 2 x efsdp 2", {"dp_shard": 4}, 2),
    experts("experts, hsdp 2x2 with ep 2", {"dp_replicate": 2, "dp_shard": 2}, 2),
    experts("experts, cp 2 x dp 2 with ep 2", {"cp": 2, "dp_shard": 2}, 2),
    experts("experts, cp 2 with ep 2", {"cp": 2}, 2),
    experts("experts, ep 2, checkpointing full", {"dp_shard": 2}, 2, same_bits_as="experts, ep 2",
            activation_checkpoint={"mode": "full"}),
    experts("experts, ep 2, checkpointing selective", {"dp_shard": 2}, 2, same_bits_as="experts, ep 2",
            activation_checkpoint={"mode": "selective"}),
    experts("experts, ep 2, accumulation 4", {"dp_shard": 2}, 2, training={"local_batch_size": 1}),
    experts("experts in groups, softmax on inputs, ep 2", {"dp_shard": 2}, 2, model={**MOE, "overrides": {"moe": {
        "num_groups": 4, "num_limited_groups": 2, "score_function": "softmax", "score_before_experts": True}}}),
    experts("experts, tp 2", {"tp": 2}),
    experts("experts, tp 2 with ep 2", {"tp": 2}, 2),
    experts("experts, tp 2 x dp 2 with ep 2", {"tp": 2, "dp_shard": 2}, 2),
    Row("experts, tp 2 x dp 2 with ep 2 and etp 2", {"tp": 2, "dp_shard": 2},
        {"expert_parallel_degree": 2, "expert_tensor_parallel_degree": 2}, {"model": MOE}),
    pipeline("experts, pp 2 x tp 2 with ep 2", 2, "1F1B", degrees={"tp": 2},
             parallelism={"expert_parallel_degree": 2}, sections={"model": MOE}),
    pipeline("experts, pp 2 (a stage's first layer dense)", 2, "1F1B", sections={"model": MOE}),
    pipeline("experts, pp 2 x dp 2 with ep 2", 2, "1F1B", local=4, degrees={"dp_shard": 2},
             parallelism={"expert_parallel_degree": 2}, sections={"model": MOE}),
    pipeline("experts, a stage without any", 2, "1F1B", sections={"model": MOE}, parallelism={
        "module_fqns_per_model_part": [["tok_embeddings", "layers.0"], ["layers.1-5", "norm", "output"]]}),
    pipeline("pp 2, checkpointing full", 2, "1F1B", sections={"activation_checkpoint": {"mode": "full"}},
             same_bits_as="pp 2 1F1B"),
    pipeline("pp 2, checkpointing selective", 2, "1F1B", sections={"activation_checkpoint": {"mode": "selective"}},
             same_bits_as="pp 2 1F1B"),
    pipeline("pp 2 ZBVZeroBubble, checkpointing full", 2, "ZBVZeroBubble",
             sections={"activation_checkpoint": {"mode": "full"}}, same_bits_as="pp 2 ZBVZeroBubble"),
    Row("dp 2, every third block computed again", {"dp_shard": 2}, {}, recomputed("selective", selective_ac_option=3),
        same_bits_as="dp 2"),
    pipeline("pp 2 x tp 2, every second block computed again", 2, "1F1B", degrees={"tp": 2},
             sections=recomputed("selective", selective_ac_option=2), same_bits_as="pp 2 x tp 2"),
    Row("dp 2, a memory budget, compiled", {"dp_shard": 2}, {}, {
        **COMPILED, **recomputed("memory_budget", memory_budget=0.3)}),
    Row("tp 2, a memory budget, compiled", {"tp": 2}, {}, {**COMPILED, **recomputed("memory_budget", memory_budget=0.0)}),
    pipeline("pp 2 x tp 2 DualPipeV, a memory budget, compiled", 2, "DualPipeV", degrees={"tp": 2}, sections={
        **COMPILED, **recomputed("memory_budget", memory_budget=0.3)}),
    Row("tp 2, checkpointing full, compiled", {"tp": 2}, {}, {**COMPILED, **recomputed("full")}),
    Row("tp 2 x dp 2, every second block computed again, compiled", {"tp": 2, "dp_shard": 2}, {}, {
        **COMPILED, **recomputed("selective", selective_ac_option=2)}),
    Row("tp 4, KV heads twice, no sequence parallel, full, compiled", {"tp": 4}, {"enable_sequence_parallel": False}, {
        **COMPILED, **recomputed("full")}),
    Row("ddp 2 x tp 2, checkpointing full, compiled", {"dp_replicate": 2, "tp": 2}, {"data_parallel_strategy": "ddp"}, {
        **COMPILED, **recomputed("full")}),
    Row("experts, tp 2 with ep 2, checkpointing full, compiled", {"tp": 2}, {"expert_parallel_degree": 2}, {
        "model": MOE, **COMPILED, **recomputed("full")}),
    *(pipeline(f"pp 2 {schedule}, compiled", 2, schedule, sections=COMPILED) for schedule in SPLIT_BACKWARD_SCHEDULES),
    pipeline("pp 2 DualPipeV, checkpointing full, compiled", 2, "DualPipeV", sections={**COMPILED, **recomputed("full")}),
    pipeline("pp 2 x tp 2 ZBVZeroBubble, checkpointing full, compiled", 2, "ZBVZeroBubble", degrees={"tp": 2}, sections={
        **COMPILED, **recomputed("full")}),
    Row("hsdp 2x4, resharded to 2", {"dp_replicate": 2, "dp_shard": 4}, {"fsdp_reshard_after_forward": 2}),
    Row("cp 2 x dp 2, resharded to 2", {"dp_shard": 2, "cp": 2}, {"fsdp_reshard_after_forward": 2}),
    pipeline("pp 2 x dp 4 Interleaved1F1B, resharded to 2", 2, "Interleaved1F1B", local=2, degrees={"dp_shard": 4},
             parallelism={"fsdp_reshard_after_forward": 2}),
    Row("experts, dp 4, resharded to 2", {"dp_shard": 4}, {"fsdp_reshard_after_forward": 2}, {"model": MOE}),
    Row("experts, dp 8 with ep 2, all but experts resharded to 4", {"dp_shard": 8}, {
        "fsdp_reshard_after_forward": 4, "expert_parallel_degree": 2}, {"model": MOE}),
)  # fmt: skip

MORE = frozenset(
    {
        "pp 2 actions of the plan, loss in 4 chunks",
        "pp 2 x dp 2 ZBVZeroBubble, loss in 4 chunks",
        "pp 2 x tp 2 InterleavedZeroBubble, loss in 4 chunks",
        "pp 2 x tp 2, no loss parallel, loss in 4 chunks",
        "pp 2 x cp 2, loss in 4 chunks",
        "pp 2 DualPipeV, loss in 4 chunks",
        "pp 2 x dp 2 ZBVZeroBubble, tied weights",
        "pp 4 ZBVZeroBubble, tied weights",
        "pp 2 x tp 2 ZBVZeroBubble, tied weights",
        "pp 2 DualPipeV, tied weights",
        "tp 4, KV heads twice, no sequence parallel, full, compiled",
        "ddp 2 x tp 2, checkpointing full, compiled",
        "pp 2 InterleavedZeroBubble, compiled",
        "pp 2 ZBVZeroBubble, compiled",
        "pp 2 x tp 2 ZBVZeroBubble, checkpointing full, compiled",
        "pp 2 x tp 2 DualPipeV, a memory budget, compiled",
        "tp 2 x dp 2, every second block computed again, compiled",
        "cp 2 x dp 2, resharded to 2",
        "hsdp 2x4, resharded to 2",
        "experts, dp 8 with ep 2, all but experts resharded to 4",
    }
)
"""Rows that show what others do, in one more combination: marked slow, run by CI and not by `make test`."""
