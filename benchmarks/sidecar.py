"""What troubles a sidecar costs: those who receive its batches, its memory, and its worker's thread.

A cache of 200,000 blocks is full; a step puts one block in, which takes another out, and is handed over.
The live latency is from there to a subscriber in the worker's process. Steps keep their times whether
or not earlier batches have come, so that a batch held up holds up those after it, as it would in earnest.
Each trouble is measured beside a quiet time of the same round.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import zmq

from hicache import HiRadixCache, KVShape, PagePool
from publisher import Respawn, Sidecar, SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.config.sidecar_config import Persist

PAGE_SIZE, BLOCKS, PROMPT_BLOCKS, LOG_BATCHES, HWM = 64, 200_000, 64, 10_000, 1000
ROUNDS, ROUND_S, STEP_S, KILLS = 3, 0.4, 0.002, 2
PATIENCE_S = 30.0
_LOOPBACK = "tcp://127.0.0.1:0"
_TS_AT, _SEQ_BYTES = 2, 8


class Measured(NamedTuple):
    """Seconds: of each batch from the worker to the subscriber, and of each pump."""

    latency: list[float]
    pump: list[float]
    peak_mib: float


class Worker:
    """Of a cache: its sidecar, and a subscriber."""

    def __init__(self, cache: HiRadixCache, state_dir: Path, persist: Persist = "all") -> None:
        self._random = Random()
        self.cache = cache
        sink = SinkConfig(
            endpoint=_LOOPBACK, replay_endpoint=_LOOPBACK, buffer_steps=LOG_BATCHES, hwm=HWM
        )
        self.state_dir = state_dir
        self.sidecar: Sidecar = spawn(
            WorkerInfo(block_size=PAGE_SIZE),
            SidecarConfig(sinks=(sink,), state_dir=str(state_dir), persist=persist),
            respawn=Respawn(first_s=0.0, most_s=0.0),
        )
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.RECONNECT_IVL, 5)
        self._subscriber.setsockopt(zmq.RCVHWM, 0)
        self._subscriber.subscribe(b"")
        self._subscriber.connect(self.sidecar.client.sinks[0].endpoint)

    @property
    def addresses(self) -> list[str]:
        """PUB, replay and HTTP."""
        client = self.sidecar.client
        sink = client.sinks[0]
        return [sink.endpoint, str(sink.replay_endpoint), str(client.http_endpoint)]

    def fill(self) -> None:
        """Cache and log."""
        for number in range(BLOCKS // PROMPT_BLOCKS):
            self.insert(PROMPT_BLOCKS)
            self.pump()
            if number % 64 == 0:
                self.flush()
        for number in range(LOG_BATCHES):
            self.insert(1)
            self.pump()
            if number % 1000 == 0:
                self.flush()
        self.flush()
        self.receive()

    def insert(self, num_blocks: int) -> None:
        """A prompt that nobody has sent before."""
        tokens = self._random.randbytes(num_blocks * PAGE_SIZE * 4)
        pages = self.cache.allocate(num_blocks)
        assert pages is not None, "nothing is locked"
        self.cache.insert(tokens, pages)

    def pump(self) -> float:
        """Seconds that it took."""
        began = time.perf_counter()
        self.sidecar.pump(self.cache)
        return time.perf_counter() - began

    def flush(self) -> None:
        """Until everything is published."""
        assert self.sidecar.client.flush(self.cache, PATIENCE_S), "everything is published"

    def receive(self) -> list[float]:
        """Take what has come; the latency of each batch that says something."""
        found: list[float] = []
        while True:
            try:
                payload = self._subscriber.recv_multipart(zmq.NOBLOCK)[2]
            except zmq.Again:
                return found
            if payload[_TS_AT + _SEQ_BYTES] != 0x90:  # no events: a heartbeat
                found.append(time.time() - struct.unpack_from(">d", payload, _TS_AT)[0])

    def hear(self, until: float) -> list[float]:
        """As `receive`, once something has come, or at `until` (of time.perf_counter)."""
        if (left := until - time.perf_counter()) > 0:
            self._subscriber.poll(max(1, int(left * 1000)))
        return self.receive()

    def measure(self, going_on: Callable[[float], bool]) -> Measured:
        """Steps at their times for as long as `going_on` says, of the seconds since the beginning."""
        self.receive()
        (Path("/proc") / str(self.sidecar.pid) / "clear_refs").write_text("5")
        latency: list[float] = []
        pumps: list[float] = []
        began = due = time.perf_counter()
        while going_on(time.perf_counter() - began):
            self.insert(1)
            pumps.append(self.pump())
            due += STEP_S
            while time.perf_counter() < due:
                latency += self.hear(due)
        until = time.perf_counter() + 2.0
        while len(latency) < len(pumps) and time.perf_counter() < until:
            latency += self.hear(until)
        return Measured(latency, pumps, memory_mib(self.sidecar.pid, "VmHWM"))

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """With the sidecar stopped."""
        os.kill(self.sidecar.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.sidecar.pid, signal.SIGCONT)

    def close(self) -> None:
        self._subscriber.close(linger=0)
        self._context.term()
        self.sidecar.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def memory_mib(pid: int, key: str) -> float:
    """A line of a process's status."""
    for line in (Path("/proc") / str(pid) / "status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"{key} of {pid}")


# ---------------------------------------------------------------------------------------- troubles


@contextlib.contextmanager
def troubled(worker: Worker, kind: str) -> Iterator[subprocess.Popen[bytes]]:
    """With a process of `sidecar_clients` at work."""
    command = [sys.executable, "-m", "benchmarks.sidecar_clients", kind, *worker.addresses]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            os.set_blocking(process.stdout.fileno(), False)
            yield process
        finally:
            process.kill()


def quiet(worker: Worker) -> Measured:
    return worker.measure(lambda seconds: seconds < ROUND_S)


def by_clients(kind: str) -> Callable[[Worker], Measured]:
    def run(worker: Worker) -> Measured:
        with troubled(worker, kind):
            return quiet(worker)

    return run


def ten_thousand_identities(worker: Worker) -> Measured:
    with troubled(worker, "identities") as process:
        assert process.stdout is not None
        stdout = process.stdout
        return worker.measure(lambda seconds: not stdout.read() and seconds < PATIENCE_S)


def subscriber_stops(worker: Worker) -> Measured:
    """Its queue is full from the beginning."""
    with troubled(worker, "subscriber-stops"):
        for _ in range(HWM + 500):
            worker.insert(1)
            worker.pump()
        worker.flush()
        return quiet(worker)


def during_checkpoint(worker: Worker) -> Measured:
    """Long prompts until the journal is as large as its checkpoint, and due."""

    def writing() -> bool:
        return any(worker.state_dir.rglob("checkpoint-*.part"))

    number = 0
    while not writing():
        number += 1
        worker.insert(256)
        worker.pump()
        if number % 4 == 0:
            worker.flush()
    return worker.measure(lambda _: writing())


def during_resync(worker: Worker) -> Measured:
    os.kill(worker.sidecar.pid, signal.SIGUSR1)
    seen = worker.sidecar.client.stats.retellings

    def telling(seconds: float) -> bool:
        begun = worker.sidecar.client.stats.retellings > seen
        return worker.cache.retelling or (not begun and seconds < PATIENCE_S)

    return worker.measure(telling)


TROUBLES: dict[str, Callable[[Worker], Measured]] = {
    "quiet": quiet,
    "a replay client that stops reading": by_clients("stops-reading"),
    "50 clients, the state now": by_clients("joins"),
    "50 clients, from seq 0": by_clients("from-zero"),
    "garbage, frames of 16 MB": by_clients("garbage"),
    "10,000 identities": ten_thousand_identities,
    "a subscriber that stops reading": subscriber_stops,
    "a checkpoint of the journal": during_checkpoint,
    "a resync": during_resync,
    "scrapes": by_clients("scrapes"),
}
LONG = {"10,000 identities": 1, "a checkpoint of the journal": 1, "a resync": 2}
"""How many rounds these have."""


# ------------------------------------------------------------------------------------ the worker


def refused(worker: Worker) -> list[float]:
    """Pumps that find the sidecar stopped and the ring full."""
    stats = worker.sidecar.client.stats
    with worker.stopped():
        while worker.sidecar.client.stats.refused == stats.refused:
            worker.insert(256)
            worker.pump()
        pumps = []
        for _ in range(2000):
            worker.insert(1)
            pumps.append(worker.pump())
    worker.flush()
    return pumps


def kill(worker: Worker) -> tuple[float, float]:
    """Seconds from SIGKILL until something said after it is received, and until all is in step."""
    worker.flush()
    worker.receive()
    began = time.perf_counter()
    os.kill(worker.sidecar.pid, signal.SIGKILL)
    heard = 0.0
    due = began
    while not heard:
        assert time.perf_counter() - began < PATIENCE_S, "it publishes again"
        worker.insert(1)
        worker.pump()
        due += STEP_S
        while not heard and time.perf_counter() < due:
            if worker.hear(due):
                heard = time.perf_counter() - began
    worker.flush()
    return heard, time.perf_counter() - began


# ------------------------------------------------------------------------------------------ tables


def at(values: list[float], share: float) -> float:
    """A quantile, in milliseconds."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3


def row(name: str, rounds: list[list[float]], base: list[list[float]], more: str = "") -> None:
    """Medians of the rounds, beside those of `base`; the greatest of all."""
    p50, p99 = (median(at(one, q) for one in rounds) for q in (0.5, 0.99))
    base50, base99 = (median(at(one, q) for one in base) for q in (0.5, 0.99))
    print(
        f"{name:36} p50 {p50:7.3f} ({p50 / base50:5.1f} ×)  p99 {p99:8.3f} ({p99 / base99:5.1f} ×)"
        f"  max {max(at(one, 1) for one in rounds):8.2f}  {more}",
        flush=True,
    )


def report_troubles(worker: Worker, rest_mib: float) -> dict[str, list[Measured]]:
    """Round by round, each trouble in turn."""
    found: dict[str, list[Measured]] = {name: [] for name in TROUBLES}
    for number in range(ROUNDS):
        for name, run in TROUBLES.items():
            if number >= LONG.get(name, ROUNDS):
                continue
            gc.collect()
            found[name].append(run(worker))
            worker.flush()
            worker.receive()
    base = [one.latency for one in found["quiet"]]
    print("live latency in ms (× quiet), and the sidecar's peak memory")
    for name, rounds in found.items():
        peak = max(one.peak_mib for one in rounds)
        memory = f"{peak:6.0f} MiB ({peak / rest_mib:4.2f} × at rest)"
        row(name, [one.latency for one in rounds], base, memory)
    return found


def main() -> int:
    print(
        f"{BLOCKS:,} blocks of {PAGE_SIZE} tokens, a log of {LOG_BATCHES:,} batches, a step every"
        f" {STEP_S * 1e3:.0f} ms, {ROUNDS} rounds, {len(os.sched_getaffinity(0))} cores, hwm {HWM}",
        flush=True,
    )
    with HiRadixCache(PagePool(BLOCKS, PAGE_SIZE, KVShape(1, 1, 1))) as cache:
        with tempfile.TemporaryDirectory() as directory, Worker(cache, Path(directory)) as worker:
            worker.fill()
            rest_mib = memory_mib(worker.sidecar.pid, "VmRSS")
            print(f"the sidecar at rest: {rest_mib:.0f} MiB", flush=True)
            found = report_troubles(worker, rest_mib)
            base = [one.pump for one in found["quiet"]]
            print("the worker's pump in ms (× quiet)")
            row("quiet", base, base)
            seconds = median(len(one.pump) * STEP_S for one in found["a resync"])
            told = f"done in {seconds:.2f} s of steps"
            row("a resync", [one.pump for one in found["a resync"]], base, told)
            row("refused, ring full", [refused(worker)], base)
            report_kills("warm, from the journal", worker)
        with (
            tempfile.TemporaryDirectory() as directory,
            Worker(cache, Path(directory), persist="seq") as worker,
        ):
            report_kills("cold, seqs alone", worker)
    return 0


def report_kills(name: str, worker: Worker) -> None:
    kills = [kill(worker) for _ in range(KILLS)]
    heard, in_step = (median(one[place] for one in kills) for place in (0, 1))
    print(
        f"kill -9, {name}: publishes after {heard:.2f} s, in step after {in_step:.2f} s", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
