"""The queue in which requests wait for engines.

A request calls :meth:`RequestQueue.assign` and waits. :meth:`RequestQueue.pump` runs the scheduler
for all waiting requests, after each arrival, completion, health change and KV event. A
:class:`Lease` releases the assigned engines.

One event loop owns everything; there are no locks.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from conductor.routing.policy import Assign, Waiting
from conductor.routing.queue import QueueRules, RejectedError, closing


class Lease:
    """The capacity of one assignment; released once, at the latest when the context is left."""

    def __init__(self, queue: "RequestQueue", assign: Assign) -> None:
        self.assign = assign
        self._queue = queue
        self._held = {assign.prefill, assign.decode}

    def release(self, engine_id: str) -> None:
        """Release one engine; a second call does nothing."""
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


class RequestQueue:
    """The waiting requests as futures.

    Attributes:
        rules: the waiting requests and those in flight.
    """

    def __init__(self, rules: QueueRules, clock: Callable[[], float]) -> None:
        """Start empty.

        Args:
            rules: the rules; used only by this queue.
            clock: seconds, monotonic.
        """
        self.rules = rules
        self._clock = clock
        self._answers: dict[int, asyncio.Future[Assign]] = {}  # by number
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.rules)

    async def assign(self, waiting: Waiting, *, again: bool = False) -> Lease:
        """Wait for engines.

        Args:
            waiting: the request; its deadline limits the wait.
            again: it failed at an engine; do not reject it because of a full queue.

        Raises:
            RejectedError: the queue is full or closed, no engine is left, or it waited too long.
        """
        self.rules.add(waiting, again=again)
        answer = asyncio.get_running_loop().create_future()
        self._answers[waiting.number] = answer
        self.pump()
        try:
            return Lease(self, await answer)
        except asyncio.CancelledError:
            self._withdraw(waiting.number, answer)
            raise

    def _withdraw(self, number: int, answer: asyncio.Future[Assign]) -> None:
        """The client disconnected: leave the queue, or release the assignment."""
        if self._answers.get(number) is answer:
            self._leave(number)
        elif answer.done() and not answer.cancelled() and not answer.exception():
            with Lease(self, answer.result()):
                pass

    def _leave(self, number: int) -> None:
        del self._answers[number]
        self.rules.remove(number)

    def released(self, engine_id: str) -> None:
        """A request at an engine has ended."""
        self.rules.released(engine_id, self._clock())
        self.pump()

    def pump(self) -> None:
        """Schedule waiting requests; does not block."""
        for number in [n for n, answer in self._answers.items() if answer.done()]:
            self._leave(number)  # its client has disconnected
        for decision in self.rules.schedule(self._clock()):
            answer = self._answers.pop(decision.request)
            if isinstance(decision, Assign):
                answer.set_result(decision)
            else:
                why = (decision.code, decision.reason, decision.retry_after_s)
                answer.set_exception(RejectedError(503, *why))
        self._set_timer()

    def _set_timer(self) -> None:
        """Pump again when the first deadline passes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.rules.first_deadline
        if deadline is not None:
            wait_s = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.pump)

    def close(self) -> None:
        """Reject waiting requests and new ones."""
        self.rules.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(closing())
        self._answers.clear()
        self._set_timer()
