"""This project's sidecar, as a worker of an engine that has no records spawns and feeds it.

The sidecar publishes AllBlocksCleared first, as sequence 0, and no heartbeats, so that sequences count
batches, and does not stay when its work is over; everything else is as it comes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence

from kvevents import BlockStored, KVEventBatch, StorageMedium
from publisher import Sidecar, SidecarConfig, SinkConfig, WorkerInfo, spawn
from publisher.version import VERSION

from .host import serve
from .interface import PublisherPeer, StoredBlocks

HWM = 200_000
HEARTBEAT_S = 3600.0
ROOM_S = 0.0002
MESSAGE_BYTES = 16  # of each message in the ring, besides its body


class OurPublisher(PublisherPeer):
    """Several outputs are several sinks of one sidecar."""

    first_sequence = 1
    _sidecar: Sidecar | None = None

    def start(
        self, endpoint: str, replay_endpoint: str | None, buffer_batches: int, block_size: int
    ) -> None:
        sink = SinkConfig(
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            buffer_steps=buffer_batches,
            hwm=HWM,
            heartbeat_s=HEARTBEAT_S,
        )
        self._spawn((sink,), block_size)

    def start_sinks(self, sinks: Sequence[tuple[str, str]], block_size: int) -> None:
        self._spawn(
            tuple(
                SinkConfig(
                    name=dialect,
                    dialect=dialect,
                    endpoint=endpoint,
                    replay_endpoint=None,
                    hwm=HWM,
                    heartbeat_s=HEARTBEAT_S,
                )
                for dialect, endpoint in sinks
            ),
            block_size,
        )

    def _spawn(self, sinks: tuple[SinkConfig, ...], block_size: int) -> None:
        self._state_dir = tempfile.TemporaryDirectory()
        self._sidecar = spawn(
            WorkerInfo(block_size=block_size),
            SidecarConfig(sinks=sinks, state_dir=self._state_dir.name, linger_s=0.0),
        )
        self._client = self._sidecar.client
        self._publish = self._client.publish_batch
        self._refused = self._waits = 0

    def prepare(self, batch: Sequence[StoredBlocks]) -> KVEventBatch:
        """The token ids are a list, as an engine has them."""
        stored = [
            BlockStored(
                block_hashes=list[int | bytes](event.block_hashes),
                parent_block_hash=event.parent_block_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
                medium=StorageMedium.GPU,
            )
            for event in batch
        ]
        return KVEventBatch(0.0, list(stored), 0)

    def publish(self, batch: KVEventBatch) -> None:
        batch.ts = time.time()
        if not self._publish(batch):
            self._refused += 1

    def publish_all(self, batch: KVEventBatch) -> None:
        """A batch that is refused is a loss that subscribers are told of, so room is waited for first."""
        while self._used_bytes > self._client._ring.capacity // 2:
            self._waits += 1
            time.sleep(ROOM_S)
        self.publish(batch)

    def counts(self) -> dict[str, int]:
        """`refused`: batches that were no message. `waits`: naps of a flood until there was room."""
        return {"refused": self._refused, "waits": self._waits}

    @property
    def pid(self) -> int:
        """Of the sidecar."""
        assert self._sidecar is not None
        return self._sidecar.pid

    @property
    def _used_bytes(self) -> int:
        ring = self._client._ring
        return ring.capacity - ring.free_bytes

    def backlog(self) -> int:
        """What waits in the ring, in batches of the mean size; what the sidecar has read is not in it."""
        stats = self._client.stats
        if not stats.written:
            return 0
        return -(-self._used_bytes // (stats.bytes // stats.written + MESSAGE_BYTES))

    def stop(self) -> None:
        if self._sidecar is not None:
            self._sidecar.close()
            self._sidecar = None
            self._state_dir.cleanup()


if __name__ == "__main__":
    serve(OurPublisher(), name="kvevents", version=VERSION)
