"""Sends a request to both engines of a pair at once.

::

    both asked ──► either fails before the first byte ──► both requests end; the next attempt
        │                                                 has another pair and another room
        ├────────► prefill's ends first ────────────────► its place is free
        └────────► decode's answer ends first ──────────► prefill's may go on for a while

The place at the prefill engine is taken until its request has ended, whatever becomes of the
client's: while an engine pushes, it computes. After the first byte, a prefill engine that fails
costs the client nothing: the decode engine goes on by itself.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Final

from aiohttp import web

from conductor.front.membership import Membership
from conductor.front.metrics import Metrics
from conductor.front.upstream import EngineError, EngineRefusedError
from conductor.front.waiting import DetachedPlace

_PREFILL: Final = "request to a prefill engine"


class PairTasks:
    """The requests to prefill engines, also those that outlast the answer to the client.

    Args:
        metrics: counts failures.
        membership: is told of failures.
        end_s: deadline for a prefill engine after the decode engine's answer has ended.
    """

    def __init__(self, metrics: Metrics, membership: Membership, end_s: float) -> None:
        self._metrics = metrics
        self._membership = membership
        self._end_s = end_s
        self._late: set[asyncio.Task[None]] = set()

    async def run(
        self,
        engine: str,
        place: DetachedPlace,
        prefill: Coroutine[None, None, object],
        serve: Coroutine[None, None, web.StreamResponse],
        has_begun: Callable[[], bool],
    ) -> web.StreamResponse:
        """Run both requests; returns the client's response.

        Args:
            engine: id of the prefill engine.
            place: place at the prefill engine; given back when the request there has ended.
            prefill: request to the prefill engine.
            serve: request to the decode engine.
            has_begun: whether the client has the first byte.

        Raises:
            EngineError: one of them failed; before the first byte, both have ended then.
            EngineRefusedError: likewise, one of them refused the request.
        """
        prefills = asyncio.create_task(prefill, name=_PREFILL)
        serves = asyncio.create_task(serve)
        prefills.add_done_callback(lambda _: place.give_back())
        awaited = False
        try:
            await asyncio.wait({prefills, serves}, return_when=asyncio.FIRST_COMPLETED)
            if not serves.done() and not has_begun():
                awaited = True
                await prefills
            response = await serves
        except BaseException:
            for task in (prefills, serves):
                task.cancel()
            await asyncio.gather(prefills, serves, return_exceptions=True)
            if not awaited:
                self._note(prefills)
            raise
        if prefills.done():
            if not awaited:
                self._note(prefills)
        else:
            late = asyncio.create_task(self._wait(prefills, engine))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
        return response

    async def _wait(self, prefills: asyncio.Task[object], engine: str) -> None:
        """Give a prefill engine some time to end its part."""
        try:
            done, _ = await asyncio.wait({prefills}, timeout=self._end_s)
        finally:
            prefills.cancel()
            await asyncio.gather(prefills, return_exceptions=True)
        if done:
            self._note(prefills)
        else:
            what = f"did not end its push within {self._end_s:g} s after decode's answer"
            self._failed(EngineError(engine, what))

    def _note(self, prefills: asyncio.Task[object]) -> None:
        """Count a failure of which the client is not told."""
        if prefills.cancelled():
            return
        failure = prefills.exception()
        if isinstance(failure, EngineError):
            self._failed(failure)
        elif failure is not None and not isinstance(failure, EngineRefusedError):
            raise failure

    def _failed(self, failure: EngineError) -> None:
        self._metrics.failed(failure.engine, retried=False)
        if failure.sick:
            self._membership.broke(failure.engine)

    async def close(self) -> None:
        """End all requests that outlast the answers to their clients."""
        late = tuple(self._late)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
