"""`python -m spec`: searches the protocols, which must have no violation; with `--mutate`, broken variants, which must
have one.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from spec.configurations import LARGER, SMALL
from spec.mutations import MUTATIONS
from spec.search import Configuration, Result

STATES_MAX = 2_000_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m spec", description=__doc__)
    parser.add_argument("--mutate", metavar="NAME|all", choices=[*MUTATIONS, "all"], help="search a broken variant")
    parser.add_argument("--list", action="store_true", help="list the configurations and the broken variants")
    parser.add_argument("--states", type=int, default=STATES_MAX, help="stop a search at this many states")
    options = parser.parse_args()
    if options.list:
        return _list()
    if options.mutate is None:
        return _search_protocol(options.states)
    names = list(MUTATIONS) if options.mutate == "all" else [options.mutate]
    caught = [_search_mutation(name, options.states) for name in names]
    return int(not all(caught))


def _list() -> int:
    for shape in (*SMALL, *LARGER):
        print(shape)
    for name, mutation in MUTATIONS.items():
        print(f"{name}: {mutation.what}\n    {mutation.shape}")
    return 0


def _search_protocol(states_max: int) -> int:
    """Search all configurations, one on each core at a time."""
    total = violations = cut = 0
    began = time.monotonic()
    shapes = (*SMALL, *LARGER)
    with ProcessPoolExecutor() as pool:
        for shape, result in zip(shapes, pool.map(_search_shape, shapes, repeat(states_max)), strict=True):
            print(f"{shape}: {_counts(result)}: {result.violation or 'no violation'}", flush=True)
            _print_trace(result)
            total += result.states
            violations += result.violation is not None
            cut += result.cut
    what = f"{violations} violations in {total:,} states, {len(shapes)} configurations, {cut} of them cut"
    print(f"{what}; {time.monotonic() - began:.0f} s")
    return int(violations > 0 or cut > 0)


def _search_shape(shape: Configuration, states_max: int) -> Result:
    return shape.search(None, states_max)


def _search_mutation(name: str, states_max: int) -> bool:
    mutation = MUTATIONS[name]
    result = mutation.shape.search(name, states_max)
    print(
        f"{name}: {mutation.what}\n  {mutation.shape}: {_counts(result)}: {result.violation or 'NOT CAUGHT'}",
        flush=True,
    )
    _print_trace(result)
    return result.violation is not None


def _counts(result: Result) -> str:
    return f"{result.states:,} states, depth {result.depth}{', cut' if result.cut else ''}"


def _print_trace(result: Result) -> None:
    for number, label in enumerate(result.trace, 1):
        print(f"    {number:2} {label}")


if __name__ == "__main__":
    sys.exit(main())
