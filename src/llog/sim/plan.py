"""The plan that a seed decides before anything runs: which roles take part, and how often and how badly things go
wrong.
"""

from __future__ import annotations

import random
from typing import Final

import msgspec

from llog.log.inline import InlineLimits
from llog.sim.stores import Faults

STEPS = 6_000
SEEDS_MAX = 100
"""The number of seeds that find every known mutation: one that they miss is a defect of the simulation."""


class SimPlan(msgspec.Struct, frozen=True, kw_only=True):
    roles: dict[str, int]
    """The number of processes of each role."""
    partitions: int
    """The number of partitions that writers, compactors and retention work on."""
    faults: Faults
    skew_ms_max: int
    """Clocks differ by at most twice this, which is less than the slack of a pin."""
    crash_every: float
    stall_every: float
    """Mean seconds between two crashes, and between two stalls, over all processes."""
    full_every: float
    """Mean seconds between two moments at which a store runs out of room."""
    trim_every: float
    compact_every: float
    """Mean seconds between two trims of a retainer, and between two passes of a compactor."""
    collect_every: float = 3.0
    grace_ms: int
    sink_open_ms: int
    max_offsets: int
    idle_ms: int
    retention_ms: int
    batches: int
    groups: int
    """The number of claimed groups that the consumers share."""
    visibility_ms: int
    relayed_at_once: int
    damage_every: float
    """Mean seconds between two losses of index entries or damages to blobs."""
    jump_every: float = 1e9
    """Mean seconds between two jumps of one clock, or of all at once, ahead and soon back."""
    old_every: float = 1e9
    """Mean seconds between two wake-ups of servers that answer from the state in which they were paused."""
    inline: InlineLimits = InlineLimits()
    """What the appends of writers and producers may have inline."""
    producer_expiry_ms: int = 86_400_000
    merge_entries_min: int = 8
    """The number of compacted entries that compactors merge."""
    old_readers: str = ""
    """The prefix of the roles whose reads these servers may answer."""


def draw_plan(source: random.Random) -> SimPlan:
    """Draw a plan with a bit of everything, or one that tests a single part of the protocol hard."""
    plan = _draw_mixture(source)
    return source.choice(_FOCUSES)(plan) if source.random() < 0.6 else plan


def with_clock_jumps(plan: SimPlan, source: random.Random) -> SimPlan:
    """Return the plan; in one seed of six, with clocks that jump and perhaps a role that repairs the damage.

    `source` is not that of the plan, so that the rest of a seed's plan does not depend on its clocks.
    """
    if source.random() > 1 / 6:
        return plan
    roles = plan.roles | {"timekeeper": source.choice((0, 1, 2))}
    return msgspec.structs.replace(plan, roles=roles, jump_every=source.choice((3.0, 10.0)))


def with_old_servers(plan: SimPlan, source: random.Random) -> SimPlan:
    """Return the plan; in one seed of four, with servers that answer reads from an old state. `source` is separate, as
    with clocks.
    """
    if source.random() > 1 / 4:
        return plan
    roles = plan.roles | {"spread": int(plan.roles["collector"] > 0)}
    return msgspec.structs.replace(plan, roles=roles, old_every=source.choice((1.0, 5.0)))


def with_owners(plan: SimPlan, source: random.Random) -> SimPlan:
    """Return the plan; in one seed of six, with processes that compete as owners. `source` is separate, as with
    clocks.
    """
    if source.random() > 1 / 6:
        return plan
    return msgspec.structs.replace(plan, roles=plan.roles | {"owner": source.choice((2, 3)), "tenant": 2})


def with_inline_appends(plan: SimPlan, source: random.Random) -> SimPlan:
    """Return the plan; in half of the seeds, with inline appends. `source` is separate, as with clocks."""
    if source.random() > 1 / 2:
        return plan
    return inline_appends(plan, source.choice((600, 2_000, 100_000)))


def inline_appends(plan: SimPlan, partition_bytes_max: int = 600) -> SimPlan:
    """Appends that are inline, if they have at most two groups of two records, in partitions that are soon full."""
    limits = InlineLimits(group_bytes_max=220, flush_bytes_max=440, partition_bytes_max=partition_bytes_max)
    return msgspec.structs.replace(plan, inline=limits)


def resumed_inline_compactions(plan: SimPlan) -> SimPlan:
    """Compactors that crash and resume each other's runs of inline appends."""
    plan = _only(
        plan,
        {"writer": 2, "compactor": 3},
        Faults(lost_answer=0.05, delay=0.1),
        crash_every=2.0,
        partitions=1,
        max_offsets=8,
    )
    return inline_appends(plan)


def with_brokers(plan: SimPlan, source: random.Random) -> SimPlan:
    """Return the plan; in one seed of three, with brokers whose clients number their records, or with little else.
    `source` is separate, as with clocks.
    """
    if source.random() > 1 / 3:
        return plan
    if source.random() < 1 / 5:
        return retried_producers(plan)
    expiry_ms = source.choice((5_000, 30_000, 86_400_000))
    return msgspec.structs.replace(
        plan, roles=plan.roles | {"broker": source.choice((1, 2, 3))}, producer_expiry_ms=expiry_ms
    )


def retried_producers(plan: SimPlan) -> SimPlan:
    """Brokers that stall and lose answers while their clients retry through others, and everything that drops
    `pending`.
    """
    return _only(
        plan,
        {"broker": 4, "compactor": 1, "retainer": 1, "collector": 1},
        Faults(unavailable=0.02, lost_answer=0.08, late_effect=0.02, throttled=0.1, delay=0.1, throttle_delay=10.0),
        partitions=1,
        trim_every=1.0,
        compact_every=1.0,
        idle_ms=0,
        retention_ms=5_000,
        stall_every=2.0,
        collect_every=5.0,
    )


def old_brokers(plan: SimPlan) -> SimPlan:
    """As `retried_producers`, with reads of the brokers that are often answered from an old state."""
    plan = retried_producers(plan)
    return msgspec.structs.replace(plan, old_every=0.3, old_readers="broker")


def with_viewers(plan: SimPlan, source: random.Random) -> SimPlan:
    """Return the plan; in one seed of five, with brokers that answer from their views. `source` is separate, as with
    clocks.
    """
    if source.random() > 1 / 5:
        return plan
    return msgspec.structs.replace(plan, roles=plan.roles | {"viewer": source.choice((1, 2, 3))})


def with_merges(plan: SimPlan, source: random.Random) -> SimPlan:
    """Return the plan; in half of the seeds, with compactors that merge few entries. `source` is separate, as with
    clocks.
    """
    if source.random() > 1 / 2:
        return plan
    if source.random() < 1 / 8:
        return overtaken_merges(plan)
    return msgspec.structs.replace(plan, merge_entries_min=source.choice((2, 3)))


def overtaken_merges(plan: SimPlan) -> SimPlan:
    """As `overtaken_compactors`, with short runs that are merged at once."""
    plan = overtaken_compactors(plan)
    return msgspec.structs.replace(
        plan, roles=plan.roles | {"compactor": 3}, merge_entries_min=2, max_offsets=3, compact_every=1.0
    )


def with_coordinators(plan: SimPlan, source: random.Random) -> SimPlan:
    """Return the plan; in one seed of five, with brokers that coordinate a group of Kafka clients. `source` is
    separate, as with clocks.
    """
    if source.random() > 1 / 5:
        return plan
    return msgspec.structs.replace(plan, roles=plan.roles | {"coordinator": source.choice((1, 2, 3))})


def doubtful_coordinators(plan: SimPlan) -> SimPlan:
    """Brokers that stall, crash and lose answers while each of them believes that it coordinates the same group."""
    return _only(
        plan,
        {"coordinator": 3},
        Faults(unavailable=0.02, lost_answer=0.05, late_effect=0.02, throttled=0.1, delay=0.05, throttle_delay=8.0),
        stall_every=3.0,
    )


def old_coordinators(plan: SimPlan) -> SimPlan:
    """As `doubtful_coordinators`, with reads that are often answered from an old state."""
    return msgspec.structs.replace(doubtful_coordinators(plan), old_every=0.3, old_readers="coordinator")


def slow_commits(plan: SimPlan) -> SimPlan:
    """Many writers, some with slow messages, beside collectors without a grace period."""
    return _only(
        plan,
        {"writer": 4, "compactor": 1, "collector": 2},
        Faults(throttled=0.03, throttle_delay=15.0, delay=0.02),
        skew_ms_max=50_000,
        crash_every=1e9,
        max_offsets=12,
        grace_ms=0,
    )


def unrepaired_clocks(plan: SimPlan) -> SimPlan:
    """As `slow_commits`, with clocks that jump and whose damage is repaired only at the end."""
    return msgspec.structs.replace(slow_commits(plan), jump_every=2.0)


def jumping_clocks(plan: SimPlan) -> SimPlan:
    """As `unrepaired_clocks`, with more writers and jumps, and two processes that repair the damage."""
    plan = unrepaired_clocks(plan)
    return msgspec.structs.replace(plan, roles=plan.roles | {"writer": 6, "timekeeper": 2}, jump_every=0.7)


def jumping_members(plan: SimPlan) -> SimPlan:
    """Members of one group whose clocks are ahead now and then."""
    return msgspec.structs.replace(lossy_groups(plan), jump_every=3.0)


def old_collectors(plan: SimPlan) -> SimPlan:
    """Collectors without a grace period, whose reads are often answered from an old state."""
    plan = _only(
        plan,
        {"writer": 2, "snapshot": 3, "compactor": 2, "collector": 1, "deleter": 1},
        Faults(delay=0.15),
        crash_every=1e9,
        stall_every=1e9,
        max_offsets=12,
        grace_ms=0,
        collect_every=0.3,
        old_every=0.15,
    )
    return msgspec.structs.replace(plan, old_readers="collector")


def old_executors(plan: SimPlan) -> SimPlan:
    """As `old_collectors`, with a collection that is spread over executors, whose reads are old."""
    plan = old_collectors(plan)
    return msgspec.structs.replace(plan, roles=plan.roles | {"collector": 0, "spread": 1}, old_readers="task")


def overtaken_compactors(plan: SimPlan) -> SimPlan:
    """A compactor that another overtakes between its reads and its writes, on one partition with much to compact."""
    return _only(
        plan,
        {"writer": 1, "compactor": 2},
        Faults(delay=0.02, late_writer="compactor-0"),
        crash_every=1e9,
        stall_every=1e9,
        partitions=1,
        compact_every=2.0,
        max_offsets=8,
        idle_ms=60_000,
    )


def _trimmed_compactions(plan: SimPlan) -> SimPlan:
    """Compactors whose late writes arrive after retention has removed the records that they compacted."""
    return _only(
        plan,
        {"writer": 2, "compactor": 3, "retainer": 1, "collector": 1},
        Faults(late_effect=0.05, throttled=0.15, delay=0.3, throttle_delay=20.0),
        max_offsets=12,
        grace_ms=0,
        retention_ms=5_000,
        trim_every=4.0,
    )


def paused_owners(plan: SimPlan) -> SimPlan:
    """Competing owners that are paused for longer than a session and read from old states."""
    return _only(
        plan,
        {"owner": 4, "tenant": 3},
        Faults(unavailable=0.02, lost_answer=0.05, late_effect=0.02, throttled=0.05, delay=0.1, throttle_delay=8.0),
        stall_every=2.0,
        jump_every=5.0,
        old_every=0.3,
    )


def slow_notifications(plan: SimPlan) -> SimPlan:
    """Brokers whose notifications are often late, beside retention and a topic that comes and goes."""
    return _only(
        plan,
        {"viewer": 3, "writer": 1, "retainer": 1, "deleter": 1},
        Faults(unavailable=0.01, lost_answer=0.01, throttled=0.1, delay=0.05, throttle_delay=8.0),
        stall_every=10.0,
    )


def old_answers_to_viewers(plan: SimPlan) -> SimPlan:
    """As `slow_notifications`, with reads of brokers that are often answered from an old state."""
    return msgspec.structs.replace(slow_notifications(plan), old_every=0.3, old_readers="viewer")


def slow_sinks(plan: SimPlan) -> SimPlan:
    """Two drivers with slow messages, and a collector without a grace period, which nearly deletes their blobs."""
    return _only(
        plan,
        {"compactor": 1, "collector": 3, "driver": 2},
        Faults(throttled=0.2, throttle_delay=10.0, delay=0.05),
        crash_every=5.0,
        grace_ms=0,
        sink_open_ms=0,
        batches=50,
        max_offsets=12,
    )


def lossy_groups(plan: SimPlan) -> SimPlan:
    """Members of one group whose answers are often lost."""
    return _only(
        plan,
        {"writer": 1, "consumer": 3},
        Faults(unavailable=0.08, lost_answer=0.15, late_effect=0.02, delay=0.05),
        groups=1,
        visibility_ms=20_000,
    )


def _assigned_group(plan: SimPlan) -> SimPlan:
    """Members that come, go and stall while they share the partitions of one group."""
    return _only(
        plan,
        {"writer": 1, "assignee": 3},
        Faults(unavailable=0.02, lost_answer=0.05, throttled=0.05, delay=0.05, throttle_delay=8.0),
        groups=1,
        visibility_ms=2_000,
    )


def snapshots(plan: SimPlan) -> SimPlan:
    """Snapshots that are read long after they were taken, while everything in them is compacted and collected."""
    return _only(
        plan,
        {"writer": 2, "snapshot": 3, "compactor": 2, "collector": 2},
        Faults(throttled=0.03, delay=0.05),
        max_offsets=12,
        grace_ms=0,
    )


_FOCUSES: Final = (
    overtaken_compactors,
    overtaken_compactors,  # Twice, because its race takes more luck.
    _trimmed_compactions,
    slow_sinks,
    snapshots,
    lossy_groups,
    _assigned_group,
)


def _only(plan: SimPlan, roles: dict[str, int], faults: Faults, **changes: int | float) -> SimPlan:
    calm = {"skew_ms_max": 0, "crash_every": 15.0, "stall_every": 5.0, "full_every": 1e9, "damage_every": 1e9}
    return msgspec.structs.replace(plan, roles=dict.fromkeys(plan.roles, 0) | roles, faults=faults, **(calm | changes))


def _draw_mixture(source: random.Random) -> SimPlan:
    """Draw a mixture of roles, not all at once, so that each has more room. Half of the plans with damage also repair
    it during the run.
    """

    def some(low: int, high: int, chance: float = 1.0) -> int:
        return source.randint(low, high) if source.random() < chance else 0

    bad = source.random() < 0.85
    sharing = source.random() < 0.5
    room = 0.3 if sharing else 1.0
    plan = SimPlan(
        roles={
            "writer": some(1, 2),
            "producer": some(1, 2, 0.7 * room),
            "reader": some(1, 1, room),
            "snapshot": some(1, 2, 0.4 * room),
            "compactor": some(1, 3, 0.9 * room),
            "retainer": some(1, 1, 0.5),
            "collector": some(1, 2, 0.9 * room),
            "spread": 0,
            "repairer": 0,
            "deleter": some(1, 1, 0.3 * room),
            "fencer": some(1, 1, 0.4 * room),
            "driver": some(1, 2, 0.7 * room),
            "consumer": some(2, 4, 0.8) if sharing else 0,
            "assignee": some(2, 3, 0.5) if sharing else 0,
            "operator": some(1, 1, 0.5) if sharing else 0,
            "outbox": some(1, 2, 0.4),
            "broker": 0,
        },
        partitions=3,
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
        full_every=source.choice((10.0, 40.0, 1e9)) if bad else 1e9,
        trim_every=10.0,
        compact_every=2.5,
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
    repairers = plan.batches % 2 if plan.damage_every < 1e9 else 0
    return msgspec.structs.replace(plan, roles=plan.roles | {"repairer": repairers})
