"""How ranks share the work: the mesh, pipeline stages, sharding of every module, FSDP units, context and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from titan_planner.ir.errors import InvariantError
from titan_planner.ir.record import Field, record

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first; tp is innermost so that it stays inside a node whenever it divides one."""

Schedule: TypeAlias = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """What a schedule asks of stages and microbatches, as torch 2.13's `torch.distributed.pipelining` has it.

    `per_rank` are the fewest and the most stages a rank (None: any number). Stages lie in a loop (stage s on rank s modulo
    pp) or in a V (rank r has r and 2 pp - 1 - r). Microbatches are as many as liked, at least one a stage, or in equal
    rounds of about one a rank.
    """

    what: str
    per_rank: tuple[int, int | None]
    multi_stage: bool
    placement: Literal["loop", "V"] = "loop"
    splits_backward: bool = False
    microbatches: Literal["any", "at least the stages", "rounds"] = "any"

    def runs(self, microbatches: int, pp: int, stages: int) -> bool:
        """Whether the schedule can run so many microbatches over `stages` stages on `pp` ranks."""
        match self.microbatches:
            case "any":
                return True
            case "at least the stages":
                return microbatches >= stages
            case "rounds":
                return microbatches % max(1, microbatches // pp) == 0


SCHEDULES: Mapping[Schedule, ScheduleFacts] = {
    "GPipe": ScheduleFacts("all forwards, then all backwards", (1, 1), False),
    "1F1B": ScheduleFacts("one forward, one backward", (1, 1), False, microbatches="at least the stages"),
    "Interleaved1F1B": ScheduleFacts("1F1B over several stages a rank", (2, None), True, microbatches="rounds"),
    "LoopedBFS": ScheduleFacts("GPipe over several stages a rank", (2, None), True),
    "InterleavedZeroBubble": ScheduleFacts(
        "Interleaved1F1B with backward split", (1, None), True, splits_backward=True, microbatches="rounds"
    ),
    "ZBVZeroBubble": ScheduleFacts("zero bubble in a V", (2, 2), True, "V", splits_backward=True),
    "DualPipeV": ScheduleFacts(
        "DualPipe in a V", (2, 2), True, "V", splits_backward=True, microbatches="at least the stages"
    ),
}
MULTI_STAGE_SCHEDULES = tuple(name for name, facts in SCHEDULES.items() if facts.multi_stage)
V_SCHEDULES = tuple(name for name, facts in SCHEDULES.items() if facts.placement == "V")
SPLIT_BACKWARD_SCHEDULES = tuple(name for name, facts in SCHEDULES.items() if facts.splits_backward)


@record
class Mesh:
    """Degrees of the axes pp x dp_replicate x dp_shard x cp x tp, and the expert view (ep, etp) of the same ranks."""

    pp: Annotated[int, Field("Pipeline-parallel ranks.", ge=1, le=10**7)]
    dp_replicate: Annotated[int, Field("Replicas of the sharded model (the outer axis of HSDP).", ge=1, le=10**7)]
    dp_shard: Annotated[int, Field("Ranks that shard parameters and data (FSDP).", ge=1, le=10**7)]
    cp: Annotated[int, Field("Ranks that share one sequence (context parallel).", ge=1, le=10**7)]
    tp: Annotated[int, Field("Ranks that share every weight matrix (tensor parallel).", ge=1, le=10**7)]
    ep: Annotated[int, Field("Ranks that share the experts; carved out of dp_shard x cp x tp.", ge=1, le=10**7)]
    etp: Annotated[int, Field("Tensor-parallel ranks inside an expert: 1 or tp.", ge=1, le=10**7)]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks over which FSDP shards a parameter: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks over which FSDP shards an expert's weights: efsdp x ep x etp are the ranks of dp_shard x cp x tp."""
        return self.fsdp * self.tp // (self.ep * self.etp)

    def degree(self, axis: str) -> int:
        """Degree of the axis named `axis`."""
        value = getattr(self, axis)
        assert isinstance(value, int)
        return value

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis; the last axis varies fastest."""
        found: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.degree(axis))
        return {axis: found[axis] for axis in AXES}


@record
class Stage:
    """One pipeline stage and the pipeline rank that holds it. Its modules are the `layers` entries with its index."""

    index: Annotated[int, Field("Position in the pipeline, from 0.", ge=0)]
    pp_rank: Annotated[int, Field("Coordinate on the pp axis.", ge=0)]


@record
class Pipeline:
    """Schedule, stages and microbatches. One stage and no schedule when pp = 1."""

    schedule: Annotated[Schedule | None, Field("Schedule, spelled as torch.distributed.pipelining; null when pp = 1.")]
    stages: Annotated[tuple[Stage, ...], Field("All (virtual) stages in order.", min_items=1)]
    microbatches: Annotated[int, Field("Pipeline microbatches in one accumulation step.", ge=1, le=10**6)]
    actions: Annotated[
        tuple[str, ...] | None,
        Field(
            "A schedule of the user's own: one row a pipeline rank, actions like `0F0,1F0,0B0`; null to use `schedule`."
        ),
    ]

    @property
    def stages_per_rank(self) -> int:
        """Virtual stages on one pipeline rank."""
        return max(1, len(self.stages) // (1 + max(stage.pp_rank for stage in self.stages)))


@record
class ModuleSharding:
    """Placement of one kind of module on one mesh axis: `S(d)` sharded on dim d, `R` replicated, `P` partial sums.

    Activations are [batch, sequence, features]. `input` is the layout that arrives, `input_needed` the one computed with,
    `output` the one that results and `output_needed` the one handed on; null where the module leaves it as it is.
    """

    module: Annotated[str, Field("Selector of the modules.")]
    axis: Annotated[Literal["tp", "ep", "etp"], Field("Mesh axis.")]
    weight: Annotated[str | None, Field("Placement of the weight.", pattern=r"^(S\(\d\)|R)$")]
    input: Annotated[str | None, Field("Layout of the input that arrives.", pattern=r"^(S\(\d\)|R|P)$")]
    input_needed: Annotated[str | None, Field("Layout of the input computed with.", pattern=r"^(S\(\d\)|R|P)$")]
    output: Annotated[str | None, Field("Layout of the result.", pattern=r"^(S\(\d\)|R|P)$")]
    output_needed: Annotated[str | None, Field("Layout handed on.", pattern=r"^(S\(\d\)|R|P)$")]


@record
class TensorParallel:
    """Options of tensor parallelism that are not placements."""

    sequence_parallel: Annotated[bool, Field("Norms and residual stream are sharded on the sequence.")]
    loss_parallel: Annotated[bool, Field("Cross-entropy works on logits sharded over the vocabulary.")]
    async_tp: Annotated[bool, Field("Matmuls overlap with their collectives (compiled CUDA only).")]
    kv_replicas: Annotated[
        int, Field("Tensor ranks that hold the same KV head; tp / kv_replicas divides the KV heads.", ge=1, le=10**7)
    ]


@record
class FsdpUnit:
    """Modules gathered and freed together. A selector with `*` or a range makes one unit of every match."""

    modules: Annotated[
        tuple[str, ...], Field("Selectors; several selectors make one unit of all their modules.", min_items=1)
    ]
    reshard_after_forward: Annotated[
        bool | int, Field("Free after forward (true), keep until backward (false), or reshard to this many ranks.")
    ]

    def check(self) -> None:
        if not isinstance(self.reshard_after_forward, bool) and self.reshard_after_forward < 2:
            raise InvariantError(
                "reshard_after_forward",
                f"`reshard_after_forward` is {self.reshard_after_forward}, but a partial reshard needs at least 2 ranks",
                rule="fsdp-units",
            )


@record
class Fsdp:
    """Data parallelism: fully sharded (FSDP2; HSDP when dp_replicate > 1) or replicated (DDP), and its precision."""

    strategy: Annotated[Literal["fsdp", "ddp"], Field("fsdp shards parameters; ddp replicates them (dp_shard = 1).")]
    units: Annotated[tuple[FsdpUnit, ...], Field("Units; modules in none belong to the root unit.")]
    param_dtype: Annotated[Literal["float32", "bfloat16"], Field("Dtype that parameters are gathered and computed in.")]
    reduce_dtype: Annotated[Literal["float32", "bfloat16"], Field("Dtype of gradient reduction.")]
    defer_gradient_sync: Annotated[bool, Field("Reduce gradients only after the last accumulation step.")]
    prefetch_forward: Annotated[
        int, Field("Units gathered ahead explicitly in forward; 0 leaves it to FSDP.", ge=0, le=10**4)
    ]
    prefetch_backward: Annotated[
        int, Field("Units gathered ahead explicitly in backward; 0 leaves it to FSDP.", ge=0, le=10**4)
    ]
    cpu_offload: Annotated[bool, Field("Parameters, gradients and optimizer states live in host memory.")]


@record
class ContextParallel:
    """How the ranks of the cp axis share one sequence."""

    method: Annotated[Literal["allgather", "ring", "alltoall"], Field("How keys and values meet queries.")]
    load_balance: Annotated[Literal["headtail", "ptrr", "none"], Field("Which parts of the sequence a rank gets.")]


@record
class ExpertParallel:
    """How the ranks of the ep axis share the experts."""

    comm_backend: Annotated[Literal["standard", "deepep", "hybridep"], Field("Implementation of token dispatch.")]
    capacity_factor: Annotated[
        float | None, Field("Tokens an expert takes, as a multiple of the mean; null drops none.", gt=0)
    ]
    force_load_balance: Annotated[bool, Field("Route round-robin: for measurements only.")]
