from __future__ import annotations

import re
import subprocess
import sys

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from llog.cli.sql.shell import NameCompleter
from llog.errors import SqlError
from llog.sql.commands.command import Command, Usage
from llog.sql.commands.registry import COMMANDS, command_of, next_command
from llog.sql.parse.lexer import tokenize
from llog.sql.parse.token_stream import TokenStream
from llog.sql.parser import parse

USAGES = [pytest.param(command, usage, id=usage.syntax) for command in COMMANDS for usage in command.usages]


@pytest.mark.parametrize(("command", "usage"), USAGES)
def test_a_statement_written_as_documented_reaches_its_command(command: Command, usage: Usage) -> None:
    required = re.sub(r"\[[^\[\]]*\]", "", usage.syntax)
    assert next_command(TokenStream(required, tokenize(required))) is command


@pytest.mark.parametrize(("command", "usage"), USAGES)
def test_the_shell_completes_the_words_of_every_statement(command: Command, usage: Usage) -> None:
    completer = NameCompleter()
    for word in re.findall(r"\b[A-Z]{2,}\b", usage.syntax):
        completions = completer.get_completions(Document(word[:-1]), CompleteEvent())
        assert word in [each.text for each in completions]


def test_every_spelling_of_a_statement_is_read_by_its_command() -> None:
    for command in COMMANDS:
        for begin in command.begins:
            text = f"{begin} t {command.action}"
            if command.is_next is None:
                assert next_command(TokenStream(text, tokenize(text + ")" * text.count("(")))) is command


def test_an_unknown_action_of_alter_topic_names_those_that_exist() -> None:
    with pytest.raises(SqlError, match=r"expected ADD SOURCE, DROP SOURCE, SET or SETTLE OUTBOX, found 'SETTEL'"):
        parse("ALTER TOPIC t SETTEL OUTBOX")


def test_a_statement_finds_the_command_that_runs_it() -> None:
    for text, action in (("ALTER TOPIC t SET (cleanup = 'compact')", "SET"), ("ACK t GROUP 'g' UPTO OFFSET 1", "")):
        (statement,) = parse(text)
        assert isinstance(statement, command_of(statement).statement)
        assert command_of(statement).action == action


def test_the_commands_load_no_parser_and_no_engine_of_tables() -> None:
    """A shell through a broker needs the words of all statements, and nothing that runs them."""
    program = (
        "import sys, llog.sql.commands.registry; print(*{'duckdb', 'sqlglot', 'rocksdict'}.intersection(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == ""
