"""The path of one completion: check, tokenise, queue, engines, answer.

A request is sent to one engine, or to a pair. In a pair, the prefill engine gets it with
``max_tokens=1`` and ``do_remote_decode``; the ``kv_transfer_params`` of its answer are sent
unchanged, with the original request, to the decode engine, whose answer the client gets. If an
engine fails before the first byte was sent to the client, the request is retried on other engines.
After the first byte the client gets an error event and the end of the stream; the request is never
repeated silently.
"""

import asyncio
import itertools
import re
import uuid
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from aiohttp import web

from conductor.config import DeadlineConfig, QueueConfig
from conductor.front.membership import Membership
from conductor.front.metrics import Metrics
from conductor.front.openai import (
    BadRequestError,
    Completion,
    error_body,
    error_response,
    parse_completion,
    read_answer,
    read_body,
    read_stream_end,
)
from conductor.front.prompts import Prompts
from conductor.front.upstream import EngineError, EngineRefusedError, Upstream
from conductor.front.waiting import Lease, RequestQueue
from conductor.routing.decisions import Attempt, Decision, DecisionLog
from conductor.routing.engines import EngineRegistry
from conductor.routing.policy import Assign, Plan, Waiting
from conductor.routing.prefixes import PrefixView
from conductor.routing.queue import QueueRules, RejectedError
from kvstore.index.face import PrefixIndex

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RANK_HEADER: Final = "X-data-parallel-rank"
"""vLLM runs a request on the data-parallel rank that this header names."""
_EXPECTED_S: Final = 10.0
"""For how long an engine is expected to have a prompt that it got, until its events tell of it."""
_UNTOLD_S: Final = 120.0
"""Likewise, an engine without events."""
_TAIL_PIECES: Final = 4
"""Number of last pieces of a stream that are kept, to read usage and timings."""


class Parts(NamedTuple):
    """The parts that the proxy uses."""

    registry: EngineRegistry
    prefix_index: PrefixIndex
    queue: RequestQueue
    rules: QueueRules
    prefixes: PrefixView
    prompts: Prompts
    upstream: Upstream
    decisions: DecisionLog
    metrics: Metrics
    membership: Membership
    clock: Callable[[], float]


class _Run:
    """One completion in progress, with the times for its decision."""

    def __init__(
        self, http: web.Request, body: Completion, decision: Decision, arrived: float, number: int
    ) -> None:
        self.http = http
        self.body = body
        self.decision = decision
        self.arrived = arrived
        self.number = number
        self.elsewhere_s = 0.0  # waiting for engines so far
        self.response: web.StreamResponse | None = None  # set after the first byte

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Request-Id": self.decision.id}

    def first_byte(self, now: float) -> None:
        self.decision.ttft_s = now - self.arrived
        self.decision.conductor_s = self.decision.ttft_s - self.elsewhere_s


class Proxy:
    """Serves ``POST /v1/completions``."""

    def __init__(
        self, parts: Parts, policy: str, queue: QueueConfig, deadline: DeadlineConfig
    ) -> None:
        """Connect the parts.

        Args:
            parts: shared with the rest of the service.
            policy: name of the policy, for decisions.
            queue: limits of waits and tries.
            deadline: deadlines for engines.
        """
        self._parts = parts
        self._policy = policy
        self._queue = queue
        self._deadline = deadline
        self._numbers = itertools.count(1)
        self.active = 0
        self.closing = False
        self.idle = asyncio.Event()
        self.idle.set()

    def _notice_idle(self) -> None:
        if not self.active:
            self.idle.set()

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """Handle one request.

        Raises:
            BadRequestError: the request is invalid; names the field.
        """
        arrived = self._parts.clock()
        if self.closing:
            return error_response(
                503, "shutting_down", "the Conductor is shutting down", retry_after_s=1
            )
        if self.active >= self._parts.rules.requests_max:
            self._parts.metrics.refused(429, "rejected")
            return error_response(
                429,
                "queue_full",
                f"{self.active} requests are in progress already",
                retry_after_s=self._parts.rules.retry_after_s,
            )
        raw = await read_body(http)
        try:
            body = parse_completion(raw)
        except BadRequestError:
            self._parts.metrics.refused(400, "invalid")
            raise
        request_id = _request_id(http, body)
        known = self._parts.registry.models()
        model = body.model if body.model is not None or len(known) != 1 else known[0]
        if not known:
            self._parts.metrics.refused(503, "rejected")
            return error_response(
                503, "no_engine", "no engine has registered", retry_after_s=1, request_id=request_id
            )
        if model is None or not self._parts.registry.of_model(model):
            self._parts.metrics.refused(404, "invalid")
            what = f"model: {model!r} is not served here; known: {', '.join(known)[:1_000]}"
            return error_response(
                404, "model_not_found", what, field="model", request_id=request_id
            )
        decision = self._parts.decisions.open(
            request_id, model, self._policy, stream=body.stream, at=datetime.now(UTC)
        )
        run = _Run(http, body, decision, arrived, next(self._numbers))
        self.active += 1
        self.idle.clear()
        try:
            async with asyncio.timeout(self._deadline.request_s):
                return await self._answer(run)
        except TimeoutError:
            return await self._give_up(run, 504, "timeout", "the request took too long")
        except ConnectionError:
            decision.outcome, decision.detail = "client_gone", "the client closed its connection"
            raise
        except asyncio.CancelledError:
            decision.outcome = "client_gone"
            decision.detail = "the client disconnected, or the Conductor was stopped"
            raise
        finally:
            self.active -= 1
            decision.total_s = self._parts.clock() - arrived
            self._parts.prefixes.forget(run.number)
            self._parts.metrics.ended(decision)
            self._notice_idle()

    async def _answer(self, run: _Run) -> web.StreamResponse:
        """Try engines until one answers."""
        parts, decision = self._parts, run.decision
        tokens = await self._tokens(run)
        waiting = Waiting(
            number=run.number,
            model=decision.model,
            deadline=run.arrived + self._queue.wait_s,
        )
        if tokens is not None:
            decision.prompt_tokens = len(tokens)
            parts.prefixes.remember(run.number, tokens, run.body.salt, decision.model)
        last_error: EngineError | None = None
        for tries_left in reversed(range(self._queue.tries)):
            started = parts.clock()
            try:
                lease = await parts.queue.assign(waiting, again=last_error is not None)
            except RejectedError as error:
                why = str(error) if last_error is None else f"{error}; last failure: {last_error}"
                return await self._give_up(
                    run, error.status, error.code, why, retry_after_s=error.retry_after_s
                )
            finally:
                waited = parts.clock() - started
                decision.queue_s += waited
                run.elsewhere_s += waited
            with lease:
                attempt = decision.attempted(lease.assign, parts.clock() - run.arrived)
                parts.metrics.assigned(self._policy, str(lease.assign.plan))
                try:
                    return await self._attempt(run, lease, attempt)
                except EngineError as error:
                    last_error = error
                    attempt.outcome = str(error)
                    retry = run.response is None and tries_left > 0
                    parts.metrics.failed(error.engine, retried=retry)
                    if error.sick:
                        parts.membership.broke(error.engine)
                    if run.response is not None:
                        return await self._give_up(run, 502, "engine_failed", str(error))
                    excluded = waiting.excluded | {error.engine}
                    waiting = Waiting(
                        number=waiting.number,
                        model=waiting.model,
                        deadline=parts.clock() + self._queue.wait_s,
                        excluded=excluded,
                    )
                except EngineRefusedError as error:
                    attempt.outcome = str(error)
                    return self._relay_refusal(run, error)
        what = f"{self._queue.tries} tries failed; the last error: {last_error}"
        return await self._give_up(
            run, 503, "engines_failed", what, retry_after_s=parts.rules.retry_after_s
        )

    async def _tokens(self, run: _Run) -> list[int] | None:
        """The prompt as token ids, if the policy needs them or the request has them."""
        if isinstance(run.body.prompt, list):
            return run.body.prompt
        if not self._parts.prefixes.needed:
            return None
        started = self._parts.clock()
        tokens = await self._parts.prompts.tokenize(run.decision.model, run.body.prompt)
        run.decision.tokenize_s = self._parts.clock() - started
        return tokens

    def _expect(self, number: int, assign: Assign) -> None:
        """Tell the index what these engines will have in their caches."""
        now = self._parts.clock()
        for engine_id, rank in assign.ranks.items():
            engine = self._parts.registry.get(engine_id)
            if engine is not None and rank is not None:
                told = engine.info.events or engine.info.events_bind
                until = now + (_EXPECTED_S if told else _UNTOLD_S)
                self._parts.prefixes.expect(number, engine_id, rank, now, until)

    def _headers(self, run: _Run, assign: Assign, engine_id: str) -> dict[str, str]:
        """Headers for an engine: they name the data-parallel rank that has more than others."""
        engine, rank = self._parts.registry.get(engine_id), assign.ranks[engine_id]
        if engine is None or len(engine.info.ranks) <= 1 or rank is None:
            return run.headers  # an engine with several ranks spreads its load itself
        return {**run.headers, _RANK_HEADER: str(rank)}

    async def _attempt(self, run: _Run, lease: Lease, attempt: Attempt) -> web.StreamResponse:
        """Send the request to the engines of one assignment."""
        parts, assign = self._parts, lease.assign
        self._expect(run.number, assign)
        body = run.body.body()
        if assign.plan is Plan.PAIR:
            started = parts.clock()
            try:
                raw, _ = await parts.upstream.post(
                    assign.prefill,
                    self._url(assign.prefill),
                    run.body.prefill_body(),
                    timeout_s=self._deadline.prefill_s,
                    headers=self._headers(run, assign, assign.prefill),
                )
            finally:
                attempt.prefill_s = parts.clock() - started
                run.elsewhere_s += attempt.prefill_s
            lease.release(assign.prefill)
            parts.membership.worked(assign.prefill)
            answer = read_answer(raw)
            if answer is None:
                raise EngineError(assign.prefill, "its answer is not JSON")
            attempt.prefilled = answer.measured()
            body = run.body.decode_body(answer.transfer)  # without one, decode computes the prompt
        if run.body.stream:
            return await self._stream(run, assign, body, attempt)
        return await self._whole(run, assign, body, attempt)

    def _url(self, engine_id: str) -> str:
        """URL of an engine's completions.

        Raises:
            EngineError: it was removed after it was chosen.
        """
        engine = self._parts.registry.get(engine_id)
        if engine is None:
            raise EngineError(engine_id, "was removed", sick=False)
        return f"{engine.info.url}/v1/completions"

    async def _whole(
        self, run: _Run, assign: Assign, body: bytes, attempt: Attempt
    ) -> web.StreamResponse:
        """Relay one JSON answer."""
        parts, engine = self._parts, assign.decode
        started = parts.clock()
        try:
            raw, content_type = await parts.upstream.post(
                engine,
                self._url(engine),
                body,
                timeout_s=self._deadline.request_s,
                headers=self._headers(run, assign, engine),
            )
        finally:
            run.elsewhere_s += parts.clock() - started
        parts.membership.worked(engine)
        answer = read_answer(raw)
        attempt.served = answer.measured() if answer else None
        attempt.outcome = "ok"
        run.first_byte(parts.clock())
        run.decision.status, run.decision.outcome = 200, "ok"
        return web.Response(body=raw, content_type=content_type, headers=run.headers)

    async def _stream(
        self, run: _Run, assign: Assign, body: bytes, attempt: Attempt
    ) -> web.StreamResponse:
        """Relay server-sent events, whole events at a time."""
        parts, engine = self._parts, assign.decode
        tail: deque[bytes] = deque(maxlen=_TAIL_PIECES)
        started = parts.clock()
        url = self._url(engine)
        headers = self._headers(run, assign, engine)
        async with parts.upstream.stream(engine, url, body, headers) as pieces:
            async for piece in pieces:
                if run.response is None:
                    run.elsewhere_s += parts.clock() - started
                    run.response = await self._begin(run)
                tail.append(piece)
                await self._write(run.response, piece)
        if run.response is None:
            raise EngineError(engine, "the stream was empty")
        parts.membership.worked(engine)
        end = read_stream_end(tail)
        attempt.served = end.measured() if end else None
        attempt.outcome = "ok"
        run.decision.status, run.decision.outcome = 200, "ok"
        await self._end(run.response)
        return run.response

    async def _begin(self, run: _Run) -> web.StreamResponse:
        """Send the first byte to the client: no retries after this."""
        headers = {
            **run.headers,
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
        }
        response = web.StreamResponse(headers=headers)
        run.decision.status = 200
        await response.prepare(run.http)
        run.first_byte(self._parts.clock())
        return response

    async def _write(self, response: web.StreamResponse, piece: bytes) -> None:
        """Send a piece to the client; a client that does not read in time is disconnected."""
        try:
            async with asyncio.timeout(self._deadline.idle_s):
                await response.write(piece)
        except TimeoutError as error:
            raise ConnectionResetError("the client does not read") from error

    async def _end(self, response: web.StreamResponse) -> None:
        try:
            async with asyncio.timeout(self._deadline.idle_s):
                await response.write_eof()
        except TimeoutError as error:
            raise ConnectionResetError("the client does not read") from error

    async def _give_up(
        self, run: _Run, status: int, code: str, why: str, *, retry_after_s: float | None = None
    ) -> web.StreamResponse:
        """Send an error: a status, or an error event if the stream has begun."""
        decision = run.decision
        decision.detail = why
        if run.response is None:
            decision.status = status
            decision.outcome = "failed" if decision.attempts else "rejected"
            return error_response(
                status, code, why, retry_after_s=retry_after_s, request_id=decision.id
            )
        decision.outcome = "broken"
        event = b"event: error\ndata: " + error_body(status, code, why) + b"\n\n"
        await self._write(run.response, event)
        await self._end(run.response)
        return run.response

    def _relay_refusal(self, run: _Run, error: EngineRefusedError) -> web.Response:
        """Relay the engine's own refusal."""
        self._parts.membership.worked(error.engine)
        run.decision.status, run.decision.outcome = error.status, "refused"
        run.decision.detail = str(error)
        return web.Response(
            status=error.status,
            body=error.body,
            content_type=error.content_type,
            headers=run.headers,
        )


def _request_id(http: web.Request, body: Completion) -> str:
    """The client's id if it is valid, else a new one."""
    for wanted in (http.headers.get("X-Request-Id"), body.request_id):
        if wanted and _REQUEST_ID.fullmatch(wanted):
            return wanted
    return uuid.uuid4().hex
