"""`llog repair clock`: resets what a clock that was far ahead has set in the future."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llog.base.units import format_size
from llog.cli.common import Invocation, format_time, json_option, note, print_json, print_table, with_log

if TYPE_CHECKING:
    from llog.engines.object.repair.clock import ClockDamage, WrongBounds
    from llog.log.log import Log

_ROWS_MAX = 20


@click.command(short_help="Reset floors, ceilings and pins that are far in the future.")
@click.option("--apply", is_flag=True, help="Repair; without it, nothing is changed.")
@json_option
@click.pass_obj
def clock(invocation: Invocation, apply: bool, as_json: bool) -> None:
    """Reset what a clock that was far ahead has set in the future, so that blobs are collected again.

    Correct the clocks first: the present time is that of the blob store, which for a local directory is this machine's
    clock. The repair resets the floors and ceilings of partitions and sinks that are more than a day ahead of it, and
    releases pins that would hold back collection for more than a day. It deletes nothing: `llog collect` deletes blobs
    once they are unreferenced.

    The repair may run beside everything else. Appends in flight upload once more; a batch of a Spark sink in flight
    fails and has to run again.
    """
    damage = with_log(invocation, lambda log, _: _find_and_repair(log, apply))
    if as_json:
        print_json({"applied": apply and damage.is_repairable, "damage": damage})
        return
    _show(damage)
    if damage.is_repairable:
        note(
            "repaired: `llog collect` deletes the blobs that are not used any more"
            if apply
            else "nothing was changed: --apply repairs it"
        )
    else:
        click.echo("all floors, ceilings and pins are right: there is nothing to repair")


async def _find_and_repair(log: Log, apply: bool) -> ClockDamage:
    from llog.engines.object.repair.clock import find_clock_damage, repair_clock

    damage = await find_clock_damage(log)
    if apply and damage.is_repairable:
        await repair_clock(log, damage)
    return damage


def _show(damage: ClockDamage) -> None:
    click.echo(f"by the blob store's clock it is {format_time(damage.present_ms)}")
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
    ceiling = format_time(bounds.ceiling_ms) if bounds.ceiling_ms else "none"
    return [kind, bounds.name, format_time(bounds.floor_ms), ceiling]
