"""The passes, in order. Each takes a valid plan and returns a better one, so every prefix of this tuple is a plan that runs."""

from __future__ import annotations

from titan_planner.passes.context import Context, Pass
from titan_planner.passes.filter_float8 import filter_float8
from titan_planner.passes.partition_stages import partition_stages
from titan_planner.passes.search_sharding import search_sharding
from titan_planner.passes.select_checkpointing import select_checkpointing
from titan_planner.passes.tune_runtime import tune_runtime

PASSES: tuple[Pass, ...] = (search_sharding, partition_stages, select_checkpointing, filter_float8, tune_runtime)

__all__ = ["PASSES", "Context", "Pass"]
