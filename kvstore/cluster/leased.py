"""The membership that is kept in a store outside of the nodes, under leases."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from time import monotonic
from typing import Any, Final, TypeVar

import msgspec

from kvstore.cluster.claiming import (
    AskThere,
    NameClaim,
    OwnRecord,
    Presence,
    PutRecord,
    RefuseName,
    TryLater,
)
from kvstore.cluster.records import (
    JoinStanding,
    NodeRecord,
    StandingState,
    differing_field,
    settings_of,
)
from kvstore.cluster.roster import Roster
from kvstore.cluster.store import RecordStore
from kvstore.protocol.errors import (
    InvalidArgument,
    PeerUnreachable,
    TransferError,
    printable,
    reason,
)

_T = TypeVar("_T")

BACKOFF_S: Final = (0.1, 5.0)
"""The first and the longest pause before the next attempt to reach a store that is away."""
STEADY_S: Final = 5.0
"""After a membership of this duration, the pause is the first one again."""
REFUSED_S: Final = 5.0
"""Pause after a refusal, whose cause an operator may have fixed."""
LATER_S = 0.5
"""Pause before the next attempt at a name whose node does not answer."""
LEAVE_S: Final = 1.0
"""Time limit of leaving."""
_RENEW: Final = 0.3
"""The lease is renewed each time this part of it is over."""
_ROUNDS_MAX: Final = 16
"""Attempts at a name whose record keeps changing."""

AskAlive = Callable[[NodeRecord], Awaitable[Presence]]
"""Asks at the endpoint of a record; takes at most 2 s."""


class _RefusedError(Exception):
    """This node may not join the cluster."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(why)
        self.field = field


class _LostError(Exception):
    """The own record or its lease is gone."""


class LeasedMembership:
    """The nodes of a cluster whose records are in a store.

    While the store is away, its last answer stays valid. A refused node knows no others.

    Args:
        store: not shared.
        alive: finds out whether the node of a record lives.

    Attributes:
        standing: whether this node is in the cluster, according to the store.
    """

    def __init__(self, store: RecordStore, alive: AskAlive) -> None:
        self.standing = JoinStanding()
        self._store = store
        self._alive = alive
        self._roster = Roster(store.lease_s)
        self._claim: NameClaim | None = None
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._joined_s = 0.0
        self._published: tuple[Mapping[str, NodeRecord], JoinStanding] = ({}, self.standing)
        self._news = asyncio.Event()

    async def join(self, record: NodeRecord) -> None:
        """Join the cluster as soon as the store permits; returns at once.

        Args:
            record: about this node; a later one replaces it.
        """
        if self._claim is None:
            self._claim = NameClaim(record)
            self._stand("joining")
        else:
            self._claim.change(record)
        self._idle.clear()
        self._changed.set()

    async def leave(self) -> None:
        """Withdraw the own record, and no other; returns within :data:`LEAVE_S`.

        :meth:`run` must be running.
        """
        self._claim = None
        self._changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._idle.wait()

    async def run(self) -> None:
        """Join, stay joined, or leave, as last requested, until cancelled."""
        try:
            while True:
                self._changed.clear()
                claim = self._claim
                if claim is None:
                    self._idle.set()
                    await self._changed.wait()
                    continue
                await first_of(self._hold(claim), self._changed.wait())
                if self._claim is not claim:
                    await self._withdraw(claim)
        finally:
            await self._store.close()

    async def changes(self) -> AsyncGenerator[tuple[Mapping[str, NodeRecord], JoinStanding], None]:
        """All nodes by name and the standing: at once, and again after every change."""
        last = None
        while True:
            while last is not None and self._published == last:
                await self._news.wait()
            last = self._published
            yield last

    async def watch(self) -> AsyncGenerator[Mapping[str, NodeRecord], None]:
        """See :meth:`kvstore.cluster.membership.Membership.watch`."""
        last = None
        async with aclosing(self.changes()) as changes:
            async for nodes, _ in changes:
                if nodes != last:
                    last = nodes
                    yield nodes

    async def _hold(self, claim: NameClaim) -> None:
        """Stay a member, even if the store fails."""
        pause_s, longest_s = BACKOFF_S
        while True:
            self._joined_s = 0.0
            field = ""
            try:
                await self._member(claim)
            except _RefusedError as refusal:
                self._roster.clear()
                self._stand("refused", refusal.field, str(refusal))
                await self._store.close()
                await asyncio.sleep(REFUSED_S)
                continue
            except _LostError as error:
                self._roster.doubt()
                self._stand("joining", why=str(error))
            except (TransferError, InvalidArgument) as error:
                if isinstance(error, InvalidArgument):
                    field = error.field
                self._roster.doubt()
                self._stand("away", field, reason(error))
            await self._store.close()
            if self._joined_s and monotonic() - self._joined_s >= STEADY_S:
                pause_s = BACKOFF_S[0]
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def _member(self, claim: NameClaim) -> None:
        """Join, and stay a member until that ends.

        Raises:
            TransferError: the store is away.
            InvalidArgument: the store rejects this node's credentials.
            _RefusedError: the cluster has another scheme, or another node of this name.
            _LostError: the own record is gone.
        """
        await self._store.open()
        own = settings_of(claim.record)
        differs = differing_field(own, await self._store.settings(msgspec.json.encode(own)))
        if differs is not None:
            raise _RefusedError(*differs)
        await self._take(claim)
        self._joined_s = monotonic()
        self._roster.trust(self._joined_s)
        await first_of(self._renew(), self._follow(claim))

    async def _take(self, claim: NameClaim) -> None:
        """Put the own record under its name."""
        expected: bytes | None = None
        rounds = 0
        while rounds < _ROUNDS_MAX:
            rounds += 1
            found = await self._put(claim, expected)
            if found is None:
                return
            step = claim.there(found)
            if isinstance(step, AskThere):
                step = claim.answered(found, await self._alive(step.record))
            expected = None
            match step:
                case PutRecord(expected=expected):
                    pass
                case RefuseName(why=why):
                    raise _RefusedError("name", why)
                case TryLater(why=why):
                    self._stand("joining", "name", why)
                    await asyncio.sleep(LATER_S)
                    rounds = 0  # it is looked at until its lease has run out
        raise PeerUnreachable("the record of this node's name is changed by others all the time")

    async def _put(self, claim: NameClaim, expected: bytes | None) -> bytes | None:
        """Ask the store for the name; if cancelled, wait for its answer first.

        Otherwise the record could arrive after it was withdrawn.
        """
        value = claim.value
        claim.asked(value)
        found = await ended(self._store.claim(claim.record.name, value, expected))
        if found is None:
            claim.confirmed(value)
        return found

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW * self._store.lease_s)
            if not await self._store.renew():
                raise _LostError("the lease has run out")
            self._roster.expire(monotonic())
            self._tell()

    async def _follow(self, claim: NameClaim) -> None:
        async with aclosing(self._store.watch()) as changes:
            async for records in changes:
                own = claim.seen(records.get(claim.record.name))
                if isinstance(own, RefuseName):
                    raise _RefusedError("name", own.why)
                if own is OwnRecord.LOST:
                    raise _LostError("the record of this node has been deleted")
                self._roster.tell(records, monotonic())
                self._stand("joined")

    async def _withdraw(self, claim: NameClaim) -> None:
        """Withdraw all values that this process has put, or leave that to the lease."""
        with contextlib.suppress(TransferError, InvalidArgument):
            try:
                await self._delete(claim)
            except PeerUnreachable:  # it may just have been closed between two attempts
                await self._store.open()
                await self._delete(claim)
        await self._store.close()
        self._roster.clear()
        self._stand("joining")

    async def _delete(self, claim: NameClaim) -> None:
        for value in reversed(claim.put):
            await self._store.withdraw(claim.record.name, value)

    def _stand(self, state: StandingState, field: str = "", why: str = "") -> None:
        """Change the standing, and report it."""
        self.standing = JoinStanding(state, field, printable(why), self._roster.unreadable)
        self._tell()

    def _tell(self) -> None:
        published = (dict(self._roster.nodes), self.standing)
        if published != self._published:
            self._published = published
            news, self._news = self._news, asyncio.Event()
            news.set()


async def ended(call: Coroutine[Any, Any, _T]) -> _T:
    """The answer to a call, which is not interrupted if this is cancelled once."""
    task = asyncio.create_task(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        raise


async def first_of(*cases: Coroutine[Any, Any, object]) -> None:
    """Run several until one of them ends; raises its error."""
    tasks = [asyncio.create_task(case) for case in cases]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
