"""Goal: a membership in a store keeps its contract; here over a store in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from kvstore.cluster import leased
from kvstore.cluster.claiming import Presence
from kvstore.cluster.leased import LeasedMembership
from kvstore.cluster.membership import Membership
from kvstore.cluster.records import NodeRecord, write_record
from kvstore.testing.leased import A_ELSEWHERE, A, B, HarmedStore, LeasedContract
from kvstore.testing.membership import MembershipContract
from kvstore.testing.stores import MemoryRecords, MemoryStore
from tests.loops import eventually, in_loop

LEASE_S = 1.0


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
        async with aclosing(membership.told()) as changes:
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
