"""A command as a process: its standard streams, Ctrl-C, and faults of our own."""

from __future__ import annotations

import _thread
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["FAULT", "INTERRUPTED", "OutputError", "run"]

_USAGE, FAULT, INTERRUPTED = 2, 70, 130


class OutputError(Exception):
    """Standard output cannot be written. No OSError, for those are taken for a file's or a socket's."""


def run(arguments: Sequence[str] | None) -> int:
    """Run one command; returns its exit code. None: those of this process, which is ours then."""
    ours = arguments is None
    before = _on_interrupt(_leave)  # while modules load, and in the end: there is nothing to close
    if ours:
        sys.unraisablehook = _not_lost
    try:
        with _standard_streams():
            return _run(sys.argv[1:] if arguments is None else arguments, before)
    finally:
        if not ours:
            _on_interrupt(before)


def _run(arguments: Sequence[str], before: object) -> int:
    from publisher.cli.commands import prepare
    from publisher.config.checks import one_line

    try:
        try:
            command = prepare(arguments)
            return _interruptible(command, before)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        _discard_output()
        return 0
    except OutputError as error:
        _discard_output()
        print(one_line(f"kvevents: standard output: {error}"), file=sys.stderr)
        return _USAGE
    except Exception:
        import traceback

        traceback.print_exc()
        return FAULT


# ------------------------------------------------------------------------------------------- Ctrl-C


def _on_interrupt(handler: object) -> object:
    """Returns what did it before. Changes nothing where Ctrl-C is ignored, or out of the main thread."""
    before: Any = signal.getsignal(signal.SIGINT)
    if before not in (signal.SIG_IGN, None):
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]
    return before


def _leave(*_: object) -> None:
    """A KeyboardInterrupt in the middle of an import, or of the end, is told by whoever catches it."""
    os._exit(INTERRUPTED)


def _interruptible(command: Callable[[], int], before: object) -> int:
    """As anywhere in Python."""
    _on_interrupt(before)
    try:
        return command()
    finally:
        _on_interrupt(_leave)


def _not_lost(told: sys.UnraisableHookArgs) -> None:
    """Ctrl-C that came where nothing can be raised comes again where it can."""
    if issubclass(told.exc_type, KeyboardInterrupt):
        _thread.interrupt_main()
    else:
        sys.__unraisablehook__(told)


# ------------------------------------------------------------------------------------------ streams


class _Stream(io.BufferedWriter):
    """Says in its own way what cannot be written. What counts the bytes written is below, and is C: were
    Ctrl-C to come between the two, they would be written again.
    """

    def __init__(self, fd: int, *, unbuffered: bool) -> None:
        super().__init__(io.FileIO(fd, "w", closefd=False))
        self._unbuffered = unbuffered

    def write(self, data: ReadableBuffer, /) -> int:
        with self._said():
            super().write(data)
            if self._unbuffered:
                super().flush()
        return memoryview(data).nbytes

    def flush(self) -> None:
        with self._said():
            super().flush()

    def _said(self) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError


class _Output(_Stream):
    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.strerror) from None


class _Messages(_Stream):
    """Where nobody can be told, nobody is."""

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        with contextlib.suppress(OSError):
            yield


@contextlib.contextmanager
def _standard_streams() -> Iterator[None]:
    """None of them is None meanwhile, nor closed: a file or a socket would take its place. What cannot
    be written is an OutputError, or is left out.
    """
    for fd in range(3):
        _hold(fd)
    before = sys.stdin, sys.stdout, sys.stderr
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _opened(_Output, 1, sys.stdout)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _opened(_Messages, 2, sys.stderr)
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def _hold(fd: int) -> None:
    try:
        os.fstat(fd)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
        assert opened == fd
        os.set_inheritable(fd, True)  # noqa: FBT003


def _opened(kind: type[_Stream], fd: int, like: TextIO | None) -> TextIO:
    """Text to `fd`, in the way of the stream in whose place it comes."""
    if not isinstance(like, io.TextIOWrapper):
        return io.TextIOWrapper(kind(fd, unbuffered=False), "utf-8", "backslashreplace")
    return io.TextIOWrapper(
        kind(fd, unbuffered=isinstance(like.buffer, io.RawIOBase)),  # python -u
        like.encoding,
        "backslashreplace",  # a terminal or locale that is not UTF-8 is no reason to say nothing
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


def _discard_output() -> None:
    """What is still to be written can never be."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
