"""publisher.engines in real SGLang and vLLM modules: their event objects go in, come out exact."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from interop_rpc import RemoteError
from interop_script import SIZE, Script, name_of
from plugin_rig import Rank, payloads, rank_of, until
from ports_rig import free_ports

from kvevents import BlockIndex, BlockStored, StorageMedium, block_hashes, decode_batch
from kvevents.hashing import block_digests
from kvevents.tokens import pack_tokens
from publisher import Batch, Subscriber
from publisher.engines.events import EventReader

pytestmark = pytest.mark.integration

SGLANG, VLLM = "sglang-0.5.23", "vllm-0.33.0"
ON = {"KVEVENTS_SIDECAR": "1"}


def keys_of(folder: Path, **more: Any) -> dict[str, Any]:
    """Of an option: sockets in a folder."""
    return {
        "endpoint": f"ipc://{folder}/pub",
        "replay_endpoint": f"ipc://{folder}/replay",
        **more,
    }


def text_of(folder: Path, **more: Any) -> str:
    """SGLang's option, for our publisher."""
    own = {"publisher": "sidecar", "state_dir": f"{folder}/state", "http_endpoint": "none"}
    return json.dumps({**own, **keys_of(folder, **more)})


def file_of(folder: Path, **more: Any) -> dict[str, str]:
    """The environment of vLLM's: a file with what its option has no keys for."""
    path = folder / "kvevents.json"
    own = {"state_dir": f"{folder}/state", "http_endpoint": "none"}
    path.write_text(json.dumps(own | more))
    return {**ON, "KVEVENTS_CONFIG": str(path)}


def told(replay_endpoint: str) -> list[bytes]:
    """The payloads that say something, without what begins a stream."""
    found = [one for one in payloads(replay_endpoint) if decode_batch(one).batch.events]
    first = decode_batch(found[0]).batch.events
    return found[1:] if [type(one).__name__ for one in first] == ["AllBlocksCleared"] else found


def has_told(replay_endpoint: str, count: int) -> bool:
    return len(told(replay_endpoint)) >= count


def stored(blocks: Sequence[int], parent: int | None, **more: Any) -> dict[str, Any]:
    tokens = [block * 10 + i for block in range(len(blocks)) for i in range(SIZE)]
    return {
        "type": "BlockStored",
        "block_hashes": list(blocks),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(blocks: Sequence[int], medium: str) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


def names(unsigned: bool, run: int = 0) -> list[int]:
    found = [name_of(block, run) for block in range(8)]
    return [one % 2**64 for one in found] if unsigned else found


def sglang_batches() -> list[list[dict[str, Any]]]:
    a, b = names(False), names(False, 1)
    return [
        [stored(a[:3], None)],
        [stored(a[3:4], a[2], session_id="s-1"), stored(b[:2], None, cache_salt="salt")],
        [stored(b[2:5], None, lora_name="adapter"), stored(a[:3], None, medium="CPU_PINNED")],
        [removed(a[3:4], "GPU"), removed([a[2]], "GPU"), stored(a[4:6], a[2])],
        [removed([a[2]], "CPU_PINNED") | {"block_hashes": [a[5]], "medium": "GPU"}],
        [CLEARED, stored(a[6:8], None)],
    ]


def vllm_batches(spell: Any) -> list[list[dict[str, Any]]]:
    a, b = ([spell(one) for one in names(True, run)] for run in (0, 1))
    media = [None, ["mm-0", 3]]
    return [
        [stored(a[:3], None, session_id="s-1")],
        [stored(b[:2], None, extra_keys=[["salt"], media[1]])],
        [stored(b[2:4], None, lora_name="adapter", extra_keys=[["adapter"], ["adapter"]])],
        [stored(a[:2], None, medium="CPU"), removed([a[2]], "GPU")],
        [removed([a[1]], "CPU")],
        [CLEARED, stored(a[5:8], None)],
    ]


def check_told(rank: Rank, replay_endpoint: str, batches: list[list[dict[str, Any]]]) -> None:
    """What has come, read by the engine's own decoder, is what its own encoder would have sent."""
    until(lambda: len(told(replay_endpoint)) >= len(batches))
    for payload, events in zip(told(replay_endpoint), batches, strict=True):
        theirs = rank.ask("decode", payload=rank.ask("encode", ts=0.0, events=events, dp_rank=0))
        ours = rank.ask("decode", payload=payload)
        assert ours["events"] == theirs["events"]
        assert ours["dp_rank"] == 0


# ------------------------------------------------------------------------------------------- both


def test_sglangs_events_come_out_exact(tmp_path: Path) -> None:
    """With "publisher": "sidecar", by SGLang's own scheduler component, every field as its own publisher
    would send it; also what went in while there was no sidecar, for it was killed; and what no engine
    should hand over raises nothing.
    """
    batches = sglang_batches()
    with rank_of(SGLANG) as rank:
        assert "sidecar=SidecarPublisher" in rank.loaded
        assert rank.ask("create", config=text_of(tmp_path)) == "SidecarPublisher"
        rank.publish(*batches[:3])
        check_told(rank, f"ipc://{tmp_path}/replay", batches[:3])
        pid = rank.ask("sidecar")
        os.kill(pid, signal.SIGKILL)
        rank.publish(*batches[3:])
        check_told(rank, f"ipc://{tmp_path}/replay", batches)
        rank.ask("publish_oddities")
        assert rank.ask("sidecar") != pid
        pid = rank.ask("sidecar")
        rank.ask("shutdown")
        assert rank.ended(pid)


def test_vllms_events_come_out_byte_for_byte(tmp_path: Path) -> None:
    """With KVEVENTS_SIDECAR, in place of "zmq": but for the time, the bytes of vLLM's own publisher."""
    batches = vllm_batches(lambda one: one)
    with rank_of(VLLM, env=file_of(tmp_path)) as rank:
        assert "zmq=SidecarPublisher" in rank.loaded
        config = keys_of(tmp_path, enable_kv_cache_events=True)
        assert rank.ask("create", config=config) == "SidecarPublisher"
        rank.publish(*batches)
        replay = f"ipc://{tmp_path}/replay"
        check_told(rank, replay, batches)
        for payload, events in zip(told(replay), batches, strict=True):
            ts = decode_batch(payload).batch.ts
            assert payload == rank.ask("encode", ts=ts, events=events, dp_rank=0)
        pid = rank.ask("sidecar")
        rank.ask("shutdown")
        assert rank.ended(pid)


def test_vllms_hashes_of_bytes(tmp_path: Path) -> None:
    """Hashes of 32 bytes come out as their last 8, as vLLM itself writes those that are ints."""
    batches = vllm_batches(lambda one: bytes(24) + one.to_bytes(8, "big"))
    with rank_of(VLLM, env=file_of(tmp_path)) as rank:
        rank.ask("create", config=keys_of(tmp_path, enable_kv_cache_events=True))
        rank.publish(*batches)
        check_told(rank, f"ipc://{tmp_path}/replay", vllm_batches(lambda one: one))


@pytest.mark.parametrize("release", ["sglang-0.5.18", "vllm-0.23.0"])
def test_event_objects_of_older_releases(release: str) -> None:
    """Whose events are arrays, and whose salted stores are another class: read as their payload is, with
    hashes as signed ints.
    """
    events = sglang_batches()[1] if release.startswith("sglang") else vllm_batches(int)[2]
    if release.startswith("sglang"):
        events = [{**one, "metadata": {"cache_salt": "pepper"}} for one in events]
    with rank_of(release, plugins=False) as rank:
        theirs = decode_batch(rank.ask("encode", ts=0.0, events=events, dp_rank=0)).batch.events
        ours = decode_batch(rank.ask("read", events=events)).batch.events
    assert ours == EventReader().read(theirs)
    if release.startswith("sglang"):
        assert [one.cache_salt for one in ours if isinstance(one, BlockStored)] == ["pepper"] * 2


# ------------------------------------------------------------------------------------------ ranks


@pytest.mark.parametrize("release", [SGLANG, VLLM])
def test_each_rank_has_a_sidecar_of_its_own(release: str, tmp_path: Path) -> None:
    """At ports that the rank is added to, as the engines do; each batch names its rank."""
    ports = free_ports(1)  # and those behind, which are not likely to be taken
    keys = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[0] + 10}"}
    sizes = {"buffer_steps": 70, "hwm": 80, "max_queue_size": 90, "topic": "kv"}
    env = file_of(tmp_path, worker={"block_size": SIZE})
    with (
        rank_of(release, rank=0, ranks=2, env=env) as first,
        rank_of(release, rank=1, ranks=2, env=env) as second,
    ):
        for rank, child in enumerate((first, second)):
            config: Any = {**keys, **sizes, "enable_kv_cache_events": True}
            if release == SGLANG:
                config = json.dumps({**keys, "publisher": "sidecar"})
            child.ask("create", config=config)
            script = Script(release, run=rank)
            child.publish(*script.batches(0, 6))
            at = [f"tcp://127.0.0.1:{ports[0] + rank}", f"tcp://127.0.0.1:{ports[0] + 10 + rank}"]
            until(partial(has_told, at[1], 6))
            router = BlockIndex()
            for payload in payloads(at[1]):
                batch = decode_batch(payload).batch
                assert batch.dp_rank == rank
                router.apply(batch.events)
            assert set(router.resident[StorageMedium.GPU]) == set(script.chain)
            source = child.ask("describe", block_size=SIZE)
            if release == SGLANG:
                assert source == [
                    {
                        "dp_rank": rank,
                        "endpoint": at[0],
                        "topic": "",
                        "block_size": SIZE,
                        "replay_endpoint": at[1],
                    }
                ]
            else:
                assert source == {**source, **sizes}
                assert source["endpoint"] == f"tcp://*:{ports[0] + rank}"
                assert source["replay_endpoint"] == f"tcp://*:{ports[0] + 10 + rank}"


def test_a_block_size_that_nobody_says(tmp_path: Path) -> None:
    """The sidecar starts with the first block that is stored, and nothing of before is lost."""
    env = file_of(tmp_path)
    with rank_of(VLLM, env=env) as rank:
        rank.ask("create", config={"endpoint": "tcp://*:0", "enable_kv_cache_events": True})
        assert rank.ask("sidecar") == 0
        assert "the sidecar of rank 0 waits for the first stored block" in rank.log()
        assert rank.ask("describe", block_size=SIZE) is None  # the port is not chosen yet
        script = Script(VLLM)
        assert rank.publish(*script.batches(0, 12)) < 1.0
        until(lambda: rank.ask("sidecar"))
        source = rank.ask("describe", block_size=SIZE)
        assert source["endpoint"].startswith("tcp://127.0.0.1:")
        assert source["endpoint"] != "tcp://127.0.0.1:0"
        rank.publish(*script.batches(12, 1))


def test_a_live_subscriber(tmp_path: Path) -> None:
    """Follows the engine as it follows any sink of ours."""
    with rank_of(SGLANG) as rank:
        rank.ask("create", config=text_of(tmp_path, heartbeat_s=0.1))
        script, router = Script(SGLANG), BlockIndex()
        with Subscriber(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay") as subscriber:
            for first in range(0, 40, 10):
                rank.publish(*script.batches(first, 10))

                def follow() -> bool:
                    for one in subscriber.receive(0.05):
                        if isinstance(one, Batch):
                            router.apply(one.batch.events)
                    return set(router.resident[StorageMedium.GPU]) == set(script.chain)

                until(follow)


# ---------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"hwmm": 5}, "--kv-events-config: hwmm: no such key; did you mean hwm?"),
        ({"buffer_steps": 0}, "--kv-events-config: buffer_steps: 0 is below 1"),
        ({"dialect": "morse"}, "--kv-events-config: dialect: 'morse'"),
        ({"block_size": 0}, "--kv-events-config: block_size: 0"),
        ({"sinks": [{"endpoint": "tcp://x"}]}, "--kv-events-config: sinks[0].endpoint: "),
        ({"replay_endpoint": "tcp://*:5557", "endpoint": "tcp://*:5557"}, "replay_endpoint: "),
        ({"topic": "{pod_ip}"}, "sinks[0].topic: {pod_ip}"),
        ({"linger_s": 1000}, "--kv-events-config: linger_s: 1000"),
    ],
)
def test_a_key_that_cannot_be_is_named(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    """And stops SGLang, as its own publisher does."""
    with rank_of(SGLANG, env={"POD_IP": ""}) as rank:
        with pytest.raises(RemoteError) as refused:
            rank.ask("create", config=text_of(tmp_path, **keys))
        assert str(refused.value).startswith("ConfigError: --kv-events-config: ")
        assert said in str(refused.value)


def test_without_the_switch_vllm_is_as_it_was(tmp_path: Path) -> None:
    """Its own publisher publishes; SGLang's "zmq" is its own too, with our plugin loaded."""
    with rank_of(VLLM) as rank:
        assert "zmq=ZmqEventPublisher" in rank.loaded
        assert (
            rank.ask("create", config=keys_of(tmp_path, enable_kv_cache_events=True))
            == "ZmqEventPublisher"
        )
    with rank_of(SGLANG) as rank:
        told_zmq = json.dumps({**keys_of(tmp_path), "publisher": "zmq"})
        assert rank.ask("create", config=told_zmq) == "ZmqEventPublisher"


def test_what_is_seen_where_the_plugin_is_not_loaded(tmp_path: Path) -> None:
    """As docs/engines.md has it: SGLang knows no such publisher, and vLLM says that it has its own."""
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    said = "Unknown event publisher 'sidecar'"
    with (
        rank_of(SGLANG, plugins=False) as rank,
        pytest.raises(RemoteError, match=f"ValueError: {said}"),
    ):
        rank.ask("create", config=text_of(tmp_path))
    assert f"`{said}`" in page
    with rank_of(SGLANG) as rank:
        until(lambda: "Loaded plugin kvevents" in rank.log())
    assert "`Loaded plugin kvevents`" in page
    with rank_of(VLLM, env=ON, plugins=False) as rank:
        rank.ask("create", config=keys_of(tmp_path, enable_kv_cache_events=True))
        until(lambda: "Starting ZMQ publisher thread" in rank.log())
    assert "`Starting ZMQ publisher thread`" in page


def test_an_address_that_is_taken_does_not_stop_the_engine(tmp_path: Path) -> None:
    """The sidecar is tried again until the address is free, and what was told meanwhile comes then."""
    import socket

    (port,) = free_ports(1)
    with socket.socket() as other, rank_of(SGLANG) as rank:
        other.bind(("0.0.0.0", port))
        other.listen()
        config = text_of(tmp_path, endpoint=f"tcp://*:{port}")
        rank.ask("create", config=config)
        assert rank.ask("sidecar") == 0
        script = Script(SGLANG)
        rank.publish(*script.batches(0, 6))
        other.close()
        until(lambda: rank.ask("sidecar"))
        until(lambda: len(told(f"ipc://{tmp_path}/replay")) >= 6)
        assert "did not start, and is tried again" in rank.log()


# ---------------------------------------------------------------------------------- SGLang's pages


def page_events(rank: Rank, first: int, count: int, parent: int | None = None) -> list[int]:
    """Have SGLang tell of the blocks of these tokens on the device; their hashes."""
    tokens = list(range(first, first + count * SIZE))
    found = [*block_hashes(tokens, SIZE)]
    event = stored(found, parent)
    rank.publish([{**event, "token_ids": tokens}])
    return [int(one) for one in found]


def on_disk(folder: Path) -> BlockIndex:
    router = BlockIndex()
    for payload in payloads(f"ipc://{folder}/replay"):
        router.apply(decode_batch(payload).batch.events)
    return router


def extra_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "backend_name": "kvevents",
        "module_path": "publisher.engines.sglang_storage",
        "class_name": "SidecarStorage",
        "directory": f"{folder}/pages",
        "min_free_bytes": 0,
        **more,
    }


@pytest.mark.parametrize(
    ("interface", "layout"), [(0, "page_first"), (1, "page_first"), (1, "layer_first")]
)
def test_pages_of_sglang_are_told_as_disk(interface: int, layout: str, tmp_path: Path) -> None:
    """By SGLang's own controller, host pool and factory: what it writes is found and read back the same,
    and a router knows of it, also after a flush, a restart of the engine, an eviction, and a clear.
    """
    extra = extra_of(tmp_path, interface_v1=interface)
    disk = StorageMedium.DISK
    with rank_of(SGLANG) as rank:
        made = rank.ask("pages_attach", extra=extra, layout=layout)
        assert made == {"class": "SidecarStorage", "base": "HiCacheStorage"}
        rank.ask("create", config=text_of(tmp_path))
        blocks = page_events(rank, 1000, 10)
        tokens = list(range(1000, 1040))
        prefix: list[str] | None = [] if interface else None
        assert rank.ask("pages_hits", tokens=tokens) == 0
        assert rank.ask("pages_backup", tokens=tokens, last=None, prefix=prefix) == 40
        assert rank.ask("pages_hits", tokens=[*tokens, *range(8)]) == 40
        assert rank.ask("pages_fetch", tokens=tokens) == 10
        until(lambda: set(on_disk(tmp_path).resident[disk]) == set(blocks))
        rank.publish([CLEARED])  # a flush: of the device and the host, and not of the files
        until(lambda: not on_disk(tmp_path).resident[StorageMedium.GPU])
        until(lambda: set(on_disk(tmp_path).resident[disk]) == set(blocks))
        rank.ask("pages_close")
    extra["max_bytes"] = sum(one.stat().st_size for one in Path(f"{tmp_path}/pages").rglob("*.kv"))
    with rank_of(SGLANG) as rank:  # it is told at once of what it has from before
        rank.ask("create", config=text_of(tmp_path))
        rank.ask("pages_attach", extra=extra, layout=layout)
        until(lambda: set(on_disk(tmp_path).resident[disk]) == set(blocks))
        more = page_events(rank, 5000, 6)
        other = list(range(5000, 5024))
        assert rank.ask("pages_backup", tokens=other, last=None, prefix=prefix) == 24

        def right() -> bool:
            held = rank.ask("pages_hits", tokens=tokens) // SIZE
            assert held < 10
            return set(on_disk(tmp_path).resident[disk]) == {*more, *blocks[:held]}

        until(right)
        assert rank.ask("pages_clear") is True
        until(lambda: not on_disk(tmp_path).resident[disk])
        rank.ask("pages_close")


def test_pages_of_other_kinds_are_apart(tmp_path: Path) -> None:
    """What one layout, model or rank has stored, another does not find; and it is there still."""
    tokens, extra = list(range(1000, 1012)), extra_of(tmp_path, interface_v1=1)
    with rank_of(SGLANG) as rank:
        rank.ask("pages_attach", extra=extra)
        assert rank.ask("pages_backup", tokens=tokens, last=None, prefix=[]) == 12
        rank.ask("pages_close")
        for other in (
            {"layout": "layer_first"},
            {"model_name": "org/other"},
            {"tp_rank": 1, "tp_size": 2},
            {"pp_rank": 1, "pp_size": 2},
        ):
            rank.ask("pages_attach", extra=extra, **other)
            assert rank.ask("pages_hits", tokens=tokens) == 0
            rank.ask("pages_close")
        rank.ask("pages_attach", extra=extra)
        assert rank.ask("pages_hits", tokens=tokens) == 12
        rank.ask("pages_close")


def test_single_pages_and_the_page_before(tmp_path: Path) -> None:
    """One page is kept as several are; one behind a prefix whose last page is not kept is not."""
    tokens, more = list(range(1000, 1004)), list(range(8))
    with rank_of(SGLANG) as rank:
        rank.ask("pages_attach", extra=extra_of(tmp_path, interface_v1=1))
        found = rank.ask("pages_singly", tokens=tokens)
        assert found.pop("said") == "host_indices: 3 for 1 pages of 4"
        assert found == {"before": [False, None], "stored": True, "exists": True, "equal": True}
        first, last = "11" * 32, page_hash_of(tokens)
        for prefix, kept in (([last, first], 0), ([first, last], 8)):
            assert rank.ask("pages_backup", tokens=more, last=prefix[-1], prefix=prefix) == kept
        rank.ask("pages_close")


def page_hash_of(tokens: list[int]) -> str:
    """Of a prompt's first page."""
    (digest,) = block_digests(b"", pack_tokens(tokens), SIZE)
    return digest.hex()


def test_pages_of_hybrid_models_and_bad_keys(tmp_path: Path) -> None:
    """The second interface answers for the KV pool alone; another pool, latents that ranks share, and
    keys that cannot be are refused by name.
    """
    tokens = list(range(1000, 1012))
    with rank_of(SGLANG) as rank:
        for keys, config, said in (
            ({"max_byte": 5}, {}, "max_byte: no such key"),
            ({"directory": ""}, {}, "directory: ''"),
            ({"max_bytes": -1}, {}, "max_bytes: -1"),
            ({}, {"is_mla_model": True, "tp_size": 2}, "tp_size: 2"),
        ):
            with pytest.raises(RemoteError, match=f"StorageError: {said}"):
                rank.ask("pages_attach", extra=extra_of(tmp_path) | keys, **config)
        rank.ask("pages_attach", extra=extra_of(tmp_path, interface_v1=1))
        assert rank.ask("pages_backup", tokens=tokens, last=None, prefix=None) == 12
        answers = rank.ask("pages_v2", tokens=tokens)
        assert answers["alone"] == [3, [1, 2, 3]]
        assert answers["beside"] == 0
        assert answers["get"] == {"kv": [True] * 3, "mamba": [False]}
        assert answers["set"] == {"kv": [True] * 3}
        with pytest.raises(RemoteError, match="StorageError: pool mamba"):
            rank.ask("pages_other_pool")
        rank.ask("pages_close")
