"""The tokens of one statement, for recursive-descent parsers, which take them one by one. Errors name the token."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from llog.errors import InvalidArgument, SqlError
from llog.model import check_topic_name
from llog.sql.parse.clauses import CLAUSES, Check, did_you_mean
from llog.sql.parse.lexer import Kind, Token
from llog.sql.parse.statements import Parameter

PARAMETERS_MAX: Final = 65_535
RESERVED: Final = frozenset(
    re.findall(
        r"\w+",
        """
        ALL AND ANTI ANY AS ASC ASOF AT BY CASE CROSS DEFAULT DELETE DESC DISTINCT DO ELSE END EXCEPT FETCH FOR
        FROM FULL GROUP HAVING IN INNER INSERT INTERSECT INTO IS JOIN LATERAL LEFT LIMIT NATURAL NOT OFFSET ON
        OR ORDER PIVOT POSITIONAL QUALIFY RETURNING RIGHT SELECT SEMI SET TABLESAMPLE THEN UNION UNPIVOT UPDATE
        USING VALUES WHEN WHERE WINDOW WITH
        """,
    )
)
"""Keywords that cannot be the name of a topic or an alias unless they are quoted."""


class TokenStream:
    """A position in the tokens of one statement, which end with END. `sql` is the whole text."""

    def __init__(self, sql: str, tokens: Sequence[Token]) -> None:
        self.sql = sql
        self.tokens = tokens
        self.at = 0
        self.parameters = _parameters(sql, tokens)

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def ahead(self, count: int = 1) -> Token:
        return self.tokens[min(self.at + count, len(self.tokens) - 1)]

    def error(self, message: str, hint: str = "", token: Token | None = None) -> SqlError:
        return SqlError.at(self.sql, (token or self.token).start, message, hint)

    def expected(self, what: str, known: Collection[str] = (), hint: str = "") -> SqlError:
        """Return an error that names the token found here instead of `what`."""
        token = self.token
        found = "the end" if token.kind is Kind.END else repr(self.sql[token.start : token.end][:40])
        return self.error(f"expected {what}, found {found}", hint or did_you_mean(token.upper, known))

    def take(self) -> Token:
        """Return the token and move past it, unless it is END."""
        token = self.tokens[self.at]
        if token.kind is not Kind.END:
            self.at += 1
        return token

    def accept(self, *words: str) -> bool:
        """Move past these keywords or symbols if all of them are next, and return whether they are."""
        at, tokens = self.at, self.tokens
        for word in words:
            if at >= len(tokens) or tokens[at].upper != word:
                return False
            at += 1
        self.at += len(words)
        return True

    def expect(self, *words: str) -> None:
        for word in words:
            if not self.accept(word):
                raise self.expected(word, (word,))

    def skip_to_end(self) -> None:
        """Move to the end of a statement whose tokens another parser has read."""
        self.at = len(self.tokens) - 1

    def end(self, known: Collection[str] = ()) -> None:
        """Raise `SqlError` unless the statement ends here."""
        if self.token.kind is not Kind.END:
            raise self.expected("the end of the statement" + (f" or {', '.join(known)}" if known else ""), known)

    def is_name(self, ahead: int = 0) -> bool:
        token = self.ahead(ahead)
        return token.kind is Kind.NAME or (token.kind is Kind.WORD and token.value.upper() not in RESERVED)

    def name(self, what: str) -> str:
        if not self.is_name():
            raise self.expected(what)
        return self.take().value

    def topic(self) -> str:
        """Read a topic's name, `t`, `ns.t` or `"any-name"`, and return it as written: its case matters."""
        first = self.token
        try:
            return check_topic_name(self.table_or_topic("a topic"))
        except InvalidArgument as error:
            raise self.error(str(error), token=first) from None

    def table_or_topic(self, what: str = "a table or a topic") -> str:
        """Read the name of a table or a topic, and return it as written."""
        parts = [self.name(f"the name of {what}")]
        while self.accept("."):
            if self.token.kind not in (Kind.WORD, Kind.NAME):
                raise self.expected(f"the rest of the name of {what}")
            parts.append(self.take().value)
        if self.token.value == "-" and self.token.start == self.tokens[self.at - 1].end:
            raise self.error("a name with '-' needs double quotes", f'write "{".".join(parts)}-…"')
        return ".".join(parts)

    def table(self) -> str:
        """Read a table's name, and return it as `schema.name` in lower case; the default schema is `main`."""
        first = self.token
        parts = [self.name("the name of a table")]
        while self.accept("."):
            parts.append(self.name("the rest of the table's name"))
        if len(parts) > 2:
            raise self.error("a table's name has at most two parts: schema.name", token=first)
        return table_name(self, parts, first)

    def scalar(self, what: str) -> Any:
        """Read a literal or a `Parameter`; a bare word is text."""
        token = self.token
        if token.kind is Kind.PARAMETER:
            self.take()
            return self.parameters[token.start]
        if token.kind is Kind.STRING:
            return self.take().value
        if token.kind is Kind.SYMBOL and token.value == "-" and self.ahead().kind is Kind.NUMBER:
            self.take()
            return -self.number(what)
        if token.kind is Kind.NUMBER:
            return self.number(what)
        if token.kind is Kind.WORD:
            word = self.take().value
            return {"true": True, "false": False, "null": None}.get(word.lower(), word)
        raise self.expected(what)

    def number(self, what: str) -> int:
        token = self.token
        if token.kind is not Kind.NUMBER or not token.value.isdigit() or len(token.value) > 30:
            raise self.expected(f"{what}, a whole number")
        self.take()
        return int(token.value)

    def check_value(self, what: str, value: Any, check: Check, token: Token) -> Any:
        """Return the checked value, or the `Parameter`, which `bind` will check."""
        if isinstance(value, Parameter):
            return value
        try:
            return check(value)
        except InvalidArgument as error:
            raise self.error(f"{what}: {error}", token=token) from None

    def clause(self, name: str) -> Any:
        """Read the value of a clause whose keyword has been read."""
        token = self.token
        if token.kind is Kind.WORD:
            raise self.expected(f"the value of {name}", hint="put text in single quotes")
        return self.check_value(name, self.scalar(f"the value of {name}"), CLAUSES[name], token)

    def clauses(self, readers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
        """Read clauses up to the end, in any order and each at most once, and return their values by keyword.

        A reader is called with its keyword, which has been read.
        """
        values: dict[str, Any] = {}
        while self.token.kind is not Kind.END:
            keyword = self.token.upper
            if keyword not in readers:
                raise self.expected(f"{', '.join(readers)} or the end", tuple(readers))
            if keyword in values:
                raise self.error(f"{keyword} is given twice")
            self.take()
            values[keyword] = readers[keyword](keyword)
        return values

    def options(self, known: Mapping[str, Check]) -> dict[str, Any]:
        """Read `(name = value, …)`, and return the values by name."""
        values: dict[str, Any] = {}
        self.expect("(")
        while True:
            token = self.token
            name = self.name("the name of an option").lower()
            if name not in known:
                hint = did_you_mean(name, known) or f"known are {', '.join(known)}"
                raise self.error(f"unknown option {name[:80]!r}; known are {', '.join(known)}", hint, token)
            if name in values:
                raise self.error(f"the option {name!r} is given twice", token=token)
            self.expect("=")
            token = self.token
            values[name] = self.check_value(name, self.scalar(f"the value of {name}"), known[name], token)
            if not self.accept(","):
                self.expect(")")
                return values


def table_name(stream: TokenStream, parts: Sequence[str], token: Token) -> str:
    for part in parts:
        if not part.isprintable() or any(c in "./" for c in part) or len(part.encode()) > 200:
            raise stream.error(
                f"{part[:80]!r} cannot name a table: names have no '.', no '/' and at most 200 bytes", token=token
            )
    return ".".join([*([] if len(parts) > 1 else ["main"]), *parts]).lower()


def _parameters(sql: str, tokens: Sequence[Token]) -> dict[int, Parameter]:
    """Return the parameters by the start of their tokens.

    A statement uses one style. Numbers have no gaps, and no two names differ only in case.
    """
    found: dict[int, Parameter] = {}
    styles: dict[str, Token] = {}
    spelled: dict[str, str] = {}
    for token in tokens:
        if token.kind is not Kind.PARAMETER:
            continue
        value = token.value
        style = "?" if value == "?" else "$1" if value[0] in "0123456789" else "$name"
        styles.setdefault(style, token)
        if len(styles) > 1:
            raise SqlError.at(
                sql, token.start, f"parameters are written as {' and as '.join(styles)}", "use one style only"
            )
        place: int | str = value
        if style == "?":
            place = len(found)
        elif style == "$1":
            place = int(value) - 1 if len(value) < 9 else PARAMETERS_MAX
        elif spelled.setdefault(value.lower(), value) != value:
            raise SqlError.at(sql, token.start, f"the parameter {value} is also written {spelled[value.lower()]}")
        if isinstance(place, int) and not 0 <= place < PARAMETERS_MAX:
            raise SqlError.at(sql, token.start, f"parameters are numbered from 1 to {PARAMETERS_MAX}")
        found[token.start] = Parameter(place)
    numbers = {parameter.place for parameter in found.values() if isinstance(parameter.place, int)}
    missing = next((number for number in range(len(numbers)) if number not in numbers), None)
    if missing is not None:
        raise SqlError.at(sql, styles["$1"].start, f"${missing + 1} is missing: parameters are numbered without gaps")
    return found
