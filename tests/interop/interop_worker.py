"""An example worker in a process of its own: a cache of device, host and file tiers, and its sidecar.

    with ExampleWorker.start(SinkConfig(dialect="dynamo", heartbeat_s=0.1)) as worker:
        prompt = worker.prompt(3)
        worker.insert(prompt)
        ... a consumer reads worker.endpoint() and worker.replay_endpoint() ...
        assert what it believes == worker.resident()

A prompt's tokens are its own. Each call does one thing, and returns when the sidecar has published what
came of it. A block is copied to the host when `backup` says so (or when it is inserted again), and from
there to storage when `write_storage` does. The sinks get ports of their own, which they keep when the
sidecar or the worker is killed and started again; so do the state and the files.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from interop_process import HERE, on_free_ports
from interop_rpc import JsonChild
from interop_waiting import LOOPBACK

from kvevents import BASE, BlockHash, Namespace, StorageMedium
from kvevents.hashing import block_hashes
from publisher import SidecarConfig, SinkConfig, WorkerInfo

__all__ = ["BLOCK", "POD_IP", "ExampleWorker", "Resident", "Store"]

BLOCK = 4
"""Tokens a block."""

POD_IP = "10.0.0.1"
"""Of the worker's environment, for topics."""

Store = Literal["DISK", "EXTERNAL"]
"""What a worker's files are told as."""

Resident = dict[StorageMedium, dict[BlockHash, tuple[int, ...]]]
"""Of each medium: the blocks that it has, and the tokens of a prompt that ends with each."""

_numbers = itertools.count(1)


class ExampleWorker:
    """A context manager. `next_seqs`: of each sink, as of the last call."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder, self._config = folder, config
        self._ends: dict[BlockHash, tuple[Sequence[int], int]] = {}
        """Of every block ever inserted: a prompt, and where in it the block ends."""
        self._child = self._start()

    @classmethod
    def start(
        cls,
        *sinks: SinkConfig,
        storage: Store | None = "DISK",
        device_pages: int = 64,
        host_pages: int = 64,
        storage_pages: int | None = None,
        dp_rank: int = 0,
        dp_size: int | None = None,
        model: str = "",
    ) -> ExampleWorker:
        """The sinks' addresses are replaced. `storage`: None, DISK, or EXTERNAL, which is files too, but
        told and flushed as a store that others share. `storage_pages`: so many fit into it.
        """
        folder = Path(tempfile.mkdtemp(prefix="interop-worker-"))

        def on(ports: list[int]) -> ExampleWorker:
            bound = [
                msgspec.structs.replace(
                    sink,
                    endpoint=f"tcp://{LOOPBACK}:{ports[2 * place]}",
                    replay_endpoint=f"tcp://{LOOPBACK}:{ports[2 * place + 1]}",
                    add_dp_rank=False,
                )
                for place, sink in enumerate(sinks)
            ]
            sidecar = SidecarConfig(
                sinks=tuple(bound), state_dir=str(folder / "state"), linger_s=0.2
            )
            worker = WorkerInfo(
                block_size=BLOCK, dp_rank=dp_rank, dp_size=dp_size, model=model, worker_id="w"
            )
            config = {
                "folder": str(folder),
                "storage": storage,
                "storage_pages": storage_pages,
                "device_pages": device_pages,
                "host_pages": host_pages,
                "worker": msgspec.to_builtins(worker),
                "sidecar": msgspec.to_builtins(sidecar),
            }
            return cls(folder, config)

        try:
            return on_free_ports(2 * len(sinks), on)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _start(self) -> JsonChild:
        child = JsonChild(
            Path(sys.executable),
            "interop_worker_child",
            self._config,
            env={"POD_IP": POD_IP},
            folders=(HERE, HERE.parents[1]),
            ready_timeout_s=60.0,
        )
        self._facts: dict[str, Any] = child.ready
        self.next_seqs: list[int] = []
        return child

    # ------------------------------------------------------------------------------ where it is

    def endpoint(self, sink: int = 0) -> str:
        """The PUB socket of a sink."""
        return str(self._facts["sinks"][sink][0])

    def replay_endpoint(self, sink: int = 0) -> str:
        """The replay socket of a sink."""
        return str(self._facts["sinks"][sink][1])

    def metrics(self) -> dict[str, float]:
        """What the sidecar counts, by name and labels as they are written."""
        page = f"{self._child.ask('facts')['http']}/metrics"
        with urllib.request.urlopen(page, timeout=10) as response:
            lines = response.read().decode().splitlines()
        rows = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in rows}

    def subscribers(self, sink: str = "sink0") -> int:
        """How many have subscribed to a sink, by the sidecar's own count."""
        return int(self.metrics()[f'kv_events_subscribers{{sink="{sink}"}}'])

    def log(self) -> str:
        """What worker and sidecar have logged."""
        return self._child.log()

    # ----------------------------------------------------------------------------- what it holds

    def prompt(self, num_blocks: int, after: Sequence[int] = ()) -> list[int]:
        """A prompt of so many blocks that nobody has seen; `after`: what it goes on from."""
        fresh = [next(_numbers) for _ in range(num_blocks * BLOCK)]
        return [*after, *fresh]

    def resident(self) -> Resident:
        """What the cache holds, on all media."""
        held: dict[str, list[int]] = self._child.ask("resident")
        return {
            StorageMedium(on): {BlockHash(one): self._prefix(BlockHash(one)) for one in hashes}
            for on, hashes in held.items()
        }

    def _prefix(self, block: BlockHash) -> tuple[int, ...]:
        prompt, end = self._ends[block]
        return tuple(prompt[:end])

    # ------------------------------------------------------------------------- what is done to it

    def insert(self, prompt: Sequence[int], namespace: Namespace = BASE) -> None:
        """A request: its blocks are on the device."""
        hashes = block_hashes(prompt, BLOCK, namespace)
        for place, one in enumerate(hashes):
            self._ends[one] = prompt, (place + 1) * BLOCK
        self._do("insert", tokens=prompt, namespace=_fields(namespace))

    def backup(self, prompt: Sequence[int], namespace: Namespace = BASE) -> None:
        """The host has its blocks too."""
        self._do("backup", tokens=prompt, namespace=_fields(namespace))

    def evict_device(self, num_blocks: int) -> None:
        """The device gives up so many, leaves first."""
        self._do("evict_device", num_pages=num_blocks)

    def evict_host(self, num_blocks: int) -> None:
        """The host gives up so many, leaves first. What was not written to the store yet is not, then,
        until it is backed up again.
        """
        self._do("evict_host", num_pages=num_blocks)

    def load_back(self, prompt: Sequence[int], namespace: Namespace = BASE) -> None:
        """What the host has of it is on the device again."""
        self._do("load_back", tokens=prompt, namespace=_fields(namespace))

    def write_storage(self) -> None:
        """What was backed up is in the store too, which gives up others if it is full."""
        self._do("write_storage")

    def prefetch(self, prompt: Sequence[int], namespace: Namespace = BASE) -> None:
        """What the store has of it is on the host."""
        self._do("prefetch", tokens=prompt, namespace=_fields(namespace))

    def flush(self) -> None:
        """Nothing is held any more; an external store keeps what it has, untold."""
        self._do("flush")

    def reset_device(self) -> None:
        """Nothing is on the device any more."""
        self._do("reset_device")

    # ------------------------------------------------------------------------------------- faults

    def resync(self) -> None:
        """SIGUSR1: the state is told anew."""
        self._do("resync")

    def kill_sidecar(self) -> int:
        """SIGKILL. Returns at once, for `await_sidecar`; other calls wait for the next sidecar too."""
        return int(self._child.ask("kill_sidecar"))

    def await_sidecar(self, killed: int) -> None:
        """Until the next sidecar is ready."""
        self._do("await_sidecar", restarts=killed)

    def restart_sidecar(self) -> None:
        """SIGKILL, and until the next one is ready."""
        self.await_sidecar(self.kill_sidecar())

    def running(self) -> bool:
        """Whether the worker's process is there."""
        return self._child.running()

    def kill(self) -> None:
        """SIGKILL of the worker; its sidecar publishes that it is gone, and ends."""
        self._child.kill()

    def restart(self) -> None:
        """After `kill` or `leave`: another process, with an empty cache and the files of the last."""
        self._child = self._start()

    def leave(self) -> None:
        """End in good order."""
        if self._child.running() and (requests := self._child.process.stdin) is not None:
            requests.close()
            self._child.process.wait(20)
        self._child.stop()

    def _do(self, op: str, **arguments: Any) -> None:
        self.next_seqs = self._child.ask(op, timeout_s=60.0, **arguments)

    # ---------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Safe to call twice."""
        with contextlib.suppress(Exception):
            self.leave()
        self._child.stop(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fields(namespace: Namespace) -> list[str | None]:
    return [namespace.lora_name, namespace.cache_salt, namespace.extra_key]
