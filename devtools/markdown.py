"""Checks the Markdown pages: `python -m devtools.markdown` fails if prose is wider than 100 columns or a link leads
nowhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = (".", "docs", "docs/decisions", "spec", "deploy")
COLUMNS_MAX: Final = 100
_FENCE: Final = re.compile(r"\s*```")
_UNWRAPPABLE: Final = re.compile(r"\s*\||#| {4,}(?![-*] |\d+\. )")
"""A row of a table, a heading, and the lines of an indented block."""
_ITEM: Final = re.compile(r"\s*(?:[-*] |\d+\. )?")
_WORD: Final = re.compile(r"(?:`[^`]*`|!?\[[^\]]*\]\([^)]*\)|\S)+")
"""Text without a space at which a line could be wrapped: a code span and a link are kept whole."""
_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_HEADING: Final = re.compile(r"#{1,6} (.+)")


def main(root: Path = ROOT) -> int:
    found = [
        problem for folder in FOLDERS for page in sorted((root / folder).glob("*.md")) for problem in problems(page)
    ]
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


def wrap(text: str, first: str = "") -> str:
    """Wrap a paragraph whose first line begins with `first`, and the others with as many spaces."""
    lines, line = [], ""
    for word in _WORD.findall(text):
        if line and len(first) + len(line) + 1 + len(word) > COLUMNS_MAX:
            lines.append(line)
            line = ""
        line += f" {word}" if line else word
    return first + ("\n" + " " * len(first)).join([*lines, line])


def problems(page: Path) -> Iterator[str]:
    """Yield a description of each wide line and each broken link of the page."""
    lines = list(_prose(page.read_text(encoding="utf-8")))
    for number, line in lines:
        if len(line) > COLUMNS_MAX and not _UNWRAPPABLE.match(line) and len(_WORD.findall(_ITEM.sub("", line, 1))) > 1:
            yield f"{page}:{number}: {len(line)} columns wide, and prose has at most {COLUMNS_MAX}: wrap it"
    for number, line in lines:
        for address, anchor in _LINK.findall(line):
            if "://" in address or address.startswith("mailto:"):
                continue
            target = page.parent / address if address else page
            if not target.exists():
                yield f"{page}:{number}: the link to {address} leads nowhere"
            elif anchor and anchor not in _anchors(target):
                yield f"{page}:{number}: {target.name} has no heading for #{anchor}"


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not in a fenced block, with their numbers."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            yield number, line


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the page's headings."""
    headings = (_HEADING.fullmatch(line) for _, line in _prose(page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", each[1].lower()).replace(" ", "-") for each in headings if each is not None}


if __name__ == "__main__":
    sys.exit(main())
