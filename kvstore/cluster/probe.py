"""Asks another node whether it would accept a session; for programs that are not nodes."""

import socket
import ssl
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from time import monotonic
from typing import Final

from kvstore.cluster.greeting import LocalNode, check_protocol
from kvstore.cluster.records import SCHEME
from kvstore.config import ServerConfig
from kvstore.config.addresses import Address
from kvstore.protocol import wire
from kvstore.protocol.errors import InvalidArgument, ProtocolError

_TIMEOUT_S: Final = 3.0
"""Time limit of each connection."""
_REJECTED_S: Final = 0.3
"""A node that rejects a certificate does so within this time after the handshake."""


Greeting = wire.PeerHello
"""The first message of a node to another one."""


@dataclass(frozen=True, slots=True)
class Willing:
    """A node would accept a session. Names and endpoints are as it sent them.

    Attributes:
        protocol: its version, as ``1.7``.
        transports: endpoint of each of its transports.
    """

    protocol: str
    transports: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Unwilling:
    """One of the two nodes refuses the session.

    Attributes:
        field: field of the greeting that is the cause; may be foreign text.
        why: for people; may be foreign text.
    """

    field: str
    why: str


def is_open(place: Address) -> bool:
    """Does anything accept connections there? Wildcard addresses are tried on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(place.host, place.host)
    if not place.port:
        return False
    try:
        socket.create_connection((host, place.port), _TIMEOUT_S).close()
    except OSError:
        return False
    return True


def greeting_of(config: ServerConfig) -> Greeting:
    """The greeting of this node. It must not run: a greeting ends its session."""
    return LocalNode(config.cluster.name, config.node.name, bytes(16), SCHEME).hello(1)


def greet(
    name: str, place: Address, tls: ssl.SSLContext | None, hello: Greeting | None
) -> Willing | Unwilling | None:
    """Connect to another node, and greet it if a greeting is given.

    Args:
        name: expected name of the other node.
        place: where its peer service listens.
        tls: None = plain text.
        hello: None = the node must only accept the connection.

    Returns:
        The answer to the greeting; None if none was given.

    Raises:
        OSError: no connection, or nothing came in time.
        ssl.SSLError: a certificate was refused.
        ProtocolError: what answers is not a node.
    """
    with closing(_connection(place, tls)) as connection:
        answer = _answer(connection, hello)
    return None if answer is None else judge(name, answer)


def judge(name: str, answer: wire.PeerWelcome | wire.Failure) -> Willing | Unwilling:
    """Interpret an answer to a greeting that should come from the node ``name``."""
    if isinstance(answer, wire.Failure):
        return Unwilling(answer.field, answer.message)
    try:
        check_protocol(answer.major, answer.minor)
        if answer.node != name:
            raise InvalidArgument("node", f"the node there is {answer.node!r}, not {name!r}")
    except InvalidArgument as error:
        return Unwilling(error.field, str(error))
    return Willing(f"{answer.major}.{answer.minor}", answer.transports)


def _connection(place: Address, tls: ssl.SSLContext | None) -> socket.socket:
    raw = socket.create_connection(place, _TIMEOUT_S)
    if tls is None:
        return raw
    try:
        return tls.wrap_socket(raw)
    except BaseException:
        raw.close()
        raise


def _answer(
    connection: socket.socket, hello: Greeting | None
) -> wire.PeerWelcome | wire.Failure | None:
    """The answer to a greeting; None = no greeting was sent.

    Raises:
        OSError: the connection broke, or nothing came in time.
        ProtocolError: what answers is not a node.
    """
    if hello is None:
        connection.settimeout(_REJECTED_S)
        try:
            if not connection.recv(1):
                raise ConnectionResetError("the other node closed the connection")
        except TimeoutError:
            pass  # it waits for a greeting
        return None
    connection.sendall(wire.encode(hello))
    frames, until_s = wire.FrameReader(), monotonic() + _TIMEOUT_S
    while monotonic() < until_s:
        data = connection.recv(4096)
        if not data:
            raise ConnectionResetError("the other node closed the connection")
        for body in frames.feed(data):
            answer = wire.decode_answer(body)
            if not isinstance(answer, wire.PeerWelcome | wire.Failure):
                raise ProtocolError(f"{type(answer).__name__} answers PeerHello")
            return answer
    raise TimeoutError("no answer to PeerHello")
