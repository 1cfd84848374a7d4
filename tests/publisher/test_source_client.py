"""publisher.worker.client with a sidecar's end of the link (K1 to K4): what a router comes to believe."""

from __future__ import annotations

import mmap
import os
import re
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TypeAlias

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_link_rig import Link
from publisher_rig import PATIENCE_S, insert, make_cache, open_fds, short_folder

from hicache import HiRadixCache, KVShape, PagePool
from kvevents import BASE, AllBlocksCleared, HashFormat, Namespace, StorageMedium
from kvevents.records import BlockId, Clear, Record, RecordSource, Remove, StoreKnown, StoreNew
from publisher import ClientStats, LinkError, SidecarClient, WorkerInfo
from publisher.link.messages import (
    FRESH,
    VERSION,
    Bound,
    Close,
    ControlMessage,
    Failed,
    Flush,
    Flushed,
    Hello,
    Ready,
    Welcome,
    receive,
    send,
)
from publisher.link.ring import MIN_RING_BYTES
from publisher.worker.client import RETELL_BLOCKS

pytestmark = pytest.mark.integration

WORKER = WorkerInfo(block_size=4)
LINK = bytes(16)


def store(first: int, count: int = 1, parent: int | None = None) -> StoreNew:
    """Blocks of four tokens each."""
    tokens = b"".join((4 * first + i).to_bytes(4, "little") for i in range(4 * count))
    parent_id = None if parent is None else BlockId(parent)
    space = BASE if parent is None else None
    return StoreNew(StorageMedium.GPU, BlockId(first), count, parent_id, space, tokens)


def settle(link: Link, source: RecordSource) -> None:
    """Pump and take until nothing is left to say; a pump that is refused says it later."""
    for _ in range(500):
        link.client.pump(source)
        link.take()
        if link.source.in_step and not source.retelling:
            written = link.client.stats.written
            link.client.pump(source)
            if link.client.stats.written == written and not link.take() and link.source.in_step:
                return
    raise AssertionError(f"never in step: {link.client.stats} {link.source.stats}")


# ---------------------------------------------------------------------------------------- in step


def test_what_is_published_is_told() -> None:
    """Records come out as events, in order, with the time at which they were handed over."""
    with Link() as link:
        before = time.time()
        assert link.client.publish([store(0, 2)])
        assert link.client.publish(
            [store(2, 1, parent=1), Remove(StorageMedium.GPU, [(BlockId(2), 1)])]
        )
        told, more = link.source.take(100)
        assert not more
        assert [type(event).__name__ for one in told for event in one.events] == [
            *("BlockStored", "BlockStored", "BlockRemoved")
        ]
        assert all(before <= one.ts <= time.time() for one in told)
        assert link.source.in_step
        assert (link.source.stats.applied, link.source.stats.events) == (2, 3)
        assert link.client.stats == ClientStats(written=2)


def test_the_handshake_tells_who_is_who() -> None:
    """The source learns its worker; the client, the source's pid and where its sinks are bound."""
    with Link(block_size=16) as link:
        assert link.source.link.worker == WorkerInfo(block_size=16, dp_rank=3, worker_id="w")
        assert link.pid == os.getpid()
        assert link.client.connected
        assert link.client.sinks == ()


def test_a_cache_without_news_sends_nothing() -> None:
    """After the first, which tells that there is nothing, a pump costs a message only when something
    changed.
    """
    with Link() as link:
        cache = make_cache()
        for _ in range(3):
            assert link.client.pump(cache)
        assert link.client.stats == ClientStats(written=1)
        insert(cache, range(8))
        assert link.client.pump(cache)
        assert link.client.stats == ClientStats(written=2)


def test_the_first_pump_tells_what_was_there_before() -> None:
    """K4: a cache that is warm, and whose events were taken otherwise, is told whole."""
    with Link() as link:
        cache = make_cache(num_pages=64)
        insert(cache, range(40))
        cache.take_events()
        settle(link, cache)
        assert link.index.resident == cache.resident_blocks()
        assert len(link.index) == 10
        assert link.client.stats.retellings == 0


@pytest.mark.parametrize("key", ["block_size", "hash_format"])
def test_a_cache_that_is_not_what_was_told_is_refused(key: str) -> None:
    """ValueError at the first pump, with both values, not a stream that never gets in step."""
    with Link() as link:
        hash_format = HashFormat.DYNAMO if key == "hash_format" else HashFormat.SGLANG
        pool = PagePool(8, 8 if key == "block_size" else 4, KVShape(1, 1, 1))
        with pytest.raises(
            ValueError, match=f"{key}: the sidecar was told (4|sglang), the cache has"
        ):
            link.client.pump(HiRadixCache(pool, hash_format=hash_format))


def test_what_is_no_record_is_a_hole() -> None:
    """K1, K2: publishing what cannot be encoded raises nothing; it is refused, and the sidecar sees
    the hole.
    """
    with Link() as link:
        assert not link.client.publish([object()])  # type: ignore[list-item]
        assert link.client.stats == ClientStats(refused=1)
        link.take()
        assert not link.source.in_step


def test_retellings_begin_at_most_so_often() -> None:
    """K3: one that cannot succeed does not take every step."""
    with Link(retell_interval_s=3600) as link:
        cache = make_cache()
        assert link.client.pump(cache)
        link.client._ring.write(b"no message")
        link.take()
        for _ in range(3):
            assert link.client.pump(cache)
        assert link.client.stats.retellings == 0


# ---------------------------------------------------------------------------------- full and lost


def test_a_full_ring_refuses_at_once() -> None:
    """K1: with nobody reading, publishing goes on, refused and counted, each in less than a
    millisecond; what fitted is told when the reader is back, and then the hole is seen.
    """
    with Link(ring_bytes=MIN_RING_BYTES) as link:
        number = 0
        while link.client.publish([store(4 * number, 4)]):
            number += 1
        start = time.monotonic()
        for _ in range(2000):
            assert not link.client.publish([store(4 * number, 4)])
        assert time.monotonic() - start < 4.0
        assert link.client.stats == ClientStats(written=number, refused=2001)
        assert link.take() == number
        assert not link.source.in_step
        assert link.source.stats.missed == 2001
        assert link.source.stats.resyncs == 1


def test_a_refused_last_message_is_noticed() -> None:
    """K2: a hole shows although no message follows it; the cache's state is told anew."""
    with Link(ring_bytes=MIN_RING_BYTES) as link:
        cache = make_cache(num_pages=2048)
        link.client.pump(cache)
        insert(cache, range(800))
        assert link.client.pump(cache)
        insert(cache, range(50, 50 + 4000))
        assert not link.client.pump(cache)
        link.take()
        assert not link.source.in_step
        settle(link, cache)
        assert link.index.resident == cache.resident_blocks()
        assert link.client.stats.retellings == link.source.stats.resyncs == 1


def test_after_a_hole_nothing_is_told_until_the_retelling() -> None:
    """R1: messages behind a hole are dropped, all of them, up to the one that begins anew."""
    with Link(ring_bytes=MIN_RING_BYTES) as link:
        cache = make_cache()
        while link.client.publish([store(link.client.stats.written)]):
            pass
        link.take()
        link.client.publish([store(9000)])
        link.client.publish([store(9001)])
        assert link.take() == 0
        assert link.source.stats.skipped == 2
        insert(cache, range(12))
        settle(link, cache)
        assert link.index.resident == cache.resident_blocks()


class Refusals:
    """A cache whose every operation may meet a full ring."""

    def __init__(self, page_size: int, num_pages: int, ring_bytes: int) -> None:
        self.cache = make_cache(num_pages, page_size)
        self.link = Link(block_size=page_size, ring_bytes=ring_bytes)

    def step(self, kind: int, pick: int, length: int) -> None:
        match kind:
            case 0 | 1 | 2:
                size, alphabet = self.cache.page_size, pick % 4
                tokens = [(alphabet + pick * (i // (3 * size))) % 7 for i in range(length * size)]
                name = f"adapter {pick % 3}" if pick % 5 == 0 else None
                insert(self.cache, tokens, Namespace(lora_name=name))
            case 3:
                self.cache.evict(length)
            case 4 if pick % 7 == 0:
                self.cache.flush()
            case 5:
                self.link.take(1 + pick % 3)
            case _:
                pass
        if kind != 6:
            self.link.client.pump(self.cache)


@settings(max_examples=80)
@given(
    page_size=st.sampled_from((100, 30, 4, 1)),
    num_pages=st.sampled_from((64, 8)),
    ops=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 40), st.sampled_from((40, 20, 8, 3, 1))),
        min_size=3,
        max_size=60,
    ),
)
def test_whatever_was_refused_is_repaired(
    page_size: int, num_pages: int, ops: list[tuple[int, int, int]]
) -> None:
    """K2, invariant 16: with a ring far smaller than the cache and a reader that stalls at random, once
    it reads again the router's view becomes the cache.
    """
    refusals = Refusals(page_size, num_pages, MIN_RING_BYTES)
    with refusals.link as link:
        for op in ops:
            refusals.step(*op)
        settle(link, refusals.cache)
        assert link.index.resident == refusals.cache.resident_blocks()
        assert refusals.cache.violations() == []
        stats = link.client.stats
        assert link.source.stats.unreadable == 0
        assert link.source.stats.applied + link.source.stats.skipped == stats.written


@pytest.mark.parametrize(
    ("page_size", "num_pages", "ring_bytes"),
    [(1, 4096, MIN_RING_BYTES), (240, 64, MIN_RING_BYTES), (4, 40_000, 1 << 16)],
)
def test_a_cache_larger_than_the_ring_is_retold(
    page_size: int, num_pages: int, ring_bytes: int
) -> None:
    """K3: the re-telling comes in parts that fit, whatever block and ring sizes are, and each tells
    at most `RETELL_BLOCKS` blocks.
    """
    with Link(block_size=page_size, ring_bytes=ring_bytes) as link:
        cache = make_cache(num_pages, page_size)
        link.client.pump(cache)
        insert(cache, range(page_size * num_pages))
        assert not link.client.pump(cache)
        link.take()
        settle(link, cache)
        assert link.index.resident == cache.resident_blocks()
        assert len(link.index) == num_pages
        assert link.client.stats.retellings == 1
        assert link.client.stats.written >= num_pages / RETELL_BLOCKS


def test_a_retelling_full_of_long_names_arrives() -> None:
    """K2: names take room too; the parts get smaller until they fit."""
    with Link(ring_bytes=MIN_RING_BYTES) as link:
        cache = make_cache(num_pages=64)
        link.client.pump(cache)
        for number in range(64):
            insert(cache, range(4), Namespace(cache_salt=f"{number:0500}"))
        assert not link.client.pump(cache)
        link.take()
        settle(link, cache)
        assert link.index.resident == cache.resident_blocks()
        assert len(link.index) == 64


def test_a_retelling_whose_first_part_is_too_large_is_begun_again() -> None:
    """K2: the part that says FRESH is refused, which the sidecar does not ask for a second time."""
    with Link(ring_bytes=MIN_RING_BYTES) as link:
        cache = make_cache(num_pages=16)
        link.client.pump(cache)
        for number in range(16):
            insert(cache, range(4), Namespace(f"{number:01000}", f"{number:01000}"))
        assert not link.client.pump(cache)
        link.take()
        assert not link.source.in_step
        assert not link.client.pump(cache), "a first part of several names"
        settle(link, cache)
        assert link.source.stats.resyncs == 1
        assert link.index.resident == cache.resident_blocks()
        assert len(link.index) == 16


def test_what_another_cache_changes_is_not_kept_while_its_retelling_waits() -> None:
    """K4, invariant 25: nobody reads for ever so long; the re-telling that is due has all of it."""
    with Link(ring_bytes=MIN_RING_BYTES) as link:
        link.client.pump(make_cache())
        while link.client.publish([store(link.client.stats.written)]):
            pass
        other = make_cache(num_pages=2)
        for number in range(20):
            insert(other, range(4 * number, 4 * number + 4))
            other.evict(1)
            assert link.client.pump(other)
            assert other.take_records() == []


def test_a_retelling_waits_for_room() -> None:
    """K3: while the ring is over half full nothing is retold, and the retelling comes after."""
    with Link(ring_bytes=MIN_RING_BYTES) as link:
        cache = make_cache()
        link.client.pump(cache)
        insert(cache, range(8))
        while link.client.publish([store(link.client.stats.written)]):
            pass
        link.take()
        for number in range(1000, 1040):
            link.client.publish([store(number)])
        assert link.client.pump(cache)
        assert link.client.stats.retellings == 0
        link.take()
        assert link.client.pump(cache)
        assert link.client.stats.retellings == 1


def test_a_retelling_stops_while_nobody_reads() -> None:
    """K3: its parts fill no more than a sixteenth of the ring and one part more; live changes have the
    rest, and none is refused.
    """
    with Link(ring_bytes=MIN_RING_BYTES) as link:
        cache = make_cache(num_pages=2000)
        link.client.pump(cache)
        insert(cache, range(4000))
        link.client.pump(cache)
        link.take()
        for _ in range(50):
            link.client.pump(cache)
        assert cache.retelling
        ring = link.client._ring
        assert ring.capacity * 11 // 16 <= ring.free_bytes < ring.capacity * 15 // 16
        insert(cache, range(9000, 9020))
        assert link.client.pump(cache)
        assert link.client.stats.refused == 1
        settle(link, cache)
        assert link.client.stats.retellings == 1
        assert link.index.resident == cache.resident_blocks()


def test_a_retelling_goes_on_beside_live_changes() -> None:
    """What changes between the parts of a re-telling is told too."""
    with Link(block_size=1, ring_bytes=1 << 16) as link:
        cache = make_cache(num_pages=10_000, page_size=1)
        for first in range(0, 9000, 500):
            insert(cache, range(first, first + 500))
        link.client.pump(cache)
        link.take()
        link.client.publish([Clear()] * 70_000)
        link.take()
        parts = 0
        for step in range(40):
            insert(cache, range(20_000 + step, 20_100 + step))
            cache.evict(150)
            link.client.pump(cache)
            parts += cache.retelling
            link.take()
        assert parts > 1
        settle(link, cache)
        assert link.index.resident == cache.resident_blocks()


BAD_BODIES: list[tuple[str, bytes]] = [
    ("no msgpack", b"\xc1"),
    ("no batch", b"\x01"),
    ("cut short", b"\x92\xcb\x3f"),
    ("no record", b"\x92\xcb" + b"\0" * 8 + b"\x91\x91\x09"),
    ("bad text", b"\x92\xcb" + b"\0" * 8 + b"\x91\x95\x02\xa1\xff\x00\x01"),
    ("bad medium", b"\x92\xcb" + b"\0" * 8 + b"\x91\x94\x02\xa1x\x00\x01"),
]


@pytest.mark.parametrize("body", [body for _, body in BAD_BODIES], ids=[n for n, _ in BAD_BODIES])
def test_an_unreadable_body_is_a_hole(body: bytes) -> None:
    """R1: bytes that are no batch are counted, and end the step; a re-telling repairs it."""
    with Link() as link:
        cache = make_cache()
        insert(cache, range(8))
        link.client.pump(cache)
        link.take()
        link.client._ring.write(body)
        assert link.take() == 0
        assert link.source.stats.unreadable == 1
        assert not link.source.in_step
        settle(link, cache)
        assert link.index.resident == cache.resident_blocks()


IMPOSSIBLE: list[list[Record]] = [
    [StoreKnown(StorageMedium.CPU, BlockId(77), 1)],
    [Remove(StorageMedium.GPU, [(BlockId(77), 1)])],
    [store(0), store(0)],
    [store(5, 1, parent=77)],
    [StoreNew(StorageMedium.GPU, BlockId(0), 3, None, BASE, b"1234")],
]


@pytest.mark.parametrize("records", IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_impossible_records_are_a_hole(records: list[Record]) -> None:
    """R1: records that break M1 or M2 are not told, nor what was sound in their message; what is known
    is told anew, beginning with a clear.
    """
    with Link() as link:
        cache = make_cache()
        link.client.publish(records)
        assert link.take() == 0
        assert (link.source.stats.unreadable, link.source.in_step) == (1, False)
        insert(cache, range(8))
        link.client.pump(cache)
        ((one,), _) = link.source.take(1)
        assert isinstance(one.events[0], AllBlocksCleared)
        link.index.apply(one.events)
        settle(link, cache)
        assert link.index.resident == cache.resident_blocks()


ids = st.integers(-1, 6).map(BlockId)
any_record: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        StoreNew,
        medium=st.sampled_from(StorageMedium),
        first_id=ids,
        count=st.integers(-1, 3),
        parent_id=st.none() | ids,
        namespace=st.sampled_from((None, BASE, Namespace(lora_name="x"))),
        tokens=st.integers(0, 3).map(lambda count: b"\7" * 16 * count) | st.binary(max_size=5),
    ),
    st.builds(
        StoreKnown,
        medium=st.sampled_from(StorageMedium),
        first_id=ids,
        count=st.integers(-1, 3) | st.just(2**63),
    ),
    st.builds(
        Remove,
        medium=st.sampled_from(StorageMedium),
        ranges=st.lists(st.tuples(ids, st.integers(-1, 3)), max_size=3),
    ),
    st.just(Clear()),
)


@given(st.lists(st.lists(any_record, max_size=4), max_size=6), st.binary(max_size=30))
def test_any_message_is_told_or_a_hole(messages: list[list[Record]], noise: bytes) -> None:
    """R1: whatever records say, and whatever bytes come, the source goes on, and what it tells next is
    right.
    """
    with Link() as link:
        cache = make_cache()
        for records in messages:
            link.client.publish(records)
        link.take()
        link.client._ring.write(noise)
        link.take()
        assert not link.source.in_step
        insert(cache, range(12))
        settle(link, cache)
        assert link.index.resident == cache.resident_blocks()


def test_bytes_in_the_ring_that_are_no_message_are_a_hole() -> None:
    """R1: the source skips what the ring holds, asks, and goes on with the re-telling."""
    with Link() as link:
        cache = make_cache()
        insert(cache, range(8))
        link.client.pump(cache)
        with mmap.mmap(link.client._ring.fd, 0) as memory:
            memory[4096:4100] = b"\xff" * 4
        assert link.take() == 0
        assert (link.source.stats.resyncs, link.source.in_step) == (1, False)
        settle(link, cache)
        assert link.index.resident == cache.resident_blocks()


# ------------------------------------------------------------------------------------------ flush


class Serving:
    """A thread that does for the link what the sidecar's loop does."""

    def __init__(self, link: Link) -> None:
        self._link, self._thread = link, Thread(target=self._serve)

    def _serve(self) -> None:
        source = self._link.source
        poller = select.poll()
        for fd in source.link.pollables():
            assert isinstance(fd, int)
            poller.register(fd, select.POLLIN)
        while source.link.alive:
            self._link.take()
            source.answer_flushes((7,))
            poller.poll(int(PATIENCE_S * 1000))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._link.client.close()
        self._thread.join()


def test_flush_waits_until_all_is_told() -> None:
    """After a flush the router's view is the cache, holes and re-tellings included."""
    with Link(ring_bytes=MIN_RING_BYTES) as link, Serving(link):
        cache = make_cache(num_pages=5000, page_size=4)
        for first in range(0, 12_000, 1000):
            insert(cache, range(first, first + 1500))
            link.client.pump(cache)
        answer = link.client.flush(cache, PATIENCE_S)
        assert answer is not None
        assert answer.in_step
        assert answer.next_seqs == (7,)
        assert link.index.resident == cache.resident_blocks()
        assert answer.num_events >= 1


def test_a_flush_is_not_answered_before_its_messages_are_taken() -> None:
    """The source holds the answer back until it has taken what was written before the flush."""
    with Link() as link:
        cache = make_cache()
        insert(cache, range(8))
        assert link.client.flush(cache, 0.02) is None
        assert link.source.link.alive
        link.source.answer_flushes((1,))
        assert link.client.flush(cache, 0.02) is None
        assert link.take() == 1
        link.source.answer_flushes((1,))
        assert link.client.flush(cache, 0.02) is not None


def test_flush_gives_up_at_its_deadline() -> None:
    """A sidecar that does not answer costs the timeout, not more; the link stays usable."""
    with Link() as link:
        cache = make_cache()
        start = time.monotonic()
        assert link.client.flush(cache, 0.05) is None
        assert 0.04 < time.monotonic() - start < 5.0
        assert link.client.connected


def test_a_late_answer_is_not_taken_for_a_later_flush() -> None:
    """The answer to a flush that was given up says nothing of what was published since."""
    with Link() as link:
        cache = make_cache()
        insert(cache, range(8))
        assert link.client.flush(cache, 0.02) is None
        assert link.source.link.alive
        link.take()
        link.source.answer_flushes((1,))
        insert(cache, range(100, 108))
        assert link.client.flush(cache, 0.02) is None, "the second batch has not been taken yet"
        with Serving(link):
            assert link.client.flush(cache, PATIENCE_S) is not None
            assert link.index.resident == cache.resident_blocks()


def test_flush_without_a_sidecar_returns_at_once() -> None:
    """None when nobody ever came, and when the other side is gone, which is noticed."""
    cache = make_cache()
    with short_folder() as folder:
        client = SidecarClient(folder / "link", WORKER)
        assert client.flush(cache, PATIENCE_S) is None
        client.close()
        assert client.flush(cache, PATIENCE_S) is None
    with Link() as link:
        link.source.close()
        assert link.client.connected
        assert link.client.flush(cache, PATIENCE_S) is None
        assert not link.client.connected


# -------------------------------------------------------------------------------------------- end


def test_a_dead_sidecar_costs_the_worker_nothing() -> None:
    """K1: its end is noticed at the next pump; what comes then is refused, without error."""
    with Link(ring_bytes=MIN_RING_BYTES) as link:
        link.source.close()
        cache = make_cache(num_pages=512)
        for number in range(200):
            insert(cache, range(number * 8, number * 8 + 8))
            assert not link.client.pump(cache)
        assert not link.client.connected
        assert link.client.stats == ClientStats(refused=200)


def test_after_close_nothing_is_taken() -> None:
    """Publishing and pumping return False, flushing None; closing again is nothing."""
    before = open_fds()
    with Link() as link:
        link.client.close()
        link.client.close()
        assert not link.client.publish([store(0)])
        assert not link.client.pump(make_cache())
        assert link.client.flush(make_cache(), 1.0) is None
        assert link.client.stats == ClientStats()
        assert not link.client.connected
        link.source.close()
        link.source.close()
    assert open_fds() == before


def test_what_cannot_be_made_leaves_nothing_open() -> None:
    """A ring too small or a path that cannot be bound: an error, and no descriptor more than before."""
    with short_folder() as folder:
        before = open_fds()
        with pytest.raises(ValueError, match=r"^ring_bytes: 1 is below 4096"):
            SidecarClient(folder / "link", WORKER, ring_bytes=1)
        for path in (folder / "none" / "link", folder / ("x" * 200)):
            with pytest.raises(OSError, match=r"No such file|too long"):
                SidecarClient(path, WORKER)
        assert open_fds() == before


def test_a_ring_must_have_room_for_a_block() -> None:
    """A ring in which no block would ever fit could never be repaired: it is refused at the start."""
    with short_folder() as folder:
        before = open_fds()
        worker = WorkerInfo(block_size=2048)
        with pytest.raises(ValueError, match=r"^ring_bytes: 4096 is below \d+, for blocks of 2048"):
            SidecarClient(folder / "link", worker, ring_bytes=4096)
        assert open_fds() == before


# -------------------------------------------------------------------------------------- handshake


Peer: TypeAlias = Callable[[Path], None]


def accept_from(peer: Peer, timeout_s: float = PATIENCE_S) -> str:
    """What accepting a sidecar that behaves like `peer` says."""
    before = open_fds()
    with short_folder() as folder:
        client = SidecarClient(folder / "link", WORKER)
        thread = Thread(target=peer, args=(folder / "link",))
        thread.start()
        try:
            with pytest.raises(LinkError) as error:
                client.accept(time.monotonic() + timeout_s)
            assert not client.connected
        finally:
            client.close()
            thread.join()
        assert not (folder / "link").exists()
    assert open_fds() == before
    return str(error.value)


def peer_saying(*messages: ControlMessage, raw: bytes | None = None, stay: bool = False) -> Peer:
    """A sidecar that connects, says these and then leaves, or stays until the worker leaves."""

    def peer(path: Path) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(str(path))
            for message in messages:
                send(connection, message)
            if raw is not None:
                connection.send(raw)
            while stay:
                answer, fds = receive(connection)
                for fd in fds:
                    os.close(fd)
                if answer is None:
                    break

    return peer


HELLO = Hello(VERSION, 1)


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (peer_saying(), "ended before it was ready"),
        (peer_saying(HELLO), r"ended before it was ready|Broken pipe|reset"),
        (peer_saying(Hello(VERSION + 1, 1), stay=True), rf"version={VERSION + 1}.*not Hello"),
        (peer_saying(Close(), stay=True), "Close.*not Hello"),
        (peer_saying(HELLO, Hello(VERSION, 1), stay=True), "Hello.*not Ready"),
        (peer_saying(HELLO, Failed("endpoint: x is taken"), stay=True), "^endpoint: x is taken$"),
        (peer_saying(raw=b"\xc1", stay=True), "control message"),
        (peer_saying(raw=b"\x81\xa4type\xa5Ready", stay=True), "control message"),
    ],
    ids=["silent", "dies", "version", "close", "not ready", "failed", "noise", "cut"],
)
def test_a_sidecar_that_does_not_start_is_a_link_error(peer: Peer, said: str) -> None:
    """It leaves, is of another version, fails or talks nonsense: LinkError says so, nothing is left."""
    assert re.search(said, accept_from(peer))


def test_a_sidecar_that_does_not_come_is_a_link_error() -> None:
    """Not connecting, and connecting without getting ready, both end at the deadline."""
    start = time.monotonic()
    assert "did not connect in time" in accept_from(lambda _: None, timeout_s=0.05)
    before = open_fds()
    with (
        short_folder() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
    ):
        client = SidecarClient(folder / "link", WORKER)
        connection.connect(str(folder / "link"))
        send(connection, HELLO)  # before its time begins
        with pytest.raises(LinkError, match="did not get ready in time"):
            client.accept(time.monotonic() + 0.1)
        assert not client.connected
        client.close()
    assert open_fds() == before
    assert time.monotonic() - start < 5.0


def test_control_messages_cross_as_they_are() -> None:
    """Each message, and the descriptors that came with it; then the end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    messages: list[ControlMessage] = [
        HELLO,
        Welcome(VERSION, WORKER, LINK),
        Ready((Bound("tcp://127.0.0.1:1", None), Bound("ipc://x", "ipc://y"))),
        Failed("why"),
        Flush(2**40),
        Flushed(2**40, (1, 2), in_step=True, num_events=3),
        Close(),
    ]
    with ours:
        with theirs:
            for message in messages:
                send(theirs, message, (0,) if isinstance(message, Welcome) else ())
                got, fds = receive(ours)
                assert got == message
                assert len(fds) == isinstance(message, Welcome)
                for fd in fds:
                    os.close(fd)
        assert receive(ours) == (None, [])


def test_a_retelling_begins_with_a_clear_marked_fresh() -> None:
    """The message that ends a hole says FRESH, and its first record forgets what was told before."""
    with Link() as link:
        cache = make_cache()
        insert(cache, range(8))
        link.client._ring.write(b"hole")
        link.take()
        assert link.client.pump(cache)
        ring = link.source.link._ring
        assert ring is not None
        message = ring.read()
        assert message is not None
        _, records = msgspec.msgpack.decode(message.body, type=tuple[float, list[Record]])
        assert message.flags == FRESH
        assert [type(one) for one in records] == [Clear, StoreNew]
