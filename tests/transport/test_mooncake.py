"""Goal: the transport ``mooncake`` keeps its contract whatever the engine does.

Here the engine is a stand-in, so that its processes, and what is decided about them, are tested
without the wheel; ``tests/cluster_processes/test_mooncake.py`` has the real one.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError, TransferTimeout
from kvstore.testing.mooncake import CHECKS, MooncakePair
from kvstore.testing.transport import TransportContract
from kvstore.transport import engine
from kvstore.transport.engine_messages import (
    EngineReady,
    MapMemory,
    MessageReader,
    StartEngine,
    framed,
)
from kvstore.transport.mooncake import MooncakeTransport
from tests.cluster_processes import mooncake_program
from tests.cluster_processes.mooncake_program import Scene
from tests.conftest import WaitUntil

FAKE = Path(__file__).parent / "fake_mooncake"
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKE))


@pytest.mark.parametrize("check", CHECKS)
def test_it_keeps_what_it_can_of_the_contract(check):
    getattr(TransportContract(MooncakePair), check)()


@pytest.mark.parametrize(
    "check",
    [
        mooncake_program.owner_is_stopped_during_a_read,
        mooncake_program.owner_is_stopped_before_the_first_contact,
        mooncake_program.owner_is_killed_during_a_read,
        mooncake_program.reading_process_is_killed_and_the_read_goes_on,
        mooncake_program.pages_that_are_written_can_be_read_at_their_end,
        mooncake_program.memory_of_a_failed_write_is_free_when_its_ticket_has_ended,
        mooncake_program.memory_that_was_unregistered_cannot_be_read,
        mooncake_program.memory_at_an_address_that_is_used_again_is_the_new_one,
        mooncake_program.a_read_into_other_memory_ends_and_harms_nobody,
        mooncake_program.rdma_without_a_device_is_refused,
    ],
    ids=lambda check: check.__name__,
)
def test_it_keeps_its_own_rules(check):
    check()


def test_rdma_with_a_device_is_not_refused(monkeypatch):
    monkeypatch.setenv("FAKE_MOONCAKE_DEVICES", "mlx5_0")
    transport = MooncakeTransport("127.0.0.1", 1 << 20)
    assert transport.endpoint.startswith("127.0.0.1:")
    transport.close()


def test_a_machine_without_mooncake_is_told_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libibverbs.so.1')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"libibverbs\.so\.1.*'\.\[mooncake\]"):
        MooncakeTransport("127.0.0.1", 1 << 20)


@pytest.mark.parametrize("descriptors", [0, 65])
def test_a_process_whose_descriptors_do_not_all_arrive_ends(descriptors: int) -> None:
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-m", "kvstore.transport.engine_child", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    memory = os.memfd_create("kvstore-test")
    try:
        ours.settimeout(WAIT_S)
        ours.sendall(framed(StartEngine("127.0.0.1", "tcp")))
        [ready] = MessageReader().feed(ours.recv(4096))
        assert isinstance(ready, EngineReady)
        os.ftruncate(memory, 1 << 21)
        socket.send_fds(ours, [framed(MapMemory(1 << 40, 1 << 21, 1))], [memory] * descriptors)
        assert ours.recv(1) == b"", "it has ended"
        assert child.wait(WAIT_S) == 0
    finally:
        child.kill()
        child.wait()
        ours.close()
        os.close(memory)


@pytest.mark.parametrize(("registering", "pause_s"), [({1}, engine.RESTART_S), (set[int](), 0.0)])
def test_only_after_a_process_that_had_its_memory_another_one_is_started_at_once(
    registering: set[int], pause_s: float
) -> None:
    """One that cannot have the memory would be started again and again."""
    lost = engine.MooncakeEngine(StartEngine("127.0.0.1", "tcp"))
    lost.ready(7000)
    lost.registering = registering

    assert lost.end(0.0)

    assert lost.pause_ns == pause_s * 1e9


PAUSE_S = 2.5
"""Longer than a process takes from its start until it is up."""


def test_a_process_that_ends_before_it_is_up_is_started_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wait_until: WaitUntil
) -> None:
    monkeypatch.setattr(engine, "RESTART_S", PAUSE_S)
    transport = MooncakeTransport("127.0.0.1", 1 << 20, protocol="tcp", serves=False)
    starts = tmp_path / "starts"
    monkeypatch.setenv("FAKE_MOONCAKE_DIES", str(starts))
    process = transport._reader.process
    assert process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    wait_until(lambda: starts.exists() and len(starts.read_text().split()) >= 2, WAIT_S)
    transport.close()

    first, second = map(float, starts.read_text().split()[:2])
    assert second - first >= PAUSE_S


EXTENTS = 2_000
DEADLINE_S = 0.5
"""Of a read; registration of all extents takes four times as long."""
WAIT_S = 30.0


def register_extents(scene: Scene) -> None:
    """Register thousands of small extents at the reader."""
    descriptor = os.memfd_create("kvstore-test")
    os.ftruncate(descriptor, 4096)
    for number in range(EXTENTS):
        scene.reader.register((1 << 40) + number * 4096, 4096, descriptor)
    os.close(descriptor)


@contextmanager
def slow_registration(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """A pair that has read once, so that its engines know each other."""
    monkeypatch.setenv("FAKE_MOONCAKE_REGISTER_S", "0.001")
    scene = Scene()
    try:
        scene.begin(0, scene.pages(4096, 1))
        assert scene.end(0).good == b"\1"
        yield scene
    finally:
        scene.close()


def test_a_process_that_registers_for_longer_than_a_deadline_is_not_killed_again(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    with slow_registration(monkeypatch) as scene:
        pages, others = scene.pages(4096, 2), scene.pages(4096, 2)
        register_extents(scene)
        wait_until(lambda: scene.reader.stats()["unregistered_bytes"] == 0, WAIT_S)
        stopped = scene.stop_owner()
        scene.begin(1, pages, DEADLINE_S)
        end = scene.end(1)
        assert not end.settled
        os.kill(stopped, signal.SIGCONT)
        scene.settle(end)

        scene.begin(2, others, DEADLINE_S)
        end = scene.end(2)
        assert isinstance(end.error, TransferTimeout)
        assert end.settled, "it has not begun"
        wait_until(lambda: scene.reader.stats()["registering_extents"] > 0)
        for number in range(3, 500):
            later = scene.after(WAIT_S)
            asked = others.transfer(number, scene.owner.endpoint, bytes(16), later)
            wait_until(lambda: scene.reader.takes(asked), WAIT_S)  # noqa: B023
            scene.begin(number, others, WAIT_S)  # or a stall would be one more that it misses
            if scene.end(number).good == b"\1\1":
                break
            assert scene.reader.stats()["replaced_processes"] == 1, "it is killed again and again"
        assert (others.arrived == others.owned).all()
        assert scene.reader.stats()["replaced_processes"] == 1


def test_reads_do_not_wait_for_memory_that_is_being_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with slow_registration(monkeypatch) as scene:
        pages = scene.pages(4096, 2)
        register_extents(scene)
        scene.begin(1, pages, WAIT_S)
        assert scene.end(1).good == b"\1\1"
        assert scene.reader.stats()["unregistered_bytes"] > 0
        assert scene.reader.stats()["replaced_processes"] == 0


def test_after_a_fault_of_ours_the_processes_are_served_further(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    transport = MooncakeTransport("127.0.0.1", 1 << 20, protocol="tcp", serves=False)
    faults, carry = [], transport._carry

    def fail_once(now_ns: int) -> None:
        if not faults:
            faults.append(now_ns)
            raise RuntimeError("a bug")
        carry(now_ns)

    descriptor = os.memfd_create("kvstore-test")
    os.ftruncate(descriptor, 4096)
    try:
        monkeypatch.setattr(transport, "_carry", fail_once)
        transport.register(1 << 40, 4096, descriptor)
        wait_until(lambda: faults)
        wait_until(lambda: transport.stats()["registered_bytes"] == 4096)
    finally:
        os.close(descriptor)
        transport.close()
