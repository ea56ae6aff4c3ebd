"""Logs of a service on stderr, one line each, as text or as JSON, with the request that a line belongs to."""

from __future__ import annotations

import logging
import re
import sys
import time
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, TextIO

import msgspec

LOGGER: Final = "llog"
REQUEST_ID: Final = "x-request-id"
TRACEPARENT: Final = "traceparent"
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestContext(NamedTuple):
    """What identifies a request in the logs of all services that it passed."""

    request_id: str
    trace_id: str | None = None
    span_id: str | None = None
    flags: str = "00"
    """The flags of the trace, in hexadecimal digits, such as whether it is recorded."""

    def headers(self) -> dict[str, str]:
        """Return the headers that carry the context on to another service."""
        found = {REQUEST_ID: self.request_id}
        if self.trace_id is not None:
            found[TRACEPARENT] = f"00-{self.trace_id}-{self.span_id}-{self.flags}"
        return found


current_request: Final[ContextVar[RequestContext | None]] = ContextVar("llog_request", default=None)


def parse_traceparent(header: str) -> tuple[str, str, str] | None:
    """Return the ids of the trace and of the caller's span and the flags in a W3C `traceparent` header; None if it is
    malformed.

    A header of a later version may have more after the flags, which is ignored.
    """
    found = _TRACEPARENT.fullmatch(header[:200])
    if found is None or header.startswith("ff") or (header.startswith("00") and len(header) != 55):
        return None
    trace_id, span_id, flags = found.groups()
    return None if not int(trace_id, 16) or not int(span_id, 16) else (trace_id, span_id, flags)


def is_request_id(text: str) -> bool:
    """Return whether a client's request id may be repeated in logs and answers."""
    return _REQUEST_ID.fullmatch(text) is not None


def log_fields(**fields: Any) -> dict[str, Any]:
    """Return the `extra` of a call of a logger: members of a JSON line, `name=value` at the end of a text line."""
    return {"fields": fields}


def configure_logs(form: str, level: str, stream: TextIO | None = None) -> None:
    """Send what the process logs to stderr, in the form `text` or `json`, from this level on.

    Other loggers, those of libraries, are sent there from warnings on.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonLine() if form == "json" else _TextLine())
    own, root = logging.getLogger(LOGGER), logging.getLogger()
    for logger in (own, root):
        logger.handlers[:] = [handler]
    own.propagate = False
    own.setLevel(level.upper())
    root.setLevel(max(logging.WARNING, own.level))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of the call, with the ids of the request."""
    request = current_request.get()
    ids = {} if request is None else dict(zip(("request_id", "trace_id", "span_id"), request, strict=False))
    return {name: value for name, value in ids.items() if value is not None} | getattr(record, "fields", {})


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class _TextLine(logging.Formatter):
    """`llog: message name=value`, as people read it; what runs the service adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        name = "llog" if record.name.partition(".")[0] == LOGGER else record.name
        # A line break in a value, which a client may have sent, must not look like another line.
        fields = "".join(f" {name}={_one_line(value)}" for name, value in _fields(record).items())
        exception = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{name}: {record.getMessage()}{fields}{exception}"


def _one_line(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else msgspec.json.encode(text).decode()
