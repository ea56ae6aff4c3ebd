"""One kind of statement: how it is written, parsed and run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from llog.sql.parse.parameters import Params
from llog.sql.parse.statements import Statement
from llog.sql.parse.token_stream import TokenStream
from llog.sql.result import Result

if TYPE_CHECKING:
    from llog.sql.session import DatabaseSession


class Section(StrEnum):
    """The lists of statements in docs/sql.md."""

    TRANSACTIONS = "transactions"
    TABLES = "tables"
    TOPICS = "topics"
    GROUPS = "groups"


class Usage(NamedTuple):
    """A row of docs/sql.md. The shell completes the words that are in capitals in `syntax`."""

    section: Section
    syntax: str
    """The grammar as people write it; `[…]` is optional, `|` separates alternatives."""
    description: str = ""
    """Markdown."""


class Command(NamedTuple):
    """One kind of statement. `commands/registry.py` lists them all."""

    statement: type[Statement]
    """What `parse` returns and `run` gets. Workers send it to the session by pickle."""
    begins: tuple[str, ...]
    """The words that the statement begins with: one text for each spelling."""
    parse: Callable[[TokenStream], Statement]
    """Parses the statement from its first token on, without I/O. `SqlError` names the token that does not fit."""
    run: Callable[[DatabaseSession, Any, Params], Awaitable[Result]]
    """Runs a statement whose parameters are bound. DuckDB gets their values from the last argument."""
    usages: tuple[Usage, ...]
    action: str = ""
    """For ALTER TOPIC: the words after the topic's name."""
    is_next: Callable[[TokenStream], bool] | None = None
    """Whether this statement is the next one, where the words of `begins` do not decide it."""
    runs_in_transaction: bool = False
    changes_names: bool = False
    """Whether it may create or remove topics, tables or groups, whose names the shell completes."""
