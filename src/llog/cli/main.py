"""The command `llog`: its top-level options, and how errors become one line and an exit code.

A new command is one line in `COMMANDS`; its module is imported when the command is used or listed.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from llog.cli.common import Invocation
from llog.errors import EXIT_FAILURE, LlogError

COMMANDS: Final = {
    "up": "llog.cli.up:up",
    "serve": "llog.cli.serve:serve",
    "compactor": "llog.cli.compactor:compactor",
    "topics": "llog.cli.topics:topics",
    "produce": "llog.cli.produce:produce",
    "consume": "llog.cli.consume.command:consume",
    "groups": "llog.cli.groups:groups",
    "sql": "llog.cli.sql.command:sql",
    "keyed": "llog.cli.keyed.command:keyed",
    "inspect": "llog.cli.inspect:inspect",
    "compact": "llog.cli.upkeep:compact",
    "retain": "llog.cli.upkeep:retain",
    "collect": "llog.cli.upkeep:collect",
    "verify": "llog.cli.verify:verify",
    "check-history": "llog.cli.check_history:check_history",
    "repair": "llog.cli.repair.command:repair",
    "pipeline": "llog.cli.pipeline.command:pipeline",
    "doctor": "llog.cli.doctor:doctor",
    "cost": "llog.cli.cost:cost",
    "demo": "llog.cli.demo:demo",
    "simulate": "llog.cli.simulate:simulate",
}

EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141


class Commands(click.Group):
    """The group of all commands: it imports a command on first use, and reports its errors in one line each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except LlogError as error:
            click.echo(f"llog: {' '.join(str(error).split())}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # The reader of the output has closed it. The interpreter flushes stdout once more when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(EXIT_BROKEN_PIPE)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            click.echo(f"llog: the output could not be written: {error.strerror}", err=True)
            ctx.exit(EXIT_FAILURE)
        return result


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="leaderless-log", prog_name="llog")
@click.option("--data-dir", metavar="DIR", help="The directory of a local log (LLOG_DATA_DIR).  [default: ./llog-data]")
@click.option(
    "--meta",
    metavar="URL",
    help="The metadata store, e.g. sqlite:///path, postgresql://user@host/database or oxia://host:port/namespace "
    "(LLOG_META).",
)
@click.option(
    "--blobs", metavar="URL", help="The blob store, e.g. s3://bucket/prefix or file:///var/llog/blobs (LLOG_BLOBS)."
)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A TOML file with settings (LLOG_CONFIG).  [default: ./llog.toml, if it exists]",
)
@click.pass_context
def main(ctx: click.Context, data_dir: str | None, meta: str | None, blobs: str | None, config: Path | None) -> None:
    """A diskless, leaderless event log.

    Record bytes live in object storage, their order in a small key-value store. Without any settings, the log is in
    ./llog-data: a SQLite file and a directory of blobs. Options take precedence over the environment (LLOG_…), and the
    environment over the TOML file.

    \b
      llog up
      llog topics create orders --partitions 3
      printf 'k1:first\\nk2:second\\n' | llog produce orders --key-separator :
      llog consume orders --format json

    Exit codes: 0 success; 1 something failed, or damage was found; 2 bad input or configuration; 3 `verify` or
    `check-history` found nothing wrong but could not check everything; 130 interrupted.
    """
    ctx.obj = Invocation({"data_dir": data_dir, "meta": meta, "blobs": blobs}, config)


if __name__ == "__main__":
    main()
