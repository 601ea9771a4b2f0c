"""Goal: whatever a node or another thread does, a call ends in its time and says why."""

import socket
import threading
from time import monotonic

import pytest

from kvstore.client import exchange, link, notices
from kvstore.client.exchange import Connection
from kvstore.client.link import Link
from kvstore.protocol import wire
from kvstore.protocol.errors import KVStoreError, PeerUnreachable, ProtocolError, TransferTimeout
from tests.client.peer import SHORT_S, TIMEOUT_S, Held, answer, connection_of

# What has no answer


def test_what_has_no_answer_does_not_wait_for_one_that_another_thread_waits_for(
    peer, connected, wait_until
):
    with Held(connection_of(connected)._turn):
        connected.send(wire.AbortPut(7))
        wait_until(lambda: wire.AbortPut(7) in peer.heard)

    assert connected.connected


def test_what_has_no_answer_does_not_wait_for_another_thread_that_writes(
    peer, connected, wait_until
):
    with Held(connection_of(connected)._writing):
        before = monotonic()
        connected.send(wire.AbortPut(7))
        connected.send_later(wire.Release(8))
        assert monotonic() - before < TIMEOUT_S / 2
        assert wire.AbortPut(7) not in peer.heard

    wait_until(lambda: peer.heard[-2:] == [wire.AbortPut(7), wire.Release(8)])


def test_what_was_said_first_arrives_first(peer, connected):
    connected.send_later(wire.Release(1))
    connected.send(wire.AbortPut(2))
    connected.send_later(wire.Release(3))
    connected.request(wire.Ping(0), TIMEOUT_S)

    assert peer.heard[1:4] == [wire.Release(1), wire.AbortPut(2), wire.Release(3)]
    assert peer.names()[4] == "Ping"


def test_a_link_that_nobody_needs_looks_seldom_and_then_sends_at_once_what_can_wait(
    peer, connected, monkeypatch, wait_until
):
    looks: list[float] = []
    seldom, go_on = threading.Event(), threading.Event()
    real = exchange.wait_closed

    def wait_closed(connection: socket.socket, timeout_s: float) -> bool:
        looks.append(timeout_s)
        if timeout_s > link._TICK_S and not seldom.is_set():
            seldom.set()
            assert go_on.wait(TIMEOUT_S)
        return real(connection, timeout_s)

    connected.send_later(wire.Release(1))
    monkeypatch.setattr(exchange, "wait_closed", wait_closed)
    assert seldom.wait(TIMEOUT_S)
    assert looks[:-1] == [link._TICK_S] * (len(looks) - 1), "often, while it was needed"
    try:
        connected.send_later(wire.Release(2))
        wait_until(lambda: wire.Release(2) in peer.heard)
    finally:
        count = len(looks)
        go_on.set()
    wait_until(lambda: len(looks) > count)
    assert looks[count] == link._TICK_S, "somebody needs it again"


def test_a_link_that_looks_seldom_sees_the_end_of_its_connection_at_once(
    peer, monkeypatch, wait_until
):
    monkeypatch.setattr(link, "_QUIET_AFTER_S", 0.0)
    monkeypatch.setattr(link, "_QUIET_TICK_S", 3600.0)
    made = Link(peer.path, "engine")
    for epoch in (1, 2):
        wait_until(lambda epoch=epoch: made.connected and made.epoch == epoch)
        wait_until(lambda: not connection_of(made).watched)
        if epoch == 1:
            peer.drop()

    thread, before = made._thread, monotonic()
    made.close()
    assert monotonic() - before < TIMEOUT_S / 2
    assert thread is not None
    assert not thread.is_alive()


def test_what_can_wait_on_a_new_connection_is_sent_soon_after_a_quiet_time(
    peer, monkeypatch, wait_until
):
    monkeypatch.setattr(link, "_QUIET_AFTER_S", 0.5)
    monkeypatch.setattr(link, "_QUIET_TICK_S", 3600.0)
    connected_again, go_on = threading.Event(), threading.Event()
    tidy = Link._tidy

    def slow(made: Link) -> None:
        if made.connected and made.epoch == 2 and not connected_again.is_set():
            connected_again.set()
            assert go_on.wait(TIMEOUT_S)
        tidy(made)

    monkeypatch.setattr(Link, "_tidy", slow)
    made = Link(peer.path, "engine")
    wait_until(lambda: made.connected and made.epoch == 1)
    made.send_later(wire.Release(1))
    wait_until(lambda: wire.Release(1) in peer.heard)
    wait_until(lambda: not connection_of(made).watched)
    peer.drop()
    assert connected_again.wait(TIMEOUT_S)
    made.send_later(wire.Release(2))  # as many messages as on the first one
    go_on.set()
    wait_until(lambda: wire.Release(2) in peer.heard)
    made.close()


def test_what_was_meant_for_an_earlier_connection_is_said_on_no_other(peer, connected, wait_until):
    epoch = connected.epoch
    peer.drop()
    wait_until(lambda: connected.connected and connected.epoch > epoch)

    connected.send(wire.Corrupt(0, 0, b"k" * 32, 1), epoch)
    connected.send_later(wire.Release(5), epoch)
    connected.send(wire.ReportPrefill(0.5))
    connected.request(wire.Ping(0), TIMEOUT_S)

    assert "Corrupt" not in peer.names()
    assert "Release" not in peer.names()
    assert "ReportPrefill" in peer.names()


def test_nothing_is_said_on_a_connection_before_its_hello(peer, connected, wait_until):
    epoch = connected.epoch
    with Held(connected._state):  # it cannot connect again yet
        peer.drop()
        for number in range(100):
            connected.send_later(wire.Release(number))
    wait_until(lambda: connected.connected and connected.epoch > epoch)
    connected.request(wire.Ping(0), TIMEOUT_S)

    names = peer.names()
    assert names[names.index("Hello", 1) + 1 :] == ["Settled", "Ping"]


def test_a_node_that_takes_no_messages_is_given_up(peer, connected, monkeypatch, wait_until):
    monkeypatch.setattr(exchange, "POSTED_MAX", 10)
    epoch = connected.epoch
    with Held(connection_of(connected)._writing):
        for number in range(11):
            connected.send_later(wire.Release(number))
        wait_until(lambda: connected.epoch == epoch and not connected.connected)

    wait_until(lambda: connected.connected and connected.epoch > epoch)


# Requests


def test_a_request_that_only_waited_for_others_leaves_the_connection_alone(peer, connected):
    epoch = connected.epoch
    with Held(connection_of(connected)._turn), pytest.raises(TransferTimeout, match="other"):
        connected.request(wire.Ping(0), SHORT_S)

    assert connected.connected
    assert connected.request(wire.Ping(0), TIMEOUT_S) is not None
    assert connected.epoch == epoch


def test_a_request_without_an_answer_ends_the_connection_and_its_late_answer_meets_nobody(
    peer, connected, wait_until
):
    gate = threading.Event()

    def late(request: wire.Request) -> wire.Answer | None:
        assert gate.wait(TIMEOUT_S)
        return answer(request)

    peer.answer = late
    with pytest.raises(TransferTimeout):
        connected.request(wire.Ping(0), SHORT_S)
    peer.answer = answer
    gate.set()

    wait_until(lambda: connected.connected)
    assert isinstance(connected.request(wire.Ping(0), TIMEOUT_S), wire.Pong)
    assert connected.epoch == 2


def test_a_request_whose_time_is_up_before_its_turn_breaks_nothing(peer, connected):
    with pytest.raises(TransferTimeout, match="other"):
        connection_of(connected).request(wire.Ping(0), monotonic() - 1.0)

    assert connected.connected


def test_an_answer_to_another_request_is_no_answer(peer, connected):
    peer.answer = lambda request: wire.Pong(99)

    with pytest.raises(ProtocolError, match="does not belong"):
        connected.request(wire.Ping(0), TIMEOUT_S)


def test_a_request_for_an_earlier_connection_is_not_sent(peer, connected, wait_until):
    epoch = connected.epoch
    peer.drop()
    wait_until(lambda: connected.connected and connected.epoch > epoch)

    with pytest.raises(PeerUnreachable, match="reconnected"):
        connected.request(wire.Ping(0), TIMEOUT_S, epoch)
    assert "Ping" not in peer.names()


def test_a_request_that_a_slow_node_reads_byte_by_byte_ends_in_its_time(tmp_path):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "slow.sock"))
    listener.listen(1)
    connection = Connection(str(tmp_path / "slow.sock"), 1)
    accepted, _ = listener.accept()
    ended = threading.Event()

    def sip() -> None:
        while not ended.wait(0.02) and accepted.recv(4096):
            pass

    thread = threading.Thread(target=sip)
    thread.start()
    before = monotonic()
    try:
        with pytest.raises((TransferTimeout, OSError)):
            connection.request(wire.Lookup(0, 0, [0], bytes(8 << 20)), before + 0.3)
    finally:
        ended.set()
        thread.join(TIMEOUT_S)
        connection.close("")
        accepted.close()
        listener.close()

    assert monotonic() - before < TIMEOUT_S, "it would take 40 s to read"


def test_a_closed_link_answers_at_once_although_a_request_was_waiting(peer, connected, wait_until):
    peer.answer = lambda request: None if isinstance(request, wire.Lookup) else answer(request)
    errors: list[KVStoreError] = []

    def look() -> None:
        try:
            connected.request(wire.Lookup(0, 0, [0], b""), TIMEOUT_S)
        except KVStoreError as error:
            errors.append(error)

    waiting = threading.Thread(target=look)
    waiting.start()
    wait_until(lambda: "Lookup" in peer.names())
    before = monotonic()
    connected.close()
    waiting.join(TIMEOUT_S)

    assert monotonic() - before < TIMEOUT_S / 2
    assert isinstance(errors[0], PeerUnreachable)
    with pytest.raises(PeerUnreachable, match="closed"):
        connected.request(wire.Ping(0), TIMEOUT_S)


def test_a_node_that_is_lost_again_and_again_is_said_once(
    peer, connected, monkeypatch, wait_until, caplog
):
    def lose() -> None:
        epoch = connected.epoch
        with pytest.raises(TransferTimeout):
            connected.request(wire.Ping(0), SHORT_S)
        wait_until(lambda: connected.connected and connected.epoch > epoch)

    caplog.set_level("INFO", "kvstore.client.link")
    peer.answer = lambda request: None if isinstance(request, wire.Ping) else answer(request)
    for _ in range(5):
        lose()
    said = [one.getMessage() for one in caplog.records]
    assert sum("lost the node" in one for one in said) == 1
    assert sum("connected to the node" in one for one in said) == 1

    monkeypatch.setattr(notices, "SAY_S", 0.0)
    caplog.clear()
    lose()
    (lost,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert lost.endswith("; 4 times more since this was said last")


# Faults of our own


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_fault_in_its_thread_a_link_connects_again(
    peer, connected, monkeypatch, wait_until
):
    epoch, tidy, faults = connected.epoch, connected._tidy, []

    def fail_once() -> None:
        if not faults:
            faults.append(1)
            raise RuntimeError("a mistake")
        tidy()

    monkeypatch.setattr(connected, "_tidy", fail_once)
    wait_until(lambda: faults)
    wait_until(lambda: not connected._thread.is_alive())
    peer.drop()

    wait_until(lambda: connected.epoch > epoch and connected.connected)
    connected.request(wire.Ping(0), TIMEOUT_S)
