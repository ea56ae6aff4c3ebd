"""`llog demo`: takes a stream through all stages of the log, with a count at every stage."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from llog.base.units import format_size
from llog.cli.common import note, progress
from llog.config import Settings
from llog.errors import InvalidArgument, LlogError, MissingExtra, SparkFailed

if TYPE_CHECKING:
    import numpy as np
    from pyspark.sql import SparkSession

    from llog.log.findings import VerifyReport
    from llog.model import Record

PARTITIONS: Final = 6
EVENTS: Final = "events"
SALES: Final = "sales-by-minute"
SALES_PARTITIONS: Final = 2
_CLOCK: Final = "clock"
_PINGS: Final = "pings"
_PING_COUNT: Final = 100
_APPENDS: Final = 30
_USERS: Final = 20_000
_HOURS: Final = 2
_LATE_SHARE: Final = 0.03
_LATE_MS_MAX: Final = 8 * 60_000
_WATERMARK: Final = "30 minutes"
"""Longer than any event is late, plus the distance between partitions that are read in parallel: none is dropped."""
_PRODUCTS: Final = (
    ("espresso machine", 42_900),
    ("grinder", 17_900),
    ("kettle", 5_900),
    ("beans 1 kg", 2_190),
    ("filters", 690),
)


_COLUMNS: Final = "{:<7}  {:>11}  {:<15}  {:>7}  {}"
"""The widths are fixed because a row is printed before the next one is known."""
_HEADER: Final = _COLUMNS.format("STAGE", "RECORDS", "COUNT", "SECONDS", "WHAT HAPPENED")


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    records: int
    seconds: float
    what: str
    """A description of what was done, for the table."""
    expected: int | None = None
    """The number of records that there must be; None if there is nothing to compare with."""

    @property
    def agrees(self) -> bool:
        return self.expected is None or self.expected == self.records


@click.command(short_help="Take a stream of events through all stages of the log.")
@click.option(
    "--events", type=click.IntRange(min=1000), default=300_000, show_default=True, help="The number of events."
)
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="A new directory to keep log, checkpoint and table in.  [default: a temporary one, removed at the end]",
)
def demo(events: int, directory: Path | None) -> None:
    """Take a stream of a shop's events through all stages, checking at each that no record is lost or duplicated.

    The demo produces events with skewed keys, some of them late, and reads them with a plain consumer. A Spark stream
    sums them up by minute and writes the sums back into the log exactly once. Then the log is compacted, exported to an
    Iceberg table and queried with DuckDB. The demo needs no server and touches no other log. Exit code 1 if a count
    does not agree.
    """
    for module, extra in (("pyspark", "spark"), ("pyiceberg", "lake")):
        if find_spec(module) is None:
            raise MissingExtra(
                f'the demo needs {module}, which is not installed: pip install "leaderless-log[{extra}]"'
            )
    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise InvalidArgument(f"--dir {directory} is not empty: name a new directory")
    with _demo_directory(directory) as root:
        began = time.monotonic()
        agrees = _run(root, events)
        seconds = time.monotonic() - began
    if agrees:
        click.echo(f"all counts agree; {seconds:.0f} s in all")
    else:
        note("llog: counts do not agree: records were lost or duplicated, see the table")
    if directory is not None:
        note(f"the log is kept, try: llog --data-dir {root / 'log'} topics list")
    if not agrees:
        click.get_current_context().exit(1)


@contextmanager
def _demo_directory(directory: Path | None) -> Iterator[Path]:
    """Create the directory, or a temporary one that is removed at the end; yield its absolute path."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="llog-demo-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)


def _run(root: Path, events: int) -> bool:
    """Run all stages, print each as it ends, and return whether all counts agree."""
    settings = Settings(data_dir=str(root / "log"))
    stages: list[Stage] = []

    def stage(name: str, work: Callable[[], Stage]) -> None:
        with progress(name):
            stages.append(work())
        click.echo(_row(stages[-1]))

    click.echo(_HEADER)

    stage("producing", lambda: _produce(settings, events))
    stage("consuming", lambda: _consume(settings, events))
    stage("measuring latency", lambda: _ping(settings))
    started = time.monotonic()
    with progress("starting Spark"):
        from llog.spark.jobs.tasks import in_one_line
        from llog.spark.session import spark_session

        conf = {"spark.sql.shuffle.partitions": "2", "spark.log.level": "ERROR"}
        spark = spark_session("llog demo", master="local[*,3]", conf=conf, fast_start=True, settings=settings)
    spark_seconds = time.monotonic() - started
    try:
        stage("streaming", lambda: _aggregate(spark, settings, root, events, spark_seconds))
        stage("compacting", lambda: _compact(spark, settings, events))
        stage("exporting", lambda: _export(spark, settings, root, events))
    except LlogError:
        raise
    except Exception as error:  # an error of Spark, with stack traces in two languages
        raise SparkFailed(f"the demo ended in Spark, after {len(stages)} stages: {in_one_line(error)}") from error
    finally:
        spark.stop()
    if find_spec("duckdb") is None:
        note("DuckDB is not installed, so the table is not queried: pip install duckdb")
    else:
        stage("querying", lambda: _query(root, events))
    return all(stage.agrees for stage in stages)


def _row(stage: Stage) -> str:
    count = "" if stage.expected is None else ("agrees" if stage.agrees else f"NOT {stage.expected:,}")
    return _COLUMNS.format(stage.name, f"{stage.records:,}", count, f"{stage.seconds:.1f}", stage.what)


def _produce(settings: Settings, events: int) -> Stage:
    import numpy as np

    from llog.api.leaderless import LeaderlessLogWriter, SharedAppendGroup

    random = np.random.default_rng(7)
    now_ms = int(time.time() * 1000)
    begin_ms = (now_ms - _HOURS * 3_600_000) // 60_000 * 60_000
    latencies: list[float] = []
    size = 0
    began = time.monotonic()
    with LeaderlessLogWriter(settings) as writer:
        writer.create_topic(EVENTS, PARTITIONS)
        for number in range(_APPENDS):
            first, last = (events * part // _APPENDS for part in (number, number + 1))
            by_partition = _events(random, begin_ms, first, last, events)
            size += sum(len(record.payload or b"") for records in by_partition.values() for record in records)
            groups = [
                SharedAppendGroup(topic=EVENTS, partition=partition, payloads=records)
                for partition, records in by_partition.items()
            ]
            appending = time.monotonic()
            writer.append_shared(groups)
            latencies.append(time.monotonic() - appending)
    what = f"{format_size(size)} of JSON in {_APPENDS} appends to {PARTITIONS} partitions, {_quantiles(latencies)} each"
    return Stage(name="produce", records=events, seconds=time.monotonic() - began, what=what)


def _events(random: np.random.Generator, begin_ms: int, first: int, last: int, events: int) -> dict[int, list[Record]]:
    """Return events `first` to `last` by partition, in the order of their arrival.

    A few users cause most of the events, and some events arrive minutes late.
    """
    import numpy as np

    from llog.model import Record, partition_for_key

    count = last - first
    users = random.zipf(1.3, count) % _USERS
    late = (random.random(count) < _LATE_SHARE) * random.integers(60_000, _LATE_MS_MAX, count)
    times = begin_ms + np.arange(first, last) * (_HOURS * 3_600_000) // events - late
    bought = random.random(count) < 0.2
    products = random.integers(0, len(_PRODUCTS), count)
    encoder = msgspec.json.Encoder()
    by_partition: dict[int, list[Record]] = {}
    rows = zip(users.tolist(), times.tolist(), bought.tolist(), products.tolist(), strict=True)
    for number, (user, at_ms, is_order, product) in enumerate(rows, first):
        key = b"user-%d" % user
        name, cents = _PRODUCTS[product]
        event = {"id": number, "kind": "order" if is_order else "view", "user": user, "product": name}
        event |= {"cents": cents if is_order else 0}
        record = Record(payload=encoder.encode(event), key=key, timestamp=max(at_ms, begin_ms))
        by_partition.setdefault(partition_for_key(key, PARTITIONS), []).append(record)
    return by_partition


def _consume(settings: Settings, events: int) -> Stage:
    from llog.api.leaderless import LeaderlessLogReader

    began = time.monotonic()
    ids = bytearray(events)
    records = 0
    decoder = msgspec.json.Decoder(_EventId)
    with LeaderlessLogReader(settings) as reader:
        for partition in range(PARTITIONS):
            for record in reader.iter_from(EVENTS, partition, 1):
                ids[decoder.decode(record.payload or b"").id] = 1
                records += 1
    seconds = time.monotonic() - began
    what = f"{records / seconds:,.0f} records a second, decoded one by one; {sum(ids):,} different ids"
    return Stage(name="consume", records=min(records, sum(ids)), seconds=seconds, what=what, expected=events)


class _EventId(msgspec.Struct):
    id: int


def _ping(settings: Settings) -> Stage:
    """Measure the time from the call of an append to the end of its record's read, one record at a time."""
    from llog.api.leaderless import LeaderlessLogReader, LeaderlessLogWriter, SharedAppendGroup

    began = time.monotonic()
    latencies, read = [], 0
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        writer.create_topic(_PINGS)
        for number in range(_PING_COUNT):
            sent = time.monotonic()
            writer.append_shared([SharedAppendGroup(topic=_PINGS, partition=0, payloads=[str(number)])])
            read += reader.read_offset(_PINGS, 0, number + 1).payload == str(number).encode()
            latencies.append(time.monotonic() - sent)
    what = f"append, fsync and read of a single record: {_quantiles(latencies)}"
    return Stage(name="latency", records=read, seconds=time.monotonic() - began, what=what, expected=_PING_COUNT)


def _aggregate(spark: SparkSession, settings: Settings, root: Path, events: int, spark_seconds: float) -> Stage:
    """Stream the events into sums by minute.

    Every event is in exactly one sum, so the counts of all sums add up to the number of events: they add up to less if
    an event was lost, and to more if one was duplicated.
    """
    from llog.api.leaderless import LeaderlessLogWriter, SharedAppendGroup
    from llog.model import Record

    began = time.monotonic()
    with LeaderlessLogWriter(settings) as writer:
        writer.create_topic(_CLOCK)
        _stream(spark, settings, root, events)
        # A sum is written once the watermark has passed its minute. A record with a later time, in a topic of its own,
        # completes the last sums.
        tick = Record(payload=None, timestamp=int(time.time() * 1000) + _HOURS * 3_600_000)
        writer.append_shared([SharedAppendGroup(topic=_CLOCK, partition=0, payloads=[tick])])
        _stream(spark, settings, root, events)
    counted, sums = _read_sums(settings)
    what = (
        f"{sums:,} sums by minute into {SALES}, by a query that was stopped and restarted (Spark took "
        f"{spark_seconds:.1f} s to start)"
    )
    return Stage(name="stream", records=counted, seconds=time.monotonic() - began, what=what, expected=events)


def _stream(spark: SparkSession, settings: Settings, root: Path, events: int) -> None:
    """Process all present events in a few batches and stop; another call continues from the checkpoint."""
    from pyspark.sql import functions as f

    from llog.spark.streams import run_stream

    stores = {"meta": settings.meta, "blobs": settings.blobs}
    event = f.from_json(f.col("value").cast("string"), "kind string, cents bigint").alias("event")
    sums = (
        spark.readStream.format("llog")
        .options(**stores, subscribe=f"{EVENTS},{_CLOCK}", startingOffsets="earliest")
        .option("maxOffsetsPerTrigger", -(-events // 3))
        .load()
        .select("timestamp", event)
        .withWatermark("timestamp", _WATERMARK)
        .groupBy(f.window("timestamp", "1 minute"), "event.kind")
        .agg(f.count("*").alias("events"), f.sum("event.cents").alias("cents"))
    )
    minute = f.date_format("window.start", "yyyy-MM-dd HH:mm").alias("minute")
    writing = (
        sums.select(minute, "kind", "events", "cents")
        .select(f.concat_ws(" ", "minute", "kind").alias("key"), f.to_json(f.struct("*")).alias("value"))
        .writeStream.format("llog")
        .options(
            **stores, topic=SALES, createTopicPartitions=SALES_PARTITIONS, checkpointLocation=str(root / "checkpoint")
        )
        .outputMode("append")
        .trigger(availableNow=True)
    )
    run_stream(writing.start)


def _read_sums(settings: Settings) -> tuple[int, int]:
    """Return the number of events that the sums count, and the number of sums."""
    from llog.api.leaderless import LeaderlessLogReader

    decoder = msgspec.json.Decoder(_Sum)
    with LeaderlessLogReader(settings) as reader:
        sums = [
            decoder.decode(record.payload or b"")
            for partition in range(SALES_PARTITIONS)
            for record in reader.iter_from(SALES, partition, 1)
        ]
    return sum(each.events for each in sums), len(sums)


class _Sum(msgspec.Struct):
    events: int


def _compact(spark: SparkSession, settings: Settings, events: int) -> Stage:
    """Compact, and then verify every record of the events."""
    from llog.engines.object.verify import verify
    from llog.log.log import Log
    from llog.model import TopicPartition
    from llog.spark.jobs.compact import compact_lagging
    from llog.spark.process import run

    began = time.monotonic()
    total = compact_lagging(spark, settings).total

    async def verify_events(log: Log) -> list[VerifyReport]:
        return [await verify(log, TopicPartition(EVENTS, partition)) for partition in range(PARTITIONS)]

    reports = run(settings, verify_events)
    pieces = sum(each.pieces for each in reports)
    readable = sum(each.records for each in reports if each.healthy)
    what = (
        f"{format_size(total.bytes_read)} in {total.blob_reads} reads to {total.runs} blobs; {EVENTS} is in "
        f"{pieces} pieces now"
    )
    return Stage(name="compact", records=readable, seconds=time.monotonic() - began, what=what, expected=events)


def _export(spark: SparkSession, settings: Settings, root: Path, events: int) -> Stage:
    from llog.spark.jobs.lake.decoder import json_decoding
    from llog.spark.jobs.lake.export import ExportOptions, export
    from llog.spark.jobs.lake.topic_table import in_spark

    decoding = json_decoding("id bigint, kind string, user bigint, product string, cents bigint")
    options = ExportOptions(topic=EVENTS, format="iceberg", to=str(root / "lake"), name=EVENTS, decoding=decoding)
    done = export(settings, options, in_spark(spark))
    what = f"an Iceberg table of {done.files} files, {format_size(done.bytes)} of Parquet, in {done.commits} commit(s)"
    return Stage(name="export", records=done.records, seconds=done.seconds, what=what, expected=events)


def _query(root: Path, events: int) -> Stage:
    import duckdb

    from llog.spark.jobs.lake.iceberg import read_table

    began = time.monotonic()
    table = read_table(root / "lake", EVENTS)
    with duckdb.connect() as database:
        database.register("events", table)
        (ids,) = database.execute("SELECT count(DISTINCT id) FROM events").fetchone() or (0,)
        (rows,) = database.execute("SELECT count(*) FROM events").fetchone() or (0,)
        product, cents = database.execute(
            "SELECT product, sum(cents) FROM events WHERE kind = 'order' GROUP BY product ORDER BY 2 DESC LIMIT 1"
        ).fetchone() or ("nothing", 0)
    what = f"DuckDB on the table: {ids:,} different ids, best seller {product} (${cents / 100:,.0f})"
    # Duplicated rows must not make up for lost ones.
    records = rows if ids == rows else min(ids, rows)
    return Stage(name="query", records=records, seconds=time.monotonic() - began, what=what, expected=events)


def _quantiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    middle, high = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return f"p50 {middle * 1000:.1f} ms, p99 {high * 1000:.1f} ms"
