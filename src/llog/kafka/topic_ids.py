"""Topic ids: Kafka's name for one incarnation of a topic, computed from the log's id and the topic's directory."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

NO_TOPIC_ID: Final = bytes(16)
"""What stands in a message where no topic is named by its id."""


def topic_id(log_id: str, directory: str) -> bytes:
    """Return the id of the topic with this directory; a topic that is created again has another one."""
    return blake2b(f"{log_id}/{directory}".encode(), digest_size=16).digest()
