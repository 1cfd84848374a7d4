"""What settings are checked with. Every message begins with the key, and gives value and bound."""

from __future__ import annotations

import re

import msgspec

__all__ = [
    "NONE",
    "ConfigError",
    "check_choice",
    "check_flag",
    "check_int",
    "check_kind",
    "check_path",
    "check_seconds",
    "check_text",
    "one_line",
    "settle_none",
    "shown",
]

NONE = "none"
"""What TOML and flags say for None, having no other word for it."""

_TEXT_BYTES = 4096
_SHOWN = 120
_INT64 = 2**63 - 1
_NOT_SHOWN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    r"\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]+"
)
"""Controls, line ends, what turns or hides text, and halves of characters."""


class ConfigError(ValueError):
    """A setting that cannot be. The message begins with its key."""


def shown(value: object) -> str:
    """`value` as a message quotes it, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits; nested without end
        return f"{type(value).__name__} of no end"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def one_line(text: str) -> str:
    """`text` without what would break a line of a log or a terminal, or show another than it is."""
    return _NOT_SHOWN.sub(" ", text)


def check_flag(key: str, value: object) -> None:
    """Raises ConfigError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}: {shown(value)} is neither true nor false")


def check_int(key: str, value: object, low: int, high: int | None = None) -> None:
    """Raises ConfigError unless `value` is an int in `low`..`high`; None: of 64 bits."""
    if type(value) is not int:
        raise ConfigError(f"{key}: {shown(value)} is not an int")
    if high is None and value < low:
        raise ConfigError(f"{key}: {shown(value)} is below {low}")
    if high is None and value > _INT64:
        raise ConfigError(f"{key}: {shown(value)} is above {_INT64}")
    if high is not None and not low <= value <= high:
        raise ConfigError(f"{key}: {shown(value)} is not in {low}..{high}")


def check_seconds(key: str, value: object, low: float, high: float) -> None:
    """Raises ConfigError unless `value` is a number in `low`..`high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{key}: {shown(value)} is not a number")
    if not low <= value <= high:
        raise ConfigError(f"{key}: {shown(value)} is not in {low}..{high}")


def check_kind(key: str, value: object, kind: type) -> None:
    """Raises ConfigError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise ConfigError(f"{key}: {shown(value)} is not a {kind.__name__}")


def check_text(key: str, value: object) -> None:
    """Raises ConfigError unless `value` is a string that UTF-8 can say in 4096 bytes."""
    if not isinstance(value, str):
        raise ConfigError(f"{key}: {shown(value)} is not a string")
    try:
        length = len(value.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{key}: {shown(value)} cannot be encoded: {error.reason}") from None
    if length > _TEXT_BYTES:
        raise ConfigError(f"{key}: {length} bytes are above {_TEXT_BYTES}")


def check_path(key: str, value: object) -> None:
    """Raises ConfigError unless `value` is a string that can be a path."""
    check_text(key, value)
    if not value or "\0" in str(value):
        raise ConfigError(f"{key}: {shown(value)} is not a path")


def check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{key}: {shown(value)} is not one of {', '.join(choices)}")


def settle_none(config: msgspec.Struct, key: str) -> None:
    """Make `NONE` None. Mutates `config`."""
    if getattr(config, key) == NONE:
        msgspec.structs.force_setattr(config, key, None)
