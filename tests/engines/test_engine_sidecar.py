"""publisher.engines.sidecar: a rank's real sidecar, killed, late, and in nobody's way (P1 to P3)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq
from engines_rig import PATIENCE_S, SIZE, index_of, rank_of, replayed, stored, until
from handler_rig import broken_handler
from ports_rig import free_port

from kvevents import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    StorageMedium,
    decode_batch,
    encode_batch,
)
from kvevents.events import Event, KVEventBatch
from publisher.engines.sidecar import _most_bytes

pytestmark = pytest.mark.integration


def test_a_kill_in_between_loses_nothing(tmp_path: Path) -> None:
    """What was told before, meanwhile and after comes out as it went in, and nothing is cleared."""
    with rank_of(tmp_path) as rank:
        assert rank.sidecar is not None
        events = [stored(first) for first in range(0, 400, 4)]
        for number, event in enumerate(events):
            rank.publish(1.0, [event], None)
            if number == 40:
                os.kill(rank.sidecar.pid, signal.SIGKILL)

        def all_of_it() -> bool:
            told = [one for one in replayed(tmp_path) if isinstance(one, BlockStored)]
            return told == events

        until(lambda: rank.sidecar is not None and rank.sidecar.restarts)
        until(all_of_it)
        pid = rank.sidecar.pid
        rank.close()
        rank.publish(1.0, events, None)  # after the end, nothing
        assert not Path(f"/proc/{pid}").exists()


def test_one_unsound_event_costs_itself_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch's others are published; what is said of it is said once."""
    odd = BlockStored([5], None, [1, 2, 3], 4, None, StorageMedium.GPU)
    good = [stored(0), stored(100)]
    with rank_of(tmp_path) as rank, caplog.at_level(logging.WARNING):
        for _ in range(3):
            rank.publish(1.0, [good[0], odd, object(), good[1]], 0)
        blocks = {one for event in good for one in event.block_hashes}
        until(lambda: set(index_of(tmp_path).resident[StorageMedium.GPU]) == blocks)
    said = [one.getMessage() for one in caplog.records if one.name.startswith("kvevents")]
    assert len([one for one in said if "was not understood" in one]) == 1


def test_a_handler_that_raises_costs_its_line_alone(tmp_path: Path) -> None:
    """Neither the engine's step nor the event beside the one that is spoken of."""
    with rank_of(tmp_path) as rank, broken_handler("kvevents.engines") as given:
        rank.publish(1.0, [object(), stored(0)], None)
        assert len(given) == 1
        until(lambda: len(index_of(tmp_path).resident[StorageMedium.GPU]) == 1)


def test_several_threads(tmp_path: Path) -> None:
    """Nothing that another thread tells meanwhile is left behind, and neither waits for the other."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with rank_of(tmp_path) as rank:

            def tell() -> None:
                for first in range(10_000, 11_200, 4):
                    rank.tell([stored(first, medium=StorageMedium.DISK)])

            other = threading.Thread(target=tell)
            other.start()
            for first in range(0, 1200, 4):
                rank.publish(1.0, [stored(first)], None)
            other.join()
            until(lambda: len(index_of(tmp_path).resident[StorageMedium.DISK]) == 300)
            until(lambda: len(index_of(tmp_path).resident[StorageMedium.GPU]) == 300)
    finally:
        sys.setswitchinterval(interval)


def test_what_the_link_has_no_room_for_waits(tmp_path: Path) -> None:
    """A sidecar that does not read for a while: nothing is lost, refused or cleared, though no batch
    follows the last one. What the link could never hold is refused.
    """
    events = [stored(first, 20) for first in range(0, 16_000, 80)]
    with rank_of(tmp_path, ring_bytes=1 << 16) as rank:
        assert rank.sidecar is not None
        os.kill(rank.sidecar.pid, signal.SIGSTOP)
        for event in events:
            rank.publish(1.0, [event], None)
        assert rank._queue
        os.kill(rank.sidecar.pid, signal.SIGCONT)
        until(lambda: replayed(tmp_path) == [AllBlocksCleared(), *events])  # as it began
        assert rank.sidecar.client.stats.refused == 0
        until(lambda: not rank._pushing)
        huge = stored(0, 2000)
        rank.publish(1.0, [huge], None)  # more than the link will ever hold
        until(lambda: rank.sidecar is not None and rank.sidecar.client.stats.oversized == 1)


def test_what_the_queue_has_no_room_for_is_cleared(tmp_path: Path) -> None:
    """The oldest goes, and with it all that was told before: what it removed is not believed in."""
    kept = stored(0, 2)
    with rank_of(tmp_path, ring_bytes=1 << 16, max_queue_size=3) as rank:
        assert rank.sidecar is not None
        rank.publish(1.0, [kept], None)
        until(lambda: index_of(tmp_path).resident[StorageMedium.GPU])
        os.kill(rank.sidecar.pid, signal.SIGSTOP)
        first = 1000
        while not rank._queue:
            rank.publish(1.0, [stored(first, 20)], None)
            first += 80
        rank.publish(1.0, [BlockRemoved([*kept.block_hashes], StorageMedium.GPU)], None)
        while rank.dropped < 2:
            rank.publish(1.0, [stored(first, 20)], None)
            first += 80
        os.kill(rank.sidecar.pid, signal.SIGCONT)
        left = {one for start in (240, 160, 80) for one in stored(first - start, 20).block_hashes}
        until(lambda: set(index_of(tmp_path).resident[StorageMedium.GPU]) == left)
        assert replayed(tmp_path).count(AllBlocksCleared()) > 1


def test_what_waits_at_the_end_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a sidecar that reads again in time."""
    monkeypatch.setattr("publisher.engines.sidecar._LAST_S", PATIENCE_S)
    events = [stored(first, 20) for first in range(0, 16_000, 80)]
    with (
        rank_of(tmp_path, ring_bytes=1 << 16) as rank,
        zmq.Context[zmq.Socket[bytes]]() as context,
        context.socket(zmq.SUB) as router,
    ):
        assert rank.sidecar is not None
        router.setsockopt(zmq.RCVTIMEO, 1000 * int(PATIENCE_S))
        router.subscribe(b"")
        router.connect(f"ipc://{tmp_path}/pub")
        for first in count(1_000_000, 80):  # until the subscription is there
            rank.publish(1.0, [stored(first)], None)
            if router.poll(10):
                break
        pid = rank.sidecar.pid
        os.kill(pid, signal.SIGSTOP)
        for event in events:
            rank.publish(1.0, [event], None)
        assert rank._queue
        reads_again = threading.Timer(0.2, os.kill, (pid, signal.SIGCONT))
        reads_again.start()
        rank.close()
        assert not rank._queue
        assert rank.dropped == 0
        index = BlockIndex()
        while AllBlocksCleared() not in (told := _received(router)):
            index.apply(told)
        blocks = {one for event in events for one in event.block_hashes}
        assert blocks <= set(index.resident[StorageMedium.GPU])


def _received(router: zmq.Socket[bytes]) -> list[Event]:
    return decode_batch(router.recv_multipart()[-1]).batch.events


def test_a_sidecar_that_does_not_read_holds_up_nobody_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is lost is counted and said."""
    monkeypatch.setattr("publisher.engines.sidecar._LAST_S", 0.1)
    with rank_of(tmp_path, ring_bytes=1 << 16) as rank, caplog.at_level(logging.WARNING):
        assert rank.sidecar is not None
        pid = rank.sidecar.pid
        os.kill(pid, signal.SIGSTOP)
        for first in range(0, 16_000, 80):
            rank.publish(1.0, [stored(first, 20)], None)
        waiting = len(rank._queue)
        rank.close()
        assert not Path(f"/proc/{pid}").exists()
    assert rank.dropped == waiting > 0
    assert f"{waiting} batches are lost" in caplog.text


def test_an_engine_that_a_signal_ends_within_a_turn_ends(tmp_path: Path) -> None:
    """A handler of its own has raised before the lock was let go of: nobody will."""
    with rank_of(tmp_path) as rank:
        rank._turn.acquire()
        rank.publish(1.0, [stored(0)], None)
        ending = threading.Thread(target=rank.close)
        ending.start()
        try:
            ending.join(PATIENCE_S)
            assert not ending.is_alive()
        finally:
            rank._turn.release()
            ending.join(PATIENCE_S)
    assert rank.dropped == 1


def test_a_forked_process_publishes_nothing(tmp_path: Path) -> None:
    """Nor keeps anything, nor waits at its end for what a thread of its parent's was doing."""
    with rank_of(tmp_path) as rank, rank._starting, rank._turn:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank.publish(1.0, [stored(100)], None)
                rank.close()
                code = len(rank._queue)
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    assert rank.dropped == 0


def test_the_first_block_tells_the_block_size(tmp_path: Path) -> None:
    """What was told before it waits; with too little room, the oldest of it goes."""
    with rank_of(tmp_path, block_size=None, max_queue_size=3) as rank:
        for _ in range(5):
            rank.publish(1.0, [AllBlocksCleared()], None)
        assert rank.sidecar is None
        assert rank.dropped == 2
        rank.publish(1.0, [stored(0, 2)], None)
        until(lambda: rank.sidecar is not None)
        until(lambda: len(index_of(tmp_path).resident[StorageMedium.GPU]) == 2)


@pytest.mark.parametrize("kinds", [("sliding_window", "full_attention"), (None, None)])
def test_the_first_block_of_the_main_group_tells_the_block_size(
    kinds: tuple[str | None, str | None], tmp_path: Path
) -> None:
    """Whatever comes of other groups before, and of others' blocks, whose size may be another."""
    others, full = kinds
    odd = {"block_size": 2 * SIZE, "token_ids": [*range(4 * SIZE)]}
    with rank_of(tmp_path, block_size=None) as rank:
        rank.publish(1.0, [stored(0, 2, group_idx=1, kv_cache_spec_kind=others, **odd)], None)
        rank.publish(1.0, [stored(8, 2, locality="REMOTE", **odd)], None)
        assert not rank._begun
        events = [stored(16, 2, group_idx=0, kv_cache_spec_kind=others, **odd)] if full else []
        events.append(stored(0, 2, group_idx=2 if full else 0, kv_cache_spec_kind=full))
        rank.publish(1.0, events, None)
        until(lambda: rank.sidecar is not None)
        until(lambda: len(index_of(tmp_path).resident[StorageMedium.GPU]) == 2)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_what_a_batch_takes_is_not_underrated(size: int) -> None:
    """However many tokens a block has, and however large they are."""
    tokens = [2**32 - 1] * (3 * size)
    event = BlockStored([2**63 - 1] * 3, -(2**63), tokens, size, None, StorageMedium.GPU)
    batch = KVEventBatch(1.0, [event, BlockRemoved([1], StorageMedium.GPU)], 0)
    assert len(encode_batch(batch)) <= _most_bytes(batch)


def test_a_queue_without_a_bound(tmp_path: Path) -> None:
    """With `max_queue_size` 0 nothing is dropped; each batch names the rank that the engine named."""
    with rank_of(tmp_path, block_size=None, max_queue_size=0) as rank:
        for number in (None, 3, None):
            rank.publish(1.0, [AllBlocksCleared()], number)
        assert [batch.dp_rank for batch in rank._queue] == [0, 3, 0]
        assert rank.dropped == 0


@pytest.mark.parametrize("odd", [7, None, [object()]], ids=repr)
def test_whatever_is_handed_over_raises_nothing(odd: Any, tmp_path: Path) -> None:
    """And is not published (P1)."""
    with rank_of(tmp_path, block_size=None) as rank:
        rank.publish(1.0, odd, None)
        rank.publish("soon", [AllBlocksCleared()], None)  # type: ignore[arg-type]
        assert not rank._queue


def test_one_sidecar_is_started(tmp_path: Path) -> None:
    """However many blocks are stored until it is there."""
    with rank_of(tmp_path, block_size=None) as rank:
        with rank._starting:
            for first in (0, 100, 200):
                rank.publish(1.0, [stored(first)], None)
            assert len(_starting_threads()) == 1
        until(lambda: rank.sidecar is not None)


def test_an_engine_without_threads_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next block that is stored tries again, and all is told."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            rank = stack.enter_context(rank_of(tmp_path))
            rank.publish(1.0, [stored(0)], None)
        assert rank.sidecar is None
        rank.publish(1.0, [stored(100)], None)
        until(lambda: rank.sidecar is not None)
        until(lambda: len(index_of(tmp_path).resident[StorageMedium.GPU]) == 2)


def test_an_end_while_the_sidecar_starts(tmp_path: Path) -> None:
    """Waits for it and ends it too."""
    with rank_of(tmp_path, block_size=None) as rank:
        rank.publish(1.0, [stored(0)], None)
        until(lambda: rank._starting.locked() or rank.sidecar)
        rank.close()
        assert rank.sidecar is not None
        assert not Path(f"/proc/{rank.sidecar.pid}").exists()


def test_an_end_before_the_sidecar_starts(tmp_path: Path) -> None:
    """None is started any more."""
    with rank_of(tmp_path, block_size=None) as rank:
        ends = threading.Thread(target=rank.close)
        with rank._starting:
            rank.publish(1.0, [stored(0)], None)
            (starts,) = _starting_threads()
            ends.start()
            until(rank._stop.is_set)
        ends.join()
        starts.join()
        assert rank.sidecar is None


def _starting_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "kvevents-start"]


def test_a_sidecar_that_does_not_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine goes on, and what it tells is told once the sidecar is there; the reason is said."""
    port = free_port()
    with socket.socket() as other, caplog.at_level(logging.ERROR):
        other.bind(("127.0.0.1", port))
        other.listen()
        with rank_of(tmp_path, endpoint=f"tcp://127.0.0.1:{port}", bind=True) as rank:
            rank.publish(1.0, [stored(0)], None)
            assert rank.sidecar is None
            assert "did not start, and is tried again" in caplog.text
            assert str(port) in caplog.text
            other.close()
            until(lambda: rank.sidecar is not None)
            until(lambda: len(index_of(tmp_path).resident[StorageMedium.GPU]) == 1)
