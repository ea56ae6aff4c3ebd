"""The functions that read and write the messages, compiled once for each message and version.

A function is made as `dataclasses` makes an `__init__`: from source text that has no branch but those that depend on
the bytes. Neighbouring fixed-width fields are read and written as one, and nothing asks for the version any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from struct import Struct, calcsize
from struct import error as StructError
from typing import Any, Final, NamedTuple

from llog.kafka import wire
from llog.kafka.messages.schema import Field, Message, in_range
from llog.kafka.wire import MalformedMessage, Read

Write = Callable[[bytearray, wire.Splices, Any], None]

UNREADABLE: Final = (StructError, IndexError, ValueError)
"""What reading raises where bytes are missing or wrong. `malformed` makes one error of them."""
_INT8: Final = Struct(">b")


class Codec(NamedTuple):
    """Reads and writes one message in one version."""

    read: Read
    write: Write


@cache
def compiled(message: type[Message], version: int, flexible: bool) -> Codec:
    """Return the codec of a message, or of a struct inside it. `flexible`: the version has compact lengths and tags."""
    present = [field for field in message.FIELDS if in_range(version, field.versions)]
    plain = [field for field in present if field.tag is None]
    tagged = sorted((field for field in present if field.tag is not None), key=lambda field: field.tag or 0)
    return Codec(
        _Source(version, flexible).reader(message, plain, tagged),
        _Source(version, flexible).writer(message, plain, tagged),
    )


def malformed(what: str, data: memoryview, error: Exception) -> MalformedMessage:
    """Return the error for bytes that are not `what` they should be."""
    if isinstance(error, UnicodeDecodeError):
        return MalformedMessage(f"{what} is malformed: a string is not UTF-8")
    if isinstance(error, ValueError):
        return MalformedMessage(f"{what} is malformed: {error}")
    return MalformedMessage(f"{what} is malformed: it ends within a field, at byte {len(data)}")


def _struct_bytes_min(message: type[Message], version: int, flexible: bool) -> int:
    present = [field for field in message.FIELDS if in_range(version, field.versions) and field.tag is None]
    return sum(_field_bytes_min(field, version, flexible) for field in present) + flexible


def _field_bytes_min(field: Field, version: int, flexible: bool) -> int:
    """Return the size of the smallest encoding of a field."""
    if field.array:
        return 1 if flexible else 4
    if isinstance(field.kind, str):
        return _primitive_bytes_min(field.kind, flexible)
    return 1 if in_range(version, field.nullable) else _struct_bytes_min(field.kind, version, flexible)


def _primitive_bytes_min(kind: str, flexible: bool) -> int:
    if kind in wire.FIXED:
        return calcsize(">" + wire.FIXED[kind])
    return 1 if flexible else {"string": 2, "bytes": 4, "records": 4}[kind]


class _Source:
    """Collects the lines of one function, and the objects that they name."""

    def __init__(self, version: int, flexible: bool) -> None:
        self._version = version
        self._flexible = flexible
        self._lines: list[str] = []
        self._names: dict[str, Any] = {}
        self._numbers = count()

    def reader(self, message: type[Message], plain: Sequence[Field], tagged: Sequence[Field]) -> Read:
        for run in _runs(plain):
            if _is_fixed(run[0]):
                layout = Struct(">" + "".join(wire.FIXED[str(field.kind)] for field in run))
                targets = ", ".join(f"f_{field.name}" for field in run)
                self._add(f"{targets}, = {self._name(layout.unpack_from)}(data, pos)")
                self._add(f"pos += {layout.size}")
            else:
                self._read_field(run[0], f"f_{run[0].name}")
        values = ", ".join(f"{field.name}=f_{field.name}" for field in plain)
        self._add(f"message = {self._name(message)}({values})")
        if self._flexible:
            known = {field.tag: (field.name, self._tagged_reader(field)) for field in tagged}
            self._add("if data[pos]:")
            self._add(f"    pos = {self._name(wire.read_tags)}(data, pos, message, {self._name(known)})")
            self._add("else:")
            self._add("    pos += 1")
        self._add("return message, pos")
        read: Read = self._function("data, pos", message)
        return read

    def writer(self, message: type[Message], plain: Sequence[Field], tagged: Sequence[Field]) -> Write:
        for run in _runs(plain):
            if _is_fixed(run[0]):
                layout = Struct(">" + "".join(wire.FIXED[str(field.kind)] for field in run))
                self._add(f"out += {self._name(layout.pack)}({', '.join(map(self._fixed_value, run))})")
            else:
                self._write_field(run[0], f"message.{run[0].name}")
        if tagged:
            empty = message()
            defaults = [(field, self._name(getattr(empty, field.name))) for field in tagged]
            known = [(field.tag, field.name, default, self._tagged_writer(field)) for field, default in defaults]
            tags = [(tag, name, self._names[default], write) for tag, name, default, write in known]
            unset = " and ".join(f"message.{field.name} == {default}" for field, default in defaults)
            self._add(f"if {unset}:")
            self._add("    out.append(0)")
            self._add("else:")
            self._add(f"    {self._name(_write_tags)}(out, message, {self._name(tags)})")
        elif self._flexible:
            self._add("out.append(0)")
        self._add("return")
        write: Write = self._function("out, splices, message", message)
        return write

    def _read_field(self, field: Field, target: str, indent: str = "") -> None:
        nullable = in_range(self._version, field.nullable)
        if field.array:
            self._read_array(field, target, nullable, indent)
        elif not isinstance(field.kind, str):
            read = self._name(compiled(field.kind, self._version, self._flexible).read)
            if nullable:
                self._add(f"{indent}{target} = None")
                self._add(f"{indent}present, = {self._name(_INT8.unpack_from)}(data, pos)")
                self._add(f"{indent}pos += 1")
                self._add(f"{indent}if present >= 0:")
                indent += "    "
            self._add(f"{indent}{target}, pos = {read}(data, pos)")
        elif _is_fixed(field):
            layout = Struct(">" + wire.FIXED[field.kind])
            self._add(f"{indent}{target}, = {self._name(layout.unpack_from)}(data, pos)")
            self._add(f"{indent}pos += {layout.size}")
        else:
            self._add(f"{indent}{target}, pos = {self._primitive('read', field.kind, nullable)}(data, pos)")

    def _read_array(self, field: Field, target: str, nullable: bool, indent: str) -> None:
        item = field._replace(array=False, nullable="")
        smallest = max(_field_bytes_min(item, self._version, self._flexible), 1)
        read_length = self._primitive("read", "length", nullable)
        self._add(f"{indent}length, pos = {read_length}(data, pos, {smallest})")
        if nullable:
            self._add(f"{indent}if length < 0:")
            self._add(f"{indent}    {target} = None")
            self._add(f"{indent}else:")
            indent += "    "
        if _is_fixed(item):
            read_items = self._name(wire.read_fixed_items)
            self._add(f"{indent}{target}, pos = {read_items}(data, pos, {wire.FIXED[str(item.kind)]!r}, length)")
        else:
            self._add(f"{indent}{target} = []")
            self._add(f"{indent}for _ in range(length):")
            self._read_field(item, "item", indent + "    ")
            self._add(f"{indent}    {target}.append(item)")

    def _write_field(self, field: Field, value: str, indent: str = "") -> None:
        nullable = in_range(self._version, field.nullable)
        if field.array:
            self._write_array(field, value, nullable, indent)
        elif not isinstance(field.kind, str):
            write = self._name(compiled(field.kind, self._version, self._flexible).write)
            if nullable:
                self._add(f"{indent}out.append(255 if {value} is None else 1)")
                self._add(f"{indent}if {value} is not None:")
                indent += "    "
            self._add(f"{indent}{write}(out, splices, {value})")
        elif _is_fixed(field):
            layout = Struct(">" + wire.FIXED[field.kind])
            self._add(f"{indent}out += {self._name(layout.pack)}({self._checked(field, value)})")
        else:
            kind = "string" if field.kind == "string" else "bytes"
            write = self._primitive("write", kind, nullable)
            splices = "" if kind == "string" else "splices, "
            self._add(f"{indent}{write}(out, {splices}{value})")

    def _write_array(self, field: Field, value: str, nullable: bool, indent: str) -> None:
        write_length = self._primitive("write", "length", False)
        self._add(f"{indent}items = {value}")
        if nullable:
            self._add(f"{indent}if items is None:")
            self._add(f"{indent}    {write_length}(out, -1)")
            self._add(f"{indent}else:")
            indent += "    "
        self._add(f"{indent}{write_length}(out, len(items))")
        self._add(f"{indent}for item in items:")
        self._write_field(field._replace(array=False, nullable=""), "item", indent + "    ")

    def _tagged_reader(self, field: Field) -> Read:
        source = _Source(self._version, self._flexible)
        source._read_field(field, "value")
        source._add("return value, pos")
        read: Read = source._function("data, pos", field.name)
        return read

    def _tagged_writer(self, field: Field) -> Write:
        if field.kind in ("bytes", "records"):
            raise NotImplementedError(f"the tagged field {field.name} has bytes, which are spliced into the message")
        source = _Source(self._version, self._flexible)
        source._write_field(field, "value")
        write: Write = source._function("out, splices, value", field.name)
        return write

    def _fixed_value(self, field: Field) -> str:
        return self._checked(field, f"message.{field.name}")

    def _checked(self, field: Field, value: str) -> str:
        return f"{self._name(wire.uuid_bytes)}({value})" if field.kind == "uuid" else value

    def _primitive(self, verb: str, kind: str, nullable: bool) -> str:
        kind = "bytes" if kind == "records" else kind
        name = f"{verb}_{'compact_' if self._flexible else ''}{'nullable_' if nullable else ''}{kind}"
        return self._name(getattr(wire, name))

    def _name(self, value: object) -> str:
        name = f"n{next(self._numbers)}"
        self._names[name] = value
        return name

    def _add(self, line: str) -> None:
        self._lines.append("    " + line)

    def _function(self, arguments: str, subject: object) -> Any:
        text = "\n".join([f"def function({arguments}):", *self._lines])
        names = dict(self._names)
        exec(compile(text, f"<codec of {subject} version {self._version}>", "exec"), names)
        return names["function"]


def _is_fixed(field: Field) -> bool:
    return not field.array and field.kind in wire.FIXED


def _runs(fields: Sequence[Field]) -> list[list[Field]]:
    """Return the fields in order, neighbouring fixed-width ones together."""
    runs: list[list[Field]] = []
    for field in fields:
        if runs and _is_fixed(field) and _is_fixed(runs[-1][-1]):
            runs[-1].append(field)
        else:
            runs.append([field])
    return runs


def _write_tags(out: bytearray, message: object, tags: Sequence[tuple[int, str, object, Write]]) -> None:
    values = [(tag, getattr(message, name), default, write) for tag, name, default, write in tags]
    present = [(tag, value, write) for tag, value, default, write in values if value != default]
    wire.write_uvarint(out, len(present))
    for tag, value, write in present:
        body = bytearray()
        write(body, [], value)
        wire.write_uvarint(out, tag)
        wire.write_uvarint(out, len(body))
        out += body
