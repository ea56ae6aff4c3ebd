"""`llog sql`: statements from options, files, a pipe or a terminal."""

from __future__ import annotations

import sys

import click

from llog.cli.common import Invocation, note_new_log


@click.command(short_help="Run SQL: tables, topics and consumer groups.")
@click.option(
    "-c", "--command", "commands", multiple=True, metavar="SQL", help="Run these statements and exit; may be repeated."
)
@click.option(
    "-f",
    "--file",
    "files",
    multiple=True,
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Run the statements in this file ('-' for stdin) and exit; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per row.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with a header; NULL is an empty field.")
@click.option("--url", metavar="URL", help="Send the statements to the broker at http://host:port.")
@click.option("--member", metavar="NAME", help="The name of this member in consumer groups. Default: a new name.")
@click.option("-q", "--quiet", is_flag=True, help="Print rows only, no status lines.")
@click.pass_obj
def sql(
    invocation: Invocation,
    commands: tuple[str, ...],
    files: tuple[str, ...],
    as_json: bool,
    as_csv: bool,
    url: str | None,
    member: str | None,
    quiet: bool,
) -> None:
    """Run SQL statements from -c, -f or stdin; on a terminal, start a shell.

    One process at a time can own a log's tables. If a broker owns them, name it with --url; a transaction is then sent
    as one piece, from BEGIN to COMMIT. Execution stops at the first error, which names its line.

    \b
      llog sql
      llog sql -c "CREATE TOPIC app.events" -c "INSERT INTO TOPIC app.events (payload) VALUES ('{}')"
      llog sql --json -c "SELECT * FROM TOPIC app.events" | jq .payload
      llog sql --url http://127.0.0.1:8080 -f schema.sql
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other")
    if commands and files:
        raise click.UsageError("-c and -f exclude each other")
    from llog.cli.sql.run import Source, read, run_scripts
    from llog.client.sessions import open_session

    form = "json" if as_json else "csv" if as_csv else "table"
    is_shell = not commands and not files and sys.stdin.isatty()
    if url is None and not quiet:
        note_new_log(invocation.settings())
    session = open_session(url or invocation.settings(), member=member)
    try:
        if is_shell:
            from llog.cli.sql.shell import run

            run(session, form, where=url or invocation.settings().meta)
            return
        sources = [Source(None, command) for command in commands] or [read(name) for name in files or ("-",)]
        failure = run_scripts(session, sources, form, quiet=quiet)
    finally:
        session.close()
    if failure is not None:
        click.get_current_context().exit(failure.exit_code)
