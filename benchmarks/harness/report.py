"""Benchmark results. They are printed as a table and, with `--json FILE`, also written to a JSON file."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FIELDS = ("name", "value", "unit", "peer", "goal", "met")


@dataclass(frozen=True)
class Record:
    """One measured value, with its goal and the peer's value."""

    name: str
    value: float
    unit: str
    peer: str = ""
    goal: float | None = None
    at_most: bool = False  # the goal is an upper bound

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--json`. The description is usually the script's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    return parser


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def report(records: Sequence[Record], path: Path | None) -> None:
    """Print the records as a table. Write them as JSON if `path` is set."""
    width = max(len(record.name) for record in records)
    print(f"\n{'':{width}}  {'value':>10}  {'goal':>6}  met   unit")
    for record in records:
        goal = "" if record.goal is None else f"{'<= ' if record.at_most else ''}{record.goal:g}"
        met = {None: "", True: "yes", False: "NO"}[record.met]
        unit = f"{record.unit}, against {record.peer}" if record.peer else record.unit
        print(f"{record.name:{width}}  {record.value:10.3f}  {goal:>6}  {met:4}  {unit}")
    if path is not None:
        rows = [{name: getattr(record, name) for name in FIELDS} for record in records]
        path.write_text(json.dumps(rows, indent=2) + "\n")
