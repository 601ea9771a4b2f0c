"""Goal: what has left costs no memory, however much of it there was."""

import gc
from bisect import insort
from collections.abc import Callable, Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.state.choice.policies import POLICIES
from kvstore.state.choice.reuse import OBSERVED_MAX, LearnedReuse, Observation
from kvstore.state.table.invariants import check
from kvstore.state.tree.node import PrefixNode, Retention, is_live
from kvstore.state.tree.nodeheap import Entry, NodeHeap, NodeLine
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Lease
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import ROOT, World, identity, key

PAGES = 2000
NODES_MAX = 600


@pytest.fixture(scope="module", autouse=True)
def only_what_comes_now_is_counted() -> Iterator[None]:
    """A look at all that the whole test run has imported takes a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def alive(kind: type) -> int:
    gc.collect()
    return sum(issubclass(type(one), kind) for one in gc.get_objects())  # asks no proxy


def letters(count: int) -> list[str]:
    return [chr(0x4E00 + at) for at in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_that_leave_before_memory_is_full_are_not_remembered_as_victims(policy):
    """Hand-offs are read once: nobody ever asks for a victim, and yet they come and go."""
    world = World()
    world.table.eviction.change_policy(policy)
    engine = world.process()
    space = world.space(engine)
    before = alive(PrefixNode)

    for letter in letters(PAGES):
        world.store(engine, space, letter, keep=Retention(read_once=True))
        number, _ = world.acquire(engine, space, letter)
        world.table.release(engine, number)

    check(world.table)
    assert not space.nodes
    assert alive(PrefixNode) - before < NODES_MAX


def test_pages_that_leave_long_before_their_time_leave_no_deadline_behind():
    """A TTL of weeks must not keep what was evicted or read in a second."""
    world = World()
    engine = world.process()
    space = world.space(engine)
    before = alive(PrefixNode)
    stays = world.store(engine, space, "stays", keep=Retention(expires_ns=1 << 60))

    for letter in letters(PAGES):
        world.store(engine, space, letter, keep=Retention(expires_ns=1 << 60))
        world.table.residents.drop(space.nodes[key(letter)], 0, "operator")

    assert alive(PrefixNode) - before < NODES_MAX
    assert world.table.next_deadline_ns() == 1 << 60
    world.table.expire(1 << 60)
    assert stays
    assert not space.nodes


def test_leases_that_end_long_before_their_time_leave_no_deadline_behind():
    world = World()
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "a")
    before = alive(Lease)

    for _ in range(PAGES):
        number, _ = world.acquire(engine, space, "a")
        world.table.release(engine, number)
    world.acquire(engine, space, "a")

    assert alive(Lease) - before < NODES_MAX
    for _ in range(PAGES):  # deadlines of leases that have ended count, too
        world.table.expire(1 << 60)
    assert world.table.counts["expired_leases"] == 1


def test_pages_that_leave_a_disk_whose_quota_is_never_used_up_are_not_remembered():
    world = DiskWorld()
    world.disk.limit(world.mine, 1 << 40, 0)
    before = alive(PrefixNode)

    for letter in letters(PAGES):
        world.store(world.me, world.mine, letter)
        world.end_all()
        world.table.residents.drop(world.node(letter), 0, "expired")

    check(world.table)
    assert alive(PrefixNode) - before < NODES_MAX


def test_prompts_that_are_only_ever_used_again_are_watched_once_each():
    reuse, space = LearnedReuse(), PrefixTree(0, identity())
    nodes = [space.node(key(letter), ROOT) for letter in "abc"]
    before = alive(Observation)
    for tick in range(3 * OBSERVED_MAX):
        reuse.used(nodes[tick % 3], tick)
    assert alive(Observation) - before < 2 * OBSERVED_MAX


def next_live(pop: Callable[[], Entry]) -> Entry:
    while not is_live((entry := pop())[-1]):
        pass
    return entry


def burst(random: Random, most: int) -> int:
    """How many to take out now: mostly none, and now and then nearly all there are."""
    return most - random.randrange(most // 8 + 1) if random.random() < 0.005 else 0


@given(st.integers(0, 1 << 32))
def test_nodes_that_stay_leave_a_heap_in_order(seed):
    random, space, heap, ranks = Random(seed), PrefixTree(0, identity()), NodeHeap(), list[Entry]()
    for at in range(random.randrange(1, 1500)):
        entry = (random.randrange(50), at, space.node(key(str(at)), ROOT))
        heap.push(entry)
        insort(ranks, entry)
        if random.random() < 0.3:
            space.prune(ranks.pop(random.randrange(len(ranks)))[-1])
        for _ in range(burst(random, len(ranks))):
            assert next_live(heap.pop) == ranks.pop(0)
    assert [next_live(heap.pop) for _ in ranks] == ranks


@given(st.integers(0, 1 << 32))
def test_nodes_that_stay_leave_a_line_in_their_turn(seed):
    random, space, line, turns = Random(seed), PrefixTree(0, identity()), NodeLine(), list[Entry]()
    for at in range(random.randrange(1, 1500)):
        entry = (at, space.node(key(str(at)), ROOT))
        if random.random() < 0.1:
            line.appendleft(entry)
            turns.insert(0, entry)
        else:
            line.append(entry)
            turns.append(entry)
        if random.random() < 0.3:
            space.prune(turns.pop(random.randrange(len(turns)))[-1])
        for _ in range(burst(random, len(turns))):
            assert next_live(line.popleft) == turns.pop(0)
    assert [next_live(line.popleft) for _ in turns] == turns
