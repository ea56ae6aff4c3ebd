"""The tables of routes: what a resource declares for each of its routes, and how a request reaches its handler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import starlette.routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.answers import Handler, no_route_answers, with_error_answers
from llog.broker.http.cors import cors
from llog.broker.http.forwarding import FORWARDED, FindOwner, Forwarding
from llog.broker.http.hosts import host_check
from llog.broker.http.request_log import request_log
from llog.broker.metrics import Metrics
from llog.broker.tracing import Tracer
from llog.config import Settings
from llog.errors import WrongRole

Role = Literal["read", "write", "all"]


class Route(NamedTuple):
    """One route of a resource. A broker refuses the routes of the other role; it answers those of `all`."""

    role: Role
    method: str
    path: str
    handler: Handler
    wait_ms: int = 0
    """How long an answer may take besides: an owner that a request is sent on to gets this much longer."""
    find_owner: FindOwner | None = None
    """Finds the broker that answers instead, before the handler runs. None: the handler runs on this broker, and the
    request is sent on if the handler raises `LogOwned` with the owner's address.
    """
    may_stay: bool = False
    """Whether this broker answers after all if the owner that was found cannot be reached."""


def build_app(
    routes: Iterable[Route],
    settings: Settings,
    forwarding: Forwarding | None,
    metrics: Metrics,
    tracer: Tracer | None = None,
) -> Starlette:
    """Return the application of these routes. Without `forwarding`, no request is sent on to another process."""
    app = Starlette(
        routes=[
            starlette.routing.Route(
                route.path,
                with_error_answers(
                    _refuse_other_role(route.role, settings.role, _forward(route, forwarding)), route.path, metrics
                ),
                methods=[route.method],
            )
            for route in routes
        ],
        exception_handlers={HTTPException: no_route_answers(metrics)},
        middleware=[*request_log(settings, tracer), host_check(settings, metrics), *cors(settings)],
    )
    app.router.redirect_slashes = False  # a redirect would name the host that the request named
    return app


def _forward(route: Route, forwarding: Forwarding | None) -> Handler:
    if forwarding is None:
        return route.handler
    if route.find_owner is None:
        return forwarding.on_refusal(route.handler, route.wait_ms)
    return forwarding.to_owner(route.find_owner, route.handler, route.wait_ms, may_stay=route.may_stay)


def _refuse_other_role(role: Role, own_role: str, handler: Handler) -> Handler:
    """Return the handler, or a refusal if the broker's own role is another one.

    A request that another broker sent on is answered whatever the role: only the owner can.
    """
    if role in ("all", own_role) or own_role == "both":
        return handler

    async def refuse(request: Request) -> Response:
        if FORWARDED in request.headers:
            return await handler(request)
        raise WrongRole(
            f"this broker has the role {own_role!r} and does not answer {request.method} {request.url.path[:200]}: "
            f"ask one with the role {role!r} or 'both' (--role, LLOG_ROLE)"
        )

    return refuse
