"""Builds wheel and sdist, checks them, and installs the wheel with each extra alone: `make package`.

    package_check.py [EXTRA …]

Without arguments all that there is; `none` is no extra. What is built stays in dist/; environments are
made in a temporary folder. Ends with 1, and the output of what failed, at the first that does.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DIST = ROOT / "dist"

OF_TOOLS = {"matplotlib", "rich", "shtab"}
ENGINES = {"sglang", "vllm"}
LAYERING = ROOT / "tests/test_layering.py"
"""Which names the modules that see the cache too, as an engine does."""

EXTRAS: dict[str, tuple[tuple[str, ...], set[str], set[str]]] = {
    "none": (("kvevents",), set(), {"zmq", "torch", "prometheus_client"}),
    "publisher": (("kvevents", "publisher"), OF_TOOLS, {"torch", "rich", "matplotlib"}),
    "tools": (("kvevents", "publisher"), set(), {"torch"}),
    "hicache": (("kvevents", "hicache"), {"mooncake"}, {"zmq", "prometheus_client"}),
    "mooncake": (("kvevents", "hicache"), set(), {"zmq", "prometheus_client"}),
    "demo": (("kvevents", "publisher", "hicache"), OF_TOOLS | {"mooncake"}, {"rich", "matplotlib"}),
}
"""Of each extra: packages of ours whose modules are all imported, what those may miss, and what is not
installed with it.
"""

COMMANDS: dict[str, list[str]] = {
    "publisher": ["serve", "--check"],
    "tools": ["completion", "bash"],
    "demo": ["demo", "--requests", "200", "--json"],
}
"""What the command is asked to do, where it can be."""

IMPORTS = """
import importlib, pkgutil, sys
packages, may_miss, absent, glue = {arguments}
for name in packages:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        if found.name in glue or found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] not in may_miss:
                raise
for name in absent:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(name + " is installed, and should not be")
assert sys.prefix in importlib.import_module("kvevents").__file__, "not of this environment"
"""

CONSUMER = """\
from kvevents import BlockIndex, decode_batch
index: BlockIndex = BlockIndex()
index.apply(decode_batch(b"").batch.events)
"""
MISTAKE = "wrong: str = BlockIndex()\n"


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Build, check and install the distributions.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=", ".join(EXTRAS))
    wanted = parser.parse_args(arguments).extras or list(EXTRAS)
    if unknown := [extra for extra in wanted if extra not in EXTRAS]:
        parser.error(f"{unknown[0]} is not one of {', '.join(EXTRAS)}")
    wheel = build()
    with tempfile.TemporaryDirectory(prefix="kvevents-package-") as folder:
        for extra in wanted:
            install(wheel, extra, Path(folder))
            print(f"ok  installed alone: {extra}", flush=True)
    return 0


def build() -> Path:
    """The wheel, made of the sdist; both checked."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT))
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    print(f"ok  {wheel.name}, {sdist.name}", flush=True)
    return wheel


def install(wheel: Path, extra: str, folder: Path) -> None:
    """Into an environment of its own, and see what is there, from a folder that has nothing of ours."""
    packages, may_miss, absent = EXTRAS[extra]
    home = folder / extra
    run(sys.executable, "-m", "venv", str(home))
    python, empty = str(home / "bin" / "python"), folder / f"{extra}-cwd"
    empty.mkdir()
    what = str(wheel) if extra == "none" else f"{wheel}[{extra}]"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what)
    told = (packages, may_miss | ENGINES, absent, glue())
    code = IMPORTS.replace("{arguments}", repr(told))
    run(python, "-I", "-W", "error", "-c", code, cwd=empty)
    if extra in COMMANDS:
        run(str(home / "bin" / "kvevents"), *COMMANDS[extra], cwd=empty)
    if extra == "none":
        check_types(python, empty)
    shutil.rmtree(home)


def glue() -> tuple[str, ...]:
    """Modules that want more than any one extra brings."""
    for node in ast.parse(LAYERING.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="GLUE")], value=value):
                names = [one.value for one in ast.walk(value) if isinstance(one, ast.Constant)]
                return tuple(map(str, names))
            case _:
                pass
    raise SystemExit(f"{LAYERING} names no GLUE")


def check_types(python: str, folder: Path) -> None:
    """A consumer of three lines is sound for mypy, and one with a mistake is not."""
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python]
    (folder / "consumer.py").write_text(CONSUMER)
    run(*command, "consumer.py", cwd=folder)
    (folder / "mistaken.py").write_text(CONSUMER + MISTAKE)
    done = subprocess.run(
        [*command, "mistaken.py"], check=False, cwd=folder, capture_output=True, text=True
    )
    if "Incompatible types in assignment" not in done.stdout:
        raise SystemExit(f"mypy saw no mistake:\n{done.stdout}{done.stderr}")
    print("ok  types: of a consumer", flush=True)


def run(*command: str, cwd: Path | None = None) -> None:
    """Quiet, unless it fails: then all that it said, and the end."""
    done = subprocess.run(
        command, check=False, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
