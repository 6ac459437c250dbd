"""Time `titan-plan compile` as a whole process, beside the floor: Python starting and importing the libraries it needs.

    python benchmarks/plan_time.py [--repeat 9] [--json OUT]

Runs are interleaved, so that a busy machine slows all alike; read the ratio, not the seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOOR = [sys.executable, "-c", "import argparse, dataclasses, json, yaml, jsonschema"]


def seconds(command: list[str]) -> float:
    """Wall-clock time of one run of `command`."""
    start = time.perf_counter()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", metavar="OUT")
    arguments = parser.parse_args()
    commands = {"floor: python + yaml + jsonschema": FLOOR}
    for spec in sorted((ROOT / "plans").glob("*/spec.yaml")):
        commands[spec.parent.name] = [
            sys.executable,
            "-m",
            "titan_planner.cli",
            "compile",
            str(spec),
            "-o",
            "/dev/null",
        ]
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(arguments.repeat):
        for name, command in commands.items():
            times[name].append(seconds(command))
    floor = statistics.median(times["floor: python + yaml + jsonschema"])
    rows = [
        {
            "name": name,
            "median_s": round(statistics.median(taken), 3),
            "min_s": round(min(taken), 3),
            "max_s": round(max(taken), 3),
            "ratio_to_floor": round(statistics.median(taken) / floor, 2),
        }
        for name, taken in times.items()
    ]
    print(f"{'compile (whole process)':36} {'median':>8} {'min':>8} {'max':>8} {'x floor':>8}")
    for row in rows:
        print(
            f"{row['name']:36} {row['median_s']:8.3f} {row['min_s']:8.3f} {row['max_s']:8.3f} {row['ratio_to_floor']:8.2f}"
        )
    if arguments.json:
        record = {
            "benchmark": "plan_time",
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "titan": version("titan-planner"),
            "repeat": arguments.repeat,
            "rows": rows,
        }
        Path(arguments.json).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
