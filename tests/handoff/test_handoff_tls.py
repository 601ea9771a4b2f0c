"""Goal: with certificates, nobody without one of the authority has a link, or is told of a rank."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest

from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.registry import HandoffRegistry, RegistryClient
from kvstore.handoff.states import FailureCode, State
from kvstore.process.tls import CertificateFiles
from kvstore.protocol.errors import InvalidArgument, PeerUnreachable
from kvstore.transport.streams import host_and_port
from tests.cluster.nodes import files
from tests.handoff.pair import SECRET, SPACE, Memory, Pair, managers, push_all

NODE = files()
STRANGER = files("stranger", "other")
"""Of another authority, and trusts that one only."""
HALF = files("stranger")
"""Trusts the node's authority, and shows a certificate of another one."""


def without_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(NODE.authority)
    return context


FOREIGN = {
    "another authority": STRANGER.connecting(),
    "a certificate of another authority": HALF.connecting(),
    "no certificate": without_certificate(),
    "plain text": None,
}


def said_to(address: str, context: ssl.SSLContext | None) -> bytes:
    """What a stranger hears of a port that he speaks to."""
    with socket.create_connection(host_and_port(address), 10) as plain, suppress(OSError):
        if context is None:
            plain.sendall(b"GET /v1/ranks HTTP/1.1\r\n\r\n")
            return b"".join(iter(lambda: plain.recv(4096), b""))
        with context.wrap_socket(plain, do_handshake_on_connect=True) as stranger:
            stranger.sendall(b"GET /v1/ranks HTTP/1.1\r\n\r\n")
            return b"".join(iter(lambda: stranger.recv(4096), b""))
    return b""


def pushes(pair: Pair, room: int, wait_until) -> None:
    sender, receiver = pair.begin(room, 12)
    blocks = list(range(20, 32))
    receiver.announce(0, blocks)
    push_all(sender, pair.here, blocks)
    wait_until(lambda: receiver.state == State.SUCCESS, 20)
    assert pair.there.has(room, range(12), blocks)
    wait_until(lambda: sender.state == State.SUCCESS)
    sender.close()
    receiver.close()


def test_with_certificates_of_one_authority_kv_arrive(wait_until):
    with managers(here=NODE, there=NODE) as pair:
        assert pair.registry.url.startswith("https://127.0.0.1:")
        pushes(pair, 1, wait_until)


@pytest.mark.parametrize("stranger", FOREIGN)
def test_strangers_hear_nothing_of_prefill_and_its_registry(stranger, wait_until, caplog):
    with managers(here=NODE, there=NODE) as pair:
        sender, receiver = pair.begin(1, 12)
        receiver.announce(0, list(range(12)))
        wait_until(lambda: sender.state == State.WAITING_FOR_INPUT)
        before = pair.prefill.describe(), pair.prefill.stats()["links"]
        heard = said_to(pair.prefill.address, FOREIGN[stranger])
        assert b"kvstore" not in heard
        wait_until(lambda: pair.prefill.stats().get("tls") == 1)
        said = "handoff, prefill: tls: 127.0.0.1: the connection broke: "
        wait_until(lambda: said in caplog.text)  # it is counted first
        heard = said_to(pair.registry.url.removeprefix("https://"), FOREIGN[stranger])
        assert b"HTTP" not in heard
        wait_until(lambda: pair.registry.faults.counts["refused"] == 1)
        wait_until(lambda: "handoff, registry: refused: 127.0.0.1: TLS: " in caplog.text)
        [one], links = pair.prefill.describe(), pair.prefill.stats()["links"]
        assert ([one._replace(seconds=before[0][0].seconds)], links) == before
        push_all(sender, pair.here, list(range(12)))
        wait_until(lambda: receiver.state == State.SUCCESS, 20)


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        (NODE, STRANGER, "CERTIFICATE_VERIFY_FAILED"),
        (NODE, HALF, "refused: 127.0.0.1: TLS: "),
        (STRANGER, NODE, "CERTIFICATE_VERIFY_FAILED"),
        (NODE, None, "both engines need certificates"),
        (None, NODE, "both engines need certificates"),
    ],
)
def test_engines_whose_certificates_do_not_fit_do_not_push(here, there, said, wait_until, caplog):
    with managers(here=here, there=there) as pair:
        sender, receiver = pair.begin(1, 12)
        receiver.announce(0, list(range(12)))
        wait_until(lambda: receiver.state == State.FAILED, 20)
        assert receiver.failure is not None
        assert receiver.failure.code == FailureCode.UNREACHABLE
        assert not receiver.holds_blocks
        assert f"handoff, decode: unreachable: {pair.registry.url}: " in caplog.text
        assert said in caplog.text
        assert sender.state == State.BOOTSTRAPPING
        assert pair.prefill.stats()["links"] == 0
        assert not pair.there.planes.any()


@contextmanager
def registered_at(pair: Pair, address: str) -> Iterator[str]:
    """A registry that sends decode engines to another address."""
    registry = HandoffRegistry("127.0.0.1", 0, SECRET, NODE)
    try:
        [record] = RegistryClient(pair.registry.url, SECRET, NODE.connecting()).ranks()
        false = msgspec.structs.replace(record, address=address)
        RegistryClient(registry.url, SECRET, NODE.connecting()).register(false)
        yield registry.url
    finally:
        registry.close()


@pytest.mark.parametrize("at", [STRANGER, None])
def test_decode_greets_no_prefill_with_another_certificate_or_none(at, wait_until, caplog):
    with (
        managers(here=NODE, there=NODE) as pair,
        managers(here=at) as false,
        registered_at(pair, false.prefill.address) as url,
    ):
        receiver = pair.decode.receiver(1, url, 64)
        wait_until(lambda: receiver.state == State.FAILED, 20)
        assert receiver.failure is not None
        assert receiver.failure.code == FailureCode.UNREACHABLE
        assert f"handoff, decode: unreachable: {url}: " in caplog.text
        assert false.prefill.stats()["links"] == 0
        pushes(pair, 2, wait_until)


def test_a_registry_with_certificates_tells_ranks_to_its_own_only():
    registry = HandoffRegistry("127.0.0.1", 0, SECRET, NODE)
    try:
        assert RegistryClient(registry.url, SECRET, NODE.connecting()).ranks() == []
        for foreign in ("another authority", "a certificate of another authority",
                        "no certificate"):  # fmt: skip
            with pytest.raises(PeerUnreachable):
                RegistryClient(registry.url, SECRET, FOREIGN[foreign]).ranks()
    finally:
        registry.close()


@pytest.mark.parametrize("field", CertificateFiles.__struct_fields__)
def test_a_file_that_is_not_there_is_named(field):
    wrong = msgspec.structs.replace(NODE, **{field: "/no/such/file"})
    pool = Memory().pool
    for make in (
        lambda: HandoffRegistry("127.0.0.1", 0, SECRET, wrong),
        lambda: PrefillManager(pool, SPACE, SECRET, certificates=wrong),
        lambda: DecodeManager(pool, SPACE, SECRET, certificates=wrong),
    ):
        with pytest.raises(InvalidArgument) as error:
            make()
        assert error.value.field == field
