"""kvevents.view: what a dialect tells, against an account of what is held."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import trials

from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    Event,
    StorageMedium,
    TokenIds,
    pack_tokens,
)
from kvevents.columns import Columns
from kvevents.dialect import NAMESPACES, PRESETS, Dialect
from kvevents.hashing import BlockHash
from kvevents.index import Oddities
from kvevents.pieces import piece_of
from kvevents.view import View

GPU, CPU, DISK, EXT = StorageMedium
CHAINS = 4
DEPTH = 5
Held = dict[StorageMedium, set[int]]

NAMES: tuple[dict[str, object], ...] = (
    {},
    {"lora_name": "adapter"},
    {"cache_salt": "salt"},
    {"extra_key": "key"},
)
"""Of each chain of blocks: what tells it from the others."""


def name(chain: int, depth: int) -> int:
    return (chain + 1) * 1000 + depth


def store(medium: StorageMedium, chain: int, start: int, stop: int, *, packed: bool) -> BlockStored:
    tokens = [chain * 100 + depth for depth in range(start, stop)]
    return BlockStored(
        [name(chain, depth) for depth in range(start, stop)],
        name(chain, start - 1) if start else None,
        TokenIds(pack_tokens(tokens)) if packed else tokens,
        1,
        medium=medium,
        **NAMES[chain],  # type: ignore[arg-type]  # fields of BlockStored
    )


Steps = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "grow", "shrink", "clear"]),
        st.sampled_from(StorageMedium),
        st.integers(0, CHAINS - 1),
        st.integers(1, DEPTH),
        st.booleans(),
    ),
    max_size=40,
)
Texts = st.sampled_from(["A", "B", "C", "D"])
Dialects = st.builds(
    Dialect,
    media=st.dictionaries(st.sampled_from(StorageMedium), Texts, min_size=1).map(
        lambda media: tuple((medium, media[medium]) for medium in StorageMedium if medium in media)
    ),
    namespaces=st.sets(st.sampled_from(NAMESPACES)).map(lambda names: tuple(sorted(names))),
)


class Cache:
    """Chains of blocks whose prefixes are on media, and the events of what it does."""

    def __init__(self) -> None:
        self.length = {(medium, chain): 0 for medium in StorageMedium for chain in range(CHAINS)}

    def step(
        self, kind: str, medium: StorageMedium, chain: int, count: int, packed: bool
    ) -> list[Event]:
        if kind == "clear":
            self.length = dict.fromkeys(self.length, 0)
            return [AllBlocksCleared()]
        have = self.length[medium, chain]
        if kind == "grow":
            stop = min(DEPTH, have + count)
            self.length[medium, chain] = stop
            return [store(medium, chain, have, stop, packed=packed)] if stop > have else []
        left = max(0, have - count)
        self.length[medium, chain] = left
        hashes = [name(chain, depth) for depth in reversed(range(left, have))]
        return [BlockRemoved([*hashes], medium)] if hashes else []

    def state(self) -> Iterator[list[Event]]:
        yield [AllBlocksCleared()]
        for (medium, chain), length in self.length.items():
            if length:
                yield [store(medium, chain, 0, length, packed=True)]

    def told(self, dialect: Dialect) -> Held:
        """What is held of it, by the first of the media that are told alike."""
        found: Held = {medium: set() for medium in StorageMedium}
        first: dict[str, StorageMedium] = {}
        for medium, text in dialect.media:
            to = found[first.setdefault(text, medium)]
            for chain, names in enumerate(NAMES):
                if names.keys() <= set(dialect.namespaces):
                    to |= {name(chain, depth) for depth in range(self.length[medium, chain])}
        return found


def believed(index: BlockIndex) -> Held:
    return {medium: {int(one) for one in held} for medium, held in index.resident.items()}


@trials(300)
@given(dialect=Dialects, steps=Steps)
def test_a_view_tells_what_is_held(
    dialect: Dialect, steps: list[tuple[str, StorageMedium, int, int, bool]]
) -> None:
    """V1, V2: after every step the index made of the view holds what the dialect tells of the cache; no
    block is told twice, removed unheard of, or stored before its parent.
    """
    cache, view, index = Cache(), View(dialect), BlockIndex()
    for step in steps:
        index.apply(view.apply(cache.step(*step)))
        assert believed(index) == cache.told(dialect)
    assert index.oddities == Oddities()


@trials(150)
@given(dialect=Dialects, steps=Steps, later=Steps)
def test_a_state_told_anew_is_the_same(
    dialect: Dialect,
    steps: list[tuple[str, StorageMedium, int, int, bool]],
    later: list[tuple[str, StorageMedium, int, int, bool]],
) -> None:
    """V3: a view that was told the state, or was told it in the middle, tells from there on what one that
    has seen it all does.
    """
    cache, seen = Cache(), View(dialect)
    for step in steps:
        seen.apply(cache.step(*step))
    new = View(dialect)
    for events in cache.state():
        new.apply(events)
    again = View(dialect)
    for step in steps:
        again.apply([msgspec.structs.replace(one) for one in Cache().step(*step)])  # of another
    for events in cache.state():
        again.apply(events)
    for step in later:
        events = cache.step(*step)
        assert seen.apply(events) == new.apply(events) == again.apply(events)


@trials(100)
@given(steps=Steps)
def test_where_all_is_told_nothing_is_touched(
    steps: list[tuple[str, StorageMedium, int, int, bool]],
) -> None:
    """V4: the same list where media are only renamed; the same events where some are left out."""
    renamed = Dialect(media=((GPU, "a"), (CPU, "b"), (DISK, "c"), (EXT, "d")))
    plain, device, cache = View(renamed), View(Dialect(media=((GPU, "GPU"),))), Cache()
    for step in steps:
        events = cache.step(*step)
        assert plain.apply(events) is events
        assert all(any(one is event for event in events) for one in device.apply(events))


def test_events_are_not_changed() -> None:
    """A piece is a copy."""
    view = View(Dialect(media=((GPU, "x"), (CPU, "x"))))
    first, second = store(GPU, 0, 0, 2, packed=False), store(CPU, 0, 0, 4, packed=True)
    before = msgspec.structs.replace(second, block_hashes=[*second.block_hashes])
    assert view.apply([first]) == [first]
    (told,) = view.apply([second])
    assert told == store(GPU, 0, 2, 4, packed=True)
    assert second == before


def test_a_device_view() -> None:
    """aibrix: a copy on the host comes and goes without a word; the device's is stored and removed."""
    view = View(PRESETS["aibrix"].dialect)
    stored, removed = store(GPU, 0, 0, 2, packed=True), BlockRemoved([name(0, 1)], GPU)
    host, gone = store(CPU, 0, 0, 2, packed=True), BlockRemoved([name(0, 1), name(0, 0)], CPU)
    assert view.apply([stored, host, removed, gone]) == [stored, removed]
    assert view.left_out == 2


def test_presence_is_merged() -> None:
    """vllm-router: disk and external store are one tier; a block leaves it when it has left both."""
    view = View(PRESETS["vllm-router"].dialect)
    disk, external = store(DISK, 0, 0, 2, packed=True), store(EXT, 0, 0, 3, packed=True)
    assert view.apply([disk]) == [disk]
    assert view.apply([external]) == [store(DISK, 0, 2, 3, packed=True)]
    assert view.apply([BlockRemoved([name(0, 1)], DISK)]) == []
    assert view.apply([BlockRemoved([name(0, 2), name(0, 1), name(0, 0)], EXT)]) == [
        BlockRemoved([name(0, 2), name(0, 1)], DISK)
    ]


def test_what_cannot_be_told_apart_is_not_told() -> None:
    """Invariant 14: a salted prompt's blocks are nowhere in a stream that has no salts, nor is a child of
    theirs that does not say it again; once they are gone their name is free.
    """
    view = View(PRESETS["smg"].dialect)
    salted = store(GPU, 2, 0, 2, packed=True)
    child = msgspec.structs.replace(
        salted, block_hashes=[5], parent_block_hash=name(2, 1), token_ids=[7], cache_salt=None
    )
    assert view.apply([salted, child]) == []
    assert view.apply([BlockRemoved([5], GPU), BlockRemoved([name(2, 1), name(2, 0)], GPU)]) == []
    assert view.left_out == 4
    plain = msgspec.structs.replace(child, parent_block_hash=None)
    assert view.apply([plain]) == [plain]
    assert view.apply([BlockRemoved([5], GPU)]) == [BlockRemoved([5], GPU)]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (None, True),
        ([None, None], True),
        ([[], None], True),
        ([["adapter"], ["adapter"]], True),
        ([["adapter", "salt"], ["adapter"]], False),
        ([[["image", 0]], None], False),
    ],
)
def test_extra_keys(keys: list[object] | None, told: bool) -> None:
    """vLLM repeats the adapter's name among them: that alone hides nothing."""
    event = msgspec.structs.replace(store(GPU, 1, 0, 2, packed=True), extra_keys=keys)
    assert View(PRESETS["vllm-router"].dialect).apply([event]) == ([event] if told else [])
    assert View(PRESETS["vllm"].dialect).apply([event]) == [event]


def test_blocks_before_an_image_are_told() -> None:
    """V3: what hides is the block that has the key, and those after it: as when each is told alone."""
    event = msgspec.structs.replace(
        store(GPU, 0, 0, 4, packed=True), extra_keys=[None, None, [["image", 0]], None]
    )
    view = View(PRESETS["smg"].dialect)
    (told,) = view.apply([event])
    assert isinstance(told, BlockStored)
    assert told.block_hashes == [name(0, 0), name(0, 1)]
    alone = View(PRESETS["smg"].dialect)
    single = [piece_of(event, at, at + 1) for at in range(4)]
    assert alone.apply([*single]) == single[:2]
    removed = BlockRemoved([name(0, depth) for depth in (3, 2, 1, 0)], GPU)
    assert view.apply([removed]) == [BlockRemoved([name(0, 1), name(0, 0)], GPU)]


HIDDEN = BlockStored([1], None, [1], 1, medium=GPU, lora_name="adapter")
SHOWN = BlockStored([9], None, [9], 1, medium=GPU)


def test_columns_behind_a_block_that_is_left_out_are_left_out() -> None:
    """V2: in columns no event names an adapter, and engines do not repeat one behind a prompt's start."""
    view, (one, two, nine) = View(Dialect(namespaces=())), map(BlockHash, (1, 2, 9))
    columns = Columns([two, nine], [one, None], [1, 1], pack_tokens([2, 9]), 1, GPU)
    assert view.apply([HIDDEN]) == []
    assert list(view.apply(columns)) == [SHOWN]
    removed = Columns([two, one], [None], [-2], pack_tokens([]), 1, GPU)
    assert list(view.apply(removed)) == []


def test_a_block_is_left_out_as_long_as_any_medium_has_it() -> None:
    """V2: it has left one of two, and neither what comes behind it nor its removal is told."""
    view = View(Dialect(namespaces=()))
    on_cpu = msgspec.structs.replace(HIDDEN, medium=CPU)
    behind = BlockStored([2], 1, [2], 1, medium=CPU)
    assert view.apply([HIDDEN, on_cpu, BlockRemoved([1], GPU), behind]) == []
    assert view.apply([BlockRemoved([2, 1], CPU)]) == []
