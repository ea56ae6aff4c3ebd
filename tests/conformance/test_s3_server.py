"""The server the S3 adapters are tested on is itself one that can be trusted to say no."""

from __future__ import annotations

import msgspec
import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError

from devtools.servers.weed import S3Server


def test_an_object_put_into_a_new_bucket_is_read_back(s3_server: S3Server) -> None:
    s3_server.create_bucket("read-back")
    s3_server.create_bucket("read-back")
    store = s3_server.store("read-back", prefix="below")
    obstore.put(store, "a/b", b"payload")
    assert bytes(obstore.get(store, "a/b").bytes()) == b"payload"
    assert [entry["path"] for page in obstore.list(s3_server.store("read-back")) for entry in page] == ["below/a/b"]


def test_a_second_create_of_one_key_is_refused(s3_server: S3Server) -> None:
    s3_server.create_bucket("put-if-absent")
    store = s3_server.store("put-if-absent")
    obstore.put(store, "once", b"first", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "once", b"second", mode="create")
    assert bytes(obstore.get(store, "once").bytes()) == b"first"


def test_a_wrong_secret_is_refused(s3_server: S3Server) -> None:
    s3_server.create_bucket("guarded")
    stranger = msgspec.structs.replace(s3_server, secret_key="not-the-secret")
    with pytest.raises(PermissionDeniedError):
        obstore.put(stranger.store("guarded"), "key", b"payload")
