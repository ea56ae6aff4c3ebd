"""How the generated modules describe messages: what is written of a field in which versions, and the APIs."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from msgspec import Struct


class Field(NamedTuple):
    """A field of a message. Versions are ranges in Kafka's notation: `3`, `0-12`, `4+`; empty is none."""

    name: str
    kind: str | type[Message]
    """A primitive type, or the struct."""
    versions: str
    array: bool = False
    nullable: str = ""
    tag: int | None = None
    """The number of a tagged field."""


class Message(Struct, kw_only=True, gc=False):
    """What all messages and the structs inside them are, so that the codec can ask for their fields."""

    FIELDS: ClassVar[tuple[Field, ...]]


class Api(NamedTuple):
    """A request and its response, with the versions that the schema knows."""

    key: int
    name: str
    lowest: int
    highest: int
    flexible_from: int
    """From this version on, the messages have compact lengths and tagged fields."""
    request: type[Message]
    response: type[Message]


def in_range(version: int, versions: str) -> bool:
    """Return whether a range in Kafka's notation contains the version."""
    if not versions:
        return False
    first, dash, last = versions.removesuffix("+").partition("-")
    if version < int(first):
        return False
    return versions.endswith("+") or version <= int(last if dash else first)
