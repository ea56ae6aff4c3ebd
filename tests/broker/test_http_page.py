"""Every request of docs/http.md works as it stands, in its order, and gets the answer that stands below it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from starlette.routing import Route

from tests.broker.pages import ROOT, Block, blocks, run
from tests.broker.serving import Served
from tests.broker.test_process import running

_CLOCK_FIELDS: Final = {"timestamp", "ts", "created_ms", "append_time_ms", "ms"}
"""Fields whose value is the time at which the request was sent, or how long it took."""


def test_every_request_on_the_page_gets_the_answer_below_it(tmp_path: Path) -> None:
    page = [*blocks((ROOT / "docs/http.md").read_text()), Block("", "", "")]
    checked = 0
    with running(tmp_path, "serve", environment={"LLOG_KEYED": "file://./keyed"}) as server:
        address = str(server.client.base_url).rstrip("/")
        for block, below in pairwise(page):
            if block.language != "sh":
                continue
            output = run(block, address, tmp_path)
            if below.language == "json":
                _check_same(json.loads(below.text), json.loads(output), block.heading)
                checked += 1
            else:
                assert '"code"' not in output, (block.heading, output)
        assert server.end() == 0
    assert checked > 10


async def test_the_page_names_every_route_of_a_broker() -> None:
    text = (ROOT / "docs/http.md").read_text()
    served = Served()
    paths = {route.path for route in served.broker.app().routes if isinstance(route, Route)}
    await served.close()
    assert len(paths) > 20
    assert [path for path in sorted(paths) if f"{path}`" not in text and f"{path}?" not in text] == []


def _check_same(shown: Any, answered: Any, place: str) -> None:
    """The page's JSON and the broker's are equal, but for times; '…' on the page stands for any text."""
    if isinstance(shown, dict):
        assert list(shown) == list(answered), place
        for name, value in shown.items():
            if name in _CLOCK_FIELDS:
                assert type(value) is type(answered[name]), f"{place}.{name}"
            else:
                _check_same(value, answered[name], f"{place}.{name}")
    elif isinstance(shown, list):
        assert len(shown) == len(answered), place
        for value, other in zip(shown, answered, strict=True):
            _check_same(value, other, place)
    elif isinstance(shown, str) and shown.endswith("…"):
        assert answered.startswith(shown[:-1]), place
    else:
        assert shown == answered, place
