"""Exports: every record once, in every format, however often they are run, raced or killed."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import polars
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from llog.api.leaderless import LeaderlessLogWriter
from llog.cli.main import main
from llog.config import Settings
from llog.engines.object.retention import trim
from llog.errors import ConfigurationError, DataLoss, MissingExtra, StaleWrite, WrongStore
from llog.log.opening import opened_log
from llog.model import Record, TopicPartition
from llog.spark.jobs.lake.decoder import avro_decoding, decoder, json_decoding
from llog.spark.jobs.lake.export import FORMATS, ExportOptions, Format, export, open_table
from llog.spark.jobs.lake.topic_table import in_process, in_spark, source_of
from llog.spark.process import run
from tests.pipeline.lake_tools import append, kill_until_done, numbered, rows_of, table_rows

KILLED = """
from llog.config import Settings
from llog.spark.jobs.lake.export import ExportOptions, export, open_table
from llog.spark.jobs.lake.topic_table import in_process, source_of
from llog.spark.process import run
settings = Settings(data_dir={data!r})
options = ExportOptions(topic="events", format={kind!r}, to={to!r}, commit_bytes=3000)
open_table(options, run(settings, lambda log: source_of(log, "events")))
print("begun", flush=True)
export(settings, options, in_process)
"""


@pytest.mark.parametrize("kind", FORMATS)
def test_runs_add_what_is_new_and_the_table_equals_the_topic(
    kind: Format, spark: SparkSession, log_settings: Settings, tmp_path: Path
) -> None:
    options = ExportOptions(topic="events", format=kind, to=str(tmp_path / "table"))
    append(log_settings, "events", 0, numbered(0, 60))
    append(log_settings, "events", 1, numbered(60, 90))
    first = export(log_settings, options, in_spark(spark))
    assert (first.records, first.commits, first.positions) == (90, 1, {0: 61, 1: 31})
    assert table_rows(kind, tmp_path / "table") == rows_of(log_settings, "events")
    assert export(log_settings, options, in_spark(spark)).files == 0
    append(log_settings, "events", 0, numbered(90, 120))
    assert export(log_settings, options, in_spark(spark)).records == 30
    assert table_rows(kind, tmp_path / "table") == rows_of(log_settings, "events")


def test_a_parquet_export_reads_as_a_plain_table_in_polars_and_spark(
    spark: SparkSession, log_settings: Settings, tmp_path: Path
) -> None:
    append(log_settings, "events", 0, numbered(0, 60))
    export(
        log_settings, ExportOptions(topic="events", format="parquet", to=str(tmp_path / "t"), headers=True), in_process
    )
    found = polars.scan_parquet(f"{tmp_path}/t/**/*.parquet").sort("offset").collect()
    assert found.columns == ["topic", "partition", "offset", "timestamp", "key", "value", "headers", "day"]
    assert list(found["value"]) == [row[3] for row in rows_of(log_settings, "events", 1)]
    assert (found["timestamp"].dt.date() == found["day"]).all()
    days = {path.parent.parent.name for path in tmp_path.glob("t/day=*/partition=*/*.parquet")}
    assert days == {f"day={day}" for day in found["day"].unique()}
    assert spark.read.parquet(str(tmp_path / "t")).where("partition = 0").count() == 60


@pytest.mark.parametrize("kind", FORMATS)
def test_files_are_closed_near_the_target_size_and_commits_are_bounded(
    kind: Format, log_settings: Settings, tmp_path: Path
) -> None:
    chance = random.Random(3)
    for _ in range(40):
        append(log_settings, "events", 0, [Record(payload=chance.randbytes(1000), timestamp=0) for _ in range(10)])
    options = ExportOptions(
        topic="events", format=kind, to=str(tmp_path / "t"), file_bytes=100_000, commit_bytes=200_000
    )
    result = export(log_settings, options, in_process)
    assert result.records == 400
    assert result.commits in (2, 3)
    sizes = [path.stat().st_size for path in tmp_path.glob("t/**/*.parquet")]
    assert len(sizes) == result.files
    assert max(sizes) < 150_000
    assert len(sizes) <= 8


@pytest.mark.parametrize("kind", FORMATS)
def test_an_export_that_is_killed_at_any_point_goes_on_without_loss_or_duplicates(
    kind: Format, log_settings: Settings, tmp_path: Path
) -> None:
    for start in range(0, 1200, 100):
        append(log_settings, "events", start // 100 % 2, numbered(start, start + 100))
    code = KILLED.format(data=log_settings.data_dir, kind=kind, to=str(tmp_path / "table"))
    assert kill_until_done(code, kills=3, seed=11) > 0
    assert table_rows(kind, tmp_path / "table") == rows_of(log_settings, "events")
    assert not list(tmp_path.glob("table/_llog/staging-*"))


@pytest.mark.parametrize("kind", FORMATS)
def test_an_exporter_that_was_overtaken_cannot_commit(kind: Format, log_settings: Settings, tmp_path: Path) -> None:
    append(log_settings, "events", 0, numbered(0, 50))
    append(log_settings, "events", 1, numbered(0, 50))
    options = ExportOptions(topic="events", format=kind, to=str(tmp_path / "table"))

    def overtaken(work: Any, tasks: Any, /) -> Any:
        written = in_process(work, tasks)
        assert export(log_settings, options, in_process).records == 100
        return written

    with pytest.raises(StaleWrite, match="another exporter"):
        export(log_settings, options, overtaken)
    assert table_rows(kind, tmp_path / "table") == rows_of(log_settings, "events")
    append(log_settings, "events", 0, numbered(50, 60))
    with pytest.raises(StaleWrite):
        export(log_settings, options, lambda work, tasks: _after_another(log_settings, options, work, tasks))
    assert table_rows(kind, tmp_path / "table") == rows_of(log_settings, "events")


def _after_another(settings: Settings, options: ExportOptions, work: Any, tasks: Any) -> Any:
    export(settings, options, in_process)
    return in_process(work, tasks)


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_of_exporters_that_race_none_writes_a_record_twice(
    kind: Format, log_settings: Settings, tmp_path: Path
) -> None:
    for start in range(0, 400, 100):
        append(log_settings, "events", start // 100 % 2, numbered(start, start + 100))
    options = ExportOptions(topic="events", format=kind, to=str(tmp_path / "table"), commit_bytes=2000)
    ended: list[BaseException | None] = []

    def run_one() -> None:
        try:
            export(log_settings, options, in_process)
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=run_one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(error is None or isinstance(error, StaleWrite) for error in ended), ended
    export(log_settings, options, in_process)
    assert table_rows(kind, tmp_path / "table") == rows_of(log_settings, "events")


def test_files_of_a_committed_manifest_that_were_not_moved_yet_are_moved_by_the_next_run(
    log_settings: Settings, tmp_path: Path
) -> None:
    append(log_settings, "events", 0, numbered(0, 40))
    options = ExportOptions(topic="events", format="parquet", to=str(tmp_path / "t"))
    export(log_settings, options, in_process)
    manifest = json.loads((tmp_path / "t/_llog/00000000000000000000.json").read_bytes())
    staging = tmp_path / "t/_llog" / manifest["staging"]
    staging.mkdir()
    for path in list(tmp_path.glob("t/day=*/partition=*/*.parquet")):
        path.rename(staging / f"{path.stem}.staged")
    assert export(log_settings, options, in_process).files == 0
    assert table_rows("parquet", tmp_path / "t") == rows_of(log_settings, "events", 1)
    assert not staging.exists()


def test_records_that_retention_took_before_they_were_exported_are_an_error(
    log_settings: Settings, tmp_path: Path
) -> None:
    append(log_settings, "events", 0, numbered(0, 20))
    options = ExportOptions(topic="events", format="parquet", to=str(tmp_path / "t"))
    export(log_settings, options, in_process)
    append(log_settings, "events", 0, numbered(20, 30))
    append(log_settings, "events", 0, numbered(30, 40))

    async def cut() -> None:
        async with opened_log(log_settings) as log:
            await trim(log, TopicPartition("events", 0), 31)

    asyncio.run(cut())
    with pytest.raises(DataLoss, match=r"records 21 to 30 of events/0 .* --allow-gaps"):
        export(log_settings, options, in_process)
    allowed = ExportOptions(topic="events", format="parquet", to=str(tmp_path / "t"), allow_gaps=True)
    assert export(log_settings, allowed, in_process).records == 10


def test_a_table_takes_records_of_its_own_topic_and_columns_only(log_settings: Settings, tmp_path: Path) -> None:
    append(log_settings, "events", 0, numbered(0, 5))
    append(log_settings, "others", 0, numbered(0, 5))
    for kind in FORMATS:
        options = ExportOptions(topic="events", format=kind, to=str(tmp_path / kind), name="table")
        export(log_settings, options, in_process)
        with pytest.raises(WrongStore, match="'events'"):
            export(
                log_settings,
                ExportOptions(topic="others", format=kind, to=str(tmp_path / kind), name="table"),
                in_process,
            )
        more = ExportOptions(topic="events", format=kind, to=str(tmp_path / kind), name="table", headers=True)
        with pytest.raises(ConfigurationError, match="has the columns"):
            export(log_settings, more, in_process)
    with LeaderlessLogWriter(log_settings) as writer:
        writer.delete_topic("events")
    append(log_settings, "events", 0, numbered(0, 5))
    for kind in FORMATS:
        options = ExportOptions(topic="events", format=kind, to=str(tmp_path / kind), name="table")
        with pytest.raises(DataLoss, match="created again"):
            export(log_settings, options, in_process)


def test_json_values_become_columns_and_bad_ones_are_kept_with_the_reason(
    spark: SparkSession, log_settings: Settings, tmp_path: Path
) -> None:
    values = [b'{"id": 1, "name": "a", "timestamp": "x", "tags": {"k": 2}, "extra": []}', b'{"id": "1"}', b"{", None]
    values += [b'{"id": 9223372036854775808}', b"\xff", b'{"price": 12345678.9}', b"{}", b"[]"]
    append(log_settings, "events", 0, [Record(payload=value, timestamp=0) for value in values])
    decoding = json_decoding(
        "id bigint, name string, timestamp string, tags map<string,int>, price decimal(5,2), items array<struct<n:int>>"
    )
    options = ExportOptions(topic="events", format="parquet", to=str(tmp_path / "t"), decoding=decoding)
    export(log_settings, options, in_spark(spark))
    rows = polars.scan_parquet(f"{tmp_path}/t/**/*.parquet").sort("offset").collect().to_dicts()
    assert (rows[0]["id"], rows[0]["name"], rows[0]["value_timestamp"]) == (1, "a", "x")
    assert [row["_error"] is not None for row in rows] == [False, True, True, False, True, True, True, False, True]
    assert [row["value"] for row in rows] == [None, *values[1:3], None, *values[4:7], None, values[8]]
    assert "Expected `int | null`, got `str`" in rows[1]["_error"]


def test_a_schema_that_spark_cannot_parse_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match="'id what' is not a list of columns"):
        json_decoding("id what")


def test_avro_values_become_the_columns_of_their_schema(log_settings: Settings, tmp_path: Path) -> None:
    import fastavro

    schema = {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "note", "type": ["null", "string"]},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "uid", "type": {"type": "string", "logicalType": "uuid"}},
            {"name": "lines", "type": {"type": "array", "items": {"type": "map", "values": "int"}}},
        ],
    }
    row = {"id": 7, "note": None, "at": 1_000, "uid": "u-1", "lines": [{"a": 1}]}
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, schema, row)
    (tmp_path / "order.avsc").write_text(json.dumps(schema))
    good = stream.getvalue()
    append(log_settings, "events", 0, [Record(payload=value, timestamp=0) for value in (good, good + b"x", b"")])
    decoding = avro_decoding(tmp_path / "order.avsc")
    export(
        log_settings,
        ExportOptions(topic="events", format="delta", to=str(tmp_path / "t"), decoding=decoding),
        in_process,
    )
    rows = polars.read_delta(str(tmp_path / "t")).sort("offset").to_dicts()
    assert (rows[0]["id"], rows[0]["note"], rows[0]["uid"], rows[0]["at"].timestamp()) == (7, None, "u-1", 1.0)
    assert rows[0]["_error"] is None
    assert rows[1]["_error"] == "1 bytes are left after the record"
    assert rows[2]["_error"]
    assert rows[2]["value"] == b""


def test_values_without_a_fitting_column_type_are_found_one_by_one() -> None:
    import pyarrow as pa

    from llog.spark.jobs.lake.decoder import Decoding

    decode = decoder(Decoding("json", pa.schema([("price", pa.decimal128(3, 1))])))
    rows, wrong = decode(pa.array([b'{"price": 12.5}', b'{"price": 1234.5}'], pa.binary()))
    assert str(rows[0].as_py()["price"]) == "12.5"
    assert rows[1].as_py() is None
    assert [each.as_py() is None for each in wrong] == [True, False]


@pytest.mark.parametrize(("kind", "package"), [("delta", "deltalake"), ("iceberg", "pyiceberg")])
def test_a_missing_package_is_told_with_how_to_install_it(
    kind: Format, package: str, log_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log_settings, "events", 0, numbered(0, 5))
    source = run(log_settings, lambda log: source_of(log, "events"))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf'{package}.*pip install "leaderless-log\[lake\]"'):
        open_table(ExportOptions(topic="events", format=kind, to=str(tmp_path / "t")), source)
    arguments = ["--data-dir", str(log_settings.data_dir), "pipeline", "export", "events", "--format", kind]
    told = CliRunner().invoke(main, [*arguments, "--to", str(tmp_path / "t")])
    assert told.exit_code == 2
    assert 'pip install "leaderless-log[lake]"' in told.stderr


def test_the_command_exports_and_tells_what_it_did(spark: SparkSession, log_settings: Settings, tmp_path: Path) -> None:
    append(log_settings, "events", 0, numbered(0, 25))
    arguments = ["--data-dir", str(log_settings.data_dir), "pipeline", "export", "events", "--to", str(tmp_path / "t")]
    told = CliRunner().invoke(main, [*arguments, "--format", "parquet", "--json"])
    assert told.exit_code == 0, told.output
    result = json.loads(told.stdout)
    assert (result["records"], result["positions"]) == (25, {"0": 26})
    again = CliRunner().invoke(main, [*arguments, "--format", "parquet"])
    assert "RECORDS" in again.stdout
    remote = CliRunner().invoke(main, [*arguments[:-1], "s3://bucket/t", "--format", "delta"])
    assert remote.exit_code == 2
    assert "s3:// is not supported" in remote.stderr
    undecoded = CliRunner().invoke(main, [*arguments, "--format", "parquet", "--decode", "json"])
    assert undecoded.exit_code == 2
    assert "--decode json needs --schema" in undecoded.stderr
