"""Goal: what is kept is divided among tenants and spaces, and no limit is ever exceeded."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.state.ask.explain import Explainer
from kvstore.state.choice import conversations as module
from kvstore.state.table.invariants import check
from kvstore.state.tree.node import PrefixNode, is_live
from tests.state.choice.test_conversations import SECOND, Scene
from tests.state.world import FULL, FULL_2, PAGE, World, chain, ended, identity, key

PATHS = [f"{head}{tail}"[:length] for head in "ab" for tail in ("cde", "cfg", "hij")
         for length in (1, 2, 3, 4)]  # fmt: skip


class Shared(Scene):
    """Two tenants; ``red`` has two spaces."""

    def __init__(self, budget_pages: int = 4) -> None:
        super().__init__(budget_pages=budget_pages)
        self.world = World(extents=3, slots_each=12)
        self.table = self.world.table
        self.table.moment.now_ns = SECOND
        self.table.keeping.conversations.budget_bytes = budget_pages * PAGE
        self.processes = {name: self.world.process(name) for name in ("red", "blue")}
        self.spaces = {
            name: self.table.spaces.open(
                self.processes[name.partition("-")[0]].session,
                identity(name.partition("-")[0], name),
                [FULL, FULL_2],
            )[0]
            for name in ("red-1", "red-2", "blue")
        }

    def of(self, name: str) -> "Shared":
        self.space = self.spaces[name]
        self.process = self.processes[self.space.identity.tenant]
        return self

    def fill(self, name: str) -> None:
        """Store more than memory has room for."""
        self.of(name)
        for number in range(40):
            self.store(chr(0x100 + number))

    def kept(self) -> dict[str, str]:
        """The pages of each conversation, by their depths."""
        return {
            f"{one.space.identity.model}/{one.name}": "".join(
                str(n.depth) for n in one.nodes.values()
            )
            for one in self.table.keeping.conversations
        }


def test_who_keeps_most_gives_way_to_another_tenant_until_both_keep_the_same():
    scene = Shared(budget_pages=6)
    scene.of("red-1").store("abcd")
    scene.store("xyz")
    scene.keep("abcd", "old")
    scene.keep("xy", "new")
    scene.of("blue").store("abcdef")

    assert scene.keep("abcdef") == (3, "budget")

    assert scene.kept() == {"red-1/old": "1", "red-1/new": "12", "blue/chat": "123"}
    assert scene.table.counts["gave_way_pages"] == 3
    assert scene.of("red-1").keep("abcd", "old") == (1, "budget"), "it does not take back"
    check(scene.table)


def test_what_gave_way_is_left_to_the_policy():
    scene = Shared(budget_pages=2)
    scene.of("red-1").store("ab")
    scene.keep("ab")
    scene.fill("red-1")
    scene.of("blue").store("a")
    scene.keep("a")

    scene.fill("red-1")

    assert [scene.of("red-1").pages("ab"), scene.of("blue").pages("a")] == [1, 1]


def test_explain_says_for_whom_a_page_gave_way():
    scene = Shared(budget_pages=2)
    scene.of("red-1").store("ab")
    scene.keep("ab")
    scene.of("blue").store("a")
    scene.keep("a")
    scene.table.moment.now_ns += 3 * SECOND
    label, past = scene.space.label[:12], "kept for conversation chat until 3.0 s ago"

    space = scene.of("red-1").space
    said = ended(Explainer(scene.table, scene.table.now_ns).steps(key("ab"), space)).text
    assert said == f"READY in host, {past}: it gave way to space {label}, which kept less"
    scene.table.residents.drop(space.nodes[key("ab")], 0, "corrupt")
    said = ended(Explainer(scene.table, scene.table.now_ns).steps(key("ab"), space)).text
    assert said.startswith("quarantined 0.0 s ago")
    assert said.endswith(f"{past}: it gave way to space {label}, which kept less")

    scene.store("ab")
    scene.table.keeping.conversations.budget_bytes = 4 * PAGE
    scene.keep("ab")
    said = ended(Explainer(scene.table, scene.table.now_ns).steps(key("ab"), space)).text
    assert said == "READY in host, kept for conversation chat (10 s left)"


def test_only_the_last_pages_that_gave_way_are_remembered(monkeypatch):
    monkeypatch.setattr(module, "GAVE_WAY_MAX", 2)
    scene = Shared(budget_pages=6)
    scene.of("red-1").store("abcdef")
    scene.keep("abcdef")
    scene.of("blue").store("abc")

    scene.keep("abc")

    kept = [one[1] for one in scene.table.keeping.conversations.gave_way]
    assert kept == [key("abcde"), key("abcd")]


def test_spaces_of_a_tenant_share_what_it_keeps():
    scene = Shared(budget_pages=4)
    scene.of("red-1").store("abcd")
    assert scene.keep("abcd") == (4, "")
    scene.of("red-2").store("abcd")

    assert scene.keep("abcd") == (2, "budget")

    assert scene.kept() == {"red-1/chat": "12", "red-2/chat": "12"}


def test_the_conversation_that_was_renewed_the_longest_ago_gives_way_first():
    scene = Shared(budget_pages=4)
    scene.of("red-1").store("ab")
    scene.store("xy")
    scene.keep("ab", "one")
    scene.keep("xy", "two")
    scene.keep("ab", "one")
    scene.of("blue").store("a")

    scene.keep("a")

    assert scene.kept()["red-1/two"] == "1"


def test_a_tenant_with_thousands_of_conversations_leaves_places_to_others(monkeypatch):
    monkeypatch.setattr(module, "CONVERSATIONS_MAX", 3)
    scene = Shared(budget_pages=8)
    scene.of("red-1").store("ab")
    for name in ("one", "two", "three"):
        scene.keep("ab", name)
    scene.of("blue").store("a")

    assert scene.keep("a", "one") == (1, "")
    assert scene.keep("a", "two") == (0, "conversations")

    assert set(scene.kept()) == {"red-1/two", "red-1/three", "blue/one"}


def test_one_step_takes_a_bounded_number_of_pages_from_others(monkeypatch):
    monkeypatch.setattr(module, "RELEASE_PAGES", 2)
    scene = Shared(budget_pages=8)
    scene.of("red-1").store("abcdefgh")
    scene.keep("abcdefgh")
    scene.of("blue").store("abcd")

    assert [scene.keep("abcd"), scene.keep("abcd")] == [(2, "budget"), (4, "")]


def test_pages_of_further_shards_are_charged_when_they_come():
    """Else a client keeps a small shard, and then stores large ones under the same keys."""
    scene = Shared(budget_pages=4)
    scene.of("red-1").store("abc")
    assert scene.keep("abc") == (3, "")

    scene.world.store(scene.process, scene.space, "abc", shard=1)

    kept = scene.table.keeping.conversations
    assert kept.used_bytes == 4 * PAGE
    assert scene.kept() == {"red-1/chat": "12"}
    check(scene.table)


def test_what_further_shards_take_beyond_the_bytes_of_a_conversation_is_let_go():
    scene = Shared(budget_pages=9)
    scene.of("red-1").store("abc")
    scene.keep("abc", bytes_max=4 * PAGE)

    scene.world.store(scene.process, scene.space, "abc", shard=1)

    assert scene.table.keeping.conversations.used_bytes == 4 * PAGE
    check(scene.table)


def test_a_conversation_that_grew_too_far_for_one_step_ends(monkeypatch):
    monkeypatch.setattr(module, "RELEASE_PAGES", 1)
    scene = Shared(budget_pages=4)
    scene.of("red-1").store("abcd")
    scene.keep("abcd")

    scene.world.store(scene.process, scene.space, "abcd", shard=1)
    scene.pass_time(0)

    assert scene.kept() == {}
    check(scene.table)


class Model:
    """What is kept, told page by page: (space, name) → when it ends and its nodes, heads first.

    Conversations are in the order of their renewal.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.kept: dict[tuple[str, str], tuple[int, list[PrefixNode]]] = {}

    def pages(self, prefix: str) -> set[PrefixNode]:
        """The distinct pages of a space, or of a tenant."""
        found = [nodes for (space, _), (_, nodes) in self.kept.items() if space.startswith(prefix)]
        return {node for nodes in found for node in nodes}

    def settle(self, now_ns: int) -> None:
        for place, (ends, nodes) in list(self.kept.items()):
            nodes[:] = [node for node in nodes if is_live(node)]
            if ends <= now_ns or not nodes:
                del self.kept[place]

    def keep(self, space: str, name: str, nodes: list[PrefixNode], ends: int, most: int) -> int:
        _, mine = self.kept.get((space, name), (0, []))
        count = 0
        for node in nodes:
            if node not in mine:
                if most and len(mine) >= most:
                    break
                if node not in self.pages(space) and not self._room(space):
                    break
                mine.append(node)
            count += 1
        if count:
            self.kept.pop((space, name), None)
            self.kept[space, name] = ends, mine
        return count

    def _room(self, space: str) -> bool:
        while len(self.pages("")) >= self.budget:
            loser = self._loser(space)
            if loser is None:
                return False
            place = next(one for one in self.kept if one[0] == loser)
            self.kept[place][1].pop()
            if not self.kept[place][1]:
                del self.kept[place]
        return True

    def _loser(self, space: str) -> str | None:
        tenant, other = ("red", "blue") if space.startswith("red") else ("blue", "red")
        spaces = [one for one in ("red-1", "red-2", "blue") if one.startswith(other)]
        if len(self.pages(other)) <= len(self.pages(tenant)) + 1:
            spaces = [one for one in ("red-1", "red-2", "blue") if one.startswith(tenant)]
            most = max(len(self.pages(one)) for one in spaces)
            if most <= len(self.pages(space)) + 1:
                return None
        return max(spaces, key=lambda one: len(self.pages(one)))


spaces = st.sampled_from(["red-1", "red-2", "blue"])
steps = st.one_of(
    st.tuples(st.just("store"), spaces, st.sampled_from(PATHS)),
    st.tuples(st.just("keep"), spaces, st.sampled_from(PATHS), st.sampled_from("xyz"),
              st.integers(1, 9), st.sampled_from([0, 1, 3])),
    st.tuples(st.just("end"), spaces, st.sampled_from("xyz")),
    st.tuples(st.just("wait"), st.integers(1, 5)),
    st.tuples(st.just("flood"), spaces, st.integers(1, 6)),
    st.tuples(st.just("drop"), spaces, st.sampled_from(PATHS)),
)  # fmt: skip


@settings(max_examples=80)
@given(st.lists(steps, max_size=40), st.integers(1, 6))
def test_any_history_agrees_with_one_page_at_a_time(history, budget):
    scene, model = Shared(budget_pages=budget), Model(budget)
    for step in history:
        match step:
            case ("store", space, path):
                scene.of(space).store(path)
            case ("keep", space, path, name, seconds, most):
                ready = scene.of(space).pages(path)
                nodes = [scene.space.nodes[one] for one in chain(path)[:ready]]
                ends = scene.table.now_ns + seconds * SECOND
                count, cause = scene.keep(path, name, seconds, most * PAGE)
                assert count == model.keep(space, name, nodes, ends, most)
                assert bool(cause) == (count < len(path))
            case ("end", space, name):
                scene.table.keeping.end(scene.spaces[space], name)
                model.kept.pop((space, name), None)
            case ("wait", seconds):
                scene.pass_time(seconds)
            case ("flood", space, pages):
                scene.of(space)
                for number in range(pages):
                    scene.store(chr(0x100 + number))
            case ("drop", space, path):
                node = scene.spaces[space].nodes.get(key(path))
                if node is not None and node.ready:
                    scene.table.residents.drop(node, 0, "corrupt")
        scene.pass_time(0)
        model.settle(scene.table.now_ns)
        check(scene.table)
        table = scene.table.keeping.conversations
        assert table.used_bytes <= budget * PAGE
        told = {(one.space.identity.model, one.name): list(one.nodes.values()) for one in table}
        assert told == {place: nodes for place, (_, nodes) in model.kept.items()}
        for name, space in scene.spaces.items():
            held = model.pages(name)
            assert all(bool(one.memory_pins) == (one in held) for one in space.nodes.values())


@settings(max_examples=40)
@given(st.lists(st.tuples(spaces, st.sampled_from(["store", "keep", "drop"]),
                          st.sampled_from(PATHS), st.integers(0, 1)), max_size=30),
       st.integers(1, 6), st.integers(0, 4))  # fmt: skip
def test_no_limit_is_ever_exceeded_however_pages_of_shards_come_and_go(history, budget, most):
    scene = Shared(budget_pages=budget)
    for space, verb, path, shard in history:
        scene.of(space)
        node = scene.space.nodes.get(key(path))
        match verb:
            case "store":
                scene.world.store(scene.process, scene.space, path, shard=shard)
            case "keep":
                scene.keep(path, bytes_max=most * PAGE)
            case "drop" if node is not None and node.ready >> shard & 1:
                scene.table.residents.drop(node, shard, "corrupt")
        scene.pass_time(0)
        check(scene.table)
        table = scene.table.keeping.conversations
        assert table.used_bytes <= budget * PAGE
        assert all(one.size_bytes <= most * PAGE or not most for one in table)
        taken = {node: node.ready.bit_count() for one in table for node in one.nodes.values()}
        assert table.used_bytes == sum(taken.values()) * PAGE
