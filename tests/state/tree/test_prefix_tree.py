"""Goal: leaf-first, and exactly least recent use where using a page uses all that precede it."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.protocol.page import CanonicalLayout, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.choice.policy import LeastRecent
from kvstore.state.tree.node import is_live
from kvstore.state.tree.prefix_tree import PrefixTree, Shard
from kvstore.state.tree.slots import Slot
from tests.state.world import hold

IDENTITY = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=1)
SPEC = ShardSpec(layout=CanonicalLayout(2048), layers=(0, 1), heads=(0, 1))
PATHS = st.text("ab", min_size=1, max_size=5)


def key(path: str) -> PrefixKey:
    return PrefixKey(path.encode().ljust(32, b"."))


def new_space() -> PrefixTree:
    return PrefixTree(0, IDENTITY, [Shard(SPEC, 4096, 4096)])


class LeastRecentUse(RuleBasedStateMachine):
    """Paths of letters; the naive model marks every ancestor of what is used."""

    def __init__(self) -> None:
        super().__init__()
        self.space = new_space()
        self.queue = LeastRecent(4096)
        self.last_use: dict[str, int] = {}
        self.tick = 0
        self.slots = 0

    @rule(path=PATHS)
    def put(self, path: str) -> None:
        """Store every page of a path that is not there yet, and so use them all."""
        self.tick += 1
        for end in range(1, len(path) + 1):
            part = path[:end]
            if part not in self.last_use:
                node = self.space.node(key(part), key(part[:-1]) if end > 1 else PrefixKey(b""))
                node.begin(0, Slot(self.slots))
                node.commit(0, b"d" * 16)
                self.slots += 1
        self._use(path)
        self.queue.add_candidate(self.space.nodes[key(path)], 0)

    @rule(path=PATHS)
    def use(self, path: str) -> None:
        """A lookup that finds as much of the path as there is."""
        self.tick += 1
        while path and path not in self.last_use:
            path = path[:-1]
        if path:
            self._use(path)

    def _use(self, path: str) -> None:
        self.space.nodes[key(path)].access = self.tick
        for end in range(1, len(path) + 1):
            self.last_use[path[:end]] = self.tick

    @rule()
    def evict(self) -> None:
        leaves = [
            path
            for path in self.last_use
            if not any(other != path and other.startswith(path) for other in self.last_use)
        ]
        while (node := self.queue.pop(0)) is not None and node.children:
            pass
        if not leaves:
            assert node is None
            return
        expected = min(leaves, key=self.last_use.__getitem__)
        assert node is not None
        assert node.key == key(expected)
        del self.last_use[expected]
        node.forget(0)
        survivor = self.space.prune(node)
        assert not is_live(node)
        if survivor is not self.space.root and not survivor.children:
            self.queue.add_candidate(survivor, 0)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        hold(self.space.checks(lambda _node: None))
        assert set(self.space.nodes) == {key(path) for path in self.last_use}


TestLeastRecentUse = LeastRecentUse.TestCase


def test_a_page_whose_parent_is_unknown_finds_its_place_when_that_is_told():
    space = new_space()
    child = space.node(key("abc"), key("ab"))
    child.begin(0, Slot(1))
    assert child.parent is space.nodes[key("ab")]
    assert child.parent.parent is space.root

    middle = space.node(key("ab"), key("a"))
    middle.begin(0, Slot(2))

    assert middle.parent is space.nodes[key("a")]
    assert list(space.root.children) == [key("a")]
    hold(space.checks(lambda _node: None))


def test_forged_parents_cannot_make_a_ring():
    space = new_space()
    first = space.node(key("x"), key("y"))
    first.begin(0, Slot(1))
    second = space.node(key("y"), key("x"))
    second.begin(0, Slot(2))

    assert second.parent is space.root
    hold(space.checks(lambda _node: None))


def test_pruning_stops_at_what_still_holds_or_leads_to_pages():
    space = new_space()
    kept = space.node(key("a"), PrefixKey(b""))
    kept.begin(0, Slot(1))
    bare = space.node(key("ab"), key("a"))
    leaf = space.node(key("abc"), key("ab"))
    leaf.access = 7

    assert space.prune(leaf) is kept
    assert not is_live(bare)
    assert kept.access == 7, "its last use is handed up"
    assert set(space.nodes) == {key("a")}


def test_a_node_that_was_offered_twice_comes_out_once_and_dead_ones_never():
    space = new_space()
    queue = LeastRecent(4096)
    alive = space.node(key("a"), PrefixKey(b""))
    alive.begin(0, Slot(1))
    dead = space.node(key("b"), PrefixKey(b""))
    for node in (alive, dead, alive):
        queue.add_candidate(node, 0)
    space.prune(dead)

    assert queue.pop(0) is alive
    assert queue.pop(0) is None
    queue.add_candidate(alive, 0)
    assert queue.pop(0) is alive, "once out, it can be offered again"
