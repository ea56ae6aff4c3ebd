from __future__ import annotations

import pytest

from llog.log.keys import PartitionKeys, group_key, members_key, pin_key, sink_key, topic_key
from llog.stores.meta import partition_prefix


@pytest.mark.parametrize("directory", ["orders", "orders~2", "partitions"])
def test_all_keys_of_a_partition_have_one_prefix(directory: str) -> None:
    keys = PartitionKeys(directory, 7)
    all_keys = (keys.control, keys.cursor, keys.compaction, keys.claim, keys.entry(1), keys.entry(10**12))
    assert {partition_prefix(key) for key in all_keys} == {keys.prefix}
    assert partition_prefix("a-root/" + keys.control) == "a-root/" + keys.prefix


def test_other_keys_stand_alone() -> None:
    names = ("partitions", "orders")
    for name in names:
        keys = (topic_key(name), sink_key(name), pin_key(name), group_key(name, name, 7), members_key(name, name))
        assert [partition_prefix(key) for key in keys] == [None] * len(keys)
