"""`llog pipeline stats`: statistics of a log as tables, Parquet files and charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from llog.base.units import format_size
from llog.cli.common import Invocation, json_option, note, print_json, print_table, progress, with_log
from llog.cli.pipeline.spark import open_session, spark_options
from llog.errors import InvalidArgument

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.spark.jobs.stats.stats import KeyCount, Stats

_PARTITIONS_SHOWN = 20
_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command(short_help="Show sizes, rates, keys, skew, lag and an S3 bill.")
@click.argument("topic", required=False)
@click.option("--to", metavar="DIR", type=_DIRECTORY, help="Write the figures to a new Parquet file in this directory.")
@click.option("--plot", metavar="DIR", type=_DIRECTORY, help="Draw charts as PNG files in this directory.")
@click.option("--no-keys", is_flag=True, help="Do not count keys. This reads only metadata and needs no Spark.")
@click.option(
    "--price",
    "prices",
    metavar="NAME=DOLLARS",
    multiple=True,
    help="A price for the bill: storage (per GiB and month), put, get or list (per 1,000 requests); repeatable.",
)
@json_option
@spark_options
@click.pass_obj
def stats(
    invocation: Invocation,
    topic: str | None,
    to: Path | None,
    plot: Path | None,
    no_keys: bool,
    prices: tuple[str, ...],
    as_json: bool,
    master: str,
    conf: tuple[str, ...],
) -> None:
    """Show records, bytes, rates, distinct keys, skew, lag and an S3 bill of TOPIC, or of every topic.

    Rates are by append time, from the first to the last record that is kept. The number of distinct keys is
    approximate (about 5 %), and counting reads all records. The bill is an estimate from the index, at the list prices
    of S3 Standard in us-east-1 unless --price is given.

    \b
      llog pipeline stats --no-keys
      llog pipeline stats orders --to stats/ --plot charts/ --price storage=0.021
    """
    from llog.spark.jobs.stats.stats import gather, with_keys

    given = _parse_prices(prices)
    measured = with_log(invocation, lambda log, _: gather(log, topic, prices=given))
    if not no_keys:
        names = [each.topic for each in measured.topics]
        measured = with_keys(measured, _count_keys(invocation.settings(), names, master, conf))
    written = _write_files(measured, to, plot)
    if as_json:
        timelines = {name: timeline.moments() for name, timeline in measured.timelines.items()}
        print_json({**msgspec.structs.asdict(measured), "timelines": timelines})
    else:
        _show(measured)
    for path in written:
        note(f"wrote {path}")


def _count_keys(settings: Settings, topics: Sequence[str], master: str, conf: Sequence[str]) -> list[KeyCount]:
    from llog.spark.jobs.stats.stats import count_distinct_keys
    from llog.spark.jobs.tasks import check_reachable

    check_reachable(settings)
    with progress("counting keys"):
        spark = open_session("llog pipeline stats", master, conf, settings)
        return count_distinct_keys(spark, settings, topics)


def _write_files(measured: Stats, to: Path | None, plot: Path | None) -> list[Path]:
    written = []
    if to is not None:
        from llog.spark.jobs.stats.output import write_parquet

        written.append(write_parquet(measured, to))
    if plot is not None:
        from llog.spark.jobs.stats.charts import draw

        written += draw(measured, plot)
    return written


def _show(measured: Stats) -> None:
    columns = ["TOPIC", "PARTITIONS", "RECORDS", "BYTES", "RECORDS/H", "BYTES/H", "KEYS", "SKEW", "NOT COMPACTED"]
    print_table(
        columns,
        [
            [
                each.topic,
                each.partitions,
                f"{each.records:,}",
                format_size(each.bytes),
                _number(each.records_per_hour),
                None if each.bytes_per_hour is None else format_size(round(each.bytes_per_hour)),
                _number(each.keys),
                None if each.byte_skew is None else f"{each.byte_skew:.2f}",
                f"{each.lag_records:,}",
            ]
            for each in measured.topics
        ],
        numbers=columns[1:],
    )
    click.echo()
    largest = sorted(measured.partitions, key=lambda each: -each.bytes)[:_PARTITIONS_SHOWN]
    columns = ["PARTITION", "RECORDS", "BYTES", "ENTRIES", "KEYS", "NOT COMPACTED", "IN ENTRIES", "OF BYTES"]
    print_table(
        columns,
        [
            [
                f"{each.topic}/{each.partition}",
                f"{each.records:,}",
                format_size(each.bytes),
                each.entries,
                _number(each.keys),
                f"{each.lag_records:,}",
                each.lag_entries,
                format_size(each.lag_bytes),
            ]
            for each in sorted(largest, key=lambda each: (each.topic, each.partition))
        ],
        numbers=columns[1:],
    )
    if len(largest) < len(measured.partitions):
        note(f"the {len(largest)} largest of {len(measured.partitions)} partitions; --json and --to have all of them")
    if measured.groups:
        click.echo()
        columns = ["GROUP", "TOPIC", "PARTITIONS", "LAG"]
        print_table(columns, _group_rows(measured), numbers=columns[2:])
    click.echo()
    columns = ["S3 BILL (ESTIMATE)", "QUANTITY", "PRICE", "PER", "$ A MONTH"]
    rows = [
        [
            line.item,
            f"{line.quantity:,.3f} GiB" if line.item == "storage" else f"{line.quantity:,.0f}",
            f"{line.price:g}",
            line.per,
            f"{line.dollars_month:,.4f}",
        ]
        for line in measured.bill
    ]
    print_table(
        columns,
        [*rows, ["total", "", "", "", f"{measured.dollars_month:,.4f}"]],
        numbers=["QUANTITY", "PRICE", "$ A MONTH"],
    )


def _group_rows(measured: Stats) -> list[list[object]]:
    lags: dict[tuple[str, str], list[int]] = {}
    for each in measured.groups:
        lags.setdefault((each.group, each.topic), []).append(each.lag)
    return [[group, topic, len(each), f"{sum(each):,}"] for (group, topic), each in lags.items()]


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def _parse_prices(prices: Sequence[str]) -> dict[str, float]:
    given = {}
    for each in prices:
        name, _, text = each.partition("=")
        try:
            given[name] = float(text)
        except ValueError:
            raise InvalidArgument(f"--price is {each!r}: write it like storage=0.021") from None
    return given
