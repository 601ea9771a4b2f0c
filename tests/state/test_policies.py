"""Goal: every policy is leaf-first and loses no leaf; admission writes no tail without its head."""

from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.policy import SLOT_BYTES, Furthest, Simulation, simulate
from kvstore.errors import InvalidArgument
from kvstore.page import CanonicalLayout, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.admission import DAY_NS, Admission
from kvstore.state.pages import PageTable
from kvstore.state.policy import POLICIES, EvictionPolicy, new_policy
from kvstore.state.sessions import Process, Session
from kvstore.state.slots import SlotTable
from kvstore.state.tree import Node, Shard, Space, is_live

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=60)


class Watched:
    """A policy between the simulation and another, which checks what comes out."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.offered: set[Node] = set()

    def stored(self, node: Node, tick: int) -> None:
        self.policy.stored(node, tick)

    def used(self, node: Node, tick: int) -> None:
        self.policy.used(node, tick)

    def offer(self, node: Node, tick: int) -> None:
        assert not node.children, "leaf-first"
        self.offered.add(node)
        self.policy.offer(node, tick)

    def pop(self, tick: int) -> Node | None:
        node = self.policy.pop(tick)
        if node is not None:
            assert is_live(node)
            self.offered.remove(node)
        else:
            assert not any(is_live(offered) for offered in self.offered), "a leaf was lost"
        return node


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
        simulation.space.check()
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
    with pytest.raises(InvalidArgument, match="'fifo' is none of lru, lfu, tinylfu, s3-fifo, kvst"):
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


def test_ours_learns_to_keep_conversations_where_lru_keeps_scans():
    requests = conversations(turns=120, others=4)
    ours = simulate(requests, 100, new_policy("kvstore", SLOT_BYTES)).hits
    lru = simulate(requests, 100, new_policy("lru", SLOT_BYTES)).hits

    assert ours > 2 * lru + 100
