"""What every benchmark does with its figures: a table for people, a JSON file for machines."""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """One measured claim. `met` is worked out from the value and the goal, never given."""

    name: str
    value: float
    unit: str
    peer: str
    goal: float | None

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.value >= self.goal


def parse_args(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    return parser.parse_args()


def report(records: list[Record], path: Path | None) -> None:
    """Print the records as a table and, if asked, write them as JSON."""
    width = max(len(record.name) for record in records)
    print(f"\n{'':{width}}  {'value':>10}  {'goal':>6}  met   unit")
    for record in records:
        goal = "" if record.goal is None else f"{record.goal:g}"
        met = {None: "", True: "yes", False: "NO"}[record.met]
        unit = f"{record.unit}, against {record.peer}" if record.peer else record.unit
        print(f"{record.name:{width}}  {record.value:10.3f}  {goal:>6}  {met:4}  {unit}")
    if path is not None:
        path.write_text(json.dumps([asdict(record) | {"met": record.met} for record in records], indent=2) + "\n")
