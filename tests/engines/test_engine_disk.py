"""publisher.engines.disk and .pages: what is kept in files is told, and nothing else (D1, D2)."""

from __future__ import annotations

import logging
import os
import re
import signal
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from engines_rig import PATIENCE_S, SIZE, index_of, rank_of, replayed, stored, until

from hicache.pool import MLAShape
from hicache.storage import PageFormat
from kvevents import AllBlocksCleared, BlockIndex, BlockRemoved, BlockStored, StorageMedium
from kvevents.events import Event
from kvevents.hashing import block_digests, wire_hash
from kvevents.namespace import Namespace
from kvevents.tokens import pack_tokens
from publisher.engines.disk import Holdings, Meeting
from publisher.engines.pages import ToldPages
from publisher.engines.sidecar import EngineSidecar

GPU, CPU, DISK = StorageMedium.GPU, StorageMedium.CPU, StorageMedium.DISK
FORM = PageFormat("m", MLAShape(1, 8, torch.uint8), SIZE)


def keys_of(first: int, count: int) -> list[bytes]:
    """Storage keys of the blocks of `stored(first, count)`."""
    return list(block_digests(b"", pack_tokens(range(first, first + count * SIZE)), SIZE))


def page(place: int) -> torch.Tensor:
    return torch.full((SIZE * 8,), place % 256, dtype=torch.uint8)


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


@pytest.fixture
def pages(tmp_path: Path, meeting: Meeting) -> Iterator[ToldPages]:
    made = ToldPages(tmp_path / "pages", FORM, min_free_bytes=0, meeting=meeting)
    yield made
    made.close()


@pytest.fixture
def waiting(tmp_path: Path, meeting: Meeting) -> Iterator[EngineSidecar]:
    """A rank that knows no block size yet, so that what is told waits in its queue."""
    with rank_of(tmp_path, block_size=None, meeting=meeting) as rank:
        yield rank


def told(rank: EngineSidecar) -> list[Event]:
    return [event for batch in rank._queue for event in batch.events]


def settle(pages: ToldPages) -> None:
    """Until all is told that was to be told anew."""
    pages._teller.submit(bool).result(PATIENCE_S)


def links(rank: EngineSidecar) -> list[tuple[object, object]]:
    """Of the stores that were told, each block behind its parent."""
    found: list[tuple[object, object]] = []
    for event in told(rank):
        assert isinstance(event, BlockStored) and event.medium is DISK
        parents = [event.parent_block_hash, *event.block_hashes[:-1]]
        found += zip(parents, event.block_hashes, strict=True)
    return found


def on_disk(folder: Path) -> set[int]:
    return set(index_of(folder).resident[DISK])


def has_on_disk(folder: Path, blocks: set[int | bytes]) -> bool:
    return on_disk(folder) == blocks


def test_a_block_is_known_while_a_medium_has_it() -> None:
    """Also when it moves within one batch; a clear forgets all."""
    known = Holdings()
    event = stored(0, 2)
    known.note([event])
    first, second = event.block_hashes
    assert isinstance(first, int) and isinstance(second, int)
    found = known.get(second)
    assert found is not None
    assert (found.parent, found.tokens) == (first, pack_tokens(range(4, 8)))
    known.note([BlockRemoved([second], GPU), stored(0, 2, medium=CPU)])
    known.note([BlockRemoved([first], GPU)])
    assert known.get(first) and known.get(second)
    known.note([BlockRemoved([second], CPU)])
    assert known.get(second) is None
    known.note([AllBlocksCleared()])
    assert known.get(first) is None
    known.note([stored(0, 2), stored(0, 2, medium=CPU)])
    known.note([BlockRemoved([first, second], CPU)])
    assert known.get(first) and known.get(second)


def test_an_empty_removal_removes_nothing() -> None:
    """Also where others of the batch do."""
    known, event = Holdings(), stored(0)
    known.note([event])
    removed = BlockRemoved([*event.block_hashes], StorageMedium.GPU)
    known.note([removed, stored(0), BlockRemoved([], StorageMedium.GPU)])
    assert known.get(int(event.block_hashes[0]))


@pytest.mark.parametrize(
    "odd",
    [
        {"token_ids": [1, 2, 3]},
        {"token_ids": [1, 2, 3, -1]},
        {"token_ids": ["a"] * 4},
        {"block_size": "4"},
        {"block_size": 4.0},
        {"lora_name": 5},
        {"extra_keys": [["image"]]},
        {"medium": None},
    ],
    ids=repr,
)
def test_a_block_of_which_too_little_is_known(odd: dict[str, Any]) -> None:
    """An unsound store, and one of more than tokens and names, is passed over; what is beside it not."""
    known = Holdings()
    event, good = stored(0, **odd), stored(100)
    known.note([event, good])
    assert known.get(wire_hash(keys_of(0, 1)[0], None)) is None
    assert known.get(wire_hash(keys_of(100, 1)[0], None))


def test_whoever_leaves_late_takes_nobody_along(tmp_path: Path, meeting: Meeting) -> None:
    """A publisher and a storage whose successors are there already; and nothing to tell is not told."""

    class Storage:
        told = 0

        def tell_all(self) -> None:
            self.told += 1

    with ExitStack() as stack:
        first, second = (
            stack.enter_context(rank_of(tmp_path / name, block_size=None, meeting=meeting))
            for name in "ab"
        )
        first.close()
        meeting.tell([])
        assert not second._queue
        meeting.tell([BlockRemoved([1], DISK)])
        assert told(second) == [BlockRemoved([1], DISK)]
        old, new = Storage(), Storage()
        meeting.join_storage(old)
        meeting.join_storage(new)
        meeting.leave_storage(old)
        meeting.tell_all()
        assert (old.told, new.told) == (1, 2)


def test_what_is_stored_is_read_back(pages: ToldPages) -> None:
    """Without a publisher too, and without a word of what the pages are; more than one call's worth."""
    keys = keys_of(0, 300)
    assert pages.write(keys, [], page) == 300
    assert pages.exists_prefix([*keys, bytes(32)]) == 300
    read: dict[int, int] = {}
    assert pages.read(keys, lambda place, content: read.update({place: int(content[0])})) == 300
    assert read == {place: place % 256 for place in range(300)}
    assert pages.read([bytes(32), *keys], lambda *_: None) == 0
    pages.close()
    pages.close()
    assert pages.exists_prefix(keys) == pages.write(keys, [], page) == 0


def test_pages_of_which_nobody_hears(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Are said once; not where no publisher is to be."""
    for told, said in ((True, 1), (False, 0)):
        meeting, folder = Meeting(), tmp_path / str(told)
        pages = ToldPages(folder, FORM, min_free_bytes=0, told=told, meeting=meeting)
        with caplog.at_level(logging.WARNING):
            assert pages.write(keys_of(0, 2), [], page) == 2
            assert pages.write(keys_of(100, 2), [], page) == 2
        pages.close()
        lines = [one for one in caplog.messages if "no router hears of them" in one]
        assert len(lines) == said
        caplog.clear()


def test_pages_without_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Are said once, and why."""
    pages = ToldPages(tmp_path, FORM, min_free_bytes=1 << 60, told=False, meeting=Meeting())
    with caplog.at_level(logging.WARNING):
        assert pages.write(keys_of(0, 2), [], page) == 0
        assert pages.write(keys_of(100, 2), [], page) == 0
    pages.close()
    (line,) = caplog.messages
    assert re.fullmatch(
        r"pages were not stored: no room for \d+ bytes within max_bytes and min_free_bytes", line
    )


def test_reading_leaves_alone_what_is_being_written(pages: ToldPages) -> None:
    """Pages that are read while others are on their way in."""
    before, keys = keys_of(0, 8), keys_of(900, 8)
    assert pages.write(before, [], page) == 8

    def reads_too(place: int) -> torch.Tensor:
        assert pages.read(before, lambda *_: None) == 8
        return page(100 + place)

    assert pages.write(keys, [], reads_too) == 8
    read: list[int] = []
    assert pages.read(keys, lambda _, content: read.append(int(content[0]))) == 8
    assert read == [*range(100, 108)]


def test_more_pages_than_one_call_takes(
    meeting: Meeting, waiting: EngineSidecar, pages: ToldPages
) -> None:
    """Each is told behind the one before it, as they are stored and when all is told anew."""
    settle(pages)
    event = stored(0, 300)
    meeting.known.note([event])
    blocks = event.block_hashes
    expected = [*zip([None, *blocks[:-1]], blocks, strict=True)]
    assert pages.write(keys_of(0, 300), [], page) == 300
    assert links(waiting) == expected
    waiting._queue.clear()
    pages.tell_all()
    settle(pages)
    assert links(waiting) == expected


def test_what_a_block_is_named_by_is_told(
    meeting: Meeting, waiting: EngineSidecar, pages: ToldPages
) -> None:
    """As the engine told it, also when all is told anew; pages of which it told nothing are not."""
    settle(pages)
    names = {"lora_name": "a", "cache_salt": "s", "extra_key": "k"}
    keys = keys_of(0, 2)
    event = stored(0, 2, **names)
    meeting.known.note([event])
    (known,) = {one.namespace for key in keys if (one := meeting.known.get(wire_hash(key, None)))}
    assert known == Namespace("a", "s", "k")
    assert pages.write(keys, [], page) == pages.write(keys_of(900, 2), [], page) == 2
    pages.tell_all()
    settle(pages)
    assert len(told(waiting)) == 2
    for found in told(waiting):
        assert isinstance(found, BlockStored)
        assert (found.block_hashes, found.medium) == (event.block_hashes, DISK)
        assert {name: getattr(found, name) for name in names} == names


def test_what_makes_room_is_told_first(
    tmp_path: Path, meeting: Meeting, waiting: EngineSidecar
) -> None:
    """What is evicted, and then what was stored in its place; as all that is cleared, from the ends of
    prompts.
    """
    old, new = stored(0, 4), stored(900, 2)
    meeting.known.note([old, new])
    with closing(
        ToldPages(tmp_path / "pages", FORM, min_free_bytes=0, meeting=Meeting())
    ) as before:
        assert before.write(keys_of(0, 4), [], page) == 4
    size = sum(one.stat().st_size for one in (tmp_path / "pages").rglob("*.kv"))
    with closing(
        ToldPages(tmp_path / "pages", FORM, max_bytes=size, min_free_bytes=0, meeting=meeting)
    ) as pages:
        settle(pages)
        assert pages.exists_prefix(keys_of(0, 4)) == 4
        assert pages.write(keys_of(900, 2), [], page) == 2
        removed, added = told(waiting)[-2:]
        assert removed == BlockRemoved(old.block_hashes[:1:-1], DISK)
        assert isinstance(added, BlockStored) and added.block_hashes == new.block_hashes
        pages.clear()
        cleared = told(waiting)[-1]
        assert isinstance(cleared, BlockRemoved)
        for event in (stored(0, 2), new):
            places = [cleared.block_hashes.index(one) for one in event.block_hashes]
            assert places == sorted(places, reverse=True)


def test_a_restart_goes_on_behind_what_is_kept(tmp_path: Path) -> None:
    """A page whose parent is in the files is stored, and told behind it."""
    for first, count in ((0, 2), (2, 1)):
        meeting = Meeting()
        meeting.known.note([stored(0, 3)])
        with closing(
            ToldPages(tmp_path / "pages", FORM, min_free_bytes=0, meeting=meeting)
        ) as pages:
            assert pages.write(keys_of(0, 3)[first : first + count], None, page) == count


def test_the_events_say_what_a_page_is_behind(
    meeting: Meeting, waiting: EngineSidecar, pages: ToldPages
) -> None:
    """Also where the engine names another prefix, and where all is told anew."""
    settle(pages)
    event = stored(0, 2)
    first, second = event.block_hashes
    meeting.known.note([event])
    assert pages.write(keys_of(0, 1), [], page) == pages.write(keys_of(900, 1), [], page) == 1
    assert pages.write(keys_of(0, 2)[1:], keys_of(900, 1), page) == 1
    assert links(waiting) == [(None, first), (first, second)]
    waiting._queue.clear()
    pages.tell_all()
    settle(pages)
    assert links(waiting) == [(None, first), (first, second)]


def test_a_page_that_is_lost_as_it_is_stored(
    tmp_path: Path, meeting: Meeting, waiting: EngineSidecar, pages: ToldPages
) -> None:
    """Is not believed in afterwards (D1)."""
    event, keys = stored(0, 100), keys_of(0, 100)
    meeting.known.note([event])
    writing = Thread(target=pages.write, args=(keys, [], page))
    writing.start()
    while not pages._coming and writing.is_alive():
        pass
    with pages._telling:  # it has nothing told now
        until(lambda: pages.exists_prefix(keys) == 100)
        (lost,) = (tmp_path / "pages").rglob(f"*{keys[-1].hex()}*")
        lost.unlink()
        assert pages._store.get(keys[-1:], array("q", [200])).result() == 0
    writing.join()
    assert pages.read(keys, lambda *_: None) == 99
    router = BlockIndex()
    router.apply(told(waiting))
    assert set(router.resident[DISK]) == set(event.block_hashes[:-1])


@pytest.mark.integration
def test_pages_are_told_and_told_again(
    tmp_path: Path, meeting: Meeting, pages: ToldPages, caplog: pytest.LogCaptureFixture
) -> None:
    """As they are stored, if the engine told of them; all of them after a clear; their end when they are
    removed.
    """
    with rank_of(tmp_path, meeting=meeting) as rank, caplog.at_level(logging.WARNING):
        event = stored(0, 5)
        rank.publish(1.0, [event], None)
        assert pages.write(keys_of(0, 3), [], page) == 3
        assert pages.write(keys_of(900, 2), [], page) == 2  # of which nobody has told
        until(lambda: on_disk(tmp_path) == set(event.block_hashes[:3]))
        assert pages.write(keys_of(0, 5)[3:], None, page) == 2  # behind those, as the events say
        until(lambda: on_disk(tmp_path) == set(event.block_hashes))
        rank.publish(1.0, [AllBlocksCleared()], None)
        until(lambda: not index_of(tmp_path).resident[GPU])
        until(lambda: on_disk(tmp_path) == set(event.block_hashes))
        pages.clear()
        until(lambda: not on_disk(tmp_path))
        assert pages.exists_prefix(keys_of(0, 1)) == 0
    assert not caplog.messages


def test_what_is_told_at_once_has_a_bound(
    waiting: EngineSidecar, meeting: Meeting, pages: ToldPages
) -> None:
    """Of a removal too: one that the link cannot hold would clear all."""
    meeting.known.note([event := stored(0, 300)])
    assert pages.write(keys_of(0, 300), [], page) == 300
    pages.clear()
    removed = [one for one in told(waiting) if isinstance(one, BlockRemoved)]
    assert [len(one.block_hashes) for one in removed] == [256, 44]
    assert {name for one in removed for name in one.block_hashes} == set(event.block_hashes)


def test_an_engine_that_goes_on_without_its_files_has_none(
    waiting: EngineSidecar, meeting: Meeting, tmp_path: Path
) -> None:
    """Its storage is detached, and later there again. Whose place another has taken says nothing."""
    meeting.known.note([event := stored(0, 3)])
    with closing(ToldPages(tmp_path / "a", FORM, min_free_bytes=0, meeting=meeting)) as pages:
        assert pages.write(keys_of(0, 3), [], page) == 3
    assert told(waiting)[-1] == BlockRemoved([*reversed(event.block_hashes)], DISK)
    with closing(ToldPages(tmp_path / "a", FORM, min_free_bytes=0, meeting=meeting)) as first:
        settle(first)
        with closing(ToldPages(tmp_path / "b", FORM, min_free_bytes=0, meeting=meeting)):
            first.close()
        router = BlockIndex()
        router.apply(told(waiting))
        assert set(router.resident[DISK]) == set(event.block_hashes)


@pytest.mark.integration
def test_after_a_hole_pages_are_told_again(
    tmp_path: Path, meeting: Meeting, pages: ToldPages
) -> None:
    """Where a sidecar did not read for too long everything is cleared, and the files are there still."""
    with rank_of(tmp_path, meeting=meeting, ring_bytes=1 << 16, max_queue_size=5) as rank:
        event = stored(0, 3)
        rank.publish(1.0, [event], None)
        assert pages.write(keys_of(0, 3), [], page) == 3
        until(lambda: on_disk(tmp_path) == set(event.block_hashes))
        assert rank.sidecar is not None
        first = 1000
        os.kill(rank.sidecar.pid, signal.SIGSTOP)
        try:
            while not rank.dropped:
                rank.publish(1.0, [stored(first, 100)], None)
                first += 400
        finally:
            os.kill(rank.sidecar.pid, signal.SIGCONT)

        until(lambda: replayed(tmp_path).count(AllBlocksCleared()) == 2)  # one when it began
        until(lambda: on_disk(tmp_path) == set(event.block_hashes))


@pytest.mark.integration
def test_after_a_batch_that_is_too_large_pages_are_told_again(
    tmp_path: Path, meeting: Meeting, pages: ToldPages
) -> None:
    """What the link can never hold is a hole too."""
    with rank_of(tmp_path, meeting=meeting, ring_bytes=1 << 16) as rank:
        event = stored(0, 3)
        rank.publish(1.0, [event], None)
        assert pages.write(keys_of(0, 3), [], page) == 3
        until(lambda: on_disk(tmp_path) == set(event.block_hashes))
        rank.publish(1.0, [stored(1000, 2000)], None)
        rank.publish(1.0, [stored(100)], None)
        until(lambda: replayed(tmp_path).count(AllBlocksCleared()) == 2)  # one when it began
        until(lambda: on_disk(tmp_path) == set(event.block_hashes))


@pytest.mark.integration
def test_unsound_stores_cost_themselves_alone(
    tmp_path: Path, meeting: Meeting, pages: ToldPages
) -> None:
    """Where a storage wants to know of every block, too: of the batch the others are told, and known."""
    odd = [
        stored(100, token_ids=tokens)
        for tokens in ([1, 2, 3, -1], [1, 2, 3, 2**32], [1, 2, 3], [1.5, 2, 3, 4], ["a"] * 4)
    ]
    odd.append(stored(200, block_size=True, token_ids=[1, 2, 3, 4]))
    odd.append(stored(300, lora_name="n" * 5000))
    good = stored(0, 2)
    with rank_of(tmp_path, meeting=meeting) as rank:
        rank.publish(1.0, [*odd, good, *odd], None)
        assert pages.write(keys_of(0, 2), [], page) == 2
        until(lambda: on_disk(tmp_path) == set(good.block_hashes))
        assert set(index_of(tmp_path).resident[GPU]) == set(good.block_hashes)


@pytest.mark.integration
def test_a_lost_file_is_told(tmp_path: Path, meeting: Meeting, pages: ToldPages) -> None:
    """When it is missed: with it goes all behind it."""
    with rank_of(tmp_path, meeting=meeting) as rank:
        event, keys = stored(0, 4), keys_of(0, 4)
        rank.publish(1.0, [event], None)
        assert pages.write(keys, [], page) == 4
        until(lambda: on_disk(tmp_path) == set(event.block_hashes))
        (lost,) = (tmp_path / "pages").rglob(f"*{keys[2].hex()}*")
        lost.unlink()
        assert pages.read(keys, lambda *_: None) == 2
        until(lambda: on_disk(tmp_path) == set(event.block_hashes[:2]))


def test_a_page_behind_one_that_is_not_kept(meeting: Meeting, pages: ToldPages) -> None:
    """Is not kept (D2): by the events, or by the prefix that the engine names."""
    meeting.known.note([stored(0, 3)])
    keys = keys_of(0, 3)
    assert pages.write(keys[1:], None, page) == 0
    other = keys_of(500, 3)
    assert pages.write(other[2:], other[:2], page) == 0
    assert pages.write(other[:2], [], page) == 2
    assert pages.write(other[2:], other[:2], page) == 1


@pytest.mark.integration
def test_what_was_kept_before_is_told_whoever_comes_first(tmp_path: Path) -> None:
    """A later process knows from the files what each page is."""
    event = stored(0, 3)
    first = Meeting()
    first.known.note([event])
    before = ToldPages(tmp_path / "pages", FORM, min_free_bytes=0, meeting=first)
    assert before.write(keys_of(0, 3), [], page) == 3
    before.close()
    assert [wire_hash(key, None) for key in keys_of(0, 3)] == event.block_hashes
    for number in range(2):
        meeting, folder = Meeting(), tmp_path / str(number)
        folder.mkdir()
        with rank_of(folder, meeting=meeting if number else Meeting()) as rank:
            after = ToldPages(tmp_path / "pages", FORM, min_free_bytes=0, meeting=meeting)
            if not number:
                meeting.join_publisher(rank)
            until(partial(has_on_disk, folder, set(event.block_hashes)))
            after.close()


def test_what_is_gone_leaves_nothing_behind(tmp_path: Path) -> None:
    """No name of a page that made room, or was cleared; of a storage that was closed, nothing to tell."""
    meeting = Meeting()
    with closing(ToldPages(tmp_path / "pages", FORM, min_free_bytes=0, meeting=meeting)) as first:
        assert first.write(keys_of(0, 4), [], page) == 4
        size = sum(one.stat().st_size for one in (tmp_path / "pages").rglob("*.kv"))
    assert meeting._storage is None
    with closing(
        ToldPages(tmp_path / "pages", FORM, max_bytes=size, min_free_bytes=0, meeting=meeting)
    ) as pages:
        for start in range(100, 800, 100):
            assert pages.write(keys_of(start, 2), [], page) == 2
        assert len(pages._by_hash) == 4
        pages.clear()
        assert pages._by_hash == {}
    meeting.tell_all()


def test_a_prompts_start_is_behind_nothing(meeting: Meeting, pages: ToldPages) -> None:
    """D2: what the engine's events say of a page goes before the keys that it was given."""
    meeting.known.note([stored(0, 2), stored(900)])
    assert pages.write(keys_of(0, 2), [], page) == 2
    assert pages.write(keys_of(900, 1), keys_of(0, 2), page) == 1
    held = {one.key: one.parent for one in pages._store.held()}
    first, second = keys_of(0, 2)
    assert held == {first: None, second: first, keys_of(900, 1)[0]: None}
