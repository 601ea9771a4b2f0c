"""Goal: what an engine's node could fetch from other nodes is told as the nodes count it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.routing.choices import Assign
from conductor.routing.columns import Prefix
from conductor.routing.joining import NodeView, Sessions
from conductor.routing.naming import own_domain
from conductor.routing.places import engine_worker, node_worker
from conductor.routing.policy import POLICIES
from tests.conductor.routing.columns import engine, request, schedule
from tests.conductor.routing.test_prefixes import LEFT, ONE, PAGE, RIGHT, TOKENS, Cluster


@pytest.fixture
def cluster() -> Cluster:
    """Node ``n``, and its peers ``p`` and ``q``."""
    cluster = Cluster()
    for node in ("n", "p", "q"):
        cluster.follows(node_worker(node))
    return cluster


def test_what_one_peer_has_counts_beyond_the_engines_own_cache_and_its_node(cluster: Cluster):
    info = cluster.engine(shards=(ONE,), peers=("p", "q"))
    cluster.follows(engine_worker("e"), own_domain(info))
    cluster.blocks(engine_worker("e"), 5)  # 10 tokens: into the third page
    cluster.pages(ONE, 2, 4)
    cluster.pages(ONE, 0, 7, node="p")
    cluster.pages(ONE, 0, 6, node="q")
    prefix = cluster.prefix()
    assert (prefix.usable, prefix.peer) == (4 * PAGE, 3 * PAGE)


def test_a_peer_that_has_no_more_adds_nothing(cluster: Cluster):
    cluster.engine(shards=(ONE,), peers=("p", "q"))
    cluster.pages(ONE, 0, 4)
    cluster.pages(ONE, 0, 4, node="p")
    cluster.pages(ONE, 0, 1, node="q")
    assert cluster.prefix().peer == 0


def test_what_two_peers_have_only_together_does_not_count(cluster: Cluster):
    cluster.engine(shards=(ONE,), peers=("p", "q"))
    cluster.pages(ONE, 0, 5, node="p")
    cluster.pages(ONE, 5, 9, node="q")
    assert cluster.prefix().peer == 5 * PAGE


def test_a_peer_needs_every_shard_of_the_engine_and_the_window_of_each(cluster: Cluster):
    cluster.engine("halves", shards=(LEFT, RIGHT), peers=("p",))
    cluster.engine("window", shards=(LEFT, RIGHT), windows={RIGHT: 2}, peers=("p",))
    cluster.pages(LEFT, 0, 8, node="p")
    cluster.pages(RIGHT, 0, 1, node="p")
    assert [cluster.prefix(name).peer for name in ("halves", "window")] == [PAGE, PAGE]
    cluster.pages(RIGHT, 4, 6, node="p")
    assert [cluster.prefix(name).peer for name in ("halves", "window")] == [PAGE, 6 * PAGE]


def test_nodes_of_another_cluster_and_those_of_nobody_do_not_count(cluster: Cluster):
    cluster.engine("with-p", shards=(ONE,), peers=("p",))
    cluster.engine("with-q", shards=(ONE,), peers=("q",))
    cluster.engine("alone", shards=(ONE,))
    cluster.pages(ONE, 0, 3, node="p")
    cluster.pages(ONE, 0, 2, node="q")
    peers = [cluster.prefix(name).peer for name in ("with-p", "with-q", "alone")]
    assert peers == [3 * PAGE, 2 * PAGE, 0]


def test_a_match_shows_peers_apart_from_the_engines_own_node(cluster: Cluster):
    cluster.engine(shards=(ONE,), peers=("p",))
    cluster.pages(ONE, 0, 1)
    cluster.pages(ONE, 0, 3, node="p")
    [found] = cluster.view.match("m", [TOKENS])
    shown = [(one.worker, one.medium, one.peer, one.tokens) for one in found]
    assert ("node/n", "CPU", False, PAGE) in shown
    assert ("node/p", "CPU", True, 3 * PAGE) in shown


def view(node: str, cluster: str) -> NodeView:
    return NodeView(
        id=node, host="", boot="b", events=None, events_replay=None, follow_token=False,
        sessions=(), unnamed=0, cluster=cluster,
    )  # fmt: skip


def test_peers_are_the_other_nodes_that_name_the_same_cluster():
    sessions = Sessions(
        [view("c", "blue"), view("a", "blue"), view("b", "red"), view("x", ""), view("y", "")]
    )
    assert sessions.peers("a") == ("c",)
    assert [sessions.peers(node) for node in ("b", "x", "unknown", None)] == [()] * 4


TOKENS_OF_EACH = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), min_size=2, max_size=5)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(TOKENS_OF_EACH)
def test_no_decision_depends_on_what_peers_have(policy: str, tokens: list[tuple[int, int]]):
    """``tokens``: usable, and at a peer, of each engine."""
    names = [f"e{number}" for number in range(len(tokens))]
    engines = [engine(name) for name in names]
    told = {
        name: Prefix(0, usable, usable, None, peer)
        for name, (usable, peer) in zip(names, tokens, strict=True)
    }
    untold = {name: prefix._replace(peer=0) for name, prefix in told.items()}
    waiting = [request(number) for number in range(4)]
    before, after = (schedule(policy, engines, waiting, known) for known in (untold, told))
    for one, other in zip(before, after, strict=True):
        assert isinstance(one, Assign)
        assert isinstance(other, Assign)
        assert one == replace(other, candidates=one.candidates, peer_tokens=0)
        if POLICIES[policy].needs_prefixes:
            by_seconds = POLICIES[policy].fetches is not None  # nothing is faster to fetch here
            assert other.peer_tokens == (0 if by_seconds else told[other.prefill].peer)
            shown = {candidate.engine: candidate.peer_tokens for candidate in other.candidates}
            assert shown == {name: prefix.peer for name, prefix in told.items()}


@pytest.mark.parametrize(
    ("policy", "usable", "peer", "told"),
    [
        ("longest-prefix", 8_192, 512, True),
        ("cache-local", 0, 30_000, False),
        ("cache-global", 8_192, 8_000, False),
        ("cache-global", 8_192, 9_000, True),
        ("earliest-first-token", 8_192, 16, False),
        ("earliest-first-token", 8_192, 20_000, True),
    ],
)
def test_an_engine_is_told_of_peers_only_if_it_is_to_fetch_from_one(
    policy: str, usable: int, peer: int, told: bool
):
    matches = {"e": Prefix(usable, 0, usable, None, peer)}
    [assign] = schedule(policy, [engine("e")], [request(tokens=32_768)], matches)
    assert isinstance(assign, Assign)
    assert assign.peer_tokens == (peer if told else 0)
    assert bool(assign.fetch.network) == (told and POLICIES[policy].fetches is not None)
