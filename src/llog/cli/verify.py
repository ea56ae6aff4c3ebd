"""`llog verify`: reads every record and checks that it is intact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
import msgspec

from llog.base.units import format_size
from llog.cli.common import Invocation, json_option, note, partitions_of, print_json, print_table, progress, with_log
from llog.errors import LlogError, TopicNotFound

if TYPE_CHECKING:
    from llog.engines.object.verify import OrphanCounts
    from llog.engines.routing import EngineReader
    from llog.log.findings import VerifyReport
    from llog.log.log import Log
    from llog.model import TopicPartition

EXIT_INCOMPLETE: Final = 3


@click.command(short_help="Read every record and check that nothing is damaged or missing.")
@click.argument("topic", required=False)
@click.option("--partition", type=int, help="The partition of TOPIC to check.  [default: all of them]")
@click.option(
    "--orphans", "with_orphans", is_flag=True, help="Also count unreferenced blobs, which lists the whole blob store."
)
@json_option
@click.pass_obj
def verify(invocation: Invocation, topic: str | None, partition: int | None, with_orphans: bool, as_json: bool) -> None:
    """Read every record of TOPIC, or of all topics, and check index, checksums and counts.

    The check changes nothing and may run beside everything else. It reports damage with the offsets and the blob or
    file, and goes on. It also reports leftovers, which are harmless and which the next `llog collect` removes, and
    partitions that it cannot read because another process or machine has them.

    \b
    Exit codes: 0 everything is intact; 1 there is damage; 3 no damage was found, but not everything could be checked.
    """
    reports, orphans = with_log(invocation, lambda log, _: _verify(log, topic, partition, with_orphans))
    if as_json:
        print_json(
            {
                "healthy": all(report.healthy for report in reports),
                "complete": all(report.unchecked is None for report in reports),
                "partitions": [{**msgspec.structs.asdict(report), "healthy": report.healthy} for report in reports],
                "orphans": orphans,
            }
        )
    else:
        _show(reports, orphans)
    if not all(report.healthy for report in reports):
        click.get_current_context().exit(1)
    if any(report.unchecked for report in reports):
        click.get_current_context().exit(EXIT_INCOMPLETE)


async def _verify(
    log: Log, topic: str | None, partition: int | None, with_orphans: bool
) -> tuple[list[VerifyReport], OrphanCounts | None]:
    from llog.engines.object.verify import count_orphans
    from llog.engines.routing import EngineReader
    from llog.engines.verify import EngineVerifier

    tps = await partitions_of(log, topic, partition)
    reader, verifier = EngineReader(log), EngineVerifier(log)
    total = sum([await _record_count(reader, tp) for tp in tps])
    reports: list[VerifyReport] = []
    with progress("records verified", total=total) as bar:
        before = 0
        for tp in tps:
            try:
                report = await verifier.verify(
                    tp,
                    progress=lambda count, before=before: bar.update(bar.task_ids[0], completed=before + count),  # type: ignore[misc]
                )
            except TopicNotFound:
                continue  # deleted meanwhile
            reports.append(report)
            before += report.records
    return reports, await count_orphans(log) if with_orphans else None


async def _record_count(reader: EngineReader, tp: TopicPartition) -> int:
    """Return the number of records to read, for the progress bar; 0 if the bounds cannot be read."""
    try:
        bounds = await reader.bounds(tp)
    except LlogError:
        return 0
    return bounds.next_offset - bounds.log_start_offset


def _show(reports: list[VerifyReport], orphans: OrphanCounts | None) -> None:
    columns = ["TOPIC", "PARTITION", "RECORDS", "BYTES", "PIECES", "RESULT"]
    rows = [
        [each.topic, each.partition, each.records, format_size(each.bytes), each.pieces, _result(each)]
        for each in reports
    ]
    print_table(columns, rows, numbers=columns[1:5])
    for report in reports:
        for problem in report.problems:
            kind = f"{problem.kind}{' (harmless)' if problem.harmless else ''}"
            offsets = f" offsets {problem.start_offset} to {problem.end_offset}" if problem.end_offset else ""
            note(f"llog: {report.topic}/{report.partition}{offsets}: {kind}: {problem.detail}")
        if report.unchecked is not None:
            note(f"llog: {report.topic}/{report.partition}: not checked: {report.unchecked}")
        if report.problems_left_out:
            note(f"llog: {report.topic}/{report.partition}: {report.problems_left_out} more problems")
    if orphans is not None:
        click.echo(f"{orphans.orphans} of {orphans.blobs} blobs are unreferenced ({format_size(orphans.orphan_bytes)})")


def _result(report: VerifyReport) -> str:
    if report.unchecked is not None:
        return "not checked"
    return "ok" if report.healthy else "DAMAGED"
