"""The settings of Oxia and S3 by their own names, beside LLOG_META and LLOG_BLOBS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from devtools import docs
from llog.config import Settings, parse_targets
from llog.config.loading import load_settings
from llog.config.locations import NO_BLOBS
from llog.errors import ConfigurationError
from llog.spark.options import read_options

OXIA = {"LLOG_OXIA_SERVICE_ADDRESS": "127.0.0.1:6648"}
EVERY_NAME = {
    **OXIA,
    "LLOG_S3_BUCKET": "bucket",
    "LLOG_OXIA_NAMESPACE": "logs",
    "LLOG_ROOT_PREFIX": "team-a",
    "LLOG_OXIA_SESSION_TIMEOUT_MS": "15000",
    "LLOG_CLIENT_IDENTIFIER": "broker-1",
    "LLOG_S3_ENDPOINT_URL": "http://127.0.0.1:8333",
    "LLOG_S3_REGION_NAME": "us-east-1",
    "LLOG_S3_ACCESS_KEY_ID": "key",
    "LLOG_S3_SECRET_ACCESS_KEY": "secret",
    "LLOG_S3_SESSION_TOKEN": "token",
    "LLOG_BATCH_MAX_BYTES": "8388608",
    "LLOG_BATCH_MAX_DELAY_MS": "500",
    "LLOG_BATCH_MAX_BUFFER_BYTES": "67108864",
    "LLOG_TAIL_CACHE_DIR": "/dev/shm/llog",
    "LLOG_TAIL_CACHE_MAX_BYTES": "536870912",
    "LLOG_COMPACTOR_BIND_HOST": "127.0.0.1",
    "LLOG_COMPACTOR_PORT": "8081",
    "LLOG_COMPACTOR_ID": "compactor-1",
    "LLOG_COMPACTOR_TARGETS": "orders:0,orders:1",
    "LLOG_COMPACTOR_WORKERS": "4",
    "LLOG_COMPACTOR_DISCOVERY_INTERVAL_MS": "5000",
    "LLOG_COMPACTOR_IDLE_SLEEP_MS": "1000",
    "LLOG_COMPACTOR_ERROR_SLEEP_MS": "2000",
    "LLOG_COMPACTOR_IDLE_JITTER_MS": "250",
    "LLOG_COMPACTOR_ERROR_JITTER_MS": "250",
    "LLOG_COMPACTOR_MAX_OFFSETS_PER_RUN": "100000",
}


def test_all_27_names_are_accepted_and_carried_to_other_processes() -> None:
    assert len(EVERY_NAME) == 27
    settings = load_settings(environment=EVERY_NAME)
    assert (settings.meta, settings.blobs) == ("oxia://127.0.0.1:6648/logs", "s3://bucket")
    assert (settings.root_prefix, settings.client_name) == ("team-a", "broker-1")
    assert settings.store_session_timeout_ms == 15_000
    carried = settings.as_environment()
    assert load_settings(environment=carried) == settings
    assert EVERY_NAME.keys() <= carried.keys()


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_example_is_sourced_as_it_is_and_with_every_line_in_force(tmp_path: Path, shell: str) -> None:
    load = [
        sys.executable,
        "-c",
        "from llog.config.loading import load_settings; print(load_settings().as_environment())",
    ]
    source = f"cp .env.example .env && set -a && . ./.env && set +a && exec {' '.join(map(repr, load))}"
    example = docs.example_environment()
    in_force = "\n".join(line[1:] if line.startswith("#LLOG_") else line for line in example.splitlines()) + "\n"
    expected = Settings(data_dir=str(tmp_path / "llog-data")).as_environment()
    for text in (example, in_force):
        (tmp_path / ".env.example").write_text(text)
        ran = subprocess.run([shell, "-c", source], cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.strip() == str(expected)


def test_the_own_addresses_win_when_both_agree() -> None:
    both = {
        **OXIA,
        "LLOG_META": "oxia://127.0.0.1:6648/other",
        "LLOG_S3_BUCKET": "bucket",
        "LLOG_BLOBS": "s3://bucket/deep",
    }
    settings = load_settings(environment=both)
    assert (settings.meta, settings.blobs) == ("oxia://127.0.0.1:6648/other", "s3://bucket/deep")
    several = {"LLOG_OXIA_SERVICE_ADDRESS": "a:1,b:2", "LLOG_META": "oxia://b:2,a:1"}
    assert load_settings(environment=several).meta == "oxia://b:2,a:1/default"


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        (
            {**OXIA, "LLOG_META": "sqlite:///x"},
            r"LLOG_META is sqlite:///x and LLOG_OXIA_SERVICE_ADDRESS is 127\.0\.0\.1:6648",
        ),
        ({**OXIA, "LLOG_META": "oxia://other:1"}, "LLOG_META is oxia://other:1/default and LLOG_OXIA_SERVICE_ADDRESS"),
        (
            {"LLOG_META": "oxia://a:1/x", "LLOG_OXIA_NAMESPACE": "y"},
            "LLOG_META is oxia://a:1/x and LLOG_OXIA_NAMESPACE is 'y'",
        ),
        ({"LLOG_OXIA_NAMESPACE": "y"}, "LLOG_META is sqlite:.* and LLOG_OXIA_NAMESPACE is 'y'"),
        ({"LLOG_BLOBS": "s3://one/x", "LLOG_S3_BUCKET": "two"}, "LLOG_BLOBS is s3://one/x and LLOG_S3_BUCKET is two"),
        ({"LLOG_BLOBS": "file:///x", "LLOG_S3_BUCKET": "two"}, "LLOG_BLOBS is file:///x and LLOG_S3_BUCKET is two"),
        ({"LLOG_BLOBS": "none", "LLOG_S3_BUCKET": "two"}, "LLOG_BLOBS is none and LLOG_S3_BUCKET is two"),
    ],
)
def test_a_contradiction_names_both(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        load_settings(environment=environment)


def test_an_option_goes_before_every_way_to_name_a_store_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        **OXIA,
        "LLOG_OXIA_NAMESPACE": "x",
        "LLOG_OXIA_SESSION_TIMEOUT_MS": "20s",
        "LLOG_S3_BUCKET": "bucket",
    }
    stores = {"meta": f"sqlite://{tmp_path}/meta.sqlite", "blobs": f"file://{tmp_path}/blobs"}
    settings = load_settings(stores, environment=environment)
    assert {"meta": settings.meta, "blobs": settings.blobs} == stores
    given = load_settings(environment=environment)
    chosen = read_options({**stores, "subscribe": "t"}, streaming=False, settings=given).settings
    assert {"meta": chosen.meta, "blobs": chosen.blobs} == stores


def test_metadata_on_a_server_has_no_blobs_on_this_machine() -> None:
    settings = load_settings(environment=OXIA)
    assert (settings.meta, settings.blobs) == ("oxia://127.0.0.1:6648/default", NO_BLOBS)
    assert load_settings(environment=settings.as_environment()) == settings
    assert settings.store_session_timeout_ms == 10_000
    assert load_settings(environment={**OXIA, "LLOG_SESSION_TIMEOUT_MS": "1s"}).store_session_timeout_ms == 2000


@pytest.mark.parametrize(
    ("written", "kept"),
    [("", ""), ("llog", ""), ("/team/a/", "team/a"), ("team/a/llog", "team/a"), ("x.y_z-1", "x.y_z-1")],
)
def test_a_root_prefix_is_kept_without_what_goes_without_saying(tmp_path: Path, written: str, kept: str) -> None:
    settings = Settings(data_dir=str(tmp_path), root_prefix=written)
    assert settings.root_prefix == kept
    assert settings.segments_dir == str(tmp_path / kept / "segments")


@pytest.mark.parametrize("prefix", ["a//b", "a/../b", ".", "a b", "llog/x", "a/partitions", "ü", "x" * 129])
def test_a_root_prefix_that_would_mix_up_keys_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigurationError, match="LLOG_ROOT_PREFIX is "):
        Settings(root_prefix=prefix)


def test_targets_are_partitions_or_whole_topics() -> None:
    assert parse_targets("orders:0, clicks ,orders:12") == [("orders", 0), ("clicks", None), ("orders", 12)]
    assert parse_targets(None) == []


def test_both_roles_have_two_names() -> None:
    assert Settings().role == Settings(role="all").role == Settings(role="both").role == "both"


def test_a_process_has_a_name_without_being_given_one() -> None:
    assert Settings().client_name.startswith("llog-")
    assert " " not in Settings().client_name
