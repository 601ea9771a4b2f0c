"""Goal: copies are asked of the right nodes, in steps, and their ends are told once."""

import pytest

from kvstore.cluster import copier as copying
from kvstore.cluster.copier import Copier, CopyEnd, CopyOrder, preference
from kvstore.protocol.counts import CopyCounts
from kvstore.protocol.errors import PeerUnreachable
from kvstore.protocol.page import CanonicalLayout, ShardSpec, SpaceIdentity, page_keys
from kvstore.state.remote.jobs import BringEnd, PeerBring, Spread, SpreadEnd

IDENTITY = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=2)
SHARD = ShardSpec(layout=CanonicalLayout(1024), layers=(0, 1), heads=(0, 1))
WINDOW = ShardSpec(
    layout=CanonicalLayout(1024), layers=(1, 2), heads=(0, 1), group="w", window_pages=2
)
KEYS = page_keys(range(20), 2).packed
GONE = PeerUnreachable("gone")
DEADLINE_NS = 60_000_000_000


class Nodes:
    """The other nodes: what they are asked, and who is there."""

    def __init__(self, *names: str) -> None:
        self.up = list(names)
        self.draining: set[str] = set()
        self.asked: list[PeerBring] = []
        self.spreads: list[SpreadEnd] = []
        self.ends: list[CopyEnd] = []
        self.now_ns = 1
        self.copier = Copier(self._ask, self._up, lambda: self.now_ns)

    def _up(self) -> dict[str, bool]:
        return {name: name in self.draining for name in self.up}

    def _ask(self, job: PeerBring) -> None:
        if job.peer in self.up:
            self.asked.append(job)
        else:
            self.copier.brought(BringEnd(job.number, 0, GONE))

    def spread(self, peers: int, shard: ShardSpec = SHARD, first: int = 0) -> None:
        self.copier.spread(
            Spread(9, IDENTITY, shard, KEYS, first, peers, DEADLINE_NS), self.spreads.append
        )

    def copy(self, peer: str = "b", first: int = 0, idle_ms: int = 5) -> None:
        order = CopyOrder(peer, IDENTITY, SHARD, KEYS, first, idle_ms, DEADLINE_NS)
        self.copier.copy(order, self.ends.append)

    def say(self, pages: int, error: PeerUnreachable | None = None) -> None:
        """Answer the oldest request."""
        self.copier.brought(BringEnd(self.asked.pop(0).number, pages, error))


@pytest.fixture
def few(monkeypatch) -> None:
    monkeypatch.setattr(copying, "STEP_PAGES", 4)


@pytest.mark.usefixtures("few")
def test_pages_are_asked_for_in_steps_heads_first():
    nodes = Nodes("b")
    nodes.copy()
    for told in (4, 8):
        (asked,) = nodes.asked
        assert (asked.keys, asked.first) == (KEYS[: told * 32], 0)
        assert (asked.peer, asked.idle_ms) == ("b", 5)
        assert asked.deadline_ns == nodes.now_ns + copying.STEP_NS
        nodes.say(told)
    assert nodes.asked[0].keys == KEYS
    assert not nodes.ends
    nodes.say(10)
    assert nodes.ends == [CopyEnd(10, True, None)]
    assert nodes.copier.stats() == CopyCounts(running=0, copied_pages=10, failed=0)


@pytest.mark.usefixtures("few")
def test_what_a_node_has_already_is_not_asked_for_step_by_step():
    nodes = Nodes("b")
    nodes.copy(first=7)
    assert (nodes.asked[0].keys, nodes.asked[0].first) == (KEYS, 7)
    nodes.say(3)
    assert nodes.ends == [CopyEnd(3, True, None)]


def test_a_step_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(copying, "STEP_BYTES", 3 * SHARD.page_bytes(IDENTITY))
    nodes = Nodes("b")
    nodes.copy()
    assert nodes.asked[0].keys == KEYS[: 3 * 32]
    monkeypatch.setattr(copying, "STEP_BYTES", 1)
    nodes.copy()
    assert nodes.asked[1].keys == KEYS[:32], "one page at least"


@pytest.mark.usefixtures("few")
def test_a_node_that_takes_no_more_ends_the_order_with_what_it_has():
    nodes = Nodes("b")
    nodes.copy()
    nodes.say(4)
    nodes.say(6)
    nodes.say(6)
    assert nodes.ends == [CopyEnd(6, False, None)]
    nodes.copy()
    nodes.say(4)
    nodes.say(0, GONE)
    assert nodes.ends[1] == CopyEnd(4, False, GONE)
    assert nodes.copier.stats().failed == 2


@pytest.mark.usefixtures("few")
def test_pages_that_a_node_has_lost_meanwhile_do_not_count():
    nodes = Nodes("b")
    nodes.copy()
    nodes.say(4)
    nodes.say(2)
    assert nodes.ends == [CopyEnd(2, False, None)]


@pytest.mark.usefixtures("few")
def test_no_step_begins_after_the_deadline():
    nodes = Nodes("b")
    nodes.copy()
    nodes.now_ns = DEADLINE_NS
    nodes.say(4)
    assert not nodes.asked
    assert nodes.ends == [CopyEnd(4, False, None)]


def test_as_many_nodes_are_asked_as_copies_are_wanted_in_their_order():
    nodes = Nodes("b", "c", "d", "e")
    order = preference(nodes.up, KEYS[:32])
    nodes.spread(2)
    assert [one.peer for one in nodes.asked] == order[:2]
    assert all(one.idle_ms == 0 for one in nodes.asked)
    nodes.say(10)
    assert not nodes.spreads
    nodes.say(10)
    assert nodes.spreads == [SpreadEnd(9, 2)]
    assert not nodes.asked


def test_for_a_node_that_fails_the_next_one_is_asked():
    nodes = Nodes("b", "c", "d")
    order = preference(nodes.up, KEYS[:32])
    nodes.spread(1)
    nodes.say(0, GONE)
    assert [one.peer for one in nodes.asked] == [order[1]]
    nodes.say(10)
    assert nodes.spreads == [SpreadEnd(9, 1)]


@pytest.mark.parametrize("names", [(), ("b",), ("b", "c")])
def test_too_few_nodes_are_told_as_they_are(names):
    nodes = Nodes(*names)
    nodes.spread(3)
    while nodes.asked:
        nodes.say(10)
    assert nodes.spreads == [SpreadEnd(9, len(names))]


def test_nodes_that_go_while_they_are_asked_end_a_spread_once():
    nodes = Nodes("b", "c", "d")
    up, nodes.copier._up = nodes.up, lambda: dict.fromkeys("bcd", False)
    up.clear()
    nodes.spread(2)
    assert nodes.spreads == [SpreadEnd(9, 0)]


def test_after_the_deadline_no_other_node_is_asked():
    nodes = Nodes("b", "c")
    nodes.spread(1)
    nodes.now_ns = DEADLINE_NS
    nodes.say(0, GONE)
    assert not nodes.asked
    assert nodes.spreads == [SpreadEnd(9, 0)]


def test_heads_are_copied_too_but_those_of_a_window_group():
    nodes = Nodes("b")
    nodes.spread(1, first=6)
    nodes.spread(1, WINDOW, first=6)
    assert [one.first for one in nodes.asked] == [0, 6]


def test_a_chain_has_its_nodes_whichever_of_them_are_there():
    names = [f"node{at}" for at in range(8)]
    firsts = set()
    for chain in range(40):
        key = chain.to_bytes(32, "little")
        order = preference(names, key)
        assert sorted(order) == names
        firsts.add(order[0])
        without = [name for name in names if name != order[0]]
        assert preference(without, key) == order[1:]
    assert len(firsts) > 4, "chains are distributed"


def test_a_node_that_drains_is_not_asked_and_is_counted():
    nodes = Nodes("b", "c")
    nodes.draining = {"b", "d"}  # with d there is no session
    nodes.spread(2)
    (asked,) = nodes.asked
    assert asked.peer == "c"
    assert nodes.copier.draining() == ["b"]
    nodes.say(10)
    assert nodes.spreads == [SpreadEnd(9, 1, 1)]
