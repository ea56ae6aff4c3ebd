"""Listings in the order of names, on a server of either order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.stores.blobs import BlobInfo
from llog.stores.object.listing import Page, list_in_order, safe_offset

PAGE_SIZE = 3


class Server:
    def __init__(self, names: set[str], by_segments: bool) -> None:
        self.key: Callable[[str], object] = (lambda name: name.split("/")) if by_segments else (lambda name: name)
        self.names = sorted(names, key=self.key)

    def open_listing(self, directory: str, offset: str | None) -> Callable[[], Awaitable[Page]]:
        after = [] if offset is None else [offset]
        found = [n for n in self.names if n.startswith(directory) and all(self.key(n) > self.key(o) for o in after)]  # type: ignore[operator]

        async def read() -> Page:
            page = found[:PAGE_SIZE]
            del found[:PAGE_SIZE]
            return [BlobInfo(name, 1, 1) for name in page]

        return read

    async def children(self, directory: str) -> dict[str, BlobInfo | None]:
        children: dict[str, BlobInfo | None] = {}
        for name in self.names:
            if name.startswith(directory):
                first, slash, _ = name[len(directory) :].partition("/")
                children[directory + first + slash] = None if slash else BlobInfo(name, 1, 1)
        return children


SEGMENT = st.text("ab-.0~", min_size=1, max_size=3)
NAME = st.lists(SEGMENT, min_size=1, max_size=4).map("/".join)


@given(st.sets(NAME, max_size=30), st.booleans(), st.data())
def test_whatever_the_order_of_the_server_nothing_is_missed_and_names_are_in_order(
    names: set[str], by_segments: bool, data: st.DataObject
) -> None:
    some = st.one_of(NAME, st.sampled_from(sorted(names)) if names else st.nothing(), st.just(""))
    whole, after = data.draw(some), data.draw(some)
    prefix = whole[: data.draw(st.integers(0, len(whole)))]

    async def collect() -> list[str]:
        directory = prefix[: prefix.rfind("/") + 1]
        pages = list_in_order(Server(names, by_segments), directory, prefix, after, PAGE_SIZE)
        return [info.name async for page in pages for info in page]

    assert asyncio.run(collect()) == sorted(name for name in names if name.startswith(prefix) and name > after)


@pytest.mark.parametrize(
    ("directory", "lower", "offset"),
    [
        ("", "", None),
        ("d/", "", None),
        ("d/", "d/", None),
        ("d/", "d/abc", "d/ab"),
        ("d/", "d/abc-def", "d/ab"),
        ("d/", "d/abc/def", "d/ab"),
        ("d/", "d/-a", None),
        ("d/", "c/abc", None),
    ],
)
def test_a_listing_starts_early_enough_for_either_order(directory: str, lower: str, offset: str | None) -> None:
    assert safe_offset(directory, lower) == offset
