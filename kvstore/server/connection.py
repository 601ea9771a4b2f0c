"""Connections of sessions: engines' processes on the node's Unix socket."""

from collections.abc import Callable
from time import monotonic
from typing import Final

import msgspec

from kvstore.node.desk import Desk
from kvstore.protocol import wire
from kvstore.protocol.counts import NodeStats
from kvstore.protocol.errors import ProtocolError
from kvstore.server.frames import FrameConnection, FrameConnections
from kvstore.server.processes import Processes, credentials
from kvstore.server.status import seen_by
from kvstore.state.tree.sessions import Peer

STATS_SHARE: Final = 20
"""Statistics are cached for this many times the duration of gathering them."""


class SessionConnections:
    """All connections of sessions with one node.

    Args:
        desk: processes their messages.
        stats: returns the node's statistics, for ``Stats``.

    Attributes:
        frames: the connections; those after their Hello by their number at the desk.
    """

    def __init__(self, desk: Desk, stats: Callable[[], NodeStats]) -> None:
        self.frames = FrameConnections(desk.node.pages.counts, self._receive, self._lost)
        self._desk = desk
        self._node = desk.node
        self._stats = stats
        self._cached_stats: NodeStats | None = None
        self._cached_until_s = 0.0
        self._processes = Processes(desk.process_ended)

    def close(self) -> None:
        """Close all connections."""
        self.frames.close()
        self._processes.close()

    def begin(
        self, connection: FrameConnection, tenants: frozenset[str] | None, hello: wire.Hello,
        rest: bytes,
    ) -> None:  # fmt: skip
        """Pass Hello to the node, before this or another connection of the process can be lost.

        Args:
            connection: a connection whose socket the loop has taken over.
            tenants: tenants that its process may use; None = any.
            hello: its first message.
            rest: bytes received after it.
        """
        try:
            connection.peer = self._watch(connection, tenants)
        except ProtocolError as error:
            self.frames.refuse(connection, error)
            return
        connection.whose = f"process {connection.peer.pid or '?'}"
        connection.number = self._desk.connect(connection.peer, connection)
        self.frames.add(connection)
        self._desk.receive(connection.number, hello)
        if rest:
            connection.data_received(rest)

    def _receive(self, connection: FrameConnection, request: wire.Request) -> None:
        if isinstance(request, wire.Stats):
            seen = seen_by(self._all_stats(), connection.peer.tenants)
            connection.answer(wire.StatsReply(request.id, msgspec.json.encode(seen)))
            return
        self._desk.receive(connection.number, request)

    def _lost(self, connection: FrameConnection) -> None:
        identity = connection.peer.identity
        ended = not self._processes.runs(identity)
        self._desk.disconnect(connection.number, ended=ended)
        if not self._node.waits_for(identity):
            self._processes.forget(identity)

    def _all_stats(self) -> NodeStats:
        """The node's statistics; cached, because many engines may request them often."""
        start_s = monotonic()
        if self._cached_stats is None or start_s >= self._cached_until_s:
            self._cached_stats = self._stats()
            took_s = monotonic() - start_s
            self._cached_until_s = start_s + STATS_SHARE * took_s if took_s > 0.001 else 0.0
        return self._cached_stats

    def _watch(self, connection: FrameConnection, tenants: frozenset[str] | None) -> Peer:
        """Ask the kernel for the peer's identity, and watch its process."""
        raw = connection.raw
        assert raw is not None
        pid = credentials(raw).pid
        process = self._processes.add(raw, pid)
        return Peer(process.identity, pid, process.watched, tenants)
