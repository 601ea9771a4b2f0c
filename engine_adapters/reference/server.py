"""The HTTP server of an engine: OpenAI (chat) completions, routes for the Conductor and tests.

The asyncio loop runs in the main thread. The step thread passes each output with
``call_soon_threadsafe`` to a queue that never has more entries than the request has tokens.
"""

import asyncio
import contextlib
import errno
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from engine_adapters.reference import tokenizer
from engine_adapters.reference.chat import ChatAnswers, ChatBody, Rendered, TokenizeBody
from engine_adapters.reference.engine import Engine, EngineBusyError, EngineClosedError
from engine_adapters.reference.protocol import (
    BadRequestError,
    CompletionAnswers,
    CompletionBody,
    parse,
    to_request,
)
from engine_adapters.reference.request import Output, Request
from kvstore.process.privatefile import token_for
from kvstore.process.smallfile import read_token
from kvstore.protocol.errors import ConfigError, InvalidArgument, reason

_log = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 8 << 20
_OUTPUT_WAIT_S: Final = 600.0  # maximum seconds between two tokens
_REGISTER_EVERY_S: Final = 3.0
_REGISTER_TIMEOUT_S: Final = 2.0
_REFUSED: Final = frozenset({401, 403})
_ERROR_TYPES: Final = {400: "invalid_request_error", 404: "not_found_error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Properties for ``GET /v1/engine`` besides the engine's options.

    Attributes:
        events: endpoint of this engine's KV events; ``events_replay``: of their replay.
        node: id of the kvstore node on this machine.
    """

    id: str
    events: str | None = None
    events_replay: str | None = None
    node: str | None = None


@dataclass(frozen=True, slots=True)
class ConductorAt:
    """The Conductor to register with.

    Attributes:
        url: URL of the Conductor.
        token_file: file with an operate token; None = the file of a Conductor of this user on this
            machine.
    """

    url: str
    token_file: Path | None = None

    def headers(self) -> dict[str, str]:
        """The header with the token.

        Read each time, because a restarted Conductor has a new one.
        """
        token = token_for("conductor", self.url) if self.token_file is None else ""
        if self.token_file is not None:
            try:
                token = read_token(self.token_file)
            except (OSError, UnicodeDecodeError) as error:
                _log.warning("%s with the Conductor's token: %s", self.token_file, reason(error))
        return {"Authorization": f"Bearer {token}"} if token else {}


class Server:
    """Handlers over one engine."""

    def __init__(self, engine: Engine, identity: Identity) -> None:
        self._engine = engine
        self._identity = identity
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self.app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors])
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.get("/v1/engine", self._describe),
                web.get("/v1/handoffs", self._handoffs),
                web.get("/v1/requests/{id}/kv-hashes", self._kv_hashes),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat_completions),
            ]
        )

    async def drain(self, timeout_s: float) -> None:
        """Accept no more requests and wait for running ones, at most ``timeout_s``."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    async def _health(self, _: web.Request) -> web.Response:
        if self._closing or not self._engine.alive:
            return _error(503, "shutting_down", "the engine is shutting down")
        return web.json_response({"status": "ok"})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._engine.metrics.text(), content_type="text/plain")

    async def _models(self, _: web.Request) -> web.Response:
        data = [{"id": self._engine.model_name, "object": "model"}]
        return web.json_response({"object": "list", "data": data})

    async def _describe(self, _: web.Request) -> web.Response:
        engine, identity = self._engine, self._identity
        return web.json_response(
            {
                "id": identity.id,
                "role": engine.options.mode,
                "model": engine.model_name,
                "page_tokens": engine.options.page_tokens,
                "space": engine.identity.digest.hex(),
                "events": identity.events,
                "events_replay": identity.events_replay,
                "node": identity.node,
                "max_running": engine.options.limits.running_max,
                "max_model_len": engine.max_model_len,
                "handoff": engine.handoff,
                "shape": engine.model_name,
                "hardware": "cpu",
            }
        )

    async def _handoffs(self, _: web.Request) -> web.Response:
        handoffs = [
            {
                "room": one.room,
                "state": one.state.lower(),
                "seconds": round(one.seconds, 3),
                "bytes": one.moved_bytes,
                "missing_ranks": one.missing,
            }
            for one in self._engine.handoffs()
        ]
        return web.json_response({"handoffs": handoffs})

    async def _kv_hashes(self, request: web.Request) -> web.Response:
        hashes = self._engine.kv_hashes(request.match_info["id"])
        if hashes is None:
            return _error(404, "unknown_request", "no hashes of such a request are kept")
        layers = [{"k": layer.k, "v": layer.v} for layer in hashes.layers]
        return web.json_response({"prompt_tokens": hashes.prompt_tokens, "layers": layers})

    async def _tokenize(self, request: web.Request) -> web.Response:
        raw = await request.read()
        prompt = parse(raw, TokenizeBody).prompt
        tokens = tokenizer.encode(parse(raw, Rendered).prompt() if prompt is None else prompt)
        return web.json_response(
            {
                "tokens": tokens,
                "count": len(tokens),
                "max_model_len": self._engine.config.max_model_len,
            }
        )

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, parse(await http.read(), CompletionBody), CompletionAnswers)

    async def _chat_completions(self, http: web.Request) -> web.StreamResponse:
        body = parse(await http.read(), ChatBody).as_completion()
        return await self._serve(http, body, ChatAnswers)

    async def _serve(
        self, http: web.Request, body: CompletionBody,
        answers: type[CompletionAnswers] | type[ChatAnswers],
    ) -> web.StreamResponse:  # fmt: skip
        if self._closing:
            return _error(503, "shutting_down", "the engine is shutting down")
        request_id = http.headers.get("X-Request-Id") or body.request_id or uuid.uuid4().hex
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Output] = asyncio.Queue()  # holds at most the request's tokens

        def emit(output: Output) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        request = to_request(body, request_id, self._engine, emit)
        made = answers(request, self._engine.model_name, with_ids=body.return_token_ids)
        answer = _Answer(request, outputs, made)
        self._active += 1
        self._idle.clear()
        submitted = False
        try:
            self._engine.submit(request)
            submitted = True
            first = await answer.next()
            if first.finish_reason in ("overloaded", "shutdown"):
                return _error(503, first.finish_reason, "the engine cannot serve this now")
            return await (answer.stream(http, first) if body.stream else answer.whole(first))
        except InvalidArgument as error:
            raise BadRequestError(f"kv_transfer_params.{error}") from error
        except (EngineBusyError, EngineClosedError) as error:
            code = "overloaded" if isinstance(error, EngineBusyError) else "shutting_down"
            return _error(503, code, str(error))
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()
            if submitted and not answer.ended:  # the client disconnected, or waited too long
                self._engine.abort(request)


class _Answer:
    """Converts the outputs of one request to a response."""

    def __init__(
        self, request: Request, outputs: asyncio.Queue[Output],
        answers: CompletionAnswers | ChatAnswers,
    ) -> None:  # fmt: skip
        self._request = request
        self._outputs = outputs
        self._answers = answers
        self.ended = False

    async def next(self) -> Output:
        """The next output.

        Raises:
            TimeoutError: no output in time.
        """
        async with asyncio.timeout(_OUTPUT_WAIT_S):
            output = await self._outputs.get()
        self.ended = output.finish_reason is not None
        return output

    async def whole(self, first: Output) -> web.Response:
        """One JSON answer with the whole output."""
        outputs = [first]
        while not self.ended:
            outputs.append(await self.next())
        last = outputs[-1]
        if last.finish_reason in ("overloaded", "shutdown"):
            return _error(503, last.finish_reason, "the engine is shutting down")
        merged = last._replace(
            tokens=[token for output in outputs for token in output.tokens],
            text="".join(output.text for output in outputs),
            logprobs=[by_token for output in outputs for by_token in output.logprobs],
        )
        body = msgspec.json.encode(self._answers.whole(merged))
        headers = {"X-Request-Id": self._request.id}
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def stream(self, http: web.Request, first: Output) -> web.StreamResponse:
        """Server-sent events, one per token."""
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Request-Id": self._request.id,
            }
        )
        await response.prepare(http)
        output = first
        while True:
            await response.write(
                b"data: " + msgspec.json.encode(self._answers.chunk(output)) + b"\n\n"
            )
            if self.ended:
                break
            output = await self.next()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A middleware that returns errors in OpenAI's format."""
    try:
        return await handler(request)
    except BadRequestError as error:
        return _error(400, "invalid_value", str(error))
    except web.HTTPException as error:
        return _error(error.status, "http", error.text or error.reason)
    except TimeoutError:
        return _error(504, "timeout", "the engine gave no token in time")


def _error(status: int, code: str, message: str) -> web.Response:
    kind = _ERROR_TYPES.get(status, "server_error")
    body = {"error": {"message": message, "type": kind, "code": code}}
    return web.json_response(body, status=status)


async def keep_registered(conductor: "ConductorAt", engine_id: str, role: str, url: str) -> None:
    """Register with the Conductor repeatedly, so that a restarted one knows this engine.

    When cancelled, it unregisters once, without retries.
    """
    refused = missed = False
    body = {"id": engine_id, "role": "mixed" if role == "mono" else role, "url": url}
    timeout = aiohttp.ClientTimeout(total=_REGISTER_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        try:
            while True:
                try:
                    address = f"{conductor.url}/v1/engines"
                    headers = conductor.headers()
                    async with session.post(address, json=body, headers=headers) as response:
                        pass
                    if response.status in _REFUSED and not refused:
                        _log.warning("the conductor refuses our token (%d)", response.status)
                    refused, missed = response.status in _REFUSED, False
                except (aiohttp.ClientError, TimeoutError) as error:
                    if not missed:
                        _log.warning("the conductor does not answer: %s", error)
                    missed = True
                await asyncio.sleep(_REGISTER_EVERY_S)
        finally:
            try:
                address = f"{conductor.url}/v1/engines/{engine_id}"
                async with session.delete(address, headers=conductor.headers()):
                    pass
            except (aiohttp.ClientError, TimeoutError):
                _log.info("could not unregister from the conductor")


async def serve(
    server: Server,
    engine: Engine,
    *,
    listen: tuple[str, int],
    conductor: ConductorAt | None,
    stop: asyncio.Event,
    ready: Callable[[str], None],
    drain_s: float = 5.0,
    engine_id: str = "engine",
) -> bool:
    """Serve at ``listen`` until ``stop`` is set, then stop within about ``3 * drain_s``.

    Args:
        server: server of a started engine.
        engine: closed at the end.
        listen: IP address and port; port 0 = any free one.
        conductor: the Conductor to register with, or None.
        stop: stops the service.
        ready: called with the URL when the server answers.
        drain_s: seconds for running requests.
        engine_id: name to register.

    Returns:
        Whether the engine ended in time.

    Raises:
        ConfigError: the port is in use, or the address is not of this machine.
    """
    runner = web.AppRunner(
        server.app, handler_cancellation=True, access_log=None, shutdown_timeout=drain_s
    )
    await runner.setup()
    host, port = listen
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            # From Python 3.12 on the error of a foreign address has no number.
            taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            option = "--port" if taken else "--host"
            raise ConfigError(f"{option}: {reason(error)}") from error
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{runner.addresses[0][1]}"
        ready(url)
        async with asyncio.TaskGroup() as tasks:
            registered: asyncio.Task[None] | None = None
            if conductor is not None:
                role = engine.options.mode
                registered = tasks.create_task(keep_registered(conductor, engine_id, role, url))
            await stop.wait()
            if registered is not None:
                registered.cancel()
        await server.drain(drain_s)
        return await asyncio.to_thread(engine.close, drain_s)
    finally:
        await runner.cleanup()
