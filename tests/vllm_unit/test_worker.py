"""How a worker waits for its moves, with a store whose jobs end when the test says."""

from typing import Any

import pytest

from engine_adapters.vllm.messages import Blocks, Load
from engine_adapters.vllm.opening import Opening
from engine_adapters.vllm.worker import IDLE_WAIT_S, GroupMemory, WorkerSide
from kvstore.page import PrefixKeys
from kvstore.results import RestoreResult
from tests.vllm_unit.engine import BLOCK, IDENTITY, PAGE, SHARD, FakeStore

KEYS = PrefixKeys(b"k" * 64)
"""Two pages."""


class Job:
    """A restore that ends while somebody waits for it, or when told."""

    def __init__(self, world: "Machine", ends_after_s: float) -> None:
        self.world = world
        self.left_s = ends_after_s
        self.waits: list[float] = []
        self.cancelled = False

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        passed = min(timeout_s, max(0.0, self.left_s))
        self.world.now += passed
        self.left_s -= passed
        return self.left_s <= 0

    def cancel(self) -> None:
        self.cancelled = True

    def result(self, timeout_s: float) -> RestoreResult:
        return RestoreResult(2, 1024, 0.012)


class Machine(FakeStore):
    """A worker, a clock and the jobs it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 10.0
        self.jobs: list[Job] = []
        self.ends_after_s = 0.0
        opening = Opening(self, IDENTITY, [SHARD], lambda: self.now)
        memory = GroupMemory(pool=None, shard=0, page_tokens=PAGE, block_tokens=BLOCK)
        self.side = WorkerSide(opening, [memory], lambda: self.now)

    def restore_to_kvpool(self, *arguments: Any) -> Job:
        self.jobs.append(Job(self, self.ends_after_s))
        return self.jobs[-1]

    def load(self, number: int, ends_after_s: float, wait_s: float = 1.0) -> Job:
        self.ends_after_s = ends_after_s
        blocks = [Blocks(0, 0, [1, 2, 3, 4])]
        load = Load(number, f"r{number}", KEYS, blocks, wait_s, layerwise=False)
        self.side.start_loads([load])
        return self.jobs[-1]


def test_a_step_that_computes_waits_for_no_load():
    machine = Machine()
    job = machine.load(1, ends_after_s=0.001)

    assert not machine.side.poll().received
    assert set(job.waits) == {0.0}
    assert machine.now == 10.0


def test_an_idle_step_ends_with_the_load_that_ends_in_it():
    machine = Machine()
    machine.load(1, ends_after_s=0.001)

    outcome = machine.side.poll(idle=True)

    assert outcome.received == {"r1"}
    assert outcome.report.ended[1] == (1, 2, 0.012), "and says how long moving took"
    assert machine.now == pytest.approx(10.001)


def test_an_idle_step_waits_only_shortly_however_many_loads_there_are():
    machine = Machine()
    for number in range(5):
        machine.load(number, ends_after_s=3.0)

    assert not machine.side.poll(idle=True).received
    assert machine.now == pytest.approx(10.0 + IDLE_WAIT_S)


def test_no_step_waits_for_a_load_that_its_request_has_given_up():
    machine = Machine()
    job = machine.load(1, ends_after_s=3.0, wait_s=0.001)
    outcome = machine.side.poll(idle=True)

    assert (outcome.received, outcome.failed) == ({"r1"}, {"r1"})
    assert machine.now == pytest.approx(10.001), "not beyond its deadline"
    assert job.cancelled
    machine.side.poll(idle=True)
    assert machine.now == pytest.approx(10.001)
