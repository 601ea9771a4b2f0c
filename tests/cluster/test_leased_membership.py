"""Goal: a membership in a store keeps its contract; here over a store in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstore.cluster.claiming import Presence
from kvstore.cluster.leased import LeasedMembership
from kvstore.cluster.membership import Membership
from kvstore.cluster.records import NodeRecord
from kvstore.testing.leased import HarmedStore, LeasedContract
from kvstore.testing.membership import MembershipContract
from kvstore.testing.stores import MemoryRecords, MemoryStore

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
    shared = MemoryRecords(LEASE_S)
    made = [LeasedMembership(MemoryStore(shared), nobody) for _ in "ab"]
    running = [asyncio.create_task(one.run()) for one in made]
    try:
        yield made[0], made[1]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.parametrize("check", MembershipContract.CHECKS)
def test_a_membership_in_a_store_keeps_the_contract_of_all_memberships(check: str) -> None:
    asyncio.run(getattr(MembershipContract(two_members), check)())
