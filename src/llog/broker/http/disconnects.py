"""Clients that disconnect before they are answered: the work for them is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def until_gone(request: Request) -> None:
    """Return when the client has disconnected. To be called only after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, call: Coroutine[Any, Any, T]) -> T:
    """Return the result of the call. If the client disconnects first, cancel it and raise `ClientDisconnect`."""
    calling, leaving = asyncio.ensure_future(call), asyncio.ensure_future(until_gone(request))
    try:
        await asyncio.wait((calling, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            raise ClientDisconnect
        return calling.result()
    finally:
        for task in (calling, leaving):
            task.cancel()
        await asyncio.gather(calling, leaving, return_exceptions=True)
