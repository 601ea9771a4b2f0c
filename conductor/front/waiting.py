"""The queue in which requests wait for engines: the asyncio shell of the dispatcher.

A request enters and gets a :class:`Lease`, which ends with it. :meth:`RequestQueue.pump` lets the
dispatcher decide, after each arrival, completion, health change and KV event, and when a deadline
passes.

One event loop owns everything; there are no locks.
"""

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self

from conductor.front.guarding import Guard
from conductor.routing.choices import Assign, Continue, Effect, Reject
from conductor.routing.columns import Matches
from conductor.routing.desk import Desk
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineRegistry
from conductor.routing.journal import Line
from conductor.routing.moving import Restored
from conductor.routing.requests import Request


class RejectedError(Exception):
    """The request is rejected; the client may retry after ``retry_after_s``."""

    def __init__(self, reject: Reject) -> None:
        super().__init__(reject.reason)
        self.status = reject.status
        self.code = reject.code
        self.retry_after_s = reject.retry_after_s
        self.judgement = reject.judgement


_AGAIN_S: Final = 0.1
"""When is decided again after that has failed."""
_Answer = asyncio.Future[Assign | Continue]


class DetachedPlace:
    """A place at an engine that outlasts its request."""

    def __init__(self, queue: "RequestQueue", number: int, engine_id: str) -> None:
        self._queue = queue
        self._number = number
        self._engine_id = engine_id
        self._taken = True

    def give_back(self) -> None:
        """The engine has ended its part; a second call does nothing."""
        if self._taken:
            self._taken = False
            self._queue.give_back(self._number, self._engine_id)


class Lease:
    """A request's places at engines; all but detached ones are given back with the context."""

    def __init__(self, queue: "RequestQueue", number: int, answer: _Answer) -> None:
        self._queue = queue
        self._number = number
        self._answer = answer

    async def assigned(self) -> Assign:
        """Wait for engines.

        Raises:
            RejectedError: the queue is full or closed, no engine is left, or it waited too long.
        """
        assign = await self._answer
        assert isinstance(assign, Assign)
        return assign

    async def handed_over(
        self, hit_tokens: int | None = None, restored: Restored | None = None
    ) -> Continue:
        """The prefill engine has done its part: wait for a place at a decode engine.

        Args:
            hit_tokens: prompt tokens that the prefill engine did not compute; None = unknown.
            restored: number of these hit tokens that it fetched; None = unknown.

        Raises:
            RejectedError: the queue was closed, no engine is left, or it waited too long.
        """
        self._answer = self._queue.prefilled(self._number, hit_tokens, restored)
        chosen = await self._answer
        assert isinstance(chosen, Continue)
        return chosen

    def release(self, engine_id: str) -> None:
        """Give the place at one engine back; a second call does nothing."""
        self._queue.released(self._number, engine_id)

    def detach(self, engine_id: str) -> DetachedPlace:
        """Take the place at one engine out of the lease; who calls this gives it back."""
        self._queue.detach(self._number, engine_id)
        return DetachedPlace(self._queue, self._number, engine_id)

    def failed(self, engine_id: str, why: str) -> None:
        """An engine failed: give all places back, and wait for others with :meth:`assigned`."""
        self._answer = self._queue.failed(self._number, engine_id, why)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._queue.leave(self._number)


class RequestQueue:
    """The waiting requests as futures.

    Args:
        dispatcher: used only by this queue.
        registry: its engines.
        find: the prefix of a request, by number and model, at each engine.
        clock: seconds, monotonic.
        guard: lets a request whose prefix cannot be looked up go by load, and all others on.
        write: gets a line for each input and decision; None = there is no journal.

    Attributes:
        dispatcher: decides; used only through this queue, except to read.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        registry: EngineRegistry,
        find: Callable[[int, str], Matches],
        clock: Callable[[], float],
        guard: Guard,
        write: Callable[[Line], None] | None = None,
    ) -> None:
        self._guard = guard
        self.dispatcher = dispatcher
        self._desk = Desk(dispatcher, registry, self._found, write)
        self._find = find
        self._clock = clock
        self._answers: dict[int, _Answer] = {}  # of those who wait, by number
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.dispatcher)

    def enter(self, request: Request) -> Lease:
        """A request arrives; enter the lease at once."""
        self._looked.arrive(request)
        try:
            return Lease(self, request.number, self._wait(request.number))
        except BaseException:
            self._answers.pop(request.number, None)
            self._looked.left(request.number, self._clock())
            raise

    @property
    def _looked(self) -> Desk:
        """Takes inputs, after what has changed of engines."""
        self._desk.look()
        return self._desk

    def prefilled(self, number: int, hit_tokens: int | None, restored: Restored | None) -> _Answer:
        """The prefill engine of a pair has done its part, but for ``hit_tokens``."""
        self._looked.prefilled(number, self._clock(), hit_tokens, restored)
        return self._wait(number)

    def failed(self, number: int, engine_id: str, why: str) -> _Answer:
        """An engine failed a request."""
        self._looked.failed(number, engine_id, why, self._clock())
        return self._wait(number)

    def _wait(self, number: int) -> _Answer:
        assert number not in self._answers
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self.pump()
        return answer

    def began(self, number: int, hit_tokens: int | None = None) -> None:
        """A request has its first token, or its decode engine the KV; may be called again.

        Args:
            number: of the request; an unknown one does nothing.
            hit_tokens: prompt tokens that were not computed; None = unknown.
        """
        self._looked.began(number, self._clock(), hit_tokens)
        self.pump()

    def ended(
        self, number: int, output_tokens: int, restored: Restored | None, *,
        read_slowly: bool = False,
    ) -> None:  # fmt: skip
        """A request has all its tokens.

        Args:
            number: of the request.
            output_tokens: of its answer.
            restored: what the engine fetched that served it alone; None = unknown, or a pair.
            read_slowly: whether its client, not its engine, says how long it took.
        """
        now = self._clock()
        self._looked.ended(number, output_tokens, now, restored, read_slowly=read_slowly)

    def untold(self, number: int, engine_id: str) -> None:
        """Nobody will tell when an engine has computed the prompt of a request."""
        self._looked.untold(number, engine_id)
        self.pump()

    def released(self, number: int, engine_id: str) -> None:
        """An engine has done its part of a request."""
        self._looked.released(number, engine_id, self._clock())
        self.pump()

    def detach(self, number: int, engine_id: str) -> None:
        """A place at an engine is to outlast its request."""
        self._looked.detach(number, engine_id)

    def give_back(self, number: int, engine_id: str) -> None:
        """An engine has ended its part of a request, whose place there was detached."""
        self._looked.give_back(number, engine_id, self._clock())
        self.pump()

    def forget(self, engine_id: str) -> None:
        """An engine is about to be removed from the registry."""
        self._looked.forget(engine_id)

    def leave(self, number: int) -> None:
        """A request has ended, or its client has disconnected."""
        self._answers.pop(number, None)
        self._looked.left(number, self._clock())
        self.pump()

    def pump(self) -> None:
        """Decide what can be decided now; does not block.

        If this fails, who waits is looked at again soon.
        """
        failed = True
        try:
            self._decide()
            failed = False
        finally:
            self._set_timer(failed=failed)

    def _decide(self) -> None:
        now = self._clock()
        for number in [n for n, answer in self._answers.items() if answer.done()]:
            del self._answers[number]  # its client has disconnected
            self._looked.left(number, now)
        try:
            self._tell(self._looked.step(now))
        except BaseException:
            self._tell(self._desk.decided(now))
            raise

    def _tell(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            answer = self._answers.pop(effect.request, None)
            if answer is None:
                continue  # its client had gone when the dispatcher refused it
            if isinstance(effect, Reject):
                answer.set_exception(RejectedError(effect))
                answer.exception()  # nobody may wait for it
            else:
                answer.set_result(effect)

    def _found(self, number: int, model: str) -> Matches:
        found: Matches = {}
        with self._guard.turn("prefix of a request"):
            found = self._find(number, model)
        return found  # noqa: RET504 # nothing, if that has failed

    def _set_timer(self, *, failed: bool) -> None:
        """Pump again when the first deadline passes, or after a failure."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = self.dispatcher.wake_at
        if wake_at is not None:
            wait_s = _AGAIN_S if failed else max(0.0, wake_at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.pump)

    def close(self) -> None:
        """Reject waiting requests and new ones."""
        self._looked.close()
        self.pump()
