"""The waiting queue: what it gives out it gets back, whoever is cancelled and when."""

import asyncio
import time

import pytest

from conductor.engines import EngineInfo, EngineRegistry, Role
from conductor.policy import Scheduler, Waiting
from conductor.queue import Lease, RejectedError, RequestQueue
from tests.loops import in_loop


def queue_over(max_running: int, waiting_max: int = 10) -> RequestQueue:
    registry = EngineRegistry()
    info = EngineInfo(
        id="e",
        role=Role.MIXED,
        url="http://x",
        model="m",
        page_tokens=4,
        domain="d",
        max_running=max_running,
    )
    registry.register(info, 0.0)
    scheduler = Scheduler("round-robin")
    return RequestQueue(
        registry, scheduler, lambda _: {}, waiting_max=waiting_max, clock=time.monotonic
    )


def request(number: int) -> Waiting:
    return Waiting(number=number, model="m", deadline=time.monotonic() + 60)


@in_loop
async def test_a_request_cancelled_while_it_waits_leaves_the_queue_at_once() -> None:
    queue = queue_over(1)
    with await queue.assign(request(1)):
        waiting = asyncio.create_task(queue.assign(request(2)))
        await asyncio.sleep(0)
        assert len(queue) == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        assert len(queue) == 0
    assert queue.in_flight("e") == 0


@in_loop
async def test_a_request_cancelled_just_as_it_is_assigned_gives_its_engine_back() -> None:
    queue = queue_over(1)
    with await queue.assign(request(1)):
        waiting = asyncio.create_task(queue.assign(request(2)))
        await asyncio.sleep(0)
    assert queue.in_flight("e") == 1  # it is the second one's now, who does not know it yet
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert queue.in_flight("e") == 0
    queue.check()


@in_loop
async def test_a_request_that_comes_back_stands_first_and_is_not_refused() -> None:
    queue = queue_over(1, waiting_max=1)
    order: list[int] = []

    async def take(number: int, *, again: bool) -> None:
        with await queue.assign(request(number), again=again):
            order.append(number)

    held = await queue.assign(request(1))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(take(3, again=False))
        await asyncio.sleep(0)
        tasks.create_task(take(2, again=True))
        await asyncio.sleep(0)
        assert len(queue) == 2
        with pytest.raises(RejectedError, match="2 requests are waiting") as refused:
            await queue.assign(request(4))
        assert refused.value.status == 429
        held.release("e")
        held.release("e")  # a second time changes nothing
    assert order == [2, 3]
    assert queue.in_flight("e") == 0


@in_loop
async def test_a_closed_queue_refuses_who_waits_and_who_comes() -> None:
    queue = queue_over(1)
    held: Lease = await queue.assign(request(1))
    waiting = asyncio.create_task(queue.assign(request(2)))
    await asyncio.sleep(0)
    queue.close()
    for late in (waiting, queue.assign(request(3))):
        with pytest.raises(RejectedError, match="shutting down"):
            await late
    held.release("e")
    assert len(queue) == 0
