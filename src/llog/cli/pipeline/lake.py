"""`llog pipeline export` and `llog pipeline materialize`: topics as tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click

from llog.base.units import format_size
from llog.cli.common import DURATION, SIZE, Invocation, json_option, note, print_json, print_table
from llog.cli.pipeline.spark import open_session, spark_options
from llog.errors import ConfigurationError

if TYPE_CHECKING:
    import msgspec

    from llog.spark.jobs.lake.decoder import Decoding
    from llog.spark.jobs.lake.topic_table import TablePosition

_SHOWN_MAX: Final = 8

F = TypeVar("F", bound=Callable[..., object])


def decode_options(command: F) -> F:
    """Add the options `--decode`, `--schema` and `--avro-schema`."""
    schema = click.option(
        "--schema", metavar="DDL", help="The columns of JSON values, e.g. 'id bigint, name string'. For --decode json."
    )
    avro = click.option(
        "--avro-schema",
        type=click.Path(path_type=Path, dir_okay=False),
        help="A file with the Avro schema of the values, whose fields become columns. For --decode avro.",
    )
    decode = click.option(
        "--decode", type=click.Choice(["json", "avro"]), help="Decode the values into columns.  [default: keep bytes]"
    )
    return decode(schema(avro(command)))


def run_options(command: F) -> F:
    """Add the options `--once`, `--interval` and `--allow-gaps`."""
    gaps = click.option("--allow-gaps", is_flag=True, help="Skip records that retention or damage has removed.")
    once = click.option("--once", is_flag=True, help="End when the present records are done (the default).")
    interval = click.option("--interval", type=DURATION, help="Repeat at this interval, e.g. 1m.")
    return once(interval(gaps(command)))


@click.command(short_help="Add a topic's records to a Parquet, Delta or Iceberg table.")
@click.argument("topic")
@click.option(
    "--format",
    "table_format",
    required=True,
    type=click.Choice(["parquet", "delta", "iceberg"]),
    help="The format of the table.",
)
@click.option(
    "--to", required=True, metavar="DIR", help="The directory of the table, which driver and executors must share."
)
@click.option("--name", help="The name of the table in DIR.  [default for iceberg: the topic's name]")
@click.option(
    "--target-file-size", type=SIZE, default="128MiB", show_default=True, help="The approximate size of a file."
)
@click.option("--max-bytes", type=SIZE, default="4GiB", show_default=True, help="The approximate size of one commit.")
@click.option("--headers", is_flag=True, help="Add a column with the records' headers.")
@decode_options
@run_options
@json_option
@spark_options
@click.pass_obj
def export(
    invocation: Invocation,
    topic: str,
    table_format: str,
    to: str,
    name: str | None,
    target_file_size: int,
    max_bytes: int,
    headers: bool,
    decode: str | None,
    schema: str | None,
    avro_schema: Path | None,
    once: bool,
    interval: int | None,
    allow_gaps: bool,
    as_json: bool,
    master: str,
    conf: tuple[str, ...],
) -> None:
    """Add the new records of TOPIC to a table, each exactly once, partitioned by day and partition.

    The export may be stopped or killed at any time and run again: the table itself records its position. If two
    exports write to one table, one of them stops with an error.

    \b
      llog pipeline export orders --format delta --to lake/orders
      llog pipeline export orders --format parquet --to lake/orders --decode json --schema 'id bigint, total double'
    """
    _check_repeat(once, interval)
    settings = invocation.settings()
    _check_decode(decode, schema, avro_schema)
    _check_packages(table_format)
    spark = open_session(f"llog pipeline export {topic}", master, conf, settings)
    from llog.spark.jobs.lake.export import ExportOptions
    from llog.spark.jobs.lake.export import export as run_export
    from llog.spark.jobs.lake.topic_table import in_spark
    from llog.spark.jobs.tasks import check_reachable

    check_reachable(settings)
    options = ExportOptions(
        topic=topic,
        format=table_format,  # type: ignore[arg-type]  # one of the choices
        to=to,
        name=name,
        file_bytes=target_file_size,
        commit_bytes=max_bytes,
        decoding=_decoding(decode, schema, avro_schema),
        headers=headers,
        allow_gaps=allow_gaps,
    )

    def export_once() -> None:
        result = run_export(settings, options, in_spark(spark), committed=_note_commit)
        _show(result, as_json, {"BYTES": format_size(result.bytes)})

    _repeat(export_once, interval)


@click.command(short_help="Apply a topic's changes to a table of current rows.")
@click.argument("topic")
@click.option("--to", required=True, metavar="DIR", help="The directory of the Delta table.")
@click.option(
    "--key", metavar="COLUMNS", help="The decoded columns that identify a row, e.g. id.  [default: the record's key]"
)
@click.option("--max-bytes", type=SIZE, default="256MiB", show_default=True, help="The approximate size of one merge.")
@click.option("--show", is_flag=True, help="Only print the rows of the table, as JSON lines.")
@decode_options
@run_options
@json_option
@spark_options
@click.pass_obj
def materialize(
    invocation: Invocation,
    topic: str,
    to: str,
    key: str | None,
    max_bytes: int,
    show: bool,
    decode: str | None,
    schema: str | None,
    avro_schema: Path | None,
    once: bool,
    interval: int | None,
    allow_gaps: bool,
    as_json: bool,
    master: str,
    conf: tuple[str, ...],
) -> None:
    """Apply the new changes of TOPIC to a Delta table in DIR, which holds the current row of each key.

    The last record of a key is its row; a record without a value deletes the row. With --decode json, a member "op" of
    "DELETE", "delete" or "d" deletes it, too. The command may be stopped or killed at any time and run again.

    \b
      llog pipeline materialize customers --to lake/customers --decode json --schema 'name string, city string'
      llog pipeline materialize customers --to lake/customers --show
    """
    _check_repeat(once, interval)
    _check_packages("delta")
    if show:
        _print_rows(to)
        return
    settings = invocation.settings()
    _check_decode(decode, schema, avro_schema)
    spark = open_session(f"llog pipeline materialize {topic}", master, conf, settings)
    from llog.spark.jobs.lake.materialize import MaterializeOptions
    from llog.spark.jobs.lake.materialize import materialize as run_materialize
    from llog.spark.jobs.lake.topic_table import in_spark
    from llog.spark.jobs.tasks import check_reachable

    check_reachable(settings)
    options = MaterializeOptions(
        topic=topic,
        to=to,
        key=tuple(each.strip() for each in key.split(",")) if key else (),
        decoding=_decoding(decode, schema, avro_schema),
        commit_bytes=max_bytes,
        allow_gaps=allow_gaps,
    )

    def materialize_once() -> None:
        _show(run_materialize(settings, options, in_spark(spark), committed=_note_commit), as_json, {})

    _repeat(materialize_once, interval)


def _check_repeat(once: bool, interval: int | None) -> None:
    if once and interval is not None:
        raise ConfigurationError("--once and --interval exclude each other: leave one out")


def _check_decode(decode: str | None, schema: str | None, avro_schema: Path | None) -> None:
    needed = {"json": "--schema", "avro": "--avro-schema"}
    given = {"--schema": schema, "--avro-schema": avro_schema}
    for option, value in given.items():
        wanted = decode is not None and needed[decode] == option
        if wanted and value is None:
            raise ConfigurationError(f"--decode {decode} needs {option}")
        if not wanted and value is not None:
            fitting = next(kind for kind, each in needed.items() if each == option)
            raise ConfigurationError(f"{option} is for --decode {fitting}: add that, or leave {option} out")


def _check_packages(table_format: str) -> None:
    """Raise `MissingExtra` if a package is missing, before Spark takes seconds to start."""
    from llog.spark.jobs.tasks import optional_module

    optional_module("pyspark", "spark", "the pipeline")
    package = {"delta": "deltalake", "iceberg": "pyiceberg"}.get(table_format)
    if package is not None:
        optional_module(package, "lake", f"the format {table_format}")


def _decoding(decode: str | None, schema: str | None, avro_schema: Path | None) -> Decoding | None:
    from llog.spark.jobs.lake.decoder import avro_decoding, json_decoding

    if decode == "json" and schema is not None:
        return json_decoding(schema)
    if decode == "avro" and avro_schema is not None:
        return avro_decoding(avro_schema)
    return None


def _repeat(once: Callable[[], None], interval_ms: int | None) -> None:
    while True:
        began = time.monotonic()
        once()
        if interval_ms is None:
            return
        time.sleep(max(0.0, interval_ms / 1000 - (time.monotonic() - began)))


def _note_commit(position: TablePosition) -> None:
    first = [f"{partition}:{offset}" for partition, offset in sorted(position.offsets.items())[:_SHOWN_MAX]]
    more = " …" if len(position.offsets) > _SHOWN_MAX else ""
    note(f"committed {position.topic}; next offsets {' '.join(first)}{more}")


def _show(result: msgspec.Struct, as_json: bool, formatted: dict[str, str]) -> None:
    """Print the figures of a result; `formatted` replaces some of them in the table."""
    if as_json:
        print_json(result)
        return
    figures = {name.upper(): getattr(result, name) for name in result.__struct_fields__ if name != "positions"}
    figures |= {"SECONDS": f"{figures['SECONDS']:.1f}"} | formatted
    numbers = [name for name in figures if name not in ("TOPIC", "TABLE")]
    print_table(list(figures), [list(figures.values())], numbers=numbers)


def _print_rows(to: str) -> None:
    import json

    from llog.spark.jobs.lake.materialize import current_rows

    for batch in current_rows(to).to_batches(max_chunksize=1000):
        for row in batch.to_pylist():
            click.echo(json.dumps(row, default=_to_text, ensure_ascii=False))


def _to_text(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
