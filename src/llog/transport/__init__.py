"""The one HTTP client of a broker, for `client/`, `cli/` and `spark/`.

`protocol.py` holds the rules of requests and answers, without any I/O; `client.py` sends requests and blocks.
"""

from __future__ import annotations

from llog.transport.client import BrokerClient
from llog.transport.protocol import ARROW, JSON, Answer, check_url

__all__ = ["ARROW", "JSON", "Answer", "BrokerClient", "check_url"]
