"""The interface of a transport: transfers in, their ends out.

A node **grants** a ticket: the pages that whoever shows it may read (or write). A peer's
**transfer** names the ticket and pages; the transport reads them straight into the peer's memory
and checks the digest of each. No call waits for a peer.

The memory of a transfer belongs to it until it is **settled**: until then bytes may still arrive
there, even after its end. **An unsettled transfer delivers nothing**: bytes that still arrive may
go over pages that had arrived, so none of its pages may be used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore import mover
from kvstore.mover import DIGEST_BYTES
from kvstore.protocol.errors import InvalidArgument, KVStoreError

TICKET_BYTES = 16
PLACE_BYTES = 8
"""Of the address of a page, for transports that read by addresses."""
PAGES_MAX = 65_536
"""Pages of one transfer, and ranges of one ticket."""


class PageArrival(IntEnum):
    """The state of one page when its transfer has ended."""

    MISSING = 0
    """It did not arrive, or not completely."""
    RIGHT = 1
    """It arrived, and its bytes match its digest. Of a write: the peer can read it."""
    WRONG = 2
    """It arrived, and its bytes do not match its digest."""


class Range(NamedTuple):
    """Memory of the node that granted it: an address as in ``wire.ADDRESS``, and bytes."""

    extent: int
    generation: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PageTransfer:
    """Read pages of one size from a peer, or write them to it.

    Attributes:
        number: number chosen by the caller; no other unsettled transfer has it.
        endpoint: of the peer's transport, as reported by it.
        ticket: 16 bytes that the peer granted.
        remote: place of each page in the peer's memory, 1 to 65,536, all of one length.
        local: address of each page in our memory, shape (n,).
        seeds: seed of each page's digest, shape (n,). A write does not use it.
        digests: 16 bytes per page, as reported by the peer. A write does not use it.
        deadline_ns: time by which it must have ended, in ``time.monotonic_ns()``.
        addresses: of each page in the peer, 8 bytes each, as reported by its transport
            (:meth:`Transport.addresses`); empty = the transport needs none.
    """

    number: int
    endpoint: str
    ticket: bytes
    remote: Sequence[Range]
    local: npt.NDArray[np.uint64]
    seeds: npt.NDArray[np.uint64]
    digests: bytes
    deadline_ns: int
    addresses: bytes = b""

    @property
    def page_bytes(self) -> int:
        """Bytes of each page."""
        return self.remote[0].length

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages."""
        return self.page_bytes * len(self.remote)

    def check(self, *, verified: bool) -> None:
        """Check that its parts match each other.

        Args:
            verified: its digests are used.

        Raises:
            InvalidArgument: they do not.
        """
        count = len(self.remote)
        if not 0 < count <= PAGES_MAX:
            raise InvalidArgument("remote", f"{count} pages are not 1 to {PAGES_MAX}")
        if self.page_bytes <= 0 or any(one.length != self.page_bytes for one in self.remote):
            raise InvalidArgument("remote", "its pages differ in length")
        if len(self.ticket) != TICKET_BYTES:
            raise InvalidArgument("ticket", f"{len(self.ticket)} bytes are not {TICKET_BYTES}")
        if self.local.shape != (count,):
            raise InvalidArgument("local", f"{self.local.shape} for {count} pages")
        if verified and self.seeds.shape != (count,):
            raise InvalidArgument("seeds", f"{self.seeds.shape} for {count} pages")
        if verified and len(self.digests) != count * DIGEST_BYTES:
            raise InvalidArgument("digests", f"{len(self.digests)} bytes for {count} pages")

    def arrivals(self, first: int, stop: int) -> bytes:
        """One :class:`PageArrival` for each page from ``first`` to before ``stop``."""
        pages = slice(first, stop)
        found = mover.digest(self.local[pages], self.page_bytes, self.seeds[pages])
        digests = self.digests[first * DIGEST_BYTES : stop * DIGEST_BYTES]
        wanted = np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        right = (found == wanted).all(axis=1)
        return np.where(right, PageArrival.RIGHT, PageArrival.WRONG).astype(np.uint8).tobytes()


class TransferEnd(NamedTuple):
    """The end of a transfer; each has exactly one.

    Attributes:
        number: of the transfer.
        good: one :class:`PageArrival` per page.
        error: why pages are missing; None if none is.
        settled: nothing arrives any more. False: no page may be used, whatever ``good`` says, and
            :class:`TransferSettled` follows.
        begun: False = no byte of it was or will be moved.
    """

    number: int
    good: bytes
    error: KVStoreError | None
    settled: bool
    begun: bool = True


class TransferSettled(NamedTuple):
    """Nothing arrives any more for a transfer that had ended unsettled."""

    number: int


class TicketEnded(NamedTuple):
    """A revoked ticket is not in use any more."""

    ticket: bytes


TransportEvent = TransferEnd | TransferSettled | TicketEnded


class Transport(Protocol):
    """A transport; all calls come from one thread.

    A new transport implements this, and must pass
    :class:`kvstore.testing.transport.TransportContract`.

    Attributes:
        name: as in ``PeerWelcome.transports``.
    """

    name: str

    @property
    def endpoint(self) -> str:
        """The endpoint for peers; empty = peers cannot read from here."""

    def register(self, address: int, length: int, descriptor: int) -> None:
        """Prepare memory for local pages and granted ranges; may continue in the background.

        Args:
            address: its address; it stays mapped until :meth:`unregister`.
            length: bytes.
            descriptor: of its file, mapped from the beginning; it may be closed afterwards.
        """
        ...

    def unregister(self, address: int) -> None:
        """The memory that was registered at this address goes; no transfer uses it."""
        ...

    def addresses(self, ranges: Sequence[tuple[Range, int]]) -> bytes | None:
        """The addresses that a peer needs, in addition to a ticket, to read ranges: 8 bytes each.

        Returns:
            None: they cannot be read through this transport now. Empty: nothing is needed.
        """
        ...

    def takes(self, transfer: PageTransfer) -> bool:
        """Whether it can carry out a transfer now; False = use another transport."""
        ...

    def read(self, transfer: PageTransfer) -> None:
        """Read pages from a peer into our memory; its end says how that went.

        If too many bytes are in flight already it ends at once with CapacityError.

        Raises:
            InvalidArgument: the parts of the transfer do not match each other.
        """
        ...

    def write(self, transfer: PageTransfer) -> None:
        """Write our pages to ranges that a ticket opens for writing; otherwise as :meth:`read`.

        A page is RIGHT when the peer can read its bytes.
        """
        ...

    def grant(
        self,
        ticket: bytes,
        ranges: Sequence[tuple[Range, int]],
        deadline_ns: int,
        *,
        write: bool = False,
    ) -> None:
        """Allow peers that show a ticket to read exactly these ranges, or to write them.

        Args:
            ticket: 16 random bytes.
            ranges: what peers request, and its address.
            deadline_ns: end of the ticket, in ``time.monotonic_ns()``.
            write: peers may write the ranges, and not read them.

        Raises:
            InvalidArgument: the ticket is in use, or not 16 bytes.
            CapacityError: there are too many tickets.
        """
        ...

    def revoke(self, ticket: bytes, *, ended: bool = False) -> bool:
        """End a ticket, and abort transfers with it; never waits.

        Args:
            ticket: it may be unknown.
            ended: the peer has said that all its transfers with it have ended, each without an
                error. Transports that do not know the transfers in progress need this
                (:class:`~kvstore.transport.mooncake.MooncakeTransport`); the others ignore it.

        Returns:
            True: no transfer of a peer with this ticket accesses our memory any more. False: one
            still may, until :class:`TicketEnded` follows.
        """
        ...

    def poll(self) -> list[TransportEvent]:
        """The events since the last call."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while :meth:`poll` has something."""
        ...

    def cancel(self, number: int) -> None:
        """Ask a transfer to end soon; its end follows as always."""
        ...

    def close(self) -> None:
        """End everything and release all resources; nothing arrives anywhere afterwards."""
        ...

    def stats(self) -> dict[str, int]:
        """Counts since the start, and current numbers."""
        ...
