"""Listing in the order of names, also on servers that sort otherwise.

Some S3 servers sort by '/'-separated segments, which puts 'a/b' before 'a-b', and they continue after an offset in that
order, too. The two orders agree where no directory is nested. So a directory that holds only blobs is listed page by
page, a listing that fits into one page is sorted here, and only a larger one with nested directories is walked
directory by directory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from llog.stores.blobs import BlobInfo

Page = list[BlobInfo]


class ListingServer(Protocol):
    """A server's two ways of listing. A directory ends with '/'; the topmost directory is empty."""

    def open_listing(self, directory: str, offset: str | None) -> Callable[[], Awaitable[Page]]:
        """Return a function that reads the next page of what is below the directory and after `offset`.

        Pages come in the server's order. A page that is not full is the last one.
        """
        ...

    async def children(self, directory: str) -> dict[str, BlobInfo | None]:
        """Return what is directly in the directory, by name: None for a directory, whose name ends with '/'."""
        ...


async def list_in_order(
    server: ListingServer, directory: str, prefix: str, start_after: str, page_size: int
) -> AsyncIterator[Page]:
    """Yield the blobs below `directory` that start with `prefix`, after `start_after`, in the order of their names."""
    read_page = server.open_listing(directory, safe_offset(directory, max(prefix, start_after)))
    is_first = True
    while True:
        page = sorted(await read_page())
        is_last = len(page) < page_size
        if not (is_first and is_last) and any("/" in info.name[len(directory) :] for info in page):
            break
        yield [info for info in page if info.name.startswith(prefix) and info.name > start_after]
        if is_last or (page[-1].name > prefix and not page[-1].name.startswith(prefix)):
            return
        start_after = max(start_after, page[-1].name)
        is_first = False
    children = await server.children(directory)
    for key in sorted(children):
        info = children[key]
        if info is not None:
            if key.startswith(prefix) and key > start_after:
                yield [info]
        elif (key.startswith(prefix) or prefix.startswith(key)) and (key > start_after or start_after.startswith(key)):
            async for found in list_in_order(server, key, prefix, start_after, page_size):
                yield found


def safe_offset(directory: str, lower: str) -> str | None:
    """Return an offset from which a listing of `directory` misses nothing from `lower` on, in either order; None for
    the beginning.

    A server that sorts by segments has 'x/…' before 'x-y', so the offset is cut before the first character below '/'.
    """
    if not lower.startswith(directory):
        return None
    segment = lower[len(directory) :].partition("/")[0]
    length = next((i for i, character in enumerate(segment) if character < "/"), len(segment))
    return directory + segment[: length - 1] if length > 1 else None
