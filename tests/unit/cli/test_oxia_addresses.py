"""What the commands say of addresses at which there is no Oxia: one line, exit code 2, without one being installed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from llog.cli.main import main
from llog.stores.oxia import store


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture
def http_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def nobody() -> Iterator[str]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        yield f"127.0.0.1:{held.getsockname()[1]}"


def refused(meta: str, *command: str) -> str:
    result = CliRunner().invoke(main, ["--meta", meta, *command])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture(autouse=True)
def short_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLOG_BLOBS", f"file://{tmp_path / 'blobs'}")
    monkeypatch.setattr(store, "OPEN_SECONDS", 2.0)


@pytest.mark.parametrize("command", [("topics", "list"), ("topics", "create", "t"), ("doctor",)])
def test_a_server_that_is_not_oxia(http_server: str, command: tuple[str, ...]) -> None:
    line = refused(f"oxia://{http_server}/default", *command)
    assert line.startswith(f"llog: LLOG_META is oxia://{http_server}/default: the server at {http_server} is not Oxia")
    assert line.endswith("name the public address of Oxia")


@pytest.mark.parametrize("command", [("topics", "list"), ("topics", "create", "t")])
def test_a_server_that_does_not_answer(nobody: str, command: tuple[str, ...]) -> None:
    line = refused(f"oxia://{nobody},{nobody}/default", *command)
    assert line.startswith(f"llog: LLOG_META is oxia://{nobody},{nobody}/default: no Oxia answers at {nobody},{nobody}")
    assert "check that" in line


def test_an_address_that_is_none() -> None:
    assert "write host:port" in refused("oxia://nowhere/default", "topics", "list")
    assert "write host:port" in refused("oxia://host:6648,:1/default", "topics", "list")
    assert "with parameters after a '?': leave them out" in refused(
        "oxia://host:6648/default?token=x", "topics", "list"
    )
    assert "leave them out" in refused("oxia://me:secret@host:6648/default", "topics", "list")
