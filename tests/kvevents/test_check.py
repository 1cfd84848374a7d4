"""kvevents.check: each rule by what breaks it and the nearest that does not; sound streams; garbage."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_data import Golden, golden, ours
from kvevents_reference import trials
from kvevents_streams import (
    CLEARED,
    CPU,
    DISK,
    GPU,
    SIZE,
    Publisher,
    answer,
    asked,
    checked,
    end,
    live,
    payload,
    plain,
    removed,
    stored,
    stream,
)

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, block_hashes
from kvevents.check import RULES, SCHEMES, Checker, Finding, Place, Verifier
from kvevents.follower import Follower, Told
from kvevents.frames import JOIN, live_frames
from kvevents.message import Channel, Message
from kvevents.reading import read

A, B, C, D = 10**18 + 1, -(10**17) - 2, 10**17 + 3, 10**17 + 4
START: list[Event] = [CLEARED]
AB = stored([A, B])

Batches = Sequence[Sequence[Event]]


class Case(NamedTuple):
    """A rule; batches that break it, where and against what; and batches that do not."""

    rule: str
    broken: Batches
    place: Place
    earlier: Place | None
    sound: Batches


CASES = [
    Case(
        "removed-unknown",
        [START, [AB], [removed([B])], [removed([B])]],
        Place(3, 0),
        Place(2, 0),
        [START, [AB], [removed([B])], [stored([B], A)], [removed([B])]],
    ),
    Case(
        "removed-unknown",
        [START, [AB], [removed([B], CPU)]],
        Place(2, 0),
        Place(1, 0),
        [START, [AB], [removed([B], None)]],
    ),
    Case(
        "removed-unknown",
        [START, [AB], [CLEARED, removed([B])]],
        Place(2, 1),
        Place(2, 0),
        [START, [AB], [removed([B]), CLEARED]],
    ),
    Case(
        "stored-again",
        [START, [AB], [stored([B], A)]],
        Place(2, 0),
        Place(1, 0),
        [START, [AB], [CLEARED, AB]],
    ),
    Case(
        "content",
        [START, [AB], [stored([A], medium=CPU, token_ids=[1, 2])]],
        Place(2, 0),
        Place(1, 0),
        [START, [AB], [stored([A], medium=CPU)]],
    ),
    Case(
        "content",
        [
            START,
            [AB],
            [stored([C], A)],
            [stored([A], medium=CPU)],
            [stored([B], A, CPU), stored([C], B, CPU)],
        ],
        Place(4, 1),
        Place(2, 0),
        [
            START,
            [AB],
            [stored([C], A)],
            [stored([A], medium=CPU)],
            [stored([B], A, CPU), stored([C], A, CPU)],
        ],
    ),
    Case(
        "content",
        [START, [AB], [removed([B])], [stored([B], A, lora_name="x")]],
        Place(3, 0),
        Place(1, 0),
        [START, [AB], [removed([B])], [stored([B], A)]],
    ),
    Case(
        "two-names",
        [START, [AB], [stored([C], medium=CPU, token_ids=AB.token_ids[:2])]],
        Place(2, 0),
        Place(1, 0),
        [START, [AB], [stored([C], medium=CPU, token_ids=AB.token_ids[:2], cache_salt="s")]],
    ),
    Case(
        "parent-elsewhere",
        [START, [AB], [stored([B], A, CPU)]],
        Place(2, 0),
        Place(1, 0),
        [START, [AB], [stored([A, B], None, CPU)]],
    ),
    Case(
        "child-left",
        [START, [AB], [removed([A, B])]],
        Place(2, 0),
        Place(1, 0),
        [START, [AB], [removed([B, A])]],
    ),
    Case(
        "orphan",
        [START, [AB], [stored([C], D)]],
        Place(2, 0),
        Place(0, 0),
        [START, [AB], [stored([C], B)]],
    ),
    Case(
        "orphan",
        [START, [AB], [removed([B, A])], [stored([C], B)]],
        Place(3, 0),
        Place(2, 0),
        [START, [AB], [removed([B, A])], [AB, stored([C], B)]],
    ),
    Case("no-blocks", [START, [AB], [BlockRemoved([], GPU)]], Place(2, 0), None, [START, [AB]]),
    Case(
        "no-identity",
        [START, [stored([A], lora_id=3)]],
        Place(1, 0),
        None,
        [START, [stored([A], lora_id=3, lora_name="x")]],
    ),
    Case(
        "block-size",
        [START, [AB], [stored([C], B, token_ids=[1, 2, 3], block_size=3)]],
        Place(2, 0),
        Place(1, 0),
        [START, [AB], [CLEARED, stored([C], token_ids=[1, 2, 3], block_size=3)]],
    ),
    Case("silent", [START, []], Place(1), None, [START, [AB]]),
    Case("first-seq", [[AB]], Place(0), None, [[], [CLEARED, AB]]),
]


def rules(found: Sequence[Finding]) -> list[str]:
    return [one.rule for one in found]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_and_the_event_it_contradicts(case: Case) -> None:
    """What breaks it is found once, with its place and the one it contradicts; what does not, not."""
    found = checked(stream(*case.broken))
    assert rules(found) == [case.rule]
    assert (found[0].place, found[0].earlier) == (case.place, case.earlier)
    invariant, severity = RULES[case.rule]
    assert (found[0].invariant, found[0].severity) == (invariant, severity)
    assert checked(stream(*case.sound)) == []


@pytest.mark.parametrize(
    ("event", "rule"),
    [
        (stored([A], A), "own-parent"),
        (stored([A, A]), "own-parent"),
        (stored([A], token_ids=[1]), "length"),
        (stored([A], token_ids=[1, 2**32]), "token-ids"),
        (stored([A], block_size=0), "block-size"),
        (stored([A], block_size=-1), "block-size"),
        (stored([A], token_ids=[], block_size=-1), "block-size"),
        (stored([A], extra_keys=[]), None),
        (stored([A], extra_keys=[None, None]), "extra-keys"),
        (stored([A], token_ids=[]), None),
        (stored([A, B, C]), None),
    ],
)
def test_an_event_by_itself(event: BlockStored, rule: str | None) -> None:
    """What no sound event says, and the nearest that one may."""
    found = checked(stream(START, [event]))
    assert rules(found) == ([] if rule is None else [rule])
    assert all(one.severity == "violation" and one.place == Place(1, 0) for one in found)


def test_blocks_of_one_event_are_one_finding() -> None:
    """It says of how many blocks, and which was the first."""
    found = checked(stream(START, [AB], [removed([C, D, B, A])]))
    assert [(one.rule, one.blocks, one.block_hash) for one in found] == [("removed-unknown", 2, C)]
    assert found[0].medium is GPU


# ---------------------------------------------------------------------------- what is not known


def test_who_joins_late_does_not_know_what_was_said() -> None:
    """Until all is cleared, parents and removals are not held against anybody; then they are."""
    unknown: list[list[Event]] = [[stored([C], D)], [removed([A])], [stored([A], B, CPU)]]
    assert checked(stream(*unknown, first=7)) == []
    assert rules(checked(stream(*unknown, START, [removed([C])], first=7))) == ["removed-unknown"]


def test_what_was_seen_is_known_nonetheless() -> None:
    """Who joins late and sees a block removed, or stored, twice knows that much."""
    found = checked(stream([removed([A])], [removed([A])], [AB], [AB], first=7))
    assert rules(found) == ["removed-unknown", "stored-again"]
    assert [one.earlier for one in found] == [Place(7, 0), Place(9, 0)]


def test_nothing_is_known_after_a_loss() -> None:
    """The hole is found, and what may have been in it is not held against what comes after."""
    first, _, *rest = stream([CLEARED, AB], [], [removed([B])], [stored([D], C)])
    found = checked([first, *rest])
    assert [(one.rule, one.severity, one.place) for one in found] == [
        ("lost", "violation", Place(1))
    ]


def test_a_hole_before_a_clear_costs_nothing() -> None:
    """As the dialect that forgets by gaps makes them: a note."""
    first, _, *rest = stream([CLEARED, AB], [], [CLEARED, AB], [removed([B])])
    found = checked([first, *rest])
    assert [(one.rule, one.severity) for one in found] == [("lost", "note")]


def test_a_hole_that_a_replay_closes_is_a_note() -> None:
    """And all is known as before."""
    messages = stream(START, [AB], [removed([B])], [removed([B])])
    first, lost, *rest = messages
    closing = [asked(1), answer(1, lost.frames[2]), answer(2, rest[0].frames[2]), end()]
    found = checked([first, rest[0], *closing, *rest[1:]], replay=True)
    assert [(one.rule, one.severity) for one in found] == [
        ("gap", "note"),
        ("removed-unknown", "violation"),
    ]


def test_a_batch_or_event_that_cannot_be_read() -> None:
    """It is found with its position, and what it may have said is not known any more."""
    broken = msgspec.msgpack.encode([2.0, [plain(AB), {"type": "BlockRemoved"}], 0])
    found = checked([live(0, payload(CLEARED)), live(1, broken), live(2, payload(removed([C])))])
    assert [(one.rule, one.place) for one in found] == [("skipped", Place(1, 1))]
    found = checked([*stream(START, [AB]), live(2, b"\xc1"), live(3, payload(removed([C])))])
    assert [(one.rule, one.place) for one in found] == [("undecodable", Place(2))]
    found = checked([*stream(START, [AB]), Message(0, Channel.LIVE, [b"", b"x"])])
    assert [(one.rule, one.invariant) for one in found] == [("malformed", 24)]


def test_events_of_another_make_are_notes() -> None:
    """An unknown type, and EAGLE's pairs of tokens."""
    pairs = plain(AB) | {"token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]]}
    other = msgspec.msgpack.encode([2.0, [{"type": "BlockMoved"}, ["Other"], pairs], 0])
    found = checked([*stream(START, [AB]), live(2, other)])
    assert [(one.rule, one.severity) for one in found] == [("skipped", "note")] * 3


# ------------------------------------------------------------------------------------ the engines


@pytest.mark.parametrize("batch", golden(), ids=str)
def test_what_engines_say_is_no_violation(batch: Golden) -> None:
    """Each batch of an engine, to who joined late: but for adapters without a name, and hashes that are
    made up so that all widths occur.
    """
    found = checked([live(7, batch.payload)])
    violations = {one.rule for one in found if one.severity == "violation"}
    expected = {
        "store_lora_id": {"no-identity"},
        "store_hash_range": {"two-names", "content", "stored-again"},
    }
    assert violations <= expected.get(batch.case, set())
    assert violations or batch.case not in expected


@pytest.mark.parametrize("case", ours())
def test_what_we_say_is_no_violation(case: str) -> None:
    """Our own bytes, to who joined late."""
    found = checked([live(7, ours()[case])])
    assert [one for one in found if one.severity == "violation"] == []


def test_groups_of_a_hybrid_model_are_apart() -> None:
    """A hash that each group stores; and blocks of another's are not the worker's."""
    one, other = (
        stored([A], group_idx=0),
        stored([A], group_idx=1, kv_cache_spec_kind="sliding_window"),
    )
    gone = BlockRemoved([A], GPU, 1)
    remote = stored([A], locality="REMOTE")
    assert checked(stream(START, [one, other], [gone], [remote, remote])) == []
    assert rules(checked(stream(START, [one, other], [gone], [gone]))) == ["removed-unknown"]


def test_who_spells_as_vllm_may_hold_a_block_twice() -> None:
    """Stored twice it is removed twice; the third time is one too many."""
    wide = 2**63 + 5
    first = stored([wide])
    gone = removed([wide])
    found = checked(stream(START, [first], [first], [gone], [gone]))
    assert [(one.rule, one.severity) for one in found] == [("stored-again", "note")]
    found = checked(stream(START, [first], [first], [gone], [gone], [gone]))
    assert rules(found) == ["stored-again", "removed-unknown"]


def test_blocks_told_by_their_hashes_alone() -> None:
    """In any order, without parents, as offloading tells of them; a size of 0, which some of it says, is
    a note. With a parent it is a violation.
    """
    named = BlockStored([B, A], None, [], 2, medium=CPU)
    assert checked(stream(START, [AB], [named], [removed([B, A], CPU)])) == []
    for size, parent, severity in ((0, None, "note"), (0, A, "violation"), (-1, None, "violation")):
        event = BlockStored([C], parent, [], size, medium=GPU)
        found = checked(stream(START, [AB], [event]))
        assert [(one.rule, one.severity) for one in found] == [("block-size", severity)]


def test_children_without_tokens_are_counted_off() -> None:
    """A chain told by its hashes, with parents: behind a block is who was told to be, on each medium,
    whether tokens were told of it there, elsewhere, later, or never.
    """
    first, bare = stored([A]), stored([B, C], A, token_ids=[])
    named = BlockStored([C, B, A], None, [], 2, medium=CPU)
    gone = [removed([C, B, A])]
    gone_too = [removed([C, B, A], CPU)]
    sound: list[Batches] = [
        [[first], [bare], gone],
        [[first], [bare], [removed([C])], [stored([C], B, token_ids=[])], gone],
        [
            [stored([A, B, C])],
            [stored([A], None, CPU), stored([B, C], A, CPU, token_ids=[])],
            gone_too,
        ],
        [[first], [bare], [stored([A, B, C], None, CPU)], gone, gone_too],
        [[stored([A, B, C])], [named], gone_too, gone],
        [[named], [stored([A, B, C])], gone_too, gone],
    ]
    for told in sound:
        assert rules(checked(stream(START, *told))) == [], told
    assert rules(checked(stream(START, [first, bare], [removed([A, C, B])]))) == ["child-left"]
    assert rules(checked(stream(START, [first, bare], [removed([B, C, A])]))) == ["child-left"]


def test_several_objects_of_one_block_in_a_store() -> None:
    """A store's events tell of objects, of which a block has as many as its key has parts."""
    event = {"event_type": "stored", "seq_hashes": [A], "medium": "disk", "block_size": 2}
    again = [1700000000000, [{"event_type": "cleared"}, event, event], 0]
    gone = event | {"event_type": "removed"}
    messages = [again, [1700000000000, [gone, gone], 0]]
    found = checked([live(n, msgspec.msgpack.encode(one)) for n, one in enumerate(messages)])
    assert found == []


# --------------------------------------------------------------------------------------- the wire


def test_a_restart_and_how_it_begins() -> None:
    """A new run is a note; one that does not begin with a clear, two; what was held is forgotten."""
    run = stream(START, [AB], [stored([C], B)])
    found = checked([*run, *run])
    assert [(one.rule, one.severity, one.earlier) for one in found] == [
        ("restart", "note", Place(2))
    ]
    found = checked([*run, *stream([AB], [stored([C], B)])])
    assert rules(found) == ["restart", "restart-without-clear"]
    assert all(one.severity == "note" for one in found)


def test_the_seq_of_end_is_for_resets_alone() -> None:
    """Without a payload it is a reset that some want; with one it is data that nobody can ask for."""
    sound = stream(START, [AB])
    reset = Message(0, Channel.LIVE, [b"", b"\xff" * 8, b""])
    data = Message(0, Channel.LIVE, [b"", b"\xff" * 8, payload(AB)])
    assert [(o.rule, o.severity) for o in checked([*sound, reset])] == [("end-seq", "note")]
    assert [(o.rule, o.severity) for o in checked([*sound, data])] == [("end-seq", "violation")]


def test_a_heartbeat_that_stops() -> None:
    """A publisher that sends them is held to it; one that does not may be silent."""
    beating = [*stream(START, [AB], [])[:3], live(3, payload(), 99.0)]
    found = checked(beating)
    assert [(one.rule, one.place, one.earlier) for one in found] == [
        ("silence", Place(3), Place(2))
    ]
    assert checked([*stream(START, [AB]), live(2, payload(), 99.0)]) == []


def test_a_silence_of_our_own() -> None:
    """What came while nobody read has the time at which it was read; what comes later has its own."""
    beats = [*stream(START, [AB]), live(2, payload(), 10.0)]
    behind, abreast = (Message(0, one, []) for one in (Channel.BEHIND, Channel.ABREAST))
    late = [*beats, behind, live(3, payload(), 99.0), behind, live(4, payload(), 199.0), abreast]
    assert checked(late) == []
    found = checked([*late, live(5, payload(), 250.0)])
    assert [(one.rule, one.place) for one in found] == [("silence", Place(5))]


def test_time_that_goes_back() -> None:
    """Of changes; a snapshot has a time of its own."""
    late = live(2, payload(stored([C], B), ts=500.0))
    early = live(3, payload(removed([C]), ts=2.0))
    found = checked([*stream(START, [AB]), late, early])
    assert [(one.rule, one.earlier) for one in found] == [("ts-back", Place(2))]
    anew = live(2, payload(CLEARED, AB, ts=500.0))
    assert checked([*stream(START, [AB]), anew, live(3, payload(removed([B]), ts=2.0))]) == []


def test_another_run_behind_the_same_connection() -> None:
    """A proxy keeps its own: what the new run replays is not held against the old one's batches."""
    old = stream(START, [AB], [stored([C], B)], [removed([C])])
    told: list[list[Event]] = [START, [AB], []]
    new = {seq: payload(*events, ts=50.0 + seq) for seq, events in enumerate(told)}
    replay = [asked(0), *(answer(seq, data) for seq, data in new.items()), end()]
    found = checked([*old, live(2, new[2], 50.0), asked(JOIN), end(), *replay], replay=True)
    assert [one.rule for one in found] == ["restart"]
    replay[1:3] = answer(0, payload()), answer(1, payload(AB))
    told_twice = [*old, live(1, new[1], 50.0), live(2, new[2], 51.0), *replay]
    found = checked(told_twice, replay=True)
    assert [one.place for one in found if one.rule == "replay-bytes"] == [Place(1)]


def test_ranks_in_one_stream() -> None:
    """Are told apart, and are a note."""
    other = live(2, payload(stored([A]), rank=1))
    found = checked([*stream(START, [AB]), other])
    assert [(one.rule, one.severity) for one in found] == [("rank-changes", "note")]


def replaying(*answers: Message, start: int = 0) -> list[Finding]:
    """Three batches live, and then a replay, whoever wanted it."""
    return checked([*stream(START, [AB], [removed([B])]), asked(start), *answers], replay=True)


FRAMES = [message.frames[2] for message in stream(START, [AB], [removed([B])])]
SAME = [answer(seq, data) for seq, data in enumerate(FRAMES)]


def test_a_replay_of_what_came_live() -> None:
    """Byte for byte, from where it was asked for, or behind a snapshot in the place of what is gone."""
    assert replaying(*SAME, end()) == []
    assert replaying(*SAME[1:], end(), start=1) == []
    snapshot = answer(0, payload(CLEARED, ts=5.0)), answer(1, payload(AB, ts=5.0))
    assert replaying(*snapshot, SAME[2], end()) == []
    padded = answer(0, payload(CLEARED, AB)), answer(1, payload())
    assert replaying(*padded, SAME[2], end()) == []
    assert replaying(answer(1, payload(CLEARED, AB)), SAME[2], end(), start=JOIN) == []
    assert replaying(answer(0, payload()), *padded[:1], end(), start=JOIN) != []


@pytest.mark.parametrize(
    ("answers", "start", "rule", "place"),
    [
        ([SAME[0], answer(1, payload(stored([A]))), end()], 0, "replay-bytes", Place(1)),
        ([SAME[0], answer(1, payload()), end()], 0, "replay-bytes", Place(1)),
        ([SAME[0], answer(1, b"\xc1"), end()], 0, "replay-bytes", Place(1)),
        ([answer(1, payload(CLEARED, AB, removed([B]))), end()], 1, "snapshot", Place(1, 2)),
        ([*SAME[1:], end()], JOIN, "snapshot", Place(1)),
        ([SAME[0], SAME[2], end()], 0, "replay-order", Place(2)),
        ([SAME[0], SAME[0], end()], 0, "replay-order", Place(0)),
        ([*SAME[1:], end()], 2, "replay-order", Place(1)),
        ([*SAME[1:], end()], 0, "replay-start", Place(1)),
        ([*SAME, Message(0, Channel.OVER, [])], 0, "replay-no-end", Place(2)),
        ([Message(0, Channel.OVER, [])], 0, "replay-no-end", Place(2)),
    ],
)
def test_a_replay_that_is_another(
    answers: list[Message], start: int, rule: str, place: Place
) -> None:
    """The first answer that is wrong, and why."""
    found = [one for one in replaying(*answers, start=start) if one.invariant in (19, 20)]
    assert [(one.rule, one.place) for one in found] == [(rule, place)]


def test_another_run_is_not_held_to_what_this_one_has_said() -> None:
    """A replay after the connection was re-made; and one that ends with the connection has no end."""
    again = [Message(0, Channel.DISCONNECTED, []), Message(0, Channel.CONNECTED, [])]
    other = answer(2, payload(AB, ts=9.0))
    found = checked(
        [again[1], *stream(START, [AB], [removed([B])]), *again, asked(2), other, end()],
        replay=True,
    )
    assert [one for one in found if one.invariant == 19] == []
    found = replaying(SAME[0], again[0], Message(0, Channel.OVER, []))
    assert [one for one in found if one.rule == "replay-no-end"] == []


# ------------------------------------------------------------------------------------ properties

Seeds = st.integers(0, 2**32)


@trials(60)
@given(Seeds)
def test_a_sound_publisher_breaks_nothing(seed: int) -> None:
    """Whatever it stores, copies, evicts, clears, restarts and tells anew; and its hashes are right."""
    publisher = Publisher(seed)
    publisher.work(60)
    verifier = Verifier("auto")
    found = checked(publisher.messages(), verifier=verifier)
    assert {one.rule for one in found} <= {"restart", "silent"}
    assert (verifier.wrong, verifier.unverifiable) == (0, 0)


Mutation = Callable[[random.Random, list[list[Event]], int, int], bool]
"""Changes the event at a place; False where it would not change what is said."""


def _twice(_: random.Random, batches: list[list[Event]], seq: int, at: int) -> bool:
    if batches[seq][at] is CLEARED:
        return False
    batches[seq].insert(at, batches[seq][at])
    return True


def _dropped(_: random.Random, batches: list[list[Event]], seq: int, at: int) -> bool:
    """Where the next that is said of one of its blocks tells that it was."""
    event = batches[seq].pop(at)
    if isinstance(event, AllBlocksCleared):
        return False
    later = batches[seq][at:] + [one for batch in batches[seq + 1 :] for one in batch]
    for one in later:
        if isinstance(one, AllBlocksCleared):
            return False
        if one.medium == event.medium and set(one.block_hashes) & set(event.block_hashes):
            return type(one) is not type(event)
    return False


def _stored_differently(change: Callable[[BlockStored], BlockStored]) -> Mutation:
    def mutate(_: random.Random, batches: list[list[Event]], seq: int, at: int) -> bool:
        event = batches[seq][at]
        if not isinstance(event, BlockStored) or event.lora_name is not None:
            return False  # an adapter's hashes may be made as events do not tell
        batches[seq][at] = change(event)
        return True

    return mutate


def _other_tokens(event: BlockStored) -> BlockStored:
    tokens = [event.token_ids[0] + 1, *event.token_ids[1:]]
    return msgspec.structs.replace(event, token_ids=tokens)


def _no_batch(_: random.Random, batches: list[list[Event]], seq: int, at: int) -> bool:
    del at
    batches[seq] = None  # type: ignore[call-overload]  # it is left out
    return seq + 1 < len(batches) and batches[seq + 1][:1] != [CLEARED]


MUTATIONS: dict[str, Mutation] = {
    "twice": _twice,
    "dropped": _dropped,
    "no batch": _no_batch,
    "other tokens": _stored_differently(_other_tokens),
    "a token less": _stored_differently(
        lambda one: msgspec.structs.replace(one, token_ids=list(one.token_ids)[1:])
    ),
    "another hash": _stored_differently(
        lambda one: msgspec.structs.replace(one, block_hashes=[5 * A, *one.block_hashes[1:]])
    ),
    "another parent": _stored_differently(
        lambda one: msgspec.structs.replace(one, parent_block_hash=5 * A)
    ),
    "its own parent": _stored_differently(
        lambda one: msgspec.structs.replace(one, parent_block_hash=one.block_hashes[0])
    ),
    "another size": _stored_differently(
        lambda one: msgspec.structs.replace(one, block_size=one.block_size + 1)
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
@trials(25)
@given(Seeds)
def test_one_lie_is_found(name: str, seed: int) -> None:
    """Wherever in a sound stream one thing is said otherwise, there is a violation."""
    publisher = Publisher(seed)
    publisher.work(40)
    batches = [list(batch) for batch in publisher.runs[0]]
    places = [(seq, at) for seq, batch in enumerate(batches) for at in range(len(batch)) if seq]
    if not places:
        return
    dice = random.Random(seed)
    seq, at = dice.choice(places)
    if not MUTATIONS[name](dice, batches, seq, at):
        return
    told = stream(*[batch or [] for batch in batches])
    messages = [one for one, batch in zip(told, batches, strict=True) if batch is not None]
    found = checked(messages, verifier=Verifier("sglang"))
    assert [one for one in found if one.severity == "violation"], (seq, at)


Plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
Odd = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])},
    optional={
        "block_hashes": st.lists(st.integers(-3, 3) | st.binary(max_size=40), max_size=3),
        "parent_block_hash": st.none() | st.integers(-3, 3) | st.binary(max_size=40),
        "token_ids": st.lists(st.integers(-1, 2**32), max_size=5),
        "block_size": st.integers(-1, 3),
        "lora_id": st.none() | st.integers(-3, 2**63),
        "medium": st.sampled_from([None, "GPU", "CPU", "disk", "?"]),
        "lora_name": st.none() | st.text(max_size=3),
        "cache_salt": st.none() | st.text(max_size=2000),
        "extra_keys": st.none() | st.lists(Plain, max_size=3),
        "group_idx": st.none() | st.integers(-2, 2),
        "locality": st.sampled_from([None, "LOCAL", "REMOTE"]),
    },
)
Payload = st.binary(max_size=20) | st.tuples(
    st.floats() | st.integers(0, 2**40),
    st.lists(Odd | Plain, max_size=4),
    st.none() | st.integers(-1, 2),
).map(msgspec.msgpack.encode)
Frames = st.lists(st.binary(max_size=9), max_size=5) | st.builds(
    live_frames, st.binary(max_size=3), st.integers(0, 6), Payload
)
Messages = st.builds(
    Message,
    st.integers(0, 2**60),
    st.sampled_from(Channel),
    Frames | Frames.map(lambda one: [b"", *one]),
)


@trials(150)
@given(st.lists(Messages, max_size=20), st.booleans())
def test_no_bytes_raise(messages: list[Message], replay: bool) -> None:
    """Whatever comes on whatever channel gives findings of known rules, and no exception."""
    for one in checked(messages, replay=replay, verifier=Verifier("auto")):
        assert RULES[one.rule].invariant == one.invariant
        assert one.severity in ("violation", "note")


TOKENS = [5, 6, 7, 8]
NAMES = block_hashes(TOKENS, SIZE)
Keys = st.none() | st.booleans() | st.text(max_size=2) | st.floats() | Plain
SOUND = plain(BlockStored(list(NAMES), None, TOKENS, SIZE, medium=GPU))
Changes = {
    "block_hashes": st.sampled_from([NAMES[:1], [*NAMES, 7], [bytes(32), bytes(32)], []]),
    "parent_block_hash": st.sampled_from([NAMES[0], 9, -1, b"", bytes(32), bytes(40)]),
    "token_ids": st.sampled_from([TOKENS[:2], [*TOKENS, 1, 2], []]),
    "block_size": st.sampled_from([1, 0, -1, 2**63]),
    "lora_id": st.integers(-(2**63), 2**64 - 1),
    "lora_name": st.text(max_size=2),
    "cache_salt": st.text(max_size=2),
    "extra_key": st.text(max_size=2),
    "extra_keys": Plain | st.lists(st.none() | st.lists(Keys, max_size=2) | Keys, max_size=3),
    "group_idx": st.integers(-(2**63), 2**64 - 1),
    "kv_cache_spec_kind": st.text(max_size=2),
}
Believable = st.lists(
    st.sampled_from(list(Changes)).flatmap(lambda key: st.tuples(st.just(key), Changes[key])),
    max_size=2,
).map(lambda changes: SOUND | dict(changes))
"""Stores that come as far as the verifier, with anything else in them."""


@pytest.mark.parametrize("scheme", SCHEMES)
@trials(60)
@given(st.lists(st.lists(Believable, max_size=3), max_size=4), st.floats())
def test_no_field_of_an_event_raises(
    scheme: str, batches: list[list[dict[str, Any]]], ts: float
) -> None:
    """Held to the hashes of each scheme, whatever is in the fields that they are made of."""
    packed = [msgspec.msgpack.encode([ts, events, 0]) for events in batches]
    told = [live(seq, one) for seq, one in enumerate(packed)]
    for one in checked(told, verifier=Verifier(scheme)):
        assert one.rule in RULES


def test_memory_is_that_of_what_is_held() -> None:
    """Blocks, ranks and groups that come and go leave nothing but what is bounded."""
    checker = Checker(verifier=Verifier("sglang"))
    follower = Follower(can_replay=False, start=None)
    for seq in range(3000):
        names: list[int | bytes] = [seq * 100 + n for n in range(20)]
        rank, group = seq % 1500, seq % 100
        told = BlockStored(names, None, [0] * 40, 2, medium=GPU, group_idx=group)
        events: list[Event] = [told, BlockRemoved(names[::-1], GPU, group)]
        for arrival in follower.take(live(seq, payload(*events, rank=rank))):
            assert isinstance(arrival, Told)
            checker.read(read(arrival))
    assert checker.resident() == {}
    assert len(checker._ranks) <= 1024
    assert len(checker._ts) <= 1024


def test_the_page_names_every_rule() -> None:
    """With the number of its invariant."""
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    for name, (invariant, severity) in RULES.items():
        assert f"| {invariant} | `{name}` | {severity} |" in page, name


def test_disk_is_a_medium_like_any_other() -> None:
    """An event on one changes only that one."""
    batches: Batches = [
        START,
        [AB],
        [stored([A, B], None, DISK)],
        [removed([B, A])],
        [removed([B, A], DISK)],
    ]
    assert checked(stream(*batches)) == []
