"""Pages in a Mooncake Store: what sharing them brings, and every way to lose them.

What any store must do is in `test_storage_contract`.
"""

from __future__ import annotations

import socket
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from mooncake_rig import (
    SEGMENT,
    Lender,
    Master,
    Replacer,
    Worker,
    config_of,
    open_storage,
    require_mooncake,
    wait_until,
)
from ports_rig import free_port
from storage_rig import FORM, TIMEOUT_S, StorageRig, content_of, get, pages_of, put

from hicache.node import PageIndices
from hicache.pool import HostPool, KVShape, MLAShape, Shape
from hicache.storage.backend import StorageError, StoredPage
from hicache.storage.keys import KeyScheme, PageFormat, default_keys, sglang_mooncake_keys
from hicache.storage.mooncake import MooncakeStorage
from hicache.storage.mooncake_client import NOT_FOUND, OK, MooncakeClient, Part, meaning

pytestmark = pytest.mark.integration

PROMPT = pages_of(range(40))
KEYS = [page.key for page in PROMPT]
BIG = PageFormat("org/model@1", KVShape(8, 8, 64, torch.bfloat16), page_size=16)
"""256 KiB a page: 64 of them fill a segment."""
SGLANG = partial(sglang_mooncake_keys, tag="t")


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    """A master and memory for those tests that do no harm to either."""
    with Master() as master, Lender(master):
        yield master


@pytest.fixture(scope="module")
def outsider(master: Master) -> Iterator[Any]:
    """Mooncake's own client: what anybody else may do."""
    client = import_module("mooncake.store").MooncakeDistributedStore()
    size = 1 << 20  # of its own buffer
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, size, "tcp", "", master.address) == 0
    yield client
    client.close()


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Closes what it is given, the last first."""
    with ExitStack() as stack:
        yield stack


def join(
    closing: ExitStack, master: Master, **settings: object
) -> tuple[StorageRig, MooncakeStorage]:
    """A worker, and its store of pages of FORM."""
    rig = StorageRig(partial(open_storage, master, **settings), remembers=False)  # type: ignore[arg-type]
    closing.callback(rig.close)
    storage = rig.open()
    assert isinstance(storage, MooncakeStorage)
    return rig, storage


def join_big(
    closing: ExitStack, master: Master, form: PageFormat, **settings: object
) -> tuple[HostPool, MooncakeStorage]:
    """A worker with pages of another format, each full of bytes of its own, and its store."""
    pool = HostPool(64, form.page_size, form.shape)
    for page in range(64):
        pool.page(page)[:] = Random(page).randbytes(pool.bytes_per_page)
    storage = open_storage(master, form=form, **settings)  # type: ignore[arg-type]
    closing.callback(storage.close)
    storage.attach(pool)
    return pool, storage


def is_put(storage: MooncakeStorage, pages: list[StoredPage]) -> bool:
    """Whether all could be stored."""
    return storage.put(pages, first(len(pages))).result(TIMEOUT_S) == len(pages)


def keys_of(pages: list[StoredPage]) -> list[bytes]:
    """Of a prompt."""
    return [page.key for page in pages]


def first(count: int) -> PageIndices:
    """Host pages."""
    return array("q", range(count))


# ---------------------------------------------------------------------------------------- sharing


@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        (KVShape(3, 2, 8, torch.bfloat16), SGLANG),
        (KVShape(3, 2, 8, torch.float8_e4m3fn), default_keys),
        (MLAShape(3, 24, torch.bfloat16), default_keys),
        (MLAShape(3, 24, torch.float8_e5m2), SGLANG),
    ],
    ids=["kv-bf16-sglang", "kv-fp8", "latent-bf16", "latent-fp8-sglang"],
)
def test_pages_come_back_to_the_byte(
    closing: ExitStack, master: Master, shape: Shape, keys: Callable[[PageFormat], KeyScheme]
) -> None:
    """S2: K and V or latents, of any dtype, as one object or as two, whichever host pages they go to."""
    form = PageFormat(f"bytes/{shape}", shape, page_size=4)
    pool, storage = join_big(closing, master, form, keys=keys)
    assert storage.put(PROMPT, first(10)).result(TIMEOUT_S) == 10
    target = array("q", range(50, 40, -1))
    assert storage.get(KEYS, target).result(TIMEOUT_S) == 10
    assert [pool.page(page) for page in target] == [pool.page(page) for page in range(10)]


def test_the_master_knows_pages_by_sglangs_names(
    closing: ExitStack, master: Master, outsider: Any
) -> None:
    """K and V apart, as SGLang 0.5.23 looks for them: each is that half of the page."""
    rig, storage = join(closing, master, keys=SGLANG)
    before = master.names()
    assert put(rig, storage, PROMPT) == 10
    names = {f"t_org-model@1_{key.hex()}_0_{part}" for key in KEYS for part in "kv"}
    assert master.names() - before == names
    halves = (outsider.get(f"t_org-model@1_{KEYS[3].hex()}_0_{part}") for part in "kv")
    assert b"".join(halves) == content_of(KEYS[3])


def test_workers_share_pages(closing: ExitStack) -> None:
    """What one process puts another gets, either way, whoever's memory it is in."""
    master = closing.enter_context(Master())
    rig, storage = join(closing, master)
    worker = closing.enter_context(Worker(master))
    assert worker.ask("put", 0, 40) == 10
    assert get(rig, storage, KEYS) == 10
    others = pages_of(range(100, 140))
    assert put(rig, storage, others) == 10
    assert worker.ask("get", 100, 140) == 10


def test_another_format_misses(closing: ExitStack, master: Master) -> None:
    """S1: pages of another dtype, though of as many bytes, are not there."""
    rig, storage = join(closing, master)
    put(rig, storage, PROMPT)
    other = replace(FORM, shape=replace(FORM.shape, dtype=torch.bfloat16))
    _, stranger = join_big(closing, master, other)
    assert stranger.exists_prefix(KEYS).result(TIMEOUT_S) == 0
    assert stranger.get(KEYS, first(10)).result(TIMEOUT_S) == 0
    assert stranger.take_lost() == []


def test_sglangs_names_yield_no_page_of_another_size(closing: ExitStack, master: Master) -> None:
    """S2: they carry no dtype; a page that is smaller than ours is no hit, and is reported."""
    form = replace(FORM, model="org/sizes")
    rig, storage = join(closing, master, form=form, keys=sglang_mooncake_keys)
    put(rig, storage, PROMPT)
    wide = replace(form, shape=replace(FORM.shape, dtype=torch.float32))
    _, stranger = join_big(closing, master, wide, keys=sglang_mooncake_keys)
    assert stranger.exists_prefix(KEYS).result(TIMEOUT_S) == 10
    assert stranger.get(KEYS, first(10)).result(TIMEOUT_S) == 0
    assert stranger.take_lost() == KEYS
    assert stranger.stats.failed_gets == 10
    assert stranger.stats.last_error == f"get: {meaning(-600)}"


def test_a_page_that_is_there_keeps_its_bytes(closing: ExitStack, master: Master) -> None:
    """Putting it again counts, and changes nothing."""
    pool, storage = join_big(closing, master, replace(FORM, model="keeps"))
    assert storage.put(PROMPT[:1], array("q", [0])).result(TIMEOUT_S) == 1
    assert storage.put(PROMPT[:1], array("q", [1])).result(TIMEOUT_S) == 1
    assert storage.stats.written == 1
    assert storage.get(KEYS[:1], array("q", [2])).result(TIMEOUT_S) == 1
    assert pool.page(2) == pool.page(0) != pool.page(1)


def test_half_a_page_is_none(closing: ExitStack, master: Master, outsider: Any) -> None:
    """M1: with V gone the page is not there, is lost, and is whole again when put again."""
    form = replace(FORM, model="halves")
    rig, storage = join(closing, master, form=form, keys=sglang_mooncake_keys)
    put(rig, storage, PROMPT)
    names = [sglang_mooncake_keys(form)(key) for key in KEYS]
    assert outsider.batch_remove([names[4][1], names[7][0]], True) == [OK, OK]
    assert storage.exists_prefix(KEYS).result(TIMEOUT_S) == 4
    assert get(rig, storage, KEYS) == 4
    assert storage.take_lost() == [KEYS[4], KEYS[7]]
    assert put(rig, storage, PROMPT) == 10
    assert storage.stats.written == 12
    assert get(rig, storage, KEYS) == 10
    assert outsider.batch_remove([names[2][1]], True) == [OK]
    assert storage.audit(KEYS).result(TIMEOUT_S) == 1
    assert storage.take_lost() == [KEYS[2]]


def test_a_page_is_deleted_though_it_is_leased(
    closing: ExitStack, master: Master, outsider: Any
) -> None:
    """A reader's lease stops a plain removal, with -706; ours comes right after the read."""
    form = replace(FORM, model="leased")
    rig, storage = join(closing, master, form=form)
    put(rig, storage, PROMPT)
    assert get(rig, storage, KEYS) == 10
    assert outsider.remove(default_keys(form)(KEYS[0])[0]) == -706
    assert storage.delete(KEYS).result(TIMEOUT_S) == 10
    assert storage.exists_prefix(KEYS).result(TIMEOUT_S) == 0
    assert storage.take_lost() == []


# ----------------------------------------------------------------------------------------- losing


def test_no_memory_outside_the_pool_is_touched(closing: ExitStack, master: Master) -> None:
    """C1: host pages that the pool does not have are refused, and so is any pointer but its own."""
    rig, storage = join(closing, master)
    for host_pages in (array("q", [0]), array("q", [0, -1]), array("q", [0, rig.pool.num_pages])):
        with pytest.raises(ValueError, match=r"^host_pages: "):
            storage.put(PROMPT[:2], host_pages)
        with pytest.raises(ValueError, match=r"^host_pages: "):
            storage.get(KEYS[:2], host_pages)
    client = MooncakeClient(config_of(master.address))
    closing.callback(client.close)
    pool = rig.pool
    assert client.register(pool.address, pool.num_bytes) == OK
    for start in (-1, pool.num_bytes - FORM.bytes_per_page + 1):
        part = Part("outside", pool.address + start, FORM.bytes_per_page, None)
        for call in (client.put, client.get):
            with pytest.raises(AssertionError, match="C1"):
                call([part])


def test_eviction_is_found_out(closing: ExitStack) -> None:
    """M3: of more pages than there is room for an audit names the lost, and so does a failed get."""
    master = closing.enter_context(Master())
    closing.enter_context(Lender(master))
    _, storage = join_big(closing, master, BIG)
    keys: list[bytes] = []
    for number in range(8):
        pages = pages_of(range(1000 * number, 1000 * number + 64))
        wait_until(partial(is_put, storage, pages))
        keys += keys_of(pages)
    found_out = storage.audit(keys[:64]).result(TIMEOUT_S)
    lost = storage.take_lost()
    assert found_out == len(lost) > 0
    got = [key for key in keys if storage.get([key], first(1)).result(TIMEOUT_S)]
    lost += storage.take_lost()
    assert sorted(lost + got) == sorted(keys)
    assert storage.stats.lost == len(lost)
    assert storage.stats.last_error == f"get: {meaning(NOT_FOUND)}"


def test_the_pages_of_a_killed_worker_are_lost(closing: ExitStack) -> None:
    """M3: the master says that they exist, a get fails at once and names them, though later than that
    an audit would."""
    master = closing.enter_context(Master())
    lender = closing.enter_context(Lender(master))
    rig, storage = join(closing, master)
    assert put(rig, storage, PROMPT) == 10
    lender.kill()
    assert storage.exists_prefix(KEYS).result(TIMEOUT_S) == 10
    assert get(rig, storage, KEYS) == 0
    assert storage.take_lost() == KEYS
    assert storage.stats.failed_gets == storage.stats.lost == 10
    assert storage.stats.last_error == f"get: {meaning(-800)}"


def test_a_page_whose_memory_is_given_away_while_it_is_read_does_not_count(
    closing: ExitStack,
) -> None:
    """S2, M2: a worker deletes pages that we read, and others take their place: no byte is theirs."""
    master = closing.enter_context(Master())
    keys = keys_of(pages_of(range(48 * FORM.page_size)))
    names = [name for key in keys for name in default_keys(BIG)(key)]
    pool, storage = join_big(closing, master, BIG)
    other = closing.enter_context(Replacer(master, names, BIG.bytes_per_page))
    ones = b"1" * BIG.bytes_per_page
    random = Random(1)
    for _ in range(20):
        other.say("begin")
        assert other.answer() == "there"
        other.say(random.random() * 0.03)
        num_read = storage.get(keys, first(48)).result(TIMEOUT_S)
        assert other.answer() == "replaced"
        other.say("go on")
        assert all(pool.page(page) == ones for page in range(num_read))


# ------------------------------------------------------------------------------------- the master


def test_the_master_may_go_and_come_back(closing: ExitStack) -> None:
    """Killed under way: every call ends with a value, in seconds, then at once. Started anew, it knows
    no page, an audit names them as lost, and puts and gets go on."""
    masters = closing.enter_context(ExitStack())
    master = masters.enter_context(Master())
    _, storage = join_big(closing, master, BIG, segment=SEGMENT)
    prompts = [pages_of(range(100 * n, 100 * n + 80)) for n in range(6)]
    pages, keys = prompts[0], keys_of(prompts[0])
    assert storage.put(pages, first(20)).result(TIMEOUT_S) == 20
    calls = [storage.put(others, first(20)) for others in prompts[1:]]
    calls += [storage.get(keys, array("q", range(20, 40))) for _ in range(5)]
    master.kill()
    calls += [storage.delete(keys[10:]), storage.exists_prefix(keys), storage.audit(keys[:10])]
    assert all(0 <= call.result(TIMEOUT_S) <= 20 for call in calls)
    assert calls[-1].result() == 0, "an audit without an answer loses nothing"

    def fails_at_once() -> bool:
        begin = time.monotonic()
        assert storage.put(pages, first(20)).result(TIMEOUT_S) == 0
        assert storage.get(keys, first(20)).result(TIMEOUT_S) == 0
        return time.monotonic() - begin < 1

    wait_until(fails_at_once)
    assert storage.stats.last_error == f"get: {meaning(-900)}"
    storage.take_lost()

    masters.enter_context(Master(master.rpc_port))
    wait_until(partial(is_put, storage, pages))
    assert storage.get(keys, first(20)).result(TIMEOUT_S) == 20
    others = keys_of(prompts[1])
    assert storage.audit([*keys, *others]).result(TIMEOUT_S) == len(lost := storage.take_lost())
    assert set(lost) <= set(others)


@pytest.mark.parametrize("harm", [Master.kill, Master.pause])
def test_closing_does_not_wait_for_the_master(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Master], None]
) -> None:
    """With a put under way and the master gone or silent, `close` is over within its bound."""
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "300")
    master = closing.enter_context(Master())
    worker = closing.enter_context(Worker(master))
    starts = count(1000, 100)  # others each time: a put that failed may have begun its objects
    wait_until(lambda: worker.ask("put", start := next(starts), start + 40) == 10)
    harm(master)
    begin = time.monotonic()
    assert worker.ask("close", 100, 140) == 0
    assert time.monotonic() - begin < 11


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:{free}", "refused"),
        ("127.0.0.1:{silent}", "setup: "),
        ("127.0.0.1", "is not host:port"),
        ("127.0.0.1:0", "is not host:port"),
        ("", "empty"),
    ],
)
def test_a_master_that_cannot_be_reached_is_named(
    monkeypatch: pytest.MonkeyPatch, address: str, why: str
) -> None:
    """Within seconds, and by the setting's name: nobody there, nobody who answers, or no address."""
    require_mooncake()
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "300")
    monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = address.format(free=free_port(), silent=silent.getsockname()[1])
        begin = time.monotonic()
        with pytest.raises(StorageError, match=rf"master_server_address: .*{why}"):
            MooncakeStorage(config_of(where), FORM)
        assert time.monotonic() - begin < 10


# ------------------------------------------------------------------------------------ the settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("local_hostname", ""),
        ("metadata_server", ""),
        ("protocol", ""),
        ("global_segment_size", -1),
        ("global_segment_size", "4gb"),
        ("global_segment_size", SEGMENT - 1),
        ("local_buffer_size", -1),
    ],
)
def test_a_bad_setting_is_named(name: str, value: object) -> None:
    """Before anything is tried."""
    with pytest.raises(StorageError, match=f"^{name}: "):
        replace(config_of("127.0.0.1:1"), **{name: value})  # type: ignore[arg-type]


def test_what_only_the_library_can_refuse_is_named(master: Master) -> None:
    """More memory than there can be: the error has the setting and the code's meaning."""
    config = replace(config_of(master.address), global_segment_size=1 << 50)
    with pytest.raises(StorageError, match=rf"^global_segment_size: {1 << 50}.*\(-600\)$"):
        MooncakeStorage(config, FORM)


def test_an_interval_that_is_none_is_refused() -> None:
    """Pages that are lost are to be found out some time."""
    for interval in (0, -1, float("nan")):
        with pytest.raises(StorageError, match=r"^audit_interval_s: "):
            MooncakeStorage(config_of("127.0.0.1:1"), FORM, audit_interval_s=interval)


def test_names_that_do_not_divide_a_page_are_refused() -> None:
    """K and V are halves of it."""
    odd = PageFormat("odd", MLAShape(1, 3, torch.float8_e5m2), page_size=1)
    with pytest.raises(StorageError, match=r"^keys: 2 names for 3 bytes"):
        MooncakeStorage(config_of("127.0.0.1:1"), odd, keys=lambda form: lambda key: ("k", "v"))


def test_without_the_library_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is installed, or a shared library is missing: the error says that, and the remedy."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = config_of(f"127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setitem(sys.modules, "mooncake.store", None)
        with pytest.raises(StorageError, match=r"^mooncake: .*kvevents\[mooncake\]"):
            MooncakeStorage(config, FORM)

        why = "libibverbs.so.1: cannot open shared object file: No such file or directory"
        (tmp_path / "store.py").write_text(f"raise ImportError({why!r})")
        package = ModuleType("mooncake")
        package.__path__ = [str(tmp_path)]
        monkeypatch.setitem(sys.modules, "mooncake", package)
        monkeypatch.delitem(sys.modules, "mooncake.store")
        with pytest.raises(StorageError, match=f"^mooncake: {why}; .*libibverbs1"):
            MooncakeStorage(config, FORM)
