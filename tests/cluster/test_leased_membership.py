"""Goal: a membership in a store keeps its contract; here over a store in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from msgspec import structs

from kvstore.cluster import leased
from kvstore.cluster.claiming import Presence
from kvstore.cluster.leased import LEAVE_S, LeasedMembership
from kvstore.cluster.membership import Membership
from kvstore.cluster.records import NodeRecord, write_record
from kvstore.testing.leased import A_ELSEWHERE, A, B, HarmedStore, LeasedContract
from kvstore.testing.membership import MembershipContract
from kvstore.testing.stores import MemoryRecords, MemoryStore
from tests.loops import eventually, in_loop

LEASE_S = 5.0
A_DRAINING = structs.replace(A, state="draining")


class HarmedMemory:
    def __init__(self) -> None:
        self.shared = MemoryRecords(LEASE_S)
        self.lease_s = LEASE_S

    def connect(self) -> MemoryStore:
        return MemoryStore(self.shared)

    async def kill(self) -> None:
        self.shared.away = True

    async def start(self) -> None:
        self.shared.away = False

    async def stop(self) -> None:
        self.shared.stopped = True

    async def go_on(self) -> None:
        self.shared.stopped = False

    async def empty(self) -> None:
        self.shared.empty()

    async def put(self, name: str, value: bytes) -> None:
        self.shared.put(name, value)


@asynccontextmanager
async def in_memory() -> AsyncIterator[HarmedStore]:
    yield HarmedMemory()


@pytest.mark.parametrize("check", LeasedContract.CHECKS)
def test_a_membership_in_memory_keeps_the_contract_of_leases(check: str) -> None:
    asyncio.run(getattr(LeasedContract(in_memory), check)())


async def nobody(record: NodeRecord) -> Presence:
    return Presence.DEAD


@asynccontextmanager
async def two_members() -> AsyncIterator[tuple[Membership, Membership]]:
    async with members(MemoryRecords(LEASE_S), None, None) as (a, b):
        yield a, b


@pytest.mark.parametrize("check", MembershipContract.CHECKS)
def test_a_membership_in_a_store_keeps_the_contract_of_all_memberships(check: str) -> None:
    asyncio.run(getattr(MembershipContract(two_members), check)())


@in_loop
async def test_a_silent_node_is_waited_for_however_long_its_lease_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leased, "LATER_S", 0.0)
    shared = MemoryRecords(lease_s=1e9)
    shared.put("a", write_record(A))
    asked = 0

    async def silent(record: NodeRecord) -> Presence:
        nonlocal asked
        asked += 1
        if asked == 50:
            shared.delete("a")
        return Presence.SILENT

    membership = LeasedMembership(MemoryStore(shared), silent)
    running = asyncio.create_task(membership.run())
    seen: set[str] = set()
    try:
        await membership.join(A_ELSEWHERE)
        async with aclosing(membership.changes()) as changes:
            async for _, standing in changes:
                seen.add(standing.state)
                if standing.state == "joined":
                    break
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert (seen, asked) == ({"joining", "joined"}, 50)
    assert shared.records() == {"a": write_record(A_ELSEWHERE)}


@in_loop
async def test_a_store_that_lies_about_a_record_costs_its_node_only() -> None:
    shared = MemoryRecords(LEASE_S)
    shared.lies = {"b": write_record(B), "c": b"?"}
    async with members(shared, A) as (a,):
        await eventually(lambda: a.standing.state == "joined")
        assert a.standing.unreadable == 1
        shared.lies = {"a": write_record(A_ELSEWHERE)}  # another one has our name, it says
        await eventually(lambda: (a.standing.state, a.standing.field) == ("refused", "name"))
    assert shared.records() == {"a": write_record(A)}, "it took no revenge on the record"


@in_loop
async def test_a_store_whose_watchers_lag_is_joined_at_last() -> None:
    shared = MemoryRecords(LEASE_S)
    shared.lag = 1
    async with members(shared, A, B) as (a, b):
        await eventually(lambda: shared.records().keys() == {"a", "b"})
        shared.lag = 0
        for one in (a, b):
            await eventually(lambda: one.standing.state == "joined")  # noqa: B023


class GatedStore(MemoryStore):
    """A store one of whose next calls is held; a claim that was sent lands, cancelled or not.

    Attributes:
        closed: the call that is held: ``open``; ``asked`` = a claim before it lands; ``put`` = the
            answer of one that has; empty = none.
        at_gate: a call is held now.
        claims: all claims.
    """

    def __init__(self, shared: MemoryRecords) -> None:
        super().__init__(shared)
        self.closed = ""
        self.at_gate = False
        self.claims: list[asyncio.Task[bytes | None]] = []
        self._goes_on = asyncio.Event()

    async def open(self) -> None:
        await self._pass("open")
        await super().open()

    async def claim(self, name: str, value: bytes, expected: bytes | None) -> bytes | None:
        self.claims.append(asyncio.create_task(self._lands(name, value, expected)))
        return await asyncio.shield(self.claims[-1])

    async def _lands(self, name: str, value: bytes, expected: bytes | None) -> bytes | None:
        await self._pass("asked")
        there = await super().claim(name, value, expected)
        await self._pass("put")
        return there

    def go_on(self) -> None:
        self.closed = ""
        self._goes_on.set()

    async def _pass(self, call: str) -> None:
        if call == self.closed:
            self.at_gate = True
            await self._goes_on.wait()


@pytest.mark.parametrize("call", ["open", "asked", "put"])
@in_loop
async def test_a_node_that_leaves_while_its_changed_record_is_put_leaves_none(call: str) -> None:
    shared = MemoryRecords(lease_s=1e9)
    store = GatedStore(shared)
    membership = LeasedMembership(store, nobody)
    running = asyncio.create_task(membership.run())
    try:
        await membership.join(A)
        await eventually(lambda: membership.standing.state == "joined")
        store.closed = call
        await membership.join(A_DRAINING)
        await eventually(lambda: store.at_gate)
        leaving = asyncio.create_task(membership.leave())
        await turns()
        store.go_on()
        await leaving
        await asyncio.gather(*store.claims, return_exceptions=True)
        assert shared.records() == {}
    finally:
        running.cancel()
        await asyncio.wait([running])


@in_loop
async def test_a_node_that_leaves_between_two_attempts_to_join_takes_its_record_away() -> None:
    shared = MemoryRecords(lease_s=1e9)
    async with members(shared, A) as (a,):
        await eventually(lambda: a.standing.state == "joined")
        shared.away = True
        await eventually(lambda: a.standing.state == "away")
        shared.away = False
        await a.leave()
        assert shared.records() == {}


@in_loop
async def test_a_claim_under_way_ends_with_the_process() -> None:
    store = GatedStore(MemoryRecords(LEASE_S))
    store.closed = "asked"
    membership = LeasedMembership(store, nobody)
    running = asyncio.create_task(membership.run())
    await membership.join(A)
    await eventually(lambda: store.at_gate)
    await membership.join(A_DRAINING)  # which waits for the claim
    await turns()
    running.cancel()
    await asyncio.wait([running], timeout=LEAVE_S)
    assert running.cancelled()
    store.go_on()
    await asyncio.gather(*store.claims, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def turns() -> None:
    """Let all others do what they can do now."""
    for _ in range(50):
        await asyncio.sleep(0)


@asynccontextmanager
async def members(
    shared: MemoryRecords, *records: NodeRecord | None
) -> AsyncIterator[list[LeasedMembership]]:
    made = [LeasedMembership(MemoryStore(shared), nobody) for _ in records]
    running = [asyncio.create_task(one.run()) for one in made]
    try:
        for one, record in zip(made, records, strict=True):
            if record is not None:
                await one.join(record)
        yield made
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
