"""Builds Spark sessions with the settings that all jobs of llog need."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from llog.config import Settings
from llog.spark import register
from llog.spark.java import java_home

_LOOPBACK_MASTER = re.compile(r"local(-cluster)?(\[.*\])?$|spark://(127\.0\.0\.1|localhost)(:\d+)?$")
_HANG_UPS = ("BrokenPipeError", "ConnectionResetError")
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
# Starts in two thirds of the time, but hot code never reaches the optimising compiler: for tests and short runs.
_FAST_START = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


def spark_session(
    app_name: str,
    *,
    master: str = "local[*]",
    conf: Mapping[str, str] | None = None,
    fast_start: bool = False,
    settings: Settings | None = None,
) -> SparkSession:
    """Return a session in which the `llog` data sources are registered with these settings.

    A session that is already running is returned, with `conf` set. Values in `conf` take precedence over those that
    llog sets, except that `spark.driver.extraJavaOptions` is added to them. Under spark-submit, its master takes
    precedence over `master`. The session is stopped when the process ends.
    """
    if SparkContext._active_spark_context is not None:
        return _register(_builder(conf or {}).getOrCreate(), settings)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if submitted:
        SparkContext._ensure_initialized()  # connects to the JVM, which has the options of spark-submit
        master = SparkConf().get("spark.master", master)
    local = _LOOPBACK_MASTER.match(master) is not None
    chosen = {"spark.app.name": app_name, "spark.master": master, **_defaults(local), **(conf or {})}
    environment = {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable)}
    if local:
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    if not submitted:
        environment["JAVA_HOME"] = str(java_home())
        log4j2 = Path(__file__).with_name("log4j2.properties").as_uri()
        options = [
            f"-Dlog4j2.configurationFile={log4j2}",
            _FAST_START if fast_start else "",
            chosen.get(_JAVA_OPTIONS),
        ]
        chosen[_JAVA_OPTIONS] = " ".join(filter(None, options))
    if "spark.sql.warehouse.dir" not in chosen:
        chosen["spark.sql.warehouse.dir"] = _scratch_directory()
    with _environment(environment):
        if SparkContext._gateway is None:
            _launch(chosen)
        session = _builder(chosen).getOrCreate()
    atexit.register(_stop, session)
    return _register(session, settings)


def _stop(session: SparkSession) -> None:
    """Stop the session, even if its JVM has already ended: a signal to a process group ends both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that the JVM could not be shut down cleanly
        try:
            session.stop()
        except (Py4JError, OSError):
            SparkSession._instantiatedSession = None


def _builder(settings: Mapping[str, str]) -> SparkSession.Builder:
    builder = SparkSession.Builder()
    for key, value in settings.items():
        builder.config(key, value)
    return builder


def _launch(settings: Mapping[str, str]) -> None:
    """Start the JVM as Spark would, with its stderr passed through `_forward`."""
    read, write = os.pipe()
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    threading.Thread(target=_forward, args=(read,), name="spark-stderr", daemon=True).start()
    with open(write, "wb") as stderr:
        gateway = launch_gateway(conf, popen_kwargs={"stderr": stderr})
    SparkContext._ensure_initialized(gateway=gateway)


def _forward(read: int) -> None:
    """Pass on what Spark prints, except the stack traces of workers that it dropped after an idle minute."""
    trace: list[str] = []
    with open(read, errors="replace") as lines:
        for line in lines:
            if not trace and not line.startswith("Traceback "):
                sys.stderr.write(line)
                continue
            trace.append(line)
            if line.startswith(("Traceback ", "  ")):
                continue
            if not _is_hang_up(trace):
                sys.stderr.writelines(trace)
            trace = []


def _is_hang_up(trace: list[str]) -> bool:
    frames = [line for line in trace if line.startswith("  File ")]
    return trace[-1].startswith(_HANG_UPS) and all("pyspark/daemon.py" in frame for frame in frames)


def _defaults(local: bool) -> dict[str, str]:
    settings = {
        "spark.python.authenticate.socketTimeout": "120s",  # for machines that are busier than the default's 15 s allow
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.scheduler.mode": "FAIR",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if local:
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    return settings


def _register(session: SparkSession, settings: Settings | None) -> SparkSession:
    register(session, settings)
    return session


def _scratch_directory() -> str:
    """Return a temporary directory for tables without a path; otherwise Spark would create one in the current one."""
    directory = tempfile.mkdtemp(prefix="llog-spark-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables while Spark starts, which is when it reads them, and restore the caller's environment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
