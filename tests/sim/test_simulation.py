"""The shipped code under seeded faults: no invariant breaks, and a seed is one run."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from llog.cli.simulate import simulate
from llog.sim.world import run_seed

_TROUBLE = (
    "crashes",
    "stalls",
    "lost answers",
    "late effects",
    "throttled",
    "refused by a full store",
    "clock jumps",
    "old answers",
)


@pytest.mark.parametrize("first", range(0, 150, 30))
def test_no_seed_breaks_an_invariant(first: int) -> None:
    broken = []
    for seed in range(first, first + 30):
        outcome = run_seed(seed)
        if outcome.violation is not None:
            broken.append(f"llog simulate --seed {seed}: {outcome.violation}")
    assert broken == []


def test_the_same_seed_takes_the_same_course_and_another_takes_another() -> None:
    digests = [run_seed(seed, steps=2000).digest for seed in (11, 12, 13)]
    assert digests == [run_seed(seed, steps=2000).digest for seed in (11, 12, 13)]
    assert len(set(digests)) == 3


def test_the_seeds_together_meet_every_kind_of_trouble() -> None:
    met: dict[str, int] = {}
    for seed in range(12):
        for what, count in run_seed(seed, steps=2000).counts.items():
            met[what] = met.get(what, 0) + count
    assert all(met.get(what, 0) > 0 for what in _TROUBLE)
    done = ("redeliveries", "acks", "resets", "stale members", "changes", "owners", "refused owners", "tenants")
    assert all(met.get(what, 0) > 0 for what in (*done, "numbered appends", "repeated numbered appends"))
    assert met["operations"] > 5_000


def test_the_command_reports_what_it_ran_and_proves_determinism() -> None:
    result = CliRunner().invoke(simulate, ["--seed", "3", "--seeds", "2", "--steps", "1500", "--twice"])
    assert result.exit_code == 0, result.output
    assert "seeds 2, operations" in result.output
    assert "violations 0" in result.output
