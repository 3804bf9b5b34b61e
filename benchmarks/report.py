"""Reports of the benchmarks' figures: a table for people, a JSON file for machines."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """One measured claim. `met` is computed from the value and the goal, never given."""

    name: str
    value: float
    unit: str
    peer: str
    goal: float | None
    at_most: bool = False  # the goal is a limit

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "peer": self.peer,
            "goal": self.goal,
            "met": self.met,
        }


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    return parser


def parse_args(description: str | None) -> argparse.Namespace:
    return make_parser(description).parse_args()


def report(records: list[Record], path: Path | None) -> None:
    """Print the records as a table and, if asked, write them as JSON."""
    width = max(len(record.name) for record in records)
    print(f"\n{'':{width}}  {'value':>10}  {'goal':>6}  met   unit")
    for record in records:
        goal = "" if record.goal is None else f"{'<= ' if record.at_most else ''}{record.goal:g}"
        met = {None: "", True: "yes", False: "NO"}[record.met]
        unit = f"{record.unit}, against {record.peer}" if record.peer else record.unit
        print(f"{record.name:{width}}  {record.value:10.3f}  {goal:>6}  {met:4}  {unit}")
    if path is not None:
        path.write_text(json.dumps([record.as_json() for record in records], indent=2) + "\n")
