"""The pages that describe the code name files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md")
_PATH = re.compile(r"`((?:[\w.-]+/)*[\w-]+(?:\.py|/))`")
_HOP = re.compile(r"\| `([\w/]+\.py)` `([\w.]+)` \|")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_PROMISE = re.compile(r"^\| (?!---|promise )(.+) \| (.+) \|$", re.MULTILINE)
_INVARIANT = re.compile(r"^- (\*\*[IW]\d+\*\* .+?)(?=\n- |\n\n)", re.MULTILINE | re.DOTALL)


def _definitions(path: Path) -> set[str]:
    """The functions of a module, and the methods of its classes as `Class.method`."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, functions):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, functions)}
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_path_on_a_page_exists(page: str) -> None:
    checked = 0
    for line in (ROOT / page).read_text().splitlines():
        paths = _PATH.findall(line)
        for path in paths:
            # A row of the map names the folders of its room without the room.
            places = (ROOT, ROOT / "src/llog", ROOT / "src/llog" / paths[0])
            assert any((place / path).exists() for place in places), f"{page} names {path}, which does not exist"
        checked += len(paths)
    assert checked


def test_every_hop_of_a_walk_exists() -> None:
    hops = _HOP.findall((ROOT / "ARCHITECTURE.md").read_text())
    assert len(hops) > 10
    assert [hop for hop in hops if hop[1] not in _definitions(ROOT / "src/llog" / hop[0])] == []


def test_every_promise_names_tests_that_exist_or_says_that_it_has_none() -> None:
    promises = _PROMISE.findall((ROOT / "docs/guarantees.md").read_text())
    assert len(promises) > 150
    bare = [promise for promise, shown in promises if not re.search(f"{_TEST.pattern}|no test|not built yet", shown)]
    assert bare == []
    named = {test for _, shown in promises for test in _TEST.findall(shown)}
    definitions = {path: _definitions(ROOT / path) for path, _ in named if (ROOT / path).exists()}
    assert [f"{path}::{name}" for path, name in sorted(named) if name not in definitions.get(path, ())] == []


def test_every_invariant_is_promised_in_the_same_words() -> None:
    invariants = [" ".join(each.split()) for each in _INVARIANT.findall((ROOT / "ARCHITECTURE.md").read_text())]
    assert len(invariants) == 13
    promised = {promise for promise, _ in _PROMISE.findall((ROOT / "docs/guarantees.md").read_text())}
    assert [each for each in invariants if each not in promised] == []
