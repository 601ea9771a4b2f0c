"""Goal: transfers in memory do what their fate says, the same each time."""

from kvstore.protocol.errors import PeerUnreachable, TransferTimeout
from kvstore.testing.transfer_pages import TransferPages
from kvstore.transport.base import TransferEnd, TransferSettled
from kvstore.transport.memory import Fate, MemoryNetwork

TICKET = b"t" * 16
MS = 1_000_000


def a_read(fate, deadline_ns=10 * MS):
    """A network with one read of three pages under way."""
    network, pages = MemoryNetwork(lambda _by, _peer, _transfer: fate), TransferPages(64, 3)
    owner, reader = network.open("owner", 1 << 20), network.open("reader", 1 << 20)
    owner.grant(TICKET, pages.granted(), 100 * MS)
    reader.read(pages.transfer(1, "owner", TICKET, deadline_ns))
    return network, owner, reader, pages


def closed(*transports):
    for each in transports:
        each.close()


def test_bytes_arrive_when_their_delay_has_passed():
    network, owner, reader, pages = a_read(Fate(delay_ns=5 * MS))
    network.step(5 * MS - 1)
    assert not reader.poll()
    assert pages.untouched

    network.step(5 * MS)

    assert reader.poll() == [TransferEnd(1, b"\1\1\1", None, settled=True)]
    assert (pages.arrived == pages.owned).all()
    closed(owner, reader)


def test_lost_bytes_end_the_transfer_at_its_deadline():
    network, owner, reader, pages = a_read(Fate(pages=1))
    network.step(10 * MS - 1)
    assert not reader.poll()

    network.step(10 * MS)

    (end,) = reader.poll()
    assert isinstance(end.error, TransferTimeout)
    assert (end.good, end.settled) == (b"\1\0\0", True)
    assert not pages.arrived[1:].any()
    closed(owner, reader)


def test_a_broken_connection_ends_the_transfer_when_it_breaks():
    network, owner, reader, _ = a_read(Fate(delay_ns=MS, pages=2, broken=True))

    network.step(MS)

    (end,) = reader.poll()
    assert isinstance(end.error, PeerUnreachable)
    assert end.good == b"\1\1\0"
    closed(owner, reader)


def test_late_bytes_land_after_the_end_and_before_it_is_settled():
    network, owner, reader, pages = a_read(Fate(pages=1, late_ns=5 * MS))
    network.step(10 * MS)
    (end,) = reader.poll()
    assert (end.good, end.settled) == (b"\1\0\0", False)
    assert reader.stats()["in_flight_bytes"] == 3 * 64
    pages.arrived[:] = 0  # somebody else's by now, if nobody waited

    network.step(15 * MS)

    assert reader.poll() == [TransferSettled(1)]
    assert (pages.arrived[1:] == pages.owned[1:]).all()
    assert not pages.arrived[0].any(), "a page that had arrived arrives once"
    assert reader.stats()["in_flight_bytes"] == 0
    assert network.next_ns() is None
    closed(owner, reader)


def test_a_delay_beyond_the_deadline_brings_nothing():
    network, owner, reader, pages = a_read(Fate(delay_ns=11 * MS))

    network.step(50 * MS)

    (end,) = reader.poll()
    assert (end.good, end.settled) == (bytes(3), True)
    assert pages.untouched
    closed(owner, reader)


def test_damaged_pages_are_wrong():
    network, owner, reader, _ = a_read(Fate(damaged=(1,)))

    network.step(0)

    assert reader.poll() == [TransferEnd(1, b"\1\2\1", None, settled=True)]
    closed(owner, reader)


def test_the_end_of_a_ticket_ends_a_read_that_is_under_way():
    network, owner, reader, pages = a_read(Fate(delay_ns=5 * MS))
    owner.revoke(TICKET)

    network.step(5 * MS)

    (end,) = reader.poll()
    assert isinstance(end.error, PeerUnreachable)
    assert pages.untouched
    closed(owner, reader)


def test_a_ticket_past_its_deadline_lets_nothing_through():
    network, owner, reader, pages = a_read(Fate(delay_ns=101 * MS), deadline_ns=200 * MS)

    network.step(150 * MS)

    (end,) = reader.poll()
    assert isinstance(end.error, PeerUnreachable)
    assert pages.untouched
    closed(owner, reader)


def test_nothing_arrives_at_a_closed_reader():
    network, owner, reader, pages = a_read(Fate(delay_ns=5 * MS, late_ns=MS))
    reader.close()

    network.step(50 * MS)

    assert pages.untouched
    owner.close()
