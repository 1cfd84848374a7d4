"""Inputs of every kind: sound ones of a worker, and whatever else bytes can say."""

from __future__ import annotations

from typing import Any

import msgspec
from core_rig import BLOCK_SIZE, StoryWorker
from hypothesis import strategies as st

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    Namespace,
    StorageMedium,
)
from kvevents.hashing import block_hashes
from kvevents.records import BlockId, Clear, Remove, StoreKnown, StoreNew
from kvevents.tokens import pack_tokens
from publisher.link.messages import BATCH, COLUMNS, FRESH, LOST, PACKED
from publisher.link.packed import pack_plain
from publisher.stream.input import Input

__all__ = ["any_events", "any_inputs", "sound_inputs", "story"]

pack = msgspec.msgpack.encode

Ids = st.integers(-1, 9).map(BlockId) | st.sampled_from([-(2**63), 2**63 - 1, 2**64 - 1]).map(
    BlockId
)
Counts = st.integers(-1, 4) | st.sampled_from([2**31, 2**63 - 1])
Media = st.sampled_from(StorageMedium)
Hashes = st.sampled_from(block_hashes([5] * 8, BLOCK_SIZE)) | st.integers(-(2**63), 2**64 - 1)
Groups = st.none() | st.integers(-1, 2)
Kinds = st.sampled_from([None, "full_attention", "sliding_window"])
Keys: st.SearchStrategy[Any] = st.none() | st.lists(st.integers(-9, 9) | st.just({}), max_size=2)
Names = st.none() | st.sampled_from(["", "ad"]) | st.text(max_size=3)

Records = st.one_of(
    st.builds(
        lambda medium, first, count, parent, name: StoreNew(
            medium,
            first,
            count,
            parent,
            None if name is None else Namespace(name),
            pack_tokens([5] * BLOCK_SIZE * count),
        ),
        Media,
        Ids,
        st.integers(0, 4),
        st.none() | Ids,
        st.none() | st.just("ad"),
    ),
    st.builds(StoreNew, Media, Ids, Counts, st.none() | Ids, st.none(), st.binary(max_size=20)),
    st.builds(StoreKnown, Media, Ids, Counts),
    st.builds(Remove, Media, st.lists(st.tuples(Ids, Counts), max_size=3)),
    st.builds(Clear),
)


@st.composite
def any_events(draw: st.DrawFn) -> Any:
    """One event as an engine could say it, sound or not."""
    medium, hashes = draw(st.none() | Media), draw(st.lists(Hashes, max_size=4))
    match draw(st.integers(0, 9)):
        case 0:
            return AllBlocksCleared()
        case 1 | 2 | 3:
            return BlockRemoved(list(hashes), medium, draw(Groups))
    sound = draw(st.integers(0, 4)) > 0
    tokens = [5] * (BLOCK_SIZE * len(hashes) if sound else draw(st.integers(0, 9)))
    event = BlockStored(
        list(hashes),
        draw(st.none() | Hashes),
        tokens,
        BLOCK_SIZE if sound else draw(st.integers(-1, 4)),
        draw(st.none() | st.integers(-(2**63), 2**64 - 1)),
        medium,
        draw(Names),
        draw(Names),
        draw(Names),
        draw(Names),
    )
    event.group_idx, event.kv_cache_spec_kind = draw(Groups), draw(Kinds)
    if draw(st.integers(0, 4)) == 0:
        event.extra_keys = draw(st.lists(Keys, max_size=4))
    return event


Stamps = st.floats() | st.integers(-(2**63), 2**64 - 1)


@st.composite
def packed_bodies(draw: st.DrawFn) -> bytes:
    """Of plain stores, some of them sound."""
    names = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    medium, parents = draw(Media), st.none() | st.integers(10, 12) | st.sampled_from(names)
    events: list[Event] = [
        BlockStored([name], None if parent == name else parent, [300] * 4, 4, None, medium)
        for name, parent in [(name, draw(parents)) for name in names]
    ]
    body = bytearray()
    assert pack_plain(KVEventBatch(1.0, events, 0), body)
    return bytes(body)


Bodies = st.one_of(
    packed_bodies(),
    st.tuples(Stamps, st.lists(Records, max_size=6)).map(pack),
    st.tuples(Stamps, st.lists(any_events(), max_size=6), st.none() | st.integers(0, 3)).map(pack),
    st.binary(max_size=40),
    st.just(pack([1.0, [msgspec.msgpack.Ext(-1, b"\xff" * 12)], 0])),
    st.just(b"\x91" * 3000),
)


@st.composite
def any_inputs(draw: st.DrawFn, most: int = 10) -> list[Input]:
    """Numbers mostly follow each other; flags and bodies are anything."""
    found: list[Input] = []
    number = 0
    for _ in range(draw(st.integers(0, most))):
        if draw(st.integers(0, 5)) == 0:
            number = draw(st.integers(0, 20) | st.integers(0, 2**63))
        body = draw(Bodies)
        if draw(st.integers(0, 8)) == 0:
            body = body[: draw(st.integers(0, len(body)))]
        packed = BATCH | PACKED
        flags = draw(
            st.sampled_from(
                [0, 0, BATCH, BATCH, packed, packed | COLUMNS, FRESH, FRESH | BATCH, LOST, 7, 31]
            )
        )
        found.append(Input(number, flags, body))
        number += 1
    return found


def story(seed: int, steps: int, *, foreign: bool = False) -> StoryWorker:
    """A worker after so many sound changes."""
    worker = StoryWorker(seed, foreign=foreign, packed=True)
    for _ in range(steps):
        worker.step()
    return worker


@st.composite
def sound_inputs(draw: st.DrawFn, most: int = 40) -> list[Input]:
    """What a sound worker of either kind offers, some of it lost on the way."""
    worker = StoryWorker(draw(st.integers(0, 2**32)), foreign=draw(st.booleans()), packed=True)
    for _ in range(draw(st.integers(1, most))):
        match draw(st.integers(0, 19)):
            case 0:
                worker.step(refused=True)
            case 1:
                worker.retell()
            case 2:
                worker.messages.append(Input(worker.number, LOST, b"the ring was full"))
            case _:
                worker.step()
    return worker.messages
