"""`llog sql`: scripts, formats, errors with their place, and the shell. The database is a stand-in."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from llog.cli.main import main
from llog.cli.sql import output as sql_output
from llog.cli.sql import shell as sql_shell
from llog.cli.sql.output import Format, Output
from llog.cli.sql.script import ScriptStatement, join_transactions, split
from llog.client import embedded
from llog.client.sessions import open_session
from llog.config import Settings
from llog.errors import InvalidArgument, LogOwned, SqlError
from llog.log.log import Log
from llog.sql.parse.lexer import Kind, tokenize
from llog.sql.result import Names
from tests.sql_stand_in import StandIn, StandInSession, standing_in

Llog = Callable[..., Result]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    return standing_in(monkeypatch)


@pytest.fixture
def llog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[StandIn]) -> Llog:
    """The command beside a log that is there already, as far as it looks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llog-data").mkdir()
    (tmp_path / "llog-data" / "meta.sqlite").touch()

    def run(*arguments: str, stdin: str | bytes | None = None, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["sql", *arguments], input=stdin)
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    return run


ROWS = "SELECT * FROM (VALUES (1, 'a'), (22, NULL)) t(id, name)"


def test_commands_run_in_one_session_and_say_what_they_did(llog: Llog) -> None:
    result = llog(
        "-c", "CREATE TABLE t (id INTEGER); INSERT INTO t VALUES (1), (2)", "-c", "SELECT sum(id) AS s FROM t"
    )
    assert result.stdout == "s\n3\n"
    assert result.stderr.splitlines() == ["CREATE", "INSERT 2"]
    assert llog("-q", "-c", "CREATE TABLE t (id INTEGER)").stderr == ""


def test_a_pipe_gets_whole_values_in_columns(llog: Llog) -> None:
    assert llog("-c", ROWS).stdout == "id  name\n 1  a\n22  NULL\n"
    long = "x" * 5000
    assert long in llog("-c", f"SELECT '{long}' AS v").stdout


def test_control_characters_of_a_value_do_not_reach_the_terminal(llog: Llog) -> None:
    assert llog("-c", "SELECT chr(27) || '[2J' || chr(10) || chr(155) AS v").stdout == "v\n\\x1b[2J\\n\\x9b\n"


def test_json_is_an_object_for_each_row(llog: Llog) -> None:
    lines = llog("--json", "-c", ROWS).stdout.splitlines()
    assert [json.loads(line) for line in lines] == [{"id": 1, "name": "a"}, {"id": 22, "name": None}]
    assert json.loads(llog("--json", "-c", "SELECT 1 AS a, 2 AS a").stdout) == {"a": 1, "a_1": 2}
    assert llog("--json", "-c", "SELECT 1 AS a WHERE false").stdout == ""


def test_csv_has_a_header_and_quotes_what_needs_it(llog: Llog) -> None:
    assert llog("--csv", "-c", ROWS).stdout == "id,name\n1,a\n22,\n"
    assert llog("--csv", "-c", "SELECT 'a,\"b' AS v").stdout == 'v\n"a,""b"\n'
    assert llog("--csv", "-c", "SELECT 1 AS v WHERE false").stdout == "v\n"


@pytest.mark.parametrize("arguments", [(), ("-f", "-")])
def test_statements_are_read_from_stdin(llog: Llog, arguments: tuple[str, ...]) -> None:
    assert llog(*arguments, stdin="-- two\nSELECT 1 AS a;\nSELECT 2 AS b").stdout == "a\n1\nb\n2\n"
    assert llog(*arguments, stdin="").stdout == ""


def test_files_run_in_order_and_stop_at_the_first_error_with_its_line(llog: Llog, tmp_path: Path) -> None:
    (tmp_path / "a.sql").write_text("SELECT 1 AS a;")
    (tmp_path / "b.sql").write_text("SELECT 2 AS b;\n\n-- here;\nFAIL 'now';\nSELECT 3 AS c;")
    result = llog("-f", "a.sql", "-f", "b.sql", code=2)
    assert result.stdout == "a\n1\nb\n2\n"
    assert "llog: b.sql, line 4: FAIL 'now'" in result.stderr


def test_what_is_no_text_or_not_there_is_refused(llog: Llog, tmp_path: Path) -> None:
    (tmp_path / "a.sql").write_bytes(b"\xff")
    assert "UTF-8" in llog("-f", "a.sql", code=2).stderr
    assert "nothing.sql" in llog("-f", "nothing.sql", code=2).stderr
    llog("--json", "--csv", "-c", "SELECT 1", code=2)
    llog("-f", "a.sql", "-c", "SELECT 1", code=2)


def test_an_error_shows_where_in_the_file_it_is_and_what_to_do(
    llog: Llog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(self: StandInSession, sql: str, params: Any = ()) -> Any:
        assert sql == "SELECT *\nFORM t"
        raise SqlError("FORM is unexpected", line=2, column=1, hint="write FROM")

    monkeypatch.setattr(StandInSession, "execute", wrong)
    (tmp_path / "a.sql").write_text("\n  SELECT *\nFORM t;")
    assert llog("-f", "a.sql", code=2).stderr.splitlines() == [
        "a.sql:3: FORM t",
        "         ^",
        "llog: a.sql, line 3, column 1: FORM is unexpected (hint: write FROM)",
    ]


def test_what_an_error_shows_itself_is_kept(llog: Llog, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wrong(self: StandInSession, sql: str, params: Any = ()) -> Any:
        raise SqlError("bad", shown="\n  FROM t WHERE x\n               ^")

    monkeypatch.setattr(StandInSession, "execute", wrong)
    assert llog("-c", "SELECT", code=2).stderr == "  FROM t WHERE x\n               ^\nllog: bad\n"


def test_the_column_counts_from_the_beginning_of_the_line_that_the_statement_is_in(
    llog: Llog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(self: StandInSession, sql: str, params: Any = ()) -> Any:
        raise SqlError("bad", line=1, column=8)

    monkeypatch.setattr(StandInSession, "execute", wrong)
    assert llog("-c", "  SELECT ?!", code=2).stderr.splitlines() == [
        "SELECT ?!",
        "       ^",
        "llog: line 1, column 10: bad",
    ]


def test_the_caret_is_under_the_place_also_behind_wide_characters_and_far_to_the_right(
    llog: Llog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(self: StandInSession, sql: str, params: Any = ()) -> Any:
        raise SqlError("bad", line=1, column=sql.index("?!") + 1)

    monkeypatch.setattr(StandInSession, "execute", wrong)
    assert llog("-c", "SELECT '日本' ?!", code=2).stderr.splitlines()[:2] == ["SELECT '日本' ?!", " " * 14 + "^"]
    text, caret = llog("-c", f"SELECT '{'x' * 1000}' ?!", code=2).stderr.splitlines()[:2]
    assert text[caret.index("^") :] == "?!"


def test_a_script_that_ends_in_a_transaction_is_an_error(llog: Llog, opened: list[StandIn]) -> None:
    assert "COMMIT" in llog("-c", "BEGIN; SELECT 1", code=2).stderr
    assert opened[-1].sessions[0].closed
    llog("-c", "BEGIN; SELECT 1", "-c", "COMMIT")


def test_a_log_that_another_process_has_is_told(llog: Llog, monkeypatch: pytest.MonkeyPatch) -> None:
    async def owned(log: Log, settings: Settings) -> StandIn:
        raise LogOwned("open in process 7")

    monkeypatch.setattr(embedded, "open_database", owned)
    assert "process 7" in llog("-c", "SELECT 1", code=1).stderr


# --- statements in text


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        ("", []),
        (" ; ;-- a; b\n/* c; */", []),
        ("SELECT 1", ["SELECT 1"]),
        ("SELECT ';'; SELECT 2;", ["SELECT ';'", "SELECT 2"]),
        ("SELECT 'it''s;' ; x", ["SELECT 'it''s;'", "x"]),
        ('SELECT ";""";x', ['SELECT ";"""', "x"]),
        ("SELECT E'\\';' ; x", ["SELECT E'\\';'", "x"]),
        ("SELECT $$;$$; x", ["SELECT $$;$$", "x"]),
        ("SELECT $a$;$$;$a$; x", ["SELECT $a$;$$;$a$", "x"]),
        ("/* ; /* ; */ ; */ a; b", ["a", "b"]),
        ("SELECT $a + $b; x", ["SELECT $a + $b", "x"]),
        ("a -- ;'\n; b /* ;' */", ["a -- ;'", "b /* ;' */"]),
    ],
)
def test_text_is_split_at_the_semicolons_that_end_statements(text: str, statements: list[str]) -> None:
    script = split(text)
    assert [each.sql for each in [*script.statements, script.rest] if each is not None] == statements


@pytest.mark.parametrize(
    "text", ["SELECT ';", 'SELECT ";', "SELECT /* ;", "/* /* ; */ ;", "SELECT $x$ ; $$", "\n-- a\nSELECT ';\n;"]
)
def test_what_is_not_closed_is_not_the_end_of_a_statement(text: str) -> None:
    script = split(text)
    assert script.statements == []
    assert script.rest is not None


@given(
    st.lists(
        st.sampled_from([";", "'", "''", '"', "$$", "$a$", "--", "/*", "*/", "\n", " ", "a", "1", "E", "\\", "$1", "-"])
    )
)
def test_text_is_split_where_the_grammar_splits_it(parts: list[str]) -> None:
    """What the grammar's tokens cannot be made of is not compared."""
    text = "".join(parts)
    try:
        tokens = tokenize(text)
    except SqlError:
        return
    expected: list[int] = []
    begin: int | None = None
    for token in tokens:
        if token.kind is Kind.END or (token.kind is Kind.SYMBOL and token.value == ";"):
            expected += [] if begin is None else [begin]
            begin = None
        elif begin is None:
            begin = token.start
    script = split(text)
    found = [*script.statements, *([] if script.rest is None else [script.rest])]
    places = [sum(map(len, text.splitlines(keepends=True)[: each.line - 1])) + each.column - 1 for each in found]
    assert places == expected


def test_every_statement_knows_its_place() -> None:
    script = split("a;\n\n  b\nc; d;\n\te")
    assert [(each.sql, each.line, each.column) for each in script.statements] == [
        ("a", 1, 1),
        ("b\nc", 3, 3),
        ("d", 4, 4),
    ]
    assert script.rest == ScriptStatement("e", 5, 2, "E")


def test_a_transaction_is_joined_with_its_lines_kept() -> None:
    script = split("a;\nbegin;\n\nb\nc;\ncommit; d; BEGIN; e;")
    joined, held = join_transactions(script.statements)
    assert [(each.sql, each.line) for each in joined] == [("a", 1), ("begin; \n\nb\nc; \ncommit;", 2), ("d", 6)]
    assert [each.sql for each in held] == ["BEGIN", "e"]


# --- the shell


@pytest.fixture
def shell(tmp_path: Path, opened: list[StandIn]) -> Any:
    session = open_session(Settings(data_dir=str(tmp_path)))
    yield sql_shell.Shell(session, Output(Format.TABLE))
    session.close()


@pytest.mark.parametrize("end", ["\\q\n", "\x04"], ids=["command", "ctrl-d"])
def test_the_shell_takes_lines_until_it_is_left(
    tmp_path: Path, opened: list[StandIn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    session = open_session(Settings(data_dir=str(tmp_path)))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("SELECT 'two\nlines;' AS a;\nBEGIN;\nforgotten\x03SELECT 2 AS b;\n" + end)
        sql_shell.run(session, Format.TABLE, where="here")
    session.close()
    shown = capsys.readouterr()
    assert shown.out == "a\ntwo\\nlines;\nb\n2\n"
    assert "rolled back" in shown.err
    history = (tmp_path / "llog" / "sql_history").read_text()
    assert "+SELECT 'two" in history
    assert "forgotten" not in history


def test_enter_ends_a_statement_only_after_its_semicolon() -> None:
    complete = ["", "  ", "SELECT 1;", "SELECT 1; -- done", "\\d", "SELECT ';';"]
    assert all(sql_shell.is_complete(text) for text in complete)
    assert not any(sql_shell.is_complete(text) for text in ["SELECT 1", "SELECT ';", "SELECT 1 /* ; */", "a; b"])


@pytest.mark.parametrize("word", ["exit", "QUIT", r"\q"])
def test_the_words_that_leave_other_shells_leave_this_one(shell: sql_shell.Shell, word: str) -> None:
    assert sql_shell.is_complete(word)
    assert not shell.take(word)


def test_help_helps(shell: sql_shell.Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert sql_shell.is_complete("help")
    assert shell.take("help")
    assert capsys.readouterr().err == sql_shell.HELP + "\n"


def test_the_shell_goes_on_after_an_error(shell: sql_shell.Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.take("SELECT 1 AS a; FAIL here; SELECT 2 AS b;")
    shown = capsys.readouterr()
    assert shown.out == "a\n1\n"
    assert "invalid_argument: FAIL here" in shown.err
    assert shell.take("SELECT 2 AS b;")
    assert capsys.readouterr().out == "b\n2\n"


def test_the_prompt_tells_of_an_open_transaction(shell: sql_shell.Shell) -> None:
    assert shell.prompt == "llog> "
    shell.take("BEGIN;")
    assert shell.prompt == "llog*> "
    shell.take("COMMIT;")
    assert shell.prompt == "llog> "


def test_an_interrupt_cancels_the_statement_and_not_the_shell(
    shell: sql_shell.Shell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sql_shell, "timed", interrupted)
    assert shell.take("SELECT 1; SELECT 2;")
    assert capsys.readouterr().err == "cancelled\n"


def test_commands_of_the_shell_switch_and_describe(
    shell: sql_shell.Shell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def kept(_: Any, sql: str) -> list[Any]:
        asked.append(sql)
        return []

    monkeypatch.setattr(sql_shell, "timed", kept)
    for line in (r"\d", r"\d chat.messages", r"\dt", r"\dt app.events;", r"\dg", r"\dr"):
        assert shell.take(line)
    assert asked == [
        "SHOW TABLES",
        "DESCRIBE chat.messages",
        "SHOW TOPICS",
        "DESCRIBE TOPIC app.events",
        "SHOW CONSUMER GROUPS",
        "SHOW ROUTES",
    ]
    for line in (r"\timing", r"\timing", r"\x", r"\x", r"\?", r"\nonsense", r"\d a;b"):
        assert shell.take(line)
    said = capsys.readouterr().err
    for each in ("timing is on", "timing is off", "per line is on", "per line is off", r"\nonsense is unknown"):
        assert each in said
    assert len(asked) == 6
    assert not shell.take(r"\q")


def test_one_value_per_line(shell: sql_shell.Shell, capsys: pytest.CaptureFixture[str]) -> None:
    shell.take(r"\x")
    shell.take("SELECT 1 AS a, 'x' AS long;")
    assert capsys.readouterr().out == "-- row 1\na     1\nlong  x\n"


def test_on_a_terminal_long_values_are_cut_and_rows_counted(
    shell: sql_shell.Shell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sql_output, "_ROWS_DRAWN_MAX", 2)
    shell.take("SELECT 7 AS n, repeat('x', 1000) AS v, NULL AS z FROM range(3);")
    shown = capsys.readouterr()
    assert "…" in shown.out
    assert re.search(r"7 .*x+….*NULL", shown.out)
    assert max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in shown.out.splitlines()) <= 60
    assert "1 more rows" in shown.err
    assert "3 rows" in shown.err


@pytest.mark.parametrize(("columns", "is_table"), [("60", False), ("200", True)])
def test_a_table_whose_columns_would_be_cut_to_nothing_is_shown_value_by_value(
    shell: sql_shell.Shell,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
    is_table: bool,
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", columns)
    names = [f"retention_{number}" for number in range(7)]
    shell.take(f"SELECT {', '.join(f'repeat({number}::VARCHAR, 15) AS {name}' for number, name in enumerate(names))};")
    shown = capsys.readouterr().out
    assert "6" * 15 in shown
    assert ("-- row 1" not in shown) == is_table


def _completed(text: str) -> list[str]:
    completer = sql_shell.NameCompleter()
    completer.names = Names({"chat.messages": ("id", "text"), "chat.users": ("email",)}, ("app.events",), ("ai",))
    return [each.text for each in completer.get_completions(Document(text), CompleteEvent())]


def test_names_and_keywords_are_completed_and_text_is_not() -> None:
    assert _completed("SELECT * FROM chat.") == ["chat.messages", "chat.users"]
    assert _completed("CONSUME FROM app") == ["app.events", "appended"]
    assert _completed("CONSUME FROM app.events GROUP 'a") == ["ai"]
    assert _completed("SELECT * FROM chat.users WHERE em") == ["email"]
    assert _completed("SELECT * FROM chat.users WHERE te") == []
    assert _completed("sel") == ["select"]
    assert _completed("SEL") == ["SELECT"]
    assert _completed("SELECT 'app") == []
    assert _completed("\\ti") == ["\\timing"]


def test_the_history_is_for_its_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = tmp_path / "llog" / "sql_history"
    assert isinstance(sql_shell.history(), FileHistory)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    sql_shell.history().append_string("SELECT 'secret'")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "secret" in path.read_text()


def test_without_a_place_for_history_the_shell_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert not isinstance(sql_shell.history(), FileHistory)
    assert "the history is not saved" in capsys.readouterr().err


def test_a_transaction_for_a_broker_is_sent_when_it_is_whole() -> None:
    sent: list[str] = []

    class Remote:
        is_remote = True
        in_transaction = False

        def execute(self, sql: str, params: Any = ()) -> list[Any]:
            sent.append(sql)
            return []

        def names(self) -> Names:
            raise InvalidArgument("none")

    shell = sql_shell.Shell(Remote(), Output(Format.TABLE))  # type: ignore[arg-type]
    shell.take("BEGIN; INSERT INTO t VALUES (1);")
    assert sent == []
    assert shell.prompt == "llog*> "
    shell.take("COMMIT; SELECT 1;")
    assert [each.split(";")[0] for each in sent] == ["BEGIN", "SELECT 1"]
    assert "COMMIT" in sent[0]
    shell.take("BEGIN;")
    shell.forget()
    assert shell.prompt == "llog> "
