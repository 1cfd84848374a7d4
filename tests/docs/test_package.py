"""What a release has in it, as the real build back end makes it; `make package` installs it as well."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from docs_pages import ROOT

PACKAGES = ("hicache", "kvevents", "publisher")
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # which a build changes
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist, of a copy: a build writes beside its sources."""
    if find_spec("setuptools") is None:
        pytest.skip("setuptools, the build back end, is not installed")
    folder = tmp_path_factory.mktemp("package")
    source, out = folder / "source", folder / "out"
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        check=False,
        cwd=source,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sources() -> set[str]:
    """Every module of the packages, and the types' markers."""
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }


def test_the_wheel_has_all_of_the_packages_and_nothing_else(built: tuple[Path, Path]) -> None:
    """Every module, py.typed of each package, the demo's trace with its notice; no tests, no caches."""
    names = names_in(built[0])
    ours = {name for name in names if ".dist-info/" not in name}
    data = {str(path.relative_to(ROOT)) for path in (ROOT / "publisher/demo/data").iterdir()}
    assert {f"{package}/py.typed" for package in PACKAGES} <= ours
    assert ours == sources() | data
    assert "publisher/demo/data/NOTICE" in ours


def test_the_wheel_says_what_it_is(built: tuple[Path, Path]) -> None:
    """Its metadata has the licence, the README and every extra; its entry points can be found."""
    with zipfile.ZipFile(built[0]) as archive:
        (folder,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(f"{folder}/METADATA").decode()
        points = archive.read(f"{folder}/entry_points.txt").decode()
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
        assert f"{folder}/licenses/publisher/demo/data/NOTICE" in archive.namelist()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Description-Content-Type: text/markdown" in metadata
    for extra in ("publisher", "tools", "hicache", "mooncake", "demo", "docs", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata
    targets = [line.partition(" = ")[2] for line in points.splitlines() if " = " in line]
    assert "publisher.cli:main" in targets
    for target in targets:
        module, _, function = target.partition(":")
        path = ROOT / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        defined = {
            one.name for one in ast.parse(file.read_text()).body if isinstance(one, ast.FunctionDef)
        }
        assert function in defined, target


def test_the_sdist_can_make_the_wheel(built: tuple[Path, Path]) -> None:
    """All that the wheel is made of is in the sdist."""
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sources() | {"pyproject.toml", "README.md", "LICENSE"} <= names
