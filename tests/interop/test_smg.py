"""SMG behind a sink of its dialect: its decoder, and the relays that follow a publisher for a gateway."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from interop_forwarder import Forwarder
from interop_process import venv_python
from interop_waiting import LOOPBACK, wait_until
from interop_worker import BLOCK, ExampleWorker
from router_kept import Kept, forget_state, replays
from smg_log import replayed
from smg_oracle import SmgOracle
from smg_relay import Kind, Resident, SmgRelay, resident

from kvevents import BASE, AllBlocksCleared, Namespace, StorageMedium, decode_batch
from kvevents.hashing import block_hashes
from kvevents.records import BlockId, Clear, Record, Remove, StoreKnown, StoreNew
from kvevents.tokens import pack_tokens
from publisher import SidecarConfig, SinkConfig, WorkerInfo, spawn

pytestmark = pytest.mark.integration

SERVICER = "smg-grpc-servicer 0.14.1"
CONSUMER: dict[Kind, str] = {"python": f"{SERVICER} relay", "rust": "SMG 1.13.0 relay"}
TIER = {
    StorageMedium.GPU: "device",
    StorageMedium.CPU: "host",
    StorageMedium.DISK: "disk",
    StorageMedium.EXTERNAL: "external",
}
STEPS = 20
"""Of the sink whose log has rolled."""
BEAT_S = 0.25
LIVE, ROLLED = 0, 1
"""The worker's sinks: as it is, and one with a short log that tells nobody for having joined."""
RESET = "restart with the state lost (seqs from 0)"


def conforms(consumer: str, situation: str) -> pytest.MarkDecorator:
    return pytest.mark.conformance(preset="smg", consumer=consumer, situation=situation)


def both_relays(situation: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "kind",
        [
            pytest.param(kind, marks=conforms(consumer, situation), id=kind)
            for kind, consumer in CONSUMER.items()
        ],
    )


# ------------------------------------------------------------------------------------ the worker


def start() -> ExampleWorker:
    return ExampleWorker.start(
        SinkConfig(dialect="smg", heartbeat_s=BEAT_S),
        SinkConfig(
            dialect="smg",
            heartbeat_s=BEAT_S,
            buffer_steps=STEPS,
            coalesce_s=0.0,
            tells_joiners=False,
        ),
        host_pages=32,
    )


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    venv_python("smg")
    found = Kept(start)
    yield found
    found.close()


@pytest.fixture
def worker(kept: Kept) -> Iterator[ExampleWorker]:
    """With an empty cache."""
    (found,) = kept.take()
    yield found
    kept.give_back()


def held(worker: ExampleWorker) -> Resident:
    """What a gateway should believe."""
    return {TIER[on]: set(blocks) for on, blocks in worker.resident().items() if blocks}


def fill(worker: ExampleWorker) -> list[int]:
    """Blocks on every tier, in different numbers; returns a prompt whose last block is on all of them."""
    prompt, other = worker.prompt(3), worker.prompt(2)
    worker.insert(prompt)
    worker.backup(prompt)
    worker.write_storage()
    worker.insert(other)
    worker.backup(other)
    worker.insert(worker.prompt(1))
    assert {tier: len(blocks) for tier, blocks in held(worker).items()} == {
        "device": 6,
        "host": 5,
        "disk": 3,
    }
    return prompt


def churn(worker: ExampleWorker, times: int) -> None:
    """So many batches at least, and other blocks than before."""
    for _ in range(times // 2):
        worker.insert(worker.prompt(1))
        worker.evict_device(1)
    worker.insert(worker.prompt(2))


# ------------------------------------------------------------------------------------ the relays


@contextlib.contextmanager
def relaying(
    kind: Kind, endpoint: str, replay_endpoint: str, *, ends: bool = False
) -> Iterator[SmgRelay]:
    """A relay that took all it was told for good. `ends`: whether it has to end the gateway's stream.

    The Rust one may do so whenever it has asked for a replay: live batches that were waiting meanwhile,
    and that the replay has brought too, it takes for those of another run.
    """
    check = "sglang" if kind == "python" else None
    with SmgRelay(kind, endpoint, replay_endpoint, block_size=BLOCK, hash_check=check) as relay:
        yield relay
        if ends or kind == "python":
            assert (relay.resubscribed > 0) == ends, relay.error
        seqs = [batch["seq"] for batch in relay.batches]
        assert seqs == sorted(set(seqs))
        if kind == "python":
            counts = relay.counts()
            assert counts["hash_checked"] > 0
            assert counts["hash_mismatch"] == counts["hash_unverifiable"] == 0
            assert counts["dropped"] == {}
            assert counts["duplicate_stores"] == 0


def joined(relay: SmgRelay) -> None:
    """Until the relay has its first batch: from then on it misses none."""
    relay.until(lambda: relay.resident() == {} and relay.batches)


def believes(relay: SmgRelay, worker: ExampleWorker) -> None:
    """Until the gateway believes what the cache holds."""
    expected = held(worker)
    relay.until(lambda: relay.resident() == expected)


@both_relays("moves between tiers")
def test_blocks_that_move(kind: Kind, worker: ExampleWorker) -> None:
    """After every step of a prompt down the tiers and up again, with an eviction from each, and after a
    flush, the gateway believes what the cache holds on each tier.
    """
    with relaying(kind, worker.endpoint(), worker.replay_endpoint()) as relay:
        joined(relay)
        prompt = worker.prompt(3)
        steps: list[Callable[[], None]] = [
            lambda: worker.insert(prompt),
            lambda: worker.backup(prompt),
            lambda: worker.evict_device(2),
            worker.write_storage,
            lambda: worker.evict_host(3),
            lambda: worker.evict_device(1),
            lambda: worker.prefetch(prompt),
            lambda: worker.load_back(prompt),
            worker.reset_device,
            worker.flush,
        ]
        seen = []
        for step in steps:
            step()
            believes(relay, worker)
            seen.append({tier: len(blocks) for tier, blocks in relay.resident().items()})
        assert seen == [
            {"device": 3},
            {"device": 3, "host": 3},
            {"device": 1, "host": 3},
            {"device": 1, "host": 3, "disk": 3},
            {"device": 1, "disk": 3},
            {"disk": 3},
            {"host": 3, "disk": 3},
            {"device": 3, "host": 3, "disk": 3},
            {"host": 3, "disk": 3},
            {},
        ]


@both_relays("late join")
def test_a_late_join(kind: Kind, worker: ExampleWorker) -> None:
    """The Rust relay asks for all that was published before it came, and the Python one, which asks for
    nothing, is told the state: neither misses anything after.
    """
    fill(worker)
    with relaying(kind, worker.endpoint(), worker.replay_endpoint()) as relay:
        believes(relay, worker)
        worker.insert(worker.prompt(2))
        believes(relay, worker)


@both_relays("resync")
def test_a_resync(kind: Kind, worker: ExampleWorker) -> None:
    """SIGUSR1: the state is told anew to those who know it already."""
    fill(worker)
    with relaying(kind, worker.endpoint(), worker.replay_endpoint()) as relay:
        believes(relay, worker)
        worker.resync()
        worker.insert(worker.prompt(2))
        believes(relay, worker)


@both_relays("gap")
def test_a_gap(kind: Kind, worker: ExampleWorker) -> None:
    """What was lost on the way comes by replay."""
    with (
        Forwarder(worker.endpoint()) as forwarder,
        relaying(kind, forwarder.endpoint, worker.replay_endpoint()) as relay,
    ):
        joined(relay)
        prompt = fill(worker)
        believes(relay, worker)
        asked = replays(worker, LIVE)
        forwarder.lose()
        worker.evict_device(3)
        worker.evict_host(2)
        worker.insert(worker.prompt(2, after=prompt))
        forwarder.restore(worker.next_seqs[LIVE])
        believes(relay, worker)
        assert replays(worker, LIVE) > asked


@both_relays("sidecar killed")
def test_a_sidecar_that_is_killed(kind: Kind, worker: ExampleWorker) -> None:
    """The next one goes on where it was: what changed meanwhile is told."""
    with relaying(kind, worker.endpoint(), worker.replay_endpoint()) as relay:
        joined(relay)
        fill(worker)
        believes(relay, worker)
        killed = worker.kill_sidecar()
        worker.evict_device(2)
        worker.insert(worker.prompt(2))
        worker.await_sidecar(killed)
        believes(relay, worker)


@both_relays("worker killed and started again")
def test_a_worker_that_is_killed(kind: Kind, worker: ExampleWorker) -> None:
    """All is cleared when it dies; when it is back the gateway believes in what its files hold, and
    follows it as before.
    """
    with relaying(kind, worker.endpoint(), worker.replay_endpoint()) as relay:
        joined(relay)
        fill(worker)
        believes(relay, worker)
        worker.kill()
        relay.until(lambda: relay.resident() == {})
        worker.restart()
        assert {tier: len(blocks) for tier, blocks in held(worker).items()} == {"disk": 3}
        believes(relay, worker)
        worker.insert(worker.prompt(2))
        believes(relay, worker)


def start_at_zero(relay: SmgRelay, worker: ExampleWorker) -> None:
    """Kill the worker, lose its sidecar's state, and start it again."""
    joined(relay)
    fill(worker)
    believes(relay, worker)
    worker.kill()
    relay.until(lambda: relay.resident() == {})
    forget_state(worker)
    before = relay.resubscribed
    worker.restart()

    def has_ended() -> bool:
        relay.read()
        return relay.resubscribed > before

    relay.until(has_ended)
    assert relay.error is not None
    assert relay.error[0] == "DATA_LOSS"


@conforms(CONSUMER["rust"], RESET)
def test_seqs_that_begin_at_zero(worker: ExampleWorker) -> None:
    """The relay ends the gateway's stream, as when an engine is restarted; who subscribes anew gets all
    of the new run.
    """
    endpoints = worker.endpoint(), worker.replay_endpoint()
    with relaying("rust", *endpoints, ends=True) as relay:
        start_at_zero(relay, worker)
        believes(relay, worker)
        worker.insert(worker.prompt(2))
        believes(relay, worker)


@conforms(CONSUMER["python"], RESET)
def test_seqs_that_begin_at_zero_for_who_asks_for_nothing(worker: ExampleWorker) -> None:
    """The relay ends the gateway's stream; who subscribes anew is told the state."""
    endpoints = worker.endpoint(), worker.replay_endpoint()
    with relaying("python", *endpoints, ends=True) as relay:
        start_at_zero(relay, worker)
        believes(relay, worker)
        worker.insert(worker.prompt(2))
        believes(relay, worker)


@conforms(CONSUMER["rust"], "late join, the log does not reach back")
def test_a_late_join_after_the_log_has_rolled(worker: ExampleWorker) -> None:
    """The state before the log comes as a snapshot, at the seq that was asked for."""
    fill(worker)
    churn(worker, STEPS + 10)
    endpoints = worker.endpoint(ROLLED), worker.replay_endpoint(ROLLED)
    with relaying("rust", *endpoints) as relay:
        believes(relay, worker)
        if not relay.resubscribed:
            assert relay.batches[0]["seq"] == 0
        worker.insert(worker.prompt(2))
        believes(relay, worker)


@both_relays("gap, the log does not reach back")
def test_a_gap_longer_than_the_log(kind: Kind, worker: ExampleWorker) -> None:
    """What was missed is no more; a snapshot comes in its place."""
    with (
        Forwarder(worker.endpoint(ROLLED)) as forwarder,
        relaying(kind, forwarder.endpoint, worker.replay_endpoint(ROLLED)) as relay,
    ):
        joined(relay)
        fill(worker)
        believes(relay, worker)
        begun, asked = len(relay.batches), replays(worker, ROLLED)
        forwarder.lose()
        churn(worker, STEPS + 10)
        worker.evict_host(2)
        forwarder.restore(worker.next_seqs[ROLLED])
        believes(relay, worker)
        assert replays(worker, ROLLED) > asked
        if not relay.resubscribed:
            assert relay.batches[begun]["events"][0] == {"kind": "cleared"}


# ----------------------------------------------------------------------------------- the decoder


@contextlib.contextmanager
def told(*batches: Sequence[Record]) -> Iterator[list[bytes]]:
    """What a sink of the dialect makes of records; behind it a clear, and one empty batch at least."""
    sink = SinkConfig(
        dialect="smg",
        endpoint=f"tcp://{LOOPBACK}:0",
        replay_endpoint=f"tcp://{LOOPBACK}:0",
        heartbeat_s=BEAT_S,
        coalesce_s=0.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        config = SidecarConfig(sinks=(sink,), linger_s=0.0, state_dir=folder, http_endpoint=None)
        with spawn(WorkerInfo(block_size=BLOCK), config) as sidecar:
            for records in (*batches, [Clear()]):
                assert sidecar.client.publish(list(records))
            replay_endpoint = sidecar.client.sinks[0].replay_endpoint
            assert replay_endpoint is not None
            payloads: list[bytes] = []

            def is_complete() -> bool:
                payloads[:] = replayed(replay_endpoint)
                events = [decode_batch(payload).batch.events for payload in payloads]
                while events and not events[-1]:
                    del events[-1]
                cleared = events[1:] and events[-1] == [AllBlocksCleared()]
                return bool(cleared) and len(events) < len(payloads)

            assert wait_until(is_complete)
            yield payloads


def store_new(first_id: int, tokens: range, namespace: Namespace = BASE) -> StoreNew:
    """A prompt of its own, on the device."""
    count = len(tokens) // BLOCK
    packed = pack_tokens(tokens)
    return StoreNew(StorageMedium.GPU, BlockId(first_id), count, None, namespace, packed)


def events_of(smg: SmgOracle, payloads: list[bytes]) -> list[list[dict[str, Any]]]:
    """What a gateway gets of each batch."""
    for payload in payloads:
        batch = smg.decode(payload)
        assert isinstance(batch["ts"], float) and batch["ts"] > 0
        assert batch["dp_rank"] == 0
        kinds = {event["kind"] for event in batch["events"]}
        assert kinds <= {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    return [smg.normalize(payload)["events"] for payload in payloads]


@conforms(f"{SERVICER} decoder", "every event on every medium")
def test_every_batch_is_read_whole() -> None:
    """A store and a removal on every medium, a clear and an empty batch: SMG reads each event as it was
    meant, drops none, and finds the hashes that it computes from the tokens.
    """
    lower = list(StorageMedium)[1:]
    tokens = range(7, 7 + 4 * BLOCK)
    with (
        told(
            [store_new(0, tokens[: 3 * BLOCK])],
            *([StoreKnown(medium, BlockId(0), 3)] for medium in lower),
            [
                StoreNew(
                    StorageMedium.GPU,
                    BlockId(3),
                    1,
                    BlockId(2),
                    None,
                    pack_tokens(tokens[3 * BLOCK :]),
                )
            ],
            [Remove(StorageMedium.GPU, [(BlockId(3), 1), (BlockId(2), 1)])],
            *([Remove(medium, [(BlockId(2), 1)])] for medium in lower),
        ) as payloads,
        SmgOracle("sglang") as smg,
    ):
        events = events_of(smg, payloads)
        counts = smg.counts()
        names = smg.sglang_chain(tokens, BLOCK)
    stored = [event for batch in events for event in batch if event["kind"] == "stored"]
    removed = [event for batch in events for event in batch if event["kind"] == "removed"]
    fields = ("tier", "medium", "block_hashes", "parent_block_hash", "token_ids", "block_size")
    most = list(tokens[: 3 * BLOCK])
    assert [tuple(event[field] for field in fields) for event in stored] == [
        *((TIER[on], on.value, names[:3], None, most, BLOCK) for on in StorageMedium),
        ("device", "GPU", names[3:], names[2], list(tokens[3 * BLOCK :]), BLOCK),
    ]
    assert [(event["tier"], event["block_hashes"]) for event in removed] == [
        ("device", [names[3], names[2]]),
        *((TIER[on], names[2:3]) for on in lower),
    ]
    cleared = {"kind": "cleared"}
    assert [batch.index(cleared) for batch in events if cleared in batch] == [0, 0]
    assert events[0][0] == cleared
    assert events[-1] == []
    assert counts["dropped"] == {}
    assert counts["hash_checked"] == 3 * len(StorageMedium) + 1
    assert counts["hash_mismatch"] == counts["hash_unverifiable"] == counts["duplicate_stores"] == 0


@conforms(f"{SERVICER} decoder", "adapters and salts")
def test_namespaces() -> None:
    """An adapter's blocks are told under its name. Those with a salt or an extra key, which the dialect
    has no words for, are not told at all: they would be taken for others of the same tokens.
    """
    tokens = range(2 * BLOCK)
    spaces = [
        BASE,
        Namespace(lora_name="adapter"),
        Namespace(cache_salt="salt"),
        Namespace(extra_key="key"),
        Namespace(lora_name="adapter", cache_salt="salt"),
    ]
    blocks = [block_hashes(tokens, BLOCK, space) for space in spaces]
    with (
        told(
            [store_new(2 * place, tokens, space) for place, space in enumerate(spaces)],
            [
                Remove(StorageMedium.GPU, [(BlockId(2 * place + 1), 1)])
                for place in range(len(spaces))
            ],
        ) as payloads,
        SmgOracle() as smg,
    ):
        events = events_of(smg, payloads)
        assert smg.counts()["dropped"] == {}
    told_of = {
        (event["lora_name"], event["cache_salt"], *event["block_hashes"])
        for batch in events
        for event in batch
        if event["kind"] == "stored"
    }
    assert told_of == {(None, None, *blocks[0]), ("adapter", None, *blocks[1])}
    before = events[: events.index([{"kind": "cleared"}], 1)]
    assert resident([{"events": batch} for batch in before]) == {
        "device": {blocks[0][0], blocks[1][0]}
    }
