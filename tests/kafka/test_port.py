"""The Kafka port: when it is opened, what is advertised, and what is said if it cannot be."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka.admin import AdminClient

from llog.cli.main import main
from llog.config import Settings
from llog.errors import ConfigurationError
from llog.kafka import listener
from llog.kafka.listener import KafkaPort
from tests.broker.test_process import LIMIT_S
from tests.kafka.serving import KafkaBroker, kafka_broker


def settings(**given: Any) -> Settings:
    return Settings(meta="memory://kafka", blobs="memory://kafka", **given)


def test_a_port_that_was_chosen_must_be_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} of 127.0.0.1 is in use.*LLOG_KAFKA_PORT"):
            KafkaPort.open(settings(kafka_port=port))


def test_the_default_port_may_be_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        port = taken.getsockname()[1]
        monkeypatch.setattr(listener, "KAFKA_PORT_DEFAULT", port)
        assert KafkaPort.open(settings()) is None
    (record,) = caplog.records
    assert record.getMessage().startswith(f"port {port} is taken, so Kafka clients are not served")


def test_zero_turns_it_off_and_other_roles_do_without() -> None:
    assert KafkaPort.open(settings(kafka_port=0)) is None
    assert KafkaPort.open(settings(role="read")) is None
    with pytest.raises(ConfigurationError, match="LLOG_KAFKA_PORT is 9, but this broker has the role write"):
        KafkaPort.open(settings(kafka_port=9, role="write"))


@pytest.mark.parametrize("wrong", ["nowhere", "host:", ":9092", "host:0", "host:99999", "host:x"])
def test_an_advertised_address_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="it must be host:port"):
        KafkaPort.open(settings(kafka_port=_free(), kafka_advertised=wrong))


def test_clients_are_told_the_advertised_address(tmp_path: Path) -> None:
    with kafka_broker(tmp_path, {"LLOG_KAFKA_ADVERTISED": "broker.example:19092", "LLOG_ZONE": "a"}) as broker:
        found = AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=LIMIT_S)
        assert [(node.host, node.port) for node in found.brokers.values()] == [("broker.example", 19092)]


def test_several_processes_and_kafka_clients_do_not_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLOG_KAFKA_PORT", str(_free()))
    ended = CliRunner().invoke(main, ["serve", "--workers", "2", "--port", "0"])
    assert ended.exit_code == 2
    assert "Kafka clients are served by one process" in ended.output


def test_requests_of_kafka_clients_are_counted(broker: KafkaBroker) -> None:
    AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=LIMIT_S)
    counted = broker.process.client.get("/metrics/prometheus").text
    assert 'llog_kafka_requests_total{api="Metadata"}' in counted
    assert "llog_kafka_connections" in counted


def _free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
