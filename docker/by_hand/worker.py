"""A worker for a sidecar in a container of its own: stores a block a second, until it is ended.

Needs no more than the sidecar's image has.
"""

from __future__ import annotations

import itertools
import time

from kvevents import BlockStored, KVEventBatch, StorageMedium
from publisher import WorkerInfo, listen

with listen(
    WorkerInfo(block_size=16, model="tried", worker_id="tried-0"), "/run/kvevents/link"
) as sidecar:
    for number in itertools.count(1):
        tokens = list(range(number, number + 16))
        stored = BlockStored([number], None, tokens, 16, medium=StorageMedium.GPU)
        sidecar.client.publish_batch(KVEventBatch(time.time(), [stored], 0))
        time.sleep(1.0)
