"""Why nothing is shown of a publisher that is listened to, and the command that looks further."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from publisher.config.checks import shown
from publisher.tools.columns import of_batches
from publisher.tools.source import Address

__all__ = ["Seen", "Watch"]

_SOON_S = 3.0
"""After so long without a connection, or without a batch, something is said."""

_UNANSWERED_S = 2.0
_LONGEST_S = 15
"""How long a replay that is not answered is waited for: three times five seconds."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A publisher as it is now. `came`: batches from its PUB socket. `fits`: whether something came, be
    it replayed, of a topic that was asked for. `told`: whether anything of it was told. `before`: the
    seq that it has come to, while what was asked for begins later. The others are those of `Follower`
    and `Listener`.
    """

    connected: bool
    refused: bool = False
    came: int = 0
    fits: bool = False
    told: bool = False
    before: int | None = None
    held: int = 0
    recovering: bool = False
    unanswered_s: float = 0.0
    ahead: int = 0
    behind: bool = False


class Watch:
    """One publisher, from the monotonic time `now` on. `doctor`: the command that looks further. `first`:
    the seq from which on it is asked for; None: it is not for one.
    """

    def __init__(
        self, address: Address, *, topic: str, doctor: str, now: float, first: int | None = None
    ) -> None:
        self.address = address
        self._topic, self._doctor, self._first = topic, doctor, first
        self._said: set[str] = set()
        self._was_connected = False
        self._connected = False
        self._since = now
        """When it was connected, or not any more."""
        self._ahead: tuple[float, int] | None = None
        """Since when the replays are ahead, and how many had come by then."""

    def look(self, seen: Seen, now: float) -> Iterator[str]:
        """What is to be said by now; each cause once."""
        if seen.connected != self._connected:
            self._connected, self._since = seen.connected, now
            self._was_connected = True
            self._said.discard("connection")
        for cause, text in self._causes(seen, now):
            if cause not in self._said:
                self._said.add(cause)
                yield text

    def why(self, seen: Seen) -> str:
        """In the end, of one of which nothing was told."""
        if seen.refused:
            return (
                "it has refused us; --server-key and --client-key are not what it wants;"
                f" {self._says_more}"
            )
        if not seen.connected:
            return (
                f"{'the connection is gone' if self._was_connected else _NOBODY}; {self._says_more}"
            )
        if seen.held or seen.unanswered_s > _UNANSWERED_S:
            return f"{self.waited(seen)}; {self._says_more}"
        if seen.ahead:
            return self._of_another(seen)
        if self._topic and not seen.fits:
            return f"it is there, but {self._no_topic}; {self._says_more}"
        if self._first is not None:
            return f"it is there, but has nothing from seq {self._first} on; {self._says_more}"
        return f"it is there, but idle; {self._says_more}"

    def waited(self, seen: Seen) -> str:
        """In the end, of one that has told batches which are not shown."""
        last = " last" if seen.told else ""
        answer = f"the answer of the replay endpoint {self.address.replay_endpoint}"
        if not seen.held:
            return f"it waited for {answer}"
        return f"{of_batches(seen.held)} came{last} that had to wait for {answer}"

    # ---------------------------------------------------------------------------------- inside

    def _causes(self, seen: Seen, now: float) -> Iterator[tuple[str, str]]:
        endpoint, is_late = self.address.endpoint, now >= self._since + _SOON_S
        if seen.refused:
            yield "refused", f"{endpoint} {self.why(seen).removeprefix('it ')}"
            return
        if not seen.connected:
            if is_late and self._was_connected:
                yield "connection", f"the connection to {endpoint} is gone; it is tried again"
            elif is_late:
                yield "connection", f"not connected to {endpoint} yet: {_NOBODY}; {self._says_more}"
            return
        if seen.unanswered_s > _UNANSWERED_S:
            yield from self._waiting(seen)
        if self._is_of_another(seen, now):
            yield "ahead", self._of_another(seen)
        if is_late and seen.before is not None:
            yield "before", f"{endpoint} has come to seq {seen.before}, and --from is {self._first}"
        if not is_late or seen.recovering or seen.came:
            return
        if self._topic and not seen.fits:
            yield "idle", f"connected to {endpoint}, but {self._no_topic}; {self._says_more}"
        elif not seen.told:
            yield (
                "idle",
                f"connected to {endpoint}, but nothing has come yet: it is idle; {self._says_more}",
            )

    def _waiting(self, seen: Seen) -> Iterator[tuple[str, str]]:
        silent = (
            f"the replay endpoint {self.address.replay_endpoint} has not answered for"
            f" {seen.unanswered_s:.0f} s"
        )
        if not seen.held:
            if "waiting" not in self._said:
                what = f"what comes waits for it, at most {_LONGEST_S} s"
                yield "unanswered", f"{silent}: {what}; {self._says_more}"
            return
        what = "1 batch has" if seen.held == 1 else f"{seen.held:,} batches have"
        text = (
            f"{what} come from {self.address.endpoint} and must wait: {silent}. What comes is shown after"
            f" {_LONGEST_S} s at most, and at once without a replay endpoint; {self._says_more}"
        )
        yield "waiting", text

    def _is_of_another(self, seen: Seen, now: float) -> bool:
        """Whether replays are ahead for long, although we are not late and batches come."""
        if not seen.ahead or seen.behind:
            self._ahead = None
            return False
        if self._ahead is None:
            self._ahead = now, seen.came
        since, came = self._ahead
        return now >= since + _SOON_S and seen.came > came

    def _of_another(self, seen: Seen) -> str:
        return (
            f"the replay endpoint {self.address.replay_endpoint} is {of_batches(seen.ahead)} ahead of"
            f" what comes from {self.address.endpoint}, which is taken for told already: the two are of"
            f" different publishers, or what comes is far behind; {self._says_more}"
        )

    @property
    def _no_topic(self) -> str:
        return (
            f"it has sent nothing whose topic begins with {shown(self._topic)}: it is idle, or its topic"
            " is another"
        )

    @property
    def _says_more(self) -> str:
        return f"`{self._doctor}` says more"


_NOBODY = "nobody listens there, or it is no PUB socket, or it wants other keys"
