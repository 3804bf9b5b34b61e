"""The metrics of all replicas in one text: every series gets the label `replica`."""

import re
from collections.abc import Mapping

SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(\{.*\})?( .*)")


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Merge Prometheus texts by replica. The series of a metric stay together, as the format asks."""
    families: dict[str, list[str]] = {}
    described: dict[str, list[str]] = {}
    for replica, text in sorted(texts.items()):
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                if replica == min(texts) or family not in families:
                    described.setdefault(family, []).append(line)
                families.setdefault(family, [])
            elif match := SAMPLE.fullmatch(line):
                families.setdefault(family or match[1], []).append(_label(match, replica))
    lines = (line for family, samples in families.items() for line in (*described.get(family, ()), *samples))
    return "\n".join(lines) + "\n"


def _label(match: "re.Match[str]", replica: str) -> str:
    name, labels, value = match.groups()
    label = f'replica="{replica}"'
    return f"{name}{{{label},{labels[1:]}{value}" if labels else f"{name}{{{label}}}{value}"
