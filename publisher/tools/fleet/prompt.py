"""The tokens of a prompt, as people have them: in an option, a file, a request's JSON."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvevents.tokens import MAX_TOKEN
from publisher.config.checks import shown

__all__ = ["parse_tokens", "read_tokens"]

_MOST_BYTES = 256 << 20
_KEYS = ("input_ids", "token_ids", "prompt_token_ids", "prompt", "tokens")
_SEPARATORS = re.compile(r"[\s,;]+")
_NUMBER = re.compile(r"-?[0-9]{1,19}")


def read_tokens(key: str, name: str) -> list[int]:
    """Those of a file; `-` is stdin. Raises ValueError that begins with `key`."""
    try:
        with sys.stdin.buffer if name == "-" else Path(name).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{key}: {name}: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"{key}: {shown(name)}: {error}") from None
    if len(text) > _MOST_BYTES:
        raise ValueError(f"{key}: {name}: above {_MOST_BYTES >> 20} MiB")
    if not text.strip():
        what = "standard input is empty, or closed" if name == "-" else f"{name}: it is empty"
        raise ValueError(f"{key}: {what}")
    return parse_tokens(key, text.decode("utf-8", "replace"))


def parse_tokens(key: str, text: str) -> list[int]:
    """A JSON list, numbers with commas or blanks between, or a JSON object, or the first of several
    lines, that has them under one of `_KEYS`. Raises ValueError.
    """
    text = text.strip().removeprefix("\ufeff")
    if text.startswith("{"):
        return _checked(key, _of_object(key, text))
    if text.startswith("["):
        return _checked(key, _unnested(key, _json(key, text)))
    words = [word for word in _SEPARATORS.split(text) if word]
    return _checked(key, [_number(key, at, word) for at, word in enumerate(words)])


def _number(key: str, at: int, word: str) -> int:
    if not _NUMBER.fullmatch(word):
        raise ValueError(f"{key}: token {at}: {shown(word)} is not an int")
    return int(word)


def _json(key: str, text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ValueError(f"{key}: no JSON: {error}") from None


def _of_object(key: str, text: str) -> object:
    try:
        found = _json(key, text)
    except ValueError:  # one object a line?
        first, newline, _ = text.partition("\n")
        if not newline:
            raise
        found = _json(key, first)
    assert isinstance(found, dict), "it begins with {"
    for name in _KEYS:
        if isinstance(found.get(name), list):
            return _unnested(key, found[name])
    raise ValueError(f"{key}: the object has none of {', '.join(_KEYS)}, as a list")


def _unnested(key: str, found: object) -> object:
    """A batch of one prompt is that prompt."""
    if isinstance(found, list) and found and isinstance(found[0], list):
        if len(found) > 1:
            raise ValueError(f"{key}: {len(found)} prompts: give one")
        return found[0]
    return found


def _checked(key: str, tokens: object) -> list[int]:
    assert isinstance(tokens, Sequence), "lists only come so far"
    for at, token in enumerate(tokens):
        if type(token) is not int:
            raise ValueError(f"{key}: token {at}: {shown(token)} is not an int")
        if not 0 <= token <= MAX_TOKEN:
            raise ValueError(f"{key}: token {at}: {shown(token)} is not in 0..{MAX_TOKEN}")
    if not tokens:
        raise ValueError(f"{key}: there is no token")
    return list(tokens)
