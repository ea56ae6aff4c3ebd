"""`llog repair clock`: brings back what a clock that was far ahead has set in the future."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llog.base.units import format_size
from llog.cli.common import Invocation, json_option, note, print_json, print_table, shown_time, with_log

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.engines.object.repair.clock import ClockDamage, WrongBounds
    from llog.log.log import Log

_ROWS_MAX = 20


@click.command(short_help="Bring back floors, ceilings and pins that a clock set far in the future.")
@click.option("--apply", is_flag=True, help="Do it; without this, nothing is changed.")
@json_option
@click.pass_obj
def clock(invocation: Invocation, apply: bool, as_json: bool) -> None:
    """Undo what a clock that was far ahead has done to the log, so that blobs are collected again.

    Set the clocks right first: the present is taken from the blob store, which for a local directory is this machine's
    clock. Partitions and sinks whose bounds for the stamps of blobs are more than a day ahead of it get right ones, and
    pins that would hold back collection for more than a day are released. Nothing is deleted: `llog collect` does that,
    once nothing names a blob.

    It may run beside everything else. Appends under way upload once more; a batch of a Spark sink under way fails and
    has to be run again.
    """
    damage = with_log(invocation, lambda log, settings: _repaired(log, settings, apply))
    if as_json:
        print_json({"applied": apply and damage.is_repairable, "damage": damage})
        return
    _show(damage)
    if damage.is_repairable:
        note(
            "repaired: `llog collect` deletes what is no longer used"
            if apply
            else "nothing was changed: --apply does it"
        )
    else:
        click.echo("no clock has left anything to repair")


async def _repaired(log: Log, _: Settings, apply: bool) -> ClockDamage:
    from llog.engines.object.repair.clock import find_clock_damage, repair_clock

    damage = await find_clock_damage(log)
    if apply and damage.is_repairable:
        await repair_clock(log, damage)
    return damage


def _show(damage: ClockDamage) -> None:
    click.echo(f"by the blob store's clock it is {shown_time(damage.present_ms)}")
    columns = ["KIND", "NAME", "FLOOR", "CEILING"]
    rows = [_row("partition", each) for each in damage.partitions] + [_row("sink", each) for each in damage.sinks]
    if rows:
        print_table(columns, rows[:_ROWS_MAX])
    if len(rows) > _ROWS_MAX:
        click.echo(f"and {len(rows) - _ROWS_MAX} more; --json shows all")
    if damage.pins:
        click.echo(f"{len(damage.pins)} pins hold back collection until a time in the future")
    if damage.blobs:
        click.echo(f"{damage.blobs} blobs ({format_size(damage.blob_bytes)}) are stamped in the future")


def _row(kind: str, bounds: WrongBounds) -> list[object]:
    ceiling = shown_time(bounds.ceiling_ms) if bounds.ceiling_ms else "none"
    return [kind, bounds.name, shown_time(bounds.floor_ms), ceiling]
