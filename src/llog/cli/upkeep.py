"""`llog compact`, `llog retain` and `llog collect`: the upkeep of a log.

All of them may run beside writers, readers and each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from llog.base.units import format_size
from llog.cli.common import (
    DURATION,
    Invocation,
    json_option,
    note,
    partitions_of,
    print_json,
    print_table,
    progress,
    with_log,
)
from llog.errors import InvalidArgument, LlogError

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.engines.object.collector import CollectionResult
    from llog.engines.object.compaction.compactor import CompactionResult
    from llog.log.engine import CleanResult, RetentionResult
    from llog.log.log import Log
    from llog.model import TopicPartition

    _CompactResults = tuple[list[CompactionResult], dict[TopicPartition, CleanResult | LlogError]]

_PASSES_MAX = 10_000


@click.command(short_help="Join small ranges of records into few large blobs.")
@click.argument("topic", required=False)
@click.option("--partition", type=int, help="The partition of TOPIC to compact.  [default: all of them]")
@json_option
@click.pass_obj
def compact(invocation: Invocation, topic: str | None, partition: int | None, as_json: bool) -> None:
    """Compact TOPIC, or all topics, until no compaction is worthwhile any more.

    For object topics, this joins small ranges of records into large blobs. Offsets and records do not change; reads get
    quicker, and `llog collect` can delete the small blobs afterwards. Small blobs of earlier compactions are merged.
    The newest append of a partition is left out, and so are partitions that another compactor has claimed.

    For disk and rocksdb topics with --cleanup compact, this is key compaction: the newest record of each key stays.
    Without TOPIC, partitions with little to remove are left out. A topic that another process owns is compacted by its
    owner.

    Exit code 1 if a partition failed or is damaged.
    """

    async def compact_all(log: Log, settings: Settings) -> _CompactResults:
        from llog.engines.upkeep import clean_all
        from llog.log.catalog import Catalog
        from llog.log.records import Cleanup

        with_owners = {name for name, each in log.engines.items() if each.has_owner}
        owned = {each.name: each for each in await Catalog(log).topics() if each.engine in with_owners}
        tps = [tp for tp in await partitions_of(log, topic, partition) if tp.topic not in owned]
        if topic in owned:
            engine = owned[topic].engine
            if owned[topic].cleanup is not Cleanup.COMPACT:
                raise InvalidArgument(
                    f"topic {topic!r} is of engine {engine!r} and keeps all records of a key: there is nothing to "
                    "compact"
                )
            if partition is not None:
                raise InvalidArgument(
                    f"--partition is for topics of engine 'object', and topic {topic!r} is of engine {engine!r}: leave "
                    "--partition out to compact all of it"
                )
        return await _compact_object_topics(log, settings, tps), await clean_all(log, topic=topic)

    runs, cleaned = with_log(invocation, compact_all)
    done = {
        tp: each for tp, each in cleaned.items() if not isinstance(each, LlogError) and (each.segments or each.removed)
    }
    if as_json:
        keys = [{"topic": tp.topic, "partition": tp.partition, **msgspec.structs.asdict(r)} for tp, r in done.items()]
        print_json([*(_as_dict(each) for each in runs), *keys])
    if not as_json and runs:
        columns = ["TOPIC", "PARTITION", "OFFSETS", "RECORDS", "ENTRIES", "READ", "WRITTEN", "MERGED"]
        print_table(columns, [_row(each) for each in runs], numbers=columns[1:])
    if not as_json and done:
        columns = ["TOPIC", "PARTITION", "THROUGH", "RECORDS REMOVED", "SEGMENTS", "BEFORE", "AFTER"]
        rows = [
            [*tp, r.through, r.removed, r.segments, format_size(r.bytes_before), format_size(r.bytes_after)]
            for tp, r in done.items()
        ]
        print_table(columns, rows, numbers=columns[1:])
    if not as_json and not runs and not done:
        note("nothing to compact")
    failures = [
        f"{each.topic}/{each.partition}: {what}" for each in runs for what in (*each.damaged, each.error) if what
    ]
    failures += [f"{tp}: {each}" for tp, each in cleaned.items() if isinstance(each, LlogError)]
    for failure in failures:
        note(f"llog: {failure}")
    if failures:
        click.get_current_context().exit(1)


async def _compact_object_topics(log: Log, settings: Settings, left: list[TopicPartition]) -> list[CompactionResult]:
    """Compact these partitions until nothing is left to do; return every compaction that did something or failed."""
    from llog.engines.object.compaction.compactor import Compactor
    from llog.log.opening import compactor_options

    compactor = Compactor(log, compactor_options(settings))
    runs: list[CompactionResult] = []
    with progress("partitions to compact", total=len(left)) as bar:
        for _ in range(_PASSES_MAX):
            results = await compactor.compact_many(left, merge_all=True)
            progressed = [each.end_offset is not None or each.merges > 0 for each in results]
            runs += [each for each, done in zip(results, progressed, strict=True) if done or each.damaged or each.error]
            before = len(left)
            left = [tp for tp, each, done in zip(left, results, progressed, strict=True) if done and not each.error]
            bar.advance(bar.task_ids[0], before - len(left))
            if not left:
                break
    return runs


@click.command(short_help="Remove records beyond the retention of their topics.")
@json_option
@click.pass_obj
def retain(invocation: Invocation, as_json: bool) -> None:
    """Remove the records that are beyond the time or size limit of their topic.

    Retention removes whole index entries or segments, so a little more than the limit may stay. `llog collect` frees
    the space of object topics. Topics without limits are left alone (see `llog topics set-retention`). If a broker
    owns a disk or rocksdb topic, only that broker can remove its records. Exit code 1 if a partition failed.
    """

    async def apply_retention(log: Log, _: Settings) -> dict[TopicPartition, RetentionResult | LlogError]:
        from llog.engines.routing import EngineAppender
        from llog.engines.upkeep import retain_all

        return await retain_all(log, EngineAppender(log))

    results = with_log(invocation, apply_retention)
    trimmed = {tp: each for tp, each in results.items() if not isinstance(each, LlogError)}
    if as_json:
        print_json(
            [{"topic": tp.topic, "partition": tp.partition, **msgspec.structs.asdict(r)} for tp, r in trimmed.items()]
        )
    else:
        columns = ["TOPIC", "PARTITION", "LOG START", "RECORDS DROPPED", "BYTES DROPPED"]
        rows = [[tp.topic, tp.partition, r.new_start, r.records, format_size(r.bytes)] for tp, r in trimmed.items()]
        print_table(columns, rows, numbers=columns[1:])
    failed = {tp: each for tp, each in results.items() if isinstance(each, LlogError)}
    for tp, error in failed.items():
        note(f"llog: {tp}: {error}")
    if failed:
        click.get_current_context().exit(1)


_PINS_MS_MAX = 600_000
"""How long a collection waits for pins: longer than the pin of a dead reader lasts."""


@click.command(short_help="Delete unreferenced blobs.")
@click.option(
    "--grace",
    type=DURATION,
    help="How old a blob must be to be deleted, e.g. 1h; longer than any append or compaction takes "
    "(LLOG_COLLECT_GRACE_MS).  [default: 1h]",
)
@json_option
@click.pass_obj
def collect(invocation: Invocation, grace: int | None, as_json: bool) -> None:
    """Delete the blobs that nothing refers to: compacted, trimmed, of deleted topics, or left behind by a crash.

    A short grace period is safe, but may force slow writers to upload twice. Pins keep the blobs of snapshots in use.
    While the index of a partition has a gap, blobs that could fill it are kept regardless of their age: see `llog
    repair index`.
    """

    async def collect_blobs(log: Log, settings: Settings) -> CollectionResult:
        from llog.engines.object.collector import Collector
        from llog.log.opening import collector_options

        options = collector_options(settings)
        if grace is not None:
            options = msgspec.structs.replace(options, grace_ms=grace)
        collector = Collector(log, options)
        result = await collector.collect_once()
        if not result.waiting:
            return result
        # The waiting blobs can go once the present pins are gone, whatever pins come later. Only this collector knows
        # which pins those are.
        held, give_up = await _living_pins(log), log.runtime.now_ms() + _PINS_MS_MAX
        while held & await _living_pins(log) and log.runtime.now_ms() < give_up:
            await log.runtime.sleep(1.0)
        again = await collector.collect_once()
        return msgspec.structs.replace(
            again, deleted=result.deleted + again.deleted, deleted_bytes=result.deleted_bytes + again.deleted_bytes
        )

    result = with_log(invocation, collect_blobs)
    if result.warning is not None:
        note(f"llog: {result.warning}")
    if as_json:
        print_json(result)
        return
    click.echo(
        f"deleted {result.deleted} blobs ({format_size(result.deleted_bytes)}) of {result.listed}; "
        f"{result.referenced} old blobs are in use, {result.waiting} wait for readers"
    )


async def _living_pins(log: Log) -> set[str]:
    from llog.log.pins import alive_pins

    return {pin_id for pin_id, _ in await alive_pins(log)}


def _row(run: CompactionResult) -> list[object]:
    offsets = "" if run.end_offset is None else f"{run.start_offset}-{run.end_offset}"
    sizes = [format_size(run.bytes_read), format_size(run.bytes_written)]
    return [run.topic, run.partition, offsets, run.records, run.entries, *sizes, run.merged_entries]


def _as_dict(run: CompactionResult) -> dict[str, object]:
    return {**msgspec.structs.asdict(run), "error": None if run.error is None else str(run.error)}
