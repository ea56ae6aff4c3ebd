"""The blocking classes: what programs without an event loop see."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import llog
from llog import (
    LeaderlessLogCompactor,
    LeaderlessLogReader,
    LeaderlessLogWriter,
    OffsetOutOfRange,
    PartitionFenced,
    PartitionNotInitialized,
    PartlyAppended,
    Record,
    Settings,
    SharedAppendGroup,
    StoreUnavailable,
    TopicExists,
    TopicNotFound,
)
from llog.api import portal
from llog.errors import ConfigurationError, InvalidArgument, LogOwned, WrongEngine
from llog.log.engine import AppendResult
from llog.log.producers import Producer
from llog.stores.blobs import Buffer
from llog.stores.files.blobs import FileBlobStore

EXAMPLE = """
from llog import LeaderlessLogCompactor, LeaderlessLogReader, LeaderlessLogWriter, SharedAppendGroup
writer = LeaderlessLogWriter.from_env()
writer.initialize_partition("orders", 0)
writer.append_shared([SharedAppendGroup(topic="orders", partition=0, payloads=[b"a", b"b", b"c"])])
reader = LeaderlessLogReader.from_env()
print(reader.read_offset("orders", 0, 1).payload)
compactor = LeaderlessLogCompactor.from_env()
print(compactor.compact_once("orders", 0))
writer.close(); reader.close(); compactor.close()
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=str(tmp_path))


def _group(*payloads: str | bytes | Record, partition: int = 0, producer: Producer | None = None) -> SharedAppendGroup:
    return SharedAppendGroup(topic="t", partition=partition, payloads=payloads, producer=producer)


def test_the_example_runs_with_nothing_but_the_environment(tmp_path: Path) -> None:
    environment = {**os.environ, "LLOG_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("b'a'\nCompactionResult(topic='orders', partition=0")


def test_text_bytes_and_records_are_read_back(settings: Settings) -> None:
    whole = Record(payload=b"p", key=b"k", timestamp=5, headers=(("h", b"v"),))
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        writer.initialize_partition("t", 0)
        (result,) = writer.append_shared([_group("é", b"\xff", whole)])
        assert (result.start_offset, result.end_offset) == (1, 3)
        records = reader.read_range("t", 0, 1, 4)
    assert [record.payload for record in records] == ["é".encode(), b"\xff", b"p"]
    last = records[2]
    assert (last.offset, last.key, last.timestamp, last.headers) == (3, b"k", 5, (("h", b"v"),))


def test_initialising_creates_the_topic_then_grows_it_and_never_shrinks_it(settings: Settings) -> None:
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        for partition, expected in ((1, 2), (3, 4), (0, 4)):
            writer.initialize_partition("t", partition)
            assert [topic.partitions for topic in reader.topics()] == [expected]
        with pytest.raises(InvalidArgument, match="-1"):
            writer.initialize_partition("t", -1)


def test_several_threads_initialise_one_topic_without_an_error(settings: Settings) -> None:
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda partition: writer.initialize_partition("t", partition), range(8)))
        assert reader.topics()[0].partitions == 8


def test_an_append_of_which_a_part_fails_tells_which_part(settings: Settings) -> None:
    with LeaderlessLogWriter(settings) as writer:
        writer.create_topic("t", 2)
        writer.fence("t", 1)
        with pytest.raises(PartlyAppended) as caught:
            writer.append_shared([_group("a"), _group("b", partition=1)])
        kept, refused = caught.value.results
        assert isinstance(kept, AppendResult)
        assert isinstance(refused, PartitionFenced)
        with pytest.raises(PartitionFenced):
            writer.append_shared([_group("b", partition=1)])
        writer.unfence("t", 1)
        assert writer.append_shared([_group("b", partition=1)])[0].start_offset == 1


def test_a_repeated_append_of_a_producer_gets_its_first_offsets(settings: Settings) -> None:
    with LeaderlessLogWriter(settings) as writer:
        writer.create_topic("t")
        group = _group("a", producer=Producer(id="p", sequence=0, since=1))
        first, again = writer.append_shared([group])[0], writer.append_shared([group])[0]
    assert (first.repeated, again.repeated) == (False, True)
    assert again.start_offset == first.start_offset


def test_reading_ends_at_what_was_the_end_and_outside_of_the_bounds_is_an_error(settings: Settings) -> None:
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        writer.create_topic("t")
        for number in range(5):
            writer.append_shared([_group(str(number))])
        records = reader.iter_from("t", 0, 2)
        assert next(records).payload == b"1"
        writer.append_shared([_group("late")])
        assert [record.payload for record in records] == [b"2", b"3", b"4"]
        assert reader.bounds("t", 0) == (1, 7)
        with pytest.raises(OffsetOutOfRange):
            reader.read_offset("t", 0, 7)


def test_a_waiting_reader_is_woken_by_an_append(settings: Settings) -> None:
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        writer.create_topic("t")
        assert reader.wait("t", 0, 1, 0.01) is False
        woken: list[bool] = []
        thread = threading.Thread(target=lambda: woken.append(reader.wait("t", 0, 1, 60)))
        thread.start()
        writer.append_shared([_group("a")])
        thread.join()
        assert woken == [True]


def test_the_offset_for_a_time_is_that_of_the_first_record_at_or_after_it(settings: Settings) -> None:
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        writer.create_topic("t")
        writer.append_shared([_group(*(Record(payload=b"", timestamp=ms) for ms in (10, 20, 30)))])
        assert [reader.offset_for_time("t", 0, ms) for ms in (0, 20, 21, 31)] == [1, 2, 3, 4]


def test_compaction_joins_appends_and_changes_no_record(settings: Settings) -> None:
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        writer.create_topic("t")
        for number in range(5):
            writer.append_shared([_group(str(number))])
        with LeaderlessLogCompactor(settings) as compactor:
            result = compactor.compact_once("t", 0, force=True)
        assert (result.start_offset, result.end_offset, result.entries) == (1, 5, 5)
        assert [record.payload for record in reader.iter_from("t", 0, 1)] == [b"0", b"1", b"2", b"3", b"4"]


def test_iterating_over_compacted_records_reads_large_pieces(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    shipped = FileBlobStore.get_ranges

    async def get_ranges(store: FileBlobStore, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        fetched.append(sum(length for _, length in ranges))
        return await shipped(store, name, ranges)

    payloads = [os.urandom(900_000) for _ in range(30)]
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        writer.create_topic("t")
        for payload in payloads:
            writer.append_shared([_group(payload)])
        with LeaderlessLogCompactor(settings) as compactor:
            assert compactor.compact_once("t", 0, force=True).records == 30
        monkeypatch.setattr(FileBlobStore, "get_ranges", get_ranges)
        assert [record.payload for record in reader.iter_from("t", 0, 1)] == payloads
    assert sum(fetched) / len(fetched) >= 4 << 20


def test_a_range_that_begins_outside_the_bounds_is_refused(settings: Settings) -> None:
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        writer.create_topic("t")
        writer.append_shared([_group("a", "b")])
        assert reader.read_range("t", 0, 3, 9) == []
        for start in (0, 4):
            with pytest.raises(OffsetOutOfRange, match="the log starts at 1 and the next offset is 3"):
                reader.read_range("t", 0, start, 9)
            with pytest.raises(OffsetOutOfRange):
                list(reader.iter_from("t", 0, start))
        with pytest.raises(PartitionNotInitialized):
            reader.read_range("missing", 0, 1, 9)


def test_a_deleted_topic_is_gone_and_its_name_is_free(settings: Settings) -> None:
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        writer.create_topic("t")
        with pytest.raises(TopicExists):
            writer.create_topic("t")
        writer.append_shared([_group("old")])
        writer.delete_topic("t")
        with pytest.raises(TopicNotFound):
            reader.bounds("t", 0)
        writer.create_topic("t")
        assert reader.bounds("t", 0) == (1, 1)


def test_a_closed_object_refuses_and_closing_twice_is_no_error(settings: Settings) -> None:
    writer = LeaderlessLogWriter(settings)
    writer.create_topic("t")
    writer.close()
    writer.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        writer.create_topic("u")
    LeaderlessLogReader(settings).close()  # never used, so never opened


def test_a_failed_opening_is_tried_again_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("in the way")
    with LeaderlessLogWriter(Settings(data_dir=str(tmp_path / "data"))) as writer:
        with pytest.raises(StoreUnavailable, match="LLOG_META"):
            writer.create_topic("t")
        (tmp_path / "data").unlink()
        assert writer.create_topic("t").partitions == 1


FORKED = """
import os, sys
from llog import LeaderlessLogWriter, LeaderlessLogReader, SharedAppendGroup
writer = LeaderlessLogWriter.from_env()
writer.initialize_partition("t", 0)
child = os.fork()
writer.append_shared([SharedAppendGroup(topic="t", partition=0, payloads=[b"x"] * 10)])
if child == 0:
    writer.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
print(status, LeaderlessLogReader.from_env().bounds("t", 0).next_offset)
"""


def test_an_object_that_was_used_before_a_fork_works_on_both_sides(tmp_path: Path) -> None:
    environment = {**os.environ, "LLOG_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "0 21\n", done.stderr


def test_arguments_that_mean_nothing_are_refused(settings: Settings) -> None:
    with LeaderlessLogWriter(settings) as writer:
        writer.create_topic("t")
        with pytest.raises(InvalidArgument, match="int"):
            writer.append_shared([SharedAppendGroup(topic="t", partition=0, payloads=[1])])  # type: ignore[list-item]
        with pytest.raises(InvalidArgument, match="surrogate"):
            writer.append_shared([_group("\ud800")])
        with pytest.raises(InvalidArgument, match="create or append"):
            writer.create_topic("u", timestamp_type="later")


def test_a_blocking_call_on_the_background_loop_is_refused_instead_of_hanging() -> None:
    async def nothing() -> None: ...

    async def nested() -> None:
        portal.run(nothing())

    with pytest.raises(InvalidArgument, match="forever"):
        portal.run(nested())


def test_wrong_settings_are_told_when_the_object_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLOG_CODEC", "gzip")
    with pytest.raises(ConfigurationError, match="LLOG_CODEC"):
        LeaderlessLogWriter.from_env()


def test_importing_llog_loads_nothing_heavy() -> None:
    script = "import sys, llog; print(sorted({'pyarrow', 'pyspark', 'obstore', 'numpy', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_everything_public_is_importable_from_the_package() -> None:
    assert {"LeaderlessLogWriter", "Record", "TopicPartition", "TopicNotFound", "__version__"} <= set(dir(llog))
    assert all(getattr(llog, name) is not None for name in dir(llog) if not name.startswith("_"))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = llog.nonsense


def test_a_topic_on_disk_is_written_and_read_like_any_other(settings: Settings) -> None:
    with LeaderlessLogWriter(settings) as writer, LeaderlessLogReader(settings) as reader:
        assert writer.create_topic("t", 2, engine="disk").engine == "disk"
        assert writer.create_topic("c", engine="disk", cleanup="compact").cleanup == "compact"
        (result,) = writer.append_shared([_group("a", "b")])
        assert (result.start_offset, result.end_offset) == (1, 2)
        assert reader.read_offset("t", 0, 2).payload == b"b"
        assert [record.payload for record in reader.iter_from("t", 0, 1)] == [b"a", b"b"]
        assert reader.bounds("t", 1) == (1, 1)
        with pytest.raises(WrongEngine):
            writer.fence("t", 0)
        with pytest.raises(InvalidArgument, match="sometimes"):
            writer.create_topic("u", cleanup="sometimes")
        with LeaderlessLogWriter(settings) as other, pytest.raises(LogOwned, match="POST /produce"):
            other.append_shared([_group("c")])
    with LeaderlessLogWriter(settings) as other:
        assert other.append_shared([_group("c")])[0].start_offset == 3
