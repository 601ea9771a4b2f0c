"""Transfers whose bytes another process moves, and what to do about them; pure.

Only the end of that process makes sure that nothing arrives any more. So a transfer that fails or
is late ends unsettled, the process is replaced, and then the transfer is settled. Those that the
process was moving besides are given to the next one. A peer because of which that happened is not
asked again for :data:`AVOIDED_NS`, so that it does not cost the others the process over and over.

Writes are given to one process only, and the end of a process makes nothing sure of those that it
was moving. Where there are only writes, those that have not failed end first (``patient``).
"""

from dataclasses import dataclass
from typing import Final

from kvstore.protocol.errors import (
    CapacityError,
    InvalidArgument,
    KVStoreError,
    PeerUnreachable,
    TransferError,
    TransferTimeout,
)
from kvstore.transport.base import PageTransfer, TransferEnd, TransferSettled

CONTACT_NS: Final = 300_000_000
"""A peer that does not answer its first contact for so long is not there: the engine does nothing
else meanwhile."""
AVOIDED_NS: Final = 2_000_000_000
GIVEN_MAX: Final = 3
"""A transfer is given to so many processes that end: one of the transfers may be why they do."""


@dataclass(frozen=True, slots=True)
class Give:
    """Give a transfer to the process."""

    transfer: PageTransfer
    write: bool = False


@dataclass(frozen=True, slots=True)
class Replace:
    """Kill the process, and start another one when it has ended."""


@dataclass(slots=True)
class _Attempt:
    """A transfer that is not settled.

    Attributes:
        given: number of processes that got it.
        moving: the present process has it.
        ended: it has been told.
        write: pages are written to the peer.
    """

    transfer: PageTransfer
    write: bool
    given: int = 0
    moving: bool = False
    ended: bool = False


class Attempts:
    """All transfers that are not settled.

    Args:
        in_flight_bytes_max: maximum bytes of all transfers in flight.
        patient: a process is replaced when all that it moves has ended, or was late; meanwhile it
            gets nothing. One that hangs in a first contact is replaced at once.

    Attributes:
        effects: what is to be done, in order; the caller empties it.
        events: what is to be told, likewise.
        up: the process takes transfers.
        replaced: how often a process was replaced.
        in_flight_bytes: bytes of all transfers that are not settled.
    """

    def __init__(self, in_flight_bytes_max: int, *, patient: bool = False) -> None:
        self._patient = patient
        self._waiting = False  # the process is to be replaced when all that it moves has ended
        self.effects: list[Give | Replace] = []
        self.events: list[TransferEnd | TransferSettled] = []
        self.up = False
        self.replaced = 0
        self.in_flight_bytes = 0
        self._in_flight_bytes_max = in_flight_bytes_max
        self._attempts: dict[int, _Attempt] = {}
        #: Peer that is not asked → until when, and why.
        self._avoided: dict[str, tuple[int, KVStoreError]] = {}
        #: The transfer whose peer is being contacted, and since when.
        self._contacting: tuple[int, int] | None = None

    def avoids(self, endpoint: str, now_ns: int) -> bool:
        """Whether a peer is not asked now."""
        return endpoint in self._avoided and now_ns < self._avoided[endpoint][0]

    def submit(self, transfer: PageTransfer, now_ns: int, *, write: bool = False) -> None:
        """Begin a transfer.

        A write is given to one process only: bytes of the first attempt might arrive at the peer
        after the second one has ended.

        Raises:
            InvalidArgument: its number is in use.
        """
        if transfer.number in self._attempts:
            raise InvalidArgument("number", f"transfer {transfer.number} is in progress")
        refusal = self._refusal(transfer, now_ns)
        if refusal is not None:
            missing = bytes(len(transfer.remote))
            self.events.append(
                TransferEnd(transfer.number, missing, refusal, settled=True, begun=False)
            )
            return
        attempt = self._attempts[transfer.number] = _Attempt(transfer, write)
        self.in_flight_bytes += transfer.total_bytes
        if self.up:
            self._give(attempt)

    def cancel(self, number: int) -> None:
        """End a transfer soon, if it has not ended."""
        attempt = self._attempts.get(number)
        if attempt is not None and not attempt.ended:
            self._fail(attempt, TransferError("the transfer was cancelled"))

    def advance(self, now_ns: int) -> None:
        """Apply all deadlines up to now."""
        for attempt in list(self._attempts.values()):
            if not attempt.ended and attempt.transfer.deadline_ns <= now_ns:
                late = TransferTimeout("the pages did not come before the deadline")
                if attempt.moving:
                    self._avoid(attempt, late, now_ns)
                self._fail(attempt, late)
        if self._contacting is not None and now_ns >= self._contacting[1] + CONTACT_NS:
            found = self._attempts.get(self._contacting[0])
            silent = TransferTimeout("the peer does not answer")
            if found is not None and not found.ended:
                self._avoid(found, silent, now_ns)
                self._fail(found, silent)
            self._replace(at_once=True)

    def next_ns(self) -> int | None:
        """When :meth:`advance` must be called next; None = no deadline."""
        deadlines = [one.transfer.deadline_ns for one in self._attempts.values() if not one.ended]
        if self._contacting is not None:
            deadlines.append(self._contacting[1] + CONTACT_NS)
        return min(deadlines, default=None)

    # ---- the process ------------------------------------------------------------------------

    def started(self) -> None:
        """A process takes transfers from now on."""
        self.up = True
        for attempt in self._attempts.values():
            self._give(attempt)

    def is_write(self, number: int) -> bool:
        """Whether a transfer writes."""
        return number in self._attempts and self._attempts[number].write

    def contacting(self, number: int, now_ns: int) -> None:
        """The process contacts a peer for the first time, for this transfer."""
        self._contacting = number, now_ns

    def contacted(self) -> None:
        """It has done so."""
        self._contacting = None

    def arrived(self, number: int, good: bytes) -> None:
        """All pages of a transfer have arrived."""
        attempt = self._attempts.get(number)
        if attempt is not None and not attempt.ended:
            self._end(attempt, good, None, settled=True)

    def failed(self, number: int, good: bytes, why: str, now_ns: int, *, touched: bool) -> None:
        """Pages are missing; ``touched``: bytes may still arrive."""
        attempt = self._attempts.get(number)
        if attempt is None or attempt.ended:
            return
        attempt.moving = touched
        error = PeerUnreachable(why)
        self._avoid(attempt, error, now_ns)
        self._fail(attempt, error, good)

    def gone(self) -> None:
        """The process has ended: nothing arrives any more of what it moved."""
        self.up, self._contacting, self._waiting = False, None, False
        self.replaced += 1
        self.effects.clear()
        for number, attempt in list(self._attempts.items()):
            attempt.moving = False
            if attempt.ended:
                del self._attempts[number]
                self.in_flight_bytes -= attempt.transfer.total_bytes
                self.events.append(TransferSettled(number))
            elif attempt.given >= (1 if attempt.write else GIVEN_MAX):
                self._fail(attempt, TransferError(f"{attempt.given} processes ended that had it"))

    # ---- internal ---------------------------------------------------------------------------

    def _refusal(self, transfer: PageTransfer, now_ns: int) -> KVStoreError | None:
        if transfer.deadline_ns <= now_ns:
            return TransferTimeout("the deadline had passed before the transfer began")
        wanted = self.in_flight_bytes + transfer.total_bytes
        if wanted > self._in_flight_bytes_max:
            return CapacityError(
                f"{wanted} bytes in flight, {self._in_flight_bytes_max} at most",
                "in_flight_bytes_max",
            )
        if self.avoids(transfer.endpoint, now_ns):
            error = self._avoided[transfer.endpoint][1]
            return type(error)(f"not asked again yet: {error}")
        return None

    def _give(self, attempt: _Attempt) -> None:
        assert not attempt.ended
        assert not attempt.moving
        attempt.moving = True
        attempt.given += 1
        self.effects.append(Give(attempt.transfer, attempt.write))

    def _avoid(self, attempt: _Attempt, error: KVStoreError, now_ns: int) -> None:
        self._avoided = {name: one for name, one in self._avoided.items() if one[0] > now_ns}
        self._avoided[attempt.transfer.endpoint] = now_ns + AVOIDED_NS, error

    def _fail(self, attempt: _Attempt, error: KVStoreError, good: bytes = b"") -> None:
        missing = good or bytes(len(attempt.transfer.remote))
        moving = attempt.moving
        self._end(attempt, missing, error, settled=not moving)
        if moving:
            self._replace(at_once=not self._patient)

    def _end(
        self, attempt: _Attempt, good: bytes, error: KVStoreError | None, *, settled: bool
    ) -> None:
        transfer = attempt.transfer
        attempt.ended = True
        if settled:
            del self._attempts[transfer.number]
            self.in_flight_bytes -= transfer.total_bytes
        self.events.append(TransferEnd(transfer.number, good, error, settled, attempt.given > 0))
        if self._waiting:
            self._replace(at_once=False)

    def _replace(self, *, at_once: bool) -> None:
        if not (self.up or self._waiting):
            return
        self.up = False
        self._waiting = not at_once and any(
            one.moving and not one.ended for one in self._attempts.values()
        )
        if not self._waiting:
            self._contacting = None
            self.effects.append(Replace())
