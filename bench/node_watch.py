"""How long the turns of a loop are, and how long Python's collector stops it.

A turn is what runs at one go: nobody else's message is looked at before it ends. It is measured in
CPU time of its thread, with the time that passed beside it; a collection that falls into it counts
as the collector's and not as its own.
"""

import asyncio
import gc
from collections.abc import Callable
from contextvars import Context
from functools import partial
from time import perf_counter, thread_time
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TURN_S_MAX: Final = 0.005
"""No turn is to be longer."""


class Span(NamedTuple):
    """How long something took.

    Attributes:
        cpu_s: the thread had a core.
        wall_s: passed.
        name: what it was.
    """

    cpu_s: float = 0.0
    wall_s: float = 0.0
    name: str = ""


class Collector:
    """What Python's cyclic collector does while this is entered; it changes nothing of that.

    Attributes:
        longest: longest pause, called ``generation N``.
        pauses: number of pauses.
        over: number of pauses that were longer than a turn may be.
        total: total of all pauses.
        found: objects that only the collector could free.
    """

    def __init__(self) -> None:
        self.longest = self.total = Span()
        self.pauses = self.over = self.found = 0
        self._cpu_s = self._wall_s = 0.0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._collects)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gc.callbacks.remove(self._collects)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._cpu_s, self._wall_s = thread_time(), perf_counter()
            return
        cpu_s, wall_s = thread_time() - self._cpu_s, perf_counter() - self._wall_s
        pause = Span(cpu_s, wall_s, f"generation {info['generation']}")
        self.pauses += 1
        self.over += cpu_s > TURN_S_MAX
        self.found += info["collected"]
        self.longest = max(self.longest, pause)
        self.total = Span(self.total.cpu_s + cpu_s, self.total.wall_s + wall_s)


class Watch:
    """Takes turns and keeps the longest.

    Args:
        collector: whose time is not a turn's own.

    Attributes:
        longest: longest turn since :meth:`begin`.
        turns: number of turns since :meth:`begin`.
        over: number of these turns that were longer than :data:`TURN_S_MAX`.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self.begin()

    def begin(self) -> None:
        """Forget what was."""
        self.longest = Span()
        self.turns = self.over = 0

    def __call__(self, name: str, call: Callable[..., T], *arguments: Any) -> T:
        """Take a turn; ``name`` says what it is."""
        collected = self._collector.total
        wall_s, cpu_s = perf_counter(), thread_time()
        try:
            return call(*arguments)
        finally:
            cpu_s, wall_s = thread_time() - cpu_s, perf_counter() - wall_s
            since = self._collector.total
            cpu_s -= since.cpu_s - collected.cpu_s
            wall_s -= since.wall_s - collected.wall_s
            self.turns += 1
            self.over += cpu_s > TURN_S_MAX
            if cpu_s > self.longest.cpu_s:
                self.longest = Span(cpu_s, wall_s, name)


class WatchedLoop(asyncio.SelectorEventLoop):
    """A loop each of whose callbacks is a turn that ``watch`` takes."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        #: What the callbacks are called that are asked for now.
        self.name = ""
        super().__init__()

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See :class:`asyncio.loop`."""
        return super().call_soon(partial(self._watch, self.name, callback, *args), context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See :class:`asyncio.loop`."""
        turn = partial(self._watch, self.name, callback, *args)
        return super().call_soon_threadsafe(turn, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:  # fmt: skip
        """See :class:`asyncio.loop`."""
        turn = partial(self._watch, self.name, callback, *args)
        return super().call_at(when, turn, context=context)
