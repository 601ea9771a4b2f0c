"""Goal: handoffs beside the link keep their rules, with a stand-in for Mooncake's engine.

``tests/cluster_processes/test_handoff_mooncake.py`` has the real one.
"""

from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.handoff.mooncake import MooncakeLanding, MooncakeWriter
from kvstore.handoff.shared_memory import SharedMemory
from tests.cluster_processes import handoff_mooncake_program

FAKE = Path(__file__).parent.parent / "transport" / "fake_mooncake"
pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("check", handoff_mooncake_program.CHECKS, ids=lambda one: one.__name__)
def test_a_handoff_over_mooncake_keeps_its_rules(check, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    check()


def test_a_machine_without_mooncake_is_told_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libibverbs.so.1')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    shared = SharedMemory(4096)
    for begin in (
        lambda: MooncakeWriter(shared, protocol="tcp"),
        lambda: MooncakeLanding(shared, [shared.address], protocol="tcp"),
    ):
        with pytest.raises(ConfigError, match=r"libibverbs\.so\.1.*kvstore-server\[mooncake\]"):
            begin()
    shared.close()
