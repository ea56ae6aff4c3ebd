"""Views: what a process that serves many reads knows of partitions, so that it need not ask the metadata store again.

A view has a partition's bounds and its topic. The process keeps it by its own appends and by one watch over the control
records and the catalog, which names the keys that changed. A view is right as of some moment, and may be used as such:

- To return records, a view must be *fresh*: right at some moment within the last `staleness_ms`. Within a topic's
  directory, the record at an offset never changes, so records that were there a moment ago are a correct answer.
- To answer that something is not there, a view must be *proved*: right at some moment after the request arrived, by
  reads that were confirmed. An empty answer, an offset out of range and a missing topic are such answers. So a read
  that began after an append was acknowledged sees the append, through any process (I9).

A view that no notification has called changed is as good as the last confirmation of the watch, which costs the same
for one view and for all of them; a changed one is read again. Whatever is asked of the store goes out in rounds, one at
a time, and all callers that arrive during a round share the next one: many reads cost what one costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from llog.engines.object.control_record import decode_control
from llog.engines.object.reader import KnownPartition, Reader
from llog.errors import LlogError, PartitionNotInitialized, StaleReads, StoreUnavailable
from llog.log.catalog import OBJECT, check_partition, topic_in
from llog.log.engine import Batch, Bounds
from llog.log.inline import is_inline
from llog.log.keys import ROOT, TOPICS, control_key, topic_key
from llog.log.log import Log
from llog.log.records import Control, Pending, Topic
from llog.model import TopicPartition, check_topic_name
from llog.stores.meta import Changes, MetaEntry, Watch

VIEWS_MAX: Final = 20_000
"""Partitions that are remembered; beyond it, those that nobody waits for are forgotten, the oldest first."""
INLINE_BYTES_MAX: Final = 16 << 20
"""Inline bytes that all views keep; beyond it, the oldest views lose theirs, and a read looks them up again."""
_ATTEMPTS: Final = 3
_CONFIRM_S_MAX: Final = 1.0
"""How long a confirmation of the watch may take. The watch may have lost its connection while reads still work."""
_RETRY_S: Final = 0.2
_REFRESH_PAUSE_S_MIN: Final = 0.001
_REFRESH_PAUSE_S_MAX: Final = 0.02
_NEVER: Final = float("-inf")


class View(msgspec.Struct, frozen=True, gc=False):
    """A partition at some moment. Without bounds if the topic's engine has an owner, which knows them."""

    topic: Topic
    bounds: Bounds | None
    pending: Pending | None = None
    """The newest append as of the last read, without its producers; the bounds may be ahead of it. None if it is in the
    index by now, or has too many inline bytes to be kept.
    """

    @property
    def directory(self) -> str:
        return self.topic.directory

    def has_record(self, offset: int) -> bool:
        return self.bounds is not None and self.bounds.log_start_offset <= offset < self.bounds.next_offset

    def ends_at(self, offset: int) -> bool:
        return self.bounds is not None and self.bounds.next_offset == offset

    @property
    def inline_bytes(self) -> int:
        if self.pending is None:
            return 0
        return sum(len(entry.data_uri) for entry in self.pending.entries if is_inline(entry.data_uri))


Found = View | LlogError
Waiter = asyncio.Future[Any]
"""Gets None as its result."""


class Read(NamedTuple):
    """What a read wants of a partition."""

    tp: TopicPartition
    position: int
    is_satisfied_at_end: bool = False
    """Whether the read may find nothing now, because it has records already or goes on waiting."""


class _Marks(NamedTuple):
    """How often keys of a partition, or all keys, were called changed."""

    own: int
    all: int


class _KnownPartition:
    """What is known of one partition."""

    __slots__ = ("control", "found", "is_proved", "marks", "proved_at", "read_marks", "seen_at")

    def __init__(self) -> None:
        self.found: Found | None = None
        self.control: str | None = None
        """The key of the control record, once the topic's directory is known."""
        self.seen_at = _NEVER
        """`found` was right at this moment, by a read, which may have been stale, or by an own append."""
        self.proved_at = _NEVER
        """`found` was right at this moment, by a confirmed read."""
        self.is_proved = False
        """Whether the last read was confirmed, so that it need not be repeated while no key changes."""
        self.marks = 0
        self.read_marks = _Marks(-1, -1)
        """The marks when the last read began."""


class _Round:
    def __init__(self) -> None:
        self.wanted: dict[TopicPartition, bool] = {}
        """Whether each partition must be proved."""
        self.task: asyncio.Task[LlogError | None] | None = None


class Views:
    """The views of one process, on the event loop of its first call. `close` ends its watch."""

    def __init__(self, log: Log, staleness_ms: int, reader: Reader) -> None:
        self._log = log
        self._reader = reader
        self._staleness_s = staleness_ms / 1000
        self._known: dict[TopicPartition, _KnownPartition] = {}
        self._by_key: dict[str, dict[TopicPartition, None]] = {}
        """The partitions that a topic's or a control record's key belongs to."""
        self._waiters: dict[TopicPartition, dict[Waiter, int]] = {}
        """Who waits for a record, and for which offset."""
        self._inline: dict[TopicPartition, int] = {}
        """The inline bytes of each view that has some, the oldest first."""
        self._inline_bytes = 0
        self._all_marks = 0
        self._confirmed_at = _NEVER
        """Every change that was committed before this moment has left its mark."""
        self._news = 0
        """The number of reads that found something new."""
        self._watch: Watch | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._refresh = asyncio.Event()
        self._round: _Round | None = None
        self._next_round: _Round | None = None

    @staticmethod
    def now() -> float:
        """Return the moment, as a time of the event loop, whose clock does not jump."""
        return asyncio.get_running_loop().time()

    async def look(self, reads: Sequence[Read], arrived: float) -> dict[TopicPartition, Found]:
        """Return a view for each of these reads, which arrived then, that is good enough to answer it; or the error.

        A fresh view is enough where it has a record at the position; see the module's docstring.
        """
        if self._watch is not None:
            self._mark(self._watch.take())
        found = await self._at_least_at({read.tp: self.now() - self._staleness_s for read in reads}, prove=False)
        doubtful = {read.tp: arrived for read in reads if not _is_enough(found[read.tp], read)}
        if doubtful:
            found |= await self._at_least_at(doubtful, prove=True)
        return found

    async def read(
        self, tp: TopicPartition, view: View, offset: int, max_bytes: int, *, stop: int | None = None
    ) -> list[Batch]:
        """Read batches as the engine's reader does, without looking up again what the view knows.

        Raises `PartitionNotInitialized` if the topic was created again.
        """
        assert view.bounds is not None
        start, end = view.bounds
        control = Control(log_start_offset=start, next_offset=end, pending=view.pending)
        return await self._reader.read(tp, offset, max_bytes, stop=stop, known=KnownPartition(view.topic, control))

    def note_append(self, directory: str, partition: int, next_offset: int) -> None:
        """Learn that an append of this process was committed, and wake who waits for its records."""
        for tp in self._by_key.get(control_key(directory, partition), ()):
            known = self._known[tp]
            view = known.found
            if isinstance(view, View) and view.bounds is not None and view.directory == directory:
                known.seen_at = self.now()
                if view.bounds.next_offset < next_offset:
                    bounds = view.bounds._replace(next_offset=next_offset)
                    self._replace(tp, known, View(view.topic, bounds))  # what was pending is in the index now

    def note_change(self, topic: str) -> None:
        """Learn that this process has changed the topic: it is looked up again before it is read."""
        self._mark(frozenset([topic_key(topic)]))

    def is_followed(self, tp: TopicPartition) -> bool:
        """Return whether the partition's view shows its records: not if its engine has an owner."""
        known = self._known.get(tp)
        return known is None or not isinstance(known.found, View) or known.found.bounds is not None

    def add_waiter(self, tp: TopicPartition, offset: int, waiter: Waiter) -> None:
        """Set the waiter's result once the partition may have a record at `offset`, or is not what it was.

        The partition must have been looked up before. The caller takes the waiter out again.
        """
        waiters = self._waiters.setdefault(tp, {})
        waiters[waiter] = min(offset, waiters.get(waiter, offset))
        self._wake(tp)
        if tp in self._waiters and not self._is_unchanged(self._known[tp]):
            self._refresh.set()

    def remove_waiter(self, tp: TopicPartition, waiter: Waiter) -> None:
        waiters = self._waiters.get(tp)
        if waiters is not None:
            waiters.pop(waiter, None)
            if not waiters:
                del self._waiters[tp]

    async def close(self) -> None:
        """End the watch, and return when the rounds under way have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        rounds = [each.task for each in (self._round, self._next_round) if each is not None and each.task is not None]
        await asyncio.gather(*rounds, return_exceptions=True)

    # --- what is known

    def _is_unchanged(self, known: _KnownPartition) -> bool:
        return known.read_marks == (known.marks, self._all_marks)

    def _right_at(self, tp: TopicPartition, *, prove: bool) -> float:
        """Return the latest moment at which the partition's view was right, as far as is known or proved."""
        known = self._known.get(tp)
        if known is None:
            return _NEVER
        moment = known.proved_at if prove else known.seen_at
        if self._is_unchanged(known) and (known.is_proved or not prove):
            return max(moment, self._confirmed_at)
        return moment

    def _mark(self, changes: Changes) -> None:
        if changes is None:
            self._all_marks += 1
            self._refresh.set()
            return
        for key in changes:
            is_topic = key.startswith(TOPICS)
            for tp in self._by_key.get(key, ()):
                known = self._known[tp]
                known.marks += 1
                if is_topic:  # it may be gone, and topics change rarely: its old records are not served any longer
                    known.seen_at = _NEVER
                if tp in self._waiters:
                    self._refresh.set()

    def _enter(self, tp: TopicPartition) -> _KnownPartition:
        known = self._known.get(tp)
        if known is None:
            while len(self._known) >= VIEWS_MAX and self._forget_oldest():
                pass
            known = self._known[tp] = _KnownPartition()
            self._by_key.setdefault(topic_key(tp.topic), {})[tp] = None
        return known

    def _forget_oldest(self) -> bool:
        """Forget the oldest view that nobody waits for and no round reads; return whether there was one."""
        busy = self._round.wanted if self._round is not None else {}
        for tp in self._known:
            if tp not in self._waiters and tp not in busy:
                self._unlink(topic_key(tp.topic), tp)
                self._unlink(self._known.pop(tp).control, tp)
                self._inline_bytes -= self._inline.pop(tp, 0)
                return True
        return False

    def _link_control(self, tp: TopicPartition, control: str) -> None:
        known = self._known[tp]
        if known.control != control:
            self._unlink(known.control, tp)
            known.control = control
            self._by_key.setdefault(control, {})[tp] = None

    def _unlink(self, key: str | None, tp: TopicPartition) -> None:
        tps = self._by_key.get(key) if key is not None else None
        if tps is not None:
            tps.pop(tp, None)
            if not tps and key is not None:
                del self._by_key[key]

    def _learn(self, tp: TopicPartition, found: Found, began: float, marks: _Marks, *, proved: bool) -> None:
        """Learn what a read found that began then. Facts that never go back are not unlearnt by a stale read."""
        known = self._known[tp]
        old = known.found
        if isinstance(found, View) and isinstance(old, View):
            if found.topic.incarnation < old.topic.incarnation:
                return
            if found.directory == old.directory and found.bounds is not None and old.bounds is not None:
                found = msgspec.structs.replace(found, bounds=Bounds(*map(max, found.bounds, old.bounds)))
        known.seen_at = max(known.seen_at, began)
        if proved:
            known.proved_at = began
        known.is_proved = proved
        known.read_marks = marks
        if not (isinstance(found, View) and isinstance(old, View) and _is_same(found, old)):
            self._news += 1
        self._replace(tp, known, found)

    def _replace(self, tp: TopicPartition, known: _KnownPartition, found: Found) -> None:
        known.found = found
        self._count_inline(tp, found)
        if tp in self._waiters:
            self._wake(tp)

    def _count_inline(self, tp: TopicPartition, found: Found) -> None:
        """Count the inline bytes of the partition's new view, and make room for them."""
        size = found.inline_bytes if isinstance(found, View) else 0
        self._inline_bytes += size - self._inline.pop(tp, 0)
        if size:
            self._inline[tp] = size
        while self._inline_bytes > INLINE_BYTES_MAX:
            oldest = next(iter(self._inline))
            self._inline_bytes -= self._inline.pop(oldest)
            view = self._known[oldest].found
            assert isinstance(view, View)
            self._known[oldest].found = View(view.topic, view.bounds)

    def _wake(self, tp: TopicPartition) -> None:
        """Wake the waiters for whom the partition does not end where they wait."""
        known = self._known.get(tp)
        found = None if known is None else known.found
        waiters = self._waiters[tp]
        for waiter, offset in list(waiters.items()):
            if isinstance(found, View) and found.bounds is not None and found.bounds.next_offset <= offset:
                continue
            del waiters[waiter]
            if not waiter.done():
                waiter.set_result(None)
        if not waiters:
            del self._waiters[tp]

    # --- rounds

    async def _at_least_at(
        self, moments: Mapping[TopicPartition, float], *, prove: bool
    ) -> dict[TopicPartition, Found]:
        """Return what is known of each partition as of its moment or later; an error if that cannot be found out."""
        error: LlogError | None = None
        for _ in range(_ATTEMPTS):
            lacking = [tp for tp, moment in moments.items() if self._right_at(tp, prove=prove) < moment]
            if not lacking:
                break
            error = await self._join_round(lacking, prove=prove)
            if error is not None and not isinstance(error, StaleReads):
                break
        result: dict[TopicPartition, Found] = {}
        for tp, moment in moments.items():
            known = self._known.get(tp)
            if known is None or known.found is None or self._right_at(tp, prove=prove) < moment:
                result[tp] = error or StoreUnavailable(f"partition {tp} could not be looked up: try again")
            else:
                # An error is raised more than once, and would collect the frames of all who raise it.
                result[tp] = known.found if isinstance(known.found, View) else known.found.with_traceback(None)
        return result

    async def _join_round(self, tps: Iterable[TopicPartition], *, prove: bool) -> LlogError | None:
        """Take part in the next round, and return its error."""
        self._start_watch()
        joined = self._next_round
        if joined is None:
            joined = self._next_round = _Round()
            joined.task = asyncio.get_running_loop().create_task(self._run_round(joined, self._round))
        for tp in tps:
            joined.wanted[tp] = prove or joined.wanted.get(tp, False)
        assert joined.task is not None
        return await asyncio.shield(joined.task)

    async def _run_round(self, this: _Round, previous: _Round | None) -> LlogError | None:
        if previous is not None and previous.task is not None:
            await asyncio.wait([previous.task])
        self._round, self._next_round = this, None
        try:
            await self._ask(this.wanted)
        except LlogError as error:
            return error
        return None

    async def _ask(self, wanted: Mapping[TopicPartition, bool]) -> None:
        """Make the views of these partitions right as of now; confirmed reads where they must be proved."""
        began = self.now()
        known = {tp: self._enter(tp) for tp in wanted}
        if any(self._is_unchanged(each) and (each.is_proved or not wanted[tp]) for tp, each in known.items()):
            await self._confirm_watch()
        changed = [tp for tp, prove in wanted.items() if self._right_at(tp, prove=prove) < began]
        if changed:
            await self._read(changed, prove=any(wanted[tp] for tp in changed))

    async def _confirm_watch(self) -> None:
        """Make sure that every change so far has left its mark. If that fails, the views are read instead."""
        assert self._watch is not None
        began = self.now()
        try:
            async with asyncio.timeout(_CONFIRM_S_MAX):
                await self._watch.confirm()
        except (LlogError, TimeoutError):
            return
        self._mark(self._watch.take())
        self._confirmed_at = began

    async def _read(self, tps: Collection[TopicPartition], *, prove: bool) -> None:
        reads = await self._log.meta.begin_reads() if prove else None
        began = self.now()
        marks = {tp: _Marks(self._known[tp].marks, self._all_marks) for tp in tps}
        found = await self._find(tps)
        failure: LlogError | None = None
        try:
            if reads is not None:
                await reads.confirm()
        except LlogError as error:
            failure = error
        for tp, each in found.items():
            self._learn(tp, each, began, marks[tp], proved=prove and failure is None)
        if failure is not None:
            raise failure

    async def _find(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, Found]:
        """Read topics and control records, in one batch where the directories are known and in two otherwise."""
        found: dict[TopicPartition, Found] = {}
        left: list[TopicPartition] = []
        for tp in tps:
            try:
                check_topic_name(tp.topic)
                left.append(tp)
            except LlogError as error:
                found[tp] = error
        for _ in range(_ATTEMPTS):
            controls = [self._known[tp].control for tp in left]
            entries = await self._get({*(topic_key(tp.topic) for tp in left), *filter(None, controls)})
            topics: dict[TopicPartition, Topic] = {}
            for tp in left:
                try:
                    topic = topic_in(tp.topic, entries[topic_key(tp.topic)])
                    check_partition(topic, tp.partition)
                    topics[tp] = topic
                except LlogError as error:
                    found[tp] = error
            keys = {
                tp: control_key(topic.directory, tp.partition) for tp, topic in topics.items() if topic.engine == OBJECT
            }
            for tp, key in keys.items():
                self._link_control(tp, key)  # before it is read, so that no change is missed
            entries |= await self._get({key for key in keys.values() if key not in entries})
            for tp, topic in topics.items():
                found[tp] = _view_of(tp, topic, entries[keys[tp]]) if tp in keys else View(topic, None)
            # A partition without a control record is being deleted with its topic: the next look shows it.
            left = [tp for tp in topics if isinstance(found[tp], PartitionNotInitialized)]
            if not left:
                break
        return found

    async def _get(self, keys: Collection[str]) -> dict[str, MetaEntry | None]:
        wanted = sorted(keys)
        return dict(zip(wanted, await self._log.meta.get_many(wanted), strict=True)) if wanted else {}

    # --- the watch

    def _start_watch(self) -> None:
        if self._watch is None:
            self._watch = self._log.meta.watch(ROOT)
            self._watch.take()  # nothing is known yet that could have changed
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._follow(self._watch)), loop.create_task(self._refresh_waited())]

    async def _follow(self, watch: Watch) -> None:
        while True:
            try:
                self._mark(await anext(watch))
            except LlogError:
                self._mark(None)
                await self._log.runtime.sleep(_RETRY_S)

    async def _refresh_waited(self) -> None:
        """Read changed views again that somebody waits for.

        Most of what changes them are appends of this process, of which nothing new can be learnt: reads that find
        nothing new become less frequent.
        """
        pause, ended = 0.0, _NEVER
        while True:
            await self._refresh.wait()
            await self._log.runtime.sleep(max(0.0, ended + pause - self.now()))
            self._refresh.clear()
            changed = [tp for tp in self._waiters if tp in self._known and not self._is_unchanged(self._known[tp])]
            if not changed:
                continue
            began, news = self.now(), self._news
            error = await self._join_round(changed, prove=False)
            ended = self.now()
            if error is not None:
                pause = _RETRY_S
                self._refresh.set()
            elif self._news > news:
                pause = ended - began
            else:
                pause = max(ended - began, min(_REFRESH_PAUSE_S_MAX, max(_REFRESH_PAUSE_S_MIN, 2 * pause)))


def _is_enough(found: Found, read: Read) -> bool:
    """Return whether a fresh view may answer the read without being proved."""
    if isinstance(found, LlogError):
        return False
    if found.bounds is None or found.has_record(read.position):
        return True
    return read.is_satisfied_at_end and found.ends_at(read.position)


def _is_same(view: View, old: View) -> bool:
    return (view.topic, view.bounds) == (old.topic, old.bounds)


def _view_of(tp: TopicPartition, topic: Topic, control: MetaEntry | None) -> Found:
    try:
        found = decode_control(tp, control)
    except LlogError as error:
        return error
    pending = found.pending
    if pending is not None and pending.producers:
        # A broker may know many partitions, and producers take most of the room of a record.
        pending = Pending(start_offset=pending.start_offset, entries=pending.entries)
    return View(topic, Bounds(found.log_start_offset, found.next_offset), pending)
