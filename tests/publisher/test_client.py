"""publisher.worker.client alone: batches of foreign engines, counts, closing at any moment (K1, K5)."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from handler_rig import broken_handler
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_link_rig import Link, Peer, store, until
from publisher_rig import PATIENCE_S, insert, make_cache, open_fds, short_folder

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    StorageMedium,
    decode_batch,
    encode_batch,
)
from publisher import ClientStats, Sidecar, SidecarState, WorkerInfo, listen
from publisher.link.messages import BATCH, FRESH, PACKED
from publisher.link.packed import Unpacked, unpack

pytestmark = pytest.mark.integration

WORKER = WorkerInfo(block_size=4, dp_rank=3)


@pytest.fixture
def link() -> Iterator[tuple[Sidecar, Peer]]:
    """A worker and a sidecar by hand; nothing stays open."""
    before = open_fds()
    with short_folder() as folder:
        with listen(WORKER, folder / "pod", ring_bytes=4096) as sidecar, Peer(sidecar.link) as peer:
            until(lambda: sidecar.state == SidecarState.READY)
            yield sidecar, peer
        assert open_fds() == before


def batch_of(*events: Any, ts: Any = 1.5, dp_rank: Any = 3) -> KVEventBatch:
    return KVEventBatch(ts, list(events), dp_rank)


def stored(**changed: Any) -> BlockStored:
    settings: dict[str, Any] = {
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 4,
        "medium": StorageMedium.GPU,
    }
    return BlockStored(**settings | changed)


def test_a_batch_of_events_is_written_as_it_is(link: tuple[Sidecar, Peer]) -> None:
    """Encoded once, marked, numbered among the others; one without a rank gets the worker's."""
    sidecar, peer = link
    batch = batch_of(stored(), BlockRemoved([1], StorageMedium.GPU), AllBlocksCleared())
    assert sidecar.client.publish_batch(batch)
    assert sidecar.client.publish([store(0)])
    assert sidecar.client.publish_batch(batch_of(dp_rank=None))
    first, second, third = peer.messages()
    packed = BATCH | PACKED
    assert [(one.number, one.flags) for one in (first, second, third)] == [
        *((0, packed), (1, 0), (2, packed))
    ]
    assert unpack(first.body, packed) == Unpacked(1.5, batch.events, 3, encode_batch(batch))
    assert unpack(third.body, packed) == Unpacked(1.5, [], 3, encode_batch(batch_of()))
    assert sidecar.client.stats == ClientStats(written=3)
    assert sidecar.client.stats.bytes == sum(len(one.body) for one in (first, second, third))
    assert sidecar.client.stats.write_ns > 0


def test_what_is_unusual_is_written_in_the_general_form(link: tuple[Sidecar, Peer]) -> None:
    """Tuples for lists, and no tokens: sound, and rare."""
    sidecar, peer = link
    batch = batch_of(stored(block_hashes=(1,)), stored(block_hashes=[2], token_ids=[]))
    assert sidecar.client.publish_batch(batch)
    (message,) = peer.messages()
    assert message.flags == BATCH
    assert message.body == encode_batch(batch)
    assert len(decode_batch(message.body).batch.events) == 2


BROKEN: list[Any] = [
    batch_of(ts=1),
    batch_of(dp_rank=-1),
    batch_of(stored(token_ids=[1])),
    batch_of(stored(token_ids=[1, 2, 3, -1])),
    batch_of(stored(token_ids=[1, 2, 3, 2**32])),
    batch_of(stored(token_ids=[1, 2, 3, 4.0])),
    batch_of(stored(token_ids=[1, 2, 3, True])),
    batch_of(stored(token_ids=[1, 2, 3, "4"])),
    batch_of(stored(block_hashes=[True])),
    batch_of(stored(block_hashes=[2**63])),
    batch_of(stored(parent_block_hash=1)),
    batch_of(stored(parent_block_hash=b"1")),
    batch_of(stored(lora_id="a")),
    batch_of(stored(session_id=1)),
    batch_of(stored(extra_keys=[])),
    batch_of(BlockRemoved([], StorageMedium.GPU)),
    batch_of(BlockRemoved([1, 2**63], StorageMedium.GPU)),
    batch_of(stored(), stored(block_size=0)),
    batch_of(stored(medium="GPU")),
    batch_of(stored(lora_name="\ud800")),
    batch_of("no event"),
    KVEventBatch(1.0, None, 0),  # type: ignore[arg-type]
    None,
    object(),
    "batch",
]


@pytest.mark.parametrize("batch", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_batch_is_counted_and_nothing_else(
    link: tuple[Sidecar, Peer], batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """K1: no exception reaches the engine; no number is used, so nothing seems lost; the first of a kind
    is logged.
    """
    sidecar, peer = link
    for _ in range(3):
        assert not sidecar.client.publish_batch(batch)
    assert sidecar.client.stats == ClientStats(invalid=3)
    assert sidecar.client.publish_batch(batch_of())
    assert peer.numbers() == [0]
    assert [one.levelno for one in caplog.records] == [logging.WARNING]


def test_kinds_of_broken_batches_are_few(
    link: tuple[Sidecar, Peer], caplog: pytest.LogCaptureFixture
) -> None:
    """Positions make no kinds, and what is logged is bounded though every batch is broken anew."""
    sidecar, _ = link
    for number in range(200):
        sidecar.client.publish_batch(batch_of(*[AllBlocksCleared()] * number, stored(block_size=0)))
    assert len(caplog.records) == 1


def test_a_handler_that_raises_costs_its_line_alone(link: tuple[Sidecar, Peer]) -> None:
    """K1: the engine has no exception of it, and the next batch is written."""
    sidecar, peer = link
    with broken_handler("kvevents.link") as given:
        assert not sidecar.client.publish_batch(batch_of(object()))
        assert len(given) == 1
        assert sidecar.client.publish_batch(batch_of())
    assert sidecar.client.stats == ClientStats(written=1, invalid=1)
    assert peer.numbers() == [0]


def test_a_large_batch_leaves_no_large_buffer() -> None:
    """What it was packed in is kept up to a mebibyte, and not beyond."""
    tokens = list(range(100 * 4096))
    large = batch_of(stored(block_hashes=[*range(100)], token_ids=tokens, block_size=4096))
    with Link(ring_bytes=4 << 20) as link:
        assert link.client.publish_batch(batch_of(stored()))
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            assert link.client.publish_batch(large)
            after, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most - before > 4 * len(tokens), "it was packed"
        assert after - before <= 1 << 20
        assert link.client.publish_batch(batch_of(stored()))


def test_a_message_larger_than_the_ring_is_refused_and_seen(link: tuple[Sidecar, Peer]) -> None:
    """It would never fit: counted as such, and its number is missing for the reader; the next is
    written.
    """
    sidecar, peer = link
    huge = [stored(token_ids=list(range(4096)), block_size=4096)]
    assert not sidecar.client.publish_batch(batch_of(*huge))
    assert not sidecar.client.publish([store(0, 1000)])
    assert sidecar.client.publish([store(0)])
    assert sidecar.client.stats == ClientStats(written=1, refused=2, oversized=2)
    assert peer.numbers() == [2]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60)), max_size=60))
def test_every_number_is_written_or_refused(ops: list[tuple[int, int]]) -> None:
    """offered == written + refused, and is what the ring has numbered, whatever is offered and read."""
    with short_folder() as folder, listen(WORKER, folder / "pod", ring_bytes=4096) as sidecar:
        client, seen = sidecar.client, 0
        with Peer(sidecar.link) as peer:
            for kind, size in ops:
                match kind:
                    case 0 | 1:
                        client.publish([store(0, size)])
                    case 2:
                        client.publish_batch(batch_of(*[AllBlocksCleared()] * size))
                    case 3:
                        client.publish([object()])  # type: ignore[list-item]
                    case _:
                        seen += len(peer.numbers())
                stats = client.stats
                assert stats.offered == stats.written + stats.refused == client._ring.offered
            assert seen + len(peer.numbers()) == client.stats.written


def test_a_pump_does_not_let_go_of_the_interpreter(link: tuple[Sidecar, Peer]) -> None:
    """Beside a thread that takes it whenever it can, none of many pumps that tell something loses it:
    they would have to wait until the other is interrupted, 5 ms each time. (Many, for one that lets go
    may have it back before the other wakes.)
    """
    sidecar, peer = link
    cache = make_cache(num_pages=400)
    assert sidecar.pump(cache)
    going, turns = True, 0

    def run() -> None:
        nonlocal turns
        while going:
            turns += 1
            time.sleep(0)

    before, other = sys.getswitchinterval(), threading.Thread(target=run)
    sys.setswitchinterval(10.0)  # nobody is interrupted meanwhile
    try:
        other.start()
        until(lambda: turns)
        seen = turns
        for first in range(0, 8 * 3000, 8):
            insert(cache, range(first, first + 8))
            assert sidecar.pump(cache)
            assert peer.numbers()
        assert turns == seen
    finally:
        going = False
        sys.setswitchinterval(before)
        other.join(PATIENCE_S)


# ----------------------------------------------------------------------------------- other caches


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(1, 9)), max_size=80),
    st.sampled_from([0.0, 1e6]),
)
def test_two_caches_are_never_told_as_one(
    ops: list[tuple[int, int, int]], retell_interval_s: float
) -> None:
    """K4: caches by turns, at any moment of a re-telling and with a ring that is often full: what is told
    is of one at each moment, though their ids are the same; in the end it is what the last one holds.
    """
    caches = [make_cache(num_pages=400), make_cache(num_pages=400)]
    blocks: list[set[int]] = [set(), set()]
    with Link(ring_bytes=4096, retell_interval_s=retell_interval_s) as link:
        client = link.client
        for which, kind, size in ops:
            cache, first = caches[which], 100_000 * (which + 1)
            match kind:
                case 0 | 1:
                    insert(cache, range(first, first + 40 * size))
                case 2:
                    cache.evict(size)
                case 3 | 4 | 5:
                    client.pump(cache)
                    last = cache
                case _:
                    link.take(size)
            blocks[which] |= cache.resident_blocks()[StorageMedium.GPU]
            told = link.index.resident.get(StorageMedium.GPU, set())
            assert not (told & blocks[0] and told & blocks[1])
        last = caches[len(ops) % 2]
        client._retell_at, client._retell_interval_s = 0.0, 0.0
        link.take()
        client.pump(last)
        while last.retelling or client._ring.resyncs != client._answered or link.take():
            link.take()
            client.pump(last)
        assert link.index.resident == last.resident_blocks()


def test_a_cache_that_is_gone_is_let_go_of(link: tuple[Sidecar, Peer]) -> None:
    """The link keeps no cache alive, and one that is made in the place of another is another."""
    sidecar, peer = link
    cache = make_cache()
    sidecar.pump(cache)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    with pytest.raises(TypeError, match="is no cache"):
        sidecar.pump(None)  # type: ignore[arg-type]
    for _ in range(2):
        until(lambda: sidecar.pump(make_cache()) and peer.numbers())


def test_a_cache_that_the_sidecar_is_not_for_changes_nothing(
    link: tuple[Sidecar, Peer], caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused each time, by the field; so is what is no cache. The one before is told as ever."""
    sidecar, peer = link
    cache = make_cache()
    assert sidecar.pump(cache)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"^block_size: the sidecar was told 4, the cache has 8$"
        ):
            sidecar.pump(make_cache(page_size=8))
        with pytest.raises(TypeError, match=r"^source: a NoneType is no cache$"):
            sidecar.pump(None)  # type: ignore[arg-type]
    insert(cache, range(8))
    assert sidecar.pump(cache)
    assert [one.flags for one in peer.messages()] == [FRESH, 0]
    assert caplog.records == []


def test_another_cache_is_logged_once(
    link: tuple[Sidecar, Peer], caplog: pytest.LogCaptureFixture
) -> None:
    """Where two are pumped by turns somebody has to know why the view is told anew again and again."""
    sidecar, _ = link
    caches = [make_cache(), make_cache()]
    for cache in caches * 3:
        sidecar.pump(cache)
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("pump: another cache than before")
    assert Path(line.pathname).parts[-2:] == ("worker", "client.py")  # who said it


def test_a_pump_raises_nothing_of_a_handler(link: tuple[Sidecar, Peer]) -> None:
    """The step that says something goes on, and so does the telling."""
    sidecar, _ = link
    with broken_handler("kvevents.link") as given:
        for cache in [make_cache(), make_cache()]:
            assert sidecar.pump(cache)
    assert len(given) == 1


# ------------------------------------------------------------------------------------------- close


def test_closing_while_another_thread_publishes_is_safe() -> None:
    """K5: again and again, at any moment of the other's call: no exception there, nothing stays open,
    and the sidecar has read a prefix of what was offered.
    """
    before = open_fds()
    with short_folder() as folder:
        for calls in range(60):
            sidecar = listen(WORKER, folder / "pod", ring_bytes=8192)
            engine = Engine(sidecar, calls % 7)
            closers = [threading.Thread(target=sidecar.close) for _ in range(2)]
            engine.start()
            assert engine.going.wait(PATIENCE_S)
            for closer in closers:
                closer.start()
            for thread in (*closers, engine):
                thread.join(PATIENCE_S)
                assert not thread.is_alive()
            assert engine.failed is None
        assert open_fds() == before


class Engine(threading.Thread):
    """Publishes until the link is closed under its feet; `going` is set after so many calls."""

    def __init__(self, sidecar: Sidecar, calls: int) -> None:
        super().__init__()
        self.sidecar, self.calls = sidecar, calls
        self.going = threading.Event()
        self.failed: BaseException | None = None

    def run(self) -> None:
        cache, number = make_cache(), 0
        try:
            while self.sidecar.state != SidecarState.CLOSED:
                insert(cache, range(4 * number, 4 * number + 8))
                self.sidecar.pump(cache)
                self.sidecar.client.publish_batch(batch_of())
                if number == self.calls:
                    self.going.set()
                number += 1
        except BaseException as error:
            self.failed = error


def test_closing_ends_a_flush(link: tuple[Sidecar, Peer]) -> None:
    """A thread that waits for an answer which never comes is let go of."""
    sidecar, _peer = link
    cache = make_cache()
    waiting = threading.Thread(target=sidecar.client.flush, args=(cache, 600.0))
    waiting.start()
    until(lambda: sidecar.client.stats.written)
    sidecar.close()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_closing_in_a_signal_handler_is_safe(link: tuple[Sidecar, Peer]) -> None:
    """K5: a handler may run in the middle of a call of the same thread."""
    sidecar, _ = link

    def handle(number: int, frame: FrameType | None) -> None:
        sidecar.close()

    class Interrupting(list[Any]):
        def __iter__(self) -> Any:
            os.kill(os.getpid(), signal.SIGUSR1)
            return super().__iter__()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        sidecar.client.publish_batch(KVEventBatch(1.0, Interrupting(), 0))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sidecar.state == SidecarState.CLOSED
    assert not sidecar.client.publish([store(0)])
    assert sidecar.client._ring.fd == -1


def test_a_forked_child_has_nothing_of_it(link: tuple[Sidecar, Peer]) -> None:
    """It publishes nothing, holds none of the descriptors, and its close leaves the parent's link as it
    is.
    """
    sidecar, peer = link
    assert sidecar.client.publish([store(0)])
    client = sidecar.client
    assert client._connection is not None
    held = [client._connection.fileno(), client.door.fileno(), client._ring.fd, client._eventfd]
    held += [sidecar._attendant._wake, sidecar._meeting._fd]
    child = os.fork()
    if not child:
        code = 1
        try:
            refused = not client.publish([store(0)]) and not client.publish_batch(batch_of())
            refused &= not sidecar.pump(make_cache())
            sidecar.close()
            code = 0 if refused and not any(is_open(fd) for fd in held) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(is_open(fd) for fd in held)
    assert client.publish([store(0)])
    assert peer.numbers() == [0, 1]
    assert sidecar.link.is_socket()


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()
