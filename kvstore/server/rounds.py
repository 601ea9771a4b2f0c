"""Schedules the processing of messages, so that no client delays others.

Messages are processed at once if the loop has done little since it last polled its sockets.
Otherwise the connection waits for its turn: processes take turns, and so do the connections of each
process. After :data:`ROUND_S` the loop polls its sockets again.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

TURN_S: Final = 0.002
"""Maximum time for messages of one connection before another's turn."""
ROUND_S: Final = 0.006
"""Maximum time for messages before the loop polls its sockets."""


Take = Callable[[float], bool]
"""Processes messages of one connection until a time; returns whether there are more."""


class Rounds:
    """The connections that wait for their turn."""

    def __init__(self) -> None:
        #: Process → its connections; the next one first.
        self._waiting: dict[int, deque[Take]] = {}
        self._queued: set[Take] = set()
        self._taken_s = 0.0
        self._called = False

    def want(self, process: int, take: Take) -> None:
        """A connection has messages: process them now, or in its turn.

        Args:
            process: equal for all connections of one process.
            take: equal in each call for one connection; called once for all calls before.
        """
        if take in self._queued:
            return
        if self._waiting or self._taken_s >= ROUND_S:
            self._wait(process, take)
        else:
            self._take(process, take)
        self._call()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._called = False
        self._taken_s = 0.0
        while self._waiting and self._taken_s < ROUND_S:
            process = next(iter(self._waiting))
            queue = self._waiting.pop(process)
            take = queue.popleft()
            self._queued.remove(take)
            if queue:
                self._waiting[process] = queue  # behind all other processes
            self._take(process, take)
        if self._waiting:
            self._call()
        else:
            self._taken_s = 0.0

    def _take(self, process: int, take: Take) -> None:
        start_s = monotonic()
        more = take(start_s + TURN_S)
        self._taken_s += monotonic() - start_s
        if more:
            self._wait(process, take)

    def _wait(self, process: int, take: Take) -> None:
        self._queued.add(take)
        self._waiting.setdefault(process, deque()).append(take)
