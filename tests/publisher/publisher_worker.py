"""A worker in a process that can be killed: spawns a sidecar that lingers for so many seconds, publishes
one block, says where, waits.
"""

from __future__ import annotations

import signal
import sys

from kvevents import BASE, StorageMedium
from kvevents.records import BlockId, StoreNew
from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn


def main() -> None:
    """Prints the sidecar's pid and its two endpoints."""
    sink = SinkConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    config = SidecarConfig(sinks=(sink,), linger_s=float(sys.argv[1]))
    with spawn(WorkerInfo(block_size=1), config) as sidecar:
        tokens = (7).to_bytes(4, "little")
        sidecar.client.publish([StoreNew(StorageMedium.GPU, BlockId(0), 1, None, BASE, tokens)])
        (bound,) = sidecar.client.sinks
        print(sidecar.pid, bound.endpoint, bound.replay_endpoint, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
