"""The files of data/, as its README describes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Golden", "frames", "golden", "hash_vectors", "ours"]

FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Golden:
    """One batch as an engine made it, and what the engine was given for it."""

    engine: str
    case: str
    payload: bytes
    ts: float
    dp_rank: int | None
    events: list[dict[str, Any]]
    typed_decoder_rejects: bool = False

    def __str__(self) -> str:
        return f"{self.engine}/{self.case}"


def golden() -> list[Golden]:
    """Every batch of every engine."""
    described = json.loads((FOLDER / "golden.json").read_text(), object_hook=_bytes)
    return [
        Golden(engine, case, payloads[case], **meaning)
        for engine, entry in described.items()
        for payloads in [{name: frames[0] for name, frames in _read(entry["file"])}]
        for case, meaning in entry["cases"].items()
    ]


def frames() -> dict[str, list[bytes]]:
    """Multipart messages by `ENGINE/NAME`."""
    return dict(_read("frames.hex"))


def ours() -> dict[str, bytes]:
    """The payloads that our encoder must make, by case."""
    return {case: parts[0] for case, parts in _read("ours.hex")}


def hash_vectors() -> list[dict[str, Any]]:
    """Prompts with the block hashes of several systems."""
    cases: list[dict[str, Any]] = json.loads((FOLDER / "hash_vectors.json").read_text())["cases"]
    return cases


def _read(file: str) -> Iterator[tuple[str, list[bytes]]]:
    for line in (FOLDER / file).read_text().splitlines():
        if line and not line.startswith("#"):
            name, *parts = line.split(" ")
            yield name, [b"" if part == "-" else bytes.fromhex(part) for part in parts]


def _bytes(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["$hex"]) if value.keys() == {"$hex"} else value
