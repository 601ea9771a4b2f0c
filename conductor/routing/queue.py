"""The rules of the waiting queue: bounded, in order of arrival.

The only place that assigns engines.

Assigned requests count as in flight at the engine until they are released, so an engine never has
more than ``max_running`` requests from us. A request that failed at an engine returns with its old
number, so it is first in the queue.

Pure: the caller passes the time, and waiting is implemented elsewhere.
"""

import bisect
import math
from collections import Counter
from typing import Final

from conductor.routing.engines import EngineRegistry
from conductor.routing.policy import (
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
    """The request is rejected; the client may retry after ``retry_after_s``."""

    def __init__(self, status: int, code: str, reason: str, retry_after_s: int) -> None:
        super().__init__(reason)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class QueueRules:
    """The waiting requests, and the requests in flight at each engine."""

    def __init__(
        self,
        registry: EngineRegistry,
        scheduler: Scheduler,
        prefixes: Prefixes,
        *,
        waiting_max: int,
    ) -> None:
        """Start empty.

        Args:
            registry: the engines.
            scheduler: makes the decisions.
            prefixes: called by the scheduler, at most once per request and call.
            waiting_max: maximum waiting requests; retried requests may exceed it.
        """
        self._registry = registry
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._waiting_max = waiting_max
        self._waiting: list[Waiting] = []  # by number
        self._in_flight: Counter[str] = Counter()
        self._last_assigned: dict[str, int] = {}
        self._assigned = 0
        self._released_at: float | None = None
        self._pace_s = 1.0
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def in_flight(self, engine_id: str) -> int:
        """Requests in flight at an engine."""
        return self._in_flight[engine_id]

    @property
    def requests_max(self) -> int:
        """Maximum requests in total: waiting and in flight at engines."""
        return self._waiting_max + sum(engine.info.max_running for engine in self._registry)

    @property
    def retry_after_s(self) -> int:
        """Estimated seconds until the present queue is served, 1 to 60."""
        return min(_RETRY_AFTER_S_MAX, max(1, math.ceil(len(self._waiting) * self._pace_s)))

    @property
    def first_deadline(self) -> float | None:
        """The earliest deadline of waiting requests; None if none wait."""
        return min((waiting.deadline for waiting in self._waiting), default=None)

    def add(self, waiting: Waiting, *, again: bool = False) -> None:
        """Add a request.

        Args:
            waiting: the request, with a new number.
            again: it failed at an engine; do not reject it because of a full queue.

        Raises:
            RejectedError: the queue is full or closed.
        """
        if self._closed:
            raise closing()
        if len(self._waiting) >= self._waiting_max and not again:
            reason = f"{len(self._waiting)} requests are waiting already"
            raise RejectedError(429, "queue_full", reason, self.retry_after_s)
        bisect.insort(self._waiting, waiting, key=lambda one: one.number)

    def remove(self, number: int) -> None:
        """Remove a request whose client has disconnected."""
        self._waiting = [waiting for waiting in self._waiting if waiting.number != number]

    def schedule(self, now: float) -> list[Assign | Reject]:
        """Decide on all waiting requests; returns the decisions that end a wait."""
        if not self._waiting:
            return []
        decisions = self._scheduler.schedule(self.view(), self._waiting, now)
        made: list[Assign | Reject] = []
        held: list[Waiting] = []
        for waiting, decision in zip(self._waiting, decisions, strict=True):
            assert decision.request == waiting.number
            match decision:
                case Hold():
                    held.append(waiting)
                case Assign():
                    self._give(decision)
                    made.append(decision)
                case Reject():
                    made.append(decision)
        self._waiting = held
        return made

    def _give(self, assign: Assign) -> None:
        self._assigned += 1
        for engine_id in {assign.prefill, assign.decode}:
            self._in_flight[engine_id] += 1
            self._last_assigned[engine_id] = self._assigned

    def released(self, engine_id: str, now: float) -> None:
        """A request at an engine has ended."""
        self._in_flight[engine_id] -= 1
        assert self._in_flight[engine_id] >= 0, engine_id
        if not self._in_flight[engine_id]:
            del self._in_flight[engine_id]
        if self._released_at is not None:
            self._pace_s += _PACE_WEIGHT * (now - self._released_at - self._pace_s)
        self._released_at = now

    def forget(self, engine_id: str) -> None:
        """An engine was removed; its requests in flight count until they are released."""
        self._last_assigned.pop(engine_id, None)

    def view(self) -> View:
        """The view for the scheduler."""
        engines = [
            EngineView(
                id=engine.info.id,
                model=engine.info.model,
                adapters=engine.info.adapters,
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

    def close(self) -> None:
        """Empty the queue and accept no more requests."""
        self._closed = True
        self._waiting.clear()

    def check(self) -> None:
        """Assert the invariants."""
        numbers = [waiting.number for waiting in self._waiting]
        assert numbers == sorted(set(numbers))
        assert all(count > 0 for count in self._in_flight.values())


def closing() -> RejectedError:
    """The rejection after the queue was closed."""
    return RejectedError(503, "shutting_down", "the Conductor is shutting down", 1)
