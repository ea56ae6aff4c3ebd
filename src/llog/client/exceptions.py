"""The exceptions of PEP 249, which stand for the errors of llog here; the class of each error names its exception.

The error itself is the exception's `__cause__`. `code` is the stable code of `llog.errors`; `line`, `column` and `hint`
are set where a statement is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from llog.errors import DbapiException, LlogError


class Warning(Exception):  # PEP 249 demands this name
    """Part of the standard; never raised here, but named in `Cursor.messages`."""


class Error(Exception):
    code: str = "error"
    line: int | None = None
    column: int | None = None
    hint: str | None = None


class InterfaceError(Error):
    """A cursor or connection was used after it was closed, or rows were fetched where a statement returned none."""


class DatabaseError(Error):
    pass


class DataError(DatabaseError):
    """A value is too large or out of its range."""


class OperationalError(DatabaseError):
    """Not the statement's fault: a store or broker is unreachable, another process owns the log, time ran out."""


class IntegrityError(DatabaseError):
    """A constraint would be violated; nothing was changed."""


class InternalError(DatabaseError):
    """Stored data is damaged."""


class ProgrammingError(DatabaseError):
    """A statement is wrong, or names something that does not exist."""


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


def to_dbapi_exception(error: LlogError) -> DatabaseError:
    exception = _BY_NAME[error.dbapi_exception](str(error))
    exception.code = error.code
    for name in ("line", "column", "hint"):
        setattr(exception, name, getattr(error, name, None) or None)
    return exception


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn every error of llog that the block raises into its exception of PEP 249."""
    try:
        yield
    except LlogError as error:
        raise to_dbapi_exception(error) from error
