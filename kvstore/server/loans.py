"""Loans: leases of other nodes, and the tickets that open their pages to the transports.

A lease is released when nobody reads with its ticket any more: until then its memory must stay as
it is. So a ticket ends before its lease (see :mod:`kvstore.server.served`). A page that a reader
reports as corrupt is checked here first, in a thread, because a bad link must not delete good
pages; the lease stays until the check has ended, so that the check reads the bytes of that page.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Final

import numpy as np

from kvstore import mover
from kvstore.process.logs import event
from kvstore.protocol import wire
from kvstore.protocol.errors import KVStoreError, TierUnavailable, printable
from kvstore.protocol.page import (
    DIGEST_BYTES,
    KEY_BYTES,
    ShardSpec,
    SpaceIdentity,
    digest_seed,
    page_seeds,
)
from kvstore.tier.host import HostMemory
from kvstore.transport.base import Range, Transport

log = logging.getLogger(__name__)

CHECKS_MAX: Final = 256
"""Maximum reported pages that wait for their check; further reports are only counted."""
_TICKET_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class LentPages:
    """Leased pages of one shard.

    Attributes:
        lease: number of the lease.
        space: number of the space.
        number: number of the shard in it.
        identity: the space.
        shard: the shard.
        keys: packed keys of the pages.
        digests: digests of the pages, 16 bytes each.
        addresses: extent, generation and offset of each.
    """

    lease: int
    space: int
    number: int
    identity: SpaceIdentity
    shard: ShardSpec
    keys: bytes
    digests: bytes
    addresses: Sequence[tuple[int, int, int]]

    @property
    def page_bytes(self) -> int:
        """Bytes of each page."""
        return self.shard.page_bytes(self.identity)

    def position(self, report: wire.Corrupt) -> int:
        """Which page a report names; -1 = none of these."""
        at = self.keys.find(report.key) if len(report.key) == KEY_BYTES else -1
        while at >= 0 and at % KEY_BYTES:
            at = self.keys.find(report.key, at + 1)
        position = at // KEY_BYTES
        same = (report.space, report.shard) == (self.space, self.number)
        known = same and at >= 0 and self.addresses[position][1] == report.generation
        return position if known else -1


@dataclass(slots=True, eq=False)
class Loan:
    """One lease of another node.

    Attributes:
        pages: what it leases.
        ticket: 16 bytes that open the pages.
        release: called once, when nothing of ours reads the pages any more.
        ended: it is released, or will be after the running checks and transfers.
        transfers: transports through which it is still read, although it has ended.
        checked: positions of pages that were reported.
        read: its reader has got all the pages, as it says.
        places: as in ``wire.Lent``.
    """

    pages: LentPages
    ticket: bytes
    release: Callable[[], None]
    timer: asyncio.TimerHandle | None = None
    ended: bool = False
    transfers: int = 0
    checks: set[Future[bool]] = field(default_factory=set)
    checked: set[int] = field(default_factory=set)
    read: bool = False
    places: dict[str, tuple[str, bytes]] = field(default_factory=dict)


class Loans:
    """All leases of other nodes.

    Args:
        memory: the memory of the slots.
        transports: the transports through which this node can be read.

    Attributes:
        counts: cause → number of loans, reports, and their outcomes.
        transports: see above.
    """

    def __init__(self, memory: HostMemory, transports: Sequence[Transport]) -> None:
        self.counts: Counter[str] = Counter()
        self.transports = [one for one in transports if one.endpoint]
        self._memory = memory
        self._open: set[Loan] = set()
        #: Loans that have ended and are still read, by ticket.
        self._ending: dict[bytes, Loan] = {}
        self._waiting = 0
        self._thread = _checking()

    def close(self) -> None:
        """End all loans; waits for the running check."""
        for loan in list(self._open):
            self.end(loan)
        self._thread.shutdown(wait=True, cancel_futures=True)

    def stats(self) -> dict[str, int]:
        """Open loans, and the counts."""
        return {"open": len(self._open), **self.counts}

    def add(self, pages: LentPages, lease_ms: int, release: Callable[[], None]) -> Loan:
        """Open leased pages to the transports.

        Args:
            pages: the leased pages.
            lease_ms: when the loan ends by itself; the lease lasts longer.
            release: releases the lease.

        Raises:
            TierUnavailable: the memory cannot be mapped; nothing was opened.
            CapacityError: a transport has too many tickets; nothing was opened.
        """
        size = pages.page_bytes
        ranges = [
            (Range(extent, generation, offset, size), self._memory.address(extent) + offset)
            for extent, generation, offset in pages.addresses
        ]
        loan = Loan(pages, secrets.token_bytes(_TICKET_BYTES), release)
        deadline_ns = monotonic_ns() + lease_ms * 1_000_000
        try:
            for transport in self.transports:
                transport.grant(loan.ticket, ranges, deadline_ns)
                endpoint, addresses = transport.endpoint, transport.addresses(ranges)
                if endpoint and addresses:
                    loan.places[transport.name] = endpoint, addresses
        except KVStoreError:
            for transport in self.transports:
                transport.revoke(loan.ticket)
            raise
        loan.timer = asyncio.get_running_loop().call_later(lease_ms / 1000, self._expire, loan)
        self._open.add(loan)
        self.counts["lent_pages"] += len(ranges)
        return loan

    def end(self, loan: Loan, *, at_once: bool = False) -> None:
        """Close the ticket; release the lease after the checks and transfers of its pages.

        Args:
            loan: the loan; one that has ended is ignored, except for ``at_once``.
            at_once: its checks do not count any more.
        """
        if not loan.ended:
            loan.ended = True
            loan.transfers = sum(not one.revoke(loan.ticket) for one in self.transports)
            if loan.transfers:
                self._ending[loan.ticket] = loan
            if loan.timer is not None:
                loan.timer.cancel()
        if at_once:
            for check in list(loan.checks):
                check.cancel()
            loan.checks.clear()
        self._release(loan)

    def ticket_ended(self, ticket: bytes) -> None:
        """A transport does not read with a revoked ticket any more."""
        loan = self._ending.get(ticket)
        if loan is None:
            return
        loan.transfers -= 1
        if not loan.transfers:
            del self._ending[ticket]
            self._release(loan)

    def report(self, loan: Loan, report: wire.Corrupt, confirmed: Callable[[], bool]) -> None:
        """Check a reported page; ``confirmed`` is called if its bytes are wrong here too.

        It says whether these were still the bytes of the page. A report is ignored if too many wait
        or no thread can be started.
        """
        position = loan.pages.position(report)
        if position < 0 or position in loan.checked or self._waiting >= CHECKS_MAX:
            self.counts["reports_ignored"] += 1
            return
        loop = asyncio.get_running_loop()
        try:
            check = self._thread.submit(_is_wrong, self._memory, loan.pages, position)
        except RuntimeError:  # no more threads; but this one has kept the call for later
            self._thread = _checking()
            self.counts["reports_ignored"] += 1
            return
        loan.checked.add(position)
        self.counts["reports"] += 1
        self._waiting += 1
        loan.checks.add(check)
        check.add_done_callback(
            lambda done: loop.call_soon_threadsafe(self._checked, loan, done, confirmed)
        )

    def _checked(self, loan: Loan, check: Future[bool], confirmed: Callable[[], bool]) -> None:
        self._waiting -= 1
        loan.checks.discard(check)
        try:
            if not check.cancelled():
                self.counts[_outcome(check, confirmed)] += 1
        finally:
            self._release(loan)

    def _expire(self, loan: Loan) -> None:
        self.counts["expired"] += 1
        self.end(loan)

    def _release(self, loan: Loan) -> None:
        running = any(not check.cancelled() for check in loan.checks)
        if loan.ended and not running and not loan.transfers and loan in self._open:
            self._open.remove(loan)
            loan.release()


def _checking() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "kvstore-reports")


def _outcome(check: Future[bool], confirmed: Callable[[], bool]) -> str:
    """What a check has found, as it is counted."""
    error = check.exception()
    if error is None:
        if not check.result():
            return "reports_false"
        return "reports_true" if confirmed() else "reports_late"
    if isinstance(error, TierUnavailable):
        return "reports_unreadable"
    event(log, logging.ERROR, "a reported page was not checked", why=printable(repr(error)))
    return "reports_failed"


def _is_wrong(memory: HostMemory, pages: LentPages, position: int) -> bool:
    """Whether a page fails its digest; runs in a thread."""
    extent, _, offset = pages.addresses[position]
    row = np.empty(pages.page_bytes, dtype=np.uint8)
    if memory.read(extent, offset, row.data) != len(row):
        raise TierUnavailable(f"extent {extent} is shorter than its pages")
    key = pages.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
    seeds = page_seeds(key, digest_seed(pages.identity, pages.shard))
    found = mover.digest(np.array([row.ctypes.data], dtype=np.uint64), len(row), seeds)
    wanted = pages.digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]
    return bool(found[0].tobytes() != wanted)
