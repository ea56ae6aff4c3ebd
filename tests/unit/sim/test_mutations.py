"""Mutations name attributes of the shipped code by strings, which no type checker sees when they are renamed."""

from __future__ import annotations

import pytest

from llog.sim.mutations import MUTATIONS, mutated


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_fits_the_shipped_code(name: str) -> None:
    with mutated(MUTATIONS[name]):
        pass
