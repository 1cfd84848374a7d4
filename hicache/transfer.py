"""Copies between device and host pages, in the background.

X1  A copy begins no earlier than `start`, and after what the current stream was computing then: it reads
    KV that is written, and writes to pages that nobody reads any more.
X2  A job that says done has filled every page it was given; a job that failed may have filled some.
X3  Until a job is done or failed, its destination is being written.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, NamedTuple, Protocol

import torch

from hicache.background import BackgroundThread
from hicache.node import PageIndices
from hicache.pool import HostPool, PagePool
from hicache.tier import Tier

__all__ = ["CpuTransfers", "CudaTransfers", "TransferJob", "Transfers", "transfers_for"]

_LOOK_S = 20e-6
_CLOSE_TIMEOUT_S = 5.0
_LARGE_PAGE_BYTES = 1 << 16
_FEW_PIECES = 1 << 10
"""A plane's pages; to copy one takes the interpreter 0.2 µs."""


class TransferJob(Protocol):
    """One submitted copy."""

    def poll(self) -> bool | None:
        """True when done, False when failed, None while under way."""


class Transfers(Protocol):
    """The copier of one device pool and one host pool."""

    def submit(
        self, target: Tier, device_pages: PageIndices, host_pages: PageIndices
    ) -> TransferJob:
        """Copy to the pages of `target`, DEVICE or HOST, from as many of the other, in order."""

    def start(self) -> None:
        """Begin what was submitted, as one batch for each target."""

    def wait(self, jobs: Iterable[TransferJob], timeout_s: float) -> None:
        """Start, and return when all are done or failed, or after `timeout_s`."""

    def close(self) -> None:
        """End the copying; jobs not begun fail. Safe to call twice."""


def transfers_for(device_pool: PagePool, host_pool: HostPool) -> Transfers:
    """What fits the device of the pool."""
    if device_pool.device.type == "cuda":
        return CudaTransfers(device_pool, host_pool)
    return CpuTransfers(device_pool, host_pool)


class _Batch(NamedTuple):
    """Copies to the same target, joined."""

    device_pages: PageIndices
    host_pages: PageIndices


class _CpuJob:
    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def poll(self) -> bool | None:
        if not self.future.done():
            return None
        return not self.future.cancelled() and self.future.exception() is None


class CpuTransfers:
    """For a device pool in main memory: a thread copies, and torch's copies release the GIL.

    Batches of up to `at_once_bytes` are copied in `start`, in a tenth of a millisecond: beside an
    interpreter that is never idle the thread would wait longer than that for its turn, up to 5 ms. A few
    pieces are copied without torch, which lets go of the GIL too and shares the work with threads of its
    own, who may have to wait for a core.
    """

    def __init__(
        self, device_pool: PagePool, host_pool: HostPool, *, at_once_bytes: int = 1 << 20
    ) -> None:
        self._device, self._host = device_pool, host_pool
        self._planes, self._pages = as_words(device_pool.raw), as_words(host_pool.raw)
        self._at_once_pages = at_once_bytes // host_pool.bytes_per_page
        self._device_bytes, self._host_bytes = _bytes_of(device_pool.raw), _bytes_of(host_pool.raw)
        self._thread = BackgroundThread("kv-transfers")
        self._submitted: list[tuple[_CpuJob, Tier, _Batch]] = []
        self._closed = False

    def submit(
        self, target: Tier, device_pages: PageIndices, host_pages: PageIndices
    ) -> TransferJob:
        job = _CpuJob()
        self._submitted.append((job, target, _Batch(device_pages, host_pages)))
        return job

    def start(self) -> None:
        submitted, self._submitted = self._submitted, []
        for target in (Tier.HOST, Tier.DEVICE):
            jobs = [job for job, to, _ in submitted if to is target]
            if jobs:
                batch = _joined(batch for _, to, batch in submitted if to is target)
                num_pages = len(batch.host_pages)
                if num_pages <= self._at_once_pages and not self._closed:
                    few = num_pages * self._planes.shape[0] <= _FEW_PIECES
                    future = self._copy_now(self._copy_pieces if few else self._copy, target, batch)
                else:
                    future = self._thread.submit(self._copy, target, batch)
                for job in jobs:
                    job.future = future

    def wait(self, jobs: Iterable[TransferJob], timeout_s: float) -> None:
        self.start()
        futures = {job.future for job in jobs if isinstance(job, _CpuJob)}
        left = {one for one in futures if not one.done()}  # it waits for cancelled ones
        wait_for(left, min(timeout_s, threading.TIMEOUT_MAX))

    def close(self) -> None:
        self._closed = True
        for job, _, _ in self._submitted:
            job.future.cancel()
        self._submitted.clear()
        self._thread.close()

    def _copy_now(
        self, copy: Callable[[Tier, _Batch], None], target: Tier, batch: _Batch
    ) -> Future[None]:
        future: Future[None] = Future()
        try:
            copy(target, batch)
        except Exception as error:  # as in the thread, it is the job that fails
            future.set_exception(error)
        else:
            future.set_result(None)
        return future

    def _copy_pieces(self, target: Tier, batch: _Batch) -> None:
        """Each plane's part of each page."""
        num_planes, num_pages, size = self._device.raw.shape
        device, host = self._device_bytes, self._host_bytes
        step = num_planes * size
        for plane in range(num_planes):
            base, offset = plane * num_pages * size, plane * size
            for device_page, host_page in zip(batch.device_pages, batch.host_pages, strict=True):
                here, there = base + device_page * size, offset + host_page * step
                if target is Tier.HOST:
                    host[there : there + size] = device[here : here + size]
                else:
                    device[here : here + size] = host[there : there + size]

    def _copy(self, target: Tier, batch: _Batch) -> None:
        """Torch has the least to do per byte with large pages one by one, small ones all at once."""
        planes, pages = self._planes, self._pages
        if self._host.bytes_per_page >= _LARGE_PAGE_BYTES:
            for device, host in zip(batch.device_pages, batch.host_pages, strict=True):
                if target is Tier.HOST:
                    pages[host].copy_(planes[:, device])
                else:
                    planes[:, device].copy_(pages[host])
            return
        device_index = self._device.index(batch.device_pages)
        host_index = self._host.index(batch.host_pages)
        if target is Tier.HOST:
            moved = planes.index_select(1, device_index)
            pages.index_copy_(0, host_index, moved.transpose(0, 1))
        else:
            planes.index_copy_(1, device_index, pages.index_select(0, host_index).transpose(0, 1))


class _CudaJob:
    __slots__ = ("event", "failed")

    def __init__(self) -> None:
        self.event: Any = None
        self.failed = False

    def poll(self) -> bool | None:
        if self.failed:
            return False
        if self.event is None:
            return None
        try:
            return True if self.event.query() else None
        except RuntimeError:
            return False


class CudaTransfers:
    """For a CUDA device: a stream for each direction, pinned host pages.

    A batch's pages are gathered on the device into a buffer that has the host's layout, `chunk_pages`
    at a time, and each is copied from there as one run of bytes; the other way round alike. The copy
    engines move them while the compute stream goes on.
    """

    def __init__(
        self, device_pool: PagePool, host_pool: HostPool, *, chunk_pages: int = 32
    ) -> None:
        self._device = device_pool
        self._planes, self._pages = as_words(device_pool.raw), as_words(host_pool.raw)
        self._chunk = chunk_pages
        size = (chunk_pages, *self._pages.shape[1:])
        self._streams, self._staging = {}, {}
        for target in (Tier.HOST, Tier.DEVICE):
            stream = self._streams[target] = torch.cuda.Stream(device_pool.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                self._staging[target] = torch.empty(
                    size, dtype=self._pages.dtype, device=device_pool.device
                )
        self._submitted: list[tuple[_CudaJob, Tier, _Batch]] = []
        self._closed = False

    def submit(
        self, target: Tier, device_pages: PageIndices, host_pages: PageIndices
    ) -> TransferJob:
        job = _CudaJob()
        self._submitted.append((job, target, _Batch(device_pages, host_pages)))
        return job

    def start(self) -> None:
        submitted, self._submitted = self._submitted, []
        for target in (Tier.HOST, Tier.DEVICE):
            jobs = [job for job, to, _ in submitted if to is target]
            if jobs:
                batch = _joined(batch for _, to, batch in submitted if to is target)
                event = None if self._closed else self._launch(target, batch)
                for job in jobs:
                    job.event, job.failed = event, event is None

    def wait(self, jobs: Iterable[TransferJob], timeout_s: float) -> None:
        """The driver has no wait with a deadline, so this looks again and again."""
        self.start()
        deadline = time.monotonic() + timeout_s
        for job in jobs:
            while job.poll() is None and time.monotonic() < deadline:
                time.sleep(_LOOK_S)

    def close(self) -> None:
        self._closed = True
        self.start()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for stream in self._streams.values():
            with contextlib.suppress(RuntimeError):
                while not stream.query() and time.monotonic() < deadline:
                    time.sleep(_LOOK_S)

    def _launch(self, target: Tier, batch: _Batch) -> Any:
        """The event after the last copy; None when one could not be launched."""
        stream = self._streams[target]
        try:
            stream.wait_stream(torch.cuda.current_stream(self._device.device))  # X1
            with torch.cuda.stream(stream):
                index = self._index(batch.device_pages)
                for start in range(0, len(batch.host_pages), self._chunk):
                    stop = start + self._chunk
                    self._copy(target, index[start:stop], batch.host_pages[start:stop])
                return stream.record_event()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                stream.synchronize()  # X3: nothing is written any more
            return None

    def _index(self, pages: PageIndices) -> torch.Tensor:
        """On the device, in order with the copies. Pinned first: a copy from other memory would keep
        this thread until all that the stream waits for is done. Torch keeps the pinned memory as long.
        """
        if not pages:
            return self._device.index(pages)
        pinned = torch.frombuffer(pages, dtype=torch.int64).pin_memory()
        return pinned.to(self._device.device, non_blocking=True)

    def _copy(self, target: Tier, index: torch.Tensor, host_pages: PageIndices) -> None:
        staging = self._staging[target][: len(host_pages)]
        if target is Tier.HOST:
            gather(self._planes, index, staging)
            for place, page in enumerate(host_pages):
                self._pages[page].copy_(staging[place], non_blocking=True)
        else:
            for place, page in enumerate(host_pages):
                staging[place].copy_(self._pages[page], non_blocking=True)
            scatter(staging, index, self._planes)


def _bytes_of(raw: torch.Tensor) -> memoryview:
    """A tensor's memory, as long as that is there."""
    return memoryview((ctypes.c_char * raw.numel()).from_address(raw.data_ptr())).cast("B")


def as_words(raw: torch.Tensor) -> torch.Tensor:
    """The same bytes in the widest words that a plane's page is a multiple of: fewer to gather."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if raw.shape[-1] % dtype.itemsize == 0:
            return raw.view(dtype)
    return raw


def gather(planes: torch.Tensor, index: torch.Tensor, pages: torch.Tensor) -> None:
    """Fill `pages` (n, planes, words), laid out as the host's, from the rows `index` of each plane."""
    pages.copy_(planes.index_select(1, index).transpose(0, 1))


def scatter(pages: torch.Tensor, index: torch.Tensor, planes: torch.Tensor) -> None:
    """The way back."""
    planes.index_copy_(1, index, pages.transpose(0, 1))


def _joined(batches: Iterable[_Batch]) -> _Batch:
    device, host = array("q"), array("q")
    for batch in batches:
        device += batch.device_pages
        host += batch.host_pages
    return _Batch(device, host)
