"""Public reports about tiers as scenarios, named by their row in the list of cases."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from units_rig import AB, AC, SHAPE, A, D, E, MemoryStore, Rig, keys, opened

from hicache import HiRadixCache, HostPool, PagePool
from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    Namespace,
    StorageMedium,
    block_hashes,
    decode_batch,
    encode_batch,
)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Sixteen device pages, sixteen host pages, no storage."""
    with opened() as rig:
        yield rig


@pytest.fixture
def stored() -> Iterator[Rig]:
    """The same with a store."""
    with opened(store=MemoryStore()) as rig:
        yield rig


def test_case_1_a_prefetch_is_told_on_the_host_alone(stored: Rig) -> None:
    """Three pages fetched into an empty tree are exactly S(CPU: h1,h2,h3); none fetched is nothing."""
    stored.fetched(A[:12])
    assert stored.heard() == []
    stored.store.fill(A[:12])
    stored.fetched(A[:12])
    assert stored.heard() == ["S(CPU: a1 a2 a3 | None)"]


def test_case_2_a_backup_is_told_when_it_is_acknowledged(rig: Rig) -> None:
    """Submitted it is silent, acknowledged it is S(CPU) without R(GPU)."""
    rig.put(A)
    assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]
    rig.cache.tick()
    assert rig.heard() == []
    rig.copies.end()
    rig.cache.tick()
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]


def test_case_2_a_backup_that_never_arrived_is_never_removed() -> None:
    """Without an acknowledgement there is no S(CPU), and making room on the host is no R(CPU)."""
    with opened(host_pages=4) as rig:
        rig.put(A)
        rig.land(arrived=False)
        rig.put(D)
        rig.land()
        assert rig.heard() == [
            "S(GPU: a1 a2 a3 a4 | None)",
            "S(GPU: d1 d2 d3 | None)",
            "S(CPU: d1 d2 d3 | None)",
        ]


@pytest.mark.parametrize("branches", [[AB], [AB, AC]], ids=["one split", "two splits"])
def test_case_3_fragments_of_a_backup_are_all_told(stored: Rig, branches: list[list[int]]) -> None:
    """A node split during its backup is told whole, prefix first; its lock is released once, and it is
    written to storage once.
    """
    stored.put(A)
    for branch in branches:
        stored.put(branch)
    stored.heard()
    stored.copies.end(stored.copies.submitted[0])
    stored.cache.tick()
    assert stored.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]
    stored.land()
    stored.cache.tick()
    assert stored.cache.num_protected == 0
    assert sorted(key for put in stored.store.puts for key in put).count(keys(A)[0]) == 1
    assert stored.store.puts[0] == keys(A)


def test_case_5_a_block_goes_up_and_down(stored: Rig) -> None:
    """Prefetch, load back, eviction from the device and from the host: S(CPU) S(GPU) R(GPU) R(CPU)."""
    stored.store.fill(E)
    stored.fetched(E)
    node = stored.cache.match_prefix(E).host_node
    stored.load_back(node)
    stored.land()
    stored.cache.evict(2)
    assert stored.heard() == ["S(CPU: e1 e2 | None)", "S(GPU: e1 e2 | None)", "R(GPU: e2 e1)"]
    stored.put(range(500, 564))
    assert stored.heard()[1:] == ["R(CPU: e2 e1)"]


def test_case_7_every_tier_is_heard_of() -> None:
    """A one-page insert is heard with any set of tiers; only a cache told to be silent is silent."""
    for host, store in ((False, False), (True, False), (True, True)):
        device = PagePool(4, 4, SHAPE)
        cache = HiRadixCache(
            device,
            host_pool=HostPool(4, 4, SHAPE) if host else None,
            storage=MemoryStore() if store else None,
        )
        pages = cache.allocate(1)
        cache.insert(A[:4], pages)
        assert len(cache.take_events()) == 1
        cache.close()


def test_case_8_whatever_gives_pages_up_says_so(stored: Rig) -> None:
    """After each verb that frees pages, what was told is what is held: one R for each page."""
    stored.backed_up(A)
    stored.backed_up(AB)
    stored.cache.evict(1)
    stored.heard()
    lent = stored.cache.allocate(9)
    assert lent is not None
    stored.cache.free(lent)
    stored.heard()
    stored.cache.reset_device()
    stored.heard()
    stored.store.lose(keys(A)[0])
    stored.cache.tick()
    stored.heard()
    stored.put(range(500, 564))
    stored.land()
    stored.heard()
    stored.cache.flush()
    assert stored.heard() == ["C"]
    assert not any(stored.cache.resident_blocks().values())


def test_case_10_what_arrives_while_idle_is_told(stored: Rig) -> None:
    """Without another request, ticks alone tell what arrives; then idle ticks tell nothing."""
    stored.put(A)
    stored.heard()
    stored.copies.prompt = True
    for _ in range(3):
        stored.cache.tick()
    assert stored.heard() == ["S(CPU: a1 a2 a3 a4 | None)", "S(DISK: a1 a2 a3 a4 | None)"]
    for _ in range(100):
        stored.cache.tick()
    assert stored.heard() == []


def test_case_11_a_write_that_failed_in_part_tells_its_prefix(stored: Rig) -> None:
    """Of four pages of which the third was not written, the first two are told, ever."""
    stored.store.put_at_most = 2
    stored.put(A)
    stored.land()
    stored.heard()
    for _ in range(5):
        stored.cache.tick()
    assert stored.heard() == ["S(DISK: a1 a2 | None)"]


def test_case_14_nothing_of_before_a_flush_is_told_after_it(stored: Rig) -> None:
    """A flush with backup, load back, write and prefetch in flight is C, and then silence."""
    stored.store.held_up = {"put", "get", "exists_prefix"}
    stored.on_host(AC)
    stored.load_back(stored.cache.match_prefix(AC).host_node)
    stored.put(A[:4] + E)
    stored.store.fill(D)
    prefetch = stored.prefetch(D)
    write, look = stored.store.call(), stored.store.call()
    stored.heard()
    stored.cache.flush()
    assert stored.heard() == ["C"]
    for call in (write, look):
        call.end()
    stored.copies.end()
    stored.step(prefetch)
    for _ in range(3):
        stored.cache.tick()
    assert stored.heard() == []
    assert stored.num_free == (16, 16)
    assert stored.cache.num_in_flight == 0


def test_case_15_a_reset_of_the_device_is_no_clear(stored: Rig) -> None:
    """R(GPU) for all, the lower tiers kept; what is stored after it is legal, and so after a flush."""
    stored.backed_up(A)
    stored.cache.reset_device()
    assert stored.heard() == ["R(GPU: a4 a3 a2 a1)"]
    stored.put(A)
    assert stored.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]
    stored.cache.flush()
    stored.put(A)
    assert stored.heard() == ["C", "S(GPU: a1 a2 a3 a4 | None)"]


def test_case_17_a_failed_transfer_is_counted_and_its_retry_is_told_once(rig: Rig) -> None:
    """No S, the pages free, the failure counted; the next copy that arrives is one S."""
    rig.put(A)
    rig.land(arrived=False)
    assert rig.heard() == ["S(GPU: a1 a2 a3 a4 | None)"]
    assert (rig.num_free[1], rig.cache.stats().failed_flights) == (16, 1)
    rig.put(A)
    rig.land()
    assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]
    assert rig.cache.stats().failed_flights == 1


def test_case_19_a_block_is_a_page_on_every_tier(stored: Rig) -> None:
    """Each event has a hash for each page and `block_size` tokens for each hash, whatever the medium."""
    stored.put(A)
    stored.land()
    stored.cache.tick()
    events = stored.cache.take_events()
    assert [event.medium for event in events if isinstance(event, BlockStored)] == [
        StorageMedium.GPU,
        StorageMedium.CPU,
        StorageMedium.DISK,
    ]
    for event in events:
        assert isinstance(event, BlockStored)
        assert (event.block_size, list(event.token_ids)) == (4, A)
        assert event.block_hashes == block_hashes(A, 4)


def test_case_20_media_are_those_of_the_wire(stored: Rig) -> None:
    """Every medium told is one of the four, spelled on the wire as it is listed."""
    stored.put(A)
    stored.land()
    stored.cache.tick()
    stored.cache.evict(4)
    events = stored.cache.take_events()
    heard = decode_batch(encode_batch(KVEventBatch(0.0, events, 0))).batch.events
    media = [event.medium for event in heard if not isinstance(event, AllBlocksCleared)]
    assert media == ["GPU", "CPU_PINNED", "DISK", "GPU"]


def test_case_22_what_left_the_device_is_still_found_on_the_host(rig: Rig) -> None:
    """S(GPU) S(CPU) R(GPU): a router finds the prompt on the host, and only there."""
    rig.on_host(A)
    overlap = rig.index.overlap(A)
    assert overlap.any_medium == 4
    assert overlap.blocks[StorageMedium.CPU] == 4
    assert overlap.blocks.get(StorageMedium.GPU, 0) == 0


def test_case_23_equal_pages_have_different_keys_and_hashes(stored: Rig) -> None:
    """Tokens [7]*12 are three blocks on every tier, and three pages in the store."""
    stored.backed_up([7] * 12)
    assert {len(blocks) for blocks in stored.cache.resident_blocks().values()} == {0, 3}
    assert len(stored.store.pages) == 3


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_case_24_a_split_is_silent_on_every_tier(stored: Rig, cut: int) -> None:
    """A node on device, host and store is split in silence; each half is then removed once from each."""
    stored.backed_up(A)
    stored.cache.match_prefix(A[: 4 * cut])
    assert stored.heard() == []
    below = " ".join(f"a{i}" for i in range(4, cut, -1))
    above = " ".join(f"a{i}" for i in range(cut, 0, -1))
    stored.cache.evict(4 - cut)
    assert stored.heard() == [f"R(GPU: {below})"]
    stored.cache.evict(cut)
    assert stored.heard() == [f"R(GPU: {above})"]
    stored.store.lose(keys(A)[cut])
    stored.cache.tick()
    assert stored.heard() == [f"R(DISK: {below})"]


def test_case_25_a_chain_can_be_rebuilt_from_every_medium(stored: Rig) -> None:
    """Encoded and decoded, S on each medium links each block to the one before it."""
    for prompt in (A, AB):
        stored.put(prompt)
        stored.land()
        stored.cache.tick()
    events = decode_batch(
        encode_batch(KVEventBatch(0.0, stored.cache.take_events(), 0))
    ).batch.events
    parents: dict[StorageMedium, dict[Any, Any]] = {}
    for event in events:
        assert isinstance(event, BlockStored) and event.medium is not None
        parent = event.parent_block_hash
        for block_hash in event.block_hashes:
            parents.setdefault(event.medium, {})[block_hash] = parent
            parent = block_hash
    chain = {
        block_hash: parent
        for prompt in (A, AB)
        for block_hash, parent in zip(
            block_hashes(prompt, 4), [None, *block_hashes(prompt, 4)], strict=False
        )
    }
    assert parents == dict.fromkeys(
        (StorageMedium.GPU, StorageMedium.CPU, StorageMedium.DISK), chain
    )


def test_case_33_an_adapter_has_its_own_pages_in_the_store() -> None:
    """Two workers that load X and Y in opposite order share the store's pages by the adapter's name."""
    stores = []
    for names in ([None, "X", "Y"], ["Y", "X", None]):
        with opened(store=MemoryStore()) as rig:
            for name in names:
                rig.put(A[:4], Namespace(lora_name=name))
                rig.land()
                rig.cache.tick()
            rig.heard()
            stores.append(set(rig.store.pages))
    assert stores[0] == stores[1]
    assert len(stores[0]) == 3


class Elsewhere:
    """The agreement of this rank with another that says what it is told to."""

    rank = 0

    def __init__(self) -> None:
        self.says: int | None = None
        self.lost: list[bytes] = []

    def least(self, values: list[int]) -> list[int]:
        if self.says is None:
            return [*values[:-1], values[-1] - bool(self.lost)]
        return [min(value, self.says) for value in values[:-1]] + values[-1:]

    def gather(self, keys: list[bytes]) -> list[list[bytes]]:
        return [keys, self.lost]


def test_case_44_what_one_rank_has_not_is_not_told() -> None:
    """A copy that arrived here is told when it arrived everywhere, and not before."""
    agreement = Elsewhere()
    with opened(agreement=agreement) as rig:
        agreement.says = 0
        rig.put(A)
        rig.heard()
        rig.land()
        assert rig.heard() == []
        agreement.says = None
        rig.cache.tick()
        assert rig.heard() == ["S(CPU: a1 a2 a3 a4 | None)"]


def test_case_45_a_write_counts_as_far_as_every_rank_got() -> None:
    """Of four pages here and one there, one is told; what one rank lost is lost."""
    agreement = Elsewhere()
    with opened(store=MemoryStore(), agreement=agreement) as rig:
        rig.put(A)
        rig.land()
        rig.heard()
        agreement.says = 1 + 1
        rig.cache.tick()
        assert rig.heard() == ["S(DISK: a1 | None)"]
        agreement.says, agreement.lost = None, keys(A)[:1]
        rig.cache.tick()
        assert rig.heard() == ["R(DISK: a1)"]


def test_case_46_lookups_and_idle_ticks_are_silent(stored: Rig) -> None:
    """A thousand lookups over what three tiers hold, with a tick each, are no event."""
    for prompt in (A, AB, D):
        stored.backed_up(prompt)
    stored.cache.evict(4)
    stored.heard()
    for i in range(1000):
        prompt = (A, AB, AC, D, E)[i % 5]
        stored.cache.match_prefix(prompt[: 4 * (i % 4 + 1)])
        stored.cache.tick()
    assert stored.heard() == []


def test_case_51_dropping_one_of_several_copies_takes_the_block_from_that_medium_alone(
    stored: Rig,
) -> None:
    """A block that is on three media leaves one of them, and is found on the others."""
    stored.backed_up(A)
    stored.cache.evict(1)
    stored.heard()
    held = stored.index.resident
    last = block_hashes(A, 4)[-1]
    media = [medium for medium, blocks in held.items() if last in blocks]
    assert media == [StorageMedium.CPU, StorageMedium.DISK]


def test_case_54_nothing_is_stored_twice_on_any_tier() -> None:
    """In a random trace over three tiers with failures, every S is of what is absent on that medium and
    every R of what is present (5, 54); every parent was stored since the last clear (27).
    """
    random = Random(7)
    with opened(num_pages=12, host_pages=10, store=MemoryStore()) as rig:
        present: dict[object, set[object]] = {medium: set() for medium in StorageMedium}
        seen: set[object] = set()
        count = 0
        for _ in range(1500):
            random_step(rig, random)
            events = rig.cache.take_events()
            count += len(events)
            for event in events:
                match event:
                    case AllBlocksCleared():
                        seen.clear()
                        for blocks in present.values():
                            blocks.clear()
                    case BlockStored():
                        assert present[event.medium].isdisjoint(event.block_hashes)
                        assert event.parent_block_hash in {None, *present[event.medium]}
                        present[event.medium].update(event.block_hashes)
                    case BlockRemoved():
                        assert present[event.medium].issuperset(event.block_hashes)
                        present[event.medium].difference_update(event.block_hashes)
            assert present == rig.cache.resident_blocks()
        assert count > 500
        assert rig.cache.violations() == []


def random_step(rig: Rig, random: Random) -> None:
    """Something that an engine does, or that happens to it."""
    prompt = random.choice((A, AB, AC, D, E))[: 4 * random.randint(1, 4)]
    match random.randrange(9):
        case 0 | 1 | 2:
            if rig.cache.device_pool.allocator.num_free + rig.cache.num_evictable >= 4:
                rig.put(prompt)
        case 3:
            rig.cache.evict(random.randint(1, 5))
        case 4 | 5:
            if rig.copies.under_way:
                copy = random.choice(rig.copies.under_way)
                rig.copies.end(copy, arrived=random.random() < 0.7)
            rig.cache.tick()
        case 6:
            match = rig.cache.match_prefix(prompt)
            if not match.host_node.is_root:
                rig.cache.load_back(match.host_node)
        case 7:
            if rig.store.pages and random.random() < 0.5:
                rig.store.lose(random.choice(list(rig.store.pages)))
            elif (prefetch := rig.cache.prefetch(prompt)) is not None:
                rig.step(prefetch)
        case _:
            if random.random() < 0.1:
                rig.cache.flush()
            rig.cache.tick()


def test_a_router_that_replays_twice_is_not_misled(stored: Rig) -> None:
    """What was told of three tiers, applied twice over from the start, is the same state (55-59)."""
    index = BlockIndex()
    stored.put(A)
    stored.land()
    stored.cache.tick()
    stored.cache.evict(2)
    events = stored.cache.take_events()
    for _ in range(2):
        index.apply(events)
        assert index.resident == stored.cache.resident_blocks()
