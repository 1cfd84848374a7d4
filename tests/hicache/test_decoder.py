"""A model computes the same, whichever tier its prefix comes from.

A matrix product may round differently for another number of rows, so what is compared to the bit is a
prompt computed in the same two steps, prefix and rest, by a model that has no cache. Prompts in one step
are compared within the rounding of float32.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from mooncake_rig import Lender, Master, open_storage

from examples.decoder import Decoder, DecoderConfig
from hicache import (
    HiCacheConfig,
    HiRadixCache,
    HostPool,
    Match,
    PageIndices,
    PagePool,
    PrefetchPolicy,
    Tier,
)
from hicache.storage.backend import StorageBackend
from hicache.storage.file import FileStorage
from hicache.storage.keys import PageFormat

PAGE = 4
NUM_PAGES = 16
PROMPT = [(7 * i * i + 3 * i + 5) % 128 for i in range(30)]
"""Seven pages and a half."""
PREFIX = PROMPT[:24]
PREFIX_PAGES = 6
GARBAGE = 0xFF
"""NaN in every float."""

DTYPES = [torch.float32, torch.bfloat16]
EAGER = HiCacheConfig(
    load_back_threshold=0,
    prefetch_threshold=0,
    prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
)

OpenStorage: TypeAlias = Callable[[], StorageBackend]


def new_decoder(dtype: torch.dtype, page_size: int = PAGE) -> Decoder:
    """The model over an empty pool."""
    config = DecoderConfig(dtype=dtype)
    return Decoder(config, PagePool(NUM_PAGES, page_size, config.shape))


def from_scratch(decoder: Decoder) -> tuple[torch.Tensor, list[bytes]]:
    """The logits behind the prefix, and the prefix's KV, computed in two steps without a cache."""
    pages = array("q", range(8))
    decoder.prefill(PREFIX, pages)
    return decoder.prefill(PROMPT, pages, len(PREFIX)), kv_of(decoder.pool, pages[:PREFIX_PAGES])


def kv_of(pool: PagePool, pages: PageIndices) -> list[bytes]:
    """The bytes of each page, all its planes."""
    return [b"".join(raw[page].numpy().tobytes() for raw in pool.raw) for page in pages]


class Served:
    """The model behind a cache, as an engine has it."""

    def __init__(self, dtype: torch.dtype, storage: StorageBackend | None = None) -> None:
        self.decoder = new_decoder(dtype)
        self.pool = self.decoder.pool
        self.host = HostPool.beside(self.pool, ratio=1)
        self.cache = HiRadixCache(self.pool, host_pool=self.host, storage=storage, config=EAGER)

    def request(self, tokens: list[int]) -> torch.Tensor:
        """Match, compute the rest, insert; the logits of what was computed."""
        cache = self.cache
        match = cache.match_prefix(tokens)
        cache.lock(match.node)
        new = cache.allocate(-(-len(tokens) // PAGE) - match.num_pages)
        assert new is not None
        logits = self.decoder.prefill(tokens, match.page_indices + new, match.prefix_len)
        whole = len(tokens) // PAGE - match.num_pages
        cache.insert(tokens, new[:whole], first_page=match.num_pages)
        cache.free(new[whole:])
        cache.unlock(match.node)
        return logits

    def fetch(self) -> Match:
        """Bring the prefix to the device from wherever it is; where it is now."""
        cache = self.cache
        if (prefetch := cache.prefetch(PREFIX)) is not None:
            assert cache.settle(30)
            assert cache.prefetch_done(prefetch)
        host_node = cache.match_prefix(PREFIX).host_node
        cache.lock(host_node)
        cache.load_back(host_node)
        assert cache.settle(30)
        cache.unlock(host_node)
        return cache.match_prefix(PREFIX)

    def forget_device(self) -> None:
        """Nothing is on the device, and whatever is read there by mistake is not a number."""
        assert self.cache.settle(30)
        self.cache.reset_device()
        for raw in self.pool.raw:
            raw.fill_(GARBAGE)


@contextmanager
def device(dtype: torch.dtype) -> Iterator[Served]:
    """The prefix is still where it was computed."""
    served = Served(dtype)
    with closing(served.cache):
        served.request(PREFIX)
        yield served


@contextmanager
def host(dtype: torch.dtype) -> Iterator[Served]:
    """The prefix was evicted from the device."""
    with device(dtype) as served:
        served.forget_device()
        assert served.cache.match_prefix(PREFIX).num_host_pages == PREFIX_PAGES
        yield served


@contextmanager
def storage(dtype: torch.dtype, open_it: OpenStorage) -> Iterator[Served]:
    """The prefix was computed by an earlier process."""
    earlier = Served(dtype, open_it())
    with closing(earlier.cache):
        earlier.request(PREFIX)
        assert earlier.cache.settle(30)
    later = Served(dtype, open_it())
    with closing(later.cache):
        match = later.cache.match_prefix(PREFIX)
        assert (match.num_pages, match.num_host_pages) == (0, 0)
        yield later


@contextmanager
def tier(name: str, dtype: torch.dtype, directory: Path) -> Iterator[Served]:
    """A model whose cache has the prefix on the tier `name` alone, or also below it."""
    form = PageFormat("decoder", DecoderConfig(dtype=dtype).shape, PAGE)
    with ExitStack() as stack:
        match name:
            case "device":
                context = device(dtype)
            case "host":
                context = host(dtype)
            case "file":
                context = storage(dtype, partial(FileStorage, directory, form, min_free_bytes=0))
            case _:
                master = stack.enter_context(Master())
                stack.enter_context(Lender(master))
                context = storage(dtype, partial(open_storage, master, form=form))
        yield stack.enter_context(context)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "device",
        "host",
        pytest.param("file", marks=pytest.mark.integration),
        pytest.param("mooncake", marks=pytest.mark.integration),
    ],
)
def test_a_cached_prefix_changes_no_logit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """From every tier, KV and logits are those from scratch, to the bit."""
    expected, kv = from_scratch(new_decoder(dtype))
    with tier(name, dtype, tmp_path) as served:
        match = served.fetch()
        assert match.num_pages == PREFIX_PAGES
        assert kv_of(served.pool, match.page_indices) == kv
        logits = served.request(PROMPT)
        assert logits.shape == (len(PROMPT) - len(PREFIX), 128)
        assert torch.equal(logits, expected)
        assert served.cache.violations() == []


@pytest.mark.parametrize("name", ["device", "host"])
def test_a_wrong_byte_changes_the_logits(name: str, tmp_path: Path) -> None:
    """The comparison above can fail: one bit of one page is enough, on the device or on the host."""
    expected, _ = from_scratch(new_decoder(torch.float32))
    with tier(name, torch.float32, tmp_path) as served:
        if name == "device":
            page = served.cache.match_prefix(PREFIX).page_indices[2]
            served.pool.raw[0][page, 3] ^= 0x40
        else:
            served.host.page(next(iter(served.cache.resident_pages(Tier.HOST).values())))[3] ^= 0x40
        assert served.fetch().num_pages == PREFIX_PAGES
        assert not torch.equal(served.request(PROMPT), expected)


def test_a_prompt_in_one_step_is_the_same_within_rounding() -> None:
    """Without a cache and in one step, float32 agrees to within 1e-5 with prefix and rest."""
    expected, _ = from_scratch(new_decoder(torch.float32))
    logits = new_decoder(torch.float32).prefill(PROMPT, array("q", range(8)))
    assert torch.allclose(logits[len(PREFIX) :], expected, rtol=1e-5, atol=1e-5)


def test_tokens_one_by_one_are_the_same_within_rounding() -> None:
    """Decoding a token at a time agrees with a prefill, so KV is written and read where it should be."""
    decoder, pages = new_decoder(torch.float32), array("q", range(8))
    single = [decoder.prefill(PROMPT[: i + 1], pages, i) for i in range(len(PROMPT))]
    expected = new_decoder(torch.float32).prefill(PROMPT, pages)
    assert torch.allclose(torch.cat(single), expected, rtol=1e-5, atol=1e-5)


def test_which_pages_hold_the_kv_does_not_matter() -> None:
    """Scattered pages, of another size too, give the logits of pages in order, to the bit."""
    expected = new_decoder(torch.float32).prefill(PROMPT, array("q", range(8)))
    scattered = new_decoder(torch.float32).prefill(PROMPT, array("q", [9, 2, 15, 0, 7, 1, 12, 4]))
    larger = new_decoder(torch.float32, page_size=16).prefill(PROMPT, array("q", [5, 3]))
    assert torch.equal(scattered, expected)
    assert torch.equal(larger, expected)


def test_every_token_before_counts_and_none_after() -> None:
    """A change of the first token changes all logits; one of the last token only its own."""
    pages = array("q", range(8))
    one, first, last = (
        new_decoder(torch.float32).prefill(tokens, pages)
        for tokens in (PROMPT, [1, *PROMPT[1:]], [*PROMPT[:-1], 1])
    )
    assert (one != first).any(dim=1).all()
    assert torch.equal(one[:-1], last[:-1])
    assert not torch.equal(one[-1], last[-1])


def test_bad_calls_are_refused() -> None:
    """A pool of another shape, odd sizes, a prefix of everything and missing pages, by name."""
    decoder = new_decoder(torch.float32)
    with pytest.raises(ValueError, match=r"prefix_len: 30 is not in 0\.\.29"):
        decoder.prefill(PROMPT, array("q", range(8)), 30)
    with pytest.raises(ValueError, match="page_indices: 7 are too few"):
        decoder.prefill(PROMPT, array("q", range(7)))
    with pytest.raises(ValueError, match="pool: of KVShape"):
        Decoder(DecoderConfig(num_layers=2), decoder.pool)
    with pytest.raises(ValueError, match="num_heads: 4 is no multiple of 3"):
        DecoderConfig(num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim: 5 is odd"):
        DecoderConfig(head_dim=5)
