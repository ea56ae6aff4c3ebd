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
    from llog.sql.session import Session


class Section(StrEnum):
    """The tables of statements in docs/sql.md."""

    TRANSACTIONS = "transactions"
    TABLES = "tables"
    TOPICS = "topics"
    GROUPS = "groups"


class Usage(NamedTuple):
    """A row of docs/sql.md. The shell completes the words that `syntax` has in capitals."""

    section: Section
    syntax: str
    """The grammar as people write it; `[…]` is optional, `|` separates alternatives."""
    description: str = ""
    """Markdown."""


class Command(NamedTuple):
    """One kind of statement. `commands/registry.py` lists them all."""

    statement: type[Statement]
    """What `parse` returns and `run` is given. It goes from worker processes to the session by pickle."""
    begins: tuple[str, ...]
    """The words that the statement begins with; one text for each spelling."""
    parse: Callable[[TokenStream], Statement]
    """Reads the statement from its first token on, without I/O. `SqlError` names the token that does not fit."""
    run: Callable[[Session, Any, Params], Awaitable[Result]]
    """Runs a statement of type `statement` whose parameters are bound. `params` are their values, for DuckDB."""
    usages: tuple[Usage, ...]
    action: str = ""
    """Of ALTER TOPIC: the words after the topic's name."""
    is_next: Callable[[TokenStream], bool] | None = None
    """Decides, where the words of `begins` do not, whether this statement is the next one."""
    runs_in_transaction: bool = False
    changes_names: bool = False
    """Whether topics, tables or groups may come or go, so that the shell completes other names."""
