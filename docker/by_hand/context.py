"""What of the repository reaches the builder: .dockerignore."""

from __future__ import annotations

import fnmatch
from pathlib import Path

__all__ = ["Context"]


class Context:
    """The folder `root` as Docker would send it. Raises OSError where it has no .dockerignore."""

    def __init__(self, root: Path) -> None:
        self.root = root
        lines = (root / ".dockerignore").read_text().splitlines()
        self._rules = [line.strip() for line in lines if line.strip() and not line.startswith("#")]

    def has(self, name: str) -> bool:
        """Whether a path is let through: the last line that matches it, or a folder it is in, decides."""
        path, through = Path(name), True
        for rule in self._rules:
            pattern = rule.removeprefix("!")
            if any(_matches(one, pattern) for one in (path, *path.parents)):
                through = rule.startswith("!")
        return through

    def ignored(self, folder: str, names: list[str]) -> set[str]:
        """Those of `names` in `folder` that are not let through, as shutil.copytree asks for them."""
        inside = Path(folder).relative_to(self.root)
        return {name for name in names if not self.has(str(inside / name))}


def _matches(path: Path, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch.fnmatch(path.name, pattern.removeprefix("**/"))
    return len(path.parts) == pattern.count("/") + 1 and fnmatch.fnmatch(str(path), pattern)
