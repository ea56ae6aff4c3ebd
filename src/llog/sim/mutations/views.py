"""Ways to tell the client of a broker that something is absent, although it was there when the request arrived."""

from __future__ import annotations

from typing import Final

from llog.engines.object import views
from llog.engines.object.views import Found, Read, View, Views
from llog.model import TopicPartition
from llog.sim.mutations.patch import Mutation, Patch
from llog.sim.plan import old_answers_to_viewers, slow_notifications


def answer_without_records_from_an_old_view(patch: Patch) -> None:
    shipped = views._is_enough

    def is_enough(found: Found, read: Read) -> bool:
        return shipped(found, read) or (isinstance(found, View) and found.ends_at(read.position))

    patch.setattr(views, "_is_enough", is_enough)


def take_a_watch_as_confirmed(patch: Patch) -> None:
    async def trust(self: Views) -> None:
        self._confirmed_at = self.now()

    patch.setattr(Views, "_confirm_watch", trust)


def take_any_read_as_proof(patch: Patch) -> None:
    shipped = Views._learn

    def learn(
        self: Views, tp: TopicPartition, found: Found, began: float, marks: views._Marks, *, proved: bool
    ) -> None:
        shipped(self, tp, found, began, marks, proved=True)

    patch.setattr(Views, "_learn", learn)


def forget_what_changed_during_a_read(patch: Patch) -> None:
    shipped = Views._learn

    def learn(
        self: Views, tp: TopicPartition, found: Found, began: float, marks: views._Marks, *, proved: bool
    ) -> None:
        shipped(self, tp, found, began, views._Marks(self._known[tp].marks, self._all_marks), proved=proved)

    patch.setattr(Views, "_learn", learn)


VIEW_MUTATIONS: Final = (
    Mutation(answer_without_records_from_an_old_view, "I9"),
    Mutation(take_a_watch_as_confirmed, "I9", slow_notifications),
    Mutation(take_any_read_as_proof, "I9", old_answers_to_viewers),
    Mutation(forget_what_changed_during_a_read, "I9", slow_notifications),
)
