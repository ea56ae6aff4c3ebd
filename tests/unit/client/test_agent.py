"""Agents: success is acknowledged, failure comes again after a backoff, what fails for good becomes a dead letter."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from llog.client.agent import Backoff, run_agent
from llog.client.backend import Backend
from llog.client.consumer import Message
from llog.errors import InvalidArgument, LlogError, OutcomeUnknown, Overloaded, StoreUnavailable, TopicNotFound
from llog.groups.options import ConsumeOptions
from tests.unit.client.backends import Harness, embedded

FAST = Backoff(first_s=0.01, most_s=0.05)


@pytest.fixture
def harness() -> Iterator[Harness]:
    with embedded() as found:
        yield found


class Handled:
    """Counts what was handled, and stops the agents when there is enough."""

    def __init__(self, enough: int) -> None:
        self.stop = threading.Event()
        self.offsets: list[int] = []
        self._enough = enough
        self._mutex = threading.Lock()

    def __call__(self, message: Message) -> None:
        with self._mutex:
            self.offsets.append(message.offset)
            if len(self.offsets) >= self._enough:
                self.stop.set()


def test_every_message_is_handled_in_order_and_acknowledged(harness: Harness) -> None:
    harness.create()
    harness.append(*map(str, range(5)))
    handled = Handled(5)
    result = run_agent(harness.backend, "t", "g", handled, stop=handled.stop)
    assert handled.offsets == [1, 2, 3, 4, 5]
    assert (result.handled, result.failed) == (5, 0)
    assert harness.committed() == 6


def test_a_message_whose_handler_raises_is_tried_again_and_no_other_ack_takes_it_along(harness: Harness) -> None:
    harness.create()
    harness.append("1", "2", "3")
    handled = Handled(3)
    errors: list[tuple[int, str]] = []
    attempts: list[int] = []

    def handler(message: Message) -> None:
        if message.offset == 2:
            attempts.append(message.attempt)
            if len(attempts) < 3:
                raise ValueError("not yet")
        handled(message)

    result = run_agent(
        harness.backend,
        "t",
        "g",
        handler,
        stop=handled.stop,
        backoff=FAST,
        on_error=lambda message, error: errors.append((message.offset, str(error))),
    )
    assert sorted(handled.offsets) == [1, 2, 3]
    assert attempts == [1, 2, 3]
    assert errors == [(2, "not yet")] * 2
    assert (result.handled, result.failed) == (3, 2)
    assert harness.committed() == 4


def test_a_message_that_never_succeeds_becomes_a_dead_letter_and_the_rest_goes_on(harness: Harness) -> None:
    harness.create()
    harness.append("bad", "good")
    tried = Counter[int]()
    stop = threading.Event()

    def handler(message: Message) -> None:
        tried[message.offset] += 1
        if message.payload == b"bad":
            raise ValueError("never")

    agent = threading.Thread(
        target=run_agent,
        args=(harness.backend, "t", "g", handler),
        kwargs={"max_attempts": 3, "backoff": FAST, "dead_letter": "graves", "stop": stop},
    )
    agent.start()
    for _ in range(600):
        if harness.committed() == 3:
            break
        stop.wait(0.05)
    stop.set()
    agent.join(30)
    assert tried == {1: 3, 2: 1}
    (letter,) = harness.backend.consume(ConsumeOptions(topic="graves")).column("payload").to_pylist()
    assert letter == b"bad"


def test_several_agents_share_the_work(harness: Harness) -> None:
    harness.create(partitions=2)
    for partition in range(2):
        harness.append(*map(str, range(20)), partition=partition)
    handled = Handled(40)
    agents = [
        threading.Thread(target=run_agent, args=(harness.backend, "t", "g", handled), kwargs={"stop": handled.stop})
        for _ in range(3)
    ]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join(60)
    assert Counter(handled.offsets) == dict.fromkeys(range(1, 21), 2)
    assert (harness.committed(), harness.committed(partition=1)) == (21, 21)


@pytest.mark.parametrize("error", [StoreUnavailable, Overloaded, OutcomeUnknown])
def test_an_agent_waits_for_what_is_away_also_if_it_went_while_it_was_asked(
    harness: Harness, error: type[LlogError]
) -> None:
    harness.create()
    harness.append("1")
    handled = Handled(1)
    flaky = _Flaky(harness.backend, failures=2, error=error)
    run_agent(flaky, "t", "g", handled, stop=handled.stop, backoff=FAST)
    assert handled.offsets == [1]
    assert harness.committed() == 2


def test_an_agent_raises_what_will_not_pass(harness: Harness) -> None:
    harness.create()
    handled = Handled(1)
    with pytest.raises(TopicNotFound):
        run_agent(harness.backend, "none", "g", handled)
    with pytest.raises(InvalidArgument):
        run_agent(harness.backend, "t", "g", handled, max_attempts=0)


def test_whatever_has_a_backend_is_a_client(harness: Harness) -> None:
    class Client:
        backend = harness.backend

    harness.create()
    harness.append("1")
    handled = Handled(1)
    run_agent(Client(), "t", "g", handled, stop=handled.stop)
    assert handled.offsets == [1]


@pytest.mark.parametrize(("failures", "full"), [(1, 1.0), (3, 4.0), (10, 60.0), (10_000, 60.0)])
def test_a_backoff_doubles_up_to_its_limit_with_jitter(failures: int, full: float) -> None:
    delays = {Backoff().delay_s(failures) for _ in range(50)}
    assert all(full / 2 <= delay <= full for delay in delays)
    assert len(delays) > 1


class _Flaky:
    """Fails each call some times before it works."""

    def __init__(self, backend: Backend, failures: int, error: type[LlogError]) -> None:
        self._backend = backend
        self._failures = failures
        self._error = error
        self._left: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name == "backend":
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Any:
            self._left[name] += 1
            if self._left[name] <= self._failures:
                raise self._error("away")
            return getattr(self._backend, name)(*arguments, **options)

        return call
