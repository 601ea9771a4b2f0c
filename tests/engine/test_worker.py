"""How a worker waits for its moves, with a store whose jobs end when the test says."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore.client.results import PutResult, RestoreResult
from kvstore.engine.identity import EngineFacts
from kvstore.engine.messages import Blocks, Load, Store
from kvstore.engine.opening import Opening
from kvstore.engine.worker import (
    END_TIMEOUT_S,
    IDLE_WAIT_S,
    LAST_WAIT_S,
    GroupMemory,
    ShardMemory,
    WorkerSide,
    memory_of,
)
from kvstore.protocol.errors import LayoutMismatch
from kvstore.protocol.page import PrefixKeys
from tests.engine.engine import BLOCK, FULL, IDENTITY, PAGE, SHARD, FakeStore

KEYS = PrefixKeys(b"k" * 64)
"""Two pages."""


class Job:
    """A restore that ends while somebody waits for it, or when told."""

    def __init__(self, world: "Machine", ends_after_s: float) -> None:
        self.world = world
        self.left_s = ends_after_s
        self.waits: list[float] = []
        self.cancelled = False
        self.stuck = False
        self.ends_after_cancel_s = 0.0
        self.ends_at = float("inf")
        self.pages = 2

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        passed = min(timeout_s, max(0.0, self.left_s))
        if self.cancelled:
            passed = min(timeout_s, max(0.0, self.ends_at - self.world.now))
        self.world.now += passed
        self.left_s -= passed
        return self.done

    def wait_layer(self, layer: int, timeout_s: float) -> bool:
        return self.wait(timeout_s)

    @property
    def done(self) -> bool:
        return self.left_s <= 0 or self.world.now >= self.ends_at

    def cancel(self) -> None:
        self.cancelled = True
        if not self.stuck:
            self.ends_at = self.world.now + self.ends_after_cancel_s

    def result(self, timeout_s: float) -> RestoreResult:
        return RestoreResult(self.pages, 1024, 0.012)


class Ended:
    """A store of several shards that has ended."""

    def __init__(self, result: Any) -> None:
        self._result, self.done = result, True

    def result(self, timeout_s: float) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class Machine(FakeStore):
    """A worker, a clock and the jobs it is given."""

    def __init__(
        self,
        steps_ahead: int = 0,
        device: str = "cpu",
        shards: int = 1,
        *,
        whole_only: bool = False,
        layers: int = 0,
    ) -> None:
        super().__init__()
        self.now = 10.0
        self.jobs: list[Job] = []
        self.ends_after_s, self.jobs_each = 0.0, 1
        opening = Opening(self, IDENTITY, [SHARD], lambda: self.now)
        pool = SimpleNamespace(device=device)
        held = [ShardMemory(pool, at) for at in range(shards)]
        memory = GroupMemory(held, PAGE, BLOCK, layers, whole_only)
        self.side = WorkerSide(opening, [memory], lambda: self.now, steps_ahead)

    def restore_shards(self, *arguments: Any) -> list[Job]:
        self.jobs += [Job(self, self.ends_after_s) for _ in range(self.jobs_each)]
        return self.jobs[-self.jobs_each :]

    def load(
        self, number: int, ends_after_s: float, wait_s: float = 1.0, *, layerwise: bool = False
    ) -> Job:
        self.ends_after_s = ends_after_s
        blocks = [Blocks(0, 0, [1, 2, 3, 4])]
        load = Load(number, f"r{number}", KEYS, blocks, wait_s, layerwise)
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


def test_a_worker_says_in_which_step_others_have_loaded():
    machine = Machine()
    assert machine.side.poll(others=7).report.ended.keys() == {7}
    assert not machine.side.poll().report


def test_a_worker_says_which_step_it_reports():
    machine = Machine()
    assert machine.side.poll(number=7).report.step == 7
    assert machine.side.poll().report.step == 0


def test_an_empty_step_among_steps_that_compute_waits_for_no_load():
    """Pipelines: the step after it computes the request whose last step is at the next stage."""
    machine = Machine(steps_ahead=1)
    machine.load(1, ends_after_s=3.0)
    for _ in range(3):
        machine.side.poll()
        machine.side.poll(idle=True)
    assert machine.now == 10.0, "they would have waited, one after the other"

    machine.side.poll(idle=True)
    assert machine.now == pytest.approx(10.0 + IDLE_WAIT_S), "by now nothing is computed"


def test_a_load_that_has_ended_does_not_wait_for_another_in_a_step_that_was_begun_before():
    machine = Machine(steps_ahead=1)
    machine.load(1, ends_after_s=0.001)
    machine.load(2, ends_after_s=3.0)
    machine.side.poll(idle=True)
    assert machine.side.poll(idle=True).received == {"r1"}

    machine.side.poll(idle=True)  # begun before the scheduler knew that the first has ended
    assert machine.now == pytest.approx(10.001)
    machine.side.poll(idle=True)
    assert machine.now == pytest.approx(10.001 + IDLE_WAIT_S)


def test_no_step_waits_for_a_load_that_its_request_has_given_up():
    machine = Machine()
    job = machine.load(1, ends_after_s=3.0, wait_s=0.001)
    outcome = machine.side.poll(idle=True)

    assert (outcome.received, outcome.failed) == ({"r1"}, {"r1"})
    assert machine.now == pytest.approx(10.001), "not beyond its deadline"
    assert job.cancelled
    machine.side.poll(idle=True)
    assert machine.now == pytest.approx(10.001)
    assert "loaded_tokens" not in machine.side.counts.take(), "nobody used them"


def test_a_layer_that_was_computed_on_before_it_came_makes_the_whole_load_invalid():
    machine = Machine()
    job = machine.load(1, ends_after_s=0.3, wait_s=0.1, layerwise=True)
    machine.side.wait_layer(0, 0)
    assert not job.done
    machine.now += 0.2  # the forward goes on without it, and meanwhile the load ends
    job.left_s = 0.0

    outcome = machine.side.poll()

    assert outcome.invalid_blocks == {1, 2, 3, 4}
    assert outcome.report.ended[1].pages == 0


def test_layers_that_come_in_time_make_a_valid_load():
    machine = Machine(layers=4)
    machine.load(1, ends_after_s=0.3, layerwise=True)
    for layer in range(4):
        machine.side.wait_layer(0, layer)

    outcome = machine.side.poll()

    assert not outcome.invalid_blocks
    assert outcome.report.ended[1].pages == 2


def test_a_step_waits_for_all_jobs_of_a_layerwise_load_together_until_its_deadline():
    machine = Machine()
    machine.jobs_each = 3
    machine.load(1, ends_after_s=0.09, wait_s=0.1, layerwise=True)

    machine.side.poll()

    assert machine.now == pytest.approx(10.1)
    assert all(job.cancelled for job in machine.jobs)


def test_a_layerwise_load_that_does_not_end_is_invalid_in_the_step_it_was_for():
    machine = Machine()
    job = machine.load(1, ends_after_s=1000.0, wait_s=0.1, layerwise=True)
    job.stuck = True

    outcome = machine.side.poll()

    assert outcome.invalid_blocks == {1, 2, 3, 4}
    assert not outcome.report.ended, "its blocks are still held"
    assert outcome.report.late == {1}, "but what was computed on them is known to be wrong"
    machine.side.poll()
    assert job.waits[-1] == 0.0, "no further step waits for it"
    job.left_s = 0.0
    outcome = machine.side.poll()
    assert outcome.report.ended[1].pages == 0
    assert not outcome.invalid_blocks, "reported once"


def test_all_layerwise_loads_that_are_late_are_cancelled_before_the_end_of_any_is_waited_for():
    """Each may wait for a disk, and ends after that: together, and not one after the other."""
    machine = Machine()
    jobs = [machine.load(number, 1000.0, wait_s=0.1, layerwise=True) for number in range(1, 4)]
    for job in jobs:
        job.ends_after_cancel_s = 2.0

    outcome = machine.side.poll()

    assert machine.now == pytest.approx(10.0 + 0.1 + 2.0)
    assert outcome.report.ended.keys() == {1, 2, 3}
    assert not outcome.report.late


def test_stuck_layerwise_loads_hold_up_a_step_together_and_not_one_after_the_other():
    machine = Machine()
    for number in range(1, 4):
        machine.load(number, 1000.0, wait_s=0.1, layerwise=True).stuck = True

    outcome = machine.side.poll()

    assert outcome.report.late == {1, 2, 3}
    assert machine.now < 10.0 + 0.1 + END_TIMEOUT_S + 3 * LAST_WAIT_S + 0.1


def test_a_process_that_was_stopped_meanwhile_gives_a_cancelled_load_time_to_end():
    machine = Machine()
    job = machine.load(1, 1000.0, wait_s=0.1, layerwise=True)
    job.ends_after_cancel_s = END_TIMEOUT_S + 0.001  # the time passed, but the thread did not run

    outcome = machine.side.poll()

    assert outcome.report.ended[1].pages == 2
    assert not outcome.report.late


def test_tokens_of_a_loaded_page_that_the_engine_had_are_not_counted():
    machine = Machine()
    blocks = [Blocks(0, 0, [0, 2, 3, 4])]
    for job, pages in ((1, 2), (2, 0)):
        machine.side.start_loads([Load(job, "r", KEYS, blocks, 1.0, False, known=BLOCK)])
        machine.jobs[-1].pages = pages
    machine.side.poll()

    assert machine.side.counts.take()["loaded_tokens"] == 2 * PAGE - BLOCK


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_a_store_that_cannot_even_begin_is_counted_as_failed(device):
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise LayoutMismatch("page_bytes", "too large")

    stores = [Store(1, KEYS, [Blocks(0, 0, [1, 2, 3, 4])])]
    machine, refused = Machine(device=device), Machine(device=device)
    machine.extract_from_kvpool = machine.extract_shards = refuse
    machine.side.start_stores(stores)
    refused.space = refuse
    refused.side.start_stores(stores)

    for one in (machine, refused):
        assert one.side.poll().report.ended[1].pages == 0
        assert one.side.counts.take()["store_failures"] == 1


def test_a_step_that_was_not_ended_has_failed_and_nothing_of_it_is_stored():
    first, second = (Store(number, KEYS, [Blocks(0, 0, [1, 2, 3, 4])]) for number in (1, 2))
    machine = Machine()
    machine.extract_shards = lambda _: Ended([PutResult(2)])

    machine.side.begin_step([first])
    machine.side.begin_step([second])
    ended = machine.side.poll().report.ended
    assert (ended.keys(), ended[1].pages) == ({1}, 0)
    assert machine.side.counts.take()["store_failures"] == 1
    machine.side.end_step()
    ended = machine.side.poll().report.ended
    assert (ended.keys(), ended[2].pages) == ({2}, 2)


def test_stores_of_a_pipelines_first_stages_start_with_the_next_step_at_the_latest():
    """vLLM does not end their steps when it decodes speculatively."""
    first, second = (Store(number, KEYS, [Blocks(0, 0, [1, 2, 3, 4])]) for number in (1, 2))
    machine = Machine()
    machine.side.early_stage = True
    machine.extract_shards = lambda _: Ended([PutResult(2)])

    machine.side.begin_step([first])
    assert not machine.side.poll().report.ended
    machine.side.begin_step([second])
    ended = machine.side.poll().report.ended
    assert (ended.keys(), ended[1].pages) == ({1}, 2)
    machine.side.end_step()
    assert machine.side.poll().report.ended.keys() == {2}
    machine.side.begin_step([])
    machine.side.end_step()
    assert not machine.side.poll().report.ended, "started once"


def test_what_became_of_each_shard_of_a_store_is_counted():
    machine = Machine(shards=2)
    machine.page_bytes = [512, 1024]
    store = Store(1, KEYS, [Blocks(0, 0, [1, 2, 3, 4])])
    asked: list[Any] = []
    refused = LayoutMismatch("page_bytes", "too large")
    for result in ([PutResult(1, existing=1), refused], [PutResult(2), PutResult(1)], refused):
        machine.extract_shards = lambda parts, result=result: asked.append(parts) or Ended(result)
        machine.side.start_stores([store])
        machine.side.poll()

    assert [[shard for *_, shard in parts] for parts in asked] == [[0, 1]] * 3
    counts = machine.side.counts.take()
    assert counts["stores"] == 3
    assert counts["store_failures"] == 1 + 2
    assert counts["stored_pages"] == 1 + 2 + 1
    assert counts["existing_pages"] == 1
    assert counts["stored_bytes"] == 512 + 2 * 512 + 1024


@pytest.mark.parametrize("blocks", [[], [1, 2, 3, 0]])
def test_a_load_without_a_block_for_the_last_page_does_not_count_as_loaded(blocks):
    machine = Machine()
    machine.side.start_loads([Load(1, "r1", KEYS, [Blocks(0, 0, blocks)], 1.0, False)])

    outcome = machine.side.poll()

    assert outcome.report.ended[1].pages == 0
    assert outcome.received == {"r1"}


@pytest.mark.parametrize("came", [0, 1, 2])
def test_pages_of_a_window_that_lacks_one_are_none(came):
    """The engine's blocks before the window are null: it could compute nothing behind them."""
    machine = Machine(whole_only=True)
    load = Load(
        1, "r1", PrefixKeys(b"k" * 160), [Blocks(0, 2, [0, 21, 22, 23, 24, 25])], 1.0, False
    )
    machine.side.start_loads([load])
    machine.jobs[0].pages = came

    outcome = machine.side.poll()

    assert (outcome.received, outcome.failed) == ({"r1"}, {"r1"})
    assert not outcome.invalid_blocks
    assert outcome.report.ended[1].pages == 0
    assert "loaded_tokens" not in machine.side.counts.take()


def test_a_window_that_came_whole_is_loaded():
    machine = Machine(whole_only=True)
    load = Load(1, "r1", PrefixKeys(b"k" * 128), [Blocks(0, 2, [21, 22, 23, 24])], 1.0, False)
    machine.side.start_loads([load])

    outcome = machine.side.poll()

    assert (outcome.received, outcome.failed) == ({"r1"}, set())
    assert outcome.report.ended[1].pages == 4


@pytest.mark.parametrize(
    ("change", "whole_only"), [({}, False), ({"window_tokens": 128}, True), ({"state": True}, True)]
)
def test_groups_that_forget_tokens_are_loaded_whole_or_not_at_all(change, whole_only):
    facts = EngineFacts(
        engine="e", model="m", revision="", kv_dtype="bfloat16", settings={}, version="1", isa="",
        ranks=1, groups=(msgspec.structs.replace(FULL, kv_heads=1, **change),),
    )  # fmt: skip
    pool = SimpleNamespace(block_bytes=128, device="cpu")
    memory = memory_of(facts, PAGE, pool, 0, 0)
    assert memory.whole_only is whole_only
    assert memory.layers == FULL.layers


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_waits_for_its_own_layers(stage):
    facts = EngineFacts(
        engine="e", model="m", revision="", kv_dtype="bfloat16", settings={}, version="1", isa="",
        ranks=1, groups=(msgspec.structs.replace(FULL, kv_heads=1),), stages=((0, 3), (3, 4)),
    )  # fmt: skip
    pool = SimpleNamespace(block_bytes=128, device="cpu")
    assert memory_of(facts, PAGE, pool, 0, 0, stage).layers == (3, 1)[stage]
