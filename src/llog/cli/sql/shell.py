"""The shell of `llog sql`: a prompt with history and completion. A statement ends with a semicolon."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Final

from llog.cli.common import note
from llog.cli.sql.output import Format, Output, message_of, show_place
from llog.cli.sql.run import timed
from llog.cli.sql.script import ScriptStatement, join_transactions, split
from llog.client.sessions import SqlSession
from llog.errors import LlogError, MissingExtra
from llog.sql.commands.registry import COMMANDS, keywords
from llog.sql.result import Names

try:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.lexers import Lexer, PygmentsLexer
except ImportError as error:
    raise MissingExtra(f"the shell needs {error.name}: pip install 'leaderless-log[sql]'") from error

HELP: Final = r"""A statement ends with ; and may span several lines. Ctrl-C cancels it, Ctrl-D quits.
  \d          list tables           \timing  show how long statements take, on or off
  \d NAME     describe a table      \x       show one value per line, on or off
  \dt         list topics           \?       show this help
  \dt NAME    describe a topic      \q       quit
  \dg         list consumer groups
  \dr         list routes"""
_SHOWS: Final = {
    r"\d": "SHOW TABLES",
    r"\dt": "SHOW TOPICS",
    r"\dg": "SHOW CONSUMER GROUPS",
    r"\dr": "SHOW ROUTES",
}
_DESCRIBES: Final = {r"\d": "DESCRIBE", r"\dt": "DESCRIBE TOPIC"}
_QUIT_WORDS: Final = ("exit", "quit")
_HELP_WORD: Final = "help"
_NAME: Final = re.compile(r'[\w."-]+')
_KEYWORDS: Final = keywords()
_NAME_CHANGES: Final = frozenset(
    begin.split()[0] for command in COMMANDS if command.changes_names for begin in command.begins
)
"""First words of statements that may change the names to complete."""


def run(session: SqlSession, form: str, *, where: str) -> None:
    """Run statements until Ctrl-D or `\\q`. An error is shown and does not end the shell."""
    names = session.names()
    shell = Shell(session, Output(Format(form), timing=True))
    shell.completer.names = names
    prompt: PromptSession[str] = PromptSession(
        history=history(),
        completer=shell.completer,
        complete_while_typing=False,
        lexer=_lexer(),
        multiline=Condition(lambda: not is_complete(get_app().current_buffer.text)),
        prompt_continuation="   -> ",
        enable_open_in_editor=True,
    )
    note(rf"llog, SQL on {where}. \? for help, \q to quit.")
    while True:
        try:
            line = prompt.prompt(shell.prompt)
        except KeyboardInterrupt:
            shell.forget()
            continue
        except EOFError:
            break
        if not shell.take(line):
            break
    if session.in_transaction:
        note("the open transaction is rolled back")


class Shell:
    """Runs the lines that a person enters."""

    def __init__(self, session: SqlSession, output: Output) -> None:
        self.completer = NameCompleter()
        self._session = session
        self._output = output
        self._form = output.form
        self._held: list[ScriptStatement] = []
        """The statements of an unfinished transaction for a broker, which are sent together with its end."""

    @property
    def prompt(self) -> str:
        return "llog*> " if self._held or self._session.in_transaction else "llog> "

    def forget(self) -> None:
        if self._held:
            note("the transaction was discarded; nothing of it was sent")
            self._held = []

    def take(self, text: str) -> bool:
        """Run a line, and return whether the shell goes on."""
        if _is_meta(text):
            return self._meta(text.split())
        script = split(text)
        statements = [*script.statements, *([] if script.rest is None else [script.rest])]
        if self._session.is_remote:
            statements, self._held = join_transactions([*self._held, *statements])
        for statement in statements:
            if not self._run(statement):
                break
        if any(statement.word in _NAME_CHANGES for statement in statements):
            self._refresh()
        return True

    def _meta(self, words: list[str]) -> bool:
        command, names = words[0], words[1:]
        if command.lower() in (r"\q", r"\quit", *_QUIT_WORDS):
            return False
        if command == r"\timing":
            self._output.timing = not self._output.timing
            note(f"timing is {'on' if self._output.timing else 'off'}")
        elif command == r"\x":
            is_expanded = self._output.form is Format.EXPANDED
            self._output.form = self._form if is_expanded else Format.EXPANDED
            note(f"one value per line is {'off' if is_expanded else 'on'}")
        elif command in _DESCRIBES and len(names) == 1 and _NAME.fullmatch(names[0].rstrip(";")):
            self._run(ScriptStatement(f"{_DESCRIBES[command]} {names[0].rstrip(';')}", 1, 1, "DESCRIBE"))
        elif command in _SHOWS and not names:
            self._run(ScriptStatement(_SHOWS[command], 1, 1, "SHOW"))
        else:
            note(
                HELP
                if command.lower() in (r"\?", _HELP_WORD)
                else f"{' '.join(words)} is unknown or incomplete.\n{HELP}"
            )
        return True

    def _run(self, statement: ScriptStatement) -> bool:
        """Run a statement, and return whether it succeeded."""
        try:
            for result, ms in timed(self._session, statement.sql):
                self._output.show(result, ms)
        except KeyboardInterrupt:
            note("cancelled")
        except LlogError as error:
            show_place(error, statement, None)
            note(f"{error.code}: {message_of(error)}")
        else:
            return True
        return False

    def _refresh(self) -> None:
        try:
            self.completer.names = self._session.names()
        except LlogError:
            pass  # only the names to complete are out of date


def is_complete(text: str) -> bool:
    """Whether Enter ends the input: after a semicolon, after a command of the shell, and if the input is empty."""
    return not text.strip() or _is_meta(text) or split(text).rest is None


def _is_meta(text: str) -> bool:
    """Whether the text is a command of the shell, or a word that people try in every shell."""
    return text.lstrip().startswith("\\") or text.strip().lower() in (*_QUIT_WORDS, _HELP_WORD)


class NameCompleter(Completer):
    """Completes keywords, tables, topics, columns of the tables that the text names, and groups within quotes."""

    def __init__(self) -> None:
        self.names = Names({}, (), ())

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        before = document.text_before_cursor
        match = re.search(r"(?:\bGROUP\s+)?'?[\w.\\-]*\Z", before, re.IGNORECASE)
        typed = re.search(r"[\w.\\-]*\Z", before)
        assert match is not None
        assert typed is not None
        word = typed.group()
        if re.match(r"GROUP\s+'", match.group(), re.IGNORECASE):
            found: Iterable[str] = self.names.groups
        elif re.search(r"'[^']*\Z", before) and before.count("'") % 2:
            found = ()
        else:
            found = self._words(document.text, word)
        for each in sorted({name for name in found if name.lower().startswith(word.lower())}):
            yield Completion(each, start_position=-len(word))

    def _words(self, text: str, word: str) -> Iterable[str]:
        if word.startswith("\\"):
            yield from (*_SHOWS, r"\timing", r"\x", r"\?", r"\q")
            return
        yield from self.names.tables
        yield from self.names.topics
        named = [table for table in self.names.tables if re.search(rf"{re.escape(table)}\b", text, re.IGNORECASE)]
        for table in named or self.names.tables:
            yield from self.names.tables[table]
        if word:
            yield from (each if word.isupper() or not word.islower() else each.lower() for each in _KEYWORDS)


def history() -> History:
    """Return a history in a file that only its user can read, since statements may contain secrets.

    If that file cannot be written, the history is kept in memory.
    """
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    path = Path(base, "llog", "sql_history")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        note(f"llog: the history is not saved: {path} cannot be written ({error.strerror})")
        return InMemoryHistory()
    return FileHistory(str(path))


def _lexer() -> Lexer | None:
    try:
        return PygmentsLexer(import_module("pygments.lexers.sql").SqlLexer)
    except ImportError:
        return None
