"""Goal: whatever ends, stops or lies at the other side, a handoff fails in time."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.greeting import PROTOCOL, read_secret
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.registry import HandoffRegistry, RankRecord, RegistryClient
from kvstore.handoff.states import FailureCode, Patience, State
from kvstore.protocol.errors import ConfigError
from tests.handoff.pair import (
    BLOCK_TOKENS,
    PATIENCE,
    SECRET,
    SPACE,
    Memory,
    managers,
    push_all,
)

COMMAND = ("-m", "tests.handoff.pair")
QUICK = replace(PATIENCE, silence_s=2.0)
STEADY = replace(PATIENCE, transferring_s=20.0, silence_s=5.0)
"""Its silence is longer than a busy machine keeps a peer from its pings before it is stopped."""
NOTICED_S = 20.0
"""A peer that stops is noticed within STEADY's silence; the rest is for a busy machine."""


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, FailureCode.PEER_CLOSED), (signal.SIGSTOP, FailureCode.PEER_SILENT)],
)
def test_decode_has_its_blocks_back_when_prefill_ends_or_stops(
    number, code, spawn, secret_file, wait_until
):
    child = spawn([sys.executable, *COMMAND, "prefill", secret_file, "-"], ready=r"ready (\S+)")
    memory = Memory()
    decode = DecodeManager(memory.pool, SPACE, SECRET, patience=STEADY)
    try:
        receivers = [
            decode.receiver(room, child.ready[1], 48 * BLOCK_TOKENS) for room in range(1, 4)
        ]
        for receiver in receivers:
            first = (receiver.room - 1) * 40
            receiver.announce(8 * BLOCK_TOKENS, list(range(first, first + 40)))
        wait_until(lambda: set(decode.poll(receivers)) == {State.TRANSFERRING})
        assert all(receiver.holds_blocks for receiver in receivers)
        child.send_signal(number)
        wait_until(lambda: set(decode.poll(receivers)) == {State.FAILED}, NOTICED_S)
        wait_until(lambda: not any(receiver.holds_blocks for receiver in receivers))

        assert {receiver.failure.code for receiver in receivers} == {code}
        assert decode.stats()["links"] == decode.stats()["limbo_blocks"] == 0
    finally:
        decode.close()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, FailureCode.PEER_CLOSED), (signal.SIGSTOP, FailureCode.PEER_SILENT)],
)
def test_prefill_has_its_blocks_back_when_decode_ends_or_stops(
    number, code, spawn, secret_file, wait_until
):
    registry, memory = HandoffRegistry("127.0.0.1", 0, SECRET), Memory()
    prefill = PrefillManager(memory.pool, SPACE, SECRET, registry=registry.url, patience=STEADY)
    try:
        child = spawn(
            [sys.executable, *COMMAND, "decode", secret_file, registry.url], ready="ready"
        )
        senders = [prefill.sender(room, 48 * BLOCK_TOKENS) for room in range(1, 4)]
        for sender in senders:  # all from the same blocks, which do not change
            sender.send(range(1), range(48), list(range(48)))
        wait_until(lambda: set(prefill.poll(senders)) == {State.TRANSFERRING})
        child.send_signal(number)
        wait_until(lambda: set(prefill.poll(senders)) == {State.FAILED}, NOTICED_S)
        wait_until(lambda: not any(sender.holds_blocks for sender in senders))

        assert {sender.failure.code for sender in senders} == {code}
        assert prefill.stats()["links"] == 0
    finally:
        prefill.close()
        registry.close()


class Relay:
    """Stands between decode and prefill, and changes or cuts what prefill sends."""

    def __init__(self, target: str, change: Callable[[bytes, int], bytes | None]) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            for source, to, change in ((near, far, None), (far, near, self._change)):
                thread = threading.Thread(target=self._copy, args=(source, to, change))
                self._threads.append(thread)
                thread.start()

    def _copy(self, source: socket.socket, to: socket.socket, change) -> None:
        done = 0
        try:
            while data := source.recv(65_536):
                kept = data if change is None else change(data, done)
                done += len(data)
                if kept is None:
                    break
                to.sendall(kept)
        except OSError:
            pass
        for one in (source, to):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for one in self._sockets:
            one.close()
        for thread in self._threads:
            thread.join()
        self._listener.close()


def through(
    change: Callable[[bytes, int], bytes | None], check: Callable[..., None],
    patience: Patience = PATIENCE,
) -> None:  # fmt: skip
    """Run a handoff of 30 blocks through a relay."""
    registry, here, there = HandoffRegistry("127.0.0.1", 0, SECRET), Memory(), Memory()
    prefill = PrefillManager(here.pool, SPACE, SECRET, patience=patience)
    relay = Relay(prefill.address, change)
    record = RankRecord(
        0, relay.address, prefill._boot.hex(), 1, (0, 4), (0, 1), here.pool.shape, SPACE.hex(),
        ["tcp"], PROTOCOL, 60.0,
    )  # fmt: skip
    RegistryClient(registry.url, SECRET).register(record)
    decode = DecodeManager(there.pool, SPACE, SECRET, patience=patience)
    try:
        receiver = decode.receiver(1, registry.url, 30 * BLOCK_TOKENS)
        receiver.announce(0, list(range(30)))
        sender = prefill.sender(1, 30 * BLOCK_TOKENS)
        push_all(sender, here, list(range(40, 70)))
        check(sender, receiver, there, decode)
    finally:
        decode.close()
        prefill.close()
        relay.close()
        registry.close()


def flip(at: int) -> Callable[[bytes, int], bytes]:
    def change(data: bytes, done: int) -> bytes:
        if done <= at < done + len(data):
            data = bytearray(data)
            data[at - done] ^= 0x40
        return bytes(data)

    return change


def test_a_relay_that_changes_nothing_does_not_disturb(wait_until):
    def check(sender, receiver, there, decode):
        wait_until(lambda: receiver.state == State.SUCCESS)
        assert there.has(1, range(30), list(range(30)))

    through(lambda data, done: data, check)


def test_a_byte_changed_on_the_wire_fails_the_handoff(wait_until):
    def check(sender, receiver, there, decode):
        wait_until(lambda: receiver.state == State.FAILED)
        wait_until(lambda: sender.state == State.FAILED and not receiver.holds_blocks)
        assert receiver.failure.code == FailureCode.DIGEST
        assert decode.stats()["digest"] == 1

    through(flip(700_000), check)


def test_a_connection_cut_within_a_range_fails_the_handoff_at_once(wait_until):
    def check(sender, receiver, there, decode):
        wait_until(lambda: receiver.state == State.FAILED)
        wait_until(lambda: sender.state == State.FAILED and not receiver.holds_blocks)
        assert receiver.failure.code == FailureCode.PEER_CLOSED

    through(lambda data, done: None if done > 700_000 else data, check)


def test_a_link_that_stalls_within_a_range_is_noticed_as_silence(wait_until):
    over = threading.Event()

    def stall(data: bytes, done: int) -> bytes:
        if done > 700_000:
            over.wait(20.0)
        return data

    def check(sender, receiver, there, decode):
        try:
            wait_until(lambda: receiver.state == State.FAILED)
            assert receiver.failure.code == FailureCode.PEER_SILENT
            wait_until(lambda: not receiver.holds_blocks)
        finally:
            over.set()
        wait_until(lambda: sender.state == State.FAILED and not sender.holds_blocks)

    through(stall, check, QUICK)


def test_garbage_on_the_ports_of_prefill_and_registry_changes_nothing(wait_until):
    with managers() as pair:
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        wait_until(lambda: sender.state == State.WAITING_FOR_INPUT)
        ports = [pair.prefill.address, pair.registry.url.removeprefix("http://")]
        for address in ports:
            host, _, port = address.rpartition(":")
            for garbage in (
                b"",
                b"\0" * 64,
                b"\xff" * 5_000,
                os.urandom(300),
                b"GET / HTTP/1.0\r\n\r\n",
            ):
                with socket.create_connection((host, int(port)), 5) as stranger:
                    stranger.settimeout(5)
                    try:
                        stranger.sendall(garbage)
                        stranger.shutdown(socket.SHUT_WR)
                        while stranger.recv(4_096):
                            pass
                    except OSError:
                        pass  # it has closed already, which is right
        wait_until(lambda: pair.prefill.stats().get("greeting") == 5)
        push_all(sender, pair.here, [0, 1, 2, 3])
        wait_until(lambda: receiver.state == State.SUCCESS)

        assert pair.prefill.stats()["links"] == 1


@pytest.mark.parametrize(
    ("secret", "space", "said"),
    [(b"another secret of 32 bytes......", SPACE, "401"), (SECRET, b"another space", "space")],
)
def test_another_secret_or_space_is_refused(secret, space, said, wait_until):
    with managers() as pair:
        decode = DecodeManager(Memory().pool, space, secret, patience=PATIENCE)
        try:
            receiver = decode.receiver(1, pair.registry.url, 16)
            wait_until(lambda: receiver.state == State.FAILED)

            assert receiver.failure.code == FailureCode.UNREACHABLE
            assert said in receiver.failure.message
            assert secret.decode() not in receiver.failure.message
            assert pair.prefill.describe() == []
        finally:
            decode.close()


def test_a_manager_that_does_not_know_the_secret_is_refused_on_both_sides(wait_until):
    registry, here = HandoffRegistry("127.0.0.1", 0, SECRET), Memory()
    prefill = PrefillManager(here.pool, SPACE, b"another secret of 32 bytes......")
    record = RankRecord(
        0, prefill.address, prefill._boot.hex(), 1, (0, 4), (0, 1), here.pool.shape, SPACE.hex(),
        ["tcp"], PROTOCOL, 60.0,
    )  # fmt: skip
    RegistryClient(registry.url, SECRET).register(record)
    decode = DecodeManager(Memory().pool, SPACE, SECRET)
    try:
        receiver = decode.receiver(1, registry.url, 16)
        wait_until(lambda: receiver.state == State.FAILED)

        assert "secret" in receiver.failure.message
        wait_until(lambda: prefill.stats().get("greeting") == 1, what="it counts it after that")
    finally:
        decode.close()
        prefill.close()
        registry.close()


def test_another_process_at_the_address_of_a_registration_is_not_taken_for_it(wait_until):
    with managers() as pair:
        registry = HandoffRegistry("127.0.0.1", 0, SECRET)
        try:
            record = RankRecord(
                0, pair.prefill.address, "ab" * 16, 1, (0, 4), (0, 1), pair.here.pool.shape,
                SPACE.hex(), ["tcp"], PROTOCOL, 60.0,
            )  # fmt: skip
            RegistryClient(registry.url, SECRET).register(record)
            receiver = pair.decode.receiver(1, registry.url, 16)
            wait_until(lambda: receiver.state == State.FAILED)

            assert "another process" in receiver.failure.message
        finally:
            registry.close()


def test_a_registry_that_is_away_fails_new_handoffs_and_leaves_running_ones(wait_until):
    with managers() as pair:
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        wait_until(lambda: sender.state == State.WAITING_FOR_INPUT)
        gone = HandoffRegistry("127.0.0.1", 0, SECRET)
        gone.close()
        other = pair.decode.receiver(2, gone.url, 16)
        wait_until(lambda: other.state == State.FAILED)

        assert other.failure.code == FailureCode.UNREACHABLE
        push_all(sender, pair.here, [0, 1, 2, 3])
        wait_until(lambda: receiver.state == State.SUCCESS)


def test_a_prefill_that_was_started_again_is_found_by_the_next_handoff(wait_until):
    with managers() as pair:
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        wait_until(lambda: sender.state == State.WAITING_FOR_INPUT)
        port = int(pair.prefill.address.rpartition(":")[2])
        pair.prefill.close()
        wait_until(lambda: receiver.state == State.FAILED and not receiver.holds_blocks)
        pair.prefill = PrefillManager(
            pair.here.pool,
            SPACE,
            SECRET,
            registry=pair.registry.url,
            listen=("127.0.0.1", port),
            patience=PATIENCE,
        )
        sender, receiver = pair.begin(2, 4)
        receiver.announce(0, [0, 1, 2, 3])
        push_all(sender, pair.here, [0, 1, 2, 3])
        wait_until(lambda: receiver.state == State.SUCCESS)


def test_a_side_that_only_pings_is_given_up_at_the_deadline_of_the_state(wait_until):
    with managers(Patience(0.5, 0.5, 5, 20, 5)) as pair:
        receiver = pair.decode.receiver(1, pair.registry.url, 64)
        receiver.announce(0, [0, 1, 2, 3])
        sender = pair.prefill.sender(2, 64)
        wait_until(lambda: sender.state == receiver.state == State.FAILED)

        assert receiver.failure.code == sender.failure.code == FailureCode.DEADLINE
        wait_until(lambda: not (sender.holds_blocks or receiver.holds_blocks))


def test_a_secret_that_others_may_read_or_that_is_short_is_refused(tmp_path, secret_file):
    assert read_secret(secret_file) == SECRET
    secret_file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod"):
        read_secret(secret_file)
    short = tmp_path / "short"
    short.write_bytes(b"short")
    short.chmod(0o600)
    with pytest.raises(ConfigError, match="16 bytes"):
        read_secret(short)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "none")
