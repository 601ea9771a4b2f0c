"""What a transport is: it moves bytes of pages between the memories of two nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError


class Range(NamedTuple):
    """Memory of the owner; the address as in :data:`kvstore.wire.ADDRESS`, and bytes."""

    extent: int
    generation: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """Pages to move.

    Attributes:
        number: names it in its end; no two unfinished transfers have the same.
        endpoint: of the peer's transport.
        ticket: 16 bytes that open the ranges at the peer.
        remote: memory of the peer, one range a page.
        local: address of each page in this process, dtype uint64.
        seeds: digest seed of each page, dtype uint64.
        digests: 16 bytes a page, checked after arrival.
        deadline_ns: monotonic time at which it ends.
    """

    number: int
    endpoint: str
    ticket: bytes
    remote: Sequence[Range]
    local: npt.NDArray[np.uint64]
    seeds: npt.NDArray[np.uint64]
    digests: bytes
    deadline_ns: int


class TransferEnd(NamedTuple):
    """A transfer has ended.

    Attributes:
        number: the transfer.
        good: a byte a page: 0 missing, 1 arrived with its digest, 2 arrived with another digest.
        error: why pages are missing.
        settled: False = bytes may still land in the local memory; :class:`TransferSettled` follows.
    """

    number: int
    good: bytes
    error: KVStoreError | None
    settled: bool


class TransferSettled(NamedTuple):
    """Nothing lands in the local memory of this ended transfer any more."""

    number: int


class Transport(Protocol):
    """Moves pages; called from one thread, never blocks.

    Attributes:
        name: its name in PeerWelcome.
        endpoint: what peers connect to; empty = this node cannot be read through it.
    """

    name: str
    endpoint: str

    def read(self, transfer: Transfer) -> None:
        """Start to read pages of a peer; refused with an immediate end."""

    def grant(
        self, ticket: bytes, ranges: Sequence[tuple[Range, int]], deadline_ns: int, *,
        write: bool = False,
    ) -> None:  # fmt: skip
        """Open these ranges, with their addresses in this process, to who shows the ticket."""

    def revoke(self, ticket: bytes) -> None:
        """Close what a ticket opened; unknown tickets are ignored."""

    def poll(self) -> list[TransferEnd | TransferSettled]:
        """What has ended since the last call."""

    def fileno(self) -> int:
        """An eventfd that is readable while :meth:`poll` has something."""

    def cancel(self, number: int) -> None:
        """A hint that nobody waits for a transfer any more."""

    def close(self) -> None:
        """End all transfers and threads."""

    def stats(self) -> dict[str, Any]:
        """Counts, as plain values."""
