"""Brokers, those that clear `pending`, and the upkeep of producers' states, in the numbers of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spec.producers import (
    KEPT,
    Broker,
    Clearer,
    Control,
    OldState,
    Part,
    Pending,
    State,
    Upkeep,
    put_keys,
    record_commit,
    state_of,
    violation,
    with_process,
)
from spec.search import Result, describe, explore

Steps = Iterator[tuple[str, State]]


class ProducerShape(NamedTuple):
    """The number of producers and processes, and how often each acts."""

    producers: int = 1
    sequences: int = 2
    """The number of records that each producer has to append."""
    brokers: int = 2
    groups: int = 2
    """The number of groups that each broker takes; a group that holds a repetition is a retry."""
    clears: int = 0
    upkeeps: int = 0
    losses: int = 0
    """The number of CAS answers that may be lost."""
    pauses: int = 0
    """The number of servers that may be paused, and wake to answer reads from their old state."""

    def __str__(self) -> str:
        return describe("producers", self)

    def search(self, mutation: str | None, states_max: int) -> Result:
        return explore(
            initial(self),
            lambda state: steps(state, self.sequences, mutation),
            lambda state: violation(state, mutation),
            states_max,
        )


def initial(shape: ProducerShape) -> State:
    procs: list[Broker | Clearer | Upkeep] = [Broker(number, "take", shape.groups) for number in range(shape.brokers)]
    if shape.clears:
        procs.append(Clearer(0, "read", shape.clears))
    if shape.upkeeps:
        procs.append(Upkeep(0, "list", shape.upkeeps))
    return State(Control(), (), (), (0,) * shape.producers, tuple(procs), shape.losses, shape.pauses)


def steps(state: State, sequences: int, mutation: str | None) -> Steps:
    if state.pauses and state.old is None and state.control != Control():
        paused = state._replace(pauses=state.pauses - 1, old=OldState(state.control, state.keys))
        yield "a server is paused", paused
    for number, process in enumerate(state.procs):
        if isinstance(process, Broker):
            name, found = "broker", broker_steps(state, number, process, sequences, mutation)
        elif isinstance(process, Clearer):
            name, found = "clearer", clearer_steps(state, number, process, mutation)
        else:
            name, found = "upkeep", upkeep_steps(state, number, process, mutation)
        for label, after in found:
            yield f"{name} {process.id} {label}", after


# --- the broker


def broker_steps(state: State, number: int, me: Broker, sequences: int, mutation: str | None) -> Steps:
    def become(after: State, **changes: object) -> State:
        return with_process(after, number, me._replace(**changes))  # type: ignore[arg-type]

    if me.pc == "take":
        if me.left:
            for group in _groups(state, sequences):
                knows_all = me.states is not None and {part[0] for part in group} <= {p for p, _ in me.states}
                following = "judge" if knows_all else "read"
                yield f"takes {group}", become(state, pc=following, left=me.left - 1, group=group)
    elif me.pc == "read":
        # One request: the same server reads the control record, and then the keys.
        yield "reads the control record", become(state, pc="read keys", seen=state.control)
        if state.old is not None:
            yield "reads the control record in an old state", become(state, pc="read old keys", seen=state.old.control)
            if mutation == "keys-read-apart":
                yield "reads the control record alone", become(state, pc="read old keys", seen=state.control)
    elif me.pc in ("read keys", "read old keys"):
        keys = state.old.keys if state.old is not None and me.pc == "read old keys" else state.keys
        wanted = sorted({producer for producer, _ in me.group})
        states = tuple((producer, state_of(producer, me.seen, keys)) for producer in wanted)
        if mutation == "judged-by-older-states" and me.states is not None:
            known = dict(me.states)
            states = tuple((producer, known.get(producer, found)) for producer, found in states)
        yield me.pc.replace("read", "reads the"), become(state, pc="judge", states=states)
    elif me.pc == "judge":
        yield from _judge(state, number, me, mutation)
    elif me.pc == "keys":
        yield "puts the keys of the append before", become(put_keys(state, me.seen.pending, mutation), pc="commit")
    elif me.pc == "commit":
        yield from _commit(state, number, me)


def _groups(state: State, sequences: int) -> list[tuple[Part, ...]]:
    """Return what a broker may find in one batch: of one producer its next part, the one after it, both, or the next
    one twice; of two producers their next parts.
    """
    groups: list[tuple[Part, ...]] = []
    following = [
        (producer, acknowledged) for producer, acknowledged in enumerate(state.acknowledged) if acknowledged < sequences
    ]
    for producer, sequence in following:
        part, later = (producer, sequence), (producer, sequence + 1)
        groups += [(part,), (part, part)]
        if sequence + 1 < sequences:
            groups += [(later,), (part, later)]
    if len(following) > 1:
        groups.append(tuple(following[:2]))
    return groups


def _judge(state: State, number: int, me: Broker, mutation: str | None) -> Steps:
    """Answer the repetitions, refuse what does not follow, and pack what is left, with the states after it."""
    assert me.states is not None
    known = dict(me.states)
    accepted: list[Part] = []
    for producer, sequence in me.group:
        if (producer, sequence) in accepted:
            continue  # Answered with the part that it repeats.
        remembered = known[producer]
        offset = next((offset for found, offset in remembered if found == sequence), None)
        if offset is not None:
            state = _acknowledge(state, (producer, sequence), offset)
            continue
        expected = remembered[-1][0] + 1 if remembered else 0
        if sequence == expected or (mutation == "unknown-appended" and not remembered):
            accepted.append((producer, sequence))
            known[producer] = (*remembered, (sequence, me.seen.next_offset + len(accepted) - 1))[-KEPT:]
    if not accepted:
        idle = me._replace(pc="take", group=())
        yield "has nothing to append", with_process(state, number, idle)
        return
    judged = me._replace(pc="keys", group=tuple(accepted))
    yield f"packs {tuple(accepted)}", with_process(state, number, judged)


def _commit(state: State, number: int, me: Broker) -> Steps:
    look_again = me._replace(pc="read")
    if state.control != me.seen:
        yield "loses its CAS", with_process(state, number, look_again)
        return
    assert me.states is not None
    known, offset = dict(me.states), me.seen.next_offset
    for position, (producer, sequence) in enumerate(me.group):
        known[producer] = (*known[producer], (sequence, offset + position))[-KEPT:]
    end = offset + len(me.group) - 1
    named = tuple(sorted((producer, known[producer]) for producer in {producer for producer, _ in me.group}))
    control = me.seen._replace(next_offset=end + 1, pending=Pending(offset, end, named))
    committed = record_commit(state, control, me.group)
    answered = committed
    for position, part in enumerate(me.group):
        answered = _acknowledge(answered, part, offset + position)
    done = me._replace(pc="take", group=(), seen=control, states=tuple(sorted(known.items())))
    yield f"commits offsets {offset} to {end}", with_process(answered, number, done)
    if state.losses:
        lost = committed._replace(losses=state.losses - 1)
        yield f"commits offsets {offset} to {end}, its answer is lost", with_process(lost, number, look_again)


def _acknowledge(state: State, part: Part, offset: int) -> State:
    producer, sequence = part
    if offset > len(state.log) or state.log[offset - 1] != part:
        return state._replace(fault=state.fault or f"{part} was acknowledged at offset {offset}, where it is not")
    count = state.acknowledged[producer]
    counts = (*state.acknowledged[:producer], max(count, sequence + 1), *state.acknowledged[producer + 1 :])
    return state._replace(acknowledged=counts)


# --- the others


def clearer_steps(state: State, number: int, me: Clearer, mutation: str | None) -> Steps:
    def become(after: State, pc: str) -> State:
        return with_process(after, number, me._replace(pc=pc))

    if me.pc == "read":
        if me.left and state.control.pending is not None:
            following = "clear" if mutation == "pending-dropped-without-keys" else "keys"
            reading = Clearer(me.id, following, me.left - 1, state.control)
            yield "reads the control record", with_process(state, number, reading)
    elif me.pc == "keys":
        yield "puts the keys of `pending`", become(put_keys(state, me.seen.pending, mutation), "clear")
    elif state.control == me.seen:
        cleared = state._replace(control=state.control._replace(pending=None))
        yield "clears `pending`", with_process(cleared, number, Clearer(me.id, "read", me.left))
    else:
        yield "loses its CAS", with_process(state, number, Clearer(me.id, "read", me.left))


def upkeep_steps(state: State, number: int, me: Upkeep, mutation: str | None) -> Steps:
    idle = Upkeep(me.id, "list", me.left)
    if me.pc == "list":
        if me.left:
            listed = Upkeep(me.id, "delete", me.left - 1, state.keys)
            yield "lists the keys", with_process(state, number, listed)
            if state.old is not None:
                old = listed._replace(seen=state.old.keys)
                yield "lists the keys in an old state", with_process(state, number, old)
    else:
        newest = {key.producer: key.end for key in me.seen}
        needed = {(producer, end) for producer, end in newest.items() if end > state.control.expired}
        gone = {key[:2] for key in me.seen} - needed
        if gone:
            kept = tuple(key for key in state.keys if key[:2] not in gone)
            yield "deletes the keys that are not needed", with_process(state._replace(keys=kept), number, idle)
        control = state.control
        stop = control.next_offset if control.pending is None else control.pending.start
        if mutation == "expiry-passes-pending":
            stop = control.next_offset
        for expired in range(control.expired + 1, stop):
            rightly = expired if control.pending is None else min(expired, control.pending.start - 1)
            raised = state._replace(
                control=control._replace(expired=expired), old_enough=max(state.old_enough, rightly)
            )
            label = f"expires the producers up to offset {expired}"
            yield label, with_process(raised, number, me)
