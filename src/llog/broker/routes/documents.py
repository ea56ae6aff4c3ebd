"""What a broker says about its own routes: `GET /openapi.json` for programs, and `GET /docs` for people."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.answers import json_answer
from llog.broker.http.docs_page import PAGE_HEADERS, render_page
from llog.broker.http.openapi import build_document
from llog.broker.http.operations import Operation
from llog.broker.http.requests import JSON
from llog.broker.http.routing import Route
from llog.broker.monitoring.description import package_version

_HTML: Final = "text/html"
_TAG: Final = "This page"


class DocumentRoutes:
    """The documents are made when they are first asked for: they load what the keyed log needs."""

    def __init__(self, others: Sequence[Route]) -> None:
        """`others` are all other routes of the process."""
        self._others = others

    def routes(self) -> list[Route]:
        as_json = Operation(_TAG, "The OpenAPI document of this broker", answers={JSON: dict[str, Any]})
        as_page = Operation(_TAG, "The same document as a page", answers={_HTML: str})
        return [
            Route("all", "GET", "/openapi.json", self._openapi, operation=as_json),
            Route("all", "GET", "/docs", self._docs, operation=as_page),
        ]

    @cached_property
    def _document(self) -> dict[str, Any]:
        return build_document([*self._others, *self.routes()], package_version())

    async def _openapi(self, _: Request) -> Response:
        return json_answer(self._document)

    async def _docs(self, _: Request) -> Response:
        return Response(render_page(self._document), headers=PAGE_HEADERS, media_type=_HTML)
