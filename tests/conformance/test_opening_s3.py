"""A log on a real S3 server: it opens, or one line says which setting is to blame."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from devtools.servers.weed import S3Server
from llog.cli.doctor import examine
from llog.config import Secret, Settings
from llog.config.loading import load_settings
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.reader import Reader
from llog.engines.object.verify import verify
from llog.engines.object.writer import Writer
from llog.errors import ConfigurationError, LlogError
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup
from llog.log.opening import open_log, opened_log
from llog.model import Record, TopicPartition


@pytest.fixture
def settings(s3_server: S3Server, tmp_path: Path) -> Settings:
    s3_server.create_bucket("opening")
    return Settings(
        meta=f"sqlite://{tmp_path}/meta.sqlite",
        blobs=f"s3://opening/{tmp_path.name}",
        s3_endpoint_url=s3_server.endpoint,
        s3_region_name=s3_server.region,
        s3_access_key_id=s3_server.access_key,
        s3_secret_access_key=Secret(s3_server.secret_key),
    )


async def test_records_in_a_bucket_are_read_by_another_opening(settings: Settings) -> None:
    async with opened_log(settings) as log:
        await Catalog(log).create("t")
        await Writer(log).append([AppendGroup(topic="t", partition=0, records=[Record(payload=b"x")])])
    async with opened_log(settings) as log:
        assert (await Reader(log).read_offset(TopicPartition("t", 0), 1)).payload == b"x"


async def test_the_doctor_finds_nothing_wrong_and_leaves_nothing_behind(settings: Settings) -> None:
    async with opened_log(settings) as log:
        findings = await examine(log)
        assert [finding for finding in findings if not finding.ok] == []
        assert [blob async for page in log.blobs.list("llog-doctor/") for blob in page] == []


async def test_a_missing_bucket_is_blamed_on_its_setting(settings: Settings) -> None:
    await _refused(msgspec.structs.replace(settings, blobs="s3://no-such-bucket/prefix"), settings)


async def test_a_wrong_secret_is_blamed_on_its_setting_and_not_shown(settings: Settings) -> None:
    await _refused(msgspec.structs.replace(settings, s3_secret_access_key=Secret("not-the-secret")), settings)


async def test_a_reader_needs_no_bucket_but_only_a_way_to_the_server(
    settings: Settings, s3_server: S3Server, tmp_path: Path
) -> None:
    async with opened_log(settings) as log:
        await Catalog(log).create("t")
        await Writer(log).append([AppendGroup(topic="t", partition=0, records=[Record(payload=b"x")])])
        await Writer(log).append([AppendGroup(topic="t", partition=0, records=[Record(payload=b"y")])])
        await Compactor(log).compact_once(TopicPartition("t", 0), force=True)
        await Writer(log).append([AppendGroup(topic="t", partition=0, records=[Record(payload=b"z")])])
    environment = {
        "LLOG_META": settings.meta,
        "LLOG_S3_ENDPOINT_URL": s3_server.endpoint,
        "AWS_REGION": s3_server.region,
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
    }
    without = load_settings(environment=environment)
    async with opened_log(without, reads_only=True) as log:
        found = [(await Reader(log).read_offset(TopicPartition("t", 0), offset)).payload for offset in (1, 2, 3)]
        assert found == [b"x", b"y", b"z"]
        assert getattr(log.blobs, "counts").count["range_get"] >= 2  # noqa: B009 (no part of the port)
        assert (await verify(log, TopicPartition("t", 0))).problems == []
        with pytest.raises(ConfigurationError, match="set LLOG_S3_BUCKET or LLOG_BLOBS"):
            await Writer(log).append([AppendGroup(topic="t", partition=0, records=[Record(payload=b"!")])])
    with pytest.raises(ConfigurationError, match=r"LLOG_S3_BUCKET=.*LLOG_BLOBS="):
        await open_log(without)


async def _refused(wrong: Settings, right: Settings) -> None:
    with pytest.raises(LlogError, match="LLOG_BLOBS is s3://") as caught:
        await open_log(wrong)
    text = str(caught.value)
    assert "\n" not in text
    assert right.s3_secret_access_key is not None
    assert right.s3_secret_access_key.value not in text
    assert "not-the-secret" not in text
