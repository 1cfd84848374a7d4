"""Stores under test: prompts' pages with bytes that can be told apart, and a rig for each back end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from typing import TypeAlias

import torch

from hicache.node import PageIndices
from hicache.pool import HostPool, KVShape
from hicache.storage.backend import StorageBackend, StoredPage
from hicache.storage.file import FileStorage
from hicache.storage.keys import PageFormat
from kvevents.hashing import block_digests, chain_seed, namespace_seed, page_key
from kvevents.namespace import BASE, Namespace
from kvevents.tokens import pack_tokens

__all__ = [
    "FORM",
    "NUM_PAGES",
    "STORAGE_RIGS",
    "TIMEOUT_S",
    "StorageRig",
    "content_of",
    "fill",
    "get",
    "pages_of",
    "put",
]

FORM = PageFormat("org/model@1", KVShape(2, 4, 64, torch.float16), page_size=4)
NUM_PAGES = 64
TIMEOUT_S = 30


class StorageRig:
    """One store that is opened and opened again, and the host pool it fills."""

    def __init__(self, make: Callable[[], StorageBackend], *, remembers: bool) -> None:
        self.pool = HostPool(NUM_PAGES, FORM.page_size, FORM.shape)
        self.make = make
        self.remembers = remembers
        """Whether `held` names what an earlier run has put."""
        self._opened: list[StorageBackend] = []

    def open(self) -> StorageBackend:
        """The store, after a restart when it was open before."""
        self.close()
        storage = self.make()
        self._opened.append(storage)
        storage.attach(self.pool)
        return storage

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


MakeRig: TypeAlias = "Callable[[Path], AbstractContextManager[StorageRig]]"


@contextmanager
def file_rig(path: Path) -> Iterator[StorageRig]:
    """A store of files below `path`."""
    rig = StorageRig(lambda: FileStorage(path / "pages", FORM, min_free_bytes=0), remembers=True)
    try:
        yield rig
    finally:
        rig.close()


STORAGE_RIGS: dict[str, MakeRig] = {"file": file_rig}
"""Every back end there is: one more line here puts another under the contract."""


def pages_of(tokens: Sequence[int], namespace: Namespace = BASE) -> list[StoredPage]:
    """The full pages of a prompt, as the cache names them."""
    packed, seed = pack_tokens(list(tokens)), namespace_seed(namespace)
    pages: list[StoredPage] = []
    parent: bytes | None = None
    for number, digest in enumerate(block_digests(chain_seed(namespace), packed, FORM.page_size)):
        size = FORM.page_size * 4
        key = page_key(digest, seed)
        part = packed[number * size : (number + 1) * size]
        pages.append(StoredPage(key, parent, namespace, part))
        parent = key
    return pages


def content_of(key: bytes) -> bytes:
    """The bytes of a page: none other has them, and the key is all it takes to know them."""
    return Random(hashlib.sha256(key).digest()).randbytes(FORM.bytes_per_page)


def fill(pool: HostPool, keys: Sequence[bytes]) -> PageIndices:
    """Host pages from 0 on with the bytes of `keys`."""
    for number, key in enumerate(keys):
        pool.page(number)[:] = content_of(key)
    return array("q", range(len(keys)))


def put(rig: StorageRig, storage: StorageBackend, pages: Sequence[StoredPage]) -> int:
    """Store pages from the rig's host pool and wait."""
    keys = [page.key for page in pages]
    return storage.put(pages, fill(rig.pool, keys)).result(TIMEOUT_S)


def get(rig: StorageRig, storage: StorageBackend, keys: Sequence[bytes]) -> int:
    """How many leading pages come back; those that do must be right to the byte (S2)."""
    for number in range(len(keys)):
        rig.pool.page(number)[:] = bytes(FORM.bytes_per_page)
    filled = storage.get(keys, array("q", range(len(keys)))).result(TIMEOUT_S)
    for number, key in enumerate(keys[:filled]):
        assert bytes(rig.pool.page(number)) == content_of(key), f"page {number}"
    return filled
