"""Messages with random content in every field that a version has, made from the same description as their codecs."""

from __future__ import annotations

import random
import struct
from typing import Any

from llog.kafka import wire
from llog.kafka.messages import APIS, Api, Message
from llog.kafka.messages.schema import Field, in_range

VERSIONS = [(api, version) for api in APIS.values() for version in range(api.lowest, api.highest + 1)]
VERSION_NAMES = [f"{api.name}-{version}" for api, version in VERSIONS]
_TEXTS = ("", "a", "topic-1", "größer", "日本語", "x" * 200, "\0")


def sample(message: type[Message], version: int, rng: random.Random) -> Any:
    """Return a message whose fields are set as far as the version has them; the others keep their defaults."""
    fields = [field for field in message.FIELDS if in_range(version, field.versions)]
    return message(**{field.name: _value(field, version, rng) for field in fields})


def frame(pieces: list[wire.Buffer]) -> memoryview:
    """Return what follows the size of a frame, after a look at the size."""
    whole = b"".join(pieces)
    assert struct.unpack_from(">i", whole) == (len(whole) - 4,)
    return memoryview(whole)[4:]


def _value(field: Field, version: int, rng: random.Random) -> Any:
    if in_range(version, field.nullable) and rng.random() < 0.2:
        return None
    if field.array:
        item = field._replace(array=False, nullable="")
        return [_value(item, version, rng) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    if not isinstance(field.kind, str):
        return sample(field.kind, version, rng)
    return _primitive(field.kind, rng)


def _primitive(kind: str, rng: random.Random) -> Any:
    if kind == "string":
        return rng.choice(_TEXTS)
    if kind in ("bytes", "records"):
        return rng.randbytes(rng.choice((0, 1, 127, 128, 200, 3000)))
    if kind == "uuid":
        return rng.randbytes(16)
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "float64":
        return rng.uniform(-1e9, 1e9)
    unsigned = kind.startswith("u")
    bits = int(kind.removeprefix("u").removeprefix("int"))
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return rng.choice((low, high, 0, 1, rng.randint(low, high)))


def seeded(api: Api, version: int) -> random.Random:
    return random.Random(f"{api.name} {version}")
