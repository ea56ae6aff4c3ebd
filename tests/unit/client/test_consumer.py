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
from llog.groups.acks import AckResult
from llog.groups.options import ConsumeOptions, Start
from llog.model import Record
from tests.unit.client.backends import Harness, embedded, remote


@pytest.fixture(params=["embedded", "remote"])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with embedded() if request.param == "embedded" else remote() as found:
        yield found


def consumer(harness: Harness, **options: object) -> Consumer:
    return Consumer(harness.backend, "t", **{"group": "g", "timeout": 0.0, **options})  # type: ignore[arg-type]


def test_messages_come_in_order_and_are_acknowledged_when_the_loop_is_over(harness: Harness) -> None:
    harness.create()
    harness.append(*(f'{{"n": {n}}}' for n in range(25)))
    with consumer(harness, batch=10) as messages:
        found = list(messages)
    assert [message.json() for message in found] == [{"n": n} for n in range(25)]
    assert [message.offset for message in found] == list(range(1, 26))
    first = found[0]
    assert (first.topic, first.partition, first.attempt, first.key, first.op) == ("t", 0, 1, None, None)
    assert first.payload == b'{"n": 0}'
    assert abs((datetime.now(UTC) - first.ts).total_seconds()) < 600
    assert harness.committed() == 26


def test_a_message_has_the_headers_of_its_record(harness: Harness) -> None:
    harness.create()
    headers = (("trace", b"x"), ("trace", None), ("raw", b"\xff"))
    records = [Record(payload=b"1", headers=headers), Record(payload=b"2")]
    harness.writer.append_shared([SharedAppendGroup(topic="t", partition=0, payloads=records)])
    with consumer(harness) as messages:
        assert [message.headers for message in messages] == [headers, ()]


def test_a_message_that_the_loop_left_by_an_exception_is_delivered_again(harness: Harness) -> None:
    harness.create()
    harness.append("1", "2", "3")

    def handle_all() -> None:
        with consumer(harness, visibility_ms=200) as failing:
            for message in failing:
                if message.offset == 2:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        handle_all()
    assert harness.committed() == 2
    with consumer(harness, timeout=10.0) as again:
        first = next(again)
        assert (first.offset, first.attempt) == (2, 2)


def test_nothing_is_acknowledged_by_itself_if_that_is_not_wanted(harness: Harness) -> None:
    harness.create(partitions=2)
    harness.append("1", "2", "3")
    harness.append("4", "5", partition=1)
    with consumer(harness, auto_ack=False) as messages:
        found = list(messages)
        assert len(found) == 5
        assert (harness.committed(), harness.committed(partition=1)) == (1, 1)
        messages.ack(next(each for each in found if (each.partition, each.offset) == (0, 2)))
        assert (harness.committed(), harness.committed(partition=1)) == (3, 1)
        messages.ack_all()
        assert (harness.committed(), harness.committed(partition=1)) == (4, 3)


def test_two_consumers_share_the_messages_of_a_group(harness: Harness) -> None:
    harness.create()
    harness.append(*map(str, range(10)))
    with consumer(harness, batch=3) as one, consumer(harness, batch=3) as other:
        both = [next(one).offset, next(other).offset, *(message.offset for message in one)]
        both += [message.offset for message in other]
    assert sorted(both) == list(range(1, 11))
    assert harness.committed() == 11


def test_an_ack_of_what_another_was_given_is_warned_of(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    harness.create()
    harness.append("1", "2")
    slow, quick = consumer(harness, auto_ack=False, visibility_ms=1), consumer(harness, auto_ack=False)
    [first, _] = slow.poll()
    deadline = time.monotonic() + 60
    while not quick.poll() and time.monotonic() < deadline:
        time.sleep(0.01)
    slow.ack(first)
    assert f"acknowledged nothing: of t/0, offset 1 is held by {quick.member!r}" in caplog.text
    caplog.clear()
    quick.ack_all()
    assert not caplog.text
    assert harness.committed() == 3


def test_a_poll_hands_out_what_there_is_and_the_next_one_acknowledges_it(harness: Harness) -> None:
    harness.create()
    harness.append("1", "2", "3")
    messages = consumer(harness)
    assert [message.offset for message in messages.poll()] == [1, 2, 3]
    assert harness.committed() == 1
    assert messages.poll() == []
    assert harness.committed() == 4
    messages.close()
    messages.close()
    with pytest.raises(InvalidArgument, match="closed"):
        messages.poll()


def test_a_consumer_begins_where_its_group_is_or_where_it_is_told(harness: Harness) -> None:
    harness.create()
    harness.append("old")
    with consumer(harness, start=Start("latest")) as messages:
        assert list(messages) == []
        harness.append("new")
        assert [message.payload for message in messages] == [b"new"]
    with pytest.raises(InvalidArgument, match="reset the group"):
        consumer(harness, start=Start("offset", 1))


def test_errors_are_the_same_whichever_way_they_come(harness: Harness) -> None:
    with pytest.raises(TopicNotFound, match="there is no topic 'none'"):
        harness.backend.consume(ConsumeOptions(topic="none"))
    harness.create(partitions=2)
    harness.append("1")
    harness.backend.consume(ConsumeOptions(topic="t", group="g"))
    with pytest.raises(OffsetOutOfRange) as caught:
        harness.backend.ack("t", "g", {0: 5})
    assert (caught.value.log_start_offset, caught.value.next_offset) == (1, 2)
    with pytest.raises(InvalidArgument, match="has 2 partitions"):
        harness.backend.ack("t", "g", {None: 1})
    assert harness.backend.ack("t", "g", {0: 1}) == {0: AckResult(2)}
    assert harness.backend.consume(ConsumeOptions(topic="t", start=Start("after", 0), partition=0)).num_rows == 1
    since = Start("timestamp", 0)
    assert harness.backend.consume(ConsumeOptions(topic="t", start=since)).column("attempt").to_pylist() == [0]


def test_the_partitions_of_an_assigned_consumer_that_is_closed_go_to_the_others_at_once(harness: Harness) -> None:
    harness.create(partitions=2)
    assigned = {"mode": "assigned", "timeout": 10.0}
    with consumer(harness, member="a", **assigned) as one:
        harness.append("a")
        assert next(one).payload == b"a"
        other = consumer(harness, member="b", **assigned)
        harness.append("b", partition=1)
        assert next(other).payload == b"b"
    harness.append("c")
    assert next(other).payload in (b"a", b"c")
    other.close()


def test_an_assigned_consumer_that_works_through_a_batch_keeps_its_partitions(harness: Harness) -> None:
    harness.create()
    harness.append("1", "2", "3", "4", "5")
    with consumer(harness, member="a", mode="assigned", visibility_ms=1_500) as slow:
        for _ in range(4):
            next(slow)
            time.sleep(0.6)
        with consumer(harness, member="b", mode="assigned") as other:
            assert other.poll() == []
    assert harness.committed() == 4


def test_a_consumer_that_was_silent_for_too_long_is_told_so(harness: Harness) -> None:
    harness.create()
    harness.append("1", "2")
    silent = consumer(harness, member="a", mode="assigned", visibility_ms=1)
    assert next(silent).offset == 1
    other = consumer(harness, member="b", mode="assigned")
    assert [message.offset for message in other.poll()] == [1, 2]
    with pytest.raises(StaleMember):
        silent.heartbeat()
    other.close()
    assert [message.offset for message in silent] == [2]


def test_all_that_was_handed_out_is_acknowledged_whatever_came_last(harness: Harness) -> None:
    harness.create()
    harness.append(*map(str, range(1, 7)))
    dead = consumer(harness, batch=3, auto_ack=False, visibility_ms=1)
    assert [message.offset for message in dead.poll()] == [1, 2, 3]
    harness.backend.release("t", "g", 0, 1, member=dead.member, delay_ms=300)
    live = consumer(harness, batch=10, auto_ack=False)
    assert [message.offset for message in live.poll()] == [2, 3, 4, 5, 6]
    assert [message.offset for message in live.poll(10)] == [1]
    live.ack_all()
    assert harness.committed() == 7


def test_a_year_that_python_does_not_know_stops_nobody(harness: Harness) -> None:
    harness.create()
    far = Record(payload=b"x", timestamp=9_000_000_000_000_000)
    harness.writer.append_shared([SharedAppendGroup(topic="t", partition=0, payloads=[far])])
    with consumer(harness) as messages:
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
    with pytest.raises(InvalidArgument, match=r"offset 7 of t/0 is not JSON"):
        message.json()


def test_a_broker_that_is_not_there_is_told_with_what_to_check(unused_tcp_port: int) -> None:
    backend = RemoteBackend(f"http://127.0.0.1:{unused_tcp_port}", timeout_s=1)
    with pytest.raises(StoreUnavailable, match="does not answer"):
        backend.consume(ConsumeOptions(topic="t"))
    backend.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        backend.consume(ConsumeOptions(topic="t"))


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
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.create()
    harness.append("1", "2")
    whole, names = harness.backend.consume, []

    def lost_at_first(call: ConsumeOptions) -> object:
        found = whole(call)
        names.append(call.member)
        if len(names) == 1:
            harness.append("3")
            raise StoreUnavailable("the answer was lost")
        return found

    monkeypatch.setattr(harness.backend, "consume", lost_at_first)
    with consumer(harness, member="m", visibility_ms=400, timeout=3.0) as messages:
        found = list(messages)
    assert names[0] != names[1]
    assert all(name.startswith("m~") for name in names)
    assert [(message.payload, message.attempt) for message in found] == [(b"3", 1), (b"1", 2), (b"2", 2)]
    assert harness.committed() == 4


def test_a_member_that_lost_a_partition_goes_on_with_what_it_has(harness: Harness) -> None:
    harness.create(partitions=2)
    for partition in range(2):
        harness.append("1", "2", partition=partition)
    first = consumer(harness, mode="assigned", member="a")
    assert {message.partition for message in first.poll()} == {0, 1}
    second = consumer(harness, mode="assigned", member="b")
    lost = {message.partition for message in second.poll()}
    assert len(lost) == 1
    assert {message.partition for message in first.poll()} <= {0, 1} - lost
    assert second.poll() == []
    first.close()
    second.close()
    assert harness.committed(partition=0) == harness.committed(partition=1) == 3
