"""EventPublisher over real ZMQ sockets: frames, replay, gaps, and an end that leaves nothing."""

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvstore.events import publisher as events
from kvstore.events import server as eventserver
from kvstore.events.publisher import (
    END_OF_REPLAY,
    ClearedEvent,
    EventBatch,
    EventPublisher,
    RemovedEvent,
    StoredEvent,
)
from kvstore.protocol.errors import InvalidArgument, TransferTimeout

WAIT_MS = 10_000
TOPIC = b"kvstore@node-a@0badcafe"
LOOPBACK = "tcp://127.0.0.1:*"
KEY = bytes(range(32))
WIDE = events.RemovedEvent(block_hashes=[KEY] * 7, medium="CPU")
HUGE = events.RemovedEvent(block_hashes=[KEY] * 2_000, medium="CPU")  # 68 kB: fills buffers


def stored(number: int = 0) -> StoredEvent:
    return StoredEvent(
        block_hashes=[number.to_bytes(32, "big")],
        parent_block_hash=None,
        token_ids=[number, number + 1],
        block_size=2,
        medium="CPU",
    )


class Peers:
    """The sockets of the other side; all of them close with the test."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket] = []

    def open(self, kind: int, endpoint: str | None, **options: int) -> zmq.Socket:
        assert endpoint is not None
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.rcvtimeo = WAIT_MS
        socket.sndtimeo = WAIT_MS
        for option, value in options.items():
            setattr(socket, option, value)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(endpoint)
        return socket

    def asker(self, publisher: EventPublisher, **options: int) -> zmq.Socket:
        return self.open(zmq.DEALER, publisher.bound_replay_endpoint, **options)

    def subscribe(self, publisher: EventPublisher, **options: int) -> tuple[zmq.Socket, int]:
        """A subscriber that is known to receive, and the next sequence it should see.

        A PUB socket drops what it sends before a subscription has arrived, so batches are
        published until one comes through; the ones on their way are then taken out.
        """
        subscriber = self.open(zmq.SUB, publisher.bound_endpoint, **options)
        for _ in range(WAIT_MS // 10):
            publisher.publish([ClearedEvent()])
            if subscriber.poll(10):
                break
        last = publisher.stats().sequence_next - 1
        while int.from_bytes(subscriber.recv_multipart()[1], "big") != last:
            pass
        return subscriber, last + 1

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    with EventPublisher(LOOPBACK, LOOPBACK, topic=TOPIC, clock=lambda: 1234.5) as publisher:
        yield publisher


def replay(asker: zmq.Socket, first: int) -> list[tuple[int, bytes]]:
    """Every (sequence, payload) the publisher still has from ``first`` on."""
    asker.send_multipart([b"", first.to_bytes(8, "big")])
    batches = []
    while True:
        empty, topic, sequence, payload = asker.recv_multipart()
        assert (empty, topic) == (b"", TOPIC)
        if sequence == END_OF_REPLAY:
            assert payload == b""
            return batches
        batches.append((int.from_bytes(sequence, "big"), payload))


def wait_replay(asker: zmq.Socket, count: int) -> list[tuple[int, bytes]]:
    """Replay from 0 until ``count`` batches have been sent."""
    for _ in range(1_000):
        batches = replay(asker, 0)
        if len(batches) >= count:
            return batches
    pytest.fail(f"{count} batches were never sent")


class Gate:
    """Parks the publisher's thread in front of its first batch until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived = threading.Event()
        self.opened = threading.Event()
        self._encode = events._encode
        monkeypatch.setattr(events, "_encode", self)

    def __call__(self, batch: EventBatch) -> bytes | None:
        self.arrived.set()
        assert self.opened.wait(WAIT_MS / 1_000)
        return self._encode(batch)


# Frames


def test_a_message_has_topic_big_endian_sequence_and_a_msgpack_array(peers, publisher):
    subscriber, sequence = peers.subscribe(publisher)
    publisher.publish([ClearedEvent(), ClearedEvent()])

    topic, number, payload = subscriber.recv_multipart()

    assert topic == TOPIC
    assert number == sequence.to_bytes(8, "big")
    assert msgspec.msgpack.decode(payload) == [1234.5, [{"type": "AllBlocksCleared"}] * 2, None]


# Sequence and replay


def test_the_sequence_starts_at_zero_and_counts_batches(peers, publisher):
    for number in range(3):
        publisher.publish([stored(number), stored(number)])

    asker = peers.asker(publisher)

    assert [sequence for sequence, _ in wait_replay(asker, 3)] == [0, 1, 2]


def test_no_events_make_no_batch(publisher):
    publisher.publish([])

    assert publisher.stats().sequence_next == 0


def test_replay_gives_the_same_payload_as_the_live_message(peers, publisher):
    subscriber, sequence = peers.subscribe(publisher)
    publisher.publish([stored(9)])
    _, _, live = subscriber.recv_multipart()
    asker = peers.asker(publisher)

    assert replay(asker, sequence) == [(sequence, live)]


def test_replay_from_the_future_is_only_the_end(peers, publisher):
    publisher.publish([stored()])
    asker = peers.asker(publisher)

    assert replay(asker, 2**63) == []


def test_two_subscribers_replay_at_their_own_pace(peers, publisher):
    publisher.publish([stored(0)])
    publisher.publish([stored(1)])
    first, second = (peers.asker(publisher) for _ in range(2))

    batches = wait_replay(first, 2)

    assert replay(second, 1) == batches[1:]
    assert replay(first, 0) == batches


@pytest.mark.parametrize(
    "request_frames", [[b""], [b"", b"\0" * 7], [b"", b"\0" * 9], [b"\0" * 8], [b"", b"", b""]]
)
def test_a_malformed_replay_request_gets_the_end_at_once(
    peers, publisher, request_frames, wait_until
):
    publisher.publish([stored()])
    asker = peers.asker(publisher)
    asker.send_multipart(request_frames)

    assert asker.recv_multipart() == [b"", TOPIC, END_OF_REPLAY, b""]
    wait_until(lambda: publisher.stats().replays_cut == 1, what="the request counted as cut")


def test_an_oversized_replay_request_costs_only_its_own_connection(peers, publisher):
    publisher.publish([stored()])
    rude = peers.asker(publisher)
    rude.send_multipart([b"", b"x" * 1_000_000])
    asker = peers.asker(publisher)

    assert len(wait_replay(asker, 1)) == 1
    assert rude.poll(0) == 0


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        pytest.param({"replay_max": 2}, 2, id="batches"),
        pytest.param({"replay_bytes_max": 1_000}, 3, id="bytes"),
    ],
)
def test_replay_keeps_the_newest_batches_within_its_bounds(peers, bounds, kept, wait_until):
    payload_bytes = len(msgspec.msgpack.encode(EventBatch(0.0, [WIDE])))
    assert 250 < payload_bytes < 333
    with EventPublisher(LOOPBACK, LOOPBACK, topic=TOPIC, clock=lambda: 0.0, **bounds) as publisher:
        for _ in range(10):
            publisher.publish([WIDE])
        wait_until(lambda: publisher.stats().batches_sent == 10)
        asker = peers.asker(publisher)

        sequences = [sequence for sequence, _ in replay(asker, 0)]

    assert sequences == list(range(10 - kept, 10))


def test_a_whole_replay_fits_however_slowly_its_client_reads(peers, wait_until):
    """3,000 messages of 7 kB: more than what may wait for one follower and the kernel's buffers."""
    event = RemovedEvent(block_hashes=[KEY] * 200, medium="CPU")
    with EventPublisher(LOOPBACK, LOOPBACK, topic=TOPIC, queue_max=3_000) as publisher:
        for _ in range(3_000):
            publisher.publish([event])
        wait_until(lambda: publisher.stats().batches_sent == 3_000)
        asker = peers.asker(publisher, rcvhwm=1, rcvbuf=4_096)
        asker.send_multipart([b"", bytes(8)])
        assert asker.poll(WAIT_MS)  # it has begun; nobody reads on for now
        assert publisher.stats().replays_served == 0

        sequences = [asker.recv_multipart()[2] for _ in range(3_001)]

    assert sequences[-1] == END_OF_REPLAY
    assert sequences[:-1] == [number.to_bytes(8, "big") for number in range(3_000)]


def test_a_client_that_asks_without_reading_is_cut_and_the_others_are_not(peers, wait_until):
    with EventPublisher(LOOPBACK, LOOPBACK, topic=TOPIC, replay_max=50) as publisher:
        for _ in range(50):
            publisher.publish([HUGE])
        wait_until(lambda: publisher.stats().batches_sent == 50)
        deaf = peers.asker(publisher, rcvhwm=1, rcvbuf=4_096)
        for _ in range(20):
            deaf.send_multipart([b"", bytes(8)])
        wait_until(lambda: publisher.stats().replays_cut > 0)
        asker = peers.asker(publisher)

        assert len(replay(asker, 0)) == 50


# Overflow


def test_a_full_queue_costs_the_batch_and_its_number_so_that_the_gap_is_seen(
    peers, monkeypatch, wait_until
):
    gate = Gate(monkeypatch)
    with EventPublisher(LOOPBACK, LOOPBACK, topic=TOPIC, queue_max=2) as publisher:
        publisher.publish([stored(0)])
        assert gate.arrived.wait(10)
        for number in range(1, 6):
            publisher.publish([stored(number)])

        held = publisher.stats()
        gate.opened.set()
        wait_until(lambda: publisher.stats().batches_sent == 3)
        publisher.publish([stored(6)])
        asker = peers.asker(publisher)
        sequences = [sequence for sequence, _ in wait_replay(asker, 4)]

    assert (held.sequence_next, held.batches_queued, held.batches_dropped) == (6, 2, 3)
    assert sequences == [0, 1, 2, 6]


def test_events_that_cannot_be_encoded_are_a_gap_and_a_log_line(peers, publisher, caplog):
    publisher.publish([stored(0)])
    publisher.publish([RemovedEvent(block_hashes=[object()], medium="CPU")])
    publisher.publish([stored(2)])
    asker = peers.asker(publisher)

    assert [sequence for sequence, _ in wait_replay(asker, 2)] == [0, 2]
    assert publisher.stats().batches_dropped == 1
    assert "cannot be encoded" in caplog.text


def test_many_threads_publish_without_losing_or_repeating_a_number(peers, wait_until):
    with EventPublisher(LOOPBACK, LOOPBACK, topic=TOPIC, queue_max=10_000) as publisher:
        threads = [
            threading.Thread(target=lambda: [publisher.publish([stored(n)]) for n in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        wait_until(lambda: publisher.stats().batches_sent == 800)
        asker = peers.asker(publisher)

        assert [sequence for sequence, _ in replay(asker, 0)] == list(range(800))


# Endpoints


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://127.0.0.1:0"])
def test_a_wildcard_port_is_reported_as_the_real_one(endpoint):
    with EventPublisher(endpoint, endpoint) as publisher:
        ports = [
            int(bound.removeprefix("tcp://127.0.0.1:"))
            for bound in (publisher.bound_endpoint, publisher.bound_replay_endpoint)
        ]

    assert min(ports) > 0
    assert ports[0] != ports[1]


def test_a_unix_socket_serves_and_its_path_can_be_used_again(peers, tmp_path: Path):
    endpoint = f"ipc://{tmp_path / 'events.sock'}"
    for _ in range(2):
        with EventPublisher(endpoint, topic=TOPIC) as publisher:
            assert publisher.bound_endpoint == endpoint
            assert publisher.bound_replay_endpoint is None
            subscriber, sequence = peers.subscribe(publisher)
            publisher.publish([stored()])

            assert subscriber.recv_multipart()[1] == sequence.to_bytes(8, "big")


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_is_taken_is_refused_by_name_and_leaks_nothing(publisher, field):
    endpoints = {"endpoint": LOOPBACK, field: publisher.bound_endpoint}

    with pytest.raises(InvalidArgument) as refusal:
        EventPublisher(**endpoints)

    assert refusal.value.field == field


@pytest.mark.parametrize("endpoint", ["", "tcp://127.0.0.1", "carrier-pigeon://loft", "ipc://"])
def test_a_malformed_endpoint_is_refused_by_name(endpoint):
    with pytest.raises(InvalidArgument) as refusal:
        EventPublisher(endpoint)

    assert refusal.value.field == "endpoint"


@pytest.mark.parametrize("field", ["queue_max", "replay_max", "replay_bytes_max"])
def test_a_bound_that_is_not_positive_is_refused_by_name(field):
    with pytest.raises(InvalidArgument) as refusal:
        EventPublisher(LOOPBACK, **{field: 0})

    assert refusal.value.field == field


# The end


def test_close_sends_what_is_queued_first(peers, monkeypatch):
    gate = Gate(monkeypatch)
    gate.opened.set()
    publisher = EventPublisher(LOOPBACK, topic=TOPIC)
    subscriber, sequence = peers.subscribe(publisher)
    gate.opened.clear()
    for number in range(600):
        publisher.publish([stored(number)])
    closer = threading.Thread(target=publisher.close)
    closer.start()
    gate.opened.set()
    closer.join(10)

    received = [int.from_bytes(subscriber.recv_multipart()[1], "big") for _ in range(600)]

    assert received == list(range(sequence, sequence + 600))


def test_publishing_after_close_is_a_counted_loss_and_closing_twice_is_harmless():
    publisher = EventPublisher(LOOPBACK)
    publisher.close()
    publisher.publish([stored()])
    publisher.close()

    assert publisher.stats().batches_dropped == 1
    assert publisher.stats().sequence_next == 1


def test_close_says_when_the_thread_does_not_end_in_time(monkeypatch):
    monkeypatch.setattr(events, "_CLOSE_GRACE_S", 0.01)
    gate = Gate(monkeypatch)
    publisher = EventPublisher(LOOPBACK)
    publisher.publish([stored()])
    assert gate.arrived.wait(10)

    with pytest.raises(TransferTimeout, match="did not end"):
        publisher.close(timeout_s=0.0)

    gate.opened.set()
    publisher.close()


def test_closing_drops_what_a_stopped_subscriber_does_not_take(peers, wait_until, monkeypatch):
    monkeypatch.setattr(events, "_CLOSE_GRACE_S", 10.0)
    publisher = EventPublisher(LOOPBACK, topic=TOPIC)
    peers.subscribe(publisher, rcvhwm=1, rcvbuf=4_096)
    for _ in range(500):
        publisher.publish([HUGE])
    wait_until(lambda: publisher.stats().batches_queued == 0)

    publisher.close(timeout_s=0.2)  # nobody reads; the leak check sees that all ended

    assert publisher.stats().sequence_next == publisher.stats().batches_sent


def test_every_way_of_waking_the_thread_reaches_it(monkeypatch, wait_until):
    """A wake-up is sent only for the first batch of a queue; none may be forgotten in between."""
    monkeypatch.setattr(events, "_POLL_S", WAIT_MS)  # nothing but wake-ups gets through
    monkeypatch.setattr(eventserver, "_CHECK_S", WAIT_MS)
    with EventPublisher(LOOPBACK) as publisher:
        for number in range(500):
            publisher.publish([stored(number)])
            if number % 7 == 0:
                wait_until(lambda: publisher.stats().batches_queued == 0)

        wait_until(lambda: publisher.stats().batches_sent == 500)
