"""kvevents.merge: fewer events that say the same (invariant 15)."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import reference_hashes, trials

from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    StorageMedium,
    decode_batch,
    encode_batch,
)
from kvevents.merge import merge_events

GPU, CPU, DISK, EXT = StorageMedium
SIZE = 2
TOKENS = [1, 9, 2, 9, 3, 9, 4, 9]
H = reference_hashes(TOKENS, SIZE)


def stored(start: int = 0, stop: int = 1, **fields: Any) -> BlockStored:
    """The blocks `start` to `stop` of one prompt."""
    event = BlockStored(
        list(H[start:stop]),
        H[start - 1] if start else None,
        TOKENS[start * SIZE : stop * SIZE],
        SIZE,
        medium=GPU,
    )
    return msgspec.structs.replace(event, **fields)


def removed(*blocks: int, medium: StorageMedium | None = GPU) -> BlockRemoved:
    return BlockRemoved([H[block] for block in blocks], medium)


# --------------------------------------------------------------------------------- what is joined


def test_a_chain_becomes_one_event() -> None:
    """Stores that continue each other are one, with the first's parent and all hashes and tokens."""
    assert merge_events([stored(0, 1), stored(1, 3), stored(3, 4)]) == [stored(0, 4)]
    assert merge_events([stored(1, 2), stored(2, 3)]) == [stored(1, 3)]


def test_removals_become_one_event() -> None:
    """Of one medium, in their order, those that name none apart from those that do."""
    events = [removed(3), removed(2, 1), removed(0, medium=None), removed(1, medium=None)]
    assert merge_events(events) == [removed(3, 2, 1), removed(0, 1, medium=None)]


def test_extra_keys_are_those_of_all_blocks() -> None:
    """Events with and without them are joined; each block keeps its own, and none are none."""
    keys = [["salt"], None, [["image", 0]]]
    events = [stored(0, 1, extra_keys=keys[:1]), stored(1, 2), stored(2, 3, extra_keys=keys[2:])]
    assert merge_events(events) == [stored(0, 3, extra_keys=keys)]
    assert merge_events([stored(0, 1), stored(1, 2, extra_keys=[None])]) == [stored(0, 2)]


def test_removals_of_groups_are_apart() -> None:
    """Of two KV cache groups they are two events."""
    first, second = (BlockRemoved([H[0]], GPU, group) for group in (0, 1))
    assert merge_events([first, first, second]) == [BlockRemoved([H[0]] * 2, GPU, 0), second]


def test_removals_of_what_is_anothers_are_apart() -> None:
    """Blocks that are another's are not told as one's own."""
    mine, remote = (BlockRemoved([H[0]], GPU, locality=where) for where in (None, "REMOTE"))
    assert merge_events([mine, remote]) == [mine, remote]


def test_a_store_of_no_blocks_is_joined_with_nothing() -> None:
    """It has no last block that another could follow."""
    empty = stored(0, 0)
    events: list[Event] = [empty, stored(0, 1), empty]
    assert merge_events(events) == events


def test_clears_become_one_event() -> None:
    """Nothing is between them."""
    assert merge_events([AllBlocksCleared()] * 3) == [AllBlocksCleared()]


DIFFERENT: dict[str, dict[str, Any]] = {
    "medium": {"medium": CPU},
    "no medium": {"medium": None},
    "block size": {"block_size": 1, "block_hashes": [H[1], H[2]]},
    "lora id": {"lora_id": 7},
    "lora name": {"lora_name": "ad"},
    "salt": {"cache_salt": "salt"},
    "session": {"session_id": "s"},
    "extra key": {"extra_key": "ek"},
    "group": {"group_idx": 1},
    "group's kind": {"kv_cache_spec_kind": "mamba"},
    "locality": {"locality": "REMOTE"},
    "no parent": {"parent_block_hash": None},
    "another parent": {"parent_block_hash": H[2]},
    "tokens left out": {"token_ids": []},
}


@pytest.mark.parametrize("fields", DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_not_joined(fields: dict[str, Any]) -> None:
    """Case 48, invariant 15: each of these keeps two stores apart, whichever comes first."""
    pairs: list[list[Event]] = [[stored(), stored(1, 2, **fields)]]
    if not fields.keys() & {"parent_block_hash", "block_hashes"}:
        pairs.append([stored(**fields), stored(1, 2)])
    for events in pairs:
        merged = merge_events(events)
        assert len(merged) == 2
        assert all(new is old for new, old in zip(merged, events, strict=True))


def test_a_sibling_is_not_joined() -> None:
    """A second child of the first block does not continue the chain that came between."""
    events: list[Event] = [stored(0, 2), stored(1, 2, block_hashes=[99])]
    assert merge_events(events) == events


@pytest.mark.parametrize(
    "between", [removed(0), removed(0, medium=CPU), AllBlocksCleared(), stored(medium=CPU)]
)
def test_nothing_is_joined_across_another(between: Event) -> None:
    """Case 48: S R S, S C S and S of another medium between stay what they are, in order."""
    events = [stored(), between, stored(1, 2)]
    assert merge_events(events) == events


def test_left_out_tokens_stay_left_out() -> None:
    """Stores without tokens are joined to one without tokens."""
    assert merge_events([stored(token_ids=[]), stored(1, 2, token_ids=[])]) == [
        stored(0, 2, token_ids=[])
    ]


def test_nothing_of_nothing() -> None:
    """No events are no events; a single one is itself."""
    one = stored()
    assert merge_events([]) == []
    assert merge_events(iter([one]))[0] is one


# ------------------------------------------------------------------------------------ properties

NAMES = st.sampled_from([None, None, None, "ad"])


@st.composite
def streams(draw: st.DrawFn) -> list[Event]:
    """Events of a few short prompts, often neighbours that can be joined."""
    prompts = [reference_hashes([p, 9, 2, 9, 3, 9, 4, 9], SIZE) for p in (1, 2)]
    events: list[Event] = []
    media = st.sampled_from([GPU, GPU, CPU, None])
    for _ in range(draw(st.integers(0, 14))):
        which, medium = draw(st.integers(0, 1)), draw(media)
        hashes = prompts[which]
        last = events[-1] if events else None
        match draw(st.integers(0, 9)):
            case 0:
                events.append(AllBlocksCleared())
            case 1 | 2 | 3:
                found = draw(st.lists(st.sampled_from(hashes), min_size=1, max_size=3))
                events.append(BlockRemoved([*found], medium))
            case 4 | 5 if isinstance(last, BlockStored) and last.block_hashes[-1] in hashes[:-1]:
                at = hashes.index(int(last.block_hashes[-1])) + 1
                tokens = [which + 1, 9, 2, 9, 3, 9, 4, 9][at * SIZE : at * SIZE + SIZE]
                left_out = not len(last.token_ids)
                events.append(
                    msgspec.structs.replace(
                        last,
                        block_hashes=[hashes[at]],
                        parent_block_hash=hashes[at - 1],
                        token_ids=[] if left_out else tokens,
                    )
                )
            case _:
                start = draw(st.integers(0, 3))
                stop = draw(st.integers(start + 1, 4))
                tokens = [which + 1, 9, 2, 9, 3, 9, 4, 9][start * SIZE : stop * SIZE]
                parent = hashes[start - 1] if start else None
                name = draw(NAMES)
                out = draw(st.integers(0, 4)) == 0
                events.append(
                    BlockStored(
                        [*hashes[start:stop]],
                        parent,
                        [] if out else tokens,
                        SIZE,
                        medium=medium,
                        lora_name=name,
                    )
                )
    return events


def flat(events: list[Event]) -> list[tuple[Any, ...]]:
    """One line a block, in order: all that is said of it."""
    lines: list[tuple[Any, ...]] = []
    for event in events:
        match event:
            case BlockStored():
                parent = event.parent_block_hash
                for at, name in enumerate(event.block_hashes):
                    tokens = tuple(event.token_ids[at * SIZE : (at + 1) * SIZE])
                    lines.append(("S", event.medium, name, parent, tokens, event.lora_name))
                    parent = name
            case BlockRemoved():
                lines += [("R", event.medium, name) for name in event.block_hashes]
            case _:
                lines.append(("C",))
    return lines


def without_repeated_clears(lines: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [
        line
        for before, line in itertools.pairwise([(), *lines])
        if line != ("C",) or before != ("C",)
    ]


def details(index: BlockIndex) -> list[Any]:
    return sorted(
        str((*event.block_hashes, event.parent_block_hash, event.medium, list(event.token_ids)))
        + str(event.lora_name)
        for chain in index.snapshot(1)
        for event in chain
    )


@trials(150)
@given(streams())
def test_the_same_is_said_in_the_same_order(events: list[Event]) -> None:
    """Invariant 15: block by block, in order; nothing is mutated, all of it can be sent."""
    before = copy.deepcopy(events)
    merged = merge_events(events)
    assert events == before
    assert flat(merged) == without_repeated_clears(flat(events))
    sound = [event for event in merged if getattr(event, "medium", GPU) is not None]
    encode_batch(KVEventBatch(0.0, sound, 0))


@trials(150)
@given(streams())
def test_a_router_believes_the_same(events: list[Event]) -> None:
    """An index after the merged events is the index after the originals, also through the wire."""
    plain, index, wired = BlockIndex(), BlockIndex(), BlockIndex()
    plain.apply(events)
    merged = merge_events(events)
    index.apply(merged)
    named = [event for event in merged if getattr(event, "medium", GPU) is not None]
    if named == merged:
        wired.apply(decode_batch(encode_batch(KVEventBatch(0.0, merged, 0))).batch.events)
        assert details(wired) == details(plain)
    assert details(index) == details(plain)
    assert index.resident == plain.resident
    assert index.oddities == plain.oddities


@trials(80)
@given(streams())
def test_once_is_enough(events: list[Event]) -> None:
    """Merging what was merged changes nothing: the same objects come out."""
    merged = merge_events(events)
    again = merge_events(merged)
    assert len(again) == len(merged)
    assert all(new is old for new, old in zip(again, merged, strict=True))


@trials(150)
@given(streams(), st.integers(0, 14))
def test_batches_may_be_cut_anywhere(events: list[Event], cut: int) -> None:
    """Merging in two parts and then the parts gives what merging all at once gives."""
    parts = [*merge_events(events[:cut]), *merge_events(events[cut:])]
    assert merge_events(parts) == merge_events(events)
