"""The first message of a connection: who it is, its session, and the name of its engine. Pure."""

from collections.abc import Callable, Iterable
from typing import Final

from kvstore.node.requests import NodeLimits
from kvstore.protocol import wire
from kvstore.protocol.errors import CapacityError, EngineNameTaken, InvalidArgument, ProtocolError
from kvstore.protocol.page import EngineLabel
from kvstore.state.tree.sessions import Peer, Process, Session

TOKEN_BYTES: Final = 16
ORIGIN_BYTES_MAX: Final = 64
LOST_MAX: Final = 256
"""Maximum lost connections of one process whose leases and puts it has not settled."""


def refuse_hello(request: wire.Hello, peer: Peer, processes: Iterable[Process]) -> None:
    """Refuse an unsupported protocol, and a process that has lost too many connections.

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


def session_of(
    request: wire.Hello, peer: Peer, sessions: dict[bytes, Session],
    new_token: Callable[[], bytes], limits: NodeLimits,
) -> Session:  # fmt: skip
    """The session of a connection; a new one is added to ``sessions`` if needed."""
    wanted = request.session if not peer.remote else b""  # no engine's session is for peers
    session = sessions.get(wanted)
    if session is None:
        # The token survives a restart of the node, so that an engine's processes meet again.
        token = wanted if len(wanted) == TOKEN_BYTES else new_token()
        quota_bytes, name = limits.session_quota_bytes, request.name[:128]
        session = sessions[token] = Session(token, name, quota_bytes, remote=peer.remote)
    return session


def free_label(
    label: EngineLabel | None, sessions: Iterable[Session], counts: dict[str, int]
) -> EngineLabel | None:
    """The label of an engine that says Hello; None if another live engine has its name.

    An engine lives while one of its processes is connected. Processes with the same ``instance``
    are one engine, in as many sessions as they like.

    Args:
        label: as its process sent it.
        sessions: all sessions of the node.
        counts: the node's counts; those that lose a derived name are counted.

    Raises:
        EngineNameTaken: an operator chose the name of another live engine.
    """
    if label is None:
        return None
    for session in sessions:
        other = session.engine
        if other is None or other.name != label.name or other.instance == label.instance:
            continue
        if not session.live:
            continue
        if not label.chosen:
            counts["unnamed_duplicates"] += 1
            return None
        pids = sorted({one.peer.pid for one in session.processes.values() if not one.lost})
        raise EngineNameTaken(
            f"an engine named {label.name!r} is connected already (processes {pids}): give each"
            " engine a name of its own (the option `engine` of its adapter), or end that one"
        )
    return label
