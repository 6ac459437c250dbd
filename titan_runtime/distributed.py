"""The process group: which device a rank uses, how ranks find each other, and how long they wait for one another."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from titan_planner.ir.cluster import Gpu
from titan_planner.ir.job import Comm


def rank_device(gpu: Gpu) -> torch.device:
    """The device of this rank: the CPU, or the GPU with the rank's number on its node (torchrun's LOCAL_RANK)."""
    if gpu.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def rendezvous_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The key-value store of this launch: torchrun's, or one in memory for a single process started without it."""
    if "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=world_size, timeout=timeout))
    return store


def start(store: dist.Store, rank: int, world_size: int, gpu: Gpu, device: torch.device, comm: Comm) -> None:
    """Make the default process group. The first collective of a run happens in here."""
    if device.type == "cuda":
        # NCCL's flight recorder: the last collectives of every rank, written out when one of them times out.
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(comm.trace_buf_size)
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1" if comm.trace_buf_size else "0"
    # Small facts (stop flags, errors, checkpoint plans) travel over gloo on every kind of device: a collective on CPU
    # tensors must not wait for the GPU's queue.
    backend = gpu.backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{gpu.backend}"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("titan/collectives", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=comm.init_timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )


def set_timeout(timeout: timedelta) -> None:
    """Let collectives of every group wait that long from now on. All ranks call it between the same two collectives."""
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
