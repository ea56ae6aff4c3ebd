"""Options of the lake's steps come as text and are checked before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from llog.errors import ConfigurationError
from llog.spark.jobs.lake.export import ExportOptions
from llog.spark.jobs.lake.materialize import MaterializeOptions
from llog.spark.jobs.lake.steps import _parse_options


def test_text_becomes_options_of_an_export() -> None:
    given = {"topic": "t", "format": "delta", "to": "lake", "file_bytes": "1MiB", "headers": "true"}
    options = _parse_options("export", ExportOptions, given)
    assert (options.topic, options.format, options.file_bytes, options.headers) == ("t", "delta", 1 << 20, True)


def test_keys_are_split_by_commas() -> None:
    options = _parse_options("materialize", MaterializeOptions, {"topic": "t", "to": "lake", "key": "a, b"})
    assert options.key == ("a", "b")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"topic": "t", "to": "x"}, "format"),
        ({"topic": "t", "to": "x", "format": "csv"}, "csv"),
        ({"topic": "t", "to": "x", "format": "delta", "colour": "red"}, "colour"),
        ({"topic": "t", "to": "x", "format": "delta", "json_schema": "a int", "avro_schema": "f"}, "not both"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        _parse_options("export", ExportOptions, given)
