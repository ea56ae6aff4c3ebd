"""What Oxia's refusals mean. Oxia up to 0.16 gives its own refusals the code UNKNOWN, so the text decides."""

from __future__ import annotations

import asyncio

import grpc

from llog.errors import ConfigurationError, LlogError, StoreUnavailable, WrongStore


def describe(error: BaseException | None) -> str:
    """Return the error as one line of text."""
    if isinstance(error, grpc.RpcError):
        details = " ".join((error.details() or "").split())
        return f"{error.code().name}: {details[:200]}" if details else str(error.code().name)
    if error is None or isinstance(error, asyncio.CancelledError | TimeoutError | EOFError):
        return "no answer"
    return f"{type(error).__name__}: {error}"


def _has_details(error: BaseException | None, text: str) -> bool:
    return isinstance(error, grpc.RpcError) and text in (error.details() or "")


def is_session_lost(error: BaseException) -> bool:
    return _has_details(error, "session not found")


def permanent_error(error: BaseException, address: str, namespace: str) -> LlogError | None:
    """Return the error to raise if no other attempt can succeed; None if the same call may succeed later."""
    if not isinstance(error, grpc.RpcError):
        return None
    code, details = error.code(), (error.details() or "").lower()
    if _has_details(error, "namespace not found"):
        return ConfigurationError(
            f"the Oxia at {address} has no namespace {namespace!r}: name one that it has, or create it there"
        )
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return ConfigurationError(
            f"the Oxia at {address} refuses this client ({describe(error)}): set LLOG_OXIA_TOKEN or "
            "LLOG_OXIA_TOKEN_FILE to a token that it accepts"
        )
    if "handshake failed" in details:
        return ConfigurationError(
            f"TLS with {address} failed ({describe(error)}): write oxia:// if the server has no TLS, or name the "
            "certificate of its authority with LLOG_OXIA_CA_FILE"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED or "parsing http/2" in details or "http1" in details:
        return WrongStore(f"the server at {address} is not Oxia ({describe(error)}): name the public address of Oxia")
    return None


def unavailable(what: str, error: BaseException | None) -> StoreUnavailable:
    return StoreUnavailable(f"{what} ({describe(error)}): check that Oxia runs and has a leader for every shard")


def no_shard(number: int) -> StoreUnavailable:
    return StoreUnavailable(f"no shard of Oxia has the hash {number}: its shards are being changed. Try again")


def store_closed() -> StoreUnavailable:
    return StoreUnavailable("this metadata store is closed: open another one")
