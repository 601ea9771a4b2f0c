"""Connections of a rank of decode to one of prefill."""

import os
import ssl
import time
from typing import Final

from kvstore.errors import PeerUnreachable
from kvstore.handoff.greeting import Greeter, Purpose
from kvstore.handoff.links import PushLink
from kvstore.handoff.peers import PeerRank
from kvstore.transport.streams import DataStream, connect, host_and_port

CONNECT_S: Final = 2.0
"""For one connection and its greeting."""
PURPOSES: Final[tuple[Purpose, ...]] = ("messages", "pushes")


def link_to(
    rank: PeerRank, peer: str, greeter: Greeter, streams: list[DataStream],
    tls: ssl.SSLContext | None,
) -> PushLink:  # fmt: skip
    """Make both connections of a link to one rank of prefill.

    Args:
        rank: as registered.
        peer: whose rank it is, for logs.
        greeter: of this rank of decode.
        streams: gets every connection as soon as it is made; the caller closes them.
        tls: of who connects; None = no TLS.

    Raises:
        KVStoreError: that did not succeed.
    """
    link = PushLink(os.urandom(16), peer)
    for purpose in PURPOSES:
        until_ns = time.monotonic_ns() + int(CONNECT_S * 1e9)
        stream = connect(*host_and_port(rank.record.address), tls, until_ns)
        streams.append(stream)
        stream.begin(until_ns)
        boot = bytes.fromhex(rank.record.boot)
        sealed = greeter.greet(stream, purpose, link.number, boot, rank.share)
        if not link.add(purpose, sealed):
            raise PeerUnreachable("the link was closed")
    return link
