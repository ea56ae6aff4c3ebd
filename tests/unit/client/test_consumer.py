"""Consumers: what is handed out, what counts as finished, and what is delivered again. On a log of this process and
through a broker.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from llog.api.leaderless import SharedAppendGroup
from llog.client.consumer import Consumer, Message
from llog.client.remote.backend import RemoteBackend
from llog.errors import (
    ConfigurationError,
    InvalidArgument,
    OffsetOutOfRange,
    OutcomeUnknown,
    StaleMember,
    StoreUnavailable,
    TopicNotFound,
)
from llog.groups.acks import Acked
from llog.groups.consumption import ConsumeCall, Start
from llog.model import Record
from tests.unit.client.backends import Place, embedded, remote


@pytest.fixture(params=["embedded", "remote"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with embedded() if request.param == "embedded" else remote() as found:
        yield found


def consumer(place: Place, **options: object) -> Consumer:
    return Consumer(place.backend, "t", **{"group": "g", "timeout": 0.0, **options})  # type: ignore[arg-type]


def test_messages_come_in_order_and_are_acknowledged_when_the_loop_is_over(place: Place) -> None:
    place.create()
    place.append(*(f'{{"n": {n}}}' for n in range(25)))
    with consumer(place, batch=10) as messages:
        found = list(messages)
    assert [message.json() for message in found] == [{"n": n} for n in range(25)]
    assert [message.offset for message in found] == list(range(1, 26))
    first = found[0]
    assert (first.topic, first.partition, first.attempt, first.key, first.op) == ("t", 0, 1, None, None)
    assert first.payload == b'{"n": 0}'
    assert abs((datetime.now(UTC) - first.ts).total_seconds()) < 600
    assert place.committed() == 26


def test_a_message_has_the_headers_of_its_record(place: Place) -> None:
    place.create()
    headers = (("trace", b"x"), ("trace", None), ("raw", b"\xff"))
    records = [Record(payload=b"1", headers=headers), Record(payload=b"2")]
    place.writer.append_shared([SharedAppendGroup(topic="t", partition=0, payloads=records)])
    with consumer(place) as messages:
        assert [message.headers for message in messages] == [headers, ()]


def test_a_message_that_the_loop_left_by_an_exception_is_delivered_again(place: Place) -> None:
    place.create()
    place.append("1", "2", "3")

    def handle_all() -> None:
        with consumer(place, visibility_ms=200) as failing:
            for message in failing:
                if message.offset == 2:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        handle_all()
    assert place.committed() == 2
    with consumer(place, timeout=10.0) as again:
        first = next(again)
        assert (first.offset, first.attempt) == (2, 2)


def test_nothing_is_acknowledged_by_itself_if_that_is_not_wanted(place: Place) -> None:
    place.create(partitions=2)
    place.append("1", "2", "3")
    place.append("4", "5", partition=1)
    with consumer(place, auto_ack=False) as messages:
        found = list(messages)
        assert len(found) == 5
        assert (place.committed(), place.committed(partition=1)) == (1, 1)
        messages.ack(next(each for each in found if (each.partition, each.offset) == (0, 2)))
        assert (place.committed(), place.committed(partition=1)) == (3, 1)
        messages.ack_all()
        assert (place.committed(), place.committed(partition=1)) == (4, 3)


def test_two_consumers_share_the_messages_of_a_group(place: Place) -> None:
    place.create()
    place.append(*map(str, range(10)))
    with consumer(place, batch=3) as one, consumer(place, batch=3) as other:
        both = [next(one).offset, next(other).offset, *(message.offset for message in one)]
        both += [message.offset for message in other]
    assert sorted(both) == list(range(1, 11))
    assert place.committed() == 11


def test_an_ack_of_what_another_was_given_is_warned_of(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.create()
    place.append("1", "2")
    slow, quick = consumer(place, auto_ack=False, visibility_ms=1), consumer(place, auto_ack=False)
    [first, _] = slow.poll()
    deadline = time.monotonic() + 60
    while not quick.poll() and time.monotonic() < deadline:
        time.sleep(0.01)
    slow.ack(first)
    assert f"acknowledged nothing: of t/0, offset 1 is held by {quick.member!r}" in caplog.text
    caplog.clear()
    quick.ack_all()
    assert not caplog.text
    assert place.committed() == 3


def test_a_poll_hands_out_what_there_is_and_the_next_one_acknowledges_it(place: Place) -> None:
    place.create()
    place.append("1", "2", "3")
    messages = consumer(place)
    assert [message.offset for message in messages.poll()] == [1, 2, 3]
    assert place.committed() == 1
    assert messages.poll() == []
    assert place.committed() == 4
    messages.close()
    messages.close()
    with pytest.raises(InvalidArgument, match="closed"):
        messages.poll()


def test_a_consumer_begins_where_its_group_is_or_where_it_is_told(place: Place) -> None:
    place.create()
    place.append("old")
    with consumer(place, start=Start("latest")) as messages:
        assert list(messages) == []
        place.append("new")
        assert [message.payload for message in messages] == [b"new"]
    with pytest.raises(InvalidArgument, match="reset the group"):
        consumer(place, start=Start("offset", 1))


def test_errors_are_the_same_whichever_way_they_come(place: Place) -> None:
    with pytest.raises(TopicNotFound, match="there is no topic 'none'"):
        place.backend.consume(ConsumeCall(topic="none"))
    place.create(partitions=2)
    place.append("1")
    place.backend.consume(ConsumeCall(topic="t", group="g"))
    with pytest.raises(OffsetOutOfRange) as caught:
        place.backend.ack("t", "g", {0: 5})
    assert (caught.value.log_start_offset, caught.value.next_offset) == (1, 2)
    with pytest.raises(InvalidArgument, match="has 2 partitions"):
        place.backend.ack("t", "g", {None: 1})
    assert place.backend.ack("t", "g", {0: 1}) == {0: Acked(2)}
    assert place.backend.consume(ConsumeCall(topic="t", start=Start("after", 0), partition=0)).num_rows == 1
    since = Start("timestamp", 0)
    assert place.backend.consume(ConsumeCall(topic="t", start=since)).column("attempt").to_pylist() == [0]


def test_the_partitions_of_an_assigned_consumer_that_is_closed_go_to_the_others_at_once(place: Place) -> None:
    place.create(partitions=2)
    assigned = {"mode": "assigned", "timeout": 10.0}
    with consumer(place, member="a", **assigned) as one:
        place.append("a")
        assert next(one).payload == b"a"
        other = consumer(place, member="b", **assigned)
        place.append("b", partition=1)
        assert next(other).payload == b"b"
    place.append("c")
    assert next(other).payload in (b"a", b"c")
    other.close()


def test_an_assigned_consumer_that_works_through_a_batch_keeps_its_partitions(place: Place) -> None:
    place.create()
    place.append("1", "2", "3", "4", "5")
    with consumer(place, member="a", mode="assigned", visibility_ms=1_500) as slow:
        for _ in range(4):
            next(slow)
            time.sleep(0.6)
        with consumer(place, member="b", mode="assigned") as other:
            assert other.poll() == []
    assert place.committed() == 4


def test_a_consumer_that_was_silent_for_too_long_is_told_so(place: Place) -> None:
    place.create()
    place.append("1", "2")
    silent = consumer(place, member="a", mode="assigned", visibility_ms=1)
    assert next(silent).offset == 1
    other = consumer(place, member="b", mode="assigned")
    assert [message.offset for message in other.poll()] == [1, 2]
    with pytest.raises(StaleMember):
        silent.heartbeat()
    other.close()
    assert [message.offset for message in silent] == [2]


def test_all_that_was_handed_out_is_acknowledged_whatever_came_last(place: Place) -> None:
    place.create()
    place.append(*map(str, range(1, 7)))
    dead = consumer(place, batch=3, auto_ack=False, visibility_ms=1)
    assert [message.offset for message in dead.poll()] == [1, 2, 3]
    place.backend.release("t", "g", 0, 1, member=dead.member, delay_ms=300)
    live = consumer(place, batch=10, auto_ack=False)
    assert [message.offset for message in live.poll()] == [2, 3, 4, 5, 6]
    assert [message.offset for message in live.poll(10)] == [1]
    live.ack_all()
    assert place.committed() == 7


def test_a_year_that_python_does_not_know_stops_nobody(place: Place) -> None:
    place.create()
    far = Record(payload=b"x", timestamp=9_000_000_000_000_000)
    place.writer.append_shared([SharedAppendGroup(topic="t", partition=0, payloads=[far])])
    with consumer(place) as messages:
        assert [message.ts.year for message in messages] == [9999]


def test_a_payload_that_is_no_json_says_so() -> None:
    message = Message(
        topic="t",
        partition=0,
        offset=7,
        message_id=None,
        source_table=None,
        op=None,
        ts=datetime.now(UTC),
        key=None,
        payload=b"\xff",
        attempt=1,
    )
    with pytest.raises(InvalidArgument, match=r"offset 7 of t/0 is no JSON"):
        message.json()


def test_a_broker_that_is_not_there_is_told_with_what_to_check(unused_tcp_port: int) -> None:
    backend = RemoteBackend(f"http://127.0.0.1:{unused_tcp_port}", timeout_s=1)
    with pytest.raises(StoreUnavailable, match="does not answer"):
        backend.consume(ConsumeCall(topic="t"))
    backend.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        backend.consume(ConsumeCall(topic="t"))


@pytest.mark.parametrize(
    "url", ["localhost:8080", "ftp://host", "http://", "http://user:secret@host", "http://h:99999"]
)
def test_an_address_that_is_none_is_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RemoteBackend(url)
    assert "secret" not in str(caught.value)


def test_what_may_not_be_asked_twice_is_not(silent: tuple[str, list[int]]) -> None:
    from llog.transport.client import ATTEMPTS, BrokerClient

    url, accepted = silent
    client = BrokerClient(url, timeout_s=5)
    with pytest.raises(OutcomeUnknown):
        client.post("/sql", b"{}", repeatable=False)
    assert len(accepted) == 1
    with pytest.raises(StoreUnavailable):
        client.post("/topics/ack", b"{}", repeatable=True)
    assert len(accepted) == 1 + ATTEMPTS
    client.close()


@pytest.fixture
def silent() -> Iterator[tuple[str, list[int]]]:
    """A server that takes a request and closes the connection."""
    import socket
    import threading

    accepted: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    accepted.append(1)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", accepted
        server.shutdown(socket.SHUT_RDWR)


def test_a_consumer_whose_poll_failed_goes_on_under_another_name_and_passes_nothing_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.create()
    place.append("1", "2")
    whole, names = place.backend.consume, []

    def lost_at_first(call: ConsumeCall) -> object:
        found = whole(call)
        names.append(call.member)
        if len(names) == 1:
            place.append("3")
            raise StoreUnavailable("the answer was lost")
        return found

    monkeypatch.setattr(place.backend, "consume", lost_at_first)
    with consumer(place, member="m", visibility_ms=400, timeout=3.0) as messages:
        found = list(messages)
    assert names[0] != names[1]
    assert all(name.startswith("m~") for name in names)
    assert [(message.payload, message.attempt) for message in found] == [(b"3", 1), (b"1", 2), (b"2", 2)]
    assert place.committed() == 4


def test_a_member_that_lost_a_partition_goes_on_with_what_it_has(place: Place) -> None:
    place.create(partitions=2)
    for partition in range(2):
        place.append("1", "2", partition=partition)
    first = consumer(place, mode="assigned", member="a")
    assert {message.partition for message in first.poll()} == {0, 1}
    second = consumer(place, mode="assigned", member="b")
    lost = {message.partition for message in second.poll()}
    assert len(lost) == 1
    assert {message.partition for message in first.poll()} <= {0, 1} - lost
    assert second.poll() == []
    first.close()
    second.close()
    assert place.committed(partition=0) == place.committed(partition=1) == 3
