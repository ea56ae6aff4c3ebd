"""What CREATE TABLE may say here: columns with types, PRIMARY KEY, NOT NULL, DEFAULT and CHECK."""

from __future__ import annotations

from typing import Final

from sqlglot import exp

from llog.errors import SqlError
from llog.sql.parse.token_stream import TokenStream

_COLUMN: Final = (
    exp.PrimaryKeyColumnConstraint,
    exp.NotNullColumnConstraint,
    exp.DefaultColumnConstraint,
    exp.CheckColumnConstraint,
)
_REFUSED: Final[tuple[tuple[type[exp.Expr], str], ...]] = (
    (exp.ForeignKey, "FOREIGN KEY is not kept"),
    (exp.Reference, "REFERENCES is not kept: there are no foreign keys"),
    (exp.ComputedColumnConstraint, "generated columns are not supported"),
    (exp.GeneratedAsIdentityColumnConstraint, "generated columns are not supported"),
    (exp.UniqueColumnConstraint, "UNIQUE is not kept, other than as PRIMARY KEY"),
    (exp.CollateColumnConstraint, "COLLATE is not supported"),
    (exp.LikeProperty, "LIKE another table is not supported"),
    (exp.TemporaryProperty, "temporary tables are not supported"),
)


def check_create(stream: TokenStream, tree: exp.Create) -> None:
    """`SqlError` for anything in the statement that the table would not keep."""
    first = stream.tokens[0]
    if str(tree.args.get("kind")).upper() != "TABLE":
        raise stream.error("only CREATE TABLE and CREATE TOPIC are supported", token=first)
    for node, message in _REFUSED:
        if tree.find(node) is not None:
            raise stream.error(message, token=first)
    if tree.args.get("replace"):
        raise stream.error("OR REPLACE would drop the table's rows", "DROP TABLE IF EXISTS first", first)
    if tree.args.get("expression") is not None:
        raise stream.error("CREATE TABLE AS is not supported", "CREATE TABLE with columns, then INSERT … SELECT", first)
    if tree.args.get("properties"):
        raise stream.error("tables have no properties here", token=first)
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
            if not isinstance(constraint.kind, _COLUMN):
                raise SqlError(f"the column {part.name!r} says more than PRIMARY KEY, NOT NULL, DEFAULT and CHECK")
    elif not isinstance(part, exp.PrimaryKey | exp.CheckColumnConstraint | exp.Check):
        raise SqlError("a table has columns, PRIMARY KEY and CHECK, and nothing else")
