"""Goal: memory that another node reads stays as it is until that read has ended."""

import threading
import time
from contextlib import AsyncExitStack

import pytest

from kvstore.protocol.page import DIGEST_BYTES
from kvstore.server import loans
from kvstore.transport.base import TicketEnded
from tests.cluster.test_two_nodes import two_nodes
from tests.cluster.whole_node import KEYS, PAGE_BYTES, reading, serving
from tests.loops import WAIT_S as LOOP_WAIT_S
from tests.loops import eventually, in_loop


@in_loop
@pytest.mark.parametrize("leaves", [True, False])
async def test_pages_stay_as_they_are_until_nobody_reads_them_with_a_revoked_ticket(leaves):
    async with AsyncExitStack() as undo:
        a, b = await two_nodes(undo)
        a.store()
        b.transport.held = []
        a.transport.lends_on = True
        service = await undo.enter_async_context(serving(a))
        async with reading(a, {}), reading(b, {"a": service.endpoint}):
            await eventually(b.up)
            number = b.fetch(b.room(KEYS), wait_s=30.0 if leaves else 3.0)
            await eventually(lambda: b.transport.held)
            if not leaves:
                await eventually(lambda: b.end(number))
                await eventually(lambda: a.transport.revoked)
                assert a.pinned_bytes() == 6 * PAGE_BYTES
                a.transport.tell(TicketEnded(a.transport.revoked[0]))
                await eventually(lambda: not a.pinned_bytes())
        await eventually(lambda: a.transport.revoked)
        if leaves:
            assert a.pinned_bytes() == 6 * PAGE_BYTES
            a.loans.ticket_ended(bytes(16))
            assert a.pinned_bytes() == 6 * PAGE_BYTES, "that was another ticket"
            a.loans.ticket_ended(a.transport.revoked[0])
        assert not a.pinned_bytes()
        assert not a.node.processes


@in_loop
async def test_a_lease_lasts_until_a_transfer_that_outlives_its_ticket_has_been_broken_off():
    async with AsyncExitStack() as undo:
        a, b = await two_nodes(undo)
        a.store()
        b.transport.held = []
        a.transport.lends_on = True
        service = await undo.enter_async_context(serving(a))
        async with reading(a, {}), reading(b, {"a": service.endpoint}):
            await eventually(b.up)
            b.fetch(b.room(KEYS), wait_s=3.0)
            await eventually(lambda: a.transport.revoked)
            (process,) = a.node.processes.values()
            (lease,) = process.leases.values()
            a.desk.advance()
            assert a.pinned_bytes() == 6 * PAGE_BYTES
            assert lease.deadline_ns > time.monotonic_ns() + 1_000_000_000, "seconds, not a moment"
            a.transport.tell(TicketEnded(a.transport.revoked[0]))
            await eventually(lambda: not a.pinned_bytes())


@in_loop
async def test_a_check_after_the_end_of_its_lease_quarantines_nothing(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(loans, "_is_wrong", lambda *_: gate.wait(LOOP_WAIT_S))
    async with AsyncExitStack() as undo:
        undo.callback(gate.set)
        a, b = await two_nodes(undo)
        a.store()
        b.transport.damaged = {0}
        service = await undo.enter_async_context(serving(a))
        async with reading(a, {}), reading(b, {"a": service.endpoint}):
            await eventually(b.up)
            b.fetch(b.room(KEYS))
            await eventually(lambda: b.ends and a.loans.stats()["open"] == 1)
            a.node.advance(time.monotonic_ns() + 60_000_000_000)
            assert not a.pinned_bytes(), "as if the node had been stopped for a minute"
            gate.set()
            await eventually(lambda: a.loans.counts["reports_late"] == 1)

            b.transport.damaged = set()
            b.fetch(b.room(KEYS[:2], "t"), keys=KEYS[:2])
            await eventually(lambda: len(b.ends) == 2)
            assert len(b.ends[1].digests) == 2 * DIGEST_BYTES, "good pages are still there"


@in_loop
@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "bad memory")])
async def test_a_check_that_fails_for_any_reason_is_counted_and_its_lease_is_released(
    monkeypatch, error
):
    def fail(*_):
        raise error

    monkeypatch.setattr(loans, "_is_wrong", fail)
    async with AsyncExitStack() as undo:
        a, b = await two_nodes(undo)
        a.store()
        b.transport.damaged = {0}
        service = await undo.enter_async_context(serving(a))
        async with reading(a, {}), reading(b, {"a": service.endpoint}):
            await eventually(b.up)
            b.fetch(b.room(KEYS))
            await eventually(lambda: a.loans.counts["reports_failed"] == 1)
            await eventually(lambda: not a.loans.stats()["open"])
            assert not a.pinned_bytes()
            assert a.stored() == 6, "nobody has seen that they are wrong"


@in_loop
async def test_a_report_that_no_thread_can_check_is_counted_and_its_lease_is_released(monkeypatch):
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("kvstore-reports"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async with AsyncExitStack() as undo:
        a, b = await two_nodes(undo)
        a.store()
        b.transport.damaged = {0}
        service = await undo.enter_async_context(serving(a))
        async with reading(a, {}), reading(b, {"a": service.endpoint}):
            await eventually(b.up)
            with monkeypatch.context() as full:
                full.setattr(threading.Thread, "start", refuse)
                b.fetch(b.room(KEYS))
                await eventually(lambda: a.loans.counts["reports_ignored"] == 1)
                await eventually(lambda: not a.loans.stats()["open"])
            assert not a.pinned_bytes()

            monkeypatch.setattr(loans, "CHECKS_MAX", 1)
            checked: list[int] = []
            monkeypatch.setattr(loans, "_is_wrong", lambda *asked: checked.append(asked[2]))
            b.fetch(b.room(KEYS, "t"))
            await eventually(lambda: a.loans.counts["reports_false"] == 1)
            assert checked == [0], "the one that was ignored is not checked later"
