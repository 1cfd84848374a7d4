"""The thread that copies and does I/O: calls in order, results as futures, an end that is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from hicache.background import BackgroundThread

TIMEOUT_S = 30.0


@pytest.fixture
def thread() -> Iterator[BackgroundThread]:
    """One that is closed at the end."""
    thread = BackgroundThread("under-test")
    yield thread
    thread.close()


def test_calls_run_in_the_order_given_in_the_other_thread(thread: BackgroundThread) -> None:
    """Each call runs once, after those before it, in a thread of the given name."""
    ran: list[int] = []
    futures = [thread.submit(ran.append, i) for i in range(100)]
    name = thread.submit(lambda: threading.current_thread().name).result(TIMEOUT_S)
    assert ran == list(range(100))
    assert name == "under-test"
    assert all(future.done() for future in futures)


def test_a_call_takes_its_arguments_and_gives_its_result(thread: BackgroundThread) -> None:
    """Arguments are handed on by place and by name; what the call returns is the future's result."""
    assert thread.submit(int, "ff", base=16).result(TIMEOUT_S) == 255


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(3), CancelledError()])
def test_what_a_call_raises_is_its_futures(thread: BackgroundThread, error: BaseException) -> None:
    """An exception of any kind ends its own call, and the thread goes on."""

    def fail() -> None:
        raise error

    assert thread.submit(fail).exception(TIMEOUT_S) is error
    assert thread.submit(abs, -1).result(TIMEOUT_S) == 1


def test_a_cancelled_call_does_not_run(thread: BackgroundThread) -> None:
    """A call cancelled before it began never runs, and those after it do."""
    go, ran = threading.Event(), list[int]()
    thread.submit(go.wait, TIMEOUT_S)
    cancelled = thread.submit(ran.append, 1)
    last = thread.submit(ran.append, 2)
    assert cancelled.cancel()
    go.set()
    last.result(TIMEOUT_S)
    assert ran == [2]


def test_close_waits_for_the_call_at_hand_and_cancels_the_rest() -> None:
    """What has begun ends, what has not is cancelled, and so is what comes later."""
    thread, began, go = BackgroundThread("t"), threading.Event(), threading.Event()

    def work() -> str:
        began.set()
        go.wait(TIMEOUT_S)
        return "done"

    at_hand, waiting = thread.submit(work), thread.submit(abs, -1)
    began.wait(TIMEOUT_S)
    closing = threading.Thread(target=thread.close)
    closing.start()
    deadline = time.monotonic() + TIMEOUT_S
    while not thread.submit(abs, -1).cancelled():  # until it is being closed
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.001)
    go.set()
    closing.join(TIMEOUT_S)
    assert at_hand.result(0) == "done"
    assert waiting.cancelled()
    assert thread.submit(abs, -1).cancelled()
    thread.close()


def test_close_does_not_wait_for_a_call_that_hangs() -> None:
    """A call that does not return holds `close` up no longer than it was told to wait."""
    thread, began, go = BackgroundThread("t"), threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        go.wait(TIMEOUT_S)

    hanging = thread.submit(hang)
    began.wait(TIMEOUT_S)
    start = time.monotonic()
    thread.close(timeout_s=0.05)
    assert time.monotonic() - start < TIMEOUT_S / 2
    assert not hanging.done()
    go.set()
    hanging.result(TIMEOUT_S)
    thread.close()
