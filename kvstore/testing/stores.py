"""A store of membership records in memory, which fails as it is told."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Final

from kvstore.cluster.store import CALL_S, LEASE_S
from kvstore.protocol.errors import InvalidArgument, PeerUnreachable, TransferTimeout

POLL_S: Final = 0.02
HISTORY_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class _Kept:
    """A record, and when its lease ends unless it is renewed."""

    value: bytes
    until_s: float


class MemoryRecords:
    """What several :class:`MemoryStore` share, with its faults.

    Args:
        lease_s: seconds after the last renewal in which a record is gone.
        clock: seconds.

    Attributes:
        away: calls fail at once.
        stopped: calls fail after :data:`~kvstore.cluster.store.CALL_S`.
        refuses: field of the file that the store does not take; empty = it takes all.
        lag: number of changes that watchers do not see yet, of the last :data:`HISTORY_MAX`.
        lies: records that watchers see in place of the true ones: name → value, None = none.
        calls: number of calls so far.
    """

    def __init__(
        self, lease_s: float = LEASE_S, clock: Callable[[], float] = monotonic
    ) -> None:  # fmt: skip
        self.lease_s = lease_s
        self.clock = clock
        self.away = False
        self.stopped = False
        self.refuses = ""
        self.lag = 0
        self.lies: dict[str, bytes | None] = {}
        self.calls = 0
        self.common = b""
        self._kept: dict[str, _Kept] = {}
        self._history: deque[dict[str, bytes]] = deque([{}], HISTORY_MAX)

    def records(self) -> dict[str, bytes]:
        """Those whose lease has not ended."""
        now_s = self.clock()
        self._kept = {name: one for name, one in self._kept.items() if one.until_s > now_s}
        records = {name: one.value for name, one in self._kept.items()}
        if records != self._history[-1]:
            self._history.append(records)
        return records

    def put(self, name: str, value: bytes) -> None:
        """Put a record, whatever is there."""
        self._kept[name] = _Kept(value, self.clock() + self.lease_s)
        self.records()

    def delete(self, name: str) -> None:
        """Delete a record."""
        self._kept.pop(name, None)
        self.records()

    def empty(self) -> None:
        """Delete everything."""
        self.common = b""
        self._kept.clear()
        self.records()

    def shown(self) -> dict[str, bytes]:
        """What watchers see."""
        self.records()
        shown = dict(self._history[max(0, len(self._history) - 1 - self.lag)])
        for name, value in self.lies.items():
            shown.pop(name, None)
            if value is not None:
                shown[name] = value
        return shown


class MemoryStore:
    """The :class:`~kvstore.cluster.store.RecordStore` of one node, in memory.

    Args:
        shared: the records of the cluster.

    Attributes:
        lease_s: seconds after the last renewal in which a record is gone.
    """

    def __init__(self, shared: MemoryRecords) -> None:
        self.lease_s = shared.lease_s
        self._shared = shared
        self._opened = False
        self._own: tuple[str, bytes] | None = None

    async def open(self) -> None:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        self._opened = True
        await self._call()

    async def close(self) -> None:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        self._opened = False

    async def settings(self, offered: bytes) -> bytes:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        await self._call()
        self._shared.common = self._shared.common or offered
        return self._shared.common

    async def claim(self, name: str, value: bytes, expected: bytes | None) -> bytes | None:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        await self._call()
        there = self._shared.records().get(name)
        if there != expected:
            return there or b""
        self._shared.put(name, value)
        self._own = (name, value)
        return None

    async def renew(self) -> bool:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        await self._call()
        if self._own is None or self._shared.records().get(self._own[0]) != self._own[1]:
            return False
        self._shared.put(*self._own)
        return True

    async def check(self) -> None:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        await self._call()

    async def withdraw(self, name: str, value: bytes) -> None:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        await self._call()
        if self._shared.records().get(name) == value:
            self._shared.delete(name)

    async def watch(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        """See :class:`~kvstore.cluster.store.RecordStore`."""
        last: dict[str, bytes] | None = None
        while True:
            await self._call()
            shown = self._shared.shown()
            if shown != last:
                last = shown
                yield shown
            await asyncio.sleep(POLL_S)

    async def _call(self) -> None:
        """Fail as it was asked.

        Raises:
            PeerUnreachable: the store is away, or is not open.
            TransferTimeout: it is stopped.
            InvalidArgument: it refuses a file.
        """
        self._shared.calls += 1
        if not self._opened:
            raise PeerUnreachable("the store is not open")
        if self._shared.stopped:
            await asyncio.sleep(CALL_S)
            raise TransferTimeout(f"the store did not answer within {CALL_S} s")
        if self._shared.away:
            raise PeerUnreachable("the store is away")
        if self._shared.refuses:
            raise InvalidArgument(self._shared.refuses, "the store does not take it")
