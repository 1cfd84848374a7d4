"""The documents as tests read them: pages, their code blocks, and what a comment says of a block."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DOCS", "ROOT", "Block", "between", "blocks_of", "flat", "pages"]

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n\s*)?"
    r"^(?P<margin> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `note`: the comment right before it, of one line; empty without one."""

    page: Path
    line: int
    language: str
    text: str
    note: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def why_not_run(self) -> str:
        """The reason that the page gives for not running it."""
        return self.note.partition("not run: ")[2]


def pages() -> list[Path]:
    """README, the documents and what contributors read; not the pages that a tool fills."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    docs = sorted(DOCS.rglob("*.md"))
    return [*top, *(page for page in docs if page.parent != DOCS / "reference")]


def blocks_of(page: Path) -> list[Block]:
    """All of a page, in turn."""
    text = page.read_text()
    found = []
    for one in _BLOCK.finditer(text):
        line = text.count("\n", 0, one.start("margin")) + 1
        margin = len(one["margin"])
        body = "".join(row[margin:] for row in one["text"].splitlines(keepends=True))
        found.append(Block(page, line, one["language"], body, one["note"] or ""))
    return found


def between(page: Path, name: str) -> str:
    """What stands between `<!-- name -->` and `<!-- /name -->`."""
    (found,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", page.read_text(), re.DOTALL)
    assert isinstance(found, str)
    return found


def flat(text: str) -> str:
    """On one line, with single spaces."""
    return re.sub(r"\s+", " ", text)
