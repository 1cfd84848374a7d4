"""What goes to and fro between a publisher and who listens, message by message."""

from __future__ import annotations

from enum import IntEnum

import msgspec

__all__ = ["Channel", "Message"]

_END_SEQ = b"\xff" * 8


class Channel(IntEnum):
    """Where a message went."""

    LIVE = 0
    """From the PUB socket."""
    ASKED = 1
    """To the replay socket: a request."""
    ANSWER = 2
    """From the replay socket, without the identity."""
    OVER = 3
    """From nobody: the replay has not ended, and was given up."""
    CONNECTED = 4
    """From nobody: the PUB socket is connected, for the first time or again."""
    DISCONNECTED = 5
    """From nobody: it is not any more."""
    REFUSED = 6
    """From nobody: the other side has no CURVE, or does not want our key, and is not tried again."""
    BEHIND = 7
    """From nobody: we read more slowly than it publishes, or did not read for a while. Until `ABREAST`,
    what is missing may be our own loss.
    """
    ABREAST = 8
    """From nobody: that is over."""


class Message(msgspec.Struct, array_like=True, frozen=True):
    """A multipart message, and when it came, in nanoseconds since the epoch."""

    at_ns: int
    channel: Channel
    frames: list[bytes]

    @property
    def is_batch(self) -> bool:
        """Whether it is something published, and not how replays begin and end."""
        return self.channel == Channel.LIVE or (
            self.channel == Channel.ANSWER and not self.ends_replay
        )

    @property
    def ends_replay(self) -> bool:
        """Whether it is the answer that says that there is no more."""
        return self.channel == Channel.ANSWER and self.frames[-2:] == [_END_SEQ, b""]
