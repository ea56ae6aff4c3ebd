"""Materialized tables: the last write of each key, whenever the run that applied it was killed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from llog.cli.main import main
from llog.config import Settings
from llog.errors import ConfigurationError, StaleWrite
from llog.model import Record
from llog.spark.jobs.lake.decoder import Decoding
from llog.spark.jobs.lake.materialize import MaterializeOptions, last_of_each, materialize
from llog.spark.jobs.lake.topic_table import in_process, in_spark
from tests.pipeline.lake_tools import append, kill_until_done

CUSTOMER = Decoding("json", pa.schema([("id", pa.int64()), ("city", pa.string())]))
KILLED = """
from llog.config import Settings
from llog.spark.jobs.lake.topic_table import in_process
from llog.spark.jobs.lake.materialize import MaterializeOptions, materialize
import deltalake
settings = Settings(data_dir={data!r})
print("begun", flush=True)
materialize(settings, MaterializeOptions(topic="changes", to={to!r}, commit_bytes=3000), in_process)
"""


def change(key: str | None, value: object = None) -> Record:
    payload = None if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
    return Record(payload=payload, key=None if key is None else key.encode())


def rows(directory: Path, *columns: str) -> list[tuple[Any, ...]]:
    table = DeltaTable(str(directory)).to_pyarrow_table()
    return sorted(zip(*(table.column(name).to_pylist() for name in columns), strict=True), key=repr)


def test_updates_replace_and_nulls_delete_over_many_runs(
    spark: SparkSession, log_settings: Settings, tmp_path: Path
) -> None:
    options = MaterializeOptions(topic="changes", to=str(tmp_path / "t"))
    append(log_settings, "changes", 0, [change("a", b"1"), change("b", b"1"), change("a", b"2"), change(None, b"x")])
    append(log_settings, "changes", 1, [change("c", b"1"), change("c"), change("d", b"1")])
    first = materialize(log_settings, options, in_spark(spark))
    assert rows(tmp_path / "t", "key", "value") == [(b"a", b"2"), (b"b", b"1"), (b"d", b"1")]
    assert (first.records, first.inserted, first.skipped, first.commits) == (7, 3, 1, 1)
    append(log_settings, "changes", 0, [change("b"), change("a", b"3"), change("e", b"1"), change("gone")])
    second = materialize(log_settings, options, in_spark(spark))
    assert rows(tmp_path / "t", "key", "value", "offset") == [(b"a", b"3", 6), (b"d", b"1", 3), (b"e", b"1", 7)]
    assert (second.inserted, second.updated, second.deleted) == (1, 1, 1)
    assert materialize(log_settings, options, in_spark(spark)).commits == 0


def test_changes_that_change_nothing_do_not_hold_up_those_after_them(log_settings: Settings, tmp_path: Path) -> None:
    options = MaterializeOptions(topic="changes", to=str(tmp_path / "t"), commit_bytes=1)
    append(log_settings, "changes", 0, [change("a"), change("b"), change("c", b"1")])
    assert materialize(log_settings, options, in_process).records == 3
    assert rows(tmp_path / "t", "key", "value") == [(b"c", b"1")]
    assert materialize(log_settings, options, in_process).records == 0


def test_json_changes_are_decoded_and_an_op_deletes(log_settings: Settings, tmp_path: Path) -> None:
    options = MaterializeOptions(topic="changes", to=str(tmp_path / "t"), decoding=CUSTOMER)
    changes = [
        change("1", {"id": 1, "city": "Ulm", "op": "c"}),
        change("2", {"id": 2, "city": "Bonn", "op": "d"}),
        change("3", {"id": 3, "city": "Köln", "op": 7}),
        change("4", {"id": "four"}),
    ]
    append(log_settings, "changes", 0, changes)
    materialize(log_settings, options, in_process)
    found = rows(tmp_path / "t", "key", "id", "city", "value")
    assert found == [(b"1", 1, "Ulm", None), (b"3", 3, "Köln", None), (b"4", None, None, b'{"id": "four"}')]
    append(log_settings, "changes", 0, [change("1", {"op": "DELETE"}), change("3", {"op": "delete"})])
    assert materialize(log_settings, options, in_process).deleted == 2
    assert [row[0] for row in rows(tmp_path / "t", "key")] == [b"4"]


def test_rows_may_be_known_by_a_decoded_column(log_settings: Settings, tmp_path: Path) -> None:
    options = MaterializeOptions(topic="changes", to=str(tmp_path / "t"), decoding=CUSTOMER, key=("id",))
    changes = [change(None, {"id": 1, "city": "Ulm"}), change(None, {"id": 1, "city": "Bonn"}), change("x", b"{")]
    append(log_settings, "changes", 0, [*changes, change("x")])
    result = materialize(log_settings, options, in_process)
    assert rows(tmp_path / "t", "id", "city") == [(1, "Bonn")]
    assert result.skipped == 2
    with pytest.raises(ConfigurationError, match="'name' is not a decoded column"):
        materialize(
            log_settings, MaterializeOptions(topic="changes", to=str(tmp_path / "u"), key=("name",)), in_process
        )


def test_the_last_of_a_key_is_by_offset_in_a_partition_and_by_time_between_partitions() -> None:
    table = pa.table(
        {
            "key": ["a", "a", "b", "b", "c"],
            "partition": [0, 0, 0, 1, 1],
            "offset": [2, 1, 9, 1, 3],
            "timestamp": [10, 99, 5, 6, 1],
        }
    )
    found = last_of_each([table.slice(0, 2), table.slice(2)], ["key"]).sort_by("key").to_pydict()
    assert found["offset"] == [2, 1, 3]


def test_a_run_that_is_killed_at_any_point_goes_on_to_the_same_rows(log_settings: Settings, tmp_path: Path) -> None:
    chance = random.Random(5)
    expected: dict[bytes, bytes] = {}
    for start in range(0, 1000, 100):
        records = []
        for n in range(start, start + 100):
            key = f"k{chance.randrange(60)}"
            record = change(key, None if chance.random() < 0.3 else b"%d" % n)
            records.append(record)
            expected.pop(key.encode(), None)
            if record.payload is not None:
                expected[key.encode()] = record.payload
        append(log_settings, "changes", 0, records)
    code = KILLED.format(data=log_settings.data_dir, to=str(tmp_path / "t"))
    assert kill_until_done(code, kills=4, seed=2) > 0
    assert dict(rows(tmp_path / "t", "key", "value")) == expected


def test_a_run_that_was_overtaken_changes_nothing(log_settings: Settings, tmp_path: Path) -> None:
    options = MaterializeOptions(topic="changes", to=str(tmp_path / "t"))
    append(log_settings, "changes", 0, [change("a", b"1")])
    materialize(log_settings, options, in_process)
    append(log_settings, "changes", 0, [change("a", b"2")])

    def overtaken(work: Any, tasks: Any, /) -> Any:
        reduced = in_process(work, tasks)
        append(log_settings, "changes", 0, [change("a", b"3")])
        materialize(log_settings, options, in_process)
        return reduced

    with pytest.raises(StaleWrite):
        materialize(log_settings, options, overtaken)
    assert rows(tmp_path / "t", "key", "value") == [(b"a", b"3")]


def test_the_command_materializes_and_shows_rows(spark: SparkSession, log_settings: Settings, tmp_path: Path) -> None:
    append(log_settings, "changes", 0, [change("1", {"id": 1, "city": "Ulm"}), change("2", {"id": 2})])
    arguments = [
        "--data-dir",
        str(log_settings.data_dir),
        "pipeline",
        "materialize",
        "changes",
        "--to",
        str(tmp_path / "t"),
    ]
    told = CliRunner().invoke(main, [*arguments, "--decode", "json", "--schema", "id bigint, city string", "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["inserted"] == 2
    shown = CliRunner().invoke(main, [*arguments, "--show"])
    found = sorted((json.loads(line) for line in shown.stdout.splitlines()), key=lambda row: int(row["id"]))
    assert [(row["key"], row["id"], row["city"]) for row in found] == [("1", 1, "Ulm"), ("2", 2, None)]
