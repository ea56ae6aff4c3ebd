"""The recorder: every operation is written down as it begins and as it ends, whoever dies in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from llog.api.leaderless import LeaderlessLogReader, LeaderlessLogWriter, SharedAppendGroup
from llog.config.loading import load_settings
from llog.engines.object.reader import Reader
from llog.engines.object.writer import Writer
from llog.errors import InvalidArgument, LlogError, OutcomeUnknown, StoreUnavailable, TopicNotFound
from llog.history.checker import check_history
from llog.history.lines import Append, Bounds, End, Line, Outcome, ProducerKey, Read, Trim, decoder
from llog.history.recorded import RecordedAppender, RecordedLogReader, RecordedLogWriter, RecordedReader
from llog.history.recorded_http import RecordedAsyncBroker, RecordedBroker
from llog.history.recorder import HistoryRecorder
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, AppendResult, LogAppender, RetentionResult
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.log.producers import Producer
from llog.model import Record, TopicPartition

T0 = TopicPartition("t", 0)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[HistoryRecorder]:
    with HistoryRecorder(tmp_path / "history.jsonl", process="tester") as recorder:
        yield recorder


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[Log]:
    async with opened_log(load_settings({"data_dir": str(tmp_path / "log")})) as log:
        await Catalog(log).create("t", 1)
        yield log


def lines(path: Path) -> list[Line]:
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def group(*payloads: bytes, producer: Producer | None = None, topic: str = "t") -> AppendGroup:
    return AppendGroup(topic=topic, partition=0, records=[Record(payload=each) for each in payloads], producer=producer)


async def test_appends_reads_and_trims_of_a_real_log_are_recorded_and_accepted(
    recorder: HistoryRecorder, log: Log
) -> None:
    appender, reader = RecordedAppender(recorder, Writer(log)), RecordedReader(recorder, Reader(log))
    producer = Producer(id="p", sequence=0, since=1)
    await appender.append([group(b"a", b"b")])
    for _ in range(2):
        [result] = await appender.append([group(b"c", producer=producer)])
        assert isinstance(result, AppendResult)
        assert result.start_offset == 3
    [refused] = await appender.append([group(b"x", producer=Producer(id="p", sequence=7, since=1))])
    assert isinstance(refused, LlogError)
    with pytest.raises(TopicNotFound):
        await appender.append([group(b"x", topic="nowhere")])
    assert len(await reader.read(T0, 1)) == 2
    assert await reader.read(T0, 4) == []
    assert (await reader.read_offset(T0, 2)).payload == b"b"
    assert [batch.start_offset async for batch in reader.iter_from(T0, 3)] == [3]
    assert await reader.wait(T0, 3, 0)
    await appender.trim(T0, 2)
    await appender.retain(T0, retention_ms=None, retention_bytes=None)
    with pytest.raises(LlogError):
        await reader.read(T0, 1)
    report = check_history([recorder.path])
    assert report.clean, report
    assert [(each.topic, each.acknowledged) for each in report.partitions] == [("nowhere", 0), ("t", 3)]
    kinds = [type(line) for line in lines(recorder.path) if not isinstance(line, End)]
    assert kinds.count(Append) == 5
    assert kinds.count(Trim) == 2
    assert Bounds in kinds
    assert Read in kinds


class Failing:
    """An appender whose calls end with this."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def append(self, groups: object) -> list[AppendResult | LlogError]:
        raise self._error

    async def trim(self, tp: TopicPartition, before_offset: int) -> RetentionResult:
        raise self._error

    async def retain(
        self, tp: TopicPartition, *, retention_ms: int | None, retention_bytes: int | None
    ) -> RetentionResult:
        raise self._error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (StoreUnavailable("down"), Outcome.FAILED),
        (OutcomeUnknown("lost"), Outcome.UNKNOWN),
        (TimeoutError(), Outcome.UNKNOWN),
        (KeyboardInterrupt(), Outcome.UNKNOWN),
    ],
)
async def test_only_an_error_of_llogs_own_says_that_nothing_was_appended(
    recorder: HistoryRecorder, error: BaseException, outcome: Outcome
) -> None:
    appender: LogAppender = RecordedAppender(recorder, Failing(error))
    with pytest.raises(type(error)):
        await appender.append([group(b"a"), group(b"b")])
    with pytest.raises(type(error)):
        await appender.trim(T0, 2)
    ends = [line for line in lines(recorder.path) if isinstance(line, End)]
    assert [end.outcome for end in ends] == [outcome] * 3
    assert ends[0].error == getattr(error, "code", type(error).__name__)


def test_the_blocking_classes_are_recorded(recorder: HistoryRecorder, tmp_path: Path) -> None:
    settings = load_settings({"data_dir": str(tmp_path / "log")})
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        writer.initialize_partition("t", 0)
        recorded, reading = RecordedLogWriter(recorder, writer), RecordedLogReader(recorder, reader)
        recorded.append_shared(
            [SharedAppendGroup(topic="t", partition=0, payloads=["a", Record(payload=b"b", key=b"k")])]
        )
        missing = SharedAppendGroup(topic="none", partition=0, payloads=["x"])
        with pytest.raises(LlogError):
            recorded.append_shared([SharedAppendGroup(topic="t", partition=0, payloads=["c"]), missing])
        with pytest.raises(LlogError):
            recorded.append_shared([missing])
        assert reading.bounds("t", 0) == (1, 4)
        assert len(reading.read_range("t", 0, 1, 100)) == 3
        assert reading.read_range("t", 0, 4, 100) == []
        assert reading.read_offset("t", 0, 2).key == b"k"
        with pytest.raises(LlogError):
            reading.read_offset("t", 0, 9)
    report = check_history([recorder.path])
    assert report.clean, report
    assert [each.acknowledged for each in report.partitions] == [0, 3]


def answering(answer: dict[str, Any] | str, status: int = 200) -> httpx.MockTransport:
    body = answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()
    return httpx.MockTransport(lambda _: httpx.Response(status, text=body))


ITEM = {"topic": "t", "partition": 0}
PRODUCED = {**ITEM, "records": ["a", {"base64": "/w=="}, {"value": "b", "key": "k", "headers": [["h", "v"]]}]}
CONSUMED = {
    **ITEM,
    "high_watermark": 3,
    "log_start_offset": 1,
    "next_fetch_offset": 4,
    "records": [
        {"offset": 1, "payload": "a", "key": None, "timestamp": 1, "headers": []},
        {"offset": 2, "payload": {"base64": "/w=="}, "key": None, "timestamp": 1, "headers": []},
        {"offset": 3, "payload": "b", "key": "k", "timestamp": 1, "headers": [["h", "v"]]},
    ],
}


def test_produce_and_consume_over_http_are_recorded(recorder: HistoryRecorder) -> None:
    with httpx.Client(
        base_url="http://a", transport=answering({"topic_partitions": [{**ITEM, "start_offset": 1, "end_offset": 3}]})
    ) as client:
        assert RecordedBroker(recorder, client, via="a").produce([PRODUCED]).status_code == 200
    with httpx.Client(base_url="http://b", transport=answering({"topic_partitions": [CONSUMED]})) as client:
        RecordedBroker(recorder, client, via="b").consume([{**ITEM, "fetch_offset": 1}], max_wait_ms=0)
    report = check_history([recorder.path])
    assert report.clean, report
    assert report.partitions[0].acknowledged == 3
    assert [line.via for line in lines(recorder.path) if isinstance(line, Append | Read)] == ["a", "b"]


@pytest.mark.parametrize(("start_offset", "broken"), [(1, set()), (4, {"I8"})])
def test_a_retry_of_a_producer_over_http_must_get_the_same_offsets(
    recorder: HistoryRecorder, start_offset: int, broken: set[str]
) -> None:
    sent = {**PRODUCED, "producer_id": "p", "producer_epoch": 2, "sequence": 0}
    for start in (1, start_offset):
        answer = {**ITEM, "start_offset": start, "end_offset": start + 2, "repeated": True}
        with httpx.Client(base_url="http://a", transport=answering({"topic_partitions": [answer]})) as client:
            RecordedBroker(recorder, client, via="a").produce([sent])
    report = check_history([recorder.path])
    found = {finding.invariant for partition in report.partitions for finding in partition.findings}
    assert found == broken
    recorded = [line.producer for line in lines(recorder.path) if isinstance(line, Append)]
    assert recorded == [ProducerKey(id="http/p", epoch=2, sequence=0)] * 2


async def test_an_async_client_is_recorded_and_a_gap_in_an_answer_shows(recorder: HistoryRecorder) -> None:
    gap = {**CONSUMED, "records": [CONSUMED["records"][0], CONSUMED["records"][2]]}  # type: ignore[index]
    acknowledged = {"topic_partitions": [{**ITEM, "start_offset": 1, "end_offset": 3}]}
    async with httpx.AsyncClient(base_url="http://a", transport=answering(acknowledged)) as client:
        await RecordedAsyncBroker(recorder, client, via="a").produce([PRODUCED])
    async with httpx.AsyncClient(base_url="http://b", transport=answering({"topic_partitions": [gap]})) as client:
        await RecordedAsyncBroker(recorder, client, via="b").consume([{**ITEM, "fetch_offset": 1}])
    assert "through b (" in str(check_history([recorder.path]))
    assert check_history([recorder.path]).findings == 1


@pytest.mark.parametrize(
    ("answer", "status", "outcome"),
    [
        ({"topic_partitions": [{**ITEM, "error": {"code": "partition_fenced", "detail": ""}}]}, 200, Outcome.FAILED),
        ({"topic_partitions": [{**ITEM, "error": {"code": "outcome_unknown", "detail": ""}}]}, 503, Outcome.UNKNOWN),
        ({"code": "overloaded", "detail": ""}, 429, Outcome.FAILED),
        ({"code": "error", "detail": ""}, 500, Outcome.UNKNOWN),
        ({"topic_partitions": []}, 200, Outcome.UNKNOWN),
        ({"topic_partitions": [ITEM]}, 200, Outcome.UNKNOWN),
        ("<html>bad gateway</html>", 502, Outcome.UNKNOWN),
        ("{", 200, Outcome.UNKNOWN),
    ],
)
def test_only_an_answer_of_llogs_own_says_that_nothing_was_appended(
    recorder: HistoryRecorder, answer: dict[str, Any] | str, status: int, outcome: Outcome
) -> None:
    with httpx.Client(base_url="http://a", transport=answering(answer, status)) as client:
        RecordedBroker(recorder, client, via="a").produce([PRODUCED])
    [end] = [line for line in lines(recorder.path) if isinstance(line, End)]
    assert end.outcome is outcome


def test_a_connection_that_breaks_leaves_the_outcome_open(recorder: HistoryRecorder) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset", request=request)

    with httpx.Client(base_url="http://a", transport=httpx.MockTransport(broken)) as client:
        broker = RecordedBroker(recorder, client, via="a")
        with pytest.raises(httpx.ReadError):
            broker.produce([PRODUCED])
        with pytest.raises(httpx.ReadError):
            broker.consume([{**ITEM, "fetch_offset": 1}])
    assert [line.outcome for line in lines(recorder.path) if isinstance(line, End)] == [Outcome.UNKNOWN] * 2


def test_threads_write_whole_lines(recorder: HistoryRecorder) -> None:
    def work(number: int) -> None:
        for turn in range(200):
            operation = recorder.append(TopicPartition("t", number), [Record(payload=b"%d" % turn)])
            operation.appended(turn + 1, turn + 1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(recorder.path)) == 1 + 2 * 8 * 200
    assert check_history([recorder.path]).findings == 0


_KILLED = """
import os, signal, sys
from llog.history.recorder import HistoryRecorder
from llog.model import Record, TopicPartition
recorder = HistoryRecorder(sys.argv[1], process="killed")
done = recorder.append(TopicPartition("t", 0), [Record(payload=b"done")])
done.appended(1, 1)
recorder.append(TopicPartition("t", 0), [Record(payload=b"under way")])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_had_under_way_is_unknown_and_its_file_can_be_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    assert subprocess.run([sys.executable, "-c", _KILLED, str(path)]).returncode == -signal.SIGKILL
    with path.open("ab") as file:
        file.write(b'{"line":"append","op":3,"to')  # as if it had been killed within a line
    with HistoryRecorder(path, process="reader") as recorder:
        recorder.read(T0, 1).answered(next_offset=2)
    report = check_history([path])
    assert (report.operations, report.findings, report.unread, report.partitions[0].unknown) == (3, 0, 1, 1)
    assert path.read_bytes().count(b"\n") == 8


def test_one_recorder_writes_a_file(recorder: HistoryRecorder) -> None:
    with pytest.raises(InvalidArgument, match="another recorder"):
        HistoryRecorder(recorder.path)


def test_a_recorder_does_not_outlive_a_fork_or_its_end(
    recorder: HistoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 1)
        with pytest.raises(InvalidArgument, match="before a fork"):
            recorder.bounds(T0)
    recorder.close()
    recorder.close()
    with pytest.raises(InvalidArgument, match="closed"):
        recorder.bounds(T0)
