"""A directory of pages: damage, bounds, kills, and a model of what must be there."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from hashlib import shake_128
from itertools import chain
from operator import mul
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from zlib import crc32

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from storage_rig import (
    FORM,
    TIMEOUT_S,
    StorageRig,
    content_of,
    fill,
    get,
    pages_of,
    put,
)

from hicache.pool import HostPool, KVShape, MLAShape
from hicache.storage.backend import StorageBackend, StorageError, StoredPage
from hicache.storage.chains import violations
from hicache.storage.file import FileStorage
from hicache.storage.keys import (
    KeyScheme,
    PageFormat,
    file_keys,
    sglang_file_keys,
    sglang_mooncake_keys,
)
from hicache.storage.page_file import page_sum
from kvevents.namespace import Namespace

pytestmark = pytest.mark.integration

PROMPT = pages_of(range(40))
KEYS = [page.key for page in PROMPT]
OTHER = pages_of(range(100, 116))
PEER = Path(__file__).with_name("storage_peer.py")
FOOTER_BYTES = 28


class FileRig(StorageRig):
    """A directory, and stores over it with whatever bounds."""

    def __init__(self, directory: Path) -> None:
        super().__init__(self.new, remembers=True)
        self.directory = directory
        self.max_bytes: int | None = None
        self.min_free_bytes = 0
        self.form = FORM
        self.keys: Callable[[PageFormat], KeyScheme] = file_keys

    def new(self) -> FileStorage:
        return FileStorage(
            self.directory,
            self.form,
            max_bytes=self.max_bytes,
            min_free_bytes=self.min_free_bytes,
            keys=self.keys,
        )

    def open(self) -> FileStorage:
        storage = super().open()
        assert isinstance(storage, FileStorage)
        return storage

    def path(self, key: bytes) -> Path:
        return self.directory / self.keys(self.form)(key)[0]

    def files(self) -> dict[Path, int]:
        """Sizes of the files there are, but for locks."""
        found = [path for path in self.directory.rglob("*") if path.is_file()]
        return {path: path.stat().st_size for path in found if path.suffix != ".lock"}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[FileRig]:
    """Over a directory that does not exist yet."""
    rig = FileRig(tmp_path / "a" / "pages")
    yield rig
    rig.close()


def settle(storage: StorageBackend) -> None:
    """Wait until the writing thread has nothing left to do."""
    storage.delete([]).result(TIMEOUT_S)


def sizes_of(pages: list[StoredPage]) -> dict[bytes, int]:
    """Bytes of each page's file, as they are on disk."""
    with tempfile.TemporaryDirectory() as directory:
        rig = FileRig(Path(directory))
        put(rig, rig.open(), pages)
        rig.close()
        return {page.key: rig.path(page.key).stat().st_size for page in pages}


# ------------------------------------------------------------------------------------- the files


def test_a_pages_sum_is_as_documented() -> None:
    """Of whole blocks, of none, and of what is behind them: as plain Python computes it."""
    factors = [
        int.from_bytes(word, "little") | 1 for word in words(shake_128(b"kvpage").digest(4096))
    ]
    for length in (0, 1, 4095, 4096, 4097, 8192, 3 * 4096 + 8):
        content = bytearray(Random(length).randbytes(length))
        sums = b"".join(
            (sum(map(mul, factors, block)) % 2**64).to_bytes(8, sys.byteorder)
            for block in (
                [int.from_bytes(word, sys.byteorder) for word in words(content[at : at + 4096])]
                for at in range(0, length - 4095, 4096)
            )
        )
        assert page_sum(memoryview(content)) == crc32(sums + content[length // 4096 * 4096 :])


def test_a_pages_sum_finds_changes() -> None:
    """Of a bit, of a block's place, of a block that is an older one or zeros, and of all of it."""
    content = bytearray(Random(1).randbytes(5 * 4096 + 100))
    right = page_sum(memoryview(content))
    for number in range(2000):
        at = Random(number).randrange(8 * len(content))
        content[at // 8] ^= 1 << at % 8
        assert page_sum(memoryview(content)) != right, at
        content[at // 8] ^= 1 << at % 8
    for start in range(0, 5 * 4096, 4096):
        for block in (bytes(4096), Random(2).randbytes(4096), content[4096:8192][::-1]):
            changed = content[:]
            changed[start : start + 4096] = block
            assert page_sum(memoryview(changed)) != right
    assert page_sum(memoryview(content[4096:8192] + content[:4096] + content[8192:])) != right
    assert page_sum(memoryview(bytearray(len(content)))) != right


def words(data: bytes | bytearray) -> list[bytes | bytearray]:
    """Of eight bytes."""
    return [data[at : at + 8] for at in range(0, len(data), 8)]


def test_a_large_page_has_its_checksum(tmp_path: Path) -> None:
    """It comes back whole, also in a later run, and a changed byte is found out."""
    form = PageFormat("org/model@1", KVShape(8, 8, 64, torch.bfloat16), page_size=16)
    pool, pages = HostPool(2, form.page_size, form.shape), PROMPT[:2]
    content = Random(0).randbytes(form.bytes_per_page)
    keys = [page.key for page in pages]
    for run in range(2):
        with closing(FileStorage(tmp_path, form, min_free_bytes=0)) as storage:
            storage.attach(pool)
            if run == 0:
                for page in range(2):
                    pool.page(page)[:] = content
                assert storage.put(pages, array("q", range(2))).result(TIMEOUT_S) == 2
            for page in range(2):
                pool.page(page)[:] = bytes(form.bytes_per_page)
            assert storage.get(keys, array("q", range(2))).result(TIMEOUT_S) == 2
            assert [bytes(pool.page(page)) for page in range(2)] == [content, content]
    path = tmp_path / file_keys(form)(keys[1])[0]
    changed = bytearray(path.read_bytes())
    changed[form.bytes_per_page // 2] ^= 1
    path.write_bytes(changed)
    with closing(FileStorage(tmp_path, form, min_free_bytes=0)) as storage:
        storage.attach(pool)
        assert storage.get(keys, array("q", range(2))).result(TIMEOUT_S) == 1
        assert storage.stats.rejected == 1


def test_a_page_is_the_first_bytes_of_its_file(rig: FileRig) -> None:
    """A reader that knows no footer finds the page; no one but its owner may read the file."""
    put(rig, rig.open(), PROMPT)
    assert set(rig.files()) == {rig.path(key) for key in KEYS}
    for key in KEYS:
        assert rig.path(key).read_bytes()[: FORM.bytes_per_page] == content_of(key)
        assert rig.path(key).stat().st_mode & 0o777 == 0o600


def test_sglangs_names_are_flat_and_share_a_directory(rig: FileRig) -> None:
    """Under SGLang's names the files lie where SGLang looks, and what is not ours stays."""
    rig.keys = sglang_file_keys
    storage = rig.open()
    foreign = {
        rig.directory / "notes.txt": b"x",
        rig.directory / f"{'0' * 64}_m_0_1.bin": b"y" * 999,
    }
    for path, text in foreign.items():
        path.write_bytes(text)
    put(rig, storage, PROMPT)
    assert {path.name for path in rig.files()} == {
        *(f"{key.hex()}_org-model@1_0_1.bin" for key in KEYS),
        *(path.name for path in foreign),
    }
    storage = rig.open()
    assert set(storage.held()) == set(PROMPT)
    assert get(rig, storage, KEYS) == len(KEYS)
    assert [path.read_bytes() for path in foreign] == [*foreign.values()]


def test_a_large_file_of_others_is_not_read(rig: FileRig) -> None:
    """Beside flat names there may be a file that does not fit into memory: its end tells enough."""
    rig.keys = sglang_file_keys
    put(rig, rig.open(), PROMPT)
    large = rig.directory / "weights.bin"
    large.touch()
    os.truncate(large, 1 << 40)
    assert set(rig.open().held()) == set(PROMPT)
    assert large.stat().st_size == 1 << 40


def test_formats_share_a_directory(rig: FileRig) -> None:
    """A store of another format has nothing of this one's and leaves it alone."""
    put(rig, rig.open(), PROMPT)
    rig.close()
    for keys in (file_keys, sglang_file_keys):
        rig.form, rig.keys = PageFormat("another", FORM.shape, FORM.page_size), keys
        storage = rig.open()
        assert storage.held() == []
        assert put(rig, storage, PROMPT) == len(PROMPT)
        rig.form, rig.keys = FORM, file_keys
        storage = rig.open()
        assert get(rig, storage, KEYS) == len(KEYS)


def test_leftovers_are_removed_at_the_start(rig: FileRig) -> None:
    """What a kill left half written goes, and pages that no prompt's start reaches."""
    put(rig, rig.open(), PROMPT)
    rig.close()
    left = rig.path(KEYS[0]).with_name(f".{FORM.fingerprint}.tmp")
    left.write_bytes(b"half a page")
    rig.path(KEYS[6]).unlink()
    storage = rig.open()
    assert storage.held() == PROMPT[:6]
    assert set(rig.files()) == {rig.path(key) for key in KEYS[:6]}
    assert storage.stats.rejected == 0 and storage.stats.lost == 3
    assert storage.take_lost() == []


# --------------------------------------------------------------------------------------- damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)

    return damage


def foreign(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = [
    *(truncate, empty, append, foreign, link, pipe),
    *(flip(offset) for offset in (0, FORM.bytes_per_page - 1, FORM.bytes_per_page + 20)),
    *(flip(-offset) for offset in (1, 9, 13, 17, 21)),
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f"{f.__qualname__.partition('.')[0]}")
def test_a_damaged_page_is_lost_with_all_behind_it(
    rig: FileRig, damage: Callable[[Path], None]
) -> None:
    """It is not counted, is removed, and is reported; it can be put again."""
    storage = rig.open()
    put(rig, storage, PROMPT)
    damage(rig.path(KEYS[4]))
    assert storage.exists_prefix(KEYS).result(TIMEOUT_S) == len(KEYS), "no I/O"
    assert get(rig, storage, KEYS) == 4
    assert storage.take_lost() == KEYS[:3:-1]
    settle(storage)
    assert set(rig.files()) - {rig.path(KEYS[4]).with_suffix(".moved")} == {
        rig.path(key) for key in KEYS[:4]
    }
    assert storage.stats.lost == 6
    assert storage.stats.failed_gets == 6
    assert storage.stats.last_error
    assert put(rig, storage, PROMPT) == len(PROMPT)
    assert get(rig, storage, KEYS) == len(PROMPT)


@pytest.mark.parametrize("damage", DAMAGE[:4], ids=lambda f: f.__name__)
def test_a_file_that_is_no_page_is_rejected(rig: FileRig, damage: Callable[[Path], None]) -> None:
    """Torn and foreign files are counted, when they are read and when a store starts."""
    storage = rig.open()
    put(rig, storage, PROMPT)
    damage(rig.path(KEYS[9]))
    get(rig, storage, KEYS)
    assert storage.stats.rejected == 1
    put(rig, storage, PROMPT)
    damage(rig.path(KEYS[9]))
    storage = rig.open()
    assert storage.stats.rejected == 1
    assert storage.held() == PROMPT[:9]
    assert not rig.path(KEYS[9]).exists()


def test_swapped_files_are_two_losses(rig: FileRig) -> None:
    """A page under another's name is not that page, however intact."""
    storage = rig.open()
    put(rig, storage, PROMPT)
    put(rig, storage, OTHER)
    one, two = rig.path(KEYS[9]), rig.path(OTHER[3].key)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    assert get(rig, storage, KEYS) == 9
    assert get(rig, storage, [page.key for page in OTHER]) == 3
    assert storage.take_lost() == [KEYS[9], OTHER[3].key]
    assert storage.stats.rejected == 2


def test_swapped_files_are_found_at_the_start(rig: FileRig) -> None:
    """A page's file under another's name, or twice, is not held."""
    put(rig, rig.open(), [*PROMPT, *OTHER])
    rig.close()
    one, two = rig.path(KEYS[9]), rig.path(OTHER[3].key)
    one.rename(two)
    shutil.copy(rig.path(KEYS[0]), rig.path(KEYS[0]).with_name("copy.kv"))
    storage = rig.open()
    assert set(storage.held()) == {*PROMPT[:9], *OTHER[:3]}
    assert storage.stats.rejected == 2
    assert set(rig.files()) == {rig.path(page.key) for page in storage.held()}


def test_an_audit_finds_what_is_gone(rig: FileRig) -> None:
    """Files that were removed or cut are reported without being read."""
    storage = rig.open()
    put(rig, storage, PROMPT)
    rig.path(KEYS[8]).unlink()
    truncate(rig.path(KEYS[7]))
    assert storage.audit(KEYS[:7]).result(TIMEOUT_S) == 0
    assert storage.audit(KEYS).result(TIMEOUT_S) == 3
    assert storage.take_lost() == KEYS[:6:-1]


def test_a_directory_that_vanishes_is_a_loss(rig: FileRig) -> None:
    """Somebody removed everything: all is lost, and what is put then is there."""
    storage = rig.open()
    put(rig, storage, PROMPT)
    shutil.rmtree(rig.directory)
    assert get(rig, storage, KEYS) == 0
    assert storage.take_lost() == KEYS[::-1]
    assert put(rig, storage, PROMPT) == len(PROMPT)
    assert get(rig, storage, KEYS) == len(PROMPT)


# --------------------------------------------------------------------------------------- prompts


def test_a_page_needs_the_one_before_it(rig: FileRig) -> None:
    """F1: without its parent a page is not stored, and the caller learns it."""
    storage = rig.open()
    assert put(rig, storage, PROMPT[2:]) == 0
    assert storage.stats.failed_puts == 8
    assert "is not stored" in storage.stats.last_error
    put(rig, storage, PROMPT[:2])
    assert put(rig, storage, PROMPT[2:]) == 8


def test_what_follows_a_deleted_page_is_lost(rig: FileRig) -> None:
    """Pages that nobody asked to delete but nobody can reach any more are reported."""
    storage = rig.open()
    put(rig, storage, PROMPT)
    assert storage.delete(KEYS[5:7]).result(TIMEOUT_S) == 2
    assert storage.take_lost() == KEYS[:6:-1]
    assert storage.held() == PROMPT[:5]
    assert set(rig.files()) == {rig.path(key) for key in KEYS[:5]}


def test_a_page_that_is_written_while_all_is_forgotten_is_not_stored(
    rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F2: a clear in the middle of a write; the page is in no index and no file, now or later."""
    storage = rig.open()
    write = storage._folder.write

    def write_and_clear(*args: Any) -> None:
        write(*args)
        storage.clear()

    monkeypatch.setattr(storage._folder, "write", write_and_clear)
    assert put(rig, storage, PROMPT[:3]) == 0
    settle(storage)
    assert (storage.held(), rig.files()) == ([], {})
    assert rig.open().held() == []


def test_a_page_whose_parent_is_lost_while_it_is_written_leaves_no_file(
    rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1: the reading thread finds the parent damaged in the middle of the write."""
    storage = rig.open()
    put(rig, storage, PROMPT[:1])
    write = storage._folder.write

    def write_and_lose(*args: Any) -> None:
        write(*args)
        get(rig, storage, KEYS[:1])

    rig.path(KEYS[0]).write_bytes(b"damaged")
    monkeypatch.setattr(storage._folder, "write", write_and_lose)
    assert put(rig, storage, PROMPT[:3]) == 0
    settle(storage)
    assert (storage.held(), rig.files()) == ([], {})
    assert storage.take_lost() == KEYS[:1]


# ---------------------------------------------------------------------------------------- bounds


def test_the_least_recently_used_ends_go_first(rig: FileRig) -> None:
    """Over the cap pages go from the end of what was used longest ago; a get or exists is a use."""
    a, b, c = (pages_of(range(start, start + 12)) for start in (0, 100, 200))
    size = sizes_of([*a, *b, *c])
    rig.max_bytes = sum(size.values()) - size[a[2].key]
    storage = rig.open()
    put(rig, storage, a)
    put(rig, storage, b)
    get(rig, storage, [page.key for page in a])
    assert put(rig, storage, c) == 3
    assert storage.take_lost() == [b[2].key]
    assert storage.exists_prefix([b[0].key]).result(TIMEOUT_S) == 1
    d = pages_of(range(300, 308))
    assert put(rig, storage, d) == 2
    assert storage.take_lost() == [b[1].key, a[2].key]
    assert storage.stats.evicted == 3
    assert sum(rig.files().values()) <= rig.max_bytes


def test_a_new_page_takes_the_file_of_one_given_up(rig: FileRig) -> None:
    """A full store makes no file: it writes over those of the pages that go, also where a page's tokens
    are fewer or more, and has none of them left over.
    """
    prompts = [pages_of(range(start, start + 8)) for start in range(0, 80, 8)]
    sizes = sizes_of([page for prompt in prompts for page in prompt])
    rig.max_bytes = sum(sizes[page.key] for page in prompts[-1])
    storage = rig.open()
    put(rig, storage, prompts[0])
    inodes = {path.stat().st_ino for path in rig.files()}
    for prompt in prompts[1:]:
        assert put(rig, storage, prompt) == len(prompt)
        assert rig.files() == {rig.path(page.key): sizes[page.key] for page in prompt}
        assert {path.stat().st_ino for path in rig.files()} == inodes
        assert get(rig, storage, [page.key for page in prompt]) == len(prompt)


def test_a_file_with_another_name_is_not_written_over(rig: FileRig, tmp_path: Path) -> None:
    """Whoever linked a page's file to keep it has its bytes still, after the page was given up."""
    rig.max_bytes = sum(sizes_of(PROMPT[:4]).values())
    storage = rig.open()
    put(rig, storage, PROMPT[:4])
    for path in list(rig.files()):
        (tmp_path / path.name).hardlink_to(path)
    before = {path.name: path.read_bytes() for path in rig.files()}
    assert put(rig, storage, OTHER) == 4
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_others_see_no_file_change(rig: FileRig) -> None:
    """In a directory that others may read, one who has a page's file open reads that page to its end."""
    rig.keys = sglang_file_keys
    rig.max_bytes = sum(sizes_of(PROMPT[:4]).values())
    storage = rig.open()
    put(rig, storage, PROMPT[:4])
    with ExitStack() as stack:
        held = {path: stack.enter_context(path.open("rb", buffering=0)) for path in rig.files()}
        before = {path: path.read_bytes() for path in held}
        assert put(rig, storage, OTHER) == 4
        assert {path: file.read() for path, file in held.items()} == before


def test_pages_given_up_for_nothing_leave_no_files(rig: FileRig) -> None:
    """Where the pages that they made room for are not stored, their space is free."""
    rig.max_bytes = sum(sizes_of(PROMPT[:8]).values())
    storage = rig.open()
    put(rig, storage, PROMPT[:8])
    trap = rig.path(OTHER[0].key)
    trap.mkdir(parents=True)
    assert put(rig, storage, OTHER) == 0
    left = {rig.path(page.key) for page in storage.held()}
    assert set(rig.files()) == left and len(left) < 8


def test_a_prompt_is_not_given_up_for_its_own_end(rig: FileRig) -> None:
    """A prompt longer than the cap keeps its start; nothing goes for what cannot fit anyway."""
    size = sizes_of([*PROMPT, *OTHER])
    rig.max_bytes = sum(size[key] for key in KEYS[:6]) + 3
    storage = rig.open()
    assert put(rig, storage, PROMPT) == 6
    assert storage.stats.failed_puts == 4
    assert "no room" in storage.stats.last_error
    assert put(rig, storage, PROMPT) == 6
    assert storage.take_lost() == []
    assert put(rig, storage, OTHER) == 4
    assert storage.take_lost() == KEYS[5:1:-1]


@pytest.mark.parametrize("bound", ["max_bytes", "min_free_bytes"])
def test_a_bound_out_of_reach_stores_nothing(rig: FileRig, bound: str) -> None:
    """A page above the cap, or a floor above the disk: a smaller number, and nothing is given up."""
    size = sizes_of(PROMPT)
    rig.max_bytes = size[KEYS[0]]
    storage = rig.open()
    assert put(rig, storage, PROMPT[:1]) == 1
    if bound == "max_bytes":
        assert put(rig, storage, pages_of(range(50, 54), Namespace(lora_name="x" * 99))) == 0
    else:
        rig.max_bytes, rig.min_free_bytes = None, 1 << 60
        storage = rig.open()
        assert put(rig, storage, OTHER[:1]) == 0
    assert storage.stats.failed_puts == 1 and storage.stats.last_error
    assert storage.held() == PROMPT[:1]
    assert storage.take_lost() == []


def test_a_smaller_cap_holds_from_the_start(rig: FileRig) -> None:
    """A store that starts with more than its cap gives up what was written first, ends first."""
    put(rig, rig.open(), [*OTHER, *PROMPT])
    rig.close()
    for at, key in enumerate([*KEYS, *(page.key for page in OTHER)]):
        os.utime(rig.path(key), (at, at))
    size = sizes_of([*OTHER, *PROMPT])
    rig.max_bytes = sum(size.values()) - size[KEYS[9]] - size[KEYS[8]]
    storage = rig.open()
    assert set(storage.held()) == {*OTHER, *PROMPT[:8]}
    assert sum(rig.files().values()) == rig.max_bytes
    assert storage.stats.evicted == 2


def test_a_page_that_cannot_be_written_is_not_counted(rig: FileRig) -> None:
    """The system refuses in the middle of a page: nothing of it stays, and the next one works."""
    storage = rig.open()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FORM.bytes_per_page + 1, hard))
    try:
        assert put(rig, storage, PROMPT) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert storage.stats.failed_puts == len(PROMPT)
    assert "File too large" in storage.stats.last_error
    assert rig.files() == {}
    assert put(rig, storage, PROMPT) == len(PROMPT)


def test_something_in_a_pages_place_is_no_error(rig: FileRig) -> None:
    """A folder where a page's file must go: the put falls short, the rest goes on."""
    storage = rig.open()
    rig.path(KEYS[3]).mkdir(parents=True)
    assert put(rig, storage, PROMPT) == 3
    assert "directory" in storage.stats.last_error
    assert get(rig, storage, KEYS) == 3
    assert put(rig, storage, OTHER) == 4


def test_nothing_is_given_up_that_cannot_be_removed(rig: FileRig) -> None:
    """The file system refuses to make room: the put falls short, and what is stored stays."""
    rig.max_bytes = sum(sizes_of(PROMPT).values())
    storage = rig.open()
    put(rig, storage, PROMPT)
    rig.path(KEYS[9]).unlink()
    rig.path(KEYS[9]).mkdir()
    assert put(rig, storage, OTHER) == 0
    assert storage.stats.failed_puts == 4
    assert "directory" in storage.stats.last_error
    assert (storage.take_lost(), storage.held()) == ([], PROMPT)
    assert get(rig, storage, KEYS) == 9
    assert put(rig, storage, OTHER) == 4


def test_a_full_disk_is_a_smaller_number(tmp_path: Path) -> None:
    """Full, short of the floor, read-only: see `storage_peer.full`."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(
        [*unshare, sys.executable, str(PEER), "full", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=peer_environment(),
    )
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------- setup


@pytest.mark.parametrize(
    ("directory", "reason"),
    [
        ("/proc/pages", "No such file"),
        ("file", "Not a directory"),
        ("file/pages", "Not a directory"),
    ],
)
def test_a_directory_that_cannot_be_had_is_named(
    tmp_path: Path, directory: str, reason: str
) -> None:
    """The error names directory and reason."""
    (tmp_path / "file").touch()
    path = tmp_path / directory
    with pytest.raises(StorageError, match=f"^directory: {path}: {reason}"):
        FileStorage(path, FORM)


def test_files_that_cannot_be_looked_into_are_kept(rig: FileRig) -> None:
    """Too few descriptors at the start are no reason to give up pages: the store is refused."""
    put(rig, rig.open(), PROMPT)
    rig.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    refused: list[str] = []
    for limit in range(lowest, lowest + 100):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            storage = rig.new()
        except StorageError as error:
            refused.append(str(error))
            continue
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with closing(storage):
            assert set(storage.held()) == set(PROMPT)
        break
    assert refused and all("Too many open files" in one for one in refused)


@pytest.mark.parametrize(
    ("max_bytes", "min_free_bytes", "message"),
    [(0, 0, "max_bytes: 0 is below 1"), (None, -1, "min_free_bytes: -1 is below 0")],
)
def test_bounds_out_of_range_are_refused(
    rig: FileRig, max_bytes: int | None, min_free_bytes: int, message: str
) -> None:
    """The error names field and bound, and nothing was made."""
    rig.max_bytes, rig.min_free_bytes = max_bytes, min_free_bytes
    with pytest.raises(StorageError, match=message):
        rig.new()
    assert not rig.directory.exists()


def test_two_names_are_too_many(rig: FileRig) -> None:
    """A key scheme that splits pages is refused."""
    rig.keys = sglang_mooncake_keys
    with pytest.raises(StorageError, match="keys: 2 names"):
        rig.new()


def test_a_name_that_is_too_long_is_refused(rig: FileRig) -> None:
    """A model's name is part of each: better an error at once than a store that stores nothing."""
    rig.keys, rig.form = sglang_file_keys, PageFormat("m" * 200, FORM.shape, FORM.page_size)
    with pytest.raises(StorageError, match="keys: a name has 273 bytes, at most 255 can be had"):
        rig.new()
    rig.form = PageFormat("m" * 182, FORM.shape, FORM.page_size)
    assert put(rig, rig.open(), PROMPT) == len(PROMPT)


def test_host_pages_that_do_not_fit_are_the_callers_fault(rig: FileRig) -> None:
    """One for each page, in the pool; else ValueError, at once."""
    with closing(rig.new()) as unattached, pytest.raises(ValueError, match="attach"):
        unattached.put(PROMPT[:1], array("q", [0]))
    storage = rig.open()
    with pytest.raises(ValueError, match="host_pages: 1 for 2 pages"):
        storage.put(PROMPT[:2], array("q", [0]))
    with pytest.raises(ValueError, match=r"host_pages: not all in 0\.\.63"):
        storage.get(KEYS[:2], array("q", [0, 64]))


def test_a_store_is_held_once(rig: FileRig) -> None:
    """A second store of the same format is refused until the first closes; another format is not."""
    storage = rig.open()
    with pytest.raises(StorageError, match=f"^directory: {rig.directory}: another store of the"):
        rig.new()
    put(rig, storage, PROMPT)
    with closing(FileStorage(rig.directory, PageFormat("another", FORM.shape, FORM.page_size))):
        pass
    assert get(rig, storage, KEYS) == len(KEYS)
    rig.close()
    rig.new().close()


def test_a_closed_store_leaves_the_directory_to_the_next(rig: FileRig) -> None:
    """A clear after the close empties its own index, and no file of the store that is there by then."""
    closed = rig.open()
    put(rig, closed, PROMPT)
    storage = rig.open()
    closed.clear()
    assert closed.held() == []
    assert get(rig, storage, KEYS) == len(KEYS)
    assert set(rig.files()) == {rig.path(key) for key in KEYS}


# --------------------------------------------------------------------------- processes and threads


def peer_environment() -> dict[str, str]:
    here = Path(__file__).parent
    return {**os.environ, "PYTHONPATH": f"{here.parent.parent}:{here}"}


def test_a_killed_store_has_all_it_counted(rig: FileRig) -> None:
    """Killed while it puts: the lock is free, each page it counted is there, and each page is exact."""
    counted: set[bytes] = set()
    for after in (7, 40):
        command = [sys.executable, str(PEER), "write", str(rig.directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=peer_environment()) as peer:
            assert peer.stdout is not None
            lines = [peer.stdout.readline() for _ in range(after)]
            with pytest.raises(StorageError, match="another store"):
                rig.new()
            peer.send_signal(signal.SIGKILL)
            lines += peer.stdout.readlines()
        counted.update(bytes.fromhex(key) for line in lines for key in line.decode().split())
        storage = rig.open()
        held = [page.key for page in storage.held()]
        assert counted <= set(held)
        for start in range(0, len(held), 50):
            part = held[start : start + 50]
            assert get(rig, storage, part) == len(part)
        assert set(rig.files()) == {rig.path(key) for key in held}
        rig.close()


def test_a_loss_is_of_one_storing(rig: FileRig) -> None:
    """A page found damaged and stored again before that is acted on stays stored."""
    storage = rig.open()
    put(rig, storage, PROMPT)
    before = storage._chains.get(KEYS[9])
    assert before is not None
    storage.delete(KEYS[9:]).result(TIMEOUT_S)
    put(rig, storage, PROMPT)
    assert storage._lose(before, "late") == 0
    assert storage.take_lost() == []
    assert get(rig, storage, KEYS) == len(KEYS)


def test_a_get_does_not_wait_for_a_put(rig: FileRig) -> None:
    """While the writing thread hangs in the file system, pages are found and read."""
    storage = rig.open()
    put(rig, storage, PROMPT)
    trap = rig.path(OTHER[0].key).with_name(f".{FORM.fingerprint}.tmp")
    trap.parent.mkdir(exist_ok=True)
    os.mkfifo(trap)  # opening it to write waits for a reader
    hanging = storage.put(OTHER[:1], array("q", [63]))
    assert get(rig, storage, KEYS) == len(KEYS)
    assert storage.exists_prefix(KEYS).result(TIMEOUT_S) == len(KEYS)
    assert not hanging.done()
    with trap.open("rb"):
        hanging.result(TIMEOUT_S)


def test_pages_are_read_while_they_are_given_up(rig: FileRig) -> None:
    """Puts that evict, gets, deletes and damage at once: no wrong byte, and the index is the files."""
    prompts = [pages_of(range(start, start + 32)) for start in range(0, 600, 100)]
    everything = [*chain(*prompts)]
    fill(rig.pool, [page.key for page in everything])
    rig.max_bytes = sum(sizes_of(everything).values()) // 3
    storage = rig.open()
    random = Random(5)
    target = array("q", range(56, 64))
    for _ in range(150):
        puts = [
            storage.put(prompts[number], array("q", range(number * 8, number * 8 + 8)))
            for number in random.sample(range(6), 3)
        ]
        wanted = [page.key for page in random.choice(prompts)]
        got = storage.get(wanted, target)
        if random.random() < 0.3:
            storage.delete([random.choice(wanted)])
        if random.random() < 0.2:
            rig.path(random.choice(wanted)).unlink(missing_ok=True)
        for index, key in zip(target[: got.result(TIMEOUT_S)], wanted, strict=False):
            assert bytes(rig.pool.page(index)) == content_of(key)
        assert all(0 <= one.result(TIMEOUT_S) <= 8 for one in puts)
    for prompt in prompts:
        get(rig, storage, [page.key for page in prompt])
    settle(storage)
    assert set(rig.files()) == {rig.path(page.key) for page in storage.held()}
    assert sum(rig.files().values()) <= rig.max_bytes
    assert violations(storage._chains) == []
    assert storage.stats.evicted > 0 and storage.stats.lost > 0


# ----------------------------------------------------------------------------------------- model

LONG = pages_of(range(20))
PROMPTS = [
    LONG,
    pages_of([*range(8), *range(50, 58)]),
    pages_of(range(200, 212)),
    pages_of(range(12), Namespace(lora_name="x")),
]
UNIVERSE = {page.key: page for page in chain(*PROMPTS)}
prompts = st.builds(lambda prompt, end: prompt[:end], st.sampled_from(PROMPTS), st.integers(1, 5))


class DiskModel(RuleBasedStateMachine):
    """A store against a dict of what must be there, its files against both."""

    sizes: ClassVar[dict[bytes, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self.rig = FileRig(Path(self._directory.name))
        if not self.sizes:
            self.sizes.update(sizes_of([*UNIVERSE.values()]))
        self.time = 0
        self.used: dict[bytes, int] = {}
        self.written: dict[bytes, int] = {}
        self.damaged: set[bytes] = set()
        self.lost: list[bytes] = []

    @initialize(num_pages=st.one_of(st.none(), st.integers(1, 9)))
    def start(self, num_pages: int | None) -> None:
        if num_pages is not None:
            self.rig.max_bytes = num_pages * max(self.sizes.values())
        self.storage = self.rig.open()

    @rule(prompt=prompts, first=st.integers(0, 2))
    def put(self, prompt: list[StoredPage], first: int) -> None:
        prompt = prompt[first:]
        for stored in self.prefix([page.key for page in prompt]) or prompt[:1]:
            self.use(stored.key if stored.key in self.used else stored.parent)
        count = put(self.rig, self.storage, prompt)
        assert count == self.model_put(prompt)
        self.use(prompt[count - 1].key if count else None)

    @rule(prompt=prompts)
    def get(self, prompt: list[StoredPage]) -> None:
        keys = [page.key for page in prompt]
        found = self.prefix(keys)
        self.use(found[-1].key if found else None)
        good = [page.key for page in found]
        bad = next((key for key in good if key in self.damaged), None)
        assert get(self.rig, self.storage, keys) == (good.index(bad) if bad else len(good))
        if bad:
            self.lose(bad)

    @rule(prompt=prompts)
    def exists(self, prompt: list[StoredPage]) -> None:
        keys = [page.key for page in prompt]
        found = self.prefix(keys)
        self.use(found[-1].key if found else None)
        assert self.storage.exists_prefix(keys).result(TIMEOUT_S) == len(found)

    @rule(keys=st.lists(st.sampled_from([*UNIVERSE]), max_size=4))
    def delete(self, keys: list[bytes]) -> None:
        assert self.storage.delete(keys).result(TIMEOUT_S) == len(keys)
        for key in keys:
            self.lost += [one for one in self.behind(key) if one not in keys]
            self.forget(self.behind(key))

    @rule(keys=st.lists(st.sampled_from([*UNIVERSE]), max_size=4, unique=True))
    def audit(self, keys: list[bytes]) -> None:
        before = len(self.used)
        for key in keys:
            if key in self.used and not self.has_its_length(key):
                self.lose(key)
        assert self.storage.audit(keys).result(TIMEOUT_S) == before - len(self.used)

    @precondition(lambda self: set(self.used) - self.damaged)
    @rule(data=st.data(), kind=st.sampled_from(["cut", "flip", "swap", "remove"]))
    def damage(self, data: st.DataObject, kind: str) -> None:
        intact = st.sampled_from(sorted(set(self.used) - self.damaged))
        key, other = data.draw(intact), data.draw(intact)
        path = self.rig.path(key)
        if kind == "cut":
            os.truncate(path, data.draw(st.integers(0, self.sizes[key] - 1)))
        elif kind == "flip":
            flip(data.draw(st.integers(0, self.sizes[key] - 1)))(path)
        elif kind == "swap" and other != key:
            content = path.read_bytes()
            path.write_bytes(self.rig.path(other).read_bytes())
            self.rig.path(other).write_bytes(content)
            self.damaged.add(other)
        else:
            path.unlink()
        self.damaged.add(key)

    @rule()
    def reopen(self) -> None:
        self.rig.close()
        for key, at in self.written.items():
            if self.rig.path(key).exists():
                os.utime(self.rig.path(key), (at, at))
        for key in [*self.damaged]:
            if self.start_notices(key):
                self.forget(self.behind(key))
        self.used = {key: max(self.written[one] for one in self.behind(key)) for key in self.used}
        self.storage = self.rig.open()

    @invariant()
    def all_accounts_agree(self) -> None:
        """What is held is what the model has, the files are those, and each loss was reported once."""
        settle(self.storage)
        assert {page.key for page in self.storage.held()} == set(self.used)
        assert violations(self.storage._chains) == []
        files = self.rig.files()
        removed = {self.rig.path(key) for key in self.damaged} - set(files)
        assert set(files) | removed == {self.rig.path(key) for key in self.used}
        if self.rig.max_bytes is not None:
            assert sum(self.sizes[key] for key in self.used) <= self.rig.max_bytes
        reported = self.storage.take_lost()
        assert sorted(reported) == sorted(self.lost)
        for number, key in enumerate(reported):
            assert UNIVERSE[key].parent not in reported[:number]
        self.lost.clear()

    def teardown(self) -> None:
        self.rig.close()
        self._directory.cleanup()

    # The model.

    def prefix(self, keys: list[bytes]) -> list[StoredPage]:
        found = []
        for key in keys:
            if key not in self.used:
                break
            found.append(UNIVERSE[key])
        return found

    def use(self, key: bytes | None) -> None:
        self.time += 1
        while key in self.used:
            self.used[key] = self.time
            key = UNIVERSE[key].parent

    def model_put(self, prompt: list[StoredPage]) -> int:
        """Store what fits beside the prompt's own start; evict the oldest ends for it."""
        own = {key for page in prompt for key in (page.key, page.parent) if key}
        kept = [key for key in self.used if any(one in own for one in self.behind(key))]
        budget = self.rig.max_bytes or 1 << 40
        total = sum(self.sizes[key] for key in kept)
        for count, page in enumerate(prompt):
            if page.key in self.used:
                continue
            total += self.sizes[page.key]
            if total > budget or not (page.parent is None or page.parent in self.used):
                return count
            while self.num_bytes() + self.sizes[page.key] > budget:
                ends = [key for key in self.used if self.behind(key) == [key]]
                oldest = min(set(ends) - own, key=self.used.__getitem__)
                self.lost.append(oldest)
                self.forget([oldest])
            self.time += 1
            self.used[page.key] = self.written[page.key] = self.time
        return len(prompt)

    def num_bytes(self) -> int:
        return sum(self.sizes[key] for key in self.used)

    def behind(self, key: bytes) -> list[bytes]:
        """A stored page and the stored pages that need it."""
        found = [key] if key in self.used else []
        for one in found:
            found += [child for child in self.used if UNIVERSE[child].parent == one]
        return found

    def lose(self, key: bytes) -> None:
        self.lost += self.behind(key)
        self.forget(self.behind(key))

    def forget(self, keys: list[bytes]) -> None:
        for key in keys:
            del self.used[key], self.written[key]
        self.damaged.difference_update(keys)

    def has_its_length(self, key: bytes) -> bool:
        path = self.rig.path(key)
        return path.exists() and path.stat().st_size == self.sizes[key]

    def start_notices(self, key: bytes) -> bool:
        """All but a change of the page's own bytes, or of their checksum."""
        if not self.has_its_length(key):
            return True
        trailer = self.rig.path(key).read_bytes()[FORM.bytes_per_page :]
        with tempfile.TemporaryDirectory() as directory:
            rig = FileRig(Path(directory))
            chain_of = [UNIVERSE[key]]
            while (parent := chain_of[0].parent) is not None:
                chain_of.insert(0, UNIVERSE[parent])
            put(rig, rig.open(), chain_of)
            rig.close()
            intact = rig.path(key).read_bytes()[FORM.bytes_per_page :]
        at = len(intact) - FOOTER_BYTES + 12  # of the page's checksum
        return trailer[:at] + trailer[at + 4 :] != intact[:at] + intact[at + 4 :]


TestDiskModel = DiskModel.TestCase
TestDiskModel.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=40)


def test_ranks_with_the_same_latents_share_a_directory(tmp_path: Path) -> None:
    """Each has a folder of its own in it, although the bytes of their pages are the same."""
    shape = MLAShape(num_layers=1, latent_dim=4, dtype=torch.uint8)
    forms = [PageFormat("model", shape, 2, tp_rank=rank, tp_size=2) for rank in range(2)]
    stores = [FileStorage(tmp_path, form, min_free_bytes=0) for form in forms]
    for store in stores:
        store.close()
    assert len([folder for folder in tmp_path.iterdir() if folder.is_dir()]) == 2
