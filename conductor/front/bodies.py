"""Reads the bodies of requests, within a bound of all of them together.

Each body has a maximum size, but thousands of connections may send one at the same time, and a
client may send it as slowly as it likes, up to a deadline. What is read counts until its request
has ended, because a waiting request keeps it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from conductor.front.openai import BadRequestError

BODIES_BYTES_MAX: Final = 512 << 20
"""Bytes of the bodies of all requests that have not ended. A prompt of 128k tokens takes 0.9 MB; as
a list of tokens in Python a body takes about ten times its size besides."""
_BODY_S: Final = 60.0
"""Seconds for a client to send its request."""


class TooManyBodiesError(Exception):
    """The bodies of all requests together are too large now."""


class Bodies:
    """The bodies of requests that have not ended.

    Args:
        body_bytes_max: maximum bytes of one body.

    Attributes:
        total_bytes: bytes of the bodies that were read so far.
        total_bytes_max: maximum of ``total_bytes``.
    """

    def __init__(self, body_bytes_max: int) -> None:
        self.total_bytes = 0
        self.total_bytes_max = BODIES_BYTES_MAX
        self._body_bytes_max = body_bytes_max

    @asynccontextmanager
    async def of(self, http: web.Request) -> AsyncIterator[bytes]:
        """Read the whole body of a request, which counts until the context ends.

        Raises:
            BadRequestError: it cannot be decompressed, or is incomplete.
            TooManyBodiesError: there is no room for it.
            HTTPException: it is too long, or takes too long.
        """
        body = bytearray()
        counted: bytes | bytearray = body
        try:
            await self._read(http, body)
            counted = bytes(body)
            del body  # once is enough
            yield counted
        finally:
            self.total_bytes -= len(counted)

    async def _read(self, http: web.Request, body: bytearray) -> None:
        """Read into ``body``, whose bytes count."""
        try:
            async with asyncio.timeout(_BODY_S):
                while chunk := await http.content.readany():
                    if self.total_bytes + len(chunk) > self.total_bytes_max:
                        raise TooManyBodiesError
                    self.total_bytes += len(chunk)
                    body += chunk
                    if len(body) > self._body_bytes_max:
                        raise web.HTTPRequestEntityTooLarge(self._body_bytes_max, len(body))
        except TimeoutError as error:
            raise web.HTTPRequestTimeout from error
        except web.RequestPayloadError as error:
            raise BadRequestError("body", f"cannot be read: {error}") from error
