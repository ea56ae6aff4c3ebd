"""What `deploy/` has is true: settings that exist, rules and expressions that a real Prometheus evaluates."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from devtools.servers.downloads import UnobtainableError
from devtools.servers.prometheus import prometheus_program
from devtools.servers.weed import ServerError
from devtools.topology import DEPLOY, ROOT, Topology, topology
from llog.cli.main import COMMANDS
from llog.config import SETTINGS
from tests.conftest import unavailable

LIMIT_S = 300
TOPIC = "orders"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/llog.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"][0]["rules"]
PANELS = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
FILES = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and path.suffix != ".json"]


def _promtool() -> str:
    try:
        return prometheus_program("promtool")
    except UnobtainableError as error:
        pytest.skip(f"promtool is not on PATH, and Debian's package cannot be had: {error}")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """One broker, a compactor and a Prometheus that scrapes them every second."""
    _promtool()
    settings = {
        "LLOG_BATCH_MAX_DELAY_MS": "50",
        "LLOG_COMPACTOR_IDLE_SLEEP_MS": "200",
        "LLOG_COMPACTOR_DISCOVERY_INTERVAL_MS": "200",
        "LLOG_GROUP_LAG_INTERVAL_MS": "500",
    }
    directory = tmp_path_factory.mktemp("deploy")
    try:
        with topology(directory, brokers=1, metadata="sqlite", scrape_interval_s=1, settings=settings) as found:
            yield found
    except ServerError as error:
        unavailable(str(error))


def _load(broker: httpx.Client) -> None:
    """Do something of everything that the dashboard shows."""
    for size in (10, 40_000):
        item = {"topic": TOPIC, "partition": 0, "records": ["x" * size]}
        assert broker.post("/produce", json={"topic_partitions": [item]}).status_code == 200
    for topic in (TOPIC, "missing"):
        broker.post("/consume", json={"topic_partitions": [{"topic": topic, "partition": 0, "fetch_offset": 1}]})
    broker.post("/topics/consume", json={"topic": TOPIC, "group_id": "g", "start": "Earliest"})
    broker.post("/consume", content=b"{", headers={"content-type": "application/json"})


def _query(prometheus: httpx.Client, expression: str) -> list[Any]:
    asked = expression.replace("$__rate_interval", "30s").replace("$instance", ".*")
    assert "$" not in asked, f"{asked} has a variable that nobody replaces"
    answer = prometheus.get("/api/v1/query", params={"query": asked}).json()
    assert answer["status"] == "success", (asked, answer)
    found: list[Any] = answer["data"]["result"]
    return found


def test_every_panel_of_the_dashboard_has_data(running: Topology) -> None:
    assert running.prometheus is not None
    deadline = time.monotonic() + LIMIT_S
    left = PANELS
    with (
        httpx.Client(base_url=running.brokers[0], timeout=LIMIT_S) as broker,
        httpx.Client(base_url=running.prometheus, timeout=LIMIT_S) as prometheus,
    ):
        while left:
            _load(broker)
            left = [(title, expression) for title, expression in left if not _query(prometheus, expression)]
            assert time.monotonic() < deadline, f"no data: {left}"
            time.sleep(0.2)


def test_every_alert_is_evaluated_and_nothing_fires_on_a_sound_log(running: Topology) -> None:
    assert running.prometheus is not None
    with httpx.Client(base_url=running.prometheus, timeout=LIMIT_S) as prometheus:
        for rule in RULES:
            _query(prometheus, rule["expr"])
        loaded = prometheus.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
        assert [rule["name"] for rule in loaded] == [rule["alert"] for rule in RULES]
        assert [rule["name"] for rule in loaded if rule["state"] == "firing"] == []


def test_a_compactor_has_a_bill_of_its_own_requests(running: Topology) -> None:
    deadline = time.monotonic() + LIMIT_S
    with (
        httpx.Client(base_url=running.brokers[0], timeout=LIMIT_S) as broker,
        httpx.Client(base_url=running.compactor, timeout=LIMIT_S) as compactor,
    ):
        while True:
            _load(broker)
            billing = compactor.get("/metrics").json()["s3"]["billing"]
            if billing["objects"] is not None and billing["requests"]["put"] and billing["request_cost"]:
                break
            assert time.monotonic() < deadline, billing
            time.sleep(0.2)


def test_the_script_runs_everything_and_ends_it(tmp_path: Path) -> None:
    command = [str(ROOT / "quick_run.sh"), "--brokers", "1", "--metadata", "sqlite", "--directory", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        lines = []
        for line in script.stdout:
            lines.append(line)
            if "end it with" in line:
                break
        shown = "".join(lines)
        broker = re.findall(r"broker +(http://\S+)", shown)
        if not broker:
            unavailable(f"quick_run.sh ended: {shown}")
        try:
            assert httpx.get(f"{broker[0]}/ready", timeout=LIMIT_S).status_code == 200
            assert re.search(r"Kafka +bootstrap.servers=127.0.0.1:\d+", shown)
        finally:
            script.send_signal(signal.SIGINT)
        assert script.wait(LIMIT_S) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{broker[0]}/ready", timeout=LIMIT_S)


def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    for command in (["check", "rules", "rules.yml"], ["check", "config", "prometheus.yml"]):
        done = subprocess.run(
            [_promtool(), *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_setting_that_is_named_exists(path: Path) -> None:
    named = set(re.findall(r"\bLLOG_[A-Z0-9_]+\b", path.read_text()))
    assert named <= {setting.variable for setting in SETTINGS.values()}


def test_containers_and_units_run_commands_that_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    commands = [service["command"] for service in compose.values() if service.get("image") == "llog:local"]
    manifests = list(yaml.safe_load_all((DEPLOY / "kubernetes/llog.yaml").read_text()))
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            commands += manifest["spec"]["template"]["spec"]["containers"][0]["args"]
    for unit in (DEPLOY / "systemd").glob("*.service"):
        commands += re.findall(r"^ExecStart=/opt/llog/bin/llog (\w+)$", unit.read_text(), re.M)
    assert len(commands) == 4 + 2 + 2
    assert set(commands) <= COMMANDS.keys()


def test_the_compose_file_mounts_and_scrapes_what_exists() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).is_dir()
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
    groups = json.loads((DEPLOY / "prometheus/targets/compose.json").read_text())
    hosts = {target.partition(":")[0] for group in groups for target in group["targets"]}
    assert hosts <= compose["services"].keys()


def test_the_image_is_made_of_files_that_exist() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    sources = [source for line in copied for source in line.split()[:-1]]
    assert sources
    assert all((ROOT / source).exists() for source in sources)
