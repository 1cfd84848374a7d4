"""What every store of pages must do; see `hicache.storage.backend`."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from mooncake_rig import Lender, Master, mooncake_rig
from storage_rig import (
    FORM,
    NUM_PAGES,
    STORAGE_RIGS,
    TIMEOUT_S,
    StorageRig,
    content_of,
    fill,
    get,
    pages_of,
    put,
)

from hicache.pool import HostPool, Shape
from hicache.storage.backend import StorageBackend, StorageError
from hicache.tier import STORAGE_TIERS
from kvevents.namespace import BASE, Namespace

pytestmark = pytest.mark.integration

PROMPT = pages_of(range(40))
KEYS = [page.key for page in PROMPT]


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    """With memory to lend; no test of these harms either."""
    with Master() as master, Lender(master):
        yield master


@pytest.fixture(params=[*STORAGE_RIGS, "mooncake"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorageRig]:
    """Each back end in turn."""
    made: AbstractContextManager[StorageRig]
    if request.param == "mooncake":
        made = mooncake_rig(request.getfixturevalue("master"))
    else:
        made = STORAGE_RIGS[request.param](tmp_path)
    with made as rig:
        yield rig


@pytest.fixture
def storage(rig: StorageRig) -> StorageBackend:
    """An empty store."""
    return rig.open()


def test_what_is_put_is_got(rig: StorageRig, storage: StorageBackend) -> None:
    """S2: every page comes back to the byte, into whatever host pages are named."""
    assert put(rig, storage, PROMPT) == len(PROMPT)
    assert get(rig, storage, KEYS) == len(PROMPT)
    elsewhere = array("q", [50, 3, 40])
    assert storage.get(KEYS[:3], elsewhere).result(TIMEOUT_S) == 3
    assert [bytes(rig.pool.page(page)) for page in elsewhere] == [content_of(k) for k in KEYS[:3]]


def test_an_empty_store_has_nothing(rig: StorageRig, storage: StorageBackend) -> None:
    """Nothing is held, exists, is got, or is lost."""
    assert storage.tier in STORAGE_TIERS
    assert storage.held() == []
    assert storage.exists_prefix(KEYS).result(TIMEOUT_S) == 0
    assert get(rig, storage, KEYS) == 0
    assert storage.take_lost() == []


def test_no_keys_are_no_work(storage: StorageBackend) -> None:
    """Every call takes an empty sequence."""
    nothing = array("q")
    calls = [
        *(storage.exists_prefix([]), storage.put([], nothing), storage.get([], nothing)),
        *(storage.delete([]), storage.audit([])),
    ]
    assert [call.result(TIMEOUT_S) for call in calls] == [0] * 5


def test_leading_pages_count(rig: StorageRig, storage: StorageBackend) -> None:
    """`exists_prefix` and `get` stop at the first page that is not there."""
    put(rig, storage, PROMPT[:4])
    assert storage.exists_prefix(KEYS).result(TIMEOUT_S) == 4
    assert get(rig, storage, KEYS) == 4
    unknown = pages_of(range(100, 104))[0].key
    assert storage.exists_prefix([*KEYS[:2], unknown, *KEYS[2:4]]).result(TIMEOUT_S) == 2
    assert get(rig, storage, [*KEYS[:2], unknown, *KEYS[2:4]]) == 2


def test_putting_again_counts_and_writes_nothing(rig: StorageRig, storage: StorageBackend) -> None:
    """A page that is there counts as stored; only the new ones are written."""
    put(rig, storage, PROMPT[:4])
    assert put(rig, storage, PROMPT) == len(PROMPT)
    assert storage.stats.written == len(PROMPT)
    assert get(rig, storage, KEYS) == len(PROMPT)
    assert (storage.stats.read, storage.stats.failed_puts) == (len(PROMPT), 0)


def test_equal_tokens_of_different_namespaces_are_different_pages(
    rig: StorageRig, storage: StorageBackend
) -> None:
    """Adapter, salt and extra key keep pages apart; branches of a prompt share its start."""
    namespaces = [BASE, *(Namespace(**{name: "x"}) for name in Namespace.__struct_fields__)]
    prompts = [pages_of(range(12), namespace) for namespace in namespaces]
    prompts.append(pages_of([*range(8), 90, 91, 92, 93]))
    for pages in prompts:
        assert put(rig, storage, pages) == 3
    assert storage.stats.written == 4 * 3 + 1
    for pages in prompts:
        assert get(rig, storage, [page.key for page in pages]) == 3


def test_what_is_deleted_is_gone(rig: StorageRig, storage: StorageBackend) -> None:
    """It is not got any more, is no loss, and can be put again."""
    put(rig, storage, PROMPT)
    assert storage.delete(KEYS[6:]).result(TIMEOUT_S) == 4
    assert storage.exists_prefix(KEYS).result(TIMEOUT_S) == 6
    assert get(rig, storage, KEYS) == 6
    assert storage.take_lost() == []
    assert storage.delete(KEYS[6:]).result(TIMEOUT_S) == 4, "not stored already"
    assert put(rig, storage, PROMPT) == len(PROMPT)
    assert get(rig, storage, KEYS) == len(PROMPT)


def test_a_delete_comes_after_earlier_puts(rig: StorageRig, storage: StorageBackend) -> None:
    """Put, delete and put without waiting leave what the last of them says."""
    host_pages = fill(rig.pool, KEYS)
    calls = [storage.put(PROMPT, host_pages), storage.delete(KEYS)]
    assert [call.result(TIMEOUT_S) for call in calls] == [10, 10]
    assert storage.exists_prefix(KEYS).result(TIMEOUT_S) == 0
    calls = [storage.put(PROMPT, host_pages), storage.delete(KEYS), storage.put(PROMPT, host_pages)]
    assert [call.result(TIMEOUT_S) for call in calls] == [10, 10, 10]
    assert get(rig, storage, KEYS) == 10


def test_what_is_there_passes_an_audit(rig: StorageRig, storage: StorageBackend) -> None:
    """An audit of stored pages reports nothing."""
    put(rig, storage, PROMPT)
    assert storage.audit(KEYS).result(TIMEOUT_S) == 0
    assert storage.take_lost() == []
    assert get(rig, storage, KEYS) == len(PROMPT)


def test_what_is_held_is_there(rig: StorageRig, storage: StorageBackend) -> None:
    """After a restart `held` names pages in full, parents before children, and they are got."""
    salted = pages_of(range(12), Namespace(lora_name="a", cache_salt="b"))
    branch = pages_of([*range(8), 90, 91, 92, 93])
    put(rig, storage, PROMPT)
    put(rig, storage, salted)
    put(rig, storage, branch)
    storage = rig.open()
    held = storage.held()
    seen: set[bytes | None] = {None}
    for page in held:
        assert page.parent in seen
        seen.add(page.key)
    if rig.remembers:
        assert set(held) == {*PROMPT, *salted, *branch}
        assert len(held) == len(set(held))
    for pages in (PROMPT, salted, branch):
        keys = [page.key for page in pages]
        assert get(rig, storage, keys) == (len(keys) if keys[0] in seen else 0)


@pytest.mark.parametrize(
    ("page_size", "shape", "field"),
    [
        (FORM.page_size * 2, FORM.shape, "page_size"),
        (FORM.page_size, replace(FORM.shape, num_layers=3), "shape"),
        (FORM.page_size, replace(FORM.shape, dtype=torch.bfloat16), "dtype"),
    ],
)
def test_a_pool_of_another_format_is_refused(
    rig: StorageRig, page_size: int, shape: Shape, field: str
) -> None:
    """The error names what differs."""
    storage = rig.make()
    try:
        with pytest.raises(StorageError, match=f"^{field}: "):
            storage.attach(HostPool(1, page_size, shape))
    finally:
        storage.close()


def test_a_store_serves_one_pool(rig: StorageRig, storage: StorageBackend) -> None:
    """A second pool is refused: pages would come from it that the first cache means."""
    with pytest.raises(StorageError, match="attach: the store has a cache already"):
        storage.attach(HostPool(1, rig.pool.page_size, rig.pool.shape))


def test_a_closed_store_leaves_no_future_open(rig: StorageRig, storage: StorageBackend) -> None:
    """After `close`, which may be called twice, each call is done or cancelled, earlier or later."""
    host_pages = fill(rig.pool, KEYS)
    calls = [storage.put(PROMPT, host_pages) for _ in range(50)]
    calls += [storage.get(KEYS, array("q", range(20, 30))) for _ in range(50)]
    storage.close()
    storage.close()
    calls += [storage.put(PROMPT, host_pages), storage.exists_prefix(KEYS), storage.delete(KEYS)]
    for call in calls:
        assert call.done()
        with suppress(CancelledError):
            assert call.result(0) <= len(PROMPT)


def test_no_interleaving_yields_wrong_bytes(rig: StorageRig, storage: StorageBackend) -> None:
    """Puts, gets and deletes of the same pages, many at a time: what is counted is right (S2)."""
    random = Random(7)
    host_pages = fill(rig.pool, KEYS)
    target = array("q", range(len(KEYS), 2 * len(KEYS)))
    for _ in range(60):
        for page in target:
            rig.pool.page(page)[:] = bytes(FORM.bytes_per_page)
        start = random.randrange(len(KEYS))
        gone = storage.delete(KEYS[start:])
        again = storage.put(PROMPT, host_pages)
        got = storage.get(KEYS, target).result(TIMEOUT_S)
        for page, key in zip(target[:got], KEYS, strict=False):
            assert bytes(rig.pool.page(page)) == content_of(key)
        assert gone.result(TIMEOUT_S) == len(KEYS) - start
        assert again.result(TIMEOUT_S) == len(KEYS)
    assert get(rig, storage, KEYS) == len(KEYS)
    assert len(KEYS) * 2 <= NUM_PAGES
