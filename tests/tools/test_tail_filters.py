"""publisher.tools.tail.filters: which events are shown."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    StorageMedium,
    block_hashes,
)
from kvevents.events import _ALIASES
from kvevents.follower import Told
from kvevents.hashing import canonical_hash, short_hash
from kvevents.reading import Reading
from publisher.tools.tail.filters import Filter, parse_filter

GPU, CPU, DISK, EXTERNAL = StorageMedium


def chosen(by: Filter, *events: Event, rank: int | None = 0) -> list[int]:
    told = Told(0, b"", replayed=False)
    return by.choose(Reading(told, KVEventBatch(1.0, list(events), rank)))


def store(
    *hashes: int | bytes,
    parent: int | bytes | None = None,
    tokens: Any = (),
    size: int = 1,
    medium: StorageMedium | None = GPU,
    lora: str | None = None,
) -> BlockStored:
    return BlockStored(list(hashes), parent, list(tokens), size, medium=medium, lora_name=lora)


EVENTS = (
    store(1),
    store(2, medium=CPU),
    BlockRemoved([1], GPU),
    BlockRemoved([1]),
    AllBlocksCleared(),
    store(3, medium=None),
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"event": "stored"}, [0, 1, 5]),
        ({"event": "removed,cleared"}, [2, 3, 4]),
        ({"medium": "GPU"}, [0, 2, 3, 4, 5]),
        ({"event": "BlockStored"}, [0, 1, 5]),
        ({"event": "blockRemoved,ALLBLOCKSCLEARED"}, [2, 3, 4]),
        ({"event": "Stored"}, [0, 1, 5]),
        ({"medium": "cpu"}, [1, 3, 4]),
        ({"medium": "host"}, [1, 3, 4]),
        ({"medium": "Host,storage"}, [1, 3, 4]),
        ({"medium": "Device"}, [0, 2, 3, 4, 5]),
        ({"medium": "gpu"}, [0, 2, 3, 4, 5]),
        ({"medium": "DISK,EXTERNAL"}, [3, 4]),
        ({"medium": "CPU_PINNED", "event": "stored"}, [1]),
        ({"hash": "1"}, [0, 2, 3, 4]),
        ({"rank": "0,3"}, [0, 1, 2, 3, 4, 5]),
        ({"rank": "1"}, []),
    ],
)
def test_kinds_media_and_ranks(options: dict[str, str], expected: list[int]) -> None:
    """Any combination, in any case and by any name that there is. A clear is of every medium and block, a
    removal without a medium of every medium, and what does not say is on the device.
    """
    renamed = {("hash_" if name == "hash" else name): text for name, text in options.items()}
    by = parse_filter(**renamed)
    assert by.open == (not options)
    assert chosen(by, *EVENTS) == expected


def test_a_rank_that_is_not_told_is_0() -> None:
    """As everywhere."""
    assert chosen(parse_filter(rank="0"), AllBlocksCleared(), rank=None) == [0]


@given(value=st.integers(-(2**63), 2**64 - 1), digits=st.integers(1, 16))
def test_a_hash_by_its_digits_or_its_number(value: int, digits: int) -> None:
    """As it is printed, in hex however short, as the number it was on the wire, or as its bytes in hex;
    of a block or of a parent.
    """
    bits = value & 2**64 - 1
    short = f"{bits:016x}"[:digits]
    digest = b"\7" * 24 + bits.to_bytes(8, "big")
    shown = short_hash(value)
    names = (shown, shown[:digits], f"0x{shown}", str(value), str(canonical_hash(value)))
    if digits == len(shown):  # which are those of another, if they are not shown so
        short = shown
    for text in (short, short.upper(), *names):
        for event in (store(value), store(5, parent=value), BlockRemoved([4, value])):
            assert chosen(parse_filter(hash_=text), event) == [0]
    assert chosen(parse_filter(hash_=f"07070707,{short}"), store(digest)) == [0]
    assert chosen(parse_filter(hash_="0707"), store(digest)) == [0]
    other = value ^ 1
    assert chosen(parse_filter(hash_=f"{bits:016x}"), store(other, parent=None)) == []


def test_a_prompt_and_all_that_go_on_from_it() -> None:
    """By tokens from the start: blocks of the prompt, blocks behind it, and their removals, though those
    do not say whose they are; what turns off before its end is another's.
    """
    by = parse_filter(token_prefix="1,2,3,4,5,6")
    assert chosen(
        by,
        *(store(10, 11, tokens=[1, 2, 3, 4], size=2),),
        *(store(12, parent=11, tokens=[5, 6], size=2),),
        *(store(13, parent=12, tokens=[7, 8], size=2, medium=CPU),),
        *(store(20, tokens=[9, 2], size=2),),
        *(store(21, parent=11, tokens=[5, 7], size=2),),
        *(store(22, parent=21, tokens=[5, 6], size=2),),
        *(store(23, parent=99, tokens=[1, 2], size=2),),
        *(store(24, tokens=[], size=2),),
    ) == [0, 1, 2]
    removals = [BlockRemoved([one], GPU) for one in (10, 11, 12, 13, 20, 21, 22, 23, 24)]
    assert chosen(by, *removals, AllBlocksCleared()) == [0, 1, 2, 3, 9]


def test_a_prompt_may_end_within_a_block() -> None:
    """As far as both go is what counts: 3 tokens, and blocks of 4."""
    by = parse_filter(token_prefix="1,2,3")
    events = [
        store(1, tokens=[1, 2, 3, 4], size=4),
        store(2, tokens=[1, 2, 4, 4], size=4),
        store(3, 4, tokens=[1, 2, 3, 9, 9, 9, 9, 9], size=4),
        store(5, parent=4, tokens=[0, 0, 0, 0], size=4),
    ]
    assert chosen(by, *events) == [0, 2, 3]


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6),
    prefix=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    size=st.integers(1, 3),
)
def test_a_prompt_is_what_its_tokens_say(
    prompts: list[list[int]], prefix: list[int], size: int
) -> None:
    """Against all tokens of each block's chain: a store of one block is shown just when they agree."""
    by = Filter(token_prefix=prefix)
    for prompt in prompts:
        parent = None
        for at, name in enumerate(block_hashes(prompt, size)):
            chain = prompt[: (at + 1) * size]
            event = store(name, parent=parent, tokens=chain[-size:], size=size)
            agrees = all(one == other for one, other in zip(chain, prefix, strict=False))
            assert chosen(by, event) == ([0] if agrees else [])
            assert chosen(by, BlockRemoved([name], GPU)) == ([0] if agrees else [])
            parent = name


def test_an_adapter_and_the_removals_of_its_blocks() -> None:
    """By name; with another filter, both must pass, and a filter that hides a store remembers it."""
    by = parse_filter(lora="a,b", event="removed")
    stores = [store(1, lora="a"), store(2, lora="c"), store(3), store(4, lora="b")]
    removals = [BlockRemoved([one], GPU) for one in (1, 2, 3, 4)]
    assert chosen(by, *stores, *removals) == [4, 7]


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("event", "stored,lost", "--event: 'lost' is not stored, removed or cleared"),
        ("event", "", "--event: ''"),
        ("medium", "TAPE", "--medium: 'TAPE' is none of GPU (device), CPU_PINNED ("),
        ("medium", "", "--medium: ''"),
        ("hash_", "xyz", "--hash: 'xyz' is neither"),
        ("hash_", "", "--hash: ''"),
        ("hash_", "12,", "--hash: ''"),
        ("hash_", str(-(2**63) - 1), "--hash: "),
        ("token_prefix", "", "--token-prefix: there is no token"),
        ("token_prefix", "1,x", "--token-prefix: token 1: 'x' is not an int"),
        ("token_prefix", "@FILE", "--token-prefix: token 0: '@FILE' is not an int"),
        ("token_prefix", "[1, 2", "--token-prefix: no JSON: "),
        ("token_prefix", str(2**32), "--token-prefix: token 0: 4294967296 is not in 0..4294967295"),
        ("token_prefix", "-1", "--token-prefix: token 0: -1 is not in 0..4294967295"),
        ("token_prefix", "٣", "--token-prefix: "),
        ("rank", "x", "--rank: 'x' is not in 0..2147483647"),
    ],
)
def test_a_filter_that_cannot_be(option: str, text: str, said: str) -> None:
    """ValueError names option, value and bound."""
    with pytest.raises(ValueError, match=r"^--") as error:
        parse_filter(**{option: text})
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_all_words_for_a_medium_are_said() -> None:
    """The error has all that are understood, and each is what it is said to be."""
    with pytest.raises(ValueError, match="--medium") as error:
        parse_filter(medium="HBM")
    said = re.findall(r"(\w+) \(([\w, ]+)\)", str(error.value).partition("none of ")[2])
    words = {other: name for name, others in said for other in (name, *others.split(", "))}
    for word, name in words.items():
        event = store(1, medium=StorageMedium(name))
        assert chosen(parse_filter(medium=word), event) == [0]
    understood = {word.lower() for word in _ALIASES if word} | {"host"}
    assert {word.lower() for word in words} == understood


@pytest.mark.parametrize("text", ["1,2,3", "1 2 3", "[1, 2, 3]", "[1,2,3]", " 1, 2,3 "])
def test_tokens_as_people_have_them(text: str) -> None:
    """As `state --tokens` takes them."""
    by = parse_filter(token_prefix=text)
    assert chosen(
        by, store(1, tokens=[1, 2, 3, 4], size=4), store(2, tokens=[1, 2, 4], size=3)
    ) == [0]


@pytest.mark.parametrize(
    "options", [{"hash_": "0000000000ab"}, {"lora": "sql"}, {"token_prefix": "1,2"}]
)
def test_a_clear_of_what_is_asked_for(options: dict[str, str]) -> None:
    """Where blocks are asked for, it is shown if one of them was stored since the clear before, by this
    rank of this source; under --medium, always; under --event, if that names it.
    """
    mine = store(0xAB, tokens=[1, 2], lora="sql", size=2)
    other, clear = store(0xCD, tokens=[2, 2], size=2), AllBlocksCleared()
    by = parse_filter(**options)
    assert chosen(by, clear, other, clear, mine, other, clear, clear) == [3, 5]
    assert chosen(by, mine) == [0]
    assert chosen(by, clear, rank=1) == []
    told = Reading(Told(0, b"", replayed=False), KVEventBatch(1.0, [clear], 0))
    assert by.choose(told, "another") == []
    assert chosen(by, clear) == [0]
    assert chosen(parse_filter(**options, medium="cpu"), mine, clear) == []
    assert chosen(parse_filter(**options, medium="gpu"), clear, mine, clear) == [1, 2]
    assert chosen(parse_filter(**options, event="stored"), mine, clear) == [0]
    assert chosen(parse_filter(**options, event="cleared"), clear, mine, clear) == [2]
    assert chosen(parse_filter(medium="disk"), clear, mine, clear) == [0, 2]


def test_no_two_small_hashes_look_alike() -> None:
    """Engines that count their blocks: each has a name of its own, and is found by it alone."""
    hashes = [0, 1, 2, 255, 2**16 - 2, 2**16 - 1, 2**31, 2**47]
    assert len({short_hash(one) for one in hashes}) == len(hashes)
    assert {len(short_hash(one)) for one in (*hashes, -1, 2**48, 2**63)} == {12}
    assert (short_hash(77), short_hash(0xABCDEF0123456789)) == ("00000000004d", "abcdef012345")
    for one in hashes:
        by = parse_filter(hash_=short_hash(one), event="stored")
        found = [hashes[at] for at in chosen(by, *map(store, hashes))]
        assert found == [one]


def test_what_is_remembered_is_bounded() -> None:
    """Of blocks without end the oldest are forgotten, and the newest are not."""
    by, most = parse_filter(lora="a"), 1 << 18
    step = 4096
    for first in range(0, most + 2 * step, step):
        chosen(by, store(*range(first, first + step), lora="a"))
    assert chosen(by, BlockRemoved([0]), BlockRemoved([most + step])) == [1]
