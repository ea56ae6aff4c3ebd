"""Operations: what a route tells its clients about itself, for the OpenAPI document and the page of docs."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

PROBLEM: Final = "application/problem+json"
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Deferred(NamedTuple):
    """A struct in a module that needs an optional package."""

    module: str
    name: str


Shape = Any
"""The type that bodies of a content type are decoded into or encoded from, a `Deferred`, or None if they have none."""


class Operation(NamedTuple):
    """What a route takes and answers, by content type."""

    tag: str
    summary: str
    bodies: Mapping[str, Shape] = NOTHING
    query: Shape = None
    headers: Mapping[str, str] = NOTHING
    """Headers of the request that the route reads, with their descriptions."""
    answers: Mapping[str, Shape] = NOTHING
    """Empty if the answer has no body."""
    status: HTTPStatus = HTTPStatus.OK


def load_shape(shape: Shape) -> Any:
    """Return the type; None if it has none, or if the package that it needs is not installed."""
    if not isinstance(shape, Deferred):
        return shape
    try:
        return getattr(import_module(shape.module), shape.name)
    except ImportError:
        return None


class Problem(msgspec.Struct, frozen=True):
    """Why a request failed (RFC 9457). Some codes have further members."""

    type: str
    title: str
    status: int
    code: str
    detail: str


class ItemError(msgspec.Struct, frozen=True):
    """Why an item of a request failed. Some codes have further members."""

    code: str
    detail: str
