"""The waiting queue: bounded, in order of arrival, and the only place where engines are given out.

A request asks with :meth:`RequestQueue.assign` and waits; :meth:`RequestQueue.pump` runs the
scheduler over everything that waits, after each arrival, completion, health change and KV event.
What it assigns counts as in flight at the engine until the :class:`Lease` gives it back, so an
engine never has more than its ``max_running`` from us. A request that an engine failed comes back
with its old number and so stands first.

One event loop owns all of it; nothing here is locked.
"""

import asyncio
import bisect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from conductor.engines import EngineRegistry
from conductor.policy import (
    Assign,
    EngineView,
    Hold,
    Prefixes,
    Reject,
    Scheduler,
    View,
    Waiting,
)

_RETRY_AFTER_S_MAX: Final = 60
_PACE_WEIGHT: Final = 0.1
"""Weight of the newest completion in the moving average of the time between completions."""


class RejectedError(Exception):
    """The request is refused; the client may come back after ``retry_after_s``."""

    def __init__(self, status: int, code: str, reason: str, retry_after_s: int) -> None:
        super().__init__(reason)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class Lease:
    """Room at the engines of one assignment; given back once, at the latest when left."""

    def __init__(self, queue: "RequestQueue", assign: Assign) -> None:
        self.assign = assign
        self._queue = queue
        self._held = {assign.prefill, assign.decode}

    def release(self, engine_id: str) -> None:
        """Give one engine's room back; a second call does nothing."""
        if engine_id in self._held:
            self._held.remove(engine_id)
            self._queue.released(engine_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for engine_id in tuple(self._held):
            self.release(engine_id)


@dataclass(slots=True, eq=False)
class _Entry:
    waiting: Waiting
    future: asyncio.Future[Assign]


class RequestQueue:
    """All and only the requests that wait for engines, and what is in flight at each engine."""

    def __init__(
        self,
        registry: EngineRegistry,
        scheduler: Scheduler,
        prefixes: Prefixes,
        *,
        waiting_max: int,
        clock: Callable[[], float],
    ) -> None:
        """Start empty.

        Args:
            registry: read at every pump.
            scheduler: decides.
            prefixes: asked by the scheduler, at most once a request and pump.
            waiting_max: bound for new requests; what an engine failed comes back beyond it.
            clock: seconds, monotonic.
        """
        self._registry = registry
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._waiting_max = waiting_max
        self._clock = clock
        self._entries: list[_Entry] = []  # by number
        self._in_flight: Counter[str] = Counter()
        self._last_assigned: dict[str, int] = {}
        self._assigned = 0
        self._timer: asyncio.TimerHandle | None = None
        self._released_at: float | None = None
        self._pace_s = 1.0
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    def in_flight(self, engine_id: str) -> int:
        """Requests at that engine."""
        return self._in_flight[engine_id]

    @property
    def requests_max(self) -> int:
        """Requests that may be here in all: waiting, or as many as engines may have in flight."""
        return self._waiting_max + sum(engine.info.max_running for engine in self._registry)

    @property
    def retry_after_s(self) -> int:
        """When the queue as it is will probably have been served, seconds, 1 to 60."""
        return min(_RETRY_AFTER_S_MAX, max(1, math.ceil(len(self._entries) * self._pace_s)))

    async def assign(self, waiting: Waiting, *, again: bool = False) -> Lease:
        """Wait for engines.

        Args:
            waiting: its deadline bounds the wait.
            again: an engine failed it; it is not refused for a full queue.

        Raises:
            RejectedError: the queue is full or closed, no engine is left, or it waited too long.
        """
        if self._closed:
            raise RejectedError(503, "shutting_down", "the Conductor is shutting down", 1)
        if len(self._entries) >= self._waiting_max and not again:
            reason = f"{len(self._entries)} requests are waiting already"
            raise RejectedError(429, "queue_full", reason, self.retry_after_s)
        entry = _Entry(waiting, asyncio.get_running_loop().create_future())
        bisect.insort(self._entries, entry, key=lambda e: e.waiting.number)
        self.pump()
        try:
            return Lease(self, await entry.future)
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise

    def _withdraw(self, entry: _Entry) -> None:
        """The client has gone: leave the queue, or give back what was just assigned."""
        if entry in self._entries:
            self._entries.remove(entry)
        elif entry.future.done() and not entry.future.cancelled() and not entry.future.exception():
            with Lease(self, entry.future.result()):
                pass

    def released(self, engine_id: str) -> None:
        """A request has left an engine."""
        self._in_flight[engine_id] -= 1
        assert self._in_flight[engine_id] >= 0, engine_id
        if not self._in_flight[engine_id]:
            del self._in_flight[engine_id]
        now = self._clock()
        if self._released_at is not None:
            self._pace_s += _PACE_WEIGHT * (now - self._released_at - self._pace_s)
        self._released_at = now
        self.pump()

    def forget(self, engine_id: str) -> None:
        """An engine was removed; what is in flight there still counts until it is released."""
        self._last_assigned.pop(engine_id, None)

    def view(self) -> View:
        """What the scheduler may know."""
        engines = [
            EngineView(
                id=engine.info.id,
                model=engine.info.model,
                role=engine.info.role,
                health=engine.health.state,
                in_flight=self._in_flight[engine.info.id],
                max_running=engine.info.max_running,
                last_assigned=self._last_assigned.get(engine.info.id, 0),
            )
            for engine in self._registry
        ]
        return View(
            engines=engines,
            assigned=self._assigned,
            prefixes=self._prefixes,
            retry_after_s=self.retry_after_s,
        )

    def pump(self) -> None:
        """Schedule what waits; never waits itself."""
        self._entries = [e for e in self._entries if not e.future.done()]
        if self._entries:
            waiting = [entry.waiting for entry in self._entries]
            decisions = self._scheduler.schedule(self.view(), waiting, self._clock())
            held: list[_Entry] = []
            for entry, decision in zip(self._entries, decisions, strict=True):
                assert decision.request == entry.waiting.number
                match decision:
                    case Assign():
                        self._give(entry, decision)
                    case Reject(reason=reason, retry_after_s=retry_after_s, code=code):
                        error = RejectedError(503, code, reason, retry_after_s)
                        entry.future.set_exception(error)
                    case Hold():
                        held.append(entry)
            self._entries = held
        self._set_timer()

    def _give(self, entry: _Entry, assign: Assign) -> None:
        self._assigned += 1
        for engine_id in {assign.prefill, assign.decode}:
            self._in_flight[engine_id] += 1
            self._last_assigned[engine_id] = self._assigned
        entry.future.set_result(assign)

    def _set_timer(self) -> None:
        """Pump again when the first deadline passes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._entries:
            wait_s = min(entry.waiting.deadline for entry in self._entries) - self._clock()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), self.pump)

    def close(self) -> None:
        """Refuse what waits and what comes."""
        self._closed = True
        for entry in self._entries:
            if not entry.future.done():
                error = RejectedError(503, "shutting_down", "the Conductor is shutting down", 1)
                entry.future.set_exception(error)
        self._entries.clear()
        self._set_timer()

    def check(self) -> None:
        """Assert the invariants."""
        numbers = [entry.waiting.number for entry in self._entries]
        assert numbers == sorted(set(numbers))
        assert all(count > 0 for count in self._in_flight.values())
