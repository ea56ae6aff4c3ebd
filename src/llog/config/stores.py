"""Settings of the stores: where they are, how they are entered, and how records are written to them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from llog.base.secret import Secret
from llog.stores.oxia.adapter import OXIA_NAMESPACE


class StoreSettings(Struct, frozen=True, kw_only=True):
    """Where a log keeps its metadata, blobs and local files."""

    data_dir: Annotated[
        str,
        Meta(
            description="Directory of a local log: `meta.sqlite` and `blobs/` lie in it unless LLOG_META and "
            "LLOG_BLOBS say "
            "otherwise. Relative to the current directory."
        ),
    ] = "./llog-data"
    meta: Annotated[
        str,
        Meta(
            description="Metadata store: `sqlite:///absolute/path`, `sqlite://./relative/path`, "
            "`postgresql://user@host:port/database?schema=name` (several hosts with commas between them; also "
            "`sslmode`, `sslrootcert`, "
            "`sslcert` and `sslkey`, and `host=/directory` of a Unix socket), `oxia://host:port/namespace` "
            "(several servers with commas "
            "between them; `oxias://` for TLS), or `memory://` (gone with the process).",
            extra={"default": "LLOG_OXIA_SERVICE_ADDRESS, else `meta.sqlite` in LLOG_DATA_DIR"},
        ),
    ] = ""
    blobs: Annotated[
        str,
        Meta(
            description="Blob store: `file:///absolute/dir`, `file://./relative/dir`, `s3://bucket/prefix`, "
            "`gs://bucket/prefix`, `az://container/prefix`, `memory://` (gone with the process), or `none`: then "
            "only readers work, which "
            "take the address of every blob from the metadata.",
            extra={
                "default": "the bucket LLOG_S3_BUCKET; else `none` if metadata is on a server or any LLOG_S3_… is "
                "set; else `blobs/` in "
                "LLOG_DATA_DIR"
            },
        ),
    ] = ""
    oxia_service_address: Annotated[
        str | None,
        Meta(
            description="Servers of the Oxia cluster that holds the metadata, `host:port`, several with commas "
            "between them: another way "
            "to write LLOG_META=oxia://host:port/namespace.",
            extra={"default": "none: LLOG_META names the store"},
        ),
    ] = None
    oxia_namespace: Annotated[
        str, Meta(description="Namespace of the metadata in Oxia, for LLOG_OXIA_SERVICE_ADDRESS.")
    ] = OXIA_NAMESPACE
    oxia_session_timeout_ms: Annotated[
        int | None,
        Meta(
            description="How long Oxia keeps the claims of a process that died.",
            ge=2000,
            le=300_000,
            extra={"unit": "duration", "default": "LLOG_SESSION_TIMEOUT_MS, at least 2s and at most 5m"},
        ),
    ] = None
    s3_bucket: Annotated[
        str | None,
        Meta(
            description="Bucket that holds the blobs, which must be there: another way to write "
            "LLOG_BLOBS=s3://bucket. Writers, brokers "
            "and compactors need one; readers do not.",
            extra={"default": "none: LLOG_BLOBS names the store"},
        ),
    ] = None
    root_prefix: Annotated[
        str,
        Meta(
            description="What the names of all keys and blobs begin with, before `llog/`: logs with different "
            "prefixes share a metadata "
            "store and a bucket without seeing each other. Letters, digits, `.`, `_`, `-`, and `/` between parts.",
            extra={"default": "none"},
        ),
    ] = ""
    client_identifier: Annotated[
        str | None,
        Meta(
            description="Name of this process in its claims, in the first lines that a broker logs, and in the "
            "user agent of its requests "
            "to object stores, metadata servers and brokers. Up to 128 visible ASCII characters, such as `broker-1`.",
            extra={"default": "`llog-`, the host's name and the process id"},
        ),
    ] = None
    segments_dir: Annotated[
        str | None,
        Meta(
            description="Directory of the topics of engine `disk`, on a disk of this machine. Without it, and with "
            "`memory://`, there can "
            "be none.",
            extra={"default": "`segments/` beside the file of LLOG_META"},
        ),
    ] = None
    rocksdb_dir: Annotated[
        str | None,
        Meta(
            description="Directory of the tables and of the topics of engine `rocksdb`, on a disk of this machine; "
            "one process at a time "
            "owns it. Without it, and with `memory://`, there can be none.",
            extra={"default": "`rocksdb/` beside the file of LLOG_META"},
        ),
    ] = None
    keyed: Annotated[
        str | None,
        Meta(
            description="Keyed log of the broker's `/keyed` routes, of `llog keyed` and of Spark's `llog-keyed`: "
            "`file:///absolute/dir`, "
            "`file://./relative/dir`, `s3://bucket/prefix`, or `memory://` (gone with the process).",
            extra={"default": "none: there is no keyed log"},
        ),
    ] = None
    s3_endpoint_url: Annotated[
        str | None,
        Meta(
            description="Address of an S3-compatible server, `http(s)://host:port`; leave it out for AWS.",
            extra={"fallbacks": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")},
        ),
    ] = None
    s3_region_name: Annotated[
        str | None,
        Meta(description="Region of the bucket.", extra={"fallbacks": ("AWS_REGION", "AWS_DEFAULT_REGION")}),
    ] = None
    s3_access_key_id: Annotated[
        str | None,
        Meta(
            description="Access key of the bucket. The three credentials are taken from one place: when none of "
            "them is set "
            "here, from the AWS variables.",
            extra={"fallbacks": ("AWS_ACCESS_KEY_ID",)},
        ),
    ] = None
    s3_secret_access_key: Annotated[
        Secret | None,
        Meta(description="Secret of the access key; never shown.", extra={"fallbacks": ("AWS_SECRET_ACCESS_KEY",)}),
    ] = None
    s3_session_token: Annotated[
        Secret | None,
        Meta(
            description="Token that temporary credentials come with; never shown.",
            extra={"fallbacks": ("AWS_SESSION_TOKEN",)},
        ),
    ] = None
    postgres_password: Annotated[
        Secret | None,
        Meta(
            description="Password of the user that LLOG_META names in a `postgresql://` address; never shown. "
            "Without it and "
            "LLOG_POSTGRES_PASSWORD_FILE, PostgreSQL's own password file (PGPASSFILE) is looked at.",
            extra={"fallbacks": ("PGPASSWORD",)},
        ),
    ] = None
    postgres_password_file: Annotated[
        str | None,
        Meta(
            description="File that holds that password and nothing else, instead of LLOG_POSTGRES_PASSWORD. It is "
            "read again for every "
            "connection, so that it can be replaced.",
            extra={"default": "none"},
        ),
    ] = None
    oxia_token: Annotated[
        Secret | None,
        Meta(
            description="Token that this process shows to Oxia, where Oxia asks for one; never shown to anybody else."
        ),
    ] = None
    oxia_token_file: Annotated[
        str | None,
        Meta(
            description="File that holds that token and nothing else, instead of LLOG_OXIA_TOKEN. It is read again "
            "every few seconds, so "
            "that it can be replaced.",
            extra={"default": "none"},
        ),
    ] = None
    oxia_ca_file: Annotated[
        str | None,
        Meta(
            description="File with the certificates, in PEM, of the authorities that an `oxias://` server's "
            "certificate may come from.",
            extra={"default": "the authorities that gRPC trusts"},
        ),
    ] = None
    session_timeout_ms: Annotated[
        int,
        Meta(
            description="How long the claims of a process that died stay: its compactions, and a keyed log in a "
            "bucket that it owned, "
            "wait so long for a successor.",
            ge=1000,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 10_000
    codec: Annotated[
        Literal["none", "lz4", "zstd"], Meta(description="How the records that this process writes are compressed.")
    ] = "none"
