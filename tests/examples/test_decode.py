"""examples.decoder: tokens of many sequences at once are those of each alone."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from examples.decoder import Decoder, DecoderConfig
from hicache import PagePool

PAGE = 4


def new_decoder() -> Decoder:
    config = DecoderConfig(dtype=torch.float64)
    return Decoder(config, PagePool(32, PAGE, config.shape))


def test_a_batch_is_its_sequences() -> None:
    """Sequences of different lengths, in scattered pages, some of which have room to spare: the logits of
    two more tokens of each are those of a prefill.
    """
    sequences = [[5, 9, 1], [7] * 8, list(range(19))]
    tables = [array("q", [30]), array("q", [3, 1, 2, 9]), array("q", [20, 8, 15, 4, 31, 0])]
    batched, alone = new_decoder(), new_decoder()
    for tokens, table in zip(sequences, tables, strict=True):
        batched.prefill(tokens[:-1], table)
    for more in ([11, 12, 13], [0, 0, 0]):
        logits = batched.decode(
            [tokens[-1] for tokens in sequences], [len(tokens) - 1 for tokens in sequences], tables
        )
        for row, tokens, table in zip(logits, sequences, tables, strict=True):
            expected = alone.prefill(tokens, table)[-1]
            assert torch.allclose(row, expected, rtol=1e-9, atol=1e-9)
        assert logits.dtype == torch.float64
        for tokens, token in zip(sequences, more, strict=True):
            tokens.append(token)


def test_a_position_that_its_pages_do_not_reach_is_refused() -> None:
    """By name, with nothing written."""
    decoder = new_decoder()
    for position in (4, -1):
        with pytest.raises(ValueError, match=rf"positions: {position} is not in 0\.\.3"):
            decoder.decode([1], [position], [array("q", [2])])
    assert not any(plane.any() for plane in decoder.pool.planes)


def test_it_is_the_decoder_that_it_says() -> None:
    """The logits are those of torch's own attention, with rotary positions as complex numbers."""
    config, decoder = DecoderConfig(dtype=torch.float64), new_decoder()
    tokens = torch.arange(11) * 7 % config.vocab_size
    rates = 10_000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
    turns = torch.polar(torch.ones(11, 8, dtype=torch.float64), torch.arange(11)[:, None] * rates)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(*x.chunk(2, -1)) * turns
        return torch.cat([turned.real, turned.imag], -1)

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

    x = decoder._embedding[tokens]
    for layer in decoder._layers:
        q, k, v = (normed(x) @ weight for weight in (layer._q, layer._k, layer._v))
        seen = scaled_dot_product_attention(
            rotated(q)[None], rotated(k)[None], v[None], is_causal=True, enable_gqa=True
        )
        x = x + seen[0].transpose(0, 1).flatten(1) @ layer._out
        y = normed(x)
        x = x + (silu(y @ layer._gate) * (y @ layer._up)) @ layer._down
    expected = normed(x) @ decoder._embedding.T
    logits = decoder.prefill(tokens.tolist(), array("q", [3, 0, 5]))
    assert torch.allclose(logits, expected, rtol=1e-6, atol=1e-6)
