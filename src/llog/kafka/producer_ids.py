"""InitProducerId: a number for each idempotent producer that no other producer of this log ever had.

Brokers take numbers in blocks from a counter in the metadata store, so that few producers cost a request.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from llog.errors import LlogError, VersionMismatch
from llog.kafka.error_codes import ErrorCode, error_code
from llog.kafka.handlers import Caller, Handlers
from llog.kafka.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from llog.log.cas import Backoff
from llog.log.keys import PRODUCER_IDS
from llog.log.log import Log
from llog.log.records import decode, encode
from llog.stores.meta import ABSENT

_BLOCK: Final = 1000


class ProducerIds(msgspec.Struct, frozen=True, kw_only=True):
    """The stored counter."""

    next: int = 1


class ProducerIdHandlers:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._block = iter(range(0))
        self._taking = asyncio.Lock()

    def handlers(self) -> Handlers:
        return {22: self.init_producer_id}

    async def init_producer_id(self, request: InitProducerIdRequest, _: Caller) -> InitProducerIdResponse:
        if request.transactional_id is not None:
            return _refusal(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)  # fatal for the client, as it should be
        try:
            return InitProducerIdResponse(producer_id=await self._next_id(), producer_epoch=0)
        except LlogError as error:
            return _refusal(error_code(error))

    async def _next_id(self) -> int:
        async with self._taking:
            for number in self._block:
                return number
            self._block = iter(await self._take_block())
            return next(self._block)

    async def _take_block(self) -> range:
        """Take numbers that no other process takes. A block whose answer was lost is left unused."""
        backoff = Backoff(self._log.runtime, "the counter of producer ids")
        while True:
            found = await self._log.meta.get(PRODUCER_IDS)
            start = 1 if found is None else decode(ProducerIds, found.value, found.key).next
            counter = encode(ProducerIds(next=start + _BLOCK))
            try:
                await self._log.meta.put(PRODUCER_IDS, counter, expected=ABSENT if found is None else found.version)
                return range(start, start + _BLOCK)
            except VersionMismatch as error:
                await backoff.wait(error)


def _refusal(code: ErrorCode) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=code, producer_id=-1, producer_epoch=-1)
