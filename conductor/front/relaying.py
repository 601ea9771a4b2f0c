"""Asks one engine, and relays its answer to the client.

An engine that computes a prompt for another one is asked for JSON, which the client does not get.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import msgspec
from aiohttp import web

from conductor.config import DeadlineConfig
from conductor.front.openai import (
    EngineAnswer,
    events_without_transfer,
    read_answer,
    read_stream_end,
    without_transfer,
    without_usage,
)
from conductor.front.parts import Parts
from conductor.front.runs import Run
from conductor.front.upstream import EngineError, EngineRefusedError, IdleDeadline
from conductor.protocols.base import PairProtocol
from conductor.routing.choices import Plan
from conductor.routing.decisions import Attempt, HandoffReport

_RANK_HEADER: Final = "X-data-parallel-rank"
"""vLLM runs a request on the data-parallel rank that this header names."""
_FIRST: Final = "first piece"
_ENGINE: Final = "engine"
_CLIENT: Final = "client"
_SLOW_READER: Final = 0.1
_SLOW_READER_S: Final = 0.02
"""A stream that waited for its client for more than this, and this part, tells nothing of its
engine."""
_PREFILL: Final = "prefill"
_DECODE: Final = "decode"
_TAIL_PIECES: Final = 4
"""Number of last pieces of a stream that are kept, to read usage and timings."""

_STREAM_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
}


class Half(NamedTuple):
    """What one engine gets of a request; ``protocol`` None = it serves alone."""

    engine: str
    rank: int | None
    body: bytes
    protocol: PairProtocol | None = None

    @property
    def reports(self) -> bool:
        """Whether its answer tells of the handoff, which is not for the client."""
        return self.protocol is not None and self.protocol.report is not None


class Relay:
    """Requests to single engines.

    Args:
        parts: shared with the rest of the service.
        deadline: deadlines for engines.
    """

    def __init__(self, parts: Parts, deadline: DeadlineConfig) -> None:
        self._parts = parts
        self._deadline = deadline

    def _headers(self, run: Run, half: Half) -> dict[str, str]:
        """Headers for an engine: they name the data-parallel rank that has more than others."""
        engine = self._parts.registry.get(half.engine)
        if engine is None or len(engine.info.ranks) <= 1 or half.rank is None:
            return run.headers  # an engine with several ranks spreads its load itself
        return {**run.headers, _RANK_HEADER: str(half.rank)}

    def url(self, engine_id: str) -> str:
        """URL of an engine.

        Raises:
            EngineError: it was removed after it was chosen.
        """
        engine = self._parts.registry.get(engine_id)
        if engine is None:
            raise EngineError(engine_id, "was removed", sick=False)
        return engine.info.url

    def _asked(self, run: Run, engine_id: str) -> str:
        """Where an engine serves what the client has asked for."""
        return f"{self.url(engine_id)}{run.body.route}"

    async def prefill(self, run: Run, half: Half, attempt: Attempt) -> msgspec.Raw | None:
        """Ask the prefill engine of a pair; returns the parameters for the decode engine."""
        parts, protocol = self._parts, half.protocol
        assert protocol is not None
        started = parts.clock()
        try:
            raw, _ = await parts.upstream.post(
                half.engine,
                self._asked(run, half.engine),
                half.body,
                timeout_s=self._deadline.prefill_s,
                headers=self._headers(run, half),
            )
            answer = read_answer(raw)
            if answer is None:
                raise EngineError(half.engine, "its answer is not JSON")
        except (EngineError, EngineRefusedError):
            parts.metrics.handoffs.ended(attempt.way, _PREFILL, None, "no_answer")
            raise
        finally:
            attempt.prefill_s = parts.clock() - started
        parts.membership.worked(half.engine)
        attempt.prefilled = answer.measured()
        if protocol.report is None:
            why = "" if answer.transfer is not None else "no_parameters"
            parts.metrics.handoffs.ended(attempt.way, _PREFILL, None, why)
        else:
            attempt.pushed = self._report(half, answer, attempt, _PREFILL)
        return answer.transfer

    def _report(
        self, half: Half, answer: EngineAnswer | None, attempt: Attempt, side: str
    ) -> HandoffReport | None:
        """How an engine says that a handoff went, counted; None if it tells nothing of it."""
        if half.protocol is None or half.protocol.report is None:
            return None
        transfer = answer.transfer if answer is not None else None
        report = half.protocol.report(transfer) if transfer is not None else None
        self._parts.metrics.handoffs.ended(attempt.way, side, report, "no_report")
        return report

    async def serve(self, run: Run, half: Half, attempt: Attempt) -> web.StreamResponse:
        """Ask the engine whose answer the client gets."""
        if run.body.stream:
            return await self._stream(run, half, attempt)
        return await self._whole(run, half, attempt)

    async def serve_apart(self, run: Run, half: Half, attempt: Attempt) -> web.StreamResponse:
        """The same, in a task of its own.

        Each piece of a stream resumes every coroutine that waits for it: so these are few.
        """
        served = asyncio.create_task(self.serve(run, half, attempt))
        try:
            return await served
        finally:
            if served.done() and not served.cancelled():
                served.exception()  # nobody takes it if we were cancelled in the same turn

    async def _whole(self, run: Run, half: Half, attempt: Attempt) -> web.StreamResponse:
        """Relay one JSON answer."""
        parts = self._parts
        if half.protocol is None:
            parts.queue.untold(run.number, half.engine)
        started = parts.clock()
        try:
            raw, content_type = await parts.upstream.post(
                half.engine,
                self._asked(run, half.engine),
                half.body,
                timeout_s=self._deadline.request_s,
                headers=self._headers(run, half),
            )
        finally:
            run.elsewhere_s += parts.clock() - started
        parts.membership.worked(half.engine)
        answer = read_answer(raw)
        attempt.served = answer.measured() if answer else None
        attempt.received = self._report(half, answer, attempt, _DECODE)
        run.first_byte(parts.clock())
        self._ended(run, attempt)
        if half.reports:
            raw = without_transfer(raw)
        return web.Response(body=raw, content_type=content_type, headers=run.headers)

    async def _stream(self, run: Run, half: Half, attempt: Attempt) -> web.StreamResponse:
        """Relay server-sent events, whole events at a time."""
        parts, engine = self._parts, half.engine
        tail: deque[bytes] = deque(maxlen=_TAIL_PIECES)
        started = begun = parts.clock()
        url, headers = self._asked(run, engine), self._headers(run, half)
        try:
            async with (
                parts.upstream.stream(engine, url, half.body, headers) as pieces,
                self._limited(engine) as idle,
            ):
                idle.wait(_FIRST, self._deadline.first_byte_s)
                idle_s = self._deadline.idle_s
                reports, usage_added = half.reports, run.body.usage_added
                async for piece in pieces:
                    if run.response is None:
                        idle.wait(_CLIENT, idle_s)
                        begun = parts.clock()
                        run.elsewhere_s += begun - started
                        if run.handed_at is not None:
                            attempt.handoff_s = begun - run.handed_at
                        headers = {**run.headers, **_STREAM_HEADERS}
                        run.response = web.StreamResponse(headers=headers)
                        await self._begin(run, run.response)
                    tail.append(piece)
                    shown = events_without_transfer(piece) if reports else piece
                    if usage_added:
                        shown = without_usage(shown)
                    if shown:
                        idle.wait(_CLIENT, idle_s)
                        await run.response.write(shown)
                    idle.wait(_ENGINE, idle_s)
        finally:
            if run.response is None:  # it has failed: the next engine's first piece counts its own
                run.elsewhere_s += parts.clock() - started
        if run.response is None:
            raise EngineError(engine, "the stream was empty")
        took_s = parts.clock() - begun
        parts.membership.worked(engine)
        end = read_stream_end(tail)
        attempt.served = end.measured() if end else None
        attempt.received = self._report(half, end, attempt, _DECODE)
        client_s, engine_s = idle.waited_s[_CLIENT], idle.waited_s[_ENGINE]
        slowly = client_s > max(_SLOW_READER_S, _SLOW_READER * (client_s + engine_s))
        if not slowly:
            attempt.streamed(took_s)
        self._ended(run, attempt, read_slowly=slowly)
        await self.end(run.response)
        return run.response

    def _ended(self, run: Run, attempt: Attempt, *, read_slowly: bool = False) -> None:
        """An answer is complete; learn from its length, if the engine tells it.

        Args:
            run: the request.
            attempt: its present try.
            read_slowly: whether its client, not its engine, says how long it took.
        """
        attempt.outcome = "ok"
        run.decision.status, run.decision.outcome = 200, "ok"
        if attempt.served is not None and attempt.served.completion_tokens is not None:
            restored = attempt.served.restored if attempt.plan == Plan.ALONE else None
            tokens = attempt.served.completion_tokens
            self._parts.queue.ended(run.number, tokens, restored, read_slowly=read_slowly)

    @asynccontextmanager
    async def _limited(self, engine: str) -> AsyncIterator[IdleDeadline]:
        """A deadline for whom a stream waits for: the engine, or a client that does not read.

        Raises:
            EngineError: it was the engine.
            ConnectionResetError: it was the client.
        """
        idle = IdleDeadline()
        try:
            async with idle:
                yield idle
        except TimeoutError as error:
            if idle.waits_for == _CLIENT:
                raise ConnectionResetError("the client does not read") from error
            raise EngineError(engine, "stream: no answer in time") from error

    async def _begin(self, run: Run, response: web.StreamResponse) -> None:
        """Send the first byte to the client: no retries after this."""
        run.decision.status = 200
        await response.prepare(run.http)
        run.first_byte(self._parts.clock())
        self._parts.queue.began(run.number)

    async def write(self, response: web.StreamResponse, piece: bytes) -> None:
        """Send a piece to the client; a client that does not read in time is disconnected."""
        try:
            async with asyncio.timeout(self._deadline.idle_s):
                await response.write(piece)
        except TimeoutError as error:
            raise ConnectionResetError("the client does not read") from error

    async def end(self, response: web.StreamResponse) -> None:
        """End a stream."""
        try:
            async with asyncio.timeout(self._deadline.idle_s):
                await response.write_eof()
        except TimeoutError as error:
            raise ConnectionResetError("the client does not read") from error
