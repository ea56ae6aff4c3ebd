"""Checks CREATE TABLE, which may have columns with types, PRIMARY KEY, NOT NULL, DEFAULT and CHECK."""

from __future__ import annotations

from typing import Final

from sqlglot import exp

from llog.errors import SqlError
from llog.sql.parse.token_stream import TokenStream

_COLUMN_CONSTRAINTS: Final = (
    exp.PrimaryKeyColumnConstraint,
    exp.NotNullColumnConstraint,
    exp.DefaultColumnConstraint,
    exp.CheckColumnConstraint,
)
_UNSUPPORTED: Final[tuple[tuple[type[exp.Expr], str], ...]] = (
    (exp.ForeignKey, "FOREIGN KEY is not supported"),
    (exp.Reference, "REFERENCES is not supported: there are no foreign keys"),
    (exp.ComputedColumnConstraint, "generated columns are not supported"),
    (exp.GeneratedAsIdentityColumnConstraint, "generated columns are not supported"),
    (exp.UniqueColumnConstraint, "UNIQUE is not supported, except as PRIMARY KEY"),
    (exp.CollateColumnConstraint, "COLLATE is not supported"),
    (exp.LikeProperty, "LIKE another table is not supported"),
    (exp.TemporaryProperty, "temporary tables are not supported"),
)


def check_create(stream: TokenStream, tree: exp.Create) -> None:
    """Raise `SqlError` if the statement has anything that tables do not support."""
    first = stream.tokens[0]
    if str(tree.args.get("kind")).upper() != "TABLE":
        raise stream.error("only CREATE TABLE and CREATE TOPIC are supported", token=first)
    for node, message in _UNSUPPORTED:
        if tree.find(node) is not None:
            raise stream.error(message, token=first)
    if tree.args.get("replace"):
        raise stream.error("OR REPLACE would drop the table's rows", "DROP TABLE IF EXISTS first", first)
    if tree.args.get("expression") is not None:
        raise stream.error("CREATE TABLE AS is not supported", "CREATE TABLE with columns, then INSERT … SELECT", first)
    if tree.args.get("properties"):
        raise stream.error("properties of tables are not supported", token=first)
    schema = tree.this
    if not isinstance(schema, exp.Schema) or not schema.expressions:
        raise stream.error("CREATE TABLE needs columns", "CREATE TABLE t (id BIGINT PRIMARY KEY, …)", first)
    for part in schema.expressions:
        _check_part(part)


def _check_part(part: exp.Expr) -> None:
    if isinstance(part, exp.Constraint):
        for inner in part.expressions:
            _check_part(inner)
    elif isinstance(part, exp.ColumnDef):
        if part.kind is None:
            raise SqlError(f"the column {part.name!r} has no type")
        for constraint in part.constraints:
            if not isinstance(constraint.kind, _COLUMN_CONSTRAINTS):
                raise SqlError(f"the column {part.name!r} may have only PRIMARY KEY, NOT NULL, DEFAULT and CHECK")
    elif not isinstance(part, exp.PrimaryKey | exp.CheckColumnConstraint | exp.Check):
        raise SqlError("a table may have only columns, PRIMARY KEY and CHECK")
