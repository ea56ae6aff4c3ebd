"""All statements, for the parser, the session, the shell and docs/sql.md."""

from __future__ import annotations

import re
from typing import Final

from llog.sql.commands import groups, insert_topic, outbox, show, sources, tables, topics, transactions
from llog.sql.commands.command import Command
from llog.sql.parse.statements import Statement
from llog.sql.parse.token_stream import TokenStream

COMMANDS: Final[tuple[Command, ...]] = (
    *transactions.COMMANDS,
    *topics.COMMANDS,
    *sources.COMMANDS,
    *outbox.COMMANDS,
    *insert_topic.COMMANDS,  # before the tables', for both begin with INSERT
    *tables.COMMANDS,
    *show.COMMANDS,
    *groups.COMMANDS,
)
FIRST_WORDS: Final = tuple(dict.fromkeys(begin.split()[0] for each in COMMANDS for begin in each.begins))
_BY_STATEMENT: Final = {command.statement: command for command in COMMANDS}
_BY_FIRST_WORD: Final = {
    word: [(begin.split(), command) for command in COMMANDS for begin in command.begins if begin.split()[0] == word]
    for word in FIRST_WORDS
}


def command_of(statement: Statement) -> Command:
    """Return the command that parsed this statement."""
    return _BY_STATEMENT[type(statement)]


def next_command(stream: TokenStream) -> Command | None:
    """Return the command of the statement at the stream's position, or None. The position does not move."""
    found = [
        command
        for words, command in _BY_FIRST_WORD.get(stream.token.upper, ())
        if all(stream.ahead(number).upper == word for number, word in enumerate(words))
        and (command.is_next is None or command.is_next(stream))
    ]
    if not found:
        return None
    return _by_action(stream, found) if found[0].action else found[0]


def second_words(first: str) -> list[str]:
    """Return the words that may follow a first word which is not enough by itself: TABLE and TOPIC after CREATE."""
    return sorted({words[1] for words, _ in _BY_FIRST_WORD.get(first, ()) if len(words) > 1})


def keywords() -> set[str]:
    """Return the keywords of all statements, in capitals."""
    return {
        word for command in COMMANDS for usage in command.usages for word in re.findall(r"\b[A-Z]{2,}\b", usage.syntax)
    } | set(tables.KEYWORDS)


def _by_action(stream: TokenStream, commands: list[Command]) -> Command:
    """Return the ALTER TOPIC command whose action follows the topic's name."""
    begin = stream.at
    stream.expect("ALTER", "TOPIC")
    stream.topic()
    actions = {command.action.split()[0]: command for command in commands}
    command = actions.get(stream.token.upper)
    if command is None:
        *most, last = sorted(each.action for each in commands)
        raise stream.expected(f"{', '.join(most)} or {last}", tuple(actions))
    stream.at = begin
    return command
