"""Goal: only ranks that are there, and know the secret, are listed; nobody waits for a registry."""

import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from kvstore.handoff import registering
from kvstore.handoff import registry as registries
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.greeting import PROTOCOL
from kvstore.handoff.peers import peer_ranks
from kvstore.handoff.ranks import RANKS_MAX, RankGroup
from kvstore.handoff.registering import RankLease
from kvstore.handoff.registry import HandoffRegistry, RankRecord, RegistryClient
from kvstore.handoff.state_data import STATES_MAX, StateKind, StateShape
from kvstore.handoff.states import FailureCode, State
from kvstore.process.faults import Faults
from kvstore.protocol.errors import PeerUnreachable, ProtocolError
from tests.cluster.nodes import files
from tests.handoff.pair import PATIENCE, SECRET, SPACE, Memory
from tests.handoff.wrong_fields import of_another_type


def test_a_registration_cannot_be_sent_again_and_its_lease_ends():
    registry = HandoffRegistry("127.0.0.1", 0, SECRET)
    try:
        client = RegistryClient(registry.url, SECRET)
        shape = Memory().pool.shape
        fields = ("127.0.0.1:9", "ab" * 16, 1, (0, 4), (0, 1), shape, "", ["tcp"], PROTOCOL)
        record = RankRecord(0, *fields, 60.0)
        client.register(record)
        assert client.ranks() == [record]
        with pytest.raises(ProtocolError, match="409"):
            client.register(record)
        with pytest.raises(ProtocolError, match="401"):
            RegistryClient(registry.url, b"x" * 32).ranks()
        client.register(RankRecord(0, "127.0.0.1:9", "ab" * 16, 2, *fields[3:], 0.0))
        assert client.ranks() == []
    finally:
        registry.close()
    with pytest.raises(PeerUnreachable):
        client.ranks()


def test_what_no_rank_can_be_is_refused_in_the_registrys_answer_too(monkeypatch):
    shape = Memory().pool.shape
    fields = ("127.0.0.1:9", "ab" * 16, 1, (0, 4), (0, 1), shape, "", ["tcp"], PROTOCOL, 60.0)
    record = RankRecord(0, *fields, ranks=1 << 30)
    client = RegistryClient("http://127.0.0.1:9", SECRET)
    monkeypatch.setattr(client, "_ask", lambda *_: msgspec.json.encode([record]))

    with pytest.raises(ProtocolError, match="rank"):
        client.ranks()


@pytest.mark.parametrize("said", [b'[{"rank": ' + b"[" * 5_000, b'[{"address":"\xff"}]'])
def test_what_is_no_text_or_too_deep_is_refused_by_registry_and_client(said, monkeypatch, caplog):
    """Other errors of the decoder; the server of the standard library would say nothing of them."""
    client = RegistryClient("http://127.0.0.1:9", SECRET)
    monkeypatch.setattr(client, "_ask", lambda *_: said)
    with pytest.raises(ProtocolError, match="cannot be read"):
        client.ranks()

    registry = HandoffRegistry("127.0.0.1", 0, SECRET)
    try:
        with pytest.raises(ProtocolError, match="400"):
            RegistryClient(registry.url, SECRET)._ask("PUT", said[1:])
    finally:
        registry.close()
    assert "PUT /v1/ranks: 400" in caplog.text


def test_an_instance_of_too_many_ranks_is_not_connected_to():
    shape = Memory().pool.shape
    fields = ("127.0.0.1:9", "ab" * 16, 1, (0, 4), (0, 1), shape, "", ["tcp"], PROTOCOL, 60.0)
    record = RankRecord(0, *fields, ranks=1_000, data_ranks=1_000)

    with pytest.raises(PeerUnreachable, match="1000 x 1000"):
        peer_ranks([record], RankGroup.alone(shape.part, bytes(16)), shape, "")


def test_a_request_that_comes_byte_by_byte_is_cut_off_by_the_registry(wait_until, monkeypatch):
    monkeypatch.setattr(registries, "_REQUEST_S", 0.3)
    registry = HandoffRegistry("127.0.0.1", 0, SECRET)
    place = urlsplit(registry.url)
    try:
        with socket.create_connection((place.hostname, place.port), 10) as slow:
            slow.setblocking(False)

            def is_cut() -> bool:
                try:
                    slow.send(b"x")  # a line that never ends
                    return slow.recv(1) == b""
                except BlockingIOError:
                    return False
                except ConnectionError:
                    return True

            wait_until(is_cut)
    finally:
        registry.close()


def test_a_registry_that_takes_connections_and_says_nothing_is_asked_once(wait_until):
    patience = replace(PATIENCE, silence_s=2.0)  # what fails later is not tried again
    decode = DecodeManager(Memory().pool, SPACE, SECRET, patience=patience)
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            receiver = decode.receiver(1, f"http://127.0.0.1:{silent.getsockname()[1]}", 16)
            wait_until(lambda: receiver.state == State.FAILED)
            assert receiver.failure.code == FailureCode.UNREACHABLE
            silent.setblocking(False)
            silent.accept()[0].close()
            with pytest.raises(BlockingIOError):
                silent.accept()
    finally:
        decode.close()


@contextlib.contextmanager
def running() -> Iterator[tuple[HandoffRegistry, RegistryClient]]:
    registry = HandoffRegistry("127.0.0.1", 0, SECRET)
    try:
        yield registry, RegistryClient(registry.url, SECRET)
    finally:
        registry.close()


def record(boot: int = 1, count: int = 1, **changed: Any) -> RankRecord:
    made = RankRecord(
        0, "127.0.0.1:9", f"{boot:032x}", count, (0, 4), (0, 1), Memory().pool.shape, SPACE.hex(),
        ["tcp"], PROTOCOL, 60.0,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


WRONG: dict[str, list[Any]] = {
    "rank": [-1, 1, 1 << 20], "ranks": [0, 1 << 20], "data_rank": [-1, 1], "data_ranks": [0],
    "address": ["", "x", "h:99999", ":1"],
    "boot": ["", "zz" * 16, "ab" * 15], "count": [-1],
    "layers": [(0, 0), (-1, 2), (0, 1 << 40)], "heads": [(2, 1), (0, 1 << 40)],
    "space": ["zz", "ab" * 65], "transports": [[], ["x"] * 17], "protocol": [0, -1],
    "lease_s": [-1.0, 1e9], "shape": [],
}  # fmt: skip


def test_every_wrong_field_of_a_registration_is_refused_and_logged_and_changes_nothing(caplog):
    fields = {field.name for field in msgspec.structs.fields(RankRecord) if field.required}
    assert fields <= set(WRONG)
    with running() as (registry, client):
        client.register(record())
        before = client.ranks()
        for field, values in WRONG.items():
            for value in values:
                with pytest.raises(ProtocolError, match="400"):
                    client.register(msgspec.structs.replace(record(2), **{field: value}))
        for what, wrong in of_another_type(record(2)):
            with pytest.raises(ProtocolError, match="400"):
                assert client._ask("PUT", msgspec.json.encode(wrong)) is None, what
        assert client.ranks() == before
        assert registry.faults.counts["refused"] > 50
        assert "127.0.0.1: PUT /v1/ranks: 400" in caplog.text


def test_an_old_registration_of_a_boot_that_was_replaced_is_refused():
    with running() as (_, client):
        client.register(record(1, 1))
        client.register(record(2, 1))
        with pytest.raises(ProtocolError, match="replaced"):
            client.register(record(1, 2))
        assert [one.boot for one in client.ranks()] == [record(2).boot]
        client.register(record(2, 2, lease_s=0.0))
        client.register(record(1, 3))  # nobody has its place any more
        assert [one.boot for one in client.ranks()] == [record(1).boot]


def test_ranks_whose_leases_have_ended_take_no_place_from_others():
    """As after starts with other numbers of ranks, or by a rank that registers as all of them."""
    shape, table = Memory().pool.shape, registries.RankTable()
    fields = ("127.0.0.1:9", "ab" * 16, 1, (0, 4), (0, 1), shape, "", ["tcp"], PROTOCOL)
    record = RankRecord(0, *fields, 5.0, ranks=RANKS_MAX, data_ranks=2)
    for rank in range(RANKS_MAX):
        assert table.register(msgspec.structs.replace(record, rank=rank), 0) == ""
    late = msgspec.structs.replace(record, data_rank=1)
    assert "are registered" in table.register(late, 4_000_000_000)
    assert table.register(late, 6_000_000_000) == ""
    assert table.listed(6_000_000_000) == [late]


def test_a_registration_is_as_small_as_that_all_can_be_listed():
    shape = Memory().pool.shape
    states = tuple(StateShape(f"{at:032}", StateKind.LAST, 4096, 1 << 30, 1 << 31, 1 << 20)
                   for at in range(STATES_MAX))  # fmt: skip
    shape = dataclasses.replace(shape, states=states)
    fields = ("a" * 200 + ":9", "ab" * 16, 1 << 62, (0, 4), (0, 1), shape, "ab" * 64)
    record = RankRecord(0, *fields, ["x" * 40] * 16, PROTOCOL, 60.0, RANKS_MAX)
    registry = HandoffRegistry("127.0.0.1", 0, SECRET)
    client = RegistryClient(registry.url, SECRET)
    try:
        client.register(record)
        for rank in range(RANKS_MAX):
            one = msgspec.structs.replace(record, rank=rank, boot="cd" * 16)
            registry._table.register(one, time.monotonic_ns())
        with pytest.raises(ProtocolError, match="413"):
            client.register(msgspec.structs.replace(record, rank=1, address="a" * 8_000 + ":9"))
        assert len(client.ranks()) == RANKS_MAX
    finally:
        registry.close()


@pytest.mark.parametrize("at", ["handshake", "name"])
def test_a_registry_that_is_not_reached_in_time_is_given_up(at, monkeypatch):
    """The system asks name servers as it likes."""
    monkeypatch.setattr(registries, "_REQUEST_S", 0.3)
    monkeypatch.setattr(registries, "_WAIT_S", 0.3)
    over, sent = threading.Event(), []

    def trickle(listener: socket.socket) -> None:
        with listener.accept()[0] as connection, contextlib.suppress(OSError):
            connection.sendall(b"\x16\x03\x03\x40\x00")  # a record of 16 KiB
            while len(sent) < 1_000 and not over.wait(0.01):
                connection.sendall(b"\0")
                sent.append(1)

    def no_name(*_, **__):
        over.wait(10)
        raise OSError("nobody")

    shown = files()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=(listener,))
        host = "127.0.0.1" if at == "handshake" else "a-name"
        client = RegistryClient(
            f"https://{host}:{listener.getsockname()[1]}", SECRET, shown.connecting()
        )
        begun = time.monotonic()
        try:
            if at == "handshake":
                thread.start()
            else:
                monkeypatch.setattr(socket, "getaddrinfo", no_name)
            with pytest.raises(PeerUnreachable, match="the registry"):
                client.ranks()
            assert time.monotonic() - begun < 5
        finally:
            over.set()
            if at == "handshake":
                thread.join()


def test_a_lease_ends_although_its_renewal_does_not(wait_until, monkeypatch):
    monkeypatch.setattr(registering, "LEASE_S", 0.04)
    monkeypatch.setattr(registering, "CLOSE_S", 0.1)
    over, leases = threading.Event(), []

    class Stuck:
        def register(self, record: RankRecord) -> None:
            leases.append(record.lease_s)
            if len(leases) > 1:
                assert over.wait(30)

    lease = RankLease(Stuck(), record(), Faults(logging.getLogger("test"), "test"))
    wait_until(lambda: len(leases) == 2)
    try:
        lease.close()
        assert leases == [0.04, 0.04], "nobody would answer"
    finally:
        over.set()
    wait_until(lambda: not lease._ticker._thread.is_alive())


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
def test_strangers_who_connect_and_ask_nothing_keep_no_rank_out(with_tls, wait_until):
    """More than may ask at a time: the one that has said nothing for longest gives way."""
    shown = files() if with_tls else None
    registry = HandoffRegistry("127.0.0.1", 0, SECRET, shown)
    client = RegistryClient(registry.url, SECRET, shown.connecting() if shown else None)
    place = urlsplit(registry.url)
    try:
        with contextlib.ExitStack() as strangers:
            for _ in range(3 * registries._REQUESTS_MAX):
                at = (place.hostname, place.port)
                strangers.enter_context(socket.create_connection(at, 10))
            wait_until(lambda: registry.faults.counts["crowd"] > 0)
            assert client.ranks() == []
    finally:
        registry.close()


def test_a_request_for_which_there_is_no_thread_takes_no_place_for_good(monkeypatch):
    monkeypatch.setattr(registries, "_REQUESTS_MAX", 1)
    registry = HandoffRegistry("127.0.0.1", 0, SECRET)
    client = RegistryClient(registry.url, SECRET)

    def no_thread(*_):
        raise RuntimeError("can't start new thread")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(ThreadingMixIn, "process_request", no_thread)
            with pytest.raises(PeerUnreachable):
                client.ranks()
        assert client.ranks() == []
    finally:
        registry.close()


def test_a_registry_that_answers_byte_by_byte_is_given_up(monkeypatch):
    monkeypatch.setattr(registries, "_REQUEST_S", 0.3)
    over = threading.Event()

    def trickle(listener: socket.socket) -> None:
        with listener.accept()[0] as connection, contextlib.suppress(OSError):
            while not over.wait(0.01):
                connection.send(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        client = RegistryClient(f"http://127.0.0.1:{listener.getsockname()[1]}", SECRET)
        with pytest.raises(PeerUnreachable):
            client.ranks()
        over.set()
        thread.join()
