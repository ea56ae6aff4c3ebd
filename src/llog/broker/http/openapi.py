"""The OpenAPI document of a broker, made from its table of routes and the structs that decode their requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from llog.broker.http.operations import PROBLEM, Operation, Problem, load_shape
from llog.broker.http.requests import FORM
from llog.broker.http.routing import Route
from llog.model import PARTITIONS_MAX, TOPIC_NAME_BYTES_MAX

_REF: Final = "#/components/schemas/{name}"
_PATH_PARAMETER: Final = re.compile(r"\{(\w+)\}")
_PATH_SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "name": {"type": "string", "pattern": "^[A-Za-z0-9._-]+$", "minLength": 1, "maxLength": TOPIC_NAME_BYTES_MAX},
    "partition": {"type": "integer", "minimum": 0, "exclusiveMaximum": PARTITIONS_MAX},
}


def build_document(routes: Sequence[Route], version: str) -> dict[str, Any]:
    """Return the document of all routes that describe their operation."""
    described = [(route, route.operation) for route in routes if route.operation is not None]
    schemas = _Schemas([operation for _, operation in described])
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in described:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "llog",
            "version": version,
            "summary": "A diskless, leaderless event log over HTTP.",
            "description": "An unknown field or parameter is an error. Times are milliseconds since 1970, offsets "
            "start at 1, and bytes that are not UTF-8 are objects with a member `base64`.",
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for _, operation in described)],
        "paths": paths,
        "components": {"schemas": schemas.components},
    }


class _Schemas:
    """The schemas of all bodies and answers, with one component for each struct."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        shapes: list[Any] = [Problem]
        for operation in operations:
            for kind, shape in (*operation.bodies.items(), *operation.answers.items()):
                loaded = load_shape(shape)
                if loaded is not None and loaded not in shapes and kind != FORM:
                    shapes.append(loaded)
        found, self.components = msgspec.json.schema_components(shapes, ref_template=_REF)
        self._known = list(zip(shapes, found, strict=True))

    def of(self, kind: str, shape: Any) -> dict[str, Any]:
        """Return the media type of bodies of this content type and shape."""
        loaded = load_shape(shape)
        if kind == FORM:
            return {"schema": _form_schema(_query_parameters(loaded))}
        return next(({"schema": schema} for known, schema in self._known if known is loaded), {})


def _operation(route: Route, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]}
        for name in _PATH_PARAMETER.findall(route.path)
    ]
    parameters += _query_parameters(load_shape(operation.query))
    parameters += [
        {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in operation.headers.items()
    ]
    described: dict[str, Any] = {
        "operationId": route.method.lower() + re.sub(r"\W+", "_", route.path).rstrip("_"),
        "tags": [operation.tag],
        "summary": operation.summary,
        "parameters": parameters,
    }
    if operation.bodies:
        content = {kind: schemas.of(kind, shape) for kind, shape in operation.bodies.items()}
        described["requestBody"] = {"required": True, "content": content}
    answer: dict[str, Any] = {"description": operation.status.phrase}
    if operation.answers:
        answer["content"] = {kind: schemas.of(kind, shape) for kind, shape in operation.answers.items()}
    problem = {"description": "The request failed.", "content": {PROBLEM: schemas.of(PROBLEM, Problem)}}
    return described | {"responses": {str(operation.status.value): answer, "default": problem}}


def _query_parameters(query: Any) -> list[dict[str, Any]]:
    if query is None:
        return []
    _, components = msgspec.json.schema_components([query], ref_template=_REF)
    schema = components[query.__name__]
    return [
        {"name": name, "in": "query", "required": name in schema["required"], "schema": _query_schema(field)}
        for name, field in schema["properties"].items()
    ]


def _form_schema(parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a body that has the parameters of an address."""
    return {
        "type": "object",
        "properties": {each["name"]: each["schema"] for each in parameters},
        "required": [each["name"] for each in parameters if each["required"]],
        "additionalProperties": False,
    }


def _query_schema(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter. An address has no null, and bytes are percent-encoded in it."""
    field = {name: value for name, value in field.items() if name != "contentEncoding"}
    if field.get("default", "") in (None, ""):
        field.pop("default", None)
    choices = [_query_schema(each) for each in field.pop("anyOf", ()) if each != {"type": "null"}]
    if len(choices) == 1:
        return choices[0] | field
    return field | ({"anyOf": choices} if choices else {})
