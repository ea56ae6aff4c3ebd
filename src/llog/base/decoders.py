"""Decoders of JSON for structs, which any thread may ask for and use.

msgspec examines a type at its first use, and two threads that have it examine one at the same time crash the process.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_decoders: dict[tuple[Any, bool], msgspec.json.Decoder[Any]] = {}
_examining = threading.Lock()


def json_decoder(kind: type[T], *, strict: bool = True) -> msgspec.json.Decoder[T]:
    """The decoder of this type, the same for every call. Without `strict`, numbers may come as text."""
    decoder = _decoders.get((kind, strict))
    if decoder is None:
        with _examining:
            decoder = _decoders[kind, strict] = msgspec.json.Decoder(kind, strict=strict)
    return decoder
