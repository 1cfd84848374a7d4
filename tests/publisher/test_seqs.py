"""publisher.stream.seqs: a seq that outlives its process, whole or noticed."""

from __future__ import annotations

import os
import random
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from publisher_rig import open_fds

from publisher.stream.seqs import MAX_KEPT_SEQ, SeqFile

Seqs = st.integers(0, MAX_KEPT_SEQ) | st.sampled_from([0, 1, MAX_KEPT_SEQ])


@contextmanager
def opened(path: Path) -> Iterator[SeqFile]:
    kept = SeqFile(path)
    try:
        yield kept
    finally:
        kept.close()


def found(path: Path) -> int | None:
    with opened(path) as kept:
        return kept.found


def kept_by(path: Path, *seqs: int) -> bytes:
    """The file after writing these, and closing."""
    with opened(path) as kept:
        for seq in seqs:
            kept.write(seq)
    return path.read_bytes()


@given(seqs=st.lists(Seqs, min_size=1, max_size=4))
def test_the_last_seq_is_found(tmp_path_factory: pytest.TempPathFactory, seqs: list[int]) -> None:
    """Whatever was written last is what the next process finds, also where it is less than before."""
    path = tmp_path_factory.getbasetemp() / "seq-found"
    kept_by(path, *seqs)
    with opened(path) as kept:
        assert (kept.found, kept.created) == (seqs[-1], False)
    assert found(path) == seqs[-1], "looking changes nothing"


def test_a_new_file_is_said_to_be_new(tmp_path: Path) -> None:
    """A file that was not there, or is empty, has nothing to say and is made, for its owner alone."""
    for name in ("absent", "empty"):
        path = tmp_path / name
        if name == "empty":
            path.touch(0o600)
        with opened(path) as kept:
            assert (kept.found, kept.created, kept.reason) == (None, True, "it is not there")
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_nothing_was_published_with_is_sound(tmp_path: Path) -> None:
    """A process that ends before its first batch leaves a file that says seq 0, not one to distrust."""
    path = tmp_path / "seq"
    with opened(path):
        pass
    with opened(path) as kept:
        assert (kept.found, kept.created) == (0, False)


def test_a_file_whose_first_process_was_killed_at_once_is_new(tmp_path: Path) -> None:
    """It had room for a seq, and none was stored: nothing is lost."""
    path = tmp_path / "seq"
    path.write_bytes(bytes(16))
    with opened(path) as kept:
        assert (kept.found, kept.created) == (None, True)
    assert found(path) == 0


def test_a_seq_is_one_word(tmp_path: Path) -> None:
    """16 bytes: the magic, and one aligned word whose upper 48 bits are the seq."""
    magic, word = struct.unpack("<QQ", kept_by(tmp_path / "seq", 0x1234_5678_9ABC))
    assert magic.to_bytes(8, "big")[:5] == b"kvseq"
    assert word >> 16 == 0x1234_5678_9ABC


@pytest.mark.parametrize("seq", [0, 4711, MAX_KEPT_SEQ])
def test_every_changed_byte_is_noticed(tmp_path: Path, seq: int) -> None:
    """All 4080 ways to change one byte: never a seq that was not written."""
    path = tmp_path / "seq"
    sound = kept_by(path, seq)
    with path.open("r+b", buffering=0) as file:
        for position, byte in enumerate(sound):
            for mask in range(1, 256):
                os.pwrite(file.fileno(), bytes([byte ^ mask]), position)
                with opened(path) as kept:
                    assert (kept.found, kept.created) == (None, False), (position, mask)
                    assert ("checksum" in kept.reason) == (position >= 8)
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert found(path) == seq


@pytest.mark.parametrize("size", [1, 8, 15, 17, 4096])
def test_another_size_is_noticed(tmp_path: Path, size: int) -> None:
    """A file that was cut or grew says nothing; a write makes a cut one sound again."""
    path = tmp_path / "seq"
    path.write_bytes((kept_by(path, 77) + bytes(4096))[:size])
    with opened(path) as kept:
        assert (kept.found, kept.created) == (None, False)
        assert kept.reason == f"{size} bytes that are not a seq"
        kept.write(78)
    if size < 16:
        assert found(path) == 78


@given(data=st.binary(max_size=40))
def test_arbitrary_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Bytes that nobody wrote as a seq are never one, and never raise."""
    path = tmp_path_factory.getbasetemp() / "seq-arbitrary"
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    assert found(path) is None


@given(seq=Seqs, check=st.integers(0, 2**16 - 1))
def test_a_word_is_believed_only_with_its_checksum(
    tmp_path_factory: pytest.TempPathFactory, seq: int, check: int
) -> None:
    """Of the 65536 words with a seq, one is sound."""
    path = tmp_path_factory.getbasetemp() / "seq-checked"
    sound = kept_by(path, seq)
    with path.open("r+b") as file:
        file.write(sound[:8] + (seq << 16 | check).to_bytes(8, "little"))
    assert found(path) == (seq if path.read_bytes() == sound else None)


def test_what_cannot_be_made_is_an_oserror(tmp_path: Path) -> None:
    """A directory in its place, or no directory to be in."""
    (tmp_path / "seq").mkdir()
    for path in (tmp_path / "seq", tmp_path / "absent" / "seq"):
        with pytest.raises(OSError, match="seq"):
            SeqFile(path)


def test_close_twice(tmp_path: Path) -> None:
    """The second close does nothing, and no descriptor is left."""
    before = open_fds()
    kept = SeqFile(tmp_path / "seq")
    kept.close()
    kept.close()
    assert open_fds() == before


# --------------------------------------------------------------------------------- full disks


def test_no_room_is_an_oserror(tmp_path: Path) -> None:
    """Where a file may have no bytes, making one raises; nothing is left open."""
    before = open_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            SeqFile(tmp_path / "seq")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert open_fds() == before


_ON_A_FULL_DISK = """
import sys
from pathlib import Path
from publisher.stream.seqs import SeqFile
folder = Path(sys.argv[1])
early = SeqFile(folder / "early")
try:
    (folder / "ballast").write_bytes(bytes(64 << 10))
except OSError:
    pass
try:
    SeqFile(folder / "late").write(1)
except OSError as error:
    print(error.strerror)
early.write(4711)
early.close()
early = SeqFile(folder / "early")
print(early.found)
"""


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="needs a mount")
def test_a_full_disk_is_an_oserror_and_no_signal(tmp_path: Path) -> None:
    """On a disk without room a new file raises, where a store into a hole would be SIGBUS; one that was
    made before takes every write.
    """
    mount = 'mount -t tmpfs -o size=16k tmpfs "$1" 2>/dev/null || exit 77; shift; exec "$@"'
    shell = ["sh", "-c", mount, "sh", str(tmp_path)]
    python = [sys.executable, "-c", _ON_A_FULL_DISK, str(tmp_path)]
    ended = subprocess.run(
        ["unshare", "-m", *shell, *python], capture_output=True, text=True, timeout=60, check=False
    )
    if ended.returncode == 77 or "unshare" in ended.stderr:
        pytest.skip("may not mount")
    assert (ended.returncode, ended.stdout) == (0, "No space left on device\n4711\n"), ended.stderr


# -------------------------------------------------------------------------------------- kills

_WRITER = """
import itertools, os, sys
from pathlib import Path
from publisher.stream.seqs import SeqFile
kept = SeqFile(Path(sys.argv[1]))
for seq in itertools.count(kept.found or 0):
    kept.write(seq)
    os.write(1, seq.to_bytes(8, "little"))
"""


@pytest.mark.integration
def test_a_kill_leaves_the_last_or_the_one_before(tmp_path: Path) -> None:
    """kill -9 of a process that writes without pause: what it told as written, or the one after."""
    rng, path, start = random.Random(3), tmp_path / "seq", 0
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            told = writer.stdout.read(8 * rng.randrange(1, 20_000))
            writer.kill()
            told += writer.stdout.read()
        last = int.from_bytes(told[len(told) // 8 * 8 - 8 :][:8], "little")
        assert last >= start
        assert found(path) in (last, last + 1)
        start = last
