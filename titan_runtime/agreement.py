"""Ranks succeed together or fail together: what one rank cannot do, no rank goes on without."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from titan_runtime.errors import RunError, reason, user_errors

T = TypeVar("T")


def together(action: Callable[[], T], what: str, *, rank_0_only: bool = False) -> T:
    """Do `action` on every rank; when it fails on any, raise the same RunError on all of them.

    `what` says what was tried ("save the checkpoint"). User errors and operating-system errors are shared; any other
    exception is a bug and goes its own way with its traceback. Collective. `action` may itself contain collectives only
    if it fails on all ranks or on none. `rank_0_only` says that only rank 0 does anything, so that its sentence needs
    no rank.
    """
    result, problem, unforeseen = None, None, None
    try:
        result = action()
    except user_errors() as error:
        problem = str(error)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        problem = f"{place}cannot {what}: {reason(error)}"
    except Exception as error:
        # The other ranks wait in the gather below; they are told, and the traceback is this rank's to print.
        problem, unforeseen = f"cannot {what}: {type(error).__name__} on this rank, see its traceback", error
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if unforeseen is not None:
        raise unforeseen
    if problems[0] is not None and not any(problems[1:]) and rank_0_only:
        raise RunError(problems[0], agreed=True)
    if any(problems):
        raise RunError(one_sentence(problems), agreed=True)
    return result  # type: ignore[return-value]


def on_first_rank(action: Callable[[], T], what: str) -> T:
    """Do `action` on rank 0 and hand its result to every rank, or its failure as the same RunError. Collective.

    The result is pickled. For whatever must be judged or written once, such as a folder that all ranks share.
    """
    result = together(lambda: action() if dist.get_rank() == 0 else None, what, rank_0_only=True)
    box = [result]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def one_sentence(problems: list[str | None]) -> str:
    """The problems of all ranks, equal ones said once and with the ranks that have them unless all do."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            ranks.setdefault(problem, []).append(rank)
    if len(ranks) == 1 and len(next(iter(ranks.values()))) == len(problems):
        return next(iter(ranks))
    return "\n".join(f"{name_ranks(where)}: {problem}" for problem, where in ranks.items())


def name_ranks(ranks: list[int], limit: int = 8) -> str:
    """ "rank 3", "ranks 0, 1", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"."""
    listed = ", ".join(str(rank) for rank in ranks[:limit])
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"
