"""The protocols have no violation, and every broken variant of them has one."""

from __future__ import annotations

import pytest

from spec.configurations import LARGER, SMALL
from spec.mutations import MUTATIONS
from spec.search import Configuration, explore

_STATES_MAX = 200_000
_OTHERS = [
    shape
    for shape in dict.fromkeys(mutation.shape for mutation in MUTATIONS.values())
    if shape not in (*SMALL, *LARGER)
]


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_protocol_has_no_violation(shape: Configuration) -> None:
    result = shape.search(None, _STATES_MAX)
    assert result.violation is None, "\n".join(result.trace)
    assert not result.cut


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_variant_is_caught_with_a_trace(name: str) -> None:
    result = MUTATIONS[name].shape.search(name, _STATES_MAX)
    assert result.violation is not None
    assert len(result.trace) == result.depth > 0


@pytest.mark.parametrize("shape", _OTHERS, ids=str)
def test_what_catches_a_broken_variant_lets_the_protocol_pass(shape: Configuration) -> None:
    result = shape.search(None, _STATES_MAX)
    assert result.violation is None, "\n".join(result.trace)
    assert not result.cut


def test_the_search_finds_a_shortest_trace() -> None:
    result = explore(
        0, lambda n: [("+1", n + 1), ("+3", n + 3)], lambda n: "seven" if n == 7 else None, states_max=1000
    )
    assert (result.violation, len(result.trace), result.cut) == ("seven", 3, False)


def test_the_search_says_when_it_was_cut() -> None:
    result = explore(0, lambda n: [("+1", n + 1)], lambda n: None, states_max=50)
    assert (result.states, result.cut, result.violation) == (50, True, None)
