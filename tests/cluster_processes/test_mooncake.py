"""The transport ``mooncake`` on Mooncake's Transfer Engine, each check in a network of its own."""

import sys

import pytest

from bench import remote_mooncake
from kvstore.testing.mooncake import CHECKS
from tests.cluster_processes import mooncake_program
from tests.cluster_processes.mooncake_scenes import Alone, variables
from tests.conftest import Spawn

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def run(spawn: Spawn, check: str) -> None:
    program = [sys.executable, "-m", "tests.cluster_processes.mooncake_program", check]
    process = spawn(Alone(spawn).program(program))
    assert process.wait(60.0) == 0, process.report()
    assert "kept" in process.stdout


@pytest.mark.parametrize("check", CHECKS)
def test_it_keeps_what_it_can_of_the_contract(spawn: Spawn, check: str) -> None:
    run(spawn, check)


@pytest.mark.parametrize(
    "check",
    [
        mooncake_program.owner_is_stopped_during_a_read,
        mooncake_program.owner_is_stopped_before_the_first_contact,
        mooncake_program.owner_is_killed_during_a_read,
        mooncake_program.reading_process_is_killed_and_the_read_goes_on,
        mooncake_program.a_read_of_many_scattered_pages_leaves_its_peer_usable,
        mooncake_program.pages_that_are_written_can_be_read_at_their_end,
        mooncake_program.memory_of_a_failed_write_is_free_when_its_ticket_has_ended,
        mooncake_program.memory_that_was_unregistered_cannot_be_read,
        mooncake_program.memory_at_an_address_that_is_used_again_is_the_new_one,
        mooncake_program.a_read_into_other_memory_ends_and_harms_nobody,
        mooncake_program.rdma_without_a_device_is_refused,
    ],
    ids=lambda check: check.__name__,
)
def test_it_keeps_its_own_rules(spawn: Spawn, check: object) -> None:
    run(spawn, check.__name__)


def test_the_bench_measures_it_beside_its_bare_engine() -> None:
    variables()  # skips where it cannot be had
    (found,) = remote_mooncake.results("transport/mooncake/1MiB/x16", 0.1)
    assert found.value > 0
    assert found.bound == remote_mooncake.BARE
