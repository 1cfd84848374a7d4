"""P12: pages put and got, against a plain copy of as many bytes, and against the bare Mooncake client.

Files: a round copies one file to another (`shutil.copyfile`), puts as many bytes of pages into a
`FileStorage` and gets them. Everything is in the page cache, what is left to write is written before each
of these begins, and what they made is removed again: what is compared is the cost of the calls, not that
of the disk. "Full": each page put takes the place of one that was put before. Pages are of the sizes that
real models have. Where thousands of files were deleted in the minutes before, ext4 is slow to make one.

Mooncake: the same pages through `MooncakeStorage` and through the client alone, from and to registered
memory. The master, both clients and the process that lends the memory are on this machine, and pages go
through TCP.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from benchmarks.figures import Figure, Reach, at_least, compared, skipped, spread
from benchmarks.options import Options
from benchmarks.report import run_alone
from hicache.pool import HostPool, KVShape
from hicache.storage.backend import StorageBackend, StorageError, StoredPage
from hicache.storage.file import FileStorage
from hicache.storage.keys import PageFormat
from kvevents.namespace import BASE

__all__ = ["NAME", "main", "measure"]

NAME = "storage"
ROUNDS, PAGE_SIZE = 5, 64
FILE_PAGES, ROUND_BYTES, CALL_BYTES = (1 << 20, 8 << 20), 64 << 20, 32 << 20
MOONCAKE_PAGES, MOONCAKE_BYTES = (1 << 20, 8 << 20), 128 << 20
MOST_CALL_PAGES = 32
FILE_REACH, MOONCAKE_REACH = at_least(0.7), at_least(0.9)
_WORDS = {"put": "pages put", "get": "pages got", "full": "pages put into a full store"}


def measure(options: Options) -> list[Figure]:
    figures: list[Figure] = []
    for page_bytes in FILE_PAGES:
        figures += _files(page_bytes, options)
    return figures + _mooncake(options)


class Rates(NamedTuple):
    """Bytes a second of each round: of pages, and of what they are compared with."""

    ours: list[float]
    theirs: list[float]

    def figure(self, id: str, work: str, reach: Reach | None, peer: str, **more: Any) -> Figure:  # noqa: A002
        ratios = [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]
        return compared(
            id,
            work,
            median(self.ours) / 1e9,
            "GB/s",
            reach=reach,
            peer=peer,
            peer_figure=median(self.theirs) / 1e9,
            ratio=median(ratios),
            spread=spread([one / 1e9 for one in self.ours]),
            **more,
        )


class Pages:
    """A host pool of two halves: pages come from the one, and go to the other."""

    def __init__(self, page_bytes: int) -> None:
        self.call_pages = min(MOST_CALL_PAGES, CALL_BYTES // page_bytes)
        shape = KVShape(2, 1, page_bytes // PAGE_SIZE // 8, torch.float16)
        self.form = PageFormat("bench", shape, PAGE_SIZE)
        self.pool = HostPool(2 * self.call_pages, PAGE_SIZE, shape)
        self.page_bytes = self.pool.bytes_per_page
        self._random = Random(1)
        for page in range(self.pool.num_pages):
            self.pool.page(page)[:] = self._random.randbytes(page_bytes)
        self.source = array("q", range(self.call_pages))
        self.target = array("q", range(self.call_pages, 2 * self.call_pages))

    def prompts(self, num_bytes: int) -> list[list[StoredPage]]:
        """New prompts of a call's pages each."""
        return [self._prompt() for _ in range(num_bytes // self.page_bytes // self.call_pages)]

    def _prompt(self) -> list[StoredPage]:
        prompt: list[StoredPage] = []
        parent = None
        for _ in range(self.call_pages):
            tokens = self._random.randbytes(4 * PAGE_SIZE)
            key = sha256((parent or b"") + tokens).digest()
            prompt.append(StoredPage(key, parent, BASE, tokens))
            parent = key
        return prompt

    def put(self, storage: StorageBackend, prompts: Sequence[Sequence[StoredPage]]) -> float:
        """Bytes a second."""
        began = perf_counter()
        for prompt in prompts:
            assert storage.put(prompt, self.source).result() == len(prompt), storage.stats
        return self._rate(prompts, began)

    def get(self, storage: StorageBackend, prompts: Sequence[Sequence[StoredPage]]) -> float:
        """Bytes a second."""
        keys = [[page.key for page in prompt] for prompt in prompts]
        began = perf_counter()
        for one in keys:
            assert storage.get(one, self.target).result() == len(one), storage.stats
        return self._rate(prompts, began)

    def _rate(self, prompts: Sequence[Sequence[StoredPage]], began: float) -> float:
        return len(prompts) * self.call_pages * self.page_bytes / (perf_counter() - began)


# ----------------------------------------------------------------------------------------- files


def _files(page_bytes: int, options: Options) -> list[Figure]:
    pages = Pages(page_bytes)
    num_bytes = options.size(ROUND_BYTES, ROUND_BYTES // 2)
    found = {kind: Rates([], []) for kind in _WORDS}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        source = directory / "source"
        source.write_bytes(Random(2).randbytes(num_bytes))
        roomy = stack.enter_context(_file_storage(directory / "roomy", pages))
        full = stack.enter_context(
            _file_storage(directory / "full", pages, max_bytes=num_bytes + (num_bytes >> 2))
        )
        pages.put(full, pages.prompts(num_bytes))
        for number in range(options.rounds_or(ROUNDS)):
            prompts = pages.prompts(num_bytes)
            calls: list[tuple[str, Callable[[], float]]] = [
                ("put", lambda prompts=prompts: pages.put(roomy, prompts)),  # type: ignore[misc]
                ("get", lambda prompts=prompts: pages.get(roomy, prompts)),  # type: ignore[misc]
                ("full", lambda prompts=prompts: pages.put(full, prompts)),  # type: ignore[misc]
            ]
            for place, (kind, call) in enumerate(calls):
                ways = [(found[kind].ours, call), (found[kind].theirs, lambda: _copied(source))]
                for rates, way in ways[:: 1 - 2 * ((number + place) % 2)]:
                    _settle(source)
                    rates.append(way())
            roomy.delete([page.key for prompt in prompts for page in prompt]).result()
    return [
        rates.figure(
            f"P12.file.{kind}.{page_bytes >> 10}K",
            f"FileStorage: {_WORDS[kind]}, of {page_bytes >> 10:,} KiB",
            FILE_REACH,
            "a file's copy",
        )
        for kind, rates in found.items()
    ]


@contextmanager
def _file_storage(
    directory: Path, pages: Pages, max_bytes: int | None = None
) -> Iterator[FileStorage]:
    """With its folders there, as they are after the first pages."""
    for number in range(256):
        (directory / pages.form.fingerprint / f"{number:02x}").mkdir(parents=True)
    storage = FileStorage(directory, pages.form, max_bytes=max_bytes, min_free_bytes=0)
    try:
        storage.attach(pages.pool)
        yield storage
    finally:
        storage.close()


def _settle(source: Path) -> None:
    """Nothing is left to write, and memory that was in use a moment ago is free: a virtual machine may
    have to ask for any other.
    """
    os.sync()
    target = source.with_suffix(".settle")
    target.write_bytes(bytes(2 * source.stat().st_size))
    target.unlink()


def _copied(source: Path) -> float:
    """Bytes a second."""
    target = source.with_suffix(".copy")
    began = perf_counter()
    shutil.copyfile(source, target)
    rate = source.stat().st_size / (perf_counter() - began)
    target.unlink()
    return rate


# -------------------------------------------------------------------------------------- mooncake


_LEND = """
import sys
from mooncake.store import MooncakeDistributedStore
store, (address, segment) = MooncakeDistributedStore(), sys.argv[1:]
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(segment), 16 << 20, "tcp", "", address) == 0
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def _lender(address: str, num_bytes: int) -> Iterator[None]:
    """A process that lends memory and does nothing else."""
    command = [sys.executable, "-c", _LEND, address, str(num_bytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", "it joins"
            yield
        finally:
            process.kill()


class Bare:
    """Mooncake's own client."""

    def __init__(self, address: str, pages: Pages) -> None:
        self._pages = pages
        self._client = import_module("mooncake.store").MooncakeDistributedStore()
        joined = self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address)
        assert joined == 0, "the master lets it in"
        pool = pages.pool
        assert self._client.register_buffer(pool.address, pool.num_bytes) == 0

    def put(self, prompts: Sequence[Sequence[StoredPage]]) -> float:
        return self._all(self._client.batch_put_from, prompts, self._pages.source, 0)

    def get(self, prompts: Sequence[Sequence[StoredPage]]) -> float:
        pages = self._pages
        return self._all(self._client.batch_get_into, prompts, pages.target, pages.page_bytes)

    def _all(
        self,
        call: Callable[..., list[int]],
        prompts: Sequence[Sequence[StoredPage]],
        host_pages: array[int],
        fine: int,
    ) -> float:
        pages = self._pages
        names = [[f"bare-{page.key.hex()}" for page in prompt] for prompt in prompts]
        addresses = [pages.pool.address + at * pages.page_bytes for at in host_pages]
        sizes = [pages.page_bytes] * len(addresses)
        began = perf_counter()
        for one in names:
            codes = call(one, addresses, sizes)
            assert {*codes} == {fine}, codes
        return len(names) * len(sizes) * pages.page_bytes / (perf_counter() - began)

    def remove(self, prompts: Sequence[Sequence[StoredPage]]) -> None:
        names = [f"bare-{page.key.hex()}" for prompt in prompts for page in prompt]
        self._client.batch_remove(names, True)  # noqa: FBT003

    def close(self) -> None:
        self._client.unregister_buffer(self._pages.pool.address)
        self._client.close()


def _mooncake(options: Options) -> list[Figure]:
    from publisher.demo.mooncake import MasterError, master

    num_bytes = options.size(MOONCAKE_BYTES, MOONCAKE_BYTES // 4)
    try:
        with master() as address, _lender(address, 4 * num_bytes):
            versions = {"mooncake": version("mooncake-transfer-engine-non-cuda")}
            return [
                figure
                for page_bytes in MOONCAKE_PAGES
                for figure in _mooncake_pages(address, page_bytes, num_bytes, options, versions)
            ]
    except (MasterError, StorageError) as error:
        return [
            skipped(
                f"P12.mooncake.{kind}.{page_bytes >> 10}K",
                _mooncake_words(kind, page_bytes),
                reach=MOONCAKE_REACH,
                reason=str(error),
                peer="its client alone",
            )
            for page_bytes in MOONCAKE_PAGES
            for kind in ("put", "get")
        ]


def _mooncake_words(kind: str, page_bytes: int) -> str:
    return f"MooncakeStorage: {_WORDS[kind]}, of {page_bytes >> 10:,} KiB"


def _mooncake_pages(
    address: str, page_bytes: int, num_bytes: int, options: Options, versions: dict[str, str]
) -> list[Figure]:
    from hicache.storage.mooncake import MooncakeConfig, MooncakeStorage

    pages = Pages(page_bytes)
    found = {kind: Rates([], []) for kind in ("put", "get")}
    with ExitStack() as stack:
        config = MooncakeConfig("127.0.0.1", address, global_segment_size=0)
        storage = MooncakeStorage(config, pages.form)
        stack.callback(storage.close)
        storage.attach(pages.pool)
        bare = Bare(address, pages)
        stack.callback(bare.close)
        for number in range(options.rounds_or(ROUNDS) + 1):
            prompts = pages.prompts(num_bytes)
            calls: dict[str, list[Callable[[], float]]] = {
                "put": [
                    lambda prompts=prompts: pages.put(storage, prompts),  # type: ignore[misc]
                    lambda prompts=prompts: bare.put(prompts),  # type: ignore[misc]
                ],
                "get": [
                    lambda prompts=prompts: pages.get(storage, prompts),  # type: ignore[misc]
                    lambda prompts=prompts: bare.get(prompts),  # type: ignore[misc]
                ],
            }
            for kind, ways in calls.items():
                for place in ((0, 1), (1, 0))[number % 2]:
                    rate = ways[place]()
                    if number:  # the first round touches the memory
                        found[kind][place].append(rate)
            storage.delete([page.key for prompt in prompts for page in prompt]).result()
            bare.remove(prompts)
    return [
        rates.figure(
            f"P12.mooncake.{kind}.{page_bytes >> 10}K",
            _mooncake_words(kind, page_bytes),
            MOONCAKE_REACH,
            "its client alone",
            versions=versions,
        )
        for kind, rates in found.items()
    ]


def main() -> int:
    return run_alone(NAME, measure, __doc__)


if __name__ == "__main__":
    sys.exit(main())
