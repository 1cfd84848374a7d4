"""kvevents.check: hashes made again, by vectors of the real systems; canonical CBOR."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_data import hash_vectors
from kvevents_reference import trials
from kvevents_streams import CLEARED, CPU, GPU, checked, removed, stream

from kvevents import BlockStored, Event, HashFormat, Namespace, block_hashes
from kvevents.check import Verifier, cbor

VECTORS = hash_vectors()
each_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["name"]))


def verified(verifier: Verifier, *events: Event) -> list[str]:
    """The rules that are broken, of what `hash` and the like say."""
    found = checked(stream([CLEARED], *[[one] for one in events]), verifier=verifier)
    return [one.rule for one in found if one.rule in ("hash", "hash-scheme")]


def chain(
    hashes: list[Any], vector: dict[str, Any], start: int = 0, /, **fields: object
) -> BlockStored:
    """The blocks of a prompt from one on."""
    size = vector["block_size"]
    tokens = vector["token_ids"][start * size : len(hashes) * size]
    parent = hashes[start - 1] if start else None
    told: dict[str, object] = {"medium": GPU} | fields
    return BlockStored(hashes[start:], parent, tokens, size, **told)  # type: ignore[arg-type]


def counts(verifier: Verifier) -> tuple[str | None, int, int, int]:
    return verifier.scheme, verifier.verified, verifier.wrong, verifier.unverifiable


@each_vector
@pytest.mark.parametrize("scheme", ["sglang", "auto"])
def test_sglangs(vector: dict[str, Any], scheme: str) -> None:
    """In one event, and in two."""
    hashes = vector["sglang"]["published"]
    verifier = Verifier(scheme)
    assert verified(verifier, chain(hashes, vector)) == []
    assert counts(verifier) == ("sglang", len(hashes), 0, 0)
    if len(hashes) > 1:
        verifier = Verifier(scheme)
        assert verified(verifier, chain(hashes[:1], vector), chain(hashes, vector, 1)) == []
        assert counts(verifier) == ("sglang", len(hashes), 0, 0)


@each_vector
def test_sglangs_with_a_salt(vector: dict[str, Any]) -> None:
    """Told as it is, or as vLLM spells it."""
    salted = vector["sglang"]["cache_salt"]
    hashes, salt = salted["published"], salted["cache_salt"]
    keys = [[salt]] + [None] * (len(hashes) - 1)
    for fields in ({"cache_salt": salt}, {"extra_keys": keys}):
        verifier = Verifier("sglang")
        assert verified(verifier, chain(hashes, vector, **fields)) == []
        assert verifier.verified == len(hashes)
    assert verified(Verifier("sglang"), chain(hashes, vector, cache_salt="another")) == ["hash"]


@each_vector
@pytest.mark.parametrize("scheme", ["dynamo", "auto"])
def test_the_dynamo_format(vector: dict[str, Any], scheme: str) -> None:
    """With a salt, an extra key, and both."""
    for one in vector["sglang"]["dynamo_format"]:
        verifier = Verifier(scheme)
        names = {name: one[name] for name in ("extra_key", "cache_salt")}
        assert verified(verifier, chain(one["published"], vector, **names)) == []
        assert verifier.verified == len(one["published"])


@each_vector
@pytest.mark.parametrize("scheme", ["vllm-sha256-cbor", "auto"])
@pytest.mark.parametrize("form", ["published", "digests"])
def test_vllms(vector: dict[str, Any], scheme: str, form: str) -> None:
    """As numbers and as digests, with each seed and with a salt."""
    for one in vector["vllm_sha256_cbor"]:
        hashes = [bytes.fromhex(h) if isinstance(h, str) else h for h in one[form]]
        keys = [[["cache_salt", one["cache_salt"]]]] + [None] * (len(hashes) - 1)
        fields: dict[str, object] = {"extra_keys": keys} if one["cache_salt"] else {}
        seed = None if one["seed"] == "vllm-none-hash" else one["seed"]
        verifier = Verifier(scheme, seed)
        assert verified(verifier, chain(hashes, vector, **fields)) == []
        assert counts(verifier) == ("vllm-sha256-cbor", len(hashes), 0, 0)
        if fields:  # the salt may be told without a word of what it is
            bare = [[one["cache_salt"]]] + [None] * (len(hashes) - 1)
            assert verified(Verifier(scheme, seed), chain(hashes, vector, extra_keys=bare)) == []


def test_extra_keys_that_are_not_of_the_blocks_verify_nothing() -> None:
    """Too few of them, and too many: no block of the event can be told right or wrong."""
    one = VECTORS[1]["vllm_sha256_cbor"][0]
    hashes = one["published"]
    for count in (1, len(hashes) + 1):
        for scheme in ("auto", "vllm-sha256-cbor"):
            verifier = Verifier(scheme)
            event = chain(hashes, VECTORS[1], extra_keys=[None] * count)
            assert verified(verifier, event) == (["hash-scheme"] if scheme == "auto" else [])
            assert verifier.verified == verifier.wrong == 0
            assert verifier.unverifiable == len(hashes)


def test_a_digest_of_vllm_needs_no_history() -> None:
    """It is the parent whole."""
    one = VECTORS[0]["vllm_sha256_cbor"][0]
    hashes = [bytes.fromhex(text) for text in one["digests"]]
    verifier = Verifier("vllm-sha256-cbor")
    found = checked(stream([chain(hashes, VECTORS[0], 1)], first=7), verifier=verifier)
    assert (found, verifier.verified) == ([], len(hashes) - 1)


def test_a_seed_that_is_not_known_fits_nothing() -> None:
    """Nothing is called wrong: who made the hashes is not known."""
    one = next(v for v in VECTORS[0]["vllm_sha256_cbor"] if v["seed"] == "0")
    verifier = Verifier("auto")
    assert verified(verifier, chain(one["published"], VECTORS[0])) == ["hash-scheme"]
    assert counts(verifier) == (None, 0, 0, len(one["published"]))


@pytest.mark.parametrize("scheme", ["sglang", "auto"])
def test_a_wrong_hash_is_found(scheme: str) -> None:
    """With its event and the first such block; those after it are right by their tokens."""
    vector = VECTORS[1]
    hashes = list(vector["sglang"]["published"])
    right = BlockStored(list(block_hashes([9, 9, 9, 9], 4)), None, [9, 9, 9, 9], 4, medium=GPU)
    wrong = [hashes[0], hashes[1] + 1, *hashes[2:]]
    found = checked(stream([CLEARED], [right], [chain(wrong, vector)]), verifier=Verifier(scheme))
    assert [(one.rule, one.invariant, one.place, one.block_hash, one.blocks) for one in found] == [
        ("hash", 9, (2, 0), wrong[1], 1)
    ]


def test_what_cannot_be_verified_is_counted() -> None:
    """Blocks whose beginning is not known, was removed, or was told without tokens."""
    vector = VECTORS[1]
    hashes = vector["sglang"]["published"]
    late = Verifier("sglang")
    checked(stream([chain(hashes, vector, 2)], first=7), verifier=late)
    assert counts(late) == ("sglang", 0, 0, len(hashes) - 2)
    bare = Verifier("sglang")
    without = BlockStored(hashes[:1], None, [], 4, medium=GPU)
    verified(bare, without, chain(hashes, vector, 1))
    assert counts(bare) == ("sglang", 0, 0, len(hashes))


def test_a_copy_keeps_what_is_known_of_a_block() -> None:
    """A block that leaves one of two media can still be verified against; on none it cannot."""
    vector = VECTORS[1]
    hashes = vector["sglang"]["published"]
    first, copy = chain(hashes[:1], vector), chain(hashes[:1], vector, medium=CPU)
    verifier = Verifier("sglang")
    verified(verifier, first, copy, removed(hashes[:1]), chain(hashes, vector, 1, medium=CPU))
    assert counts(verifier) == ("sglang", len(hashes) + 1, 0, 0)
    verifier = Verifier("sglang")
    verified(verifier, first, removed(hashes[:1]), chain(hashes, vector, 1))
    assert counts(verifier) == ("sglang", 1, 0, len(hashes) - 1)


def test_an_adapter_is_held_to_what_it_was_once() -> None:
    """Of hashes that events do not tell how to make, none is wrong; once one was right, all must be."""
    tokens = [1, 2, 3, 4]
    ours = list(block_hashes(tokens, 4, Namespace(lora_name="x")))
    right = BlockStored(list(ours), None, tokens, 4, medium=GPU, lora_name="x")
    other = BlockStored([12345678901], None, [5, 6, 7, 8], 4, medium=GPU, lora_name="x")
    verifier = Verifier("sglang")
    assert verified(verifier, other) == []
    assert counts(verifier) == ("sglang", 0, 0, 1)
    assert verified(Verifier("sglang"), right, other) == ["hash"]


def test_auto_tells_the_formats_apart_by_a_salt() -> None:
    """Without one both fit, and the first is said; with one only one of them does."""
    tokens = [1, 2, 3, 4]
    plain = BlockStored(list(block_hashes(tokens, 4)), None, tokens, 4, medium=GPU)
    for wanted, hash_format in (("sglang", HashFormat.SGLANG), ("dynamo", HashFormat.DYNAMO)):
        hashes = list(block_hashes(tokens, 4, Namespace(cache_salt="s"), hash_format))
        salted = BlockStored(list(hashes), None, tokens, 4, medium=GPU, cache_salt="s")
        verifier = Verifier("auto")
        assert verified(verifier, plain) == []
        assert verifier.scheme == "sglang"
        verifier = Verifier("auto")
        assert verified(verifier, plain, salted) == []
        assert counts(verifier) == (wanted, 2, 0, 0)


@pytest.mark.parametrize(
    ("scheme", "seed", "why"),
    [("md5", None, "'md5' is not one of sglang, "), ("sglang", "0", "hash_seed: sglang has none")],
)
def test_what_cannot_be_asked_for(scheme: str, seed: str | None, why: str) -> None:
    """Names what is wrong."""
    with pytest.raises(ValueError, match=why):
        Verifier(scheme, seed)


# ------------------------------------------------------------------------------------------- CBOR


@pytest.mark.parametrize(
    ("value", "coded"),
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (255, "18ff"),
        (1000, "1903e8"),
        (1000000, "1a000f4240"),
        (1000000000000, "1b000000e8d4a51000"),
        (18446744073709551615, "1bffffffffffffffff"),
        (-1, "20"),
        (-1000, "3903e7"),
        (0.0, "f90000"),
        (-0.0, "f98000"),
        (1.5, "f93e00"),
        (65504.0, "f97bff"),
        (100000.0, "fa47c35000"),
        (1.1, "fb3ff199999999999a"),
        (1.0e300, "fb7e37e43c8800759c"),
        (math.inf, "f97c00"),
        (-math.inf, "f9fc00"),
        (math.nan, "f97e00"),
        (False, "f4"),
        (True, "f5"),
        (None, "f6"),
        (b"\1\2\3\4", "4401020304"),
        ("ü", "62c3bc"),
        ("IETF", "6449455446"),
        ([], "80"),
        ([1, [2, 3], (4, 5)], "8301820203820405"),
    ],
)
def test_the_examples_of_the_rfc(value: object, coded: str) -> None:
    """RFC 8949, Appendix A."""
    assert cbor.encode(value).hex() == coded


@trials(100)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=300))
def test_ints_at_once_are_the_same(values: list[int]) -> None:
    """As one after the other."""
    assert cbor.encode_ints(values) == cbor.encode(values)


def test_what_has_no_canonical_form() -> None:
    """A set, and an int that is too wide."""
    with pytest.raises(TypeError, match="set"):
        cbor.encode({1})
    with pytest.raises(ValueError, match="more than 64 bits"):
        cbor.encode(2**64)
