"""kvevents.namespace: three optional names, checked where they are made."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvevents_reference import trials

from kvevents import BASE, Namespace

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


@trials(50)
@given(*[st.none() | st.text(max_size=4)] * 3)
def test_namespaces_travel(lora: str | None, salt: str | None, extra: str | None) -> None:
    """Encoding and decoding gives an equal namespace."""
    space = Namespace(lora, salt, extra)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(space), type=Namespace) == space
