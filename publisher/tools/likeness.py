"""What somebody may have meant who wrote a word that is none of those there are."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]

_LIKE = 0.7


def nearest(word: str, words: Iterable[str]) -> str | None:
    """That which is most like it, whatever the case; None: none is."""
    import difflib  # takes a while, and is needed for mistakes alone

    folded = {_folded(one): one for one in words}
    found = difflib.get_close_matches(_folded(word), folded, 1, _LIKE)
    return folded[found[0]] if found else None


def _folded(word: str) -> str:
    return word.casefold().replace("_", "-")


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """What a message ends with; empty where nothing is like it."""
    found = nearest(word, words)
    return "" if found is None else f"; did you mean {found}?"
