"""`kvevents completion`: what it prints, in the shells that are here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from publisher_rig import kvevents

from publisher.cli.commands import COMMANDS

_TRY = """
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_shtab_kvevents
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For bash."""
    path = tmp_path_factory.mktemp("completion") / "kvevents.bash"
    done = kvevents("completion", "bash")
    assert (done.returncode, done.stderr) == (0, "")
    path.write_text(done.stdout)
    return path


def complete(script: Path, *words: str, where: Path) -> set[str]:
    """What a bash that has read the script makes of the last word."""
    done = subprocess.run(
        ["bash", "--norc", "-c", f'source "{script}"\n{_TRY}', "bash", *words],
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
        cwd=where,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands(script: Path, tmp_path: Path) -> None:
    """All of them, or those that begin so."""
    assert complete(script, "kvevents", "ta", where=tmp_path) == {"tail"}
    assert complete(script, "kvevents", "", where=tmp_path) == set(COMMANDS)


def test_bash_completes_options_and_choices(script: Path, tmp_path: Path) -> None:
    """Those of the command, from its own parser."""
    assert complete(script, "kvevents", "tail", "--fr", where=tmp_path) == {"--from"}
    assert complete(script, "kvevents", "lint", "--output", "j", where=tmp_path) == {"json"}
    assert complete(script, "kvevents", "completion", "", where=tmp_path) == {"bash", "zsh", "fish"}


def test_bash_completes_lists(script: Path, tmp_path: Path) -> None:
    """The first word of one, and those behind a comma."""
    assert complete(script, "kvevents", "lint", "--as", "vl", where=tmp_path) == {
        *("vllm", "vllm-router")
    }
    assert complete(script, "kvevents", "lint", "--as", "smg,kth", where=tmp_path) == {"smg,kthena"}
    told = complete(script, "kvevents", "tail", "--medium", "GPU,CPU", where=tmp_path)
    assert told == {"GPU,CPU_PINNED"}
    assert complete(script, "kvevents", "record", "--from", "b", where=tmp_path) == {"beginning"}
    told = complete(script, "kvevents", "check", "--allow", "hash,two", where=tmp_path)
    assert told == {"hash,two-names"}


def test_bash_completes_files(script: Path, tmp_path: Path) -> None:
    """Captures where a source is asked for, and outputs; folders where a folder is."""
    (tmp_path / "life.capture").touch()
    (tmp_path / "live").mkdir()
    both = {"life.capture", "live"}
    assert complete(script, "kvevents", "plot", "li", where=tmp_path) == both
    assert complete(script, "kvevents", "lint", "li", where=tmp_path) == both
    assert complete(script, "kvevents", "record", "--write", "li", where=tmp_path) == both
    assert complete(script, "kvevents", "keygen", "li", where=tmp_path) == {"live"}


def test_bash_calls_it_for_the_command(script: Path) -> None:
    """Sourcing registers it, says nothing, and minds no strict shell."""
    told = subprocess.run(
        ["bash", "--norc", "-euc", f'eval "$(cat "{script}")"; complete -p kvevents'],
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
    )
    assert told.stderr == ""
    assert told.stdout.strip().endswith("-F _shtab_kvevents kvevents")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str, tmp_path: Path) -> None:
    """It names every command, and the shell, where it is here, can read it."""
    done = kvevents("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in (*COMMANDS, "replay-endpoint"))
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here to read it")
    (tmp_path / "script").write_text(done.stdout)
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=30)


def test_no_other_shell(tmp_path: Path) -> None:
    """Those that there are are named; exit code 2."""
    done = kvevents("completion", "csh")
    assert (done.returncode, done.stdout) == (2, "")
    assert "csh" in done.stderr and "bash" in done.stderr and len(done.stderr.splitlines()) == 1
