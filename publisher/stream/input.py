"""What a stream is made of."""

from __future__ import annotations

import msgspec

__all__ = ["Input"]


class Input(msgspec.Struct, frozen=True, gc=False):
    """What came from the worker at place `number` of its stream. `flags`: of publisher.link.messages."""

    number: int
    flags: int
    body: bytes
