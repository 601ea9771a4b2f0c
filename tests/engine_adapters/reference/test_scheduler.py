"""Goal: decode first, bounded steps, nothing lost when blocks run out. Pure: no model, no clock."""

from hypothesis import given
from hypothesis import strategies as st

from engine_adapters.reference.prefix_tree import BlockAllocator, PrefixTree
from engine_adapters.reference.request import Request, State
from engine_adapters.reference.scheduler import Limits, Plan, Scheduler

PAGE, BLOCK = 8, 4


def make(
    blocks: int = 64, *, tree: bool = False, budget: int = 16, running: int = 4, waiting: int = 8
) -> tuple[Scheduler, BlockAllocator]:
    allocator = BlockAllocator(blocks)
    limits = Limits(token_budget=budget, running_max=running, waiting_max=waiting)
    prefixes = PrefixTree(allocator, PAGE // BLOCK) if tree else None
    scheduler = Scheduler(limits, allocator, prefixes, page_tokens=PAGE, block_tokens=BLOCK)
    return scheduler, allocator


def request(name: str, prompt: int, first: int = 0) -> Request:
    tokens = list(range(first, first + prompt))
    return Request(
        id=name, tokens=tokens, prompt_tokens=prompt, max_tokens=100, emit=lambda _: None
    )


def step(scheduler: Scheduler) -> Plan:
    """Admit, plan, and compute what was planned: a finished prompt or decode gets a token."""
    scheduler.admit()
    plan = scheduler.plan()
    for one, count in plan.work:
        scheduler.computed(one, count)
        if not one.uncomputed:
            one.tokens.append(1000 + len(one.tokens))
    scheduler.check()
    return plan


def shape(plan: Plan) -> list[tuple[str, int]]:
    return [(one.id, count) for one, count in plan.work]


def test_decodes_come_first_and_prompts_share_the_rest_of_the_budget() -> None:
    scheduler, _ = make(budget=16)
    scheduler.add(request("a", 5))
    assert shape(step(scheduler)) == [("a", 5)]
    scheduler.add(request("b", 30, 100))
    scheduler.add(request("c", 4, 200))
    assert shape(step(scheduler)) == [("a", 1), ("b", 8), ("c", 4)]
    assert shape(step(scheduler)) == [("a", 1), ("c", 1), ("b", 8)]


def test_pieces_of_a_prompt_end_at_pages_unless_the_budget_is_smaller() -> None:
    scheduler, _ = make(budget=19)
    scheduler.add(request("a", 40))
    assert [shape(step(scheduler)) for _ in range(3)] == [[("a", 16)], [("a", 16)], [("a", 8)]]
    scheduler, _ = make(budget=3)
    scheduler.add(request("a", 10))
    assert [shape(step(scheduler)) for _ in range(3)] == [[("a", 3)], [("a", 3)], [("a", 2)]]


def test_the_queue_and_the_running_set_are_bounded() -> None:
    scheduler, _ = make(running=2, waiting=3)
    assert [scheduler.add(request(str(i), 4)) for i in range(4)] == [True, True, True, False]
    step(scheduler)
    assert (scheduler.running, scheduler.waiting) == (2, 1)


def test_a_cached_prefix_is_shared_but_one_token_is_always_computed() -> None:
    scheduler, allocator = make(tree=True)
    first = request("a", 16)
    scheduler.add(first)
    step(scheduler)
    kept = list(first.blocks[:4])
    scheduler.finish(first)
    again = request("b", 16)
    scheduler.add(again)
    scheduler.admit()
    assert again.computed == 8, "a prompt of two whole pages may reuse only one"
    assert again.blocks[:2] == kept[:2]
    longer = request("c", 17)
    scheduler.add(longer)
    scheduler.admit()
    assert longer.computed == 16
    assert longer.blocks[:4] == kept
    assert allocator.references(kept[0]) == 3  # tree, b, c


def test_the_youngest_gives_its_blocks_back_and_starts_again() -> None:
    scheduler, _ = make(blocks=8)  # four pages
    old, young = request("old", 16), request("young", 16, 100)
    scheduler.add(old)
    scheduler.add(young)
    step(scheduler)
    plan = step(scheduler)
    assert old.uncomputed == 1
    assert plan.preempted == [young]
    assert (young.state, young.blocks, young.computed) == (State.WAITING, [], 0)
    for _ in range(3):
        assert shape(step(scheduler)) == [("old", 1)]
    scheduler.finish(old)
    assert shape(step(scheduler)) == [("young", 16)]


def test_a_restoring_request_is_neither_computed_nor_preempted() -> None:
    scheduler, _ = make(blocks=8)
    old, young = request("old", 7), request("young", 20, 100)
    scheduler.add(old)
    scheduler.add(young)
    scheduler.admit()
    young.state = State.RESTORING
    assert shape(step(scheduler)) == [("old", 7)]
    assert shape(step(scheduler)) == [("old", 1)]
    plan = step(scheduler)  # position 8 is in a new page, and young has the other three
    assert (plan.work, plan.preempted) == ([], [old])
    scheduler.restored(young, 19)
    assert shape(step(scheduler)) == [("young", 1)]


def test_finishing_in_any_state_frees_everything() -> None:
    scheduler, allocator = make(running=1)
    running, waiting = request("a", 9), request("b", 9)
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler)
    for one in (waiting, running, running):
        scheduler.finish(one)
    scheduler.check()
    assert allocator.free == allocator.count
    assert (scheduler.running, scheduler.waiting) == (0, 0)


def test_a_request_that_can_never_fit_is_known_beforehand() -> None:
    scheduler, _ = make(blocks=8)
    assert scheduler.tokens_max == 32


@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=6),
    aborted=st.sets(st.integers(0, 5)),
    tree=st.booleans(),
    budget=st.integers(1, 20),
)
def test_every_request_ends_and_no_block_is_lost(
    sizes: list[tuple[int, int]], aborted: set[int], tree: bool, budget: int
) -> None:
    scheduler, allocator = make(blocks=14, tree=tree, budget=budget)
    requests = [request(str(i), prompt, i % 2) for i, (prompt, _) in enumerate(sizes)]
    for one in requests:
        assert scheduler.add(one)
    for number in range(5_000):
        plan = step(scheduler)
        assert sum(count for _, count in plan.work) <= budget
        for index, one in enumerate(requests):
            ended = one.output_tokens >= sizes[index][1]
            if ended or (index in aborted and number > index):
                scheduler.finish(one)
        if not list(scheduler.requests()):
            break
    for index, one in enumerate(requests):
        assert one.state is State.FINISHED
        assert index in aborted or one.output_tokens == sizes[index][1]
    scheduler.check()
    assert tree or allocator.free == allocator.count
