"""publisher.stream.journal: what a next process reads is what was written, or the beginning of it."""

from __future__ import annotations

import itertools
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from publisher_journal_writer import entry, head
from publisher_rig import open_fds

from kvevents import KVEventsError
from publisher.stream.journal import Entry, Head, Journal, Kind, read_journal

HEAD = head(3)
Entries = st.builds(
    Entry,
    st.sampled_from([kind for kind in Kind if kind < Kind.HEAD]),
    st.binary(max_size=60),
    st.integers(0, 2**64 - 1),
    st.integers(0, 255),
    st.integers(0, 2**16 - 1),
)


def write(journal: Journal, *generations: tuple[int, int]) -> None:
    """Generations of entries, each given by its first number and the one after its last."""
    for first, stop in generations:
        journal.begin(head(first), iter([b"piece", str(first).encode()]))
        journal.advance(1 << 20)
        for number in range(first, stop):
            journal.append(entry(number))


def read(folder: Path) -> tuple[Head, list[bytes], list[Entry]] | None:
    """The longest history that can be read to its end, as a sidecar takes it."""
    for found in read_journal(folder):
        try:
            return found.head, found.pieces, list(found.entries)
        except KVEventsError:
            continue
    return None


def history(folder: Path) -> tuple[int, int] | None:
    """The first number and the one after the last of what is read, which must be whole and in order."""
    found = read(folder)
    if found is None:
        return None
    first = found[0].expected
    assert found[1] == [b"piece", str(first).encode()]
    stop = first + len(found[2])
    assert found[2] == [entry(number) for number in range(first, stop)]
    return first, stop


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def due(journal: Journal) -> bool:
    return journal.due


def failure(journal: Journal) -> str | None:
    return journal.failure


@contextmanager
def most_bytes(count: int) -> Iterator[None]:
    """While no file may become longer, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --------------------------------------------------------------------------------- there and back


@given(
    pieces=st.lists(st.binary(max_size=30), max_size=4),
    first=st.lists(Entries, max_size=6),
    second=st.lists(Entries, max_size=6),
    resumed=st.booleans(),
)
def test_what_is_written_is_read(
    pieces: list[bytes], first: list[Entry], second: list[Entry], resumed: bool
) -> None:
    """Head, pieces and entries come back as they were, also those of a process that went on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal = Journal(folder)
        journal.begin(HEAD, iter(pieces))
        for one in first:
            journal.append(one)
        while journal.checkpointing:
            journal.advance(1)
        if resumed:
            journal.close()
            assert read(folder) == (HEAD, pieces, first)
            journal = Journal(folder)
            journal.resume()
        for one in second:
            journal.append(one)
        assert journal.num_bytes == (folder / "entries-00000001").stat().st_size - 8 * (not resumed)
        journal.close()
        assert read(folder) == (HEAD, pieces, first + second)


def test_files_are_private(tmp_path: Path) -> None:
    """They hold prompts: their owner's eyes only, whatever the umask."""
    old = os.umask(0)
    try:
        write(Journal(tmp_path), (0, 3))
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_nothing_is_read_where_nothing_was_written(tmp_path: Path) -> None:
    """An empty folder, one that is not there, one with files of others: no history."""
    assert list(read_journal(tmp_path)) == list(read_journal(tmp_path / "absent")) == []
    for name in (
        "lock",
        "seq-a",
        "entries-",
        "entries-x",
        "checkpoint-1",
        "entries-²",
        "entries-٣",
    ):
        (tmp_path / name).write_bytes(b"kvjrnl\0\1")
    assert list(read_journal(tmp_path)) == []
    Journal(tmp_path).close()


def test_two_generations_are_kept(tmp_path: Path) -> None:
    """The history goes back to the older checkpoint; what is before it is removed."""
    journal = Journal(tmp_path)
    stops = [0, 3, 7, 8, 12]
    for number, (first, stop) in enumerate(itertools.pairwise(stops), 1):
        write(journal, (first, stop))
        assert history(tmp_path) == (stops[max(0, number - 2)], stop)
        kept = range(max(1, number - 1), number + 1)
        assert files(tmp_path) == sorted(
            f"{what}-{generation:08d}" for what in ("checkpoint", "entries") for generation in kept
        )
    journal.close()


def test_a_generation_counts_once_its_checkpoint_is_whole(tmp_path: Path) -> None:
    """Until then the one before the previous stays, and entries of all three are read."""
    journal = Journal(tmp_path)
    write(journal, (0, 3), (3, 5))
    journal.begin(head(5), iter([b"piece", b"5"]))
    journal.append(entry(5))
    journal.advance(1)
    assert history(tmp_path) == (0, 6)
    assert "checkpoint-00000003.part" in files(tmp_path)
    while journal.checkpointing:
        journal.advance(1)
    assert history(tmp_path) == (3, 6)
    assert not [name for name in files(tmp_path) if name.endswith(("1", ".part"))]
    journal.close()


def test_a_checkpoint_that_was_cut_short_is_never_taken(tmp_path: Path) -> None:
    """A process that dies in the middle of it leaves the older one; the next removes the rest."""
    journal = Journal(tmp_path)
    write(journal, (0, 3))
    journal.begin(head(3), iter([b"piece", b"3"]))
    journal.append(entry(3))
    journal.advance(1)
    journal.close()
    assert history(tmp_path) == (0, 4)
    after = Journal(tmp_path)
    after.resume()
    after.append(entry(4))
    assert history(tmp_path) == (0, 5)
    write(after, (5, 6), (6, 7))
    assert history(tmp_path) == (5, 7)
    assert len(files(tmp_path)) == 4
    after.close()


def test_a_generation_is_due_by_its_bytes(tmp_path: Path) -> None:
    """After `limit_bytes` of entries, or twice those of the checkpoint; never while one is written."""
    journal = Journal(tmp_path, limit_bytes=100)
    journal.begin(HEAD, iter([bytes(500)]))
    assert not due(journal)
    journal.append(Entry(Kind.INPUT, bytes(400)))
    assert not due(journal), "one is being written"
    journal.advance(1 << 20)
    assert not due(journal), "the checkpoint is larger"
    journal.append(Entry(Kind.INPUT, bytes(1000)))
    assert due(journal)
    journal.close()
    journal = Journal(tmp_path, limit_bytes=100)
    journal.resume()
    assert due(journal), "also after a restart"
    write(journal, (0, 0))
    assert not due(journal)
    journal.append(Entry(Kind.INPUT, bytes(100)))
    size = (tmp_path / "checkpoint-00000002").stat().st_size
    assert due(journal) == (journal.num_bytes >= 2 * size)
    journal.close()


def test_many_entries_at_once_are_all_there(tmp_path: Path) -> None:
    """More than the system writes in one call."""
    journal = Journal(tmp_path)
    journal.begin(HEAD, iter([]))
    journal.advance(1 << 20)
    entries = [Entry(Kind.INPUT, b"x", number) for number in range(2000)]
    journal.append(*entries)
    assert journal.failure is None
    journal.close()
    (found,) = read_journal(tmp_path)
    assert list(found.entries) == entries


def test_nothing_is_written_while_it_is_not_active(tmp_path: Path) -> None:
    """Before the first generation and after `close`, appending and advancing do nothing."""
    journal = Journal(tmp_path)
    journal.append(entry(0))
    journal.advance(100)
    assert not (journal.active or journal.checkpointing or journal.due)
    write(journal, (0, 1))
    journal.close()
    journal.close()
    journal.append(entry(1))
    assert history(tmp_path) == (0, 1)


def test_discard_leaves_what_is_of_others(tmp_path: Path) -> None:
    """Only the journal's own files go, unfinished ones too; numbers go on where they were."""
    (tmp_path / "seq-a").write_text("7")
    journal = Journal(tmp_path)
    write(journal, (0, 2), (2, 3))
    journal.begin(head(3), iter([b"piece"]))
    journal.close()
    later = Journal(tmp_path)
    later.discard()
    assert files(tmp_path) == ["seq-a"]
    write(later, (9, 11))
    assert history(tmp_path) == (9, 11)
    assert "entries-00000004" in files(tmp_path)
    later.close()


# --------------------------------------------------------------------------------------- damage


def test_a_torn_last_entry_is_dropped_and_more_can_follow(tmp_path: Path) -> None:
    """J1: cut at every byte of the last entry, all before it is read, and what follows is whole."""
    journal = Journal(tmp_path)
    write(journal, (0, 2), (2, 7))
    journal.close()
    path = tmp_path / "entries-00000002"
    whole = path.read_bytes()
    last = len(whole) - 20 - len(entry(6).body)
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        assert history(tmp_path) == (0, 6), end
        assert path.stat().st_size == last
        later = Journal(tmp_path)
        later.resume()
        later.append(entry(6))
        later.close()
        assert history(tmp_path) == (0, 7)
        assert path.read_bytes() == whole


def test_a_torn_earlier_generation_is_no_history(tmp_path: Path) -> None:
    """Entries are missing in the middle: the later checkpoint is taken instead, with what is after it."""
    journal = Journal(tmp_path)
    write(journal, (0, 4), (4, 6))
    journal.close()
    path = tmp_path / "entries-00000001"
    whole = path.read_bytes()
    for end in set(range(len(whole))) - _ends(whole):  # at an end of an entry nothing is torn
        path.write_bytes(whole[:end])
        found = history(tmp_path)
        assert found == (4, 6), end


def _ends(data: bytes) -> set[int]:
    ends, position = {8}, 8
    while position < len(data):
        position += 20 + int.from_bytes(data[position + 4 : position + 8], "little")
        ends.add(position)
    return ends


@pytest.mark.parametrize(
    "name", ["checkpoint-00000001", "entries-00000001", "checkpoint-00000002", "entries-00000002"]
)
def test_a_changed_byte_never_gives_what_was_not_written(tmp_path: Path, name: str) -> None:
    """Any byte of any file: a beginning of what was written is read, from one checkpoint or the other."""
    journal = Journal(tmp_path)
    write(journal, (0, 3), (3, 6))
    journal.close()
    path = tmp_path / name
    whole = path.read_bytes()
    for position in range(len(whole)):
        for mask in (0x01, 0xFF):
            damaged = bytearray(whole)
            damaged[position] ^= mask
            with path.open("r+b") as file:  # which reading may have cut
                file.write(damaged)
            found = history(tmp_path)
            match name:
                case "checkpoint-00000001" | "entries-00000001":
                    assert found == (3, 6), position
                case "checkpoint-00000002":
                    assert found == (0, 6), position
                case _:  # the last entries may be lost; all of them with the magic word
                    assert (found is None) == (position < 8)
                    assert found is None or (found[0] == 0 and 3 <= found[1] < 6), position


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_missing_generation_is_no_history(tmp_path: Path, missing: int) -> None:
    """What is read never has a hole: without a file in the middle it begins after that, or not at all."""
    journal = Journal(tmp_path)
    write(journal, (0, 2), (2, 4))
    journal.begin(head(4), iter([b"piece", b"4"]))
    journal.append(entry(4))
    journal.close()
    (tmp_path / f"entries-{missing:08d}").unlink()
    assert history(tmp_path) == {1: (2, 5), 2: None, 3: (0, 4)}[missing]


def test_a_missing_checkpoint_is_gone_without(tmp_path: Path) -> None:
    """Either one of the two is enough for some history."""
    for missing, found in ((1, (2, 4)), (2, (0, 4))):
        folder = tmp_path / str(missing)
        folder.mkdir()
        journal = Journal(folder)
        write(journal, (0, 2), (2, 4))
        journal.close()
        (folder / f"checkpoint-{missing:08d}").unlink()
        assert history(folder) == found


def test_an_empty_newest_file_is_none(tmp_path: Path) -> None:
    """A process that died between making the file and its first word: the one before goes on."""
    journal = Journal(tmp_path)
    write(journal, (0, 2))
    journal.close()
    (tmp_path / "entries-00000002").touch()
    assert history(tmp_path) == (0, 2)
    later = Journal(tmp_path)
    later.resume()
    later.append(entry(2))
    assert history(tmp_path) == (0, 3)
    write(later, (3, 4))
    assert history(tmp_path) == (0, 4)
    later.close()


def test_a_length_that_is_not_there_is_not_waited_for(tmp_path: Path) -> None:
    """An entry that claims four gigabytes is a torn one; nothing is reserved for it."""
    journal = Journal(tmp_path)
    write(journal, (0, 1))
    journal.close()
    with (tmp_path / "entries-00000001").open("ab") as file:
        file.write(bytes(4) + b"\xff" * 60)
    assert history(tmp_path) == (0, 1)


# ------------------------------------------------------------------------------------ full disks


def test_a_full_disk_ends_the_journal_and_nothing_else(tmp_path: Path) -> None:
    """J3: wherever in an entry the room ends, the journal says why, leaves no file, can begin anew."""
    for room in range(300, 340):
        journal = Journal(tmp_path)
        with most_bytes(room):
            write(journal, (0, 40))
            assert failure(journal) == "entries: File too large"
            assert not journal.active
            assert files(tmp_path) == []
            journal.append(entry(1))
        write(journal, (7, 9))
        assert failure(journal) is None
        assert history(tmp_path) == (7, 9)
        journal.discard()
        journal.close()


def test_no_room_for_a_checkpoint(tmp_path: Path) -> None:
    """J3: the same in the middle of a checkpoint; the entries, which could be written, go as well."""
    journal = Journal(tmp_path)
    write(journal, (0, 2))
    with most_bytes(1000):
        journal.begin(head(2), iter([b"piece", bytes(2000)]))
        journal.append(entry(2))
        journal.advance(1 << 20)
    assert journal.failure == "checkpoint: File too large"
    assert not (journal.active or journal.checkpointing)
    assert files(tmp_path) == []
    journal.close()


@pytest.mark.parametrize("room", [0, 4])
def test_no_room_to_begin(tmp_path: Path, room: int) -> None:
    """J3: not even for the magic word; no descriptor is left open, and no file."""
    before = open_fds()
    journal = Journal(tmp_path)
    with most_bytes(room):
        journal.begin(HEAD, iter([]))
    assert journal.failure == f"{tmp_path}: File too large"
    assert files(tmp_path) == []
    assert open_fds() == before


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    """J3: a generation or a resumption that finds no folder is a failure that is said, and no error."""
    folder = tmp_path / "state"
    folder.mkdir()
    journal = Journal(folder)
    write(journal, (0, 1))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    journal.append(entry(1))
    journal.begin(HEAD, iter([]))
    assert journal.failure == f"{folder}: No such file or directory"
    journal.resume()
    assert not journal.active
    journal.close()


# ----------------------------------------------------------------------------------------- kills

WRITER = Path(__file__).with_name("publisher_journal_writer.py")


@pytest.mark.integration
def test_a_kill_leaves_a_beginning(tmp_path: Path) -> None:
    """kill -9 at moments of no choosing, again and again over one folder: every entry that was told as
    kept is read, in order, and at most one more.
    """
    rng, stop = random.Random(5), 0
    for seed in range(4):
        with subprocess.Popen(
            [sys.executable, str(WRITER), str(tmp_path), str(seed + 2)],
            stdout=subprocess.PIPE,
        ) as writer:
            assert writer.stdout is not None
            told = writer.stdout.read(8 * rng.randrange(1, 3000))
            writer.kill()
            told += writer.stdout.read()
        first_told = int.from_bytes(told[:8], "little")
        last_told = int.from_bytes(told[len(told) // 8 * 8 - 8 :][:8], "little")
        assert first_told == stop
        found = history(tmp_path)
        assert found is not None
        assert found[1] in (last_told + 1, last_told + 2)
        assert len(files(tmp_path)) <= 6
        stop = found[1]


def test_a_generation_is_measured_by_its_own_checkpoint(tmp_path: Path) -> None:
    """Not by those before it too, or files would grow with each; and by it still after a restart."""
    journal = Journal(tmp_path, limit_bytes=100)
    for _ in range(3):
        journal.begin(HEAD, iter([bytes(2000)]))
        journal.advance(1 << 20)
        size = (tmp_path / f"checkpoint-{journal._generation:08d}").stat().st_size
        journal.append(Entry(Kind.INPUT, bytes(size)))
        assert not due(journal)
        journal.append(Entry(Kind.INPUT, bytes(size)))
        assert due(journal)
    journal.begin(HEAD, iter([bytes(2000)]))
    journal.advance(1 << 20)
    journal.append(Entry(Kind.INPUT, bytes(size)))
    journal.close()
    journal = Journal(tmp_path, limit_bytes=100)
    journal.resume()
    assert not due(journal), "after a restart"
    journal.append(Entry(Kind.INPUT, bytes(size)))
    assert due(journal)
    journal.close()
