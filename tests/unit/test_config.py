"""Settings: where they come from, what is refused, and that a secret never shows."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devtools import docs
from llog.base.units import epoch_ms, format_duration_ms, parse_duration_ms, parse_size
from llog.config import SETTINGS, Secret, Settings
from llog.config.loading import load_settings
from llog.config.locations import NO_BLOBS
from llog.errors import ConfigurationError, InvalidArgument


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_any_setting_the_log_is_in_the_current_directory(tmp_path: Path) -> None:
    settings = load_settings(environment={})
    assert settings.meta == f"sqlite://{tmp_path}/llog-data/meta.sqlite"
    assert settings.blobs == f"file://{tmp_path}/llog-data/blobs"
    assert settings.collect_grace_ms == 3_600_000


def test_disk_topics_are_beside_the_metadata_unless_told_otherwise(tmp_path: Path) -> None:
    def directory(**variables: str) -> str | None:
        return load_settings(environment={f"LLOG_{name}": value for name, value in variables.items()}).segments_dir

    assert directory() == f"{tmp_path}/llog-data/segments"
    assert directory(META="sqlite:///var/llog/meta.db", BLOBS="s3://bucket") == "/var/llog/segments"
    assert directory(SEGMENTS_DIR="here") == f"{tmp_path}/here"
    assert directory(META="memory://", BLOBS="memory://") is None
    assert directory(META="memory://", BLOBS="memory://", SEGMENTS_DIR="/there") == "/there"


def test_the_rocksdb_is_beside_the_metadata_unless_told_otherwise(tmp_path: Path) -> None:
    def directory(**variables: str) -> str | None:
        return load_settings(environment={f"LLOG_{name}": value for name, value in variables.items()}).rocksdb_dir

    assert directory() == f"{tmp_path}/llog-data/rocksdb"
    assert directory(META="sqlite:///var/llog/meta.db", BLOBS="s3://bucket") == "/var/llog/rocksdb"
    assert directory(ROCKSDB_DIR="here") == f"{tmp_path}/here"
    assert directory(META="memory://", BLOBS="memory://") is None


def test_an_override_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "llog.toml").write_text('codec = "lz4"\nbatch_max_bytes = "1MiB"\nbatch_max_delay_ms = 7\n')
    environment = {"LLOG_CODEC": "zstd", "LLOG_BATCH_MAX_BYTES": "2MiB"}
    settings = load_settings({"codec": "none", "meta": None}, environment=environment)
    assert (settings.codec, settings.batch_max_bytes, settings.batch_max_delay_ms) == ("none", 2 << 20, 7)


def test_a_named_file_goes_before_the_one_in_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "llog.toml").write_text('codec = "lz4"\n')
    other = tmp_path / "other.toml"
    other.write_text('codec = "zstd"\n')
    assert load_settings(environment={"LLOG_CONFIG": str(other)}).codec == "zstd"
    assert load_settings(environment={}, config_file=other).codec == "zstd"


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"LLOG_MTEA": "x"}, "LLOG_META"),
        ({"LLOG_codec": "lz4"}, "LLOG_CODEC"),
        ({"LLOG_CODEC": "gzip"}, "none, lz4 or zstd"),
        ({"LLOG_SESSION_TIMEOUT_MS": "5"}, "from 1s"),
        ({"LLOG_SESSION_TIMEOUT_MS": "soon"}, "LLOG_SESSION_TIMEOUT_MS is 'soon'"),
        ({"LLOG_COMPACTOR_MAX_OFFSETS_PER_RUN": "-1"}, "LLOG_COMPACTOR_MAX_OFFSETS_PER_RUN"),
        ({"LLOG_SEGMENT_FSYNC": "never"}, "always, interval or os"),
        ({"LLOG_SEGMENT_BYTES": "10"}, "a size such as 64KiB or 64MiB or 1GiB, from 1KiB to 4GiB"),
        ({"LLOG_META": "oxia://host"}, "LLOG_META names the Oxia server 'host': write host:port"),
        ({"LLOG_OXIA_SERVICE_ADDRESS": "a:1,b:70000"}, "LLOG_OXIA_SERVICE_ADDRESS names the Oxia server 'b:70000'"),
        ({"LLOG_OXIA_SESSION_TIMEOUT_MS": "1s", "LLOG_OXIA_SERVICE_ADDRESS": "a:1"}, "from 2s to 5m"),
        ({"LLOG_OXIA_SESSION_TIMEOUT_MS": "20s"}, "LLOG_OXIA_SESSION_TIMEOUT_MS is set, but LLOG_META is sqlite:"),
        ({"LLOG_S3_BUCKET": "s3://bucket"}, "LLOG_S3_BUCKET is 's3://bucket': write the name of a bucket"),
        ({"LLOG_CLIENT_IDENTIFIER": "two words"}, "LLOG_CLIENT_IDENTIFIER is 'two words'"),
        ({"LLOG_COMPACTOR_ID": "x" * 129}, "LLOG_COMPACTOR_ID"),
        ({"LLOG_COMPACTOR_PORT": "65536"}, "LLOG_COMPACTOR_PORT"),
        ({"LLOG_COMPACTOR_WORKERS": "0"}, "LLOG_COMPACTOR_WORKERS"),
        ({"LLOG_COMPACTOR_TARGETS": "orders:x"}, "LLOG_COMPACTOR_TARGETS names 'orders:x'"),
        ({"LLOG_ROLE": "none"}, "both, all, write or read"),
        ({"LLOG_META": "postgres://x"}, "LLOG_META"),
        ({"LLOG_META": "sqlite://host/path"}, "sqlite:///absolute/path"),
        ({"LLOG_META": "sqlite://"}, "sqlite:///absolute/path"),
        ({"LLOG_BLOBS": "/var/blobs"}, "file://"),
        ({"LLOG_BLOBS": "s3:///prefix"}, "names no bucket"),
        ({"LLOG_S3_ENDPOINT_URL": "localhost:9000"}, "http://host:port"),
        ({"LLOG_S3_ACCESS_KEY_ID": "key"}, "LLOG_S3_SECRET_ACCESS_KEY is missing"),
        ({"LLOG_BATCH_MAX_BUFFER_BYTES": "1MiB"}, "LLOG_BATCH_MAX_BUFFER_BYTES"),
        ({"LLOG_CONFIG": "nowhere.toml"}, "nowhere.toml"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named.replace("(", r"\(")):
        load_settings(environment=environment)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("codecs = 'lz4'", "did you mean codec"),
        ("codec = 3", "codec in"),
        ("codec = ", "not valid TOML"),
        ("[s3]", "'s3'"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "llog.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        load_settings(environment={})


def test_variables_of_the_tests_are_no_settings() -> None:
    load_settings(
        environment={
            "LLOG_TEST_ANYTHING": "1",
            "LLOG_REQUIRE_SERVERS": "1",
            "LLOG_HYPOTHESIS_PROFILE": "x",
            "HOME": "/",
        }
    )


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load_settings(environment={"LLOG_CODEC": "", "LLOG_META": ""}) == load_settings(environment={})


def test_settings_that_are_made_directly_are_checked_too() -> None:
    with pytest.raises(ConfigurationError, match="LLOG_BATCH_MAX_DELAY_MS"):
        Settings(batch_max_delay_ms=-1)
    with pytest.raises(ConfigurationError, match="LLOG_CODEC"):
        Settings(codec="gzip")  # type: ignore[arg-type]


def test_aws_variables_fill_in_what_nobody_set() -> None:
    aws = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_DEFAULT_REGION": "eu-west-1",
        "AWS_ACCESS_KEY_ID": "aws-key",
        "AWS_SECRET_ACCESS_KEY": "aws-secret",
        "AWS_SESSION_TOKEN": "aws-token",
    }
    settings = load_settings(environment=aws)
    assert settings.s3_endpoint_url == "http://127.0.0.1:1"
    assert settings.s3_region_name == "eu-west-1"
    assert settings.s3_session_token == Secret("aws-token")


def test_credentials_of_two_places_are_never_mixed() -> None:
    environment = {
        "LLOG_BLOBS": "s3://bucket",
        "LLOG_S3_ACCESS_KEY_ID": "own-key",
        "LLOG_S3_SECRET_ACCESS_KEY": "own-secret",
        "AWS_ACCESS_KEY_ID": "aws-key",
        "AWS_SECRET_ACCESS_KEY": "aws-secret",
        "AWS_SESSION_TOKEN": "aws-token",
    }
    settings = load_settings(environment=environment)
    assert settings.s3_access_key_id == "own-key"
    assert settings.s3_session_token is None
    assert load_settings(environment={"AWS_ACCESS_KEY_ID": "half"}).s3_access_key_id is None


def test_a_secret_is_in_no_representation_and_in_no_error() -> None:
    secrets = {"LLOG_S3_ACCESS_KEY_ID": "key", "LLOG_S3_SECRET_ACCESS_KEY": "hush-1", "LLOG_S3_SESSION_TOKEN": "hush-2"}
    settings = load_settings(environment={"LLOG_BLOBS": "s3://bucket"} | secrets)
    assert "hush" not in repr(settings) + str(settings) + str(settings.s3_secret_access_key)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(environment={"LLOG_BLOBS": "s3://key:hush-3@bucket/prefix"})
    assert "hush" not in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings({"s3_secret_access_key": 12}, environment={})
    assert "12" not in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(environment={"LLOG_S3_ENDPOINT_URL": "http://key:hush-4@host:1"})
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "url"),
    [
        ("LLOG_BLOBS", "az://box?sv=1&sig=hush"),
        ("LLOG_BLOBS", "az://box?sv=1&sig=hush/prefix"),
        ("LLOG_BLOBS", "s3://bucket/prefix?X-Amz-Signature=hush"),
        ("LLOG_BLOBS", "s3://key:word@bucket?X-Amz-Signature=hush"),
        ("LLOG_BLOBS", "https://account.blob.core.windows.net/box?sig=hush"),
        ("LLOG_META", "oxia://host?token=hush"),
        ("LLOG_S3_ENDPOINT_URL", "ftp://host:1?token=hush"),
    ],
)
def test_a_secret_among_the_parameters_of_an_address_is_refused_and_not_shown(variable: str, url: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{variable} is '") as caught:
        load_settings(environment={variable: url})
    assert "hush" not in str(caught.value)


def test_settings_travel_by_pickle_and_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(
        {"data_dir": "a directory#1", "codec": "zstd"},
        environment={
            "LLOG_KEYED": "s3://bucket",
            "LLOG_S3_ACCESS_KEY_ID": "key",
            "LLOG_S3_SECRET_ACCESS_KEY": "secret",
            "LLOG_COLLECT_GRACE_MS": "2h",
        },
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert load_settings(environment=settings.as_environment()) == settings


def test_a_relative_store_is_made_absolute_once(tmp_path: Path) -> None:
    settings = load_settings({"meta": "sqlite://./here/meta.sqlite", "blobs": "file://./there/"}, environment={})
    assert settings.meta == f"sqlite://{tmp_path}/here/meta.sqlite"
    assert settings.blobs == f"file://{tmp_path}/there"
    assert load_settings({"blobs": "s3://bucket/a/b/"}, environment={}).blobs == "s3://bucket/a/b"


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("500", 500), ("10s", 10_000), ("1.5h", 5_400_000), ("7d", 604_800_000), ("2 m", 120_000)],
)
def test_durations_are_read_as_people_write_them(text: str, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64MiB", 64 << 20), ("64mib", 64 << 20), ("1.5GiB", 3 << 29), ("10MB", 10_000_000)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1s", "1x", "h", "1e3", "1s2", "99999999999w", "1_000", "١s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_duration_ms(text)


@given(st.integers(0, 10**12))
def test_a_formatted_duration_reads_back(milliseconds: int) -> None:
    assert parse_duration_ms(format_duration_ms(milliseconds)) == milliseconds


@given(st.integers(-62_000_000_000_000, 253_000_000_000_000), st.integers(0, 999), st.integers(-12, 12))
def test_a_time_of_any_year_and_zone_is_its_ms(ms: int, microseconds: int, hours: int) -> None:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms, microseconds=microseconds)
    assert epoch_ms(moment.astimezone(timezone(timedelta(hours=hours)))) == ms
    assert epoch_ms(moment.replace(tzinfo=None)) == ms


def test_every_setting_is_documented_and_the_documentation_is_fresh(tmp_path: Path) -> None:
    assert all(setting.variable in docs.configuration() for setting in SETTINGS.values())
    assert docs.main(["--check"], root=tmp_path) == 1
    assert docs.main([], root=tmp_path) == 0
    assert docs.main(["--check"], root=tmp_path) == 0
    (tmp_path / "docs/configuration.md").write_text("something else")
    assert docs.main(["--check"], root=tmp_path) == 1


def test_variables_that_kubernetes_injects_are_not_settings() -> None:
    injected = {
        "LLOG_SERVICE_HOST": "10.0.0.1",
        "LLOG_SERVICE_PORT": "8080",
        "LLOG_SERVICE_PORT_HTTP": "8080",
        "LLOG_PORT": "tcp://10.0.0.1:8080",
        "LLOG_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "LLOG_PORT_8080_TCP_PROTO": "tcp",
        "LLOG_PORT_8080_TCP_PORT": "8080",
        "LLOG_PORT_8080_TCP_ADDR": "10.0.0.1",
        "LLOG_BROKER_SERVICE_HOST": "10.0.0.1",
        "LLOG_BROKER_PORT": "tcp://10.0.0.1:8080",
    }
    assert load_settings(environment=injected) == load_settings(environment={})


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("LLOG_PORT", "LLOG_BROKER_PORT"), ("LLOG_DATADIR", "LLOG_DATA_DIR"), ("LLOG_SERVICE_HOSTS", "LLOG_BROKER_HOSTS")],
)
def test_a_misspelt_setting_is_named_with_the_nearest_one(variable: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{variable}: did you mean .*{meant}") as raised:
        load_settings(environment={variable: "8080"})
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 200


def test_settings_of_s3_without_a_bucket_leave_only_readers() -> None:
    settings = load_settings(environment={"LLOG_S3_ENDPOINT_URL": "http://127.0.0.1:1"})
    assert settings.blobs == NO_BLOBS
    assert load_settings(environment=settings.as_environment()) == settings
    for local in ("LLOG_BLOBS", "LLOG_KEYED"):
        environment = {"LLOG_BLOBS": "file:///blobs", "LLOG_S3_REGION_NAME": "eu-west-1", local: "file:///elsewhere"}
        with pytest.raises(
            ConfigurationError, match=r"LLOG_S3_REGION_NAME is set, but LLOG_BLOBS is file:.*s3://bucket"
        ):
            load_settings(environment=environment)
    for variable in ("LLOG_BLOBS", "LLOG_KEYED"):
        load_settings(environment={"LLOG_S3_REGION_NAME": "eu-west-1", variable: "s3://bucket/prefix"})
    machine = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hush", "AWS_REGION": "eu-west-1"}
    local_log = load_settings(environment=machine)
    assert load_settings(environment=local_log.as_environment()).blobs == local_log.blobs


def test_examples_in_errors_are_within_the_bounds_beside_them() -> None:
    with pytest.raises(ConfigurationError, match="such as 64KiB or 64MiB, from 1KiB to 256MiB"):
        load_settings(environment={"LLOG_REQUEST_MAX_BYTES": "1GiB"})
    for setting in SETTINGS.values():
        assert "such as ," not in setting.accepts
        assert not setting.accepts.endswith("such as ")


def test_an_address_that_needs_no_credentials_is_not_told_where_to_put_them() -> None:
    with pytest.raises(ConfigurationError, match="leave them out"):
        load_settings(environment={"LLOG_META": "sqlite://user@host/file"})


def test_the_password_of_postgresql_is_carried_only_where_it_is_needed(tmp_path: Path) -> None:
    meta = "postgresql://llog@db/llog?schema=x"
    given = load_settings(environment={"LLOG_META": meta, "LLOG_POSTGRES_PASSWORD": "hush", "PGPASSWORD": "other"})
    assert given.meta == "postgresql://llog@db:5432/llog?schema=x"
    assert given.postgres_password == Secret("hush")
    assert given.as_environment()["LLOG_POSTGRES_PASSWORD"] == "hush"
    assert "hush" not in repr(given)
    assert load_settings(environment={"LLOG_META": meta, "PGPASSWORD": "hush"}).postgres_password == Secret("hush")
    of_file = load_settings(environment={"LLOG_META": meta, "PGPASSWORD": "hush", "LLOG_POSTGRES_PASSWORD_FILE": "f"})
    assert (of_file.postgres_password, of_file.postgres_password_file) == (None, f"{tmp_path}/f")
    for settings in (given, of_file):
        assert load_settings(environment=settings.as_environment()) == settings
        assert pickle.loads(pickle.dumps(settings)) == settings
    local = load_settings(environment={"PGPASSWORD": "hush"})
    assert "LLOG_POSTGRES_PASSWORD" not in local.as_environment()


def test_a_password_of_postgresql_without_its_address_or_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="LLOG_POSTGRES_PASSWORD is set, but LLOG_META is sqlite"):
        load_settings(environment={"LLOG_POSTGRES_PASSWORD": "hush"})
    both = {"LLOG_POSTGRES_PASSWORD": "hush", "LLOG_POSTGRES_PASSWORD_FILE": "f", "LLOG_META": "postgresql://u@h/d"}
    with pytest.raises(ConfigurationError, match="LLOG_POSTGRES_PASSWORD and LLOG_POSTGRES_PASSWORD_FILE"):
        load_settings(environment=both)


@pytest.mark.parametrize(
    "url", ["postgresql://u:hush@h/d", "postgres://u:hush@h/d", "postgresql://u@h/d?password=hush"]
)
def test_a_password_in_the_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigurationError, match="LLOG_META is") as caught:
        Settings(meta=url)
    assert "hush" not in str(caught.value)


def test_the_tail_may_have_512_mib_unless_told_otherwise() -> None:
    assert load_settings({}, environment={}).tail_cache_max_bytes == 512 << 20


def test_a_file_of_the_shell_s_settings_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("LLOG_BROKER_PORT=9\n")
    monkeypatch.chdir(tmp_path)
    assert load_settings({}, environment={}).broker_port != 9
