"""The two locks: what `make up` installs is a part of what `make test` installs, and no more than running needs."""

from __future__ import annotations

import re
import tomllib

from devtools.suites import ROOT


def _pins(lock: str) -> set[str]:
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    return {line for line in lines if line and not line.startswith((" ", "#"))}


def _names(requirements: set[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}


def test_an_environment_for_running_grows_into_one_for_testing_without_another_version_of_anything() -> None:
    assert _pins("runtime.lock") < _pins("dev.lock")


def test_running_installs_the_broker_and_the_stores_and_neither_spark_nor_test_tools() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {extra: _names(set(needed)) for extra, needed in project["optional-dependencies"].items()}
    running = _names(_pins("runtime.lock"))
    needed = set.union(*(extras[extra] for extra in ("broker", "keyed", "oxia", "postgres", "sql")))
    assert needed | _names(set(project["dependencies"])) <= running
    assert not (extras["spark"] | extras["dev"]) & running
