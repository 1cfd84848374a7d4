"""kvevents.hashing: SGLang's chain, namespaces that never meet, one canonical 64-bit form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kvevents_data import hash_vectors
from kvevents_reference import reference_hashes, to_bytes, to_u64, trials

from kvevents import BASE, HashFormat, Materializer, Namespace, StorageMedium, block_hashes
from kvevents.events import BlockRemoved, BlockStored
from kvevents.hashing import are_canonical, block_digests, canonical_hash, chain_seed
from kvevents.records import BlockId, Remove, StoreNew
from kvevents.tokens import pack_tokens

VECTORS = hash_vectors()
each_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["name"]))

Names = st.none() | st.text("abx\0", max_size=3)


# --------------------------------------------------------------------------------------- vectors


@each_vector
def test_digests_are_sglangs(vector: dict[str, Any]) -> None:
    """The 32-byte chain is SGLang's page hash, partial last block left out."""
    tokens = pack_tokens(vector["token_ids"])
    digests = block_digests(b"", tokens, vector["block_size"])
    assert [digest.hex() for digest in digests] == vector["sglang"]["digests"]


@each_vector
def test_wire_hashes_are_sglangs(vector: dict[str, Any]) -> None:
    """The 64-bit form is what SGLang publishes."""
    hashes = block_hashes(vector["token_ids"], vector["block_size"])
    assert hashes == vector["sglang"]["published"]


@each_vector
def test_salted_hashes_are_sglangs(vector: dict[str, Any]) -> None:
    """A cache salt seeds the chain as SGLang's does."""
    salted = vector["sglang"]["cache_salt"]
    namespace = Namespace(cache_salt=salted["cache_salt"])
    assert chain_seed(namespace).hex() == salted["seed"]
    hashes = block_hashes(vector["token_ids"], vector["block_size"], namespace)
    assert hashes == salted["published"]


@each_vector
def test_dynamo_format_is_sglangs(vector: dict[str, Any]) -> None:
    """Extra key and salt are folded in as under SGLang's `"format": "dynamo"`."""
    for case in vector["sglang"]["dynamo_format"]:
        namespace = Namespace(cache_salt=case["cache_salt"], extra_key=case["extra_key"])
        tokens, size = vector["token_ids"], vector["block_size"]
        assert block_hashes(tokens, size, namespace, HashFormat.DYNAMO) == case["published"]
        if case["extra_key"] is not None:  # then both formats fold
            assert block_hashes(tokens, size, namespace) == case["published"]


@trials(200)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=12), st.integers(1, 5), Names, Names, Names)
def test_hashes_follow_the_description(
    tokens: list[int], size: int, lora: str | None, salt: str | None, extra: str | None
) -> None:
    """In any namespace and format the hash is that of the algorithm written down independently."""
    namespace = Namespace(lora, salt, extra)
    for form in HashFormat:
        assert block_hashes(tokens, size, namespace, form) == reference_hashes(
            tokens,
            size,
            lora_name=lora,
            cache_salt=salt,
            extra_key=extra,
            dynamo=form is HashFormat.DYNAMO,
        )


# ---------------------------------------------------------------------------------------- chain


def test_equal_pages_have_different_hashes() -> None:
    """Case 23: the same content at three positions has three hashes, none its parent's."""
    hashes = block_hashes([7] * 12, 4)
    assert len(set(hashes)) == 3
    assert block_hashes([7] * 4, 4) == hashes[:1]


@trials(100)
@given(st.lists(st.integers(0, 3), max_size=16), st.lists(st.integers(0, 3), max_size=16))
def test_hashes_are_equal_exactly_as_far_as_the_prefixes_are(a: list[int], b: list[int]) -> None:
    """A hash covers the whole prefix: two prompts share hashes as long as they share blocks."""
    same = 0
    while a[: same + 2] == b[: same + 2] and len(a[: same + 2]) == same + 2:
        same += 2
    left, right = block_hashes(a, 2), block_hashes(b, 2)
    assert left[: same // 2] == right[: same // 2]
    assert not set(left[same // 2 :]) & set(right[same // 2 :])


@pytest.mark.parametrize("size", [0, -1])
def test_block_size_has_a_bound(size: int) -> None:
    """A block size below 1 is the caller's error, named."""
    with pytest.raises(ValueError, match=f"block_size: {size} is below 1"):
        block_hashes([1], size)


@pytest.mark.integration
def test_hashes_are_the_same_in_every_process() -> None:
    """Case 35: PYTHONHASHSEED does not matter."""
    program = (
        "import json; from kvevents import *; ns = Namespace('ad', 'salt', 'ek');"
        "print(json.dumps([block_hashes(range(32), 4), block_hashes(range(32), 4, ns)]))"
    )
    here = [block_hashes(range(32), 4), block_hashes(range(32), 4, Namespace("ad", "salt", "ek"))]
    for seed in ("0", "1", "random"):
        found = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        )
        assert json.loads(found.stdout) == here


# ------------------------------------------------------------------------------------ namespaces


@trials(300)
@given(st.tuples(Names, Names, Names), st.tuples(Names, Names, Names), st.sampled_from(HashFormat))
@example((None, "c", "ab"), (None, "bc", "a"), HashFormat.SGLANG)
@example(("x", None, None), (None, None, "x"), HashFormat.SGLANG)
@example((None, "x", None), ("x", None, None), HashFormat.DYNAMO)
def test_namespaces_never_meet(
    a: tuple[str | None, str | None, str | None],
    b: tuple[str | None, str | None, str | None],
    form: HashFormat,
) -> None:
    """Equal tokens have equal hashes in equal namespaces only; an empty name is no name."""
    left, right = Namespace(*a), Namespace(*b)
    same_space = [name or None for name in a] == [name or None for name in b]
    assert (left == right) is same_space
    hashes = block_hashes(range(8), 4, left, form), block_hashes(range(8), 4, right, form)
    assert (hashes[0] == hashes[1]) is same_space
    assert same_space or not set(hashes[0]) & set(hashes[1])


def test_a_salt_changes_only_salted_prompts() -> None:
    """Case 32: none, salt a and salt b give three hashes; the unsalted one stays SGLang's."""
    none, a, b = (block_hashes(range(1, 5), 4, Namespace(cache_salt=s)) for s in (None, "a", "b"))
    assert len({*none, *a, *b}) == 3
    assert none == [-3488128144981237669]


def test_removing_a_salted_block_names_only_it() -> None:
    """Case 32: the same tokens under salt a, salt b and none; evicting salt a removes one hash."""
    materializer = Materializer(4)
    tokens = pack_tokens(range(4))
    spaces = [BASE, Namespace(cache_salt="a"), Namespace(cache_salt="b")]
    stores = [
        StoreNew(StorageMedium.GPU, BlockId(at), 1, None, space, tokens)
        for at, space in enumerate(spaces)
    ]
    stored = materializer.apply(stores)
    assert all(isinstance(event, BlockStored) for event in stored)
    removed = materializer.apply([Remove(StorageMedium.GPU, [(BlockId(1), 1)])])
    wanted = reference_hashes(range(4), 4, cache_salt="a")
    assert removed == [BlockRemoved(list(wanted), StorageMedium.GPU)]


def test_adapters_are_known_by_name_not_by_order() -> None:
    """Case 33: two workers load adapters X and Y in opposite order and hash alike; base differs."""

    def worker(names: list[str | None]) -> dict[str | None, int | bytes]:
        materializer = Materializer(4)
        found: dict[str | None, int | bytes] = {}
        for at, name in enumerate(names):
            space = Namespace(lora_name=name)
            record = StoreNew(StorageMedium.GPU, BlockId(at), 1, None, space, pack_tokens(range(4)))
            (event,) = materializer.apply([record])
            assert isinstance(event, BlockStored)
            found[event.lora_name] = event.block_hashes[0]
        return found

    first, second = worker([None, "X", "Y"]), worker(["Y", "X", None])
    assert first == second
    assert len(set(first.values())) == 3


# ------------------------------------------------------------------------------------- canonical


@trials(200)
@given(st.integers(-(2**63), 2**63 - 1))
@example(-1)
@example(-(2**63))
def test_one_canonical_form(value: int) -> None:
    """Case 36: signed, unsigned and bytes readings of a hash are the same block."""
    assert canonical_hash(value) == value
    assert canonical_hash(to_u64(value)) == value
    assert canonical_hash(to_u64(value).to_bytes(8, "big")) == value
    assert canonical_hash(to_bytes(value)) == value


def test_top_bit_survives_signed_and_unsigned_readers() -> None:
    """Case 36: a hash with the top bit set goes through msgpack as i64 and as u64 and comes out equal."""
    value = next(name for name in block_hashes(range(400), 4) if name < 0)
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    read = [decode(encode(form), type=int) for form in (value, to_u64(value))]
    assert read[0] < 0 < read[1]
    assert canonical_hash(read[0]) == canonical_hash(read[1]) == value


@pytest.mark.parametrize("odd", [2**63, -(2**63) - 1, b"\x00" * 8, True, None])
@pytest.mark.parametrize("others", [[], [0], [0, -1]])
def test_what_is_no_signed_hash_is_not_taken_for_one(others: list[int], odd: object) -> None:
    """Neither alone nor among others; the bounds themselves are."""
    bounds = [-(2**63), 2**63 - 1]
    assert are_canonical([*others, *bounds]) and are_canonical(bounds[:1])
    assert not are_canonical([*others, odd])
    assert not are_canonical([odd, *others])
