"""From a frame to its handler and back: the header, the version, the answer."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any, Final

from llog.base.units import format_size
from llog.batch.columns import Buffer
from llog.broker.metrics import Metrics
from llog.kafka.error_codes import ErrorCode
from llog.kafka.handlers import Caller, Handlers
from llog.kafka.messages import APIS, Api, RequestHeader, decode_header, decode_request, encode_response
from llog.kafka.messages.api_versions import ApiVersion, ApiVersionsResponse
from llog.kafka.versions import VERSIONS
from llog.kafka.wire import MalformedMessage

_PRODUCE: Final = 0
_API_VERSIONS: Final = 18
_OTHER_BYTES_MAX: Final = 4 << 20
"""The largest request without records: it is enough for 100,000 partitions, and decoding takes many times its size."""
_WAITING: Final = frozenset({1, 11, 14})
"""Fetch, JoinGroup and SyncGroup: these may wait for long, and nobody misses them when their client has gone."""

Handling = Coroutine[Any, Any, list[Buffer] | None]


class Dispatcher:
    """Hands requests to their handlers. Only APIs that have a handler are advertised."""

    def __init__(self, handlers: Handlers, metrics: Metrics, frame_bytes_max: int) -> None:
        self._handlers = handlers
        self.metrics = metrics
        self.frame_bytes_max = frame_bytes_max
        self._advertised = [
            ApiVersion(api_key=key, min_version=lowest, max_version=highest)
            for key, (lowest, highest) in sorted(VERSIONS.items())
            if key in handlers or key == _API_VERSIONS
        ]

    def begin(self, frame: memoryview, peer: str) -> tuple[bool, Handling]:
        """Return whether the request may be cancelled when its client goes, and its handling, which returns the frame
        of the answer, if there is one.

        Raises `MalformedMessage`, after which the connection cannot go on.
        """
        header, body = decode_header(frame)
        api = APIS.get(header.api_key)
        if header.api_key != _PRODUCE and len(frame) > _OTHER_BYTES_MAX:
            raise MalformedMessage(
                f"a request of {len(frame)} bytes: only Produce may have more than {format_size(_OTHER_BYTES_MAX)}"
            )
        if api is not None and api.key == _API_VERSIONS:
            return True, self._answer_versions(api, header)
        if api is None or api.key not in self._handlers:
            raise MalformedMessage(f"a request of the API {header.api_key}, which is not served")
        lowest, highest = VERSIONS[api.key]
        if not lowest <= header.api_version <= highest:
            raise MalformedMessage(
                f"a request of {api.name} in version {header.api_version}: versions {lowest} to {highest} are served"
            )
        return api.key in _WAITING, self._handle(api, header, body, peer)

    async def _handle(self, api: Api, header: RequestHeader, body: memoryview, peer: str) -> list[Buffer] | None:
        started = time.perf_counter()
        request = decode_request(api, header.api_version, body)
        caller = Caller(header.client_id or "", peer, header.api_version)
        response = await self._handlers[api.key](request, caller)
        self.metrics.kafka_requests[api.name] += 1
        self.metrics.kafka_request_seconds[api.name].observe(time.perf_counter() - started)
        if response is None:
            return None
        return encode_response(api, header.api_version, header.correlation_id, response)

    async def _answer_versions(self, api: Api, header: RequestHeader) -> list[Buffer]:
        """Answer in the version that was asked for, or in version 0 with an error that makes the client ask again."""
        self.metrics.kafka_requests[api.name] += 1
        lowest, highest = VERSIONS[api.key]
        is_known = lowest <= header.api_version <= highest
        code = ErrorCode.NONE if is_known else ErrorCode.UNSUPPORTED_VERSION
        response = ApiVersionsResponse(error_code=code, api_keys=self._advertised)
        return encode_response(api, header.api_version if is_known else 0, header.correlation_id, response)
