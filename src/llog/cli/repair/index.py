"""`llog repair index`: restores lost index entries, on proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llog.cli.common import Invocation, format_time, json_option, note, partitions_of, print_json, print_table, with_log
from llog.errors import InvalidArgument

if TYPE_CHECKING:
    from llog.engines.object.repair.index import OpenGap, RepairPlan
    from llog.log.log import Log


@click.command(short_help="Restore lost index entries that can be proved.")
@click.argument("topic", required=False)
@click.option("--partition", type=int, help="The partition of TOPIC to repair.  [default: all of them]")
@click.option("--apply", is_flag=True, help="Repair; without it, nothing is changed.")
@json_option
@click.pass_obj
def index(invocation: Invocation, topic: str | None, partition: int | None, apply: bool, as_json: bool) -> None:
    """Find gaps in the index of TOPIC, or of all object topics, and restore the entries that belong there.

    An entry is restored only on proof: a compaction's breadcrumb, a compacted blob that names its offsets, or blobs of
    which exactly one choice fits the gap. For other gaps, the candidates are listed. Nothing is deleted, and as long as
    there is a gap, `llog collect` keeps the blobs that could fill it.

    The repair may run beside everything else. Exit code 1 as long as there is a gap.
    """
    plans, put = with_log(invocation, lambda log, _: _plan_and_repair(log, topic, partition, apply))
    is_repaired = (
        apply and put == sum(len(plan.entries) for plan in plans) and not any(plan.open_gaps for plan in plans)
    )
    if as_json:
        print_json({"partitions": plans, "entries_put": put})
    elif not plans:
        click.echo("no index has a gap")
    else:
        _show(plans)
        note(f"{put} index entries were restored" if apply else "nothing was changed: --apply restores these entries")
    if plans and not is_repaired:
        click.get_current_context().exit(1)


async def _plan_and_repair(
    log: Log, topic: str | None, partition: int | None, apply: bool
) -> tuple[list[RepairPlan], int]:
    from llog.engines.object.repair.index import apply_repair, plan_repairs
    from llog.log.catalog import OBJECT, Catalog

    catalog = Catalog(log)
    if topic is not None and (await catalog.get(topic)).engine != OBJECT:
        raise InvalidArgument(f"topic {topic!r} is not of engine {OBJECT!r}: it has no index to repair")
    own = {each.name for each in await catalog.topics(OBJECT)}
    plans = await plan_repairs(log, [tp for tp in await partitions_of(log, topic, partition) if tp.topic in own])
    return plans, sum([await apply_repair(log, plan) for plan in plans]) if apply else 0


def _show(plans: list[RepairPlan]) -> None:
    columns = ["TOPIC", "PARTITION", "FIRST", "LAST", "PROOF", "BLOB"]
    rows = [
        [plan.topic, plan.partition, new.start_offset, new.end_offset, new.proof, new.entry.data_uri]
        for plan in plans
        for new in plan.entries
    ]
    if rows:
        print_table(columns, rows, numbers=columns[1:4])
    for plan in plans:
        for gap in plan.open_gaps:
            _show_open_gap(plan, gap)


def _show_open_gap(plan: RepairPlan, gap: OpenGap) -> None:
    where = f"{plan.topic}/{plan.partition} offsets {gap.start_offset} to {gap.end_offset}"
    click.echo(f"{where} cannot be decided: {gap.reason}")
    for each in gap.candidates:
        body = each.body
        known = "" if body.next_offset is None else f", from offset {body.next_offset} on"
        click.echo(
            f"  {body.msg_count} records{known}, uploaded {format_time(body.append_ms)}: byte {body.body_offset} of "
            f"{each.blob}"
        )
    if gap.candidates_left_out:
        click.echo(f"  and {gap.candidates_left_out} more")
