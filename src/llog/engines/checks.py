"""What the engines that can compact by key ask of appends."""

from __future__ import annotations

from llog.batch.columns import Columns
from llog.errors import InvalidArgument
from llog.log.records import Cleanup, Topic


def check_keys(topic: Topic, columns: Columns) -> None:
    """Every record of a topic with cleanup `compact` has a key: without one it would stay for ever."""
    if topic.cleanup is Cleanup.COMPACT and (columns.keys is None or columns.keys.null_count):
        raise InvalidArgument(
            f"topic {topic.name!r} keeps the newest record of each key (cleanup compact): give every record a key"
        )
