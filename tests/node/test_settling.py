"""Goal: what a client says is over is freed, and nothing else; it gets the lease it may have."""

import pytest

from kvstore.node.describe import describe
from kvstore.node.requests import NodeLimits
from kvstore.protocol import wire
from kvstore.protocol.page import page_keys
from kvstore.state.tree.sessions import Peer
from tests.node.test_protocol import IDENTITY, KEYS, LEASE_MS_MAX, SHARDS, Wire, node

__all__ = ["node"]

SIZE = 6 * 4096
ORIGIN = b"origin-a"


def connect(node: Wire, connection: int, number: int, origin: bytes = ORIGIN, session: bytes = b""):
    node.node.connected(connection, Peer(77))
    minor = wire.PROTOCOL_MINOR if number else 2
    return node.ask(connection, wire.Hello(0, 1, minor, "engine", session, origin, number))


def begin(node: Wire, connection: int, number: int, origin: bytes = ORIGIN) -> bytes:
    """A connection of a session of its own, in the middle of a put; its session's token."""
    welcome = connect(node, connection, number, origin)
    assert isinstance(welcome, wire.Welcome)
    node.ask(connection, wire.OpenSpace(0, IDENTITY, SHARDS))
    node.begin(connection, KEYS)
    return welcome.session


def lose(node: Wire, connection: int) -> None:
    node.node.disconnected(connection, node.now_ns, ended=False)


def limbo(node: Wire) -> int:
    left: int = describe(node.node).host.limbo_bytes
    return left


def refused(node: Wire) -> int:
    return node.node.pages.counts["refused_protocol"]


def test_slots_of_a_lost_writer_are_free_once_the_same_client_says_it_has_settled(node):
    session = begin(node, 2, number=1)
    lose(node, 2)
    assert limbo(node) == SIZE

    for connection, origin, left in ((3, b"origin-b", SIZE), (4, b"", SIZE), (5, ORIGIN, 0)):
        assert isinstance(connect(node, connection, 2, origin, session), wire.Welcome)
        node.ask(connection, wire.Settled(2))
        assert limbo(node) == left, origin


def test_a_stale_settled_frees_nothing_of_the_connections_it_does_not_name(node):
    session = begin(node, 2, number=1)
    lose(node, 2)
    connect(node, 3, 2, session=session)

    node.ask(3, wire.Settled(1))
    assert limbo(node) == SIZE, "it was said of what came before the first"
    lose(node, 3)
    connect(node, 4, 3, session=session)
    node.ask(4, wire.Settled(2))

    assert limbo(node) == 0, "the number counts, not the connection it came on"


def test_a_connection_cannot_settle_itself_nor_what_comes_after_it(node):
    session = begin(node, 2, number=5)
    lose(node, 2)
    connect(node, 3, 6, session=session)

    assert node.ask(3, wire.Settled(7)) is None
    assert (limbo(node), refused(node)) == (SIZE, 1)
    node.ask(3, wire.Settled(6))
    assert limbo(node) == 0


def test_only_what_is_lost_is_settled(node):
    session = begin(node, 2, number=1, origin=b"other")
    connect(node, 3, 2, session=session)

    node.ask(3, wire.Settled(2))

    assert describe(node.node).host.writing_bytes == SIZE


@pytest.mark.parametrize("number", [0, 9])
def test_a_settled_that_names_nothing_frees_nothing(node, number):
    session = begin(node, 2, number=number and number - 1)
    lose(node, 2)
    connect(node, 3, number, session=session)

    node.ask(3, wire.Settled())
    assert limbo(node) == SIZE, "a client of protocol 1.2 may mean a connection it has lost since"

    node.node.process_ended(77, node.now_ns)
    assert limbo(node) == 0


def test_connections_without_a_number_are_never_settled_by_one_that_has_one(node):
    session = begin(node, 2, number=0)
    lose(node, 2)
    connect(node, 3, 1, session=session)

    node.ask(3, wire.Settled(1))

    assert limbo(node) == SIZE


def test_a_connection_that_closes_while_what_it_settled_is_given_back_is_over():
    """Taken for lost once more it would have been given up a minute after its end."""
    limits = NodeLimits(1 << 20, LEASE_MS_MAX, turn_pages=2)
    made = Wire(limits)
    nobody_sees_its_end = Peer(77, watched=False)
    made.node.connected(1, nobody_sees_its_end)
    first = wire.Hello(0, 1, wire.PROTOCOL_MINOR, "engine", b"", ORIGIN, 1)
    welcome = made.ask(1, first)
    assert isinstance(welcome, wire.Welcome)
    made.ask(1, wire.OpenSpace(0, IDENTITY, SHARDS))
    for start in range(0, 400, 100):
        made.begin(1, page_keys(range(start, start + 8), 2))
    made.node.connected(2, nobody_sees_its_end)
    made.ask(2, wire.Hello(0, 1, wire.PROTOCOL_MINOR, "engine", welcome.session, ORIGIN, 2))

    made.ask(2, wire.Settled(2))
    assert made.node.unfinished, "there is more to give back than one turn does"
    made.node.disconnected(1, made.now_ns, ended=False)
    while made.node.unfinished:
        made.node.go_on(made.now_ns)

    assert list(made.node.processes) == [2]
    assert len(made.node.leaving.retirement) == 0
    made.node.advance(made.now_ns + 2 * limits.unwatched_ns)


def lost_writer() -> Wire:
    """A writer that nobody watches, and six puts of two pages each: three are given up a turn."""
    made = Wire(NodeLimits(1 << 20, LEASE_MS_MAX, turn_pages=5))
    made.node.connected(1, Peer(77, watched=False))
    made.ask(1, wire.Hello(0, 1, wire.PROTOCOL_MINOR, "engine", b"", ORIGIN, 1))
    made.ask(1, wire.OpenSpace(0, IDENTITY, SHARDS))
    for start in range(0, 600, 100):
        made.begin(1, page_keys(range(start, start + 4), 2))
    made.node.disconnected(1, made.now_ns, ended=False)
    return made


def test_one_turn_gives_up_few_puts_of_a_connection_that_was_lost():
    made = lost_writer()
    assert limbo(made) == 6 * 4096
    assert len(made.node.leaving.retirement) == 0, "not all that it may write is in LIMBO"

    while made.node.unfinished:
        made.node.go_on(made.now_ns)
    assert limbo(made) == 12 * 4096
    assert made.node.pages.counts["lost_puts"] == 6
    assert len(made.node.leaving.retirement) == 1


def test_a_lost_writer_that_ends_before_all_its_puts_are_given_up_holds_nothing():
    made = lost_writer()

    made.node.process_ended(77, made.now_ns)
    while made.node.unfinished:
        made.node.go_on(made.now_ns)

    assert not made.node.processes
    assert limbo(made) == 0
    assert len(made.node.leaving.retirement) == 0
    assert made.node.pages.slots.stats().writing_bytes == 0


def test_a_process_is_waited_for_while_a_connection_of_it_may_still_say_hello(node):
    node.node.connected(2, Peer(77))
    node.node.connected(3, Peer(77))
    assert isinstance(node.ask(2, wire.Hello(0, 9, 0, "refused")), wire.Failure)
    lose(node, 3)

    assert node.node.waits_for(77), "what it holds later would never come back"
    lose(node, 2)

    assert not node.node.waits_for(77)


def test_when_a_process_ends_its_connections_without_a_session_are_closed_too(node):
    """A child of it may hold them, and would hold on to what nobody gives back."""
    begin(node, 2, number=1)
    node.node.connected(3, Peer(77))
    node.node.connected(4, Peer(78))

    node.node.process_ended(77, node.now_ns)

    assert sorted(node.node.closing) == [2, 3]


def test_a_hello_that_was_overtaken_takes_nothing_from_the_newer_connection(node):
    session = begin(node, 2, number=2)

    answer = connect(node, 3, 1, session=session)

    assert isinstance(answer, wire.Failure)
    assert answer.code == "protocol"
    assert 3 not in node.node.processes
    assert describe(node.node).host.writing_bytes == SIZE
    assert not node.node.processes[2].lost


def test_a_second_hello_gives_the_older_connections_of_its_origin_up(node):
    session = begin(node, 2, number=1)

    connect(node, 3, 2, session=session)

    assert node.node.processes[2].lost
    assert limbo(node) == SIZE, "it may still be written to"


@pytest.mark.parametrize(
    ("asked_ms", "granted_ms"), [(1, 1), (LEASE_MS_MAX, LEASE_MS_MAX), (1 << 40, LEASE_MS_MAX)]
)
def test_a_lease_lasts_as_long_as_was_asked_or_as_the_node_allows(node, asked_ms, granted_ms):
    node.store(1, KEYS)

    leased = node.ask(1, wire.Acquire(0, 9, 0, 0, KEYS.packed, asked_ms))

    assert isinstance(leased, wire.Acquired)
    assert leased.lease_ms == granted_ms
    node.node.advance(node.now_ns + granted_ms * 1_000_000 - 1)
    assert node.node.pages.counts["expired_leases"] == 0
    node.node.advance(node.now_ns + granted_ms * 1_000_000)
    assert node.node.pages.counts["expired_leases"] == 1
    node.ask(1, wire.Release(9))
