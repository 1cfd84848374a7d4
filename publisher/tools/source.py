"""Where a stream comes from: a publisher's sockets, or a capture. Each message, with what it brought."""

from __future__ import annotations

import heapq
import re
import stat
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from kvevents.capture import CaptureHead, CaptureReader
from kvevents.errors import KVEventsError
from kvevents.follower import Arrival, Follower, Step
from kvevents.frames import JOIN
from kvevents.message import Channel, Message
from publisher.closing import Closing
from publisher.config.checks import one_line, shown
from publisher.subscriber.listener import Listener, wait_for

__all__ = [
    "Address",
    "Capture",
    "Live",
    "Source",
    "Sources",
    "meant",
    "parse_file",
    "parse_sources",
]

_HWM = 4000
"""Messages that may wait for us. What a slow reader misses is missing for it alone."""

_MAX_FRAME = 64 << 20
"""Bytes; whoever sends a larger one is disconnected for good."""

_CHUNK = 1 << 20
_SHOWN = 300

_PLACE = r"(?P<{0}>(?:\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9._*-]+):[0-9]{{1,5}})"
_NO_SCHEME = re.compile(
    rf"(?P<name>[^=]*=)?(?:tcp:/{{0,2}}|tcp/{{1,2}})?{_PLACE.format('place')}"
    rf"(?:,(?:(?:tcp://)?{_PLACE.format('replay')}|(?P<port>[0-9]{{1,5}})))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Address:
    """A publisher. `name`: what its lines begin with."""

    name: str
    endpoint: str
    replay_endpoint: str | None


def parse_sources(texts: Sequence[str], replay_endpoint: str | None) -> list[Address | Path]:
    """`[NAME=]ENDPOINT[,REPLAY]`, where REPLAY is an endpoint or a port of the same host, or a file.

    `replay_endpoint` is that of the one endpoint there is. Raises ValueError for anything else, and for
    what is no file but all of an endpoint except its scheme.
    """
    found = [_parse_one(text) for text in texts]
    if replay_endpoint is not None:
        if len(found) != 1 or not isinstance(found[0], Address):
            raise ValueError("--replay-endpoint: it goes with one endpoint, and nothing else")
        if found[0].replay_endpoint is not None:
            raise ValueError(f"--replay-endpoint: {shown(texts[0])} names one already")
        found[0] = Address(found[0].name, found[0].endpoint, replay_endpoint)
    names = [one.name for one in found if isinstance(one, Address)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"SOURCE: {shown(name)} is named twice")
    return found


def parse_file(text: str, key: str) -> Path:
    """A capture, where no endpoint can be given. Raises ValueError for one."""
    endpoint = text if "://" in text and _kind(text) is None else meant(text)
    if endpoint is not None:
        raise ValueError(
            f"{key}: {_cut(text)} is no capture; `kvevents record {_cut(endpoint)} -w FILE` makes one"
        )
    return _path(key, text)


def meant(text: str) -> str | None:
    """The source that is likely meant by what lacks a scheme, or is the file of a socket. None: by any
    other file that is there, and by all else.
    """
    kind = _kind(text)
    if kind is not None:
        return f"ipc://{text}" if stat.S_ISSOCK(kind) else None
    if (found := _NO_SCHEME.fullmatch(text)) is not None:
        replay = found["port"] or (found["replay"] and f"tcp://{found['replay']}")
        return f"{found['name'] or ''}tcp://{found['place']}{f',{replay}' if replay else ''}"
    if text.startswith("ipc:") and "://" not in text:
        return f"ipc://{text.removeprefix('ipc:')}"
    return None


def _kind(path: str) -> int | None:
    """Of what is there; None: nothing is."""
    try:
        return Path(path).stat().st_mode
    except (OSError, ValueError):
        return None


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _parse_one(text: str) -> Address | Path:
    is_endpoint = "://" in text
    if (likely := meant(text)) is not None and likely != text:
        why = "no such file" if _kind(text) is None else "a socket, and no file"
        why = "no endpoint" if is_endpoint else why
        raise ValueError(f"SOURCE: {_cut(text)}: {why}; did you mean {_cut(likely)}?")
    return _parse(text) if is_endpoint else _path("SOURCE", text)


def _path(key: str, text: str) -> Path:
    if not text:
        raise ValueError(f"{key}: '' is no file")
    return Path(text)


def _parse(text: str) -> Address:
    name, equals, rest = text.partition("=")
    if not equals or "://" in name:
        name, rest = "", text
    endpoint, comma, replay = rest.rpartition(",")
    if not comma or not (replay.isdecimal() or "://" in replay):  # a comma of a path
        return Address(name or _short(rest), rest, None)
    if replay.isdecimal():
        head, colon, _ = endpoint.rpartition(":")
        if not endpoint.startswith("tcp://") or not colon:
            raise ValueError(f"SOURCE: {shown(text)} has a port for replays, but is not of tcp")
        replay = f"{head}:{replay}"
    return Address(name or _short(endpoint), endpoint, replay)


def _short(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").removeprefix("ipc://")


class Live(Closing):
    """A publisher that is listened to. `start`: what is asked for first, where there are replays. `hwm`:
    messages that may wait for us.
    """

    def __init__(
        self,
        address: Address,
        *,
        topic: str = "",
        start: int | None = JOIN,
        attempts: int = 3,
        replay_timeout_s: float = 5.0,
        hwm: int = _HWM,
        server_key: str | None = None,
        client_keys: tuple[str, str] | None = None,
    ) -> None:
        self.name, self.address = one_line(address.name), address
        self.is_behind = False
        """As of the last step that was given: whether what is missing may be our own loss."""
        self.listener = Listener(
            address.endpoint,
            address.replay_endpoint,
            topic=topic,
            start=start,
            attempts=attempts,
            replay_timeout_s=replay_timeout_s,
            hwm=hwm,
            max_frame=_MAX_FRAME,
            server_key=server_key,
            client_keys=client_keys,
            keys=("ENDPOINT", "--replay-endpoint"),
        )

    @property
    def can_replay(self) -> bool:
        """Whether there is a replay endpoint."""
        return self.address.replay_endpoint is not None

    @property
    def follower(self) -> Follower:
        """What it has come to."""
        return self.listener.follower

    @property
    def connected(self) -> bool:
        """Whether the publisher is there."""
        return self.listener.connected

    def close(self) -> None:
        """Safe to call twice."""
        self.listener.close()


class Capture:
    """A capture that is read again. Raises ValueError, from `steps`, for a file that is none. `key`: what
    an error calls it. `topic`: what is of others is passed over, as if it had not been subscribed to.
    """

    def __init__(self, file: Path, key: str = "SOURCE", *, topic: str = "") -> None:
        self.name, self.file, self._key = one_line(str(file)), file, key
        self._topic = topic.encode()
        self.batches = 0
        """How many were read so far."""
        self.is_behind = False
        """As of the last step that was given: whether what is missing may be the recorder's own loss."""
        self.ends_in_replay = False
        """As of the last step: whether a replay was under way that might have brought what is missing."""
        self._size = 0
        self._reader = CaptureReader()
        self._follower: Follower | None = None

    connected = True

    @property
    def head(self) -> CaptureHead | None:
        """Whom it is of; None before that was read."""
        return self._reader.head

    @property
    def can_replay(self) -> bool:
        """Whether there was a replay endpoint."""
        return self.head is not None and self.head.replay_endpoint is not None

    @property
    def follower(self) -> Follower:
        """What it has come to."""
        if self._follower is None:
            topic = self.head.topic.encode() if self.head is not None else b""
            self._follower = Follower(can_replay=self.can_replay, start=None, topic=topic)
        return self._follower

    @property
    def damaged(self) -> str | None:
        """Why its end was not read; None: it was, or was cut off."""
        return self._reader.damaged

    @property
    def left_out(self) -> int:
        """How many bytes at its end were not read."""
        return self._reader.torn

    def fault(self, batches: int) -> str | None:
        """What is said, once it was read, of an end that was not, after so many batches that were, or of
        other damage; None: nothing is wrong.
        """
        if not self.left_out:
            return None if self.damaged is None else f"{self.file}: {self.damaged}"
        if self.damaged is None:
            return f"{self.file}: the last {self.left_out} bytes were left out: it was cut off"
        read = "1 batch was" if batches == 1 else f"{batches} batches were"
        share = f"{100 * self.left_out / self._size:.0f} % of the file"
        return (
            f"{self.file}: {read} read, the other {self.left_out:,} bytes, {share}, were left out:"
            f" {self.damaged}"
        )

    def steps(self) -> Iterator[Step]:
        """All of it; what is left in the end comes with the last."""
        last: Step | None = None
        for message in self.messages():
            if last is not None:
                yield last
            last = Step(message, self.follower.take(message))
        self.ends_in_replay = self.follower.recovering
        rest: list[Arrival] = self.follower.close()
        if last is not None:
            yield Step(last.message, last.arrivals + rest)

    def messages(self) -> Iterator[Message]:
        """Each of them as it came."""
        reader = self._reader
        try:
            with self._open() as capture:
                while chunk := capture.read(_CHUNK):
                    self._size += len(chunk)
                    for message in reader.read(chunk):
                        if self._topic and not _is_of(message, self._topic):
                            continue
                        self.batches += message.is_batch
                        yield message
        except OSError as error:
            raise self._error(error.strerror) from None
        except KVEventsError as error:
            raise self._error(error) from None
        reader.close()

    def _open(self) -> BinaryIO:
        try:
            return self.file.open("rb")
        except ValueError as error:  # a name that none can have
            raise self._error(error) from None

    def _error(self, why: object) -> ValueError:
        return ValueError(f"{self._key}: {_cut(str(self.file))}: {why}")


def _is_of(message: Message, topic: bytes) -> bool:
    """Whether it is what a subscriber to `topic` has; so is an answer that says none."""
    match message:
        case Message(channel=Channel.LIVE, frames=[first, *_]):
            return first.startswith(topic)
        case Message(channel=Channel.ANSWER, frames=[b"", said, _, _] | [said, _, _]):
            return not said or said.startswith(topic)
    return True


Source = Live | Capture
S = TypeVar("S", bound=Source)


def _given(source: S, step: Step) -> tuple[S, Step]:
    if step.message.channel in (Channel.BEHIND, Channel.ABREAST):
        source.is_behind = step.message.channel == Channel.BEHIND
    return source, step


def _named(capture: Capture) -> Iterator[tuple[Source, Step]]:
    for step in capture.steps():
        yield capture, step


class Sources(Closing):
    """Several of them at once: captures first, merged by the time of their messages, then what is live.

    `live`: settings of `Live`. Raises ValueError for an address that cannot be connected to.
    """

    def __init__(self, sources: Sequence[Address | Path], **live: object) -> None:
        self._stack = ExitStack()
        self.all: list[Source] = []
        self._pending: deque[tuple[Live, Step]] = deque()
        """What was taken and not given yet, because the time was up."""
        try:
            for one in sources:
                if isinstance(one, Path):
                    self.all.append(Capture(one, topic=str(live.get("topic") or "")))
                else:
                    self.all.append(Live(one, **live))  # type: ignore[arg-type]
                    self._stack.callback(self.all[-1].close)  # type: ignore[union-attr]
        except BaseException:
            self.close()
            raise

    @property
    def captures(self) -> list[Capture]:
        """Those that are files."""
        return [one for one in self.all if isinstance(one, Capture)]

    @property
    def live(self) -> list[Live]:
        """Those that are listened to."""
        return [one for one in self.all if isinstance(one, Live)]

    @property
    def drained(self) -> bool:
        """Whether all that was taken of what is live was given: no follower is ahead of its steps."""
        return not self._pending

    def steps(
        self, until: float = float("inf"), tick_s: float | None = None
    ) -> Iterator[tuple[Source, Step] | None]:
        """Each message of each source, until the captures are over and the monotonic clock, where
        something is live, is at `until`; it is looked at before each message. With `tick_s`, None comes
        at least that often while something is live.
        """
        told = [_named(capture) for capture in self.captures]
        for one in heapq.merge(*told, key=lambda one: one[1].message.at_ns):
            yield _given(*one)
        next_tick = time.monotonic() + (tick_s or 0.0)
        while self.live and time.monotonic() < until:
            if tick_s is None:
                yield from self.live_steps(until)
                return
            self._fill(min(until, next_tick))
            if self._pending and time.monotonic() < until:  # one between two ticks, however late
                yield _given(*self._pending.popleft())
            yield from self.live_steps(min(until, next_tick))
            yield None
            next_tick = time.monotonic() + tick_s

    def live_steps(self, until: float = float("inf")) -> Iterator[tuple[Live, Step]]:
        """Of what is live only."""
        while time.monotonic() < until and self.live:
            if self._pending:
                yield _given(*self._pending.popleft())
            else:
                self._fill(until)

    def _fill(self, until: float) -> None:
        """Wait for something, and take it, unless something is there already."""
        if not self._pending:
            wait_for([one.listener for one in self.live], until)
            for source in self.live:
                self._pending += [(source, step) for step in source.listener.turn()]

    def rest(self) -> Iterator[tuple[Live, Step]]:
        """What was taken when the time was up, and not given; none of it comes later."""
        while self._pending:
            yield _given(*self._pending.popleft())

    def close(self) -> None:
        """Safe to call twice."""
        self._stack.close()
