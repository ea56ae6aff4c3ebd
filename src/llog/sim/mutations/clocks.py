"""Ways to break what bounds a wrong clock, and the repair of what one has done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llog.engines.object import append, clocks, collector, lanes, writer
from llog.engines.object.repair import clock as clock_repair
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import Control
from llog.runtime import stamp_of
from llog.sim.mutations.patch import Mutation, Patch
from llog.sim.plan import jumping_clocks, unrepaired_clocks


def commit_what_is_stamped_above_the_ceiling(patch: Patch) -> None:
    def may_commit(control: Control, blob: str, clock_repairs: int) -> bool:
        return (stamp_of(blob) or 0) >= control.blob_floor_ms and clock_repairs == control.clock_repairs

    def stamp_within(now_ms: int, *controls: Control) -> int:
        return max([now_ms, *(control.blob_floor_ms for control in controls)])

    patch.setattr(append, "may_commit", may_commit)
    patch.setattr(writer, "stamp_within", stamp_within)
    patch.setattr(lanes, "is_near_ceiling", lambda *_: False)


def commit_after_a_repair_what_was_uploaded_before(patch: Patch) -> None:
    shipped = clocks.may_commit

    def may_commit(control: Control, blob: str, clock_repairs: int) -> bool:
        return shipped(control, blob, control.clock_repairs)

    patch.setattr(append, "may_commit", may_commit)


def judge_by_its_age_what_is_stamped_below_a_ceiling(patch: Patch) -> None:
    shipped = collector.raise_floors

    async def no_ceiling(log: Log, enumerated: Sequence[PartitionKeys], run: clocks.Window) -> int:
        await shipped(log, enumerated, run)
        return 0

    patch.setattr(collector, "raise_floors", no_ceiling)


def leave_the_bounds_where_a_clock_has_set_them(patch: Patch) -> None:
    patch.setattr(clock_repair, "lower_bounds", lambda record, present_ms: record)


CLOCK_MUTATIONS: Final = (
    Mutation(commit_what_is_stamped_above_the_ceiling, "I6", jumping_clocks),
    Mutation(commit_after_a_repair_what_was_uploaded_before, "I6", jumping_clocks),
    Mutation(judge_by_its_age_what_is_stamped_below_a_ceiling, "I6", unrepaired_clocks),
    Mutation(leave_the_bounds_where_a_clock_has_set_them, "I6", unrepaired_clocks),
)
