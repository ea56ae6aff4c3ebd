from __future__ import annotations

import pytest

from tests.conftest import unavailable


def test_a_missing_server_skips_the_test_on_a_developers_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLOG_REQUIRE_SERVERS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no server"):
        unavailable("no server")


def test_a_missing_server_fails_the_test_where_servers_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLOG_REQUIRE_SERVERS", "1")
    with pytest.raises(pytest.fail.Exception, match="no server"):
        unavailable("no server")
