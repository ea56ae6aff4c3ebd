"""The tool that makes modules of Kafka's message schemas, on schemas that are small enough to read."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from devtools.kafka_messages import api_source
from llog.kafka.messages import decode_header, decode_request, decode_response, encode_request, encode_response
from tests.unit.kafka.sample_messages import frame

REQUEST = """
// A licence.
{
  "apiKey": 900, "type": "request", "name": "ExampleRequest", "validVersions": "2-4", "flexibleVersions": "4+",
  "latestVersionUnstable": true,
  "fields": [
    // An old field.
    { "name": "GroupId", "type": "string", "versions": "2+", "default": "none" },
    { "name": "TimeoutMs", "type": "int32", "versions": "3+", "default": "0x10", "about": "Milliseconds." },
    { "name": "Topics", "type": "[]Topic", "versions": "2+", "nullableVersions": "3+", "fields": [
      { "name": "Name", "type": "string", "versions": "2+" }
    ]},
    { "name": "Place", "type": "Place", "versions": "2+", "nullableVersions": "2+", "default": "null" }
  ],
  "commonStructs": [
    { "name": "Place", "versions": "2+", "fields": [{ "name": "TopicId", "type": "uuid", "versions": "2+" }] }
  ]
}
"""
RESPONSE = """
{
  "apiKey": 900, "type": "response", "name": "ExampleResponse", "validVersions": "2-4", "flexibleVersions": "4+",
  "fields": [
    { "name": "Topics", "type": "[]Topic", "versions": "2+", "fields": [
      { "name": "IsGone", "type": "bool", "versions": "2+" }
    ]},
    { "name": "Port", "type": "uint16", "versions": "2+" },
    { "name": "Checksum", "type": "uint32", "versions": "2+" },
    { "name": "Share", "type": "float64", "versions": "2+" },
    { "name": "Ids", "type": "[]uuid", "versions": "2+" }
  ]
}
"""


@pytest.fixture
def schemas(tmp_path: Path) -> Path:
    (tmp_path / "ExampleRequest.json").write_text(REQUEST)
    (tmp_path / "ExampleResponse.json").write_text(RESPONSE)
    return tmp_path


@pytest.fixture
def module(schemas: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = ModuleType("example_messages")
    monkeypatch.setitem(sys.modules, made.__name__, made)  # where msgspec looks for the types
    exec(api_source(schemas, "Example"), vars(made))
    return made


def test_fields_are_named_typed_and_defaulted_as_the_schema_says(module: Any) -> None:
    request = module.ExampleRequest()
    assert (request.group_id, request.timeout_ms, request.topics, request.place) == ("none", 16, [], None)


def test_what_the_schema_says_about_its_fields_is_not_copied(schemas: Path) -> None:
    assert "Milliseconds" not in api_source(schemas, "Example")


def test_structs_with_one_name_but_different_fields_are_told_apart(module: Any) -> None:
    assert module.ExampleRequestTopic().name == ""
    assert module.ExampleResponseTopic().is_gone is False
    assert not hasattr(module, "Topic")
    assert module.Place().topic_id == bytes(16)


def test_a_version_that_kafka_calls_unstable_is_not_offered(module: Any) -> None:
    api = module.API
    assert (api.key, api.name, api.lowest, api.highest, api.flexible_from) == (900, "Example", 2, 3, 4)


def test_a_field_is_written_only_in_the_versions_that_have_it(module: Any) -> None:
    api = module.API
    request = module.ExampleRequest(timeout_ms=5, place=module.Place(topic_id=b"0123456789abcdef"))
    for version, timeout_ms in ((2, 16), (3, 5)):
        _, body = decode_header(frame(encode_request(api, version, 1, None, request)))
        decoded = decode_request(api, version, body)
        assert decoded.timeout_ms == timeout_ms
        assert decoded.place == request.place


def test_types_that_few_messages_have_are_read_as_they_were_written(module: Any) -> None:
    response = module.ExampleResponse(port=0xFFFE, checksum=0xFFFFFFFE, share=0.75, ids=[bytes(16), b"x" * 16])
    pieces = encode_response(module.API, 3, 1, response)
    assert decode_response(module.API, 3, frame(pieces)) == (1, response)
    assert b"\xff\xfe\xff\xff\xff\xfe\x3f\xe8" in b"".join(pieces)


def test_a_directory_without_the_schema_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match=r"ExampleRequest\.json does not exist"):
        api_source(tmp_path, "Example")
