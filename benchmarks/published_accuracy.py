"""Predict published measurements and print how far off the predictions are.

    python benchmarks/published_accuracy.py --rows DIR [--json OUT] [--plots DIR] [--report OUT] [--calibration [SOURCE=]FILE]

DIR holds YAML files, each a list of rows in the published format. Every row becomes a pinned plan and the program that ran it,
or is listed with the reason why it cannot. A calibration FILE is JSON, GPU name -> efficiency fields; with `SOURCE=` it is used
for the rows of that source only (a file fitted without it), which makes the tables a cross-validation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.published.cases import Efficiencies, case_of  # noqa: E402
from benchmarks.published.report import QUANTITIES, Record, plot, record_of, summarise, text_report  # noqa: E402
from benchmarks.published.rows import Row, read_rows  # noqa: E402
from titan_planner.hardware import GPUS  # noqa: E402
from titan_planner.ir.cluster import Efficiency  # noqa: E402


class BadCalibration(Exception):
    """A calibration file that cannot be used."""


def read_calibration(path: Path) -> Efficiencies:
    """GPU name -> fields of its `Efficiency`. Raises `BadCalibration`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadCalibration(f"{path}: {error}") from None
    known = {field.name for field in fields(Efficiency)}
    if not isinstance(values, dict):
        raise BadCalibration(f"{path} holds no mapping of GPUs")
    for gpu, entry in values.items():
        if gpu not in GPUS:
            raise BadCalibration(f"{path}: there is no GPU `{gpu}`")
        wrong = sorted(set(entry) - known) if isinstance(entry, dict) else [str(entry)[:40]]
        if wrong:
            raise BadCalibration(f"{path}: {gpu}: `{wrong[0]}` is no efficiency")
    return values


def records_of(rows: Sequence[Row], calibrations: Mapping[str, Efficiencies]) -> list[Record]:
    """One record a row, in order. `calibrations` is keyed by source; the empty key is for all others."""
    return [record_of(case_of(row), calibrations.get(row.source, calibrations.get(""))) for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report, write the JSON and the plots."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", required=True, type=Path, metavar="DIR", help="folder of published rows")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write one record a row and a summary")
    parser.add_argument("--report", type=Path, metavar="OUT", help="write the printed report as well")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots of predicted over measured")
    parser.add_argument(
        "--calibration", action="append", default=[], metavar="[SOURCE=]FILE", help="efficiencies to use"
    )
    arguments = parser.parse_args(argv)
    start = time.perf_counter()
    calibrations: dict[str, Efficiencies] = {}
    try:
        for given in arguments.calibration:
            source, separator, path = given.partition("=")
            calibrations[source if separator else ""] = read_calibration(Path(path if separator else given))
        rows = read_rows(arguments.rows)
    except (BadCalibration, OSError) as error:
        print(f"published_accuracy: {error}", file=sys.stderr)
        return 2
    records = records_of(rows, calibrations)
    summary = summarise(records)
    text = text_report(summary, records)
    print(text, end="")
    print(f"\n{time.perf_counter() - start:.1f} s", file=sys.stderr)
    if arguments.report:
        _write(arguments.report, text)
    if arguments.json:
        _write(arguments.json, json.dumps({"summary": summary, "rows": records}, indent=1) + "\n")
    if arguments.plots:
        for quantity in QUANTITIES:
            drawn = plot(records, quantity)
            if drawn is not None:
                _write(arguments.plots / f"published_{quantity}.svg", drawn)
    return 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
