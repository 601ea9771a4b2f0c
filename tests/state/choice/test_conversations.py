"""Goal: the pages of a conversation stay for their time, within every budget, and no longer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.state.choice import conversations as module
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import PrefixNode, is_live
from tests.state.world import PAGE, World, chain, identity, key

SECOND = 1_000_000_000
PATHS = [f"{head}{tail}"[:length] for head in "ab" for tail in ("cde", "cfg", "hij")
         for length in (1, 2, 3, 4)]  # fmt: skip


class Scene:
    """A node of a few pages, one space that keeps conversations, one that floods."""

    def __init__(self, pages: int = 4, budget_pages: int = 4) -> None:
        self.world = World(extents=1, slots_each=pages)
        self.table = self.world.table
        self.table.moment.now_ns = SECOND
        self.table.keeping.conversations.budget_bytes = budget_pages * PAGE
        self.process = self.world.process()
        self.space = self.world.space(self.process)
        self.other, _ = self.table.spaces.open(
            self.process.session, identity(model="other"), [self.space.shards[0].spec]
        )

    def store(self, path: str) -> list[PageStatus]:
        return self.world.store(self.process, self.space, path)

    def flood(self, pages: int = 12) -> None:
        for number in range(pages):
            self.world.store(self.process, self.other, chr(0x100 + number))

    def keep(self, path: str, name: str = "chat", seconds: float = 10.0, bytes_max: int = 0):
        keys, ttl_ns = chain(path), int(seconds * SECOND)
        return self.table.keeping.keep(self.space, name, keys, ttl_ns, bytes_max)

    def pages(self, path: str) -> int:
        return self.world.lookup(self.space, path)[0]

    def pass_time(self, seconds: float) -> None:
        now_ns = self.table.now_ns + int(seconds * SECOND)
        self.table.moment.now_ns = now_ns
        while self.table.expire(now_ns):
            pass


def test_kept_pages_outlive_a_flood_until_their_time_is_up():
    scene = Scene()
    scene.store("abc")
    assert scene.keep("abc") == (3, "")

    scene.pass_time(9)
    scene.flood()
    assert scene.pages("abc") == 3

    scene.pass_time(1)
    assert len(scene.table.keeping.conversations) == 0
    scene.flood()
    assert scene.pages("abc") == 0
    check(scene.table)


def test_the_next_request_sets_a_new_end_and_adds_its_pages():
    scene = Scene()
    scene.store("ab")
    scene.keep("ab")
    scene.pass_time(9)
    scene.store("abc")

    assert scene.keep("abc") == (3, "")
    scene.pass_time(9)
    scene.flood()

    assert scene.pages("abc") == 3
    assert scene.table.keeping.conversations.used_bytes == 3 * PAGE


@pytest.mark.parametrize(
    ("limit", "cause"), [("bytes", "bytes"), ("budget", "budget"), ("quota", "quota")]
)
def test_the_start_of_a_prompt_is_kept_as_far_as_each_limit_allows(limit, cause):
    scene = Scene(pages=8, budget_pages=2 if limit == "budget" else 8)
    scene.store("abcd")
    if limit == "quota":
        scene.table.quotas.set(scene.space, 2 * PAGE + 1, 0, 8 * PAGE)

    kept = scene.keep("abcd", bytes_max=2 * PAGE if limit == "bytes" else 0)

    assert kept == (2, cause)
    assert scene.table.counts[f"not_kept_pages_{cause}"] == 2
    check(scene.table)


def test_a_page_that_two_conversations_share_is_charged_once_and_stays_for_the_longer():
    scene = Scene(budget_pages=4)
    scene.store("abc")
    scene.store("abd")
    assert scene.keep("abc", "one", seconds=5) == (3, "")
    assert scene.keep("abd", "two", seconds=9) == (3, "")
    assert scene.table.keeping.conversations.used_bytes == 4 * PAGE

    scene.pass_time(5)
    scene.flood()

    assert scene.pages("abd") == 3
    assert scene.pages("abc") == 2
    check(scene.table)


def test_pages_that_do_not_follow_kept_ones_are_not_kept():
    """Else pages before them would stay that nobody was charged for."""
    scene = Scene()
    scene.store("abc")

    found = scene.table.keeping.keep(scene.space, "chat", [key("abc")], SECOND, 0)

    assert found == (0, "missing")
    assert scene.table.keeping.conversations.used_bytes == 0


def test_a_page_that_left_and_came_back_is_kept_again():
    scene = Scene()
    scene.store("ab")
    scene.keep("ab")
    scene.table.residents.drop(scene.space.nodes[key("a")], 0, "corrupt")
    assert scene.pages("ab") == 0

    scene.store("ab")
    assert scene.keep("ab") == (2, "")
    scene.flood()

    assert scene.pages("ab") == 2
    assert scene.table.keeping.conversations.used_bytes == 2 * PAGE


def test_an_ended_conversation_is_left_to_the_policy():
    scene = Scene()
    scene.store("abcd")
    scene.keep("abcd")

    assert scene.table.keeping.end(scene.space, "chat") == 4
    assert scene.table.keeping.end(scene.space, "chat") == 0, "that was said"
    assert scene.table.keeping.end(scene.space, "nobody's") == 0
    scene.pass_time(0)
    scene.flood()

    assert scene.pages("abcd") == 0
    assert scene.table.next_deadline_ns() == 0


def test_one_step_lets_a_bounded_number_of_pages_go(monkeypatch):
    monkeypatch.setattr(module, "RELEASE_PAGES", 2)
    scene = Scene(pages=8, budget_pages=8)
    scene.store("abcde")
    scene.keep("abcde")
    now_ns = scene.table.now_ns + 10 * SECOND

    steps = []
    while gone := scene.table.keeping.conversations.expire(now_ns):
        steps.append([node.key for node in gone])

    assert steps == [
        [key("abcde"), key("abcd")], [key("abc"), key("ab")], [key("a")]
    ]  # fmt: skip


def test_there_are_not_more_conversations_than_allowed(monkeypatch):
    monkeypatch.setattr(module, "CONVERSATIONS_MAX", 1)
    scene = Scene()
    scene.store("a")

    assert scene.keep("a", "one") == (1, "")
    assert scene.keep("a", "two") == (0, "conversations")
    assert scene.keep("a", "one") == (1, "")


steps = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(PATHS)),
    st.tuples(st.just("keep"), st.sampled_from(PATHS), st.sampled_from("xyz"),
              st.integers(1, 9), st.sampled_from([0, PAGE, 3 * PAGE])),
    st.tuples(st.just("end"), st.sampled_from("xyz")),
    st.tuples(st.just("wait"), st.integers(1, 5)),
    st.tuples(st.just("flood"), st.integers(1, 6)),
    st.tuples(st.just("drop"), st.sampled_from(PATHS)),
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(steps, max_size=40), st.integers(1, 6))
def test_any_history_agrees_with_one_page_at_a_time(history, budget):
    """The model: name → (end, the nodes that were kept), told page by page."""
    scene = Scene(pages=8, budget_pages=budget)
    kept: dict[str, tuple[int, list[PrefixNode]]] = {}
    for step in history:
        match step:
            case ("store", path):
                scene.store(path)
            case ("keep", path, name, seconds, bytes_max):
                count, _ = scene.keep(path, name, seconds, bytes_max)
                known = [one for one in kept.get(name, (0, []))[1] if is_live(one)]
                nodes = [scene.space.nodes[one] for one in chain(path)[:count]]
                nodes = known + [one for one in nodes if one not in known]
                if count:
                    kept[name] = scene.table.now_ns + seconds * SECOND, nodes
                if bytes_max and len(nodes) > len(known):
                    assert len(nodes) * PAGE <= bytes_max
            case ("end", name):
                scene.table.keeping.end(scene.space, name)
                scene.pass_time(0)
                kept.pop(name, None)
            case ("wait", seconds):
                scene.pass_time(seconds)
                kept = {name: one for name, one in kept.items() if one[0] > scene.table.now_ns}
            case ("flood", pages):
                scene.flood(pages)
            case ("drop", path):
                node = scene.space.nodes.get(key(path))
                if node is not None and node.ready:
                    scene.table.residents.drop(node, 0, "corrupt")
        check(scene.table)
        table = scene.table.keeping.conversations
        assert table.used_bytes <= budget * PAGE
        assert {one.name for one in table} == set(kept)
        for _, nodes in kept.values():
            alive = [one for one in nodes if is_live(one)]
            assert all(one.memory_pins for one in alive)
        live = {node for _, nodes in kept.values() for node in nodes if is_live(node)}
        held = {one for node in table for one in node.nodes.values() if is_live(one)}
        assert live == held
        assert all(bool(one.memory_pins) == (one in held) for one in scene.space.nodes.values())
