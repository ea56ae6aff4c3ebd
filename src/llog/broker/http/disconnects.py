"""Clients that go away before they are answered: nobody else should wait for what is done for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def until_gone(request: Request) -> None:
    """Returns when the client has gone. Only after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, call: Coroutine[Any, Any, T]) -> T:
    """The result of the call. It is cancelled, and has ended, if the client goes before; then `ClientDisconnect`."""
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
