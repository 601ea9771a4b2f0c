"""The HTTP application: converts requests to operations, and their results to JSON.

It checks access first, then the size, then parses the request, so that refused requests are cheap.
Every error is ``{"error": {"code", "message", "field"}}``.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route as HttpRoute

from kvstore.protocol.counts import NodeStats
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.explanation import Explanation
from kvstore.server import answers, operations
from kvstore.server.admin import prompts
from kvstore.server.admin.access import Access, is_of_no_site
from kvstore.server.admin.connections import HttpPeer
from kvstore.server.admin.link import NOBODY, AdminLink
from kvstore.server.admin.openapi import described
from kvstore.server.admin.routes import ROUTES, Question, Route, ShowConfiguration, ShowMetrics
from kvstore.server.channel import Caller
from kvstore.server.metrics import render
from kvstore.server.refusal import Refusal

HEALTH_S: Final = 2.0
"""A node whose loop does not answer within this time is not healthy."""
READY_S: Final = 5.0
PROMPTS_MAX: Final = 2
"""Maximum prompts parsed and hashed at a time; each may take 100 MB."""
BUSY_S: Final = 10.0
STRETCHES_MAX: Final = 16
DISCARD_BYTES_MAX: Final = 32 << 20
"""Maximum bytes read of a refused request's body, so that the client gets the answer."""
DISCARD_S: Final = 2.0
NUMBER_DIGITS_MAX: Final = 1_000
"""Maximum digits of a number in a path; Python converts at most 4,300."""
_PAGE: Final = (Path(__file__).parent / "docs.html").read_text()
_CODES: Final = {404: "not_found", 405: "method_not_allowed"}

Handler = Callable[[Any, Caller], Awaitable[Any]]


class NumberConvertor(IntegerConvertor):
    """A number in a path."""

    regex = f"[0-9]{{1,{NUMBER_DIGITS_MAX}}}"


register_url_convertor("number", NumberConvertor())


class App:
    """The application.

    Args:
        link: the link to the node.
        access: access control.
        open_metrics: whether metrics need no token; they do for requests to a host with a name.
        values: the settings for ``/v1/config``.
    """

    def __init__(
        self, link: AdminLink, access: Access, values: list[dict[str, Any]], *, open_metrics: bool
    ) -> None:
        self._link = link
        self._access = access
        self._values = values
        self._open_metrics = open_metrics
        self._prompts = asyncio.Semaphore(PROMPTS_MAX)
        self._document = msgspec.json.encode(described(ROUTES))
        self._handlers: dict[type[operations.Operation], Handler] = {
            operations.PingNode: partial(self._within, HEALTH_S),
            operations.ShowReadiness: partial(self._within, READY_S),
            ShowMetrics: self._metrics,
            ShowConfiguration: self._configuration,
            Question: self._explain,
        }

    def starlette(self) -> Starlette:
        """The ASGI application."""
        routes = [
            HttpRoute("/", _home), HttpRoute("/docs", _docs),
            HttpRoute("/openapi.json", self._described),
        ]  # fmt: skip
        for route in ROUTES:
            endpoint = partial(self._answer, route)
            routes.append(HttpRoute(route.path, endpoint, methods=[route.method]))
        app = Starlette(
            routes=routes,
            exception_handlers={
                Refusal: _refused, KVStoreError: _store_error, HTTPException: _http_error,
                Exception: _failed,
            },
        )  # fmt: skip
        app.router.redirect_slashes = False
        return app

    async def _described(self, _request: Request) -> Response:
        return _json(self._document)

    async def _answer(self, route: Route, request: Request) -> Response:
        """Serve one request."""
        by = NOBODY
        try:
            if route.role is not None and not self._is_open(route, request):
                peer = request.scope["state"].get("peer")
                authorization = request.headers.get("authorization", "")
                by = self._access.check(peer, authorization, route.role, prompts=route.prompts)
            prompt = route.asks is Question
            if prompt:
                await self._acquire_prompt()
            try:
                asked = await _asked(route, request)
                handler = self._handlers.get(route.asks)
                if handler is not None:
                    given = await handler(asked, by)
                elif route.rows:
                    given = await self._listed(route, asked, by)
                else:
                    given = await self._link.ask(asked, Any, by)
            finally:
                if prompt:
                    self._prompts.release()
        except (Refusal, KVStoreError):
            await _discard(request)
            raise
        except ClientDisconnect:
            return Response(status_code=400)  # the client has disconnected
        if route.gives is None:
            return Response(given, media_type="text/plain")
        return _json(msgspec.json.encode(given), route.status)

    def _is_open(self, route: Route, request: Request) -> bool:
        """Whether a request needs no token: metrics, if no page in a browser asks for them."""
        if route.asks is not ShowMetrics or not self._open_metrics:
            return False
        peer: HttpPeer | None = request.scope["state"].get("peer")
        is_unix = peer is not None and peer.unix
        return is_unix or is_of_no_site(request.headers.get("host", ""))

    async def _acquire_prompt(self) -> None:
        try:
            async with asyncio.timeout(BUSY_S):
                await self._prompts.acquire()
        except TimeoutError:
            message = f"{PROMPTS_MAX} prompts are being explained; retry later"
            raise Refusal(503, "busy", message) from None

    async def _within(self, seconds: float, asked: operations.Operation, by: Caller) -> Any:
        return await self._link.ask(asked, Any, by, seconds)

    async def _metrics(self, _asked: ShowMetrics, by: Caller) -> bytes:
        return render(await self._link.ask(operations.ShowStats(), NodeStats, by))

    async def _configuration(self, _asked: ShowConfiguration, _by: Caller) -> Any:
        return {"values": self._values}

    async def _explain(self, asked: Question, by: Caller) -> Explanation:
        if (asked.key is None) == (asked.tokens is None):
            raise Refusal(400, "invalid_argument", "give either a key or tokens", "key")
        if asked.space is None and asked.shard is not None:
            message = "a shard needs its space too"
            raise Refusal(400, "invalid_argument", message, "shard")

        async def ask(operation: operations.Operation, kind: Any) -> Any:
            return await self._link.ask(operation, kind, by)

        if asked.tokens is not None:
            return await prompts.explain(ask, asked.tokens, asked.space, asked.shard)
        assert asked.key is not None
        question = operations.ExplainKey(key=asked.key, space=asked.space, shard=asked.shard)
        found: Explanation = await ask(question, Explanation)
        return found

    async def _listed(self, route: Route, asked: Any, by: Caller) -> dict[str, Any]:
        """The requested number of rows, from as many answers of the node as needed."""
        rows: list[Any] = []
        part: dict[str, Any] = {}
        for _ in range(STRETCHES_MAX):
            part = await self._link.ask(asked, dict, by)
            rows += part[route.rows]
            left = asked.limit - len(part[route.rows])
            if part["next"] is None or left <= 0 or not part[route.rows]:
                break
            asked = msgspec.structs.replace(asked, cursor=part["next"], limit=left)
        return {**part, route.rows: rows}


async def _home(_request: Request) -> Response:
    return RedirectResponse("/docs")


async def _docs(_request: Request) -> Response:
    return HTMLResponse(_PAGE)


async def _asked(route: Route, request: Request) -> Any:
    """Convert a request to its operation.

    Raises:
        Refusal: it is invalid or too long.
    """
    in_path = request.path_params
    if not route.has_body:
        fields = {**request.query_params, **in_path}
        return _converted(fields, route, strict=False)
    body = await _body(request, route.body_bytes_max)
    try:
        if not in_path:
            return msgspec.json.decode(body, type=route.asks)
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the body is not JSON: {error}"
        if not body:
            message = "the body is empty: send a JSON object"
        raise Refusal(422, "invalid_argument", message) from error
    for name in in_path:
        if name in fields:
            raise Refusal(422, "invalid_argument", "it is in the path already", name)
    return _converted({**fields, **in_path}, route, strict=True)


def _converted(fields: dict[str, Any], route: Route, *, strict: bool) -> Any:
    try:
        return msgspec.convert(fields, route.asks, strict=strict)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error


def _invalid(error: msgspec.ValidationError) -> Refusal:
    """The refusal for an invalid request, with the field."""
    message, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").replace("[", ".").replace("]", "").strip(".")
    if not field and "field `" in message:
        field = message.partition("field `")[2].rstrip("`")
    elif not field:
        message = f"the body: {message}: send a JSON object"
    return Refusal(422, "invalid_argument", message, field)


async def _body(request: Request, most: int) -> bytes:
    size = request.headers.get("content-length", "")
    parts, length = [], int(size) if size.isdecimal() else 0
    if length <= most:
        length = 0
        async for part in request.stream():
            length += len(part)
            if length > most:
                break
            parts.append(part)
    if length > most:
        raise Refusal(413, "too_large", f"a request has at most {most} bytes")
    return b"".join(parts)


async def _discard(request: Request) -> None:
    """Read the rest of the body for a while, so that the client gets the refusal."""
    size = 0
    try:
        async with asyncio.timeout(DISCARD_S):
            async for part in request.stream():
                size += len(part)
                if size > DISCARD_BYTES_MAX:
                    break
    except (TimeoutError, ClientDisconnect, RuntimeError):  # or all of it was read
        return


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


def _error(status: int, code: str, message: str, field: str = "") -> Response:
    fault = answers.ErrorBody(code=code, message=message, field=field)
    answer = _json(msgspec.json.encode(answers.ErrorAnswer(error=fault)), status)
    if status == 401:
        answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _error(error.status, error.code, str(error), error.field)


def _store_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KVStoreError)
    return _refused(request, Refusal.of(error))


def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, _CODES.get(error.status_code, "http"), str(error.detail))


def _failed(_request: Request, _: Exception) -> Response:
    return _error(500, "internal", "see the node's log")
