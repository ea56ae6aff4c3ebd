"""The page of docs: the OpenAPI document as HTML for people, without scripts and without anything from the network."""

from __future__ import annotations

import json
from html import escape
from typing import Any, Final

from llog.broker.http.requests import JSON

PAGE_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.5 ui-monospace, monospace; }
pre { background: #8881; padding: .75rem; overflow-x: auto; }
summary { cursor: pointer; padding: .25rem 0; }
details details { margin-left: 1rem; }
table { border-collapse: collapse; }
td, th { border: 1px solid #8886; padding: .2rem .6rem; text-align: left; vertical-align: top; }
.method { display: inline-block; width: 4.5rem; font-weight: bold; }
:root { color-scheme: light dark; }
"""


def render_page(document: dict[str, Any]) -> str:
    """Return the page of this document."""
    operations = [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [f"<h1>{escape(document['info']['title'])} {escape(document['info']['version'])}</h1>"]
    parts.append(f"<p>{escape(document['info']['description'])} Programs read <a href='openapi.json'>openapi.json</a>.")
    for tag in document["tags"]:
        parts.append(f"<h2>{escape(tag['name'])}</h2>")
        parts += [
            _operation(method, path, operation)
            for method, path, operation in operations
            if tag["name"] in operation["tags"]
        ]
    parts.append("<h2>Schemas</h2>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.append(f"<details id='{escape(name)}'><summary><code>{escape(name)}</code></summary>{_json(schema)}")
        parts.append("</details>")
    head = f"<meta charset='utf-8'><title>llog</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>"


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    name = f"<span class='method'>{method.upper()}</span> <code>{escape(path)}</code>"
    parts = [f"<details><summary>{name} — {escape(operation['summary'])}</summary>"]
    if operation["parameters"]:
        rows = [
            f"<tr><td><code>{escape(each['name'])}</code><td>{each['in']}"
            f"<td>{'required' if each['required'] else ''}<td><code>{escape(json.dumps(each['schema']))}</code>"
            for each in operation["parameters"]
        ]
        parts.append(f"<table><tr><th>parameter<th>in<th><th>schema{''.join(rows)}</table>")
    for kind, media in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>Body <code>{escape(kind)}</code> {_shape(media)}")
    for status, answer in operation["responses"].items():
        kinds = [f"<code>{escape(kind)}</code> {_shape(media)}" for kind, media in answer.get("content", {}).items()]
        label = "Errors" if status == "default" else f"Answer {status}"
        parts.append(f"<p>{label} {', '.join(kinds) or 'without a body'}")
    parts.append(f"<pre>{escape(_curl(method, path, operation))}</pre></details>")
    return "".join(parts)


def _shape(media: dict[str, Any]) -> str:
    """Return a link to the schema of a media type, if it has one."""
    schema = media.get("schema")
    if schema is None:
        return ""
    name = schema.get("$ref", "").rpartition("/")[2]
    return f"<a href='#{escape(name)}'>{escape(name)}</a>" if name else f"<code>{escape(json.dumps(schema))}</code>"


def _json(schema: dict[str, Any]) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=2))}</pre>"


def _curl(method: str, path: str, operation: dict[str, Any]) -> str:
    words = ["curl"] if method == "get" else ["curl", "-X", method.upper()]
    kinds = list(operation.get("requestBody", {}).get("content", {}))
    if kinds:
        body = "'{…}'" if kinds[0] == JSON else "@FILE"
        words += ["-H", f"'content-type: {kinds[0]}'", "-d" if kinds[0] == JSON else "--data-binary", body]
    required = [f"{each['name']}=…" for each in operation["parameters"] if each["in"] == "query" and each["required"]]
    target = f"http://127.0.0.1:8080{path}{'?' if required else ''}{'&'.join(required)}"
    return " ".join([*words, f"'{target}'"])
