"""Goal: every membership keeps the contract, and the fixed list is what its operator wrote."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from kvstore.cluster.membership import LocalMembership, Membership
from kvstore.cluster.records import NodeRecord
from kvstore.testing.membership import A, B, MembershipContract
from tests.loops import in_loop

LIST = {"a": A.endpoint, "b": B.endpoint}


@asynccontextmanager
async def local() -> AsyncIterator[tuple[Membership, Membership]]:
    one, other = ({name: at for name, at in LIST.items() if name != own} for own in "ab")
    yield LocalMembership(one), LocalMembership(other)


@pytest.mark.parametrize("check", MembershipContract.CHECKS)
def test_the_fixed_list_keeps_the_contract(check: str) -> None:
    asyncio.run(getattr(MembershipContract(local), check)())


@in_loop
async def test_a_node_that_is_in_its_own_list_is_there_once_as_it_says_itself() -> None:
    membership = LocalMembership(LIST)
    own = NodeRecord(name="a", boot=b"x" * 16, endpoint="10.0.0.9:1")
    await membership.join(own)
    async with aclosing(membership.watch()) as changes:
        assert await anext(changes) == {
            "a": own, "b": NodeRecord(name="b", endpoint=B.endpoint),
        }  # fmt: skip
        await membership.leave()
        assert set(await anext(changes)) == {"b"}
