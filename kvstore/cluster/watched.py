"""Watches the nodes of a cluster in a store, for a process that is not a node (the Conductor)."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from time import monotonic
from typing import Final, Literal

import msgspec

from kvstore.cluster.leased import BACKOFF_S, STEADY_S, first_of
from kvstore.cluster.records import NodeRecord
from kvstore.cluster.roster import Roster
from kvstore.cluster.store import RecordStore
from kvstore.protocol.errors import InvalidArgument, TransferError, printable, reason

_CHECK: Final = 0.3
"""The store is checked each time this part of a lease is over."""

WatchState = Literal["connecting", "current", "away"]


class WatchStanding(msgspec.Struct, frozen=True):
    """Whether the known nodes of a cluster are current.

    Attributes:
        state: ``connecting`` = nothing was read yet; ``current``; ``away`` = the store does not
            serve, and its last answer stays valid.
        field: in the state ``away`` the file that the store rejects: ``login``, ``authority`` and
            so on; empty = another reason.
        why: description, possibly text of others.
        unreadable: number of records that cannot be read; they are left out.
    """

    state: WatchState = "connecting"
    field: str = ""
    why: str = ""
    unreadable: int = 0


class WatchedMembership:
    """Reads the records of a cluster, and writes nothing.

    While the store is away, its last answer stays valid. When it is back, nodes that have not
    registered again within the time of a lease are removed.

    Args:
        store: not shared.
        changed: called when the nodes or the standing have changed.

    Attributes:
        nodes: by name.
        standing: whether they are current.
    """

    def __init__(self, store: RecordStore, changed: Callable[[], None]) -> None:
        self.nodes: Mapping[str, NodeRecord] = {}
        self.standing = WatchStanding()
        self._store = store
        self._changed = changed
        self._roster = Roster(store.lease_s)

    async def run(self) -> None:
        """Read until cancelled, even if the store fails."""
        pause_s, longest_s = BACKOFF_S
        try:
            while True:
                began_s, field = monotonic(), ""
                try:
                    await self._store.open()
                    await first_of(self._follow(), self._check())
                except (TransferError, InvalidArgument) as error:
                    if isinstance(error, InvalidArgument):
                        field = error.field
                    self._roster.doubt()
                    self._tell("away", field, reason(error))
                await self._store.close()
                if monotonic() - began_s >= STEADY_S:
                    pause_s = BACKOFF_S[0]
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        finally:
            await self._store.close()

    async def _follow(self) -> None:
        """Process each change.

        Raises:
            TransferError: the store is away.
            InvalidArgument: it rejects the credentials of this process.
        """
        async with aclosing(self._store.watch()) as changes:
            first = True
            async for records in changes:
                if first:
                    self._roster.trust(monotonic())
                    first = False
                self._roster.tell(records, monotonic())
                self._tell("current")

    async def _check(self) -> None:
        """Notice a suspended store, and nodes that have not registered again at one that was away.

        Raises:
            TransferError, InvalidArgument: as of :meth:`_follow`.
        """
        while True:
            await asyncio.sleep(_CHECK * self._store.lease_s)
            await self._store.check()
            self._roster.expire(monotonic())
            self._tell(self.standing.state, self.standing.field, self.standing.why)

    def _tell(self, state: WatchState, field: str = "", why: str = "") -> None:
        nodes = dict(self._roster.nodes)
        standing = WatchStanding(state, field, printable(why), self._roster.unreadable)
        if nodes != self.nodes or standing != self.standing:
            self.nodes, self.standing = nodes, standing
            self._changed()
