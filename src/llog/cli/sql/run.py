"""Runs the scripts of `llog sql`: one statement after the other, up to the first that fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from llog.cli.common import note
from llog.cli.sql.output import Format, Output, message_of, place_of, show_place
from llog.cli.sql.script import ScriptStatement, join_transactions, split
from llog.client.sessions import SqlSession
from llog.errors import InvalidArgument, LlogError
from llog.sql.result import Result


class Source(NamedTuple):
    name: str | None
    """The file's name; None for statements of -c."""
    text: str


def read(name: str) -> Source:
    """Read the file, or stdin for `-`. Raises `InvalidArgument` if it cannot be read as text."""
    try:
        if name == "-":
            return Source("stdin", sys.stdin.buffer.read().decode("utf-8-sig"))
        with open(name, "rb") as file:
            return Source(name, file.read().decode("utf-8-sig"))
    except OSError as error:
        raise InvalidArgument(f"{name!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name!r} is not UTF-8 text: {error}") from error


def run_scripts(session: SqlSession, sources: Iterable[Source], form: str, *, quiet: bool) -> LlogError | None:
    """Run the scripts. Returns the error of the statement that failed, after showing it, or None."""
    output = Output(Format(form), quiet=quiet)
    held: list[ScriptStatement] = []
    for source in sources:
        script = split(source.text)
        statements = [*script.statements, *([] if script.rest is None else [script.rest])]
        if session.is_remote:
            statements, held = join_transactions(statements)
        for statement in statements:
            try:
                for result, ms in timed(session, statement.sql):
                    output.show(result, ms)
            except LlogError as error:
                _show_error(error, statement, source)
                return error
        if held:
            break
    if held or session.in_transaction:
        raise InvalidArgument("the statements end within a transaction, which is rolled back: end it with COMMIT")
    return None


def timed(session: SqlSession, sql: str) -> Iterator[tuple[Result, float]]:
    """Yield the results, each with the ms that all of them took."""
    start = time.perf_counter()
    results = session.execute(sql)
    ms = (time.perf_counter() - start) * 1000
    return ((result, ms) for result in results)


def _show_error(error: LlogError, statement: ScriptStatement, source: Source) -> None:
    show_place(error, statement, source.name)
    line, column = place_of(error, statement)
    where = f"{source.name}, line {line}" if source.name else f"line {line}"
    place = f"{where}, column {column}: " if column else f"{where}: " if source.name else ""
    note(f"llog: {place}{message_of(error)}")
