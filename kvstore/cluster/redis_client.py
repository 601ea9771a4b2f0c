"""A Redis client with time limits: without retries of its own, with our TLS context."""

from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvstore.cluster.access import EndpointTurns, StoreServers, read_login, tls_context


def redis_clients(servers: StoreServers, call_s: float) -> Callable[[], Redis]:
    """Create clients of these servers, one after the other; none is connected yet.

    Each raises ``InvalidArgument`` if a file cannot be used.

    Args:
        servers: of one Redis; the files are read for each client.
        call_s: time limit of connecting, and of the wait for an answer.
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
            retry=Retry(NoBackoff(), 0), socket_timeout=call_s, socket_connect_timeout=call_s,
            **given,
        )  # fmt: skip
        made = Redis(connection_pool=pool)
        made.auto_close_connection_pool = True
        return made

    return client


class _TlsConnection(SSLConnection):
    """A connection with a context created here: the client's own would ask for passwords."""

    def __init__(self, *, context: Any, **given: Any) -> None:
        super().__init__(**given)
        self.ssl_context.context = context
