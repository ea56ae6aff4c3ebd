"""Settings of the stores: their addresses, their credentials, and how records are written to them."""

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
            description="The directory of a local log. It holds `meta.sqlite` and `blobs/` unless LLOG_META and "
            "LLOG_BLOBS name other stores. A relative path starts at the current directory."
        ),
    ] = "./llog-data"
    meta: Annotated[
        str,
        Meta(
            description="The address of the metadata store: `sqlite:///absolute/path`, `sqlite://./relative/path`, "
            "`postgresql://user@host:port/database?schema=name` (hosts separated by commas; `sslmode`, `sslrootcert`, "
            "`sslcert`, `sslkey` and `host=/directory` of a Unix socket are understood, too), "
            "`oxia://host:port/namespace` (servers separated by commas; `oxias://` for TLS), or `memory://`, which is "
            "lost with the process.",
            extra={"default": "LLOG_OXIA_SERVICE_ADDRESS, else `meta.sqlite` in LLOG_DATA_DIR"},
        ),
    ] = ""
    blobs: Annotated[
        str,
        Meta(
            description="The address of the blob store: `file:///absolute/dir`, `file://./relative/dir`, "
            "`s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `memory://`, which is lost with the "
            "process, or `none`. With `none`, only readers work; they take the address of every blob from the "
            "metadata.",
            extra={
                "default": "the bucket LLOG_S3_BUCKET; else `none` if the metadata is on a server or any LLOG_S3_… "
                "is set; else `blobs/` in LLOG_DATA_DIR"
            },
        ),
    ] = ""
    oxia_service_address: Annotated[
        str | None,
        Meta(
            description="The servers of the Oxia cluster that holds the metadata, as `host:port`, separated by "
            "commas: another way to write LLOG_META=oxia://host:port/namespace.",
            extra={"default": "none: LLOG_META names the store"},
        ),
    ] = None
    oxia_namespace: Annotated[
        str, Meta(description="The namespace of the metadata in Oxia, with LLOG_OXIA_SERVICE_ADDRESS.")
    ] = OXIA_NAMESPACE
    oxia_session_timeout_ms: Annotated[
        int | None,
        Meta(
            description="How long a dead process's claims in Oxia block others. Set it to use another timeout than "
            "LLOG_SESSION_TIMEOUT_MS.",
            ge=2000,
            le=300_000,
            extra={"unit": "duration", "default": "LLOG_SESSION_TIMEOUT_MS, at least 2s and at most 5m"},
        ),
    ] = None
    s3_bucket: Annotated[
        str | None,
        Meta(
            description="The bucket that holds the blobs: another way to write LLOG_BLOBS=s3://bucket. The bucket "
            "must exist. Writers, brokers and compactors need a bucket; readers do not.",
            extra={"default": "none: LLOG_BLOBS names the store"},
        ),
    ] = None
    root_prefix: Annotated[
        str,
        Meta(
            description="A prefix for the names of all keys and blobs, before `llog/`. Set it to keep several logs "
            "apart in one metadata store and one bucket. It consists of letters, digits, `.`, `_` and `-`, with `/` "
            "between parts.",
            extra={"default": "none"},
        ),
    ] = ""
    client_identifier: Annotated[
        str | None,
        Meta(
            description="The name of this process in its claims, in the first lines that a broker logs, and in the "
            "user agent of its requests to object stores, metadata servers and brokers. It has up to 128 visible "
            "ASCII characters, as in `broker-1`.",
            extra={"default": "`llog-`, the host's name and the process id"},
        ),
    ] = None
    segments_dir: Annotated[
        str | None,
        Meta(
            description="The directory of the topics of engine `disk`, on a disk of this machine. Such topics need "
            "it; they cannot exist beside a `memory://` store.",
            extra={"default": "`segments/` beside the file of LLOG_META"},
        ),
    ] = None
    rocksdb_dir: Annotated[
        str | None,
        Meta(
            description="The directory of SQL's tables and of the topics of engine `rocksdb`, on a disk of this "
            "machine. One process at a time owns it. Tables and such topics need it; they cannot exist beside a "
            "`memory://` store.",
            extra={"default": "`rocksdb/` beside the file of LLOG_META"},
        ),
    ] = None
    keyed: Annotated[
        str | None,
        Meta(
            description="The address of the keyed log that the broker's `/keyed` routes, `llog keyed` and Spark's "
            "`llog-keyed` use: `file:///absolute/dir`, `file://./relative/dir`, `s3://bucket/prefix`, or `memory://`, "
            "which is lost with the process.",
            extra={"default": "none: there is no keyed log"},
        ),
    ] = None
    s3_endpoint_url: Annotated[
        str | None,
        Meta(
            description="The address of an S3-compatible server, as `http(s)://host:port`. Leave it unset for AWS.",
            extra={"fallbacks": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")},
        ),
    ] = None
    s3_region_name: Annotated[
        str | None,
        Meta(description="The region of the bucket.", extra={"fallbacks": ("AWS_REGION", "AWS_DEFAULT_REGION")}),
    ] = None
    s3_access_key_id: Annotated[
        str | None,
        Meta(
            description="The access key of the bucket. If none of the three S3 credentials is set, all of them come "
            "from the AWS variables; the two sources are never mixed.",
            extra={"fallbacks": ("AWS_ACCESS_KEY_ID",)},
        ),
    ] = None
    s3_secret_access_key: Annotated[
        Secret | None,
        Meta(
            description="The secret of the access key. It is never shown.",
            extra={"fallbacks": ("AWS_SECRET_ACCESS_KEY",)},
        ),
    ] = None
    s3_session_token: Annotated[
        Secret | None,
        Meta(
            description="The session token of temporary S3 credentials. It is never shown.",
            extra={"fallbacks": ("AWS_SESSION_TOKEN",)},
        ),
    ] = None
    postgres_password: Annotated[
        Secret | None,
        Meta(
            description="The password of the user in a `postgresql://` address of LLOG_META. It is never shown. "
            "Without this setting and LLOG_POSTGRES_PASSWORD_FILE, PostgreSQL's own password file (PGPASSFILE) "
            "counts.",
            extra={"fallbacks": ("PGPASSWORD",)},
        ),
    ] = None
    postgres_password_file: Annotated[
        str | None,
        Meta(
            description="A file that holds the PostgreSQL password and nothing else, instead of "
            "LLOG_POSTGRES_PASSWORD. It is read again for every connection, so the password can be replaced at any "
            "time.",
            extra={"default": "none"},
        ),
    ] = None
    oxia_token: Annotated[
        Secret | None,
        Meta(description="The token that this process sends to Oxia, if Oxia requires one. It is never shown."),
    ] = None
    oxia_token_file: Annotated[
        str | None,
        Meta(
            description="A file that holds the Oxia token and nothing else, instead of LLOG_OXIA_TOKEN. It is read "
            "again every few seconds, so the token can be replaced at any time.",
            extra={"default": "none"},
        ),
    ] = None
    oxia_ca_file: Annotated[
        str | None,
        Meta(
            description="A PEM file with the certificates of the authorities that may sign an `oxias://` server's "
            "certificate.",
            extra={"default": "the authorities that gRPC trusts"},
        ),
    ] = None
    session_timeout_ms: Annotated[
        int,
        Meta(
            description="How long a dead process's claims block others: for this long, nobody continues its "
            "compactions or takes over a keyed log in a bucket that it owned. Raise it if pauses of living processes "
            "let their claims expire.",
            ge=1000,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 10_000
    codec: Annotated[
        Literal["none", "lz4", "zstd"],
        Meta(description="How this process compresses the records that it writes. Readers understand every codec."),
    ] = "none"
    inline_max_bytes: Annotated[
        int,
        Meta(
            description="The most bytes of one append to one partition that go into the metadata store instead of a "
            "blob, if no append of the same batch is larger and the batch has at most 256 KiB. Lower it to spare the "
            "metadata store; 0 puts all records into blobs.",
            ge=0,
            le=256 << 10,
            extra={"unit": "size"},
        ),
    ] = 16 << 10
    inline_partition_max_bytes: Annotated[
        int,
        Meta(
            description="The most bytes of records that one partition may have in the metadata store. A partition "
            "that has them puts all appends into blobs until compaction has emptied it.",
            ge=1,
            le=16 << 20,
            extra={"unit": "size"},
        ),
    ] = 256 << 10
