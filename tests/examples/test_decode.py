"""examples.decoder: tokens of many sequences at once are those of each alone."""

from __future__ import annotations

from array import array

import pytest
import torch

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
