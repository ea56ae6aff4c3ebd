"""How llog opens a blob store in a bucket of S3, Google Cloud Storage or Azure."""

from __future__ import annotations

from typing import Final, Protocol

from llog.base.secret import Secret, reveal
from llog.errors import ConfigurationError
from llog.stores.addresses import Address, refuse_credentials, refuse_parameters, split_url
from llog.stores.blobs import BlobStore
from llog.stores.registry import BlobAdapter


class BucketSettings(Protocol):
    @property
    def s3_endpoint_url(self) -> str | None: ...
    @property
    def s3_region_name(self) -> str | None: ...
    @property
    def s3_access_key_id(self) -> str | None: ...
    @property
    def s3_secret_access_key(self) -> Secret | None: ...
    @property
    def s3_session_token(self) -> Secret | None: ...
    @property
    def client_name(self) -> str: ...


def _parse(variable: str, url: str) -> Address:
    scheme, bucket, path = split_url(url)
    s3_remedy = "put them into LLOG_S3_ACCESS_KEY_ID and LLOG_S3_SECRET_ACCESS_KEY"
    refuse_credentials(variable, url, s3_remedy if scheme == "s3" else "leave them out")
    refuse_parameters(variable, url)
    if not bucket:
        raise ConfigurationError(f"{variable} is {url!r}, which names no bucket: write {scheme}://bucket/prefix")
    return Address(scheme, bucket, path.strip("/"))


def _open(address: Address, settings: BucketSettings) -> BlobStore:
    from llog.stores.object.blobs import ObjectBlobStore
    from llog.stores.object.requests import Limits

    limits = Limits(user_agent=settings.client_name)
    if address.scheme == "gs":
        return ObjectBlobStore.gcs(address.authority, address.path, limits=limits)
    if address.scheme == "az":
        return ObjectBlobStore.azure(address.authority, address.path, limits=limits)
    return ObjectBlobStore.s3(
        address.authority,
        address.path,
        endpoint=settings.s3_endpoint_url,
        region=settings.s3_region_name,
        access_key_id=settings.s3_access_key_id,
        secret_access_key=reveal(settings.s3_secret_access_key),
        session_token=reveal(settings.s3_session_token),
        limits=limits,
    )


BLOB_ADAPTER: Final = BlobAdapter(_parse, _open, in_bucket=True)
