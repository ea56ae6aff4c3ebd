"""The commands and options that the pages name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest

from llog.cli.main import main

ROOT: Final = Path(__file__).parents[3]
_FENCED: Final = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PASTED: Final = re.compile(r"(?:^|\| )llog ([^#|\n]+)", re.MULTILINE)
_QUOTED: Final = re.compile(r"`llog ([^`]+)`")


def _commands(text: str) -> Iterator[str]:
    """The command lines in shell blocks and in code spans, without the program's name."""
    for block in _FENCED.findall(text):
        yield from _PASTED.findall(block.replace("\\\n", " "))
    yield from (" ".join(span.split()) for span in _QUOTED.findall(_FENCED.sub("", text)))


def _unknown_word(line: str) -> str | None:
    """The first subcommand or option of the line that does not exist."""
    command: click.Command = main
    context = click.Context(main)
    for word in line.split():
        option = word.partition("=")[0]
        if option.startswith("--"):
            named = {each for parameter in [*command.params, *main.params] for each in parameter.opts}
            if option not in named | {"--help"}:
                return word
        elif isinstance(command, click.Group) and re.fullmatch(r"[a-z][a-z-]*", word):
            found = command.get_command(context, word)
            if found is None:
                return word
            command = found
    return None


def test_every_command_and_option_on_a_page_exists() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = [(page.name, line) for page in pages for line in _commands(page.read_text())]
    assert len(named) > 100
    assert [each for each in named if _unknown_word(each[1]) is not None] == []


@pytest.mark.parametrize("line", ["topics make orders", "topics create orders --parts 3", "keyed read k"])
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    assert _unknown_word(line) is not None
