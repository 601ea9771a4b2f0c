"""What all HTTP routes share: errors with stable codes, and turns on the state's loop."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from contextlib import suppress
from time import monotonic, monotonic_ns
from typing import Any, Final, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message

from kvstore.config import Loaded, ServerConfig
from kvstore.errors import InvalidArgument, KVStoreError
from kvstore.node import Node
from kvstore.page import KEY_BYTES, PrefixKey
from kvstore.state.pages import PageTable
from kvstore.state.tree import Space
from kvstore.tier.host import HostMemory

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_TIMEOUT_S: Final = 5.0
_LOOK_S: Final = 0.25
_STATUS: Final = {
    "invalid_argument": 400, "layout_mismatch": 400, "not_found": 404, "capacity": 409,
    "config": 400, "tier_unavailable": 503, "durability_unavailable": 409,
}  # fmt: skip
_CODES: Final = {
    400: "invalid_argument", 401: "unauthorized", 403: "forbidden", 404: "not_found",
    405: "method_not_allowed", 413: "too_large",
}  # fmt: skip
BODY_BYTES_MAX: Final = 32 << 20
"""More than the longest prompt that :class:`~kvstore.server.inspect.Question` takes."""


class Fault(BaseModel):
    """Why a request was refused; ``field`` is empty when no part of it in particular is wrong."""

    code: str
    message: str
    field: str


class Refusal(BaseModel):
    """The body of every answer that is no success."""

    error: Fault


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: HTTP status.
        code: stable identifier, ``snake_case``.
        message: what is wrong and what to do.
        field: which part of the request is wrong; empty = none in particular.
    """

    def __init__(self, status: int, code: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field


class Movement(Protocol):
    """Bytes on their way between tiers; every call is made on the state's loop."""

    def progress(self) -> tuple[int, int]:
        """Pages that are done, and pages in all."""

    def finished(self) -> bool:
        """Whether nothing of it is under way any more."""

    def cancel(self) -> None:
        """Begin nothing more."""


class Movements(Protocol):
    """What moves pages between tiers; every call is made on the state's loop."""

    def prefetch(self, space: Space, keys: list[PrefixKey], deadline_ns: int) -> Movement:
        """Bring pages from the SSD into host memory, as far as that works by the deadline."""

    def demote(self, space: Space, keys: list[PrefixKey], deadline_ns: int) -> Movement:
        """Write pages of host memory to the SSD, then let go of their memory."""


class Observed(Protocol):
    """What the HTTP face shows and operates; all calls are made on the state's loop.

    Attributes:
        node: decides.
        memory: the bytes of the host tier.
        loaded: the configuration and where its values came from.
        movements: moves pages between tiers; None on a node with one tier.
    """

    node: Node
    memory: HostMemory
    loaded: Loaded[ServerConfig]
    movements: Movements | None

    def stats(self) -> dict[str, Any]:
        """One snapshot of everything that can be counted."""

    def tiers(self) -> list[dict[str, Any]]:
        """Each tier's name, sizes and state; its values are plain."""

    def policy(self) -> dict[str, Any]:
        """The policies at work.

        ``name``: of eviction; ``known``: all there are; ``configured``: the one a start takes;
        ``ssd``: those of the SSD tier and its wear, if there is one.
        """

    def set_policy(self, name: str) -> None:
        """Change the eviction policy.

        Raises:
            InvalidArgument: there is none of that name; nothing has changed.
        """


class Turns:
    """Short turns on the loop that owns the state, for threads beside it.

    Args:
        loop: the state's loop.
        observed: what may be touched there, and only there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, observed: Observed) -> None:
        """Take no turn yet."""
        self._loop = loop
        self._closed = False
        self.observed = observed

    def close(self) -> None:
        """The loop will take no more turns; who waits for one is told so."""
        self._closed = True

    def ask(self, question: Callable[[], T]) -> T:
        """Run ``question`` on the loop and wait for its answer.

        Raises:
            ApiError: 503, the loop does not answer.
        """

        async def turn() -> T:
            return question()

        if self._ending():
            raise ApiError(503, "unavailable", "the node is ending")
        asked = turn()
        try:
            future = asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError as error:  # the loop is closed
            asked.close()
            raise ApiError(503, "unavailable", "the node is ending") from error
        deadline = monotonic() + ANSWER_TIMEOUT_S
        while not self._ending() and monotonic() < deadline:
            done, _ = wait([future], _LOOK_S)
            if done:
                return future.result()
        future.cancel()
        raise ApiError(503, "unavailable", "the node does not answer; try again")

    def operate(self, change: Callable[[PageTable], T]) -> T:
        """Like :meth:`ask`, for what changes pages: its effects are published."""
        return self.ask(lambda: self.observed.node.operate(change, monotonic_ns()))

    def tell(self, change: Callable[[PageTable], None]) -> None:
        """Have ``change`` made, however long the loop takes to get to it; waits for nothing."""
        with suppress(RuntimeError):  # the loop is closed: nothing is left to change
            self._loop.call_soon_threadsafe(self.observed.node.operate, change, monotonic_ns())

    def space(self, label: str) -> Space:
        """The space of a label, or of the beginning of one (8 or more hex digits).

        Raises:
            ApiError: 404 none, 400 more than one.
        """
        spaces = self.ask(lambda: list(self.observed.node.pages.spaces))
        short = len(label) >= 8
        found = [
            one for one in spaces if one.label == label or (short and one.label.startswith(label))
        ]
        if not found:
            raise ApiError(404, "not_found", f"{label!r} is not open here; see /v1/spaces", "space")
        if len(found) > 1:
            raise ApiError(400, "invalid_argument", f"{label!r} begins several spaces", "space")
        return found[0]

    def _ending(self) -> bool:
        return self._closed


def key_of(text: str, field: str = "key") -> PrefixKey:
    """A key from its 64 hex digits.

    Raises:
        InvalidArgument: it is none.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidArgument(field, f"{text[:80]!r} is no key ({2 * KEY_BYTES} hex digits)")
    return PrefixKey(key)


def not_stored(key: str, field: str) -> ApiError:
    """What is asked of a page that a space does not have."""
    message = f"{key} is not stored in this space; ask /v1/explain why"
    return ApiError(404, "not_found", message, field)


class Checked(APIRoute):
    """A route that looks at who asks, and at how much it is, before it reads what is asked."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        answer = super().get_route_handler()
        checks = [one.dependency for one in self.dependencies if one.dependency is not None]

        async def checked(request: Request) -> Response:
            for check in checks:
                check(request)
            size = 0

            async def receive() -> Message:
                nonlocal size
                part = await request.receive()
                size += len(part.get("body", b""))
                if size > BODY_BYTES_MAX:
                    raise HTTPException(413, f"a request is {BODY_BYTES_MAX} bytes at most")
                return part

            return await answer(Request(request.scope, receive))

        return checked


def answer_errors(app: FastAPI) -> None:
    """Make every error of an app ``{"error": {"code", "message", "field"}}``."""

    def api_error(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return _answer(error.status, error.code, error.message, error.field)

    def store_error(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, KVStoreError)
        field = getattr(error, "field", "")
        message = str(error).removeprefix(f"{field}: ") if field else str(error)
        return _answer(_STATUS.get(error.code, 500), error.code, message, field)

    def not_valid(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        message = first["msg"]
        if first["type"] == "json_invalid":  # its place is that in the text
            message, field = f"the body is no JSON ({message} at character {field})", ""
        elif not field:
            message = f"the body: {message}; send a JSON object as Content-Type: application/json"
        return _answer(422, "invalid_argument", message, field)

    def http_error(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = _CODES.get(error.status_code, "http")
        return _answer(error.status_code, code, str(error.detail), "")

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(KVStoreError, store_error)
    app.add_exception_handler(RequestValidationError, not_valid)
    app.add_exception_handler(HTTPException, http_error)


def _answer(status: int, code: str, message: str, field: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    body = {"error": {"code": code, "message": message, "field": field}}
    return JSONResponse(body, status, headers)
