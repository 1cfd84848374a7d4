"""What a file for each page costs, against pages packed into segments and against bare files.

Three ways store, read and give up the same pages in turn, round by round: `FileStorage`; segments, to
which pages are appended with a checksum each, as a log does; and files written in place and read without
checksums, which is as fast as files get. All of it stays in the page cache: what is compared is the cost
of the calls, not of the disk, and segments would gain nothing from a disk that a file does not.

Giving up: a random half of the pages, one at a time. Files are removed. Segments are no smaller until
the other half is copied out of them, once, at the end; the time is for that.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median
from struct import Struct
from time import perf_counter
from typing import NamedTuple, Protocol
from zlib import crc32

import torch

from hicache.pool import HostPool, KVShape
from hicache.storage.backend import StoredPage
from hicache.storage.file import FileStorage
from hicache.storage.keys import PageFormat
from kvevents.namespace import BASE

PAGE_BYTES, ROUND_BYTES, ROUNDS = (64 << 10, 1 << 20), 128 << 20, 5
CALL_PAGES, PAGE_SIZE, SEGMENT_BYTES = 32, 64, 64 << 20


class Way(Protocol):
    """Somewhere to put pages."""

    def put(self, pages: Sequence[StoredPage], host_pages: array[int]) -> None: ...
    def get(self, pages: Sequence[StoredPage], host_pages: array[int]) -> None: ...
    def give_up(self, pages: Sequence[StoredPage]) -> None: ...
    def close(self) -> None: ...


class Files:
    """`FileStorage`, each call waited for. Its folders are there, as they are after the first pages."""

    def __init__(self, directory: Path, form: PageFormat, pool: HostPool) -> None:
        for number in range(256):
            (directory / form.fingerprint / f"{number:02x}").mkdir(parents=True)
        self._storage = FileStorage(directory, form, min_free_bytes=0)
        self._storage.attach(pool)

    def put(self, pages: Sequence[StoredPage], host_pages: array[int]) -> None:
        assert self._storage.put(pages, host_pages).result() == len(pages)

    def get(self, pages: Sequence[StoredPage], host_pages: array[int]) -> None:
        assert self._storage.get([page.key for page in pages], host_pages).result() == len(pages)

    def give_up(self, pages: Sequence[StoredPage]) -> None:
        assert self._storage.delete([page.key for page in pages]).result() == len(pages)

    def close(self) -> None:
        self._storage.close()


class Segments:
    """Records of key, length and checksum, then the page; where each is, in memory."""

    _header = Struct("<32sII")

    def __init__(self, directory: Path, _form: PageFormat, pool: HostPool) -> None:
        self._directory, self._pool = directory, pool
        self._segments: list[int] = []
        self._at: dict[bytes, tuple[int, int]] = {}
        self._end = SEGMENT_BYTES

    def put(self, pages: Sequence[StoredPage], host_pages: array[int]) -> None:
        for page, host_page in zip(pages, host_pages, strict=True):
            self._append(page.key, self._pool.page(host_page))

    def get(self, pages: Sequence[StoredPage], host_pages: array[int]) -> None:
        for page, host_page in zip(pages, host_pages, strict=True):
            fd, offset = self._at[page.key]
            header, content = bytearray(self._header.size), self._pool.page(host_page)
            os.preadv(fd, [header, content], offset)
            assert self._header.unpack(header) == (page.key, len(content), crc32(content))

    def give_up(self, pages: Sequence[StoredPage]) -> None:
        for page in pages:
            del self._at[page.key]
        old, self._segments, self._end = self._segments, [], SEGMENT_BYTES
        content = memoryview(bytearray(self._pool.bytes_per_page))
        for key, (fd, offset) in [*self._at.items()]:
            os.preadv(fd, [content], offset + self._header.size)
            self._append(key, content)
        for fd in old:
            os.ftruncate(fd, 0)
            os.close(fd)

    def close(self) -> None:
        for fd in self._segments:
            os.close(fd)

    def _append(self, key: bytes, content: memoryview) -> None:
        if self._end + len(content) > SEGMENT_BYTES:
            fd, _ = tempfile.mkstemp(dir=self._directory)
            self._segments.append(fd)
            self._end = 0
        fd = self._segments[-1]
        header = self._header.pack(key, len(content), crc32(content))
        self._at[key] = fd, self._end
        self._end += os.pwritev(fd, [header, content], self._end)


class BareFiles:
    """A file a page, in one folder: no checksum, no metadata, no temporary name."""

    def __init__(self, directory: Path, _form: PageFormat, pool: HostPool) -> None:
        self._directory, self._pool = str(directory), pool

    def put(self, pages: Sequence[StoredPage], host_pages: array[int]) -> None:
        for page, host_page in zip(pages, host_pages, strict=True):
            fd = os.open(self._path(page), os.O_WRONLY | os.O_CREAT)
            os.write(fd, self._pool.page(host_page))
            os.close(fd)

    def get(self, pages: Sequence[StoredPage], host_pages: array[int]) -> None:
        for page, host_page in zip(pages, host_pages, strict=True):
            fd = os.open(self._path(page), os.O_RDONLY)
            os.readv(fd, [self._pool.page(host_page)])
            os.close(fd)

    def give_up(self, pages: Sequence[StoredPage]) -> None:
        for page in pages:
            Path(self._path(page)).unlink()

    def close(self) -> None:
        pass

    def _path(self, page: StoredPage) -> str:
        return f"{self._directory}/{page.key.hex()}"


WAYS: dict[str, Callable[[Path, PageFormat, HostPool], Way]] = {
    "file a page (FileStorage)": Files,
    "segments": Segments,
    "bare files": BareFiles,
}


class Spent(NamedTuple):
    """Seconds a page, one number a call; giving up is one call."""

    put: list[float]
    get: list[float]
    give_up: float


def timed(call: Callable[[], None], num_pages: int) -> float:
    start = perf_counter()
    call()
    return (perf_counter() - start) / num_pages


def run(way: Way, prompts: list[list[StoredPage]]) -> Spent:
    """Put all prompts, get all, give up half of the pages, ends of prompts first."""
    mine, theirs = array("q", range(CALL_PAGES)), array("q", range(CALL_PAGES, 2 * CALL_PAGES))
    put = [timed(lambda p=p: way.put(p, mine), CALL_PAGES) for p in prompts]  # type: ignore[misc]
    get = [timed(lambda p=p: way.get(p, theirs), CALL_PAGES) for p in prompts]  # type: ignore[misc]
    half = [page for prompt in prompts for page in prompt[CALL_PAGES // 2 :]]
    return Spent(put, get, timed(lambda: way.give_up(half[::-1]), len(half)))


def prompts_of(num_pages: int, random: Random) -> list[list[StoredPage]]:
    """Prompts of `CALL_PAGES` pages each."""
    prompts = []
    for _ in range(num_pages // CALL_PAGES):
        prompt: list[StoredPage] = []
        parent = None
        for _ in range(CALL_PAGES):
            tokens = random.randbytes(4 * PAGE_SIZE)
            key = sha256((parent or b"") + tokens).digest()
            prompt.append(StoredPage(key, parent, BASE, tokens))
            parent = key
        prompts.append(prompt)
    return prompts


def measure(page_bytes: int) -> dict[str, list[Spent]]:
    """Each way, round by round, in a directory of its own that is gone before the next."""
    form = PageFormat(
        "bench", KVShape(2, 1, page_bytes // PAGE_SIZE // 8, torch.float16), PAGE_SIZE
    )
    pool = HostPool(2 * CALL_PAGES, PAGE_SIZE, form.shape)
    assert pool.bytes_per_page == page_bytes
    random = Random(1)
    for page in range(CALL_PAGES):
        pool.page(page)[:] = random.randbytes(page_bytes)
    found: dict[str, list[Spent]] = {name: [] for name in WAYS}
    for number in range(ROUNDS):
        prompts = prompts_of(ROUND_BYTES // page_bytes, random)
        names = [*WAYS]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            gc.collect()
            with tempfile.TemporaryDirectory() as directory:
                way = WAYS[name](Path(directory), form, pool)
                found[name].append(run(way, prompts))
                way.close()
    return found


def report(page_bytes: int, found: dict[str, list[Spent]]) -> None:
    """Medians of the rounds; p99 of all calls."""
    for name, rounds in found.items():
        cells = [f"{page_bytes >> 10:>5} KiB  {name:<25}"]
        for calls in ([one.put for one in rounds], [one.get for one in rounds]):
            mean = median(sum(one) / len(one) for one in calls)
            every = sorted(second for one in calls for second in one)
            p50, p99 = (every[int(len(every) * q)] * 1e6 for q in (0.5, 0.99))
            rate = f"{page_bytes / mean / 1e9:5.2f} GB/s {1 / mean:7,.0f}/s"
            cells.append(f"{rate}  p50 {p50:5.0f}  p99 {p99:6.0f}")
        cells.append(f"{median(one.give_up for one in rounds) * 1e6:6.0f}")
        print("  | ".join(cells), flush=True)


def main() -> int:
    print(
        f"{ROUND_BYTES >> 20} MiB a round, {CALL_PAGES} pages a call, {ROUNDS} rounds,"
        f" {len(os.sched_getaffinity(0))} cores, in {tempfile.gettempdir()}, no fsync; µs a page"
    )
    print(f"{'':38}| {'put':42}  | {'get':42}  | give up", flush=True)
    for page_bytes in PAGE_BYTES:
        report(page_bytes, measure(page_bytes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
