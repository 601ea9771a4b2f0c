"""Whose messages are taken next, so that no client makes the others wait, however many it has open.

A connection's messages are taken at once while the loop has done little since it last looked at its
sockets. Otherwise the connection waits for its turn: processes follow each other, and so do the
connections of each, and after :data:`ROUND_S` the loop looks at its sockets again.
"""

import asyncio
from collections import deque
from time import monotonic
from typing import Final, Protocol

TURN_S: Final = 0.002
"""How long one connection's messages are taken before it is another's turn."""
ROUND_S: Final = 0.006
"""How long messages are taken before the loop does something else."""


class Taker(Protocol):
    """A connection with messages to take."""

    @property
    def process(self) -> int:
        """Whose it is: equal for all connections of one process."""

    def take(self, end_s: float) -> bool:
        """Take messages until then; whether there are more that may be taken."""


class Rounds:
    """All connections whose messages wait for their turn."""

    def __init__(self) -> None:
        #: Process → its connections; whose turn it is first.
        self._waiting: dict[int, deque[Taker]] = {}
        self._queued: set[Taker] = set()
        self._taken_s = 0.0
        self._called = False

    def want(self, taker: Taker) -> None:
        """A connection has messages that may be taken: now, or when it is its turn."""
        if taker in self._queued:
            return
        if self._waiting or self._taken_s >= ROUND_S:
            self._wait(taker)
        else:
            self._take(taker)
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
            taker = queue.popleft()
            self._queued.remove(taker)
            if queue:
                self._waiting[process] = queue  # behind all other processes
            self._take(taker)
        if self._waiting:
            self._call()
        else:
            self._taken_s = 0.0

    def _take(self, taker: Taker) -> None:
        start_s = monotonic()
        more = taker.take(start_s + TURN_S)
        self._taken_s += monotonic() - start_s
        if more:
            self._wait(taker)

    def _wait(self, taker: Taker) -> None:
        self._queued.add(taker)
        self._waiting.setdefault(taker.process, deque()).append(taker)
