"""Record every collective that a rank really issues: kind, group, bytes, dtype, and whether autograd was running.

    with Recorder() as recorder:
        train_step(...)
    recorder.events            # [Event("all_gather", (0, 1), 1024, "float32", backward=False), ...]

How it is complete. Whatever starts a collective in Python or C++ goes through torch's dispatcher: `dist.all_reduce` and its
like (FSDP2's too) as `c10d.*`, functional collectives (DTensor's and this runtime's) as `_c10d_functional.*`. A dispatch mode
sees both, and only the outer one of the two, because a functional collective's own call runs below the mode. DTensor's ops
are taken apart first, so that what they send is seen. Modes belong to a thread, and a backward pass on CPU runs in the
thread that asked for it. That nothing was missed is not believed but counted: `unseen()` compares the number of
operations on every group with how far the backend's own sequence number has gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Event:
    """One collective, as one rank issues it. `nbytes` follows the convention of `titan_planner.cost.collectives`."""

    kind: str
    ranks: tuple[int, ...]
    nbytes: int
    dtype: str
    backward: bool


class Recorder(TorchDispatchMode):
    """Collects `events` while active, on this thread. Groups of one rank are left out: nothing is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.calls: dict[str, int] = {}
        self._before: dict[str, int] = {}

    def __enter__(self) -> Recorder:
        self._before = _sequence_numbers()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # first it becomes what it does to plain tensors
        kwargs = kwargs or {}
        namespace, name = func.namespace, func._schema.name.split("::")[1]
        if namespace == "c10d":
            self._direct(name, args)
        elif namespace == "_c10d_functional":
            self._functional(name, args)
        return func(*args, **kwargs)

    def _direct(self, name: str, args: Sequence[Any]) -> None:
        match name:
            case "allreduce_":
                tensors, group = args[0], args[1]
                self._add("all_reduce", group, tensors)
            case "_allgather_base_":
                self._add("all_gather", args[2], [args[0]])
            case "_reduce_scatter_base_":
                self._add("reduce_scatter", args[2], [args[1]])
            case "alltoall_base_":
                self._add("all_to_all", args[2], [args[1]])
            case "broadcast_":
                self._add("broadcast", args[1], args[0])
            case "send":
                self._add("send", args[1], args[0], peer=args[2])
            case "recv_":
                self._add("recv", args[1], args[0], peer=args[2])
            case _:
                raise NotImplementedError(f"the recorder does not know c10d.{name}")

    def _functional(self, name: str, args: Sequence[Any]) -> None:
        match name:
            case "wait_tensor" | "_wrap_tensor_autograd":
                return  # nothing is sent
            case "all_reduce" | "all_reduce_":
                self._add("all_reduce", _group(args[2]), [args[0]])
            case "all_gather_into_tensor":
                self._add("all_gather", _group(args[2]), [args[0]], times=args[1])
            case "reduce_scatter_tensor":
                self._add("reduce_scatter", _group(args[3]), [args[0]])
            case "all_to_all_single":
                # A shift around a ring is written as an all-to-all in which each rank has one receiver.
                shift = sum(size > 0 for size in args[2]) == 1 if args[2] else False
                self._add("ring" if shift else "all_to_all", _group(args[3]), [args[0]])
            case "broadcast" | "broadcast_":
                self._add("broadcast", _group(args[2]), [args[0]])
            case _:
                raise NotImplementedError(f"the recorder does not know _c10d_functional.{name}")

    def _add(self, kind: str, group: Any, tensors: Sequence[Tensor], times: int = 1, peer: int | None = None) -> None:
        group = dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group
        self.calls[group.group_name] = self.calls.get(group.group_name, 0) + 1
        if group.size() == 1:
            return
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        if peer is not None:
            ranks = tuple(sorted((dist.get_rank(), dist.get_global_rank(group, peer))))
        nbytes = times * sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        self.events.append(Event(kind, ranks, nbytes, dtype, torch._C._current_graph_task_id() != -1))

    def unseen(self) -> dict[str, tuple[int, int]]:
        """Group -> (operations the backend counted, operations recorded), where they differ."""
        now = _sequence_numbers()
        return {
            name: (number - self._before.get(name, 0), self.calls.get(name, 0))
            for name, number in now.items()
            if number - self._before.get(name, 0) != self.calls.get(name, 0)
        }


def _group(name: Any) -> Any:
    return dist.distributed_c10d._resolve_process_group(name) if isinstance(name, str) else name


def _sequence_numbers() -> dict[str, int]:
    return {group.group_name: group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map}
