"""Goal: every policy is leaf-first, loses no leaf, and is bounded in what one call does."""

from collections.abc import Callable, Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.policy import SLOT_BYTES, Furthest, Simulation, simulate
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import CanonicalLayout, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.choice.former import FORGOTTEN_MAX
from kvstore.state.choice.highest_reuse import COST_MAX, MOVES_TICK_MAX, HighestReuse
from kvstore.state.choice.policies import POLICIES, new_policy
from kvstore.state.choice.policy import MOVES_MAX, EvictionPolicy, LeastRecent
from kvstore.state.choice.reuse import BINS, Kind, LearnedReuse
from kvstore.state.table.invariants import check
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.nodeheap import NodeHeap, NodeLine
from kvstore.state.tree.prefix_tree import PrefixTree, Shard
from kvstore.state.tree.sessions import Peer, Process, Session
from kvstore.state.tree.slots import Slot, SlotTable
from tests.state.world import PAGE, World, hold, key

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=60)


class Watched:
    """A policy between the simulation and another, which checks what comes out."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.behind = False
        self.offered: set[PrefixNode] = set()

    def stored(self, node: PrefixNode, keys: list[PrefixKey], tick: int) -> None:
        self.policy.stored(node, keys, tick)

    def used(self, node: PrefixNode, tick: int) -> None:
        self.policy.used(node, tick)

    def add_candidate(self, node: PrefixNode, tick: int) -> None:
        assert not node.children, "leaf-first"
        self.offered.add(node)
        self.policy.add_candidate(node, tick)

    def pop(self, tick: int) -> PrefixNode | None:
        node = self.policy.pop(tick)
        if node is not None:
            assert is_live(node)
            self.offered.remove(node)
        else:
            left = [one for one in self.offered if is_live(one) and not one.children]
            assert not left, "a leaf was lost"
        return node

    def sweep(self, most: int) -> int:
        return self.policy.sweep(most)


def chained(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Ids that name a whole prefix, as a trace has them."""
    numbers: dict[tuple[int, ...], int] = {}
    return [
        [numbers.setdefault(tuple(prompt[: end + 1]), len(numbers)) for end in range(len(prompt))]
        for prompt in prompts
    ]


@pytest.mark.parametrize("name", POLICIES)
@given(prompts=PROMPTS, capacity=st.integers(1, 12))
def test_a_policy_returns_each_offered_leaf_once_and_loses_none(name, prompts, capacity):
    watched = Watched(new_policy(name, SLOT_BYTES))
    simulation = Simulation(capacity, watched)
    for ids in chained(prompts):
        uses = sum(node.uses for node in [simulation.space.root, *simulation.space.nodes.values()])
        hits = simulation.request(ids)
        hold(simulation.space.checks(lambda _node: None))
        assert len(simulation.space.nodes) <= capacity
        after = sum(node.uses for node in [simulation.space.root, *simulation.space.nodes.values()])
        assert after >= uses + bool(hits), "marks of what is gone are handed up"
    while watched.pop(simulation.tick) is not None:
        pass


@given(prompts=PROMPTS, capacity=st.integers(1, 12), name=st.sampled_from(sorted(POLICIES)))
def test_no_policy_finds_more_than_the_optimum(prompts, capacity, name):
    requests = [ids for ids in chained(prompts) if len(ids) <= capacity]
    best = simulate(requests, capacity, Furthest(requests))

    assert simulate(requests, capacity, new_policy(name, SLOT_BYTES)).hits <= best.hits


def test_an_unknown_policy_is_refused_and_the_known_ones_are_named():
    with pytest.raises(
        InvalidArgument, match="'fifo' is not one of lru, lfu, tinylfu, s3-fifo, kv"
    ):
        new_policy("fifo", SLOT_BYTES)


def conversations(turns: int, others: int) -> list[list[int]]:
    """Conversations of ``turns`` turns, one turn in ``others`` one-shot prompts, never again."""
    fresh, requests = count(1), []
    growing: list[list[int]] = [[] for _ in range(8)]
    for turn in range(turns * 8):
        at = turn % 8
        if turn // 8 % 6 == 5:
            growing[at] = []
        growing[at] = [*growing[at], next(fresh), next(fresh)]
        requests.append(growing[at])
        requests += [[next(fresh) for _ in range(4)] for _ in range(others)]
    return requests


def test_s3_fifo_keeps_all_of_a_used_prefix_through_a_scan_and_not_only_its_last_page():
    """A use marks the deepest page only: those above must not look new when their turn comes."""
    simulation = Simulation(100, new_policy("s3-fifo", SLOT_BYTES))
    head = list(range(20))
    for at in range(3):
        simulation.request([*head, 1000 + at])
    for scanned in range(20):
        simulation.request(list(range(5000 + 10 * scanned, 5010 + 10 * scanned)))

    assert simulation.request([*head, 2000]) == 20


@pytest.mark.parametrize("name", POLICIES)
def test_a_leaf_whose_turn_was_not_taken_comes_again(name):
    simulation = Simulation(100, new_policy(name, SLOT_BYTES))
    for at in range(5):
        simulation.request([10 * at, 10 * at + 1])
    policy = simulation.policy
    for _ in range(20):
        first = policy.pop(simulation.tick)
        assert first is not None
        policy.add_candidate(first, simulation.tick)
    found = [policy.pop(simulation.tick) for _ in range(5)]
    assert None not in found
    assert len(set(found)) == 5


def test_ours_learns_to_keep_conversations_where_lru_keeps_scans():
    requests = conversations(turns=120, others=4)
    ours = simulate(requests, 100, new_policy("kvstore", SLOT_BYTES)).hits
    lru = simulate(requests, 100, new_policy("lru", SLOT_BYTES)).hits

    assert ours > 2 * lru + 100


def a_leaf(space: PrefixTree, number: int, tick: int) -> PrefixNode:
    """A node under the root, last used at ``tick``."""
    node = space.node(PrefixKey(number.to_bytes(32, "little")), PrefixKey(b""))
    node.access = tick
    return node


def a_space(number: int, prefill_s_per_token: float = 0.0) -> PrefixTree:
    identity = SpaceIdentity(model=f"m{number}", kv_dtype="uint8", page_tokens=1)
    spec = ShardSpec(layout=CanonicalLayout(2048), layers=(0, 1), heads=(0, 1))
    space = PrefixTree(number, identity, [Shard(spec, SLOT_BYTES, SLOT_BYTES)])
    space.prefill_s_per_token = prefill_s_per_token
    return space


@given(cheap_is_older=st.booleans(), factor=st.integers(4, 1000))
def test_ours_evicts_what_is_computed_again_fastest_of_pages_alike(cheap_is_older, factor):
    cheap, dear = a_space(0, 0.001), a_space(1, 0.001 * factor)
    policy = new_policy("kvstore", SLOT_BYTES)
    for number in range(8):
        for space in (cheap, dear):
            policy.add_candidate(
                a_leaf(space, number, 100 if (space is cheap) == cheap_is_older else 101), 102
            )

    victims = [policy.pop(102) for _ in range(16)]
    assert [victim.space for victim in victims] == [cheap] * 8 + [dear] * 8


def test_a_put_tells_its_space_what_its_session_reported():
    table = PageTable(SlotTable(8 * SLOT_BYTES, 1), "kvstore")
    session = Session(b"engine", "engine", 1 << 40)
    process = Process(1, Peer(1), session)
    given_space = a_space(0)
    space = table.spaces.open(session, given_space.identity, [given_space.shards[0].spec])[0]
    table.begin_put(process, 1, space, 0, bytes(31) + b"1", PrefixKey(b""))
    assert space.prefill_s_per_token == 0
    session.prefill_s_per_token = 0.002
    table.begin_put(process, 2, space, 0, bytes(31) + b"2", PrefixKey(b""))

    assert space.prefill_s_per_token == 0.002


def test_no_choice_of_a_victim_moves_more_than_a_few_leaves_however_many_aged(monkeypatch):
    space, policy = a_space(0), HighestReuse(SLOT_BYTES)
    for number in range(3000):
        policy.add_candidate(a_leaf(space, number, number), 3000)
    moved = []
    put = HighestReuse._put
    monkeypatch.setattr(HighestReuse, "_put", lambda *given: (moved.append(given), put(*given)))
    most = 0
    for _ in range(3000):
        moved.clear()
        assert policy.pop(1 << 20) is not None
        most = max(most, len(moved))

    assert 0 < most <= MOVES_MAX
    assert policy.pop(1 << 20) is None


def test_no_tick_moves_many_leaves_however_many_victims_are_chosen_in_it(monkeypatch):
    space, policy = a_space(0), HighestReuse(SLOT_BYTES)
    for number in range(3000):
        policy.add_candidate(a_leaf(space, number, number), 3000)
    moved = []
    put = HighestReuse._put
    monkeypatch.setattr(HighestReuse, "_put", lambda *given: (moved.append(given), put(*given)))
    of_ticks = []
    for tick in (1 << 20, 1 + (1 << 20)):
        moved.clear()
        assert all(policy.pop(tick) is not None for _ in range(100))
        of_ticks.append(len(moved))

    assert 0 < max(of_ticks) <= MOVES_TICK_MAX
    assert of_ticks[1], "the others age in the ticks after it"


@pytest.mark.parametrize("name", POLICIES)
def test_what_a_policy_learnt_is_let_go_in_steps(name):
    policy = new_policy(name, SLOT_BYTES)
    simulation = Simulation(200, policy)
    for ids in conversations(20, 4):
        simulation.request(ids)
    while policy.pop(simulation.tick) is not None:
        pass

    steps = 1
    while not policy.forget(10):
        steps += 1

    learns = name in ("tinylfu", "s3-fifo", "kvstore")
    assert steps > 10 if learns else steps == 1
    if isinstance(policy, HighestReuse):
        learnt = policy._reuse
        assert not any([learnt._in_order, *learnt._by_age, *learnt._observed])
        assert not any([learnt._table, learnt._tables, learnt._counted, learnt._ranks])


def test_what_a_replaced_policy_learnt_is_let_go_with_the_choices_that_come():
    world = World(extents=1, slots_each=2 * FORGOTTEN_MAX)
    eviction, engine = world.table.eviction, world.process()
    eviction.change_policy("kvstore")
    space = world.space(engine)
    for page in range(3 * FORGOTTEN_MAX):
        world.store(engine, space, chr(0x1000 + page))

    eviction.change_policy("lru")
    assert not eviction.settle(1 << 20), "it learnt more than one step lets go"
    for page in range(20):
        world.store(engine, space, chr(0x8000 + page))
    assert eviction.settle(1)


def learn(policy: HighestReuse, kind: Kind, rank: float) -> None:
    """Pages of a kind rank so from now on, whatever their age."""
    policy._reuse._ranks[kind] = [rank] * BINS
    for cell in policy._of_kind[kind]:
        policy._rank(cell)


def test_a_cell_that_ranks_higher_than_before_is_not_taken_for_its_former_rank():
    space, policy = a_space(0), HighestReuse(SLOT_BYTES)
    first, second = a_leaf(space, 1, 5), a_leaf(space, 2, 5)
    second.turns = 1
    for leaf in (first, second):
        policy.add_candidate(leaf, 5)
    learn(policy, LearnedReuse.kind(first), 1.0)
    learn(policy, LearnedReuse.kind(second), 2.0)

    learn(policy, LearnedReuse.kind(first), 3.0)

    assert [policy.pop(5) for _ in range(3)] == [second, first, None]


def test_a_cell_that_came_back_to_a_former_rank_is_forgotten_once():
    space, policy = a_space(0), HighestReuse(SLOT_BYTES)
    first, second = a_leaf(space, 1, 5), a_leaf(space, 2, 5)
    policy.add_candidate(first, 5)
    for rank in (1.0, 2.0, 1.0):
        learn(policy, LearnedReuse.kind(first), rank)

    assert [policy.pop(5) for _ in range(2)] == [first, None]
    policy.add_candidate(second, 5)
    assert policy.pop(5) is second


def test_of_one_conversation_only_the_newest_prompt_is_watched():
    """Otherwise each turn would leave one more prefix that seems never to be used again."""
    policy = HighestReuse(SLOT_BYTES)
    simulation = Simulation(1000, policy)
    for turn in range(1, 30):
        simulation.request(list(range(4 * turn)))
    simulation.request([1 << 20])

    watched = set().union(*policy._reuse._observed)
    assert {int.from_bytes(key, "little") for key in watched} == {114, 115}


def test_the_simulator_finds_what_a_page_table_finds():
    """The same prompts through real slots, leases and puts, evicted by ``lru``."""
    requests = [ids for ids in conversations(turns=24, others=2) if len(ids) <= 48]
    table = PageTable(SlotTable(64 * SLOT_BYTES, 1), "lru")
    session = Session(b"engine", "engine", 1 << 40)
    process = Process(1, Peer(1), session)
    identity = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=1)
    spec = ShardSpec(layout=CanonicalLayout(2048), layers=(0, 1), heads=(0, 1))
    space = table.spaces.open(session, identity, [spec])[0]
    simulation = Simulation(64, new_policy("lru", SLOT_BYTES))
    for number, ids in enumerate(requests):
        packed = b"".join(block.to_bytes(32, "little") for block in ids)
        hits, _ = table.lookup(space, [0], packed)
        if hits:
            table.acquire(process, number, space, 0, packed, 1 << 60)
            table.release(process, number)
        if hits < len(ids):
            parent = PrefixKey(packed[hits * 32 - 32 : hits * 32] if hits else b"")
            _, put = table.begin_put(process, number, space, 0, packed[hits * 32 :], parent)
            table.commit_put(process, number, bytes(16 * len(put.slots)))
        assert simulation.request(ids) == hits
        assert set(simulation.space.nodes) == set(space.nodes)
        check(table)


@pytest.mark.parametrize("kind", [LeastRecent, HighestReuse])
def test_leaves_that_have_gone_otherwise_do_not_wait_in_the_heap_for_the_next_choice(kind):
    world = World(extents=20)
    engine = world.process()
    space = world.space(engine)
    paths = [chr(0x1000 + at) for at in range(60)]
    for path in paths:
        world.store(engine, space, path)
    nodes = [space.nodes[key(path)] for path in paths]
    policy = kind(SLOT_BYTES + 1)  # a class of its own: the table has offered them as well
    for node in nodes[:40]:
        policy.add_candidate(node, 0)
    for node in nodes[:40]:
        world.table.residents.drop(node, 0, "evicted")

    for node in nodes[40:]:
        policy.add_candidate(node, 0)

    heaps = [policy._heap] if kind is LeastRecent else policy._cells.values()
    assert sum(map(len, heaps)) == 20
    assert [policy.pop(0) for _ in range(21)] == [*nodes[40:], None]


def counted_pops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an item for each entry that is taken out of a queue."""
    pops: list[int] = []
    for kind in (NodeHeap, NodeLine):
        name = "pop" if kind is NodeHeap else "popleft"
        popped = getattr(kind, name)

        def pop(self: object, popped: Callable[[object], object] = popped) -> object:
            pops.append(1)
            return popped(self)

        monkeypatch.setattr(kind, name, pop)
    return pops


def changed_leaves(
    policy: str, monkeypatch: pytest.MonkeyPatch, *, used: bool
) -> tuple[World, PrefixTree, list[int]]:
    """A leaf, and 2,000 that were continued or used since they were offered; pops of heaps."""
    world = World(extents=80, slots_each=128)
    world.table.eviction.change_policy(policy)
    engine = world.process()
    space = world.space(engine)
    names = [chr(0x4E00 + number) for number in range(2001)]
    for name in names:
        world.store(engine, space, name + "a")
    for name in names[1:]:
        if used:
            lease, _ = world.acquire(engine, space, name + "a")
            world.table.release(engine, lease)
        else:
            world.store(engine, space, name + "ab", start=2)
    return world, space, counted_pops(monkeypatch)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("used", [False, True])
def test_a_choice_passes_over_few_leaves_that_have_changed(policy, used, monkeypatch):
    monkeypatch.setattr("kvstore.state.choice.policy.LOOKS_MAX", 100)
    world, space, pops = changed_leaves(policy, monkeypatch, used=used)
    eviction = world.table.eviction

    for choice in range(8):
        victim = eviction.victim(space, PAGE)
        assert victim is not None
        assert eviction.evictable(victim)
        assert len(pops) <= 2 * (100 + 10 * (choice + 1))


def test_a_choice_that_may_not_pass_over_more_takes_the_longest_unused_that_it_has_seen(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("kvstore.state.choice.policy.LOOKS_MAX", 20)
    for used in (False, True):
        world, space, _ = changed_leaves("lru", monkeypatch, used=used)
        first = world.table.eviction.victim(space, PAGE)
        second = world.table.eviction.victim(space, PAGE)
        assert first is not None
        assert second is not None
        assert first.key == key(chr(0x4E00) + "a")
        assert second.key == key(chr(0x4E01) + ("a" if used else "ab"))


def test_first_entries_of_leaves_that_were_continued_go_with_those_that_come(monkeypatch):
    world, space, pops = changed_leaves("lru", monkeypatch, used=False)
    assert world.table.eviction.victim(space, PAGE) is not None

    for number in range(1000):
        world.store(world.process(), space, chr(0x7000 + number))
    pops.clear()
    assert world.table.eviction.victim(space, PAGE) is not None
    assert len(pops) <= 8


def test_times_that_engines_report_make_a_limited_number_of_cells():
    policy = HighestReuse(SLOT_BYTES)
    for number in range(200):
        space = a_space(number, prefill_s_per_token=10.0 ** (number - 190))
        node = space.node(key("a"), PrefixKey(b""))
        node.begin(0, Slot(0))
        policy.add_candidate(node, 1)

    assert len(policy._cells) <= 2 * COST_MAX + 1
