"""Messages in, the stream in order out: what a subscriber follows live, and what a capture shows again.

No I/O. Whoever has the sockets makes each request that is due (`asking`) before the next message, and
says so with a message of `Channel.ASKED`. A capture has the requests that were made in it; one that was
not made was not answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvevents.errors import KVEventsError
from kvevents.frames import JOIN, End, answered_topic, parse_live, parse_replay_answer
from kvevents.gaps import MAX_HELD_BYTES, Action, Ask, Deliver, Gap, GapTracker, Lost, Restarted
from kvevents.message import Channel, Message

__all__ = ["Arrival", "Follower", "Malformed", "Step", "Told"]

_SEQ_BYTES = 8
_MAX_SHOWN = 100
_CLEARS = b"leared"
"""In every payload with an AllBlocksCleared, or a store's `cleared`. In any other it does no harm."""


@dataclass(frozen=True, slots=True)
class Told:
    """A batch, in its turn. `replayed`: it came in answer to a replay. `at_ns`: when it came."""

    seq: int
    payload: bytes
    replayed: bool
    topic: bytes = b""
    at_ns: int = 0


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that is none of the wire's."""

    message: Message
    reason: str


Arrival: TypeAlias = Told | Malformed | Gap | Lost | Restarted


class Step(NamedTuple):
    """A message, and what it brought. What was missing or out of order is brought by a later one."""

    message: Message
    arrivals: list[Arrival]


class _Payload:
    """A batch on its way through the tracker."""

    __slots__ = ("at_ns", "data", "topic")

    def __init__(self, data: bytes, topic: bytes, at_ns: int) -> None:
        self.data, self.topic, self.at_ns = data, topic, at_ns

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Payload) and self.data == other.data

    def __len__(self) -> int:
        return len(self.data) + len(self.topic)

    __hash__ = None  # type: ignore[assignment]


class Follower:
    """One stream. `can_replay`, `attempts`, `max_held`, `max_held_bytes`: see `GapTracker`.

    `start`: what to ask for first; None: nothing, it begins with what comes live. `topic`: what the
    topics of what is followed begin with; an answer of another is another stream's, and as good as none.
    """

    def __init__(
        self,
        *,
        can_replay: bool,
        start: int | None = JOIN,
        topic: bytes = b"",
        attempts: int = 3,
        max_held: int = 100_000,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self._tracker = GapTracker[_Payload](
            can_replay=can_replay,
            attempts=attempts,
            max_held=max_held,
            max_held_bytes=max_held_bytes,
        )
        self._can_replay, self._topic = can_replay, topic
        self.behind = False
        """Whether what is missing may be a loss of our own (`Channel.BEHIND`)."""
        self._connections = 0
        self.asking: int | None = None
        """The start of the request that is to be made now."""
        if start is not None:
            self._begin(start)

    @property
    def next_seq(self) -> int | None:
        """The seq of the batch that would come next; None while nothing is known of the stream."""
        return self._tracker.expected

    @property
    def recovering(self) -> bool:
        """Whether a replay is under way."""
        return self._tracker.recovering

    @property
    def diverged(self) -> bool:
        """Whether something was given up that a `rejoin` might still bring."""
        return self._tracker.diverged

    @property
    def held(self) -> int:
        """How many batches wait for the replay under way."""
        return self._tracker.held

    @property
    def ahead(self) -> int:
        """By how many seqs the replays are ahead of what came live: see `GapTracker`."""
        return self._tracker.ahead

    @property
    def connections(self) -> int:
        """How many were made so far."""
        return self._connections

    def take(self, message: Message) -> list[Arrival]:
        """One message, of whatever channel; anything may be in it."""
        match message.channel:
            case Channel.LIVE:
                return [*self._not_asked(), *self._live(message)]
            case Channel.ANSWER:
                return self._answer(message)
            case Channel.ASKED:
                return list(self._asked(message.frames))
            case Channel.OVER:
                return self._act(self._tracker.failed())
            case Channel.CONNECTED:
                self._connections += 1
                if self._connections > 1:
                    return self._act(self._tracker.reconnected())
            case Channel.BEHIND | Channel.ABREAST:
                self.behind = message.channel == Channel.BEHIND
        return []

    def rejoin(self) -> list[Arrival]:
        """Try anew to have what was given up."""
        return self._act(self._tracker.rejoin())

    def close(self) -> list[Arrival]:
        """There is no more: what is held is all there will be."""
        arrivals: list[Arrival] = []
        while self._tracker.recovering:
            arrivals += self._act(self._tracker.failed())
        self.asking = None
        return arrivals

    # ---------------------------------------------------------------------------------- inside

    def _begin(self, start: int) -> None:
        self._act(self._tracker.start(start))

    def _live(self, message: Message) -> list[Arrival]:
        try:
            frame = parse_live(message.frames)
        except KVEventsError as error:
            return [Malformed(message, str(error))]
        payload = _Payload(frame.payload, frame.topic, message.at_ns)
        return self._act(self._tracker.live(frame.seq, payload))

    def _answer(self, message: Message) -> list[Arrival]:
        try:
            answer = parse_replay_answer(message.frames)
        except KVEventsError as error:
            return [Malformed(message, str(error)), *self._act(self._tracker.failed())]
        if isinstance(answer, End):
            return self._act(self._tracker.end())
        topic = answered_topic(message.frames)
        if topic is not None and not topic.startswith(self._topic):
            reason = f"replay answer: its topic is {_shown(topic)}, not {_shown(self._topic)}"
            return [Malformed(message, reason), *self._act(self._tracker.failed())]
        payload = _Payload(answer.payload, answer.topic, message.at_ns)
        clears = _CLEARS in answer.payload
        return self._act(self._tracker.replayed(answer.seq, payload, clears=clears))

    def _asked(self, frames: list[bytes]) -> Iterator[Arrival]:
        """A request was made: the one that is due, or, in a capture, one that somebody wanted."""
        start = int.from_bytes(frames[-1], "big") if frames and len(frames[-1]) == _SEQ_BYTES else 0
        due, self.asking = self.asking, None
        if due == start or not self._can_replay:
            return
        if self.next_seq is None and not self.recovering:
            self._begin(start)
        elif start == JOIN:
            yield from self.rejoin()
        self.asking = None

    def _not_asked(self) -> Iterator[Arrival]:
        """What was due was not asked for."""
        while self.asking is not None:
            self.asking = None
            yield from self._act(self._tracker.failed())

    def _act(self, actions: list[Action[_Payload]]) -> list[Arrival]:
        arrivals: list[Arrival] = []
        for action in actions:
            match action:
                case Deliver(seq, payload, replayed):
                    arrivals.append(Told(seq, payload.data, replayed, payload.topic, payload.at_ns))
                case Ask(start):
                    self.asking = start
                case _:
                    arrivals.append(action)
        if not self._tracker.recovering:
            self.asking = None
        return arrivals


def _shown(topic: bytes) -> str:
    return repr(topic[:_MAX_SHOWN].decode(errors="backslashreplace"))
