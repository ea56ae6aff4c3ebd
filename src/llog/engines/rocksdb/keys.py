"""Every key in RocksDB, by column family: no other module spells one. `<topic>` is the topic's directory in the
catalog.

| family | key | value | written by |
| --- | --- | --- | --- |
| `topic_logs` | `topic/<topic>/<partition>/<offset:020>` | one record: `envelope.py` | appends and table changes |
| `topic_offsets` | `offset/<topic>/<group>/<partition>` | how far a group has come, and its claims | CONSUME, ACK, RESET |
| `topic_meta` | `meta/<topic>` | the topic's catalog entry as of its creation: it exists here | CREATE TOPIC |
| `topic_routes` | `route/<topic>/<table>/<op>` | the route of one kind of change: filter, partition key, payload | ALTER TOPIC |
| `counters` | `counter/<topic>/<partition>` | u64 last offset, then the partition's state | appends, retention |
| | `counter/message_id` | u64 the last message id that was given | table changes |
| | `counter/message_node` | u64 the node in message ids, drawn once | the first use |
| | `counter/store` | a name that no other store has, drawn once | the first use |
| | `counter/table` | u64 the number of the last table that was created | CREATE TABLE |
| `rows` | `table/<table>` | the table's definition | CREATE TABLE |
| | `row/<number:010>/<primary key>` | one row | INSERT, UPDATE, DELETE |
| `outbox` | `outbox/<topic>/<partition>/<sequence:020>` | a change for a topic of another engine | table changes; the relay deletes it |
| | `last/<topic>/<partition>` | u64 the last sequence that was given | table changes |
| | `relay/<topic>/<partition>` | what the relay is about to append | the relay |

Numbers in values are little-endian.
"""  # noqa: E501

from __future__ import annotations

from typing import Final

LOGS: Final = "topic_logs"
OFFSETS: Final = "topic_offsets"
META: Final = "topic_meta"
ROUTES: Final = "topic_routes"
COUNTERS: Final = "counters"
ROWS: Final = "rows"
OUTBOX: Final = "outbox"
FAMILIES: Final = (LOGS, OFFSETS, META, ROUTES, COUNTERS, ROWS, OUTBOX)

MESSAGE_ID: Final = b"counter/message_id"
MESSAGE_NODE: Final = b"counter/message_node"
STORE_NAME: Final = b"counter/store"
LAST_TABLE: Final = b"counter/table"
TABLES: Final = b"table/"
ROUTE_PREFIX: Final = b"route/"
OUTBOX_PREFIX: Final = b"outbox/"


def record_key(topic: str, partition: int, offset: int) -> bytes:
    return b"topic/%s/%d/%020d" % (topic.encode(), partition, offset)


def record_keys(topic: str, partition: int, offsets: range) -> list[bytes]:
    return _keys_with_numbers(record_prefix(topic, partition), offsets)


def record_prefix(topic: str, partition: int) -> bytes:
    return b"topic/%s/%d/" % (topic.encode(), partition)


def offset_of(key: bytes) -> int:
    """Return the offset, or the sequence, at the end of a key."""
    return int(key[-20:])


def counter_key(topic: str, partition: int) -> bytes:
    return b"counter/%s/%d" % (topic.encode(), partition)


def meta_key(topic: str) -> bytes:
    return b"meta/%s" % topic.encode()


def group_key(topic: str, group: str, partition: int) -> bytes:
    return b"offset/%s/%s/%d" % (topic.encode(), group.encode(), partition)


def group_prefix(topic: str, group: str | None = None) -> bytes:
    """Return the prefix of the keys of all groups of a topic, or of one group."""
    return b"offset/%s/" % topic.encode() + (b"" if group is None else b"%s/" % group.encode())


def route_key(topic: str, table: str, op: str) -> bytes:
    return b"route/%s/%s/%s" % (topic.encode(), table.encode(), op.encode())


def route_prefix(topic: str) -> bytes:
    return b"route/%s/" % topic.encode()


def table_key(table: str) -> bytes:
    return TABLES + table.encode()


def row_prefix(number: int) -> bytes:
    return b"row/%010d/" % number


def outbox_key(topic: str, partition: int, sequence: int) -> bytes:
    return b"outbox/%s/%d/%020d" % (topic.encode(), partition, sequence)


def outbox_keys(topic: str, partition: int, sequences: range) -> list[bytes]:
    return _keys_with_numbers(outbox_prefix(topic, partition), sequences)


def outbox_prefix(topic: str, partition: int) -> bytes:
    return b"outbox/%s/%d/" % (topic.encode(), partition)


def outbox_prefixes(topic: str) -> tuple[bytes, ...]:
    """Return the prefixes of all keys of a topic in the outbox."""
    return tuple(b"%s/%s/" % (kind, topic.encode()) for kind in (b"outbox", b"last", b"relay"))


def partition_of(key: bytes) -> tuple[str, int]:
    """Return the topic and the partition that a key of the outbox names."""
    _, topic, partition, *_ = key.decode().split("/")
    return topic, int(partition)


def last_sequence_key(topic: str, partition: int) -> bytes:
    return b"last/%s/%d" % (topic.encode(), partition)


def relay_key(topic: str, partition: int) -> bytes:
    return b"relay/%s/%d" % (topic.encode(), partition)


def prefixes_of(topic: str) -> tuple[tuple[str, bytes], ...]:
    """Return the families and prefixes of all keys that are removed with a topic."""
    return (
        (LOGS, b"topic/%s/" % topic.encode()),
        (OFFSETS, group_prefix(topic)),
        (ROUTES, route_prefix(topic)),
        (COUNTERS, b"counter/%s/" % topic.encode()),
    )


def after(prefix: bytes) -> bytes:
    """Return the lowest key above every key that starts with `prefix`."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


_LAST_DIGITS: Final = tuple(b"%03d" % number for number in range(1000))


def _keys_with_numbers(prefix: bytes, numbers: range) -> list[bytes]:
    """Return the prefix with each number in 20 digits. The first 17 are formatted once per thousand numbers."""
    keys: list[bytes] = []
    for thousand in range(numbers.start // 1000, -(-numbers.stop // 1000)):
        front, zero = prefix + b"%017d" % thousand, thousand * 1000
        keys += [front + last for last in _LAST_DIGITS[max(numbers.start - zero, 0) : numbers.stop - zero]]
    return keys
