"""What Dynamo's deployments read KV events with: a relay in the worker, and the frontend's router.

`KvEventPublisher(zmq_endpoint=…)` subscribes to a sink and passes on to `KvRouter`, here in one process.
Unlike the indexer it takes no notice of seqs and asks for no replay; it counts how often a block was
stored, and takes one rank's batches only. Neither etcd nor NATS is needed.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, Self

from dynamo_answers import Blocks, Tiers, believed
from interop_process import loopback_env, venv_python
from interop_rpc import JsonChild
from interop_waiting import LOOPBACK
from interop_worker import BLOCK

from kvevents.namespace import BASE, Namespace

__all__ = ["DynamoRelay"]


class DynamoRelay:
    """One worker with a relay for each rank, and a router, as a context manager."""

    def __init__(self, child: JsonChild) -> None:
        self._child = child

    @classmethod
    def start(cls, *endpoints: str) -> DynamoRelay:
        """`endpoints`: the PUB socket of rank 0, of rank 1 … Skips the test where it is not installed.

        What is told before a relay has subscribed is not known to it.
        """
        python, env = venv_python("dynamo"), loopback_env()
        env |= {
            "DYN_LOG": "warn",
            "DYN_EVENT_PLANE_HOST": LOOPBACK,
            "DYN_TCP_RPC_HOST": LOOPBACK,
            "DYN_TCP_RESPONSE_STREAM_HOST": LOOPBACK,
        }
        config: dict[str, Any] = {"sources": endpoints, "block_size": BLOCK}
        return cls(JsonChild(python, "dynamo_relay_child", config, env=env, ready_timeout_s=60.0))

    def blocks(self, dp_rank: int = 0) -> Blocks:
        """What the router believes of a rank, on each tier."""
        return believed(self._child.ask("dump"), dp_rank)

    def score(self, prompt: Sequence[int], dp_rank: int = 0, namespace: Namespace = BASE) -> Tiers:
        """How much of a prompt the router finds with a rank."""
        rows = self._child.ask(
            "scores",
            tokens=list(prompt),
            lora_name=namespace.lora_name,
            cache_salt=namespace.cache_salt,
        )
        for row in rows:
            if row["dp_rank"] == dp_rank:
                return Tiers(
                    row["device_blocks"],
                    row["host_pinned_extension_blocks"],
                    row["disk_extension_blocks"],
                )
        return Tiers()

    def warnings(self) -> list[str]:
        """All it has logged, for it logs no less."""
        return [
            one for one in self._child.log().splitlines() if " WARN " in one or " ERROR " in one
        ]

    def stop(self) -> None:
        """It holds nothing worth keeping, so it is killed. Safe to call twice."""
        self._child.stop(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
