"""kvevents.namespace: three optional names, checked where they are made."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import trials

from kvevents import BASE, Namespace
from kvevents.namespace import MAX_NAME_BYTES

FIELDS = ("lora_name", "cache_salt", "extra_key")


@pytest.mark.parametrize("field", FIELDS)
def test_an_empty_name_is_no_name(field: str) -> None:
    """Engines send "" for "none"; it is the same namespace."""
    assert Namespace(**{field: ""}) == BASE
    assert hash(Namespace(**{field: ""})) == hash(BASE)
    assert getattr(Namespace(**{field: ""}), field) is None


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("bad", [7, b"salt", 1.5, ["a"]])
def test_names_are_strings(field: str, bad: Any) -> None:
    """A number of an adapter, or bytes, raises TypeError with the field and the value."""
    with pytest.raises(TypeError) as error:
        Namespace(**{field: bad})
    assert field in str(error.value)
    assert repr(bad) in str(error.value)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("bad", ["\ud800", "x" * (MAX_NAME_BYTES + 1), "é" * MAX_NAME_BYTES])
def test_names_can_be_sent(field: str, bad: str) -> None:
    """What UTF-8 cannot encode, or what is too long for a record, raises ValueError with the field."""
    with pytest.raises(ValueError, match=field):
        Namespace(**{field: bad})
    assert Namespace(**{field: "x" * MAX_NAME_BYTES}) != BASE


@pytest.mark.parametrize("field", FIELDS)
def test_a_kind_of_string_becomes_a_string(field: str) -> None:
    """A subclass of str, which encoders do not know, is kept as the string it is."""

    class Name(str):
        __slots__ = ()

    space = Namespace(**{field: Name("x")})
    assert type(getattr(space, field)) is str
    assert space == Namespace(**{field: "x"})
    assert msgspec.msgpack.encode(space) == msgspec.msgpack.encode(Namespace(**{field: "x"}))


@trials(50)
@given(*[st.none() | st.text(max_size=4)] * 3)
def test_namespaces_travel(lora: str | None, salt: str | None, extra: str | None) -> None:
    """Encoding and decoding gives an equal namespace."""
    space = Namespace(lora, salt, extra)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(space), type=Namespace) == space
