"""Carries out a Dockerfile on a root that stands for the image it begins with. As root, on Linux.

    python3 -m docker.by_hand DOCKERFILE BASE WORK [--build-arg NAME=VALUE]...

In the folder WORK, which is empty, it leaves the roots of the stages, `image.json` (the last one, and
how to run it), and `files`: what is in it, by mode and content.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from docker.by_hand.builder import build
from docker.by_hand.context import Context
from docker.by_hand.dockerfile import read

_REPOSITORY = Path(__file__).parents[2]


def _lines(root: Path) -> Iterator[str]:
    """Every file and link of a root, with its mode and content; no devices."""
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                content = str(path.readlink()).encode()
            elif stat.S_ISREG(mode):
                content = path.read_bytes()
            else:
                continue
            yield f"{hashlib.sha256(content).hexdigest()} {mode:o} {path.relative_to(root)}"


def main() -> int:
    parser = argparse.ArgumentParser("python3 -m docker.by_hand")
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--build-arg", action="append", default=[])
    options = parser.parse_args()
    arguments = dict(one.split("=", 1) for one in options.build_arg)
    context = Context(_REPOSITORY)
    image = build(
        read(options.dockerfile), options.base.resolve(), context, options.work.resolve(), arguments
    )
    (options.work / "files").write_text("\n".join(_lines(image.root)) + "\n")
    image.save(options.work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
