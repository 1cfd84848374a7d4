"""publisher.tools.{fleet,held,prompt,columns}: what is held, by whom, and why it is no more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from publisher_rig import PATIENCE_S, RawPublisher

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, Namespace, StorageMedium
from kvevents.capture import CaptureHead, capture_start, pack_message
from kvevents.follower import Step
from kvevents.frames import JOIN, live_frames, replay_answer, replay_end, replay_request
from kvevents.message import Channel, Message
from kvevents.tokens import pack_tokens
from publisher.tools.columns import Cell, Column, lay_out, short_number
from publisher.tools.fleet.fleet import Fleet, Rank, Worker, waiting
from publisher.tools.fleet.held import Held, HeldBlock, score
from publisher.tools.fleet.prompt import parse_tokens
from publisher.tools.fleet.state import Prompt, State, gather
from publisher.tools.source import Address, Capture, Live, Source, Sources
from publisher.tools.text import printable

GPU, CPU, DISK = StorageMedium.GPU, StorageMedium.CPU, StorageMedium.DISK
UNREADABLE = (
    "1 batch cannot be read: payload: MessagePack data is malformed:"
    " invalid opcode '\\xc1' (byte 0)"
)
MALFORMED = "1 block malformed: "
S = 10**9


def stored(*names: int, parent: int | None = None, **more: object) -> BlockStored:
    """Blocks of two tokens: n has 10n and 10n + 1."""
    tokens = [token for name in names for token in (10 * name, 10 * name + 1)]
    told: dict[str, object] = {"token_ids": tokens, "block_size": 2, "medium": GPU}
    return BlockStored(list(names), parent, **told | more)  # type: ignore[arg-type]


def strange(events: list[Event], rank: int = 0) -> bytes:
    """A payload that our own encoder might refuse."""
    return msgspec.msgpack.encode([1.0, events, rank])


def capture(path: Path, *batches: list[Event] | bytes, first: int = 0, rank: int = 0) -> Capture:
    """Of live batches from seq `first`."""
    payloads = [one if isinstance(one, bytes) else strange(one, rank) for one in batches]
    told = [
        pack_message(seq, Channel.LIVE, live_frames(b"", seq, payload))
        for seq, payload in enumerate(payloads, first)
    ]
    path.write_bytes(capture_start(CaptureHead(endpoint="tcp://h:1")) + b"".join(told))
    return Capture(path)


def followed(capture: Capture) -> tuple[Worker, list[Rank]]:
    """What it comes to."""
    with Sources([capture.file]) as sources:
        fleet = Fleet(sources.all)
        for told in sources.steps():
            assert told is not None, "nothing is live"
            fleet.take(*told)
        return fleet.of(sources.all[0]), fleet.ranks


# ------------------------------------------------------------------------------------------ fleet


def test_a_stream_from_its_beginning_is_whole(tmp_path: Path) -> None:
    """Blocks by medium, the last seq, and nothing to note."""
    events: list[Event] = [stored(1, 2), stored(1, medium=CPU), BlockRemoved([2], GPU)]
    worker, (rank,) = followed(capture(tmp_path / "c", events))
    assert rank.index.resident[GPU] == rank.index.resident[CPU] == {1}
    assert (worker.seq, worker.is_whole(rank), worker.notes(rank)) == (0, True, [])


@pytest.mark.parametrize(
    ("batches", "first", "note"),
    [
        ([[stored(1)]], 3, "joined live: what was stored before is unknown"),
        ([[stored(1)], b"\xc1"], 0, UNREADABLE),
        (
            [[stored(1)], [stored(2, block_size=5)]],
            0,
            f"{MALFORMED}block_size 5, after blocks of 2",
        ),
        ([[stored(1, block_size=-1)]], 0, f"{MALFORMED}block_size -1 is below 1"),
        ([[stored(1, block_size=3)]], 0, f"{MALFORMED}2 token ids, not 1 x 3"),
    ],
)
def test_what_is_missing_is_noted_until_all_is_cleared(
    tmp_path: Path, batches: list[list[Event] | bytes], first: int, note: str
) -> None:
    """A state that is not all there is says why; what is told after a clear is whole again."""
    worker, (rank,) = followed(capture(tmp_path / "c", *batches, first=first))
    assert not worker.is_whole(rank)
    assert worker.notes(rank) == [note]
    batches = [*batches, [AllBlocksCleared(), stored(7)]]
    worker, (rank,) = followed(capture(tmp_path / "d", *batches, first=first))
    assert worker.is_whole(rank) and not worker.notes(rank)
    assert rank.index.resident[GPU] == {7}
    worker, (rank,) = followed(capture(tmp_path / "e", *batches, b"\xc1", first=first))
    assert worker.notes(rank) == [UNREADABLE]


def test_batches_that_are_lost_leave_it_stale(tmp_path: Path) -> None:
    """How many, and it is not whole."""
    one, other = capture(tmp_path / "a", [stored(1)]), capture(tmp_path / "b", [stored(2)], first=4)
    worker, (rank,) = followed(joined(tmp_path / "c", one, other))
    assert worker.notes(rank) == ["stale: 3 batches lost"]
    assert not worker.is_whole(rank) and worker.seq == 4


def told_in_turn(
    path: Path, *told: tuple[int, Channel, list[bytes]], replay: bool = False
) -> Capture:
    """A capture of messages, each with its second."""
    head = CaptureHead(endpoint="tcp://h:1", replay_endpoint="tcp://h:2" if replay else None)
    records = [pack_message(at * S, channel, frames) for at, channel, frames in told]
    path.write_bytes(capture_start(head) + b"".join(records))
    return Capture(path)


def live(at: int, seq: int, *events: Event) -> tuple[int, Channel, list[bytes]]:
    """A batch that comes in this second."""
    return at, Channel.LIVE, live_frames(b"", seq, strange(list(events)))


def test_a_loss_that_may_be_our_own_is_said_to_be(tmp_path: Path) -> None:
    """What did not come while too little was read, that alone; that too little is read is said only where
    something is missing for it.
    """
    fine = [live(0, 0, stored(1)), (1, Channel.BEHIND, []), live(1, 1)]
    worker, (rank,) = followed(told_in_turn(tmp_path / "d", *fine))
    assert worker.source.is_behind and not worker.notes(rank)
    own = [live(0, 0, stored(1)), (1, Channel.BEHIND, []), live(1, 4)]
    worker, (rank,) = followed(told_in_turn(tmp_path / "a", *own))
    ours = "perhaps by us alone: it was read too slowly then"
    assert worker.notes(rank) == [
        f"stale: 3 batches lost, {ours}",
        "it was recorded too slowly: what is missing may be our own loss",
    ]
    later = [*own, (5, Channel.ABREAST, []), live(6, 9)]
    worker, (rank,) = followed(told_in_turn(tmp_path / "b", *later))
    assert worker.notes(rank) == [f"stale: 7 batches lost, 3 of them {ours}"]
    theirs = [live(0, 0, stored(1)), (1, Channel.BEHIND, []), (2, Channel.ABREAST, []), live(3, 4)]
    worker, (rank,) = followed(told_in_turn(tmp_path / "c", *theirs))
    assert worker.notes(rank) == ["stale: 3 batches lost"]


def test_a_loss_is_ours_although_a_replay_was_asked_for_it_first(tmp_path: Path) -> None:
    """Who had caught up by the time that the replay was over has still lost it himself."""
    message = told_in_turn(
        tmp_path / "c",
        live(0, 0, stored(1)),
        (1, Channel.BEHIND, []),
        live(1, 4),
        (1, Channel.ASKED, replay_request(1)),
        (4, Channel.ABREAST, []),
        (5, Channel.ANSWER, [b"", *replay_end(delimited=False)[-2:]]),
        live(6, 5),
        replay=True,
    )
    worker, _ = followed(message)
    assert worker.missing.lost == worker.missing.ours == 3
    assert worker.own_gaps == 1


def test_what_waits_for_a_replay_that_is_under_way(tmp_path: Path) -> None:
    """One that has brought something is not over, however long it pauses; it is not one that nobody
    answers.
    """
    source = told_in_turn(
        tmp_path / "c",
        (0, Channel.ASKED, replay_request(JOIN)),
        (0, Channel.ANSWER, [b"", b"", (3).to_bytes(8, "big"), strange([stored(1)])]),
        *(live(9, 5 + seq) for seq in range(2)),
        replay=True,
    )
    fleet = Fleet([source])
    for message in source.messages():
        fleet.take(source, Step(message, source.follower.take(message)))
    worker, (rank,) = fleet.of(source), fleet.ranks
    assert worker.held == 2
    assert worker.notes(rank) == ["its replay is not over: 2 batches wait behind it"]


@pytest.mark.parametrize(("until", "astray"), [(1, False), (9, True)])
def test_replays_of_another_publisher(tmp_path: Path, until: int, astray: bool) -> None:
    """Answers that stay ahead of what comes live are another's, and then the state is not this one's."""
    source = told_in_turn(
        tmp_path / "c",
        (0, Channel.ASKED, replay_request(JOIN)),
        (0, Channel.ANSWER, [b"", b"", (1000).to_bytes(8, "big"), strange([stored(1)])]),
        (0, Channel.ANSWER, [b"", b"", b"\xff" * 8, b""]),
        live(1, 10, stored(2)),
        live(until, 11, stored(3)),
        replay=True,
    )
    worker, (rank,) = followed(source)
    assert worker.is_whole(rank) is not astray
    note = (
        "the replay endpoint tcp://h:2 is 989 batches ahead of what comes live: it is another"
        " publisher's, or what comes live is far behind"
    )
    assert worker.notes(rank) == [note] * astray


ASKED = (0, Channel.ASKED, replay_request(JOIN))
NOT_ANSWERED = [ASKED, (5, Channel.OVER, [])] * 3
STOPPED = [
    ASKED,
    (
        0,
        Channel.ANSWER,
        replay_answer(b"", 3, strange([AllBlocksCleared(), stored(1)]), delimited=True),
    ),
    (5, Channel.OVER, []),
    *NOT_ANSWERED[:4],
]
UNKNOWN = "a replay stopped before its end: what it had still to tell is unknown"


@pytest.mark.parametrize(
    ("told", "notes", "whole"),
    [
        (STOPPED[:2], [UNKNOWN], False),
        ([*STOPPED, live(16, 4, stored(2))], [UNKNOWN], False),
        ([*STOPPED, live(16, 4, AllBlocksCleared(), stored(2))], [], True),
        (
            [*STOPPED[:2], live(1, 4, AllBlocksCleared(), stored(2)), *STOPPED[2:], *STOPPED[:2]],
            [UNKNOWN],
            False,
        ),
        (
            [*NOT_ANSWERED, live(16, 0, stored(2)), live(17, 1)],
            ["its replay endpoint does not answer"],
            True,
        ),
    ],
)
def test_a_replay_that_stopped_before_its_end(
    tmp_path: Path, told: list[tuple[int, Channel, list[bytes]]], notes: list[str], whole: bool
) -> None:
    """What it had still to tell is not known until all is cleared live; who follows from seq 0 needs
    none.
    """
    source = told_in_turn(tmp_path / "c", *told, replay=True)
    worker, (rank,) = followed(source)
    assert (worker.notes(rank), worker.is_whole(rank)) == (notes, whole)


def test_without_any_answer_nothing_is_known(tmp_path: Path) -> None:
    """A replay that nobody answered is not one that says that there is nothing."""
    worker, ranks = followed(told_in_turn(tmp_path / "c", *NOT_ANSWERED, replay=True))
    assert not ranks and not worker.is_whole(None)
    assert worker.notes(None) == ["its replay endpoint does not answer"]


def test_who_has_answered_is_not_said_to_answer_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that it answers no more."""
    monkeypatch.setattr("publisher.tools.fleet.fleet._SILENT_S", -1.0)
    with Live(Address("w", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")) as source:
        worker = Fleet([source]).of(source)
        assert waiting(worker) == "the replay endpoint tcp://127.0.0.1:2 does not answer"
        for channel in (Channel.ANSWER, Channel.OVER, Channel.ASKED):
            worker.look(Step(Message(0, channel, []), []))
        assert waiting(worker) == "the replay endpoint tcp://127.0.0.1:2 answers no more"


class Interrupted(Sources):
    """Stands still, once it is in step, while its publisher goes on."""

    publisher: RawPublisher
    batches = 3000

    def steps(
        self, until: float = float("inf"), tick_s: float | None = None
    ) -> Iterator[tuple[Source, Step] | None]:
        """As ever, but for that."""
        (source,), publisher = self.live, self.publisher
        for one in super().steps(until, tick_s):
            if publisher.router.poll(0):
                client, _ = publisher.request()
                publisher.answer(client, 0, AllBlocksCleared())
                publisher.end(client)
            if one is None and source.follower.next_seq == 1 and not source.follower.recovering:
                for seq in range(1, self.batches):
                    publisher.live(seq)
                time.sleep(1.1)
            yield one

    def live_steps(self, until: float = float("inf")) -> Iterator[tuple[Live, Step]]:
        """Until all of it was read: a second later it would be known that nothing more waits."""
        for one in super().live_steps(until):
            yield one
            if self.drained and one[0].follower.next_seq == self.batches:
                return


@pytest.mark.integration
@pytest.mark.parametrize(("for_s", "all_read"), [(PATIENCE_S, True), (1.0, False)])
def test_who_stood_still_reads_what_waits(for_s: float, all_read: bool) -> None:
    """That nothing was read meanwhile is no silence: it is in step only when it has caught up; and where
    the time was up meanwhile, it is said that something may wait.
    """
    with RawPublisher() as publisher:
        address = Address("w", publisher.endpoint, publisher.replay_endpoint)
        with Interrupted([address]) as sources:
            sources.publisher = publisher
            state = gather(sources, quiet_s=0.02, for_s=for_s, warn=pytest.fail)
            (row,) = state.document(None, blocks=False)["workers"]
            (source,) = sources.live
            assert row["seq"] == Interrupted.batches - 1
            assert (row["whole"], row["quiet"], not source.is_behind) == (all_read,) * 3
            late = (
                "we read more slowly than it publishes, or stood still: what waits was not read yet"
            )
            assert (late in row["notes"]) is not all_read


def joined(path: Path, *captures: Capture) -> Capture:
    """One after the other, as one stream."""
    told = [message for one in captures for message in one.messages()]
    records = [pack_message(at, one.channel, one.frames) for at, one in enumerate(told)]
    path.write_bytes(capture_start(CaptureHead(endpoint="tcp://h:1")) + b"".join(records))
    return Capture(path)


def test_a_restart_forgets_all(tmp_path: Path) -> None:
    """Where the seq goes back, nothing of the run before is held, or missing."""
    before = capture(tmp_path / "a", [stored(1)], b"\xc1", first=3)
    after = capture(tmp_path / "b", [stored(2)])
    worker, (rank,) = followed(joined(tmp_path / "c", before, after))
    assert rank.index.resident[GPU] == {2}
    assert (worker.seq, worker.is_whole(rank), worker.notes(rank)) == (0, True, [])


def test_a_stream_without_a_block_says_so(tmp_path: Path) -> None:
    """Connected, and nothing but heartbeats: why a router shows zero blocks."""
    worker, (rank,) = followed(capture(tmp_path / "c", [], [BlockRemoved([1], GPU)]))
    assert worker.notes(rank) == ["none of 2 batches has stored a block"]


def test_what_is_of_others_is_left_out_and_counted(tmp_path: Path) -> None:
    """Blocks that are another worker's, and of KV cache groups that are not the main one: the first of
    full attention, and before it is known group 0.
    """
    events: list[Event] = [
        stored(1, locality="REMOTE"),
        stored(2, group_idx=0),
        stored(3, group_idx=1, kv_cache_spec_kind="full_attention"),
        stored(4, group_idx=0),
        BlockRemoved([3], GPU, group_idx=0),
        BlockRemoved([3], GPU, locality="REMOTE"),
        stored(5),
    ]
    worker, (rank,) = followed(capture(tmp_path / "c", events))
    assert rank.index.resident[GPU] == {3, 5}
    assert (rank.remote, rank.other_groups) == (2, 2)
    assert worker.is_whole(rank)
    assert worker.notes(rank) == [
        "2 blocks of other workers left out",
        "2 blocks of other KV cache groups left out",
    ]


def test_blocks_that_are_told_by_their_hashes_alone(tmp_path: Path) -> None:
    """An offload tells hashes in any order, a size of 0 and no tokens: those that are held get a second
    medium, and the others are counted.
    """
    offload = BlockStored([2, 9, 1], None, [], 0, medium=CPU)
    worker, (rank,) = followed(capture(tmp_path / "c", [stored(1, 2), offload]))
    assert rank.index.resident[CPU] == {1, 2}
    assert worker.notes(rank) == [f"{MALFORMED}told by its hash alone, and not held"]
    assert [one.depth for one in rank.index.path([10, 11, 20, 21], Namespace())] == [0, 1]


def test_ranks_are_kept_apart_and_bounded(tmp_path: Path) -> None:
    """A stream that makes up ranks does not take all memory, and it is said."""
    told = [strange([stored(1)], rank) for rank in range(1100)]
    worker, ranks = followed(capture(tmp_path / "c", *told))
    assert len(ranks) == 1024 and not worker.is_whole(ranks[0])
    only = "only 1024 ranks are looked at: 76 batches of others left out"
    assert worker.notes(ranks[0]) == [only]


# ------------------------------------------------------------------------------------------- held


def test_the_depth_of_a_block_is_its_place_in_its_prompt() -> None:
    """From 0; unknown where something before it is not held, and where blocks stand in a circle."""
    held = Held()
    held.apply([stored(3, parent=2), stored(1, 2), stored(8, parent=7), stored(9, parent=8)])
    held.apply([stored(20, parent=21), stored(21, parent=20)])
    depths = {int(one.name): one.depth for one in held.blocks()}
    assert depths == {1: 0, 2: 1, 3: 2, 8: None, 9: None, 20: None, 21: None}


@given(st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 6)), max_size=12))
def test_any_parents_have_depths(told: list[tuple[int, int | None]]) -> None:
    """A block's depth is one more than its parent's, whatever a stream says of parents."""
    held = Held()
    held.apply([stored(name, parent=parent) for name, parent in told])
    found = {one.name: one for one in held.blocks()}
    assert len(found) == len(held)
    for _, block, depth in found.values():
        if block.parent is None:
            assert depth == 0
        elif block.parent not in found:
            assert depth is None
        elif depth is not None:
            assert depth == (found[block.parent].depth or 0) + 1


def reasons(held: Held, tokens: list[int], namespace: Namespace | None = None) -> list[str]:
    """Why no more of it is held."""
    (one,) = score([("w", 0, held)], tokens, namespace or Namespace())
    return one.reasons


def test_why_a_prompt_is_not_held() -> None:
    """Each of the usual causes is told from the others."""
    held = Held()
    assert reasons(held, [10, 11]) == ["holds no block"]
    held.apply([stored(1, 2, lora_name="x"), stored(3, 4)])
    assert reasons(held, [10]) == [
        "the prompt has 1 token, less than a block of 2: nothing can be found"
    ]
    assert reasons(held, [10, 11, 20, 21, 30, 31]) == [
        "2 of 3 blocks are held under lora 'x', not under the base"
    ]
    assert reasons(held, [30, 31], Namespace(cache_salt="s")) == [
        "1 of 1 blocks are held under the base, not under cache salt 's'"
    ]
    assert reasons(held, [30, 31, 99, 99]) == ["the chain breaks at block 1, token 2"]
    assert reasons(held, [31, 40]) == [
        "a prompt is held that begins alike, with one token more before it (BOS?)"
    ]
    assert reasons(held, [7, 30, 31, 40]) == [
        "a prompt is held that begins alike, without the first token (BOS?)"
    ]
    assert reasons(held, [30, 31]) == []
    held.apply([stored(5, extra_keys=[["image"]]), stored(6, parent=77)])
    assert reasons(held, [50, 51]) == [
        "its first block is held with extra keys (of an image, say), which tokens do not tell",
        "blocks are held whose beginning is not: chains of that kind: 1",
    ]
    untold = Held()
    untold.apply([stored(1, 2, token_ids=[])])
    assert reasons(untold, [10, 11]) == [
        "token ids are left out of all blocks: these cannot be found by tokens"
    ]


def test_why_not_even_the_first_block_is_held() -> None:
    """How many prompts are held, how far the best of them goes along, and whether they are of other
    names; where no beginning is held at all, that.
    """
    held = Held()
    held.apply([stored(1, lora_name="x"), stored(2, cache_salt="s")])
    assert reasons(held, [70, 71]) == [
        "all 2 first blocks are under cache salt 's', lora 'x', none under the base"
    ]
    held.apply([stored(3, 4), stored(5, token_ids=[30, 99])])
    assert reasons(held, [30, 70]) == [
        "the 2 first blocks held under the base have other tokens: at best 1 of 2 are alike"
    ]
    assert reasons(held, [70, 30], Namespace(lora_name="x")) == [
        "the 1 first block held under lora 'x' has other tokens: at best 0 of 2 are alike"
    ]
    late = Held()
    late.apply([stored(3, parent=2)])
    assert reasons(late, [10, 11]) == [
        "only blocks are held whose beginning is not: chains of that kind: 1"
    ]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=6),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
def test_how_far_the_best_prompt_goes_along(held: list[list[int]], prompt: list[int]) -> None:
    """As many tokens as any of the first blocks has in common with it, one by one."""
    index = Held()
    for name, tokens in enumerate(held):
        index.apply([stored(name + 1, token_ids=tokens, block_size=4)])
    best = max(next((at for at in range(4) if one[at] != prompt[at]), 4) for one in held)
    around = index.look_around(pack_tokens(prompt), Namespace())
    assert (around.roots, around.roots_here, around.alike) == (len(held), len(held), best)


def test_a_prompt_may_be_of_before_a_stream_was_joined(tmp_path: Path) -> None:
    """Where what was stored before is unknown, that is said of what is not held."""
    source = capture(tmp_path / "c", [stored(1)], first=7)
    fleet = Fleet([source])
    for step in source.steps():
        fleet.take(source, step)
    (one,) = State(fleet, set()).scored(Prompt([70, 71], Namespace()))
    assert len(one.reasons) == 2
    assert one.reasons[1] == "what was stored before we joined is unknown: it may be held"


def test_the_best_worker_comes_first() -> None:
    """Most tokens on any medium, then most on the fastest; the path is what the overlap counts."""
    few, host, device = Held(), Held(), Held()
    few.apply([stored(1)])
    host.apply([stored(1, 2, medium=CPU)])
    device.apply([stored(1, 2), stored(1, medium=DISK)])
    tokens = [10, 11, 20, 21, 30]
    found = score([("few", 0, few), ("host", 0, host), ("gpu", 3, device)], tokens, Namespace())
    assert [(one.worker, one.overlap.any_medium, one.whole) for one in found] == [
        ("gpu", 2, 2),
        ("host", 2, 2),
        ("few", 1, 2),
    ]
    path = device.path(tokens, Namespace())
    assert [(one.name, one.block.media) for one in path] == [(1, 5), (2, 1)]
    assert isinstance(path[0], HeldBlock)


# ----------------------------------------------------------------------------------------- prompt


@pytest.mark.parametrize(
    "text",
    [
        "1,2,3",
        " 1 2\n3 ",
        "1, 2; 3,",
        "[1, 2, 3]",
        "[[1,2,3]]",
        '{"input_ids": [1,2,3]}',
        '{"prompt_token_ids": [[1,2,3]], "x": 1}',
        '{"token_ids": [1,2,3]}\n{"token_ids": [4]}\n',
    ],
)
def test_tokens_in_each_form(text: str) -> None:
    """As people have them."""
    assert parse_tokens("--tokens", text) == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is no token"),
        ("[]", "there is no token"),
        ("1,x", "token 1: 'x' is not an int"),
        ("1,-1", "token 1: -1 is not in 0..4294967295"),
        ("4294967296", "token 0: 4294967296 is not in"),
        ("1" * 50, "is not an int"),
        ("--5", "token 0: '--5' is not an int"),
        ("1,-", "token 1: '-' is not an int"),
        ("[1" + "0" * 30 + "]", "token 0: 1"),
        ("[-1]", "token 0: -1 is not in 0..4294967295"),
        ("[1,2.5]", "token 1: 2.5 is not an int"),
        ("[true]", "token 0: True is not an int"),
        ("[[1],[2]]", "2 prompts: give one"),
        ("[" * 100_000, "no JSON"),
        ("[1,", "no JSON"),
        ('{"messages": []}', "the object has none of input_ids"),
        ("²", "is not an int"),
    ],
)
def test_what_is_no_prompt(text: str, why: str) -> None:
    """Refused in one line that names the option and the token."""
    with pytest.raises(ValueError, match=r"^--tokens: ") as error:
        parse_tokens("--tokens", text)
    assert why in str(error.value)


# ---------------------------------------------------------------------------------------- columns


@given(
    st.lists(st.lists(st.integers(0, 10**12), min_size=5, max_size=5), max_size=4),
    st.integers(16, 100),
)
def test_a_table_of_any_width_has_every_number(rows: list[list[int]], width: int) -> None:
    """Columns that do not fit go on below; no number is cut, and no line is too long."""
    columns = [Column(f"head{at}") for at in range(5)]
    head, bodies = lay_out(columns, [[Cell(str(one)) for one in row] for row in rows], width)
    told = ["".join(cell.text for cell in line) for line in head]
    assert " ".join(told).split() == [one.head for one in columns]
    for row, body in zip(rows, bodies, strict=True):
        text = ["".join(cell.text for cell in line) for line in body]
        assert len(text) == len(told) and max(map(len, text)) <= width
        assert " ".join(text).split() == [str(one) for one in row]


def test_names_are_cut_in_the_middle() -> None:
    """So that what tells them apart, mostly the end, is there; and columns of zeros go first."""
    columns = [Column("name", left=True, most=9), Column("zero", spare=True), Column("n")]
    rows = [[Cell("abcdefghijklm"), Cell("0"), Cell("5")]]
    _, ((line,),) = lay_out(columns, rows, 14)
    assert "".join(cell.text for cell in line) == "abcd…jklm  5"
    _, ((line,),) = lay_out(columns, rows, None)
    assert "".join(cell.text for cell in line).split() == ["abcd…jklm", "0", "5"]


def test_numbers_are_short_and_controls_written_out() -> None:
    """Six characters at most; nothing that a terminal would obey."""
    told = {0: "0", 0.25: "0.2", 99999: "99999", 123456: "123k", 1234567: "1.23M", 2e9: "2G"}
    assert {value: short_number(value) for value in told} == told
    assert printable("a\x1b[2J\u202eb") == "a\\x1b[2J\\u202eb"
