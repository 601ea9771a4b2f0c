"""What a connection may ask for, and its first message: who it is, and its session. Pure."""

from collections.abc import Callable, Iterable
from typing import Final

from kvstore import wire
from kvstore.errors import CapacityError, InvalidArgument, ProtocolError
from kvstore.node.requests import NodeLimits
from kvstore.state.tree.sessions import Peer, Process, Session

TOKEN_BYTES: Final = 16
ORIGIN_BYTES_MAX: Final = 64
_OF_PEERS: Final = (
    wire.Hello, wire.OpenSpace, wire.Lookup, wire.Acquire, wire.Release, wire.Corrupt, wire.Ping,
    wire.Bring,
)  # fmt: skip
"""What another node may ask for: it reads, and asks this node to read."""
LOST_MAX: Final = 256
"""Maximum lost connections of one process whose leases and puts it has not settled."""


def refuse_hello(request: wire.Hello, peer: Peer, processes: Iterable[Process]) -> None:
    """Refuse a client that this node does not understand, or that forgets too much.

    Raises:
        ProtocolError, InvalidArgument: the message.
        CapacityError: its process has too many lost connections that it has not settled.
    """
    if request.major != wire.PROTOCOL_MAJOR:
        raise ProtocolError(
            f"client speaks protocol {request.major}.{request.minor},"
            f" this node {wire.PROTOCOL_MAJOR}.{wire.PROTOCOL_MINOR}"
        )
    if len(request.origin) > ORIGIN_BYTES_MAX:
        raise InvalidArgument("origin", f"{len(request.origin)} bytes, at most {ORIGIN_BYTES_MAX}")
    lost = sum(one.lost for one in processes if one.peer.identity == peer.identity)
    if lost >= LOST_MAX:
        raise CapacityError(f"{lost} earlier connections of this process still hold pages")


def refuse_others(request: wire.Request, peer: Peer) -> None:
    """Refuse what only engines, or only other nodes, may ask for.

    Raises:
        ProtocolError: the request is not one of who asks.
    """
    name = type(request).__name__
    if peer.remote and not isinstance(request, _OF_PEERS):
        raise ProtocolError(f"{name} is not for other nodes: they read")
    if not peer.remote and isinstance(request, wire.Bring):
        raise ProtocolError(f"{name} is for other nodes only")


def session_of(
    request: wire.Hello, peer: Peer, sessions: dict[bytes, Session],
    new_token: Callable[[], bytes], limits: NodeLimits,
) -> Session:  # fmt: skip
    """The session that a connection belongs to, a new one in ``sessions`` if need be."""
    wanted = request.session if not peer.remote else b""  # no engine's session is for peers
    session = sessions.get(wanted)
    if session is None:
        # The token survives a restart of the node, so that an engine's processes meet again.
        token = wanted if len(wanted) == TOKEN_BYTES else new_token()
        quota_bytes, name = limits.session_quota_bytes, request.name[:128]
        session = sessions[token] = Session(token, name, quota_bytes, remote=peer.remote)
    return session
