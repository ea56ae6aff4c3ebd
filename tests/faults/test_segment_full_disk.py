"""A segment log on a disk that is full: appends fail, nothing that was acknowledged is harmed, and it goes on once
there is space.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from llog.batch.columns import columns_of
from llog.engines.disk.format.files import INDEX, file_name
from llog.engines.disk.log.log import SegmentLog, SegmentOptions
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.log.writer import EncodedAppend, SegmentWriter
from llog.errors import LlogError, OutcomeUnknown, StoreUnavailable
from llog.model import Record
from tests.conftest import unavailable
from tests.unit.engines.disk.tools import Faults, append, body, kill, read_all

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        unavailable(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


async def _filled(log: SegmentLog, expected: dict[int, bytes]) -> StoreUnavailable:
    """Appends until that fails, and how it did; what was acknowledged is added to `expected`."""
    for number in range(100):
        payload = bytes([number]) * 100_000
        try:
            result = await log.append(columns_of([Record(payload=payload)]))
        except StoreUnavailable as error:
            return error
        expected[result.start_offset] = payload
    raise AssertionError("the disk is not full")


async def test_appends_go_on_once_a_full_disk_has_space_again(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2 * MIB))
    log = SegmentLog.open(small_disk / "log", SegmentOptions(segment_bytes=MIB))
    reader = SegmentReader.open(small_disk / "log")
    expected: dict[int, bytes] = {}
    raised = await _filled(log, expected)
    assert f"{small_disk / 'log'}/" in str(raised)
    assert "(No space left on device): free some space" in str(raised)
    assert expected
    assert read_all(reader) == expected
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await log.append(columns_of([Record(payload=bytes(100_000))]))
    ballast.unlink()
    result = await log.append(columns_of([Record(payload=b"after")]))
    expected[result.start_offset] = b"after"
    assert read_all(reader) == expected
    await log.close()
    log = SegmentLog.open(small_disk / "log")
    assert read_all(reader) == expected
    await log.close()


async def test_a_log_on_a_full_disk_can_be_opened_and_retention_frees_it(small_disk: Path) -> None:
    log = SegmentLog.open(small_disk / "log", SegmentOptions(segment_bytes=MIB))
    await _filled(log, {})
    left = os.statvfs(small_disk)
    (small_disk / "rest").write_bytes(bytes(left.f_bavail * left.f_bsize))
    kill(log._writer)
    os.truncate(small_disk / "log" / file_name(log._writer.active.base, INDEX), 0)
    log = SegmentLog.open(small_disk / "log", SegmentOptions(segment_bytes=MIB))
    files = (small_disk / "log").glob("*.log")
    sizes = {file: file.stat().st_size for file in files}
    result = await log.retain(retention_ms=None, retention_bytes=2 * MIB)
    assert result.new_start > 1
    assert result.bytes == sum(size for file, size in sizes.items() if not file.exists())
    await log.append(columns_of([Record(payload=bytes(100_000))]))
    await log.close()


def test_a_write_that_ends_midway_is_cut_off_and_the_log_goes_on(tmp_path: Path) -> None:
    """A limit of the file's size stops a write in the middle of a frame, as a full disk does."""
    writer = SegmentWriter(tmp_path / "log", SegmentOptions(), "t/0")
    first = append(writer, [b"x" * 10_000])
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, limits[1]))
        with pytest.raises(StoreUnavailable, match=r"File too large"):
            append(writer, [b"y" * 10_000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert os.stat(writer.active.path).st_size == writer.active.position
    second = append(writer, [b"z" * 10_000])
    assert second.start_offset == first.end_offset + 1
    kill(writer)
    writer = SegmentWriter(tmp_path / "log", SegmentOptions(), "t/0")
    assert read_all(SegmentReader.open(tmp_path / "log")) == {1: b"x" * 10_000, 2: b"z" * 10_000}
    writer.close()


class Failing:
    """Makes calls of the operating system fail, as often as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.left: dict[str, int] = {}

    def fail(self, name: str, times: int, code: int) -> None:
        real: Callable[..., object] = getattr(os, name)
        self.left[name] = times

        def call(*arguments: object) -> object:
            if self.left[name]:
                self.left[name] -= 1
                raise OSError(code, os.strerror(code))
            return real(*arguments)

        self._monkeypatch.setattr(os, name, call)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


def test_after_a_failed_sync_the_segment_is_opened_and_checked_again(tmp_path: Path, faults: Failing) -> None:
    writer = SegmentWriter(tmp_path / "log", SegmentOptions(), "t/0")
    append(writer, [b"first"])
    before = writer.active
    faults.fail("fdatasync", 1, errno.EIO)
    with pytest.raises(StoreUnavailable, match="check the disk"):
        append(writer, [b"lost"])
    assert writer.active is not before
    assert append(writer, [b"second"]).start_offset == 2
    assert read_all(SegmentReader.open(tmp_path / "log")) == {1: b"first", 2: b"second"}
    writer.close()


def test_if_the_failed_write_cannot_be_cut_off_its_outcome_is_unknown_and_later_appends_wait_for_it(
    tmp_path: Path, faults: Failing
) -> None:
    writer = SegmentWriter(tmp_path / "log", SegmentOptions(), "t/0")
    append(writer, [b"first"])
    faults.fail("fdatasync", 3, errno.EIO)
    with pytest.raises(OutcomeUnknown):
        append(writer, [b"lost"])
    with pytest.raises(LlogError):
        append(writer, [b"lost, too"])
    assert append(writer, [b"second"]).start_offset == 2
    assert read_all(SegmentReader.open(tmp_path / "log")) == {1: b"first", 2: b"second"}
    writer.close()


def test_ctrl_c_while_the_segment_is_opened_again_harms_neither_it_nor_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Failing
) -> None:
    others = [tmp_path / f"other-{number}" for number in range(3)]
    for step in range(100):
        writer = SegmentWriter(tmp_path / str(step), SegmentOptions(), "t/0")
        append(writer, [b"first"])
        faults.fail("fdatasync", 2, errno.EIO)
        with pytest.raises(OutcomeUnknown):
            append(writer, [b"lost"])
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            fault = Faults(patch, step, interrupts=True)
            append(writer, [b"lost"])
        if not fault.met:
            break
        with ExitStack() as opened:  # they get the numbers of descriptors that were closed
            for other in others:
                opened.enter_context(other.open("wb", buffering=0)).write(bytes(1000))
            append(writer, [b"second"])
            assert [other.stat().st_size for other in others] == [1000] * 3
        found = read_all(SegmentReader.open(tmp_path / str(step)))
        assert [found.pop(1), found.pop(max(found)), set(found.values()) - {b"lost"}] == [b"first", b"second", set()]
        kill(writer)
    assert step > 15


def test_appends_that_found_no_segment_to_be_written_to_are_known_to_be_absent(tmp_path: Path, faults: Failing) -> None:
    writer = SegmentWriter(tmp_path / "log", SegmentOptions(segment_bytes=1000), "t/0")
    append(writer, [b"a" * 500])
    faults.fail("fsync", 3, errno.EIO)
    with pytest.raises(StoreUnavailable):
        append(writer, [b"b" * 500])
    assert faults.left["fsync"] < 2, "nor could the segment be opened again"
    faults.left["fsync"] = 0
    assert append(writer, [b"c" * 500]).start_offset == 2
    writer.close()


def test_all_appends_of_a_group_that_failed_get_the_error(tmp_path: Path, faults: Failing) -> None:
    writer = SegmentWriter(tmp_path / "log", SegmentOptions(), "t/0")
    faults.fail("pwritev", 1, errno.ENOSPC)
    results = writer.commit([EncodedAppend([body([b"a"])]), EncodedAppend([body([b"b"])])], 1)
    assert [type(result) for result in results] == [StoreUnavailable, StoreUnavailable]
    assert append(writer, [b"c"]).start_offset == 1
    writer.close()


@pytest.mark.parametrize("faults", [{}, {"forever": True}, {"interrupts": True}], ids=["once", "on", "interrupted"])
def test_a_roll_that_fails_anywhere_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: dict[str, bool]
) -> None:
    """Every call that a roll makes fails in turn; the log goes on in the old segment or the new one, also after a
    kill.
    """
    options = SegmentOptions(segment_bytes=1000)
    for step in range(100):
        directory = tmp_path / str(step)
        writer = SegmentWriter(directory, options, "t/0")
        expected = {append(writer, [b"a" * 500]).start_offset: b"a" * 500}
        with monkeypatch.context() as patch:
            fault = Faults(patch, step, **faults)
            try:
                expected[append(writer, [b"b" * 500]).start_offset] = b"b" * 500
            except (LlogError, KeyboardInterrupt):
                pass
        if not fault.met:
            break
        for letter in (b"c", b"d" * 500, b"e" * 300):
            expected[append(writer, [letter]).start_offset] = letter
        _check_read_from_everywhere(directory, expected)
        kill(writer)
        writer = SegmentWriter(directory, options, "t/0")
        _check_read_from_everywhere(directory, expected)
        writer.close()
    assert step > 20


def _check_read_from_everywhere(directory: Path, expected: dict[int, bytes]) -> None:
    for offset in expected:
        found = read_all(SegmentReader.open(directory), offset)
        assert found == {each: payload for each, payload in expected.items() if each >= offset}
