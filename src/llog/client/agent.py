"""A loop that passes the messages of a topic to a handler, as every agent and service would write it.

Several agents may share a group, in any processes: each message goes to one of them at a time. Delivery is at least
once, so a handler must tolerate a message that it has seen before.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
import pyarrow as pa

from llog.client.backend import Backend, HasBackend, acknowledge, backend_of
from llog.client.consumer import Message, messages_in, new_member_name
from llog.errors import InvalidArgument, OutcomeUnknown, Overloaded, StoreUnavailable
from llog.groups.options import ConsumeOptions, Start

R = TypeVar("R")

_WAIT_MS: Final = 1_000
"""How long one consume call waits for a message, and so how long an idle agent may take to stop."""
_LAST_TRIES: Final = 5
_LAST_WAIT_S: Final = 1.0
_PASSING: Final = (StoreUnavailable, Overloaded, OutcomeUnknown)
"""Errors after which the agent tries again. A broker that stops during a request leaves its outcome unknown, and every
request of an agent may be repeated.
"""


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait after a failure: `first_s`, doubled each time up to `most_s`; then a random part of that, at
    least half.
    """

    first_s: float = 1.0
    most_s: float = 60.0

    def delay_s(self, failures: int) -> float:
        """Return the delay after this many failures, counted from 1."""
        full = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 60))
        return full * random.uniform(0.5, 1.0)


class AgentResult(msgspec.Struct, frozen=True, kw_only=True):
    handled: int
    failed: int


def run_agent(
    client: Backend | HasBackend,
    topic: str,
    group: str,
    handler: Callable[[Message], object],
    *,
    max_attempts: int = 5,
    backoff: Backoff | None = None,
    dead_letter: str | None = None,
    stop: threading.Event | None = None,
    start: Start | None = None,
    member: str | None = None,
    visibility_ms: int = 60_000,
    on_error: Callable[[Message, Exception], object] | None = None,
) -> AgentResult:
    """Call `handler` with each message, and acknowledge the message when the handler returns. Run until `stop` is set,
    and finish the current message.

    If the handler raises, the message is delivered again after the backoff, to this agent or another one; after
    `max_attempts` deliveries it goes to the topic `dead_letter` (`<topic>.dead-letter` unless named). While a handler
    takes longer than `visibility_ms`, another agent may get the same message. The agent waits for an unreachable store
    or broker; it raises other errors of the log.
    """
    if max_attempts < 1:
        raise InvalidArgument(f"max_attempts is {max_attempts}: it must be at least 1")
    agent = _Agent(
        backend_of(client),
        ConsumeOptions(
            topic=topic,
            group=group,
            member=new_member_name(member or "agent"),
            start=start,
            limit=1,
            wait_ms=_WAIT_MS,
            visibility_ms=visibility_ms,
            max_attempts=max_attempts,
            dead_letter=dead_letter,
        ),
        backoff or Backoff(),
        stop or threading.Event(),
    )
    return agent.run(handler, on_error)


class _Agent:
    def __init__(self, backend: Backend, options: ConsumeOptions, backoff: Backoff, stop: threading.Event) -> None:
        self._backend = backend
        self._options = options
        self._backoff = backoff
        self._stop = stop
        self._handled = self._failed = 0

    def run(
        self, handler: Callable[[Message], object], on_error: Callable[[Message, Exception], object] | None
    ) -> AgentResult:
        while not self._stop.is_set():
            found = self._retry_until_stopped(self._consume)
            for message in [] if found is None else messages_in(found):
                try:
                    handler(message)
                except Exception as error:
                    if on_error is not None:
                        on_error(message, error)
                    self._release(message)
                else:
                    self._ack(message)
        return AgentResult(handled=self._handled, failed=self._failed)

    def _consume(self) -> pa.Table:
        try:
            return self._backend.consume(self._options)
        except BaseException:
            self._options = msgspec.structs.replace(self._options, member=new_member_name(self._options.member))
            raise

    def _ack(self, message: Message) -> None:
        options = self._options
        assert options.group is not None
        group: str = options.group
        upto: dict[int | None, int] = {message.partition: message.offset}
        self._report(lambda: acknowledge(self._backend, options.topic, group, upto, options.member))
        self._handled += 1

    def _release(self, message: Message) -> None:
        """Have the message delivered again after the backoff, and wait that long: what fails here may fail for every
        message.
        """
        options, delay_s = self._options, self._backoff.delay_s(message.attempt)
        assert options.group is not None
        group, place = options.group, (message.partition, message.offset)
        self._report(
            lambda: self._backend.release(
                options.topic, group, *place, member=options.member, delay_ms=int(delay_s * 1000)
            )
        )
        self._failed += 1
        self._stop.wait(delay_s)

    def _retry_until_stopped(self, ask: Callable[[], R]) -> R | None:
        """Return the answer, after any number of retries; None if the agent is stopped before it comes."""
        failures = 0
        while True:
            try:
                return ask()
            except _PASSING:
                failures += 1
                if self._stop.wait(self._backoff.delay_s(failures)):
                    return None

    def _report(self, send: Callable[[], object]) -> None:
        """Report what became of a message, with any number of retries; only a few once the agent is to stop."""
        failures = last_tries = 0
        while True:
            try:
                send()
                return
            except _PASSING:
                failures += 1
                delay_s = self._backoff.delay_s(failures)
                if self._stop.wait(delay_s):
                    last_tries += 1
                    if last_tries == _LAST_TRIES:
                        raise
                    time.sleep(min(delay_s, _LAST_WAIT_S))
