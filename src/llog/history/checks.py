"""The checks over all operations of a partition: retries, unacknowledged appends, and order in real time.

All checks are sorting and running maxima over columns: n log n in the number of operations.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from llog.errors import InvalidArgument
from llog.history.lines import Outcome
from llog.history.offsets import NOBODY, Hashes
from llog.history.operations import NEVER, OUTCOMES, UNSAID, Column, PartitionHistory
from llog.model import FIRST_OFFSET

_OK, _FAILED = OUTCOMES[Outcome.OK], OUTCOMES[Outcome.FAILED]


class Times(NamedTuple):
    """The times of each row on one time line. A row that began within `skew_ns` of another's end may have overlapped
    it.
    """

    start: Column
    end: Column
    skew_ns: int


class Appends(NamedTuple):
    """One row for each append, however often it was tried. `first` is UNSAID if no answer named its offsets."""

    row: Column
    start: Column
    """The start of the first attempt that may have happened; NEVER if all attempts failed."""
    first: Column
    records: Column
    producer: Column
    epoch: Column
    sequence: Column
    attempt: Column
    """The position of the attempt in `PartitionHistory.appends`."""


def check_partition(history: PartitionHistory, times: Times, *, unrecorded_retention: bool) -> None:
    """Run all checks and add violations to the history's findings."""
    appends = _join_attempts(history, times)
    appends = _place_unknown(history, appends)
    located = _select(appends, np.flatnonzero(appends.first != UNSAID))
    located = _select(located, np.argsort(located.first, kind="stable"))
    _check_producers(history, located)
    _check_real_time(history, times, located)
    _check_wholeness(history, located)
    _check_log_start(history, times, unrecorded_retention)


def _join_attempts(history: PartitionHistory, times: Times) -> Appends:
    """Join the attempts of each append and return the appends; report those acknowledged at two places (I8)."""
    attempts = history.appends
    if not len(attempts):
        return Appends(*(np.zeros(0, np.int64) for _ in Appends._fields))
    names = ("producer", "epoch", "sequence", "outcome", "first", "count", "content", "row")
    order = np.lexsort([attempts.column(name) for name in ("sequence", "epoch", "producer")])
    producer, epoch, sequence, outcome, first, count, content, row = (attempts.column(name)[order] for name in names)
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (np.diff(producer) != 0) | (np.diff(epoch) != 0) | (np.diff(sequence) != 0)
    groups = np.flatnonzero(is_new)
    for position in np.flatnonzero(~is_new):
        if (count[position], content[position]) != (count[position - 1], content[position - 1]):
            raise InvalidArgument(
                f"{history.ref(int(row[position - 1]))} and {history.ref(int(row[position]))} have the same producer "
                "and sequence, but not the same records: a retry must repeat them"
            )
    lowest = np.minimum.reduceat(np.where(outcome == _OK, first, NEVER), groups)
    highest = np.maximum.reduceat(first, groups)
    for group in np.flatnonzero((lowest != highest) & (highest != UNSAID)).tolist():
        members = slice(groups[group], groups[group + 1] if group + 1 < len(groups) else len(order))
        rows = [int(row[members][first[members] == offset][0]) for offset in (lowest[group], highest[group])]
        low, high = int(lowest[group]), int(highest[group])
        history.report(
            "I8",
            low,
            high + int(count[groups[group]]) - 1,
            "an append and its retry were acknowledged at two places: ",
            rows[0],
            f" at offset {low}, ",
            rows[1],
            f" at offset {high}",
        )
    # The attempt that shows most: an acknowledged one, otherwise one that may have happened.
    best = np.minimum.reduceat(outcome * len(order) + np.arange(len(order)), groups) % len(order)
    start = np.minimum.reduceat(np.where(outcome == _FAILED, NEVER, times.start[row]), groups)
    return Appends(
        row=row[best],
        start=start,
        first=np.where(highest == UNSAID, UNSAID, lowest),
        records=count[best],
        producer=producer[best],
        epoch=epoch[best],
        sequence=sequence[best],
        attempt=order[best],
    )


def _place_unknown(history: PartitionHistory, appends: Appends) -> Appends:
    """Locate the appends of unknown outcome among the records that no acknowledgement explains; report what no append
    explains (I3, I8).
    """
    unknown = np.flatnonzero((appends.first == UNSAID) & (appends.start != NEVER)).tolist()
    history.unknown = len(unknown)
    hashes = {append: history.hashes[int(appends.attempt[append])] for append in unknown}
    candidates: dict[int, list[tuple[int, int]]] = {}
    for append, theirs in hashes.items():
        for position, value in enumerate(theirs.tolist()):
            candidates.setdefault(value, []).append((append, position))
    starts: dict[int, list[int]] = {}
    seen: Counter[int] = Counter()
    explained = 0
    for offset, value in history.offsets.unowned():
        found = candidates.get(value, [])
        seen[value] += 1
        if not found:
            _report_stranger(history, offset, value)
        elif len(found) == 1:
            append, position = found[0]
            starts_found = starts.setdefault(append, [])
            if offset - position not in starts_found[-1:]:
                starts_found.append(offset - position)
            explained += 1
        elif seen[value] > len(found):
            row = int(appends.row[found[0][0]])
            history.report(
                "I3", offset, offset, f"there are more such records than the {len(found)} of ", row, " and others"
            )
        else:
            explained += 1
    first = appends.first.copy()
    for append, starts_found in starts.items():
        if _check_unknown_append(history, appends, append, hashes[append], starts_found):
            first[append] = starts_found[0]
    _check_density(history, appends, sum(map(len, hashes.values())) - explained)
    return appends._replace(first=first)


def _check_unknown_append(
    history: PartitionHistory, appends: Appends, append: int, hashes: Hashes, starts_found: list[int]
) -> bool:
    """Return whether an append of unknown outcome is at one place, with all of its records; report it otherwise."""
    row, count = int(appends.row[append]), len(hashes)
    start = starts_found[0]
    if len(starts_found) > 1:
        invariant = "I3" if appends.producer[append] == UNSAID else "I8"
        history.report(
            invariant,
            min(starts_found),
            max(starts_found) + count - 1,
            "the records of ",
            row,
            f" are there more than once: at offsets {', '.join(map(str, starts_found[:5]))}",
        )
        return False
    for offset, wanted in enumerate(hashes.tolist(), start):
        found = history.offsets.hash_at(offset)
        if offset < FIRST_OFFSET or found not in (0, wanted) or history.offsets.append_at(offset) != NOBODY:
            history.report(
                "I3", start, start + count - 1, row, f" is there in part: offset {offset} holds another record"
            )
            return False
    return True


def _report_stranger(history: PartitionHistory, offset: int, value: int) -> None:
    """Report a record that was read and that no recorded append can have put there."""
    if history.is_full:
        history.left_out += 1
        return
    reader = history.offsets.read_at(offset)
    twin = history.offsets.acknowledged_with(value)
    if twin is not None:
        other, row = twin
        invariant = "I3" if history.rows.value("identity", row) == row else "I8"
        history.report(
            invariant,
            offset,
            offset,
            row,
            f" was acknowledged at offset {other}, but ",
            reader,
            " found its record here, too: it was appended twice",
        )
        return
    for attempt, hashes in history.hashes.items():
        if value in hashes:
            row, is_failed = history.appends.value("row", attempt), history.appends.value("outcome", attempt) == _FAILED
            invariant, how = ("I3", "failed") if is_failed else ("I8", "was acknowledged elsewhere when it was retried")
            history.report(invariant, offset, offset, row, f" {how}, but ", reader, " found its record")
            return
    history.report("I3", offset, offset, reader, " found a record that nobody appended")


def _check_density(history: PartitionHistory, appends: Appends, left: int) -> None:
    """I2: offsets that no acknowledged append and no read explains belong to appends of unknown outcome, which have
    `left` records.
    """
    ends = appends.first + appends.records
    reach = history.reads.column("reach")
    top = int(max(ends[appends.first != UNSAID].max(initial=FIRST_OFFSET), reach.max(initial=FIRST_OFFSET)))
    holes = top - FIRST_OFFSET - history.offsets.count_known(top)
    if holes > left:
        start = history.offsets.first_unknown(FIRST_OFFSET, top)
        rows = history.reads.column("row")[reach == top][:1].tolist() or appends.row[ends == top][:1].tolist()
        history.report(
            "I2",
            start,
            start,
            rows[0],
            f" shows that all offsets below {top} are taken, but no append can have taken {holes - left} of them",
        )


def _check_producers(history: PartitionHistory, located: Appends) -> None:
    """I2: a producer's appends are in the order of its sequences."""
    named = _select(located, np.flatnonzero(located.producer != UNSAID))
    named = _select(named, np.lexsort([named.sequence, named.epoch, named.producer]))
    back = (np.diff(named.producer) == 0) & (np.diff(named.first) <= 0)
    for position in np.flatnonzero(back).tolist():
        before, after = int(named.first[position]), int(named.first[position + 1])
        history.report(
            "I2",
            after,
            before,
            int(named.row[position]),
            f" is at offset {before}, and the same producer's next one, ",
            int(named.row[position + 1]),
            f", before it at offset {after}",
        )


class _Floor(NamedTuple):
    """The highest value known at any time, and the row that showed it first."""

    times: Column
    values: Column
    rows: Column

    @classmethod
    def of(cls, times: Column, values: Column, rows: Column) -> _Floor:
        order = np.argsort(times, kind="stable")
        highest = np.maximum.accumulate(values[order])
        rises = np.diff(highest, prepend=NOBODY) > 0
        return cls(times[order][rises], highest[rises], rows[order][rises])

    def before(self, times: Column, lowest: int) -> tuple[Column, Column]:
        """Return the value known before each of these times, or `lowest`, and the row that showed it."""
        position = np.searchsorted(self.times, times, side="left")
        return np.concatenate([[lowest], self.values])[position], np.concatenate([[NOBODY], self.rows])[position]


def _check_real_time(history: PartitionHistory, times: Times, located: Appends) -> None:
    """I9 and I2: an operation must see everything that was acknowledged or seen before it began, so no record is seen
    before its append began.
    """
    attempts, reads = history.appends, history.reads
    done = attempts.column("outcome") == _OK
    ends = (attempts.column("first") + attempts.column("count"))[done]
    shown = reads.column("reach") != UNSAID
    rows = np.concatenate([attempts.column("row")[done], reads.column("row")[shown]])
    floor = _Floor.of(times.end[rows], np.concatenate([ends, reads.column("reach")[shown]]), rows)

    said = reads.column("next") != UNSAID
    row, next_offset = reads.column("row")[said], reads.column("next")[said]
    least, by = floor.before(times.start[row] - times.skew_ns, FIRST_OFFSET)
    stale = np.flatnonzero(next_offset < least)
    culprits, firsts, counts = np.unique(by[stale], return_index=True, return_counts=True)
    for culprit, position, count in zip(culprits.tolist(), stale[firsts].tolist(), counts.tolist(), strict=True):
        _report_stale(
            history, times, int(row[position]), int(next_offset[position]), culprit, int(least[position]), count
        )

    least, by = floor.before(located.start - times.skew_ns, FIRST_OFFSET)
    for position in np.flatnonzero(located.first < least).tolist():
        offset, shows = int(located.first[position]), int(least[position])
        history.report(
            "I2",
            offset,
            offset + int(located.records[position]) - 1,
            int(located.row[position]),
            f" is at offset {offset}, though it began after ",
            int(by[position]),
            f" had shown that all offsets below {shows} were taken",
        )


def _report_stale(
    history: PartitionHistory, times: Times, row: int, next_offset: int, culprit: int, least: int, count: int
) -> None:
    """Report I9, or I3 if no read ever found the acknowledged record."""
    later_s = int(times.start[row] - times.end[culprit]) / 1e9
    others = f"; {count - 1} more reads have the same" if count > 1 else ""
    verb = "was acknowledged" if history.is_append(culprit) else "had shown offsets"
    lost = history.is_append(culprit) and history.offsets.read_at(least - 1) == NOBODY
    history.report(
        "I3" if lost else "I9",
        next_offset,
        least - 1,
        row,
        f" said that the next offset is {next_offset}, though it began {later_s:.6f} s after ",
        culprit,
        f" {verb} up to offset {least - 1}{', which no read ever found: it is lost' if lost else ''}{others}",
    )


def _check_wholeness(history: PartitionHistory, located: Appends) -> None:
    """I3: the records of an append appear together or not at all, so the next offset is never within an append."""
    if not len(located.first):
        return
    said = history.reads.column("next") != UNSAID
    row, next_offset = history.reads.column("row")[said], history.reads.column("next")[said]
    position = np.searchsorted(located.first, next_offset, side="left") - 1
    within = (position >= 0) & (next_offset < (located.first + located.records)[position])
    for read in np.flatnonzero(within).tolist():
        start, end = int(located.first[position[read]]), int((located.first + located.records)[position[read]]) - 1
        history.report(
            "I3",
            start,
            end,
            int(row[read]),
            f" said that the next offset is {next_offset[read]}, which is within ",
            int(located.row[position[read]]),
        )


def _check_log_start(history: PartitionHistory, times: Times, unrecorded_retention: bool) -> None:
    """I1 and I3: the log start only rises, and only by trims."""
    trims, reads = history.trims, history.reads
    done, said = trims.column("log_start") != UNSAID, reads.column("log_start") != UNSAID
    rows = np.concatenate([trims.column("row")[done], reads.column("row")[said]])
    values = np.concatenate([trims.column("log_start")[done], reads.column("log_start")[said]])
    floor = _Floor.of(times.end[rows], values, rows)

    claims = np.where(said, reads.column("log_start"), reads.column("asked"))
    claimed = np.flatnonzero(claims != UNSAID)
    row = reads.column("row")[claimed]
    least, by = floor.before(times.start[row] - times.skew_ns, FIRST_OFFSET)
    for position in np.flatnonzero(claims[claimed] < least).tolist():
        offset, start = int(claims[claimed][position]), int(least[position])
        history.report(
            "I1",
            offset,
            start - 1,
            int(row[position]),
            f" found offset {offset}, though it began after ",
            int(by[position]),
            f" had shown that the log starts at {start}",
        )
    if unrecorded_retention:
        return
    cause = _Floor.of(times.start[trims.column("row")], trims.column("bound"), trims.column("row"))
    ended = np.minimum(times.end[rows], NEVER - times.skew_ns - 1) + times.skew_ns + 1
    most, _ = cause.before(ended, FIRST_OFFSET)
    for position in np.flatnonzero(values > np.maximum(most, FIRST_OFFSET))[:1].tolist():
        start = int(values[position])
        history.report(
            "I3",
            int(max(most[position], FIRST_OFFSET)),
            start - 1,
            int(rows[position]),
            f" shows that the log starts at {start}, but no recorded trim reached so far",
        )


def _select(appends: Appends, positions: Column) -> Appends:
    return Appends(*(column[positions] for column in appends))
