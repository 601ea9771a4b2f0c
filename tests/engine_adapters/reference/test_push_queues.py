"""Goal: no block has two owners, every request ends, and who came first is served first."""

import math

from hypothesis import given
from hypothesis import strategies as st

from engine_adapters.reference.prefix_tree import BlockAllocator
from engine_adapters.reference.push_queues import DecodeQueues, Holding, may_take
from engine_adapters.reference.request import Request, State
from engine_adapters.reference.scheduler import Limits, Scheduler
from tests.engine_adapters.reference.push_world import BLOCK, PAGE, PushWorld

STEPS_MAX = 3_000
POOL_TOKENS = 40

sizes = st.integers(1, POOL_TOKENS - 1).flatmap(
    lambda prompt: st.tuples(
        st.just(prompt), st.integers(1, min(10, POOL_TOKENS - prompt)), st.booleans()
    )
)
arrivals = st.lists(sizes, min_size=1, max_size=7)


@given(
    seed=st.integers(0, 1 << 30),
    requests=arrivals,
    blocks=st.integers(POOL_TOKENS // BLOCK, 20),
    tree=st.booleans(),
    store=st.booleans(),
    aborted=st.sets(st.tuples(st.integers(0, 6), st.sampled_from(["here", "there"])), max_size=3),
)
def test_every_request_ends_at_both_engines_and_no_block_has_two_owners(
    seed: int,
    requests: list[tuple[int, int, bool]],
    blocks: int,
    tree: bool,
    store: bool,
    aborted: set[tuple[int, str]],
) -> None:
    world = PushWorld(seed, here=blocks, there=blocks, tree=tree, store=store)
    left = list(requests)
    for _ in range(STEPS_MAX):
        if left and world.random.random() < 0.4:
            prompt, wanted, ordinary = left.pop()
            world.arrive(prompt, wanted, ordinary=ordinary)
        for index, side in aborted:
            if index < len(world.all) and world.random.random() < 0.05:
                world.abort(world.all[index], side)
        world.step()
        if not left and world.done:
            break
    else:
        raise AssertionError(f"not done after {STEPS_MAX} steps: {world.all}")
    for one in world.all:
        assert "there" in one.gone or one.there.output_tokens == one.wanted
    for side in (world.prefill, world.decode):
        assert tree or side.allocator.free == side.allocator.count


def test_what_decode_does_not_take_gives_way_to_what_it_waits_for() -> None:
    """Each engine's memory is held for a request that waits for the other's."""
    world = PushWorld(1, here=10, there=10, tree=False, store=True)
    world.arrive(30, 2, ordinary=False)
    world.arrive(31, 2, ordinary=False)
    first, second = world.all
    world.starting.bootstrap.reverse()  # prefill hears of them in the other order
    for _ in range(200):
        world.step()
        if world.done:
            break
    assert world.done
    assert world.given_up == 1
    assert second.failed
    assert not first.failed


@given(
    needed=st.integers(1, 30),
    more=st.integers(0, 30),
    spare=st.integers(-4, 12),
    holders=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=5),
    reserve=st.integers(0, 4),
)
def test_after_blocks_are_taken_each_request_alone_could_still_end(
    needed: int, more: int, spare: int, holders: list[tuple[int, int]], reserve: int
) -> None:
    known = [Holding(*one) for one in holders]
    longest = needed + more
    free = max(longest + spare, 0)
    if not may_take(needed, longest, free, known, reserve):
        assert holders or longest > free, "alone in an empty pool it may always have its blocks"
        return
    assert needed <= free
    everyone = [*known, Holding(more, 0)]
    for index, one in enumerate(everyone):
        others = sum(other.retractable for at, other in enumerate(everyone) if at != index)
        assert one.missing <= free - needed + others


def decode_with(blocks: int) -> tuple[Scheduler, DecodeQueues]:
    limits = Limits(token_budget=16, running_max=2, waiting_max=3)
    scheduler = Scheduler(
        limits, BlockAllocator(blocks), None, page_tokens=PAGE, block_tokens=BLOCK
    )
    return scheduler, DecodeQueues(scheduler, waiting_max=3, held_max=2, page_tokens=PAGE)


def request(name: str, prompt: int, arrived: float, most: int = 8) -> Request:
    made = Request(
        id=name, tokens=list(range(prompt)), prompt_tokens=prompt, max_tokens=most,
        emit=lambda _: None,
    )  # fmt: skip
    made.arrived = arrived
    return made


def test_a_retracted_request_comes_back_before_a_new_one_gets_memory() -> None:
    scheduler, queues = decode_with(8)
    old, young, new = request("old", 16, 1.0), request("young", 9, 2.0), request("new", 4, 0.5, 1)
    for one in (old, young):
        scheduler.add(one)
    scheduler.admit()
    while young.state is not State.WAITING:
        for one, count in scheduler.plan().work:
            scheduler.computed(one, count)
            if not one.uncomputed:
                one.tokens.append(1)
    queues.add(new)
    assert young.retracted
    assert queues.preallocate() is None
    scheduler.finish(old)
    assert queues.preallocate() is None, "young has not come back yet"
    assert scheduler.admit(queues.until) == [young]
    assert queues.preallocate() is new


def test_who_arrived_first_gets_memory_first_in_either_queue() -> None:
    scheduler, queues = decode_with(16)
    pushed, later = request("pushed", 20, 2.0), request("later", 8, 3.0)
    first = request("first", 8, 1.0)
    queues.add(pushed)
    scheduler.add(first)
    scheduler.add(later)
    assert queues.preallocate() is None
    assert scheduler.admit(queues.until) == [first]
    assert queues.preallocate() is pushed
    assert queues.until == math.inf
    assert scheduler.admit(queues.until) == [later]


def test_queues_are_bounded_by_who_waits_and_who_holds_blocks() -> None:
    _, queues = decode_with(100)
    asked = [request(str(number), 8, number) for number in range(4)]
    assert [queues.add(one) for one in asked] == [True, True, True, False]
    assert [queues.preallocate() for _ in range(3)] == [asked[0], asked[1], None]
    queues.end_transfer(asked[1])
    assert queues.preallocate() is None, "it holds its blocks still"
    assert queues.run() == [asked[1]]
    assert queues.preallocate() is asked[2]


def test_what_a_push_arrives_in_does_not_count_as_memory_that_can_be_had_back() -> None:
    scheduler, queues = decode_with(12)
    first, second = request("first", 15, 1.0, 1), request("second", 8, 2.0, 32)
    queues.add(first)
    queues.add(second)
    assert queues.preallocate() is first
    assert queues.preallocate() is None, "it may need 10 blocks, and 8 are free"
    queues.end_transfer(first)
    assert queues.preallocate() is None, "it does not run yet"
    first.tokens.append(1)
    scheduler.computed(first, 15)
    assert queues.run() == [first]
    assert queues.preallocate() is second


def test_a_request_whose_blocks_are_pushed_is_not_retracted() -> None:
    scheduler, _ = decode_with(8)
    old, pushing = request("old", 16, 1.0), request("pushing", 15, 2.0)
    pushing.pushes = True
    for one in (old, pushing):
        scheduler.add(one)
    scheduler.admit()
    scheduler.computed(old, 16)
    old.tokens.append(1)
    plan = scheduler.plan()
    assert plan.preempted == [old]
    assert [one for one, _ in plan.work] == [pushing]
