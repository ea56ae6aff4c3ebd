"""llog: a diskless, leaderless event log. Everything public is importable from here, and loaded when it is first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llog.api.leaderless import LeaderlessLogCompactor as LeaderlessLogCompactor
    from llog.api.leaderless import LeaderlessLogReader as LeaderlessLogReader
    from llog.api.leaderless import LeaderlessLogWriter as LeaderlessLogWriter
    from llog.api.leaderless import SharedAppendGroup as SharedAppendGroup
    from llog.client.connection import connect as connect
    from llog.config import Settings as Settings
    from llog.config.loading import load_settings as load_settings
    from llog.errors import *  # noqa: F403
    from llog.history.checker import check_history as check_history
    from llog.history.recorder import HistoryRecorder as HistoryRecorder
    from llog.model import Record as Record
    from llog.model import TopicPartition as TopicPartition

    __version__: str

_HOMES = {
    "check_history": "llog.history.checker",
    "connect": "llog.client.connection",
    "HistoryRecorder": "llog.history.recorder",
    "LeaderlessLogCompactor": "llog.api.leaderless",
    "LeaderlessLogReader": "llog.api.leaderless",
    "LeaderlessLogWriter": "llog.api.leaderless",
    "SharedAppendGroup": "llog.api.leaderless",
    "Settings": "llog.config",
    "load_settings": "llog.config.loading",
    "Record": "llog.model",
    "TopicPartition": "llog.model",
}


def _errors() -> list[str]:
    found = vars(import_module("llog.errors"))
    return [name for name, value in found.items() if isinstance(value, type) and issubclass(value, Exception)]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("leaderless-log")
    home = _HOMES.get(name) or ("llog.errors" if name in _errors() else None)
    if home is None:
        raise AttributeError(f"module 'llog' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_errors(), "__version__"])
