"""Known ways to break the shipped code, which the simulation must find within a hundred seeds (`llog simulate --mutate
NAME`).
"""

from __future__ import annotations

from typing import Final

from llog.sim.mutations.clocks import CLOCK_MUTATIONS
from llog.sim.mutations.groups import GROUP_MUTATIONS
from llog.sim.mutations.inline import INLINE_MUTATIONS
from llog.sim.mutations.kafka_groups import KAFKA_GROUP_MUTATIONS
from llog.sim.mutations.owners import OWNER_MUTATIONS
from llog.sim.mutations.partition import PARTITION_MUTATIONS
from llog.sim.mutations.patch import Mutation, mutated
from llog.sim.mutations.producers import PRODUCER_MUTATIONS
from llog.sim.mutations.stale_reads import STALE_READ_MUTATIONS
from llog.sim.mutations.views import VIEW_MUTATIONS

__all__ = ["MUTATIONS", "Mutation", "mutated"]

MUTATIONS: Final[dict[str, Mutation]] = {
    mutation.change.__name__.replace("_", "-"): mutation
    for mutation in (
        *PARTITION_MUTATIONS,
        *INLINE_MUTATIONS,
        *PRODUCER_MUTATIONS,
        *STALE_READ_MUTATIONS,
        *CLOCK_MUTATIONS,
        *GROUP_MUTATIONS,
        *KAFKA_GROUP_MUTATIONS,
        *OWNER_MUTATIONS,
        *VIEW_MUTATIONS,
    )
}
