"""Goal: what verify finds of a page is said of that page, and of none that came meanwhile."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.protocol.errors import TierUnavailable
from kvstore.server.channel import Caller
from kvstore.server.jobs import OperatorJob
from kvstore.server.verify import Verifier
from kvstore.state.table.invariants import check
from tests.server.conftest import TIMEOUT_S
from tests.state.world import FULL, FULL_2, World, key


class Memory:
    """Bytes that are wrong, and are read only once a test allows it."""

    def __init__(self) -> None:
        self.asked, self.allowed = threading.Event(), threading.Event()
        self.reads = 0

    def read(self, _extent: int, _offset: int, into: memoryview) -> int:
        self.reads += 1
        self.asked.set()
        assert self.allowed.wait(TIMEOUT_S)
        return len(into)


@pytest.fixture
def begun(wait_until):
    """``(world, space, process, go_on)``: the page "a" is being read; ``go_on()`` ends the job."""
    world, memory = World(), Memory()
    process = world.process()
    space = world.space(process, (FULL, FULL_2))
    world.store(process, space, "a")
    world.store(process, space, "a", shard=1)
    verifier = Verifier(world.table, memory)  # type: ignore[arg-type]
    job = OperatorJob(1, "verify", {}, Caller())
    work = verifier.page(space.nodes[key("a")], ["host"], 1 << 62)(job)
    next(work)
    assert memory.asked.wait(TIMEOUT_S)

    def go_on() -> dict[str, Any]:
        memory.allowed.set()
        for _ in work:
            threading.Event().wait(0.001)
        return job.result

    yield SimpleNamespace(world=world, space=space, process=process, go_on=go_on)
    memory.allowed.set()
    verifier.close()


def test_pages_whose_bytes_are_wrong_are_quarantined(begun):
    assert begun.go_on()["corrupt"] == 2
    assert key("a") not in begun.space.nodes
    assert begun.world.table.counts["removed_corrupt"] == 2


def test_a_page_that_was_stored_again_meanwhile_stays(begun):
    table = begun.world.table
    table.residents.drop(begun.space.nodes[key("a")], 0, "operator")
    begun.world.store(begun.process, begun.space, "a")

    begun.go_on()

    assert begun.world.lookup(begun.space, "a", [0]) == (1, 0)
    assert begun.world.lookup(begun.space, "a", [1]) == (0, 0)
    assert table.counts["removed_corrupt"] == 1
    assert table.slots.stats().limbo_bytes == 0, "what it had read has been let go of"
    check(table)


def test_pages_that_no_thread_can_read_are_let_go_of_and_verified_another_time(monkeypatch):
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    world, memory = World(), Memory()
    memory.allowed.set()
    process = world.process()
    space = world.space(process, (FULL,))
    world.store(process, space, "a")
    node = space.nodes[key("a")]
    verifier = Verifier(world.table, memory)  # type: ignore[arg-type]

    def verified() -> dict[str, Any]:
        job = OperatorJob(1, "verify", {}, Caller())
        for _ in verifier.page(node, ["host"], 1 << 62)(job):
            threading.Event().wait(0.001)
        return job.result

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TierUnavailable, match=r"new thread.*ulimit -u"):
            verified()
    assert world.table.slots.stats().pinned_bytes == 0

    try:
        assert verified()["checked"] == 1
        assert memory.reads == 1, "what was refused is not read later"
    finally:
        verifier.close()
