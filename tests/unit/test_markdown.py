"""The check of Markdown pages finds lines that could be wrapped and links that lead nowhere, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from devtools.markdown import COLUMNS_MAX, ROOT, main, problems, wrap

WIDE = "word " * 25


@pytest.mark.parametrize("line", [WIDE, f"- {WIDE}", f"  {WIDE}", f"1. {WIDE}", f"    - {WIDE}"])
def test_prose_that_could_be_wrapped_is_found(tmp_path: Path, line: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{line}\n")
    assert [each.partition(": ")[0] for each in problems(page)] == [f"{page}:3"]


@pytest.mark.parametrize(
    "text",
    [
        f"| a | {WIDE} |",
        f"```\n{WIDE}\n```",
        f"    {WIDE}",
        f"# {WIDE}",
        "x" * 120,
        f"- [{WIDE}](https://example.com)",
        f"`{WIDE}`",
        "w" * COLUMNS_MAX,
    ],
)
def test_what_markdown_cannot_wrap_may_be_wide(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert list(problems(page)) == []


def test_a_link_leads_to_a_page_and_to_a_heading_of_it(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("[a](docs/a.md#post-produce) [b](#none) [c](docs/c.md) [d](https://x.y/z)\n")
    (tmp_path / "docs/a.md").write_text("## POST /produce\n\n[back](../README.md)\n")
    found = list(problems(tmp_path / "README.md"))
    assert [each.partition(": ")[2] for each in found] == [
        "README.md has no heading for #none",
        "the link to docs/c.md leads nowhere",
    ]
    assert main(tmp_path) == 1


def test_a_wrapped_paragraph_keeps_its_words_and_its_code_spans() -> None:
    text = f"{WIDE}`{'code ' * 10}` {WIDE}"
    lines = wrap(text).split("\n")
    assert " ".join(lines) == " ".join(text.split())
    assert max(map(len, lines)) <= COLUMNS_MAX
    assert sum(line.count("`") % 2 for line in lines) == 0


def test_the_index_of_the_docs_links_to_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "README.md" and f"]({page})" not in index] == []


def test_the_glossary_has_each_word_once_in_order() -> None:
    words = re.findall(r"^- \*\*(.+?)\*\*: ", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert words == sorted(set(words))
