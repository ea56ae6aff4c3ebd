"""The shared tail: what is put is found, whole or not at all, within its bound, and nothing of the dead stays."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.batch.columns import Buffer, columns_of, stamp
from llog.batch.format import encode
from llog.broker.cache import shared_tail
from llog.broker.cache.shared_tail import TailKey, TailReader, TailWriter, prepare
from llog.engines.disk.format.files import write_at
from llog.model import Record

MAX = 1 << 20
T: TailKey = ("t", 0)


def stored(*payloads: bytes) -> bytes:
    return b"".join(encode(stamp(columns_of([Record(payload=each) for each in payloads]), 5)))


def files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.log"))


def size(root: Path) -> int:
    return sum(path.stat().st_size for path in files(root))


def test_a_batch_is_found_by_any_of_its_offsets_and_by_no_other(tmp_path: Path) -> None:
    writer, reader = TailWriter(tmp_path, "w", MAX), TailReader(tmp_path)
    assert reader.find(T, 1, MAX) == []
    batch = stored(b"a", b"b", b"c")
    assert writer.put(T, 10, batch)
    for offset in (10, 11, 12):
        assert reader.find(T, offset, MAX) == [(10, batch)]
    for place, offset in ((T, 9), (T, 13), (("t", 1), 10), (("t~2", 0), 10)):
        assert reader.find(place, offset, MAX) == []
    assert writer.put(T, 13, batch)
    assert reader.find(T, 13, MAX) == [(13, batch)], "the reader follows"
    assert reader.damaged == 0


def test_batches_that_follow_each_other_come_together_up_to_a_limit(tmp_path: Path) -> None:
    one, two = TailWriter(tmp_path, "1", MAX), TailWriter(tmp_path, "2", MAX)
    batches = [stored(b"%d" % n) for n in range(10)]
    for n, batch in enumerate(batches):
        (one if n % 2 else two).put(T, n + 1, batch)
        (two if n % 2 else one).put(("u", 7), n + 1, batch)
    reader = TailReader(tmp_path)
    assert reader.find(T, 3, MAX) == [(n + 1, batches[n]) for n in range(2, 10)]
    assert len(reader.find(T, 1, len(batches[0]) + 1)) == 2
    assert len(reader.find(("u", 7), 1, 1)) == 1


def test_two_processes_may_put_the_same_batch(tmp_path: Path) -> None:
    batch = stored(b"a")
    for name in "12":
        TailWriter(tmp_path, name, MAX).put(T, 1, batch)
    assert TailReader(tmp_path).find(T, 1, MAX) == [(1, batch)]


def test_all_writers_together_stay_within_the_bound_and_the_oldest_go_first(tmp_path: Path) -> None:
    writers = [TailWriter(tmp_path, f"{n}", MAX) for n in range(3)]
    batch = stored(b"x" * 10_000)
    put = 0
    for n in range(600):
        put += writers[n % 3].put(T, n + 1, batch)
        assert size(tmp_path) <= MAX
    assert put == 600
    assert size(tmp_path) > MAX // 2
    reader = TailReader(tmp_path)
    there = [n for n in range(1, 601) if reader.find(T, n, 1)]
    assert there[-1] == 600
    assert 25 < len(there) < 110
    assert min(there) > 400


def test_more_writers_than_segments_still_stay_within_the_bound(tmp_path: Path) -> None:
    writers = [TailWriter(tmp_path, f"{n:02}", MAX) for n in range(12)]
    batch = stored(b"x" * 20_000)
    for n in range(300):
        assert writers[n % 12].put(T, n + 1, batch)
        assert size(tmp_path) <= MAX
    assert TailReader(tmp_path).find(T, 300, 1)


def test_what_is_removed_takes_no_space_though_its_writer_has_it_open(tmp_path: Path) -> None:
    idle, busy = TailWriter(tmp_path, "0", MAX), TailWriter(tmp_path, "1", MAX)
    batch = stored(b"x" * 20_000)
    assert idle.put(T, 1, batch)
    (first,) = files(tmp_path)
    with first.open("rb") as kept:
        for n in range(2, 100):
            assert busy.put(T, n, batch)
        assert not first.exists()
        assert os.fstat(kept.fileno()).st_size == 0
    assert idle.put(T, 100, batch)
    assert TailReader(tmp_path).find(T, 100, 1) == [(100, batch)]


@pytest.mark.parametrize("known", [True, False])
def test_a_file_that_is_removed_while_it_is_read_is_a_miss_and_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    writer, reader = TailWriter(tmp_path, "w", MAX), TailReader(tmp_path)
    batch = stored(b"x" * 20_000)
    for n in range(1, 10):
        assert writer.put(T, n, batch)
    if known:
        assert reader.find(T, 1, 1)
    real, first = os.pread, files(tmp_path)[0].stat().st_ino

    def removed(descriptor: int, length: int, position: int) -> bytes:
        if os.fstat(descriptor).st_ino == first:
            monkeypatch.setattr(os, "pread", real)
            for n in range(10, 100):
                assert writer.put(T, n, batch)
        return real(descriptor, length, position)

    monkeypatch.setattr(os, "pread", removed)
    reader.find(T, 1, 1)
    assert os.pread is real
    assert reader.find(T, 1, 1) == []
    assert reader.damaged == 0


def test_a_batch_over_a_segment_is_not_put(tmp_path: Path) -> None:
    writer = TailWriter(tmp_path, "w", MAX)
    assert not writer.put(T, 1, stored(b"x" * (MAX // 4)))
    assert files(tmp_path) == []


def test_a_reader_forgets_what_was_removed(tmp_path: Path) -> None:
    writer, reader = TailWriter(tmp_path, "w", MAX), TailReader(tmp_path)
    writer.put(T, 1, stored(b"a"))
    assert reader.find(T, 1, 1)
    writer.close()
    assert files(tmp_path) == []
    assert reader.find(T, 1, 1) == []
    assert reader.find(T, 2, 1) == []
    assert reader.damaged == 0


def test_a_reader_that_knows_as_much_as_it_may_forgets_what_it_learnt_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_tail, "LOCATIONS_MAX", 10)
    writer, reader = TailWriter(tmp_path, "w", MAX), TailReader(tmp_path)
    batch = stored(b"a")
    for n in range(1, 101):
        writer.put(T, n, batch)
    assert len(reader.find(T, 95, MAX)) == 6
    assert reader.find(T, 80, MAX) == []


def test_the_leftovers_of_a_dead_writer_are_removed_and_the_living_are_left_alone(tmp_path: Path) -> None:
    dead, living = TailWriter(tmp_path, "dead", MAX), TailWriter(tmp_path, "living", MAX)
    for n, writer in enumerate((dead, living), 1):
        writer.put(T, n, stored(b"a"))
    assert dead._lock is not None
    os.close(dead._lock)  # as the end of its process does
    (tmp_path / "empty").mkdir()
    prepare(tmp_path)
    assert [path.parent.name for path in files(tmp_path)] == ["living"]
    assert not (tmp_path / "empty").exists()
    reader = TailReader(tmp_path)
    assert reader.find(T, 1, 1) == []
    assert reader.find(T, 2, 1)


@pytest.mark.parametrize("lost", ["files", "directory", "everything"])
def test_a_writer_goes_on_where_its_files_are_taken_away(tmp_path: Path, lost: str) -> None:
    root = tmp_path / "root"
    prepare(root)
    writer = TailWriter(root, "w", MAX)
    writer.put(T, 1, stored(b"a"))
    if lost == "files":
        for path in files(root):
            path.unlink()
    else:
        shutil.rmtree(root / "w" if lost == "directory" else root)
    assert writer.put(T, 2, stored(b"b"))
    assert TailReader(root).find(T, 2, 1) == [(2, stored(b"b"))]
    prepare(root)
    assert TailReader(root).find(T, 2, 1), "it is alive, and its directory its own"


def test_a_full_disk_costs_the_batch_that_met_it_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(descriptor: int, parts: Sequence[Buffer], position: int, size: int) -> None:
        whole = b"".join(parts)
        os.pwrite(descriptor, whole[: len(whole) // 2], position)
        raise OSError(errno.ENOSPC, "no space left on device")

    writer, reader = TailWriter(tmp_path, "w", MAX), TailReader(tmp_path)
    writer.put(T, 1, stored(b"a"))
    monkeypatch.setattr(shared_tail, "write_at", half)
    with pytest.raises(OSError, match="no space"):
        writer.put(T, 2, stored(b"b"))
    monkeypatch.setattr(shared_tail, "write_at", write_at)
    assert writer.put(T, 3, stored(b"c"))
    assert [bool(reader.find(T, offset, 1)) for offset in (1, 2, 3)] == [True, False, True]
    assert reader.damaged == 1, "the torn file is known as such, and looked at once"
    reader.find(T, 2, 1)
    assert reader.damaged == 1


def test_a_writer_that_cannot_make_room_just_now_puts_nothing(tmp_path: Path) -> None:
    writer = TailWriter(tmp_path, "w", MAX)
    with shared_tail._lock_root(tmp_path) as alone:
        assert alone
        assert not writer.put(T, 1, stored(b"a"))
    assert writer.put(T, 1, stored(b"a"))


BATCHES = [stored(b"one"), stored(b"two", b"three" * 50), stored(b"four" * 10), stored(b"five", b"six", b"seven")]
STARTS = [1, 2, 4, 5]


@given(data=st.data())
def test_whatever_happens_to_a_file_a_batch_is_found_whole_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("tail")
    writer, reader = TailWriter(root, "w", MAX), TailReader(root)
    for start, batch in zip(STARTS, BATCHES, strict=True):
        writer.put(T, start, batch)
    path = files(root)[0]
    whole = path.read_bytes()
    if data.draw(st.booleans(), label="known before"):
        assert len(reader.find(T, 1, MAX)) == 4
    cut = data.draw(st.integers(0, len(whole)), label="cut")
    kind = data.draw(st.sampled_from(["truncate", "zero", "duplicate", "flip"]), label="kind")
    damaged = {
        "truncate": whole[:cut],
        "zero": whole[:cut] + bytes(len(whole) - cut),
        "duplicate": whole + whole[cut:],
        "flip": whole[:cut] + bytes(byte ^ 0x55 for byte in whole[cut : cut + 3]) + whole[cut + 3 :],
    }[kind]
    path.write_bytes(damaged)
    for start, batch in zip(STARTS, BATCHES, strict=True):
        found = reader.find(T, start, 1)
        assert found in ([], [(start, batch)])
        end = whole.index(batch) + len(batch)
        if (kind in ("truncate", "zero") and cut >= end + 8) or kind == "duplicate":
            assert found, "what came before the damage is there"
    writer.close()


def test_a_file_that_is_not_ours_is_no_trouble(tmp_path: Path) -> None:
    writer, reader = TailWriter(tmp_path, "w", MAX), TailReader(tmp_path)
    writer.put(T, 1, stored(b"a"))
    (tmp_path / "w" / "00000000000000000000.log").write_bytes(b"\xff" * 5000)
    (tmp_path / "w" / "notes.txt").write_text("x")
    (tmp_path / "a file").write_text("x")
    assert reader.find(T, 1, 1)
    assert reader.find(T, 2, 1) == []
    assert reader.damaged == 1


KILLED = """
import sys
from pathlib import Path
from llog.broker.cache import shared_tail
from tests.unit.broker.test_shared_tail import T, stored
writer = shared_tail.TailWriter(Path(sys.argv[1]), "killed", 1 << 20)
batch = stored(b"x" * 50_000)
n = 0
while True:
    n += 1
    writer.put(T, n, batch)
    if n == 50:
        print("writing", flush=True)
"""


def test_a_writer_killed_while_it_writes_leaves_nothing_torn_to_see_and_is_cleaned_up_after(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    reader = TailReader(tmp_path)
    prepare(tmp_path)
    assert files(tmp_path), "it lives"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    batch = stored(b"x" * 50_000)
    reader.find(T, 1 << 60, 1)
    known = sorted(start for _, start in reader._locations)
    assert known
    assert all(reader.find(T, start, 1) == [(start, batch)] for start in known)
    TailWriter(tmp_path, "next", MAX).put(T, 1, batch)
    assert {path.parent.name for path in files(tmp_path)} == {"next"}
