"""Lines of a service's log, and the headers that say which request a line belongs to."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from llog.base.logs import (
    RequestContext,
    configure_logs,
    current_request,
    is_request_id,
    log_fields,
    parse_traceparent,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def restored() -> Iterator[None]:
    """The loggers as they were before."""
    root, own = logging.getLogger(), logging.getLogger("llog")
    before = root.handlers[:], root.level, own.handlers[:], own.level, own.propagate
    yield
    root.handlers[:], own.handlers[:] = before[0], before[2]
    root.setLevel(before[1])
    own.setLevel(before[3])
    own.propagate = before[4]


@pytest.mark.usefixtures("restored")
def test_a_line_of_json_has_the_message_its_fields_and_its_request() -> None:
    stream = io.StringIO()
    configure_logs("json", "info", stream)
    logger = logging.getLogger("llog.broker")
    token = current_request.set(RequestContext("r-1", TRACE, SPAN))
    logger.info("two\nlines of %s", "text", extra=log_fields(status=200, path='/"x"'))
    current_request.reset(token)
    logger.debug("too unimportant")
    logging.getLogger("some.library").info("too unimportant, too")
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "info",
        "logger": "llog.broker",
        "message": "two\nlines of text",
        "request_id": "r-1",
        "trace_id": TRACE,
        "span_id": SPAN,
        "status": 200,
        "path": '/"x"',
    }


@pytest.mark.usefixtures("restored")
def test_a_value_that_a_client_sent_cannot_begin_a_line_of_text() -> None:
    stream = io.StringIO()
    configure_logs("text", "warning", stream)
    logging.getLogger("llog.access").warning("request", extra=log_fields(user_agent="a\nllog: forged", status=200))
    assert stream.getvalue() == 'llog: request user_agent="a\\nllog: forged" status=200\n'


@pytest.mark.usefixtures("restored")
def test_an_exception_is_logged_with_its_trace() -> None:
    stream = io.StringIO()
    configure_logs("json", "error", stream)
    try:
        raise ValueError("planted")
    except ValueError:
        logging.getLogger("llog.broker").exception("it failed")
    assert "ValueError: planted" in json.loads(stream.getvalue())["exception"]


@pytest.mark.parametrize(
    ("header", "ids"),
    [
        (f"00-{TRACE}-{SPAN}-01", (TRACE, SPAN, "01")),
        (f"01-{TRACE}-{SPAN}-00-more", (TRACE, SPAN, "00")),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        ("", None),
        ("x" * 10_000, None),
    ],
)
def test_a_malformed_traceparent_counts_as_none(header: str, ids: tuple[str, str, str] | None) -> None:
    assert parse_traceparent(header) == ids


def test_a_request_id_that_could_spoil_a_log_is_not_taken() -> None:
    assert is_request_id("0af7-42")
    assert not any(map(is_request_id, ("", "a b", "a\nb", "x" * 129, "ä")))


def test_a_context_goes_on_to_the_next_service() -> None:
    assert RequestContext("r").headers() == {"x-request-id": "r"}
    given = f"00-{TRACE}-{SPAN}-01"
    assert RequestContext("r", *(parse_traceparent(given) or ())).headers()["traceparent"] == given
