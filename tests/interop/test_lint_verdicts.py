"""kvevents.lint against the real consumers: what it says is lost, they lose, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interop_rig import EngineCodec
from interop_rpc import RemoteError
from interop_waiting import wait_until
from router_process import Source, router_for
from smg_oracle import SmgOracle

from kvevents.frames import live_frames, replay_end
from kvevents.lint import CONSUMERS, Finding, Lint

HASH, PARENT = 0x0123_4567_89AB_CDEF, 0x1123_4567_89AB_CDEF
TS = 1_700_000_000.25
pack = msgspec.msgpack.encode
Engines = dict[str, EngineCodec]

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [HASH],
    "parent_block_hash": PARENT,
    "token_ids": [1, 2, 3, 4],
    "block_size": 4,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}
REMOVED: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": [HASH], "medium": "GPU"}
CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}

hashes = st.sampled_from(
    [HASH, -HASH, 2**64 - 1, 1, -1, 0, 2**32, b"12345678", bytes(32), "a", None, 1.5]
)
values = {
    "type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "BlockTouched", 7]),
    "block_hashes": st.lists(hashes, max_size=3) | st.none(),
    "parent_block_hash": hashes,
    "token_ids": st.sampled_from(
        [[1, 2, 3, 4], [], [1], [-1] * 4, [2**32] * 4, [[1, 2]] * 4, None]
    ),
    "block_size": st.sampled_from([4, 2, 0, None, "4"]),
    "lora_id": st.sampled_from([None, 7, "a"]),
    "medium": st.sampled_from(
        [None, "GPU", "CPU", "CPU_PINNED", "DISK", "EXTERNAL", "FPGA", "gpu", 7]
    ),
    "lora_name": st.sampled_from([None, "a", 7]),
    "cache_salt": st.sampled_from([None, "s"]),
    "session_id": st.sampled_from([None, "s"]),
    "favourite": st.sampled_from([None, "tea"]),
}


@st.composite
def events(draw: st.DrawFn) -> Any:
    """An event with a few fields changed, gone or added, as a map or as an array."""
    event = dict(draw(st.sampled_from([STORED, REMOVED, CLEARED])))
    for key in draw(st.lists(st.sampled_from(list(values)), max_size=2)):
        if draw(st.booleans()):
            event.pop(key, None)
        else:
            event[key] = draw(values[key])
    return list(event.values()) if draw(st.integers(0, 3)) == 0 else event


batches = st.builds(
    lambda ts, told, rank, more: pack([ts, told, *rank, *more]),
    st.sampled_from([TS, TS, TS, 1, None, "x"]),
    st.lists(events(), max_size=3),
    st.sampled_from([[0], [0], [0], [3], [None], ["0"], []]),
    st.sampled_from([[], [], [], ["publisher"]]),
)
many = settings(max_examples=400, suppress_health_check=list(HealthCheck), deadline=None)


def verdict(consumer: str, payload: bytes) -> list[Finding]:
    """What lint says of one batch."""
    return Lint([CONSUMERS[consumer]]).live(live_frames(b"", 0, payload))


def batch_lost(consumer: str, payload: bytes) -> bool:
    """Whether it says that the batch is lost."""
    return any(one.lost == "batch" for one in verdict(consumer, payload))


# ------------------------------------------------------------------------------ typed decoders


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """The decoders of the newest releases of both engines."""
    with EngineCodec("vllm-0.33.0") as vllm, EngineCodec("sglang-0.5.23") as sglang:
        yield {"vllm": vllm, "sglang": sglang}


@pytest.mark.integration
@pytest.mark.parametrize("name", ["vllm", "sglang"])
@many
@given(payload=batches)
def test_engines_decoders(engines: Engines, name: str, payload: bytes) -> None:
    """A batch is lost, says lint, exactly where the engine's own decoder refuses it."""
    try:
        engines[name].decode(payload)
    except RemoteError:
        assert batch_lost(name, payload)
    else:
        assert verdict(name, payload) == []


# ----------------------------------------------------------------------------------------- SMG


@pytest.fixture(scope="module")
def smg() -> Iterator[SmgOracle]:
    with SmgOracle() as oracle:
        yield oracle


@pytest.mark.integration
@many
@given(payload=batches)
def test_smg(smg: SmgOracle, payload: bytes) -> None:
    """Batches that its relay cannot read, and events that it does, are those that lint names."""
    found = verdict("smg", payload)
    lost = {one.where.partition(".")[0] for one in found if one.lost == "event"}
    try:
        told = smg.decode(payload)["events"]
    except RemoteError:
        assert any(one.lost == "batch" for one in found)
        return
    assert not any(one.lost == "batch" for one in found)
    malformed = [one["kind"] in ("malformed", "unknown") for one in told]
    assert not any(malformed) or lost


# --------------------------------------------------------------------------------- vllm-router

CHANGES: dict[str, Any] = {
    "as told": [STORED],
    "an array": [list(STORED.values())[:-1]],
    "no lora_name": [{key: value for key, value in STORED.items() if key != "lora_name"}],
    "no parent": [{key: value for key, value in STORED.items() if key != "parent_block_hash"}],
    "cache_salt": [STORED | {"cache_salt": "s"}],
    "session_id": [STORED | {"session_id": "s"}],
    "extra_keys": [STORED | {"extra_keys": [["s"]]}],
    "lookahead_token_ids": [STORED | {"lookahead_token_ids": [[1]]}],
    "group": [STORED | {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}],
    "unknown event": [STORED, {"type": "BlockTouched"}],
    "negative hash": [STORED | {"block_hashes": [-HASH]}],
    "negative parent": [STORED | {"parent_block_hash": -1}],
    "u64": [STORED | {"block_hashes": [2**64 - 1]}],
    "bytes": [STORED | {"block_hashes": [bytes(32)]}],
    "narrow": [STORED | {"block_hashes": [1]}],
    "text": [STORED | {"block_hashes": ["a"]}],
    "no hashes": [STORED | {"block_hashes": [], "token_ids": []}],
    "pairs": [STORED | {"token_ids": [[1, 2]] * 4}],
    "token beyond u32": [STORED | {"token_ids": [2**32] * 4}],
    "CPU_PINNED": [STORED | {"medium": "CPU_PINNED"}],
    "medium an int": [STORED | {"medium": 7}],
    "removed": [REMOVED],
    "removed, no medium": [{"type": "BlockRemoved", "block_hashes": [HASH]}],
    "removed, session_id": [REMOVED | {"session_id": "s"}],
    "cleared": [CLEARED],
    "cleared, medium": [CLEARED | {"medium": "GPU"}],
    "nothing": [],
}
PAYLOADS = {name: pack((TS, told, 0)) for name, told in CHANGES.items()} | {
    "ts an int": pack((1, [STORED], 0)),
    "ts nil": pack((None, [STORED], 0)),
    "no rank": pack((TS, [STORED])),
    "rank nil": pack((TS, [STORED], None)),
    "rank text": pack((TS, [STORED], "0")),
    "rank negative": pack((TS, [STORED], -1)),
    "four": pack((TS, [STORED], 0, "x")),
    "trailing": pack((TS, [STORED], 0)) + b"\x00",
}
MARK = pack((TS, [{"type": "Mark"}], 0))


class Publisher:
    """A PUB socket by hand; replay requests are answered with END, so that nobody waits for more."""

    def __init__(self) -> None:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.endpoint = self._pub.bind("tcp://127.0.0.1:0").addr
        self.replay_endpoint = self._router.bind("tcp://127.0.0.1:0").addr
        self._over = Event()
        self._thread = Thread(target=self._answer)
        self._thread.start()
        self._seq = 0

    def await_subscriber(self) -> None:
        """Until the consumer has subscribed."""
        assert wait_until(lambda: self._pub.poll(0))

    def publish(self, payload: bytes) -> None:
        """The next live message."""
        self._pub.send_multipart(live_frames(b"", self._seq, payload))
        self._seq += 1

    def _answer(self) -> None:
        while not self._over.is_set():
            if self._router.poll(20):
                client = self._router.recv_multipart()[0]
                self._router.send_multipart([client, *replay_end(delimited=True)])

    def close(self) -> None:
        """Both sockets and the thread."""
        self._over.set()
        self._thread.join()
        self._pub.close(linger=0)
        self._router.close(linger=0)
        self._context.term()


@pytest.mark.integration
def test_vllm_router() -> None:
    """Batches that it cannot read, by its log, are those that lint says it drops."""
    with contextlib.closing(Publisher()) as publisher:
        source = Source(publisher.endpoint, publisher.replay_endpoint)
        with router_for([None, source], 4) as router:
            publisher.await_subscriber()
            for name, payload in PAYLOADS.items():
                before = len(router.unreadable())
                publisher.publish(payload)
                publisher.publish(MARK)

                def marked(before: int = before) -> bool:
                    return any("Mark" in line for line in router.unreadable()[before:])

                assert wait_until(marked), name
                lost = [line for line in router.unreadable()[before:] if "Mark" not in line]
                assert bool(lost) == batch_lost("vllm-router", payload), (name, lost)
