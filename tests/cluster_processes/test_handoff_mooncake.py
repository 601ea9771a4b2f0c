"""Handoffs over Mooncake's Transfer Engine, each check in a network of its own."""

import sys

import pytest

from tests.cluster_processes.handoff_mooncake_program import WITH_THE_WHEEL
from tests.cluster_processes.mooncake_scenes import Alone
from tests.conftest import Spawn

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.mark.parametrize("check", WITH_THE_WHEEL, ids=lambda one: one.__name__)
def test_a_handoff_over_mooncake_keeps_its_rules(spawn: Spawn, check: object) -> None:
    name = check.__name__
    program = [sys.executable, "-m", "tests.cluster_processes.handoff_mooncake_program", name]
    process = spawn(Alone(spawn).program(program))
    assert process.wait(60.0) == 0, process.report()
    assert "kept" in process.stdout
