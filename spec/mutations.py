"""Broken variants of the protocols. Each omits one thing that the code does; its configuration shows why the code does
it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from spec.partition_model import PartitionShape
from spec.producer_model import ProducerShape
from spec.search import Configuration
from spec.sink_model import BOTH, SECOND, SinkShape


class Mutation(NamedTuple):
    what: str
    shape: Configuration


_STALLED_WRITER = PartitionShape(writers=1, collectors=1)
_REPAIRED = PartitionShape(writers=1, collectors=1, jumps=1, repairs=1)
_ONE_COMPACTION = PartitionShape(compactors=1, collectors=1, written=3)
_RESTARTED = SinkShape((BOTH, SECOND))
_ONE_DRIVER = SinkShape((BOTH,), collections=1)

MUTATIONS: Final[dict[str, Mutation]] = {
    "ack-before-cas": Mutation("an append is acknowledged after its blob is put", PartitionShape(writers=1)),
    "no-writer-dedup": Mutation(
        "after a lost answer, a writer appends again without looking", PartitionShape(writers=1, losses=1)
    ),
    "no-pending-recovery": Mutation(
        "a writer replaces `pending` without putting its index entry", PartitionShape(1, 2)
    ),
    "index-unconditional": Mutation(
        "index entries are put over what is there", PartitionShape(writers=1, compactors=1, written=3)
    ),
    "no-floor": Mutation("the collector does not raise the partition's floor", _STALLED_WRITER),
    "no-remark": Mutation("the collector marks before it raises the floor, and not again", _STALLED_WRITER),
    "far-stamp-judged-by-age": Mutation(
        "the collector judges a blob stamped far ahead by its age before the ceiling is below its stamp", _REPAIRED
    ),
    "ceiling-ignored": Mutation("a writer commits a blob stamped above the ceiling", _REPAIRED),
    "repair-unnoticed": Mutation("a writer commits after a repair what it has put before it", _REPAIRED),
    "no-confirm": Mutation(
        "the collector does not confirm that none of its reads was answered from an old state",
        PartitionShape(writers=1, compactors=1, collectors=1, pauses=1, written=1),
    ),
    "mark-ignores-pending": Mutation("the mark does not look at `pending`", _STALLED_WRITER),
    "mark-ignores-breadcrumb": Mutation("the mark does not look at the breadcrumb", _ONE_COMPACTION),
    "mark-ignores-gaps": Mutation(
        "the collector deletes what could fill a gap in the index",
        PartitionShape(collectors=1, damages=1, written=2),
    ),
    "blob-before-breadcrumb": Mutation("the compacted blob is put before the breadcrumb names it", _ONE_COMPACTION),
    "delete-before-compacted": Mutation("the lower entries are deleted before COMPACTED is there", _ONE_COMPACTION),
    "no-cursor-check": Mutation(
        "a compactor does not read the cursor again after it has put its breadcrumb",
        PartitionShape(compactors=3, written=4, stalled=True),
    ),
    "no-merge-check": Mutation(
        "a compactor does not read its run of COMPACTED entries again after it has put its breadcrumb",
        PartitionShape(compactors=2, compacted=3),
    ),
    "merge-inside-another": Mutation(
        "a compactor merges an entry that lies inside another one",
        PartitionShape(compactors=2, compacted=3, damages=1, stalled_repairs=1),
    ),
    "abandon-without-rewrite": Mutation(
        "a trimmed run that may be published is given up without changing the version of its highest entry",
        PartitionShape(compactors=2, collectors=1, trims=1, written=2),
    ),
    "trim-one-too-many": Mutation("the entry at the log start is deleted too", PartitionShape(trims=1, written=3)),
    "inline-entry-without-bytes": Mutation(
        "the index entry of an inline append is put without its bytes",
        PartitionShape(writers=1, appends=2, inline=2),
    ),
    "inline-not-judged-again": Mutation(
        "after a lost CAS, a writer commits inline although the partition admits no more",
        PartitionShape(writers=2, inline=1),
    ),
    "inline-counted-twice": Mutation(
        "a compaction adds what it has compacted to the count of inline records, so that a resumed one counts twice",
        PartitionShape(compactors=2, written=2, inline=2),
    ),
    "inline-counted-early": Mutation(
        "a compaction counts the inline records of its run before they are replaced",
        PartitionShape(compactors=1, written=2, inline=2),
    ),
    "reader-no-fallthrough": Mutation(
        "a reader whose blob is gone gives up instead of trying the next entry",
        PartitionShape(writers=2, compactors=1, collectors=1, written=2),
    ),
    "mutable-producer-key": Mutation(
        "a producer's state is under one key, which later states replace", ProducerShape(clears=1)
    ),
    "pending-dropped-without-keys": Mutation(
        "`pending` is cleared before the states that it names have keys", ProducerShape(brokers=1, clears=1, losses=1)
    ),
    "keys-read-apart": Mutation(
        "the keys may be read from another server than the control record",
        ProducerShape(brokers=2, clears=1, pauses=1),
    ),
    "judged-by-older-states": Mutation(
        "after a lost CAS, parts are judged by the states that were read before it", ProducerShape(losses=1)
    ),
    "unknown-appended": Mutation(
        "a part of a producer that is not known is appended, whatever its sequence", ProducerShape(brokers=1)
    ),
    "expiry-passes-pending": Mutation(
        "producers of the newest append are expired", ProducerShape(brokers=2, upkeeps=1, losses=1)
    ),
    "sink-own-attempt": Mutation("a driver publishes its own attempt although the record names another", _RESTARTED),
    "sink-batch-goes-back": Mutation(
        "a driver publishes a batch although the sink is past it", SinkShape((BOTH, SECOND), 2)
    ),
    "sink-no-producer-dedup": Mutation("a manifest is appended without looking whether it has been", _RESTARTED),
    "sink-cleared-before-applied": Mutation("the manifest is cleared before all partitions have it", _RESTARTED),
    "sink-clears-any-manifest": Mutation(
        "a driver clears the manifest that is there, of whichever batch", SinkShape((BOTH, SECOND), 2)
    ),
    "sink-no-floor": Mutation("the collector does not raise the sink's floor", _ONE_DRIVER),
    "sink-floor-unchecked": Mutation("a driver does not compare its uploads with the floor", _ONE_DRIVER),
    "sink-repair-unnoticed": Mutation(
        "a driver publishes after a repair what its tasks have put before it",
        SinkShape((BOTH,), collections=1, repairs=1),
    ),
    "sink-no-confirm": Mutation(
        "the collector does not confirm its reads of the sinks and of what they write to",
        SinkShape((BOTH,), collections=1, pauses=1),
    ),
    "mark-ignores-manifest": Mutation("the mark does not look at the sinks' manifests", _ONE_DRIVER),
    "sink-opened-after-upload": Mutation("a task puts its blob before the sink's record is there", _ONE_DRIVER),
    "sink-published-again-after-forget": Mutation(
        "a driver whose forgetting had no answer publishes again before it forgets again",
        SinkShape((BOTH,), runs=2, compactions=True, collections=1, losses=1, forgets=True),
    ),
}
