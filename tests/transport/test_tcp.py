"""Goal: whatever comes to the data port, or from it, the node goes on and no wrong byte counts."""

import contextlib
import socket
import ssl
import struct
import threading
import time

import pytest

from kvstore.protocol.errors import PeerUnreachable, ProtocolError, TransferError, TransferTimeout
from kvstore.testing.transfer_pages import TransferPages
from kvstore.transport import owner as owners
from kvstore.transport import reader as readers
from kvstore.transport.base import TicketEnded
from kvstore.transport.frames import ANSWER_BYTES, HEAD_BYTES, MAGIC, RANGE_BYTES, VERSION
from kvstore.transport.reader import PageReader
from kvstore.transport.streams import PlainStream
from kvstore.transport.tcp import TcpTransport
from tests.transport.transports import context

TICKET = b"t" * 16
HEAD = struct.Struct("<4sBBHII16s")
ANSWER = struct.Struct("<4sBBHQ")
LOCAL = "127.0.0.1:0"


def later(seconds=20.0):
    return time.monotonic_ns() + int(seconds * 1e9)


@pytest.fixture
def opened():
    """Opens transports, and closes them at the end."""
    with contextlib.ExitStack() as stack:

        def open_one(listen=LOCAL, **options):
            made = TcpTransport(listen, 1 << 30, **options)
            stack.callback(made.close)
            return made

        yield open_one


@pytest.fixture
def end_of(wait_until):
    """Waits for the one end of a transport's only transfer."""

    def wait(transport):
        found = []

        def polled():
            found.extend(transport.poll())
            return found

        wait_until(polled)
        (end,) = found
        return end

    return wait


@pytest.fixture
def dial():
    """Connects plain sockets to a transport, and closes them at the end."""
    with contextlib.ExitStack() as stack:

        def connect(transport, tls=None):
            host, port = transport.endpoint.split(":")
            found = stack.enter_context(socket.create_connection((host, int(port))))
            found.settimeout(10)
            if tls is not None:
                found = stack.enter_context(tls.wrap_socket(found, server_hostname=host))
            return found

        yield connect


def everything(connection):
    """What comes until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := connection.recv(1 << 16):
            found += data
    return found


def request_for(pages, **changes):
    """A read of all pages, as it goes over the wire."""
    fields = {
        "magic": MAGIC, "version": VERSION, "kind": 1, "zero": 0, "count": len(pages.ranges),
        "budget_ms": 5000, "ticket": TICKET,
    } | changes  # fmt: skip
    ranges = b"".join(struct.pack("<IIQQ", *one) for one in pages.ranges)
    return HEAD.pack(*fields.values()) + ranges


def a_read_works(opened, end_of, owner, pages):
    reader = opened("")
    reader.read(pages.transfer(1, owner.endpoint, TICKET, later()))
    return end_of(reader).good == b"\1" * len(pages.ranges)


def test_a_peer_that_tells_another_address_each_time_takes_no_place_of_other_peers(
    opened, end_of, monkeypatch, wait_until
):
    monkeypatch.setattr(readers, "PEERS_MAX", 2)
    owner, reader = opened("0.0.0.0:0"), opened("")
    port = owner.endpoint.rpartition(":")[2]
    pages = TransferPages(4096, 2)
    owner.grant(TICKET, pages.granted(), later())

    for number in range(1, 9):
        reader.read(pages.transfer(number, f"127.0.0.{number}:{port}", TICKET, later()))
        assert end_of(reader).error is None
        lanes = reader._reader._lanes
        wait_until(lambda: all(one.idle == one.threads for one in list(lanes.values())))  # noqa: B023

    wait_until(lambda: reader.stats()["connections_out"] <= 2 * readers.CONNECTIONS)


# Strangers at the port


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"GET "}, {"kind": 0}, {"kind": 3}, {"zero": 1}, {"count": 0}, {"count": 1025},
        {"count": (1 << 32) - 1}, {"budget_ms": 0}, {"budget_ms": (1 << 32) - 1},
    ],
)  # fmt: skip
def test_a_request_that_is_none_is_refused_and_others_are_served(changes, opened, end_of, dial):
    owner, pages = opened(), TransferPages(4096, 2)
    owner.grant(TICKET, pages.granted(), later())

    stranger = dial(owner)
    stranger.sendall(request_for(pages, **changes)[:HEAD_BYTES])

    assert everything(stranger) == ANSWER.pack(MAGIC, VERSION, 3, 0, 0)
    assert a_read_works(opened, end_of, owner, pages)
    assert owner.stats()["connections_failed"] == 1


def test_a_request_of_another_version_is_told_which_one_is_spoken(opened, dial):
    owner, pages = opened(), TransferPages(4096, 2)
    newer = dial(owner)

    newer.sendall(request_for(pages, version=9)[:HEAD_BYTES])

    magic, version, status, _, _ = ANSWER.unpack(everything(newer))
    assert (magic, version, status) == (MAGIC, VERSION, 3)


def test_who_does_not_finish_its_first_request_in_time_is_hung_up_on(opened, dial, monkeypatch):
    monkeypatch.setattr(owners, "FIRST_S", 0.05)
    owner, pages = opened(), TransferPages(4096, 2)
    owner.grant(TICKET, pages.granted(), later())
    words = request_for(pages)

    started = [dial(owner) for _ in range(3)]
    for connection, size in zip(started, (0, 7, HEAD_BYTES + 3), strict=True):
        connection.sendall(words[:size])

    assert [everything(one) for one in started] == [b""] * 3


def test_those_who_say_nothing_keep_nobody_out(opened, end_of, dial, monkeypatch):
    monkeypatch.setattr(owners, "SILENT_MAX", 2)
    owner, pages = opened(connections_max=3), TransferPages(4096, 2)
    owner.grant(TICKET, pages.granted(), later())

    silent = [dial(owner) for _ in range(2)]
    assert a_read_works(opened, end_of, owner, pages)

    assert everything(silent[0]) == b"", "the oldest made room"
    assert owner.stats()["connections_refused"] == 1


def test_connections_with_tickets_are_bounded(opened, end_of, dial, wait_until):
    owner, pages, big = opened(connections_max=1), TransferPages(4096, 2), TransferPages(1 << 25, 1)
    owner.grant(TICKET, pages.granted(), later())
    owner.grant(b"b" * 16, big.granted(), later())
    slow, second, third = dial(owner), opened(""), opened("")
    slow.sendall(request_for(big, ticket=b"b" * 16, budget_ms=60_000))
    assert slow.recv(1), "it is being answered"

    second.read(pages.transfer(1, owner.endpoint, TICKET, later()))
    assert isinstance(end_of(second).error, PeerUnreachable)
    assert owner.stats()["connections_refused"] == second.stats()["connects"] > 1
    slow.close()
    wait_until(lambda: not owner.stats()["connections_in"])
    third.read(pages.transfer(1, owner.endpoint, TICKET, later()))
    assert end_of(third).error is None


def test_a_connection_that_nobody_uses_gives_its_place_to_a_peer_that_asks(opened, end_of):
    owner, pages = opened(connections_max=1), TransferPages(4096, 2)
    owner.grant(TICKET, pages.granted(), later())
    first, second = opened(""), opened("")

    for number in (1, 2):
        for reader in (first, second):
            reader.read(pages.transfer(number, owner.endpoint, TICKET, later()))
            assert end_of(reader).error is None, "each in turn, though only one has a place"

    assert owner.stats()["connections_replaced"] == 3
    assert "connections_refused" not in owner.stats()


@pytest.mark.parametrize(
    ("server", "client"),
    [("node", "stranger"), ("stranger", "node"), ("node", ""), ("", "node")],
)
def test_without_the_right_certificate_no_byte_moves(server, client, opened, end_of):
    owner = opened(server=context(server=True, of=server) if server else None)
    reader = opened("", client=context(server=False, of=client) if client else None)
    pages = TransferPages(4096, 2)
    owner.grant(TICKET, pages.granted(), later())

    reader.read(pages.transfer(1, owner.endpoint, TICKET, later(6)))

    end = end_of(reader)
    assert isinstance(end.error, (TransferError, ProtocolError)), end
    assert end.good == bytes(2)
    assert pages.untouched
    assert "sent_bytes" not in owner.stats()


# Peers that stop in the middle


def test_a_reader_that_takes_nothing_holds_the_owner_no_longer_than_it_said(
    opened, dial, wait_until
):
    owner, pages = opened(), TransferPages(1 << 20, 32)
    owner.grant(TICKET, pages.granted(), later())
    stopped = dial(owner)

    stopped.sendall(request_for(pages, budget_ms=100))

    wait_until(lambda: owner.stats().get("requests_failed") == 1)
    wait_until(lambda: owner.stats()["connections_in"] == 0)


@pytest.mark.parametrize("tls", [False, True])
def test_the_end_of_a_ticket_ends_a_read_that_is_under_way(tls, opened, dial, wait_until):
    owner = opened(server=context(server=True) if tls else None)
    pages = TransferPages(1 << 20, 32)
    owner.grant(TICKET, pages.granted(), later())
    slow = dial(owner, context(server=False) if tls else None)
    slow.sendall(request_for(pages, budget_ms=60_000))
    assert slow.recv(1)

    assert not owner.revoke(TICKET), "it is read at this moment"

    ended = []
    wait_until(lambda: ended.extend(owner.poll()) or ended)
    assert ended == [TicketEnded(TICKET)]
    assert len(everything(slow)) < 32 << 20
    assert owner.revoke(TICKET), "an unknown ticket is not in use"
    wait_until(lambda: owner.stats()["requests_failed"] == 1)


def test_nothing_is_written_once_the_ticket_has_ended(opened, dial, wait_until):
    owner, pages = opened(), TransferPages(1 << 20, 2)
    owner.grant(TICKET, pages.granted(), later(), write=True)
    writer = dial(owner)
    writer.sendall(request_for(pages, kind=2, budget_ms=60_000))
    assert writer.recv(ANSWER_BYTES, socket.MSG_WAITALL)
    writer.sendall(bytes(1 << 20))

    ended = []
    if not owner.revoke(TICKET):
        wait_until(lambda: ended.extend(owner.poll()) or ended)
    kept = pages.owned.copy()
    with contextlib.suppress(ConnectionError):
        writer.sendall(bytes(1 << 20))
    everything(writer)

    assert (pages.owned == kept).all()


# What a false owner does


class FalseOwner:
    """Listens, and answers each request with what it is told to send; then closes, or waits."""

    def __init__(self, *parts, close=True):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.go_on, self.close = threading.Event(), close
        self.parts = parts
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                self.serve()

    def serve(self):
        with self.listener.accept()[0] as connection:
            connection.settimeout(10)
            connection.recv(HEAD_BYTES + RANGE_BYTES)
            for at, part in enumerate(self.parts):
                if at:
                    self.go_on.wait(10)
                connection.sendall(part)
            if not self.close:
                self.go_on.wait(10)

    def end(self):
        self.go_on.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(10)


@pytest.fixture
def false_owner():
    with contextlib.ExitStack() as stack:

        def start(*parts, **options):
            made = FalseOwner(*parts, **options)
            stack.callback(made.end)
            return made

        yield start


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError),
        (ANSWER.pack(MAGIC, 2, 0, 0, 8192), ProtocolError),
        (ANSWER.pack(MAGIC, VERSION, 0, 0, 8191), ProtocolError),
        (ANSWER.pack(MAGIC, VERSION, 77, 0, 8192), ProtocolError),
        (ANSWER.pack(MAGIC, VERSION, 0, 0, 8192)[:9], PeerUnreachable),
        (b"", PeerUnreachable),
    ],
)
def test_an_answer_that_is_none_brings_an_error_and_no_byte(
    answer, error, opened, end_of, false_owner
):
    pages, reader = TransferPages(4096, 2), opened("")

    reader.read(pages.transfer(1, false_owner(answer).endpoint, TICKET, later()))

    end = end_of(reader)
    assert isinstance(end.error, error), end
    assert end.good == bytes(2)
    assert pages.untouched


@pytest.mark.parametrize(("stops", "error"), [(True, TransferTimeout), (False, PeerUnreachable)])
def test_pages_before_the_end_of_a_peer_count_and_nothing_arrives_later(
    stops, error, opened, end_of, false_owner
):
    size = 1 << 20  # a page of this size is received and checked by itself
    pages, reader = TransferPages(size, 3), opened("")
    pages.ranges = pages.ranges[:1]
    answer = ANSWER.pack(MAGIC, VERSION, 0, 0, size)
    content = pages.owned[0].tobytes()
    rest = [content[5000:]] if stops else []
    peer = false_owner(answer + content[:5000], *rest)

    deadline_ns = later(0.3 if stops else 20)
    reader.read(pages.transfer(1, peer.endpoint, TICKET, deadline_ns, slice(0, 1)))

    end = end_of(reader)
    assert isinstance(end.error, error), end
    assert (end.good, end.settled) == (b"\0", True)
    kept = pages.arrived.copy()
    peer.end()
    assert (pages.arrived == kept).all(), "bytes arrived after the transfer was settled"


def test_a_connection_that_the_owner_has_closed_meanwhile_is_made_again(opened, end_of):
    pages, reader, owner = TransferPages(4096, 2), opened(""), opened()
    port = int(owner.endpoint.split(":")[1])
    owner.grant(TICKET, pages.granted(), later())
    reader.read(pages.transfer(1, owner.endpoint, TICKET, later()))
    assert end_of(reader).error is None
    owner.close()
    again = opened(f"127.0.0.1:{port}")
    again.grant(TICKET, pages.granted(), later())

    reader.read(pages.transfer(2, again.endpoint, TICKET, later()))

    assert end_of(reader).error is None
    assert reader.stats()["connects"] == 2


def test_a_new_connection_that_had_to_make_room_is_made_again(opened, end_of):
    pages, reader, owner = TransferPages(4096, 2), opened(""), opened()
    owner.grant(TICKET, pages.granted(), later())
    host, port = owner.endpoint.split(":")
    with socket.create_server(("127.0.0.1", 0)) as crowded:
        crowded.settimeout(10)
        hung_up = []

        def serve():
            crowded.accept()[0].close()
            hung_up.append(True)
            with crowded.accept()[0] as taken, socket.create_connection((host, int(port))) as on:
                on.sendall(taken.recv(1 << 16))
                with contextlib.suppress(OSError):
                    while data := on.recv(1 << 16):
                        taken.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        endpoint = f"127.0.0.1:{crowded.getsockname()[1]}"
        reader.read(pages.transfer(1, endpoint, TICKET, later()))
        end = end_of(reader)
        reader.close()
        owner.close()
        thread.join(10)

    assert hung_up
    assert (end.error, end.good) == (None, b"\1\1")


def test_a_wrong_page_is_counted(opened, end_of):
    pages, reader, owner = TransferPages(4096, 2), opened(""), opened()
    owner.grant(TICKET, pages.granted(), later())
    pages.owned[1, 5] ^= 1

    reader.read(pages.transfer(1, owner.endpoint, TICKET, later()))

    assert end_of(reader).good == b"\1\2"
    assert reader.stats()["wrong_pages"] == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_by_a_bug_leaves_room_for_another(opened, monkeypatch, wait_until):
    owner, reader, pages = opened(), opened(), TransferPages(4096, 2)
    owner.grant(TICKET, pages.granted(), later())

    def bug(*_):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(PageReader, "_carry", bug)
        reader.read(pages.transfer(1, owner.endpoint, TICKET, later(0.2)))
        ended = []
        wait_until(lambda: ended.extend(reader.poll()) or ended)
        assert ended[0].good == bytes(2)
    wait_until(lambda: not reader._reader._lanes)
    reader.read(pages.transfer(2, owner.endpoint, TICKET, later()))
    wait_until(lambda: len(ended) == 2 or ended.extend(reader.poll()))
    assert ended[1].good == b"\1\1"


def test_a_write_is_answered_when_its_ticket_is_not_in_use_any_more(opened, end_of, monkeypatch):
    owner, writer = opened(), opened()
    theirs, ours = TransferPages(4096, 2), TransferPages(4096, 2)
    owner.grant(TICKET, theirs.granted(), later(), write=True)
    in_use = []
    send = PlainStream.send

    def watched(stream, buffers, deadline_ns):
        if threading.current_thread().name == "kvstore-data-owner":
            in_use.append(bool(owner._tickets._tickets[TICKET].users))
        send(stream, buffers, deadline_ns)

    monkeypatch.setattr(PlainStream, "send", watched)
    writer.write(ours.transfer(1, owner.endpoint, TICKET, later()))

    assert end_of(writer).error is None
    assert in_use == [True, False]
    assert owner.revoke(TICKET)
