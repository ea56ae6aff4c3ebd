"""Kafka's primitive types: how they are read from a message and written to one.

A reader takes the message and a position, and returns the value and the position behind it. It compares every length
with the bytes that are left before it believes it, so that a message cannot make the broker allocate more than a
multiple of its own size. Reading a fixed-width number or a single byte beyond the end raises `struct.error` or
`IndexError`; `llog.kafka.messages` turns both into `MalformedMessage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from struct import Struct, calcsize, unpack_from
from types import MappingProxyType
from typing import Any, Final

Buffer = bytes | bytearray | memoryview
Splices = list[tuple[int, Buffer]]
"""Large buffers that belong between the written bytes, each with the position that it goes to."""
Read = Callable[[memoryview, int], tuple[Any, int]]

FIXED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bool": "?",
        "int8": "b",
        "int16": "h",
        "uint16": "H",
        "int32": "i",
        "uint32": "I",
        "int64": "q",
        "float64": "d",
        "uuid": "16s",
    }
)
"""The format of each fixed-width type in the language of `struct`."""
STRING_BYTES_MAX: Final = 0x7FFF
COPIED_BYTES_MAX: Final = 1024
"""A buffer up to this size is copied into its message, which is cheaper than one more piece to send."""
_UVARINT_BYTES_MAX: Final = 5
_INT16: Final = Struct(">h")
_INT32: Final = Struct(">i")


class MalformedMessage(ValueError):
    """A Kafka client sent bytes that are not the message that they should be. Its connection has to be closed."""


def read_uvarint(data: memoryview, pos: int) -> tuple[int, int]:
    value = data[pos]
    if value < 0x80:
        return value, pos + 1
    value &= 0x7F
    for index in range(1, _UVARINT_BYTES_MAX):
        byte = data[pos + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value > 0xFFFFFFFF:
                break
            return value, pos + index + 1
    raise MalformedMessage(f"the variable-length number at byte {pos} has more than 32 bits")


def read_string(data: memoryview, pos: int) -> tuple[str, int]:
    return _text(data, pos + 2, _INT16.unpack_from(data, pos)[0])


def read_nullable_string(data: memoryview, pos: int) -> tuple[str | None, int]:
    length = _INT16.unpack_from(data, pos)[0]
    return (None, pos + 2) if length == -1 else _text(data, pos + 2, length)


def read_compact_string(data: memoryview, pos: int) -> tuple[str, int]:
    length, pos = read_uvarint(data, pos)
    return _text(data, pos, length - 1)


def read_compact_nullable_string(data: memoryview, pos: int) -> tuple[str | None, int]:
    length, pos = read_uvarint(data, pos)
    return _text(data, pos, length - 1) if length else (None, pos)


def read_bytes(data: memoryview, pos: int) -> tuple[memoryview, int]:
    return _slice(data, pos + 4, _INT32.unpack_from(data, pos)[0])


def read_nullable_bytes(data: memoryview, pos: int) -> tuple[memoryview | None, int]:
    length = _INT32.unpack_from(data, pos)[0]
    return (None, pos + 4) if length == -1 else _slice(data, pos + 4, length)


def read_compact_bytes(data: memoryview, pos: int) -> tuple[memoryview, int]:
    length, pos = read_uvarint(data, pos)
    return _slice(data, pos, length - 1)


def read_compact_nullable_bytes(data: memoryview, pos: int) -> tuple[memoryview | None, int]:
    length, pos = read_uvarint(data, pos)
    return _slice(data, pos, length - 1) if length else (None, pos)


def read_length(data: memoryview, pos: int, item_bytes_min: int) -> tuple[int, int]:
    """Read the number of an array's items, each of which takes at least `item_bytes_min` bytes."""
    length = _INT32.unpack_from(data, pos)[0]
    return _checked(data, pos + 4, length, item_bytes_min), pos + 4


def read_nullable_length(data: memoryview, pos: int, item_bytes_min: int) -> tuple[int, int]:
    """Read the number of an array's items; -1 stands for null."""
    length = _INT32.unpack_from(data, pos)[0]
    return (-1 if length == -1 else _checked(data, pos + 4, length, item_bytes_min)), pos + 4


def read_compact_length(data: memoryview, pos: int, item_bytes_min: int) -> tuple[int, int]:
    length, pos = read_uvarint(data, pos)
    return _checked(data, pos, length - 1, item_bytes_min), pos


def read_compact_nullable_length(data: memoryview, pos: int, item_bytes_min: int) -> tuple[int, int]:
    length, pos = read_uvarint(data, pos)
    return (_checked(data, pos, length - 1, item_bytes_min) if length else -1), pos


def read_fixed_items(data: memoryview, pos: int, code: str, length: int) -> tuple[list[Any], int]:
    """Read the items of an array of fixed-width values, whose length was checked."""
    if code == "16s":
        end = pos + 16 * length
        return [bytes(data[at : at + 16]) for at in range(pos, end, 16)], end
    layout = f">{length}{code}"
    return list(unpack_from(layout, data, pos)), pos + calcsize(layout)


def read_tags(data: memoryview, pos: int, message: object, known: Mapping[int, tuple[str, Read]]) -> int:
    """Read tagged fields into the message, skip those that are not known, and return the position behind them."""
    count, pos = read_uvarint(data, pos)
    for _ in range(count):  # each takes two bytes or more, so that reading ends with the message
        tag, pos = read_uvarint(data, pos)
        size, pos = read_uvarint(data, pos)
        end = pos + size
        if end > len(data):
            raise MalformedMessage(f"tagged field {tag} has {size} bytes at byte {pos}, but {len(data) - pos} are left")
        if tag in known:
            name, read = known[tag]
            value, pos = read(data[:end], pos)
            if pos != end:
                raise MalformedMessage(f"tagged field {tag} ends at byte {pos} instead of byte {end}")
            setattr(message, name, value)
        pos = end
    return pos


def write_uvarint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def write_string(out: bytearray, value: str) -> None:
    text = value.encode()
    out += _INT16.pack(len(text))
    out += text


def write_nullable_string(out: bytearray, value: str | None) -> None:
    if value is None:
        out += b"\xff\xff"
    else:
        write_string(out, value)


def write_compact_string(out: bytearray, value: str) -> None:
    text = value.encode()
    if len(text) > STRING_BYTES_MAX:
        raise ValueError(f"a string has {len(text)} bytes, and Kafka's have at most {STRING_BYTES_MAX}")
    write_uvarint(out, len(text) + 1)
    out += text


def write_compact_nullable_string(out: bytearray, value: str | None) -> None:
    if value is None:
        out.append(0)
    else:
        write_compact_string(out, value)


def write_bytes(out: bytearray, splices: Splices, value: Buffer | Sequence[Buffer]) -> None:
    out += _INT32.pack(_size(value))
    _splice(out, splices, value)


def write_nullable_bytes(out: bytearray, splices: Splices, value: Buffer | Sequence[Buffer] | None) -> None:
    if value is None:
        out += b"\xff\xff\xff\xff"
    else:
        write_bytes(out, splices, value)


def write_compact_bytes(out: bytearray, splices: Splices, value: Buffer | Sequence[Buffer]) -> None:
    write_uvarint(out, _size(value) + 1)
    _splice(out, splices, value)


def write_compact_nullable_bytes(out: bytearray, splices: Splices, value: Buffer | Sequence[Buffer] | None) -> None:
    if value is None:
        out.append(0)
    else:
        write_compact_bytes(out, splices, value)


def write_length(out: bytearray, length: int) -> None:
    out += _INT32.pack(length)


def write_compact_length(out: bytearray, length: int) -> None:
    write_uvarint(out, length + 1)


def uuid_bytes(value: bytes) -> bytes:
    """Return the value if it is a uuid: `struct` would pad or cut any other length."""
    if len(value) != 16:
        raise ValueError(f"a uuid has 16 bytes, not {len(value)}")
    return value


def pieces(out: bytearray, splices: Splices) -> list[Buffer]:
    """Return what was written and the large buffers between it, in order, without copying either."""
    written = memoryview(out)
    found: list[Buffer] = []
    start = 0
    for position, buffer in splices:
        if position > start:
            found.append(written[start:position])
            start = position
        found.append(buffer)
    if start < len(out):
        found.append(written[start:])
    return found


def _text(data: memoryview, pos: int, length: int) -> tuple[str, int]:
    end = pos + length
    if not 0 <= length <= STRING_BYTES_MAX or end > len(data):
        raise _bad_length("a string", data, pos, length)
    return str(data[pos:end], "utf-8"), end


def _slice(data: memoryview, pos: int, length: int) -> tuple[memoryview, int]:
    end = pos + length
    if length < 0 or end > len(data):
        raise _bad_length("a field of bytes", data, pos, length)
    return data[pos:end], end


def _checked(data: memoryview, pos: int, length: int, item_bytes_min: int) -> int:
    if length < 0 or length * item_bytes_min > len(data) - pos:
        raise _bad_length("an array", data, pos, length)
    return length


def _bad_length(what: str, data: memoryview, pos: int, length: int) -> MalformedMessage:
    if length == -1:
        return MalformedMessage(f"{what} before byte {pos} is null, which it must not be")
    return MalformedMessage(f"{what} before byte {pos} has the length {length}, but {len(data) - pos} bytes are left")


def _size(value: Buffer | Sequence[Buffer]) -> int:
    return sum(map(len, value)) if isinstance(value, list | tuple) else len(value)


def _splice(out: bytearray, splices: Splices, value: Buffer | Sequence[Buffer]) -> None:
    for buffer in value if isinstance(value, list | tuple) else (value,):
        if len(buffer) <= COPIED_BYTES_MAX:
            out += buffer
        else:
            splices.append((len(out), buffer))
