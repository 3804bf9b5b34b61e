"""Merges the metrics of all replicas. Every series gets the label `replica`."""

import re
from collections.abc import Mapping

SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?( .*)")


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Merge Prometheus texts by replica. The format requires that all series of a metric stay together."""
    families: dict[str, list[str]] = {}
    for replica, text in sorted(texts.items()):
        known, family = set(families), ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                lines = families.setdefault(family, [])
                if family not in known:
                    lines.append(line)
            elif match := SAMPLE.fullmatch(line):
                name, labels, value = match.groups()
                label = f'replica="{replica}"' + (f",{labels}" if labels else "")
                families.setdefault(family or name, []).append(f"{name}{{{label}}}{value}")
    return "\n".join(line for lines in families.values() for line in lines) + "\n"
