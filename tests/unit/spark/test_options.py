"""Options: Kafka's names and meanings, and mistakes told before anything starts."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from llog.config import Settings
from llog.errors import ConfigurationError
from llog.model import TopicPartition
from llog.spark.options import EARLIEST, LATEST, OffsetSpec, read_options, warn_of_ignored, write_options
from tests.spark.logs import LogOnDisk


@pytest.fixture
def stores(tmp_path: Path) -> dict[str, str]:
    return LogOnDisk(tmp_path).options


def test_a_batch_reads_from_the_beginning_to_the_end_and_a_stream_from_now_on(stores: dict[str, str]) -> None:
    batch = read_options({**stores, "subscribe": "a, b,a"}, streaming=False)
    assert (batch.selection.topics, batch.start.everywhere, batch.end.everywhere) == (("a", "b"), EARLIEST, LATEST)
    assert batch.fail_on_data_loss
    assert not batch.include_headers
    stream = read_options({**stores, "subscribe": "a"}, streaming=True)
    assert stream.start.everywhere == LATEST
    assert (stream.offsets_per_trigger_max, stream.group, stream.trigger_delay_ms_max) == (None, None, 900_000)


def test_names_of_options_are_taken_in_any_case(stores: dict[str, str]) -> None:
    given = {
        "SUBSCRIBEPATTERN": "a.*",
        "startingoffsets": " Earliest ",
        "MaxOffsetsPerTrigger": "5",
        "maxBytesPerTrigger": "2MiB",
        "minOffsetsPerTrigger": "3",
        "maxTriggerDelay": "2m",
        "groupIdForCommit": "g",
        "includeheaders": "TRUE",
        "failOnDataLoss": "false",
        "minPartitions": "7",
        "maxPartitionBytes": "1MiB",
    }
    options = read_options({**stores, **given}, streaming=True)
    assert (options.selection.pattern, options.start.everywhere) == ("a.*", EARLIEST)
    assert (options.offsets_per_trigger_max, options.bytes_per_trigger_max, options.offsets_per_trigger_min) == (
        5,
        2 << 20,
        3,
    )
    assert (options.trigger_delay_ms_max, options.group, options.min_partitions) == (120_000, "g", 7)
    assert (options.include_headers, options.fail_on_data_loss, options.partition_bytes_max) == (True, False, 1 << 20)


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"startingOffsets": '{"a": {"0": -2, "1": 17}}'}, OffsetSpec(offsets={"a/0": -2, "a/1": 17})),
        ({"startingOffsets": "-10m"}, OffsetSpec(ago_ms=600_000)),
        ({"startingTimestamp": "-1h"}, OffsetSpec(ago_ms=3_600_000)),
        ({"startingTimestamp": "1700000000000"}, OffsetSpec(timestamp_ms=1_700_000_000_000)),
        ({"startingOffsetsByTimestamp": '{"a": {"0": 5}}'}, OffsetSpec(timestamps={"a/0": 5})),
        # Times win over offsets, one time for all over times by partition.
        ({"startingOffsets": "earliest", "startingTimestamp": "7"}, OffsetSpec(timestamp_ms=7)),
        ({"startingTimestamp": "7", "startingOffsetsByTimestamp": '{"a": {"0": 5}}'}, OffsetSpec(timestamp_ms=7)),
        (
            {"startingTimestamp": "7", "startingOffsetsByTimestampStrategy": "latest"},
            OffsetSpec(timestamp_ms=7, latest_if_missing=True),
        ),
    ],
)
def test_where_reading_starts(stores: dict[str, str], given: dict[str, str], start: OffsetSpec) -> None:
    assert read_options({**stores, "subscribe": "a", **given}, streaming=True).start == start


def test_where_a_batch_ends(stores: dict[str, str]) -> None:
    def end(**given: str) -> OffsetSpec:
        return read_options({**stores, "subscribe": "a", **given}, streaming=False).end

    assert end(endingOffsets='{"a": {"0": -1, "1": 3}}') == OffsetSpec(offsets={"a/0": -1, "a/1": 3})
    assert end(endingTimestamp="9").timestamp_ms == 9
    assert end(endingOffsetsByTimestamp='{"a": {"0": 9}}').timestamps == {"a/0": 9}


def test_assigned_partitions_are_sorted_and_named_once(stores: dict[str, str]) -> None:
    selection = read_options({**stores, "assign": '{"b": [1, 0, 1], "a": [3]}'}, streaming=False).selection
    assert selection.assigned == (TopicPartition("a", 3), TopicPartition("b", 0), TopicPartition("b", 1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of the options subscribe, subscribePattern and assign"),
        ({"subscribe": "a", "assign": "{}"}, "exactly one of the options"),
        ({"subscribe": " , "}, "subscribe names no topic"),
        ({"subscribe": "a/b"}, r"option subscribe: topic name 'a/b' is not usable"),
        ({"subscribePattern": "("}, "subscribePattern is not a regular expression"),
        ({"assign": '{"a": [-1]}'}, "option assign must look like"),
        ({"assign": "a"}, "option assign is not the JSON it should be"),
        ({"subscribe": "a", "startingOffsets": "{}"}, "option startingOffsets names no partition"),
        ({"subscribe": "a", "startingOffsets": "yesterday"}, "option startingOffsets is not the JSON"),
        (
            {"subscribe": "a", "startingOffsets": '{"a": {"0": -3}}'},
            "option startingOffsets of topic 'a' has {\"0\": -3}: write a partition from 0",
        ),
        ({"subscribe": "a", "startingOffsetsByTimestamp": '{"a": {"0": -1}}'}, "startingOffsetsByTimestamp of topic"),
        ({"subscribe": "a", "startingTimestamp": "today"}, "option startingTimestamp must be ms since 1970"),
        ({"subscribe": "a", "startingOffsetsByTimestampStrategy": "x"}, "must be error or latest: 'x'"),
        ({"subscribe": "a", "failOnDataLoss": "maybe"}, "option failOnDataLoss must be true or false: 'maybe'"),
        ({"subscribe": "a", "minPartitions": "0"}, "option minPartitions must be a whole number above 0: '0'"),
        ({"subscribe": "a", "minPartitions": "²"}, "option minPartitions must be a whole number above 0"),
        ({"subscribe": "a", "maxPartitionBytes": "many"}, "option maxPartitionBytes: 'many' is not a size"),
        ({"subscribe": "a", "startingOffset": "1"}, r"'startingOffset' is unknown.*did you mean startingOffsets"),
        ({"subscribe": "a", "path": "x"}, "option 'path' is unknown for a batch read of llog"),
        ({"subscribe": "a", "maxOffsetsPerTrigger": "1"}, "option maxOffsetsPerTrigger is not for a batch read"),
        ({"subscribe": "a", "startingOffsets": "latest"}, "option startingOffsets cannot be 'latest' in a batch read"),
        ({"subscribe": "a", "startingOffsets": '{"a": {"0": -1}}'}, "cannot have the offset -1 in a batch read"),
        ({"subscribe": "a", "endingOffsets": "earliest"}, "option endingOffsets cannot be 'earliest'"),
    ],
)
def test_a_wrong_option_of_a_read_is_named(stores: dict[str, str], given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_options({**stores, **given}, streaming=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"endingOffsets": "latest"}, "option endingOffsets is not for a stream of llog"),
        ({"maxTriggerDelay": "0"}, "option maxTriggerDelay must be above 0"),
        ({"groupIdForCommit": "a b"}, "option groupIdForCommit: group name 'a b' is not usable"),
    ],
)
def test_a_wrong_option_of_a_stream_is_named(stores: dict[str, str], given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_options({**stores, "subscribe": "a", **given}, streaming=True)


def test_what_batch_or_stream_alone_takes_passes_while_it_is_not_known_which_it_is(stores: dict[str, str]) -> None:
    given = {"subscribe": "a", "startingOffsets": "latest", "endingOffsets": "latest", "maxOffsetsPerTrigger": "1"}
    read_options({**stores, **given}, streaming=None)
    with pytest.raises(ConfigurationError, match="minPartitions"):
        read_options({**stores, **given, "minPartitions": "x"}, streaming=None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topic": "a b"}, "option topic: topic name"),
        ({"writeId": "x" * 200}, "option writeId: "),
        ({"uploadBytes": "2GiB"}, "option uploadBytes is 2147483648, over its limit"),
        ({"createTopicPartitions": "-1"}, "option createTopicPartitions must be"),
        ({"subscribe": "a"}, "option subscribe is not for a batch write"),
    ],
)
def test_a_wrong_option_of_a_write_is_named(stores: dict[str, str], given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        write_options({**stores, **given}, streaming=False)


def test_a_stream_has_no_write_id(stores: dict[str, str]) -> None:
    assert write_options({**stores, "writeId": "w"}, streaming=False).write_id == "w"
    with pytest.raises(ConfigurationError, match="exactly once by its checkpoint"):
        write_options({**stores, "writeId": "w"}, streaming=True)


def test_a_log_in_memory_is_refused_for_spark_runs_in_several_processes() -> None:
    with pytest.raises(ConfigurationError, match="lives in one process"):
        read_options({"subscribe": "a", "meta": "memory://", "blobs": "memory://"}, streaming=False)


def test_kafkas_own_options_are_ignored_with_one_warning_for_all(stores: dict[str, str]) -> None:
    kafkas = {
        "fetchOffset.numRetries": "3",
        "groupIdPrefix": "g",
        "kafka.bootstrap.servers": "x:9092",
        "kafka.group.id": "g",
        "kafkaConsumer.pollTimeoutMs": "512",
        "maxRecordsPerPartition": "10",
    }
    given = {**stores, "subscribe": "a", **{name.lower(): value for name, value in kafkas.items()}}
    for streaming in (False, True, None):
        assert read_options(given, streaming=streaming).selection.topics == ("a",)
    assert write_options({**stores, "topic": "a", **kafkas}, streaming=False).topic == "a"
    with pytest.warns(UserWarning, match=", ".join(kafkas)) as caught:
        warn_of_ignored({**stores, **kafkas})
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_ignored({**stores, "subscribe": "a"})


def test_options_go_before_the_settings_that_are_given_and_those_before_the_environment(
    stores: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLOG_DATA_DIR", str(tmp_path / "environment"))
    given = Settings(data_dir=str(tmp_path / "given"), codec="none")
    assert read_options({"subscribe": "a"}, streaming=False, settings=given).settings == given
    chosen = write_options({**stores, "topic": "a"}, streaming=False, settings=given).settings
    assert (chosen.meta, chosen.blobs, chosen.codec) == (stores["meta"], stores["blobs"], "none")
    own = read_options({"subscribe": "a"}, streaming=False).settings
    assert own.data_dir == str(tmp_path / "environment")
