"""One Kafka group as a state machine."""

from __future__ import annotations

import pytest

from llog.kafka.error_codes import ErrorCode
from llog.kafka.groups import group as group_module
from llog.kafka.groups import protocols as protocols_module
from llog.kafka.groups.group import INITIAL_DELAY_MS, INITIAL_DELAY_MS_MAX, State
from llog.kafka.groups.membership import Identity, SyncAnswer, SyncRequest
from llog.kafka.groups.protocols import MEMBER_METADATA_BYTES_MAX
from tests.unit.kafka.group_members import REBALANCE_MS, SESSION_MS, Room, join_request, only

# --- the first generation


def test_the_first_member_leads_the_first_generation_after_a_short_delay() -> None:
    room = Room()
    answers = room.join(join_request(client_id="billing"))
    assert (answers, room.group.state) == ([], State.PREPARING)
    room.wait(INITIAL_DELAY_MS)
    joined = only(answers)
    assert joined.generation == 1
    assert joined.leader == joined.member_id
    assert joined.member_id.startswith("billing-")
    assert [(each.member.member_id, each.metadata) for each in joined.members] == [(joined.member_id, b"topics")]
    assert (joined.protocol_type, joined.protocol) == ("consumer", "range")
    assert room.group.state is State.COMPLETING


def test_members_that_start_together_share_one_generation() -> None:
    room = Room()
    first = room.join()
    room.wait(INITIAL_DELAY_MS - 1)
    second = room.join()
    room.wait(INITIAL_DELAY_MS - 1)
    assert (first, second) == ([], [])
    room.wait(1)
    assert only(first).generation == only(second).generation == 1
    assert len(only(first).members) == 2
    assert only(second).members == ()


def test_an_empty_group_waits_for_a_stream_of_members_only_so_long() -> None:
    room = Room()
    answers = [room.join()]
    for _ in range(INITIAL_DELAY_MS_MAX // (INITIAL_DELAY_MS - 1) + 1):
        room.wait(INITIAL_DELAY_MS - 1)
        answers.append(room.join())
    assert only(answers[0]).generation == 1


def test_assignments_of_the_leader_reach_those_who_wait_for_them() -> None:
    room = Room()
    leader, other = (room.join() for _ in range(2))
    room.wait(INITIAL_DELAY_MS)
    waiting = room.sync(only(other))
    assert waiting == []
    synced = room.sync(only(leader), {only(other).member_id: b"1", only(leader).member_id: b"0"})
    assert [each.assignment for each in (*synced, *waiting)] == [b"0", b"1"]
    assert room.group.state is State.STABLE
    assert [each.assignment for each in room.sync(only(other))] == [b"1"], "a member may ask again"


def test_a_member_that_the_leader_leaves_out_gets_an_empty_assignment() -> None:
    room = Room()
    leader, other = (room.join() for _ in range(2))
    room.wait(INITIAL_DELAY_MS)
    waiting = room.sync(only(other))
    room.sync(only(leader), {})
    assert [(each.error, each.assignment) for each in waiting] == [(ErrorCode.NONE, b"")]


# --- ids of members


def test_a_new_member_is_sent_back_with_an_id_where_its_client_expects_that() -> None:
    room = Room()
    (sent_back,) = room.join(join_request(needs_known_id=True))
    assert sent_back.error is ErrorCode.MEMBER_ID_REQUIRED
    assert room.group.members == {}
    answers = room.join(join_request(sent_back.member_id, needs_known_id=True))
    room.wait(INITIAL_DELAY_MS)
    assert only(answers).member_id == sent_back.member_id


def test_a_rebalance_waits_for_a_member_that_was_sent_back_with_an_id() -> None:
    room = Room()
    (joined,) = room.start(None)
    (sent_back,) = room.join(join_request(needs_known_id=True))
    again = room.join(join_request(joined.member_id))
    assert (again, room.group.state) == ([], State.PREPARING)
    new = room.join(join_request(sent_back.member_id))
    assert only(again).generation == only(new).generation == 2


def test_an_id_that_nobody_joins_with_is_forgotten_after_a_session() -> None:
    room = Room()
    (joined,) = room.start(None)
    (sent_back,) = room.join(join_request(needs_known_id=True))
    again = room.join(join_request(joined.member_id))
    room.wait(SESSION_MS)
    assert only(again).generation == 2
    assert [each.error for each in room.join(join_request(sent_back.member_id))] == [ErrorCode.UNKNOWN_MEMBER_ID]


def test_a_member_that_the_group_does_not_know_is_refused() -> None:
    room = Room()
    room.start(None)
    assert [each.error for each in room.join(join_request("nobody"))] == [ErrorCode.UNKNOWN_MEMBER_ID]
    assert room.group.heartbeat(Identity("nobody"), 1, room.now_ms) is ErrorCode.UNKNOWN_MEMBER_ID
    assert room.leave("nobody") is ErrorCode.UNKNOWN_MEMBER_ID
    assert room.commit("nobody", 1) is ErrorCode.UNKNOWN_MEMBER_ID


# --- rebalances


def test_a_new_member_has_the_others_join_again() -> None:
    room = Room()
    first, second = room.start(None, None)
    new = room.join()
    assert room.heartbeat(first) is room.heartbeat(second) is ErrorCode.REBALANCE_IN_PROGRESS
    again = [room.join(join_request(each.member_id)) for each in (first, second)]
    assert {only(answers).generation for answers in (new, *again)} == {2}
    assert only(again[0]).leader == first.member_id, "the leader stays"
    assert room.heartbeat(first) is ErrorCode.ILLEGAL_GENERATION


def test_members_that_do_not_join_again_in_time_are_dropped() -> None:
    room = Room()
    first, second = room.start(None, None)
    new = room.join()
    for _ in range(REBALANCE_MS // 5_000):
        room.heartbeat(first)
        room.heartbeat(second)
        room.wait(5_000)
    assert only(new).generation == 2
    assert only(new).leader == only(new).member_id
    assert room.group.members.keys() == {only(new).member_id}


def test_the_others_join_again_when_a_member_leaves() -> None:
    room = Room()
    first, second = room.start(None, None)
    assert room.leave(second.member_id) is ErrorCode.NONE
    assert room.heartbeat(first) is ErrorCode.REBALANCE_IN_PROGRESS
    again = only(room.join(join_request(first.member_id)))
    assert (again.generation, len(again.members)) == (2, 1)


def test_another_member_leads_when_the_leader_leaves() -> None:
    room = Room()
    first, second = room.start(None, None)
    room.leave(first.member_id)
    assert only(room.join(join_request(second.member_id))).leader == second.member_id


def test_a_member_that_is_silent_for_a_session_is_dropped() -> None:
    room = Room()
    first, second = room.start(None, None)
    for _ in range(3):
        room.wait(SESSION_MS // 2)
        room.heartbeat(first)
    assert room.group.members.keys() == {first.member_id}
    assert room.heartbeat(second) is ErrorCode.UNKNOWN_MEMBER_ID
    assert room.group.state is State.PREPARING


def test_a_group_is_empty_when_its_last_member_is_gone() -> None:
    room = Room()
    room.start(None)
    room.wait(SESSION_MS)
    assert room.group.state is State.EMPTY
    answers = room.join()
    room.wait(INITIAL_DELAY_MS)
    assert only(answers).generation == 2


def test_a_member_that_waits_for_others_does_not_time_out() -> None:
    room = Room()
    first, second = room.start(None, None)
    room.join(join_request(first.member_id))
    for _ in range(4):
        room.wait(SESSION_MS - 1)
        room.heartbeat(second)
    assert first.member_id in room.group.members


def test_the_session_of_a_member_whose_connection_is_gone_ends() -> None:
    room = Room()
    first, second = room.start(None, None)
    answers: list[object] = []
    room.group.join(join_request(first.member_id), room.now_ms, answers.append)
    room.group.abandon(answers.append, room.now_ms)
    for _ in range(3):
        room.wait(SESSION_MS // 2)
        room.heartbeat(second)
    assert room.group.members.keys() == {second.member_id}


def test_a_member_that_does_not_sync_in_time_is_dropped() -> None:
    room = Room()
    leader, other = (room.join() for _ in range(2))
    room.wait(INITIAL_DELAY_MS)
    waiting = room.sync(only(other))
    for _ in range(REBALANCE_MS // 5_000):
        room.heartbeat(only(leader))
        room.wait(5_000)
    assert [each.error for each in waiting] == [ErrorCode.REBALANCE_IN_PROGRESS]
    assert room.group.members.keys() == {only(other).member_id}


def test_those_who_wait_for_assignments_learn_of_the_next_rebalance() -> None:
    room = Room()
    leader, other = (room.join() for _ in range(2))
    room.wait(INITIAL_DELAY_MS)
    waiting = room.sync(only(other))
    room.leave(only(leader).member_id)
    assert waiting == [SyncAnswer(ErrorCode.REBALANCE_IN_PROGRESS)]


def test_a_leader_that_joins_again_begins_a_rebalance_and_another_member_does_not() -> None:
    room = Room()
    leader, other = room.start(None, None)
    assert only(room.join(join_request(other.member_id))).generation == 1
    assert room.join(join_request(leader.member_id)) == []
    assert room.group.state is State.PREPARING


def test_a_member_with_another_subscription_begins_a_rebalance() -> None:
    room = Room()
    _, other = room.start(None, None)
    assert room.join(join_request(other.member_id, metadata=b"more topics")) == []
    assert room.group.state is State.PREPARING


def test_a_member_that_missed_its_answer_gets_it_again() -> None:
    room = Room()
    leader = room.join()
    room.wait(INITIAL_DELAY_MS)
    again = only(room.join(join_request(only(leader).member_id)))
    assert again == only(leader)


def test_a_join_that_is_sent_twice_has_one_answer_each() -> None:
    room = Room()
    first, _ = room.start(None, None)
    one, two = (room.join(join_request(first.member_id)) for _ in range(2))
    assert [each.error for each in one] == [ErrorCode.REBALANCE_IN_PROGRESS]
    assert two == []


# --- protocols


def test_members_choose_the_protocol_that_most_of_them_prefer() -> None:
    room = Room()
    answers = [
        room.join(join_request(protocols=names))
        for names in (("range", "roundrobin"), ("roundrobin", "range"), ("roundrobin", "sticky", "range"))
    ]
    room.wait(INITIAL_DELAY_MS)
    assert {only(each).protocol for each in answers} == {"roundrobin"}


def test_a_member_without_a_common_protocol_is_refused() -> None:
    room = Room()
    room.start(None)
    assert [each.error for each in room.join(join_request(protocols=["sticky"]))] == [
        ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    ]
    assert [each.error for each in room.join(join_request(protocol_type="connect"))] == [
        ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    ]
    assert [each.error for each in room.join(join_request(protocols=[]))] == [ErrorCode.INCONSISTENT_GROUP_PROTOCOL]


def test_a_sync_of_another_protocol_or_generation_is_refused() -> None:
    room = Room()
    (joined,) = room.start(None)
    assert [each.error for each in room.sync(joined._replace(protocol="sticky"))] == [
        ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    ]
    assert [each.error for each in room.sync(joined._replace(generation=0))] == [ErrorCode.ILLEGAL_GENERATION]
    answers: list[SyncAnswer] = []
    room.group.sync(SyncRequest(Identity(joined.member_id), 1, None, None, {}), room.now_ms, answers.append)
    assert [each.assignment for each in answers] == [b"0"], "an older client names neither"


# --- static members


def test_a_static_member_that_restarts_keeps_its_assignment_without_a_rebalance() -> None:
    room = Room()
    leader, static = room.start(None, "static")
    again = only(room.join(join_request(instance_id="static")))
    assert again.member_id != static.member_id
    assert (again.generation, again.leader, again.skip_assignment) == (1, leader.member_id, False)
    assert [each.assignment for each in room.sync(again, instance_id="static")] == [b"1"]
    assert room.heartbeat(leader) is ErrorCode.NONE


def test_the_former_self_of_a_static_member_is_fenced() -> None:
    room = Room()
    _, static = room.start(None, "static")
    room.join(join_request(instance_id="static"))
    assert room.heartbeat(static, "static") is ErrorCode.FENCED_INSTANCE_ID
    assert [each.error for each in room.sync(static, instance_id="static")] == [ErrorCode.FENCED_INSTANCE_ID]
    assert room.leave(static.member_id, "static") is ErrorCode.FENCED_INSTANCE_ID
    refused = room.join(join_request(static.member_id, "static"))
    assert [each.error for each in refused] == [ErrorCode.FENCED_INSTANCE_ID]
    assert room.group.check_commit(Identity(static.member_id, "static"), 1, room.now_ms) is ErrorCode.FENCED_INSTANCE_ID


@pytest.mark.parametrize("may_skip", [False, True])
def test_a_static_leader_that_restarts_does_not_assign_again(may_skip: bool) -> None:
    room = Room()
    static, _ = room.start("static", None)
    again = only(room.join(join_request(instance_id="static", may_skip_assignment=may_skip)))
    if may_skip:
        assert (again.leader, again.skip_assignment, len(again.members)) == (again.member_id, True, 2)
    else:
        assert (again.leader, again.skip_assignment, again.members) == (static.member_id, False, ())
    assert [each.assignment for each in room.sync(again, instance_id="static")] == [b"0"]


def test_a_static_member_that_restarts_while_the_leader_assigns_begins_a_rebalance() -> None:
    room = Room()
    leader = room.join()
    static = room.join(join_request(instance_id="static"))
    room.wait(INITIAL_DELAY_MS)
    waiting = room.sync(only(static), instance_id="static")
    assert room.join(join_request(instance_id="static")) == []
    assert [each.error for each in waiting] == [ErrorCode.FENCED_INSTANCE_ID]
    assert room.heartbeat(only(leader)) is ErrorCode.REBALANCE_IN_PROGRESS


def test_a_static_member_that_misses_a_rebalance_stays_until_its_session_ends() -> None:
    room = Room()
    leader, static = room.start(None, "static")
    room.join()
    again = room.join(join_request(leader.member_id))
    for _ in range(REBALANCE_MS // 5_000):
        room.heartbeat(static, "static")
        room.wait(5_000)
    assert len(only(again).members) == 3, "the leader assigns to it all the same"


def test_a_static_member_is_removed_by_its_instance_id() -> None:
    room = Room()
    leader, _ = room.start(None, "static")
    assert room.leave("", "static") is ErrorCode.NONE
    assert room.group.members.keys() == {leader.member_id}
    assert room.leave("", "static") is ErrorCode.UNKNOWN_MEMBER_ID


# --- commits


def test_members_commit_in_their_generation_only() -> None:
    room = Room()
    (joined,) = room.start(None)
    assert room.commit(joined.member_id, 1) is ErrorCode.NONE
    assert room.commit(joined.member_id, 0) is ErrorCode.ILLEGAL_GENERATION
    room.join()
    assert room.commit(joined.member_id, 1) is ErrorCode.NONE, "before it joins again, a member commits its last work"
    room.join(join_request(joined.member_id))
    assert room.commit(joined.member_id, 1) is ErrorCode.ILLEGAL_GENERATION
    assert room.commit(joined.member_id, 2) is ErrorCode.REBALANCE_IN_PROGRESS


def test_a_consumer_without_a_group_commits_while_the_group_is_empty() -> None:
    room = Room()
    assert room.commit("", -1) is ErrorCode.NONE
    room.start(None)
    assert room.commit("", -1) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_commit_keeps_a_member_alive() -> None:
    room = Room()
    (joined,) = room.start(None)
    for _ in range(4):
        room.wait(SESSION_MS - 1)
        assert room.commit(joined.member_id, 1) is ErrorCode.NONE


# --- bounds, and the end


def test_what_a_member_may_ask_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room()
    room.start(None)
    for request, error in (
        (join_request(session_ms=1), ErrorCode.INVALID_SESSION_TIMEOUT),
        (join_request(session_ms=1 << 31), ErrorCode.INVALID_SESSION_TIMEOUT),
        (join_request(metadata=bytes(MEMBER_METADATA_BYTES_MAX + 1)), ErrorCode.INVALID_REQUEST),
        (join_request(protocols=[f"range{number}" for number in range(65)]), ErrorCode.INVALID_REQUEST),
        (join_request(instance_id="i" * 256), ErrorCode.INVALID_REQUEST),
    ):
        assert [each.error for each in room.join(request)] == [error]
    monkeypatch.setattr(group_module, "MEMBERS_MAX", 1)
    assert [each.error for each in room.join()] == [ErrorCode.GROUP_MAX_SIZE_REACHED]
    monkeypatch.setattr(protocols_module, "GROUP_METADATA_BYTES_MAX", 12)
    assert [each.error for each in room.join()] == [ErrorCode.GROUP_MAX_SIZE_REACHED]


def test_members_whose_generation_could_not_be_recorded_join_again() -> None:
    room = Room()
    joined, _ = room.start(None, None)
    waiting = room.join(join_request(joined.member_id))
    room.group.postpone(ErrorCode.COORDINATOR_NOT_AVAILABLE, room.now_ms)
    assert [each.error for each in waiting] == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
    assert room.group.state is State.PREPARING
    assert len(room.group.members) == 2


def test_all_who_wait_are_sent_away_when_the_group_moves() -> None:
    room = Room()
    leader, other = (room.join() for _ in range(2))
    room.wait(INITIAL_DELAY_MS)
    waiting = room.sync(only(other))
    room.group.close(ErrorCode.NOT_COORDINATOR)
    assert [each.error for each in waiting] == [ErrorCode.NOT_COORDINATOR]
    assert room.group.heartbeat(Identity(only(leader).member_id), 1, room.now_ms) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_described_group_shows_what_its_members_have() -> None:
    room = Room()
    leader, _ = room.start(None, "static")
    view = room.group.view()
    assert (view.state, view.protocol_type, view.protocol) == ("Stable", "consumer", "range")
    assert [(each.member.instance_id, each.client_id, each.host) for each in view.members] == [
        (None, "app", "127.0.0.1"),
        ("static", "app", "127.0.0.1"),
    ]
    assert [each.assignment for each in view.members] == [b"0", b"1"]
    room.leave(leader.member_id)
    assert [each.assignment for each in room.group.view().members] == [b""], "not while they join again"
