"""Goal: a job always ends, in order, and says how; an engine never waits for what will not come."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from kvstore.client import forks, jobs
from kvstore.client.jobs import MustWaitError, RestoreJob, StoreJob, Worker
from kvstore.client.results import RestoreResult
from kvstore.mover import Progress
from kvstore.protocol.errors import CapacityError, KVStoreError, PeerUnreachable, TransferTimeout

TIMEOUT_S = 10.0


class Gate:
    """Holds the worker inside a job until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> int:
        self.entered.set()
        assert self.opened.wait(TIMEOUT_S)
        return 0


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("test-jobs")
    yield made
    made.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


def raising(error: BaseException):
    def run() -> int:
        raise error

    return run


def test_jobs_run_one_after_the_other_in_the_order_they_came(worker, gate):
    order: list[int] = []
    first = StoreJob(worker, gate)
    others = [StoreJob(worker, lambda at=at: order.append(at) or at) for at in range(5)]

    assert gate.entered.wait(TIMEOUT_S)
    assert not first.done
    assert not any(job.done for job in others)
    assert not others[-1].wait(0.01)
    with pytest.raises(TransferTimeout):
        first.result(0.01)
    gate.opened.set()

    assert [job.result(TIMEOUT_S) for job in others] == order == list(range(5))


def test_more_jobs_than_may_wait_have_failed_at_once(gate, monkeypatch):
    monkeypatch.setattr(jobs, "QUEUE_MAX", 2)
    worker = Worker("small")
    running = StoreJob(worker, gate)
    assert gate.entered.wait(TIMEOUT_S)
    waiting = [StoreJob(worker, lambda: 1) for _ in range(2)]

    refused = StoreJob(worker, lambda: 1)
    restore = RestoreJob(worker, lambda: RestoreResult(9), Progress(), layered=True)

    assert refused.done
    with pytest.raises(CapacityError, match="2 jobs are queued"):
        refused.result(0)
    assert restore.result(0) == RestoreResult(0), "a restore that cannot be is a miss"
    gate.opened.set()
    assert [job.result(TIMEOUT_S) for job in (running, *waiting)] == [0, 1, 1]
    worker.close()


class Waits:
    """A restore that must wait the first time it is run, and then for a gate."""

    def __init__(self, gate: Gate) -> None:
        self.threads: list[str] = []
        self._gate = gate

    def __call__(self) -> RestoreResult:
        self.threads.append(threading.current_thread().name)
        if len(self.threads) == 1:
            raise MustWaitError
        self._gate()
        return RestoreResult(5)


def test_a_job_that_must_wait_goes_on_elsewhere_and_those_behind_it_do_not_wait(worker, gate):
    slow = Worker("test-slow", 2)
    waits = Waits(gate)
    job = RestoreJob(worker, waits, Progress(), layered=True, slow=slow)
    behind = StoreJob(worker, lambda: 7)

    assert behind.result(TIMEOUT_S) == 7
    assert gate.entered.wait(TIMEOUT_S)
    assert not job.done
    assert StoreJob(slow, lambda: 8).result(TIMEOUT_S) == 8, "nor does another that waits"
    gate.opened.set()
    assert job.result(TIMEOUT_S).pages == 5
    assert waits.threads == ["test-jobs", "test-slow"]
    slow.close()


def test_a_job_that_must_wait_and_cannot_be_queued_is_a_miss_and_leaves_nobody_waiting(
    worker, gate
):
    slow = Worker("test-slow")
    slow.close()
    job = RestoreJob(worker, Waits(gate), Progress(), layered=True, slow=slow)

    assert not job.wait_layer(0, TIMEOUT_S)
    assert job.result(TIMEOUT_S).pages == 0


def test_a_worker_runs_as_many_jobs_at_a_time_as_it_may(gate):
    worker = Worker("test-pair", 2)
    held = [Gate(), Gate()]
    running = [StoreJob(worker, one) for one in held]
    assert all(one.entered.wait(TIMEOUT_S) for one in held)
    third = StoreJob(worker, lambda: 3)
    assert not third.wait(0.01)
    held[1].opened.set()
    assert third.result(TIMEOUT_S) == 3
    assert not running[0].done
    held[0].opened.set()
    worker.close()


def test_a_restore_that_was_refused_lets_nobody_wait_for_its_layers(worker):
    worker.close()
    job = RestoreJob(worker, lambda: RestoreResult(1), Progress(), layered=True)

    before = time.monotonic()
    assert not job.wait_layer(0, TIMEOUT_S)
    assert time.monotonic() - before < TIMEOUT_S / 2
    assert job.result(0).pages == 0


def test_a_store_raises_its_trouble_and_a_restore_is_a_miss(worker):
    error = PeerUnreachable("nobody there")

    with pytest.raises(PeerUnreachable):
        StoreJob(worker, raising(error)).result(TIMEOUT_S)
    job = RestoreJob(worker, raising(error), Progress(), layered=False)
    assert job.result(TIMEOUT_S) == RestoreResult(0)


@pytest.mark.parametrize("layered", [True, False])
def test_waiting_for_a_layer_ends_with_the_job(worker, layered):
    job = RestoreJob(worker, lambda: RestoreResult(3), Progress(), layered=layered)

    assert job.wait(TIMEOUT_S)
    assert job.wait_layer(5, TIMEOUT_S) is not layered, "no layer was counted"
    assert job.result(0).pages == 3


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
def test_a_programmers_error_ends_its_job_but_strands_no_other(worker, gate, caplog, kind):
    StoreJob(worker, gate)
    assert gate.entered.wait(TIMEOUT_S)
    broken = StoreJob(worker, raising(kind("mine")))
    after = StoreJob(worker, lambda: 7)
    gate.opened.set()

    with pytest.raises(KVStoreError, match=f"{kind.__name__}: mine"):
        broken.result(TIMEOUT_S)
    assert after.result(TIMEOUT_S) == 7
    assert f"{kind.__name__}: mine" in caplog.text, "it is not swallowed either"


def test_closing_runs_what_was_submitted_and_takes_no_more(worker, gate):
    first, second = StoreJob(worker, gate), StoreJob(worker, lambda: 2)
    closing = threading.Thread(target=worker.close)
    closing.start()
    gate.opened.set()
    closing.join(TIMEOUT_S)

    assert (first.result(0), second.result(0)) == (0, 2)
    with pytest.raises(CapacityError, match="closed"):
        StoreJob(worker, lambda: 3).result(0)


def test_closing_a_worker_whose_queue_is_full_ends_it(gate, monkeypatch):
    monkeypatch.setattr(jobs, "QUEUE_MAX", 1)
    monkeypatch.setattr(jobs, "_JOIN_TIMEOUT_S", 0.01)
    worker = Worker("full")
    running = StoreJob(worker, gate)
    assert gate.entered.wait(TIMEOUT_S)
    waiting = StoreJob(worker, lambda: 2)

    worker.close()

    assert not running.done
    assert StoreJob(worker, lambda: 3).refused
    gate.opened.set()
    assert (running.result(TIMEOUT_S), waiting.result(TIMEOUT_S)) == (0, 2)


def test_a_job_for_which_there_is_no_thread_has_failed_at_once(monkeypatch):
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = Worker("poor")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        job = StoreJob(worker, lambda: 1)

    assert job.refused
    with pytest.raises(CapacityError, match="thread"):
        job.result(0)
    assert StoreJob(worker, lambda: 2).result(TIMEOUT_S) == 2
    worker.close()


@pytest.mark.parametrize("layered", [True, False])
def test_in_a_forked_child_the_parents_jobs_have_failed_and_new_ones_run(worker, gate, layered):
    running = StoreJob(worker, gate)
    assert gate.entered.wait(TIMEOUT_S)
    waiting = RestoreJob(worker, lambda: RestoreResult(1), Progress(), layered=layered)
    parents = worker._changed

    with parents:  # as another thread of the parent may have held it
        worker.forked()

    assert running.done
    with pytest.raises(PeerUnreachable, match="parent"):
        running.result(0)
    assert waiting.result(0) == RestoreResult(0)
    assert waiting.wait_layer(0, TIMEOUT_S) is not layered
    assert StoreJob(worker, lambda: 3).result(TIMEOUT_S) == 3


def test_a_forked_child_frees_nothing_of_its_parents_device(worker, gate, monkeypatch):
    """CUDA aborts a child that does; and a grandchild has what the child has kept."""

    class Blocks:
        """Of a device."""

    monkeypatch.setattr(forks, "_of_parents", [])
    running = StoreJob(worker, gate)
    assert gate.entered.wait(TIMEOUT_S)
    blocks = Blocks()
    waiting = StoreJob(worker, gate, blocks=blocks)
    of_parent = weakref.ref(blocks)
    for _ in range(2):
        worker.forked()
        waiting.forked()
    assert running.done
    assert waiting.done
    del blocks, waiting
    gc.collect()
    assert of_parent() is not None


def test_waiting_for_a_job_that_has_ended_takes_no_lock(worker):
    job = RestoreJob(worker, lambda: RestoreResult(1), Progress(), layered=True)
    assert job.wait(TIMEOUT_S)
    with job._ended._cond:
        waited: list[bool] = []
        other = threading.Thread(target=lambda: waited.append(job.wait(TIMEOUT_S / 4)))
        other.start()
        other.join(TIMEOUT_S)

    assert waited == [True]


def test_a_worker_without_jobs_has_no_thread():
    before = threading.active_count()
    worker = Worker("idle")

    assert threading.active_count() == before
    worker.close()
