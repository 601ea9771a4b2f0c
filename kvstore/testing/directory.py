"""The contract of all stores of entries, and of those who announce pages there.

::

    contract = DirectoryContract(open_directory)
    for check in DirectoryContract.CHECKS:
        asyncio.run(getattr(contract, check)())      # AssertionError says what was broken

Each check opens a new directory, and ends within :data:`WAIT_S`.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from time import monotonic, monotonic_ns
from typing import ClassVar, Final, Protocol

import msgspec
import numpy as np

from kvstore.cluster.announcing import (
    Announcing,
    ChangeEntries,
    Claim,
    PageAnnouncement,
    Renew,
    Step,
    WaitUntil,
    Withdraw,
)
from kvstore.cluster.entries import EntryNames, usable_prefixes
from kvstore.cluster.page_store import AnnouncedNumber, ChangedPages, DirectoryFault, PageStore
from kvstore.events.publisher import Event, EventBatch, RemovedEvent, StoredEvent
from kvstore.protocol.page import KEY_BYTES, page_keys

WAIT_S: Final = 30.0
_CLUSTER: Final = "c"
_SPACE: Final = "5" * 64
_SHARDS: Final = ("a" * 16, "b" * 16)
_KEYS: Final = page_keys(np.arange(16 * 16), 16).packed
_ENCODER: Final = msgspec.msgpack.Encoder()

Page = tuple[str, str, bytes]
"""Medium, shard, key."""


class AnnouncingNode:
    """A node that announces its pages, without a follower and without a clock.

    Attributes:
        pages: what it has.
        announcing: its announcements.
    """

    def __init__(self, name: str, store: PageStore, boot: bytes = b"") -> None:
        self.name = name
        self.boot = boot or name.encode() * 16
        self.pages: dict[Page, None] = {}
        self.announcing = Announcing(self._begin)
        self._store = store
        self._names = EntryNames(_CLUSTER)
        self._followed: set[str] = set()

    def _begin(self) -> PageAnnouncement:
        return PageAnnouncement(secrets.token_hex(8), self._names)

    def store(self, *pages: Page) -> None:
        """Store pages."""
        for page in pages:
            self.pages[page] = None
        self._publish(pages, stored=True)

    def remove(self, *pages: Page) -> None:
        """Remove pages."""
        for page in pages:
            self.pages.pop(page, None)
        self._publish(pages, stored=False)

    def _publish(self, pages: Iterable[Page], *, stored: bool) -> None:
        events: list[Event] = [_event(page, stored=stored) for page in pages]
        payload = _ENCODER.encode(EventBatch(1.0, events))
        for one in self.announcing.announcements:
            if one.token in self._followed:
                for _ in one.apply(payload):
                    pass

    def miss(self) -> None:
        """Lose some events, and know it."""
        for one in self.announcing.announcements:
            one.clear()

    def follow(self) -> None:
        """Read the snapshot for announcements that have just begun."""
        for one in self.announcing.announcements:
            if one.token not in self._followed:
                self._followed.add(one.token)
                one.live(counts=False)
                one.clear()
                for medium, shard, key in self.pages:
                    one.add(_SPACE, shard, medium, key)
                one.live(counts=True)

    async def step(self, now_ns: int) -> Step:
        """Take one step; a fault of the store is told to the announcements."""
        state = self.announcing
        step = state.next(now_ns)
        try:
            match step:
                case Claim(announcement=one):
                    state.claimed(one, await self._store.claim(self.name, self.boot, one.token))
                case ChangeEntries(one):
                    paced, batch = one.is_paced, one.batch
                    done = await self._store.change(
                        one.number, one.token, batch, one.next_changes()
                    )
                    state.changed(one, now_ns, done=done, paced=paced)
                case Renew(numbers):
                    state.renewed(await self._store.renew(numbers), now_ns)
                case Withdraw(number, token):
                    await self._store.withdraw(number, token)
                    state.withdrawn()
                case WaitUntil():
                    pass
        except DirectoryFault as fault:
            state.failed(fault.cause, now_ns)
        self.follow()
        return step

    async def run(self) -> None:
        """Take steps until cancelled."""
        while True:
            if isinstance(await self.step(monotonic_ns()), WaitUntil):
                await asyncio.sleep(0.002)


def _event(page: Page, *, stored: bool) -> Event:
    medium, shard, key = page
    if not stored:
        return RemovedEvent(
            block_hashes=[key], medium=medium, space=_SPACE, shard=0, shard_digest=shard
        )
    return StoredEvent(
        block_hashes=[key], parent_block_hash=None, token_ids=[], block_size=16, medium=medium,
        space=_SPACE, shard=0, shard_digest=shard,
    )  # fmt: skip


def pages_of(first: int, end: int, shard: int = 0, medium: str = "CPU") -> list[Page]:
    """Some pages of one chain of 16."""
    keys = [_KEYS[at : at + KEY_BYTES] for at in range(0, len(_KEYS), KEY_BYTES)]
    return [(medium, _SHARDS[shard], key) for key in keys[first:end]]


async def located(store: PageStore, *windows: int) -> dict[str, int]:
    """How many leading pages of the chain each node has.

    Args:
        store: where to look.
        windows: of the first, or of both shards.
    """
    names = EntryNames(_CLUSTER)
    found = await store.find([names.of(_SPACE, shard, _KEYS) for shard in _SHARDS[: len(windows)]])
    return {one.holder.node: one.pages for one in usable_prefixes(found, windows)}


class OpenedDirectory(Protocol):
    """A directory that a check uses."""

    def store(self) -> PageStore:
        """A store for one more node."""
        ...

    async def empty(self) -> None:
        """Delete everything."""
        ...

    async def save(self) -> None:
        """Keep what it has now for :meth:`set_back`."""
        ...

    async def set_back(self) -> None:
        """Let it have again just what it had at :meth:`save`."""
        ...

    async def stop(self) -> None:
        """Let it answer nobody."""
        ...

    async def go_on(self) -> None:
        """Let it answer again."""
        ...

    async def expire(self) -> None:
        """Wait until entries and numbers that were not told again have expired."""
        ...


OpenDirectory = Callable[[], AbstractAsyncContextManager[OpenedDirectory]]


class DirectoryContract:
    """What every shared directory guarantees.

    Args:
        open_directory: opens a directory for each check.
    """

    CHECKS: ClassVar = (
        "a_page_is_found_from_its_announcement_to_its_removal",
        "a_page_is_found_until_it_has_left_every_medium",
        "a_prefix_needs_all_shards_and_of_a_window_its_end",
        "nodes_that_change_the_same_pages_at_once_lose_nothing",
        "a_new_boot_takes_the_place_of_the_one_before",
        "what_was_emptied_is_announced_again",
        "what_came_back_with_older_data_is_announced_again",
        "what_was_missed_is_announced_again_and_nothing_stale_is_left",
        "while_it_is_away_calls_fail_in_time_and_changes_are_made_good",
        "the_pages_of_a_dead_node_mean_nothing",
        "a_batch_is_carried_out_once_and_in_order",
    )

    def __init__(self, open_directory: OpenDirectory) -> None:
        self._open = open_directory

    async def a_page_is_found_from_its_announcement_to_its_removal(self) -> None:
        """What is stored is found, what is removed is not."""
        async with asyncio.timeout(WAIT_S), self._open() as at, _running(at, "a") as (a,):
            reader = at.store()
            a.store(*pages_of(0, 9))
            await _finds(reader, {"a": 9})
            a.remove(*pages_of(4, 9))
            await _finds(reader, {"a": 4})
            a.store(*pages_of(4, 6))
            await _finds(reader, {"a": 6})

    async def a_page_is_found_until_it_has_left_every_medium(self) -> None:
        """A page that is also on the SSDs stays when it leaves memory."""
        async with asyncio.timeout(WAIT_S), self._open() as at, _running(at, "a") as (a,):
            reader = at.store()
            a.store(*pages_of(0, 9), *pages_of(0, 5, medium="STORAGE"))
            await _finds(reader, {"a": 9})
            a.remove(*pages_of(0, 9))
            await _finds(reader, {"a": 5})
            a.remove(*pages_of(2, 5, medium="STORAGE"))
            await _finds(reader, {"a": 2})

    async def a_prefix_needs_all_shards_and_of_a_window_its_end(self) -> None:
        """A prefix counts as far as every shard has what it needs of it."""
        async with asyncio.timeout(WAIT_S), self._open() as at, _running(at, "a") as (a,):
            reader = at.store()
            a.store(*pages_of(0, 9), *pages_of(5, 8, shard=1))
            await _finds(reader, {"a": 9})
            await _finds(reader, {"a": 8}, 0, 2)
            await _finds(reader, {}, 0, 0)
            await _finds(reader, {}, 0, 4)

    async def nodes_that_change_the_same_pages_at_once_lose_nothing(self) -> None:
        """Each node's pages are what that node said last, whatever the others do."""
        async with asyncio.timeout(WAIT_S), self._open() as at, _running(at, "a", "b") as (a, b):
            reader = at.store()
            for _ in range(20):
                for one in (a, b):
                    one.store(*pages_of(0, 16))
                await asyncio.sleep(0)
                for one in (b, a):
                    one.remove(*pages_of(3, 16))
                await asyncio.sleep(0)
            a.store(*pages_of(3, 12))
            b.store(*pages_of(3, 7))
            await _finds(reader, {"a": 12, "b": 7})

    async def a_new_boot_takes_the_place_of_the_one_before(self) -> None:
        """Of a node that starts again nothing is believed that its earlier boot has said."""
        async with asyncio.timeout(WAIT_S), self._open() as at:
            reader = at.store()
            async with _running(at, "a") as (a,):
                a.store(*pages_of(0, 9))
                await _finds(reader, {"a": 9})
            again = AnnouncingNode("a", at.store(), b"new")
            again.store(*pages_of(0, 2))
            async with _at_work(again):
                await _finds(reader, {"a": 2})

    async def what_was_emptied_is_announced_again(self) -> None:
        """A directory that lost everything has it again after a while."""
        async with asyncio.timeout(WAIT_S), self._open() as at, _running(at, "a", "b") as (a, b):
            reader = at.store()
            a.store(*pages_of(0, 9))
            b.store(*pages_of(0, 4))
            await _finds(reader, {"a": 9, "b": 4})
            await at.empty()
            a.store(*pages_of(9, 10))
            await _finds(reader, {"a": 10, "b": 4})
            assert a.announcing.faults["lost"], "nobody has noticed"

    async def what_came_back_with_older_data_is_announced_again(self) -> None:
        """A directory that forgets what it was told last has it again, also if nothing changes."""
        async with asyncio.timeout(WAIT_S), self._open() as at, _running(at, "a") as (a,):
            reader = at.store()
            a.store(*pages_of(0, 4))
            await _finds(reader, {"a": 4})
            await at.save()
            a.store(*pages_of(4, 9))
            await _finds(reader, {"a": 9})
            await at.set_back()
            await _finds(reader, {"a": 9})
            assert a.announcing.faults["lost"], "nobody has noticed"

    async def what_was_missed_is_announced_again_and_nothing_stale_is_left(self) -> None:
        """After a gap in its events a node's pages are what it has."""
        async with asyncio.timeout(WAIT_S), self._open() as at, _running(at, "a") as (a,):
            reader = at.store()
            a.store(*pages_of(0, 9))
            await _finds(reader, {"a": 9})
            for page in pages_of(3, 9):
                del a.pages[page]
            a.miss()
            await _finds(reader, {"a": 3})
            assert a.announcing.faults["gap"] == 1

    async def while_it_is_away_calls_fail_in_time_and_changes_are_made_good(self) -> None:
        """A directory that answers nobody costs each call a bounded time, and no change."""
        async with asyncio.timeout(WAIT_S), self._open() as at, _running(at, "a") as (a,):
            reader = at.store()
            a.store(*pages_of(0, 9))
            await _finds(reader, {"a": 9})
            await at.stop()
            begun = monotonic()
            assert await _fault(reader) in ("away", "late"), "it answers"
            assert monotonic() - begun < 5.0, "a call took too long"
            a.remove(*pages_of(4, 9))
            faults = a.announcing.faults
            await _until(lambda: bool(faults["away"] + faults["late"]))
            await at.go_on()
            await _finds(reader, {"a": 4})

    async def the_pages_of_a_dead_node_mean_nothing(self) -> None:
        """What a node has said that says nothing any more expires; the others' stays."""
        async with asyncio.timeout(WAIT_S), self._open() as at, _running(at, "b") as (b,):
            reader = at.store()
            b.store(*pages_of(0, 4))
            async with _running(at, "a") as (a,):
                a.store(*pages_of(0, 9))
                await _finds(reader, {"a": 9, "b": 4})
            await at.expire()
            await _finds(reader, {"b": 4})

    async def a_batch_is_carried_out_once_and_in_order(self) -> None:
        """A call that comes late, twice, or for another announcement changes nothing."""
        async with asyncio.timeout(WAIT_S), self._open() as at:
            store, names = at.store(), EntryNames(_CLUSTER).of(_SPACE, _SHARDS[0], _KEYS)
            number = await store.claim("a", b"boot", "t1")
            assert await store.claim("a", b"boot", "t1") == number, "two numbers of one token"
            stored = [ChangedPages(stored=True, sign="", names=names)]
            removed = [ChangedPages(stored=False, sign="", names=names)]
            assert await store.change(number, "t1", 1, stored)
            assert await located(store, 0) == {"a": 16}
            assert await store.change(number, "t1", 2, removed)
            assert await store.change(number, "t1", 2, stored), "it was carried out"
            assert not await store.change(number, "t1", 1, stored), "an old batch is not lost"
            assert not await store.change(number, "t1", 4, stored), "a batch is missing"
            assert not await store.change(number, "t2", 3, stored), "of somebody else"
            assert await located(store, 0) == {}
            assert await store.change(number, "t1", 3, stored)
            await store.withdraw(number, "t2")
            assert await located(store, 0) == {"a": 16}
            await store.withdraw(number, "t1")
            assert await located(store, 0) == {}
            assert await store.renew({number: AnnouncedNumber("t1", 3)}) == [number]
            assert await store.claim("b", b"boot", "t3") != number, "entries name it still"


class _at_work:  # noqa: N801
    """Nodes that announce meanwhile."""

    def __init__(self, *nodes: AnnouncingNode) -> None:
        self._nodes = nodes
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Sequence[AnnouncingNode]:
        self._tasks = [asyncio.create_task(one.run()) for one in self._nodes]
        return self._nodes

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


def _running(at: OpenedDirectory, *names: str) -> _at_work:
    return _at_work(*(AnnouncingNode(name, at.store()) for name in names))


async def _finds(store: PageStore, expected: dict[str, int], *windows: int) -> None:
    """Wait until a reader finds just this."""
    found: object = None
    try:
        while found != expected:
            try:
                found = await located(store, *(windows or (0,)))
            except DirectoryFault as fault:
                found = fault
            await asyncio.sleep(0.005)
    except asyncio.CancelledError:
        raise AssertionError(f"found {found}, not {expected}") from None


async def _fault(store: PageStore) -> str:
    """The cause why a question fails; empty if it does not."""
    try:
        await located(store, 0)
    except DirectoryFault as fault:
        return fault.cause
    return ""


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 -- conditions of others' state
        await asyncio.sleep(0.005)
