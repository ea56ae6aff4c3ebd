"""Settings of the Kafka protocol."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from llog.config.broker import BrokerSettings

KAFKA_PORT_DEFAULT: Final = 9092


class KafkaSettings(BrokerSettings, frozen=True, kw_only=True):
    """Where Kafka clients find a broker, in addition to the settings of the broker."""

    kafka_port: Annotated[
        int | None,
        Meta(
            description="The port on which a broker serves Kafka clients, at LLOG_BROKER_BIND_HOST. 0 turns the Kafka "
            "protocol off.",
            ge=0,
            le=65_535,
            extra={"default": "9092; if that port is taken, the broker logs a warning and goes on without it"},
        ),
    ] = None
    kafka_advertised: Annotated[
        str | None,
        Meta(
            description="Where Kafka clients reach this broker, as host:port. Set it if LLOG_BROKER_BIND_HOST is "
            "0.0.0.0 or ::, or if clients reach the broker through another address than it listens on.",
            extra={"default": "where the broker listens; the machine's name if that is every address of the machine"},
        ),
    ] = None
    zone: Annotated[
        str,
        Meta(
            description="The availability zone of this broker. Kafka clients that name the same zone (`client.rack`, "
            "or `zone_id=` in `client.id`) are sent to the brokers of their zone.",
            max_length=128,
        ),
    ] = ""
