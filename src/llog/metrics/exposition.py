"""Both forms of the answer to `GET /metrics`, JSON and the Prometheus text format, and the choice between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from llog.metrics.families import Sample

PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
_TEXT_TYPES: Final = ("text/plain", "application/openmetrics-text")
_JSON_TYPES: Final = ("application/json", "application/*", "*/*")
_ACCEPT_BYTES_MAX: Final = 2000


class MetricReport(NamedTuple):
    """What a process exports at one moment: sections, which only the JSON answer has, and samples."""

    sections: dict[str, Any]
    samples: Sequence[Sample]


def as_json(samples: Iterable[Sample]) -> dict[str, object]:
    """Return the samples by name: a number, or a list of numbers with their labels."""
    numbers: dict[str, object] = {}
    for sample in samples:
        name = sample.family.name + sample.suffix
        if not sample.labels:
            numbers[name] = sample.value
            continue
        labelled = numbers.setdefault(name, [])
        assert isinstance(labelled, list)
        labelled.append({**dict(sample.labels), "value": sample.value})
    return numbers


def as_prometheus(samples: Iterable[Sample]) -> str:
    """Return the samples in the text format, which wants those of one name together."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.family.name, []).append(sample)
    lines = []
    for name, samples_of_name in families.items():
        family = samples_of_name[0].family
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for sample in samples_of_name:
            labels = ",".join(f'{label}="{_escape(value)}"' for label, value in sample.labels)
            lines.append(f"{name}{sample.suffix}{f'{{{labels}}}' if labels else ''} {sample.value}")
    return "\n".join([*lines, ""])


def prefers_prometheus(accept: str | None) -> bool:
    """Return whether a client with this Accept header wants text rather than JSON.

    Prometheus names its formats and takes anything else at a low weight. A client that takes anything, or JSON as
    readily as text, gets JSON.
    """
    weights = {"text": 0.0, "json": 0.0}
    for item in (accept or "")[:_ACCEPT_BYTES_MAX].lower().split(","):
        media_type, *parameters = (part.strip() for part in item.split(";"))
        weight = _weight(parameters)
        if media_type in _TEXT_TYPES:
            weights["text"] = max(weights["text"], weight)
        elif media_type in _JSON_TYPES:
            weights["json"] = max(weights["json"], weight)
    return weights["text"] > weights["json"]


def _weight(parameters: Iterable[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
