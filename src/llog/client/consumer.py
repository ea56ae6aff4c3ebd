"""A topic as an iterator of messages, for a consumer group.

A message is delivered at least once: what was not acknowledged when its visibility time is over is delivered again, to
any member of the group, with `attempt` one higher.
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

from llog.batch.columns import headers_in
from llog.client.backend import Backend, acknowledge
from llog.errors import InvalidArgument, OutcomeUnknown, StaleMember, StoreUnavailable
from llog.groups.consumption import ConsumeCall, Start
from llog.model import Header

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_WAIT_MS: Final = 5_000
"""How long one call waits for messages; a consumer without a timeout calls again and again."""
_TRIES: Final = 4
_RETRY_S: Final = 0.05
"""A store or broker that does not answer is asked again, after twice as long each time."""
_ACK_S: Final = 0.1
"""Finished messages are acknowledged together within this time: each acknowledgement is a write that survives a power
cut.
"""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a topic. Those that are no change events have no message id, table and op."""

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
    """Which delivery to the group this is, counted from 1; 0 if it was read without one."""

    def json(self) -> Any:
        """The payload as JSON has it; None if there is no payload. `InvalidArgument` if it is no JSON."""
        if self.payload is None:
            return None
        try:
            return msgspec.json.decode(self.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"offset {self.offset} of {self.topic}/{self.partition} is no JSON ({error}): use .payload"
            ) from error


def messages_in(table: pa.Table) -> list[Message]:
    """One object per row."""
    times = table.column("ts").cast(pa.int64()).to_pylist()
    names = ("topic", "partition", "offset", "message_id", "source_table", "op", "key", "payload", "attempt")
    columns = {name: table.column(name).to_pylist() for name in names}
    headers = headers_in(table.column("headers"))
    return [
        Message(ts=_time(ms), headers=pairs, **dict(zip(names, row, strict=True)))
        for ms, pairs, *row in zip(times, headers, *columns.values(), strict=True)
    ]


def _time(ms: int) -> datetime:
    """The nearest one that Python knows: any producer may give a year beyond 9999."""
    try:
        return _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return (datetime.max if ms > 0 else datetime.min).replace(tzinfo=UTC)


def renamed(member: str) -> str:
    """A name that nobody had before, for a member that is new, or whose consume has failed: see `Consuming.consume`."""
    return f"{member.partition('~')[0]}~{uuid.uuid4().hex[:16]}"


class Consumer:
    """Messages of a topic in order, one partition's at a time. For one thread; several consumers may share a group.

    With `auto_ack`, a message is acknowledged once the loop has asked for the next one: what the loop left by `break`
    or an exception is delivered again. Without it, `ack` and `ack_all` do, and raise `StaleMember` in an assigned group
    if another member has the partition by now. The iteration ends when nothing came for `timeout` seconds; never, if
    that is None. `member` is how the name begins under which it holds messages: a name that was used before could hold
    what nobody was given.

    A member of an assigned group that is silent for `visibility_ms` loses its partitions. Asking for the next message
    and `ack` are signs of life; whoever takes longer over one message calls `heartbeat`.
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
                "a consumer starts at the latest or the earliest message, then where its group is, not at "
                f"{start.kind!r}: reset the group"
            )
        self.topic, self.group = topic, group
        self.member = renamed(member or "consumer")
        self._backend = backend
        self._auto_ack = auto_ack
        self._timeout = timeout
        self._call = ConsumeCall(
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
        """By partition: up to where the messages are finished and not acknowledged."""
        self._delivered: dict[int | None, int] = {}
        self._acked_at = self._heard_at = time.monotonic()
        self._closed = False

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        self._finish()
        if self._buffered:
            self._stay()
        if not self._buffered:
            self._buffered.extend(self._polled(self._timeout))
        if not self._buffered:
            raise StopIteration
        self._current = self._buffered.popleft()
        self._handed_out(self._current)
        return self._current

    def poll(self, timeout: float = 0.0) -> list[Message]:
        """What has been delivered and not handed out, else what comes within `timeout` seconds. Counts as finished with
        the next call.
        """
        self._finish()
        found = list(self._buffered) or self._polled(timeout)
        self._buffered.clear()
        for message in found:
            self._handed_out(message)
        if self._auto_ack:
            self._finished |= {message.partition: message.offset for message in found[:-1]}
            self._current = found[-1] if found else None
        return found

    def ack(self, message: Message) -> None:
        """Acknowledges this message and all before it that this consumer was given of its partition."""
        self._stay()
        self._acked({message.partition: message.offset})

    def ack_all(self) -> None:
        """Acknowledges every message that was handed out."""
        self._acked(dict(self._delivered))

    def heartbeat(self) -> None:
        """Says that this member of an assigned group is at work; `StaleMember` if its partitions were given to
        others.
        """
        self._backend.heartbeat(self.topic, self.group, self.member, visibility_ms=self._call.visibility_ms)
        self._heard_at = time.monotonic()

    def close(self) -> None:
        """Acknowledges what is finished, with `auto_ack`. Idempotent. What was fetched and not handed out is delivered
        again later.

        A member of an assigned group leaves it: the others get its partitions at once.
        """
        if not self._closed:
            self._closed = True
            try:
                self._flush()
            finally:
                if self._call.mode == "assigned":
                    self._backend.leave(self.topic, self.group, self.member)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _finish(self) -> None:
        """The loop is done with the message that it has."""
        if self._closed:
            raise InvalidArgument("this consumer is closed: make another one")
        if self._auto_ack and self._current is not None:
            self._finished[self._current.partition] = self._current.offset
        self._current = None
        if not self._buffered or time.monotonic() - self._acked_at >= _ACK_S:
            self._flush()

    def _handed_out(self, message: Message) -> None:
        """One that is delivered again may be below those that came before it."""
        self._delivered[message.partition] = max(message.offset, self._delivered.get(message.partition, 0))

    def _stay(self) -> None:
        """A heartbeat when it is time for one. What a member holds that was dropped all the same goes to others."""
        due_s = self._heard_at + self._call.visibility_ms / 3000
        if self._call.mode != "assigned" or time.monotonic() < due_s:
            return
        try:
            self.heartbeat()
        except StaleMember:
            self._buffered.clear()
        except (StoreUnavailable, OutcomeUnknown):
            pass  # the next call tells

    def _flush(self) -> None:
        """What is of a partition that another member of an assigned group has by now is dropped: that one gets it
        anew.
        """
        if not self._finished:
            return
        try:
            self._acked(dict(self._finished))
        except StaleMember:
            for partition, offset in list(self._finished.items()):
                try:
                    self._acked({partition: offset})
                except StaleMember:
                    self._lost(partition)

    def _lost(self, partition: int | None) -> None:
        for kept in (self._finished, self._delivered):
            kept.pop(partition, None)
        self._buffered = deque(each for each in self._buffered if each.partition != partition)

    def _acked(self, upto: dict[int | None, int]) -> None:
        if upto:
            acknowledge(self._backend, self.topic, self.group, upto, self.member)
        for partition, offset in upto.items():
            for kept in (self._finished, self._delivered):
                if partition in kept and kept[partition] <= offset:
                    del kept[partition]
        self._acked_at = time.monotonic()

    def _polled(self, timeout: float | None) -> list[Message]:
        deadline = None if timeout is None else time.monotonic() + timeout
        failures = 0
        while True:
            left = _WAIT_MS if deadline is None else int((deadline - time.monotonic()) * 1000)
            call = msgspec.structs.replace(self._call, wait_ms=min(max(left, 0), _WAIT_MS))
            self._heard_at = time.monotonic()
            try:
                found = messages_in(self._backend.consume(call))
            except BaseException as error:
                # It may hold what it was never given: that expires with the old name.
                self.member = renamed(self.member)
                self._call = msgspec.structs.replace(self._call, member=self.member)
                failures += 1
                if not isinstance(error, StoreUnavailable | OutcomeUnknown) or failures == _TRIES:
                    raise
                time.sleep(_RETRY_S * 2**failures)
                continue
            if found or (deadline is not None and time.monotonic() >= deadline):
                return found
