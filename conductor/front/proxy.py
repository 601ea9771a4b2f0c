"""The path of one completion, or chat completion: check, tokenise, queue, engines, answer.

If an engine fails before the first byte was sent to the client, the request is retried on other
engines. After the first byte the client gets an error event and the end of the stream; the request
is never repeated silently.
"""

import asyncio
import itertools
import re
import uuid
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from conductor.config import ConductorConfig
from conductor.front.bodies import Bodies
from conductor.front.completions import Completion, Route, parse_completion
from conductor.front.openai import BadRequestError, error_body, error_response, name_of
from conductor.front.parts import Parts
from conductor.front.relaying import Relay
from conductor.front.runs import Run
from conductor.front.sending import Sender
from conductor.front.tracing import TOKENS_MAX, AnsweredRequest
from conductor.front.upstream import EngineError, EngineRefusedError
from conductor.front.waiting import Lease, RejectedError
from conductor.routing.requests import Request

_SERVICE_CLASS: Final = "X-Service-Class"
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Proxy:
    """Serves ``POST /v1/completions`` and ``POST /v1/chat/completions``.

    Args:
        parts: shared with the rest of the service.
        config: the policy's name, for decisions; limits of tries; deadlines for engines.
        bodies: reads the bodies of requests.
        classes: names of the classes of requests.
    """

    def __init__(
        self,
        parts: Parts,
        config: ConductorConfig,
        bodies: Bodies,
        classes: Collection[str] = (),
    ) -> None:
        self._parts = parts
        self._policy = config.policy.name
        self._queue = config.queue
        self._deadline = config.deadline
        self._classes = classes
        self._relay = Relay(parts, config.deadline)
        self._sender = Sender(parts, self._relay, config.deadline.push_s)
        self._bodies = bodies
        self._numbers = itertools.count(1)
        self.active = 0
        self.closing = False
        self.idle = asyncio.Event()
        self.idle.set()

    async def close(self) -> None:
        """End what outlasts the answers to clients."""
        await self._sender.close()

    def _notice_idle(self) -> None:
        if not self.active:
            self.idle.set()

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """Handle one request for a completion.

        Raises:
            BadRequestError: the request is invalid; names the field.
        """
        return await self._serve(http, Route.COMPLETIONS)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        """Handle one request for a chat completion.

        Raises:
            BadRequestError: the request is invalid; names the field.
        """
        return await self._serve(http, Route.CHAT)

    async def _serve(self, http: web.Request, route: Route) -> web.StreamResponse:
        if self.closing:
            return error_response(
                503, "shutting_down", "the Conductor is shutting down", retry_after_s=1
            )
        if self.active >= self._parts.dispatcher.requests_max:
            self._parts.metrics.refused(429, "rejected")
            return error_response(
                429,
                "queue_full",
                f"{self.active} requests are in progress already",
                retry_after_s=self._parts.dispatcher.retry_after_s,
            )
        async with self._bodies.of(http) as raw:
            return await self._complete(http, route, raw)

    async def _complete(self, http: web.Request, route: Route, raw: bytes) -> web.StreamResponse:
        """Handle one request whose body has been read.

        It arrives now: a client that sends slowly is not thought to have waited.
        """
        arrived = self._parts.clock()
        try:
            body = parse_completion(route, raw)
            body = replace(body, service=self._service(http, body))
        except BadRequestError:
            self._parts.metrics.refused(400, "invalid")
            raise
        request_id = _request_id(http, body)
        known = self._parts.registry.models()
        model = body.model if body.model is not None or len(known) != 1 else known[0]
        if not known:
            self._parts.metrics.refused(503, "rejected")
            what = "no engine is registered: register engines with POST /v1/engines"
            return error_response(503, "no_engine", what, retry_after_s=1, request_id=request_id)
        if model is None or not self._parts.registry.of_model(model):
            self._parts.metrics.refused(404, "invalid")
            what = f"model: {model!r} is not served here; known: {', '.join(known)[:1_000]}"
            return error_response(
                404, "model_not_found", what, field="model", request_id=request_id
            )
        decision = self._parts.decisions.open(
            request_id, route, model, self._policy, stream=body.stream, at=datetime.now(UTC)
        )
        run = Run(http, body, decision, arrived, next(self._numbers))
        self.active += 1
        self.idle.clear()
        if self._parts.trace is not None:
            self._parts.trace.began(run.number)
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
            decision.brought = self._parts.bringer.left(run.number)
            self._parts.prefixes.forget(run.number)
            self._parts.metrics.ended(decision)
            self._parts.decisions.ended(decision)
            if self._parts.trace is not None:
                self._parts.trace.ended(run.number, self._traced(run))
            self._notice_idle()

    def _service(self, http: web.Request, body: Completion) -> str:
        """The class that a request names; empty = none.

        Raises:
            BadRequestError: the header names one that does not exist.
        """
        named = http.headers.get(_SERVICE_CLASS)
        if named is None:
            return body.service if body.service in self._classes else ""
        if named not in self._classes:
            known = ", ".join(self._classes)
            raise BadRequestError(_SERVICE_CLASS, f"{name_of(named)!r} is not one of {known}")
        return named

    async def _answer(self, run: Run) -> web.StreamResponse:
        """Try engines until one answers."""
        with self._parts.queue.enter(await self._request(run)) as lease:
            try:
                return await self._try(run, lease)
            except RejectedError as error:
                why = str(error)
                run.decision.judgement = error.judgement or run.decision.judgement
                for attempt in run.decision.attempts[-1:]:
                    attempt.outcome = attempt.outcome or why
                if run.last_error is not None and str(run.last_error) not in why:
                    why = f"{why}; last failure: {run.last_error}"
                return await self._give_up(
                    run, error.status, error.code, why, retry_after_s=error.retry_after_s or None
                )
            except EngineRefusedError as error:
                run.decision.attempts[-1].outcome = str(error)
                return self._relay_refusal(run, error)

    async def _request(self, run: Run) -> Request:
        """What the dispatcher knows of it."""
        prefixes, model, body = self._parts.prefixes, run.decision.model, run.body
        tokens = await self._tokens(run)
        if tokens is not None:
            run.decision.prompt_tokens = len(tokens)
            prefixes.remember(run.number, tokens, body.salt, model)
        run.keys = prefixes.keys(run.number, model)
        return Request(
            number=run.number,
            model=model,
            arrived=run.arrived,
            tokens=len(tokens) if tokens is not None else None,
            keys=run.keys,
            tenant=body.tenant,
            service=body.service,
            output_max=body.max_tokens,
            session=name_of(run.http.headers.get("X-Session-Id")) or body.session or body.tenant,
        )

    def _traced(self, run: Run) -> AnsweredRequest | None:
        """What a trace has of a request that has ended; None if its tokens are not known."""
        decision = run.decision
        served = decision.attempts[-1].served if decision.attempts else None
        if served is None or served.completion_tokens is None:
            return None
        prompt_tokens = decision.prompt_tokens or served.prompt_tokens
        if prompt_tokens is None or not all(
            0 <= count <= TOKENS_MAX for count in (prompt_tokens, served.completion_tokens)
        ):
            return None
        page_tokens = self._parts.prefixes.key_tokens(decision.model)
        return AnsweredRequest(
            run.arrived, prompt_tokens, served.completion_tokens, run.keys, page_tokens
        )

    async def _try(self, run: Run, lease: Lease) -> web.StreamResponse:
        """Send the request to engines, until one begins to answer.

        Raises:
            RejectedError: no engine was free in time, or too many have failed.
            EngineRefusedError: an engine refused the request.
        """
        parts, decision = self._parts, run.decision
        while True:
            started = parts.clock()
            try:
                assign = await lease.assigned()
            finally:
                run.waited(parts.clock() - started)
            parts.bringer.assigned(run.number, decision.model, assign.prefill, run.keys)
            decision.judgement = parts.dispatcher.admission.judgement(run.number)
            attempt = decision.attempted(assign, parts.clock() - run.arrived)
            parts.metrics.assigned(self._policy, str(assign.plan))
            try:
                return await self._sender.send(run, lease, assign, attempt)
            except EngineError as error:
                run.last_error = error
                attempt.outcome = str(error)
                retried = run.response is None and len(decision.attempts) < self._queue.tries
                parts.metrics.failed(error.engine, retried=retried)
                if error.sick:
                    parts.membership.broke(error.engine)
                if run.response is not None:
                    return await self._give_up(run, 502, "engine_failed", str(error))
                parts.prefixes.unexpect(run.number, error.engine)
                lease.failed(error.engine, error.brief)  # a journal has it

    async def _tokens(self, run: Run) -> list[int] | None:
        """The prompt as token ids, if the policy needs them or the request has them."""
        body = run.body
        if body.rendered is None or not self._parts.prefixes.needed:
            return body.tokens
        started = self._parts.clock()
        tokens = await self._parts.prompts.tokenize(run.decision.model, body.rendered)
        run.decision.tokenize_s = self._parts.clock() - started
        return tokens

    async def _give_up(
        self, run: Run, status: int, code: str, why: str, *, retry_after_s: float | None = None
    ) -> web.StreamResponse:
        """Send an error: a status, or an error event if the stream has begun."""
        decision = run.decision
        decision.detail = why
        if run.response is None or not run.response.prepared:
            decision.status = status
            decision.outcome = "failed" if decision.attempts else "rejected"
            return error_response(
                status, code, why, retry_after_s=retry_after_s, request_id=decision.id
            )
        decision.outcome = "broken"
        event = b"event: error\ndata: " + error_body(status, code, why) + b"\n\n"
        await self._relay.write(run.response, event)
        await self._relay.end(run.response)
        return run.response

    def _relay_refusal(self, run: Run, error: EngineRefusedError) -> web.Response:
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
