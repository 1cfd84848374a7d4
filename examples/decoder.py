"""A small decoder in torch whose KV is in pages: a model to show a KV cache with.

RMSNorm, rotary positions, grouped-query attention, SwiGLU; its weights come from a seed. It is written to
be read, not to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from hicache.node import PageIndices
from hicache.pool import KVShape, PagePool

__all__ = ["Decoder", "DecoderConfig"]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes. Raises ValueError for heads that do not divide into groups, and for an odd `head_dim`."""

    vocab_size: int = 128
    num_layers: int = 3
    hidden_dim: int = 64
    mlp_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: {self.num_heads} is no multiple of {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd")

    @property
    def shape(self) -> KVShape:
        """What a token's KV looks like."""
        return KVShape(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype)


class Decoder:
    """Runs over the pages of `pool`. Raises ValueError when that is not of the config's shape."""

    def __init__(self, config: DecoderConfig, pool: PagePool, seed: int = 0) -> None:
        if pool.shape != config.shape:
            raise ValueError(f"pool: of {pool.shape}, the decoder needs {config.shape}")
        self.pool = pool
        weights = _Weights(config.dtype, pool.device, seed)
        self._embedding = weights.new(config.vocab_size, config.hidden_dim)
        self._layers = [_Layer(config, weights) for _ in range(config.num_layers)]

    def prefill(
        self, tokens: Sequence[int], page_indices: PageIndices, prefix_len: int = 0
    ) -> Tensor:
        """The logits of the tokens after the first `prefix_len`: (tokens, vocab_size), at least float32.

        `page_indices`: the pages of all `tokens`, in order. Those of the prefix are read; the KV of the
        new tokens is written behind it. Raises ValueError, with nothing written, for a prefix that is
        not shorter than the tokens, and for too few pages.
        """
        if not 0 <= prefix_len < len(tokens):
            raise ValueError(f"prefix_len: {prefix_len} is not in 0..{len(tokens) - 1}")
        size, device = self.pool.page_size, self.pool.device
        if len(page_indices) * size < len(tokens):
            raise ValueError(f"page_indices: {len(page_indices)} are too few for the tokens")
        at = torch.arange(len(tokens), device=device)
        slots = self.pool.index(page_indices)[at // size] * size + at % size
        new = torch.tensor(tokens[prefix_len:], device=device)
        return self._forward(new[None], at[None, prefix_len:], slots[None])[0]

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], tables: Sequence[PageIndices]
    ) -> Tensor:
        """The logits of one more token of each sequence: (sequences, vocab_size), at least float32.

        `tokens[i]` is at `positions[i]` of the sequence whose pages are `tables[i]`: the KV of what is
        before it is read there, its own is written. Raises ValueError, with nothing written, for a
        position that its pages do not reach.
        """
        size, device = self.pool.page_size, self.pool.device
        for position, pages in zip(positions, tables, strict=True):
            if not 0 <= position < len(pages) * size:
                raise ValueError(f"positions: {position} is not in 0..{len(pages) * size - 1}")
        at = torch.arange(max(positions) + 1, device=device)
        slots = torch.stack(  # those past a sequence's end are some of its own, and masked
            [
                self.pool.index(pages)[(at // size).clamp(max=len(pages) - 1)] * size + at % size
                for pages in tables
            ]
        )
        new, ends = (torch.tensor(one, device=device)[:, None] for one in (tokens, positions))
        return self._forward(new, ends, slots)[:, 0]

    def _forward(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """(sequences, tokens) at their positions among the (sequences, slots) that hold their KV."""
        x = self._embedding[tokens]
        for layer, k_pages, v_pages in zip(self._layers, self.pool.k, self.pool.v, strict=True):
            x = layer.forward(x, positions, slots, k_pages.flatten(0, 1), v_pages.flatten(0, 1))
        return _no_less_than_float(_norm(x) @ self._embedding.T)


class _Weights:
    """Matrices from a seed, the same on every device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype, self._device = dtype, device

    def new(self, *size: int) -> Tensor:
        """(inputs, outputs), or one such matrix for each head."""
        values = torch.randn(size, generator=self._generator) / math.sqrt(size[-2])
        return values.to(self._device, self._dtype)


class _Layer:
    def __init__(self, config: DecoderConfig, weights: _Weights) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._group = heads // kv_heads
        self._q = weights.new(heads, config.hidden_dim, dim)
        self._k = weights.new(kv_heads, config.hidden_dim, dim)
        self._v = weights.new(kv_heads, config.hidden_dim, dim)
        self._out = weights.new(heads * dim, config.hidden_dim)
        self._gate = weights.new(config.hidden_dim, config.mlp_dim)
        self._up = weights.new(config.hidden_dim, config.mlp_dim)
        self._down = weights.new(config.mlp_dim, config.hidden_dim)

    def forward(
        self, x: Tensor, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor
    ) -> Tensor:
        """Tokens at `positions` of sequences whose KV is in `slots` of the pools."""
        y, new = _norm(x), slots.gather(1, positions)
        k_pool[new] = _rotate(_heads(y, self._k), positions)
        v_pool[new] = _heads(y, self._v)
        q = _rotate(_heads(y, self._q), positions)
        x = x + self._attend(q, k_pool[slots], v_pool[slots], positions) @ self._out
        y = _norm(x)
        return x + (silu(y @ self._gate) * (y @ self._up)) @ self._down

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Each query sees its keys up to its own position. (sequences, tokens, heads * dim)."""
        k, v = (part.repeat_interleave(self._group, dim=2) for part in (k, v))
        scores = _no_less_than_float(torch.einsum("bqhd,bkhd->bhqk", q, k)) / math.sqrt(q.shape[-1])
        ahead = torch.arange(k.shape[1], device=k.device) > positions[:, None, :, None]
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1).to(v.dtype)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


def _heads(x: Tensor, weight: Tensor) -> Tensor:
    """(sequences, tokens, inputs) by (heads, inputs, dim): (sequences, tokens, heads, dim)."""
    return torch.einsum("bti,hid->bthd", x, weight)


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions of (sequences, tokens, heads, dim), the halves paired (arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (torch.arange(half, device=x.device) / -half)
    angles = positions[..., None, None] * rates
    halves = _no_less_than_float(x)
    a, b, cos, sin = halves[..., :half], halves[..., half:], angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def _no_less_than_float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _norm(x: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:])
