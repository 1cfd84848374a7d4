"""What every copier between device and host pages must do; see `hicache.transfer`.

On a GPU, what is done late is held back by a kernel that only waits, so that nothing hangs on how fast a
copy is: while that kernel runs, no copy behind it can be done.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch

from hicache import HiCacheConfig, HiRadixCache, HostPool, KVShape, MLAShape, PagePool, Tier
from hicache.node import PageIndices
from hicache.pool import Shape
from hicache.transfer import (
    CpuTransfers,
    CudaTransfers,
    TransferJob,
    Transfers,
    as_words,
    gather,
    scatter,
    transfers_for,
)
from kvevents import BlockStored, StorageMedium

NUM_PAGES = 12
NUM_HOST_PAGES = 20
PAGE_SIZE = 3
TIMEOUT_S = 30.0
SHAPES: list[Shape] = [
    shape
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
    for shape in (KVShape(2, 3, 5, dtype), MLAShape(3, 7, dtype))
]
HELD_CYCLES = 500_000_000
"""A quarter of a second or more."""


class Rig:
    """Two pools of bytes that can be told apart, and a copier between them."""

    def __init__(self, device: str, shape: Shape) -> None:
        self.pool = PagePool(NUM_PAGES, PAGE_SIZE, shape, device=device)
        self.host = HostPool(NUM_HOST_PAGES, PAGE_SIZE, shape)
        self.transfers: Transfers
        if device == "cuda":  # a batch is more than one chunk
            self.transfers = CudaTransfers(self.pool, self.host, chunk_pages=3)
        else:
            self.transfers = CpuTransfers(self.pool, self.host)
        generator = torch.Generator().manual_seed(1)
        for raw in [*self.pool.raw, self.host.raw]:
            raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))

    def device_pages(self) -> list[bytes]:
        """The bytes of each device page, its planes one after the other."""
        planes = torch.stack([raw.cpu() for raw in self.pool.raw], dim=1)
        return [bytes(array("B", page.flatten().tolist())) for page in planes]

    def host_pages(self) -> list[bytes]:
        """The bytes of each host page."""
        return [bytes(self.host.page(page)) for page in range(NUM_HOST_PAGES)]

    def submit(self, target: Tier, device: Sequence[int], host: Sequence[int]) -> TransferJob:
        return self.transfers.submit(target, array("q", device), array("q", host))

    def finish(self, *jobs: TransferJob) -> None:
        """Wait until all are done."""
        self.transfers.wait(jobs, TIMEOUT_S)
        assert [job.poll() for job in jobs] == [True] * len(jobs)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Each copier in turn, over bf16."""
    rig = Rig(request.param, KVShape(2, 3, 5))
    yield rig
    rig.transfers.close()


# ------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{type(shape).__name__}-{shape.dtype}")
@pytest.mark.parametrize("device", DEVICES)
def test_a_page_is_the_same_bytes_on_both_sides(device: str, shape: Shape) -> None:
    """To the host and to the device, in any layout and dtype; no other page changes (X2)."""
    rig = Rig(device, shape)
    try:
        on_device, on_host = rig.device_pages(), rig.host_pages()
        to_host = array("q", [11, 0, 5, 4, 7]), array("q", [2, 19, 0, 8, 3])
        to_device = array("q", [3, 9, 1, 2]), array("q", [10, 18, 1, 4])
        rig.finish(
            rig.transfers.submit(Tier.HOST, *to_host),
            rig.transfers.submit(Tier.DEVICE, *to_device),
        )
        assert rig.host_pages() == replaced(on_host, to_host[1], on_device, to_host[0])
        assert rig.device_pages() == replaced(on_device, to_device[0], on_host, to_device[1])
    finally:
        rig.transfers.close()


def replaced(
    pages: list[bytes], at: PageIndices, others: list[bytes], source: PageIndices
) -> list[bytes]:
    """`pages`, those `at` replaced by the `source` of `others`."""
    found = list(pages)
    for page, other in zip(at, source, strict=True):
        found[page] = others[other]
    return found


def test_a_batch_is_many_jobs(rig: Rig) -> None:
    """Jobs in both directions that are started together are all done, each with its own pages."""
    on_device, on_host = rig.device_pages(), rig.host_pages()
    jobs = [rig.submit(Tier.HOST, [page], [2 * page]) for page in (6, 0, 3)]
    jobs += [rig.submit(Tier.DEVICE, [page, page + 1], [page, page + 4]) for page in (9, 7)]
    rig.finish(*jobs)
    assert [rig.host_pages()[page] for page in (12, 0, 6)] == [on_device[i] for i in (6, 0, 3)]
    assert rig.device_pages()[7:11] == [on_host[i] for i in (7, 11, 9, 13)]


def test_a_batch_may_be_all_pages(rig: Rig) -> None:
    """Every page of the device goes, scattered, and comes back to where it was."""
    on_device = rig.device_pages()
    device = array("q", [5, 1, 9, 0, 11, 3, 7, 2, 8, 4, 10, 6])
    host = array("q", range(NUM_HOST_PAGES - 1, NUM_HOST_PAGES - 1 - NUM_PAGES, -1))
    rig.finish(rig.transfers.submit(Tier.HOST, device, host))
    for raw in rig.pool.raw:
        raw.zero_()
    rig.finish(rig.transfers.submit(Tier.DEVICE, device, host))
    assert rig.device_pages() == on_device


@pytest.mark.parametrize("target", [Tier.HOST, Tier.DEVICE])
def test_a_source_may_be_read_twice(rig: Rig, target: Tier) -> None:
    """The same page can go to several places, in one job and in several."""
    device, host = ([4] * 4, [1, 2, 3, 4]) if target is Tier.HOST else ([1, 2, 3, 4], [4] * 4)
    sources = rig.device_pages() if target is Tier.HOST else rig.host_pages()
    rig.finish(
        rig.submit(target, device[:3], host[:3]),
        rig.submit(target, device[3:], host[3:]),
    )
    filled = rig.host_pages() if target is Tier.HOST else rig.device_pages()
    assert filled[1:5] == [sources[4]] * 4


@pytest.mark.parametrize("target", [Tier.HOST, Tier.DEVICE])
def test_no_pages_are_done(rig: Rig, target: Tier) -> None:
    """An empty job is done like any other, alone or in a batch."""
    before = rig.device_pages(), rig.host_pages()
    rig.finish(rig.submit(target, [], []))
    assert (rig.device_pages(), rig.host_pages()) == before
    rig.finish(rig.submit(target, [], []), rig.submit(target, [1], [1]))
    assert rig.device_pages()[1] == rig.host_pages()[1]


def test_nothing_begins_before_start(rig: Rig) -> None:
    """X1: what is in the source at `start` is copied, not what was there at `submit`."""
    before = rig.host_pages()
    job = rig.submit(Tier.HOST, [4], [7])
    assert job.poll() is None
    assert rig.host_pages() == before
    for raw in rig.pool.raw:
        raw[4] = 200
    rig.finish(job)
    assert set(rig.host_pages()[7]) == {200}


def test_start_with_nothing_to_do(rig: Rig) -> None:
    """Starting again, with nothing new, does nothing; what is done stays done."""
    rig.transfers.start()
    job = rig.submit(Tier.HOST, [4], [7])
    rig.finish(job)
    for raw in rig.pool.raw:
        raw[4] = 200
    rig.transfers.start()
    rig.transfers.wait([job], TIMEOUT_S)
    assert job.poll() is True
    assert set(rig.host_pages()[7]) != {200}


def test_waiting_for_nothing(rig: Rig) -> None:
    """No jobs are no wait, and those submitted are begun all the same."""
    job = rig.submit(Tier.HOST, [4], [7])
    rig.transfers.wait([], TIMEOUT_S)
    rig.finish(job)


def test_the_pages_given_are_only_read_at_submit(rig: Rig) -> None:
    """What the caller does to its arrays after `start` changes nothing."""
    on_device = rig.device_pages()
    device, host = array("q", [4, 5]), array("q", [7, 8])
    job = rig.transfers.submit(Tier.HOST, device, host)
    rig.transfers.start()
    device[:], host[:] = array("q", [0, 0]), array("q", [1, 1])
    device.extend(host)
    rig.finish(job)
    assert rig.host_pages()[7:9] == on_device[4:6]


def test_close_fails_what_was_not_begun(rig: Rig) -> None:
    """Such a job fails and its pages stay as they were; what is submitted later fails too, at once."""
    before = rig.host_pages()
    done = rig.submit(Tier.HOST, [0], [0])
    rig.finish(done)
    before[0] = rig.host_pages()[0]
    waiting = rig.submit(Tier.HOST, [1], [1])
    rig.transfers.close()
    assert waiting.poll() is False
    assert done.poll() is True
    late = rig.submit(Tier.HOST, [2], [2])
    began = time.monotonic()
    rig.transfers.wait([waiting, late], TIMEOUT_S)
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert late.poll() is False
    assert rig.host_pages() == before
    rig.transfers.close()


def test_close_ends_what_was_begun(rig: Rig) -> None:
    """After it no job is under way, and whatever says done is."""
    on_device = rig.device_pages()
    jobs = []
    for page in range(NUM_PAGES):
        jobs.append(rig.submit(Tier.HOST, [page], [page]))
        rig.transfers.start()
    rig.transfers.close()
    outcomes = [job.poll() for job in jobs]
    assert None not in outcomes
    for page, done in enumerate(outcomes):
        assert not done or rig.host_pages()[page] == on_device[page]


def test_a_device_has_its_copier() -> None:
    """A pool in main memory gets the thread."""
    pool = PagePool(2, PAGE_SIZE, SHAPES[0])
    transfers = transfers_for(pool, HostPool(2, PAGE_SIZE, SHAPES[0]))
    assert isinstance(transfers, CpuTransfers)
    transfers.close()


# ---------------------------------------------------------------------------------- in main memory


class HeldPool(PagePool):
    """A pool whose copies do not go on before they are let go."""

    def __init__(self) -> None:
        super().__init__(NUM_PAGES, PAGE_SIZE, KVShape(2, 3, 5))
        self.let_go = threading.Event()
        self.reached = threading.Event()

    def index(self, pages: PageIndices) -> torch.Tensor:
        self.reached.set()
        assert self.let_go.wait(TIMEOUT_S)
        return super().index(pages)


@pytest.fixture
def held() -> Iterator[tuple[HeldPool, HostPool, CpuTransfers]]:
    """A copier whose copies are held back."""
    pool = HeldPool()
    host = HostPool(NUM_HOST_PAGES, PAGE_SIZE, pool.shape)
    transfers = CpuTransfers(pool, host, at_once_bytes=0)
    yield pool, host, transfers
    pool.let_go.set()
    transfers.close()


def test_start_does_not_wait_for_the_copy(held: tuple[HeldPool, HostPool, CpuTransfers]) -> None:
    """A copy runs beside the engine: `start` returns, the job is under way, and ends later."""
    pool, _, transfers = held
    job = transfers.submit(Tier.HOST, array("q", [1]), array("q", [1]))
    transfers.start()
    assert pool.reached.wait(TIMEOUT_S)
    assert job.poll() is None
    pool.let_go.set()
    transfers.wait([job], TIMEOUT_S)
    assert job.poll() is True


def test_a_small_batch_is_copied_at_once() -> None:
    """Up to `at_once_bytes` a batch is there when `start` returns; one of more is left to the thread."""
    pool = HeldPool()
    host = HostPool(NUM_HOST_PAGES, PAGE_SIZE, pool.shape)
    transfers = CpuTransfers(pool, host, at_once_bytes=2 * host.bytes_per_page)
    job = transfers.submit(Tier.HOST, array("q", [1, 2, 3]), array("q", [1, 2, 3]))
    transfers.start()
    assert job.poll() is None
    pool.let_go.set()
    small = transfers.submit(Tier.HOST, array("q", [4, 5]), array("q", [4, 5]))
    transfers.start()
    assert small.poll() is True
    transfers.wait([job], TIMEOUT_S)
    transfers.close()


def test_large_pages_are_the_same_bytes_on_both_sides() -> None:
    """Pages that are copied one by one, in both directions."""
    rig = Rig("cpu", KVShape(2, 40, 128))
    assert rig.host.bytes_per_page > 1 << 16
    on_device, on_host = rig.device_pages(), rig.host_pages()
    rig.finish(rig.submit(Tier.HOST, [11, 0], [2, 19]), rig.submit(Tier.DEVICE, [3, 9], [10, 18]))
    assert [rig.host_pages()[page] for page in (2, 19)] == [on_device[11], on_device[0]]
    assert [rig.device_pages()[page] for page in (3, 9)] == [on_host[10], on_host[18]]
    rig.transfers.close()


def test_waiting_ends_at_its_deadline(held: tuple[HeldPool, HostPool, CpuTransfers]) -> None:
    """A copy that is not done by then is still under way."""
    _, _, transfers = held
    job = transfers.submit(Tier.HOST, array("q", [1]), array("q", [1]))
    transfers.wait([job], 0.01)
    assert job.poll() is None


def test_waiting_may_have_no_end(held: tuple[HeldPool, HostPool, CpuTransfers]) -> None:
    """However long the patience, it waits until the copy is done."""
    pool, _, transfers = held
    job = transfers.submit(Tier.HOST, array("q", [1]), array("q", [1]))
    transfers.start()
    assert pool.reached.wait(TIMEOUT_S)
    late = threading.Timer(0.02, pool.let_go.set)
    late.start()
    transfers.wait([job], float("inf"))
    late.join()
    assert job.poll() is True


def test_a_copy_that_cannot_be_done_fails() -> None:
    """A foreign page fails its batch; the next one is fine. (On a GPU it would end the process.)"""
    rig = Rig("cpu", KVShape(2, 3, 5))
    bad = rig.submit(Tier.HOST, [NUM_PAGES], [0])
    also = rig.submit(Tier.HOST, [0], [1])
    rig.transfers.wait([bad, also], TIMEOUT_S)
    assert (bad.poll(), also.poll()) == (False, False)
    rig.finish(rig.submit(Tier.HOST, [0], [1]))
    rig.transfers.close()


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.fixture
def cuda() -> Iterator[Rig]:
    """The CUDA copier, warm: its first launches load kernels and pin memory, which waits."""
    rig = Rig("cuda", KVShape(2, 3, 5))
    pages = array("q", range(NUM_PAGES))
    rig.finish(
        rig.transfers.submit(Tier.HOST, pages, pages),
        rig.transfers.submit(Tier.DEVICE, pages, pages),
    )
    compute(1000)
    torch.cuda.synchronize()
    yield rig
    torch.cuda.synchronize()
    rig.transfers.close()


def compute(cycles: int = HELD_CYCLES) -> None:
    """Keep the compute stream, and none of the others, busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def busy() -> bool:
    """Whether the compute stream still has work, so that what waits for it cannot be done."""
    return not torch.cuda.current_stream().query()


@pytest.mark.gpu
@pytest.mark.parametrize("target", [Tier.HOST, Tier.DEVICE])
def test_a_copy_waits_for_the_compute_stream_and_the_engine_does_not(
    cuda: Rig, target: Tier
) -> None:
    """X1: behind a long kernel nothing is copied, while `start` returns; no job is done before its
    copies are (X2)."""
    job = cuda.submit(target, [1, 2, 3, 4], [1, 3, 5, 7])
    before = cuda.host_pages()
    compute()
    cuda.transfers.start()
    early, unchanged = job.poll(), cuda.host_pages() == before
    assert busy(), "start() waited for the compute stream"
    assert early is None
    assert unchanged
    cuda.finish(job)
    on_device, on_host = cuda.device_pages(), cuda.host_pages()
    assert on_device[1:5] == [on_host[page] for page in (1, 3, 5, 7)]


@pytest.mark.gpu
def test_kv_that_is_still_being_computed_is_what_is_copied(cuda: Rig) -> None:
    """X1: KV that a kernel writes after a long one, and before `start`, reaches the host."""
    compute()
    for raw in cuda.pool.raw:
        raw[4:6].fill_(201)
    job = cuda.submit(Tier.HOST, [4, 5], [9, 2])
    cuda.transfers.start()
    assert busy(), "the kernels were done before there was anything to wait for"
    cuda.finish(job)
    assert {*cuda.host_pages()[9], *cuda.host_pages()[2]} == {201}


@pytest.mark.gpu
def test_a_page_that_is_still_being_read_is_not_overwritten(cuda: Rig) -> None:
    """X1: what a kernel behind a long one reads of a page is what was there before the load."""
    expected = [raw[6].clone() for raw in cuda.pool.raw]
    cuda.host.page(0)[:] = bytes([77]) * cuda.host.bytes_per_page
    compute()
    read = [raw[6].clone() for raw in cuda.pool.raw]
    job = cuda.submit(Tier.DEVICE, [6], [0])
    cuda.transfers.start()
    assert busy(), "the kernels were done before there was anything to wait for"
    cuda.finish(job)
    assert all(torch.equal(*pair) for pair in zip(read, expected, strict=True))
    assert set(cuda.device_pages()[6]) == {77}


@pytest.mark.gpu
def test_what_is_computed_after_start_is_not_waited_for(cuda: Rig) -> None:
    """A copy that was started is done though the compute stream is busy with what came later."""
    job = cuda.submit(Tier.HOST, [1, 2, 3, 4], [1, 3, 5, 7])
    cuda.transfers.start()
    compute(4 * HELD_CYCLES)
    cuda.transfers.wait([job], TIMEOUT_S)
    assert busy(), "the copy took as long as the kernel"
    assert job.poll() is True


@pytest.mark.gpu
def test_waiting_for_the_device_ends_at_its_deadline(cuda: Rig) -> None:
    """A copy that is held back is still under way then."""
    compute()
    job = cuda.submit(Tier.HOST, [1], [1])
    cuda.transfers.wait([job], 0.01)
    early = job.poll()
    assert busy(), "the kernel was done before the deadline"
    assert early is None
    cuda.finish(job)


@pytest.mark.gpu
def test_no_event_comes_before_its_copy(cuda: Rig) -> None:
    """S(CPU_PINNED) and S(GPU) are recorded once the copy's CUDA event is complete, and not before."""
    cache = HiRadixCache(
        cuda.pool,
        host_pool=cuda.host,
        transfers=cuda.transfers,
        config=HiCacheConfig(load_back_threshold=0),
    )
    tokens, pages = list(range(4 * PAGE_SIZE)), cache.allocate(4)
    assert pages is not None
    cache.insert(tokens, pages)
    assert stored_on(cache) == {StorageMedium.GPU: 4}
    compute()
    for _ in range(3):
        cache.tick()
    early = stored_on(cache)
    assert busy(), "the kernel was done before there was anything to wait for"
    assert early == {}
    assert cache.settle(TIMEOUT_S)
    assert stored_on(cache) == {StorageMedium.CPU: 4}

    cache.reset_device()
    assert stored_on(cache) == {}
    node = cache.match_prefix(tokens).host_node
    cache.lock(node)
    compute()
    flight = cache.load_back(node)
    for _ in range(3):
        cache.tick()
    early = stored_on(cache)
    assert busy(), "the kernel was done before there was anything to wait for"
    assert early == {}
    assert flight is not None and not flight.done
    assert cache.settle(TIMEOUT_S)
    assert stored_on(cache) == {StorageMedium.GPU: 4}
    cache.unlock(node)


def stored_on(cache: HiRadixCache) -> Counter[StorageMedium]:
    """How many blocks the events since the last look store, by medium."""
    stored: Counter[StorageMedium] = Counter()
    for event in cache.take_events():
        if isinstance(event, BlockStored):
            assert event.medium is not None
            stored[event.medium] += len(event.block_hashes)
    return stored


@pytest.mark.gpu
@pytest.mark.parametrize("target", [Tier.HOST, Tier.DEVICE])
def test_copies_overlap_with_compute(target: Tier) -> None:
    """Both together take well under the sum of each alone, from the first to the last of it."""
    shape = KVShape(num_layers=4, num_kv_heads=8, head_dim=128)
    pool = PagePool(128, 256, shape, device="cuda")  # 4 MiB a page, so that launches are few
    host = HostPool(128, 256, shape)
    transfers = CudaTransfers(pool, host)
    pages = array("q", range(128))

    def took_ms(cycles: int, *, copies: bool) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        jobs = [transfers.submit(target, pages, pages)] if copies else []
        transfers.start()
        if cycles:
            compute(cycles)
        torch.cuda.synchronize()
        took_s = time.perf_counter() - began
        assert all(job.poll() is True for job in jobs)
        return took_s * 1000

    took_ms(1000, copies=True)  # warm
    copies_ms = took_ms(0, copies=True)
    cycles = int(10_000_000 * copies_ms / took_ms(10_000_000, copies=False))
    compute_ms = took_ms(cycles, copies=False)
    both_ms = took_ms(cycles, copies=True)
    transfers.close()
    assert both_ms < 0.8 * (copies_ms + compute_ms), (both_ms, copies_ms, compute_ms)


@pytest.mark.gpu
def test_a_cuda_pool_has_its_copier(cuda: Rig) -> None:
    """A pool on a GPU gets the streams."""
    transfers = transfers_for(cuda.pool, cuda.host)
    assert isinstance(transfers, CudaTransfers)
    transfers.close()


@pytest.mark.parametrize(
    "shape",
    [
        KVShape(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.bfloat16),
        MLAShape(num_layers=2, latent_dim=3, dtype=torch.uint8),
    ],
)
def test_gathered_pages_have_the_hosts_layout(shape: Shape) -> None:
    """What the CUDA path gathers on the device is the host's page, byte for byte, and goes back to the
    same places; here on CPU tensors.
    """
    pool, host = PagePool(7, 5, shape), HostPool(4, 5, shape)
    pool.raw.random_(0, 256)
    before, chosen = pool.raw.clone(), array("q", [3, 0, 6])
    planes, pages = as_words(pool.raw), as_words(host.raw)
    gather(planes, pool.index(chosen), pages[:3])
    for place, page in enumerate(chosen):
        assert bytes(host.page(place)) == b"".join(bytes(raw[page].tolist()) for raw in before)
    pool.raw.zero_()
    scatter(pages[:3], pool.index(chosen), planes)
    for page in range(7):
        expected = before[:, page] if page in chosen else torch.zeros_like(before[:, page])
        assert torch.equal(pool.raw[:, page], expected)
