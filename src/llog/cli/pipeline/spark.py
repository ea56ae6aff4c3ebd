"""What the commands on Spark share: the options `--master` and `--conf`, and opening a session."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, TypeVar

import click

from llog.errors import ConfigurationError, LlogError, MissingExtra, SparkFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from llog.config import Settings

F = TypeVar("F", bound=Callable[..., object])

SPARK_INSTALLATION: Final = 'pip install "leaderless-log[spark]", or make setup in a clone'
_MASTER: Final = re.compile(
    r"local(\[(\*|[1-9]\d*)(,\d+)?\])?|local-cluster\[\d+,\d+,\d+\]|spark://[^\s/]+:\d+(,[^\s/]+:\d+)*|yarn|k8s://\S+"
)


def spark_options(command: F) -> F:
    """Add the options `--master` and `--conf`, as of spark-submit."""
    conf = click.option(
        "--conf",
        metavar="KEY=VALUE",
        multiple=True,
        help="A setting of Spark, e.g. spark.driver.memory=4g; repeatable.",
    )
    master = click.option(
        "--master",
        default="local[*]",
        show_default=True,
        help="Where Spark runs: local[N], spark://host:port, yarn or k8s://…",
    )
    return master(conf(command))


def require_spark() -> None:
    """Raise `MissingExtra` unless Spark is installed."""
    if find_spec("pyspark") is None:
        raise MissingExtra(f"the pipeline runs on Spark, which is not installed: {SPARK_INSTALLATION}")


def open_session(app_name: str, master: str, conf: Sequence[str], settings: Settings) -> SparkSession:
    """Return a session for the log that the settings name.

    Raises `ConfigurationError` for malformed options, and `SparkFailed` if Spark does not start.
    """
    parsed = _parse_conf(conf)
    if not _MASTER.fullmatch(master):
        raise ConfigurationError(
            f"--master is {master!r}: it must be local, local[N], local[*], spark://host:port, yarn or k8s://…"
        )
    require_spark()
    from llog.spark.jobs.tasks import in_one_line
    from llog.spark.session import spark_session

    try:
        return spark_session(app_name, master=master, conf=parsed, settings=settings)
    except LlogError:
        raise
    except Exception as error:
        given = " ".join(["--master", master, *(f"--conf {each}" for each in conf)])
        raise SparkFailed(f"Spark did not start with {given}: {in_one_line(error)}") from error


def _parse_conf(conf: Sequence[str]) -> dict[str, str]:
    settings = {}
    for each in conf:
        key, separator, value = each.partition("=")
        if not separator or not re.fullmatch(r"spark\.\S+", key):
            raise ConfigurationError(f"--conf is {each!r}: write it like spark.driver.memory=4g")
        settings[key] = value
    return settings
