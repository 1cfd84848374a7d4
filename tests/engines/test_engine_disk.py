"""publisher.engines.disk and .pages: what is kept in files is told, and nothing else (D1, D2)."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from engines_rig import SIZE, index_of, rank_of, replayed, stored, until

from hicache.pool import MLAShape
from hicache.storage import PageFormat
from kvevents import AllBlocksCleared, BlockRemoved, StorageMedium
from kvevents.hashing import block_digests, wire_hash
from kvevents.tokens import pack_tokens
from publisher.engines.disk import Holdings, Meeting
from publisher.engines.pages import ToldPages

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
