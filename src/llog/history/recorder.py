"""The recorder of a history: writes one line before an operation begins, and another when its answer arrives."""

from __future__ import annotations

import fcntl
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from llog.base.durable import FILE_MODE
from llog.batch.columns import Columns
from llog.errors import InvalidArgument, LlogError, OffsetOutOfRange, OutcomeUnknown
from llog.history.lines import FORMAT, Append, Begin, Bounds, End, Outcome, Process, ProducerKey, Read, Trim, hashes_of
from llog.log.engine import Batch
from llog.log.producers import Producer
from llog.log.record_producers import RecordProducer
from llog.model import Record, TopicPartition

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class HistoryRecorder:
    """Records the operations of one process in `path`, from any thread or task. Continues an existing file.

    Every line is handed to the operating system before the call returns, so that `kill -9` loses none; nothing is kept
    in memory. Create the recorder after a fork, not before. Times are those of the machine's monotonic clock, which all
    its processes share.
    """

    def __init__(
        self, path: str | Path, *, process: str | None = None, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.path = Path(path)
        self._clock = clock
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._last_op = 0
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise InvalidArgument(
                f"another recorder is writing to {self.path}: give every recorder a file of its own"
            ) from None
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # A process was killed within a line.
        name = f"{Path(sys.argv[0]).name or 'python'} {self._pid}" if process is None else process
        self._write(
            Process(format=FORMAT, process=name, machine=_machine(), wall_ns=time.time_ns(), clock_ns=self._clock())
        )

    def append(
        self,
        tp: TopicPartition,
        records: Sequence[Record] | Columns,
        producer: Producer | RecordProducer | ProducerKey | None = None,
        *,
        via: str = "",
    ) -> OpenOperation:
        """Record that these records are about to be appended together."""
        if isinstance(producer, Producer):
            producer = ProducerKey(id=producer.id, sequence=producer.sequence)
        elif isinstance(producer, RecordProducer):
            producer = ProducerKey(
                id=f"{producer.kind}/{producer.id}", epoch=producer.epoch, sequence=producer.sequence
            )
        hashes = hashes_of(records)
        return self._begin(
            lambda op, now: Append(
                op=op, topic=tp.topic, partition=tp.partition, start_ns=now, via=via, hashes=hashes, producer=producer
            )
        )

    def read(
        self,
        tp: TopicPartition,
        offset: int,
        *,
        stop: int | None = None,
        max_bytes: int | None = None,
        via: str = "",
    ) -> OpenOperation:
        """Record that a read from `offset` on is about to begin."""
        return self._begin(
            lambda op, now: Read(
                op=op,
                topic=tp.topic,
                partition=tp.partition,
                start_ns=now,
                via=via,
                offset=offset,
                stop=stop,
                max_bytes=max_bytes,
            )
        )

    def bounds(self, tp: TopicPartition, *, via: str = "") -> OpenOperation:
        """Record that a request for the bounds is about to begin."""
        return self._begin(lambda op, now: Bounds(op=op, topic=tp.topic, partition=tp.partition, start_ns=now, via=via))

    def trim(self, tp: TopicPartition, before_offset: int | None = None, *, via: str = "") -> OpenOperation:
        """Record that a trim below `before_offset`, or retention, is about to begin."""
        return self._begin(
            lambda op, now: Trim(
                op=op, topic=tp.topic, partition=tp.partition, start_ns=now, via=via, before_offset=before_offset
            )
        )

    def close(self) -> None:
        """Close the file; operations under way stay without an end. Idempotent."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> HistoryRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, line: Callable[[int, int], Begin]) -> OpenOperation:
        with self._lock:
            self._last_op += 1
            op = self._last_op
        self._write(line(op, self._clock()))
        return OpenOperation(op, self._clock, self._write)

    def _write(self, line: Process | Begin | End) -> None:
        if os.getpid() != self._pid:
            raise InvalidArgument(f"the recorder of {self.path} was created before a fork: create one in each process")
        data = msgspec.json.encode(line) + b"\n"
        with self._lock:
            if self._file < 0:
                raise InvalidArgument(f"the recorder of {self.path} is closed")
            while data:
                data = data[os.write(self._file, data) :]


class OpenOperation:
    """An operation under way. Call exactly one method to record how it ended; without a call, it counts as unknown."""

    def __init__(self, op: int, clock: Callable[[], int], write: Callable[[End], None]) -> None:
        self._op = op
        self._clock = clock
        self._write = write

    def appended(self, start_offset: int, end_offset: int) -> None:
        self._end(Outcome.OK, start_offset=start_offset, end_offset=end_offset)

    def answered(
        self, batches: Sequence[Batch] = (), *, log_start_offset: int | None = None, next_offset: int | None = None
    ) -> None:
        """Record the answer to a read, a request for the bounds, or a trim."""
        now = self._clock()  # before the hashes, which take time
        self._end(
            Outcome.OK,
            now,
            batches=[(batch.start_offset, hashes_of(batch.columns)) for batch in batches if batch.columns.count],
            log_start_offset=log_start_offset,
            next_offset=next_offset,
        )

    def raised(self, error: BaseException) -> None:
        """Record the error that the call raised. Only an error of llog proves that nothing happened."""
        if isinstance(error, OffsetOutOfRange):
            self.refused(error.code, log_start_offset=error.log_start_offset, next_offset=error.next_offset)
        elif isinstance(error, LlogError):
            self.refused(error.code)
        else:
            self.lost(type(error).__name__)

    def refused(self, code: str, *, log_start_offset: int | None = None, next_offset: int | None = None) -> None:
        """Record the error code with which a broker answered."""
        outcome = Outcome.UNKNOWN if code == OutcomeUnknown.code else Outcome.FAILED
        self._end(outcome, error=code, log_start_offset=log_start_offset, next_offset=next_offset)

    def lost(self, reason: str) -> None:
        """Record that no answer came, or none that can be understood."""
        self._end(Outcome.UNKNOWN, error=reason)

    def _end(
        self,
        outcome: Outcome,
        now: int | None = None,
        *,
        error: str = "",
        start_offset: int | None = None,
        end_offset: int | None = None,
        batches: Sequence[tuple[int, list[str]]] = (),
        log_start_offset: int | None = None,
        next_offset: int | None = None,
    ) -> None:
        self._write(
            End(
                op=self._op,
                end_ns=self._clock() if now is None else now,
                outcome=outcome,
                error=error,
                start_offset=start_offset,
                end_offset=end_offset,
                batches=list(batches),
                log_start_offset=log_start_offset,
                next_offset=next_offset,
            )
        )


def _machine() -> str:
    """Return an id of this boot of the machine: the clock of its processes starts again with each boot."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()
