"""Whose messages are taken next, so that no client makes the others wait, however many it has open.

A connection's messages are taken at once while the loop has done little since it last looked at its
sockets. Otherwise the connection waits for its turn: processes follow each other, and so do the
connections of each, and after :data:`ROUND_S` the loop looks at its sockets again.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

TURN_S: Final = 0.002
"""How long one connection's messages are taken before it is another's turn."""
ROUND_S: Final = 0.006
"""How long messages are taken before the loop does something else."""


Take = Callable[[float], bool]
"""Takes messages of one connection until then; whether there are more that may be taken."""


class Rounds:
    """All connections whose messages wait for their turn."""

    def __init__(self) -> None:
        #: Process → its connections; whose turn it is first.
        self._waiting: dict[int, deque[Take]] = {}
        self._queued: set[Take] = set()
        self._taken_s = 0.0
        self._called = False

    def want(self, process: int, take: Take) -> None:
        """A connection has messages that may be taken: now, or when it is its turn.

        Args:
            process: equal for all connections of one process.
            take: equal at each call for one connection; it is called once for all calls before.
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
