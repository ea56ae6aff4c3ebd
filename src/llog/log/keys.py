"""Every key and blob name of the leaderless log; none is spelled anywhere else.

Below the root `llog/`, `{dir}` being the topic's directory (`{topic}`, or `{topic}~2` … when re-created):

| key | value | written by | when it exists |
| --- | --- | --- | --- |
| `topics/{topic}` | `Topic`: the catalog entry | admin | from the first creation on; deleting leaves a tombstone |
| `{dir}/partitions/{p:010}/meta/control` | `Control` | writers, fencing, retention, collector (CAS) | from initialisation on |
| `{dir}/partitions/{p:010}/index/{end:020}` | `IndexEntry` | writers, compactors | while the offsets are kept |
| `{dir}/partitions/{p:010}/producers/{digest}/{end:020}` | `StoredProducer`: the state of a producer of records after its append that ends there; the highest counts | writers, compactors, retention (ABSENT only) | until the producer's next one, or its expiry |
| `{dir}/partitions/{p:010}/meta/compaction-cursor` | `CompactionCursor`: first offset not yet compacted | compactors (CAS) | from initialisation on |
| `{dir}/partitions/{p:010}/meta/compaction` | `Compaction`: breadcrumb of a running compaction | compactors | while one runs |
| `{dir}/partitions/{p:010}/meta/compactor-claim` | `CompactorClaim`, ephemeral: who compacts now | compactors | while they do |
| `sinks/{sink}` | `Sink`: batch and manifest of an exactly-once writer | Spark drivers and tasks (CAS) | from its first upload on |
| `pins/{id}` | `Pin`: a snapshot that readers still use | readers | until released or expired |
| `groups/{group}/{dir}/{p:010}` | `GroupRecord`, in `groups/` | consumers (CAS) | until the topic is deleted; not of rocksdb topics |
| `groups/{group}/{dir}/members` | `Members`, in `groups/` | members of assigned groups (CAS) | until the topic is deleted; of all engines |
| `kafka/groups/{group}` | `KafkaGroup`, in `kafka/groups/`: the generation of a group of Kafka clients; the broker that put it last coordinates the group | coordinators (CAS) | from the group's first generation or commit on, until it is deleted |
| `owners/{what}` | ephemeral `Lease`: the process that owns `what` now, and its address | owners | while they run |
| `owners/upkeep/{step}` | `CompactorClaim`, ephemeral: the compactor service that does retention or collection for all | compactor services | while it runs |
| `owners/kafka/{id:010}` | `LiveBroker` in `kafka/`, ephemeral: a broker that serves Kafka clients, and its address | brokers | while they run |
| `homes/{what}` | the id of the one directory that holds `what` for this log | first owner | from its first use on |
| `log-id/producer-ids` | `ProducerIds` in `kafka/`: the next free number of a Kafka producer | brokers (CAS) | from the first idempotent Kafka producer on |
| `log-id` | a random id, also a blob of that name: ties the two stores together | first opener | always |
| `log-id/format` | `LogFormat`: the format of all keys and blobs | first opener | always; an older log gets it when it is opened |

Blob names, below the root of the blob store: `wal-shared/{uuid7}`, `sink/{sink}/{uuid7}`,
`{dir}/partitions/{p}/data/compacted/{uuid7}`, `compacted-shared/{uuid7}`, and for a moment `clock/{uuid7}`, to learn the store's time.
A topic's directory never has one of these names (`RESERVED`).
"""  # noqa: E501

from __future__ import annotations

from functools import cached_property
from typing import Final

import msgspec

ROOT: Final = "llog/"
LOG_ID: Final = ROOT + "log-id"
LOG_FORMAT: Final = LOG_ID + "/format"
PRODUCER_IDS: Final = LOG_ID + "/producer-ids"
TOPICS: Final = ROOT + "topics/"
SINKS: Final = ROOT + "sinks/"
PINS: Final = ROOT + "pins/"
GROUPS: Final = ROOT + "groups/"
KAFKA_GROUPS: Final = ROOT + "kafka/groups/"
OWNERS: Final = ROOT + "owners/"
LIVE_BROKERS: Final = OWNERS + "kafka/"
HOMES: Final = ROOT + "homes/"
MEMBERS: Final = "members"
WAL: Final = ROOT + "wal-shared/"
SINK_BLOBS: Final = ROOT + "sink/"
COMPACTED_SHARED: Final = ROOT + "compacted-shared/"
CLOCK: Final = ROOT + "clock/"
RESERVED: Final = frozenset(
    {
        "topics",
        "sinks",
        "pins",
        "groups",
        "kafka",
        "owners",
        "homes",
        "wal-shared",
        "sink",
        "compacted-shared",
        "clock",
        "log-id",
    }
)


class PartitionKeys(msgspec.Struct, frozen=True, dict=True):
    """The keys of one partition in a topic's directory. The keys that every append needs are computed once."""

    directory: str
    partition: int

    @cached_property
    def prefix(self) -> str:
        return _prefix(self.directory, self.partition)

    @cached_property
    def control(self) -> str:
        return control_key(self.directory, self.partition)

    @property
    def cursor(self) -> str:
        return self.prefix + "meta/compaction-cursor"

    @property
    def compaction(self) -> str:
        return self.prefix + "meta/compaction"

    @property
    def claim(self) -> str:
        return self.prefix + "meta/compactor-claim"

    @property
    def index(self) -> str:
        return self.prefix + "index/"

    def entry(self, end_offset: int) -> str:
        return f"{self.prefix}index/{end_offset:020}"

    @property
    def producers(self) -> str:
        return self.prefix + "producers/"

    def producer(self, digest: str, end_offset: int) -> str:
        return f"{self.prefix}producers/{digest}/{end_offset:020}"

    def newest_producer(self, digest: str) -> str:
        """Return the bound below which the highest key of this producer lies."""
        return f"{self.prefix}producers/{digest}/{'9' * 20}"

    def compacted(self, uuid: str) -> str:
        return f"{ROOT}{self.directory}/partitions/{self.partition}/data/compacted/{uuid}"


def control_key(directory: str, partition: int) -> str:
    """Return the key of a partition's control record, for those who need no other of its keys."""
    return _prefix(directory, partition) + "meta/control"


def _prefix(directory: str, partition: int) -> str:
    return f"{ROOT}{directory}/partitions/{partition:010}/"


def end_offset_of(key: str) -> int:
    """Return the end offset in an index key, or in the key of a producer's state."""
    return int(key[-20:])


def topic_key(topic: str) -> str:
    return TOPICS + topic


def sink_key(sink: str) -> str:
    return SINKS + sink


def pin_key(pin_id: str) -> str:
    return PINS + pin_id


def group_prefix(group: str, directory: str | None = None) -> str:
    """Return the prefix of all keys of a group, or of its keys for one topic."""
    return f"{GROUPS}{group}/" + ("" if directory is None else f"{directory}/")


def group_key(group: str, directory: str, partition: int) -> str:
    """Return the key of a group's record; it contains the directory, so that a topic that is created again starts
    without groups.
    """
    return f"{GROUPS}{group}/{directory}/{partition:010}"


def members_key(group: str, directory: str) -> str:
    return f"{GROUPS}{group}/{directory}/{MEMBERS}"


def kafka_group_key(group: str) -> str:
    return KAFKA_GROUPS + group


def owner_key(what: str) -> str:
    return OWNERS + what


def upkeep_claim(step: str) -> str:
    """Return the key by which one compactor service does a step of the upkeep for all of them."""
    return f"{OWNERS}upkeep/{step}"


def live_broker_key(node_id: int) -> str:
    """Return the key of a broker that serves Kafka clients under this id."""
    return f"{LIVE_BROKERS}{node_id:010}"


def home_key(what: str) -> str:
    return HOMES + what


def directory_name(topic: str, incarnation: int) -> str:
    """Return the directory of one incarnation: each has its own, so that a process stalled since an earlier incarnation
    touches nothing of the new one.
    """
    if incarnation == 1 and topic not in RESERVED:
        return topic
    return f"{topic}~{incarnation}"
