"""Schedules the processing of messages, so that no client delays others.

Messages are processed at once if the loop has done little since it last polled its sockets.
Otherwise the connection waits for its turn: processes take turns, and so do the connections of each
process. A connection whose last turn was long waits for its turn in a line of its own, and the loop
polls its sockets after each such turn: a lookup comes before puts that were sent earlier.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

TURN_S: Final = 0.0005
"""A connection's turn ends with the first message that ends after this time: of a long put each
message has a turn of its own."""
ROUND_S: Final = 0.006
"""Maximum time for short turns before the loop polls its sockets."""
LONG_S: Final = 0.0005
"""A connection whose last turn took longer is expected to take a long one again."""
POLL_S: Final = 0.0005
"""After long turns for this time the loop polls its sockets."""


Take = Callable[[float], bool]
"""Processes messages of one connection until a time; returns whether there are more."""


class TurnQueue:
    """Connections that wait: processes take turns, and so do the connections of each process."""

    def __init__(self) -> None:
        #: Process → its connections; the next one first.
        self._waiting: dict[int, deque[Take]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, process: int, take: Take) -> None:
        """A connection waits, behind the others of its process."""
        self._waiting.setdefault(process, deque()).append(take)

    def next(self) -> tuple[int, Take]:
        """Take out the connection whose turn it is; its process goes behind all others."""
        process = next(iter(self._waiting))
        queue = self._waiting.pop(process)
        take = queue.popleft()
        if queue:
            self._waiting[process] = queue
        return process, take


class Rounds:
    """The connections that wait for their turn."""

    def __init__(self) -> None:
        self._short, self._long = TurnQueue(), TurnQueue()
        self._queued: set[Take] = set()
        self._taken_s = 0.0
        self._called = False

    def want(self, process: int, take: Take, *, long: bool = False) -> None:
        """A connection has messages: process them now, or in its turn.

        Args:
            process: equal for all connections of one process.
            take: equal in each call for one connection; called once for all calls before.
            long: its turn is expected to be long: others come first.
        """
        if take in self._queued:
            return
        if long:
            self._wait(self._long, process, take)
        elif self._short or self._taken_s >= ROUND_S:
            self._wait(self._short, process, take)
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
        self._take_from(self._short, ROUND_S)
        self._take_from(self._long, self._taken_s + POLL_S)
        if self._short or self._long:
            self._call()
        else:
            self._taken_s = 0.0

    def _take_from(self, line: TurnQueue, until_s: float) -> None:
        while line and self._taken_s < until_s:
            process, take = line.next()
            self._queued.remove(take)
            self._take(process, take)

    def _take(self, process: int, take: Take) -> None:
        start_s = monotonic()
        more = take(start_s + TURN_S)
        self._taken_s += monotonic() - start_s
        if more:
            self._wait(self._long, process, take)

    def _wait(self, line: TurnQueue, process: int, take: Take) -> None:
        self._queued.add(take)
        line.add(process, take)
