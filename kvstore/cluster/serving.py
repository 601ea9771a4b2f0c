"""Lets other nodes follow this node's events through its peer service.

The connection was accepted and decrypted, and its first message was FollowEvents. From then on its
bytes are copied unchanged to a socket pair whose other end belongs to the publisher's thread. Two
tasks copy, one per direction, each with one piece of data at a time: for a follower that does not
read, the publisher waits for room in that socket pair, and drops batches for this follower only.
"""

import asyncio
import contextlib
import logging
import socket
from typing import Final, NamedTuple, Protocol

from kvstore.process.faults import Faults
from kvstore.protocol.counts import EventTunnelCounts
from kvstore.protocol.wire import FollowEvents

_log = logging.getLogger(__name__)

TUNNELS_MAX: Final = 96
"""Maximum followers. Each of 15 nodes has one connection for live batches, and at times one or two
for replays and questions; the publisher has room for 128 connections in total."""
NAME_MAX: Final = TUNNELS_MAX // 16
"""Maximum connections of one node; a new one ends the oldest."""
ADDRESS_MAX: Final = TUNNELS_MAX // 2
"""Maximum connections from one address: three for each of 16 nodes that share it."""
_PIECE_BYTES: Final = 32 << 10
"""Bytes copied at a time: 14 microseconds of the loop's time without TLS, 25 with it (uvloop)."""
_GATHER_S: Final = 0.01
"""How long to wait for further live batches after a smaller piece: a busy publisher sends 500 small
pieces per second to each follower, each of which would cost nearly as much."""
_BUFFER_BYTES: Final = 64 << 10
"""Data that may wait in each direction, in addition to the kernel's socket buffers."""
_KEEPALIVE: Final = {
    socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 30_000,
}  # fmt: skip
"""A follower whose machine is gone is noticed within half a minute."""
_GONE: Final = "it left before it was served"


class ServesFollowers(Protocol):
    """The node's publication of events."""

    def serve(self, raw: socket.socket, *, replay: bool) -> None:
        """See :meth:`kvstore.events.publisher.EventPublisher.serve`."""


class _Follower(NamedTuple):
    """A connection of a follower.

    Attributes:
        node: the name that it gives itself.
        address: its source address; empty = this machine.
        writer: ends it.
    """

    node: str
    address: str
    writer: asyncio.StreamWriter


class EventTunnels:
    """All followers of this node that are other nodes.

    Args:
        publication: the node's events.

    Attributes:
        faults: followers that were refused or whose connection broke, by cause.
    """

    def __init__(self, publication: ServesFollowers) -> None:
        self.faults = Faults(_log, "a node that follows this one was disconnected")
        self._publication = publication
        self._followers: dict[int, _Follower] = {}
        self._number = 0

    def stats(self) -> EventTunnelCounts:
        """Current followers, and why others ended."""
        following = sorted(one.node for one in self._followers.values())
        return EventTunnelCounts(following=following, faults=dict(self.faults.counts))

    async def serve_events(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: FollowEvents
    ) -> None:
        """Copy data between a follower and the publisher, until one of them closes.

        Args:
            reader: data of the follower, from the first byte after its FollowEvents on.
            writer: data for it; closed at the end.
            hello: its first message; its cluster, name and scheme have been checked.
        """
        if writer.transport.is_closing():  # uvloop no longer knows its address
            self.faults.note("connection", f"{hello.node}: {_GONE}")
            return
        follower = _Follower(hello.node, _address(writer), writer)
        if not self._has_room(follower):
            writer.transport.abort()
            return
        self._number += 1
        number = self._number
        self._followers[number] = follower
        try:
            await self._splice(reader, writer, replay=hello.replay)
        except OSError as error:
            if number in self._followers:  # not replaced by a newer one, which was counted
                said = str(error) or type(error).__name__
                self.faults.note("connection", f"{hello.node}: {said}")
        finally:
            self._followers.pop(number, None)
            writer.transport.abort()

    def _has_room(self, new: "_Follower") -> bool:
        """Whether a connection may follow; the oldest one of its node is closed for it."""
        at_address = sum(one.address == new.address for one in self._followers.values())
        same = [number for number, one in self._followers.items() if one.node == new.node]
        if len(same) >= NAME_MAX:
            self.faults.note("replaced", f"{new.node}: {NAME_MAX} connections follow already")
            self._followers.pop(same[0]).writer.transport.abort()
        elif new.address and at_address >= ADDRESS_MAX:
            self.faults.note("full", f"{new.address}: {ADDRESS_MAX} connections follow already")
            return False
        elif len(self._followers) >= TUNNELS_MAX:
            self.faults.note("full", f"{new.node}: {TUNNELS_MAX} connections follow already")
            return False
        return True

    async def _splice(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replay: bool
    ) -> None:
        _notice_the_dead(writer)
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)  # noqa: FBT003
            events, requests = await asyncio.open_connection(sock=ours, limit=_BUFFER_BYTES)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        copying: list[asyncio.Task[None]] = []
        try:
            if writer.transport.is_closing():  # meanwhile; uvloop refuses to set its limits
                theirs.close()
                raise ConnectionResetError(_GONE)
            self._publication.serve(theirs, replay=replay)
            for one in (writer, requests):
                one.transport.set_write_buffer_limits(_BUFFER_BYTES)
            copying += [
                asyncio.create_task(_copy(reader, requests)),
                asyncio.create_task(_copy(events, writer, 0.0 if replay else _GATHER_S)),
            ]
            await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
        finally:
            requests.transport.abort()
            for task in copying:
                task.cancel()
            ended = await asyncio.gather(*copying, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error


def _address(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gather_s: float = 0.0
) -> None:
    """Copy data until its end.

    Args:
        reader: source.
        writer: target.
        gather_s: pause after a piece that is smaller than the maximum.

    Raises:
        OSError: a connection broke.
    """
    while data := await reader.read(_PIECE_BYTES):
        if writer.transport.is_closing():
            return  # uvloop refuses data for a connection that is closed
        writer.write(data)
        await writer.drain()
        if gather_s and len(data) < _PIECE_BYTES:
            await asyncio.sleep(gather_s)


def _notice_the_dead(writer: asyncio.StreamWriter) -> None:
    raw: socket.socket | None = writer.get_extra_info("socket")
    if raw is None or raw.family == socket.AF_UNIX:
        return
    with contextlib.suppress(OSError):  # already closed
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in _KEEPALIVE.items():
            raw.setsockopt(socket.IPPROTO_TCP, option, value)
