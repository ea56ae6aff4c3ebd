"""`llog check-history`: checks recorded histories of clients against the promises of the log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llog.cli.common import DURATION, json_option, note, print_json, print_table, progress
from llog.cli.verify import EXIT_INCOMPLETE

if TYPE_CHECKING:
    from llog.history.report import HistoryReport, PartitionReport


@click.command(short_help="Check recorded appends and reads against the log's promises.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--clock-skew",
    "clock_skew_ms",
    type=DURATION,
    help="The largest difference between the clocks of the machines that recorded the files. Needed if there are "
    "several machines.",
)
@click.option(
    "--unrecorded-retention",
    is_flag=True,
    help="Accept log starts that were raised by retention. Without it, a log start that no recorded trim explains is "
    "a loss.",
)
@json_option
def check_history(
    files: tuple[Path, ...], clock_skew_ms: int | None, unrecorded_retention: bool, as_json: bool
) -> None:
    """Check FILES, which together hold every append to some partitions and reads of them, with their times.

    For each partition, the check decides whether acknowledged records are at their offsets, unchanged, dense and in
    order (I1, I2), whether none was lost and none appeared twice (I3), whether retries of a producer appended once
    (I8), and whether every read saw the records that were acknowledged before it began, through any broker (I9). Each
    finding names the offsets, the operations and their lines. After the last append, read all partitions to their ends:
    records that were never read cannot be judged. docs/history.md describes the format.

    \b
    Exit codes: 0 nothing is wrong; 1 a promise was broken; 2 a file is not a history; 3 nothing wrong was found, but
    some acknowledged records were never read.
    """
    from llog.history.checker import check_history as run_check

    with progress("bytes checked", total=sum(file.stat().st_size for file in files)) as bar:
        report = run_check(
            files,
            clock_skew_ms=clock_skew_ms,
            unrecorded_retention=unrecorded_retention,
            progress=lambda done: bar.update(bar.task_ids[0], completed=done),
        )
    if as_json:
        print_json({"clean": report.clean, "operations": report.operations, "partitions": report.partitions})
    else:
        _show(report)
    if report.findings:
        click.get_current_context().exit(1)
    if report.unread:
        click.get_current_context().exit(EXIT_INCOMPLETE)


def _show(report: HistoryReport) -> None:
    columns = ["TOPIC", "PARTITION", "OPERATIONS", "ACKNOWLEDGED", "NEVER READ", "UNKNOWN", "RESULT"]
    rows = [
        [each.topic, each.partition, each.operations, each.acknowledged, each.unread, each.unknown, _result(each)]
        for each in report.partitions
    ]
    print_table(columns, rows, numbers=columns[1:6])
    for paragraph in report.paragraphs():
        note(f"llog: {paragraph}")
    click.echo(report.summary())


def _result(report: PartitionReport) -> str:
    if report.findings:
        return "BROKEN"
    return "not all read" if report.unread else "ok"
