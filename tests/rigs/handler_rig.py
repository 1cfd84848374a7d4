"""A log handler of somebody else's that raises."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["broken_handler"]


class _Broken(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.given.append(record.getMessage())
        raise ValueError("a broken handler")


@contextlib.contextmanager
def broken_handler(name: str) -> Iterator[list[str]]:
    """The logger `name` has one meanwhile; what that was given."""
    handler, logger = _Broken(), logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield handler.given
    finally:
        logger.removeHandler(handler)
