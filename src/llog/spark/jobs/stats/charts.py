"""Draws statistics as PNG charts: records per partition, bytes over time, skew and lag."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from llog.errors import ConfigurationError
from llog.spark.jobs.stats.stats import Stats
from llog.spark.jobs.stats.timeline import Moment
from llog.spark.jobs.tasks import optional_module

_BARS_MAX: Final = 30
_BARS_MIN: Final = 6
"""A chart has room for at least this many bars, so that a single bar does not fill it."""
_TOPICS_MAX: Final = 8
_STEPS_MAX: Final = 128
_LABEL_MAX: Final = 32
_HOUR_MS: Final = 3_600_000
_SIZES: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
_BLUE, _ORANGE, _GREY = "#2b6cb0", "#dd7f28", "#8a8f98"
_COLOURS: Final = (_BLUE, _ORANGE, "#2f9e6e", "#b83280", "#6b46c1", "#c5a614", "#319795", "#c0392b", _GREY)


def draw(measured: Stats, directory: Path) -> list[Path]:
    """Draw four files, with the same names in every run, and return their paths."""
    optional_module("matplotlib", "lake", "--plot")
    paths = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, figure in (
            ("records-per-partition", _records(measured)),
            ("bytes-over-time", _bytes(measured)),
            ("skew", _skew(measured)),
            ("lag", _lag(measured)),
        ):
            path = directory / f"{name}.png"
            figure.savefig(path)
            paths.append(path)
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be written to: {error.strerror or error}") from error
    return paths


def _records(measured: Stats) -> Any:
    parts = sorted(measured.partitions, key=lambda each: -each.records)
    shown = sorted(parts[:_BARS_MAX], key=lambda each: (each.topic, each.partition))
    figure, axes = _figure(_bars_height(len(shown)))
    topics = _by_size(measured)
    colours = [_colour(topics.index(each.topic)) for each in shown]
    _bars(axes, [_label(each.topic, each.partition) for each in shown], [each.records for each in shown], colours)
    _title(axes, "Records per partition", _cut(len(shown), len(parts), "partitions"))
    axes.set_xlabel("records")
    return figure


def _bytes(measured: Stats) -> Any:
    names = [name for name in _by_size(measured) if name in measured.timelines]
    figure, axes = _figure(4.5)
    moments = {name: measured.timelines[name].moments() for name in names}
    starts = sorted({moment.start_ms for each in moments.values() for moment in each})
    width_ms = next((measured.timelines[name].width_ms for name in names), 1000)
    while starts and (starts[-1] - starts[0]) // width_ms >= _STEPS_MAX:
        width_ms *= 2
    _title(axes, "Bytes appended over time", f"by append time, in steps of {_step(width_ms)}")
    if not starts:
        return _nothing(figure, axes, "no records")
    every = range(starts[0] // width_ms * width_ms, starts[-1] + 1, width_ms)
    series = {name: _in_steps(moments[name], every) for name in names[:_TOPICS_MAX]}
    if len(names) > _TOPICS_MAX:
        rest = [_in_steps(moments[name], every) for name in names[_TOPICS_MAX:]]
        series[f"{len(rest)} other topics"] = [sum(column) for column in zip(*rest, strict=True)]
    highest = max(sum(column) for column in zip(*series.values(), strict=True))
    unit, factor = _unit(highest)
    times = [datetime.fromtimestamp(ms / 1000, UTC) for ms in every]
    bottom = [0.0] * len(times)
    for number, (name, values) in enumerate(series.items()):
        heights = [value / factor for value in values]
        axes.bar(
            times,
            heights,
            bottom=bottom,
            width=width_ms / 86_400_000,
            align="edge",
            color=_colour(number),
            linewidth=0,
            label=_short(name),
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    dates = optional_module("matplotlib.dates", "lake", "--plot")
    axes.xaxis.set_major_locator(dates.AutoDateLocator(minticks=3, maxticks=7))
    format_ = "%H:%M:%S" if starts[-1] - starts[0] < _HOUR_MS else "%m-%d %H:%M"
    axes.xaxis.set_major_formatter(dates.DateFormatter(format_, tz=UTC))
    axes.set_ylabel(f"{unit} in {_step(width_ms)}")
    axes.set_xlabel(f"append time, UTC, from {times[0]:%Y-%m-%d} on")
    axes.grid(axis="y", color="#e3e6ea")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def _skew(measured: Stats) -> Any:
    topics = [each for each in measured.topics if each.record_skew is not None and each.byte_skew is not None]
    shown = sorted(topics, key=lambda each: -max(each.record_skew or 0, each.byte_skew or 0))[:_BARS_MAX]
    figure, axes = _figure(_bars_height(2 * len(shown)))
    _title(axes, "Skew of topics", _cut(len(shown), len(topics), "topics", "largest partition by the mean one"))
    if not shown:
        return _nothing(figure, axes, "no records")
    for shift, colour, name, values in (
        (-0.2, _BLUE, "records", [each.record_skew or 0 for each in shown]),
        (0.2, _ORANGE, "bytes", [each.byte_skew or 0 for each in shown]),
    ):
        drawn = axes.barh([row + shift for row in range(len(shown))], values, height=0.38, color=colour, label=name)
        axes.bar_label(drawn, labels=[f"{value:.2f}" for value in values], padding=4, fontsize=8)
    axes.axvline(1, color=_GREY, linestyle="--", linewidth=1, label="even")
    axes.set_yticks(range(len(shown)), [_short(each.topic) for each in shown])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("max / mean")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def _lag(measured: Stats) -> Any:
    by_group: dict[str, int] = {}
    for each in measured.groups:
        name = f"{each.group} · {each.topic}"
        by_group[name] = by_group.get(name, 0) + each.lag
    consumers = sorted(by_group.items(), key=lambda item: -item[1])
    compaction = sorted(measured.partitions, key=lambda each: -each.lag_records)
    shown = min(_BARS_MAX, max(len(consumers), len(compaction)))
    figure, (left, right) = _figure(_bars_height(shown), columns=2)
    top = consumers[:_BARS_MAX]
    _title(left, "Lag of consumer groups", _cut(len(top), len(consumers), "groups", "records yet to read"))
    if top:
        _bars(left, [_short(name) for name, _ in top], [lag for _, lag in top], [_BLUE] * len(top))
        left.set_xlabel("records")
    else:
        _nothing(figure, left, "no groups")
    waiting = compaction[:_BARS_MAX]
    _title(right, "Lag of compaction", _cut(len(waiting), len(compaction), "partitions", "records not compacted"))
    if waiting:
        names = [_label(each.topic, each.partition) for each in waiting]
        _bars(right, names, [each.lag_records for each in waiting], [_ORANGE] * len(waiting))
        right.set_xlabel("records")
    else:
        _nothing(figure, right, "no partitions")
    return figure


def _by_size(measured: Stats) -> list[str]:
    return [each.topic for each in sorted(measured.topics, key=lambda each: -each.bytes)]


def _colour(number: int) -> str:
    """Return the colour of a topic, which is the same in every chart."""
    return _COLOURS[min(number, _TOPICS_MAX)]


def _figure(height: float, columns: int = 1) -> Any:
    """Create a figure without pyplot, whose figures are global and stay in memory."""
    figure = optional_module("matplotlib.figure", "lake", "--plot").Figure(
        figsize=(9 if columns == 1 else 13, height), dpi=120, layout="constrained"
    )
    axes = figure.subplots(1, columns)
    for each in [axes] if columns == 1 else axes:
        each.spines[["top", "right"]].set_visible(False)
        each.set_axisbelow(True)
    return figure, axes


def _bars(axes: Any, labels: Sequence[str], values: Sequence[float], colours: Sequence[str]) -> None:
    rows = range(len(labels))
    drawn = axes.barh(rows, values, height=0.7, color=colours)
    axes.bar_label(drawn, labels=[f"{value:,.0f}" for value in values], padding=4, fontsize=8)
    axes.set_yticks(rows, labels)
    axes.set_ylim(max(len(labels), _BARS_MIN) - 0.4, -0.6)
    axes.margins(x=0.15)
    axes.set_xlim(left=0, right=None if any(values) else 1)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="x", color="#e3e6ea")


def _title(axes: Any, title: str, below: str) -> None:
    axes.set_title(f"{title}\n" if below else title, loc="left", fontweight="bold")
    if below:
        axes.annotate(
            below, (0, 1), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points", fontsize=9, color=_GREY
        )


def _nothing(figure: Any, axes: Any, why: str) -> Any:
    axes.set_axis_off()
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=_GREY)
    return figure


def _in_steps(moments: Sequence[Moment], steps: range) -> list[float]:
    sizes = [0.0] * len(steps)
    for moment in moments:
        sizes[(moment.start_ms - steps.start) // steps.step] += moment.bytes
    return sizes


def _bars_height(bars: int) -> float:
    return max(3.0, 1.5 + 0.28 * bars)


def _cut(shown: int, there_are: int, what: str, meaning: str = "") -> str:
    cut = f"largest {shown} of {there_are:,} {what}" if shown < there_are else ""
    return "; ".join(filter(None, [meaning, cut]))


def _unit(highest: float) -> tuple[str, int]:
    return next((each for each in _SIZES if highest >= each[1]), _SIZES[-1])


def _step(width_ms: int) -> str:
    seconds = width_ms // 1000
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"


def _label(topic: str, partition: int) -> str:
    return f"{_short(topic)}/{partition}"


def _short(name: str) -> str:
    """Return a long name without its middle: the names of related topics differ at their ends."""
    return name if len(name) <= _LABEL_MAX else f"{name[: _LABEL_MAX // 2]}…{name[-(_LABEL_MAX // 2 - 1) :]}"
