"""publisher.link.ring: B1 to B3, against a model that knows nothing of shared memory."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import re
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from publisher_rig import PATIENCE_S, kill, open_fds, still_running

from kvevents import KVEventsError
from publisher.link.ring import MIN_RING_BYTES, Message, RingReader, RingWriter

HEADER_BYTES = 4096
PREFIX_BYTES = 16
HELPER = str(Path(__file__).with_name("publisher_ring_peer.py"))


def body_of(number: int, size: int) -> bytes:
    """What the message of this number says: so that no two look alike at any offset."""
    return (struct.pack("<I", number * 2654435761 % 2**32) * (size // 4 + 1))[:size]


def room_for(size: int) -> int:
    """Bytes that a message of this size takes."""
    return PREFIX_BYTES + -(-size // 8) * 8


class RingMachine(RuleBasedStateMachine):
    """Writer and reader, and a deque that must agree with them."""

    def __init__(self) -> None:
        super().__init__()
        self.writer: RingWriter | None = None

    @initialize(pages=st.integers(1, 3))
    def start(self, pages: int) -> None:
        self.writer = RingWriter(pages * mmap.PAGESIZE)
        self.reader = RingReader(self.writer.fd)
        self.capacity = pages * mmap.PAGESIZE
        self.unread: deque[Message] = deque()
        self.read_only: list[Message] = []  # read, and not let go of
        self.offered = 0

    @property
    def free(self) -> int:
        held = [*self.unread, *self.read_only]
        return self.capacity - sum(room_for(len(one.body)) for one in held)

    @rule(
        size=st.one_of(st.integers(0, 200), st.integers(0, 3 * 4096 + 64)), flags=st.integers(0, 3)
    )
    def write(self, size: int, flags: int) -> None:
        assert self.writer is not None
        message = Message(self.offered, flags, body_of(self.offered, size))
        fits = room_for(size) <= self.free
        assert self.writer.write(message.body, flags) is fits
        self.offered += 1
        if fits:
            self.unread.append(message)

    @rule(data=st.data())
    def fill_exactly(self, data: st.DataObject) -> None:
        """A message that leaves nothing, or 8 bytes more than there are."""
        if self.free >= PREFIX_BYTES:
            self.write(self.free - PREFIX_BYTES + data.draw(st.sampled_from((0, 0, 1))), 0)

    @rule(most=st.integers(1, 20))
    def read(self, most: int) -> None:
        for _ in range(most):
            message = self.reader.read()
            assert message == (self.unread.popleft() if self.unread else None)
            if message is None:
                break
            self.read_only.append(message)

    @rule()
    def release(self) -> None:
        self.reader.release()
        self.read_only.clear()

    @rule()
    def reader_dies(self) -> None:
        """B2: what it had not let go of is read again by the next."""
        self.reader.close()
        assert self.writer is not None
        self.reader = RingReader(self.writer.fd)
        self.unread.extendleft(reversed(self.read_only))
        self.read_only.clear()

    @rule()
    def skip_all(self) -> None:
        self.reader.skip_all()
        self.unread.clear()
        self.read_only.clear()

    @rule()
    def ask(self) -> None:
        assert self.writer is not None
        before = self.writer.resyncs
        self.reader.ask_resync()
        assert self.writer.resyncs == before + 1

    @invariant()
    def counts_agree(self) -> None:
        """B3: offered is what was offered, refused or not, on both sides."""
        if self.writer is not None:
            assert self.writer.offered == self.reader.offered == self.offered
            assert self.writer.free_bytes == self.free

    def teardown(self) -> None:
        if self.writer is not None:
            self.reader.close()
            self.writer.close()


def test_any_use_of_the_ring_agrees_with_a_deque() -> None:
    """Whatever is written, read, let go of, refused, and by whichever reader, in whatever order: each
    message comes once, whole, in order and with its number, over any number of wraps.
    """
    run_state_machine_as_test(
        RingMachine, settings=settings(max_examples=100, stateful_step_count=40)
    )


@given(st.lists(st.integers(0, 4000), min_size=50, max_size=120))
def test_messages_wrap_at_every_offset(sizes: list[int]) -> None:
    """Headers and bodies that straddle the end of the ring come out as they went in."""
    writer = RingWriter(MIN_RING_BYTES)
    reader = RingReader(writer.fd)
    try:
        for number, size in enumerate(sizes):
            assert writer.write(body_of(number, size), number % 7)
            assert reader.read() == Message(number, number % 7, body_of(number, size))
            assert reader.read() is None
            reader.release()
            assert writer.free_bytes == writer.capacity
    finally:
        reader.close()
        writer.close()


# ----------------------------------------------------------------------------------------- bounds


def test_capacity_has_a_lower_bound() -> None:
    """A ring too small is refused with the value and the bound, and nothing stays open."""
    before = open_fds()
    with pytest.raises(ValueError, match=r"^ring_bytes: 4095 is below 4096$"):
        RingWriter(MIN_RING_BYTES - 1)
    assert open_fds() == before


@pytest.mark.parametrize("asked", [4096, 4097, 12288])
def test_capacity_is_rounded_up_to_pages_and_usable_to_the_last_byte(asked: int) -> None:
    """The largest message is capacity less its header; one byte more is refused, and harmless."""
    writer = RingWriter(asked)
    reader = RingReader(writer.fd)
    try:
        assert writer.capacity == reader.capacity == -(-asked // mmap.PAGESIZE) * mmap.PAGESIZE
        most = writer.capacity - PREFIX_BYTES
        assert not writer.write(body_of(0, most + 1))
        assert writer.free_bytes == writer.capacity
        assert writer.write(body_of(1, most))
        assert writer.free_bytes == 0
        assert not writer.write(b"")
        assert reader.read() == Message(1, 0, body_of(1, most))
        assert (writer.offered, reader.offered) == (3, 3)
    finally:
        reader.close()
        writer.close()


def test_ends_close_twice() -> None:
    """Closing again is nothing; both ends give back all they had."""
    before = open_fds()
    writer = RingWriter(MIN_RING_BYTES)
    reader = RingReader(writer.fd)
    for end in (reader, reader, writer, writer):
        end.close()
    assert open_fds() == before


class TornBody:
    """A body of which nothing can be copied: the write ends in its middle, as if the writer had died."""

    def __len__(self) -> int:
        return 100


def test_a_write_that_does_not_come_to_its_end_has_written_nothing() -> None:
    """B1: there is nothing to read, and the number that it had is missing afterwards."""
    writer = RingWriter(MIN_RING_BYTES)
    reader = RingReader(writer.fd)
    try:
        writer.write(b"before")
        with pytest.raises(TypeError):
            writer.write(TornBody())  # type: ignore[arg-type]
        assert reader.read() == Message(0, 0, b"before")
        assert reader.read() is None
        writer.write(b"after")
        assert reader.read() == Message(2, 0, b"after")
        assert reader.offered == 3
    finally:
        reader.close()
        writer.close()


class Died(Exception):
    """The end of an end of a ring, at a store."""


class Stores:
    """Memory whose owner dies at a store that it can no longer afford; bytes are torn at any place."""

    def __init__(self, memory: memoryview, budget: list[int]) -> None:
        self._memory, self._budget = memory, budget

    def __getitem__(self, key: Any) -> Any:
        return self._memory[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        left = self._budget[0]
        if isinstance(key, slice):
            size = len(value)
            start = key.start or 0
            self._memory[start : start + min(left, size)] = value[: min(left, size)]
        else:
            size = 1
            if left:
                self._memory[key] = value
        self._budget[0] = max(0, left - size)
        if size > left:
            raise Died

    def release(self) -> None:
        self._memory.release()


def mortal(end: Any) -> list[int]:
    """Give this end a life of so many stores: what is in the list that is returned."""
    budget = [1_000_000]
    end._words, end._data = Stores(end._words, budget), Stores(end._data, budget)
    return budget


@given(
    before=st.lists(st.integers(0, 600), max_size=12),
    read=st.integers(0, 12),
    last=st.integers(0, 600),
    life=st.integers(0, 640),
)
def test_a_writer_may_die_at_any_store(before: list[int], read: int, last: int, life: int) -> None:
    """B1, B3: wherever in a write its process ends, also in the middle of a header or a body, over the
    wrap or not, the reader has the messages before whole and in order, and that one whole or not at
    all; what it says was offered is what was read, or one more or less.
    """
    writer = RingWriter(MIN_RING_BYTES)
    reader = RingReader(writer.fd)
    try:
        for size in (900, 900, 900, 900, 400):  # so that what follows comes upon the end
            writer.write(bytes(size))
            reader.read()
        reader.release()
        budget = mortal(writer)
        written = [
            number for number, size in enumerate(before, 5) if writer.write(body_of(number, size))
        ]
        for _ in range(read):
            if (message := reader.read()) is None:
                break
            assert message.number == written[0]
            assert message.body == body_of(written[0], before[written[0] - 5])
            written.pop(0)
        reader.release()
        number = writer.offered
        budget[0] = life
        try:
            done = writer.write(body_of(number, last))
        except Died:
            done = False
        found = []
        while (message := reader.read()) is not None:
            size = last if message.number == number else before[message.number - 5]
            assert message == Message(message.number, 0, body_of(message.number, size))
            found.append(message.number)
        assert found in (written, [*written, number])
        assert not done or found == [*written, number]
        assert reader.offered in (number, number + 1)
    finally:
        reader.close()
        writer.close()


class Watched:
    """Words of which each store is looked at once it is done."""

    def __init__(self, words: memoryview, look: Callable[[], None]) -> None:
        self._words, self._look = words, look

    def __getitem__(self, key: Any) -> Any:
        return self._words[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._words[key] = value
        self._look()

    def release(self) -> None:
        self._words.release()


def test_what_was_written_is_readable_before_it_counts_as_offered() -> None:
    """B3: a reader that looks at `offered` at any store of a write, and then reads all there is, misses
    nothing; it would ask for a resync, and what an engine holds would be cleared.
    """
    writer = RingWriter(MIN_RING_BYTES)
    reader = RingReader(writer.fd)
    found: list[int] = []

    def look() -> None:
        offered = reader.offered
        while (message := reader.read()) is not None:
            found.append(message.number)
        reader.release()
        assert offered <= len(found)

    try:
        writer._words = Watched(writer._words, look)  # type: ignore[assignment]
        for size in range(20):
            assert writer.write(bytes(size))
        assert found == list(range(20))
    finally:
        reader.close()
        writer.close()


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    lives=st.lists(st.integers(0, 6), min_size=1, max_size=30),
)
def test_readers_may_die_at_any_store(sizes: list[int], lives: list[int]) -> None:
    """B2: however soon each reader ends, letting go or asking for a resync, the next reads on where it
    had let go: every message that was written is read, in order, by at least one.
    """
    writer = RingWriter(MIN_RING_BYTES)
    try:
        written: list[int] = []
        seen: list[int] = []

        def serve(life: int) -> None:
            reader = RingReader(writer.fd)
            mortal(reader)[0] = life
            try:
                while (message := reader.read()) is not None:
                    assert message.body == body_of(message.number, sizes[message.number])
                    seen.append(message.number)
                    reader.release()
                    if message.number % 3 == 0:
                        reader.ask_resync()
            except Died:
                pass
            finally:
                reader.close()

        for number, size in enumerate(sizes):
            if writer.write(body_of(number, size)):
                written.append(number)
            serve(lives[number % len(lives)])
        serve(1_000_000)
        assert list(dict.fromkeys(seen)) == written
        assert all(after - before >= 0 for before, after in itertools.pairwise(seen))
        assert writer.free_bytes == writer.capacity
    finally:
        writer.close()


class Unread:
    """A body that can be measured, and not copied."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


@pytest.mark.parametrize("length", [4096 - PREFIX_BYTES + 1, 10**9, 2**62])
def test_a_refusal_does_not_look_at_the_message(length: int) -> None:
    """O(1): what does not fit is neither copied nor read, however long it is."""
    writer = RingWriter(MIN_RING_BYTES)
    try:
        assert not writer.write(Unread(length))  # type: ignore[arg-type]
        assert (writer.offered, writer.free_bytes) == (1, writer.capacity)
    finally:
        writer.close()


def test_memory_is_there_from_the_start() -> None:
    """Prefaulted at both ends: no page of the ring is still to be found when it is first written."""
    writer = RingWriter(1 << 20)
    reader = RingReader(writer.fd)
    try:
        maps = Path("/proc/self/smaps").read_text().split("kvevents-ring")[1:]
        assert len(maps) == 2
        for one in maps:
            found = dict(re.findall(r"^(Size|Rss): +(\d+) kB$", one, re.MULTILINE)[:2])
            assert found == {"Size": "1028", "Rss": "1028"}
    finally:
        reader.close()
        writer.close()


# ----------------------------------------------------------------------------------- corrupt bytes


def poke(fd: int, offset: int, data: bytes) -> None:
    """Write into the ring's memory from outside; words count from its start."""
    with mmap.mmap(fd, 0) as memory:
        memory[offset : offset + len(data)] = data


def word(number: int) -> int:
    return number * 8


def test_a_reader_refuses_memory_that_is_no_ring() -> None:
    """Too short, another magic, another capacity: each raises KVEventsError and leaves nothing open."""
    before = open_fds()
    writer = RingWriter(MIN_RING_BYTES)
    short = os.memfd_create("short")
    try:
        held = open_fds()
        with pytest.raises(KVEventsError, match="too few"):
            RingReader(short)
        for number in (0, 1):
            saved = writer.capacity if number else None
            poke(writer.fd, word(number), struct.pack("<Q", 12345))
            with pytest.raises(KVEventsError, match="not one of this version"):
                RingReader(writer.fd)
            if saved is not None:
                poke(writer.fd, word(number), struct.pack("<Q", saved))
        assert open_fds() == held
    finally:
        os.close(short)
        writer.close()
    assert open_fds() == before


@pytest.mark.parametrize("length", [57, 4096, 2**31, 2**32 - 1])
def test_a_length_that_cannot_be_raises_and_can_be_skipped(length: int) -> None:
    """A message longer than what is written raises KVEventsError; after `skip_all` the ring goes on."""
    writer = RingWriter(MIN_RING_BYTES)
    reader = RingReader(writer.fd)
    try:
        writer.write(body_of(0, 40))
        writer.write(b"")
        poke(writer.fd, HEADER_BYTES, struct.pack("<I", length))
        for _ in range(2):
            with pytest.raises(KVEventsError, match=f"a message of {length} bytes"):
                reader.read()
        reader.skip_all()
        assert reader.read() is None
        assert writer.free_bytes == writer.capacity
        assert writer.write(b"after")
        assert reader.read() == Message(2, 0, b"after")
    finally:
        reader.close()
        writer.close()


@pytest.mark.parametrize("head", [1, 8, 15, MIN_RING_BYTES + 8, 2**63])
def test_a_head_that_cannot_be_raises(head: int) -> None:
    """More bytes than the ring has, or fewer than a message has, are no message."""
    writer = RingWriter(MIN_RING_BYTES)
    reader = RingReader(writer.fd)
    try:
        poke(writer.fd, word(8), struct.pack("<Q", head))
        with pytest.raises(KVEventsError, match=f"{head} bytes available"):
            reader.read()
    finally:
        reader.close()
        writer.close()


@pytest.mark.parametrize("tail", [8, 2**64 - 8])
def test_a_tail_that_cannot_be_is_a_full_ring(tail: int) -> None:
    """A reader that claims to have read the future makes the writer refuse, not overwrite."""
    writer = RingWriter(MIN_RING_BYTES)
    try:
        poke(writer.fd, word(16), struct.pack("<Q", tail))
        assert writer.free_bytes == 0
        assert not writer.write(b"x")
    finally:
        writer.close()


@given(noise=st.binary(min_size=1, max_size=64), at=st.integers(0, MIN_RING_BYTES - 64))
def test_noise_in_the_data_is_read_or_refused(noise: bytes, at: int) -> None:
    """Whatever the data bytes are, reading ends, with messages or a KVEventsError."""
    writer = RingWriter(MIN_RING_BYTES)
    reader = RingReader(writer.fd)
    try:
        while writer.write(body_of(writer.offered, 100)):
            pass
        poke(writer.fd, HEADER_BYTES + at, noise)
        left = MIN_RING_BYTES
        try:
            while (message := reader.read()) is not None:
                left -= room_for(len(message.body))
                assert left >= 0
        except KVEventsError:
            reader.skip_all()
        reader.release()
        assert writer.write(b"after")
        assert (last := reader.read()) is not None and last.body == b"after"
    finally:
        reader.close()
        writer.close()


# -------------------------------------------------------------------------------------- processes


def start_peer(role: str, *fds: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, HELPER, role, *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )


def end_peer(process: subprocess.Popen[bytes]) -> None:
    kill(process.pid)
    process.communicate()


@pytest.mark.integration
@pytest.mark.parametrize("read_before", [0, 100, 1000])
def test_a_writer_killed_midstream_leaves_whole_messages(read_before: int) -> None:
    """B1: after kill -9 of a writer in full flow, what is readable is whole, in order and numbered; the
    numbers that are missing were refused.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = start_peer("write", theirs.fileno())
        try:
            ours.settimeout(PATIENCE_S)
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
            reader = RingReader(fds[0])
            try:
                seen, expected = 0, 0

                def check(message: Any) -> None:
                    nonlocal seen, expected
                    assert message.number >= expected  # a jump was refused
                    assert message.body == body_of(message.number, message.number * 37 % 900)
                    seen, expected = seen + 1, message.number + 1

                while seen < read_before:
                    if (message := reader.read()) is not None:
                        check(message)
                        reader.release()
                kill(process.pid)
                assert still_running([process.pid], PATIENCE_S) == set()
                while (message := reader.read()) is not None:
                    check(message)
                assert expected <= reader.offered + 1  # it may have died between head and offered
            finally:
                reader.close()
                os.close(fds[0])
        finally:
            end_peer(process)


@pytest.mark.integration
def test_a_reader_killed_before_release_is_followed_by_one_that_reads_again() -> None:
    """B2: the messages that a killed reader had not let go of are read by its successor, those that it
    had are not.
    """
    writer = RingWriter(MIN_RING_BYTES)
    try:
        for number in range(4):
            writer.write(body_of(number, 100))
        process = start_peer("read", writer.fd)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"released 0, read 1 and 2\n"
        finally:
            end_peer(process)
        reader = RingReader(writer.fd)
        try:
            assert [one and one.number for one in (reader.read() for _ in range(4))] == [
                *(1, 2, 3),
                None,
            ]
        finally:
            reader.close()
    finally:
        writer.close()


@pytest.mark.integration
def test_writers_killed_at_random_moments_leave_whole_messages() -> None:
    """B1 with SIGKILL, at 15 moments drawn with a seed, the ring being read meanwhile: nothing that is
    read is torn, out of order or counted wrongly.
    """
    draw = random.Random(7)
    for _ in range(15):
        writer = RingWriter(MIN_RING_BYTES)
        child = os.fork()
        if not child:
            while True:  # until it is killed
                writer.write(body_of(writer.offered, writer.offered * 37 % 900))
        reader = RingReader(writer.fd)
        try:
            quota, expected = draw.randrange(1, 400), 0
            while True:
                if (message := reader.read()) is None:
                    if quota <= 0:
                        break
                    continue
                assert message.number >= expected
                assert message.body == body_of(message.number, message.number * 37 % 900)
                expected = message.number + 1
                reader.release()
                if (quota := quota - 1) == 0:
                    kill(child)
                    os.waitpid(child, 0)
            assert expected <= reader.offered + 1
        finally:
            kill(child)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
            reader.close()
            writer.close()
