"""JSON decoders that any thread may get and use.

They have their own module because msgspec examines a type on its first use, and crashes the process if two threads do
so at the same time: every decoder of a struct must come from here.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_decoders: dict[tuple[Any, bool], msgspec.json.Decoder[Any]] = {}
_examining = threading.Lock()


def json_decoder(kind: type[T], *, strict: bool = True) -> msgspec.json.Decoder[T]:
    """Return the one decoder of this type. Without `strict`, it accepts numbers as text."""
    decoder = _decoders.get((kind, strict))
    if decoder is None:
        with _examining:
            decoder = _decoders[kind, strict] = msgspec.json.Decoder(kind, strict=strict)
    return decoder
