"""ZMTP 3.1, the wire protocol of ZeroMQ, as far as KV events need it; pure state machine.

::

    greeting   64 bytes from each side: version, mechanism (NULL, or PLAIN: a token)
    commands   handshake, then PING, PONG, SUBSCRIBE, CANCEL
    messages   one or more frames each; a frame is flags | size | body

Every size is checked before data is kept. ``docs/decisions/0013-events-are-private.md`` says why
libzmq is not used.
"""

import hmac
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.protocol.errors import ProtocolError

Message = list[bytes]
"""The frames of one message."""

USER: Final = b"kvstore"
"""User name sent with a token; servers check only the token."""
TOKEN_BYTES_MAX: Final = 255

_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING_BYTES: Final = 64
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
GREETING_FIRST: Final = b"\xff"
"""The first byte that every peer sends."""
_VERSION: Final = b"\x03\x01"
_MECHANISM_BYTES: Final = 20
_COMMAND_BYTES_MAX: Final = 1_024
"""Maximum length of a command."""
_PING_CONTEXT_BYTES_MAX: Final = 16


class PeerError(ProtocolError):
    """The peer sent something that ends this connection.

    Attributes:
        cause: a fixed word for counters: ``greeting``, ``mechanism``, ``handshake``, ``refused``,
            ``frame``, ``too_long``, ``command``.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Side(NamedTuple):
    """The type of a socket, and the types of its peers.

    Attributes:
        socket_type: ZeroMQ's name of the type.
        peers: allowed types of peers.
    """

    socket_type: bytes
    peers: frozenset[bytes]


PUB: Final = Side(b"PUB", frozenset({b"SUB", b"XSUB"}))
SUB: Final = Side(b"SUB", frozenset({b"PUB", b"XPUB"}))
ROUTER: Final = Side(b"ROUTER", frozenset({b"DEALER", b"REQ", b"ROUTER"}))
DEALER: Final = Side(b"DEALER", frozenset({b"ROUTER", b"REP", b"DEALER"}))


class MessageLimits(NamedTuple):
    """Limits of one message.

    Attributes:
        message_bytes: maximum bytes of all frames together.
        frames: maximum number of frames.
    """

    message_bytes: int
    frames: int


class ZmtpPeer:
    """One connection to a peer.

    Attributes:
        ready: the handshake is over; messages may be sent.
        beats: the peer answers :data:`PING`.
    """

    def __init__(
        self, side: Side, limits: MessageLimits, *, token: bytes = b"", server: bool = False
    ) -> None:
        """Begin the handshake: :meth:`outgoing` has its first bytes.

        Args:
            side: type of our socket.
            limits: limits of received messages.
            token: token that both sides must know; empty = none.
            server: True if we check the token.
        """
        self.ready = False
        self.beats = False
        self._side = side
        self._limits = limits
        self._token = token
        self._server = server
        self._mechanism = b"PLAIN" if token else b"NULL"
        self._awaited = b""  # next command of the handshake; empty: the greeting
        self._out = bytearray(_greeting(self._mechanism, server=server and bool(token)))
        self._in = bytearray()
        self._frames: Message = []
        self._message_bytes = 0

    def outgoing(self) -> bytes:
        """Bytes to send to the peer now; each byte is returned once."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def feed(self, data: bytes) -> list[Message]:
        """Add received bytes; return all complete messages.

        A subscription is returned as a message of one frame: a byte 1 and the topic; its
        cancellation with a byte 0.

        Raises:
            PeerError: the bytes are invalid; the connection must be closed.
        """
        self._in += data
        messages: list[Message] = []
        at = 0
        if not self._awaited and not self.ready:
            at = self._greeted()
            if not at:
                return messages
        while True:
            if self.ready:
                at = self._collect_whole(at, messages)
            found = self._frame(at)
            if found is None:
                break
            flags, start, at = found
            body = bytes(memoryview(self._in)[start:at])
            if not self.ready:
                self._shake_hands(flags, body)
            elif flags & _COMMAND:
                self._obey(flags, body, messages)
            else:
                self._collect(flags, body, messages)
        del self._in[:at]
        return messages

    def _collect_whole(self, at: int, messages: list[Message]) -> int:
        """Remove the complete frames of messages, many at a time.

        Anything else (a command, a frame that is too long) is left.

        Returns:
            Offset of the first byte that was not removed.
        """
        seen = bytes(self._in)  # a slice of bytes is copied once only
        end = len(seen)
        most, frames_most = self._limits
        frames, held = self._frames, self._message_bytes
        while end - at >= 2:
            flags = seen[at]
            start, size = at + 2, seen[at + 1]
            if flags & _LONG:
                start = at + 9
                size = int.from_bytes(seen[at + 1 : start], "big")
            stop = start + size
            if stop > end or flags & ~(_MORE | _LONG) or size > most - held:
                break
            if flags & _MORE:
                if len(frames) + 1 >= frames_most:
                    break
                frames.append(seen[start:stop])
                held += size
            else:
                frames.append(seen[start:stop])
                messages.append(frames)
                frames, held = [], 0
            at = stop
        self._frames, self._message_bytes = frames, held
        return at

    def _greeted(self) -> int:
        """Check the greeting; returns its length if it is complete and valid, else 0."""
        seen = self._in
        if not seen:
            return 0
        signed = seen[0] == 0xFF and (len(seen) < 10 or seen[9] & 1)
        if not signed or (len(seen) > 10 and seen[10] < _VERSION[0]):
            raise PeerError("greeting", "it does not speak ZMTP 3")
        if len(seen) < _GREETING_BYTES:
            return 0
        mechanism = bytes(seen[12 : 12 + _MECHANISM_BYTES]).rstrip(b"\0")
        if mechanism != self._mechanism:
            its = mechanism.decode("ascii", "replace")
            raise PeerError(
                "mechanism",
                f"its mechanism is {its!r}, ours is {self._mechanism.decode()}"
                " (PLAIN is used with a token, NULL without)",
            )
        self.beats = seen[10] > _VERSION[0] or seen[11] >= _VERSION[1]
        if not self._token:
            self._say(b"READY", self._metadata())
            self._awaited = b"READY"
        elif self._server:
            self._awaited = b"HELLO"
        else:
            self._say(b"HELLO", _short(USER) + _short(self._token))
            self._awaited = b"WELCOME"
        return _GREETING_BYTES

    def _frame(self, at: int) -> tuple[int, int, int] | None:
        """Flags, start and end of the frame at ``at``; None if it is incomplete.

        Raises:
            PeerError: the frame is invalid or too long.
        """
        seen = self._in
        left = len(seen) - at
        if left < 2:
            return None
        flags = seen[at]
        long = bool(flags & _LONG)
        if flags & ~(_MORE | _LONG | _COMMAND) or flags & (_MORE | _COMMAND) == _MORE | _COMMAND:
            raise PeerError("frame", f"{flags:#x} are not valid flags of a frame")
        if long and left < 9:
            return None
        start = at + (9 if long else 2)
        size = int.from_bytes(seen[at + 1 : start], "big")
        command = flags & _COMMAND or not self.ready
        most = _COMMAND_BYTES_MAX if command else self._limits.message_bytes - self._message_bytes
        if size > most:
            raise PeerError(
                "too_long", f"a frame of {size} bytes is longer than the {most} allowed"
            )
        return (flags, start, start + size) if len(seen) >= start + size else None

    def _shake_hands(self, flags: int, body: bytes) -> None:
        name, said = _command(flags, body)
        if name == b"ERROR":
            reason = said[1:].decode("ascii", "replace") or "no reason given"
            raise PeerError("refused", f"it refuses the connection: {reason}")
        if name != self._awaited:
            raise PeerError("handshake", f"{name!r} came, not {self._awaited!r}")
        match name:
            case b"HELLO":
                if not hmac.compare_digest(_password(said), self._token):
                    self._say(b"ERROR", _short(b"400"))
                    raise PeerError("refused", "its token is wrong")
                self._say(b"WELCOME", b"")
                self._awaited = b"INITIATE"
                return
            case b"WELCOME":
                self._say(b"INITIATE", self._metadata())
                self._awaited = b"READY"
                return
            case b"INITIATE":
                self._say(b"READY", self._metadata())
        kind = _properties(said).get(b"socket-type", b"")
        if kind not in self._side.peers:
            raise PeerError("handshake", f"a {kind!r} socket does not go with {self._side[0]!r}")
        self.ready = True

    def _obey(self, flags: int, body: bytes, messages: list[Message]) -> None:
        """Handle a command after the handshake; unknown ones are ignored."""
        name, said = _command(flags, body)
        match name:
            case b"PING":
                self._say(b"PONG", said[2 : 2 + _PING_CONTEXT_BYTES_MAX])
            case b"SUBSCRIBE":
                messages.append([b"\x01" + said])
            case b"CANCEL":
                messages.append([b"\x00" + said])
            case b"ERROR":
                raise PeerError("refused", "it ends the connection with an error")

    def _collect(self, flags: int, body: bytes, messages: list[Message]) -> None:
        self._frames.append(body)
        self._message_bytes += len(body)
        if not flags & _MORE:
            messages.append(self._frames)
            self._frames = []
            self._message_bytes = 0
        elif len(self._frames) >= self._limits.frames:
            raise PeerError("too_long", f"a message has more than {self._limits.frames} frames")

    def _say(self, name: bytes, said: bytes) -> None:
        self._out += _framed(_COMMAND, _short(name) + said)

    def _metadata(self) -> bytes:
        kind = self._side.socket_type
        return _short(b"Socket-Type") + len(kind).to_bytes(4, "big") + kind


PING: Final = b"\x04\x07\x04PING\x00\x00"
"""The encoded PING command."""


def encode(frames: Sequence[bytes]) -> bytes:
    """Encode one message."""
    last = len(frames) - 1
    return b"".join(_framed(_MORE if at < last else 0, frame) for at, frame in enumerate(frames))


def _greeting(mechanism: bytes, *, server: bool) -> bytes:
    head = _SIGNATURE + _VERSION + mechanism.ljust(_MECHANISM_BYTES, b"\0")
    return (head + bytes([server])).ljust(_GREETING_BYTES, b"\0")


def _framed(flags: int, body: bytes) -> bytes:
    size = len(body)
    if size < 256:
        return bytes((flags, size)) + body
    return bytes((flags | _LONG,)) + size.to_bytes(8, "big") + body


def _short(text: bytes) -> bytes:
    return bytes((len(text),)) + text


def _command(flags: int, body: bytes) -> tuple[bytes, bytes]:
    """Name and body of a command."""
    if not flags & _COMMAND or not body or len(body) <= body[0]:
        raise PeerError("command", "this is not a command")
    return body[1 : 1 + body[0]], body[1 + body[0] :]


def _password(said: bytes) -> bytes:
    """The password in a HELLO."""
    user_end = 1 + said[0] if said else 0
    if not said or len(said) <= user_end or len(said) != user_end + 1 + said[user_end]:
        raise PeerError("handshake", "its HELLO has no user name and password")
    return said[user_end + 1 :]


def _properties(said: bytes) -> dict[bytes, bytes]:
    """Parse metadata; names are converted to lower case."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(said):
        name_end = at + 1 + said[at]
        start = name_end + 4
        end = start + int.from_bytes(said[name_end:start], "big")
        if start > len(said) or end > len(said):
            raise PeerError("handshake", "its metadata are truncated")
        found[said[at + 1 : name_end].lower()] = said[start:end]
        at = end
    return found
