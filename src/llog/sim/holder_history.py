"""The checker of owners: sees every change of a holder, and every answer that a process gets.

W1 concerns the lease of a keyed log in a bucket, W2 the directory that is the home of the tables. No process replaces a
holder that has not ended. If a process learns that it is the holder, it was at some moment since it asked; if it learns
that it is not, it was not at some such moment. An answer may be overtaken on its way, but is never older than its
question.
"""

from __future__ import annotations

from llog.sim.outcome import Violation


class HolderHistory:
    """The holders of one thing. Moments count the changes of its holder."""

    def __init__(self, rule: str) -> None:
        self._rule = rule
        self._moment = 0
        self._holder: str | None = None
        self._began: dict[str, int] = {}
        self._ended: dict[str, int] = {}

    def put(self, holder: str) -> None:
        if self._holder not in (None, holder):
            raise Violation(f"{self._rule}: {holder} took the place of {self._holder}, which had not ended")
        self._moment += 1
        if self._holder is None:
            self._began[holder] = self._moment
        self._holder = holder

    def removed(self) -> None:
        self._moment += 1
        if self._holder is not None:
            self._ended[self._holder] = self._moment
        self._holder = None

    def moment(self) -> int:
        """Return the present moment, for a process that is about to ask."""
        return self._moment

    def check_answer(self, who: str, asked_at: int, *, holds: bool) -> None:
        if holds and self._holder != who and self._ended.get(who, 0) <= asked_at:
            raise Violation(
                f"{self._rule}: {who} was told that it holds, and did not since it asked: {self._holder} does"
            )
        if not holds and self._holder == who and self._began[who] <= asked_at:
            raise Violation(f"{self._rule}: {who} was told that it does not hold, and did since before it asked")
