"""A Redis client with time limits: without retries of its own, with our TLS context."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final, Literal

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvstore.cluster.access import EndpointTurns, StoreServers, read_login, tls_context

_GOODBYE_S: Final = 0.2
"""Time for the end of TLS, for which a server that has stopped would be waited for in vain."""
_WRAPPED: Final[dict[str, "RedisTrouble"]] = {
    "-OOM ": "full", "-NOPERM ": "login", "The user executing the script can't": "login",
}  # fmt: skip
"""Parts of what Redis 6.2 says when a command of a script fails: always the code ERR, then this."""

PRIMARY_ONLY: Final = """
local written = redis.pcall('DEL', KEYS[1] .. 'none')
if type(written) == 'table' and string.find(written.err, 'READONLY', 1, true) then
  return written
end
"""
"""The beginning of a script that only reads: it fails at a replica, whose primary may be gone.

The key does not exist. A user without the right to delete cannot tell, and reads."""

RedisTrouble = Literal["login", "late", "away", "full", "refused"]
"""Why a call failed: it rejects the login, or the rights of this user do not suffice; no answer in
time; no connection; its memory is full; it cannot do it, or is not Redis."""


def redis_clients(servers: StoreServers, call_s: float) -> Callable[[], Redis]:
    """Create clients of these servers, one after the other; none is connected yet.

    Each raises ``InvalidArgument`` if a file cannot be used.

    Args:
        servers: of one Redis; the files are read for each client.
        call_s: time limit of connecting; callers limit their calls.
    """
    turns = EndpointTurns(servers)

    def client() -> Redis:
        where, login, context = turns.next(), read_login(servers), tls_context(servers)
        kind: type[Connection] = Connection if context is None else _TlsConnection
        given: dict[str, Any] = {} if context is None else {"context": context}
        pool = ConnectionPool(
            kind, max_connections=16, host=where.host, port=where.port, protocol=2,
            username=login.user if login else None, password=login.password if login else None,
            # The client's own retries made a call to a killed server last five seconds.
            # With a socket_timeout, it sends under wait_for, which loses cancellations before 3.12.
            retry=Retry(NoBackoff(), 0), socket_timeout=None, socket_connect_timeout=call_s,
            **given,
        )  # fmt: skip
        made = Redis(connection_pool=pool)
        made.auto_close_connection_pool = True
        return made

    return client


async def disconnect(client: Redis) -> None:
    """Close all connections of a client, within a moment, whatever its server does."""
    with contextlib.suppress(OSError, exceptions.RedisError):  # TimeoutError is an OSError
        async with asyncio.timeout(_GOODBYE_S):
            await client.aclose()


def trouble_of(error: Exception) -> RedisTrouble:
    """Why a call of a client failed.

    Answers that are not of its protocol make the client raise anything: ValueError, IndexError.
    """
    match error:
        # A wrong password, or none where one is needed; a command that the user may not use.
        case exceptions.AuthenticationError() | exceptions.NoPermissionError():
            return "login"
        case TimeoutError() | exceptions.TimeoutError():
            return "late"
        case OSError() | exceptions.ConnectionError():
            return "away"
        case exceptions.OutOfMemoryError():
            return "full"
        case _:
            said = str(error)
            return next((one for part, one in _WRAPPED.items() if part in said), "refused")


class _TlsConnection(SSLConnection):
    """A connection with a context created here: the client's own would ask for passwords."""

    def __init__(self, *, context: Any, **given: Any) -> None:
        super().__init__(**given)
        self.ssl_context.context = context
