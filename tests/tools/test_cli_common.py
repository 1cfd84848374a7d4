"""What all commands have in common: their streams, Ctrl-C, options, help, and faults of our own."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from publisher_rig import ENVIRONMENT, payload_of

from kvevents import BlockStored, StorageMedium
from kvevents.capture import CaptureHead, capture_start, pack_message
from kvevents.frames import live_frames
from kvevents.message import Channel
from publisher.cli import main
from publisher.cli.commands import COMMANDS, Command, parser_of
from publisher.tools.interrupt import InterruptCount

NOBODY = "tcp://127.0.0.1:1"
STORED = BlockStored([7], None, [1, 2, 3, 4], 4, medium=StorageMedium.GPU)
ROOT = Path(__file__).parents[2]
KVEVENTS = [sys.executable, "-m", "publisher.cli"]

WAYS = {
    "tail": ["CAPTURE"],
    "state": ["CAPTURE"],
    "top": ["CAPTURE"],
    "doctor": [NOBODY, "--timeout", "0.1"],
    "check": ["CAPTURE"],
    "lint": ["CAPTURE"],
    "record": [NOBODY, "-w", "-", "--for", "0.1"],
    "play": ["--help"],
    "plot": ["--help"],
    "serve": ["--check"],
    "keygen": ["FOLDER"],
    "demo": ["--help"],
    "completion": ["bash"],
    "--version": [],
}
"""Each command, so that it writes something and ends by itself."""

CODES = {"doctor": 3, "record": 3, "lint": 1}
"""That of each where it is not 0."""


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one batch."""
    file = tmp_path_factory.mktemp("common") / "one.capture"
    head = CaptureHead(endpoint=NOBODY, replay_endpoint=None, topic="", started_ns=1)
    frames = live_frames(b"", 0, payload_of(STORED))
    file.write_bytes(capture_start(head) + pack_message(2, Channel.LIVE, frames))
    return file


def start(redirection: str, *arguments: str) -> subprocess.Popen[str]:
    """By a shell, which can close what `subprocess` cannot."""
    return subprocess.Popen(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *KVEVENTS, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=ENVIRONMENT,
        cwd=ROOT,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, and what it wrote."""
    with process:
        try:
            out, err = process.communicate(timeout=60.0)
        finally:
            process.kill()
        return process.returncode, out, err


# ------------------------------------------------------------------------------------------ streams


@pytest.mark.integration
@pytest.mark.parametrize("command", WAYS)
def test_streams_that_are_full_or_closed(command: str, capture: Path, tmp_path: Path) -> None:
    """A full stdout is one line and exit code 2; a closed one takes nothing, and is no fault; what goes
    to a closed stderr is not seen on stdout. Never a traceback.
    """
    filled = {"CAPTURE": str(capture)}
    started = {}
    for at, redirection in enumerate((">/dev/full", ">&-", "2>&-", "<&-")):
        filled["FOLDER"] = str(tmp_path / str(at))
        given = [filled.get(one, one) for one in WAYS[command]]
        started[redirection] = start(redirection, command, *given)
    done = {redirection: ended(process) for redirection, process in started.items()}
    code, _, err = done.pop(">/dev/full")
    assert code == 2
    assert err.startswith("kvevents")
    assert err.endswith(": No space left on device\n")
    assert err.count("\n") == 1
    if command == "record":  # a capture that nobody gets is a mistake
        code, _, err = done.pop(">&-")
        assert (code, err) == (2, "kvevents record: -w: -: standard output is closed\n")
    for redirection, (code, out, err) in done.items():
        assert code == CODES.get(command, 0), (redirection, err)
        assert "Traceback" not in err
        assert f"kvevents {command}: " not in out
        assert bool(out) is (redirection != ">&-")


def test_every_command_is_tried() -> None:
    """With its streams full and closed."""
    assert WAYS.keys() == {*COMMANDS, "--version"}


@pytest.mark.integration
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_stdout_is_said_however_much_is_written(unbuffered: str, tmp_path: Path) -> None:
    """Of what is larger than a buffer nothing is left to be written in the end."""
    file = tmp_path / "long.capture"
    head = CaptureHead(endpoint=NOBODY, replay_endpoint=None, topic="", started_ns=1)
    told = [
        pack_message(2, Channel.LIVE, live_frames(b"", seq, payload_of(STORED)))
        for seq in range(3000)
    ]
    file.write_bytes(capture_start(head) + b"".join(told))
    for command in ("tail", "check"):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*KVEVENTS, command, str(file)],
                stdin=subprocess.DEVNULL,
                stdout=full,
                stderr=subprocess.PIPE,
                check=False,
                timeout=60.0,
                env={**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered},
                cwd=ROOT,
            )
        assert done.stderr == b"kvevents: standard output: No space left on device\n"
        assert done.returncode == 2


@pytest.mark.integration
def test_messages_for_a_closed_stderr_go_nowhere(tmp_path: Path) -> None:
    """Not to stdout, and not into a file that got the number of a stream."""
    for redirection in ("2>&-", "2>/dev/full"):
        assert ended(start(redirection, "state", "nosuch.capture")) == (2, "", "")
    file = tmp_path / "a.capture"
    arguments = ("record", NOBODY, "-w", str(file), "--for", "0.1")
    assert ended(start("<&- >&- 2>&-", *arguments)) == (3, "", "")
    assert not file.exists() or b"kvevents record" not in file.read_bytes()


# ------------------------------------------------------------------------------------------- Ctrl-C

INTERRUPTED = """
import os, signal, sys, publisher.cli
count = 0
def look(event, _):
    global count
    count += event == "import"
    if event == "import" and count == NTH:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(look)
sys.exit(publisher.cli.main())
"""


@pytest.mark.integration
@pytest.mark.parametrize("nth", [1, 2, 4, 10, 30, 60, 90, 130])
def test_ctrl_c_at_an_import(nth: int) -> None:
    """Whichever it is, it ends quietly with 130."""
    code = INTERRUPTED.replace("NTH", str(nth))
    done = subprocess.run(
        [sys.executable, "-c", code, "state", NOBODY, "--for", "0.1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=60.0,
        env=ENVIRONMENT,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.integration
def test_nothing_is_imported_before_ctrl_c_is_seen_to() -> None:
    """What the script imports is what it is called with, and nothing that takes time."""
    code = "import sys; old = {*sys.modules}; import publisher.cli; print(*{*sys.modules} - old)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, cwd=ROOT
    )
    assert {*done.stdout.split()} <= {"publisher", "publisher.cli", "__future__"}


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("command", COMMANDS)
def test_two_dashes_as_a_value(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--OPTION=--`, of every option: one line that names it, and exit code 2."""
    (commands,) = (
        one for one in parser_of(command)._actions if isinstance(one, argparse._SubParsersAction)
    )
    tried = 0
    for action in commands.choices[command]._actions:
        for option in action.option_strings:
            with pytest.raises(SystemExit) as end:
                main([command, f"{option}=--" if option.startswith("--") else f"{option}--"])
            out, err = capsys.readouterr()
            if action.dest == "help" and option == "-h":
                continue
            assert (end.value.code, out) == (2, ""), option
            assert err.startswith(f"kvevents {command}: argument ")
            assert option in err
            assert err.count("\n") == 1
            tried += 1
    assert tried


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, examples included."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert not end.value.code
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_the_help_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command it is one line that leads to the help; that leads to the commands' own, and says
    what each needs.
    """
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert capsys.readouterr().err == "kvevents: which COMMAND? kvevents --help lists them\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert "kvevents COMMAND --help" in out
    for extra in ("publisher", "tools", "demo"):
        assert f"pip install 'kvevents[{extra}]'" in out
    for name, command in COMMANDS.items():
        line = next(line for line in out.splitlines() if f"[{command.extra}]" in line)
        assert name in line or command.extra == "publisher"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("tial", "kvevents: 'tial' is no command; did you mean tail?"),
        ("STAT x", "kvevents: 'STAT' is no command; did you mean state?"),
        ("xyzzy", "kvevents: 'xyzzy' is no command; kvevents --help lists them"),
        ("tail x --tpoic", "kvevents tail: unrecognized arguments: --tpoic; did you mean --topic?"),
        (
            "lint x --outptu=json",
            "kvevents lint: unrecognized arguments: --outptu=json; did you mean",
        ),
        ("keygen a b", "kvevents keygen: unrecognized arguments: b"),
        ("tail x -o jsno", "did you mean json?"),
        ("lint x --as vllm_router", "smg, kthena, vllm, sglang; did you mean vllm-router?"),
        ("doctor tcp://h:1 --as Dynamo", "did you mean dynamo?"),
        ("doctor tcp://h:1 --as nobody", "kthena, vllm, sglang"),
    ],
)
def test_what_was_meant(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A word that is none of those there are is said with the nearest, where one is near."""
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(said) if said.startswith("kvevents") else err.endswith(f"{said}\n")


def test_seconds_have_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    """In every command's help."""
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "SECONDS" not in capsys.readouterr().out, command


# ------------------------------------------------------------------------------------ our own faults


@pytest.mark.parametrize("error", [TypeError, AssertionError, KeyError, OSError, ValueError])
def test_a_fault_of_ours_is_no_mistake_in_the_command(
    error: type[Exception], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback and exit code 70; only a ValueError is what a command says of its input."""

    def fail(_: object) -> int:
        raise error("this is it")

    module = types.ModuleType("publisher.cli.faulty")
    module.run, module.add_options = fail, lambda _: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, "faulty", Command("a command with a fault"))
    if error is ValueError:
        with pytest.raises(SystemExit) as end:
            main(["faulty"])
        assert end.value.code == 2
        assert capsys.readouterr().err == "kvevents faulty: this is it\n"
        return
    assert main(["faulty"]) == 70
    err = capsys.readouterr().err
    assert err.startswith("Traceback ")
    assert "this is it" in err


def test_the_third_ctrl_c_ends_whatever_hangs() -> None:
    """The first two are only counted: a batch is to be read to its end."""
    before = signal.getsignal(signal.SIGINT)
    with InterruptCount() as interrupts:
        for count in (1, 2):
            signal.raise_signal(signal.SIGINT)
            assert interrupts.count == count
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before
