"""Listing in the order of names on servers that sort otherwise.

Some S3 servers sort by '/'-separated segments, which puts 'a/b' before 'a-b' (and resumes after an offset in that
order, too). The two orders agree where nothing is nested. So a directory of blobs is passed on page by page; what fits
one page is sorted here; and only a larger nested one is walked, directory by directory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from llog.stores.blobs import BlobInfo

Page = list[BlobInfo]


class Listed(Protocol):
    """A server's two ways of listing; directories end with '/', the topmost is empty."""

    def pages(self, directory: str, offset: str | None) -> Callable[[], Awaitable[Page]]:
        """All below the directory after `offset`, a page a call, in the server's order; a page that is not full is the
        last.
        """
        ...

    async def children(self, directory: str) -> dict[str, BlobInfo | None]:
        """What is directly in the directory: blobs by name, directories (None) by their name with a '/'."""
        ...


async def ordered(server: Listed, directory: str, prefix: str, start_after: str, page_size: int) -> AsyncIterator[Page]:
    """Blobs below `directory` that start with `prefix`, after `start_after`, in the order of their names."""
    read = server.pages(directory, safe_offset(directory, max(prefix, start_after)))
    is_first = True
    while True:
        page = sorted(await read())
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
            async for found in ordered(server, key, prefix, start_after, page_size):
                yield found


def safe_offset(directory: str, lower: str) -> str | None:
    """Where a listing of `directory` may start so as to miss nothing from `lower` on, by names or by segments.

    A server that sorts by segments has 'x/…' before 'x-y', so the offset is cut before the first character below '/'.
    """
    if not lower.startswith(directory):
        return None
    segment = lower[len(directory) :].partition("/")[0]
    length = next((i for i, character in enumerate(segment) if character < "/"), len(segment))
    return directory + segment[: length - 1] if length > 1 else None
