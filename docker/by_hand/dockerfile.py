"""A Dockerfile as instructions: as much of the language as ours have, and an error for the rest."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["DockerfileError", "Instruction", "Stage", "expand", "parse", "read"]

KEYWORDS = frozenset(
    (
        *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM"),
        *("HEALTHCHECK", "LABEL", "RUN", "USER", "VOLUME", "WORKDIR"),
    )
)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_FLAG = re.compile(r"--([a-z-]+)=(\S+)\s+")


class DockerfileError(ValueError):
    """Something that is not understood, with its line."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `text`: what follows keyword and flags; `line`: where it begins, from 1."""

    line: int
    keyword: str
    flags: Mapping[str, str]
    text: str

    @property
    def words(self) -> list[str]:
        """The text as a list: of JSON where it is that, else word by word."""
        if self.text.startswith("["):
            found: list[str] = json.loads(self.text)
            return found
        return shlex.split(self.text)

    @property
    def pairs(self) -> dict[str, str]:
        """Of ARG, ENV and LABEL: names and values; a name without a value has an empty one."""
        return {name: value for name, _, value in (word.partition("=") for word in self.words)}


@dataclass(slots=True)
class Stage:
    """What follows a FROM. `base`: an image or an earlier stage, variables filled in."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$NAME` and `${NAME}` filled in; a name that is not there is empty."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)


def read(path: Path) -> list[Stage]:
    """The stages of a file. Raises DockerfileError, OSError."""
    return parse(path.read_text())


def parse(text: str) -> list[Stage]:
    """The stages, in order. Raises DockerfileError for what is not understood."""
    stages: list[Stage] = []
    outer: dict[str, str] = {}
    for one in _instructions(text):
        if one.keyword == "FROM":
            base, *name = one.words
            if name and (len(name) != 2 or name[0].upper() != "AS"):
                raise DockerfileError(f"line {one.line}: FROM {one.text}")
            stages.append(Stage(expand(base, outer), name[1] if name else ""))
        elif stages:
            stages[-1].instructions.append(one)
        elif one.keyword == "ARG":
            outer |= one.pairs
        else:
            raise DockerfileError(f"line {one.line}: {one.keyword} before the first FROM")
    return stages


def _instructions(text: str) -> list[Instruction]:
    found: list[Instruction] = []
    pending, begun = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun or number
        pending += line.strip() + " "
        if line.rstrip().endswith("\\"):
            pending = pending.rstrip().removesuffix("\\")
            continue
        found.append(_instruction(pending.strip(), begun))
        pending, begun = "", 0
    if pending:
        raise DockerfileError(f"line {begun}: it has no end")
    return found


def _instruction(text: str, line: int) -> Instruction:
    keyword, _, rest = text.partition(" ")
    if keyword not in KEYWORDS:
        raise DockerfileError(f"line {line}: {keyword} is none of {', '.join(sorted(KEYWORDS))}")
    rest, flags = rest.lstrip(), dict[str, str]()
    while (flag := _FLAG.match(rest)) is not None:
        flags[flag[1]] = flag[2]
        rest = rest[flag.end() :]
    return Instruction(line, keyword, flags, rest)
