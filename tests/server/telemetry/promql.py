"""Checks PromQL expressions against the metrics of a server.

The check infers the labels of each result. It finds unknown metrics, labels and label values, and operands whose labels
never match, which Prometheus accepts silently.
"""

import re
from collections.abc import Mapping
from typing import Any

import promql_parser as promql

Labels = Mapping[str, set[str]]  # label values by label
SAMPLE = re.compile(r"^(\w+)(?:{(.*)})? ", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
TARGET_LABELS = {"instance", "job"}  # Prometheus adds them to each sample
UP: dict[str, Labels] = {"up": {}}  # Prometheus writes this metric for each target


def read_labels(*texts: str) -> dict[str, dict[str, set[str]]]:
    """Return the labels and their values of each metric in the Prometheus text format."""
    metrics: dict[str, dict[str, set[str]]] = {}
    for name, labels in SAMPLE.findall("\n".join(texts)):
        values = metrics.setdefault(name, {})
        for label, value in LABEL.findall(labels):
            values.setdefault(label, set()).add(value)
    return metrics


def check_expression(text: str, metrics: Mapping[str, Labels]) -> set[str]:
    """Return the labels of the expression's result. Raise if it cannot match samples of these metrics."""
    return _infer(promql.parse(text), UP | dict(metrics)) or set()


def _infer(node: Any, metrics: Mapping[str, Labels]) -> set[str] | None:
    """Return the labels of a vector, or None for a number."""
    match node:
        case promql.NumberLiteral():
            return None
        case promql.ParenExpr():
            return _infer(node.expr, metrics)
        case promql.MatrixSelector() | promql.VectorSelector():
            return _check_selector(getattr(node, "vector_selector", node), metrics)
        case promql.Call():
            (labels,) = (each for each in (_infer(each, metrics) for each in node.args) if each is not None)
            is_quantile = node.func.name == "histogram_quantile"
            assert not is_quantile or "le" in labels, "a histogram needs the label `le`"
            return labels - {"le"} if is_quantile else labels
        case promql.AggregateExpr():
            return _aggregate(node, _infer(node.expr, metrics) or set())
    assert isinstance(node, promql.BinaryExpr), f"unsupported expression: {node}"
    left, right = _infer(node.lhs, metrics), _infer(node.rhs, metrics)
    assert left is None or right is None or left == right, f"{left} never match {right}"
    return right if left is None else left


def _aggregate(node: Any, labels: set[str]) -> set[str]:
    if node.modifier is None:
        return labels if str(node.op) in ("topk", "bottomk") else set()
    grouped = set(node.modifier.labels)
    assert grouped <= labels, f"{grouped - labels} are not labels of {node.expr}"
    return labels - grouped if node.modifier.type == promql.AggModifierType.Without else grouped


def _check_selector(selector: Any, metrics: Mapping[str, Labels]) -> set[str]:
    assert selector.name in metrics, f"{selector.name} is not a metric"
    labels = metrics[selector.name]
    for matcher in selector.matchers.matchers:
        assert matcher.name in labels.keys() | TARGET_LABELS, f"{selector.name} has no label {matcher.name}"
        if matcher.name in labels:
            unknown = set(matcher.value.split("|")) - labels[matcher.name]
            assert not unknown, f"{selector.name}: {matcher.name} is never {unknown}"
    return labels.keys() | TARGET_LABELS
