"""`llog simulate`: the shipped code under virtual time and faults, one seed after the other."""

from __future__ import annotations

import sys
import time

import click

from llog.sim.plan import STEPS

_COUNTED = ("operations", "crashes", "stalls", "lost answers")


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=20, show_default=True, help="How many seeds to run.")
@click.option("--seed", type=click.IntRange(0), help="Run this seed, and those after it if --seeds is given, too.")
@click.option("--twice", is_flag=True, help="Run every seed twice and compare the traces.")
@click.option("--steps", type=click.IntRange(1), default=STEPS, show_default=True, help="Steps under faults per seed.")
@click.option("--seconds", type=click.FloatRange(0), help="Begin no further seed after so long.")
@click.pass_context
def simulate(ctx: click.Context, seeds: int, seed: int | None, twice: bool, steps: int, seconds: float | None) -> None:
    """Search for schedules that break the log.

    Writers, readers, compactors, retention, collectors, an exactly-once sink, members of consumer groups and the relay of an outbox run in
    virtual time on simulated stores that delay, fail and lose answers, while processes crash, stall and come back. A history checker sees
    every change. The same seed gives the same run. Exit code 1 if an invariant broke, or a seed gave two traces.
    """
    from llog.sim.world import run_seed

    if seed is not None and ctx.get_parameter_source("seeds") is click.core.ParameterSource.DEFAULT:
        seeds = 1
    first = seed or 0
    began = time.monotonic()
    totals = dict.fromkeys(_COUNTED, 0)
    run = failed = 0
    for number in range(first, first + seeds):
        if seconds is not None and time.monotonic() - began > seconds:
            break
        outcome = run_seed(number, steps=steps)
        run += 1
        for what in _COUNTED:
            totals[what] += outcome.counts.get(what, 0)
        broken = outcome.violation
        if broken is None and twice and run_seed(number, steps=steps).digest != outcome.digest:
            broken = "the second run of this seed took another course than the first"
        if broken is not None:
            failed += 1
            click.echo("\n".join(outcome.last))
            click.echo(f"seed {number}: {broken}")
            option = "" if steps == STEPS else f" --steps {steps}"
            click.echo(f"again: llog simulate --seed {number}{option}{' --twice' if twice else ''}")
    click.echo(
        f"seeds {run}, " + ", ".join(f"{what} {count}" for what, count in totals.items()) + f", violations {failed}"
    )
    sys.exit(1 if failed else 0)
