"""The simulation finds what it is there for: each known way to break the protocol is caught within a hundred seeds."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from llog.cli.simulate import simulate
from llog.engines.object.compaction import job as compaction
from llog.sim.mutations import MUTATIONS, mutated
from llog.sim.plan import SEEDS_MAX, SimPlan
from llog.sim.world import run_seed


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_protocol_is_caught(name: str) -> None:
    mutation = MUTATIONS[name]
    with mutated(mutation):
        for seed in range(SEEDS_MAX):
            violation = run_seed(seed, adjust=mutation.focus).violation
            if violation is not None:
                assert re.match(mutation.found_as, violation), violation
                return
    pytest.fail(f"not caught within {SEEDS_MAX} seeds")


FOCUSES = {mutation.focus.__name__: mutation.focus for mutation in MUTATIONS.values() if mutation.focus}


@pytest.mark.parametrize("focus", FOCUSES.values(), ids=FOCUSES)
def test_nothing_breaks_where_mutations_are_looked_for(focus: Callable[[SimPlan], SimPlan]) -> None:
    found = [run_seed(seed, adjust=focus).violation for seed in range(6)]
    assert found == [None] * 6


def test_the_shipped_code_is_back_after_a_mutation() -> None:
    shipped = compaction._publish
    with mutated(MUTATIONS["advance-the-cursor-first"]):
        assert compaction._publish is not shipped
    assert compaction._publish is shipped


def test_the_command_shows_how_a_mutation_is_found() -> None:
    result = CliRunner().invoke(simulate, ["--mutate", "advance-the-cursor-first"])
    assert result.exit_code == 0, result.output
    assert "seed 0: I5: the cursor of" in result.output
    assert "again: llog simulate --mutate advance-the-cursor-first --seed 0\n" in result.output
    assert "found by seed 0" in result.output


def test_the_command_says_when_a_mutation_is_missed() -> None:
    result = CliRunner().invoke(simulate, ["--mutate", "ignore-pins", "--seeds", "1", "--steps", "10"])
    assert result.exit_code == 1, result.output
    assert "ignore-pins was not found by 1 seed" in result.output


def test_the_command_lists_the_mutations_that_there_are() -> None:
    result = CliRunner().invoke(simulate, ["--mutate", "ignore-pin"])
    assert result.exit_code == 2
    assert "did you mean ignore-pins?" in result.output
    listed = CliRunner().invoke(simulate, ["--mutations"])
    assert listed.exit_code == 0
    assert listed.output.split() == list(MUTATIONS)
