"""Turns on the loop that owns the state: operators' work, in pieces of about a millisecond.

Work is a generator. It runs on the loop, so it may look at the state and change it; where it gives
the turn away anything may happen to the state, and what it holds on to must be looked at anew. All
work together gets one turn at a time, and the loop has as long for everybody else before the next.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from time import monotonic_ns, perf_counter
from typing import Any, Final, TypeVar

from kvstore.errors import KVStoreError
from kvstore.node.desk import Desk
from kvstore.server.refusal import Refusal

T = TypeVar("T")

Work = Generator[float | None, None, T]
"""Gives None where it may go on at its next turn, or the seconds that it waits for something."""

TURN_S: Final = 0.001
"""A turn ends with the first step that ends later."""


class Task:
    """Work that was begun.

    Args:
        work: its steps.
        ended: is called with what it gave or why it was refused.
    """

    def __init__(self, work: Work[Any], ended: Callable[[Any], None]) -> None:
        self.work = work
        self.ended = ended


class Turns:
    """All work on one node, each in its turn.

    Args:
        desk: carries out, when a turn ends, what it did to the state.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._tasks: set[Task] = set()
        self._ready: deque[Task] = deque()
        #: Ends the pause after a turn.
        self._handle: asyncio.Handle | None = None
        self._taking = False

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Work[T], ended: Callable[[T | Refusal], None]) -> Task:
        """Do some work; what else than a refusal it raises, goes to the loop's handler."""
        task = Task(work, ended)
        self._tasks.add(task)
        self._ready.append(task)
        self._go_on()
        return task

    def abandon(self, task: Task) -> None:
        """Nobody waits for this any more: it takes no further turn."""
        self._tasks.discard(task)
        task.work.close()

    def close(self) -> None:
        """End all work where it is."""
        for task in list(self._tasks):
            self.abandon(task)
        if self._handle is not None:
            self._handle.cancel()

    def _go_on(self) -> None:
        if self._ready and self._handle is None and not self._taking:
            self._taking = True
            self._turn()
            self._taking = False

    def _turn(self) -> None:
        """Take steps for a while, then leave the loop to the others for as long."""
        begun = perf_counter()
        end, now = begun + TURN_S, begun
        while self._ready and now < end:
            task = self._ready.popleft()
            if task in self._tasks:
                self._step(task)
            now = perf_counter()
        self._desk.flush()
        took = perf_counter() - begun
        self._desk.note_turn(round(took * 1e9), "what an operator asked for")
        self._handle = asyncio.get_running_loop().call_later(took, self._rested)

    def _rested(self) -> None:
        self._handle = None
        self._go_on()

    def _step(self, task: Task) -> None:
        """One step; the effects on the state are handed on by the node."""
        result: Any
        try:
            pause = self._desk.node.operate(lambda _table: next(task.work), monotonic_ns())
        except StopIteration as end:
            result = end.value
        except Refusal as refusal:
            result = refusal
        except KVStoreError as error:
            result = Refusal.of(error)
        else:
            if pause is None:
                self._ready.append(task)
            else:
                asyncio.get_running_loop().call_later(pause, self._wake, task)
            return
        self._tasks.discard(task)
        task.ended(result)

    def _wake(self, task: Task) -> None:
        if task in self._tasks:
            self._ready.append(task)
            self._go_on()
