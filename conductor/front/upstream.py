"""HTTP client for engines: every call has deadlines, and ends with an answer or an error.

:class:`EngineError` means that this engine failed and another one may serve the request;
:class:`EngineRefusedError` is an answer that every engine would give (a bad request) and is
relayed.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, Self
from weakref import WeakSet

import aiohttp

from conductor.config import DeadlineConfig
from kvstore.protocol.errors import printable

EVENT_BYTES_MAX: Final = 4 << 20
"""Maximum size of one server-sent event; the last one of a stream has usage and timings."""
ANSWER_BYTES_MAX: Final = 16 << 20
"""Maximum size of a whole completion."""
SMALL_ANSWER_BYTES_MAX: Final = 1 << 20
"""Maximum size of an engine's description or error."""
_HEADER_BYTES_MAX: Final = 16 << 10
_UNKNOWN_TYPE: Final = "application/octet-stream"
_FOREIGN: Final = (aiohttp.ClientError, OSError, ValueError, EOFError)
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_DONE_BYTES: Final = 64
_BUSY: Final = frozenset({429, 503})


class EngineError(Exception):
    """An engine did not serve a request.

    Attributes:
        engine: its id.
        what: what happened.
        sick: counts against its health; False if it is only busy.
        status: the status of its answer; 0 = none.
    """

    def __init__(self, engine: str, what: str, *, sick: bool = True, status: int = 0) -> None:
        self.what = printable(what)
        super().__init__(f"engine {engine}: {self.what}")
        self.engine = engine
        self.sick = sick
        self.status = status

    @property
    def brief(self) -> str:
        """The same without a word of the engine's answer, which may repeat the prompt."""
        return f"engine {self.engine}: " + (f"status {self.status}" if self.status else "it failed")


class EngineRefusedError(Exception):
    """An engine refused the request as invalid."""

    def __init__(self, engine: str, status: int, body: bytes, content_type: str) -> None:
        super().__init__(f"engine {engine} answered {status}")
        self.engine = engine
        self.status = status
        self.body = body
        self.content_type = content_type


@asynccontextmanager
async def _foreign_errors(engine: str, what: str) -> AsyncIterator[None]:
    """Translate errors of the HTTP client to :class:`EngineError`."""
    try:
        yield
    except TimeoutError as error:
        raise EngineError(engine, f"{what}: no answer in time") from error
    except _FOREIGN as error:
        raise _translated(engine, what, error) from error


def _translated(engine: str, what: str, error: Exception) -> EngineError:
    return EngineError(engine, f"{what}: {str(error) or type(error).__name__}")


class IdleDeadline:
    """A deadline that moves with each piece of a stream; an async context manager.

    Leaving it raises :class:`TimeoutError` if the deadline has passed. It costs one timer for many
    pieces; a timeout around each wait costs two timers for each.

    Attributes:
        waits_for: what was waited for last.
        waited_s: seconds for which each was waited for.
    """

    def __init__(self) -> None:
        self.waits_for = ""
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)
        self._due = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._since = self._loop.time()

    def wait(self, what: str, seconds: float) -> None:
        """From now on this is waited for, at most so long."""
        self._due = self._count() + seconds
        self.waits_for = what
        if self._timer is None or self._due < self._timer.when():
            self._set_timer()

    def _count(self) -> float:
        """Add the time since the last call to what was waited for; returns the time."""
        now = self._loop.time()
        self.waited_s[self.waits_for] += now - self._since
        self._since = now
        return now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        """The timer: the deadline may have moved meanwhile."""
        if self._loop.time() < self._due:
            self._set_timer()
        else:
            self._timer = None
            self._scope.reschedule(self._due)

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._count()
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(kind, error, traceback)


class Upstream:
    """One HTTP client for all engines; connections are reused."""

    def __init__(self, deadline: DeadlineConfig) -> None:
        """Create the client; an event loop must be running.

        Args:
            deadline: deadlines for engines.
        """
        self._deadline = deadline
        self._ends: WeakSet[asyncio.Future[None]] = WeakSet()  # of connections
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=deadline.connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Never accept compressed answers: a few bytes could expand to more than memory.
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            max_line_size=_HEADER_BYTES_MAX,
            max_field_size=_HEADER_BYTES_MAX,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def get(self, engine: str, url: str, timeout_s: float) -> bytes:
        """GET a small answer with status 200; returns its body.

        Raises:
            EngineError: any other answer, or none.
        """
        async with (
            _foreign_errors(engine, f"GET {url}"),
            asyncio.timeout(timeout_s),
            self._session.get(url, allow_redirects=False) as answer,
        ):
            body = await read_limited(answer, SMALL_ANSWER_BYTES_MAX)
            if answer.status != 200:
                what = f"GET {url}: status {answer.status}"
                raise EngineError(engine, what, status=answer.status)
            return body

    async def post(
        self,
        engine: str,
        url: str,
        body: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ) -> tuple[bytes, str]:
        """POST a request; returns the whole body of the answer, and its content type.

        Raises:
            EngineError: the engine did not answer correctly in time, or is busy.
            EngineRefusedError: the engine refused the request.
        """
        async with (
            _foreign_errors(engine, "POST"),
            asyncio.timeout(timeout_s),
            await self._open(engine, url, body, headers) as answer,
        ):
            return await read_limited(answer, answer_bytes_max), _content_type(answer)

    async def _open(
        self, engine: str, url: str, body: bytes, headers: Mapping[str, str] | None
    ) -> aiohttp.ClientResponse:
        """Send a request; returns an answer with a good status, body not read yet."""
        send = {"Content-Type": "application/json", **(headers or {})}
        answer = await self._session.post(url, data=body, headers=send, allow_redirects=False)
        self._hear_of_end(answer)
        if answer.status == 200 and "Content-Encoding" not in answer.headers:
            return answer
        async with answer:
            raw = await read_limited(answer, SMALL_ANSWER_BYTES_MAX)
        if 400 <= answer.status < 500 and answer.status not in _BUSY:
            raise EngineRefusedError(engine, answer.status, raw, _content_type(answer))
        what = f"status {answer.status}: {raw[:200].decode(errors='replace')}"
        raise EngineError(engine, what, sick=answer.status not in _BUSY, status=answer.status)

    def _hear_of_end(self, answer: aiohttp.ClientResponse) -> None:
        """Let those who read an answer hear that its connection has ended.

        aiohttp closes a connection with chunks that are none, and tells nobody who reads.
        """

        def tell(_: object = None) -> None:
            if not answer.content.is_eof() and answer.content.exception() is None:
                why = "the connection was closed in the middle of the answer"
                answer.content.set_exception(aiohttp.ClientPayloadError(why))

        def leave() -> None:
            if ended is not None:
                ended.remove_done_callback(tell)

        connection = answer.connection
        if connection is None or connection.protocol is None:
            return  # the whole answer is here
        ended = connection.protocol.closed
        if ended is None:
            tell()
            return
        if ended not in self._ends:
            self._ends.add(ended)
            ended.add_done_callback(_take)
        ended.add_done_callback(tell)
        connection.add_callback(leave)

    @asynccontextmanager
    async def stream(
        self, engine: str, url: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """POST a request; yields a stream of server-sent events, in pieces of whole events.

        Iterating raises :class:`EngineError` if the connection breaks, or the stream ends before
        ``[DONE]``; the caller limits the time. Leaving the context closes the connection, so that
        the engine cancels the request.

        Raises:
            EngineError: the engine did not answer correctly in time, or is busy.
            EngineRefusedError: the engine refused the request.
        """
        async with (
            _foreign_errors(engine, "POST"),
            asyncio.timeout(self._deadline.first_byte_s),
        ):
            answer = await self._open(engine, url, body, headers)
        try:
            yield self._events(engine, answer)
        finally:
            answer.close()  # a completely read answer has released its connection already

    async def _events(self, engine: str, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        rest, last = bytearray(), b""
        readany = answer.content.readany
        while True:
            try:
                piece = await readany()
            except _FOREIGN as error:
                raise _translated(engine, "stream", error) from error
            if not piece:
                if rest.strip() or not _is_done(last):
                    raise EngineError(engine, "the stream ended before it was complete")
                return
            if not rest and piece.endswith(_EVENT_ENDS) and len(piece) <= EVENT_BYTES_MAX:
                last = piece  # nearly always: whole events, as the engine wrote them
                yield piece
                continue
            seen = max(0, len(rest) - 3)  # an end of an event cannot begin before this
            rest += piece
            end = max(rest.rfind(b"\n\n", seen) + 2, rest.rfind(b"\r\n\r\n", seen) + 4)
            if end >= 4:
                last = bytes(rest[:end])
                del rest[:end]
                yield last
            if len(rest) > EVENT_BYTES_MAX:
                raise EngineError(engine, "an event of the stream is too long")


def _take(ended: asyncio.Future[None]) -> None:
    """Take why a connection has ended, so that nobody misses it."""
    if not ended.cancelled():
        ended.exception()


def _is_done(events: bytes) -> bool:
    """Whether the last of these events ends the stream."""
    return events[-_DONE_BYTES:].rstrip().endswith((b"data: [DONE]", b"data:[DONE]"))


def _content_type(answer: aiohttp.ClientResponse) -> str:
    """The content type without parameters, in a form that can be relayed."""
    kind = answer.content_type
    return kind if kind.isascii() and kind.isprintable() and ";" not in kind else _UNKNOWN_TYPE


async def read_limited(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Read the whole body of an answer.

    Raises:
        ValueError: it is too long.
    """
    pieces: list[bytes] = []
    size = 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > bytes_max:
            raise ValueError(f"the answer is longer than {bytes_max} bytes")
    return b"".join(pieces)
