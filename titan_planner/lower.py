"""Lower a spec to the naive plan: all ranks shard data, one stage, nothing recomputed, no Float8, nothing compiled.

Pins on degrees, batch, schedule and compilation are honoured here, because a plan must be valid from the first moment and
after every pass; everything that is `auto` takes the plainest legal value, and the passes improve on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from titan_planner.ir.cluster import Cluster
from titan_planner.ir.errors import Complaint, InvariantError, SpecError
from titan_planner.ir.execution import KEEP_ALL, ActivationCheckpoint, Compile, Float8, Loss
from titan_planner.ir.job import (
    Checkpoint,
    Comm,
    Data,
    Job,
    LrSchedule,
    Metrics,
    Optimizer,
    ParamGroup,
    Profiling,
    Seeds,
    Validation,
)
from titan_planner.ir.model import Model
from titan_planner.ir.parallel import ContextParallel, ExpertParallel, Fsdp, Mesh
from titan_planner.ir.plan import PLAN_VERSION, Plan, Remark
from titan_planner.ir.request import DEGREE_FIELDS, Request, Spec
from titan_planner.ir.verify import verify
from titan_planner.layout import comm_backend, lay_out, meshes
from titan_planner.stages import InfeasibleStages


@dataclass(frozen=True, slots=True)
class Problem:
    """What a spec asks for, resolved: the spec, its model and machines, and the plan's name."""

    spec: Spec
    model: Model
    cluster: Cluster
    name: str


def lower(problem: Problem) -> Plan:
    """The naive plan: the first legal mesh with the least model parallelism.

    Raises `SpecError` when none is legal, with everything that is wrong: degrees or stages that cannot be had hide nothing else.
    """
    first: tuple[Complaint, ...] = ()
    tried = 0
    expected = True
    for mesh in _grids(problem):
        expected = expected and (tried > 0 or _all_unpinned_are_one(problem, mesh))
        tried += 1
        try:
            plan = _on_mesh(problem, mesh)
            broken = verify(plan)
        except InfeasibleStages as error:
            broken = (_about_stages(error),)
        else:
            if not broken:
                return plan
        first = first or (*broken, *_beside(problem, broken))
    # The first mesh is the one that users expect: what is wrong with it is what is wrong with the spec. Unless even the
    # first had to be something else, because the batch does not divide.
    raise SpecError(first if expected else _none_is_legal(problem, tried, first))


def _grids(problem: Problem) -> Iterator[Mesh]:
    try:
        yield from meshes(problem.model, problem.cluster, problem.spec.request())
    except SpecError as error:
        raise SpecError((*error.complaints, *_beside(problem, error.complaints))) from None


def _about_stages(error: InfeasibleStages) -> Complaint:
    return Complaint(error.message, error.address, hint=error.hint, rule=error.rule)


def _beside(problem: Problem, found: tuple[Complaint, ...]) -> tuple[Complaint, ...]:
    """What else is wrong with a spec whose degrees or stages, `found` says, cannot be had; nothing where they can.

    Judged on a mesh of the other pins, with one rank on every axis that is open or that `found` speaks of: what breaks a rule
    there breaks it on every mesh. Rules that a larger mesh could satisfy are left out.
    """
    spec, rules = problem.spec, {complaint.rule for complaint in found}
    pins = spec.request().parallelism
    bad = {complaint.address.removeprefix("parallelism.") for complaint in found}
    changed: dict[str, Any] = dict.fromkeys(sorted(bad & set(DEGREE_FIELDS.values())), 1)
    if rules & {"pp-layers", "pp-listed", "plan-stages", "plan-stage-order"}:
        changed["pipeline_parallel_degree"] = 1
    if not changed:
        return ()
    if "pipeline_parallel_degree" in changed:
        changed["pipeline_parallel_schedule_actions"] = None
    if isinstance(pins.fsdp_reshard_after_forward, int):
        changed["fsdp_reshard_after_forward"] = "default"
    trial = replace(problem, spec=replace(spec, parallelism=replace(pins, **changed)))
    trusted = trial.spec.request()
    degrees = {axis: getattr(trusted.parallelism, name) for axis, name in DEGREE_FIELDS.items()}
    open_data = any(
        name in changed or not _is_degree(degrees[axis]) for axis, name in DEGREE_FIELDS.items() if axis[:2] == "dp"
    )
    doubtful = {"mesh-world", "ep-region"}
    if trusted.parallelism.pipeline_parallel_schedule == "auto":
        doubtful.add("pp-microbatches")  # another schedule may do
    if open_data and trusted.local_batch_size == "auto" and trusted.global_batch_size not in ("auto", -1):
        doubtful |= {"pp-microbatches", "batch-micro"}  # how many there are follows from the data-parallel ranks
    ep, etp = (degree if isinstance(degree, int) else 1 for degree in (
        trusted.parallelism.expert_parallel_degree, trusted.parallelism.expert_tensor_parallel_degree))  # fmt: skip
    mesh = Mesh(**{axis: degree if _is_degree(degree) else 1 for axis, degree in degrees.items()}, ep=ep, etp=etp)
    try:
        told = verify(_on_mesh(trial, mesh), without=doubtful)
        # Experts are shared among the data-parallel ranks, so these are given as many as that takes.
        wide = verify(_on_mesh(trial, replace(mesh, dp_shard=ep * etp)), without={"mesh-world"})
    except InfeasibleStages as error:
        stages = _about_stages(error)
        return (stages, *_beside(problem, (*found, stages)))
    except InvariantError:
        return ()  # degrees beyond what a batch can have: what was found says so
    return (*told, *(complaint for complaint in wide if complaint.rule == "ep-region"))


def _is_degree(value: int | str) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def _all_unpinned_are_one(problem: Problem, mesh: Mesh) -> bool:
    pins = problem.spec.request().parallelism
    return all(mesh.degree(axis) == 1 for axis in ("pp", "cp", "tp") if getattr(pins, DEGREE_FIELDS[axis]) == "auto")


def _none_is_legal(problem: Problem, tried: int, first: tuple[Complaint, ...]) -> Complaint:
    """The planner had a choice of meshes and none worked: say so, and suggest a batch that was checked to work."""
    gpus, batch = problem.cluster.num_gpus, problem.spec.training.global_batch_size
    hint = "unpin a degree, or change the number of GPUs"
    if isinstance(batch, int) and batch > 0:
        for ranks in (gpus // problem.cluster.gpus_per_node, gpus):
            other = max(1, round(batch / ranks)) * ranks
            training = replace(problem.spec.training, global_batch_size=other)
            try:
                # The batch differs from the one that failed, and is never changed again: this ends after one level.
                if other != batch and _lowers(replace(problem, spec=replace(problem.spec, training=training))):
                    hint = f"use a global batch of {other}, a multiple of {ranks} data-parallel ranks"
                    break
            except SpecError:
                continue
    return Complaint(
        f"no layout of {gpus} GPUs that honours the pins is legal ({tried} tried); the first fails because "
        f"{first[0].message}",
        first[0].address if not isinstance(batch, int) else "batch.global_batch_size",
        hint=hint,
        rule=first[0].rule,
    )


def _lowers(problem: Problem) -> bool:
    for mesh in meshes(problem.model, problem.cluster, problem.spec.request()):
        try:
            if not verify(_on_mesh(problem, mesh)):
                return True
        except InfeasibleStages:
            continue
    return False


def _on_mesh(problem: Problem, mesh: Mesh) -> Plan:
    spec = problem.spec
    request = spec.request()
    pins, training = request.parallelism, spec.training
    layout = lay_out(problem.model, request, training.seq_len, mesh)
    remarks: list[Remark] = []
    schedule = _lr_schedule(problem, remarks)
    if request.global_batch_size in ("auto", -1):
        batch = layout.batch
        message = f"no global batch is pinned: {batch.local_batch_size} sequences x {mesh.dp} data-parallel ranks"
        remarks.append(Remark(kind="analysis", by="lower", address="batch.global_batch_size", message=message))
    remarks += _unused(spec)
    param_dtype = training.mixed_precision_param
    if param_dtype == "auto":
        param_dtype = training.dtype if problem.cluster.gpu.device == "cpu" else "bfloat16"
    return Plan(
        plan_version=PLAN_VERSION,
        name=problem.name,
        description=spec.description,
        model=problem.model,
        cluster=problem.cluster,
        mesh=mesh,
        batch=layout.batch,
        pipeline=layout.pipeline,
        fsdp=Fsdp(
            strategy="ddp" if pins.data_parallel_strategy == "ddp" else "fsdp",
            units=layout.units,
            param_dtype=param_dtype,
            reduce_dtype=training.mixed_precision_reduce,
            defer_gradient_sync=pins.defer_gradient_sync is True,
            # Left to itself, torch gathers the next unit while one computes.
            prefetch_forward=0 if pins.fsdp_prefetch_forward == "auto" else pins.fsdp_prefetch_forward,
            prefetch_backward=0 if pins.fsdp_prefetch_backward == "auto" else pins.fsdp_prefetch_backward,
            cpu_offload=training.enable_cpu_offload,
        ),
        tensor_parallel=layout.tensor_parallel,
        context_parallel=ContextParallel(
            method=pins.context_parallel_method if pins.context_parallel_method != "auto" else "allgather",
            load_balance=(
                pins.context_parallel_load_balancer if pins.context_parallel_load_balancer != "auto" else "headtail"
            ),
        ),
        expert_parallel=ExpertParallel(
            comm_backend=comm_backend(request, mesh),
            capacity_factor=pins.expert_capacity_factor,
            force_load_balance=pins.moe_force_load_balance,
        ),
        activation_checkpoint=ActivationCheckpoint(
            policies=(KEEP_ALL,),
            preserve_rng_state=request.activation_checkpoint.preserve_rng_state,
            early_stop=request.activation_checkpoint.early_stop,
            determinism_check=request.activation_checkpoint.determinism_check,
        ),
        float8=Float8(
            recipe=None,
            converted=(),
            skipped=(),
            enable_fsdp_float8_all_gather=False,
            precompute_float8_dynamic_scale_for_fsdp=False,
            emulate=False,
        ),
        compile=Compile(
            enable=_compiled(request), components=request.compile.components, backend=request.compile.backend
        ),
        loss=Loss(
            kind="cross_entropy",
            chunks=request.loss.chunks if isinstance(request.loss.chunks, int) else 1,
            z_loss=request.loss.z_loss,
        ),
        layers=layout.layers,
        sharding=layout.sharding,
        dtype=training.dtype,
        optimizer=_optimizer(problem),
        lr_schedule=schedule,
        data=_data(problem),
        seeds=Seeds(seed=training.seed, deterministic=training.deterministic),
        job=_job(problem),
        request=request,
        estimate=None,
        remarks=tuple(remarks),
    )


def _compiled(request: Request) -> bool:
    """Whether what is pinned is compiled: the pin itself, or a memory budget, which only the compiler can keep."""
    asked = request.compile.enable
    return request.activation_checkpoint.mode == "memory_budget" if asked == "auto" else asked


def _unused(spec: Spec) -> list[Remark]:
    """What the spec asks for and no part of the planner reads yet."""
    unused = []
    if spec.objective != "max_throughput":
        message = f"{spec.objective}: the search does not compare predicted times or costs yet: the plain rule was used"
        unused.append(Remark(kind="missed", by="lower", address="request.objective", message=message))
    return unused


def _optimizer(problem: Problem) -> Optimizer:
    given = problem.spec.optimizer
    groups = tuple(
        ParamGroup(pattern=group.pattern, lr_scale=group.lr_scale, weight_decay=group.weight_decay)
        for group in given.param_groups
    )
    return Optimizer(
        name=given.name,
        lr=given.lr,
        beta1=given.beta1,
        beta2=given.beta2,
        eps=given.eps,
        weight_decay=given.weight_decay,
        implementation=given.implementation,
        state_dtype=given.state_dtype,
        max_norm=problem.spec.training.max_norm,
        param_groups=groups,
    )


def _lr_schedule(problem: Problem, remarks: list[Remark]) -> LrSchedule:
    given = problem.spec.lr_scheduler
    total = given.total_steps or problem.spec.training.steps
    warmup = min(given.warmup_steps, total)
    if warmup < given.warmup_steps:
        message = f"warmup of {given.warmup_steps} steps is longer than the curve of {total}: it is cut to {warmup}"
        remarks.append(Remark(kind="applied", by="lower", address="lr_schedule.warmup_steps", message=message))
    decay = total - warmup if given.decay_ratio is None else round(total * given.decay_ratio)
    if warmup + decay > total:
        message = f"decay of {decay} steps does not fit after {warmup} of warmup: it is cut to {total - warmup}"
        remarks.append(Remark(kind="applied", by="lower", address="lr_schedule.decay_steps", message=message))
        decay = total - warmup
    return LrSchedule(
        warmup_steps=warmup,
        total_steps=total,
        decay_steps=decay,
        decay_type=given.decay_type,
        min_lr_factor=given.min_lr_factor,
    )


def _data(problem: Problem) -> Data:
    given = problem.spec.data
    return Data(
        source=given.source,
        dataset=given.dataset or ("c4" if given.source == "huggingface" else None),
        path=given.path,
        tokenizer=given.tokenizer or problem.spec.model.hf_assets_path,
        text_field=given.text_field,
        add_bos=given.add_bos,
    )


def _job(problem: Problem) -> Job:
    spec = problem.spec

    def fields(section: object, into: type) -> dict[str, object]:
        # The spec's section and the plan's record have the same fields on purpose; a missing one fails loudly here.
        return {name: getattr(section, name) for name in into.__dataclass_fields__}  # type: ignore[attr-defined]

    return Job(
        steps=spec.training.steps,
        dump_folder=spec.dump_folder,
        checkpoint=Checkpoint(**fields(spec.checkpoint, Checkpoint)),  # type: ignore[arg-type]
        metrics=Metrics(**fields(spec.metrics, Metrics)),  # type: ignore[arg-type]
        profiling=Profiling(**fields(spec.profiling, Profiling)),  # type: ignore[arg-type]
        comm=Comm(**fields(spec.comm, Comm)),  # type: ignore[arg-type]
        validation=Validation(**fields(spec.validation, Validation)),  # type: ignore[arg-type]
        environment=dict(spec.environment),
        token_budget=spec.training.token_budget,
    )
