"""The contract of all transports, as checks that need no test framework.

::

    contract = TransportContract(open_pair)
    for check in TransportContract.CHECKS:
        getattr(contract, check)()      # AssertionError says what was broken

``open_pair`` opens a :class:`TransportPair`: two transports, and something that passes time.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final, Protocol, TypeVar

from kvstore.protocol.errors import (
    CapacityError,
    InvalidArgument,
    KVStoreError,
    NotFound,
    TransferTimeout,
)
from kvstore.testing.transfer_pages import Bytes, TransferPages, any_memory
from kvstore.transport.base import (
    TICKET_BYTES,
    PageTransfer,
    TransferEnd,
    TransferSettled,
    Transport,
    TransportEvent,
)
from kvstore.transport.memory import Fate, MemoryNetwork
from kvstore.transport.tcp import TcpTransport

IN_FLIGHT_BYTES: Final = 32 << 20
"""The bound of the reader of every pair."""
WAIT_S: Final = 20.0
SHORT_S: Final = 0.3
"""Deadline of transfers that are meant to miss it."""
SILENT: Final = "silent"
_STEP_NS: Final = 1_000_000


class TransportPair(Protocol):
    """Two open transports.

    Attributes:
        owner: grants tickets.
        reader: reads from the owner, and writes to it; 32 MiB in flight at most.
        silent: endpoint of a peer that accepts transfers and never says anything.
    """

    owner: Transport
    reader: Transport
    silent: str

    def now_ns(self) -> int:
        """The time that deadlines are compared with."""

    def memory(self, size: int) -> Bytes:
        """Zeroed memory, shape (size,), that both transports have registered."""

    def wait(self) -> None:
        """Let some time pass, at most until the reader has something to poll."""

    def close(self) -> None:
        """Release everything."""


class TcpPair:
    """A pair over TCP on loopback.

    Args:
        server: for connections to the owner; None = no TLS.
        client: of the reader.
    """

    def __init__(
        self, server: ssl.SSLContext | None = None, client: ssl.SSLContext | None = None
    ) -> None:
        self.owner: Transport = TcpTransport("127.0.0.1:0", IN_FLIGHT_BYTES, server=server)
        self.reader: Transport = TcpTransport("", IN_FLIGHT_BYTES, client=client)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.silent = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def now_ns(self) -> int:
        """See :class:`TransportPair`."""
        return time.monotonic_ns()

    def memory(self, size: int) -> Bytes:
        """See :class:`TransportPair`; this transport needs none."""
        return any_memory(size)

    def wait(self) -> None:
        """See :class:`TransportPair`."""
        select.select([self.reader], [], [], 0.05)

    def close(self) -> None:
        """See :class:`TransportPair`."""
        self.reader.close()
        self.owner.close()
        self._listener.close()


class MemoryPair:
    """A pair of a network in memory.

    Args:
        late_ns: bytes that did not come before the end of a transfer come so long after it.
    """

    def __init__(self, late_ns: int = -1) -> None:
        def fate(_by: str, peer: str, _transfer: PageTransfer) -> Fate:
            pages = 0 if peer == SILENT else -1
            return Fate(delay_ns=2 * _STEP_NS, pages=pages, late_ns=late_ns)

        self.network = MemoryNetwork(fate)
        self.owner: Transport = self.network.open("owner", IN_FLIGHT_BYTES)
        self.reader: Transport = self.network.open("reader", IN_FLIGHT_BYTES)
        self._silent = self.network.open(SILENT, IN_FLIGHT_BYTES)
        self.silent = SILENT

    def now_ns(self) -> int:
        """See :class:`TransportPair`."""
        return self.network.now_ns

    def memory(self, size: int) -> Bytes:
        """See :class:`TransportPair`; this transport needs none."""
        return any_memory(size)

    def wait(self) -> None:
        """See :class:`TransportPair`."""
        self.network.step(self.network.now_ns + _STEP_NS)

    def close(self) -> None:
        """See :class:`TransportPair`."""
        for each in (self.reader, self.owner, self._silent):
            each.close()


Ended = TypeVar("Ended", TransferEnd, TransferSettled)


class TransportDriver:
    """Polls the reader of a pair, and lets time pass while it waits.

    Args:
        open_pair: opens the pair.

    Attributes:
        owner: of the pair, as are ``reader`` and ``silent``.
        left: what was polled of the reader and not asked for yet.
    """

    def __init__(self, open_pair: Callable[[], TransportPair]) -> None:
        self._pair = open_pair()
        self.owner, self.reader = self._pair.owner, self._pair.reader
        self.silent = self._pair.silent
        self.left: list[TransportEvent] = []
        self._found = self._unsaid = 0  # polls that found something; with no readable descriptor

    def pages(self, page_bytes: int, count: int, *, gap: int = 0) -> TransferPages:
        """Pages in memory that both transports know."""
        pages = TransferPages(page_bytes, count, gap=gap, memory=self._pair.memory)
        addresses = self.owner.addresses(pages.granted())
        give_up_s = time.monotonic() + WAIT_S
        while addresses is None:
            assert time.monotonic() < give_up_s, "the owner's memory is never registered"
            self._pair.wait()
            addresses = self.owner.addresses(pages.granted())
        pages.addresses = addresses
        return pages

    def now_ns(self) -> int:
        """The time that deadlines are compared with."""
        return self._pair.now_ns()

    def after(self, seconds: float) -> int:
        """A deadline so long from now."""
        return self.now_ns() + int(seconds * 1e9)

    def end(self, number: int) -> TransferEnd:
        """Wait for the end of a transfer."""
        found = self._wait(TransferEnd, number)
        assert isinstance(found, TransferEnd)
        return found

    def settle(self, end: TransferEnd) -> None:
        """Wait until the transfer is settled."""
        if not end.settled:
            self._wait(TransferSettled, end.number)

    def close(self) -> None:
        """Release everything."""
        self._pair.close()

    def _wait(self, kind: type[Ended], number: int) -> Ended:
        give_up_s = time.monotonic() + WAIT_S + 1
        while True:
            for at, one in enumerate(self.left):
                if isinstance(one, kind) and one.number == number:
                    del self.left[at]
                    return one
            assert time.monotonic() < give_up_s, f"transfer {number}: no {kind.__name__}"
            self._pair.wait()
            readable = _readable(self.reader)
            found = self.reader.poll()
            self._found += bool(found)
            self._unsaid += bool(found) and not readable
            # One may come between both calls, but not most of them.
            assert self._unsaid <= 1 + self._found // 8, "the descriptor was not readable"
            self.left += found


class TransportContract:
    """The checks.

    Args:
        open_pair: opens two transports of the kind.
    """

    CHECKS: ClassVar[tuple[str, ...]] = (
        "check_pages_arrive_byte_for_byte",
        "check_a_wrong_page_is_told_from_right_ones",
        "check_only_a_ticket_that_is_open_opens_pages",
        "check_a_ticket_opens_exactly_its_ranges",
        "check_each_of_many_transfers_ends_once",
        "check_bytes_in_flight_are_bounded",
        "check_a_silent_peer_costs_no_more_than_the_deadline",
        "check_a_cancelled_transfer_ends_and_others_go_on",
        "check_nobody_there_is_an_end_with_an_error",
        "check_written_pages_can_be_read_where_they_went",
        "check_arguments_that_do_not_match_are_refused",
        "check_a_closed_transport_leaves_nothing_behind",
    )

    def __init__(self, open_pair: Callable[[], TransportPair]) -> None:
        self._open = open_pair

    def check_pages_arrive_byte_for_byte(self) -> None:
        """Pages of several sizes arrive whole, also where they do not touch, and again."""
        pair = TransportDriver(self._open)
        for number, (size, count, gap) in enumerate(
            [(1, 1, 0), (512, 300, 0), (4096, 33, 64), (1 << 20, 5, 0), (3 << 20, 3, 4096)]
        ):
            pages, ticket = pair.pages(size, count, gap=gap), _ticket(number)
            pair.owner.grant(ticket, pages.granted(), pair.after(WAIT_S))
            for again in (0, 100):
                transfer = pages.transfer(
                    number + again, pair.owner.endpoint, ticket, pair.after(WAIT_S)
                )
                pair.reader.read(transfer)
                end = pair.end(number + again)
                assert end == TransferEnd(number + again, b"\1" * count, None, settled=True), end
                assert (pages.arrived == pages.owned).all(), "other bytes arrived"
                pages.arrived[:] = 0
            pair.owner.revoke(ticket)
        assert pair.reader.stats()["in_flight_bytes"] == 0
        pair.close()

    def check_a_wrong_page_is_told_from_right_ones(self) -> None:
        """A page whose bytes differ from its digest is WRONG, its neighbours are RIGHT."""
        pair = TransportDriver(self._open)
        pages = pair.pages(8192, 6)
        pair.owner.grant(_ticket(0), pages.granted(), pair.after(WAIT_S))
        pages.owned[2, 77] ^= 1
        pages.owned[5, 0] ^= 128
        pair.reader.read(pages.transfer(1, pair.owner.endpoint, _ticket(0), pair.after(WAIT_S)))
        end = pair.end(1)
        assert end.good == b"\1\1\2\1\1\2", end
        assert end.error is None
        pair.close()

    def check_only_a_ticket_that_is_open_opens_pages(self) -> None:
        """A wrong, ended or revoked ticket, or one for writing, brings an error and no byte."""
        pair = TransportDriver(self._open)
        pages = pair.pages(4096, 4)
        granted, later = pages.granted(), pair.after(WAIT_S)
        pair.owner.grant(_ticket(0), granted, later)
        pair.owner.grant(_ticket(2), granted, later)
        pair.owner.grant(_ticket(3), granted, later, write=True)
        pair.owner.grant(_ticket(1), granted, pair.after(0))
        pair.owner.revoke(_ticket(2))
        pair.owner.revoke(_ticket(9))
        for number in (1, 2, 3, 4):
            pair.reader.read(pages.transfer(number, pair.owner.endpoint, _ticket(number), later))
            end = pair.end(number)
            assert isinstance(end.error, NotFound), f"ticket {number}: {end}"
            assert end.good == bytes(4)
            pair.settle(end)
        pair.reader.write(pages.transfer(5, pair.owner.endpoint, _ticket(0), later))
        assert isinstance(pair.end(5).error, NotFound), "a ticket for reading was written with"
        assert pages.untouched
        pair.reader.read(pages.transfer(6, pair.owner.endpoint, _ticket(0), later))
        assert pair.end(6).good == b"\1" * 4, "the open ticket is still open"
        pair.close()

    def check_a_ticket_opens_exactly_its_ranges(self) -> None:
        """A page outside the ticket, a longer or shifted one, or one twice: refused as a whole."""
        pair = TransportDriver(self._open)
        pages = pair.pages(4096, 4)
        later = pair.after(WAIT_S)
        pair.owner.grant(_ticket(0), pages.granted()[:3], later)
        true = list(pages.ranges)
        asked = (
            true,
            [one._replace(offset=one.offset + 8) for one in true],
            [true[0]._replace(length=8192)],
            [true[0]._replace(length=1)],
            [one._replace(generation=1) for one in true[:2]],
            [true[0], true[1], true[0]],
        )
        for number, pages.ranges in enumerate(asked):
            count = slice(0, len(pages.ranges))
            pair.reader.read(pages.transfer(number, pair.owner.endpoint, _ticket(0), later, count))
            end = pair.end(number)
            assert isinstance(end.error, InvalidArgument), f"{number}: {end}"
            assert end.good == bytes(len(pages.ranges))
            pair.settle(end)
        assert pages.untouched
        pages.ranges = true
        pair.reader.read(pages.transfer(9, pair.owner.endpoint, _ticket(0), later, slice(1, 3)))
        assert pair.end(9).good == b"\1\1", "a part of what it opens"
        pair.close()

    def check_each_of_many_transfers_ends_once(self) -> None:
        """Transfers under way together each have one end, and the descriptor says so."""
        pair = TransportDriver(self._open)
        pages = pair.pages(2048, 64)
        later = pair.after(WAIT_S)
        pair.owner.grant(_ticket(0), pages.granted(), later)
        assert not pair.reader.poll()
        assert not _readable(pair.reader), "there is nothing to poll"
        for number in range(64):
            pages_of = slice(number, number + 1)
            pair.reader.read(
                pages.transfer(number, pair.owner.endpoint, _ticket(0), later, pages_of)
            )
        ends = [pair.end(number).number for number in range(64)]
        assert not pair.left, "a transfer has two ends"
        assert sorted(ends) == list(range(64))
        assert (pages.arrived == pages.owned).all()
        pair.close()

    def check_bytes_in_flight_are_bounded(self) -> None:
        """What would exceed the bound ends at once, and costs the others nothing."""
        pair = TransportDriver(self._open)
        pages = pair.pages(1 << 20, 33)
        later = pair.after(WAIT_S)
        pair.owner.grant(_ticket(0), pages.granted(), later)
        pair.reader.read(pages.transfer(1, pair.owner.endpoint, _ticket(0), later))
        end = pair.end(1)
        assert isinstance(end.error, CapacityError), end
        assert end.settled
        assert pages.untouched
        pair.reader.read(pages.transfer(2, pair.owner.endpoint, _ticket(0), later, slice(0, 32)))
        assert pair.end(2).good == b"\1" * 32
        pair.close()

    def check_a_silent_peer_costs_no_more_than_the_deadline(self) -> None:
        """The transfer ends by its deadline; others go on; after it is settled nothing changes."""
        pair = TransportDriver(self._open)
        pages, others = pair.pages(1 << 20, 9), pair.pages(4096, 2)
        later = pair.after(WAIT_S)
        pair.owner.grant(_ticket(0), others.granted(), later)
        pair.reader.read(pages.transfer(1, pair.silent, _ticket(1), later))
        pair.reader.read(others.transfer(2, pair.owner.endpoint, _ticket(0), later))
        assert pair.end(2).good == b"\1\1", "a silent peer holds up others"
        deadline_ns = pair.after(SHORT_S)
        pair.reader.read(pages.transfer(3, pair.silent, _ticket(1), deadline_ns))
        end = pair.end(3)
        assert isinstance(end.error, TransferTimeout), end
        assert end.good == bytes(9)
        assert pair.now_ns() < deadline_ns + 2 * 10**9, "long after the deadline"
        pair.settle(end)
        pair.reader.cancel(1)
        pair.settle(pair.end(1))
        assert pair.reader.stats()["in_flight_bytes"] == 0
        pair.close()

    def check_a_cancelled_transfer_ends_and_others_go_on(self) -> None:
        """Its end comes long before its deadline; a number that is not under way is ignored."""
        pair = TransportDriver(self._open)
        pages = pair.pages(4096, 9)
        later = pair.after(WAIT_S)
        pair.owner.grant(_ticket(0), pages.granted(), later)
        pair.reader.read(pages.transfer(1, pair.silent, _ticket(1), later))
        pair.reader.cancel(1)
        pair.reader.cancel(7)
        end = pair.end(1)
        assert isinstance(end.error, KVStoreError)
        assert pair.now_ns() < later, "it waited for its deadline"
        pair.settle(end)
        pair.reader.read(pages.transfer(2, pair.owner.endpoint, _ticket(0), later))
        assert pair.end(2).good == b"\1" * 9
        pair.close()

    def check_nobody_there_is_an_end_with_an_error(self) -> None:
        """A peer that has closed, or was never there, is an end, not an exception."""
        pair = TransportDriver(self._open)
        pages = pair.pages(4096, 2)
        later = pair.after(WAIT_S)
        pair.owner.grant(_ticket(0), pages.granted(), later)
        pair.reader.read(pages.transfer(1, pair.owner.endpoint, _ticket(0), later))
        assert pair.end(1).good == b"\1\1"
        endpoint = pair.owner.endpoint
        pair.owner.close()
        pages.arrived[:] = 0
        pair.reader.read(pages.transfer(2, endpoint, _ticket(0), later))
        end = pair.end(2)
        assert isinstance(end.error, KVStoreError)
        assert end.good == bytes(2)
        assert pair.now_ns() < later, "it waited for its deadline"
        pair.settle(end)
        assert pages.untouched
        pair.close()

    def check_written_pages_can_be_read_where_they_went(self) -> None:
        """A write has ended when the peer can read the bytes; no other byte has changed."""
        pair = TransportDriver(self._open)
        pages, source = pair.pages(4096, 6), pair.pages(4096, 7)
        later, before = pair.after(WAIT_S), pages.owned.copy()
        pair.owner.grant(_ticket(0), pages.granted()[1:5], later, write=True)
        source.arrived[:] = source.owned  # what a transfer calls local
        written = source.transfer(1, pair.owner.endpoint, _ticket(0), later, slice(1, 5))
        pair.reader.write(written)
        end = pair.end(1)
        assert end.good == b"\1" * 4, end
        assert (pages.owned[1:5] == source.owned[1:5]).all(), "it cannot be read yet"
        assert (pages.owned[[0, 5]] == before[[0, 5]]).all()
        assert pair.owner.revoke(_ticket(0), ended=True)
        source.arrived[:] = 0
        pair.reader.write(source.transfer(2, pair.owner.endpoint, _ticket(0), later, slice(1, 5)))
        assert isinstance(pair.end(2).error, NotFound)
        assert (pages.owned[1:5] == source.owned[1:5]).all(), "written with a revoked ticket"
        pair.close()

    def check_arguments_that_do_not_match_are_refused(self) -> None:
        """They raise InvalidArgument, and have no end."""
        pair = TransportDriver(self._open)
        pages = pair.pages(4096, 3)
        later = pair.after(WAIT_S)
        good = pages.transfer(1, pair.owner.endpoint, _ticket(0), later)
        endpoint, remote = good.endpoint, pages.ranges
        for wrong in (
            PageTransfer(1, endpoint, b"", remote, good.local, good.seeds, good.digests, later),
            PageTransfer(1, endpoint, good.ticket, [], good.local, good.seeds, b"", later),
            PageTransfer(1, endpoint, good.ticket, remote, good.local, good.seeds, b"", later),
            PageTransfer(
                1, endpoint, good.ticket, remote[:2], good.local, good.seeds, good.digests, later
            ),
            PageTransfer(
                1, endpoint, good.ticket, [*remote[:2], remote[2]._replace(length=1)], good.local,
                good.seeds, good.digests, later,
            ),
        ):  # fmt: skip
            _refused(lambda wrong=wrong: pair.reader.read(wrong))  # type: ignore[misc]
        pair.owner.grant(_ticket(0), pages.granted(), later)
        _refused(lambda: pair.owner.grant(_ticket(0), pages.granted(), later))
        _refused(lambda: pair.owner.grant(b"short", pages.granted(), later))
        assert not pair.reader.poll()
        pair.close()

    def check_a_closed_transport_leaves_nothing_behind(self) -> None:
        """Closing under way takes a limited time, may be repeated, and frees all it had."""
        threads, descriptors = set(threading.enumerate()), _descriptors()
        pair = TransportDriver(self._open)
        pages = pair.pages(1 << 20, 8)
        later = pair.after(WAIT_S)
        pair.owner.grant(_ticket(0), pages.granted(), later)
        pair.reader.read(pages.transfer(1, pair.owner.endpoint, _ticket(0), later))
        pair.reader.read(pages.transfer(2, pair.silent, _ticket(0), later))
        closing = threading.Thread(target=pair.reader.close)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive(), "close does not return"
        kept = pages.arrived.copy()
        pair.close()
        assert (pages.arrived == kept).all(), "bytes arrived after the end"
        assert set(threading.enumerate()) <= threads, "threads are left"
        assert _descriptors() <= descriptors, "descriptors are left"


def _ticket(number: int) -> bytes:
    return number.to_bytes(TICKET_BYTES, "big")


def _refused(call: Callable[[], None]) -> None:
    try:
        call()
    except InvalidArgument:
        return
    raise AssertionError("arguments that do not match are accepted")


def _readable(transport: Transport) -> bool:
    return bool(select.select([transport], [], [], 0)[0])


def _descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])
