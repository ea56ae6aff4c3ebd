"""Settings of a broker: batches, addresses, limits of requests, the tail cache and SQL."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llog.config.segments import SegmentSettings


class BrokerSettings(SegmentSettings, frozen=True, kw_only=True):
    """What a broker serves and within which limits, added to the settings before them."""

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
