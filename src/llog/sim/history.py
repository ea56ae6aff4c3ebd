"""The checker: sees every change at the servers as it happens, every answer as it is given, and says which invariant
broke.

What a commit makes of an offset is read off the blob at the moment of the commit; from then on that offset has these
bytes for ever. I1 readable and unchanging; I2 dense and growing; I3 acknowledged is never lost, unacknowledged appears
at most once; I4 fences; I5 index and cursor; I6 blobs; I8 a repeated append; S1 a sink's batches. `group_history.py`
has I7, of groups, `holder_history.py` W1 and W2, of owners, and `outbox.py` O1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from llog.batch.codecs import decoder
from llog.engines.object.reader import pending_pieces
from llog.log.keys import GROUPS, HOMES, OWNERS, ROOT, SINKS, TOPICS, PartitionKeys, end_offset_of
from llog.log.records import Control, Cursor, IndexEntry, Kind, LogState, Sink, Topic, decode
from llog.sim.damage import Damage
from llog.sim.group_history import GroupHistory
from llog.sim.holder_history import HolderHistory
from llog.sim.outbox import SimOutbox
from llog.sim.stores import WatchedMeta
from llog.sim.violation import Violation
from llog.stores.blobs import Buffer
from llog.stores.memory.blobs import MemoryBlobs

R = TypeVar("R", bound=msgspec.Struct)
_CONTROL: Final = "/meta/control"
_LEASES: Final = OWNERS + "keyed/"
_CURSOR: Final = "/meta/compaction-cursor"


class Span(NamedTuple):
    start: int
    end: int
    blob: str
    kind: Kind


class SinkRecord(NamedTuple):
    """What the payload of a sink's record says: `sink|{sink}|{batch}|{attempt}|{upload}|{number}`."""

    sink: str
    batch: int
    attempt: str
    number: int


class History:
    def __init__(self, meta: WatchedMeta, blobs: MemoryBlobs, outbox: SimOutbox, actor: Callable[[], str]) -> None:
        self.groups = GroupHistory(meta, actor)
        self.leases = HolderHistory("W1")
        self.homes = HolderHistory("W2")
        self.damage = Damage(meta, blobs)
        self._actor = actor
        self._meta = meta
        self._blobs = blobs
        self.truth: dict[str, list[bytes]] = {}
        """By partition prefix: the payload of every offset, from 1 on, as committed."""
        self._appeared: dict[str, set[bytes]] = {}
        self._last_end: dict[tuple[str, str], int] = {}
        self._sinks: dict[str, dict[int, dict[int, str]]] = {}
        """sink → batch → number of the record → the attempt that it came from."""
        self._outbox = outbox
        self._acknowledged: dict[str, dict[int, bytes]] = {}
        self._decoded: dict[tuple[str, bytes], Span] = {}

    # --- changes at the servers

    def meta_put(self, key: str, old: bytes | None, new: bytes) -> None:
        if key.endswith(_CONTROL):
            before = None if old is None else decode(Control, old, key)
            self._control_put(key.removesuffix("meta/control"), before, decode(Control, new, key))
        elif "/index/" in key:
            prefix = key[: key.index("index/")]
            self._entry_put(prefix, key, old, new)
            if self.damage.entries.get(key) == new:
                del self.damage.entries[key]
            if old is not None:
                self._entries_gone(prefix, [self._span(key, old)])
        elif key.endswith(_CURSOR):
            before_offset = 1 if old is None else decode(Cursor, old, key).offset
            self._cursor_put(key.removesuffix("meta/compaction-cursor"), before_offset, decode(Cursor, new, key).offset)
        elif key.startswith(SINKS):
            self._sink_put(key, None if old is None else decode(Sink, old, key), decode(Sink, new, key))
        elif key.startswith(GROUPS):
            self.groups.put(key, old, new)
        elif key.startswith(_LEASES):
            self.leases.put(self._actor())
        elif key.startswith(HOMES):
            self.homes.put(new.decode())

    def meta_removed(self, removed: Sequence[tuple[str, bytes]]) -> None:
        gone: dict[str, list[Span]] = {}
        for key, value in removed:
            if "/index/" in key:
                gone.setdefault(key[: key.index("index/")], []).append(self._span(key, value))
            elif key.endswith(_CONTROL):
                raise Violation(f"I3: control record {key} was deleted")
            elif key.startswith(GROUPS):
                self.groups.removed(key)
            elif key.startswith(_LEASES):
                self.leases.removed()
            elif key.startswith(HOMES):
                self.homes.removed()
        for prefix, spans in gone.items():
            self._entries_gone(prefix, spans)

    def blobs_removed(self, names: Sequence[str]) -> None:
        if not names:
            return
        referenced = self.referenced()
        for name in names:
            if name in referenced:
                raise Violation(f"I6: blob {name} was deleted, but {referenced[name]} names it")

    # --- answers

    def acknowledged(
        self, who: str, topic: str, partition: int, start: int, payloads: Sequence[bytes], *, repeated: bool
    ) -> None:
        """An append of these payloads was answered with this offset."""
        for prefix in self._incarnations(topic, partition):
            if self.truth.get(prefix, [])[start - 1 : start - 1 + len(payloads)] == list(payloads):
                break
        else:
            raise Violation(
                f"I3: {who} was told that {payloads[0]!r} is at offset {start} of {topic}/{partition}; it is not"
            )
        kept = self._acknowledged.setdefault(prefix, {})
        kept.update(enumerate(payloads, start))
        last = self._last_end.get((who, prefix), 0)
        if start <= last and not repeated:
            raise Violation(f"I2: {who} was answered offset {start} of {prefix} after {last}")
        self._last_end[who, prefix] = max(last, start + len(payloads) - 1)

    def read(self, topic: str, partition: int, start: int, payloads: Sequence[bytes | None]) -> None:
        """A reader was given these payloads from `start` on."""
        for prefix in self._incarnations(topic, partition):
            if self.truth.get(prefix, [])[start - 1 : start - 1 + len(payloads)] == list(payloads):
                return
        raise Violation(
            f"I1: a reader of {topic}/{partition} got {payloads[:3]!r} … at offset {start}, not what was committed"
        )

    # --- at rest

    def check_partition(self, prefix: str) -> None:
        """I5: index ranges neither overlap nor gap, what is below the cursor is compacted, and the cursor is at or
        below the counter.
        """
        control = self._control(prefix)
        if control is None or control.log_state is LogState.DELETED:
            return
        spans = self._spans(prefix)
        expected = spans[0].start if spans else control.sequence_counter
        if expected > control.log_start_offset:
            raise Violation(f"I5: the index of {prefix} begins at {expected}, its log at {control.log_start_offset}")
        for span in spans:
            if span.start != expected:
                raise Violation(f"I5: the index of {prefix} has {span}, but offset {expected} comes next")
            if span.end < control.log_start_offset:
                raise Violation(
                    f"I5: the index of {prefix} still has {span}, below its log start {control.log_start_offset}"
                )
            expected = span.end + 1
        if expected != control.sequence_counter:
            raise Violation(f"I5: the index of {prefix} ends at {expected}, its counter is {control.sequence_counter}")
        self.check_compacted(prefix, control)

    def check_compacted(self, prefix: str, control: Control) -> None:
        """Everything below the cursor is in compacted blobs, or trimmed."""
        found = self._meta.value(prefix + "meta/compaction-cursor")
        cursor = 1 if found is None else decode(Cursor, found, prefix).offset
        spans = self._spans(prefix)
        compacted = [span for span in [*spans, *self._once_lost(prefix)] if span.kind is Kind.COMPACTED]
        for span in spans:
            if span.kind is Kind.COMPACTED or not control.log_start_offset <= span.end < cursor:
                continue
            if span.blob in self.damage.blobs:
                continue  # the cursor passes a damaged slice
            if f"{prefix}index/{span.end:020}" in self.damage.keys:
                continue  # put by a stalled writer, where a compacted entry was lost
            if not any(other.start <= span.start and span.end <= other.end for other in compacted):
                raise Violation(f"I5: the cursor of {prefix} is at {cursor}, but {span} is not compacted")

    def check_blobs(self, exempt: Sequence[str]) -> None:
        """I6: there are the blobs that something names, and no others."""
        referenced = self.referenced()
        for name, by in referenced.items():
            if name not in self._blobs.blobs:
                raise Violation(f"I6: {by} names blob {name}, which is not there")
        for name in self._blobs.names:
            if name not in referenced and name not in exempt:
                raise Violation(f"I6: nothing names blob {name}, but it is never collected")

    def check_sink(self, sink: str, batch: int, numbers: int) -> None:
        """S1: the batch is there whole."""
        found = self._sinks.get(sink, {}).get(batch, {})
        if set(found) != set(range(numbers)):
            raise Violation(f"S1: batch {batch} of sink {sink} has records {sorted(found)} instead of {numbers}")

    def check_acknowledged(self, prefix: str, log_start: int, payloads: Sequence[bytes | None]) -> None:
        """I1, I3: what can be read from the log start on is what was committed, and holds all that was acknowledged."""
        committed = self.truth.get(prefix, [])[log_start - 1 :]
        if list(payloads) != committed:
            raise Violation(
                f"I1: {prefix} reads {len(payloads)} records from {log_start} on, not the {len(committed)} committed"
            )
        for offset, payload in self._acknowledged.get(prefix, {}).items():
            if offset >= log_start and (offset - log_start >= len(payloads) or payloads[offset - log_start] != payload):
                raise Violation(f"I3: {payload!r} was acknowledged at offset {offset} of {prefix} and is lost")

    def referenced(self) -> dict[str, str]:
        """Every blob that something names and needs, with the key that does. Leftovers that a higher entry covers need
        nothing.
        """
        found: dict[str, str] = {}
        gone = self._dead_prefixes()
        for key, value in self._meta.below(ROOT):
            if key.startswith(SINKS):
                manifest = decode(Sink, value, key).manifest
                found.update(dict.fromkeys(manifest.blobs if manifest else (), key))
            elif key.endswith(_CONTROL):
                prefix = key.removesuffix("meta/control")
                control = decode(Control, value, key)
                if control.log_state is LogState.DELETED or prefix in gone:
                    continue
                for piece in pending_pieces(control):
                    found[_name(piece.entry)] = key
                lowest = control.sequence_counter
                spans = self._spans(prefix) + self._lost(prefix)
                for span in sorted(spans, key=lambda span: (span.end, span.kind is Kind.COMPACTED), reverse=True):
                    if span.start < lowest and span.end >= control.log_start_offset:
                        found[span.blob] = f"{prefix}index/{span.end:020}"
                    lowest = min(lowest, span.start)
        return found

    def lost_entries(self) -> dict[str, str]:
        """The keys of lost entries without which some record cannot be read now, with the blobs that hold what they led
        to.
        """
        gone = self._dead_prefixes()
        found = {}
        for key, value in self.damage.entries.items():
            prefix, span = key[: key.index("index/")], self._span(key, value)
            if prefix not in gone and span in self._lost(prefix):
                found[key] = span.blob
        return found

    def needed_entries(self) -> list[str]:
        """The keys of the index entries without which some record could not be read."""
        return [key for key in self.referenced().values() if "/index/" in key and key not in self.damage.entries]

    # --- parts

    def _control_put(self, prefix: str, old: Control | None, new: Control) -> None:
        if old is None:
            if prefix in self.truth:
                raise Violation(f"I2: {prefix} was initialised twice")
            self.truth[prefix] = []
            return
        if old.log_state is LogState.DELETED and new.log_state is not LogState.DELETED:
            raise Violation(f"I2: {prefix} came back after its deletion")
        if new.sequence_counter < old.sequence_counter or new.log_start_offset < old.log_start_offset:
            raise Violation(f"I2: counter or log start of {prefix} went back")
        if new.log_start_offset > new.sequence_counter:
            raise Violation(f"I2: the log start of {prefix} passed its counter")
        if new.sequence_counter > old.sequence_counter:
            if old.log_state is not LogState.OPEN:
                raise Violation(f"I4: {prefix} is {old.log_state}, but took an append")
            self._committed(prefix, old, new)
        if old.pending is not None and new.pending != old.pending and new.log_state is not LogState.DELETED:
            self._require(prefix, new, old.pending.start_offset, old.pending.end_offset)

    def _committed(self, prefix: str, old: Control, new: Control) -> None:
        if new.pending is None or new.pending.start_offset != old.sequence_counter:
            raise Violation(f"I2: {prefix} advanced from {old.sequence_counter} without naming the append")
        if new.pending.end_offset + 1 != new.sequence_counter:
            raise Violation(
                f"I2: {prefix} advanced to {new.sequence_counter} by an append that ends at {new.pending.end_offset}"
            )
        appeared = self._appeared.setdefault(prefix, set())
        for entry in new.pending.entries:
            for payload in self._payloads(prefix, entry):
                if payload in appeared:
                    raise Violation(f"I8: {payload!r} was appended to {prefix} a second time")
                appeared.add(payload)
                self.truth[prefix].append(payload)
                if payload.startswith(b"sink|"):
                    self._sink_committed(prefix, payload)
                elif payload.startswith(b"outbox|"):
                    self._outbox.relayed(prefix, payload)

    def _sink_committed(self, prefix: str, payload: bytes) -> None:
        _, sink, batch_text, attempt, _, number_text = payload.decode().split("|")
        batch, number = int(batch_text), int(number_text)
        batches = self._sinks.setdefault(sink, {})
        numbers = batches.setdefault(batch, {})
        if number in numbers:
            raise Violation(
                f"S1: record {number} of batch {batch} of sink {sink} was appended a second time to {prefix}"
            )
        if numbers and attempt not in numbers.values():
            raise Violation(
                f"S1: batch {batch} of sink {sink} mixes attempts {attempt} and {sorted(set(numbers.values()))}"
            )
        if max(batches) > batch:
            raise Violation(f"S1: batch {batch} of sink {sink} came after batch {max(batches)}")
        numbers[number] = attempt

    def _entry_put(self, prefix: str, key: str, old: bytes | None, value: bytes) -> None:
        """I6, I1: an entry that is needed names a blob that is there, with the bytes that were committed."""
        span, entry = self._span(key, value), decode(IndexEntry, value, key)
        control = self._control(prefix)
        if control is None or control.log_state is LogState.DELETED or prefix in self._dead_prefixes():
            return
        if span.kind is Kind.COMPACTED:
            lost = any(each.start <= span.end and span.start <= each.end for each in self._once_lost(prefix))
            self._compacted_put(prefix, span, replaced=old is not None or lost)
        if span.end >= control.sequence_counter or span.start < 1:
            raise Violation(f"I5: {key} was put, but the counter is {control.sequence_counter}")
        if span.blob not in self._blobs.blobs:
            leftover = span.end < control.log_start_offset or any(
                other.start <= span.start
                and (span.end < other.end or (span.end == other.end and span.kind is not other.kind))
                for other in [*self._spans(prefix), *self._lost(prefix)]
            )
            if not leftover:
                raise Violation(f"I6: {key} was put, but its blob {span.blob} is not there")
            return
        if self._payloads(prefix, entry) != self.truth[prefix][span.start - 1 : span.end]:
            raise Violation(f"I1: {key} leads to other records than were committed")

    def _compacted_put(self, prefix: str, span: Span, *, replaced: bool) -> None:
        """I5: a compaction replaces the highest entry of its run, and what others have compacted is not part of the
        run.
        """
        if not replaced:
            raise Violation(f"I5: {span} of {prefix} was put where there was no entry any more")
        for other in self._spans(prefix):
            overlaps = other.start <= span.end and span.start <= other.end
            if other.kind is Kind.COMPACTED and other.end != span.end and overlaps:
                raise Violation(f"I5: {span} of {prefix} was put, but overlaps {other}")

    def _entries_gone(self, prefix: str, spans: Sequence[Span]) -> None:
        control = self._control(prefix)
        if control is None or control.log_state is LogState.DELETED:
            return
        for span in spans:
            self._require(prefix, control, span.start, span.end)

    def _require(self, prefix: str, control: Control, start: int, end: int) -> None:
        """I1: offsets [start, end] are covered by the index or by `pending`, as far as they are not trimmed."""
        start = max(start, control.log_start_offset)
        spans = self._spans(prefix) + self._lost(prefix)
        spans += [Span(p.start_offset, p.end_offset, "", Kind.WAL) for p in pending_pieces(control)]
        while start <= end:
            ends = [span.end for span in spans if span.start <= start <= span.end]
            if not ends:
                raise Violation(f"I1: offset {start} of {prefix} is no longer reachable")
            start = max(ends) + 1

    def _cursor_put(self, prefix: str, old: int, new: int) -> None:
        control = self._control(prefix)
        if control is None:
            return  # the cursor is put first
        if new < old:
            raise Violation(f"I5: the cursor of {prefix} went back from {old} to {new}")
        if new > control.sequence_counter:
            raise Violation(f"I5: the cursor of {prefix} went to {new}, past the counter {control.sequence_counter}")
        if control.log_state is not LogState.DELETED:
            self.check_compacted(prefix, control)

    def _sink_put(self, key: str, old: Sink | None, new: Sink) -> None:
        if old is not None and new.batch < old.batch:
            raise Violation(f"S1: {key} went back from batch {old.batch} to {new.batch}")
        for blob in new.manifest.blobs if new.manifest else ():
            if blob not in self._blobs.blobs:
                raise Violation(f"I6: {key} was put, but its blob {blob} is not there")

    def _payloads(self, prefix: str, entry: IndexEntry) -> list[bytes]:
        blob = self.damage.undamaged(_name(entry))
        if blob is None:
            raise Violation(f"I6: an append to {prefix} was committed, but its blob {entry.data_uri} is not there")
        data: Buffer = blob[entry.byte_offset : entry.byte_offset + entry.byte_length]
        payloads: list[bytes] = decoder(entry.encoding)(data).values.to_pylist()
        return payloads

    def _control(self, prefix: str) -> Control | None:
        found = self._meta.value(prefix + "meta/control")
        return None if found is None else decode(Control, found, prefix)

    def _spans(self, prefix: str) -> list[Span]:
        return [self._span(key, value) for key, value in self._meta.below(prefix + "index/")]

    def _once_lost(self, prefix: str) -> list[Span]:
        """Spans of lost entries that did not come back as they were; a stalled writer's or a repair's may have taken
        their places.
        """
        return [self._span(key, value) for key, value in self.damage.entries.items() if key.startswith(prefix)]

    def _lost(self, prefix: str) -> list[Span]:
        """Spans of lost entries that nothing else covers now."""
        lost = self._once_lost(prefix)
        control = self._control(prefix) if lost else None
        if control is None:
            return []
        there = [span for span in self._spans(prefix) if span.blob in self._blobs.blobs]
        there += [Span(p.start_offset, p.end_offset, "", Kind.WAL) for p in pending_pieces(control)]
        return [
            span
            for span in lost
            if any(
                not any(other.start <= offset <= other.end for other in there)
                for offset in range(max(span.start, control.log_start_offset), span.end + 1)
            )
        ]

    def _span(self, key: str, value: bytes) -> Span:
        span = self._decoded.get((key, value))
        if span is None:
            entry, end = decode(IndexEntry, value, key), end_offset_of(key)
            span = self._decoded[key, value] = Span(end - entry.msg_count + 1, end, _name(entry), entry.kind)
        return span

    def _topics(self) -> list[Topic]:
        return [decode(Topic, value, key) for key, value in self._meta.below(TOPICS)]

    def _dead_prefixes(self) -> set[str]:
        """Partitions of topics that are deleted, or of incarnations before the present one."""
        living = {
            PartitionKeys(topic.directory, partition).prefix
            for topic in self._topics()
            if not topic.deleted
            for partition in range(topic.partitions)
        }
        return {prefix for prefix in self.truth if prefix not in living}

    def _incarnations(self, topic: str, partition: int) -> list[str]:
        """Newest first."""
        tail = f"/partitions/{partition:010}/"
        names = [p for p in self.truth if p.endswith(tail) and p[len(ROOT) :].removesuffix(tail).split("~")[0] == topic]
        return names[::-1]


def _name(entry: IndexEntry) -> str:
    return entry.data_uri.removeprefix("memory://sim/")
