"""Pipeline parallelism: the stages that this rank holds, the schedule that runs them, and what stages share.

torch's schedules run the stages; here they get modules with only their own layers, the plan's microbatches, and a loss
that is already divided by the step's number of valid tokens, so nothing is scaled again. Shapes between stages are told
in advance: torch would otherwise infer them with a forward pass of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    FORWARD,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor

from titan_planner.ir.plan import Plan
from titan_runtime.apply.fsdp import DTYPES
from titan_runtime.errors import RunError
from titan_runtime.modules import Transformer, build
from titan_runtime.modules.output import Loss


def stages_of(plan: Plan, pp_rank: int) -> list[int]:
    """Indices of the stages that pipeline rank `pp_rank` holds, in order."""
    return [stage.index for stage in plan.pipeline.stages if stage.pp_rank == pp_rank]


def build_stage(plan: Plan, stage: int, dtype: torch.dtype) -> Transformer:
    """The model with only the modules of `stage`, on the meta device; every module keeps its FQN."""
    module = build(plan.model, seq_len=plan.batch.seq_len, dtype=dtype)
    keep = {layer.fqn for layer in plan.layers if layer.stage == stage}
    for number in list(module.layers):
        if f"layers.{number}" not in keep:
            del module.layers[number]
    for name in ("tok_embeddings", "norm", "output"):
        if name not in keep:
            setattr(module, name, None)
    return module


class Stage(PipelineStage):
    """A stage whose gradients are reduced at the end of a schedule's run only when `reduce_now` says so.

    With `loss_arguments` (labels, loss and chunks of every microbatch) the module takes the loss itself, in chunks, and
    returns it in place of logits, which then never exist all at once. torch's schedules take the loss of what a stage
    returned, outside of the module, where FSDP may have freed the weights already.
    """

    reduce_now = True
    loss_arguments: Sequence[tuple[Tensor, Loss, int]] | None = None

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        """Called by the schedule for the forward of microbatch `fwd_chunk_id`."""
        if self.loss_arguments is not None:
            labels, loss, chunks = self.loss_arguments[fwd_chunk_id]
            kwargs = {**(kwargs or {}), "labels": labels, "loss": loss, "chunks": chunks}
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, **options)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Called by the schedule after the last backward of its microbatches."""
        if self.reduce_now:
            super().perform_reduce_grad(grad_scale_factor)


class Pipeline(nn.Module):
    """The stages of one pipeline rank as one module: parameters under the model's FQNs, and the run of a batch."""

    def __init__(self, plan: Plan, world: DeviceMesh, parts: Sequence[Transformer], device: torch.device) -> None:
        """`parts` are the finished modules (sharded, allocated, filled) of this rank's stages. Collective."""
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.group = world.get_group("pp")
        self._plan = plan
        self._device = device
        rank = world.get_local_rank("pp")
        indices = stages_of(plan, rank)
        self.holds_first, self.holds_last = 0 in indices, len(plan.pipeline.stages) - 1 in indices
        self._loss: Loss | None = None
        self._valid: Tensor | None = None
        self.stages = [
            _stage(plan, part, index, device, self.group) for part, index in zip(parts, indices, strict=True)
        ]
        self._schedule = _schedule(plan, self.stages, self._share)
        self._forward_table: dict[int, list[_Action]] | None = None
        self._tied = _TiedWeight(plan, world, self) if plan.model.tied else None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As the whole model names them, without the number of the part.

        Each name once: where one rank holds a tied weight twice, the last stage's copy is no parameter of its own.
        """
        seen: set[str] = set()
        for part in self.parts:
            for name, parameter in part.named_parameters(*args, **kwargs):
                if name not in seen:
                    seen.add(name)
                    yield name, parameter

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """As the whole model names them; every part stands in for the root."""
        for part in self.parts:
            yield from part.named_modules(*args, **kwargs)

    def counted_parameters(self) -> list[nn.Parameter]:
        """Parameters whose gradients belong into the global norm: a tied weight's second copy does not."""
        copy = self._tied.copy if self._tied else None
        return [parameter for parameter in self.parameters() if parameter is not copy]

    def after_change(self) -> None:
        """To be called when the weights have changed, by the optimizer or a checkpoint."""
        if self._tied is not None:
            self._tied.update_copy()

    def _share(self, output: Tensor, labels: Tensor) -> Tensor:
        """A microbatch's part of the loss, of what the last stage returned: logits, or with chunks the loss itself."""
        assert self._loss is not None
        assert self._valid is not None
        return (output if self._plan.loss.chunks > 1 else self._loss(output, labels)) / self._valid

    def _set_loss(self, loss: Loss, valid: Tensor, labels: Tensor) -> None:
        """What the next run of the schedule takes the loss with; `labels` are of its whole batch."""
        self._loss, self._valid = loss, valid
        chunks = self._plan.loss.chunks
        if self.holds_last and chunks > 1:
            each = labels.tensor_split(self._plan.pipeline.microbatches)  # as torch splits tokens and targets
            self.stages[-1].loss_arguments = [(part, loss, chunks) for part in each]

    def forward_backward(self, loss: Loss, microbatches: Sequence[tuple[Tensor, Tensor]], valid: Tensor) -> Tensor:
        """Gradients of all microbatches, pairs of tokens and labels [local batch, sequence]. Collective over pp.

        Returns this rank's part of the loss, a float32 scalar that is zero unless it holds the last stage: the sum over
        pipeline ranks is the loss. `loss` sums over tokens, `valid` is the number of valid tokens of the whole step.
        """
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        for number, (tokens, labels) in enumerate(microbatches, start=1):
            last = number == len(microbatches)
            for stage in self.stages:
                stage.reduce_now = last or not self._plan.fsdp.defer_gradient_sync
            losses: list[Tensor] = []
            labels = labels.to(self._device)
            inputs = (tokens.to(self._device),) if self.holds_first else ()
            targets = {"target": labels, "losses": losses} if self.holds_last else {}
            self._set_loss(loss, valid, labels)
            self._schedule.step(*inputs, return_outputs=False, **targets)
            if losses:
                total += torch.stack([one.detach().float() for one in losses]).sum()
        self._require_gradients()
        if self._tied is not None:
            self._tied.reduce_gradients()
        return total

    def evaluate(self, loss: Loss, tokens: Tensor, labels: Tensor) -> Tensor:
        """`loss` summed over one batch, forward only; zero on a rank without the last stage. Collective over pp."""
        self._set_loss(loss, torch.ones((), device=self._device), labels)
        losses: list[Tensor] = []
        inputs = (tokens,) if self.holds_first else ()
        targets = {"target": labels, "losses": losses} if self.holds_last else {}
        with self._forward_only():
            self._schedule.eval(*inputs, return_outputs=False, **targets)
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)

    @contextmanager
    def _forward_only(self) -> Iterator[None]:
        """Leave backward out of the schedule: torch 2.13's tables of actions have it even when they evaluate.

        The same schedule with another table, not another schedule: it knows whether its stages are set up for gradients.
        """
        schedule = self._schedule
        if not isinstance(schedule, _PipelineScheduleRuntime):
            yield
            return
        kept = schedule.pipeline_order_with_comms
        if self._forward_table is None:
            microbatches = range(self._plan.pipeline.microbatches)
            rows = {
                rank: [_Action(stage, FORWARD, m) for stage in stages_of(self._plan, rank) for m in microbatches]
                for rank in range(self._plan.mesh.pp)
            }
            self._forward_table = _add_send_recv(
                {rank: _add_unshard_reshard(row) for rank, row in rows.items()},
                stage_to_rank=lambda stage: self._plan.pipeline.stages[stage].pp_rank,
                num_stages=len(self._plan.pipeline.stages),
            )
        schedule.pipeline_order_with_comms = self._forward_table
        try:
            yield
        finally:
            schedule.pipeline_order_with_comms = kept

    def _require_gradients(self) -> None:
        """Every parameter must have a gradient: a schedule that loses weight gradients would train on silently wrong."""
        for part in self.parts:
            for name, parameter in part.named_parameters():
                if parameter.grad is None:
                    raise RuntimeError(f"the schedule {self._plan.pipeline.schedule} computed no gradient of {name}")


def _stage(plan: Plan, part: Transformer, index: int, device: torch.device, group: dist.ProcessGroup) -> Stage:
    count = len(plan.pipeline.stages)
    micro, dtype = plan.batch.microbatch_size, DTYPES[plan.fsdp.param_dtype]
    length = plan.batch.seq_len // plan.mesh.cp
    # With sequence parallelism a tensor rank holds its part of the stream between blocks.
    stream = length // plan.mesh.tp if plan.tensor_parallel.sequence_parallel else length
    vocab = plan.model.vocab_size // (plan.mesh.tp if plan.tensor_parallel.loss_parallel else 1)

    def between() -> Tensor:
        return torch.empty(micro, stream, plan.model.dim, dtype=dtype, device="meta", requires_grad=True)

    first, last = index == 0, index == count - 1
    tokens = torch.empty(micro, length, dtype=torch.int64, device="meta")
    logits = torch.empty(micro, length, vocab, dtype=dtype, device="meta", requires_grad=True)
    summed = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
    result = summed if plan.loss.chunks > 1 else logits
    return Stage(
        part,
        index,
        count,
        device,
        input_args=(tokens if first else between(),),
        output_args=(result if last else between(),),
        group=group,
    )


def _schedule(plan: Plan, stages: list[Stage], loss: Loss) -> PipelineScheduleSingle | PipelineScheduleMulti:
    options: dict[str, Any] = {
        "n_microbatches": plan.pipeline.microbatches,
        "loss_fn": loss,
        # The loss is divided by the step's valid tokens already.
        "scale_grads": False,
    }
    if plan.pipeline.actions is not None:
        return _from_actions(plan, stages, options)
    kind = get_schedule_class(cast(str, plan.pipeline.schedule))
    if issubclass(kind, PipelineScheduleSingle):
        return kind(stages[0], **options)
    return kind(stages, **options)


def _from_actions(plan: Plan, stages: list[Stage], options: dict[str, Any]) -> PipelineScheduleMulti:
    """A schedule that the plan spells out: one row of computing actions a pipeline rank; torch adds the transfers."""
    rows = cast(tuple[str, ...], plan.pipeline.actions)
    if len(rows) != plan.mesh.pp:
        raise RunError(
            f"pipeline.actions has {len(rows)} rows, but there are {plan.mesh.pp} pipeline ranks",
            hint="write one row of actions for each pipeline rank",
        )
    schedule = _PipelineScheduleRuntime(stages, **options)
    try:
        actions = {
            rank: [_Action.from_str(text) for text in re.split(r"[,\s]+", row.strip())] for rank, row in enumerate(rows)
        }
        schedule._prepare_schedule_with_comms(actions)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise RunError(
            f"pipeline.actions is no schedule that torch can run: {str(error).splitlines()[0]}",
            hint="rows look like `0F0,0F1,0B0,0B1`: stage, F, B, I or W, microbatch",
        ) from error
    return schedule


class _TiedWeight:
    """The embedding's weight, which the first stage and the last stage both hold when the model is tied.

    Both start from the same values. On two ranks the sum of both gradients goes into both optimizers, so the copies stay
    equal to the bit. Where one rank holds both stages, only the first stage's is trained and saved, with the sum of both
    gradients, and the last stage's copy is set to it whenever it has changed. (Not one parameter in both: each stage is an
    FSDP root, which gathers and frees its own.)
    """

    def __init__(self, plan: Plan, world: DeviceMesh, pipeline: Pipeline) -> None:
        first, last = plan.pipeline.stages[0].pp_rank, plan.pipeline.stages[-1].pp_rank
        self.copy: nn.Parameter | None = None
        self._weight: nn.Parameter | None = None
        self._group: dist.ProcessGroup | None = None
        if pipeline.holds_first:
            self._weight = cast(Transformer, pipeline.parts[0]).tok_embeddings.weight
        if pipeline.holds_last:
            self.copy = cast(Transformer, pipeline.parts[-1]).output.weight
        if first == last:
            return
        # Every rank takes part in making every group, also those it is no member of.
        pp_lines = world.mesh.flatten(1).t()  # [ranks of a pipeline stage, pp]
        for line in pp_lines.tolist():
            members = [line[first], line[last]]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                self._group = group

    def reduce_gradients(self) -> None:
        """Add the two stages' gradients, on both or into the one that is trained. Collective over two ranks."""
        mine = [weight for weight in (self._weight, self.copy) if weight is not None]
        gradients = [_local(weight.grad) for weight in mine if weight.grad is not None]
        if len(mine) == 2:
            total, more = gradients
            total += more
            mine[1].grad = None
        elif gradients:
            dist.all_reduce(gradients[0], group=self._group)

    @torch.no_grad()
    def update_copy(self) -> None:
        """Set the copy that is not trained to the weight that is."""
        if self._weight is not None and self.copy is not None:
            _local(self.copy).copy_(_local(self._weight))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
