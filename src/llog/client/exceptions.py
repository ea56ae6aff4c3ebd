"""The exceptions of PEP 249, which replace the errors of llog here; each error's class names its exception.

The error itself is the exception's `__cause__`. `code` is the stable code of `llog.errors`; `line`, `column` and `hint`
are set where a statement is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from llog.errors import DbapiException, LlogError


class Warning(Exception):  # the name that PEP 249 has for it
    """Part of the standard; never raised here, but named in `Cursor.messages`."""


class Error(Exception):
    code: str = "error"
    line: int | None = None
    column: int | None = None
    hint: str | None = None


class InterfaceError(Error):
    """A cursor or a connection is used in a way that makes no sense: after it was closed, or to fetch rows where there
    are none.
    """


class DatabaseError(Error):
    pass


class DataError(DatabaseError):
    """A value is too large or out of its range."""


class OperationalError(DatabaseError):
    """Not the statement's fault: a store or a broker cannot be reached, another process owns the log, time is over."""


class IntegrityError(DatabaseError):
    """A constraint would be violated; nothing was changed."""


class InternalError(DatabaseError):
    """Stored data is damaged."""


class ProgrammingError(DatabaseError):
    """A statement is wrong, or names what is not there."""


class NotSupportedError(DatabaseError):
    """The engine, the role of the broker or the installation cannot do this."""


_BY_NAME: Final[Mapping[DbapiException, type[DatabaseError]]] = {
    "DataError": DataError,
    "IntegrityError": IntegrityError,
    "InternalError": InternalError,
    "NotSupportedError": NotSupportedError,
    "OperationalError": OperationalError,
    "ProgrammingError": ProgrammingError,
}


def exception_of(error: LlogError) -> DatabaseError:
    made = _BY_NAME[error.dbapi_exception](str(error))
    made.code = error.code
    for name in ("line", "column", "hint"):
        setattr(made, name, getattr(error, name, None) or None)
    return made


@contextmanager
def translated() -> Iterator[None]:
    """What llog raises inside leaves as PEP 249 has it."""
    try:
        yield
    except LlogError as error:
        raise exception_of(error) from error
