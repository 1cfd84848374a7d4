"""What the cache asks of a store of pages.

Calls return at once with a future that the cache looks at later; nothing in here makes the engine wait,
and no future raises: what goes wrong is a smaller number, and is counted in `stats`.

S1  A page is stored under a key that names its content (see `kvevents.hashing.page_key`) in a form that
    names model, layout, dtype, page size and rank: a page found is a page that fits.
S2  `get` fills a host page with exactly the bytes that were `put` under the key, or does not count it.
S3  A page that `put` counted is there until `delete`, or until `take_lost` names it, which may come
    before anybody looked at the future of the `put`. A store that cannot know what it loses says so with
    `audit_interval_s`, and finds out in `get` and `audit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hicache.node import PageIndices
from hicache.pool import HostPool
from hicache.tier import Tier
from kvevents.namespace import Namespace

__all__ = ["StorageBackend", "StorageError", "StorageStats", "StoredPage"]


class StorageError(ValueError):
    """A store that cannot be set up as asked. The message names the setting and the reason."""


class StoredPage(NamedTuple):
    """A page by what it is. `parent`: the key of the page before it, None at a prompt's start.

    `tokens`: its own, packed (see `kvevents.tokens`).
    """

    key: bytes
    parent: bytes | None
    namespace: Namespace
    tokens: bytes


@dataclass(slots=True)
class StorageStats:
    """Counts since the start, in pages unless they say otherwise."""

    written: int = 0
    """Put; a page that was there already does not count."""
    read: int = 0
    evicted: int = 0
    """Given up to stay within bounds."""
    lost: int = 0
    """Gone or unreadable, found out by looking."""
    rejected: int = 0
    """Torn or foreign, and removed."""
    failed_puts: int = 0
    failed_gets: int = 0
    """Believed stored, and not read."""
    last_error: str = field(default="")
    """Why the last failure was one."""


class StorageBackend(Protocol):
    """A store of pages. One cache uses it, from one thread."""

    @property
    def tier(self) -> Tier:
        """DISK or EXTERNAL."""

    @property
    def stats(self) -> StorageStats:
        """Counts; those of a thread still at work may lag."""

    @property
    def audit_interval_s(self) -> float | None:
        """How often the cache should `audit` what it believes stored; None: not needed."""

    def attach(self, pool: HostPool) -> None:
        """Called once, before all else: the pages that `put` and `get` name are this pool's.

        Raises StorageError for a pool of another shape, dtype or page size than the store is for, and
        when it has a pool already.
        """

    def held(self) -> list[StoredPage]:
        """What it has from an earlier run and can name in full, parents before children."""

    def exists_prefix(self, keys: Sequence[bytes]) -> Future[int]:
        """How many leading keys are stored. A hint: `get` may still fail."""

    def put(self, pages: Sequence[StoredPage], host_pages: PageIndices) -> Future[int]:
        """Store pages; how many leading ones are stored now. One that was there already counts.

        The host pages must not change until the future is done.
        """

    def get(self, keys: Sequence[bytes], host_pages: PageIndices) -> Future[int]:
        """Fill host pages; how many leading ones have their bytes now. The others' are undefined."""

    def delete(self, keys: Sequence[bytes]) -> Future[int]:
        """Remove pages; how many of them are not stored any more. Comes after every earlier `put`."""

    def clear(self) -> None:
        """Remove every page: none is found from now on, and no `put` of before stores one.

        Asked of a DISK store only; others' pages are in an external one.
        """

    def audit(self, keys: Sequence[bytes]) -> Future[int]:
        """Look whether pages are still there, and report those that are not as lost; how many."""

    def take_lost(self) -> list[bytes]:
        """Keys that are not stored any more, though nobody deleted them, since the last call."""

    def close(self) -> None:
        """Stop, bounded in time. Safe to call twice."""
