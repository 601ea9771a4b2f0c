"""Goal: however much one client sends, and whatever it does not read, others get their turn."""

import asyncio
import socket
from collections import Counter

import pytest

from kvstore.protocol import wire
from kvstore.protocol.errors import ProtocolError
from kvstore.server import frames, rounds
from kvstore.server.frames import (
    UNREAD_BYTES_MAX,
    FrameConnection,
    FrameConnections,
)
from kvstore.server.rounds import LONG_S, POLL_S, ROUND_S, TURN_S, Rounds
from kvstore.state.tree.sessions import Peer
from tests.loops import eventually, in_loop

ONE_ROUND_S = ROUND_S + POLL_S + 2 * TURN_S
"""Each of both lines ends with a turn that begins within its time."""


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands unless somebody works."""
    made = Clock()
    monkeypatch.setattr(rounds, "monotonic", lambda: made.now_s)
    return made


class Clock:
    now_s = 0.0


class Busy:
    """A connection with endless messages, or with one."""

    def __init__(self, clock: Clock, taken: list["Busy"], process: int, turns: int) -> None:
        self.process, self.turns = process, turns
        self._clock, self._taken = clock, taken

    def take(self, end_s: float) -> bool:
        self._taken.append(self)
        self._clock.now_s = end_s
        self.turns -= 1
        return self.turns > 0


def test_a_process_with_many_busy_connections_delays_others_by_one_round(clock):
    async def run() -> None:
        taken: list[Busy] = []
        made = Rounds()
        flood = [Busy(clock, taken, 1, turns=100) for _ in range(300)]
        for one in flood:
            made.want(one.process, one.take)
        assert clock.now_s <= ONE_ROUND_S, "the others wait for their turn"

        await asyncio.sleep(0)
        before_s = clock.now_s
        other = Busy(clock, taken, 2, turns=1)
        made.want(other.process, other.take)
        await asyncio.sleep(0)
        assert other in taken
        assert clock.now_s - before_s <= ONE_ROUND_S

        before_s = clock.now_s
        await asyncio.sleep(0)
        assert 0 < clock.now_s - before_s <= ONE_ROUND_S, "and so does all else"

    asyncio.run(run())


class Puts:
    """A connection whose turns all take ``turn_s``, with one message in each."""

    def __init__(self, clock: Clock, taken: list[object], process: int, turn_s: float) -> None:
        self.process = process
        self._clock, self._taken, self._turn_s = clock, taken, turn_s

    def take(self, _end_s: float) -> bool:
        self._taken.append(self)
        self._clock.now_s += self._turn_s
        return False


def test_a_short_request_waits_for_one_of_the_long_turns_that_others_want(clock):
    async def run() -> None:
        taken: list[object] = []
        made = Rounds()
        engines = [Puts(clock, taken, process, 2 * LONG_S) for process in range(1, 9)]
        for one in engines:
            made.want(one.process, one.take, long=True)
        lookup = Puts(clock, taken, 9, LONG_S / 4)
        made.want(lookup.process, lookup.take)
        assert taken == [lookup], "what was read together with eight puts"

        for number in range(8):
            await asyncio.sleep(0)
            assert taken[1 + 2 * number :] == [engines[number]], "sockets are polled after each"
            made.want(lookup.process, lookup.take)
            assert taken[-1] is lookup

    asyncio.run(run())


def test_short_requests_without_end_leave_each_round_to_a_long_one(clock):
    async def run() -> None:
        taken: list[object] = []
        made = Rounds()
        put = Puts(clock, taken, 1, 2 * LONG_S)
        lookups = [Puts(clock, taken, process, LONG_S / 4) for process in range(2, 200)]
        for number in range(3):
            made.want(put.process, put.take, long=True)
            for one in lookups:
                made.want(one.process, one.take)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert taken.count(put) == number + 1

    asyncio.run(run())


def test_the_connections_of_a_process_have_equal_turns_and_all_come_to_an_end(clock):
    async def run() -> None:
        taken: list[Busy] = []
        made = Rounds()
        all_of_it = [Busy(clock, taken, 1 + at % 3, turns=4) for at in range(9)]
        for one in all_of_it:
            made.want(one.process, one.take)
        for _ in range(36):
            await asyncio.sleep(0)
        assert Counter(taken) == dict.fromkeys(all_of_it, 4)
        assert set(taken[: 3 + 9]) == set(all_of_it), "whoever came last need not wait for the ends"

    asyncio.run(run())


class Quiet:
    """A transport that takes everything."""

    closing = False

    def set_write_buffer_limits(self, high: int) -> None:
        assert high > 0

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Served:
    """All connections, noting what it gets; ``full`` after so many messages."""

    def __init__(self, full: int) -> None:
        self.got: list[bytes] = []
        self.unread_bytes = 0
        self._full = full
        self._rounds = Rounds()

    def want(self, connection: FrameConnection) -> None:
        self._rounds.want(connection.peer.identity, connection.take)

    def receive(self, connection: FrameConnection, body: bytes | memoryview) -> None:
        self.got.append(bytes(body))
        if len(self.got) == self._full:
            connection.pause_writing()

    def refuse(self, connection: FrameConnection, error: ProtocolError) -> None:
        raise error

    def unread(self, change_bytes: int) -> None:
        self.unread_bytes += change_bytes

    def end(self, connection: FrameConnection) -> None:
        assert not self.unread_bytes


def test_of_a_thousand_connections_that_close_together_few_end_at_one_go(clock):
    async def run() -> None:
        ended: list[FrameConnection] = []

        def lost(connection: FrameConnection) -> None:
            ended.append(connection)
            clock.now_s += ROUND_S / 10

        server = FrameConnections(Counter(), lambda *_: None, lost)
        connections = [made(server) for _ in range(1000)]
        for number, connection in enumerate(connections, start=1):
            connection.peer, connection.number = Peer(number), number
            server.add(connection)
        for connection in connections:
            connection.connection_lost(None)
        assert 0 < len(ended) <= 11, "the others wait for their turn"

        before = len(ended)
        await asyncio.sleep(0)
        assert before < len(ended) <= before + 11
        while len(ended) < 1000:
            before = len(ended)
            await asyncio.sleep(0)
            assert len(ended) > before
        assert not server.open

    asyncio.run(run())


def test_nothing_more_is_taken_from_a_client_that_does_not_read_its_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()  # a machine that stalls makes a message long
    for module in (frames, rounds):
        monkeypatch.setattr(module, "monotonic", lambda: clock.now_s)

    async def run() -> None:
        server = Served(full=3)
        transport = Quiet()
        connection = made(server)
        connection.connection_made(transport)  # type: ignore[arg-type]
        frames = [wire.encode(wire.Stats(number)) for number in range(1, 11)]
        connection.data_received(b"".join(frames))
        assert len(server.got) == 3, "what it sent behind them must wait, or its answers pile up"
        assert not transport.reading

        connection.resume_writing()
        assert server.got == [frame[4:] for frame in frames]
        assert transport.reading
        assert not server.unread_bytes

        connection.data_received(frames[0][:3])
        connection.connection_lost(None)

    asyncio.run(run())


@pytest.mark.parametrize(("took_s", "long"), [(LONG_S / 2, False), (2 * LONG_S, True)])
def test_after_a_long_turn_a_connection_lets_those_come_first_that_are_quick(
    monkeypatch: pytest.MonkeyPatch, took_s: float, *, long: bool
) -> None:
    order = list[str]()

    async def run() -> None:
        both = puts_and_asks(monkeypatch, order, took_s)
        for _ in range(2):
            for connection in both:
                connection.data_received(wire.encode(wire.Ping(1)))
            for _ in range(2):
                await asyncio.sleep(0)

    asyncio.run(run())
    assert order == ["puts", "asks", *(("asks", "puts") if long else ("puts", "asks"))]


def test_of_messages_that_are_sent_together_each_long_one_has_a_turn_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = list[str]()

    async def run() -> None:
        puts, asks = puts_and_asks(monkeypatch, order, 0.0006)
        puts.data_received(wire.encode(wire.Ping(1)) * 4)
        for _ in range(4):
            asks.data_received(wire.encode(wire.Ping(1)))
            await asyncio.sleep(0)

    asyncio.run(run())
    assert order == ["puts", "asks"] * 4


def puts_and_asks(
    monkeypatch: pytest.MonkeyPatch, order: list[str], put_s: float
) -> tuple[FrameConnection, FrameConnection]:
    """Two connections; a message takes ``put_s`` on the first one, and 20 µs on the other.

    ``order`` gets the name of the connection of each message that is processed.
    """
    clock = Clock()
    for module in (frames, rounds):
        monkeypatch.setattr(module, "monotonic", lambda: clock.now_s)

    def receive(connection: FrameConnection, _request: wire.Request) -> None:
        order.append(connection.whose)
        clock.now_s += put_s if connection.whose == "puts" else 0.00002

    server = FrameConnections(Counter(), receive, lambda _: None)
    puts, asks = both = (made(server), made(server))
    for number, (connection, whose) in enumerate(((puts, "puts"), (asks, "asks")), 1):
        connection.connection_made(Quiet())  # type: ignore[arg-type]
        connection.whose, connection.peer = whose, Peer(number)
    return both


def made(server: object) -> FrameConnection:
    def begin(connection: FrameConnection) -> None:
        connection.peer = Peer(1)

    return FrameConnection(server, None, begin)  # type: ignore[arg-type]


def test_who_sends_the_most_of_long_messages_loses_one_of_them():
    refused: list[FrameConnection] = []
    server = FrameConnections.__new__(FrameConnections)
    server.refuse = lambda connection, error: refused.append(connection)  # type: ignore[method-assign]
    server.open = {}
    for number, process, size in ((1, 1, UNREAD_BYTES_MAX // 2), (2, 1, 8), (3, 2, 1 << 20)):
        connection = server.open[number] = made(server)
        connection.peer, connection.unread_bytes = Peer(process), size
    server.unread_bytes = UNREAD_BYTES_MAX

    server.unread(1)

    assert refused == [server.open[1]]


@in_loop
async def test_who_is_refused_and_reads_nothing_keeps_neither_bytes_nor_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "UNREAD_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(frames, "LINGER_S", 0.05)
    loop, lost = asyncio.get_running_loop(), []

    def answer(connection: FrameConnection, request: wire.Request) -> None:
        connection.answer(wire.StatsReply(1, bytes(frames.UNSENT_BYTES_HIGH // 2)))

    def begin(connection: FrameConnection) -> None:
        connection.number = len(server.open) + 1
        server.add(connection)

    server = FrameConnections(Counter(), answer, lost.append)
    clients = []
    for _ in range(6):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        clients.append(theirs)
        await loop.connect_accepted_socket(
            lambda ours=ours: FrameConnection(server, ours, begin), ours
        )
    for client in clients:  # an answer that it does not read, and most of a long message
        half = (16 << 20).to_bytes(4, "little") + bytes(300 << 10)
        await loop.sock_sendall(client, wire.encode(wire.Stats(1)) + half)
        await asyncio.sleep(0)
        assert server.unread_bytes <= frames.UNREAD_BYTES_MAX
    await eventually(lambda: lost, "who does not read its refusal is disconnected")
    assert len(lost) < len(clients)
    assert server.unread_bytes == sum(one.unread_bytes for one in server.open.values()) > 0

    server.close()
    await eventually(lambda: len(lost) == len(clients))
    assert not server.unread_bytes
    for client in clients:
        client.close()
