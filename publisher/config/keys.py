"""CURVE keys in files. They have the form of ZeroMQ's certificates, as czmq and pyzmq write them.

No secret is ever logged, shown or part of an error.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils import z85

from publisher.config.checks import ConfigError

__all__ = ["is_key", "read_public_key", "read_secret_key", "write_keys"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LINE = re.compile(r"\s*(public|secret)-key\s*=\s*[\"']?([^\"'\s]*)[\"']?\s*")
_KEY_LENGTH = 40
_FILE_BYTES = 64 << 10


def write_keys(directory: str | Path, name: str) -> tuple[Path, Path]:
    """Make a pair of keys: NAME.key, to give away, and NAME.key_secret, for its owner's eyes only.

    The directory is made where it is missing. Raises ValueError for a name that is not one of a file,
    FileExistsError rather than overwrite either file, OSError when they cannot be written.
    """
    if _NAME.fullmatch(name) is None or name.startswith("."):
        raise ValueError(f"name: {name!r} is not 1..64 of A-Z a-z 0-9 _ - and dots inside")
    folder = Path(directory)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    public, secret = zmq.curve_keypair()
    lines = f'metadata\ncurve\n    public-key = "{public.decode()}"\n'
    public_path, secret_path = folder / f"{name}.key", folder / f"{name}.key_secret"
    _write_new(public_path, f"# CURVE public key of {name}: for the other side.\n{lines}", 0o644)
    try:
        _write_new(
            secret_path,
            f"# CURVE SECRET key of {name}: give it to nobody.\n{lines}"
            f'    secret-key = "{secret.decode()}"\n',
            0o600,
        )
    except BaseException:
        public_path.unlink()
        raise
    return public_path, secret_path


def _write_new(path: Path, text: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def read_public_key(key: str, path: str | Path) -> str:
    """The public key in a file of either kind. Raises ConfigError, beginning with `key`, naming it."""
    return _read_keys(key, Path(path), "public")["public"]


def read_secret_key(key: str, path: str | Path) -> tuple[str, str]:
    """The public and the secret key in a file. Raises ConfigError, beginning with `key`, naming it."""
    found = _read_keys(key, Path(path), "secret")
    return found["public"], found["secret"]


def _read_keys(key: str, path: Path, needed: Literal["public", "secret"]) -> dict[str, str]:
    try:
        text = _read_file(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file of up to 64 KiB"
        raise ConfigError(f"{key}: {path}: {reason}") from None
    lines = [_LINE.fullmatch(line) for line in text.splitlines()]
    found = {match[1]: match[2] for match in lines if match is not None}
    for wanted in ("public", needed):
        if wanted not in found:
            raise ConfigError(f"{key}: {path}: it has no {wanted}-key")
    for kind, value in found.items():
        if not is_key(value):
            raise ConfigError(
                f"{key}: {path}: its {kind}-key is not {_KEY_LENGTH} characters of Z85"
            )
    if "secret" in found and zmq.curve_public(found["secret"].encode()) != found["public"].encode():
        raise ConfigError(f"{key}: {path}: its two keys are not of one pair")
    return found


def _read_file(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe: do not wait
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError
        data = file.read(_FILE_BYTES + 1)
    if len(data) > _FILE_BYTES:
        raise ValueError
    return data.decode()


def is_key(value: str) -> bool:
    """Whether it is Z85 of 32 bytes, spelled as everybody spells those."""
    if len(value) != _KEY_LENGTH:
        return False
    try:
        decoded = z85.decode(value.encode())
    except (KeyError, ValueError, struct.error):
        return False
    return len(decoded) == 32 and z85.encode(decoded) == value.encode()
