"""The contract of memberships that are kept in a store, as checks that need no test framework.

::

    contract = LeasedContract(open_store)
    for check in LeasedContract.CHECKS:
        asyncio.run(getattr(contract, check)())      # AssertionError says what was broken

Each check opens a new store. It keeps to :data:`WAIT_S`, and none of its calls lasts longer than
:data:`~kvstore.cluster.store.CALL_S`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from time import monotonic
from typing import ClassVar, Final, Protocol

from kvstore.cluster.claiming import Presence
from kvstore.cluster.leased import LEAVE_S, LeasedMembership
from kvstore.cluster.records import SCHEME, NodeRecord, write_record
from kvstore.cluster.store import CALL_S, RecordStore

WAIT_S: Final = 30.0
LATE_S: Final = 5.0
"""So much longer than its limit may a call last on a busy machine; one without a limit never ends.
"""
LEAVING_LATE_S: Final = 0.75
"""So much longer may leaving last, at least once in :data:`LEAVINGS`; a call lasts longer."""
LEAVINGS: Final = 3

PAUSE_S: Final = 0.05


class HarmedStore(Protocol):
    """A store of one cluster and what happens to it.

    Attributes:
        lease_s: seconds after the last renewal in which a record is gone.
    """

    lease_s: float

    def connect(self) -> RecordStore:
        """The store as another node sees it, not open."""

    async def kill(self) -> None:
        """End its process at once."""

    async def start(self) -> None:
        """Start it again with the data that it had."""

    async def stop(self) -> None:
        """It does not do anything any more, but its connections stay."""

    async def go_on(self) -> None:
        """Let it go on."""

    async def empty(self) -> None:
        """Delete all that is in it."""

    async def put(self, name: str, value: bytes) -> None:
        """Put a record for a lease's time, whatever is there."""


OpenStore = Callable[[], AbstractAsyncContextManager[HarmedStore]]
"""Opens a new, empty store."""


class TimedStore:
    """A store whose longest call is measured.

    Attributes:
        lease_s: seconds of the store's lease.
        longest_s: duration of the longest call so far.
    """

    def __init__(self, store: RecordStore) -> None:
        self.lease_s = store.lease_s
        self.longest_s = 0.0
        self._store = store

    async def open(self) -> None:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        async with self._measured():
            await self._store.open()

    async def close(self) -> None:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        async with self._measured():
            await self._store.close()

    async def settings(self, offered: bytes) -> bytes:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        async with self._measured():
            return await self._store.settings(offered)

    async def claim(self, name: str, value: bytes, expected: bytes | None) -> bytes | None:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        async with self._measured():
            return await self._store.claim(name, value, expected)

    async def renew(self) -> bool:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        async with self._measured():
            return await self._store.renew()

    async def check(self) -> None:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        async with self._measured():
            await self._store.check()

    async def withdraw(self, name: str, value: bytes) -> None:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        async with self._measured():
            await self._store.withdraw(name, value)

    def watch(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        return self._store.watch()

    @asynccontextmanager
    async def _measured(self) -> AsyncIterator[None]:
        began_s = monotonic()
        try:
            yield
        finally:
            self.longest_s = max(self.longest_s, monotonic() - began_s)


class ScenePlace:
    """One process of a node: its membership, and whether it answers.

    Attributes:
        membership: running until the process ends.
        store: its store.
        record: of the node.
    """

    def __init__(self, scene: "Scene", record: NodeRecord) -> None:
        self.record = record
        self.store = TimedStore(scene.harmed.connect())
        self.membership = LeasedMembership(self.store, scene.presence)
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Join."""
        self._running = asyncio.create_task(self.membership.run())
        await self.membership.join(self.record)

    async def die(self) -> None:
        """End without leaving."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def has_called(self) -> bool:
        """Whether its store was called since its longest call was set to 0."""
        return self.store.longest_s > 0.0

    async def stands(self, state: str, field: str = "", within_s: float = WAIT_S) -> str:
        """Wait for a standing; returns why it is so."""
        try:
            async with asyncio.timeout(within_s):
                async for _, standing in self.membership.changes():
                    if (standing.state, standing.field) == (state, field):
                        return standing.why
        except TimeoutError:
            pass
        raise AssertionError(
            f"{self.record.name} is not {state} {field} within {within_s} s:"
            f" {self.membership.standing}"
        )

    async def sees(self, *records: NodeRecord, within_s: float = WAIT_S) -> None:
        """Wait until its nodes are exactly these."""
        nodes: Mapping[str, NodeRecord] = {}
        try:
            async with asyncio.timeout(within_s):
                async for nodes in self.membership.watch():
                    if nodes == {one.name: one for one in records}:
                        return
        except TimeoutError:
            pass
        raise AssertionError(f"{self.record.name} does not see these nodes: {nodes}")


class Scene:
    """A store, and processes of nodes.

    Attributes:
        harmed: the store.
        living: endpoint → boot id of the process that answers there.
        silent: endpoints where nobody answers, and nobody refuses.
    """

    def __init__(self, harmed: HarmedStore) -> None:
        self.harmed = harmed
        self.living: dict[str, bytes] = {}
        self.silent: set[str] = set()
        self._places: list[ScenePlace] = []

    async def presence(self, record: NodeRecord) -> Presence:
        """What is at the endpoint of a record."""
        if record.endpoint in self.silent:
            return Presence.SILENT
        lives = self.living.get(record.endpoint) == record.boot
        return Presence.LIVE if lives else Presence.DEAD

    async def begin(self, record: NodeRecord) -> ScenePlace:
        """Start a process, which need not come to join."""
        place = ScenePlace(self, record)
        self._places.append(place)
        self.living[record.endpoint] = record.boot
        await place.start()
        return place

    async def join(self, *records: NodeRecord) -> list[ScenePlace]:
        """Processes that have joined."""
        places = [await self.begin(record) for record in records]
        for place in places:
            await place.stands("joined")
        return places

    async def kill(self, place: ScenePlace) -> None:
        """End a process at once; its endpoint refuses connections from now on."""
        await place.die()
        self.living.pop(place.record.endpoint, None)

    async def records(self) -> dict[str, bytes]:
        """What is in the store."""
        store = self.harmed.connect()
        await store.open()
        try:
            async for records in store.watch():
                return dict(records)
        finally:
            await store.close()
        raise AssertionError("the watch has ended")

    async def end(self) -> None:
        """End all processes; none of their calls was too long."""
        for place in self._places:
            await place.die()
        longest_s = max([place.store.longest_s for place in self._places], default=0.0)
        assert longest_s <= CALL_S + LATE_S, f"a call has lasted {longest_s:.2f} s"


A: Final = NodeRecord(name="a", boot=b"a" * 16, endpoint="127.0.0.1:7001")
B: Final = NodeRecord(name="b", boot=b"b" * 16, endpoint="127.0.0.1:7002")
A_AGAIN: Final = NodeRecord(name="a", boot=b"A" * 16, endpoint=A.endpoint)
A_ELSEWHERE: Final = NodeRecord(name="a", boot=b"A" * 16, endpoint="127.0.0.1:7003")


class LeasedContract:
    """What every membership in a store guarantees.

    Args:
        open_store: opens a store for each check.
    """

    CHECKS: ClassVar = (
        "nodes_see_each_other",
        "a_restarted_node_replaces_its_record_at_once",
        "the_name_of_a_live_node_is_refused",
        "the_name_of_a_dead_node_is_taken_at_once",
        "the_name_of_a_silent_node_is_taken_when_its_lease_has_run_out",
        "a_node_whose_record_was_replaced_is_refused_and_does_not_take_it_back",
        "another_scheme_is_refused",
        "another_protocol_is_refused",
        "who_leaves_is_gone_at_once",
        "who_leaves_takes_no_record_of_another_process_along",
        "who_dies_is_gone_when_its_lease_has_run_out",
        "a_changed_record_is_told",
        "what_a_killed_store_has_told_stays_and_it_comes_back",
        "what_a_stopped_store_has_told_stays_and_it_comes_back",
        "an_emptied_store_is_filled_again_and_nobody_is_missed",
        "who_starts_without_a_store_joins_when_it_comes",
        "who_leaves_while_the_store_is_stopped_does_not_wait_for_it",
        "unreadable_records_are_left_out_and_counted",
    )

    def __init__(self, open_store: OpenStore) -> None:
        self._open = open_store

    async def nodes_see_each_other(self) -> None:
        """All that they have said of themselves."""
        async with self._scene() as scene:
            full = NodeRecord(
                name="c", boot=b"c" * 16, endpoint="[::1]:7003", transports={"tcp": ":7"},
                state="draining",
            )  # fmt: skip
            places = await scene.join(A, B, full)
            for place in places:
                await place.sees(A, B, full)

    async def a_restarted_node_replaces_its_record_at_once(self) -> None:
        """It has the same endpoint and another boot id."""
        async with self._scene() as scene:
            a, b = await scene.join(A, B)
            await scene.kill(a)
            again = await scene.begin(A_AGAIN)
            await again.stands("joined", within_s=scene.harmed.lease_s / 2)
            await b.sees(A_AGAIN, B)

    async def the_name_of_a_live_node_is_refused(self) -> None:
        """The field is ``name``, and the record is unchanged."""
        async with self._scene() as scene:
            (a,) = await scene.join(A)
            other = await scene.begin(A_ELSEWHERE)
            assert A.endpoint in await other.stands("refused", "name")
            assert await scene.records() == {"a": write_record(A)}
            await other.sees()
            await a.sees(A)

    async def the_name_of_a_dead_node_is_taken_at_once(self) -> None:
        """Nobody listens at its endpoint any more."""
        async with self._scene() as scene:
            a, b = await scene.join(A, B)
            await scene.kill(a)
            other = await scene.begin(A_ELSEWHERE)
            await other.stands("joined", within_s=scene.harmed.lease_s / 2)
            await b.sees(A_ELSEWHERE, B)

    async def the_name_of_a_silent_node_is_taken_when_its_lease_has_run_out(self) -> None:
        """Not before: it may be that only the way to it is cut."""
        async with self._scene() as scene:
            (a,) = await scene.join(A)
            scene.silent.add(A.endpoint)
            other = await scene.begin(A_ELSEWHERE)
            await other.stands("joining", "name")
            assert await scene.records() == {"a": write_record(A)}
            await scene.kill(a)
            await other.stands("joined")
            assert await scene.records() == {"a": write_record(A_ELSEWHERE)}

    async def a_node_whose_record_was_replaced_is_refused_and_does_not_take_it_back(self) -> None:
        """Two machines that say one address do not take the name from each other in turns."""
        async with self._scene() as scene:
            (a,) = await scene.join(A)
            again = await scene.begin(A_AGAIN)
            await again.stands("joined")
            await a.stands("refused", "name")
            a.store.longest_s = 0.0
            await _until(a.has_called)  # it has tried again
            await a.stands("refused", "name")
            assert await scene.records() == {"a": write_record(A_AGAIN)}

    async def another_scheme_is_refused(self) -> None:
        """The field is named, and no record is changed."""
        await self._is_refused("scheme", scheme=f"{SCHEME} of another kind")

    async def another_protocol_is_refused(self) -> None:
        """Another major version; another minor one is not."""
        await self._is_refused("protocol", protocol="2.0")
        async with self._scene() as scene:
            newer = NodeRecord(name="b", boot=b"b" * 16, endpoint="127.0.0.1:7002", protocol="1.99")
            a, _ = await scene.join(A, newer)
            await a.sees(A, newer)

    async def _is_refused(self, field: str, **differs: str) -> None:
        async with self._scene() as scene:
            (a,) = await scene.join(A)
            fields = {"name": "b", "boot": b"b" * 16, "endpoint": B.endpoint}
            other = await scene.begin(NodeRecord(**fields, **differs))  # type: ignore[arg-type]
            said = next(iter(differs.values())).partition(".")[0]
            assert said in await other.stands("refused", field), "it does not say what differs"
            assert await scene.records() == {"a": write_record(A)}
            await a.sees(A)

    async def who_leaves_is_gone_at_once(self) -> None:
        """Not when its lease has run out."""
        async with self._scene() as scene:
            a, b = await scene.join(A, B)
            await b.sees(A, B)
            await a.membership.leave()
            assert await scene.records() == {"b": write_record(B)}
            await b.sees(B)

    async def who_leaves_takes_no_record_of_another_process_along(self) -> None:
        """A process that was replaced may end later than the other one begins."""
        async with self._scene() as scene:
            (a,) = await scene.join(A)
            await scene.join(A_AGAIN)
            await a.membership.leave()
            assert await scene.records() == {"a": write_record(A_AGAIN)}

    async def who_dies_is_gone_when_its_lease_has_run_out(self) -> None:
        """And who lives stays."""
        async with self._scene() as scene:
            a, b = await scene.join(A, B)
            await b.sees(A, B)
            await scene.kill(a)
            await b.sees(B)
            assert await scene.records() == {"b": write_record(B)}

    async def a_changed_record_is_told(self) -> None:
        """A node that is to be emptied says so."""
        async with self._scene() as scene:
            a, b = await scene.join(A, B)
            draining = NodeRecord(name="a", boot=A.boot, endpoint=A.endpoint, state="draining")
            await a.membership.join(draining)
            await b.sees(draining, B)
            await a.stands("joined")

    async def what_a_killed_store_has_told_stays_and_it_comes_back(self) -> None:
        """Nobody has to restart a node."""
        async with self._scene() as scene:
            places = await self._two(scene)
            await scene.harmed.kill()
            await self._stay(places)
            await scene.harmed.start()
            await self._return(scene, places)

    async def what_a_stopped_store_has_told_stays_and_it_comes_back(self) -> None:
        """Its connections stay open, so only deadlines tell."""
        async with self._scene() as scene:
            places = await self._two(scene)
            await scene.harmed.stop()
            await self._stay(places)
            await scene.harmed.go_on()
            await self._return(scene, places)

    async def an_emptied_store_is_filled_again_and_nobody_is_missed(self) -> None:
        """Both are there again before anyone has taken the other for gone."""
        async with self._scene() as scene:
            places = await self._two(scene)
            a = places[0]
            seen: list[frozenset[str]] = []

            async def look() -> None:
                async for nodes in a.membership.watch():
                    seen.append(frozenset(nodes))  # noqa: PERF401

            looking = asyncio.create_task(look())
            try:
                await scene.harmed.empty()
                await self._return(scene, places)
            finally:
                looking.cancel()
            assert set(seen) == {frozenset("ab")}, seen

    async def who_starts_without_a_store_joins_when_it_comes(self) -> None:
        """Until then it is alone."""
        async with self._scene() as scene:
            await scene.harmed.kill()
            a = await scene.begin(A)
            assert await a.stands("away"), "it does not say why"
            await a.sees()
            await scene.harmed.start()
            await a.stands("joined")

    async def who_leaves_while_the_store_is_stopped_does_not_wait_for_it(self) -> None:
        """A node ends within its time."""
        limit_s, lasted_s = LEAVE_S + LEAVING_LATE_S, list[float]()
        while not lasted_s or (lasted_s[-1] > limit_s and len(lasted_s) < LEAVINGS):
            async with self._scene() as scene:
                (a,) = await scene.join(A)
                await scene.harmed.stop()
                began_s = monotonic()
                await a.membership.leave()
                lasted_s.append(monotonic() - began_s)
                await scene.harmed.go_on()
        assert lasted_s[-1] <= limit_s, lasted_s

    async def unreadable_records_are_left_out_and_counted(self) -> None:
        """Unknown fields are ignored; who cannot read a record does not guess."""
        async with self._scene() as scene:
            (a,) = await scene.join(A)
            unknown = write_record(B)[:-1] + b',"color":"blue"}'
            await scene.harmed.put("b", unknown)
            await scene.harmed.put("c", b"\xff not JSON")
            await scene.harmed.put("d", write_record(B))  # the record of another name
            await a.sees(A, B)
            async for _, standing in a.membership.changes():
                if standing.unreadable == 2:
                    return

    async def _two(self, scene: Scene) -> list[ScenePlace]:
        places = await scene.join(A, B)
        for place in places:
            await place.sees(A, B)
        return places

    async def _stay(self, places: list[ScenePlace]) -> None:
        """The store is away, and its last word stands."""
        for place in places:
            assert await place.stands("away"), "it does not say why"
        for place in places:
            await place.sees(A, B, within_s=0.1)

    async def _return(self, scene: Scene, places: list[ScenePlace]) -> None:
        """All are joined again, with their records in the store."""
        expected = {"a": write_record(A), "b": write_record(B)}

        async def look() -> bool:
            return await scene.records() == expected

        await _until(look)
        for place in places:
            await place.stands("joined")
            await place.sees(A, B)

    @asynccontextmanager
    async def _scene(self) -> AsyncIterator[Scene]:
        async with asyncio.timeout(2 * WAIT_S), AsyncExitStack() as stack:
            scene = Scene(await stack.enter_async_context(self._open()))
            stack.push_async_callback(scene.end)
            yield scene


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition is met, within the limit of the scene."""
    while not await condition():  # noqa: ASYNC110 - it asks a server
        await asyncio.sleep(PAUSE_S)
