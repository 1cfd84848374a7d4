"""A sidecar's configuration in a file: TOML or JSON with the keys of SidecarConfig."""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Iterable
from pathlib import Path

import msgspec

from publisher.config.checks import ConfigError, one_line, shown
from publisher.config.sidecar_config import SidecarConfig, read_config

__all__ = ["in_file", "load_config", "read_file"]

_MAX_FILE_BYTES = 1 << 20


def load_config(path: str | Path) -> SidecarConfig:
    """The configuration in a file, as `kvevents serve --config` reads it; of the environment, nothing.

    Raises ConfigError that begins with the key, or with `path` where the file cannot be read, and names
    the file.
    """
    if str(path) == "-":
        raise ConfigError("path: - is no file")
    data = read_file("path", str(path))
    try:
        return read_config(SidecarConfig, data)
    except ConfigError as error:
        raise ConfigError(in_file(str(error), str(path), data)) from None


def in_file(message: str, name: str, keys: Iterable[str]) -> str:
    """The message, which begins with a key's path, with the file's name where that key is one of its
    `keys`. Standard input has none.
    """
    first = re.split(r"[.:\[]", message, maxsplit=1)[0]
    return message if name == "-" or first not in keys else f"{message} (in {one_line(name)})"


def read_file(key: str, name: str) -> dict[str, typing.Any]:
    """What a file says; `-` is JSON on standard input. Raises ConfigError that begins with `key` and the
    file's name.
    """
    where = f"{key}: {'standard input' if name == '-' else one_line(name)}"
    try:
        data = _parse(name)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from None
    except (ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"{where}: {one_line(str(error))[:400]}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: {shown(data)} is not an object")
    return data


def _parse(name: str) -> object:
    if name == "-":
        if sys.stdin is None:
            raise ValueError("it is closed")
        return msgspec.json.decode(_limited(sys.stdin.buffer))
    suffix = Path(name).suffix
    if suffix not in (".json", ".toml"):
        raise ValueError("ends in neither .json nor .toml")
    with Path(name).open("rb") as file:
        text = _limited(file)
    if suffix == ".json":
        return msgspec.json.decode(text)
    import tomllib

    return tomllib.loads(text.decode())


def _limited(file: typing.BinaryIO) -> bytes:
    text = file.read(_MAX_FILE_BYTES + 1)
    if len(text) > _MAX_FILE_BYTES:
        raise ValueError(f"longer than {_MAX_FILE_BYTES} bytes")
    return text
