"""What has to be there before `pending` is replaced or dropped.

The control record names the newest append as pending. Its index entries, and the states of its producers of records,
are put by the process that replaces or drops it: a writer, a compactor, retention, or the deletion of the topic.
"""

from __future__ import annotations

from llog.log.keys import PartitionKeys
from llog.log.records import Control, Pending, encode
from llog.stores.meta import ABSENT, Put


def pending_puts(keys: PartitionKeys, pending: Pending | None) -> list[Put]:
    """Return the puts that go before the CAS that replaces or drops this pending append.

    They expect ABSENT. An index entry that exists is the same, or has been compacted since. The key of a producer's
    state that exists holds the same state, because only one append ends at its offset.
    """
    if pending is None:
        return []
    puts, end = [], pending.start_offset - 1
    for entry in pending.entries:
        end += entry.msg_count
        puts.append(Put(keys.entry(end), encode(entry), ABSENT))
    puts.extend(
        Put(keys.producer(stored.name.digest, stored.state.end_offset), encode(stored), ABSENT)
        for stored in pending.producers
    )
    return puts


def puts_before_change(keys: PartitionKeys, old: Control, new: Control) -> list[Put]:
    """Return the puts that go before the CAS from `old` to `new`."""
    return pending_puts(keys, old.pending) if new.pending != old.pending else []
