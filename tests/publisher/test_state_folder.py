"""publisher.stream.state_folder: private, and one sidecar's at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from publisher_rig import PATIENCE_S, eventually, open_fds

from publisher.stream.state_folder import StateError, StateFolder, default_root


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def refused(root: Path, name: str = "w", wait_s: float = 0.0) -> str:
    """Why there is no such folder; no descriptor is left open."""
    before = open_fds()
    with pytest.raises(StateError) as error:
        StateFolder(root, name, wait_s=wait_s)
    assert open_fds() == before
    return str(error.value)


def test_it_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    """Folder, root and lock are private whatever the umask; parents are made where they are missing."""
    old = os.umask(0)
    try:
        folder = StateFolder(tmp_path / "a" / "root", "w", wait_s=0)
    finally:
        os.umask(old)
    assert folder.path == tmp_path / "a" / "root" / "w"
    assert [mode(it) for it in (folder.path.parent, folder.path)] == [0o700, 0o700]
    assert mode(folder.path / "lock") == 0o600
    assert (folder.path / "lock").read_text() == str(os.getpid())
    folder.close()


def test_what_is_there_stays(tmp_path: Path) -> None:
    """A folder of an earlier run is taken as it is, readable by others as it may be."""
    folder = StateFolder(tmp_path, "w", wait_s=0)
    (folder.path / "seq-a").write_text("7")
    folder.path.chmod(0o755)
    folder.close()
    again = StateFolder(tmp_path, "w", wait_s=0)
    assert (again.path / "seq-a").read_text() == "7"
    again.close()
    again.close()


@pytest.mark.parametrize("bits", [0o020, 0o002, 0o022, 0o1002])
@pytest.mark.parametrize("which", ["root", "folder"])
def test_others_may_not_write(tmp_path: Path, bits: int, which: str) -> None:
    """A root or folder that its group or all may write to is refused by mode, sticky or not."""
    root = tmp_path / "root"
    (root / "w").mkdir(parents=True)
    open_one = root if which == "root" else root / "w"
    open_one.chmod(0o700 | bits)
    said = refused(root)
    assert said == f"state_dir: {open_one}: mode {oct(0o700 | bits)} lets others write to it"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("which", ["root", "folder"])
def test_it_belongs_to_us(tmp_path: Path, which: str) -> None:
    """A root or folder of another user is refused, who it belongs to being said."""
    root = tmp_path / "root"
    (root / "w").mkdir(parents=True, mode=0o700)
    foreign = root if which == "root" else root / "w"
    os.chown(foreign, 65534, 65534)
    assert refused(root) == f"state_dir: {foreign}: belongs to user 65534, not 0"


def test_no_symlink_is_followed(tmp_path: Path) -> None:
    """Neither as the root nor as the folder, dangling or not: it may have been put there by another."""
    (tmp_path / "real").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    assert refused(link) == f"state_dir: {link}: not a directory"
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    (root / "w").symlink_to(tmp_path / "real")
    assert refused(root) == f"state_dir: {root / 'w'}: not a directory"
    (root / "v").symlink_to(tmp_path / "absent")
    assert refused(root, "v") == f"state_dir: {root / 'v'}: File exists"
    assert list((tmp_path / "real").iterdir()) == []
    assert not (tmp_path / "absent").exists()


def test_a_file_in_its_place(tmp_path: Path) -> None:
    """A file where root, folder or the root's parent should be is said, and stays."""
    file = tmp_path / "file"
    file.write_text("precious")
    assert refused(file) == f"state_dir: {file / 'w'}: File exists"
    assert refused(file / "below") == f"state_dir: {file / 'below' / 'w'}: Not a directory"
    (tmp_path / "w").write_text("precious")
    assert refused(tmp_path) == f"state_dir: {tmp_path / 'w'}: File exists"
    assert (tmp_path / "w").read_text() == file.read_text() == "precious"


def test_a_directory_as_the_lock(tmp_path: Path) -> None:
    """A lock that cannot be opened is said, not raised as something else."""
    (tmp_path / "w" / "lock").mkdir(parents=True, mode=0o700)
    assert refused(tmp_path) == f"state_dir: {tmp_path / 'w'}: Is a directory"


# --------------------------------------------------------------------------------------- lock

_HOLDER = """
import sys
from pathlib import Path
from publisher.stream.state_folder import StateFolder
folder = StateFolder(Path(sys.argv[1]), "w", wait_s=0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.integration
def test_another_process_holds_it_until_it_dies(tmp_path: Path) -> None:
    """Who holds it is named by pid, after the wait and not before; a kill -9 lets go of it."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        began = time.monotonic()
        said = refused(tmp_path, wait_s=0.2)
        assert 0.2 <= time.monotonic() - began < PATIENCE_S
        where = f"state_dir: {tmp_path / 'w'}: in use by the sidecar with pid {holder.pid}"
        assert said == f"{where}, which has the same worker_id or address"
        StateFolder(tmp_path, "other", wait_s=0).close()
        holder.kill()
    (tmp_path / "w" / "lock").write_text("9" * 20)
    folder = StateFolder(tmp_path, "w", wait_s=0)
    assert (folder.path / "lock").read_text() == str(os.getpid()), "nothing of a longer one is left"
    folder.close()


def test_it_waits_for_an_earlier_one(tmp_path: Path) -> None:
    """One that comes while it is held gets it as soon as it is let go."""
    first = StateFolder(tmp_path, "w", wait_s=0)
    taken: list[StateFolder] = []
    second = Thread(target=lambda: taken.append(StateFolder(tmp_path, "w", wait_s=PATIENCE_S)))
    second.start()
    lock = str(first.path / "lock")

    def both_have_it_open() -> int | None:
        fds = Path("/proc/self/fd").iterdir()
        return 2 if [os.path.realpath(fd) for fd in fds].count(lock) == 2 else None

    eventually(both_have_it_open)
    assert second.is_alive()
    first.close()
    second.join(PATIENCE_S)
    assert [folder.path for folder in taken] == [first.path]
    assert "in use" in refused(tmp_path)
    taken[0].close()


def test_who_gave_up_waits_no_more(tmp_path: Path) -> None:
    """Whoever holds it has its whole linger again; but not while a third one waits."""
    first = StateFolder(tmp_path, "w", wait_s=0)
    refused(tmp_path)
    assert not first.successor_waits()
    third = Thread(target=lambda: StateFolder(tmp_path, "w", wait_s=PATIENCE_S).close())
    third.start()
    eventually(lambda: first.successor_waits() or None)
    with pytest.raises(StateError):
        StateFolder(tmp_path, "w", wait_s=0)
    eventually(lambda: first.successor_waits() or None)
    first.close()
    third.join(PATIENCE_S)
    assert not third.is_alive()


def test_a_lock_that_says_nonsense(tmp_path: Path) -> None:
    """Whatever the lock file says, the refusal is one bounded line of text."""
    folder = StateFolder(tmp_path, "w", wait_s=0)
    for nonsense, shown in ((b"", "?"), (b" \n", "?"), (b"\xff" * 99, "\N{REPLACEMENT CHARACTER}")):
        (folder.path / "lock").write_bytes(nonsense)
        said = refused(tmp_path)
        assert f"pid {shown}" in said
        assert len(said) < len(str(tmp_path)) + 160
    folder.close()


# -------------------------------------------------------------------------------------- names

NAMES = {
    "worker-0.a_b": "worker-0.a_b",
    "ns/pod/0": "ns_pod_0",
    "../../etc": "etc",
    "..": "state",
    ".": "state",
    "": "state",
    "/": "state",
    "a\0b\n": "a_b",
    "tcp://*:5557-dp0": "tcp_5557-dp0",
    "ü": "state",
    ".hidden": "hidden",
}


@pytest.mark.parametrize(("name", "shown"), NAMES.items())
def test_a_name_is_one_component(tmp_path: Path, name: str, shown: str) -> None:
    """Whatever a worker is called, its folder is right below the root, in plain letters."""
    folder = StateFolder(tmp_path, name, wait_s=0)
    assert folder.path.parent == tmp_path
    kept = folder.path.name
    assert kept == name if kept == shown else kept.startswith(f"{shown}-")
    folder.close()


@given(name=st.text(max_size=300) | st.text("ab/._-", max_size=300))
def test_arbitrary_names(name: str) -> None:
    """Any name makes a folder right below the root."""
    with tempfile.TemporaryDirectory() as root:
        folder = StateFolder(Path(root), name, wait_s=0)
        assert [it.name for it in Path(root).iterdir()] == [folder.path.name]
        assert folder.path.is_dir()
        folder.close()


def test_long_names_are_told_apart_by_their_ends(tmp_path: Path) -> None:
    """Two ranks of a worker with a long id have a folder each."""
    folders = [StateFolder(tmp_path, "w" * 300 + f"-dp{rank}", wait_s=0) for rank in (0, 1)]
    assert folders[0].path != folders[1].path
    for folder in folders:
        assert len(folder.path.name) <= 200
        folder.close()


def test_the_default_root_is_this_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the temporary directory, by the user's number: users do not meet in one folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert default_root() == tmp_path / f"kvevents-{os.getuid()}"
