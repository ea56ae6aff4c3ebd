"""The settings of one process: all declared settings, completed and checked against each other."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from llog.base.secret import Secret
from llog.config.declaration import Setting, check, declarations
from llog.config.locations import NO_BLOBS, blobs_url, meta_url, normalize_prefix, parse_address
from llog.config.monitoring import MonitoringSettings
from llog.errors import ConfigurationError, InvalidArgument
from llog.model import PARTITIONS_MAX, check_topic_name
from llog.stores.addresses import redact
from llog.stores.registry import meta_adapter, settings_prefixes

_IDENTIFIER: Final = re.compile(r"[!-~]{1,128}")


class Settings(MonitoringSettings, frozen=True, kw_only=True):
    """The settings of one process.

    Creating them checks and completes them: paths become absolute and the stores' URLs are filled in. They pickle, and
    `as_environment` carries them to another process.
    """

    def __post_init__(self) -> None:
        for setting in SETTINGS.values():
            check(setting, getattr(self, setting.field))
        directory = Path(self.data_dir).absolute()
        url = meta_url(self.meta, self.oxia_service_address, self.oxia_namespace, directory)
        meta = parse_address("meta", url)
        adapter = meta_adapter(meta.scheme)
        prefix = normalize_prefix(self.root_prefix)
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
                f"LLOG_OXIA_SESSION_TIMEOUT_MS is set, but LLOG_META is {redact(url)}: set LLOG_SESSION_TIMEOUT_MS "
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
        if self.inline_partition_max_bytes < self.inline_max_bytes:
            raise ConfigurationError(
                f"LLOG_INLINE_PARTITION_MAX_BYTES is {self.inline_partition_max_bytes}, less than one append "
                f"(LLOG_INLINE_MAX_BYTES is {self.inline_max_bytes}): raise it, or lower the other"
            )
        if self.batch_max_buffer_bytes < self.batch_max_bytes:
            raise ConfigurationError(
                f"LLOG_BATCH_MAX_BUFFER_BYTES is {self.batch_max_buffer_bytes}, less than one batch "
                f"(LLOG_BATCH_MAX_BYTES is {self.batch_max_bytes}): raise it, or lower the other"
            )

    @property
    def uses_s3(self) -> bool:
        """Whether a store is or may be in S3: with `none`, readers take the addresses of blobs from the metadata."""
        return self.blobs == NO_BLOBS or any(
            url is not None and url.startswith("s3://") for url in (self.blobs, self.keyed)
        )

    @property
    def client_name(self) -> str:
        """The name of this process: LLOG_CLIENT_IDENTIFIER, or one made of its host and process id."""
        return self.client_identifier or f"llog-{socket.gethostname()}-{os.getpid()}"

    @property
    def store_session_timeout_ms(self) -> int:
        """The session timeout for the metadata store that these settings name."""
        if not self.uses_oxia:
            return self.session_timeout_ms
        bounds = SETTINGS["oxia_session_timeout_ms"]
        assert bounds.low is not None
        assert bounds.high is not None
        return self.oxia_session_timeout_ms or int(min(max(self.session_timeout_ms, bounds.low), bounds.high))

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
        """Return all settings as `LLOG_…` variables, from which `load_settings` restores them.

        Secrets are in clear text. Credentials that no store needs are left out.
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


SETTINGS: Final[Mapping[str, Setting]] = declarations(Settings)
"""The declarations by field name, in their order."""


def parse_targets(text: str | None) -> list[tuple[str, int | None]]:
    """Return the topics and partitions of LLOG_COMPACTOR_TARGETS; None stands for all partitions of a topic."""
    targets: list[tuple[str, int | None]] = []
    for each in filter(None, (text or "").replace(" ", "").split(",")):
        topic, colon, partition = each.partition(":")
        is_number = partition.isascii() and partition.isdecimal() and int(partition[:7]) < PARTITIONS_MAX
        try:
            if colon and not is_number:
                raise InvalidArgument(f"{partition[:40]!r} is not a partition")
            targets.append((check_topic_name(topic), int(partition) if colon else None))
        except InvalidArgument as error:
            raise ConfigurationError(
                f"LLOG_COMPACTOR_TARGETS names {each[:80]!r}: write topic:partition or topic, with commas between "
                f"them ({error})"
            ) from error
    return targets
