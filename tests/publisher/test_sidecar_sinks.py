"""Whole sidecars with several sinks, in all ways that a sink can be reached and spelled."""

from __future__ import annotations

import contextlib
import json
import socket as unix
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from ports_rig import free_ports
from publisher_link_rig import until
from publisher_rig import (
    LOOPBACK,
    PATIENCE_S,
    Socket,
    make_cache,
    receive_until,
    router_view,
    short_folder,
)
from publisher_sidecar_rig import (
    Recorder,
    config,
    flushed,
    get,
    sink,
    state_of,
    work,
)

from hicache import HiRadixCache
from kvevents import AllBlocksCleared, BlockIndex, BlockStored, StorageMedium, decode_batch
from kvevents.frames import parse_live
from kvevents.gaps import Restarted
from publisher import (
    Batch,
    ConfigError,
    LinkError,
    SidecarConfig,
    SinkConfig,
    Subscriber,
    WorkerInfo,
    spawn,
)
from publisher.link.messages import Bound

pytestmark = pytest.mark.integration

RANK = 3
WORKER = WorkerInfo(block_size=4, dp_rank=RANK, worker_id="w", model="org/m")


def tokens_in(recorder: Recorder) -> set[int]:
    """All tokens that were ever told."""
    return {
        token
        for seq in range(recorder.next_seq)
        for event in recorder.events(seq)
        if isinstance(event, BlockStored)
        for token in event.token_ids
    }


def test_sinks_of_one_source_each_tell_everything(tmp_path: Path) -> None:
    """Plain, without tokens, and merged: each counts from 0 without a hole, each view is the cache, each
    can be replayed from 0; the sidecar says of each what a recorder has seen.
    """
    cache = make_cache(num_pages=64)
    sinks = (
        sink(),
        sink(name="redacted", token_ids=False),
        sink(name="merged", coalesce_s=0.05),
    )
    with (
        spawn(WORKER, config(tmp_path, *sinks)) as sidecar,
        contextlib.ExitStack() as stack,
    ):
        recorders = [stack.enter_context(Recorder(bound)) for bound in sidecar.client.sinks]
        for _ in range(20):
            work(sidecar, cache, 10)
            for recorder in recorders:
                recorder.take()
        seqs = flushed(sidecar, cache)
        for recorder, seq in zip(recorders, seqs, strict=True):
            recorder.follow(seq)
            assert recorder.clears[0] == 0
            assert recorder.index.resident == cache.resident_blocks()
            recorder.check_told_again(0)
        plain, redacted, merged = recorders
        assert seqs[0] == seqs[1] > 200 > 2 * seqs[2]
        assert len(tokens_in(plain)) > 1000
        assert tokens_in(redacted) == set()
        assert tokens_in(merged) <= tokens_in(plain)
        until(lambda: [one["next_seq"] for one in state_of(sidecar)["sinks"]] == list(seqs))
        state = state_of(sidecar)["sinks"]
        assert [one["name"] for one in state] == ["sink0", "redacted", "merged"]
        assert [one["batches"] for one in state] == list(seqs)
        assert [one["subscribers"] for one in state] == [1, 1, 1]
        assert [one["endpoints"] for one in state] == [
            [bound.endpoint] for bound in sidecar.client.sinks
        ]


def first_topic(sidecar_bound: Bound) -> bytes:
    """That of a live batch."""
    with zmq.Context[Socket]() as context, context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(sidecar_bound.endpoint)
        assert sub.poll(int(PATIENCE_S * 1000))
        return parse_live(sub.recv_multipart()).topic


def test_topics_say_what_their_templates_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod is from the environment, the port is the one that was bound, each sink's its own."""
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    monkeypatch.setenv("POD_NAME", "pod-1")
    sinks = (
        sink(topic="kv@{pod_ip}:{port}@{model}", heartbeat_s=0.02),
        sink(topic="{pod_name}/{worker_id}/{dp_rank}/{served_model}", heartbeat_s=0.02),
    )
    with spawn(WORKER, config(tmp_path, *sinks)) as sidecar:
        one, other = sidecar.client.sinks
        port = one.endpoint.rpartition(":")[2]
        assert first_topic(one) == f"kv@10.0.0.7:{port}@org/m".encode()
        assert first_topic(other) == b"pod-1/w/3/org/m"


# ---------------------------------------------------------------------------------- where it is


@contextlib.contextmanager
def listening(count: int) -> Iterator[list[Socket]]:
    """Routers that bind, as some do, and wait for workers to connect."""
    with zmq.Context[Socket]() as context, contextlib.ExitStack() as stack:
        subs = [stack.enter_context(context.socket(zmq.SUB)) for _ in range(count)]
        for sub in subs:
            sub.setsockopt(zmq.LINGER, 0)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.bind(LOOPBACK)
        yield subs


@pytest.mark.parametrize("count", [1, 2])
def test_a_sink_connects_to_routers_that_bind(count: int, tmp_path: Path) -> None:
    """Each gets the whole stream; what was published before the connection was made is replayed."""
    cache = make_cache(num_pages=64)
    with listening(count) as subs:
        targets = tuple(sub.getsockopt_string(zmq.LAST_ENDPOINT) for sub in subs)
        endpoint = targets if count > 1 else targets[0]
        one = sink(mode="connect", endpoint=endpoint, add_dp_rank=False, heartbeat_s=0.02)
        with spawn(WORKER, config(tmp_path, one)) as sidecar:
            (bound,) = sidecar.client.sinks
            assert bound.endpoint == ",".join(targets)
            before = [_receive(sub)[0] for sub in subs]  # it is connected to everyone
            work(sidecar, cache, 20)
            (seq,) = flushed(sidecar, cache)
            for sub, start in zip(subs, before, strict=True):
                index, last = BlockIndex(), start
                while last + 1 < seq:
                    following, payload = _receive(sub)
                    assert following == last + 1
                    index.apply(decode_batch(payload).batch.events)
                    last = following
                assert index.resident == cache.resident_blocks()
            assert bound.replay_endpoint is not None


def _receive(sub: Socket) -> tuple[int, bytes]:
    assert sub.poll(int(PATIENCE_S * 1000)), "nothing came"
    frame = parse_live(sub.recv_multipart())
    return frame.seq, frame.payload


def test_the_rank_is_added_to_every_port(tmp_path: Path) -> None:
    """PUB, replay and HTTP of rank 3 are three above what all ranks are told; the documents for routers
    say the same.
    """
    cache = make_cache()
    pub, replay, http = free_ports(3)
    base = sink(
        endpoint=f"tcp://127.0.0.1:{pub - RANK}", replay_endpoint=f"tcp://127.0.0.1:{replay - RANK}"
    )
    settings = config(tmp_path, base, http_endpoint=f"http://127.0.0.1:{http - RANK}")
    with spawn(WORKER, settings) as sidecar:
        bound = Bound(f"tcp://127.0.0.1:{pub}", f"tcp://127.0.0.1:{replay}")
        assert sidecar.client.sinks == (bound,)
        assert sidecar.client.http_endpoint == f"http://127.0.0.1:{http}"
        assert get(f"http://127.0.0.1:{http}/readyz")[0] == 200
        work(sidecar, cache, 3)
        view = router_view(*_addresses(bound), flushed(sidecar, cache)[0])
        assert view.resident == cache.resident_blocks()
        info = json.loads(get(f"http://127.0.0.1:{http}/server_info")[1])["kv_events"]
        assert info["endpoint_port_base"] + RANK == pub
        assert info["replay_endpoint_port_base"] + RANK == replay
        document = json.loads(get(f"http://127.0.0.1:{http}/kv_event_sources")[1])
        assert document[str(RANK)]["endpoint"] == bound.endpoint


def _addresses(bound: Bound) -> tuple[str, str]:
    assert bound.replay_endpoint is not None
    return bound.endpoint, bound.replay_endpoint


def test_ranks_have_paths_of_their_own(tmp_path: Path) -> None:
    """Rank 0 and rank 1 of one worker with one configuration over ipc, at the same time."""
    with short_folder() as folder:
        shared = sink(endpoint=f"ipc://{folder}/pub", replay_endpoint=f"ipc://{folder}/replay")
        ranks = [WorkerInfo(block_size=4, dp_rank=rank, dp_size=2) for rank in range(2)]
        with (
            spawn(ranks[0], config(tmp_path, shared)) as first,
            spawn(ranks[1], config(tmp_path, shared)) as second,
        ):
            assert first.client.sinks[0].endpoint == f"ipc://{folder}/pub"
            assert second.client.sinks[0] == Bound(
                f"ipc://{folder}/pub_dp1", f"ipc://{folder}/replay_dp1"
            )
            for sidecar, pages in ((first, 1), (second, 5)):
                cache = make_cache()
                work(sidecar, cache, pages)
                view = router_view(*_addresses(sidecar.client.sinks[0]), flushed(sidecar, cache)[0])
                assert view.resident == cache.resident_blocks()
                assert len(view) == 2 * pages


def has_ipv6() -> bool:
    with contextlib.closing(unix.socket(unix.AF_INET6)) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")
def test_everything_is_there_over_ipv6(tmp_path: Path) -> None:
    """PUB, replay and HTTP, on free ports that are read back (case 96)."""
    cache = make_cache()
    address = "tcp://[::1]:0"
    settings = config(
        tmp_path, sink(endpoint=address, replay_endpoint=address), http_endpoint="http://[::1]:0"
    )
    with spawn(WORKER, settings) as sidecar:
        work(sidecar, cache, 3)
        view = router_view(*_addresses(sidecar.client.sinks[0]), flushed(sidecar, cache)[0])
        assert view.resident == cache.resident_blocks()
        assert str(sidecar.client.http_endpoint).startswith("http://[::1]:")
        assert state_of(sidecar)["sinks"][0]["endpoints"] == [sidecar.client.sinks[0].endpoint]


# ------------------------------------------------------------------------------------- refused


TWO_RANKS = WorkerInfo(block_size=4, dp_size=2)
A, B = "tcp://127.0.0.1:24557", "tcp://127.0.0.1:24558"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"sinks": (SinkConfig(endpoint=A, replay_endpoint=B),)},
            r"^sinks\[0\]\.replay_endpoint: .*24558 \(ranks 0\.\.1\) .* of sinks\[0\]\.endpoint, .*24557",
        ),
        (
            {
                "sinks": (
                    SinkConfig(endpoint=A, replay_endpoint=None),
                    SinkConfig(mode="connect", endpoint=A, replay_endpoint=None),
                )
            },
            r"^sinks\[1\]\.endpoint: .*24557.*sinks\[0\]\.endpoint",
        ),
        (
            {"sinks": (SinkConfig(endpoint="tcp://127.0.0.1:65535", replay_endpoint=None),)},
            r"^sinks\[0\]\.endpoint: port 65535 \+ rank 1 .* is above 65535",
        ),
        (
            {"sinks": (sink(topic="{namespace}"),)},
            r": sinks\[0\]\.topic: \{namespace\} .*has no NAMESPACE",
        ),
    ],
    ids=["overlap", "itself", "port", "no value"],
)
def test_what_cannot_be_reaches_the_caller(
    settings: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ports that overlap over the ranks, a connection to ourselves, a port too large for the last rank, a
    topic with a field that has no value: LinkError with the key and the reason.
    """
    monkeypatch.delenv("NAMESPACE", raising=False)
    with pytest.raises(LinkError, match=said):
        spawn(TWO_RANKS, SidecarConfig(**settings, state_dir=str(tmp_path)))


def test_a_topic_with_an_unknown_field_is_no_configuration() -> None:
    """ConfigError says the field, and which there are."""
    with pytest.raises(ConfigError, match=r"^topic: 'pot_ip' in .* is not one of .*pod_ip"):
        SinkConfig(topic="{pot_ip}")


# -------------------------------------------------------------------------------------- rebase


def follow(subscriber: Subscriber, index: BlockIndex, cache: HiRadixCache) -> list[int]:
    """Apply what comes until the view is the cache; the seqs."""
    seqs: list[int] = []

    def right(_: object) -> bool:
        return index.resident == cache.resident_blocks()

    while not right(None):
        for one in receive_until(subscriber, bool):
            match one:
                case Batch():
                    index.apply(one.batch.events)
                    seqs.append(one.seq)
                case Restarted():
                    index.clear()
                case _:
                    raise AssertionError(one)
    return seqs


def test_a_sink_starts_over_and_tells_everything(tmp_path: Path) -> None:
    """`rebase_after`: at seq 1000 the numbering of that sink goes back to 0, with AllBlocksCleared and
    then the state; the other sink's goes on. A subscriber's view is exact before and after.
    """
    cache = make_cache(num_pages=1024)
    sinks = sink(rebase_after=1000), sink()
    with spawn(WORKER, config(tmp_path, *sinks)) as sidecar:
        rebased, plain = sidecar.client.sinks
        with Subscriber(*_addresses(rebased)) as subscriber:
            index = BlockIndex()
            work(sidecar, cache, 900)
            assert flushed(sidecar, cache) == (901, 901)
            assert follow(subscriber, index, cache) == list(range(901))
            work(sidecar, cache, 150)
            seqs = follow(subscriber, index, cache)
            fall = seqs.index(0)
            assert seqs[:fall] == list(range(seqs[0], seqs[0] + fall))
            assert 1000 <= seqs[0] + fall < 1100
            assert seqs[fall:] == list(range(len(seqs) - fall))
            assert flushed(sidecar, cache)[0] == seqs[-1] + 1
            assert flushed(sidecar, cache)[1] > 1050
        with Recorder(rebased) as late:
            late.follow(flushed(sidecar, cache)[0])
            assert late.events(0)[0] == AllBlocksCleared()
            assert late.clears == [0]
            assert late.index.resident == cache.resident_blocks()
            assert late.index.count(StorageMedium.GPU) > 500
        view = router_view(*_addresses(plain), flushed(sidecar, cache)[1])
        assert view.resident == cache.resident_blocks()
