"""An event loop without a clock, threads or sockets: one seed gives one schedule.

Every callback belongs to the owner that its context names. The seed decides which owner runs next; the callbacks of one
owner keep their order, as asyncio promises. When nothing is ready, time jumps to the next timer. An owner that is not
alive never runs again: no `finally`, no clean-up, as after a kill.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeVar, TypeVarTuple

Ts = TypeVarTuple("Ts")
T = TypeVar("T")


class Owner:
    """The owner of callbacks: a simulated process, or the world around the processes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.stalled_until = 0.0
        self.ready: deque[asyncio.Handle] = deque()


class Stuck(Exception):
    """Nothing is ready and no timer is set, or the step limit is reached: waiting tasks would wait for ever."""


OWNER: Final[ContextVar[Owner]] = ContextVar("owner")


class SimLoop(asyncio.AbstractEventLoop):
    """Supports tasks, futures and timers, but no sockets, signals, threads or subprocesses."""

    def __init__(self, source: random.Random, *, steps_max: int) -> None:
        self.world = Owner("world")
        self.steps = 0
        self.errors: list[str] = []
        """Errors that callbacks raised, which none may."""
        self._source = source
        self._steps_max = steps_max
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.Handle]] = []
        self._timers_set = 0
        self._busy: dict[Owner, None] = {}
        # Nothing is destroyed while the simulation runs: the clean-up of a killed process must never happen.
        self._tasks: list[asyncio.Task[Any]] = []
        self._closed = False

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` as part of the world until it is done; raise its error, or `Stuck`."""
        before = sys.get_asyncgen_hooks()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._finish_generator)
        try:
            task = self.spawn(main, self.world)
            while not task.done():
                self._step()
            return task.result()
        finally:
            sys.set_asyncgen_hooks(*before)
            events._set_running_loop(None)

    def spawn(self, work: Coroutine[Any, Any, T], owner: Owner) -> asyncio.Task[T]:
        """Start a task of this owner; every task that it starts belongs to the same owner."""
        context = copy_context()
        context.run(OWNER.set, owner)
        return self.create_task(work, context=context)

    def call_world(self, delay: float, callback: Callable[[], object]) -> None:
        """Call back after `delay` even if the caller's owner dies, as a message under way arrives."""
        context = Context()
        context.run(OWNER.set, self.world)
        self.call_later(delay, callback, context=context)

    def stall(self, owner: Owner, seconds: float) -> None:
        """Run nothing of this owner for `seconds`; then it continues as if nothing had happened."""
        owner.stalled_until = max(owner.stalled_until, self._now + seconds)
        self.call_world(owner.stalled_until - self._now, lambda: None)

    def _step(self) -> None:
        self.steps += 1
        if self.steps > self._steps_max:
            raise Stuck(f"not done after {self._steps_max} steps")
        runnable = [owner for owner in self._busy if owner.stalled_until <= self._now]
        while not runnable:
            if not self._timers:
                raise Stuck("nothing is ready and no timer is set")
            self._advance()
            runnable = [owner for owner in self._busy if owner.stalled_until <= self._now]
        owner = runnable[0] if len(runnable) == 1 else runnable[self._source.randrange(len(runnable))]
        handle = owner.ready.popleft()
        if not owner.ready:
            del self._busy[owner]
        if not handle.cancelled():
            handle._run()

    def _advance(self) -> None:
        self._now = max(self._now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now:
            self._enqueue(heapq.heappop(self._timers)[2])

    def _enqueue(self, handle: asyncio.Handle) -> None:
        owner: Owner = handle._context.get(OWNER, self.world)  # type: ignore[attr-defined]
        if owner.alive:
            owner.ready.append(handle)
            self._busy[owner] = None

    def kill(self, owner: Owner) -> None:
        owner.alive = False
        owner.ready.clear()
        self._busy.pop(owner, None)

    def _finish_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.create_task(generator.aclose())

    def close(self) -> None:
        """Close the coroutines that killed processes left behind, and ignore their errors."""
        self._closed = True
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine = task.get_coro()
                try:
                    if coroutine is not None:
                        coroutine.close()
                except BaseException:
                    pass  # The clean-up of a killed process does not matter.
        self._tasks.clear()
        self._timers.clear()
        self._busy.clear()

    # --- what asyncio requires of a loop

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._closed:
            self._enqueue(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + max(delay, 0.0), callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._closed:
            self._timers_set += 1
            heapq.heappush(self._timers, (when, self._timers_set, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if "handle" in context:
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")
