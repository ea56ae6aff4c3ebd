"""Keyed logs: one log for every key, millions of them, in one SlateDB database. docs/keyed.md describes their use."""

from __future__ import annotations

from llog.keyed.model import Config as Config
from llog.keyed.model import CountOptions as CountOptions
from llog.keyed.model import KeyRange as KeyRange
from llog.keyed.model import LogEntry as LogEntry
from llog.keyed.model import Record as Record
from llog.keyed.model import RetentionConfig as RetentionConfig
from llog.keyed.model import ScanOptions as ScanOptions
from llog.keyed.model import Segment as Segment
from llog.keyed.model import SegmentConfig as SegmentConfig
from llog.keyed.model import SeqRange as SeqRange
from llog.keyed.model import StorageConfig as StorageConfig
from llog.keyed.model import TimeRange as TimeRange
from llog.keyed.model import WriteOptions as WriteOptions
from llog.keyed.reader import KeyedLogReader as KeyedLogReader
from llog.keyed.sync import SyncKeyedLog as SyncKeyedLog
from llog.keyed.sync import SyncKeyedLogReader as SyncKeyedLogReader
from llog.keyed.writer import KeyedLog as KeyedLog
