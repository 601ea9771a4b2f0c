"""The waiting queue: what it gives out it gets back, whoever is cancelled and when."""

import asyncio
import time

import pytest

from conductor.front.waiting import Lease, RequestQueue
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.policy import Assign, Reject, Scheduler, Waiting
from conductor.routing.queue import QueueRules, RejectedError
from tests.loops import in_loop


def rules_over(max_running: int, waiting_max: int = 10) -> QueueRules:
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
    return QueueRules(registry, Scheduler("round-robin"), lambda _: {}, waiting_max=waiting_max)


def queue_over(max_running: int, waiting_max: int = 10) -> RequestQueue:
    return RequestQueue(rules_over(max_running, waiting_max), time.monotonic)


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
    assert queue.rules.in_flight("e") == 0


@in_loop
async def test_a_request_cancelled_just_as_it_is_assigned_gives_its_engine_back() -> None:
    queue = queue_over(1)
    with await queue.assign(request(1)):
        waiting = asyncio.create_task(queue.assign(request(2)))
        await asyncio.sleep(0)
    assert queue.rules.in_flight("e") == 1  # it is the second one's now, who does not know it yet
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert queue.rules.in_flight("e") == 0
    queue.rules.check()


@in_loop
async def test_room_is_not_given_to_who_was_cancelled_a_moment_ago() -> None:
    queue = queue_over(1)
    held = await queue.assign(request(1))
    waiting = asyncio.create_task(queue.assign(request(2)))
    await asyncio.sleep(0)
    waiting.cancel()
    held.release("e")
    assert (len(queue), queue.rules.in_flight("e")) == (0, 0)
    await asyncio.wait([waiting])
    assert waiting.cancelled()


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
    assert queue.rules.in_flight("e") == 0


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


def test_the_rules_give_room_in_order_of_arrival_and_refuse_who_waited_too_long() -> None:
    rules = rules_over(max_running=1)
    for number, deadline in ((3, 9.0), (2, 5.0), (1, 9.0)):
        rules.add(Waiting(number=number, model="m", deadline=deadline))
    assert rules.first_deadline == 5.0
    assert [type(one) for one in rules.schedule(0.0)] == [Assign]
    assert rules.in_flight("e") == 1
    assert rules.schedule(4.0) == []
    (refused,) = rules.schedule(5.0)
    assert isinstance(refused, Reject)
    assert refused.request == 2
    rules.released("e", 6.0)
    assert [one.request for one in rules.schedule(6.0)] == [3]
    assert (len(rules), rules.first_deadline) == (0, None)
    rules.check()


def test_clients_are_told_to_come_back_as_fast_as_requests_end() -> None:
    rules = rules_over(max_running=100, waiting_max=200)
    for number in range(100):
        rules.add(Waiting(number=number, model="m", deadline=1e9))
    rules.schedule(0.0)
    for number in range(100, 120):
        rules.add(Waiting(number=number, model="m", deadline=1e9))
    assert rules.retry_after_s == 20
    for ended in range(100):
        rules.released("e", 0.1 * ended)
    assert rules.retry_after_s == 3


def test_a_request_that_is_taken_out_gets_nothing() -> None:
    rules = rules_over(max_running=1)
    for number in (1, 2):
        rules.add(Waiting(number=number, model="m", deadline=9.0))
    rules.remove(1)
    rules.remove(1)
    assert [one.request for one in rules.schedule(0.0)] == [2]
