"""`llog verify`: reads everything, to know that it can be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from llog.cli.common import Invocation, json_option, note, partitions_of, print_json, print_table, progress, with_log
from llog.units import format_size

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.partition.log import Log
    from llog.partition.verify import OrphanCounts, VerifyReport


@click.command(short_help="Read every record and check that nothing is damaged or missing.")
@click.argument("topic", required=False)
@click.option("--partition", type=int, help="Only this partition of TOPIC.")
@click.option(
    "--orphans", "with_orphans", is_flag=True, help="Count blobs that nothing names, too: lists the whole store."
)
@json_option
@click.pass_obj
def verify(invocation: Invocation, topic: str | None, partition: int | None, with_orphans: bool, as_json: bool) -> None:
    """Read every record of TOPIC, or of all topics, and check index, checksums and counts.

    It may run beside everything else, and changes nothing. Damage is told with its offsets and the blob or file it lies in;
    leftovers that the next `llog collect` removes are told and do no harm. Exit code 1 if there is damage.
    """
    reports, orphans = with_log(
        invocation, lambda log, settings: _verified(log, settings, topic, partition, with_orphans)
    )
    if as_json:
        print_json(
            {
                "healthy": all(report.healthy for report in reports),
                "partitions": [{**msgspec.structs.asdict(report), "healthy": report.healthy} for report in reports],
                "orphans": orphans,
            }
        )
    else:
        _show(reports, orphans)
    if not all(report.healthy for report in reports):
        click.get_current_context().exit(1)


async def _verified(
    log: Log, _: Settings, topic: str | None, partition: int | None, with_orphans: bool
) -> tuple[list[VerifyReport], OrphanCounts | None]:
    from llog.engines.routing import EngineReader
    from llog.engines.verify import verify as verify_partition
    from llog.partition.verify import orphans

    tps = await partitions_of(log, topic, partition)
    reader = EngineReader(log)
    bounds = [await reader.bounds(tp) for tp in tps]
    total = sum(each.next_offset - each.log_start_offset for each in bounds)
    reports: list[VerifyReport] = []
    with progress("records verified", total=total) as bar:
        before = 0
        for tp in tps:
            reports.append(
                await verify_partition(
                    log,
                    tp,
                    progress=lambda count, before=before: bar.update(bar.task_ids[0], completed=before + count),  # type: ignore[misc]
                )
            )
            before += reports[-1].records
    return reports, await orphans(log) if with_orphans else None


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
            where = f"{report.topic}/{report.partition} offsets {problem.start_offset} to {problem.end_offset}"
            note(f"llog: {where}: {kind}: {problem.detail}")
        if report.problems_left_out:
            note(f"llog: {report.topic}/{report.partition}: {report.problems_left_out} more problems")
    if orphans is not None:
        click.echo(
            f"{orphans.orphans} of {orphans.blobs} blobs are named by nothing ({format_size(orphans.orphan_bytes)})"
        )


def _result(report: VerifyReport) -> str:
    return "ok" if report.healthy else "DAMAGED"
