"""Names of pages, pinned: a page found under one is a page that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hicache.pool import HostPool, KVShape, MLAShape
from hicache.storage.keys import (
    PageFormat,
    default_keys,
    file_keys,
    sglang_file_keys,
    sglang_mooncake_keys,
)

KEY = bytes(range(32))
HASH = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
MHA = PageFormat("org/model-x", KVShape(2, 4, 8), page_size=64)
MLA = PageFormat("org/model-x", MLAShape(2, 576), page_size=64)
MHA_FINGERPRINT = "e5e2fe5934a9c07a"
MLA_FINGERPRINT = "055c9a89fb0c13e2"


@pytest.mark.parametrize(
    ("form", "fingerprint"), [(MHA, MHA_FINGERPRINT), (MLA, MLA_FINGERPRINT)], ids=["kv", "latents"]
)
def test_our_names_never_change(form: PageFormat, fingerprint: str) -> None:
    """A format has the fingerprint it always had, so that what was stored once is found again."""
    assert form.fingerprint == fingerprint
    assert default_keys(form)(KEY) == (f"{HASH}_{fingerprint}",)
    assert file_keys(form)(KEY) == (f"{fingerprint}/00/{HASH}_{fingerprint}.kv",)


def test_whatever_the_bytes_depend_on_is_in_the_fingerprint() -> None:
    """Formats that differ in one respect have different fingerprints."""
    base = replace(MHA, tp_size=4, pp_size=4)
    shape = KVShape(2, 4, 8)
    forms = [
        base,
        replace(base, model="org/model-y"),
        replace(base, page_size=32),
        replace(base, tp_rank=1),
        replace(base, tp_size=8),
        replace(base, pp_rank=1),
        replace(base, pp_size=8),
        replace(base, shape=replace(shape, num_layers=3)),
        replace(base, shape=replace(shape, num_kv_heads=2)),
        replace(base, shape=replace(shape, head_dim=16)),
        replace(base, shape=replace(shape, num_kv_heads=8, head_dim=4)),
        replace(base, shape=replace(shape, dtype=torch.float16)),
        replace(base, shape=MLAShape(2, 32)),
        replace(base, shape=MLAShape(4, 32)),
        replace(base, shape=MLAShape(2, 64)),
    ]
    assert len({form.fingerprint for form in forms}) == len(forms)


def test_latents_are_shared_by_the_ranks_of_a_stage() -> None:
    """Tensor-parallel ranks have the same latents and the same names; stages have not."""
    first = replace(MLA, tp_rank=0, tp_size=4)
    assert replace(first, tp_rank=3).fingerprint == first.fingerprint == MLA.fingerprint
    stages = {replace(MLA, pp_rank=rank, pp_size=2).fingerprint for rank in range(2)}
    assert len(stages | {MLA.fingerprint}) == 3


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (MHA, f"{HASH}_org-model-x_0_1.bin"),
        (replace(MHA, tp_rank=1, tp_size=2), f"{HASH}_org-model-x_1_2.bin"),
        (
            replace(MHA, tp_rank=1, tp_size=2, pp_rank=0, pp_size=4),
            f"{HASH}_org-model-x_1_2_4_0.bin",
        ),
        (replace(MHA, pp_rank=3, pp_size=4), f"{HASH}_org-model-x_0_1_4_3.bin"),
        (MLA, f"{HASH}_org-model-x.bin"),
        (replace(MLA, tp_rank=1, tp_size=2), f"{HASH}_org-model-x.bin"),
        (replace(MLA, pp_rank=3, pp_size=4), f"{HASH}_org-model-x_4_3.bin"),
    ],
)
def test_files_are_called_as_sglang_calls_them(form: PageFormat, name: str) -> None:
    """SGLang 0.5.23, HiCacheFile: tp part unless latents, pp part unless a single stage."""
    assert sglang_file_keys(form)(KEY) == (name,)


@pytest.mark.parametrize(
    ("form", "names"),
    [
        (MHA, (f"org-model-x_{HASH}_0_k", f"org-model-x_{HASH}_0_v")),
        (
            replace(MHA, tp_rank=1, tp_size=2),
            (f"org-model-x_{HASH}_1_k", f"org-model-x_{HASH}_1_v"),
        ),
        (
            replace(MHA, tp_rank=1, tp_size=2, pp_rank=0, pp_size=4),
            (f"org-model-x_{HASH}_1_0_k", f"org-model-x_{HASH}_1_0_v"),
        ),
        (MLA, (f"org-model-x_{HASH}__k",)),
        (replace(MLA, tp_rank=1, tp_size=2), (f"org-model-x_{HASH}__k",)),
        (replace(MLA, pp_rank=0, pp_size=4), (f"org-model-x_{HASH}_0_k",)),
        (replace(MLA, pp_rank=3, pp_size=4), (f"org-model-x_{HASH}_3_k",)),
    ],
)
def test_objects_are_called_as_sglang_calls_them(form: PageFormat, names: tuple[str, ...]) -> None:
    """SGLang 0.5.23, MooncakeStore: K and V of a rank, or one object with nothing for the rank."""
    assert sglang_mooncake_keys(form)(KEY) == names
    assert sglang_mooncake_keys(form, tag="t")(KEY) == tuple(f"t_{name}" for name in names)


@pytest.mark.parametrize("form", [MHA, MLA, replace(MHA, page_size=1)])
def test_a_page_is_as_long_as_the_host_pools(form: PageFormat) -> None:
    """`bytes_per_page` is that of a host pool of the same shape."""
    assert form.bytes_per_page == HostPool(1, form.page_size, form.shape).bytes_per_page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "model: empty"),
        ({"page_size": 0}, "page_size: 0 is below 1"),
        ({"tp_rank": 1}, r"tp_rank: 1 is not in 0\.\.0"),
        ({"tp_rank": -1}, r"tp_rank: -1 is not in 0\.\.0"),
        ({"pp_rank": 2, "pp_size": 2}, r"pp_rank: 2 is not in 0\.\.1"),
        ({"tp_size": 0}, r"tp_size: 0 is below 1"),
    ],
)
def test_a_format_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    """The error names the field, the value and the bound."""
    with pytest.raises(ValueError, match=message):
        replace(MHA, **changes)  # type: ignore[arg-type]
