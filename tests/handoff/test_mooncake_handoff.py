"""Goal: handoffs beside the link keep their rules, with a stand-in for Mooncake's engine.

``tests/cluster_processes/test_handoff_mooncake.py`` has the real one.
"""

import os
import signal
from pathlib import Path

import pytest

from kvstore.handoff.mooncake import MooncakeLanding, MooncakeWriter
from kvstore.handoff.push_writes import PushWrites
from kvstore.handoff.receiving import Receivers
from kvstore.handoff.shared_memory import SharedMemory
from kvstore.protocol.errors import ConfigError
from tests.cluster_processes import handoff_mooncake_program
from tests.cluster_processes.handoff_mooncake_scene import NEW, OLD, Scene, until
from tests.handoff.pair import push_all

FAKE = Path(__file__).parent.parent / "transport" / "fake_mooncake"
pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("check", handoff_mooncake_program.CHECKS, ids=lambda one: one.__name__)
def test_a_handoff_over_mooncake_keeps_its_rules(check, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    check()


def test_a_fault_of_ours_in_one_push_ends_no_thread_that_others_need(monkeypatch, caplog):
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    written, engine_up, faults = PushWrites._written, Receivers.engine_up, []

    def once(call):
        def broken(self, number, *rest, **more):
            if call not in faults:
                faults.append(call)
                raise AssertionError("a fault of ours, for a test")
            return call(self, number, *rest, **more)

        return broken

    monkeypatch.setattr(PushWrites, "_written", once(written))
    scene = Scene()
    sender, receiver = scene.begin(2, [0, 1, 2, 3])
    push_all(sender, scene.here, [0, 1, 2, 3])
    until(lambda: written in faults)
    receiver.close()
    scene.push(3, OLD, NEW)

    monkeypatch.setattr(Receivers, "engine_up", once(engine_up))
    engine = scene.engine_pid()
    os.kill(engine, signal.SIGKILL)
    until(lambda: engine_up in faults)
    os.kill(scene.engine_pid(), signal.SIGKILL)
    before = scene.written()
    until(lambda: scene.decode._core._engines._place is not None)
    scene.push(4, OLD, NEW)
    assert scene.written() > before
    assert caplog.text.count("continues after an internal error") == 2
    caplog.clear()  # its tracebacks hold the pools
    scene.close()


def test_a_machine_without_mooncake_is_told_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libibverbs.so.1')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    shared = SharedMemory(4096)
    for begin in (
        lambda: MooncakeWriter(shared, protocol="tcp"),
        lambda: MooncakeLanding(shared, [shared.address], protocol="tcp"),
    ):
        with pytest.raises(ConfigError, match=r"libibverbs\.so\.1.*'\.\[mooncake\]"):
            begin()
    shared.close()
