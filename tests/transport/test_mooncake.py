"""Goal: the transport ``mooncake`` keeps its contract whatever the engine does.

Here the engine is a stand-in, so that its processes, and what is decided about them, are tested
without the wheel; ``tests/cluster_processes/test_mooncake.py`` has the real one.
"""

from pathlib import Path

import pytest

from kvstore.errors import ConfigError, InvalidArgument
from kvstore.testing.mooncake import CHECKS, MooncakePair
from kvstore.testing.transfer_pages import TransferPages
from kvstore.testing.transport import TransportContract
from kvstore.transport.mooncake import MooncakeTransport
from tests.cluster_processes import mooncake_program

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
    with pytest.raises(ConfigError, match=r"libibverbs\.so\.1.*kvstore-server\[mooncake\]"):
        MooncakeTransport("127.0.0.1", 1 << 20)


def test_writing_is_refused():
    transport = MooncakeTransport("127.0.0.1", 1 << 20, protocol="tcp", serves=False)
    pages = TransferPages(4096, 1)
    with pytest.raises(InvalidArgument):
        transport.write(pages.transfer(1, "127.0.0.1:1", bytes(16), 1))
    transport.close()
