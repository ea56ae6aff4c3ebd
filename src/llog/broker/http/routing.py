"""The tables of routes: what a resource declares for each of its routes, and how a request reaches its handler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import starlette.routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.answers import Handler, no_route_answers, with_error_answers
from llog.broker.http.cors import cors
from llog.broker.http.forwarding import FORWARDED, FindOwner, Forwarding
from llog.broker.http.hosts import HostCheck, ServedHosts
from llog.broker.http.operations import Operation
from llog.broker.http.request_log import request_log
from llog.broker.http.shortcuts import Shortcut, Shortcuts
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
    has_shortcut: bool = False
    """Whether small requests may reach the handler by a shortcut (`shortcuts.py`). The handler answers with no stream,
    and sends what another broker owns on by itself.
    """
    operation: Operation | None = None
    """What the OpenAPI document says of the route."""


class App(Starlette):
    """The application of a service, and the shortcuts to its handlers, which pass by the log of requests: there are
    none while it is on. Without `forwarding`, no request is sent on to another process.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        settings: Settings,
        forwarding: Forwarding | None,
        metrics: Metrics,
        tracer: Tracer | None = None,
    ) -> None:
        hosts = ServedHosts(settings)
        log = request_log(settings, tracer)
        handlers = {
            (route.method, route.path): with_error_answers(
                _refuse_other_role(route.role, settings.role, _forward(route, forwarding)), route.path, metrics
            )
            for route in routes
        }
        super().__init__(
            routes=[
                starlette.routing.Route(path, handler, methods=[method]) for (method, path), handler in handlers.items()
            ],
            exception_handlers={HTTPException: no_route_answers(metrics)},
            middleware=[
                *log,
                Middleware(HostCheck, hosts=hosts, metrics=metrics),
                *cors(settings, {route.method for route in routes}),
            ],
        )
        self.router.redirect_slashes = False  # a redirect would name the host that the request named
        quick = [(route.method, route.path) for route in routes if route.has_shortcut and not log]
        self.shortcuts = Shortcuts([Shortcut(*name, handlers[name]) for name in quick], hosts.serves)


def _forward(route: Route, forwarding: Forwarding | None) -> Handler:
    if forwarding is None or route.has_shortcut:
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
