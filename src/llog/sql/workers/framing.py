"""Messages between a process and its workers, over a socket: one pickled value followed by raw buffers."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any, Final

import pyarrow as pa

Buffer = bytes | bytearray | memoryview
"""Arrow's buffers are accepted, too, but have no types."""

_COUNT: Final = struct.Struct("<I")
_JOINED_MAX: Final = 64 << 10
"""Messages up to this size are sent with one system call."""


def send(to: socket.socket, value: Any, *buffers: Buffer) -> None:
    """Send one message. Raises `OSError` if the other end is closed."""
    send_pickled(to, pickle.dumps(value, 5), *buffers)


def send_pickled(to: socket.socket, value: bytes, *buffers: Buffer) -> None:
    parts = [memoryview(each) for each in (value, *buffers)]
    sizes = [part.nbytes for part in parts]
    head = struct.pack(f"<I{len(parts)}Q", len(parts), *sizes)
    if sum(sizes) <= _JOINED_MAX:
        to.sendall(b"".join((head, *parts)))
        return
    to.sendall(head)
    for part in parts:
        to.sendall(part)


def receive(source: socket.socket) -> tuple[Any, list[bytearray]]:
    """Return the next message.

    Raises `EOFError` if the other end is closed, and `MemoryError` for a message that is too large; the message after
    it can be received.
    """
    [count] = _COUNT.unpack(_receive_exactly(source, _COUNT.size))
    sizes = struct.unpack(f"<{count}Q", _receive_exactly(source, 8 * count))
    parts: list[bytearray] = []
    for number, size in enumerate(sizes):
        try:
            parts.append(_receive_exactly(source, size))
        except MemoryError:
            _skip(source, sum(sizes[number:]))
            raise
    return pickle.loads(parts[0]), parts[1:]


def encode_table(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def decode_table(buffer: Buffer) -> pa.Table:
    """Return the table, which shares the buffer's memory."""
    with pa.ipc.open_stream(pa.py_buffer(buffer)) as reader:
        return reader.read_all()


def _receive_exactly(source: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    with memoryview(buffer) as view:
        done = 0
        while done < size:
            count = source.recv_into(view[done:], 0, socket.MSG_WAITALL)
            if not count:
                raise EOFError("the other end was closed")
            done += count
    return buffer


def _skip(source: socket.socket, size: int) -> None:
    while size:
        size -= len(_receive_exactly(source, min(size, _JOINED_MAX)))
