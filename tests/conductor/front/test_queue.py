"""The waiting queue: what it gives out it gets back, whoever is cancelled and when."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from conductor.front.guarding import Guard
from conductor.front.waiting import Lease, RejectedError, RequestQueue
from conductor.routing.columns import Matches
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.policy import POLICIES
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler
from kvstore.process.faults import Faults
from tests.loops import in_loop


def queue_over(
    waiting_max: int = 10, wait_s: float = 60.0, policy: str = "round-robin",
    find: Callable[[int, str], Matches] | None = None, **engines: tuple[str, int],
):  # fmt: skip
    """A queue over engines: their roles and places; one mixed engine "e" with one by default."""
    registry = EngineRegistry()
    for name, (role, max_running) in (engines or {"e": ("mixed", 1)}).items():
        info = EngineInfo(
            id=name, role=Role(role), url="http://x", model="m", page_tokens=4, domain="d",
            max_running=max_running,
        )  # fmt: skip
        registry.register(info, 0.0)
    limits = DispatchLimits(waiting_max, wait_s, tries=2)
    dispatcher = Dispatcher(registry, Scheduler(POLICIES[policy]), limits)
    guard = Guard(Faults(logging.getLogger(), ""))
    return RequestQueue(dispatcher, registry, find or (lambda *_: {}), time.monotonic, guard)


def request(number: int, tokens: int | None = None) -> Request:
    return Request(number=number, model="m", arrived=time.monotonic(), tokens=tokens)


async def take(queue: RequestQueue, number: int, tokens: int | None = None) -> Lease:
    lease = queue.enter(request(number, tokens))
    await lease.assigned()
    return lease


async def use(queue: RequestQueue, number: int, order: list[int] | None = None) -> None:
    """Wait for engines and give them back at once."""
    with queue.enter(request(number)) as lease:
        await lease.assigned()
        if order is not None:
            order.append(number)


@in_loop
async def test_a_request_cancelled_while_it_waits_leaves_the_queue_at_once() -> None:
    queue = queue_over()
    with await take(queue, 1):
        waiting = asyncio.create_task(use(queue, 2))
        await asyncio.sleep(0)
        assert len(queue) == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        assert len(queue) == 0
    assert queue.dispatcher.in_flight("e") == 0


@in_loop
async def test_a_request_cancelled_just_as_it_is_assigned_gives_its_engine_back() -> None:
    queue = queue_over()
    with await take(queue, 1):
        waiting = asyncio.create_task(use(queue, 2))
        await asyncio.sleep(0)
    assert queue.dispatcher.in_flight("e") == 1  # the second one has it, and does not know it yet
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert queue.dispatcher.in_flight("e") == 0
    queue.dispatcher.check()


@in_loop
async def test_room_is_not_given_to_who_was_cancelled_a_moment_ago() -> None:
    queue = queue_over()
    held = await take(queue, 1)
    waiting = asyncio.create_task(use(queue, 2))
    await asyncio.sleep(0)
    waiting.cancel()
    held.release("e")
    assert (len(queue), queue.dispatcher.in_flight("e")) == (0, 0)
    await asyncio.wait([waiting])
    assert waiting.cancelled()


@in_loop
async def test_a_request_that_failed_stands_first_and_is_not_refused() -> None:
    queue = queue_over(waiting_max=1, e=("mixed", 1), f=("mixed", 1))
    order: list[int] = []
    first, second = await take(queue, 1), await take(queue, 2)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(use(queue, 3, order))
        await asyncio.sleep(0)
        with pytest.raises(RejectedError, match="1 requests are waiting") as refused:
            await take(queue, 4)
        assert refused.value.status == 429
        second.failed("f", "broke")  # the third one waits already, and gets its place
        assert len(queue) == 1
        first.release("e")
        first.release("e")  # a second time changes nothing
        assert (await second.assigned()).prefill == "e"
        order.append(2)
    assert sorted(order) == [2, 3]
    second.release("e")
    assert [queue.dispatcher.in_flight(name) for name in "ef"] == [0, 0]


@in_loop
async def test_a_closed_queue_refuses_who_waits_and_who_comes_and_who_fails() -> None:
    queue = queue_over()
    held = await take(queue, 1)
    waiting = asyncio.create_task(use(queue, 2))
    await asyncio.sleep(0)
    queue.close()
    for late in (waiting, use(queue, 3)):
        with pytest.raises(RejectedError, match="shutting down"):
            await late
    held.failed("e", "broke")
    with pytest.raises(RejectedError, match="shutting down"):
        await held.assigned()
    assert len(queue) == 0
    queue.dispatcher.check()


@in_loop
async def test_closing_refuses_the_others_if_one_client_has_gone_a_moment_ago() -> None:
    queue = queue_over()
    with await take(queue, 1):
        gone, stays = (asyncio.create_task(use(queue, number)) for number in (2, 3))
        await asyncio.sleep(0)
        gone.cancel()
        queue.close()
        with pytest.raises(RejectedError, match="shutting down"):
            await stays
        await asyncio.wait([gone])
    queue.dispatcher.check()


@in_loop
async def test_who_waits_too_long_is_refused_without_any_other_event() -> None:
    queue = queue_over(wait_s=0.02)
    with await take(queue, 1):
        with pytest.raises(RejectedError, match="waited too long") as refused:
            await take(queue, 2)
        assert (refused.value.status, refused.value.code) == (503, "queue_timeout")


@in_loop
async def test_a_prefix_that_cannot_be_looked_up_is_none_and_nobody_waits_for_it() -> None:
    asked: list[object] = []

    def find(number: int, _: str) -> Matches:
        asked.append(number)
        if number == 2:
            raise OSError("the index cannot be read")
        return {}

    queue = queue_over(policy="longest-prefix", find=find)
    with await take(queue, 1) as first:
        waiting = [asyncio.create_task(use(queue, number)) for number in (2, 3)]
        await asyncio.sleep(0)
        first.release("e")
        await asyncio.gather(*waiting)
    assert set(asked) >= {2, 3}
    queue.dispatcher.check()


@in_loop
async def test_who_waits_is_served_although_nothing_could_be_decided_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> Any:
        raise OSError("cannot decide")

    queue = queue_over()
    with await take(queue, 1) as first:
        waiting = asyncio.create_task(use(queue, 2))
        await asyncio.sleep(0)
        monkeypatch.setattr(type(queue.dispatcher), "step", broken)
        with pytest.raises(OSError, match="cannot decide"):
            first.release("e")
        with pytest.raises(OSError, match="cannot decide"):
            queue.enter(request(3))
        assert len(queue) == 1, "who could not enter is not there"
        monkeypatch.undo()
        await waiting
    queue.dispatcher.check()


@in_loop
async def test_the_first_token_of_one_request_gives_the_next_its_engine() -> None:
    queue = queue_over(policy="earliest-first-token", e=("mixed", 2))
    with await take(queue, 1, tokens=60_000):
        second = asyncio.create_task(use(queue, 2))
        await asyncio.sleep(0)
        assert len(queue) == 1, "the engine computes the first prompt"
        queue.began(1)
        assert len(queue) == 0
        await second


@in_loop
async def test_a_place_to_decode_is_waited_for_when_the_prompt_is_computed() -> None:
    queue = queue_over(p=("prefill", 2), d=("decode", 1))
    first, second = await take(queue, 1), queue.enter(request(2))
    assert (await first.handed_over()).decode == "d"
    await second.assigned()  # the prompt is computed while the only place to decode is taken
    later = asyncio.create_task(second.handed_over())
    await asyncio.sleep(0)
    assert [queue.dispatcher.in_flight(name) for name in "pd"] == [0, 1]
    assert len(queue) == 1
    first.release("d")
    assert (await later).decode == "d"
    with second:
        assert queue.dispatcher.in_flight("d") == 1
    assert queue.dispatcher.in_flight("d") == 0


@in_loop
async def test_a_client_that_goes_while_its_kv_waits_leaves_nothing_behind() -> None:
    queue = queue_over(p=("prefill", 2), d=("decode", 1))
    first = await take(queue, 1)
    await first.handed_over()

    async def second() -> None:
        with queue.enter(request(2)) as lease:
            await lease.assigned()
            await lease.handed_over()

    waiting = asyncio.create_task(second())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(queue) == 1
    waiting.cancel()
    await asyncio.wait([waiting])
    assert len(queue) == 0
    first.release("d")
    assert queue.dispatcher.in_flight("d") == 0
    queue.dispatcher.check()


@in_loop
async def test_what_was_decided_before_a_bug_is_told_and_the_request_of_the_bug_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = queue_over(e=("mixed", 1), f=("mixed", 2))
    held = [await take(queue, number) for number in (1, 2, 3)]
    waiting = [asyncio.create_task(use(queue, number)) for number in (4, 5, 6)]
    await asyncio.sleep(0)
    assigned = queue.dispatcher.loads.assigned

    def broken(number: int, *args: Any) -> None:
        if number == 5:
            raise KeyError("a bug")
        assigned(number, *args)

    monkeypatch.setattr(queue.dispatcher.loads, "assigned", broken)
    with monkeypatch.context() as at_once:
        at_once.setattr(queue, "pump", lambda: None)
        for lease in held:
            lease.__exit__(None, None, None)
    with pytest.raises(KeyError):
        queue.pump()
    async with asyncio.timeout(30):
        await waiting[0]
        with pytest.raises(RejectedError, match="internal error") as refused:
            await waiting[1]
        await waiting[2]
    assert (refused.value.status, refused.value.code) == (500, "internal")
    queue.dispatcher.check()


@in_loop
async def test_kv_that_arrived_has_its_place_though_nothing_else_could_be_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = queue_over(p=("prefill", 2), d=("decode", 1))
    scheduler = queue.dispatcher._scheduler
    with await take(queue, 1) as first:
        await first.handed_over()
        second = await take(queue, 2)
        later = asyncio.create_task(second.handed_over())
        await asyncio.sleep(0)
        other = asyncio.create_task(use(queue, 3))
        await asyncio.sleep(0)
        assert len(queue) == 2

        def broken(*_: object) -> Any:
            raise OSError("cannot decide")

        with monkeypatch.context() as patched:
            patched.setattr(scheduler, "schedule", broken)
            with pytest.raises(OSError, match="cannot decide"):
                first.release("d")
            assert (await asyncio.wait_for(later, 5)).decode == "d"
        second.__exit__(None, None, None)
        await asyncio.wait_for(other, 30)
    queue.dispatcher.check()
