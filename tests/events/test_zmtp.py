"""ZMTP as we speak it: with ourselves byte by byte, with libzmq, and with what is neither."""

from collections.abc import Callable, Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvstore.events import zmtp
from kvstore.events.publisher import ClearedEvent, EventPublisher, FollowerAccess
from kvstore.events.zmtp import DEALER, PUB, ROUTER, SUB, MessageLimits, PeerError, ZmtpPeer, encode

LIMITS = MessageLimits(message_bytes=1_000, frames=4)
TOKEN = b"a token of sixteen or more"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
WAIT_MS = 10_000


def ready(kind: bytes) -> bytes:
    said = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return bytes((4, len(said))) + said


def met(token: bytes = b"") -> tuple[ZmtpPeer, ZmtpPeer]:
    """A publisher and a subscriber after their handshake."""
    publisher = ZmtpPeer(PUB, LIMITS, token=token, server=True)
    subscriber = ZmtpPeer(SUB, LIMITS, token=token)
    for _ in range(4):
        for one, other in ((publisher, subscriber), (subscriber, publisher)):
            if said := one.outgoing():
                assert other.feed(said) == []
    assert publisher.ready
    assert subscriber.ready
    return publisher, subscriber


@pytest.mark.parametrize("token", [b"", TOKEN])
def test_both_sides_get_ready_and_messages_pass(token):
    publisher, subscriber = met(token)

    assert subscriber.feed(encode([b"topic", b"", b"x" * 300])) == [[b"topic", b"", b"x" * 300]]
    assert publisher.feed(encode([b"\x01topic"])) == [[b"\x01topic"]]


@given(
    messages=st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), max_size=5),
    cuts=st.lists(st.integers(1, 400), max_size=40),
    token=st.sampled_from([b"", TOKEN]),
)
def test_where_the_stream_is_cut_makes_no_difference(messages, cuts, token):
    server = ZmtpPeer(ROUTER, LIMITS, token=token, server=True)
    client = ZmtpPeer(DEALER, LIMITS, token=token)
    sizes = iter([*cuts, *[1 << 20] * 10_000])
    found, data, sent = [], b"", False
    for _ in range(5_000):
        data += client.outgoing()
        if client.ready and not sent:
            data += b"".join(map(encode, messages))
            sent = True
        size = next(sizes)
        if data:
            found += server.feed(data[:size])
            data = data[size:]
        if said := server.outgoing():
            for byte in said:
                client.feed(bytes([byte]))
        if sent and not data:
            break

    assert found == messages


SUBSCRIBER = GREETING + ready(b"SUB")
WRONG = {
    "greeting": [b"GET / HTTP/1.1\r\n\r\n", b"\x00", GREETING[:10] + b"\x02"],
    "mechanism": [GREETING.replace(b"NULL\0", b"CURVE"), GREETING.replace(b"NULL\0", b"PLAIN")],
    "handshake": [
        GREETING + ready(b"PULL"), GREETING + b"\x04\x06\x05HELLO", GREETING + b"\x04\x06\x05READY",
        GREETING + b"\x04\x0a\x05READY\xffabc",
    ],
    "refused": [GREETING + b"\x04\x0a\x05ERROR\x03no!", SUBSCRIBER + b"\x04\x06\x05ERROR"],
    "frame": [GREETING + b"\x08\x00", SUBSCRIBER + b"\x05\x00", GREETING + b"\x80\x00"],
    "command": [GREETING + b"\x00\x01x", SUBSCRIBER + b"\x04\x00", GREETING + b"\x04\x01\xff"],
    "too_long": [
        GREETING + b"\x06" + (2**63).to_bytes(8, "big"),
        SUBSCRIBER + b"\x02" + (1_001).to_bytes(8, "big"),
        SUBSCRIBER + b"\x01\x01x" * 5,
        SUBSCRIBER + (b"\x03" + (400).to_bytes(8, "big") + bytes(400)) * 3,
        SUBSCRIBER + b"\x06" + (1_025).to_bytes(8, "big"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "data"), [(cause, data) for cause, each in WRONG.items() for data in each]
)
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_what_is_no_peer_ends_the_connection_and_is_named(cause, data, step):
    peer = ZmtpPeer(PUB, LIMITS, server=True)
    pieces = [data[start : start + step] for start in range(0, len(data), step)]

    with pytest.raises(PeerError) as ended:
        any(peer.feed(piece) for piece in pieces)

    assert ended.value.cause == cause
    assert not peer.ready or data.startswith(SUBSCRIBER)


@pytest.mark.parametrize("said", [b"", b"\x07kvstore", b"\xff", b"\x00\x05abc", b"\x00\x01ab"])
def test_a_login_that_is_none_is_refused(said):
    peer = ZmtpPeer(PUB, LIMITS, token=TOKEN, server=True)
    hello = b"\x05HELLO" + said
    peer.feed(GREETING.replace(b"NULL\0", b"PLAIN"))

    with pytest.raises(PeerError, match="HELLO"):
        peer.feed(bytes((4, len(hello))) + hello)

    assert not peer.ready


def test_a_wrong_token_is_told_so_and_gets_nothing():
    server = ZmtpPeer(PUB, LIMITS, token=TOKEN, server=True)
    client = ZmtpPeer(SUB, LIMITS, token=b"another one, as long")
    client.feed(server.outgoing())

    with pytest.raises(PeerError) as ended:
        server.feed(client.outgoing())
    with pytest.raises(PeerError) as told:
        client.feed(server.outgoing())

    assert (ended.value.cause, told.value.cause) == ("refused", "refused")
    assert not server.ready
    assert not client.ready


def test_a_ping_is_answered_and_unknown_commands_are_read_over():
    publisher, subscriber = met()

    assert publisher.feed(zmtp.PING + b"\x04\x05\x04NEWS" + encode([b"\x01"])) == [[b"\x01"]]
    assert publisher.outgoing() == b"\x04\x05\x04PONG"
    assert subscriber.feed(b"\x04\x05\x04PONG") == []


def test_the_command_forms_of_subscriptions_are_what_their_messages_are():
    publisher, _ = met()

    assert publisher.feed(b"\x04\x0d\x09SUBSCRIBEabc\x04\x0a\x06CANCELabc") == [
        [b"\x01abc"], [b"\x00abc"],
    ]  # fmt: skip


# libzmq


Libzmq = Callable[..., zmq.Socket]


@pytest.fixture
def libzmq() -> Iterator[Libzmq]:
    """Sockets of libzmq, which are closed with the test."""
    context = zmq.Context()
    sockets: list[zmq.Socket] = []

    def connected(kind: int, endpoint: str | None, token: bytes = b"") -> zmq.Socket:
        assert endpoint is not None
        found = context.socket(kind)
        sockets.append(found)
        found.rcvtimeo = WAIT_MS
        if token:
            found.plain_username, found.plain_password = b"whoever", token
        if kind == zmq.SUB:
            found.subscribe(b"kvstore@")
            found.heartbeat_ivl, found.heartbeat_timeout = 20, 5_000
        found.connect(endpoint)
        return found

    yield connected
    for one in sockets:
        one.close(linger=0)
    context.term()


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
@pytest.mark.parametrize("token", [b"", TOKEN])
def test_libzmq_follows_and_asks_again_over_tcp(libzmq, kind, token):
    where = "tcp://127.0.0.1:*"
    with EventPublisher(
        where, where, topic=b"kvstore@n@aa", access=FollowerAccess(token)
    ) as publisher:
        live = libzmq(zmq.SUB, publisher.bound_endpoint, token)
        asking = libzmq(kind, publisher.bound_replay_endpoint, token)
        for _ in range(500):
            publisher.publish([ClearedEvent()])
            if live.poll(20):
                break
        first = live.recv_multipart()
        number = b"\0" * 8
        asking.send_multipart([b"", number] if kind == zmq.DEALER else [number])
        answer = asking.recv_multipart()

        assert first[0] == answer[-3] == b"kvstore@n@aa"
        assert answer[-2] == number


@pytest.mark.parametrize("shown", [b"", b"not the token at all"])
def test_libzmq_without_the_token_gets_nothing(libzmq, shown, wait_until):
    where = "tcp://127.0.0.1:*"
    with EventPublisher(where, where, access=FollowerAccess(TOKEN)) as publisher:
        live = libzmq(zmq.SUB, publisher.bound_endpoint, shown)
        asking = libzmq(zmq.DEALER, publisher.bound_replay_endpoint, shown)
        asking.send_multipart([b"", bytes(8)])
        publisher.publish([ClearedEvent()])
        friend = libzmq(zmq.DEALER, publisher.bound_replay_endpoint, TOKEN)
        friend.send_multipart([b"", bytes(8)])
        assert friend.recv_multipart()[-2] == bytes(8)
        publisher.publish([ClearedEvent()])
        wait_until(lambda: publisher.stats().batches_sent == 2)

        assert not live.poll(50)
        assert not asking.poll(0)
        assert publisher.stats().replays_served == 1
