"""Cut the model into contiguous pipeline stages: as listed by the user, so many layers each, or even by layer weight."""

from __future__ import annotations

from typing import Literal

from titan_planner.ir.fqn import select
from titan_planner.ir.inventory import top_level_modules
from titan_planner.ir.model import Model
from titan_planner.ir.parallel import MULTI_STAGE_SCHEDULES, V_SCHEDULES, Schedule
from titan_planner.ir.request import ParallelismSpec


class InfeasibleStages(Exception):
    """The stages that were asked for cannot be made; `address` is the spec's, `rule` the id of a rule."""

    def __init__(
        self, address: str, message: str, hint: str, rule: Literal["pp-layers", "pp-listed"] = "pp-layers"
    ) -> None:
        super().__init__(message)
        self.rule = rule
        self.address = address
        self.message = message
        self.hint = hint


def layer_stages(
    model: Model, pp: int, per_rank: int, schedule: Schedule | None, pins: ParallelismSpec
) -> tuple[int, ...]:
    """Stage of every top-level module, in their order. Raises `InfeasibleStages`."""
    if pp == 1:
        return (0,) * (model.num_layers + 3)
    if pins.module_fqns_per_model_part is not None:
        return _listed(model, pins.module_fqns_per_model_part)
    first, last = pins.pipeline_parallel_first_stage_less_layers, pins.pipeline_parallel_last_stage_less_layers
    effective = model.num_layers + first + last
    stages = pp * per_rank
    layers = pins.pipeline_parallel_layers_per_stage
    if isinstance(layers, int):
        stages = -(-effective // layers)
        single = schedule is not None and schedule not in MULTI_STAGE_SCHEDULES
        legal = stages == pp if single else stages == 2 * pp if schedule in V_SCHEDULES else stages % pp == 0
        if not legal:
            wanted = f"{pp}" if single else f"{2 * pp}" if schedule in V_SCHEDULES else f"a multiple of {pp}"
            count = 1 if single else 2
            raise InfeasibleStages(
                "parallelism.pipeline_parallel_layers_per_stage",
                f"{layers} layers a stage make {stages} stages of {effective} layers (embedding and output counted as "
                f"{first} and {last}), but {schedule} over {pp} pipeline ranks needs {wanted}",
                f"use {-(-effective // (count * pp))} layers a stage",
            )
    return even_split(model, stages, first, last)


def even_split(model: Model, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Layers spread evenly, embedding weighing `first` layers and norm with output `last`; earlier stages get the extra."""
    if stages > model.num_layers:
        raise InfeasibleStages(
            "parallelism.pipeline_parallel_degree",
            f"{stages} stages need at least one layer each, but the model has {model.num_layers}",
            f"use at most {model.num_layers} stages",
        )
    counts = even_counts(model.num_layers, stages, first, last)
    assert counts is not None
    stage_of = [0]
    for stage, count in enumerate(counts):
        stage_of += [stage] * count
    return (*stage_of, stages - 1, stages - 1)


def even_counts(layers: int, stages: int, first: int, last: int, late: bool = False) -> tuple[int, ...] | None:
    """Layers of every stage; earlier (`late`: later) stages get the extra. None when there are more stages than layers."""
    if stages > layers:
        return None
    share, extra = divmod(layers + first + last, stages)
    counts = [share + (1 if (stages - 1 - stage if late else stage) < extra else 0) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    # A stage without layers would be legal but pointless: it takes one from its fullest neighbour down the line.
    for stage in range(stages):
        while counts[stage] < 1:
            counts[max(range(stages), key=lambda s: (counts[s], -s))] -= 1
            counts[stage] += 1
    return tuple(counts)


def _listed(model: Model, parts: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
    address = "parallelism.module_fqns_per_model_part"
    names = top_level_modules(model)
    stage_of: dict[str, int] = {}
    for stage, selectors in enumerate(parts):
        for selector in selectors:
            found = select("output" if selector == "lm_head" else selector, names)
            if not found:
                raise InfeasibleStages(
                    address,
                    f"`{selector}` names no top-level module of the model",
                    f"use {names[0]}, layers.0 to {names[-3]}, norm, output",
                    "pp-listed",
                )
            for fqn in found:
                if fqn in stage_of:
                    raise InfeasibleStages(
                        address, f"`{fqn}` is listed in stages {stage_of[fqn]} and {stage}", "list it once", "pp-listed"
                    )
                stage_of[fqn] = stage
    missing = [fqn for fqn in names if fqn not in stage_of]
    if missing:
        raise InfeasibleStages(address, f"`{missing[0]}` is in no stage", "list every module once", "pp-listed")
    return tuple(stage_of[fqn] for fqn in names)
