"""Goal: whoever runs next, no slot is free while a client touches it, and none is kept after."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.client import exchange, link
from kvstore.client.exchange import Connection
from kvstore.client.link import SETTLE_WAIT_S, Link
from kvstore.client.mapping import Use
from kvstore.node.describe import describe
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.protocol import wire
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import CanonicalLayout, ShardSpec, SpaceIdentity, page_keys
from kvstore.state.table.invariants import check
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import Slot, SlotState, SlotTable
from tests.client.schedule import Schedule, Socket, Threading

IDENTITY = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=2)
SHARD = ShardSpec(layout=CanonicalLayout(1024), layers=(0, 1), heads=(0, 1))
PAGES = 2
SLOTS = 16
LEASE_MS = 1_000_000
LONG_S = 20.0
SHORT_S = 0.5
TIME = 19
"""Let time pass; any other choice is of a thread."""


class Line:
    """One connection at the node, as its desk has it."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    def answer(self, answer: wire.Answer) -> None:
        self._socket.answers += wire.encode(answer)

    def cut(self) -> None:
        self._socket.sent.clear()
        self._socket.shut = True


class World:
    """A node, a client, and whoever disturbs them, on one schedule."""

    def __init__(self, choices: list[int]) -> None:
        self._choices = iter(choices)
        self._turns = count()
        self.schedule = Schedule(self._choose, self._check)
        self._tokens = (bytes([number]) * 16 for number in range(1, 200))
        self._boots = count(1)
        self._names = count(1)
        self._chains = count(1)
        self._serial = count(1)
        self.sockets: list[Socket] = []
        self.moving: dict[int, list[tuple[Node, Slot, int]]] = {}
        self.nodes: dict[bytes, Node] = {}
        self.link: Link | None = None
        self.start_node()

    def start_node(self) -> None:
        boot = bytes([next(self._boots)]) * 16
        slots = SlotTable(4096 * SLOTS, 1)
        limits = NodeLimits(4096 * SLOTS, LEASE_MS)
        self.node = Node("n", boot, slots, limits, lambda: next(self._tokens))
        memory = SimpleNamespace(replace=list.clear)
        self.desk = Desk(self.node, memory, lambda _actions: None, clock=lambda: 1)
        self.nodes[boot] = self.node

    def _choose(self, most: int) -> int:
        """As the test says; when it has said enough, in turns, so that all comes to an end."""
        chosen = next(self._choices, None)
        if chosen == TIME:
            return -1
        return (next(self._turns) if chosen is None else chosen) % most

    def _check(self) -> None:
        for places in self.moving.values():
            for node, slot, generation in places:
                if node is self.node:
                    assert node.pages.slots.state(slot) is not SlotState.FREE, "it is touched"
                    assert node.pages.slots.address(slot)[1] == generation, "it is another's"

    # ---- the node

    def open_socket(self, path: str) -> Socket:
        self.schedule.pause()
        socket = Socket(self.schedule)
        self.sockets.append(socket)
        desk = self.desk
        self.schedule.spawn(f"node-{next(self._serial)}", lambda: self._serve(socket, desk))
        return socket

    def _serve(self, socket: Socket, desk: Desk) -> None:
        """What the node does for one connection, a message at a time."""
        reader, connection = wire.FrameReader(), 0
        while True:
            self.schedule.pause(lambda: bool(socket.sent) or socket.shut)
            if desk is not self.desk:  # it has ended, and its end of every connection with it
                socket.shut = True
                self.sockets.remove(socket)
                return
            data = bytes(socket.sent)
            socket.sent.clear()
            for body in reader.feed(data):
                connection = connection or desk.connect(Peer(1), Line(socket))
                desk.receive(connection, wire.decode_request(body))
                check(desk.node.pages)
                self.schedule.pause()
            if socket.shut and not socket.sent:
                if connection:
                    desk.disconnect(connection, ended=False)
                self.sockets.remove(socket)
                return

    # ---- the client

    @contextmanager
    def client(self) -> Iterator[None]:
        threads, really_post = Threading(self.schedule), Connection.post

        def post(connection: Connection, message: wire.Request, *, now: bool) -> None:
            if isinstance(message, wire.Settled):
                assert self.link is not None
                assert self.link._state._held, "or something else is decided before it is said"
            really_post(connection, message, now=now)

        with (
            patch.object(Connection, "post", post),
            patch.object(link, "threading", threads),
            patch.object(exchange, "threading", threads),
            patch.object(link, "monotonic", lambda: self.schedule.now),
            patch.object(exchange, "monotonic", lambda: self.schedule.now),
            patch.object(exchange, "open_socket", self.open_socket),
            patch.object(exchange, "send_now", Socket.send_now),
            patch.object(exchange, "wait_closed", Socket.wait_closed),
            patch.object(exchange, "set_timeout", _set_timeout),
        ):
            yield

    def put(self, made: Link, reconnects: int = 0) -> None:
        """As a space puts: ask for slots, write, commit; or take it back.

        Writing takes until the link has connected so many times more, or long.
        """
        name, chain = next(self._names), next(self._chains)
        keys = page_keys(range(1000 * chain, 1000 * chain + 2 * PAGES), 2)
        epoch = self._open(made)
        with made.moving() as memory:
            request = wire.BeginPut(0, name, 0, 0, keys.packed, b"")
            try:
                granted = made.request(request, 1.0, epoch)
                assert isinstance(granted, wire.PutGranted)
                with self._touching(memory, name, granted.addresses):
                    self._last(made, reconnects)
                digests = b"d" * (len(granted.addresses))
                if granted.addresses:
                    made.request(wire.CommitPut(0, name, digests), 1.0, epoch)
            except KVStoreError:
                made.send(wire.AbortPut(name), epoch)

    def read(self, made: Link, reconnects: int = 0) -> None:
        """As a space reads: lease what a late chain holds, look at it, give it back."""
        name = next(self._names)
        epoch = self._open(made)
        chain = max(1, next(self._chains) - 2)
        keys = page_keys(range(1000 * chain, 1000 * chain + 2 * PAGES), 2)
        with made.moving() as memory:
            try:
                leased = made.request(
                    wire.Acquire(0, name, 0, 0, keys.packed, LEASE_MS), 1.0, epoch
                )
                assert isinstance(leased, wire.Acquired)
                with self._touching(memory, name, leased.addresses):
                    self._last(made, reconnects)
            finally:
                made.send_later(wire.Release(name), epoch)

    def _last(self, made: Link, reconnects: int) -> None:
        connection = made._reconnecting.connection + reconnects
        self.schedule.pause(
            lambda: made._reconnecting.connection >= connection, self.schedule.now + LONG_S
        )

    def _open(self, made: Link) -> int:
        """Wait until it is connected; what is opened is of this epoch."""
        closing = made._reconnecting
        self.schedule.pause(lambda: made.connected or closing.closing, self.schedule.now + LONG_S)
        epoch = made.epoch
        made.request(wire.OpenSpace(0, IDENTITY, [SHARD]), 1.0, epoch)
        return epoch

    @contextmanager
    def _touching(self, memory: Use, name: int, addresses: bytes) -> Iterator[None]:
        """These slots are read or written by the client until the end."""
        node = self.nodes[memory._mapping.boot]
        slots = node.pages.slots
        self.moving[name] = [
            (node, Slot(offset // 4096), generation)
            for _, generation, offset in wire.unpack_addresses(addresses)
        ]
        assert all(slots.address(slot)[1] == at for _, slot, at in self.moving[name])
        try:
            yield
        finally:
            del self.moving[name]

    # ---- those who disturb

    def cut(self, made: Link) -> None:
        """The connection breaks, best while something moves; what was said is still read."""
        self._wait_for_moves(made)
        for socket in list(self.sockets):
            socket.shut = True

    def drop(self, made: Link) -> None:
        """The node cuts it off, without reading what was said; not while we hang up ourselves."""
        self._wait_for_moves(made)
        for socket in list(self.sockets):
            if not made._reconnecting.closing:
                socket.sent.clear()
            socket.shut = True

    def restart(self, made: Link) -> None:
        """Another boot of the node, with nothing in it."""
        self._wait_for_moves(made)
        self.start_node()
        for socket in list(self.sockets):
            socket.shut = True

    def _wait_for_moves(self, made: Link) -> None:
        self.schedule.pause(
            lambda: made.connected and bool(self.moving), self.schedule.now + SHORT_S
        )


def _set_timeout(socket: Socket, seconds: float) -> None:
    socket.timeout_s = seconds


ACTIONS: dict[str, Callable[[World, Link], None]] = {
    "put": World.put,
    "put, until it is connected anew": lambda world, made: world.put(made, 1),
    "put, until it is connected a third time": lambda world, made: world.put(made, 2),
    "read": World.read,
    "read, until it is connected anew": lambda world, made: world.read(made, 1),
    "cut": World.cut,
    "drop": World.drop,
    "restart": World.restart,
}


def play(actions: Sequence[list[str]], choices: list[int], *, close_at: int) -> World:
    """Carry out actions, each list in a thread of its own; the store closes meanwhile, or after."""
    world = World(choices)
    made: list[Link] = []
    done = count(1)
    finished: list[int] = []
    closed_at: list[float] = []

    def act(names: list[str]) -> None:
        for name in names:
            world.schedule.pause(lambda: bool(made))
            try:
                ACTIONS[name](world, made[0])
            except KVStoreError:
                continue  # a miss
            finally:
                finished.append(next(done))

    def client() -> None:
        world.link = Link("path", "engine")
        made.append(world.link)
        total = sum(map(len, actions))
        world.schedule.pause(lambda: len(finished) >= min(close_at, total))
        made[0].close()
        closed_at.append(world.schedule.now)

    with world.client():
        world.schedule.spawn("client", client)
        for index, names in enumerate(actions):
            world.schedule.spawn(f"thread-{index}", lambda names=names: act(names))
        world.schedule.run()
    link_ = made[0]
    assert link_._reconnecting.closed
    assert link_._connection is None
    assert not link_._mappings
    assert link_._reconnecting.unfinished() == {}
    assert not world.sockets, "a connection is left open"
    if world.schedule.now < closed_at[0] + SETTLE_WAIT_S:  # else it may have given up
        assert not world.node.processes, "the node keeps what nobody has"
        assert not describe(world.node).host.limbo_bytes
    return world


def histories(*disturbances: str) -> dict[str, st.SearchStrategy[object]]:
    """What threads do, who runs when, and after how many of their actions the store closes."""
    kinds = [name for name in ACTIONS if name.startswith(("put", "read"))]
    thread = st.lists(st.sampled_from([*kinds, *disturbances]), min_size=1, max_size=4)
    cutter = st.lists(st.sampled_from(disturbances), min_size=1, max_size=4)
    return {
        "actions": st.tuples(cutter, thread, thread, thread),
        "choices": st.lists(st.integers(0, TIME), max_size=500),
        "close_at": st.integers(0, 20),
    }


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(**histories("cut", "drop"))
def test_no_slot_is_free_while_it_is_touched_and_none_is_kept_after(actions, choices, close_at):
    play(actions, choices, close_at=close_at)


@pytest.mark.soak("link", minutes=8)
@settings(max_examples=20_000, suppress_health_check=[HealthCheck.too_slow])
@given(**histories("cut", "drop", "restart"))
def test_no_slot_is_free_in_many_histories(actions, choices, close_at):
    play(actions, choices, close_at=close_at)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(**histories("cut", "restart"))
def test_a_node_that_starts_anew_changes_nothing_of_it(actions, choices, close_at):
    play(actions, choices, close_at=close_at)


@pytest.mark.parametrize("close_at", [0, 1, 9])
def test_a_quiet_history_stores_and_leaves_nothing(close_at):
    world = play([["put", "read", "put"], ["put"]], [], close_at=close_at)

    assert world.node.pages.counts["stored_pages"] > 0 or close_at < 9
