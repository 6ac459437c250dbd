"""The training run, readable from top to bottom."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from titan_planner.ir.codec import digest, dumps
from titan_planner.ir.inventory import muon_parameters, parameters
from titan_planner.ir.plan import Plan
from titan_runtime import distributed
from titan_runtime.agreement import together
from titan_runtime.apply import build_model
from titan_runtime.apply.compile import compiled_loss
from titan_runtime.apply.context import shard_sequences
from titan_runtime.banner import METRICS_FILE, SPEED_FILE, announce, say_done, say_stopped, warn_about_schedule
from titan_runtime.checkpoint import Checkpointer
from titan_runtime.checkpoint.compatibility import PLAN_FILE
from titan_runtime.data import DataLoader, PackedStream, open_stream
from titan_runtime.errors import RunError, naming_lost_connections
from titan_runtime.lock import FolderLock
from titan_runtime.loss import loss_function, measured_loss
from titan_runtime.mesh import build_mesh, data_group, data_rank
from titan_runtime.metrics import Console, Meter, ScalarWriter, StepLog, WandbWriter
from titan_runtime.metrics.meter import predictions
from titan_runtime.optimizer import build_optimizer
from titan_runtime.profiling import memory_snapshots, profiler
from titan_runtime.signals import StopRequest, agree_on_flags
from titan_runtime.step import batch_loss, train_step
from titan_runtime.validation import Validator
from titan_runtime.watch import Watch

_GC_STEPS = 50


def train(
    plan: Plan,
    rank: int,
    world_size: int,
    store: dist.Store,
    *,
    written_plan: Plan | None = None,
    accept_changes: bool = False,
    watch: Watch | None = None,
) -> int:
    """Run `plan` as rank `rank` until its last step. Returns 0, or 128 + the signal's number when one asked to stop.

    The preflight checks have passed, so the plan can be run here. `written_plan` is the plan as its file has it, before
    the command line changed paths; `watch` is told how long collectives wait. Raises RunError, on all ranks
    or (not `agreed`) on this one alone.
    """
    console = Console(rank)
    comm = plan.job.comm
    device = distributed.rank_device(plan.cluster.gpu)
    distributed.start(store, rank, world_size, plan.cluster.gpu, device, comm)
    world = build_mesh(plan.mesh, device.type)
    _seed(plan, rank)

    dump_folder = Path(plan.job.dump_folder)
    lock = together(lambda: FolderLock(dump_folder) if rank == 0 else None, "lock the dump folder", rank_0_only=True)
    announce(console, plan)
    module = build_model(plan, world, device)
    names = [parameter.fqn for parameter in parameters(plan.model)]
    optimizer = build_optimizer(module, plan.optimizer, muon_parameters(plan.model), names)
    loss = compiled_loss(loss_function(plan, world), plan)
    loader = together(lambda: open_data(plan, rank), "open the training data")
    group = data_group(world)
    validator = Validator(plan, rank, partial(open_text, plan)) if plan.job.validation.enable else None
    measure = partial(batch_loss, plan, module, compiled_loss(measured_loss(plan, world), plan))
    checkpoints = Checkpointer(
        plan,
        module,
        optimizer,
        loader,
        rank,
        device,
        written_plan=written_plan,
        accept_changes=accept_changes,
        say=console.say,
    )
    progress = checkpoints.load()
    steps = plan.job.steps
    if progress.step >= steps:
        console.say(f"nothing to do: the checkpoint is at step {progress.step} of {steps}")
        _release(lock)
        return 0
    checkpoints.leave_other_branch()
    warn_about_schedule(console, plan, progress.schedule_start)

    log, speed = _open_logs(plan, rank, progress.step, written_plan or plan)
    scalars = together(lambda: ScalarWriter(plan, rank, progress.step), "write TensorBoard scalars")
    wandb = together(lambda: WandbWriter(plan, rank), "begin a run of Weights & Biases")
    meter, predicted, named = Meter(plan, device), predictions(plan), digest(plan)
    result = None
    with (
        naming_lost_connections(lambda: f"during step {progress.step + 1}"),
        StopRequest() as stop,
        loader,
        manual_gc() as collect,
        profiler(plan, rank, device, progress.step) as trace,
        memory_snapshots(plan, rank) as snapshot,
    ):
        began_at = progress.step
        while progress.step < steps:
            microbatches = shard_sequences(loader.next_batch(), plan, rank)
            result = train_step(
                plan,
                module,
                optimizer,
                loss,
                microbatches,
                step=progress.step + 1,
                schedule_step=progress.step - progress.schedule_start,
                device=device,
                group=group,
            )
            progress.step += 1
            progress.tokens_seen += plan.batch.tokens_per_step
            step = progress.step
            meter.step()
            if trace is not None:
                trace.step()
            snapshot(step)
            collect(step)

            numbers = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}
            more = result.experts.numbers() if result.experts else {}
            if step == began_at + 1 or step % plan.job.metrics.log_freq == 0 or step == steps:
                measured = meter.measure(loader.wait_s)
                seen = progress.tokens_seen
                console.step(step, steps, tokens_seen=seen, measured=measured, predicted=predicted, **numbers)
                if result.experts is not None and result.experts.dropped:
                    console.say(
                        f"note: in step {step} expert capacity cut off {result.experts.dropped:,} choices of tokens"
                    )
                scalars.write(step, tokens_seen=seen, measured=measured, predicted=predicted, **numbers, more=more)
                wandb.write(step, measured, tokens_seen=seen, **numbers, **more)
                # The first step holds compilation and warm-up; it says nothing of the others.
                if speed is not None and step > began_at + 1:
                    speed.append(step, {"plan": named, **asdict(measured)})
            if step == began_at + 1:
                # The first step holds compilation, the allocator's warm-up and lazy connections; later ones do not.
                _set_timeout(comm.train_timeout_seconds, watch)

            if validator is not None and validator.due(step):
                if validator.runs == 0:
                    # It compiles and connects like a first step.
                    _set_timeout(comm.init_timeout_seconds, watch)
                validation = validator.run(module, measure, device, group)
                if validator.runs == 1:
                    _set_timeout(comm.train_timeout_seconds, watch)
                meter.skip(validation.seconds)
                console.validation(step, steps, validation.loss, validation.tokens, validation.seconds)
                more = {**more, "validation_loss": validation.loss}
                scalars.validation(step, validation.loss)
                wandb.validation(step, validation.loss)
            if log is not None:
                log.write(step=step, tokens_seen=progress.tokens_seen, **numbers, more=more)

            # Signals and clocks differ between ranks, and all must save after the same step.
            signal, minutes_over = agree_on_flags(stop.signal, checkpoints.minutes_due() if rank == 0 else 0)
            last = step == steps
            if signal or minutes_over or last or checkpoints.due(step):
                began = time.perf_counter()
                saved = checkpoints.save(progress, last=last)
                if saved is not None:
                    console.say(f"saved {saved}")
                meter.skip(time.perf_counter() - began)
            if signal and not last:
                say_stopped(console, plan, step, signal)
                break
        else:
            signal = 0
    for opened in (log, speed):
        if opened is not None:
            opened.close()
    scalars.close()
    wandb.close()
    _release(lock)
    if signal:
        return 128 + signal
    say_done(console, plan, progress.step, result.loss if result else None)
    return 0


def _set_timeout(seconds: int, watch: Watch | None) -> None:
    """Let collectives wait that long from now on, and a silent rank be missed after as long. Collective."""
    distributed.set_timeout(timedelta(seconds=seconds))
    if watch is not None:
        watch.allow(seconds)


def _release(lock: FolderLock | None) -> None:
    if lock is not None:
        lock.release()


def _open_logs(plan: Plan, rank: int, step: int, written: Plan) -> tuple[StepLog | None, StepLog | None]:
    """The logs of steps and of speed on rank 0, with the plan beside them; None elsewhere. Fails on all ranks if on one.

    What was computed is exact and the same in every run of a plan; how fast is neither, and has a file of its own, which
    `titan-plan calibrate` reads together with the plan.
    """
    folder = Path(plan.job.dump_folder)

    def open_both() -> tuple[StepLog, StepLog]:
        logs = StepLog(folder / METRICS_FILE, step), StepLog(folder / SPEED_FILE, step)
        (folder / PLAN_FILE).write_text(dumps(written), encoding="utf-8")
        return logs

    opened = together(lambda: open_both() if rank == 0 else None, "write metrics", rank_0_only=True)
    return opened or (None, None)


def _seed(plan: Plan, rank: int) -> None:
    """Seed what is drawn during training, differently on every rank; weights have their own generators."""
    torch.manual_seed(plan.seeds.seed + 1_000_003 * rank)
    if plan.seeds.deterministic:
        # cuBLAS reads this when it starts, which is at the first matrix product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def open_data(plan: Plan, rank: int) -> DataLoader:
    data = plan.data
    if data.path is None or data.tokenizer is None:
        missing = "data.path" if data.path is None else "data.tokenizer"
        option = "--data-path" if data.path is None else "--tokenizer"
        raise RunError(f"`{missing}` is not set", hint=f"start with {option} PATH")
    return DataLoader(
        open_text(plan, data.path),
        global_batch_size=plan.batch.global_batch_size,
        dp_rank=data_rank(plan.mesh, rank),
        dp_degree=plan.mesh.dp,
        local_batch_size=plan.batch.local_batch_size,
    )


def open_text(plan: Plan, path: str) -> PackedStream:
    """The text at `path` as samples, read and cut as the plan's training data are."""
    data = plan.data
    assert data.tokenizer is not None
    stream = open_stream(data.source, path, data.tokenizer, plan.batch.seq_len, data.text_field, data.add_bos)
    if stream.tokenizer.vocab_size > plan.model.vocab_size:
        raise RunError(
            f"the tokenizer {data.tokenizer} has ids up to {stream.tokenizer.vocab_size - 1}, "
            f"but the model's embedding has {plan.model.vocab_size} rows",
            hint=f"use the model's own tokenizer, or a vocab_size of at least {stream.tokenizer.vocab_size}",
        )
    return stream


@contextmanager
def manual_gc() -> Iterator[Callable[[int], None]]:
    """Collect garbage on all ranks at the same steps: a rank that collects alone makes all others wait for it."""

    def collect(step: int) -> None:
        if step % _GC_STEPS == 0:
            gc.collect(1)

    enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    try:
        yield collect
    finally:
        if enabled:
            gc.enable()
