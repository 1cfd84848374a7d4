"""Imports point one way: hicache → kvevents ← publisher."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("hicache", "kvevents", "publisher")
GLUE = (
    *("publisher.demo.engine", "publisher.demo.worker"),
    *("publisher.engines.pages", "publisher.engines.sglang_storage"),
)
"""Where cache and publisher meet, as in an engine."""

ROOMS = {
    "config": "",
    "link": "config",
    "worker": "config link",
    "stream": "config link",
    "sidecar": "config link stream",
    "subscriber": "config",
    "engines": "config link worker",
    "tools": "config sidecar subscriber",
}
"""The rooms of publisher, and those below each."""
SHARED = {"closing", "host_log", "multipart", "once", "version"}

IO_AND_TIME = {"asyncio", "multiprocessing", "select", "socket", "subprocess", "threading", "time"}
"""What the contract has no business with."""


def modules_of(package: str) -> list[Path]:
    """Every source file of a package."""
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    """The dotted name of a source file's module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path: Path) -> set[str]:
    """The top-level names a module imports, wherever in it that stands."""
    return set(_imports(ast.parse(path.read_text()))) - {""}


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name.split(".")[0] for name in names)
            case ast.ImportFrom(module=module, level=level):
                yield "a relative import" if level else (module or "").split(".")[0]
            case ast.Call(
                func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name.split(".")[0]


@pytest.mark.parametrize("path", modules_of("kvevents"), ids=name_of)
def test_the_contract_stands_on_the_standard_library_and_msgspec(path: Path) -> None:
    """kvevents imports nothing else, and neither I/O, clock nor threads."""
    imported = imports_of(path)
    assert imported <= sys.stdlib_module_names | {"msgspec", "kvevents"}
    assert imported.isdisjoint(IO_AND_TIME)


@pytest.mark.parametrize("path", modules_of("hicache"), ids=name_of)
def test_the_cache_knows_no_socket(path: Path) -> None:
    """hicache imports torch, msgspec, mooncake and kvevents, and never zmq or publisher."""
    assert imports_of(path) <= sys.stdlib_module_names | {
        *("torch", "msgspec", "mooncake", "hicache", "kvevents")
    }
    assert imports_of(path).isdisjoint({"asyncio", "zmq"})


@pytest.mark.parametrize("path", modules_of("publisher"), ids=name_of)
def test_the_publisher_knows_no_tensor(path: Path) -> None:
    """publisher imports neither torch nor hicache, but for its one piece of glue."""
    assert imports_of(path).isdisjoint({"torch", "hicache"}) or name_of(path) in GLUE


@pytest.mark.parametrize("room", ROOMS)
def test_the_rooms_of_the_publisher_stand_on_each_other(room: str) -> None:
    """Imports between them go down."""
    below = {"publisher", *SHARED, room, *ROOMS[room].split()}
    for path in modules_of(f"publisher/{room}"):
        named = {name.split(".")[1] for name in _modules(ast.parse(path.read_text()), "publisher.")}
        assert named <= below, path


def _modules(tree: ast.Module, prefix: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
            yield node.module or ""


@pytest.mark.parametrize("package", OURS)
def test_a_package_has_modules(package: str) -> None:
    """The rules above are about something."""
    assert modules_of(package)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("kvevents", {"torch", "zmq", "hicache", "publisher"}),
        ("hicache", {"zmq", "publisher"}),
        ("publisher", {"torch", "hicache"}),
    ],
)
def test_importing_all_of_a_package_loads_nothing_it_may_not_know(
    package: str, absent: set[str]
) -> None:
    """In a fresh process with every module of the package, the forbidden ones are not loaded."""
    names = [name_of(path) for path in modules_of(package)]
    wanted = [name for name in names if name not in GLUE and not name.endswith("__main__")]
    code = f"""
import importlib, sys
for name in {wanted!r}:
    importlib.import_module(name)
print(*sorted({absent!r}.intersection(sys.modules)))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
