"""publisher.stream.foreign, kvevents.view spellers: what consumers believe of a relayed engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    Event,
    HashFormat,
    Namespace,
    StorageMedium,
    block_hashes,
    decode_batch,
)
from kvevents.dialect import PRESETS, Dialect
from kvevents.store_form import StoreSpeller
from kvevents.view import View
from publisher.stream.foreign import ForeignState

FEWER = settings(max_examples=settings().max_examples // 2)
"""Of each dialect: there are a dozen, and what the engine says is the same for all."""
SIZE = 2
TS = 1e9
GPU, CPU, DISK, EXTERNAL = StorageMedium
CLEARED = AllBlocksCleared()


class Node(NamedTuple):
    """A block as its engine knows it, when it does not disagree with itself."""

    name: int
    parent: int | None
    tokens: tuple[int, ...]
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    keys: list[Any] | None = None


def tree() -> list[Node]:
    """A prompt in three namespaces, with a fork whose hashes have a key in them; the others are ours."""
    found: list[Node] = []
    spaces: list[dict[str, Any]] = [{}, {"lora_name": "adapter"}, {"cache_salt": "salt"}]
    for space in spaces:
        path = [1, 2, 3, 4, 5, 6]
        names = list(map(int, block_hashes(path, SIZE, Namespace(**space))))
        for at, name in enumerate(names):
            tokens = tuple(path[at * SIZE : (at + 1) * SIZE])
            found.append(Node(name, names[at - 1] if at else None, tokens, **space))
        image = Node(len(found), names[0], (8, 8), **space, keys=["image"])
        found += [image, Node(-len(found), image.name, (9, 9), **space)]
    return found


OF = {node.name: node for node in tree()}


def stored(node: Node, medium: StorageMedium = GPU, **changes: Any) -> BlockStored:
    """A block by itself."""
    event = BlockStored([node.name], node.parent, [*node.tokens], SIZE, medium=medium)
    names = {
        "lora_name": node.lora_name,
        "cache_salt": node.cache_salt,
        "extra_key": node.extra_key,
    }
    keys = None if node.keys is None else [node.keys]
    return replace(event, **names, extra_keys=keys, **changes)


Names = st.sampled_from(sorted(OF))
Media = st.sampled_from(StorageMedium)
Spaces: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"cache_salt": "other"},
        {"cache_salt": None},
        {"lora_name": "other"},
        {"lora_name": None},
        {"lora_id": 7},
        {"session_id": "session"},
        {"extra_key": "other"},
    ]
)


@st.composite
def stores(draw: st.DrawFn) -> BlockStored:
    """A chain of blocks, of which the engine may say what is not so."""
    chain = [OF[draw(Names)]]
    while chain[0].parent is not None and draw(st.integers(0, 3)):
        chain.insert(0, OF[chain[0].parent])
    event = stored(chain[0], draw(Media))
    event.block_hashes = [node.name for node in chain]
    event.token_ids = [token for node in chain for token in node.tokens]
    keys = [node.keys for node in chain]
    event.extra_keys = keys if any(keys) else None
    oddity = draw(st.integers(0, 9))
    if oddity == 0:
        event.parent_block_hash = draw(st.none() | Names)
    elif oddity == 1:
        event.token_ids = [1] * len(event.token_ids)
    elif oddity == 2:
        event.extra_keys = draw(st.none() | st.just([["other"]] * len(chain)))
    elif oddity == 3:
        event.block_hashes = draw(st.permutations(event.block_hashes))
    elif oddity == 4:
        event.token_ids = []
    elif oddity < 8:
        event = replace(event, **draw(Spaces))
    return event


Events: st.SearchStrategy[Event] = st.one_of(
    stores(),
    stores(),
    stores(),
    st.builds(BlockRemoved, st.lists(Names, max_size=3), st.none() | Media),
    st.builds(BlockRemoved, st.lists(Names, max_size=3), Media),
)
Batches = st.lists(st.lists(Events, max_size=4) | st.just([CLEARED]), max_size=14)


class Sink:
    """What one dialect tells, and a consumer that believes it."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect, self.view, self.believes = dialect, View(dialect), BlockIndex()
        self.speller: StoreSpeller | None = None
        if dialect.event_form == "mooncake":
            self.speller = StoreSpeller(
                0,
                block_size=SIZE,
                hash_format=HashFormat.SGLANG,
                media=dict(dialect.media),
                model="model",
                worker_id="worker",
            )

    def tell(self, events: Iterable[Event]) -> bytes | None:
        """The bytes, where the form depends on what is held."""
        told = self.view.apply(list(events))
        if self.speller is None:
            self.believes.apply(told)
            return None
        payload = self.speller.spell(TS, told)
        decoded = decode_batch(payload)
        assert decoded.skipped == ()
        self.believes.apply(decoded.batch.events)
        return payload

    def anew(self, state: ForeignState) -> Sink:
        """One that is told the state from its beginning."""
        sink = Sink(self.dialect)
        for events in whole(state):
            sink.tell(events)
        return sink

    def taken_up(self, state: ForeignState) -> Sink:
        """One that goes on where another ended."""
        sink = Sink(self.dialect)
        for events in whole(state):
            told = sink.view.apply(events)
            if sink.speller is not None:
                sink.speller.hold(told)
        return sink


def whole(state: ForeignState) -> list[list[Event]]:
    """The state told from its beginning."""
    return [[CLEARED], *map(list[Event], state.index.snapshot(3))]


def follow(preset: str, batches: list[list[Event]]) -> None:
    """After each batch, who heard it all believes what one does that is told the state, down to what each
    block is; and a process that goes on from the state makes the same bytes.
    """
    state, sink = ForeignState(SIZE), Sink(PRESETS[preset].dialect)
    for batch in batches:
        later = sink.taken_up(state)
        told = state.apply(batch)
        assert sink.tell(told) == later.tell(told)
        anew = sink.anew(state)
        assert sink.believes.resident == anew.believes.resident
        assert identities(sink.believes) == identities(anew.believes)
        assert sink.believes.oddities.removed_unknown == 0


@pytest.mark.parametrize("preset", PRESETS)
@FEWER
@given(Batches)
def test_what_is_told_is_what_is_told_anew(preset: str, batches: list[list[Event]]) -> None:
    """In every dialect, of engines that disagree with themselves."""
    follow(preset, batches)


PROMPT = list(OF.values())[:4]
"""Three blocks, and one that has a key, behind the first."""


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from(PROMPT),
            st.sampled_from([DISK, EXTERNAL]),
        ),
        max_size=20,
    )
)
def test_copies_come_and_go_in_any_order(steps: list[tuple[bool, Node, StorageMedium]]) -> None:
    """Of what is on the device in any case: a store's objects are told the same, parents there or not."""
    batches: list[list[Event]] = [[stored(node) for node in PROMPT]]
    batches += [
        [stored(node, medium) if comes else BlockRemoved([node.name], medium)]
        for comes, node, medium in steps
    ]
    follow("mooncake-store", batches)


def identities(index: BlockIndex) -> dict[int, Any]:
    """Each block as the index has it, but for its media."""
    told = [event for chain in index.snapshot(1) for event in chain]
    return {int(event.block_hashes[0]): replace(event, medium=None) for event in told}


@given(Batches)
def test_a_state_that_was_told_goes_on_alike(batches: list[list[Event]]) -> None:
    """F8: one that is built from a state has the same told of all that follows."""
    state = ForeignState(SIZE)
    for batch in batches:
        later = ForeignState(SIZE)
        for events in whole(state):
            later.apply(events)
        assert state.apply(batch) == later.apply(batch)
