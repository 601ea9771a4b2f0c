"""Goal: the pages of a conversation stay for their time, within every budget, and no longer."""

import pytest

from kvstore.state.choice import conversations as module
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
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


def test_conversations_that_share_their_pages_keep_so_many_together(monkeypatch):
    monkeypatch.setattr(module, "KEPT_MAX", 5)
    scene = Scene()
    scene.store("abc")

    assert scene.keep("abc", "one", seconds=5) == (3, "")
    assert scene.keep("abc", "two") == (2, "conversations")
    assert scene.keep("ab", "three") == (0, "conversations")
    assert scene.keep("ab", "two") == (2, ""), "they are kept already"
    check(scene.table)

    scene.pass_time(5)
    assert scene.keep("abc", "three") == (3, "")
    check(scene.table)


def test_a_page_that_left_is_charged_to_nobody():
    scene = Scene()
    scene.store("abc")
    scene.keep("abc")

    scene.table.residents.drop(scene.space.nodes[key("ab")], 0, "corrupt")
    scene.pass_time(0)

    assert scene.table.keeping.conversations.used_bytes == PAGE
    scene.table.residents.drop(scene.space.nodes[key("a")], 0, "corrupt")
    scene.pass_time(0)
    assert len(scene.table.keeping.conversations) == 0
    check(scene.table)


def test_a_page_is_not_kept_behind_a_head_that_came_back_and_is_not():
    scene = Scene()
    scene.store("ab")
    scene.keep("ab")
    scene.table.residents.drop(scene.space.nodes[key("a")], 0, "corrupt")
    scene.store("ab")

    assert scene.table.keeping.keep(scene.space, "chat", [key("ab")], SECOND, 0) == (0, "missing")


def test_kept_pages_are_checked_a_stretch_at_a_time():
    scene = Scene(pages=600, budget_pages=600)
    path = "".join(chr(0x1000 + at) for at in range(600))
    scene.store(path)
    assert scene.keep(path) == (600, "")

    looked = list(scene.table.keeping.conversations.checks())

    assert sum(looked) == 600
    assert max(looked) <= 256


def test_a_conversation_is_not_kept_longer_than_the_node_allows():
    scene = Scene()
    scene.table.keeping.ttl_ns_max = 5 * SECOND
    scene.store("a")

    scene.keep("a", seconds=1000)
    assert scene.table.counts["shortened_keeps"] == 1
    scene.pass_time(5)

    assert len(scene.table.keeping.conversations) == 0
