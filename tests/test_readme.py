"""What the README shows is so."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest
from ports_rig import free_ports

README = Path(__file__).parent.parent / "README.md"
PATIENCE_S = 40.0
PORTS = ("5557", "5558")
SEEN = "leading blocks of the prompt held: {'GPU': 3, 'CPU_PINNED': 0, 'DISK': 0, 'EXTERNAL': 0}"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def start(file: Path) -> subprocess.Popen[str]:
    """As from a terminal, in a folder of its own; only our packages are on its path."""
    return subprocess.Popen(
        [sys.executable, "-u", str(file)],
        cwd=file.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(README.parent)},
    )


def stop(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Ctrl-C; the exit code, and what it left on stderr."""
    process.send_signal(signal.SIGINT)
    return process.wait(PATIENCE_S), process.communicate()[1]


@pytest.mark.integration
def test_the_worker_and_the_router_of_the_readme_agree(tmp_path: Path) -> None:
    """The two code blocks are programs: in two processes, changed in nothing but their ports, the router
    prints that the prompt's three blocks are held, and Ctrl-C ends both quietly.
    """
    files = tmp_path / "worker.py", tmp_path / "router.py"
    worker_code, _, router_code = python_blocks()
    for file, code in zip(files, (worker_code, router_code), strict=True):
        assert all(code.count(port) == 1 for port in PORTS)
        file.write_text(code)
    for port, free in zip(PORTS, free_ports(len(PORTS)), strict=True):
        for file in files:
            file.write_text(file.read_text().replace(port, str(free)))
    with start(files[0]) as worker, start(files[1]) as router:
        watch = Timer(PATIENCE_S, router.kill)
        watch.start()
        try:
            assert router.stdout is not None
            said = []
            for line in router.stdout:
                said.append(line.rstrip("\n"))
                if said[-1] == SEEN:
                    break
            assert said[-1:] == [SEEN]
            assert worker.poll() is None
            assert [stop(router), stop(worker)] == [(0, ""), (0, "")]
        finally:
            watch.cancel()
            worker.kill()
            router.kill()


def test_every_command_and_file_that_the_readme_names_is_there() -> None:
    """No path in backquotes or links leads nowhere."""
    text = README.read_text()
    paths = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r"`([\w/]+/[\w/]+\.py)`", text)
    assert paths
    assert [path for path in paths if not (README.parent / path).exists()] == []


@pytest.mark.integration
def test_the_tiers_of_the_readme_are_filled(tmp_path: Path) -> None:
    """The example of the lower tiers prints the line that the text promises."""
    (tmp_path / "tiers.py").write_text(python_blocks()[1])
    with start(tmp_path / "tiers.py") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    (promised,) = re.findall(r"It prints `(.*?)`\.", README.read_text())
    assert (out.strip(), err) == (promised, "")
