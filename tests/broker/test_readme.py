"""Every block of README's five minutes works as it stands, in its order, beside a running `llog up`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from devtools.servers.listening import free_ports
from tests.broker.pages import ROOT, blocks, run
from tests.broker.test_process import running
from tests.conftest import unavailable


def test_every_block_of_the_five_minutes_works_beside_a_running_broker(tmp_path: Path) -> None:
    if find_spec("pyspark") is None:
        unavailable("Spark is not installed")
    text = (ROOT / "README.md").read_text()
    shown: dict[str, str] = {}
    (port,) = free_ports(1)
    text = text.replace("127.0.0.1:9092", f"127.0.0.1:{port}")
    with running(tmp_path, "up", environment={"LLOG_KAFKA_PORT": str(port)}) as server:
        address = str(server.client.base_url).rstrip("/")
        for block in blocks(text[text.index("## Five minutes") : text.index("## What it is not")]):
            output = run(block, address, tmp_path)
            assert '"error"' not in output, block.heading
            shown[block.heading] = shown.get(block.heading, "") + output
        assert server.end() == 0
    assert all(word in shown["With curl"] for word in ("hello", "world"))
    assert "[b'hello', b'world', b'from Python']" in shown["With Python"]
    assert '"body":"hello"' in shown["With SQL"], shown["With SQL"]
    assert "'body': 'hello'" in shown["With SQL"], shown["With SQL"]
    assert "from Python" in shown["With Spark"]
    assert "b'hello'" in shown["With Kafka clients"]
    assert "b'from Kafka'" in shown["With Kafka clients"]
    assert "first" in shown["The command line"]
