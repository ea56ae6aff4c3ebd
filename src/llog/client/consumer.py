"""A topic as an iterator of messages, for a consumer group.

A message is delivered at least once: if it is not acknowledged before its visibility time is over, it is delivered
again, to any member of the group, with `attempt` one higher.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa

from llog.batch.columns import decode_arrow_headers
from llog.client.backend import Backend, acknowledge
from llog.errors import InvalidArgument, OutcomeUnknown, StaleMember, StoreUnavailable
from llog.groups.options import ConsumeOptions, Start
from llog.model import Header

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_WAIT_MS: Final = 5_000
"""How long one consume call waits for messages; a consumer without a timeout repeats it."""
_TRIES: Final = 4
_RETRY_S: Final = 0.05
"""The first delay before asking a store or broker again that does not answer; it doubles each time."""
_ACK_S: Final = 0.1
"""How long finished messages may wait to be acknowledged together: each acknowledgement is a write that survives a
power cut.
"""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a topic. A record that is not a change event has no message id, table and op."""

    topic: str
    partition: int
    offset: int
    message_id: int | None
    source_table: str | None
    op: str | None
    """INSERT, UPDATE or DELETE."""
    ts: datetime
    key: bytes | None
    payload: bytes | None
    """None marks its key as deleted."""
    headers: tuple[Header, ...] = ()
    """Names and values, in the order in which the producer gave them."""
    attempt: int
    """The number of this delivery to the group, from 1; 0 if the message was read without a group."""

    def json(self) -> Any:
        """Return the decoded payload; None if there is no payload. Raises `InvalidArgument` if it is not JSON."""
        if self.payload is None:
            return None
        try:
            return msgspec.json.decode(self.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"offset {self.offset} of {self.topic}/{self.partition} is not JSON ({error}): use .payload"
            ) from error


def messages_in(table: pa.Table) -> list[Message]:
    """Return one message per row."""
    times = table.column("ts").cast(pa.int64()).to_pylist()
    names = ("topic", "partition", "offset", "message_id", "source_table", "op", "key", "payload", "attempt")
    columns = {name: table.column(name).to_pylist() for name in names}
    headers = decode_arrow_headers(table.column("headers"))
    return [
        Message(ts=_time(ms), headers=pairs, **dict(zip(names, row, strict=True)))
        for ms, pairs, *row in zip(times, headers, *columns.values(), strict=True)
    ]


def _time(ms: int) -> datetime:
    """Return the nearest time that Python can hold: a producer may give a year beyond 9999."""
    try:
        return _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return (datetime.max if ms > 0 else datetime.min).replace(tzinfo=UTC)


def new_member_name(member: str) -> str:
    """Return a name that no member had before, for a new member or one whose consume failed (`Dispatcher.consume`)."""
    return f"{member.partition('~')[0]}~{uuid.uuid4().hex[:16]}"


class Consumer:
    """Iterates over the messages of a topic, in order within each partition. For one thread; several consumers may
    share a group.

    With `auto_ack`, a message is acknowledged once the loop has asked for the next one: a message that the loop left by
    `break` or an exception is delivered again. Without it, call `ack` or `ack_all`, which raise `StaleMember` in an
    assigned group if another member has the partition by now. The iteration ends when no message came for `timeout`
    seconds, or never if that is None. `member` is a prefix of the name under which the consumer holds messages: a name
    that was used before might hold messages that were never delivered.

    A member of an assigned group that is silent for `visibility_ms` loses its partitions. Asking for the next message
    and `ack` are signs of life; a program that takes longer over one message calls `heartbeat`.
    """

    def __init__(
        self,
        backend: Backend,
        topic: str,
        *,
        group: str,
        member: str | None = None,
        partition: int | None = None,
        start: Start | None = None,
        auto_ack: bool = True,
        batch: int = 100,
        timeout: float | None = None,
        visibility_ms: int = 60_000,
        max_attempts: int | None = None,
        dead_letter: str | None = None,
        mode: Literal["claimed", "assigned"] = "claimed",
    ) -> None:
        if start is not None and start.kind not in ("latest", "earliest"):
            raise InvalidArgument(
                "a new group starts at the latest or the earliest message, and a consumer where its group is, not at "
                f"{start.kind!r}: reset the group"
            )
        self.topic, self.group = topic, group
        self.member = new_member_name(member or "consumer")
        self._backend = backend
        self._auto_ack = auto_ack
        self._timeout = timeout
        self._options = ConsumeOptions(
            topic=topic,
            group=group,
            member=self.member,
            partition=partition,
            start=start,
            limit=batch,
            visibility_ms=visibility_ms,
            max_attempts=max_attempts,
            dead_letter=dead_letter,
            mode=mode,
        )
        self._buffered: deque[Message] = deque()
        self._current: Message | None = None
        self._finished: dict[int | None, int] = {}
        """By partition: the highest offset that is finished and not acknowledged yet."""
        self._delivered: dict[int | None, int] = {}
        self._acked_at = self._heard_at = time.monotonic()
        self._closed = False

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        self._finish_current()
        if self._buffered:
            self._heartbeat_if_due()
        if not self._buffered:
            self._buffered.extend(self._consume_messages(self._timeout))
        if not self._buffered:
            raise StopIteration
        self._current = self._buffered.popleft()
        self._note_delivery(self._current)
        return self._current

    def poll(self, timeout: float = 0.0) -> list[Message]:
        """Return the messages that were fetched and not returned yet, or else those that come within `timeout` seconds.
        With `auto_ack`, the next call acknowledges them.
        """
        self._finish_current()
        found = list(self._buffered) or self._consume_messages(timeout)
        self._buffered.clear()
        for message in found:
            self._note_delivery(message)
        if self._auto_ack:
            self._finished |= {message.partition: message.offset for message in found[:-1]}
            self._current = found[-1] if found else None
        return found

    def ack(self, message: Message) -> None:
        """Acknowledge this message and all earlier ones of its partition that this consumer got."""
        self._heartbeat_if_due()
        self._acknowledge({message.partition: message.offset})

    def ack_all(self) -> None:
        """Acknowledge every message that was returned."""
        self._acknowledge(dict(self._delivered))

    def heartbeat(self) -> None:
        """Report that this member of an assigned group is alive; raise `StaleMember` if its partitions went to
        others.
        """
        self._backend.heartbeat(self.topic, self.group, self.member, visibility_ms=self._options.visibility_ms)
        self._heard_at = time.monotonic()

    def close(self) -> None:
        """Acknowledge the finished messages, with `auto_ack`. Messages that were fetched and not returned are delivered
        again later. Idempotent.

        A member of an assigned group leaves it: the others get its partitions at once.
        """
        if not self._closed:
            self._closed = True
            try:
                self._flush()
            finally:
                if self._options.mode == "assigned":
                    self._backend.leave(self.topic, self.group, self.member)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _finish_current(self) -> None:
        """Mark the message that the loop has as finished, and acknowledge finished messages if it is time."""
        if self._closed:
            raise InvalidArgument("this consumer is closed: make another one")
        if self._auto_ack and self._current is not None:
            self._finished[self._current.partition] = self._current.offset
        self._current = None
        if not self._buffered or time.monotonic() - self._acked_at >= _ACK_S:
            self._flush()

    def _note_delivery(self, message: Message) -> None:
        """Remember the highest offset of the partition: a redelivered message may be below earlier ones."""
        self._delivered[message.partition] = max(message.offset, self._delivered.get(message.partition, 0))

    def _heartbeat_if_due(self) -> None:
        """Send a heartbeat if one is due. If the member was dropped all the same, its messages go to others."""
        due_s = self._heard_at + self._options.visibility_ms / 3000
        if self._options.mode != "assigned" or time.monotonic() < due_s:
            return
        try:
            self.heartbeat()
        except StaleMember:
            self._buffered.clear()
        except (StoreUnavailable, OutcomeUnknown):
            pass  # the next call reports the failure if it lasts

    def _flush(self) -> None:
        """Acknowledge the finished messages. Those of a partition that now belongs to another member are dropped: that
        member gets them again.
        """
        if not self._finished:
            return
        try:
            self._acknowledge(dict(self._finished))
        except StaleMember:
            for partition, offset in list(self._finished.items()):
                try:
                    self._acknowledge({partition: offset})
                except StaleMember:
                    self._drop_partition(partition)

    def _drop_partition(self, partition: int | None) -> None:
        for kept in (self._finished, self._delivered):
            kept.pop(partition, None)
        self._buffered = deque(each for each in self._buffered if each.partition != partition)

    def _acknowledge(self, upto: dict[int | None, int]) -> None:
        if upto:
            acknowledge(self._backend, self.topic, self.group, upto, self.member)
        for partition, offset in upto.items():
            for kept in (self._finished, self._delivered):
                if partition in kept and kept[partition] <= offset:
                    del kept[partition]
        self._acked_at = time.monotonic()

    def _consume_messages(self, timeout: float | None) -> list[Message]:
        deadline = None if timeout is None else time.monotonic() + timeout
        failures = 0
        while True:
            left = _WAIT_MS if deadline is None else int((deadline - time.monotonic()) * 1000)
            options = msgspec.structs.replace(self._options, wait_ms=min(max(left, 0), _WAIT_MS))
            self._heard_at = time.monotonic()
            try:
                found = messages_in(self._backend.consume(options))
            except BaseException as error:
                # The old name may hold messages that were never delivered: they expire with it.
                self.member = new_member_name(self.member)
                self._options = msgspec.structs.replace(self._options, member=self.member)
                failures += 1
                if not isinstance(error, StoreUnavailable | OutcomeUnknown) or failures == _TRIES:
                    raise
                time.sleep(_RETRY_S * 2**failures)
                continue
            if found or (deadline is not None and time.monotonic() >= deadline):
                return found
