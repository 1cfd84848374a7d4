"""What the cache's parts are made of is looked at when they are made, and named."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache import HiCacheConfig, HiRadixCache, HostPool, KVShape, MLAShape, PagePool
from hicache.storage import FileStorage, PageFormat, StorageError

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=1)
POOL = PagePool(8, 4, SHAPE)
FORM = PageFormat.of(POOL, "m")
ODD: list[Any] = ["x", b"b", (), [1], {}, object()]
MAKERS: dict[str, tuple[Callable[..., object], dict[str, Any], tuple[str, ...]]] = {
    "KVShape": (
        *(KVShape, {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1}),
        ("num_layers", "num_kv_heads", "head_dim", "dtype"),
    ),
    "MLAShape": (MLAShape, {"num_layers": 1, "latent_dim": 1}, ("num_layers", "latent_dim")),
    "PagePool": (
        *(PagePool, {"num_pages": 8, "page_size": 4, "shape": SHAPE}),
        ("num_pages", "page_size", "shape"),
    ),
    "HostPool": (
        *(HostPool, {"num_pages": 8, "page_size": 4, "shape": SHAPE}),
        ("num_pages", "page_size", "shape"),
    ),
    "beside": (HostPool.beside, {"pool": POOL}, ("ratio", "num_bytes")),
    "PageFormat": (PageFormat.of, {"pool": POOL, "model": "m"}, ("pool",)),
    "cache": (
        *(HiRadixCache, {"device_pool": POOL, "host_pool": HostPool.beside(POOL, ratio=1.0)}),
        ("device_pool", "host_pool", "storage", "transfers", "config", "agreement", "hash_format"),
    ),
    "HiCacheConfig": (
        *(HiCacheConfig, {}),
        tuple(field.name for field in dataclasses.fields(HiCacheConfig)),
    ),
}


@pytest.mark.parametrize(
    ("maker", "field"), [(maker, field) for maker in MAKERS for field in MAKERS[maker][2]]
)
def test_another_type_is_refused_by_name(maker: str, field: str) -> None:
    """A ValueError or TypeError whose first word is the argument, whatever it is given."""
    make, whole, _ = MAKERS[maker]
    for odd in ODD:
        if isinstance(odd, str) and field == "eviction_policy":
            continue
        with pytest.raises((ValueError, TypeError), match=rf"^{field}\b"):
            make(**whole | {field: odd})


@pytest.mark.parametrize("field", ["directory", "form", "max_bytes", "min_free_bytes"])
def test_a_store_is_told_of_the_right_types(field: str, tmp_path: Path) -> None:
    """As above; and a bound that is no number is none."""
    whole: dict[str, Any] = {"directory": tmp_path, "form": FORM}
    for odd in ODD:
        if (field, odd) != ("directory", "x"):
            with pytest.raises(TypeError, match=rf"^{field}\b"):
                FileStorage(**whole | {field: odd})
    if field.endswith("bytes"):
        with pytest.raises(StorageError, match=rf"^{field}: nan is below"):
            FileStorage(**whole | {field: math.nan})


def test_a_store_that_is_refused_says_so_each_time(tmp_path: Path) -> None:
    """It needs a host pool; it is the caller's still, open, and a second one is told what to do."""
    storage = FileStorage(tmp_path, FORM)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^storage: needs a host_pool"):
            HiRadixCache(POOL, storage=storage)
    with pytest.raises(StorageError, match=re.escape("uses it, until it is closed (it holds ")):
        FileStorage(tmp_path, FORM)
    host = HostPool.beside(POOL, ratio=1.0)
    with HiRadixCache(POOL, host_pool=host, storage=storage):
        pass
    FileStorage(tmp_path, FORM).close()
