from __future__ import annotations

import msgspec
import pytest

from llog.errors import BY_CODE, StoreUnavailable
from llog.transport.protocol import refusal


@pytest.mark.parametrize("code", BY_CODE)
def test_every_error_comes_back_as_what_it_was(code: str) -> None:
    body = msgspec.json.encode({"code": code, "detail": "what was wrong"})
    error = refusal("http://127.0.0.1/sql", 500, body)
    assert type(error) is BY_CODE[code]
    assert str(error) == "what was wrong"


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"code": "of_another_version", "detail": "?"}'])
def test_an_answer_without_a_known_error_is_unavailability(body: bytes) -> None:
    assert type(refusal("http://127.0.0.1/sql", 502, body)) is StoreUnavailable
