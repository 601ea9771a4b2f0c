"""The contract of all memberships, as checks that need no test framework.

::

    contract = MembershipContract(open_members)
    for check in MembershipContract.CHECKS:
        asyncio.run(getattr(contract, check)())      # AssertionError says what was broken

Each check opens a new cluster of the nodes ``a`` and ``b``, and ends within :data:`WAIT_S`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import ClassVar, Final

from kvstore.cluster.membership import Membership
from kvstore.cluster.records import NodeRecord

WAIT_S: Final = 30.0
QUIET_S: Final = 0.1
"""For so long nothing is told when nothing has changed."""

A: Final = NodeRecord(name="a", boot=b"a" * 16, endpoint="127.0.0.1:7001")
B: Final = NodeRecord(name="b", boot=b"b" * 16, endpoint="127.0.0.1:7002")

OpenMembers = Callable[[], AbstractAsyncContextManager[tuple[Membership, Membership]]]
"""Opens a new cluster: the memberships of the nodes A and B, which have not joined."""


class MembershipContract:
    """What every membership guarantees.

    Args:
        open_members: opens a cluster for each check.
    """

    CHECKS: ClassVar = (
        "who_joined_is_seen_by_itself_and_others",
        "a_new_start_replaces_the_record_of_the_one_before",
        "who_left_sees_itself_no_more_and_may_join_again",
        "a_watcher_is_told_at_once_and_then_of_changes_only",
        "a_watcher_that_comes_late_or_leaves_disturbs_no_other",
    )

    def __init__(self, open_members: OpenMembers) -> None:
        self._open = open_members

    async def who_joined_is_seen_by_itself_and_others(self) -> None:
        """Both nodes are at last known to both, with the addresses that they gave."""
        async with asyncio.timeout(WAIT_S), self._open() as (a, b):
            await a.join(A)
            await b.join(B)
            for member, own in ((a, A), (b, B)):
                seen = await _seen(member, lambda nodes: {"a", "b"} <= nodes.keys())
                assert seen[own.name] == own, "a node does not see itself as it is"
                assert (seen["a"].endpoint, seen["b"].endpoint) == (A.endpoint, B.endpoint)

    async def a_new_start_replaces_the_record_of_the_one_before(self) -> None:
        """A restarted node is there at once under its name, with its new boot id."""
        async with asyncio.timeout(WAIT_S), self._open() as (a, _):
            await a.join(A)
            await _seen(a, lambda nodes: nodes.get("a") == A)
            again = NodeRecord(name="a", boot=b"A" * 16, endpoint="127.0.0.1:7003")
            await a.join(again)
            seen = await _seen(a, lambda nodes: nodes.get("a", A) != A)
            assert seen["a"] == again, "the record of an earlier start is there still"

    async def who_left_sees_itself_no_more_and_may_join_again(self) -> None:
        """Leaving takes the own record away; leaving twice does nothing."""
        async with asyncio.timeout(WAIT_S), self._open() as (a, _):
            await a.leave()
            await a.join(A)
            await a.leave()
            await a.leave()
            await _seen(a, lambda nodes: "a" not in nodes)
            await a.join(A)
            await _seen(a, lambda nodes: nodes.get("a") == A)

    async def a_watcher_is_told_at_once_and_then_of_changes_only(self) -> None:
        """There is a first answer without any change, and none that repeats the one before."""
        async with (
            asyncio.timeout(WAIT_S), self._open() as (a, _), aclosing(a.watch()) as changes
        ):  # fmt: skip
            nodes = await anext(changes)
            assert "a" not in nodes, "a node is there that has not joined"
            await a.join(A)
            while "a" not in nodes:
                before, nodes = nodes, await anext(changes)
                assert nodes != before, "told twice"
            try:
                async with asyncio.timeout(QUIET_S):
                    again = await anext(changes)
            except TimeoutError:
                return
            assert again != nodes, "told twice"

    async def a_watcher_that_comes_late_or_leaves_disturbs_no_other(self) -> None:
        """Each of several watchers sees the present nodes and what changes afterwards."""
        async with (
            asyncio.timeout(WAIT_S), self._open() as (a, _), aclosing(a.watch()) as first
        ):  # fmt: skip
            await anext(first)
            await a.join(A)
            assert await _seen(a, lambda nodes: nodes.get("a") == A)  # watches, and leaves
            await _until(first, lambda nodes: nodes.get("a") == A)
            await a.leave()
            await _until(first, lambda nodes: "a" not in nodes)


async def _seen(
    member: Membership, condition: Callable[[Mapping[str, NodeRecord]], bool]
) -> Mapping[str, NodeRecord]:
    """What a new watcher sees once a condition is met."""
    async with aclosing(member.watch()) as changes:
        return await _until(changes, condition)


async def _until(
    changes: AsyncGenerator[Mapping[str, NodeRecord], None],
    condition: Callable[[Mapping[str, NodeRecord]], bool],
) -> Mapping[str, NodeRecord]:
    """What a watcher sees once a condition is met."""
    while not condition(nodes := await anext(changes)):
        pass
    return nodes
