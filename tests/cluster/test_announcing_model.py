"""Goal: whatever is lost, late, emptied or restarted, the directory is at last what nodes have."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cluster import announcing
from kvstore.cluster.entries import FoundEntries
from kvstore.cluster.page_store import AnnouncedNumber, ChangedPages, DirectoryFault
from kvstore.testing.directory import AnnouncingNode, located, pages_of
from kvstore.testing.memory_pages import MemoryPages

SHARE = 0.3
SETTLE_MS = 20_000


class Unreliable:
    """Calls that are lost, carried out without an answer, or carried out again much later."""

    def __init__(self, pages: MemoryPages, chance: random.Random) -> None:
        self.pages = pages
        self.chance = chance
        self.good = False
        self._late: list[Callable[[], Coroutine[Any, Any, object]]] = []

    async def claim(self, node: str, boot: bytes, token: str) -> int:
        return int(await self._call(lambda: self.pages.claim(node, boot, token)))

    async def change(
        self, number: int, token: str, batch: int, changes: Sequence[ChangedPages]
    ) -> bool:
        sent = list(changes)
        return bool(await self._call(lambda: self.pages.change(number, token, batch, sent)))

    async def renew(self, numbers: Mapping[int, AnnouncedNumber]) -> list[int]:
        lost: list[int] = await self._call(lambda: self.pages.renew(numbers))
        return lost

    async def withdraw(self, number: int, token: str) -> None:
        await self._call(lambda: self.pages.withdraw(number, token))

    async def find(self, shards: Sequence[bytes]) -> FoundEntries:
        return await self.pages.find(shards)

    async def late(self) -> None:
        """Carry out a call that was thought to be lost."""
        if self._late:
            await self._late.pop(self.chance.randrange(len(self._late)))()

    async def _call(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        if self.good or self.chance.random() > SHARE:
            return await call()
        if self.chance.random() < 0.5:
            await call()
        if self.chance.random() < 0.5:
            self._late.append(call)
        raise DirectoryFault("late", "lost")


class Case:
    """Two nodes; ``sets_back``: their store comes back with older data now and then."""

    def __init__(self, seed: int, *, sets_back: bool) -> None:
        self.sets_back = sets_back
        self.chance = random.Random(seed)
        self.pages = MemoryPages()
        self.store = Unreliable(self.pages, self.chance)
        self.boots = 0
        self.nodes = [self._start(name) for name in "ab"]

    def _start(self, name: str) -> AnnouncingNode:
        self.boots += 1
        return AnnouncingNode(name, self.store, b"%d" % self.boots)

    def _some(self) -> list[tuple[str, str, bytes]]:
        first = self.chance.randrange(16)
        medium = self.chance.choice(["CPU", "CPU", "STORAGE"])
        shard = self.chance.randrange(2)
        return pages_of(first, first + self.chance.randrange(1, 9), shard, medium)

    async def step(self) -> None:
        what, at = self.chance.random(), self.chance.randrange(2)
        node = self.nodes[at]
        if what < 0.15:
            node.store(*self._some())
        elif what < 0.25:
            node.remove(*[one for one in self._some() if one in node.pages])
        elif what < 0.27:
            gone = [one for one in self._some() if one in node.pages]
            for one in gone:
                del node.pages[one]
            node.miss()
        elif what < 0.28:
            await self._lose()
        elif what < 0.29:
            self.nodes[at] = self._start(node.name)
        elif what < 0.31:
            self.pages.now_ms += self.chance.choice([1_000, 40_000, 4_000_000])
        elif what < 0.36:
            await self.store.late()
        else:
            await self._announce(node)

    async def _lose(self) -> None:
        if not self.sets_back or self.chance.random() < 0.3:
            self.pages.empty()
        elif self.chance.random() < 0.5:
            self.pages.save()
        else:
            self.pages.set_back()

    async def _announce(self, node: AnnouncingNode) -> None:
        self.pages.now_ms += 10
        await node.step(self.pages.now_ms * 1_000_000)

    async def settle(self) -> None:
        """Nothing fails any more: announce until there is nothing to say.

        That is before numbers end by themselves, unless some that were withdrawn have come back.
        """
        self.store.good = True
        for _ in range(2_000 if self.sets_back else SETTLE_MS // 20):
            self.pages.now_ms += 20
            for node in self.nodes:
                await node.step(self.pages.now_ms * 1_000_000)

    async def check(self) -> None:
        for node in self.nodes:
            state = node.announcing
            assert state.present is not None
            assert not any(one.has_more for one in state.announcements)
            assert state.coming is None
        names = announcing.EntryNames("c")
        for number, shard in enumerate(("a" * 16, "b" * 16)):
            keys = b"".join(key for _, _, key in pages_of(0, 16))
            found = await self.pages.find([names.of("5" * 64, shard, keys)])
            for (_, text), (_, _, key) in zip(found.runs[0], pages_of(0, 16, number), strict=True):
                said = {
                    (found.holders[abs(int(one))].node, "STORAGE" if one[0] == "-" else "CPU")
                    for one in text.split(",")
                    if one and abs(int(one)) in found.holders
                }
                true = {
                    (node.name, medium)
                    for node in self.nodes
                    for medium in ("CPU", "STORAGE")
                    if (medium, shard, key) in node.pages
                }
                assert said == true
        await located(self.pages, 0, 0)


async def play(seed: int, steps: int, *, sets_back: bool) -> None:
    case = Case(seed, sets_back=sets_back)
    for _ in range(steps):
        await case.step()
    await case.settle()
    await case.check()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(0, 400), st.booleans())
def test_the_directory_is_at_last_what_the_nodes_have(
    seed: int,
    steps: int,
    sets_back: bool,
) -> None:
    asyncio.run(play(seed, steps, sets_back=sets_back))


def test_a_batch_that_the_store_does_not_know_is_not_announced_and_all_pages_are_again() -> None:
    async def case() -> None:
        pages = MemoryPages()
        node = AnnouncingNode("a", pages)
        node.store(*pages_of(0, 4))
        for _ in range(8):
            await node.step(0)
        assert node.announcing.pages == 4
        pages.empty()
        node.store(*pages_of(4, 5))
        before = node.announcing.announcements
        assert isinstance(await node.step(1), announcing.ChangeEntries)
        assert node.announcing.pages == 4
        assert (node.announcing.present, node.announcing.announcements) == (None, [])
        steps = [await node.step(200_000_000) for _ in range(8)]
        assert any(isinstance(one, announcing.Claim) for one in steps), "before a renewal is due"
        assert node.announcing.announcements != before
        assert await located(pages, 0) == {"a": 5}

    asyncio.run(case())


def test_what_a_dropped_announcement_has_said_means_nothing_at_once() -> None:
    async def case() -> None:
        pages = MemoryPages()
        node = AnnouncingNode("a", pages)
        node.store(*pages_of(0, 9))
        for _ in range(8):
            await node.step(0)
        assert await located(pages, 0) == {"a": 9}
        for page in pages_of(2, 9):
            del node.pages[page]
        node.miss()
        for _ in range(2):
            await node.step(200_000_000)
        assert await located(pages, 0) == {}
        for _ in range(8):
            await node.step(400_000_000)
        assert await located(pages, 0) == {"a": 2}

    asyncio.run(case())


def test_what_older_data_say_means_nothing_from_the_next_renewal_on() -> None:
    async def case() -> None:
        pages = MemoryPages()
        node = AnnouncingNode("a", pages)
        node.store(*pages_of(0, 9))
        for _ in range(8):
            await node.step(0)
        pages.save()
        node.remove(*pages_of(2, 9))
        await node.step(0)
        pages.set_back()
        assert await located(pages, 0) == {"a": 9}
        assert isinstance(await node.step(announcing.RENEW_NS), announcing.Renew)
        await node.step(announcing.RENEW_NS)
        assert await located(pages, 0) == {}
        for _ in range(8):
            await node.step(announcing.RENEW_NS + 200_000_000)
        assert await located(pages, 0) == {"a": 2}

    asyncio.run(case())


def test_pages_are_announced_again_before_they_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        pages = MemoryPages()
        node = AnnouncingNode("a", pages)
        node.store(*pages_of(0, 16))
        for _ in range(3 * 3_600):
            pages.now_ms += 1_000
            while not isinstance(await node.step(pages.now_ms * 1_000_000), announcing.WaitUntil):
                pass
            assert pages.now_ms < 5_000 or await located(pages, 0) == {"a": 16}
        assert node.announcing.completed == 3 * 60 // 25 + 1

    asyncio.run(case())


def test_what_waits_while_the_store_is_away_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcing, "PENDING_PAGES_MAX", 64)

    async def case() -> None:
        pages = MemoryPages()
        node = AnnouncingNode("a", pages)
        for _ in range(8):
            await node.step(0)
        [one] = node.announcing.announcements
        assert not one.full
        pages.away = True
        for at in range(16):
            node.store(*pages_of(at, at + 1, medium=("CPU", "STORAGE")[at % 2]))
        assert one.full
        pages.away = False
        while one.has_more:
            await node.step(10**10)
        assert not one.full
        assert await located(pages, 0) == {"a": 16}

    asyncio.run(case())


def test_pages_of_a_snapshot_are_announced_at_a_bounded_rate_and_changes_at_once() -> None:
    async def case() -> None:
        pages = MemoryPages()
        node = AnnouncingNode("a", pages)
        node.announcing.next(0)
        await node.step(0)  # it has a number
        [one] = node.announcing.announcements
        for _ in range(10):
            one.add("5" * 64, "a" * 16, "CPU", bytes(32 * 10_000))
        sent = []
        for now_ms in range(1_500):
            while not isinstance(await node.step(now_ms * 1_000_000), announcing.WaitUntil):
                pass
            sent.append(node.announcing.pages)
        assert 45_000 <= sent[999] <= 60_000
        assert 70_000 <= sent[1_499] <= 85_000

    asyncio.run(case())
