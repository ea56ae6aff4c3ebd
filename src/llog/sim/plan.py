"""What a seed decides before anything runs: who takes part, how often things go wrong, and how badly."""

from __future__ import annotations

import random

import msgspec

from llog.sim.stores import Faults

STEPS = 6_000


class SimPlan(msgspec.Struct, frozen=True, kw_only=True):
    roles: dict[str, int]
    """How many processes of each role."""
    faults: Faults
    skew_ms_max: int
    """Clocks differ by at most twice this, which is less than the slack of a pin."""
    crash_every: float
    stall_every: float
    """Mean seconds between two of a kind, over all processes."""
    grace_ms: int
    sink_open_ms: int
    max_offsets: int
    idle_ms: int
    retention_ms: int
    batches: int
    groups: int
    """How many claimed groups the consumers share."""
    visibility_ms: int
    relayed_at_once: int
    damage_every: float
    """Mean seconds between two index entries that get lost, or blobs that are damaged."""


def draw_plan(source: random.Random) -> SimPlan:
    """Not everything at once: what a seed leaves out gives the rest more room."""

    def some(low: int, high: int, chance: float = 1.0) -> int:
        return source.randint(low, high) if source.random() < chance else 0

    bad = source.random() < 0.85
    sharing = source.random() < 0.5
    room = 0.3 if sharing else 1.0
    return SimPlan(
        roles={
            "writer": some(1, 2),
            "producer": some(1, 2, 0.7 * room),
            "reader": some(1, 1, room),
            "snapshot": some(1, 2, 0.4 * room),
            "compactor": some(1, 3, 0.9 * room),
            "retainer": some(1, 1, 0.5),
            "collector": some(1, 2, 0.9 * room),
            "deleter": some(1, 1, 0.3 * room),
            "fencer": some(1, 1, 0.4 * room),
            "driver": some(1, 2, 0.7 * room),
            "consumer": some(2, 4, 0.8) if sharing else 0,
            "assignee": some(2, 3, 0.5) if sharing else 0,
            "operator": some(1, 1, 0.5) if sharing else 0,
            "outbox": some(1, 2, 0.4),
        },
        faults=Faults(
            unavailable=source.choice((0.0, 0.005, 0.03)) if bad else 0.0,
            lost_answer=source.choice((0.0, 0.01, 0.05)) if bad else 0.0,
            late_effect=source.choice((0.0, 0.0, 0.01)) if bad else 0.0,
            throttled=source.choice((0.0, 0.03, 0.15)),
            delay=source.choice((0.002, 0.05, 0.3)),
            throttle_delay=source.choice((1.0, 8.0, 20.0)),
        ),
        skew_ms_max=source.choice((0, 1_000, 50_000)),
        crash_every=source.choice((5.0, 20.0, 1e9)) if bad else 1e9,
        stall_every=source.choice((3.0, 10.0, 1e9)),
        grace_ms=source.choice((0, 0, 500, 5_000)),
        sink_open_ms=source.choice((0, 500, 30_000)),
        max_offsets=source.choice((4, 12, 1_000)),
        idle_ms=source.choice((0, 3_000, 60_000)),
        retention_ms=source.choice((5_000, 60_000)),
        batches=source.randint(4, 20),
        groups=source.randint(1, 2),
        visibility_ms=source.choice((500, 5_000, 30_000)),
        relayed_at_once=source.choice((1, 3, 1_000)),
        damage_every=source.choice((1e9, 1e9, 10.0)) if bad else 1e9,
    )
