"""The blocking classes, and the fast way of bytes into SlateDB."""

from __future__ import annotations

import os
import threading

import pytest

from llog.errors import InvalidArgument, WriterFenced
from llog.keyed import (
    CountOptions,
    KeyRange,
    LogEntry,
    RetentionConfig,
    ScanOptions,
    SyncKeyedLog,
    SyncKeyedLogReader,
    WriteOptions,
    fast_bytes,
)


def test_a_program_without_an_event_loop_writes_and_reads(url: str) -> None:
    with SyncKeyedLog.open(url) as log:
        assert log.append([(b"a", b"1"), (b"b", b"2")]) == 0
        assert log.append_with_options([(b"a", b"3")], WriteOptions(await_durable=False)) == 2
        log.flush()
        assert log.seal_segment(b"meta") == 0
        with SyncKeyedLogReader.open(url) as reader:
            for each in (log, reader):
                assert list(each.scan(b"a")) == [LogEntry(b"a", 0, b"1"), LogEntry(b"a", 2, b"3")]
                assert [entry.sequence for entry in each.scan_with_options(b"a", None, ScanOptions(limit=1))] == [0]
                assert [entry.sequence for entry in each.scan_prefix(b"")] == [0, 2, 1]
                assert [entry.sequence for entry in each.scan_keys(KeyRange(b"b"))] == [1]
                assert [batch.num_rows for batch in each.scan_batches(b"a")] == [2]
                assert [batch.num_rows for batch in each.scan_prefix_batches(b"b")] == [1]
                assert [batch.num_rows for batch in each.scan_keys_batches(KeyRange())] == [3]
                assert list(each.keys()) == [b"a", b"b"]
                assert (each.count(b"a"), each.count_with_options(b"a", range(1), CountOptions())) == (2, 1)
                assert [segment.user_meta for segment in each.segments()] == [b"meta", None]
                assert each.next_sequence() == 3
                tail = each.tail(prefix=b"", after=-1)
                assert [next(tail).sequence for _ in range(3)] == [0, 1, 2]
                assert next(each.tail_batches(b"a", after=0)).num_rows == 1
                assert each.metrics()
        assert log.delete_segments(1) == 1
        assert log.retain(RetentionConfig(max_bytes=0)) == 0
        SyncKeyedLog.open(url).close()
        with pytest.raises(WriterFenced):
            log.append([(b"a", b"4")])


def test_threads_may_share_a_log(url: str) -> None:
    with SyncKeyedLog.open(url) as log:
        threads = [threading.Thread(target=log.append, args=([(b"k", b"%d" % number)] * 10,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert log.count(b"k") == 80


def test_a_log_that_was_opened_before_a_fork_refuses_the_child(url: str) -> None:
    with SyncKeyedLog.open(url) as log:
        log._pid = os.getppid()  # as the child would find it
        with pytest.raises(InvalidArgument, match="fork"):
            log.count(b"k")
        log._pid = os.getpid()


def test_the_fast_converter_is_in_use_with_the_locked_version() -> None:
    assert fast_bytes.install()


def test_the_fast_converter_is_left_out_for_unknown_versions_and_when_it_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slatedb.uniffi._slatedb_uniffi import slatedb as binding

    in_use = binding._UniffiFfiConverterBytes.lower
    monkeypatch.setattr(fast_bytes, "_installed", None)
    monkeypatch.setattr(fast_bytes, "version", lambda _: "0.18.0")
    assert not fast_bytes.install()
    monkeypatch.setattr(fast_bytes, "_installed", None)
    monkeypatch.setattr(fast_bytes, "version", lambda _: "0.17.3")
    monkeypatch.setattr(fast_bytes, "_make_lower", lambda *_: lambda value: in_use(value + b"!"))
    assert not fast_bytes.install()
    assert binding._UniffiFfiConverterBytes.lower is in_use
