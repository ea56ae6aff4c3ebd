"""Settings of metrics, logs and traces: what is reported, in which form, and what the estimate of costs counts with."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llog.config.kafka import KafkaSettings


class MonitoringSettings(KafkaSettings, frozen=True, kw_only=True):
    """How a process is observed, in addition to the settings of a broker."""

    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="The form of a service's log on stderr: `text` for people, or a line of `json` per message."),
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="The least important messages that a service logs."),
    ] = "info"
    access_log: Annotated[
        Literal["off", "on"],
        Meta(
            description="Whether a broker logs every request (at the level `info`), with its id (`x-request-id`), the "
            "trace that its `traceparent` names, its status and its duration."
        ),
    ] = "off"
    otel_endpoint: Annotated[
        str | None,
        Meta(
            description="Where a broker sends traces by OpenTelemetry (OTLP over HTTP), such as "
            "http://127.0.0.1:4318/v1/traces. Needs the extra `otel`.",
            extra={"default": "none: nothing is traced"},
        ),
    ] = None
    run_info: Annotated[
        str | None,
        Meta(
            description="What describes this run, such as a load test, in the metrics: up to 20 `name=value` "
            "separated by commas (`scenario=six-clients,clients=6`). Numbers are exported as gauges, too.",
            extra={"default": "none"},
        ),
    ] = None
    price_storage_gb_month: Annotated[
        float,
        Meta(
            description="The price in US dollars of storing a GB (2^30 bytes) for a month, for the estimate of costs "
            "in the metrics and in `llog cost`. The defaults are those of S3 Standard in us-east-1.",
            ge=0,
            le=1_000_000,
        ),
    ] = 0.023
    price_put_1000: Annotated[
        float,
        Meta(description="The price in US dollars of 1,000 PUT, COPY, POST or LIST requests.", ge=0, le=1_000_000),
    ] = 0.005
    price_get_10000: Annotated[
        float, Meta(description="The price in US dollars of 10,000 GET and other requests.", ge=0, le=1_000_000)
    ] = 0.004
    footprint_interval_ms: Annotated[
        int,
        Meta(
            description="How old the number and size of the blobs in the bucket may be in the metrics. A request for "
            "metrics starts a new LIST of all blobs if they are older, but LISTs never exceed one in ten seconds on "
            "average. 0 turns the listing off.",
            ge=0,
            le=604_800_000,
            extra={"unit": "duration"},
        ),
    ] = 900_000
    group_lag_interval_ms: Annotated[
        int,
        Meta(
            description="How old the lag of consumer groups may be in the metrics. A request for metrics reads it "
            "again from the metadata store if it is older. 0 turns it off.",
            ge=0,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
