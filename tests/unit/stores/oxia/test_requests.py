"""How calls become requests: Oxia applies puts first, then deletes, then ranges, whatever the order of the calls."""

from __future__ import annotations

from llog.errors import OutcomeUnknown
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.writes import REQUEST_BYTES_MAX, Request


def puts(count: int = 1) -> proto.WriteRequest:
    return proto.WriteRequest(puts=[proto.PutRequest(key="a")] * count)


def deletes(count: int = 1) -> proto.WriteRequest:
    return proto.WriteRequest(deletes=[proto.DeleteRequest(key="a")] * count)


def delete_range() -> proto.WriteRequest:
    return proto.WriteRequest(delete_ranges=[proto.DeleteRangeRequest(start_inclusive="a", end_exclusive="b")])


async def test_calls_share_a_request_as_long_as_their_order_is_the_order_of_kinds() -> None:
    request = Request(3)
    for call in (puts(), puts(), deletes(), delete_range(), delete_range()):
        assert request.add(call, 1) is not None
    assert request.add(puts(), 1) is None
    assert request.add(deletes(), 1) is None
    assert request.add(delete_range(), 1) is not None
    assert request.message.shard == 3
    assert len(request.message.puts) == 2
    assert len(request.message.deletes) == 1
    assert len(request.message.delete_ranges) == 3


async def test_each_call_gets_the_answers_of_its_own_operations() -> None:
    request = Request(0)
    first, gone, last = request.add(puts(2), 2), request.add(deletes(), 1), None
    assert first is not None
    assert gone is not None
    last = request.add(deletes(2), 2)
    assert last is not None
    response = proto.WriteResponse(
        puts=[proto.PutResponse(version=proto.Version(version_id=number)) for number in (7, 8)],
        deletes=[proto.DeleteResponse(status=status) for status in ("OK", "KEY_NOT_FOUND", "UNEXPECTED_VERSION_ID")],
    )
    request.answer(response)
    assert [each.version.version_id for each in first.result()] == [7, 8]
    assert [each.status for each in gone.result()] == [0]
    assert [each.status for each in last.result()] == [1, 2]


async def test_a_call_that_was_given_up_does_not_disturb_the_others() -> None:
    request = Request(0)
    given_up, other = request.add(puts(), 1), request.add(puts(), 1)
    assert given_up is not None
    assert other is not None
    given_up.cancel()
    request.answer(proto.WriteResponse(puts=[proto.PutResponse(), proto.PutResponse(status="UNEXPECTED_VERSION_ID")]))
    assert other.result()[0].status == 2
    failed = Request(0)
    future = failed.add(puts(), 1)
    assert future is not None
    failed.fail(OutcomeUnknown("lost"))
    assert isinstance(future.exception(), OutcomeUnknown)


async def test_a_request_stays_below_the_size_that_oxia_takes() -> None:
    request = Request(0)
    assert request.add(puts(), REQUEST_BYTES_MAX - 1) is not None
    assert request.add(puts(), 2) is None
    assert request.add(puts(), 1) is not None
