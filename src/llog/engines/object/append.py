"""An append of one or several groups of a call to their partition, while it is under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from llog.batch.columns import Buffer, Columns
from llog.batch.shared import Body
from llog.engines.object.append_parts import AppendParts, Judgement, Part
from llog.engines.object.clocks import may_commit
from llog.engines.object.commit_order import CommitTurn
from llog.engines.object.lanes import Lane
from llog.errors import LlogError
from llog.log.engine import AppendResult
from llog.log.inline import InlineLimits
from llog.log.producers import Producer, RememberedAppend
from llog.log.record_producers import ProducerName, RecordProducerState
from llog.log.records import Control
from llog.stores.meta import ABSENT, Reads

_NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
_NOTHING_KNOWN: Final = Control()
_NOTHING_APPENDED: Final = RememberedAppend(0, 0, 0)


class Append(msgspec.Struct, eq=False, gc=False):
    """One CAS of the partition's control record, tried as often as needed."""

    lane: Lane
    turn: CommitTurn
    sequence: int
    producer: Producer | None
    columns: Columns | None
    """The records, to be put again if their blob may be gone; None if the caller keeps their blobs, or before the parts
    were packed.
    """
    parts: AppendParts | None = None
    """The groups that share the append, in a call with producers of records."""
    states: Mapping[ProducerName, RecordProducerState | None] = _NONE
    """The states of the producers of records by which the parts were judged last."""
    attempted: Mapping[int, list[Part]] = _NONE
    """Other parts that were packed before, by the sequence of their attempts."""
    sources: Sequence[tuple[str, Body]] = ()
    """Each body of the records with its blob, or with its inline address."""
    inline_uri: str = ""
    """The address that contains the batch, if the append is inline."""
    is_refused_inline: bool = False
    """Whether the append is small enough to be inline, but its partition has too much that is."""
    batch: Sequence[Buffer] = ()
    """The parts of the batch in the blob that this writer put last; kept only for `on_commit`."""
    clock_repairs: int = 0
    """The partition's count that the writer knew when it chose the blob's name."""
    control: Control = _NOTHING_KNOWN
    version: int = ABSENT
    """The control record, with its version, by which the append was judged last."""
    changed: Control = _NOTHING_KNOWN
    appended: RememberedAppend = _NOTHING_APPENDED
    """The control record that the last attempt tried to put, and the append's offsets if it succeeded."""
    since: int = 0
    """The partition's next offset before the first attempt: a remembered append below it cannot be this one."""
    attempts: int = 0
    look: Reads | None = None
    """The reads of the control record after the last attempt; an append may be refused only by a record read here."""
    is_fresh: bool = False
    """Whether the control record was read, or put, since the append began."""
    is_doubtful: bool = False
    """Whether an earlier attempt may have happened."""
    outcome: AppendResult | LlogError | None = None

    @property
    def records(self) -> Columns:
        assert self.columns is not None
        return self.columns

    @property
    def final_outcome(self) -> AppendResult | LlogError:
        assert self.outcome is not None
        return self.outcome

    @property
    def is_numbered(self) -> bool:
        return self.parts is not None and self.parts.is_numbered

    @property
    def inline_bytes(self) -> int:
        return self.sources[0][1].body_length if self.inline_uri else 0

    def may_commit(self, limits: InlineLimits) -> bool:
        """Return whether the append has a blob that no collector can have decided to delete, or the partition still
        admits it inline.
        """
        if self.columns is None:
            return True
        if not self.sources:
            return False
        if self.inline_uri:
            return limits.admit(self.control, self.inline_bytes)
        return may_commit(self.control, self.sources[0][0], self.clock_repairs)

    def succeed(self, result: AppendResult, packed: Sequence[Part] | None = None) -> None:
        """Settle an append whose packed parts are at the offsets of `result`. Parts that were left out stay open."""
        if self.parts is None or not self.is_numbered:
            self.outcome = result
            return
        self.is_fresh = True
        self.parts.settle(self.parts.packed if packed is None else packed, result.start_offset)
        self._end_if_settled()

    def settle_repeated(self, judgement: Judgement) -> None:
        assert self.parts is not None
        for part, start_offset in judgement.repeated:
            self.parts.settle([part], start_offset, repeated=True)
        self._end_if_settled()

    def refuse(self, part: Part, error: LlogError) -> None:
        part.outcome = part.outcome or error
        self._end_if_settled()

    def _end_if_settled(self) -> None:
        assert self.parts is not None
        if not self.parts.left:
            self.outcome = self.parts.all[-1].outcome
