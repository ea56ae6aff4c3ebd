"""Claims: a partition is left to the process that has it, and never stays claimed by one that has let it go."""

from __future__ import annotations

import pytest

from llog.engines.object.compaction.claims import ClaimOutcome, Claims
from llog.engines.object.compaction.compactor import Compactor, CompactorOptions
from llog.errors import OutcomeUnknown, StoreUnavailable
from llog.log.records import CompactionState, CompactorClaim, decode
from tests.unit.world import TP, Crash, Faults, LostAnswers, World


async def test_a_claim_is_taken_once_and_free_after_its_release(world: World) -> None:
    key = (await world.keys()).claim
    first, second = Claims(world.process(), "c-1"), Claims(world.process(), "c-2")
    assert await first.take(key)
    assert not await second.take(key)
    found = await world.meta.get(key)
    assert found is not None
    assert decode(CompactorClaim, found.value, key).holder == "c-1"
    await first.release(key)
    assert await second.take(key)
    assert (first.held, second.held) == (0, 1)
    assert first.counts == {ClaimOutcome.TAKEN: 1, ClaimOutcome.RELEASED: 1}
    assert second.counts == {ClaimOutcome.REFUSED: 1, ClaimOutcome.TAKEN: 1}


async def test_a_claim_ends_with_the_session_of_its_process(world: World) -> None:
    key = (await world.keys()).claim
    process = world.process()
    assert await Claims(process).take(key)
    await process.meta.close()
    assert await Claims(world.log).take(key)


@pytest.mark.parametrize("done", [True, False])
async def test_a_claim_whose_release_got_no_answer_does_not_stay(world: World, done: bool) -> None:
    key = (await world.keys()).claim
    error = StoreUnavailable("no answer")
    faults = LostAnswers(error, lambda operation, _: operation == "delete", done=done)
    claims = Claims(world.process(faults), "c-1")
    assert await claims.take(key)
    await claims.release(key)
    assert claims.counts[ClaimOutcome.FAILED] == 1
    assert await claims.take(key), "the process waits for a claim of its own"
    await claims.release(key)
    assert await world.meta.get(key) is None


async def test_a_claim_that_was_taken_without_an_answer_does_not_stay(world: World) -> None:
    key = (await world.keys()).claim
    faults = LostAnswers(OutcomeUnknown("no answer"), lambda operation, _: operation == "put", done=True)
    claims = Claims(world.process(faults), "c-1")
    with pytest.raises(OutcomeUnknown):
        await claims.take(key)
    assert await claims.take(key)
    assert claims.held == 1


async def test_a_doubtful_claim_that_another_process_has_is_left_to_it(world: World) -> None:
    key = (await world.keys()).claim
    faults = LostAnswers(StoreUnavailable("no answer"), lambda operation, _: operation == "delete", done=True)
    claims, other = Claims(world.process(faults), "c-1"), Claims(world.process(), "c-2")
    assert await claims.take(key)
    await claims.release(key)
    assert await other.take(key)
    assert not await claims.take(key)


async def test_a_kept_claim_is_known_to_be_lost_after_a_pause(world: World) -> None:
    key = (await world.keys()).claim
    claims, other = Claims(world.log, "c-1"), Claims(world.process(), "c-2")
    assert await claims.keep(key)
    assert await claims.keep(key)
    assert claims.counts[ClaimOutcome.TAKEN] == 1
    await world.meta.delete(key)  # as the end of its session would
    assert await other.take(key)
    assert not await claims.keep(key)
    await claims.release_all()
    assert await world.meta.get(key) is not None


async def test_a_compactor_that_stops_begins_no_other_run_and_keeps_no_claim(world: World) -> None:
    for number in range(4):
        await world.append(f"a{number}")
    [result] = await Compactor(world.log).compact_many([TP], stopping=lambda: True)
    assert (result.end_offset, result.error) == (None, None)
    asked = iter((False, True))

    [result] = await Compactor(world.log).compact_many([TP], stopping=lambda: next(asked))
    assert (result.end_offset, result.error) == (None, None)
    keys = await world.keys()
    assert await world.meta.get(keys.claim) is None
    assert await world.meta.get(keys.compaction) is None


async def test_a_result_says_in_which_state_a_compaction_was_resumed(world: World) -> None:
    for number in range(4):
        await world.append(f"a{number}")

    class DiesBeforePublishing(Faults):
        async def before(self, operation: str, key: str) -> None:
            if operation == "put" and "/index/" in key:
                raise Crash

    with pytest.raises(Crash):
        await Compactor(world.process(DiesBeforePublishing()), CompactorOptions()).compact_once(TP)
    compactor = Compactor(world.log)
    result = await compactor.compact_once(TP)
    assert (result.end_offset, result.resumed_from) == (3, CompactionState.WRITING_COMPACTED_INDEX)
    assert compactor.stages.count["publish"] == 1
    await world.append("b")
    await world.append("c")
    assert (await compactor.compact_once(TP)).resumed_from is None
    assert {"choose", "begin", "fetch", "write", "publish"} <= compactor.stages.count.keys()
