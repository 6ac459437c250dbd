"""How long one estimate of a pinned plan takes inside the process, warm and cold.

    python benchmarks/estimate_time.py [--json OUT] [PLAN ...]

Prints, per plan, the first estimate, the median and the fastest of many, of the same plan and of plans that differ in their
batch (what a search asks for: kinds of blocks and groups are known, counts are not). Plans: the golden ones by default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from titan_planner.cost.estimate import estimate  # noqa: E402
from titan_planner.ir.plan import Plan  # noqa: E402
from titan_planner.ir.verify import load_plan  # noqa: E402

REPEATS = 50


def timed(plans: Sequence[Plan]) -> list[float]:
    """Milliseconds of CPU time of each estimate: the machine's other work does not count."""
    found = []
    for plan in plans:
        start = time.process_time()
        estimate(plan)
        found.append(1e3 * (time.process_time() - start))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, write the JSON."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plans", nargs="*", type=Path, metavar="PLAN")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args(argv)
    report = {}
    print(f"{'plan':32} {'first':>9} {'same':>9} {'fastest':>9} {'new batch':>9}   ms of CPU time")
    for path in arguments.plans or sorted((ROOT / "plans").glob("*/plan.json")):
        plan = load_plan(path)
        first = timed([plan])[0]
        same = timed([plan] * REPEATS)
        others = [
            replace(
                plan,
                batch=replace(
                    plan.batch,
                    accumulation_steps=steps,
                    global_batch_size=plan.batch.global_batch_size // plan.batch.accumulation_steps * steps,
                ),
            )
            for steps in range(2, 2 + REPEATS)
        ]
        varied = timed(others)
        row = {
            "first_ms": first,
            "same_ms": statistics.median(same),
            "fastest_ms": min(same),
            "new_batch_ms": statistics.median(varied),
        }
        report[path.parent.name] = row
        print(f"{path.parent.name:32} " + " ".join(f"{value:9.3f}" for value in row.values()))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
