"""Requests at engines that did not come through this Conductor. Pure.

Engines tell how many requests they run, and how many wait for that. What is ours of these is known;
the rest is of others: further Conductors, or clients that ask the engine themselves. Nothing else
is known of them, so they count as requests of usual size.
"""

from typing import Final, NamedTuple

TOLD_MAX: Final = 1_000_000
"""Requests that an engine is believed to have; it may say any number."""
USUAL_TOKENS: Final = 1_024
"""Of a request of which nothing is known but that it is there."""


class OtherRequests(NamedTuple):
    """Requests at one engine that this Conductor did not send.

    Fractions, because engines do not report whose requests wait.

    Attributes:
        running: that it computes.
        waiting: that it has not begun.
    """

    running: float
    waiting: float


NOBODY: Final = OtherRequests(0.0, 0.0)


class EngineOthers:
    """The requests of others at all engines that tell.

    Attributes:
        changes: counts what may change :meth:`of`.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._by_engine: dict[str, OtherRequests] = {}

    def tell(self, engine_id: str, running: float, waiting: float, ours: int) -> None:
        """An engine tells what it has.

        Args:
            engine_id: the engine.
            running: requests that it computes.
            waiting: requests that it has not begun.
            ours: how many of both may be ours.
        """
        running = min(max(running, 0.0), TOLD_MAX)
        waiting = min(max(waiting, 0.0), TOLD_MAX)
        every = running + waiting
        part = max(0.0, every - ours) / every if every else 0.0
        self._set(engine_id, OtherRequests(part * running, part * waiting))

    def forget(self, engine_id: str) -> None:
        """An engine does not tell, or was removed: nobody else is thought to use it."""
        if engine_id in self._by_engine:
            del self._by_engine[engine_id]
            self.changes += 1

    def of(self, engine_id: str) -> OtherRequests:
        """Those at one engine; :data:`NOBODY` also if it does not tell."""
        return self._by_engine.get(engine_id, NOBODY)

    def reported(self, engine_id: str) -> OtherRequests | None:
        """Those at one engine; None = it does not tell."""
        return self._by_engine.get(engine_id)

    def _set(self, engine_id: str, others: OtherRequests) -> None:
        if self._by_engine.get(engine_id) != others:
            self._by_engine[engine_id] = others
            self.changes += 1
