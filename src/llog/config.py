"""Every setting, declared once: its name, type, bounds, default and what it is for. Where values come from:
`loading.py`.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from llog.base.secret import Secret as Secret
from llog.base.units import format_duration_ms, format_size
from llog.errors import ConfigurationError, InvalidArgument
from llog.locations import (
    NO_BLOBS,
    blobs_url,
    checked_prefix,
    meta_url,
    parse_address,
)
from llog.model import PARTITIONS_MAX, check_topic_name
from llog.stores.addresses import shown
from llog.stores.oxia.adapter import OXIA_NAMESPACE
from llog.stores.registry import meta_adapter, settings_prefixes

PREFIX: Final = "LLOG_"
# Examples for people, of which some are within the bounds of every setting.
_DURATIONS: Final = (500, 10_000, 3_600_000)
_SIZES: Final = (64 << 10, 64 << 20, 1 << 30)

_FOR_SERVICE: Final = (
    "No command of this version starts that service; the upkeep beside a broker looks at all partitions."
)
_IDENTIFIER: Final = re.compile(r"[!-~]{1,128}")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one process, checked when made and complete: paths are absolute, the stores' URLs are filled in.

    They pickle, and `as_environment` carries them to another process.
    """

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
    compactor_id: Annotated[
        str | None,
        Meta(
            description="Name of a compactor in its claims, so that people see which process compacts a partition.",
            extra={"default": "LLOG_CLIENT_IDENTIFIER"},
        ),
    ] = None
    compactor_idle_sleep_ms: Annotated[
        int,
        Meta(
            description="How long the upkeep beside a broker waits before it looks again for partitions to compact.",
            ge=1,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
    compactor_idle_jitter_ms: Annotated[
        int,
        Meta(
            description="Most time that is added to LLOG_COMPACTOR_IDLE_SLEEP_MS at random, so that many processes "
            "do not look at once.",
            ge=0,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 3000
    compactor_error_sleep_ms: Annotated[
        int,
        Meta(
            description="How long the upkeep beside a broker waits after a compaction that failed as a whole, for "
            "example because a store "
            "cannot be reached.",
            ge=1,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
    compactor_error_jitter_ms: Annotated[
        int,
        Meta(
            description="Most time that is added to LLOG_COMPACTOR_ERROR_SLEEP_MS at random.",
            ge=0,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 3000
    compactor_targets: Annotated[
        str | None,
        Meta(
            description="Partitions that a compactor service looks at before it has discovered any: "
            "`topic:partition`, or `topic` for all "
            "of its partitions, with commas between them. " + _FOR_SERVICE,
            extra={"default": "none: those that it discovers"},
        ),
    ] = None
    compactor_bind_host: Annotated[
        str, Meta(description="Address that a compactor service listens on. " + _FOR_SERVICE)
    ] = "127.0.0.1"
    compactor_port: Annotated[
        int,
        Meta(
            description="Port that a compactor service listens on; 0 takes a free one. " + _FOR_SERVICE, ge=0, le=65_535
        ),
    ] = 8081
    compactor_workers: Annotated[
        int, Meta(description="Partitions that a compactor service compacts at once. " + _FOR_SERVICE, ge=1, le=256)
    ] = 4
    compactor_discovery_interval_ms: Annotated[
        int,
        Meta(
            description="How often a compactor service looks for new partitions. " + _FOR_SERVICE,
            ge=100,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
    compactor_max_offsets_per_run: Annotated[
        int, Meta(description="Most records that one compaction joins into a blob.", ge=1, le=100_000_000)
    ] = 1_000_000
    compactor_max_bytes_per_run: Annotated[
        int,
        Meta(
            description="Most bytes that one compaction joins into a blob; it holds about twice as much in memory.",
            ge=1 << 10,
            le=1 << 30,
            extra={"unit": "size"},
        ),
    ] = 64 << 20
    collect_grace_ms: Annotated[
        int,
        Meta(
            description="How old a blob that nothing names must be to be collected: longer than any append or "
            "compaction takes.",
            ge=0,
            extra={"unit": "duration"},
        ),
    ] = 3_600_000
    segment_bytes: Annotated[
        int,
        Meta(
            description="Size at which a disk topic begins a new segment file. Retention removes whole segments.",
            ge=1 << 10,
            le=4 << 30,
            extra={"unit": "size"},
        ),
    ] = 1 << 30
    segment_ms: Annotated[
        int,
        Meta(
            description="Age at which a disk topic begins a new segment file with the next append, however small "
            "the old one is.",
            ge=1000,
            extra={"unit": "duration"},
        ),
    ] = 7 * 86_400_000
    segment_index_bytes: Annotated[
        int,
        Meta(
            description="A disk topic's index has one entry for so many bytes: fewer make it larger, and lookups "
            "quicker.",
            ge=64,
            le=16 << 20,
            extra={"unit": "size"},
        ),
    ] = 4 << 10
    segment_index_records: Annotated[
        int,
        Meta(
            description="A disk topic's index also has an entry for so many records, where they take fewer bytes than "
            "LLOG_SEGMENT_INDEX_BYTES; 0: only bytes count.",
            ge=0,
        ),
    ] = 0
    segment_frame_bytes: Annotated[
        int,
        Meta(
            description="Bytes of records, before compression, that a disk topic writes as one frame; a larger "
            "append becomes several "
            "frames, which recovery keeps or drops together. A frame is what a read decodes at least: fewer bytes "
            "make reads of "
            "single records cheaper, and appends a little slower.",
            ge=4 << 10,
            le=64 << 20,
            extra={"unit": "size"},
        ),
    ] = 1 << 20
    segment_fsync: Annotated[
        Literal["always", "interval", "os"],
        Meta(
            description="When a disk topic's records are on the disk. `always`: before an append is answered. "
            "`interval`: every "
            "LLOG_SEGMENT_FSYNC_INTERVAL_MS; a power cut can take what was answered since. `os`: when the "
            "operating system likes."
        ),
    ] = "always"
    segment_fsync_interval_ms: Annotated[
        int,
        Meta(
            description="How often a disk topic is synced with LLOG_SEGMENT_FSYNC=interval.",
            ge=1,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 1000
    segment_ahead_bytes: Annotated[
        int,
        Meta(
            description="With LLOG_SEGMENT_FSYNC=always, the file of a disk topic is made longer by up to so many "
            "zeros at a time: appends "
            "of up to a quarter of that are on the disk sooner. 0: never, as suits file systems that do not write "
            "in place "
            "(Btrfs, ZFS).",
            ge=0,
            le=16 << 20,
            extra={"unit": "size"},
        ),
    ] = 512 << 10
    batch_max_bytes: Annotated[
        int,
        Meta(
            description="A batching writer puts a blob as soon as this much waits.",
            ge=1,
            le=256 << 20,
            extra={"unit": "size"},
        ),
    ] = 8 << 20
    batch_max_delay_ms: Annotated[
        int,
        Meta(
            description="A batching writer puts a blob when its oldest record has waited this long: fewer, larger "
            "blobs against "
            "quicker answers.",
            ge=0,
            le=60_000,
            extra={"unit": "duration"},
        ),
    ] = 500
    batch_max_buffer_bytes: Annotated[
        int,
        Meta(
            description="Most that a batching writer holds in memory, waiting or under way; beyond it, callers "
            "wait, and "
            "a broker refuses requests with 429. One request of a broker never holds more than it leaves free for "
            "others.",
            ge=1,
            extra={"unit": "size"},
        ),
    ] = 64 << 20
    broker_bind_host: Annotated[
        str,
        Meta(
            description="Address that the broker listens on. It asks nobody for a password: beyond this machine, "
            "put a proxy in "
            "front of it that does."
        ),
    ] = "127.0.0.1"
    broker_port: Annotated[
        int, Meta(description="Port that the broker listens on; 0 takes a free one.", ge=0, le=65_535)
    ] = 8080
    broker_advertised_address: Annotated[
        str | None,
        Meta(
            description="Where other brokers reach this one, as http://host:port: they send it the requests for "
            "what it owns. Set it if "
            "LLOG_BROKER_BIND_HOST is 0.0.0.0 or ::, or if a proxy is between them.",
            extra={"default": "where the broker listens, unless that is every address of the machine"},
        ),
    ] = None
    broker_forward_timeout_ms: Annotated[
        int,
        Meta(
            description="How long a broker waits for the answer of another one that owns what a request asks for, "
            "besides the time that "
            "the request itself may wait. 0 forwards nothing: such requests get 421, with the owner's address.",
            ge=0,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
    broker_hosts: Annotated[
        str | None,
        Meta(
            description="Names that clients may call the broker by, with commas between them: `llog.example.com`, "
            "`*.example.com` for all "
            "below one, or `*` for any, where a proxy in front of the broker checks them.",
            extra={"default": "none: only localhost, LLOG_BROKER_BIND_HOST and any IP address"},
        ),
    ] = None
    auto_create: Annotated[
        str,
        Meta(
            description="What a write through a broker makes if it is missing. `lazy`: the topic, and the "
            "partitions up to the one that is "
            "written to, at most 64 more than there are. A number: a new topic gets this many partitions, or as "
            "many as the first request "
            "names; a topic that exists does not grow. `off`: nothing."
        ),
    ] = "lazy"
    request_max_bytes: Annotated[
        int,
        Meta(
            description="Largest body of a request that the broker reads; larger ones, and those over half of "
            "LLOG_BATCH_MAX_BUFFER_BYTES, are refused with 413.",
            ge=1 << 10,
            le=256 << 20,
            extra={"unit": "size"},
        ),
    ] = 16 << 20
    request_header_max_bytes: Annotated[
        int,
        Meta(
            description="Largest header of a request, its address included, that the broker reads; larger ones are "
            "refused with 431.",
            ge=1 << 10,
            le=16 << 20,
            extra={"unit": "size"},
        ),
    ] = 128 << 10
    request_timeout_ms: Annotated[
        int,
        Meta(
            description="How long the header of a request may take to arrive, and how long a body may arrive, or "
            "an answer be taken, more "
            "slowly than LLOG_REQUEST_MIN_BYTES_PER_SECOND; then the broker gives the request up. Raise it for "
            "clients on bad networks.",
            ge=100,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 10_000
    request_min_bytes_per_second: Annotated[
        int,
        Meta(
            description="Bytes per second at which the broker's clients must send bodies and take answers. Lower "
            "it for clients on slow "
            "networks.",
            ge=1,
            le=1 << 30,
            extra={"unit": "size"},
        ),
    ] = 16 << 10
    role: Annotated[
        Literal["both", "all", "write", "read"],
        Meta(
            description="What a broker answers besides health, metrics and what there is: `write` produces and the "
            "making of topics, "
            "`read` consumes, `both` (or `all`) everything."
        ),
    ] = "both"
    cors_origins: Annotated[
        str | None,
        Meta(
            description="Web pages that may ask the broker from a browser: their origins "
            "(`https://app.example.com`), with commas between "
            "them, or `*` for all pages.",
            extra={"default": "none: browsers let no other page read an answer"},
        ),
    ] = None
    tail_cache_dir: Annotated[
        str | None,
        Meta(
            description="Directory of the shared tail: brokers of this machine that name the same one read from "
            "there what others of "
            "them appended a moment ago. Best in memory (`/dev/shm/llog`). It must belong to the broker's user, "
            "and others must not be "
            "able to write there.",
            extra={"default": "none: nothing is shared"},
        ),
    ] = None
    tail_cache_max_bytes: Annotated[
        int,
        Meta(
            description="Most memory for batches that a broker appended or read a moment ago, so that consuming "
            "them asks no blob store. "
            "With LLOG_TAIL_CACHE_DIR also the most bytes of files there that the brokers of one log have, all "
            "together; a batch of more "
            "than an eighth of it is not shared. 0 keeps and shares nothing.",
            ge=0,
            extra={"unit": "size"},
        ),
    ] = 512 << 20
    sql_timeout_ms: Annotated[
        int,
        Meta(
            description="How long the statements of one request may run in a broker, waiting included, and how "
            "long one statement may "
            "compute in a program that uses the log without one; then they are cancelled.",
            ge=100,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 300_000
    sql_answer_max_bytes: Annotated[
        int,
        Meta(
            description="Most bytes of rows that a broker answers to the statements of one request.",
            ge=1 << 10,
            le=1 << 30,
            extra={"unit": "size"},
        ),
    ] = 64 << 20
    sql_memory_max_bytes: Annotated[
        int,
        Meta(
            description="Most memory for the copies of tables that SQL reads, and for what statements compute on "
            "them: those that need "
            "more fail. Statements that read no tables, and the reading of long texts, each have as much again. "
            "Enforced on Linux.",
            ge=64 << 20,
            extra={"unit": "size"},
        ),
    ] = 1 << 30

    def __post_init__(self) -> None:
        for setting in SETTINGS.values():
            check(setting, getattr(self, setting.field))
        directory = Path(self.data_dir).absolute()
        url = meta_url(self.meta, self.oxia_service_address, self.oxia_namespace, directory)
        meta = parse_address("meta", url)
        adapter = meta_adapter(meta.scheme)
        prefix = checked_prefix(self.root_prefix)
        complete = {
            "data_dir": str(directory),
            "meta": url,
            "blobs": blobs_url(self.blobs, self.s3_bucket, directory, is_local=adapter.is_local),
            "root_prefix": prefix,
            "role": "both" if self.role == "all" else self.role,
        }
        for field, given in (("segments_dir", self.segments_dir), ("rocksdb_dir", self.rocksdb_dir)):
            if given is not None:
                complete[field] = str(Path(given).absolute())
            elif (beside := adapter.directory(meta)) is not None:
                complete[field] = str(beside / prefix / field.removesuffix("_dir"))
        if self.keyed is not None:
            complete["keyed"] = parse_address("keyed", self.keyed).url
        for field in ("postgres_password_file", "oxia_token_file", "oxia_ca_file"):
            if (given := getattr(self, field)) is not None:
                complete[field] = str(Path(given).absolute())
        if self.tail_cache_dir is not None:
            complete["tail_cache_dir"] = str(Path(self.tail_cache_dir).absolute())
        for field, value in complete.items():
            msgspec.structs.force_setattr(self, field, value)
        if (self.s3_access_key_id is None) != (self.s3_secret_access_key is None):
            missing = "s3_access_key_id" if self.s3_access_key_id is None else "s3_secret_access_key"
            raise ConfigurationError(
                f"{SETTINGS[missing].variable} is missing: an access key and its secret go together"
            )
        if self.postgres_password is not None and self.postgres_password_file is not None:
            raise ConfigurationError(
                "LLOG_POSTGRES_PASSWORD and LLOG_POSTGRES_PASSWORD_FILE are both set: unset one of them"
            )
        if self.oxia_token is not None and self.oxia_token_file is not None:
            raise ConfigurationError("LLOG_OXIA_TOKEN and LLOG_OXIA_TOKEN_FILE are both set: unset one of them")
        if self.oxia_session_timeout_ms is not None and not self.uses_oxia:
            raise ConfigurationError(
                f"LLOG_OXIA_SESSION_TIMEOUT_MS is set, but LLOG_META is {shown(url)}: set LLOG_SESSION_TIMEOUT_MS "
                "instead"
            )
        for field in ("client_identifier", "compactor_id"):
            name = getattr(self, field)
            if name is not None and not _IDENTIFIER.fullmatch(name):
                raise ConfigurationError(
                    f"{SETTINGS[field].variable} is {name[:40]!r}: write 1 to 128 visible ASCII characters without "
                    "spaces"
                )
        parse_targets(self.compactor_targets)
        if self.auto_create not in ("lazy", "off"):
            number = self.auto_create
            if not (number.isascii() and number.isdecimal() and 1 <= int(number[:7]) <= PARTITIONS_MAX):
                raise ConfigurationError(
                    f"LLOG_AUTO_CREATE is {number[:40]!r}: write lazy, off, or a number of partitions from 1 to "
                    f"{PARTITIONS_MAX}"
                )
        if self.batch_max_buffer_bytes < self.batch_max_bytes:
            raise ConfigurationError(
                f"LLOG_BATCH_MAX_BUFFER_BYTES is {self.batch_max_buffer_bytes}, less than one batch "
                f"(LLOG_BATCH_MAX_BYTES is {self.batch_max_bytes}): raise it, or lower the other"
            )

    @property
    def uses_s3(self) -> bool:
        """Whether any store is in S3, or may be: without a blob store of its own, a reader gets blobs from where the
        metadata says.
        """
        return self.blobs == NO_BLOBS or any(
            url is not None and url.startswith("s3://") for url in (self.blobs, self.keyed)
        )

    @property
    def client_name(self) -> str:
        """What this process calls itself: LLOG_CLIENT_IDENTIFIER, or its host and process id."""
        return self.client_identifier or f"llog-{socket.gethostname()}-{os.getpid()}"

    @property
    def store_session_timeout_ms(self) -> int:
        """The session timeout for the metadata store that these settings name."""
        if not self.uses_oxia:
            return self.session_timeout_ms
        bounds = SETTINGS["oxia_session_timeout_ms"]
        assert bounds.low is not None
        assert bounds.high is not None
        return self.oxia_session_timeout_ms or min(max(self.session_timeout_ms, bounds.low), bounds.high)

    @property
    def uses_postgres(self) -> bool:
        """Whether the metadata store is a PostgreSQL database."""
        return self._reads_settings("postgres_")

    @property
    def uses_oxia(self) -> bool:
        """Whether the metadata store is Oxia."""
        return self._reads_settings("oxia_")

    def _reads_settings(self, prefix: str) -> bool:
        return meta_adapter(self.meta.partition("://")[0]).settings_prefix == prefix

    def as_environment(self) -> dict[str, str]:
        """All of it as `LLOG_…` variables, secrets in the clear: `load_settings` makes the same settings of them.

        Credentials that no store needs are left out.
        """
        unused = tuple(prefix for prefix in settings_prefixes() if not self._reads_settings(prefix))
        if not self.uses_s3:
            unused += ("s3_",)
        values = {
            setting: getattr(self, setting.field)
            for setting in SETTINGS.values()
            if not setting.field.startswith(unused)
        }
        return {
            setting.variable: value.value if isinstance(value, Secret) else str(value)
            for setting, value in values.items()
            if value is not None
        }


class Setting(NamedTuple):
    """The declaration of one setting, as read off `Settings`."""

    field: str
    kind: type
    """str, int or Secret."""
    choices: tuple[str, ...]
    optional: bool
    default: object
    doc: str
    low: int | None
    high: int | None
    unit: str | None
    fallbacks: tuple[str, ...]
    default_doc: str | None

    @property
    def variable(self) -> str:
        return PREFIX + self.field.upper()

    @property
    def accepts(self) -> str:
        """What may be written, for people."""
        if self.choices:
            return " or ".join((", ".join(self.choices[:-1]), self.choices[-1]))
        if self.kind is not int:
            return "text"
        what = {
            "duration": f"a duration such as {self._examples(_DURATIONS)}",
            "size": f"a size such as {self._examples(_SIZES)}",
            None: "a whole number",
        }
        bounds = [
            f"from {self.written(self.low)}" if self.low is not None else "",
            f"to {self.written(self.high)}" if self.high is not None else "",
        ]
        within = " ".join(filter(None, bounds))
        return f"{what[self.unit]}, {within}" if within else what[self.unit]

    def _examples(self, values: Sequence[int]) -> str:
        """Those of the values that are within the bounds, as people write them."""
        low, high = self.low or 0, math.inf if self.high is None else self.high
        return " or ".join(self.written(value) for value in values if low <= value <= high)

    def written(self, value: int) -> str:
        """A value as people write it."""
        if self.unit == "duration":
            return format_duration_ms(value)
        return format_size(value).replace(" ", "") if self.unit == "size" else str(value)


def _declared() -> dict[str, Setting]:
    hints = get_type_hints(Settings, include_extras=True)
    return {info.name: _declaration(info, hints[info.name]) for info in msgspec.structs.fields(Settings)}


def _declaration(info: msgspec.structs.FieldInfo, annotated: Any) -> Setting:
    kind, meta = get_args(annotated)
    alternatives = [each for each in get_args(kind) if each is not type(None)]
    choices: tuple[str, ...] = ()
    if get_origin(kind) is Literal:
        choices, plain = tuple(alternatives), str
    else:
        plain = alternatives[0] if alternatives else kind
    extra = meta.extra or {}
    return Setting(
        field=info.name,
        kind=plain,
        choices=choices,
        optional=not choices and bool(alternatives),
        default=info.default,
        doc=meta.description,
        low=meta.ge,
        high=meta.le,
        unit=extra.get("unit"),
        fallbacks=extra.get("fallbacks", ()),
        default_doc=extra.get("default"),
    )


SETTINGS: Final[Mapping[str, Setting]] = _declared()
"""By field name, in the order of declaration."""


def parse_targets(text: str | None) -> list[tuple[str, int | None]]:
    """The topics and partitions of LLOG_COMPACTOR_TARGETS; None for all partitions of a topic."""
    targets: list[tuple[str, int | None]] = []
    for each in filter(None, (text or "").replace(" ", "").split(",")):
        topic, colon, partition = each.partition(":")
        is_number = partition.isascii() and partition.isdecimal() and int(partition[:7]) < PARTITIONS_MAX
        try:
            if colon and not is_number:
                raise InvalidArgument(f"{partition[:40]!r} is no partition")
            targets.append((check_topic_name(topic), int(partition) if colon else None))
        except InvalidArgument as error:
            raise ConfigurationError(
                f"LLOG_COMPACTOR_TARGETS names {each[:80]!r}: write topic:partition or topic, with commas between "
                f"them ({error})"
            ) from error
    return targets


def check(setting: Setting, value: object, source: str | None = None) -> None:
    """Type and bounds, which hold however the settings were made."""
    if value is None and setting.optional:
        return
    fits = isinstance(value, setting.kind) and not isinstance(value, bool)
    if fits and isinstance(value, int):
        fits = (setting.low is None or value >= setting.low) and (setting.high is None or value <= setting.high)
    if fits and setting.choices:
        fits = value in setting.choices
    if not fits:
        given = "a value that is not shown" if setting.kind is Secret else repr(value)[:80]
        raise ConfigurationError(f"{source or setting.variable} is {given}: it must be {setting.accepts}")
    if setting.field in ("s3_endpoint_url", "broker_advertised_address") and not _is_http(str(value)):
        raise ConfigurationError(
            f"{source or setting.variable} is {shown(str(value))!r}: it must be http://host:port or https://host:port"
        )


def _is_http(url: str) -> bool:
    """Whether it is the address of an HTTP server, without credentials."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in url
    except ValueError:  # its port is no number
        return False
