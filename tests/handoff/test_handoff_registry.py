"""Goal: only ranks that are there, and know the secret, are listed; nobody waits for a registry."""

import socket
from urllib.parse import urlsplit

import pytest

from kvstore.errors import PeerUnreachable, ProtocolError
from kvstore.handoff import registry as registries
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.greeting import PROTOCOL
from kvstore.handoff.registry import HandoffRegistry, RankRecord, RegistryClient
from kvstore.handoff.states import FailureCode, State
from tests.handoff.pair import PATIENCE, SECRET, SPACE, Memory


def test_a_registration_cannot_be_sent_again_and_its_lease_ends():
    registry = HandoffRegistry("127.0.0.1", 0, SECRET)
    try:
        client = RegistryClient(registry.url, SECRET)
        shape = Memory().pool.shape
        fields = ("127.0.0.1:9", "ab", 1, (0, 4), (0, 1), shape, "", ["tcp"], PROTOCOL)
        record = RankRecord(0, *fields, 60.0)
        client.register(record)
        assert client.ranks() == [record]
        with pytest.raises(ProtocolError, match="409"):
            client.register(record)
        with pytest.raises(ProtocolError, match="401"):
            RegistryClient(registry.url, b"x" * 32).ranks()
        client.register(RankRecord(0, "127.0.0.1:9", "ab", 2, *fields[3:], 0.0))
        assert client.ranks() == []
    finally:
        registry.close()
    with pytest.raises(PeerUnreachable):
        client.ranks()


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
    decode = DecodeManager(Memory().pool, SPACE, SECRET, patience=PATIENCE)
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
