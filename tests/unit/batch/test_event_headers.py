"""Which records delete their key."""

from __future__ import annotations

import pyarrow as pa
import pytest

from llog.batch.columns import Columns, encode_headers, slice_columns
from llog.batch.event_headers import HEADER, Op, PayloadMode, deletion_mask
from llog.cdc.events import encode_event_headers


def event(op: Op, mode: PayloadMode) -> bytes:
    (encoded,) = encode_event_headers(op, mode, "chat.messages", range(7, 8))
    return encoded


def columns(headers: list[bytes] | None, values: list[bytes | None]) -> Columns:
    encoded = None if headers is None else pa.array(headers, pa.binary())
    return Columns(pa.array(values, pa.binary()), None, None, encoded, ())


def test_records_without_a_value_and_events_of_deleted_rows_delete_their_keys() -> None:
    given = [
        (event(Op.DELETE, PayloadMode.KEY), b"{}", True),
        (event(Op.DELETE, PayloadMode.FULL), b"{}", True),
        (event(Op.DELETE, PayloadMode.DIFF), b"{}", False),
        (event(Op.UPDATE, PayloadMode.FULL), b"{}", False),
        (event(Op.INSERT, PayloadMode.KEY), None, True),
        (b"", None, True),
        (b"", b"x", False),
        (encode_headers([("trace", b"x" * 50)]), b"x", False),
        (event(Op.DELETE, PayloadMode.KEY) + encode_headers([("trace", None)]), b"{}", True),
    ]
    whole = columns([each[0] for each in given], [each[1] for each in given])
    expected = [each[2] for each in given]
    assert deletion_mask(whole).tolist() == expected
    for start in range(len(given)):
        assert deletion_mask(slice_columns(whole, start, len(given))).tolist() == expected[start:]
    assert deletion_mask(columns(None, [None, b"x"])).tolist() == [True, False]
    assert deletion_mask(columns([], [])).tolist() == []


@pytest.mark.parametrize("value", [None, b"", b"\1\3\1", b"\2\3\1" + bytes(13), b"\1\3\0" + bytes(13)])
def test_a_header_of_that_name_that_is_no_events_deletes_nothing(value: bytes | None) -> None:
    encoded = encode_headers([(HEADER, value), ("more", bytes(100))])
    assert deletion_mask(columns([encoded], [b"x"])).tolist() == [False]
