"""The checker: sees every change at the servers and every answer as it happens, and reports which invariant broke.

At the moment of a commit, the checker reads the payloads of the new offsets from the blob; from then on, each offset
has its payload for ever. I1: records are readable and never change. I2: offsets are dense and grow. I3: acknowledged
records are never lost, unacknowledged ones appear at most once. I4: fences. I5: index and cursor. I6: blobs. I8:
repeated appends. I9: answers without records. I10: inline bytes are counted and bounded. S1: a sink's batches.
`group_history.py` checks I7, for groups; `kafka_history.py` checks I11, for groups of Kafka clients;
`holder_history.py` checks W1 and W2, for owners; `outbox.py` checks O1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import lt
from typing import Final, NamedTuple, TypeVar

import msgspec

from llog.batch.encodings import decoder
from llog.engines.object.reader import pending_spans
from llog.engines.object.views import View
from llog.log.engine import Bounds
from llog.log.inline import InlineLimits, from_inline, inline_bytes, is_inline
from llog.log.keys import GROUPS, HOMES, OWNERS, ROOT, SINKS, TOPICS, PartitionKeys, end_offset_of, topic_key
from llog.log.records import CompactionCursor, Control, IndexEntry, Kind, LogState, Sink, Topic, decode
from llog.model import TopicPartition
from llog.sim.damage import Damage
from llog.sim.group_history import GroupHistory
from llog.sim.holder_history import HolderHistory
from llog.sim.kafka_history import KAFKA_OFFSETS, KAFKA_RECORD, KafkaHistory
from llog.sim.numbered_history import NUMBERED, NumberedHistory
from llog.sim.outbox import SimOutbox
from llog.sim.outcome import Violation
from llog.sim.stores import WatchedMeta
from llog.stores.blobs import Buffer
from llog.stores.memory.blobs import MemoryBlobs

R = TypeVar("R", bound=msgspec.Struct)
_CONTROL: Final = "/meta/control"
_LEASES: Final = OWNERS + "keyed/"
_CURSOR: Final = "/meta/compaction-cursor"


class BlobSpan(NamedTuple):
    """The offsets that an index entry covers, and the blob that holds them: none if the entry does."""

    start: int
    end: int
    blob: str
    kind: Kind
    inline_bytes: int = 0


class PartitionNow(NamedTuple):
    """A partition as it is at the servers."""

    topic: Topic
    control: Control


class SinkRecord(NamedTuple):
    """The parts of the payload of a sink's record: `sink|{sink}|{batch}|{attempt}|{upload}|{number}`."""

    sink: str
    batch: int
    attempt: str
    number: int


class History:
    def __init__(
        self,
        meta: WatchedMeta,
        blobs: MemoryBlobs,
        outbox: SimOutbox,
        actor: Callable[[], str],
        inline: InlineLimits,
    ) -> None:
        self._inline = inline
        self.groups = GroupHistory(meta, actor)
        self.kafka = KafkaHistory()
        self.leases = HolderHistory("W1")
        self.homes = HolderHistory("W2")
        self.damage = Damage(meta, blobs)
        self._actor = actor
        self._meta = meta
        self._blobs = blobs
        self.truth: dict[str, list[bytes]] = {}
        """The committed payload of every offset from 1 on, by partition prefix."""
        self._payloads_seen: dict[str, set[bytes]] = {}
        self._last_end: dict[tuple[str, str], int] = {}
        self._sinks: dict[str, dict[int, dict[int, str]]] = {}
        """sink → batch → number of the record → the attempt that appended it."""
        self._outbox = outbox
        self._acknowledged: dict[str, dict[int, bytes]] = {}
        self.numbered = NumberedHistory()
        self._span_cache: dict[tuple[str, bytes], BlobSpan] = {}

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
                self._check_removed_entries(prefix, [self._span(key, old)])
        elif key.endswith(_CURSOR):
            before_offset = 1 if old is None else decode(CompactionCursor, old, key).offset
            self._cursor_put(
                key.removesuffix("meta/compaction-cursor"), before_offset, decode(CompactionCursor, new, key).offset
            )
        elif key.startswith(SINKS):
            self._sink_put(key, None if old is None else decode(Sink, old, key), decode(Sink, new, key))
        elif key == KAFKA_RECORD:
            self.kafka.record_put(new)
        elif key.startswith(KAFKA_OFFSETS):
            self.kafka.offset_put(key, new)
        elif key.startswith(GROUPS):
            self.groups.put(key, old, new)
        elif key.startswith(_LEASES):
            self.leases.put(self._actor())
        elif key.startswith(HOMES):
            self.homes.put(new.decode())

    def meta_removed(self, removed: Sequence[tuple[str, bytes]]) -> None:
        gone: dict[str, list[BlobSpan]] = {}
        for key, value in removed:
            if "/index/" in key:
                gone.setdefault(key[: key.index("index/")], []).append(self._span(key, value))
            elif key.endswith(_CONTROL):
                raise Violation(f"I3: control record {key} was deleted")
            elif key == KAFKA_RECORD or key.startswith(KAFKA_OFFSETS):
                self.kafka.removed(key)
            elif key.startswith(GROUPS):
                self.groups.removed(key)
            elif key.startswith(_LEASES):
                self.leases.removed()
            elif key.startswith(HOMES):
                self.homes.removed()
        for prefix, spans in gone.items():
            self._check_removed_entries(prefix, spans)

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
        """Check the answer to an append: these payloads are at this offset (I2, I3)."""
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
        """Check what a reader got: these payloads from `start` on (I1)."""
        for prefix in self._incarnations(topic, partition):
            if self.truth.get(prefix, [])[start - 1 : start - 1 + len(payloads)] == list(payloads):
                return
        raise Violation(
            f"I1: a reader of {topic}/{partition} got {payloads[:3]!r} … at offset {start}, not what was committed"
        )

    def is_forgotten(self, tp: TopicPartition, end_offset: int) -> bool:
        """Return whether the partition may have forgotten a producer whose last append ends at this offset."""
        controls = [self._control(prefix) for prefix in self._incarnations(*tp)[:1]]
        return any(control is not None and end_offset <= control.producers_expired_through for control in controls)

    def partition_now(self, topic: str, partition: int) -> PartitionNow | None:
        """Return the topic and the control record as they are at the servers; None without such a topic."""
        key = topic_key(topic)
        stored = self._meta.value(key)
        found = None if stored is None else decode(Topic, stored, key)
        if found is None or found.deleted:
            return None
        control = self._control(PartitionKeys(found.directory, partition).prefix)
        return None if control is None else PartitionNow(found, control)

    def check_absence(self, tp: TopicPartition, position: int, before: PartitionNow, found: View) -> None:
        """Check an answer that there is no record at the position: whatever was there when the request arrived, it
        must have been seen (I9).
        """
        assert found.bounds is not None
        then = Bounds(before.control.log_start_offset, before.control.next_offset)
        is_same = found.topic.incarnation == before.topic.incarnation
        if found.topic.incarnation < before.topic.incarnation or (is_same and any(map(lt, found.bounds, then))):
            raise Violation(
                f"I9: a read of {tp} at {position} was answered that the partition has {found.bounds} in "
                f"{found.directory}, but it had {then} in {before.topic.directory} when the read began"
            )

    # --- at rest

    def check_partition(self, prefix: str) -> None:
        """I5: index ranges neither overlap nor leave gaps, all offsets below the cursor are compacted, and the cursor
        is at or below the next offset.
        """
        control = self._control(prefix)
        if control is None or control.log_state is LogState.DELETED:
            return
        spans = self._spans(prefix)
        expected = spans[0].start if spans else control.next_offset
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
        if expected != control.next_offset:
            raise Violation(f"I5: the index of {prefix} ends at {expected}, its next offset is {control.next_offset}")
        self.check_compacted(prefix, control)

    def check_no_inline(self, prefix: str) -> None:
        """I10: once upkeep has nothing left to do, no record is inline, and the control record counts none."""
        control = self._control(prefix)
        if control is None or control.log_state is LogState.DELETED:
            return
        spans = [span for span in self._spans(prefix) if not self._was_lost(prefix, span)]
        if any(span.inline_bytes for span in spans) or inline_bytes(control):
            raise Violation(f"I10: {prefix} still has inline records, and counts {inline_bytes(control)} bytes of them")

    def check_compacted(self, prefix: str, control: Control) -> None:
        """I5: all offsets below the cursor are in compacted blobs, or trimmed."""
        found = self._meta.value(prefix + "meta/compaction-cursor")
        cursor = 1 if found is None else decode(CompactionCursor, found, prefix).offset
        spans = self._spans(prefix)
        compacted = [span for span in [*spans, *self._lost_spans(prefix)] if span.kind is Kind.COMPACTED]
        for span in spans:
            if span.kind is Kind.COMPACTED or not control.log_start_offset <= span.end < cursor:
                continue
            if span.blob in self.damage.blobs:
                continue  # The cursor passes a damaged slice.
            if self._was_lost(prefix, span):
                continue
            if not any(other.start <= span.start and span.end <= other.end for other in compacted):
                raise Violation(f"I5: the cursor of {prefix} is at {cursor}, but {span} is not compacted")

    def check_blobs(self, exempt: Sequence[str]) -> None:
        """I6: exactly the blobs that something names exist."""
        referenced = self.referenced()
        for name, by in referenced.items():
            if name not in self._blobs.blobs:
                raise Violation(f"I6: {by} names blob {name}, which is not there")
        for name in self._blobs.names:
            if name not in referenced and name not in exempt:
                raise Violation(f"I6: nothing names blob {name}, but it is never collected")

    def check_sink(self, sink: str, batch: int, numbers: int) -> None:
        """S1: the batch is complete."""
        found = self._sinks.get(sink, {}).get(batch, {})
        if set(found) != set(range(numbers)):
            raise Violation(f"S1: batch {batch} of sink {sink} has records {sorted(found)} instead of {numbers}")

    def check_acknowledged(self, prefix: str, log_start: int, payloads: Sequence[bytes | None]) -> None:
        """I1, I3: the readable records from the log start on are the committed ones, and include all acknowledged
        ones.
        """
        committed = self.truth.get(prefix, [])[log_start - 1 :]
        if list(payloads) != committed:
            raise Violation(
                f"I1: {prefix} reads {len(payloads)} records from {log_start} on, not the {len(committed)} committed"
            )
        for offset, payload in self._acknowledged.get(prefix, {}).items():
            if offset >= log_start and (offset - log_start >= len(payloads) or payloads[offset - log_start] != payload):
                raise Violation(f"I3: {payload!r} was acknowledged at offset {offset} of {prefix} and is lost")

    def referenced(self) -> dict[str, str]:
        """Return every blob that some key names and needs, with that key. Leftovers that a higher entry covers need no
        blob.
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
                for pending in pending_spans(control):
                    if not is_inline(pending.entry.data_uri):
                        found[_name(pending.entry)] = key
                lowest = control.next_offset
                spans = self._spans(prefix) + self._uncovered_spans(prefix)
                for span in sorted(spans, key=lambda span: (span.end, span.kind is Kind.COMPACTED), reverse=True):
                    if span.start < lowest and span.end >= control.log_start_offset and span.blob:
                        found[span.blob] = f"{prefix}index/{span.end:020}"
                    lowest = min(lowest, span.start)
        return found

    def lost_entries(self) -> dict[str, str]:
        """Return the keys of lost entries without which some record cannot be read, with the blobs of these records."""
        gone = self._dead_prefixes()
        found = {}
        for key, value in self.damage.entries.items():
            prefix, span = key[: key.index("index/")], self._span(key, value)
            if prefix not in gone and span in self._uncovered_spans(prefix):
                found[key] = span.blob
        return found

    def needed_entries(self) -> list[str]:
        """Return the keys of the index entries without which some record could not be read."""
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
        if new.next_offset < old.next_offset or new.log_start_offset < old.log_start_offset:
            raise Violation(f"I2: next offset or log start of {prefix} went back")
        if new.log_start_offset > new.next_offset:
            raise Violation(f"I2: the log start of {prefix} passed its next offset")
        self.numbered.check_expiry(prefix, old, new)
        if new.next_offset > old.next_offset:
            if old.log_state is not LogState.OPEN:
                raise Violation(f"I4: {prefix} is {old.log_state}, but took an append")
            self._record_commit(prefix, old, new)
        if old.pending is not None and new.pending != old.pending and new.log_state is not LogState.DELETED:
            self._require(prefix, new, old.pending.start_offset, old.pending.end_offset)
        self._check_inline_count(prefix, new)

    def _check_inline_count(self, prefix: str, control: Control) -> None:
        """I10: the control record never counts fewer inline bytes than the partition has, nor more than it may have."""
        if control.log_state is LogState.DELETED:
            return
        counted = inline_bytes(control)
        if not 0 <= counted <= self._inline.partition_bytes_max:
            raise Violation(f"I10: {prefix} counts {counted} inline bytes of {self._inline.partition_bytes_max}")
        spans = self._spans(prefix)
        compacted = [span for span in [*spans, *self._lost_spans(prefix)] if span.kind is Kind.COMPACTED]
        present = {
            span.end: span.inline_bytes
            for span in spans
            if span.end >= control.log_start_offset
            and not any(other.start <= span.start and span.end <= other.end for other in compacted)
        }
        for pending in pending_spans(control):
            present[pending.end_offset] = _inline_length(pending.entry)
        if sum(present.values()) > counted:
            raise Violation(f"I10: {prefix} has {sum(present.values())} inline bytes, but counts {counted}")

    def _record_commit(self, prefix: str, old: Control, new: Control) -> None:
        if new.pending is None or new.pending.start_offset != old.next_offset:
            raise Violation(f"I2: {prefix} advanced from {old.next_offset} without naming the append")
        if new.pending.end_offset + 1 != new.next_offset:
            raise Violation(
                f"I2: {prefix} advanced to {new.next_offset} by an append that ends at {new.pending.end_offset}"
            )
        appeared = self._payloads_seen.setdefault(prefix, set())
        for entry in new.pending.entries:
            for payload in self._payloads(prefix, entry):
                offset = len(self.truth[prefix]) + 1
                if payload.startswith(NUMBERED):
                    self.numbered.commit(prefix, payload, offset, new.producers_expired_through)
                elif payload in appeared:
                    raise Violation(f"I8: {payload!r} was appended to {prefix} a second time")
                appeared.add(payload)
                self.truth[prefix].append(payload)
                if payload.startswith(b"sink|"):
                    self._record_sink_commit(prefix, payload)
                elif payload.startswith(b"outbox|"):
                    self._outbox.record_relayed(prefix, payload)

    def _record_sink_commit(self, prefix: str, payload: bytes) -> None:
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
        """I6, I1: a needed entry names an existing blob with the committed records."""
        span, entry = self._span(key, value), decode(IndexEntry, value, key)
        control = self._control(prefix)
        if control is None or control.log_state is LogState.DELETED or prefix in self._dead_prefixes():
            return
        if span.kind is Kind.COMPACTED:
            lost = any(each.start <= span.end and span.start <= each.end for each in self._lost_spans(prefix))
            overtaken = span.end < control.log_start_offset and self._repairs(prefix, span)
            before = None if old is None else self._span(key, old)
            self._compacted_put(prefix, span, before, expected=lost or overtaken or self._was_lost(prefix, span))
        if span.end >= control.next_offset or span.start < 1:
            raise Violation(f"I5: {key} was put, but the next offset is {control.next_offset}")
        if not self._is_there(span):
            leftover = span.end < control.log_start_offset or any(
                other.start <= span.start
                and (span.end < other.end or (span.end == other.end and span.kind is not other.kind))
                for other in [*self._spans(prefix), *self._uncovered_spans(prefix)]
            )
            if not leftover:
                raise Violation(f"I6: {key} was put, but its blob {span.blob} is not there")
            return
        if self._payloads(prefix, entry) != self.truth[prefix][span.start - 1 : span.end]:
            raise Violation(f"I1: {key} leads to other records than were committed")

    def _compacted_put(self, prefix: str, span: BlobSpan, before: BlobSpan | None, *, expected: bool) -> None:
        """I5: a compaction replaces the highest entry of its run, and its run contains nothing that is already
        compacted; a merge replaces the highest compacted entry of its run, and contains its other entries completely.

        Where an entry was lost, a repair may put one, also late: then a merged entry may cover it already.
        """
        if before is None and not expected:
            raise Violation(f"I5: {span} of {prefix} was put where there was no entry any more")
        for other in self._spans(prefix):
            if other.kind is not Kind.COMPACTED or other.end == span.end:
                continue
            overlaps = other.start <= span.end and span.start <= other.end
            is_merge = before is not None and before.kind is Kind.COMPACTED
            contains = (is_merge or self._was_lost(prefix, span)) and span.start <= other.start and other.end < span.end
            is_inside = self._was_lost(prefix, span) and other.start <= span.start and span.end < other.end
            if overlaps and not contains and not is_inside:
                raise Violation(f"I5: {span} of {prefix} was put, but overlaps {other}")

    def _check_removed_entries(self, prefix: str, spans: Sequence[BlobSpan]) -> None:
        control = self._control(prefix)
        if control is None or control.log_state is LogState.DELETED:
            return
        for span in spans:
            self._require(prefix, control, span.start, span.end)

    def _require(self, prefix: str, control: Control, start: int, end: int) -> None:
        """I1: offsets [start, end] are covered by the index or by `pending`, as far as they are not trimmed."""
        start = max(start, control.log_start_offset)
        spans = self._spans(prefix) + self._uncovered_spans(prefix)
        spans += [BlobSpan(p.start_offset, p.end_offset, "", Kind.WAL) for p in pending_spans(control)]
        while start <= end:
            ends = [span.end for span in spans if span.start <= start <= span.end]
            if not ends:
                raise Violation(f"I1: offset {start} of {prefix} is no longer reachable")
            start = max(ends) + 1

    def _cursor_put(self, prefix: str, old: int, new: int) -> None:
        control = self._control(prefix)
        if control is None:
            return  # The cursor is put before the control record.
        if new < old:
            raise Violation(f"I5: the cursor of {prefix} went back from {old} to {new}")
        if new > control.next_offset:
            raise Violation(f"I5: the cursor of {prefix} went to {new}, past the next offset {control.next_offset}")
        if control.log_state is not LogState.DELETED:
            self.check_compacted(prefix, control)

    def _sink_put(self, key: str, old: Sink | None, new: Sink) -> None:
        if old is not None and new.batch < old.batch:
            raise Violation(f"S1: {key} went back from batch {old.batch} to {new.batch}")
        for blob in new.manifest.blobs if new.manifest else ():
            if blob not in self._blobs.blobs:
                raise Violation(f"I6: {key} was put, but its blob {blob} is not there")

    def _is_there(self, span: BlobSpan) -> bool:
        """Return whether the records of the span can be read."""
        return not span.blob or span.blob in self._blobs.blobs

    def _payloads(self, prefix: str, entry: IndexEntry) -> list[bytes]:
        data: Buffer
        if is_inline(entry.data_uri):
            data = from_inline(entry.data_uri)
        else:
            blob = self.damage.undamaged(_name(entry))
            if blob is None:
                raise Violation(f"I6: an append to {prefix} was committed, but its blob {entry.data_uri} is not there")
            data = blob[entry.byte_offset : entry.byte_offset + entry.byte_length]
        payloads: list[bytes] = decoder(entry.encoding)(data).values.to_pylist()
        return payloads

    def _control(self, prefix: str) -> Control | None:
        found = self._meta.value(prefix + "meta/control")
        return None if found is None else decode(Control, found, prefix)

    def _spans(self, prefix: str) -> list[BlobSpan]:
        return [self._span(key, value) for key, value in self._meta.below(prefix + "index/")]

    def _lost_spans(self, prefix: str) -> list[BlobSpan]:
        """Return the spans of lost entries that were not put back; entries of a stalled writer or a repair may have
        replaced them.
        """
        return [self._span(key, value) for key, value in self.damage.entries.items() if key.startswith(prefix)]

    def _was_lost(self, prefix: str, span: BlobSpan) -> bool:
        """Return whether an entry was once lost under the span's key. A stalled writer may have put its own where the
        compacted one had been, and the cursor has passed it.
        """
        return f"{prefix}index/{span.end:020}" in self.damage.keys

    def _repairs(self, prefix: str, span: BlobSpan) -> bool:
        """Return whether an entry of the span's records was once lost, so that a repair may put the span at a moment
        when retention has just removed these records.
        """
        lost = (end_offset_of(key) for key in self.damage.keys if key.startswith(f"{prefix}index/"))
        return any(span.start <= end <= span.end for end in lost)

    def _uncovered_spans(self, prefix: str) -> list[BlobSpan]:
        """Return the spans of lost entries that nothing else covers now."""
        lost = self._lost_spans(prefix)
        control = self._control(prefix) if lost else None
        if control is None:
            return []
        there = [span for span in self._spans(prefix) if self._is_there(span)]
        there += [BlobSpan(p.start_offset, p.end_offset, "", Kind.WAL) for p in pending_spans(control)]
        return [
            span
            for span in lost
            if any(
                not any(other.start <= offset <= other.end for other in there)
                for offset in range(max(span.start, control.log_start_offset), span.end + 1)
            )
        ]

    def _span(self, key: str, value: bytes) -> BlobSpan:
        span = self._span_cache.get((key, value))
        if span is None:
            entry, end = decode(IndexEntry, value, key), end_offset_of(key)
            span = BlobSpan(end - entry.msg_count + 1, end, _name(entry), entry.kind, _inline_length(entry))
            self._span_cache[key, value] = span
        return span

    def _topics(self) -> list[Topic]:
        return [decode(Topic, value, key) for key, value in self._meta.below(TOPICS)]

    def _dead_prefixes(self) -> set[str]:
        """Return the partitions of deleted topics, and of incarnations before the present one."""
        living = {
            PartitionKeys(topic.directory, partition).prefix
            for topic in self._topics()
            if not topic.deleted
            for partition in range(topic.partitions)
        }
        return {prefix for prefix in self.truth if prefix not in living}

    def _incarnations(self, topic: str, partition: int) -> list[str]:
        """Return the prefixes of the partition in all incarnations of the topic, newest first."""
        tail = f"/partitions/{partition:010}/"
        names = [p for p in self.truth if p.endswith(tail) and p[len(ROOT) :].removesuffix(tail).split("~")[0] == topic]
        return names[::-1]


def _inline_length(entry: IndexEntry) -> int:
    return entry.byte_length if is_inline(entry.data_uri) else 0


def _name(entry: IndexEntry) -> str:
    """Return the name of the entry's blob; empty if the entry is inline."""
    if is_inline(entry.data_uri):
        return ""
    return entry.data_uri.removeprefix("memory://sim/")
