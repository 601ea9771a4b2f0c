"""Goal: what one session asks for never keeps the others out, nor takes memory without measure."""

from random import Random

import msgspec
import pytest

from kvstore.node.describe import describe
from kvstore.node.hello import LOST_MAX
from kvstore.node.node import Node
from kvstore.node.requests import LEASE_PAGES_MAX, PUT_PAGES_MAX, NodeLimits
from kvstore.node.waiting import (
    SESSION_WAITERS_ALWAYS,
    SESSION_WAITERS_MAX,
    SESSION_WAITING_BYTES_MAX,
    WAITERS_MAX,
    Waiter,
    WaitingRoom,
)
from kvstore.protocol import wire
from kvstore.protocol.page import PrefixKeys, SpaceIdentity, page_keys
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import SlotTable
from tests.node.test_protocol import DIGEST, IDENTITY, KEYS, SHARDS, Wire

MS = 1_000_000
WAIT_MS = 100
HELLO = wire.Hello(0, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "forgetful")


def waiter(number: int, session: bytes = b"a", size_bytes: int = 32) -> Waiter:
    return Waiter(1, session, None, size_bytes, 0, 1 << 60, ("thing", number))


@pytest.fixture
def node() -> Wire:
    """A node on which connection 1 writes KEYS and does not commit."""
    made = Wire()
    made.join(1)
    made.begin(1, KEYS)
    return made


# What waits


def test_a_session_may_wait_so_often_and_others_still_may(node):
    node.join(2)
    for _ in range(SESSION_WAITERS_MAX):
        assert node.lookup(2, KEYS, wait_ms=WAIT_MS) is None
    assert node.lookup(2, KEYS, wait_ms=WAIT_MS) == (0, 6), "it is answered at once"

    node.join(3)
    assert node.lookup(3, KEYS, wait_ms=WAIT_MS) is None
    assert describe(node.node).waiting_requests == SESSION_WAITERS_MAX + 1


def test_the_bytes_of_waiting_messages_are_counted(node):
    node.join(2)
    # The first key is pending; the others cannot be there.
    others = Random(1).randbytes(32 * 65_535)
    keys = PrefixKeys(KEYS.packed[:32] + others)
    waited = 0
    while node.lookup(2, keys, wait_ms=WAIT_MS) is None:
        waited += 1

    assert waited == SESSION_WAITING_BYTES_MAX // len(keys.packed)
    assert describe(node.node).waiting_bytes <= SESSION_WAITING_BYTES_MAX
    node.join(3)
    assert node.lookup(3, KEYS, wait_ms=WAIT_MS) is None


def test_every_session_may_always_wait_a_few_times_however_much_the_others_do():
    room = WaitingRoom()
    number = 0
    while room.admits(b"%d" % (number // SESSION_WAITERS_MAX), 32):
        room.add(waiter(number, b"%d" % (number // SESSION_WAITERS_MAX)))
        number += 1
    assert number == WAITERS_MAX + SESSION_WAITERS_ALWAYS, "the last session found it full"

    for late in range(SESSION_WAITERS_ALWAYS):
        assert room.admits(b"late", 32)
        room.add(waiter(number + late, b"late"))
    assert not room.admits(b"late", 32)
    assert not room.admits(b"later", SESSION_WAITING_BYTES_MAX)
    room.check()


def test_what_waits_is_ready_in_the_order_in_which_it_came():
    room = WaitingRoom()
    first, second, other, due = waiter(1), waiter(1), waiter(2), waiter(3)
    due.deadline_ns = 5
    for one in (first, second, other, due):
        room.add(one)

    room.wake(("thing", 1))
    room.wake_due(5)
    room.remove(second)
    room.check()

    assert room.may_go_on
    assert [room.take(), room.take(), room.take()] == [first, due, None]
    assert room.of(1) == [other]
    assert len(room) == 1
    room.remove(other)
    room.check()
    assert room.size_bytes == 0


# What is left behind


def test_a_connection_has_so_many_leases_however_small_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.state.tree.sessions.LEASES_MAX", 3)
    made = Wire()
    made.join(1)
    made.join(2)
    made.store(1, KEYS)
    asked = [wire.Acquire(0, lease, 0, 0, KEYS[:1].packed, 100) for lease in range(1, 5)]

    answers = [made.ask(1, one) for one in asked]

    assert [type(one) for one in answers] == [*[wire.Acquired] * 3, wire.Failure]
    assert describe(made.node).leases == 3
    made.ask(1, wire.Release(2))
    for connection in (1, 2):
        again = made.ask(connection, msgspec.structs.replace(asked[3]))
        assert isinstance(again, wire.Acquired)
    check(made.node.pages)


def test_a_process_that_leaves_pages_behind_again_and_again_is_let_in_no_more():
    made = Wire()
    made.join(1)
    made.store(1, KEYS)
    for connection in range(10, 10 + LOST_MAX):
        made.node.connected(connection, Peer(77))
        hello = msgspec.structs.replace(HELLO, session=connection.to_bytes(16, "big"))
        made.node.receive(connection, hello, made.now_ns)
        made.node.receive(connection, wire.OpenSpace(0, IDENTITY, SHARDS), made.now_ns)
        made.node.receive(connection, wire.Acquire(0, 1, 0, 0, KEYS.packed, 100), made.now_ns)
        made.node.disconnected(connection, made.now_ns, ended=False)
    assert describe(made.node).leases == LOST_MAX

    made.node.connected(2, Peer(77))
    refused = made.ask(2, msgspec.structs.replace(HELLO, id=0))

    assert isinstance(refused, wire.Failure)
    assert refused.code == "capacity"
    made.join(3, pid=78)
    made.node.process_ended(77, made.now_ns)
    while made.node.unfinished:
        made.node.go_on(made.now_ns)
    assert describe(made.node).sessions_total == 2
    made.join(4, pid=77)


# Turns


def test_a_process_with_many_connections_gives_back_in_turns_what_they_held():
    made = Wire()
    made.node = small_turns(20)
    made.join(1)
    made.store(1, KEYS)
    for connection in range(10, 20):
        made.join(connection, pid=77)
        made.ask(connection, wire.Acquire(0, 1, 0, 0, KEYS.packed, 100))

    made.node.process_ended(77, made.now_ns)
    held = [describe(made.node).leases]
    while made.node.unfinished:
        made.node.go_on(made.now_ns)
        held.append(describe(made.node).leases)

    assert held == [7, 4, 1, 0], "three of six pages and their ends are a turn"


def small_turns(turn_pages: int) -> Node:
    tokens = (bytes([number]) * 16 for number in range(1, 200))
    limits = NodeLimits(1 << 30, 1000, turn_pages)
    return Node("n", b"b" * 16, SlotTable(1 << 20, 8), limits, lambda: next(tokens))


def test_one_commit_that_many_wait_for_is_told_to_them_in_turns():
    made = Wire()
    made.node = small_turns(20)
    made.join(1)
    made.join(2)
    put = made.begin(1, KEYS)
    for _ in range(10):
        assert made.lookup(2, KEYS, wait_ms=WAIT_MS) is None

    made.ask(1, wire.CommitPut(0, put, DIGEST * len(KEYS)))

    told = [len(made.found(2))]
    while made.node.unfinished:
        made.node.go_on(made.now_ns)
        told.append(len(made.found(2)))
    assert told == [3, 3, 3, 1], "each looks at six keys, and is one request"


def test_a_process_that_held_much_gives_it_back_in_turns():
    made = Wire()
    made.node = small_turns(10)
    made.join(1)
    made.join(2, pid=77)
    made.store(1, KEYS)
    for lease in range(1, 11):
        made.ask(2, wire.Acquire(0, lease, 0, 0, KEYS.packed, 100))
    turns = 0

    made.node.process_ended(77, made.now_ns)
    held = [describe(made.node).leases]
    while made.node.unfinished:
        made.node.go_on(made.now_ns)
        held.append(describe(made.node).leases)
        turns += 1

    assert held[0] == 8, "one turn"
    assert held[-1] == 0
    assert turns > 1
    assert [one.name for one in describe(made.node).sessions] == ["engine-1"]
    check(made.node.pages)


def test_leases_that_run_out_together_do_so_in_turns(monkeypatch):
    monkeypatch.setattr("kvstore.state.table.pages.EXPIRE_MAX", 10)
    made = Wire()
    made.join(1)
    made.store(1, KEYS)
    for lease in range(1, 6):
        made.ask(1, wire.Acquire(0, lease, 0, 0, KEYS.packed, 100))

    made.node.advance(made.now_ns + 100 * MS)

    assert made.node.unfinished
    while made.node.unfinished:
        made.node.go_on(made.now_ns + 100 * MS)
    assert made.node.pages.counts["expired_leases"] == 5


# Large messages


def test_a_put_of_more_pages_than_a_message_grants_goes_on_where_it_ended():
    """An old client takes ``busy`` for room that is being made, and asks for the rest again."""
    made = Wire()
    made.node = small_turns(4096)
    made.join(1)
    keys = page_keys(range(2 * (PUT_PAGES_MAX + 100)), 2)

    first = made.ask(1, wire.BeginPut(0, 1, 0, 0, keys.packed, b""))

    assert isinstance(first, wire.PutGranted)
    assert list(first.statuses) == (
        [PageStatus.GRANTED] * PUT_PAGES_MAX + [PageStatus.NO_ROOM] * 100
    )
    assert first.busy
    made.ask(1, wire.CommitPut(0, 1, DIGEST * PUT_PAGES_MAX))
    rest = keys[PUT_PAGES_MAX:]
    second = made.ask(1, wire.BeginPut(0, 2, 0, 0, rest.packed, rest.parent))
    assert isinstance(second, wire.PutGranted)
    assert set(second.statuses) == {PageStatus.GRANTED}
    assert not second.busy


def test_a_put_whose_first_page_has_no_head_does_not_ask_to_come_again():
    made = Wire()
    made.join(1)
    keys = page_keys(range(2 * (PUT_PAGES_MAX + 5)), 2)[1:]

    answer = made.ask(1, wire.BeginPut(0, 1, 0, 0, keys.packed, keys.parent))

    assert isinstance(answer, wire.PutGranted)
    assert set(answer.statuses) == {PageStatus.NO_PARENT}
    assert not answer.busy


def test_a_lease_of_a_long_run_is_of_its_leading_pages():
    made = Wire()
    made.node = Node(
        "n", b"b" * 16, SlotTable(1 << 24, 2), NodeLimits(1 << 40, 1000), lambda: b"t" * 16
    )
    made.join(1)
    keys = page_keys(range(2 * (LEASE_PAGES_MAX + 10)), 2)
    for start in range(0, len(keys), PUT_PAGES_MAX):
        made.store(1, keys[start : start + PUT_PAGES_MAX])

    leased = made.ask(1, wire.Acquire(0, 1, 0, 0, keys.packed, 1000))

    assert isinstance(leased, wire.Acquired)
    assert len(leased.digests) == 16 * LEASE_PAGES_MAX


def test_a_shard_named_a_million_times_is_refused_at_once(node):
    answer = node.ask(1, wire.Lookup(0, 0, [0] * 1_000_000, KEYS.packed, 1))

    assert isinstance(answer, wire.Failure)
    assert answer.field == "shards"


def test_more_windows_than_a_lookup_looks_at_are_refused(node):
    windows = [
        msgspec.structs.replace(SHARDS[0], group=f"w{at}", window_pages=at) for at in range(1, 10)
    ]
    opened = node.ask(1, wire.OpenSpace(0, IDENTITY, windows))
    assert isinstance(opened, wire.SpaceOpened)

    answer = node.ask(1, wire.Lookup(0, 0, opened.shards, KEYS.packed))

    assert isinstance(answer, wire.Failure)
    assert answer.field == "shards"
    assert isinstance(node.ask(1, wire.Lookup(0, 0, opened.shards[:8], KEYS.packed)), wire.Found)


# A client's later connection


def test_what_still_comes_on_a_connection_that_was_given_up_is_not_carried_out():
    """Its put was taken for lost: a commit that was on its way ended the node."""
    made = Wire()
    made.node.connected(1, Peer(77))
    welcome = made.ask(1, wire.Hello(0, 1, 2, "engine", b"", b"origin"))
    made.ask(1, wire.OpenSpace(0, IDENTITY, SHARDS))
    put = made.begin(1, KEYS)
    made.node.connected(2, Peer(77))
    made.ask(2, wire.Hello(0, 1, 2, "engine", welcome.session, b"origin"))
    assert made.node.closing == [1]

    answer = made.ask(1, wire.CommitPut(0, put, DIGEST * len(KEYS)))

    assert isinstance(answer, wire.Failure)
    assert answer.code == "protocol"
    assert describe(made.node).host.limbo_bytes == 6 * 4096
    made.node.disconnected(1, made.now_ns, ended=False)
    made.node.process_ended(77, made.now_ns)
    assert describe(made.node).host.limbo_bytes == 0


def test_an_origin_without_measure_is_refused():
    made = Wire()
    made.node.connected(1, Peer(1))

    answer = made.ask(1, wire.Hello(0, 1, 2, "engine", b"", bytes(65)))

    assert isinstance(answer, wire.Failure)
    assert answer.field == "origin"


def test_a_report_of_another_life_of_the_node_says_nothing_of_this_one(node):
    keys = page_keys(range(100, 104), 2)
    node.store(1, keys)
    leased = node.ask(1, wire.Acquire(0, 1, 0, 0, keys.packed, 100))
    assert isinstance(leased, wire.Acquired)
    generation = int.from_bytes(leased.addresses[4:8], "little")

    node.ask(1, wire.Corrupt(0, 0, keys[0], generation, b"another life"))
    assert node.lookup(1, keys) == (2, 0)
    node.ask(1, wire.Corrupt(0, 0, keys[0], generation, node.node.boot))

    assert node.lookup(1, keys) == (0, 0)


def test_a_process_uses_the_tenants_it_may_and_no_other():
    made = Wire()
    made.node.connected(1, Peer(1, tenants=frozenset({"red", "default"})))
    made.ask(1, wire.Hello(0, 1, 2, "engine"))
    refused = made.ask(1, wire.OpenSpace(0, _tenant("blue"), SHARDS))
    opened = made.ask(1, wire.OpenSpace(0, _tenant("red"), SHARDS))

    assert isinstance(refused, wire.Failure)
    assert refused.field == "tenant"
    assert isinstance(opened, wire.SpaceOpened)


def test_a_process_that_may_use_one_tenant_touches_nothing_of_the_one_without_a_name():
    made = Wire()
    keys = page_keys(range(8), 2)
    for connection, tenants in ((1, None), (2, frozenset({"red"}))):
        made.node.connected(connection, Peer(connection, tenants=tenants))
        made.ask(connection, wire.Hello(0, 1, 2, "engine"))
    assert isinstance(made.ask(1, wire.OpenSpace(0, _tenant(""), SHARDS)), wire.SpaceOpened)

    refused = made.ask(2, wire.BeginPut(0, 1, 0, 0, keys.packed, b""))

    assert isinstance(refused, wire.Failure)
    assert refused.field == "space"
    assert made.lookup(1, keys) == (0, 0), "it would be called verified"


def test_who_joins_a_session_of_another_tenant_gets_nothing_of_its_pages():
    made = Wire()
    made.node.connected(1, Peer(1, tenants=frozenset({"red"})))
    made.node.connected(2, Peer(2, tenants=frozenset({"blue"})))
    welcome = made.ask(1, wire.Hello(0, 1, 2, "engine"))
    made.ask(2, wire.Hello(0, 1, 2, "engine", welcome.session))
    opened = made.ask(1, wire.OpenSpace(0, _tenant("red"), SHARDS))

    for message in (
        wire.Lookup(0, opened.space, [0], KEYS.packed),
        wire.Acquire(0, 1, opened.space, 0, KEYS.packed, 1000),
        wire.BeginPut(0, 1, opened.space, 0, KEYS.packed, b""),
    ):
        refused = made.ask(2, message)
        assert isinstance(refused, wire.Failure)
        assert refused.field == "tenant"


def _tenant(name: str) -> SpaceIdentity:
    return msgspec.structs.replace(IDENTITY, tenant=name)


def test_a_page_of_four_gibibytes_can_be_evicted():
    tokens = (bytes([number]) * 16 for number in range(1, 9))
    limits = NodeLimits(1 << 40, 1000)
    made = Wire()
    made.node = Node("n", b"b" * 16, SlotTable(1 << 32, 1), limits, lambda: next(tokens))
    made.node.connected(1, Peer(1))
    made.ask(1, wire.Hello(0, 1, 2, "engine"))
    huge = msgspec.structs.replace(SHARDS[0], layers=(0, 1 << 20))
    opened = made.ask(1, wire.OpenSpace(0, IDENTITY, [huge]))
    assert isinstance(opened, wire.SpaceOpened)
    for put in (1, 2):
        keys = page_keys(range(put * 100, put * 100 + 2), 2)
        granted = made.ask(1, wire.BeginPut(0, put, 0, 0, keys.packed, b""))
        assert isinstance(granted, wire.PutGranted)
        assert list(granted.statuses) == [PageStatus.GRANTED]
        made.ask(1, wire.CommitPut(0, put, DIGEST))

    [space] = made.node.pages.spaces
    ghost = made.node.pages.residents.ghosts.find(space, page_keys(range(100, 102), 2)[0])
    assert ghost is not None
    assert ghost.wanted_bytes == 1 << 32


def test_what_follows_a_page_that_was_damaged_leaves_in_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.state.table.residents.DROP_AT_ONCE", 2)
    monkeypatch.setattr("kvstore.node.node.SWEEP_STEPS", 2)
    made = Wire()
    made.join(1)
    made.store(1, KEYS)
    leased = made.ask(1, wire.Acquire(0, 1, 0, 0, KEYS.packed, 100))
    assert isinstance(leased, wire.Acquired)
    _, generation, _ = wire.unpack_addresses(leased.addresses)[0]

    made.ask(1, wire.Corrupt(0, 0, KEYS[0], generation, made.node.boot))

    assert made.lookup(1, KEYS) == (0, 0)
    turns = 0
    while made.node.unfinished:
        made.node.go_on(made.now_ns)
        turns += 1
    assert turns > len(KEYS) // 2
    assert made.node.pages.counts["removed_corrupt"] == len(KEYS)
    assert not next(iter(made.node.pages.spaces)).nodes
