"""The versions of each API that llog serves, and advertises to clients."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

VERSIONS: Final[Mapping[int, tuple[int, int]]] = MappingProxyType(
    {
        0: (3, 13),  # Produce; from 13 on with topic ids
        1: (4, 18),  # Fetch; from 13 on with topic ids
        2: (1, 11),  # ListOffsets
        3: (0, 13),  # Metadata
        8: (2, 9),  # OffsetCommit
        9: (1, 9),  # OffsetFetch
        10: (0, 6),  # FindCoordinator
        11: (0, 9),  # JoinGroup
        12: (0, 4),  # Heartbeat
        13: (0, 5),  # LeaveGroup
        14: (0, 5),  # SyncGroup
        15: (0, 6),  # DescribeGroups
        16: (0, 5),  # ListGroups
        18: (0, 4),  # ApiVersions
        19: (2, 7),  # CreateTopics
        20: (1, 6),  # DeleteTopics
        21: (0, 2),  # DeleteRecords
        22: (0, 5),  # InitProducerId
        23: (2, 4),  # OffsetForLeaderEpoch
        32: (1, 4),  # DescribeConfigs
        33: (0, 2),  # AlterConfigs
        37: (0, 3),  # CreatePartitions
        42: (0, 2),  # DeleteGroups
        44: (0, 1),  # IncrementalAlterConfigs
        46: (0, 0),  # ListPartitionReassignments
        47: (0, 0),  # OffsetDelete
        60: (0, 2),  # DescribeCluster
        75: (0, 0),  # DescribeTopicPartitions
    }
)
