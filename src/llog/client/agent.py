"""A loop that gives the messages of a topic to a handler: what every agent and every service would write.

Several agents may share a group, in any processes: each message goes to one of them at a time. Delivery is at least
once, so a handler must bear a message that it has seen before.
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
from llog.client.consumer import Message, messages_in, renamed
from llog.errors import InvalidArgument, OutcomeUnknown, Overloaded, StoreUnavailable
from llog.groups.consumption import ConsumeCall, Start

R = TypeVar("R")

_WAIT_MS: Final = 1_000
"""How long one call waits for a message, and so how long a stop may take while there is none."""
_LAST_TRIES: Final = 5
_LAST_WAIT_S: Final = 1.0
_PASSING: Final = (StoreUnavailable, Overloaded, OutcomeUnknown)
"""A broker that goes while it is asked leaves the outcome unknown; all that an agent asks for may be asked for again.
"""


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait after a failure: `first_s`, twice as much each time, `most_s` at most; of that, a random part
    from a half on.
    """

    first_s: float = 1.0
    most_s: float = 60.0

    def delay_s(self, failures: int) -> float:
        """After so many failures, counted from 1."""
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
    """Calls `handler` with each message, and acknowledges it when that returns. Runs until `stop` is set; the message
    in hand is finished.

    If the handler raises, the message is delivered again after the backoff, to this agent or another one; after
    `max_attempts` deliveries it goes to the topic `dead_letter` (`<topic>.dead-letter` unless named). A handler that
    takes longer than `visibility_ms` may find that another agent was given its message, too. An unreachable store or
    broker is waited for; other errors of the log are raised.
    """
    if max_attempts < 1:
        raise InvalidArgument(f"max_attempts is {max_attempts}: a message is tried at least once")
    agent = _Agent(
        backend_of(client),
        ConsumeCall(
            topic=topic,
            group=group,
            member=renamed(member or "agent"),
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
    def __init__(self, backend: Backend, call: ConsumeCall, backoff: Backoff, stop: threading.Event) -> None:
        self._backend = backend
        self._call = call
        self._backoff = backoff
        self._stop = stop
        self._handled = self._failed = 0

    def run(
        self, handler: Callable[[Message], object], on_error: Callable[[Message, Exception], object] | None
    ) -> AgentResult:
        while not self._stop.is_set():
            found = self._patiently(self._consumed)
            for message in [] if found is None else messages_in(found):
                try:
                    handler(message)
                except Exception as error:
                    if on_error is not None:
                        on_error(message, error)
                    self._give_back(message)
                else:
                    self._ack(message)
        return AgentResult(handled=self._handled, failed=self._failed)

    def _consumed(self) -> pa.Table:
        try:
            return self._backend.consume(self._call)
        except BaseException:
            self._call = msgspec.structs.replace(self._call, member=renamed(self._call.member))
            raise

    def _ack(self, message: Message) -> None:
        call = self._call
        assert call.group is not None
        group: str = call.group
        upto: dict[int | None, int] = {message.partition: message.offset}
        self._finished(lambda: acknowledge(self._backend, call.topic, group, upto, call.member))
        self._handled += 1

    def _give_back(self, message: Message) -> None:
        """To be delivered again after the backoff, which this agent waits out: what fails here may well fail for
        all.
        """
        call, delay_s = self._call, self._backoff.delay_s(message.attempt)
        assert call.group is not None
        group, place = call.group, (message.partition, message.offset)
        self._finished(
            lambda: self._backend.release(call.topic, group, *place, member=call.member, delay_ms=int(delay_s * 1000))
        )
        self._failed += 1
        self._stop.wait(delay_s)

    def _patiently(self, ask: Callable[[], R]) -> R | None:
        """The answer, whenever there is one; None if the agent is to stop before."""
        failures = 0
        while True:
            try:
                return ask()
            except _PASSING:
                failures += 1
                if self._stop.wait(self._backoff.delay_s(failures)):
                    return None

    def _finished(self, tell: Callable[[], object]) -> None:
        """Tells what became of a message: as long as it takes, but, once the agent is to stop, no more than a few
        times.
        """
        failures = last_tries = 0
        while True:
            try:
                tell()
                return
            except _PASSING:
                failures += 1
                delay_s = self._backoff.delay_s(failures)
                if self._stop.wait(delay_s):
                    last_tries += 1
                    if last_tries == _LAST_TRIES:
                        raise
                    time.sleep(min(delay_s, _LAST_WAIT_S))
