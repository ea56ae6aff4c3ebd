"""The data source on Sparks of all kinds, with the package reaching the executors in both ways, and tasks that are
retried.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import pyspark
import pytest

import llog
from devtools.servers.postgres import PostgresServer
from llog.spark.java import java_home
from tests.spark.logs import LogOnDisk
from tests.spark.roundtrip_job import ROWS

JOB = Path(__file__).with_name("roundtrip_job.py")
SPARK_HOME = Path(pyspark.__file__).parent
LIMIT_S = 480


def environment(python: str, **more: str) -> dict[str, str]:
    names = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPARK", "LLOG"))}
    spark = {"SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1", "JAVA_HOME": str(java_home())}
    spark["JDK_JAVA_OPTIONS"] = os.environ["SPARK_SUBMIT_OPTS"]  # reaches masters, workers and executors, too
    return {**names, **spark, "PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python, **more}


def submit(
    log: LogOnDisk, directory: Path, master: str, *options: str, python: str = sys.executable, **more: str
) -> list[str]:
    """Runs the job; returns where the driver and an executor had the package from."""
    command: list[str | Path] = [
        SPARK_HOME / "bin" / "spark-submit",
        "--master",
        master,
        "--conf",
        "spark.driver.bindAddress=127.0.0.1",
    ]
    command += ["--conf", "spark.driver.host=127.0.0.1", *options, JOB]
    run = subprocess.run(
        [*command, log.options["blobs"], directory, *(f"{name}={value}" for name, value in log.environment.items())],
        env=environment(python, **more),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert run.returncode == 0, run.stderr[-20000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["numbers"] == list(range(ROWS))
    assert found["master"] == master
    homes: list[str] = found["homes"]
    return homes


def check_topics(log: LogOnDisk) -> None:
    """Nothing of the attempts that were lost is in the log, though all of them uploaded."""
    for topic, partitions in (("a", 3), ("b", 2)):
        assert sorted(int(payload.rstrip("x")) for payload in log.payloads(topic, partitions)) == list(range(ROWS))
        assert log.problems(topic, partitions) == []


@pytest.mark.parametrize("master", ["local[2,3]", "local-cluster[2,1,1024]"])
def test_it_works_within_one_command_and_retried_tasks_write_once(tmp_path: Path, master: str) -> None:
    log = LogOnDisk(tmp_path)
    homes = submit(log, tmp_path, master)
    assert homes == [llog.__file__] * 2
    check_topics(log)


def test_executors_get_the_way_into_postgresql_from_the_driver(tmp_path: Path, postgres: PostgresServer) -> None:
    log = LogOnDisk(tmp_path, postgres.environment(f"s_{uuid4().hex}"))
    submit(log, tmp_path, "local[2,3]")
    check_topics(log)


@contextmanager
def daemon(tmp_path: Path, kind: str, *arguments: str) -> Iterator[None]:
    with open(tmp_path / f"{kind}.log", "ab") as output:
        process = subprocess.Popen(
            [SPARK_HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{kind}", *arguments],
            env=environment(sys.executable),
            cwd=tmp_path,
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def python_without_llog(directory: Path) -> str:
    """An interpreter that has every package of this one, but not this project."""
    venv.create(directory, with_pip=False, symlinks=True)
    packages = next((directory / "lib").glob("python3*/site-packages"))
    # A path that a .pth file adds has no .pth files of its own read, which is how this project is installed here.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = str(directory / "bin" / "python")
    absent = subprocess.run([python, "-c", "import pyspark, obstore, llog"], capture_output=True, text=True)
    assert "No module named 'llog'" in absent.stderr
    return python


def test_it_works_on_a_standalone_cluster_that_gets_the_package_with_the_job(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    master = f"spark://127.0.0.1:{port}"
    python = python_without_llog(tmp_path / "venv")
    package = shutil.make_archive(str(tmp_path / "llog"), "zip", Path(llog.__file__).parents[1], "llog")
    log = LogOnDisk(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(
            daemon(tmp_path, "master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
        )
        for name in ("one", "two"):
            limits = ("--cores", "1", "--memory", "1g", "--webui-port", "0", "--work-dir", str(tmp_path / name))
            stack.enter_context(daemon(tmp_path, "worker.Worker", "--host", "127.0.0.1", *limits, master))
        # Spark gives --py-files to executors and to batch reads, but not to the process that a stream's source runs in.
        homes = submit(log, tmp_path, master, "--py-files", package, python=python, PYTHONPATH=package)
        assert all("llog.zip" in home for home in homes)
        assert all(any((tmp_path / name).glob("app-*/*")) for name in ("one", "two"))  # both had executors
    check_topics(log)
