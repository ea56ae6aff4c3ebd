"""Every block of README's five minutes works as it stands, in its order, beside a running `llog up`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.broker.test_process import LIMIT_S, running
from tests.conftest import unavailable

README = Path(__file__).parents[2] / "README.md"
ADDRESS = "http://127.0.0.1:8080"
_HEADING_OR_BLOCK = re.compile(r"^#{2,3} ([^\n]+)$|^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str, str]]:
    """The heading, the language and the text of each block that a reader pastes while `make up` runs."""
    text = README.read_text()
    found, heading = [], ""
    for match in _HEADING_OR_BLOCK.finditer(text[text.index("## Five minutes") : text.index("## What it is not")]):
        heading = match[1] or heading
        if match[2]:
            found.append((heading, match[2], match[3]))
    return found


def test_every_block_of_the_five_minutes_works_beside_a_running_broker(tmp_path: Path) -> None:
    if find_spec("pyspark") is None:
        unavailable("Spark is not installed")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shown: dict[str, str] = {}
    with running(tmp_path, "up") as server:
        address = str(server.client.base_url).rstrip("/")
        for heading, language, text in blocks():
            command = ["sh", "-e"] if language == "sh" else [sys.executable, "-"]
            ended = subprocess.run(
                command,
                input=text.replace(ADDRESS, address),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                cwd=tmp_path,
                env=os.environ | {"PATH": path},
            )
            assert ended.returncode == 0, (heading, ended.stderr)
            assert '"error"' not in ended.stdout, heading
            shown[heading] = shown.get(heading, "") + ended.stdout
        assert server.end() == 0
    assert all(word in shown["With curl"] for word in ("hello", "world"))
    assert "[b'hello', b'world', b'from Python']" in shown["With Python"]
    assert '"body":"hello"' in shown["With SQL"], shown["With SQL"]
    assert "'body': 'hello'" in shown["With SQL"], shown["With SQL"]
    assert "from Python" in shown["With Spark"]
    assert "first" in shown["The command line"]
