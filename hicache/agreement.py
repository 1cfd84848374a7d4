"""What the ranks of a tensor-parallel group do at the same step, though their copies end at other times.

Every rank runs the same requests through a cache of its own, each with its part of the KV. Their trees
are equal as long as each does the same at the same step. What time decides, the end of a copy above all,
they therefore settle together: a number is what the slowest rank says (all-reduce MIN), and a page that
one rank lost is lost.

A1  Every rank calls the same methods in the same order.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Agreement", "Alone", "GroupAgreement"]


class Agreement(Protocol):
    """One rank's end of it."""

    @property
    def rank(self) -> int:
        """Of this process; rank 0 publishes."""

    def least(self, values: list[int]) -> list[int]:
        """The minimum over all ranks of each value. All ranks give as many."""

    def gather(self, keys: list[bytes]) -> list[list[bytes]]:
        """What each rank gave, by rank."""


class Alone:
    """One rank: it agrees with itself."""

    rank = 0

    def least(self, values: list[int]) -> list[int]:
        return values

    def gather(self, keys: list[bytes]) -> list[list[bytes]]:
        return [keys]


class GroupAgreement:
    """The ranks of a `torch.distributed` group whose back end reduces CPU tensors, as gloo does.

    Errors of the group, a dead rank for one, are raised as torch raises them: the ranks cannot go on.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = torch.distributed.get_rank(group)
        self._size = torch.distributed.get_world_size(group)

    def least(self, values: list[int]) -> list[int]:
        """See `Agreement`. Waits for all ranks."""
        tensor = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MIN, group=self._group)
        agreed: list[int] = tensor.tolist()
        return agreed

    def gather(self, keys: list[bytes]) -> list[list[bytes]]:
        """See `Agreement`. Waits for all ranks."""
        gathered: list[Any] = [None] * self._size
        torch.distributed.all_gather_object(gathered, keys, group=self._group)
        return gathered
