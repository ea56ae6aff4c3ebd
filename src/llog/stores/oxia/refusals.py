"""What Oxia's refusals mean. Until 0.16 all of its own come with the code UNKNOWN, so that the text decides."""

from __future__ import annotations

import asyncio

import grpc

from llog.errors import ConfigurationError, LlogError, StoreUnavailable, WrongStore


def describe(error: BaseException | None) -> str:
    """One line for people."""
    if isinstance(error, grpc.RpcError):
        said = " ".join((error.details() or "").split())
        return f"{error.code().name}: {said[:200]}" if said else str(error.code().name)
    if error is None or isinstance(error, asyncio.CancelledError | TimeoutError | EOFError):
        return "no answer"
    return f"{type(error).__name__}: {error}"


def said(error: BaseException | None, text: str) -> bool:
    return isinstance(error, grpc.RpcError) and text in (error.details() or "")


def is_session_lost(error: BaseException) -> bool:
    return said(error, "session not found")


def final(error: BaseException, address: str, namespace: str) -> LlogError | None:
    """What no other attempt would change, as the error to raise; None if the same call may succeed later."""
    if not isinstance(error, grpc.RpcError):
        return None
    code, details = error.code(), (error.details() or "").lower()
    if said(error, "namespace not found"):
        return ConfigurationError(
            f"the Oxia at {address} has no namespace {namespace!r}: name one that it has, or create it there"
        )
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return ConfigurationError(
            f"the Oxia at {address} refuses this client ({describe(error)}): set LLOG_OXIA_TOKEN or "
            "LLOG_OXIA_TOKEN_FILE to a token "
            "that it accepts"
        )
    if "handshake failed" in details:
        return ConfigurationError(
            f"TLS with {address} failed ({describe(error)}): write oxia:// if the server has no TLS, or name its "
            "authority's certificate "
            "with LLOG_OXIA_CA_FILE"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED or "parsing http/2" in details or "http1" in details:
        return WrongStore(f"what listens at {address} is not Oxia ({describe(error)}): name the public address of Oxia")
    return None


def unavailable(what: str, error: BaseException | None) -> StoreUnavailable:
    return StoreUnavailable(f"{what} ({describe(error)}): check that Oxia runs and has a leader for every shard")


def no_shard(number: int) -> StoreUnavailable:
    return StoreUnavailable(f"no shard of Oxia has the hash {number}: its shards are being changed, try again")
