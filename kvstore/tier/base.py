"""The interface of a tier below host memory: jobs in, completions out.

The node decides what is written where (:mod:`kvstore.state.disk.log`); the tier moves the bytes and
checks them. No call blocks. Its jobs are those of the state (:mod:`kvstore.state.disk.jobs`), in
which the address of each page in memory is set; that memory must stay valid until their completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.protocol.errors import KVStoreError
from kvstore.state.disk.jobs import DiskJob


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one job; ``error`` None = success.

    Attributes:
        tokens: of a read: the tokens in the record; empty if it has none.
        failed: of a sync or a seal: the segments that could not be synced, now or before; all other
            writes that it covers are durable.
    """

    job: int
    error: KVStoreError | None = None
    tokens: bytes = b""
    failed: tuple[int, ...] = ()


class Tier(Protocol):
    """A tier; all calls come from the node's thread.

    A new tier implements this, and must pass :class:`kvstore.testing.contract.TierContract`.
    """

    def submit(self, jobs: Sequence[DiskJob]) -> None:
        """Submit jobs. Writes and reads may end in any order; a ``DiskSync`` covers ended ones."""
        ...

    def poll(self) -> list[Completion]:
        """Completions since the last call."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is in progress; returns False on timeout."""
        ...

    def close(self) -> None:
        """End jobs in progress within a limited time, and release all resources."""
        ...
