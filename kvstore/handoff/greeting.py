"""The start of a connection between the managers of prefill and decode, and its frames.

Both sides prove that they know a secret, which is never sent: prefill sends a challenge, decode
answers with its own nonce and an HMAC of both, prefill answers with another one. The key of the
connection is derived from both nonces; each later frame ends with an HMAC over its number and its
body. The data after a head of ranges has digests instead. Nothing is encrypted.

A frame is its length in 4 bytes, little-endian, the body, and after the greeting 16 bytes of HMAC.
"""

import hashlib
import hmac
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from kvstore.handoff.messages import MESSAGE_BYTES_MAX, UNREADABLE
from kvstore.handoff.ranks import RankGroup, RankPart, Share, Span, plan_ranks
from kvstore.handoff.shape import PoolShape
from kvstore.handoff.state_data import check_alike
from kvstore.handoff.tables import LinkTarget
from kvstore.mover.memory import memory_at
from kvstore.mover.ranges import (
    STEP_BYTES,
    FrameBuffer,
    Places,
    digest_ranges,
    receive_frame,
    receive_ranges,
    send_ranges,
)
from kvstore.process.smallfile import read_small
from kvstore.protocol.errors import (
    ConfigError,
    InvalidArgument,
    PeerUnreachable,
    ProtocolError,
    reason,
)
from kvstore.transport.streams import DataStream, receive_bytes

Purpose = Literal["messages", "pushes"]
"""Purpose of a connection: ``messages`` of decode, or messages and ranges of prefill
(``pushes``)."""
PROTOCOL: Final = 2
NONCE_BYTES: Final = 16
SECRET_BYTES_MIN: Final = 16
CONNECT_S = 2.0
"""Time limit of one connection, before its greeting."""
GREETING_S = 2.0
"""Time limit of a greeting."""
_GREETING_BYTES_MAX: Final = 64 * 1024
"""Enough for RANKS_MAX ranks of decode, which take at most 22 bytes each."""
_MAC_BYTES: Final = 16
_FRAME_BYTES: Final = 32 * 1024
"""Longer frames are received in two steps; RANGES_MAX ranges take 28 KiB."""


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="kvstore-handoff"):
    """Prefill: the first frame of a connection."""

    protocol: int
    nonce: bytes


class LinkGreeting(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Decode: its identity, and the purpose of this connection.

    Attributes:
        protocol: version of the protocol.
        purpose: ``messages`` of decode, or ``pushes`` of prefill.
        link: 16 random bytes, the same for both connections of a link.
        nonce: 16 random bytes.
        name: name of the decode engine, for logs.
        space: identifies the KV that may be shared; both sides must have the same.
        shape: shape of the pool.
        group: all ranks of decode, and the number of this rank.
        part: the KV that this prefill rank sends to this decode rank over the link; or None.
        has_aux: whether the link carries the aux data.
        states: planes of each state buffer that are sent over this link; empty = none.
        proof: HMAC of both nonces and all other fields.
    """

    protocol: int
    purpose: Purpose
    link: bytes
    nonce: bytes
    name: str
    space: bytes
    shape: PoolShape
    group: RankGroup
    part: RankPart | None
    has_aux: bool
    states: tuple[Span, ...]
    proof: bytes


class Greeted(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Prefill: it proves that it knows the secret; ``boot`` is that of its registration."""

    boot: bytes
    proof: bytes


class GreetingRefused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Prefill: it refuses this connection."""

    field: str
    message: str


_challenge: Final = msgspec.msgpack.Decoder(Challenge)
_greeting: Final = msgspec.msgpack.Decoder(LinkGreeting)
_answer: Final = msgspec.msgpack.Decoder(Greeted | GreetingRefused)


def read_secret(path: Path) -> bytes:
    """The secret in a file, without white space at both ends.

    Raises:
        ConfigError: the file cannot be read, other users may read it, or it is shorter than 16
            bytes.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path}: other users may read the secret: chmod 600")
        secret = read_small(path).strip()
    except OSError as error:
        raise ConfigError(f"{path}: the secret cannot be read: {reason(error)}") from error
    if len(secret) < SECRET_BYTES_MIN:
        raise ConfigError(f"{path}: a secret has {SECRET_BYTES_MIN} bytes at least")
    return secret


def proof_of(secret: bytes, what: bytes, *parts: bytes) -> bytes:
    """An HMAC-SHA256 of parts, for one purpose."""
    mac = hmac.new(secret, what, hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "little") + part)
    return mac.digest()


class SealedStream:
    """Frames of one connection after its greeting; one direction is used, by one thread.

    Args:
        stream: owned by this object from now on.
        key: of the connection.
    """

    def __init__(self, stream: DataStream, key: bytes) -> None:
        self._stream = stream
        self._key = key
        self._count = 0
        self._frame = FrameBuffer(_FRAME_BYTES)

    def send(self, body: bytes, after: Places, limit_s: float) -> None:
        """Send a frame, and the memory that follows it; raises as :meth:`DataStream.send`."""
        head = len(body).to_bytes(4, "little")
        frame = head + body + self._mac(body)
        descriptor = self._stream.descriptor
        if descriptor is not None and after:
            send_ranges(descriptor, frame, after, limit_s)
        else:
            self._stream.send([frame, *_views(after)], _after(limit_s))

    def receive(self, silence_s: float) -> bytes:
        """The body of the next frame.

        Raises:
            ProtocolError: it is too long, or its HMAC is wrong.
            TransferTimeout: nothing came within ``silence_s``.
            PeerUnreachable: the connection broke.
        """
        rest = self._receive_rest(silence_s)
        body = rest[:-_MAC_BYTES]
        if not hmac.compare_digest(rest[-_MAC_BYTES:], self._mac(body)):
            raise ProtocolError("a frame was changed on its way")
        return body

    def _receive_rest(self, silence_s: float) -> bytes:
        """Body and HMAC of the next frame."""
        descriptor = self._stream.descriptor
        if descriptor is not None:
            size = receive_frame(descriptor, self._frame, _MAC_BYTES, silence_s)
            if size <= _FRAME_BYTES:
                return self._frame.read(size)
        else:
            head = receive_bytes(self._stream, 4, _after(silence_s))
            size = int.from_bytes(head, "little") + _MAC_BYTES
        if size > MESSAGE_BYTES_MAX + _MAC_BYTES:
            raise ProtocolError(f"a frame of {size - _MAC_BYTES} bytes")
        return receive_bytes(self._stream, size, _after(silence_s))

    def receive_ranges(self, places: Places, seeds: bytes, silence_s: float) -> bytes:
        """Fill memory with the data after a frame; raises as :meth:`receive`.

        Args:
            places: the target memory, in order.
            seeds: 8 bytes of each; empty = no digests.
            silence_s: time limit for each 256 KiB.

        Returns:
            16 bytes of digest of each.
        """
        descriptor = self._stream.descriptor
        if descriptor is not None:
            return receive_ranges(descriptor, places, seeds, silence_s)
        self._receive_into(_views(places), silence_s)
        return digest_ranges(places, seeds) if seeds else b""

    def _receive_into(self, buffers: Sequence[memoryview], silence_s: float) -> None:
        group: list[memoryview] = []
        size = 0
        for buffer in buffers:
            for at in range(0, len(buffer), STEP_BYTES):
                part = buffer[at : at + STEP_BYTES]
                if group and size + len(part) > STEP_BYTES:
                    self._stream.receive(group, _after(silence_s))
                    group, size = [], 0
                group.append(part)
                size += len(part)
        if group:
            self._stream.receive(group, _after(silence_s))

    def shutdown(self) -> None:
        """Break the connection; any thread may call this."""
        self._stream.shutdown()

    def close(self) -> None:
        """Free the descriptor; no other call is in progress."""
        self._stream.close()

    def _mac(self, body: bytes) -> bytes:
        number = self._count.to_bytes(8, "little")
        self._count += 1
        return hmac.digest(self._key, number + body, "sha256")[:_MAC_BYTES]


class Greeter(NamedTuple):
    """The properties of one side that greetings exchange.

    Attributes:
        secret: known to both sides.
        space: identifies the KV that may be shared.
        shape: of the pool.
        group: all ranks of this side, and the number of this rank.
        name: for logs.
        boot: of prefill.
    """

    secret: bytes
    space: bytes
    shape: PoolShape
    group: RankGroup
    name: str = ""
    boot: bytes = b""

    def greet(
        self, stream: DataStream, purpose: Purpose, link: bytes, boot: bytes, share: Share,
        states: tuple[Span, ...] = (),
    ) -> SealedStream:  # fmt: skip
        """Decode's side of a greeting.

        Args:
            stream: a new connection to prefill; the caller closes it if this raises.
            purpose: of the connection.
            link: of the connection.
            boot: expected boot of prefill.
            share: the part of the KV that the link moves.
            states: planes of each state buffer that are sent over it; empty = none.

        Raises:
            ProtocolError: this is not such a port, or the other side does not know the secret.
            PeerUnreachable: it has another boot.
            InvalidArgument: prefill refuses; ``field`` names the difference.
            TransferError: the connection broke, or took too long.
        """
        deadline_ns = _after(GREETING_S)
        try:
            challenge = _challenge.decode(_receive_plain(stream, deadline_ns))
            if challenge.protocol != PROTOCOL or len(challenge.nonce) != NONCE_BYTES:
                raise ProtocolError(f"prefill has version {challenge.protocol} of handoffs")
            nonce = os.urandom(NONCE_BYTES)
            greeting = LinkGreeting(
                PROTOCOL, purpose, link, nonce, self.name, self.space, self.shape, self.group,
                share.part, share.has_aux, states, b"",
            )  # fmt: skip
            proof = proof_of(self.secret, b"decode", challenge.nonce, _encode(greeting))
            greeting = msgspec.structs.replace(greeting, proof=proof)
            _send_plain(stream, _encode(greeting), deadline_ns)
            answer = _answer.decode(_receive_plain(stream, deadline_ns))
        except UNREADABLE as error:
            raise ProtocolError(f"no port for handoffs: {error}") from error
        if isinstance(answer, GreetingRefused):
            raise InvalidArgument(answer.field[:64], answer.message[:200])
        wanted = proof_of(self.secret, b"prefill", nonce, challenge.nonce, answer.boot)
        if not hmac.compare_digest(answer.proof, wanted):
            raise ProtocolError("prefill has another secret")
        if answer.boot != boot:
            raise PeerUnreachable("another process of prefill is at this address now")
        return SealedStream(stream, proof_of(self.secret, b"key", challenge.nonce, nonce))

    def answer(self, stream: DataStream) -> tuple[LinkGreeting, LinkTarget, SealedStream]:
        """Prefill's side of a greeting.

        Args:
            stream: a new connection; the caller closes it if this raises.

        Returns:
            Decode's greeting, the target of the link, and the connection.

        Raises:
            ProtocolError: it is not a greeting, or decode does not know the secret.
            InvalidArgument: decode does not match this pool; it was told so.
            TransferError: the connection broke, or took too long.
        """
        deadline_ns = _after(GREETING_S)
        nonce = os.urandom(NONCE_BYTES)
        _send_plain(stream, _encode(Challenge(PROTOCOL, nonce)), deadline_ns)
        try:
            greeting = _greeting.decode(_receive_plain(stream, deadline_ns))
        except (*UNREADABLE, InvalidArgument) as error:
            raise ProtocolError(f"no greeting: {error}") from error
        bare = msgspec.structs.replace(greeting, proof=b"")
        wanted = proof_of(self.secret, b"decode", nonce, _encode(bare))
        known = hmac.compare_digest(greeting.proof, wanted)
        if not known or len(greeting.link) != NONCE_BYTES or len(greeting.nonce) != NONCE_BYTES:
            refusal = GreetingRefused("secret", "decode has another secret")
            _send_plain(stream, _encode(refusal), deadline_ns)
            raise ProtocolError(refusal.message)
        try:
            target = self.target(greeting)
        except InvalidArgument as error:
            message = str(error).removeprefix(f"{error.field}: ")[:200]
            refused = GreetingRefused(error.field, message)
            _send_plain(stream, _encode(refused), deadline_ns)
            raise
        proof = proof_of(self.secret, b"prefill", greeting.nonce, nonce, self.boot)
        _send_plain(stream, _encode(Greeted(self.boot, proof)), deadline_ns)
        key = proof_of(self.secret, b"key", nonce, greeting.nonce)
        return greeting, target, SealedStream(stream, key)

    def target(self, greeting: LinkGreeting) -> LinkTarget:
        """At prefill: the target of a link, and the part of the KV that it moves.

        Raises:
            InvalidArgument: decode does not match; with the field in which it differs.
        """
        shape, group = greeting.shape, greeting.group
        unlike = {
            "protocol": greeting.protocol != PROTOCOL,
            "space": greeting.space != self.space,
            "planes_per_layer": shape.planes_per_layer != self.shape.planes_per_layer,
            "block_tokens": shape.block_tokens != self.shape.block_tokens,
            "block_bytes": shape.block_bytes * self.shape.head_count
            != self.shape.block_bytes * shape.head_count,
        }
        for field, differs in unlike.items():
            if differs:
                raise InvalidArgument(field, f"{field} of decode is not that of prefill")
        group.check(shape.plane_count // shape.planes_per_layer)
        if group.part != shape.part:
            raise InvalidArgument("ranks", "the pool of decode is not that of its rank")
        plan = plan_ranks(self.group.parts, group.parts)
        shares = {share.decode: share for share in plan.of_prefill(self.group.rank)}
        share = shares.get(group.rank)
        if share is None or (share.part, share.has_aux) != (greeting.part, greeting.has_aux):
            what = "the registered ranks of prefill are not those that it has"
            raise InvalidArgument("ranks", what)
        if share.part is not None:  # ranks of other layers may have other numbers of planes
            check_alike(self.shape.states, shape.states)
        for state, (first, stop) in zip(self.shape.states, greeting.states, strict=False):
            same = group.parts == self.group.parts and group.rank == self.group.rank
            if first < stop and not state.is_alike and not same:
                what = "the ranks are not those of prefill, and the buffer is not alike on them"
                raise InvalidArgument(f"states.{state.name}", what)
        moved = self.shape.share(share, shape.part, greeting.states)
        return LinkTarget(group.instance, group.rank, moved, frozenset(shares))


def _views(places: Places) -> list[memoryview]:
    return [memory_at(*place) for place in places if place[1]]


def _encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def _send_plain(stream: DataStream, body: bytes, deadline_ns: int) -> None:
    stream.send([len(body).to_bytes(4, "little") + body], deadline_ns)


def _receive_plain(stream: DataStream, deadline_ns: int) -> bytes:
    size = int.from_bytes(receive_bytes(stream, 4, deadline_ns), "little")
    if size > _GREETING_BYTES_MAX:
        raise ProtocolError(f"a greeting of {size} bytes")
    return receive_bytes(stream, size, deadline_ns)


def _after(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)
