"""A transport within one process: it copies at once, or when a test opens its gate."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore import mover
from kvstore.mover.memory import memory_at
from kvstore.protocol.errors import KVStoreError, NotFound, TransferError
from kvstore.protocol.page import DIGEST_BYTES
from kvstore.transport.base import PageArrival, PageTransfer, Range, TransferEnd, TransportEvent


class Network:
    """All transports, by their endpoints."""

    def __init__(self) -> None:
        self.transports: dict[str, FakeTransport] = {}


class FakeTransport:
    """One node's transport.

    Attributes:
        held: None, or the transfers that wait until the test lets them go.
        damaged: positions of pages that arrive with a wrong byte.
        lingers: transfers end unsettled when they are cancelled.
        lends_on: a revoked ticket is in use until the test tells its end.
        revoked: revoked tickets.
    """

    def __init__(self, network: Network, endpoint: str, name: str = "fake") -> None:
        self.name, self.endpoint = name, endpoint
        self.tickets: dict[bytes, dict[Range, int]] = {}
        self.held: list[PageTransfer] | None = None
        self.damaged: set[int] = set()
        self.lingers = self.lends_on = False
        self.revoked: list[bytes] = []
        self._network = network
        self._events: list[TransportEvent] = []
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        network.transports[endpoint] = self

    def register(self, address: int, length: int, descriptor: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass

    def addresses(self, ranges: Sequence[tuple[Range, int]]) -> bytes | None:
        return b""

    def takes(self, transfer: PageTransfer) -> bool:
        return True

    def read(self, transfer: PageTransfer) -> None:
        transfer.check(verified=True)
        if self.held is None:
            self.go(transfer)
        else:
            self.held.append(transfer)

    def write(self, transfer: PageTransfer) -> None:
        raise NotImplementedError

    def go(self, transfer: PageTransfer) -> None:
        """Carry a transfer out."""
        open_ = self._network.transports[transfer.endpoint].tickets.get(transfer.ticket)
        good = bytearray(len(transfer.remote))
        error: KVStoreError | None = None
        if open_ is None:
            error = NotFound("ticket", "the peer does not know it")
        else:
            for at, one in enumerate(transfer.remote):
                target = memory_at(int(transfer.local[at]), one.length)
                target[:] = memory_at(open_[one], one.length)
                if at in self.damaged:
                    target[one.length // 2] ^= 1
                good[at] = self._checked(transfer, at)
        self.tell(TransferEnd(transfer.number, bytes(good), error, settled=True))

    def tell(self, event: TransportEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._eventfd, 1)

    def grant(
        self, ticket: bytes, ranges: Sequence[tuple[Range, int]], deadline_ns: int, *,
        write: bool = False,
    ) -> None:  # fmt: skip
        self.tickets[ticket] = dict(ranges)

    def revoke(self, ticket: bytes, *, ended: bool = False) -> bool:
        self.tickets.pop(ticket, None)
        self.revoked.append(ticket)
        return not self.lends_on

    def poll(self) -> list[TransportEvent]:
        events, self._events = self._events, []
        if events:
            os.eventfd_read(self._eventfd)
        return events

    def fileno(self) -> int:
        return self._eventfd

    def cancel(self, number: int) -> None:
        for transfer in [one for one in self.held or [] if one.number == number]:
            assert self.held is not None
            self.held.remove(transfer)
            missing = bytes(len(transfer.remote))
            error = TransferError("cancelled")
            self.tell(TransferEnd(number, missing, error, settled=not self.lingers))

    def close(self) -> None:
        del self._network.transports[self.endpoint]
        os.close(self._eventfd)

    def stats(self) -> dict[str, Any]:
        return {"tickets": len(self.tickets)}

    def _checked(self, transfer: PageTransfer, at: int) -> PageArrival:
        found = mover.digest(
            np.array([transfer.local[at]], dtype=np.uint64), transfer.page_bytes,
            transfer.seeds[at : at + 1],
        )  # fmt: skip
        wanted = transfer.digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
        return PageArrival.RIGHT if found[0].tobytes() == wanted else PageArrival.WRONG
