"""The checker of owners: sees every change of who holds something, and knows what each process was told.

W1 is about the lease of a keyed log in a bucket, W2 about the directory that is the home of the tables. Nobody takes
the place of a holder that has not ended. Who is told that it holds did so at some moment since it asked, and who is
told that it does not lacked it at one: an answer may be overtaken on its way, but never be older than the question.
"""

from __future__ import annotations

from llog.sim.violation import Violation


class HolderHistory:
    """Of one thing. Moments count changes of its holder."""

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

    def asks(self) -> int:
        """The moment of a question."""
        return self._moment

    def is_told(self, who: str, asked: int, *, holds: bool) -> None:
        if holds and self._holder != who and self._ended.get(who, 0) <= asked:
            raise Violation(
                f"{self._rule}: {who} was told that it holds, and did not since it asked: {self._holder} does"
            )
        if not holds and self._holder == who and self._began[who] <= asked:
            raise Violation(f"{self._rule}: {who} was told that it does not hold, and did since before it asked")
