"""A sidecar's configuration in a file: TOML or JSON with the keys of SidecarConfig."""

from __future__ import annotations

import sys
import typing
from pathlib import Path

import msgspec

from publisher.config.checks import ConfigError, one_line, shown
from publisher.config.sidecar_config import SidecarConfig, read_config

__all__ = ["load_config", "read_file"]

_MAX_FILE_BYTES = 1 << 20


def load_config(path: str | Path) -> SidecarConfig:
    """The configuration in a file, as `kvevents serve --config` reads it; of the environment, nothing.

    Raises ConfigError that begins with the key, or with `path` where the file cannot be read.
    """
    if str(path) == "-":
        raise ConfigError("path: - is no file")
    return read_config(SidecarConfig, read_file("path", str(path)))


def read_file(key: str, name: str) -> dict[str, typing.Any]:
    """What a file says; `-` is JSON on standard input. Raises ConfigError that begins with `key`."""
    try:
        data = _parse(name)
    except OSError as error:
        raise ConfigError(f"{key}: {one_line(name)}: {error.strerror or error}") from None
    except (ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"{key}: {one_line(str(error))[:400]}") from None
    except RecursionError:
        raise ConfigError(f"{key}: nested too deeply") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{key}: {shown(data)} is not an object")
    return data


def _parse(name: str) -> object:
    if name == "-":
        if sys.stdin is None:
            raise ConfigError("--config: standard input is closed")
        return msgspec.json.decode(_limited(sys.stdin.buffer))
    suffix = Path(name).suffix
    if suffix not in (".json", ".toml"):
        raise ValueError(f"{name} ends in neither .json nor .toml")
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
