"""Sends one assigned request to its engines, and the answer to its client.

A request is sent to one engine, or to a pair, as its protocol says
(:data:`conductor.protocols.PROTOCOLS`). In turn, the prefill engine answers first, and the KV waits
until the decode engine has a place; at once, both get the request, and the decode engine's answer
is relayed.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from conductor.config import DeadlineConfig
from conductor.front.bringing import Bringer
from conductor.front.membership import Membership
from conductor.front.metrics import Metrics
from conductor.front.openai import (
    EngineAnswer,
    events_without_transfer,
    read_answer,
    read_stream_end,
    refuses_transfer,
    without_transfer,
    without_usage,
)
from conductor.front.pairs import PairTasks
from conductor.front.prompts import Prompts
from conductor.front.runs import Run
from conductor.front.tracing import TraceFile
from conductor.front.upstream import EngineError, EngineRefusedError, IdleDeadline, Upstream
from conductor.front.waiting import Lease, RequestQueue
from conductor.protocols import PROTOCOLS
from conductor.protocols.base import Fields, PairProtocol, PairRequest, hinted
from conductor.protocols.hints import fetch_hint
from conductor.routing.choices import Assign, Plan
from conductor.routing.decisions import Attempt, DecisionLog, HandoffReport
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineRegistry
from conductor.routing.prefixes import PrefixView
from kvstore.handoff.rooms import BOOT_MAX, RoomNumbers
from kvstore.index.face import PrefixIndex
from kvstore.protocol.errors import CapacityError

_RANK_HEADER: Final = "X-data-parallel-rank"
"""vLLM runs a request on the data-parallel rank that this header names."""
_EXPECTED_S: Final = 10.0
"""For how long an engine is expected to have a prompt that it got, until its events tell of it."""
_UNTOLD_S: Final = 120.0
"""Likewise, an engine without events."""
_BOOT_BITS: Final = BOOT_MAX.bit_length()
_ENGINE: Final = "engine"
_CLIENT: Final = "client"
_PREFILL: Final = "prefill"
_DECODE: Final = "decode"
_TAIL_PIECES: Final = 4
"""Number of last pieces of a stream that are kept, to read usage and timings."""

_STREAM_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
}


class Parts(NamedTuple):
    """The parts that the front uses."""

    registry: EngineRegistry
    prefix_index: PrefixIndex
    queue: RequestQueue
    dispatcher: Dispatcher
    prefixes: PrefixView
    prompts: Prompts
    upstream: Upstream
    decisions: DecisionLog
    metrics: Metrics
    membership: Membership
    clock: Callable[[], float]
    bringer: Bringer
    trace: TraceFile | None = None


class _Half(NamedTuple):
    """What one engine gets of a request; ``protocol`` None = it serves alone."""

    engine: str
    rank: int | None
    body: bytes
    protocol: PairProtocol | None = None

    @property
    def reports(self) -> bool:
        """Whether its answer tells of the handoff, which is not for the client."""
        return self.protocol is not None and self.protocol.report is not None


_Result = TypeVar("_Result")


class Sender:
    """Sends requests to engines."""

    def __init__(self, parts: Parts, deadline: DeadlineConfig) -> None:
        """Connect the parts.

        Args:
            parts: shared with the rest of the service.
            deadline: deadlines for engines.
        """
        self._parts = parts
        self._deadline = deadline
        self._rooms = RoomNumbers(secrets.randbits(_BOOT_BITS))
        self._pairs = PairTasks(parts.metrics, parts.membership, deadline.push_s)

    async def close(self) -> None:
        """End the requests to engines that outlast the answers to their clients."""
        await self._pairs.close()

    async def send(
        self, run: Run, lease: Lease, assign: Assign, attempt: Attempt
    ) -> web.StreamResponse:
        """Send the request to the engines of one assignment; returns the client's response.

        Raises:
            EngineError: an engine failed; before the first byte, if ``run.response`` is None.
            EngineRefusedError: an engine refused the request as invalid.
            RejectedError: no decode engine had a place for its KV in time.
        """
        for engine_id, rank in assign.ranks.items():
            self._expect(run.number, engine_id, rank)
        run.prefill_done = None
        if assign.plan is Plan.ALONE:
            hint = self._hint(run, assign)
            body = run.body.body() if hint is None else _encoded(hinted(run.body.fields, hint))
            alone = _Half(assign.decode, assign.ranks[assign.decode], body)
            return await self._serve_apart(run, alone, attempt)
        protocol = PROTOCOLS[assign.protocol]
        pair = PairRequest(
            run.body.fields,
            self._room(),
            self._url(assign.prefill),
            self._url(assign.decode),
            self._registry_url(assign.prefill) if protocol.over is not None else "",
            self._hint(run, assign),
        )
        attempt.way = protocol.way
        if assign.at_once:
            attempt.room = pair.room
            return await self._at_once(run, lease, assign, attempt, protocol, pair)
        return await self._in_turn(run, lease, assign, attempt, protocol, pair)

    async def _in_turn(
        self, run: Run, lease: Lease, assign: Assign, attempt: Attempt,
        protocol: PairProtocol, pair: PairRequest,
    ) -> web.StreamResponse:  # fmt: skip
        """Ask the decode engine when the prefill engine has answered."""
        assert protocol.prefill is not None
        first = _Half(
            assign.prefill, assign.ranks[assign.prefill], _encoded(protocol.prefill(pair)), protocol
        )
        started = self._parts.clock()
        try:
            transfer = await self._prefill(run, first, attempt)
        finally:
            run.elsewhere_s += self._parts.clock() - started
        started = self._parts.clock()
        try:
            hit_tokens = attempt.prefilled.hit_tokens if attempt.prefilled is not None else None
            chosen = await lease.handed_over(hit_tokens)
        finally:
            attempt.decode_queue_s = self._parts.clock() - started
            run.waited(attempt.decode_queue_s)
        if chosen.decode != assign.decode:
            attempt.decode = chosen.decode
            self._expect(run.number, chosen.decode, chosen.rank)
        pair = pair._replace(decode_url=self._url(chosen.decode))
        body = _encoded(protocol.decode(pair, transfer))
        second = _Half(chosen.decode, chosen.rank, body, protocol)
        return await self._serve_apart(run, second, attempt)

    async def _at_once(
        self, run: Run, lease: Lease, assign: Assign, attempt: Attempt,
        protocol: PairProtocol, pair: PairRequest,
    ) -> web.StreamResponse:  # fmt: skip
        """Ask both engines; if either fails before the first byte, neither goes on."""
        second = _Half(
            assign.decode, assign.ranks[assign.decode], _encoded(protocol.decode(pair, None)),
            protocol,
        )  # fmt: skip
        if protocol.prefill is None:
            run.prefill_done = lambda: lease.release(assign.prefill)
            return await self._serve_apart(run, second, attempt)
        first = _Half(
            assign.prefill, assign.ranks[assign.prefill], _encoded(protocol.prefill(pair)), protocol
        )
        return await self._pairs.run(
            assign.prefill,
            lease.detach(assign.prefill),
            _if_understood(self._push(run, first, attempt)),
            _if_understood(self._serve(run, second, attempt)),
            lambda: run.response is not None,
        )

    async def _push(self, run: Run, half: _Half, attempt: Attempt) -> None:
        """Ask the prefill engine of a pair that is asked at once; it has pushed when it answers."""
        await self._prefill(run, half, attempt)
        if run.response is None:  # the decode engine has the KV, and has not told us
            prefilled = attempt.prefilled
            self._parts.queue.began(run.number, prefilled.hit_tokens if prefilled else None)

    def _room(self) -> int:
        try:
            return self._rooms.draw()
        except CapacityError:
            self._rooms = RoomNumbers(secrets.randbits(_BOOT_BITS))
            return self._rooms.draw()

    def _expect(self, number: int, engine_id: str, rank: int | None) -> None:
        """Tell the index what an engine will have in its cache."""
        engine = self._parts.registry.get(engine_id)
        if engine is not None and rank is not None:
            now = self._parts.clock()
            told = engine.info.events or engine.info.events_bind
            until = now + (_EXPECTED_S if told else _UNTOLD_S)
            self._parts.prefixes.expect(number, engine_id, rank, now, until)

    def _hint(self, run: Run, assign: Assign) -> msgspec.Raw | None:
        """Where the node of the engine that computes the prompt finds more of it; None = nowhere.

        If another node has more leading pages than the engine and its node have.
        """
        engine = self._parts.registry.get(assign.prefill)
        takes = assign.peer_tokens and PROTOCOLS[assign.protocol].takes_hints
        if engine is None or not takes:
            return None
        node, keys = self._parts.prefixes.peer_pages(run.number, engine.info)
        return fetch_hint(run.number, node, keys) if keys else None

    def _headers(self, run: Run, half: _Half) -> dict[str, str]:
        """Headers for an engine: they name the data-parallel rank that has more than others."""
        engine = self._parts.registry.get(half.engine)
        if engine is None or len(engine.info.ranks) <= 1 or half.rank is None:
            return run.headers  # an engine with several ranks spreads its load itself
        return {**run.headers, _RANK_HEADER: str(half.rank)}

    def _url(self, engine_id: str) -> str:
        """URL of an engine.

        Raises:
            EngineError: it was removed after it was chosen.
        """
        engine = self._parts.registry.get(engine_id)
        if engine is None:
            raise EngineError(engine_id, "was removed", sick=False)
        return engine.info.url

    def _registry_url(self, engine_id: str) -> str:
        """Where decode engines find a prefill engine that pushes.

        Raises:
            EngineError: it does not push any more: it registered again after it was chosen.
        """
        engine = self._parts.registry.get(engine_id)
        offer = engine.info.handoff.push if engine is not None and engine.info.handoff else None
        if offer is None or offer.registry is None:
            raise EngineError(engine_id, "does not push any more", sick=False)
        return offer.registry

    def _completions(self, engine_id: str) -> str:
        return f"{self._url(engine_id)}/v1/completions"

    async def _prefill(self, run: Run, half: _Half, attempt: Attempt) -> msgspec.Raw | None:
        """Ask the prefill engine of a pair; returns the parameters for the decode engine."""
        parts, protocol = self._parts, half.protocol
        assert protocol is not None
        started = parts.clock()
        try:
            raw, _ = await parts.upstream.post(
                half.engine,
                self._completions(half.engine),
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
        self, half: _Half, answer: EngineAnswer | None, attempt: Attempt, side: str
    ) -> HandoffReport | None:
        """How an engine says that a handoff went, counted; None if it tells nothing of it."""
        if half.protocol is None or half.protocol.report is None:
            return None
        transfer = answer.transfer if answer is not None else None
        report = half.protocol.report(transfer) if transfer is not None else None
        self._parts.metrics.handoffs.ended(attempt.way, side, report, "no_report")
        return report

    async def _serve(self, run: Run, half: _Half, attempt: Attempt) -> web.StreamResponse:
        """Ask the engine whose answer the client gets."""
        if run.body.stream:
            return await self._stream(run, half, attempt)
        return await self._whole(run, half, attempt)

    async def _serve_apart(self, run: Run, half: _Half, attempt: Attempt) -> web.StreamResponse:
        """The same, in a task of its own.

        Each piece of a stream resumes every coroutine that waits for it: so these are few.
        """
        served = asyncio.create_task(self._serve(run, half, attempt))
        try:
            return await served
        finally:
            if served.done() and not served.cancelled():
                served.exception()  # nobody takes it if we were cancelled in the same turn

    async def _whole(self, run: Run, half: _Half, attempt: Attempt) -> web.StreamResponse:
        """Relay one JSON answer."""
        parts = self._parts
        if half.protocol is None:
            parts.queue.untold(run.number, half.engine)
        started = parts.clock()
        try:
            raw, content_type = await parts.upstream.post(
                half.engine,
                self._completions(half.engine),
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

    async def _stream(self, run: Run, half: _Half, attempt: Attempt) -> web.StreamResponse:
        """Relay server-sent events, whole events at a time."""
        parts, engine = self._parts, half.engine
        tail: deque[bytes] = deque(maxlen=_TAIL_PIECES)
        started = parts.clock()
        url, headers = self._completions(engine), self._headers(run, half)
        async with (
            parts.upstream.stream(engine, url, half.body, headers) as pieces,
            self._limited(engine) as idle,
        ):
            idle.wait(_ENGINE, self._deadline.first_byte_s)
            idle_s, reports, usage_added = self._deadline.idle_s, half.reports, run.body.usage_added
            async for piece in pieces:
                idle.wait(_CLIENT, idle_s)
                if run.response is None:
                    run.elsewhere_s += parts.clock() - started
                    headers = {**run.headers, **_STREAM_HEADERS}
                    run.response = web.StreamResponse(headers=headers)
                    await self._begin(run, run.response)
                tail.append(piece)
                shown = events_without_transfer(piece) if reports else piece
                if usage_added:
                    shown = without_usage(shown)
                if shown:
                    await run.response.write(shown)
                idle.wait(_ENGINE, idle_s)
        if run.response is None:
            raise EngineError(engine, "the stream was empty")
        parts.membership.worked(engine)
        end = read_stream_end(tail)
        attempt.served = end.measured() if end else None
        attempt.received = self._report(half, end, attempt, _DECODE)
        self._ended(run, attempt)
        await self.end(run.response)
        return run.response

    def _ended(self, run: Run, attempt: Attempt) -> None:
        """An answer is complete; learn from its length, if the engine tells it."""
        attempt.outcome = "ok"
        run.decision.status, run.decision.outcome = 200, "ok"
        if attempt.served is not None and attempt.served.completion_tokens is not None:
            parts, output_tokens = self._parts, attempt.served.completion_tokens
            parts.dispatcher.ended(run.number, output_tokens, parts.clock())

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


def _encoded(fields: Fields) -> bytes:
    return msgspec.json.encode(fields)


async def _if_understood(answer: Awaitable[_Result]) -> _Result:
    """An answer of an engine; one that refuses what the Conductor adds is only not to be used.

    Raises:
        EngineError: it refuses the transfer parameters: it has changed since it registered.
    """
    try:
        return await answer
    except EngineRefusedError as error:
        if not refuses_transfer(error.body):
            raise
        what = f"refuses the handoff: {error.body[:200].decode(errors='replace')}"
        raise EngineError(error.engine, what, sick=False) from error
