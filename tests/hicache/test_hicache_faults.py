"""What is late is done late, what fails does half, and what never ends ends when it is released."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from storage_rig import FORM, TIMEOUT_S, StorageRig, content_of, fill, pages_of

from hicache import HostPool, KVShape, PagePool, Tier
from hicache.faults import Fault, FaultyStorage, FaultyTransfers
from hicache.node import PageIndices
from hicache.storage.file import FileStorage
from hicache.transfer import CpuTransfers, TransferJob

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=4, dtype=torch.uint8)
PAGES = array("q", [0, 1, 2, 3])
PROMPT = pages_of(range(16))
KEYS = [page.key for page in PROMPT]


class Plan:
    """The faults of the calls to come, and the names of those that were."""

    def __init__(self) -> None:
        self.next = Fault()
        self.asked: list[str] = []

    def __call__(self, name: str) -> Fault:
        self.asked.append(name)
        return self.next


@pytest.fixture
def plan() -> Plan:
    """No faults, unless a test says so."""
    return Plan()


# ------------------------------------------------------------------------------------------- copies


class Copies:
    """Two pools whose pages are full of their own number, plus 100 on the host."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pool, self.host = PagePool(4, 1, SHAPE), HostPool(4, 1, SHAPE)
        for page in PAGES:
            for raw in self.pool.raw:
                raw[page] = page
            self.host.raw[page] = 100 + page
        self.inner = CpuTransfers(self.pool, self.host)
        self.transfers = FaultyTransfers(self.inner, plan)

    def submit(self, target: Tier, fault: Fault) -> TransferJob:
        """All pages, in order."""
        self.plan.next = fault
        return self.transfers.submit(target, PAGES[:], PAGES[:])

    def tick(self) -> None:
        """Start, and let what was begun end: the copier does one thing after the other."""
        self.transfers.start()
        self.inner.wait([self.inner.submit(Tier.HOST, array("q"), array("q"))], TIMEOUT_S)

    def on_host(self) -> list[int]:
        return [self.host.page(page)[0] for page in PAGES]

    def on_device(self) -> list[int]:
        return [int(self.pool.raw[0][page, 0]) for page in PAGES]


@pytest.fixture
def copies(plan: Plan) -> Iterator[Copies]:
    """Pools and a copier."""
    copies = Copies(plan)
    yield copies
    copies.transfers.close()


def test_without_a_fault_a_copy_is_a_copy(copies: Copies, plan: Plan) -> None:
    """Both ways; the plan was asked once for each, by name."""
    job = copies.submit(Tier.HOST, Fault())
    assert job.poll() is None
    copies.transfers.wait([job], TIMEOUT_S)
    assert job.poll() is True
    assert copies.on_host() == [0, 1, 2, 3]
    copies.host.raw[2] = 50
    job = copies.submit(Tier.DEVICE, Fault())
    copies.tick()
    assert job.poll() is True
    assert copies.on_device() == [0, 1, 50, 3]
    assert plan.asked == ["to_host", "to_device"]


@pytest.mark.parametrize("delay", [1, 3])
def test_a_late_copy_is_put_off(copies: Copies, delay: int) -> None:
    """It begins after so many ticks more, and one that is not late overtakes it."""
    late = copies.submit(Tier.HOST, Fault(delay=delay))
    prompt = copies.submit(Tier.DEVICE, Fault())
    for _ in range(delay):
        copies.tick()
        assert (prompt.poll(), late.poll()) == (True, None)
        assert copies.on_host() == [100, 101, 102, 103]
    copies.tick()
    assert late.poll() is True


def test_a_late_copy_reads_late(copies: Copies) -> None:
    """What is in the source when the delay is over is what arrives."""
    job = copies.submit(Tier.HOST, Fault(delay=1))
    copies.tick()
    copies.pool.raw[0][3] = 77
    copies.tick()
    assert job.poll() is True
    assert copies.on_host() == [0, 1, 2, 77]


def test_a_failing_copy_does_half(copies: Copies) -> None:
    """Its first half arrives, and it says that it failed."""
    job = copies.submit(Tier.HOST, Fault(fails=True))
    copies.tick()
    assert job.poll() is False
    assert copies.on_host() == [0, 1, 102, 103]


def test_a_copy_that_never_ends_ends_when_released(copies: Copies) -> None:
    """No tick and no wait touches it; released, it does its work."""
    job = copies.submit(Tier.HOST, Fault(never=True))
    for _ in range(10):
        copies.tick()
    copies.transfers.wait([job], TIMEOUT_S)
    assert job.poll() is None
    assert copies.on_host() == [100, 101, 102, 103]
    copies.transfers.release()
    copies.tick()
    assert job.poll() is True
    assert copies.on_host() == [0, 1, 2, 3]


def test_waiting_makes_what_is_late_be_done_now(copies: Copies) -> None:
    """Of the jobs waited for alone."""
    waited, other = (
        copies.submit(Tier.HOST, Fault(delay=5)),
        copies.submit(Tier.HOST, Fault(delay=5)),
    )
    copies.transfers.wait([waited], TIMEOUT_S)
    assert waited.poll() is True
    assert other.poll() is None


# ------------------------------------------------------------------------------------------ storage

Call: TypeAlias = "Callable[[FaultyStorage, PageIndices], Future[int]]"
CALLS: dict[str, Call] = {
    "exists_prefix": lambda storage, _: storage.exists_prefix(KEYS),
    "get": lambda storage, pages: storage.get(KEYS, pages),
    "put": lambda storage, pages: storage.put(PROMPT, pages),
}


@pytest.fixture
def stored(plan: Plan, tmp_path: Path) -> Iterator[tuple[FaultyStorage, StorageRig]]:
    """A store of files that has the prompt, and a host pool that does not."""
    files = FileStorage(tmp_path, FORM, min_free_bytes=0)
    rig = StorageRig(lambda: files, remembers=True)
    storage = FaultyStorage(rig.open(), plan)
    assert files.put(PROMPT, fill(rig.pool, KEYS)).result(TIMEOUT_S) == len(KEYS)
    rig.pool.raw.zero_()
    yield storage, rig
    storage.close()


def barrier(storage: FaultyStorage) -> None:
    """What was begun so far has ended: the store does one thing after the other."""
    for call in (storage.audit([]), storage._inner.exists_prefix([])):
        call.result(TIMEOUT_S)


@pytest.mark.integration
@pytest.mark.parametrize("name", CALLS)
def test_without_a_fault_a_call_is_a_call(
    stored: tuple[FaultyStorage, StorageRig], plan: Plan, name: str
) -> None:
    """At once, with no tick; the plan was asked once, by name."""
    storage, _ = stored
    assert CALLS[name](storage, PAGES).result(TIMEOUT_S) == len(KEYS)
    assert plan.asked == [name]


@pytest.mark.integration
@pytest.mark.parametrize("name", CALLS)
def test_a_late_call_begins_late(
    stored: tuple[FaultyStorage, StorageRig], plan: Plan, name: str
) -> None:
    """After so many ticks, and not before."""
    storage, _ = stored
    plan.next = Fault(delay=2)
    late = CALLS[name](storage, PAGES)
    for _ in range(2):
        barrier(storage)
        assert not late.done()
        storage.take_lost()
    storage.take_lost()
    assert late.result(TIMEOUT_S) == len(KEYS)


@pytest.mark.integration
@pytest.mark.parametrize("name", CALLS)
def test_a_failing_call_does_half(
    stored: tuple[FaultyStorage, StorageRig], plan: Plan, name: str
) -> None:
    """And says so."""
    storage, rig = stored
    plan.next = Fault(fails=True)
    assert CALLS[name](storage, PAGES).result(TIMEOUT_S) == len(KEYS) // 2
    if name == "get":
        assert [bytes(rig.pool.page(i)) for i in (0, 1)] == [content_of(key) for key in KEYS[:2]]
        assert not rig.pool.raw[2:].any()


@pytest.mark.integration
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_never_ends_ends_when_released(
    stored: tuple[FaultyStorage, StorageRig], plan: Plan, name: str
) -> None:
    """Ticks do not touch it; released, it does its work."""
    storage, _ = stored
    plan.next = Fault(never=True)
    call = CALLS[name](storage, PAGES)
    for _ in range(10):
        storage.take_lost()
    barrier(storage)
    assert not call.done()
    storage.release()
    assert call.result(TIMEOUT_S) == len(KEYS)


@pytest.mark.integration
def test_a_late_put_reads_late_and_a_delete_comes_after_it(
    stored: tuple[FaultyStorage, StorageRig], plan: Plan
) -> None:
    """What is in the host pages when the delay is over is stored; a delete waits for no tick."""
    storage, rig = stored
    others = pages_of(range(100, 116))
    plan.next = Fault(delay=100)
    put = storage.put(others, PAGES)
    fill(rig.pool, [page.key for page in others])
    assert storage.delete([others[-1].key]).result(TIMEOUT_S) == 1
    assert put.result(TIMEOUT_S) == len(others)
    plan.next = Fault()
    keys = [page.key for page in others]
    rig.pool.raw.zero_()
    assert storage.get(keys, PAGES).result(TIMEOUT_S) == len(others) - 1
    assert [bytes(rig.pool.page(i)) for i in range(3)] == [content_of(key) for key in keys[:3]]


@pytest.mark.integration
def test_the_rest_is_the_store_s(stored: tuple[FaultyStorage, StorageRig], plan: Plan) -> None:
    """What it holds, counts, lost, audits and on which tier it is, whatever the plan says."""
    storage, _ = stored
    plan.next = Fault(never=True)
    inner = storage._inner
    assert storage.held() == inner.held() != []
    assert (storage.tier, storage.stats) == (Tier.DISK, inner.stats)
    assert storage.audit_interval_s == inner.audit_interval_s
    assert storage.audit(KEYS).result(TIMEOUT_S) == 0
    assert storage.take_lost() == []
    assert storage.delete(KEYS).result(TIMEOUT_S) == len(KEYS)
    assert plan.asked == []
