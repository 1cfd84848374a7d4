"""kvevents.tokens: every input kind gives the same bytes, and every bad one a useful error."""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import trials

from kvevents.tokens import MAX_TOKEN, TokenBytes, TokenIds, pack_tokens

IDS = [0, 1, 151_643, 2**31, MAX_TOKEN]
PACKED = struct.pack("<5I", *IDS)


def numpy_array(ids: list[Any], dtype: str) -> Any:
    return pytest.importorskip("numpy").array(ids, dtype)


def tensor(ids: list[Any], dtype: str) -> Any:
    torch = pytest.importorskip("torch")
    return torch.tensor(ids, dtype=getattr(torch, dtype))


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "array I": lambda ids: array("I", ids),
    "array q": lambda ids: array("q", ids),
    "bytes": lambda ids: struct.pack(f"<{len(ids)}I", *ids),
    "TokenIds": lambda ids: TokenIds(TokenBytes(struct.pack(f"<{len(ids)}I", *ids))),
    "numpy uint32": lambda ids: numpy_array(ids, "uint32"),
    "numpy big-endian": lambda ids: numpy_array(ids, ">u4"),
    "numpy int64": lambda ids: numpy_array(ids, "int64"),
    "numpy uint64": lambda ids: numpy_array(ids, "uint64"),
    "list of numpy ints": lambda ids: list(numpy_array(ids, "int64")),
    "torch int64": lambda ids: tensor(ids, "int64"),
    "torch uint32": lambda ids: tensor(ids, "uint32"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_packs_to_little_endian_u32(kind: str) -> None:
    """Any sequence of ints becomes four little-endian bytes an id, up to the largest id."""
    assert pack_tokens(KINDS[kind](IDS)) == PACKED


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_are_no_bytes(kind: str) -> None:
    """An empty sequence of any kind is valid and empty."""
    assert pack_tokens(KINDS[kind]([])) == b""


def test_range_packs() -> None:
    """A range is a sequence of ints like any other."""
    assert pack_tokens(range(2, 5)) == struct.pack("<3I", 2, 3, 4)


def test_strided_arrays_pack_by_value() -> None:
    """A view with holes packs what it shows, not what lies under it."""
    numpy = pytest.importorskip("numpy")
    assert pack_tokens(numpy.arange(10, dtype="uint32")[::3]) == struct.pack("<4I", 0, 3, 6, 9)
    torch = pytest.importorskip("torch")
    assert pack_tokens(torch.arange(10)[::3]) == struct.pack("<4I", 0, 3, 6, 9)


@trials(50)
@given(st.lists(st.integers(0, MAX_TOKEN)))
def test_kinds_agree(ids: list[int]) -> None:
    """Lists, arrays, packed bytes and TokenIds of the same ids pack to the same bytes."""
    packed = pack_tokens(ids)
    assert packed == struct.pack(f"<{len(ids)}I", *ids)
    assert {pack_tokens(array("q", ids)), pack_tokens(packed), pack_tokens(TokenIds(packed))} == {
        packed
    }


# ---------------------------------------------------------------------------------------- errors

BAD_IDS: list[tuple[Any, type[Exception], str]] = [
    ([5, -1], ValueError, r"tokens\[1\]: -1 is not in 0\.\.4294967295"),
    ([5, 6, 2**32], ValueError, r"tokens\[2\]: 4294967296 is not in 0\.\.4294967295"),
    ([5, 2**70], ValueError, rf"tokens\[1\]: {2**70} is not in 0\.\.4294967295"),
    ((5, -(2**70)), ValueError, rf"tokens\[1\]: {-(2**70)} is not in 0\.\.4294967295"),
    (array("q", [5, -1]), ValueError, r"tokens\[1\]: -1 is not in 0\.\.4294967295"),
    (range(-1, 3), ValueError, r"tokens\[0\]: -1 is not in 0\.\.4294967295"),
    ([5, 6.0], TypeError, r"tokens\[1\]: 6\.0 is not an int"),
    ([5, None], TypeError, r"tokens\[1\]: None is not an int"),
    (["5"], TypeError, r"tokens\[0\]: '5' is not an int"),
    ([[1, 2], [3, 4]], TypeError, r"tokens\[0\]: \[1, 2\] is not an int"),
    (array("d", [5.0]), TypeError, r"tokens\[0\]: 5\.0 is not an int"),
    ("12", TypeError, "tokens: str is not a sequence of ints"),
    (None, TypeError, "tokens: NoneType is not a sequence of ints"),
    (7, TypeError, "tokens: int is not a sequence of ints"),
    (bytearray(4), TypeError, "tokens: bytearray is not a sequence of ints"),
    (memoryview(b"abcd"), TypeError, "tokens: memoryview is not a sequence of ints"),
    ({3, 1}, TypeError, "tokens: set is not a sequence of ints"),
    ({3: 1}, TypeError, "tokens: dict is not a sequence of ints"),
    (iter([2**40]), TypeError, "tokens: list_iterator is not a sequence of ints"),
    (b"abcde", ValueError, "tokens: 5 packed bytes are not a multiple of 4"),
]


@pytest.mark.parametrize(("bad", "kind", "message"), BAD_IDS, ids=lambda it: repr(it)[:30])
def test_errors_name_position_value_and_bound(
    bad: Any, kind: type[Exception], message: str
) -> None:
    """What cannot be packed raises the promised type, naming where, what and the bound."""
    with pytest.raises(kind, match=message):
        pack_tokens(bad)


@pytest.mark.parametrize("bad", [-1, 2**32])
@pytest.mark.parametrize("make", [numpy_array, tensor])
def test_array_errors_name_position_value_and_bound(
    make: Callable[[list[int], str], Any], bad: int
) -> None:
    """An id out of range in a numpy array or a tensor is named with its position too."""
    with pytest.raises(ValueError, match=rf"tokens\[2\]: {bad} is not in 0\.\.4294967295"):
        pack_tokens(make([5, 6, bad, 7], "int64"))


def test_numpy_ints_out_of_range_are_a_value_error() -> None:
    """A numpy int in a list is an int: out of range it is a ValueError, not a TypeError."""
    with pytest.raises(ValueError, match=r"tokens\[1\]: -1 is not in"):
        pack_tokens(list(numpy_array([5, -1], "int64")))


@pytest.mark.parametrize("make", [numpy_array, tensor])
def test_arrays_must_be_flat_and_of_ints(make: Callable[[list[Any], str], Any]) -> None:
    """Two dimensions are a ValueError with the shape, floats and bools a TypeError with the dtype."""
    with pytest.raises(ValueError, match=r"shape \(2, 2\) is not one-dimensional"):
        pack_tokens(make([[1, 2], [3, 4]], "int64"))
    with pytest.raises(TypeError, match=r"dtype (torch\.)?float32 is not an integer type"):
        pack_tokens(make([1.0], "float32"))
    with pytest.raises(TypeError, match=r"dtype (torch\.)?bool is not an integer type"):
        pack_tokens(make([True], "bool"))


def test_scalars_are_not_sequences() -> None:
    """A zero-dimensional array or tensor is refused by its shape."""
    for scalar in (numpy_array([5], "int64")[0], tensor([5], "int64")[0]):
        with pytest.raises(ValueError, match=r"shape \(\) is not one-dimensional"):
            pack_tokens(scalar)


@trials(200)
@given(
    st.one_of(
        st.none() | st.integers() | st.floats() | st.text() | st.binary(),
        st.lists(st.integers() | st.floats() | st.text() | st.none() | st.lists(st.integers())),
    )
)
def test_nothing_but_type_and_value_errors(anything: Any) -> None:
    """Whatever is passed in, the outcome is bytes, a TypeError or a ValueError."""
    try:
        packed = pack_tokens(anything)
    except (TypeError, ValueError):
        return
    assert len(packed) % 4 == 0


# -------------------------------------------------------------------------------------- TokenIds


@trials(100)
@given(st.lists(st.integers(0, MAX_TOKEN), max_size=20), st.data())
def test_token_ids_behave_like_the_list(ids: list[int], data: st.DataObject) -> None:
    """TokenIds has the length, items, slices and equality of the list of its ids."""
    found = TokenIds(pack_tokens(ids))
    assert len(found) == len(ids)
    assert list(found) == found.tolist() == ids
    assert list(reversed(found)) == ids[::-1]
    assert found == ids
    assert ids == found
    assert found == tuple(ids)
    assert found != [*ids, 1]
    assert repr(found) == repr(ids)
    cut = data.draw(st.slices(len(ids)))
    assert found[cut] == ids[cut]
    for at in range(-len(ids), len(ids)):
        assert found[at] == ids[at]


def test_token_ids_equal_only_sequences() -> None:
    """Comparing with what is no sequence is False, not an error."""
    assert TokenIds(pack_tokens([1])) != 1
    assert TokenIds(pack_tokens([1])) != "1"
    assert TokenIds(pack_tokens([1])) == TokenIds(pack_tokens([1]))


def test_token_ids_are_no_key() -> None:
    """TokenIds equal tuples and lists, whose hashes differ, so they have none."""
    with pytest.raises(TypeError, match="unhashable"):
        hash(TokenIds(pack_tokens([1, 2])))


@pytest.mark.timeout(20)
def test_iterating_token_ids_is_linear() -> None:
    """A long prompt is walked in one pass: an unpacking per id would take minutes here."""
    ids = range(400_000)
    assert sum(TokenIds(pack_tokens(ids))) == sum(ids)
