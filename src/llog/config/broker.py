"""Settings of a broker: batches, addresses, limits of requests, the tail cache and SQL."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from llog.config.segments import SegmentSettings

BATCH_DELAY_MS_DEFAULT: Final = 500


class BrokerSettings(SegmentSettings, frozen=True, kw_only=True):
    """What a broker serves and within which limits, in addition to the settings of disk topics."""

    batch_max_bytes: Annotated[
        int,
        Meta(
            description="How many bytes of records a batching writer collects before it puts a blob.",
            ge=1,
            le=256 << 20,
            extra={"unit": "size"},
        ),
    ] = 8 << 20
    batch_max_delay_ms: Annotated[
        int | None,
        Meta(
            description="How long the oldest record of a batching writer waits before the writer puts a blob. Raise "
            "it for fewer and larger blobs; lower it for quicker acknowledgements. Every blob in a bucket costs a PUT: "
            "at 500ms a busy broker pays for 5 million in a month, about $26 at $5 for a million.",
            ge=0,
            le=60_000,
            extra={
                "unit": "duration",
                "default": "500ms if the blobs are in a bucket; with local files, records wait only for the batch "
                "before theirs",
            },
        ),
    ] = None
    batch_max_buffer_bytes: Annotated[
        int,
        Meta(
            description="The most memory for records that a batching writer has not appended yet. Beyond it, callers "
            "wait, and a broker refuses requests with 429. A single request gets at most half of what the others "
            "leave.",
            ge=1,
            extra={"unit": "size"},
        ),
    ] = 64 << 20
    broker_bind_host: Annotated[
        str,
        Meta(
            description="The address that the broker listens on. The broker does not authenticate its clients: to "
            "serve other machines, put a proxy in front of it that does."
        ),
    ] = "127.0.0.1"
    broker_port: Annotated[
        int, Meta(description="The port that the broker listens on; 0 takes a free one.", ge=0, le=65_535)
    ] = 8080
    workers: Annotated[
        int,
        Meta(
            description="How many processes `llog serve` serves its port with. Raise it, up to the number of cores, if "
            "one core is busy with requests. The limits of memory, connections and requests are those of each process.",
            ge=1,
            le=64,
        ),
    ] = 1
    broker_advertised_address: Annotated[
        str | None,
        Meta(
            description="Where other brokers reach this one, as http://host:port, to forward requests for what it "
            "owns. Set it if LLOG_BROKER_BIND_HOST is 0.0.0.0 or ::, or if a proxy stands between the brokers.",
            extra={"default": "where the broker listens, unless that is every address of the machine"},
        ),
    ] = None
    broker_forward_timeout_ms: Annotated[
        int,
        Meta(
            description="How long a broker waits for the answer to a request that it forwarded to the owner, beyond "
            "the time that the request itself may wait. With 0, the broker forwards nothing: it answers 421 with the "
            "owner's address.",
            ge=0,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
    broker_hosts: Annotated[
        str | None,
        Meta(
            description="The host names under which clients may call the broker, separated by commas: "
            "`llog.example.com`, `*.example.com` for all names below one, or `*` for any name, if a proxy in front of "
            "the broker checks them.",
            extra={"default": "none: only localhost, LLOG_BROKER_BIND_HOST and any IP address"},
        ),
    ] = None
    auto_create: Annotated[
        str,
        Meta(
            description="What a write through a broker creates if it is missing. `lazy`: the topic, and its "
            "partitions up to the one written to, at most 64 more than exist. A number: a new topic with this many "
            "partitions, or with as many as the first request names; an existing topic does not grow. `off`: nothing."
        ),
    ] = "lazy"
    request_max_bytes: Annotated[
        int,
        Meta(
            description="The largest request body that the broker reads. It refuses larger ones, and those over half "
            "of LLOG_BATCH_MAX_BUFFER_BYTES, with 413.",
            ge=1 << 10,
            le=256 << 20,
            extra={"unit": "size"},
        ),
    ] = 16 << 20
    request_header_max_bytes: Annotated[
        int,
        Meta(
            description="The largest request header, including the request's address, that the broker reads. It "
            "refuses larger ones with 431.",
            ge=1 << 10,
            le=16 << 20,
            extra={"unit": "size"},
        ),
    ] = 128 << 10
    request_timeout_ms: Annotated[
        int,
        Meta(
            description="How long the header of a request may take to arrive, and how long a client may send a body "
            "or read an answer more slowly than LLOG_REQUEST_MIN_BYTES_PER_SECOND, before the broker gives the "
            "request up. Raise it for clients on bad networks.",
            ge=100,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 10_000
    request_min_bytes_per_second: Annotated[
        int,
        Meta(
            description="How many bytes per second clients must send of a body, or read of an answer. Lower it for "
            "clients on slow networks.",
            ge=1,
            le=1 << 30,
            extra={"unit": "size"},
        ),
    ] = 16 << 10
    role: Annotated[
        Literal["both", "all", "write", "read"],
        Meta(
            description="Which requests a broker answers besides health, metrics and listings: `write` appends and "
            "creates topics, `read` consumes, `both` (or `all`) does everything."
        ),
    ] = "both"
    cors_origins: Annotated[
        str | None,
        Meta(
            description="The origins of the web pages whose scripts may read the broker's answers, separated by "
            "commas (`https://app.example.com`), or `*` for all pages.",
            extra={"default": "none: browsers let no other page read an answer"},
        ),
    ] = None
    tail_cache_dir: Annotated[
        str | None,
        Meta(
            description="The directory of the shared tail: brokers of this machine that name the same directory read "
            "from it what the others have just appended. It is best in memory (`/dev/shm/llog`), must belong to the "
            "broker's user, and must not be writable by others.",
            extra={"default": "none: nothing is shared"},
        ),
    ] = None
    tail_cache_max_bytes: Annotated[
        int,
        Meta(
            description="The most memory for recently appended or read batches, which a broker serves without asking "
            "the blob store. With LLOG_TAIL_CACHE_DIR, it also bounds the files there, for all brokers of one log "
            "together; a batch larger than an eighth of it is not shared. 0 turns both caches off.",
            ge=0,
            extra={"unit": "size"},
        ),
    ] = 512 << 20
    tail_staleness_ms: Annotated[
        int,
        Meta(
            description="How old a broker's knowledge of a partition's bounds may be when it serves records from "
            "memory, and so how long records may still be served after they were trimmed or their topic was deleted. "
            "An answer without records never rests on knowledge that is older than its request. 0 asks the metadata "
            "store for every request.",
            ge=0,
            le=60_000,
            extra={"unit": "duration"},
        ),
    ] = 1000
    sql_timeout_ms: Annotated[
        int,
        Meta(
            description="How long the statements of one request may run in a broker, including waits, and how long "
            "one statement may compute in a program that uses the log without a broker. Then they are cancelled.",
            ge=100,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 300_000
    sql_answer_max_bytes: Annotated[
        int,
        Meta(
            description="The most bytes of rows in a broker's answer to the statements of one request.",
            ge=1 << 10,
            le=1 << 30,
            extra={"unit": "size"},
        ),
    ] = 64 << 20
    sql_memory_max_bytes: Annotated[
        int,
        Meta(
            description="The most memory for the copies of tables that SQL reads and for what statements compute on "
            "them; a statement that needs more fails. Statements without tables, and the parsing of long statements, "
            "have as much again each. The limit is enforced on Linux.",
            ge=64 << 20,
            extra={"unit": "size"},
        ),
    ] = 1 << 30

    @property
    def batch_delay_ms(self) -> int:
        """LLOG_BATCH_MAX_DELAY_MS, or its default for blobs in a bucket."""
        return BATCH_DELAY_MS_DEFAULT if self.batch_max_delay_ms is None else self.batch_max_delay_ms
