"""kvevents.behind: which blocks come right after which, against a set of pairs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvevents.behind import Behind
from kvevents.hashing import BlockHash

Hashes = st.sampled_from([BlockHash(value) for value in (-(2**63), -8, 0, 8, 16, 24)])


@given(st.lists(st.tuples(st.booleans(), Hashes, Hashes)))
def test_what_is_behind_comes_in_the_order_of_hashes(
    steps: list[tuple[bool, BlockHash, BlockHash]],
) -> None:
    """Whatever was put there when; twice is once, and what is not there is not missed."""
    behind, pairs = Behind(), set[tuple[BlockHash, BlockHash]]()
    for comes, parent, name in steps:
        if comes:
            behind.add(parent, name)
            pairs.add((parent, name))
        else:
            behind.discard(parent, name)
            pairs.discard((parent, name))
        for one in {parent for _, parent, _ in steps}:
            assert list(behind.of(one)) == sorted(name for at, name in pairs if at == one)
    behind.clear()
    assert not any(behind.of(parent) for _, parent, _ in steps)
