"""BEGIN, COMMIT and ROLLBACK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from llog.sql.commands.command import Command, Section, Usage
from llog.sql.parse.parameters import Params
from llog.sql.parse.token_stream import TokenStream
from llog.sql.result import Result

if TYPE_CHECKING:
    from llog.sql.session import DatabaseSession


class Begin(msgspec.Struct, frozen=True):
    pass


class Commit(msgspec.Struct, frozen=True):
    pass


class Rollback(msgspec.Struct, frozen=True):
    pass


def _parse_begin(stream: TokenStream) -> Begin:
    if stream.take().upper == "START":
        stream.expect("TRANSACTION")
    else:
        _skip_noise(stream)
    return Begin()


def _parse_commit(stream: TokenStream) -> Commit:
    stream.take()
    _skip_noise(stream)
    return Commit()


def _parse_rollback(stream: TokenStream) -> Rollback:
    stream.take()
    _skip_noise(stream)
    return Rollback()


def _skip_noise(stream: TokenStream) -> None:
    stream.accept("TRANSACTION") or stream.accept("WORK")


async def _run_begin(session: DatabaseSession, _: Begin, __: Params) -> Result:
    opened, table_session = await session.tables()
    await session.change(lambda: opened.tables.begin(table_session))
    return Result("BEGIN")


async def _run_commit(session: DatabaseSession, _: Commit, __: Params) -> Result:
    opened, table_session = await session.tables()
    await session.change(lambda: opened.tables.commit(table_session))
    opened.relay.poke()
    return Result("COMMIT")


async def _run_rollback(session: DatabaseSession, _: Rollback, __: Params) -> Result:
    opened, table_session = await session.tables()
    await session.change(lambda: opened.tables.rollback(table_session))
    return Result("ROLLBACK")


BEGIN: Final = Command(
    statement=Begin,
    begins=("BEGIN", "START"),
    parse=_parse_begin,
    run=_run_begin,
    usages=(
        Usage(
            Section.TRANSACTIONS,
            "BEGIN [TRANSACTION | WORK]",
            "Also `START TRANSACTION`. A transaction changes tables, not topics.",
        ),
    ),
    runs_in_transaction=True,
)
COMMIT: Final = Command(
    statement=Commit,
    begins=("COMMIT", "END"),
    parse=_parse_commit,
    run=_run_commit,
    usages=(Usage(Section.TRANSACTIONS, "COMMIT", "Also `END`."),),
    runs_in_transaction=True,
)
ROLLBACK: Final = Command(
    statement=Rollback,
    begins=("ROLLBACK", "ABORT"),
    parse=_parse_rollback,
    run=_run_rollback,
    usages=(Usage(Section.TRANSACTIONS, "ROLLBACK", "Also `ABORT`."),),
    runs_in_transaction=True,
)
COMMANDS: Final = (BEGIN, COMMIT, ROLLBACK)
