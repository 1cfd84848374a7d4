"""Whether the sockets of all ranks of a worker can be open side by side, worked out before any is.

Two sockets are on one address when their ports are equal and so are their hosts, or either host is a
wildcard; or when their paths are equal. A socket that moves adds the rank to its port, so it takes a
range of them. Of a bound socket that does not move, ranks have one address each on hosts of their own: it
is compared with the others of its rank, and not with itself. A target is compared with all that is bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from publisher.config.checks import ConfigError
from publisher.config.endpoint import Endpoint

__all__ = ["Socket", "check_sockets"]

_RANK = re.compile(r"_dp([1-9][0-9]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Socket:
    """One socket of a rank. `key`: its setting. `moves`: whether the rank is added to its address."""

    key: str
    endpoint: Endpoint
    moves: bool

    def said(self, num_ranks: int) -> str:
        """Its address as a message says it."""
        moves = self.moves and num_ranks > 1 and not self.endpoint.is_any
        return f"{self.endpoint} (ranks 0..{num_ranks - 1})" if moves else str(self.endpoint)


def check_sockets(bound: list[Socket], targets: list[Socket], num_ranks: int) -> None:
    """Raises ConfigError unless ranks 0 to `num_ranks` - 1 can have all of these.

    `bound`: where to listen; no two on one address. `targets`: where to connect; none may be ours.
    """
    for socket in (*bound, *targets):
        try:
            socket.endpoint.for_rank(num_ranks - 1 if socket.moves else 0)
        except ValueError as error:
            raise ConfigError(f"{socket.key}: {error}") from None
    for place, one in enumerate(bound):
        for other in bound[:place]:
            if _meet(one, other, num_ranks):
                said = f"{one.said(num_ranks)} is on the address of {other.key},"
                raise ConfigError(f"{one.key}: {said} {other.said(num_ranks)}")
    for target in targets:
        for own in bound:
            if _reaches(target.endpoint, own.endpoint) and _meet(target, own, num_ranks):
                said = f"{target.said(num_ranks)} is our own {own.key}, {own.said(num_ranks)}"
                raise ConfigError(f"{target.key}: {said}; two sides of a connection cannot be one")


def _meet(one: Socket, other: Socket, num_ranks: int) -> bool:
    """Whether a rank of `one` has the address of a rank of `other`."""
    mine, theirs = one.endpoint, other.endpoint
    if mine.is_any or theirs.is_any:
        return False
    if "ipc" in (mine.scheme, theirs.scheme):
        if mine.scheme != theirs.scheme:
            return False
        return (
            mine.same_path(theirs)
            or (one.moves and _is_rank_of(theirs.path, mine.path, num_ranks))
            or (other.moves and _is_rank_of(mine.path, theirs.path, num_ranks))
        )
    assert mine.port is not None and theirs.port is not None
    ahead = theirs.port - mine.port
    most_ahead = num_ranks - 1 if one.moves else 0
    most_behind = num_ranks - 1 if other.moves else 0
    return -most_behind <= ahead <= most_ahead and mine.shares_host(theirs)


def _is_rank_of(path: str, base: str, num_ranks: int) -> bool:
    """Whether `path` is that of a rank of the socket at `base`."""
    found = _RANK.fullmatch(path.removeprefix(base)) if path.startswith(base) else None
    return found is not None and len(found[1]) <= len(str(num_ranks)) and int(found[1]) < num_ranks


def _reaches(target: Endpoint, own: Endpoint) -> bool:
    """Whether connecting to the host of `target` can end at `own`: a wildcard takes what comes to this
    host only.
    """
    return not own.is_wildcard or own.scheme == "ipc" or target.is_loopback
