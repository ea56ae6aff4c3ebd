"""`llog simulate`: runs the shipped code under virtual time and faults, one seed after the other."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable

import click

from llog.sim.plan import SEEDS_MAX, STEPS, SimPlan

_SEEDS = 20
_COUNTED = ("operations", "crashes", "stalls", "lost answers")


@click.command(short_help="Search for schedules that break the log.")
@click.option(
    "--seeds",
    type=click.IntRange(1),
    help=f"The number of seeds to run.  [default: {_SEEDS}; with --mutate: {SEEDS_MAX}; with --seed: 1]",
)
@click.option("--seed", type=click.IntRange(0), help="The first seed to run.  [default: 0]")
@click.option("--twice", is_flag=True, help="Run every seed twice and compare the traces.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=STEPS,
    show_default=True,
    help="The steps with faults per seed.",
)
@click.option("--seconds", type=click.FloatRange(0), help="Begin no further seed after this many seconds.")
@click.option("--mutate", metavar="NAME", help="Break the code in a known way, and show how the simulation finds it.")
@click.option("--mutations", is_flag=True, help="List the names that --mutate takes, and exit.")
def simulate(
    seeds: int | None,
    seed: int | None,
    twice: bool,
    steps: int,
    seconds: float | None,
    mutate: str | None,
    mutations: bool,
) -> None:
    """Search for schedules that break the log.

    Writers, readers, compactors, retention, collectors, an exactly-once sink, members of consumer groups and the relay
    of an outbox run in virtual time on simulated stores that delay, fail, fill up and lose answers, while processes
    crash, stall and come back, and clocks jump. A history checker sees every change. A seed always gives the same run.
    Exit code 1 if an invariant broke, or if two runs of a seed differ.

    With --mutate, the run ends at the first seed that finds the mutation; exit code 1 if none does.

    \b
      llog simulate --seed 7
      llog simulate --mutations
    """
    from llog.sim.mutations import MUTATIONS, mutated

    if mutations:
        click.echo("\n".join(MUTATIONS))
        return
    search = _Search(mutate, first=seed or 0, steps=steps, twice=twice, seconds=seconds)
    if mutate is None:
        search.run(seeds or (_SEEDS if seed is None else 1))
        click.echo(search.summary())
        sys.exit(1 if search.failed else 0)
    if mutate not in MUTATIONS:
        near = difflib.get_close_matches(mutate, MUTATIONS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise click.BadParameter(
            f"there is no mutation {mutate!r}: {hint}--mutations lists them", param_hint="--mutate"
        )
    with mutated(MUTATIONS[mutate]):
        search.run(seeds or SEEDS_MAX, MUTATIONS[mutate].focus)
    click.echo(search.summary())
    if not search.failed:
        click.echo(f"{mutate} was not found by {search.ran} seed{'s' if search.ran > 1 else ''}")
        sys.exit(1)
    click.echo(f"{mutate} was found by seed {search.first + search.ran - 1}")


class _Search:
    """Runs seeds one after the other and prints those that break an invariant; a mutation ends with the first."""

    def __init__(self, mutate: str | None, *, first: int, steps: int, twice: bool, seconds: float | None) -> None:
        self.first = first
        self._mutate = mutate
        self.ran = 0
        self.failed = 0
        self._steps = steps
        self._twice = twice
        self._seconds = seconds
        self._totals = dict.fromkeys(_COUNTED, 0)

    def run(self, seeds: int, focus: Callable[[SimPlan], SimPlan] | None = None) -> None:
        began = time.monotonic()
        for number in range(self.first, self.first + seeds):
            late = self._seconds is not None and time.monotonic() - began > self._seconds
            if late or (self._mutate and self.failed):
                return
            self._run_one(number, focus)

    def summary(self) -> str:
        counts = ", ".join(f"{what} {count}" for what, count in self._totals.items())
        return f"seeds {self.ran}, {counts}, violations {self.failed}"

    def _run_one(self, number: int, focus: Callable[[SimPlan], SimPlan] | None) -> None:
        from llog.sim.world import run_seed

        outcome = run_seed(number, steps=self._steps, adjust=focus)
        self.ran += 1
        for what in _COUNTED:
            self._totals[what] += outcome.counts.get(what, 0)
        broken = outcome.violation
        if (
            broken is None
            and self._twice
            and run_seed(number, steps=self._steps, adjust=focus).digest != outcome.digest
        ):
            broken = "the second run of this seed took another course than the first"
        if broken is not None:
            self.failed += 1
            click.echo("\n".join(outcome.last))
            click.echo(f"seed {number}: {broken}")
            mutate = f"--mutate {self._mutate} " if self._mutate else ""
            option = "" if self._steps == STEPS else f" --steps {self._steps}"
            click.echo(f"again: llog simulate {mutate}--seed {number}{option}{' --twice' if self._twice else ''}")
