"""Goal: who does not greet as it should gets no link, is logged, and disturbs nobody."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest

from kvstore.handoff.greeting import (
    PROTOCOL,
    Challenge,
    Greeted,
    GreetingRefused,
    LinkGreeting,
    SealedStream,
    proof_of,
)
from kvstore.handoff.registry import HandoffRegistry, RegistryClient
from kvstore.handoff.states import FailureCode, State
from kvstore.protocol.errors import ProtocolError
from kvstore.transport.streams import stream_of
from tests.handoff.pair import SECRET, SPACE, Pair, managers, push_all
from tests.handoff.wrong_fields import of_another_type


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def received(connection: socket.socket) -> bytes:
    """The body of a plain frame; empty when the other side has closed."""
    try:
        size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
        return connection.recv(size, socket.MSG_WAITALL)
    except OSError:
        return b""


def deeper(message: msgspec.Struct) -> bytes:
    """With one field more, so deep that a reader of msgpack ends with RecursionError."""
    body = msgspec.msgpack.encode(message)
    return bytes([body[0] + 1]) + body[1:] + b"\x91" * 60_000 + b"\xc0"


def garbled(message: msgspec.Struct, text: bytes) -> bytes:
    """With bytes that are no text in place of a text."""
    return msgspec.msgpack.encode(message).replace(text, b"\xff" * len(text))


def sealed(greeting: LinkGreeting, nonce: bytes, secret: bytes = SECRET) -> LinkGreeting:
    """With the proof of somebody who knows a secret."""
    bare = msgspec.structs.replace(greeting, proof=b"")
    proof = proof_of(secret, b"decode", nonce, msgspec.msgpack.encode(bare))
    return msgspec.structs.replace(greeting, proof=proof)


def greet(pair: Pair, make) -> None:
    """One connection to prefill; ``make`` makes its frames from the challenge."""
    host, _, port = pair.prefill.address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as stranger:
        challenge = msgspec.msgpack.decode(received(stranger), type=Challenge)
        with suppress(OSError):  # prefill may have closed it already
            stranger.sendall(make(challenge.nonce))
            stranger.shutdown(socket.SHUT_WR)
        while received(stranger):
            pass


def test_every_wrong_field_of_a_greeting_is_refused_by_prefill(wait_until, caplog):
    with managers() as pair:
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        wait_until(lambda: sender.state == State.WAITING_FOR_INPUT)
        own = pair.decode._greeter
        example = LinkGreeting(
            PROTOCOL, "messages", os.urandom(16), os.urandom(16), "strange", SPACE, own.shape,
            pair.decode._group, None, False, ((0, 1),), b"",
        )  # fmt: skip
        count = 0
        for _, wrong in of_another_type(example):
            greet(pair, lambda _, wrong=wrong: framed(msgspec.msgpack.encode(wrong)))
            count += 1
        for field, value in [
            ("protocol", 0), ("protocol", 1 << 40), ("link", b""), ("link", bytes(17)),
            ("nonce", b"short"), ("space", b"another"),
        ]:  # fmt: skip
            wrong = msgspec.structs.replace(example, **{field: value})
            greet(pair, lambda nonce, w=wrong: framed(msgspec.msgpack.encode(sealed(w, nonce))))
            count += 1
        for frames in (
            lambda nonce: framed(msgspec.msgpack.encode(sealed(example, nonce, b"x" * 32))),
            lambda nonce: framed(msgspec.msgpack.encode(sealed(example, bytes(16)))),
            lambda nonce: framed(b"x" * 5_000),
            lambda nonce: framed(deeper(example)),
            lambda nonce: framed(garbled(example, b"strange")),
            lambda nonce: b"\xff" * 4,
            lambda nonce: os.urandom(300),
            lambda nonce: b"",
        ):
            greet(pair, frames)
            count += 1
        wait_until(lambda: pair.prefill.stats()["greeting"] == count)
        assert "127.0.0.1: no greeting" in caplog.text
        assert SECRET.decode() not in caplog.text
        assert pair.prefill.stats()["links"] == 1
        push_all(sender, pair.here, [0, 1, 2, 3])
        wait_until(lambda: receiver.state == State.SUCCESS)


@contextmanager
def false_prefill(pair: Pair, frames: list[bytes]) -> Iterator[str]:
    """Somebody at the address of a registration, who writes these frames; the registry's URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    registry = HandoffRegistry("127.0.0.1", 0, SECRET)

    def speak() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                for frame in frames:
                    connection.sendall(frame)
                    if not received(connection):
                        break

    thread = threading.Thread(target=speak)
    thread.start()
    try:
        [record] = RegistryClient(pair.registry.url, SECRET).ranks()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        false = msgspec.structs.replace(record, address=address)
        RegistryClient(registry.url, SECRET).register(false)
        yield registry.url
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
        registry.close()


CHALLENGE = Challenge(PROTOCOL, bytes(16))
ANSWERS = [Greeted(bytes(16), bytes(32)), GreetingRefused("space", "not the same")]


@pytest.mark.parametrize("at", ["challenge", "answer", "garbage"])
def test_every_wrong_field_of_prefills_greeting_is_refused_by_decode(at, wait_until, caplog):
    challenge = framed(msgspec.msgpack.encode(CHALLENGE))
    cases: dict[str, list] = {
        "challenge": [[wrong] for _, wrong in of_another_type(CHALLENGE)],
        "answer": [
            *([wrong] for one in ANSWERS for _, wrong in of_another_type(one)),
            framed(garbled(ANSWERS[1], b"not the same")),
        ],
        "garbage": [
            b"\xff" * 4,
            framed(b"x" * 5_000),
            framed(b"\xc1"),
            framed(deeper(CHALLENGE)),
            os.urandom(100),
            b"HTTP/1.1",
        ],
    }[at]
    with managers() as pair:
        for number, case in enumerate(cases):
            said = framed(msgspec.msgpack.encode(case[0])) if isinstance(case, list) else case
            frames = [challenge, said] if at == "answer" else [said]
            with false_prefill(pair, frames) as url:
                receiver = pair.decode.receiver(10 + number, url, 64)
                receiver.announce(0, [0, 1, 2, 3])
                wait_until(lambda: receiver.state == State.FAILED)  # noqa: B023
                assert receiver.failure is not None
                assert receiver.failure.code == FailureCode.UNREACHABLE
                assert "registration" not in receiver.failure.message
                assert not receiver.holds_blocks
                receiver.close()
                wait_until(lambda: pair.decode.stats()["threads"] == 0)
        assert pair.decode.stats()["unreachable"] == len(cases)
        assert "handoff, decode: unreachable: http://127.0.0.1:" in caplog.text
        assert not pair.there.planes.any()


@pytest.mark.parametrize("spoil", ["changed", "again", "too long"])
def test_a_frame_that_others_wrote_or_that_comes_again_is_refused(spoil):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near, far = socket.create_connection(listener.getsockname()), listener.accept()[0]
    writer, reader = (SealedStream(stream_of(one, None), b"key") for one in (near, far))
    body = b"a message"
    frame = framed(body) + writer._mac(body)
    sent = {
        "changed": frame[:-1] + bytes([frame[-1] ^ 1]),
        "again": frame + frame,
        "too long": b"\xff\xff\xff\x7f",
    }[spoil]
    try:
        near.sendall(sent)
        if spoil == "again":
            assert reader.receive(5.0) == body
        with pytest.raises(ProtocolError):
            reader.receive(5.0)
    finally:
        writer.close()
        reader.close()
