"""The log of the process that we are a guest of: an engine, a worker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import MutableMapping
from typing import Any

__all__ = ["HostLog", "host_log"]


class HostLog(logging.LoggerAdapter[logging.Logger]):
    """A logger, of which a handler of the host's that raises costs its line, and nothing else."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, Any]:
        """As they are: `extra` is each line's own."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """As a Logger's; raises nothing."""
        kwargs.setdefault("stacklevel", 2)  # who said it, and not this line
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **kwargs)


def host_log(name: str) -> HostLog:
    """The logger of this name."""
    return HostLog(logging.getLogger(name), {})
