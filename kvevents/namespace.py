"""What separates equal tokens: LoRA adapter name, cache salt, extra key."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["BASE", "MAX_NAME_BYTES", "Namespace"]

MAX_NAME_BYTES: Final = 1024


class Namespace(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a prompt apart from its tokens. An empty string is the same as None.

    Raises TypeError for anything but a string or None, ValueError for one that UTF-8 cannot encode or
    that takes more than `MAX_NAME_BYTES`.
    """

    lora_name: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None

    def __post_init__(self) -> None:
        for field in ("lora_name", "cache_salt", "extra_key"):
            value = getattr(self, field)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{field}: {value!r} is not a string")
            if value is not None:
                msgspec.structs.force_setattr(self, field, _checked(field, value) or None)


def _checked(field: str, value: str) -> str:
    """`value` as an exact string that the wire can carry: subclasses of str are not encoded alike."""
    try:
        length = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{field}: {value!r} cannot be encoded: {error.reason}") from None
    if length > MAX_NAME_BYTES:
        raise ValueError(f"{field}: {length} bytes are above {MAX_NAME_BYTES}")
    return str.__str__(value)


BASE: Final = Namespace()
"""The base model, unsalted."""
