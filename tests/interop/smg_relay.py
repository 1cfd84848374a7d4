"""SMG's relays, which follow a publisher for a gateway, and a gateway's part: what it believes.

`python` is smg-grpc-servicer's: it joins when a gateway subscribes, and takes what is live from then on.
`rust` is smg's: it joins at once, asks for a replay from seq 0 and keeps a history for gateways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

from interop_process import venv_python
from interop_rpc import JsonChild
from interop_waiting import wait_until

__all__ = ["Kind", "Resident", "SmgRelay", "resident"]

Kind = Literal["python", "rust"]
Resident = dict[str, set[int]]
"""Hashes by tier: device, host, disk, external. A tier that holds nothing is not in it."""


class SmgRelay:
    """A relay, and a gateway that has subscribed to it. Skips the test where SMG is not installed."""

    def __init__(
        self,
        kind: Kind,
        endpoint: str,
        replay_endpoint: str,
        *,
        block_size: int,
        hash_check: str | None = None,
    ) -> None:
        """`hash_check`: as an oracle's, of the Python relay."""
        config = {
            "kind": kind,
            "endpoint": endpoint,
            "replay_endpoint": replay_endpoint,
            "block_size": block_size,
            "hash_check": hash_check,
        }
        self._child = JsonChild(venv_python("smg"), "smg_relay_child", config)
        self.resubscribed = -1
        """How often the gateway had to start over, because the relay ended its stream."""
        self.error: list[str] | None = None
        """The gRPC status that ended the last one: its name and what was said."""
        try:
            self._subscribe()
        except BaseException:
            self._child.stop()
            raise

    def _subscribe(self) -> None:
        self._number: int = self._child.ask("subscribe")
        self.resubscribed += 1
        self.batches: list[dict[str, Any]] = []

    def read(self) -> None:
        """Take what has come; where the relay ended its stream, forget all and subscribe anew."""
        found = self._child.ask("read", number=self._number, since=len(self.batches))
        self.batches += found["batches"]
        if found["error"]:
            self._subscribe()
            self.error = found["error"]

    def resident(self) -> Resident:
        """What the gateway believes."""
        self.read()
        return resident(self.batches)

    def counts(self) -> dict[str, Any]:
        """The Python relay's, of this subscription."""
        found: dict[str, Any] = self._child.ask("counts")
        return found

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for it. Raises ChildExited with the relay's log when it does not come."""
        if not wait_until(condition, interval_s=0.03):
            raise self._child.failure(f"believes {self.resident()} after {self.batches[-3:]}")

    def log(self) -> str:
        """What the relay has said."""
        return self._child.log()

    def __enter__(self) -> SmgRelay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.stop()


def resident(batches: list[dict[str, Any]]) -> Resident:
    """Fold batches of one rank as the gateway does: a store adds a copy, a removal takes one."""
    copies: Counter[tuple[str, int]] = Counter()
    for batch in batches:
        for event in batch["events"]:
            if event["kind"] == "cleared":
                copies.clear()
                continue
            step = 1 if event["kind"] == "stored" else -1
            for block_hash in event["block_hashes"]:
                key = (event["tier"], block_hash)
                copies[key] = max(0, copies[key] + step)
    found: Resident = {}
    for (tier, block_hash), count in copies.items():
        if count:
            found.setdefault(tier, set()).add(block_hash)
    return found
