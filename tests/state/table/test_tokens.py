"""Goal: a page's tokens are known while it is in memory, once for all shards, and never others'."""

from collections.abc import Callable

import msgspec
import pytest

from kvstore.protocol.errors import PageCorrupt, TierUnavailable
from kvstore.protocol.page import OpaqueLayout
from kvstore.state.disk.checks import CHECKS_MAX
from kvstore.state.disk.jobs import DiskRead, DiskTokens
from kvstore.state.table.announce import READ_NS, Announcement
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import TierRemoved, TierStored
from tests.state.disk.disk_world import DiskWorld, flood
from tests.state.world import FULL, FULL_2, World, chain, identity, key


def ids(text: str) -> bytes:
    """The tokens of pages of one token each."""
    return text.encode("utf-32-le")


class Engine(World):
    """A page table of two shards, and an engine that gives what tokens it wants."""

    def __init__(self) -> None:
        super().__init__()
        self.me = self.process()
        self.mine = self.space(self.me, [FULL, FULL_2])

    def put(self, path: str, tokens: bytes, shard: int = 0, *, commit: bool = True) -> int:
        self._numbers += 1
        packed = b"".join(chain(path))
        self.table.begin_put(self.me, self._numbers, self.mine, shard, packed, key(""), tokens)
        if commit:
            self.commit(self.me, self._numbers)
        check(self.table)
        return self._numbers

    def known(self, path: str) -> list[bytes]:
        return [self.mine.nodes[one].tokens for one in chain(path)]


# Puts


def test_each_page_keeps_its_own_tokens_and_the_event_tells_them():
    world = Engine()

    world.put("abc", ids("abc"))

    assert world.known("abc") == [ids("a"), ids("b"), ids("c")]
    (stored,) = world.stored()
    assert stored.tokens == ids("abc")


def test_the_first_tokens_that_are_given_stay_and_are_the_same_object_for_all_shards():
    world = Engine()
    world.put("ab", ids("ab"))
    before = world.known("ab")

    world.put("ab", ids("xy"), shard=1)

    assert [after is first for after, first in zip(world.known("ab"), before, strict=True)]
    assert world.known("ab") == [ids("a"), ids("b")]
    assert [one.tokens for one in world.stored()] == [ids("ab"), ids("ab")]


def test_a_rank_that_gives_tokens_gives_them_for_one_that_did_not():
    world = Engine()
    world.put("ab", b"")
    assert world.known("ab") == [b"", b""]

    world.put("ab", ids("ab"), shard=1)

    assert world.known("ab") == [ids("a"), ids("b")]
    assert [one.tokens for one in world.stored()] == [b"", ids("ab")]


def test_an_event_of_which_a_page_has_no_tokens_tells_none():
    world = Engine()
    world.put("a", ids("a"))

    world.put("ab", b"", shard=1)

    assert world.known("ab") == [ids("a"), b""]
    assert [one.tokens for one in world.stored()] == [ids("a"), b""]


def test_tokens_that_are_not_as_many_as_a_page_has_are_left_out():
    world = Engine()

    world.put("ab", ids("abcd"))

    assert world.known("ab") == [b"", b""]
    assert world.stored()[0].tokens == b""


def test_a_put_that_is_taken_back_leaves_no_tokens():
    world = Engine()
    world.put("a", b"")
    number = world.put("ab", ids("ab"), commit=False)

    world.table.abort_put(world.me, number)

    check(world.table)
    assert list(world.mine.nodes) == [key("a")]
    assert world.known("a") == [b""], "it was stored already, and nothing of it was granted"


def test_tokens_go_with_the_last_page_of_a_node_that_leaves_memory():
    world = Engine()
    world.put("a", ids("a"))
    world.put("a", ids("a"), shard=1)
    node = world.mine.nodes[key("a")]

    world.table.residents.drop(node, 0, "corrupt")
    assert node.tokens == ids("a"), "the other shard is in memory"

    world.table.residents.drop(node, 1, "corrupt")
    assert node.tokens == b""


@pytest.mark.parametrize(("page_tokens", "kept"), [(64, True), (65, False), (4096, False)])
def test_tokens_of_small_pages_take_no_memory_beside_that_of_pages(page_tokens: int, kept: bool):
    """A slot has 4 KiB here, however many tokens the page has; two shards have two slots."""
    world = Engine()
    layout = OpaqueLayout("e", "1", "", block_tokens=page_tokens, block_bytes=1)
    shards = [msgspec.structs.replace(one, layout=layout) for one in (FULL, FULL_2)]
    named = msgspec.structs.replace(identity(), page_tokens=page_tokens)
    world.mine, _ = world.table.spaces.open(world.me.session, named, shards)
    tokens = bytes(range(1, 5)) * page_tokens

    world.put("a", tokens)
    assert world.known("a") == [tokens if kept else b""]

    world.put("a", tokens, shard=1)
    assert world.known("a") == [tokens if page_tokens < 4096 else b""]
    world.table.residents.drop(world.mine.nodes[key("a")], 1, "corrupt")
    assert world.known("a") == [tokens if kept else b""]


# With a disk


@pytest.fixture
def world() -> DiskWorld:
    """One whose pages a and ab are on disk only."""
    made = DiskWorld(extents=2)
    made.store(made.me, made.mine, "ab")
    made.end_all()
    flood(made)
    assert made.in_memory("ab") == [False, False]
    made.table.actions.clear()
    return made


def load(world: DiskWorld, path: str, given: Callable[[DiskRead], bytes]) -> None:
    """Load a path's pages; ``given`` says what a record has of tokens."""
    fetch = world.fetch([world.node(path[:end]) for end in range(1, len(path) + 1)], 0)
    while jobs := world.jobs(DiskRead):
        del world.open[jobs[0].job]
        world.disk.completed(jobs[0].job, None, given(jobs[0]))
        check(world.table)
    world.table.end_fetch(world.me, fetch)


def told(world: DiskWorld, kind: type) -> dict[bytes, tuple[str, bytes]]:
    return {
        one.keys[0]: (one.tier, one.tokens) for one in world.table.actions if isinstance(one, kind)
    }


def test_a_page_that_is_on_disk_only_keeps_its_tokens_there(world):
    assert [world.node(path).tokens for path in ("a", "ab")] == [b"", b""]


def test_a_page_that_goes_to_disk_is_announced_there_with_its_tokens():
    world = DiskWorld(extents=1)
    world.store(world.me, world.mine, "a")
    world.end_all()

    assert told(world, TierStored)[key("a")] == ("ssd", ids("a"))
    flood(world, 4)
    assert told(world, TierRemoved)[key("a")] == ("host", ids("a")), "it stays on disk"


def test_a_page_that_is_loaded_has_the_tokens_of_its_record_again(world):
    load(world, "ab", lambda job: ids("b" if job.page.key == key("ab") else "a"))

    assert [world.node(path).tokens for path in ("a", "ab")] == [ids("a"), ids("b")]
    assert told(world, TierStored)[key("ab")] == ("host", ids("b"))


@pytest.mark.parametrize("given", [b"", b"abc", ids("ab")])
def test_a_record_without_tokens_of_one_page_is_loaded_without_any(world, given):
    load(world, "a", lambda job: given)

    assert world.in_memory("a") == [True]
    assert world.node("a").tokens == b""


# Announcements


def announced(world: DiskWorld, *, steps: int = 1) -> Announcement:
    announcement = Announcement(world.table, tokens=True)
    world.table.actions.clear()
    for _ in range(steps):
        announcement.step(world.table)
    return announcement


def answer(world: DiskWorld, text: dict[bytes, str], error: Exception | None = None) -> None:
    while jobs := world.jobs(DiskTokens):
        assert len(jobs) <= CHECKS_MAX
        del world.open[jobs[0].job]
        tokens = ids(text.get(jobs[0].page.key, ""))
        world.disk.completed(jobs[0].job, error, tokens)


def test_pages_that_a_start_found_are_told_of_with_the_tokens_of_their_records(world):
    announcement = announced(world, steps=2)
    assert not told(world, TierStored), "their records are being read"

    answer(world, {key("a"): "a", key("ab"): "b"})
    announcement.step(world.table)

    assert announcement.done
    assert told(world, TierStored)[key("a")] == ("ssd", ids("a"))
    assert told(world, TierStored)[key("ab")] == ("ssd", ids("b"))
    on_disk = {node.key for node in world.mine.nodes.values() if node.disk}
    assert told(world, TierStored).keys() == on_disk, "those whose records have none as well"
    assert world.node("a").tokens == b"", "it is not in memory"


def test_a_record_with_tokens_that_are_not_one_pages_is_told_of_without(world):
    announcement = announced(world)
    answer(world, {key("a"): "ab", key("ab"): "b"})
    announcement.step(world.table)

    assert told(world, TierStored)[key("a")] == ("ssd", b"")
    assert told(world, TierStored)[key("ab")] == ("ssd", ids("b"))


def test_without_anybody_who_wants_tokens_no_record_is_read(world):
    Announcement(world.table).step(world.table)

    assert not world.jobs(DiskTokens)
    assert told(world, TierStored)[key("ab")] == ("ssd", b"")


def test_pages_are_told_of_without_tokens_when_the_disk_does_not_give_them(world):
    announcement = announced(world)
    answer(world, {}, TierUnavailable("no such disk"))
    announcement.step(world.table)
    assert told(world, TierStored)[key("a")] == ("ssd", b"")

    late = announced(world)
    world.table.moment.now_ns += READ_NS
    late.step(world.table)
    assert late.done
    assert told(world, TierStored)[key("a")] == ("ssd", b"")


def test_a_record_that_is_not_its_pages_is_found_while_its_tokens_are_read(world):
    announcement = announced(world)
    answer(world, {}, PageCorrupt("no header"))
    announcement.step(world.table)

    assert key("a") not in told(world, TierStored)
    assert world.lookup(world.mine, "ab") == (0, 0)
    assert world.table.counts["disk_corrupt_records"] > 0
    assert world.table.counts["disk_checked_records"] == 0, "no page was read"
    check(world.table)


def test_the_record_of_one_shard_is_enough():
    world = DiskWorld(extents=4)
    space = world.space(world.me, [FULL, FULL_2])
    for shard in (0, 1):
        world.store(world.me, space, "a", shard=shard)
    world.end_all()
    node = space.nodes[key("a")]
    run = world.disk.read_tokens([(node, 0), (node, 1)])
    first, second = world.jobs(DiskTokens)

    world.disk.completed(first.job, None, b"")
    world.disk.completed(second.job, None, ids("a"))
    assert run.finished
    assert run.tokens == {(space.number, node.key): ids("a")}

    again = world.disk.read_tokens([(node, 0)] * (CHECKS_MAX + 3))
    for job in [one for one in world.jobs(DiskTokens) if one.job > second.job]:
        world.disk.completed(job.job, None, ids("a"))
    assert (again.finished, again.checked, again.skipped) == (True, CHECKS_MAX, 3)
