"""What the tests of publisher.engines share: a rank's sidecar, and what its sink has told."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import zmq

from kvevents import BlockIndex, BlockStored, StorageMedium, block_hashes, decode_batch
from kvevents.events import Event
from kvevents.frames import Frame, parse_replay_answer, replay_request
from publisher.engines.disk import Meeting
from publisher.engines.sidecar import EngineSidecar
from publisher.engines.told import Told, read_told
from publisher.worker.client import DEFAULT_RING_BYTES

__all__ = ["PATIENCE_S", "SIZE", "index_of", "rank_of", "replayed", "stored", "told_of", "until"]

SIZE = 4
PATIENCE_S = 20.0


def until(done: Callable[[], object]) -> None:
    """Ask until it is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.005)


def told_of(folder: Path, environ: Mapping[str, str] | None = None, **keys: Any) -> Told:
    """Sockets and state in a folder."""
    said = {
        "endpoint": f"ipc://{folder}/pub",
        "replay_endpoint": f"ipc://{folder}/replay",
        "state_dir": str(folder / "state"),
        "http_endpoint": "none",
        **keys,
    }
    return read_told(json.loads(json.dumps(said)), environ or {}, dialect="sglang")


@contextlib.contextmanager
def rank_of(
    folder: Path,
    *,
    block_size: int | None = SIZE,
    meeting: Meeting | None = None,
    ring_bytes: int = DEFAULT_RING_BYTES,
    **keys: Any,
) -> Iterator[EngineSidecar]:
    """A rank with a sidecar, which ends with it."""
    engine = {"block_size": block_size}
    rank = EngineSidecar(
        told_of(folder, **keys), 0, engine, ring_bytes=ring_bytes, meeting=meeting or Meeting()
    )
    try:
        yield rank
    finally:
        rank.close()


def stored(first: int, count: int = 1, **more: Any) -> BlockStored:
    """The leading blocks of a prompt that counts from `first`."""
    tokens = list(range(first, first + count * SIZE))
    fields: dict[str, Any] = {"token_ids": tokens, "block_size": SIZE, "medium": StorageMedium.GPU}
    return BlockStored([*block_hashes(tokens, SIZE)], None, **{**fields, **more})


def replayed(folder: Path) -> list[Event]:
    """All that the first sink has told so far."""
    events: list[Event] = []
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        dealer.connect(f"ipc://{folder}/replay")
        dealer.send_multipart(replay_request(0))
        while isinstance(answer := parse_replay_answer(dealer.recv_multipart()), Frame):
            events += decode_batch(answer.payload).batch.events
    return events


def index_of(folder: Path) -> BlockIndex:
    """What a router believes that has read all of it."""
    index = BlockIndex()
    index.apply(replayed(folder))
    return index
