"""Example workers that many tests have in common, as long as they are well."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from interop_process import ChildExited
from interop_rpc import RemoteError
from interop_waiting import LOOPBACK, wait_until
from interop_worker import ExampleWorker

__all__ = ["Kept", "forget_state", "replays"]


class Kept:
    """`start`: each makes one worker; all are started at the same time, once they are wanted."""

    def __init__(self, *start: Callable[[], ExampleWorker]) -> None:
        self._start = start
        self._workers: list[ExampleWorker] = []

    def take(self) -> Sequence[ExampleWorker]:
        """The workers, with empty caches."""
        if not self._workers:
            with ThreadPoolExecutor() as threads:
                starting = [threads.submit(one) for one in self._start]
            self._workers = [one.result() for one in starting]
        return self._workers

    def give_back(self) -> None:
        """Empty the caches; a worker that a test has left dead, or stuck, ends here."""
        try:
            for worker in self._workers:
                worker.flush()
        except (ChildExited, RemoteError, TimeoutError):
            self.close()

    def close(self) -> None:
        """Safe to call twice."""
        for worker in self._workers:
            worker.close()
        self._workers = []


def replays(worker: ExampleWorker, sink: int) -> int:
    """How many replays of a sink were asked for."""
    label = f'sink="sink{sink}"'
    counted = worker.metrics().items()
    return int(sum(n for name, n in counted if "replay_requests" in name and label in name))


def forget_state(worker: ExampleWorker) -> None:
    """What a dead worker's sidecar had kept is gone: the next one begins at seq 0."""
    port = int(worker.endpoint().rpartition(":")[2])

    def is_gone() -> bool:
        with socket.socket() as one:
            return one.connect_ex((LOOPBACK, port)) != 0

    assert wait_until(is_gone), "the sidecar has outlived its worker"
    shutil.rmtree(worker.folder / "state")
