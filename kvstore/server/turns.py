"""Runs work for operators and followers on the loop that owns the state, in short turns.

A turn takes about a millisecond. Work is a generator. It runs on the loop, so it may read and
change the state. When it yields, the state may change, and everything it holds must be checked
again. All work together gets one turn at a time, followed by a pause of the same length for other
work of the loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from time import monotonic_ns, perf_counter
from typing import Any, Final, TypeVar

from kvstore.node.desk import Desk
from kvstore.protocol.errors import KVStoreError
from kvstore.server.refusal import Refusal

T = TypeVar("T")

Work = Generator[float | None, None, T]
"""Yields None to continue in its next turn, or seconds to wait."""

TURN_S: Final = 0.001
"""A turn ends with the first step that ends after this time."""


class Task:
    """Work in progress.

    Args:
        work: its steps.
        ended: called with its result or its refusal.
        name: what it does, in words for the log.
    """

    def __init__(self, work: Work[Any], ended: Callable[[Any], None], name: str = "") -> None:
        self.work = work
        self.ended = ended
        self.name = name


class Turns:
    """All work on one node.

    Args:
        desk: carries out the decisions made in a turn, at its end.
        name: whose they are; a long turn is called that, and by the work whose step was longest.
    """

    def __init__(self, desk: Desk, name: str = "an operator's request") -> None:
        self._desk, self._meter = desk, desk.node.pages.meter
        self._story = desk.node.pages.story
        self._name = name
        self._tasks: set[Task] = set()
        self._ready: deque[Task] = deque()
        #: Ends the pause after a turn.
        self._handle: asyncio.Handle | None = None
        self._taking = False

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Work[T], ended: Callable[[T | Refusal], None], name: str = "") -> Task:
        """Start work; exceptions other than refusals go to the loop's handler."""
        task = Task(work, ended, name)
        self._tasks.add(task)
        self._ready.append(task)
        self._go_on()
        return task

    def abandon(self, task: Task) -> None:
        """Cancel work whose client does not wait any more."""
        self._tasks.discard(task)
        task.work.close()

    def close(self) -> None:
        """Cancel all work."""
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
        """Run steps for one turn, then pause for the same time."""
        begun = perf_counter()
        end, now = begun + TURN_S, begun
        longest, what = 0.0, self._name
        while self._ready and now < end:
            task, before = self._ready.popleft(), now
            if task in self._tasks:
                self._step(task)
            now = perf_counter()
            if now - before > longest and task.name:
                longest, what = now - before, f"{self._name}: {task.name}"
        self._desk.flush()
        took = perf_counter() - begun
        self._meter.note_turn(round(took * 1e9), what)
        self._handle = asyncio.get_running_loop().call_later(took, self._rested)

    def _rested(self) -> None:
        self._handle = None
        self._go_on()

    def _step(self, task: Task) -> None:
        """Run one step; the desk carries out its effects later."""
        result: Any
        try:
            pause = self._desk.node.operate(lambda _table: next(task.work), monotonic_ns())
        except StopIteration as end:
            result = end.value
        except Refusal as refusal:
            result = refusal
        except KVStoreError as error:
            result = Refusal.of(error)
        except AssertionError as error:
            self._story.explain(error)
            raise
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
