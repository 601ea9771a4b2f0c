"""Connections of a rank of decode to those of prefill."""

import contextlib
import os
import ssl
import time
from collections.abc import Sequence
from typing import Final

from kvstore.errors import PeerUnreachable
from kvstore.handoff.greeting import Greeter, Purpose
from kvstore.handoff.links import PushLink
from kvstore.handoff.peers import PeerRank
from kvstore.transport.streams import connect, host_and_port

CONNECT_S: Final = 2.0
"""For one connection and its greeting."""
PURPOSES: Final[tuple[Purpose, ...]] = ("messages", "pushes")


def link_to(rank: PeerRank, peer: str, greeter: Greeter, tls: ssl.SSLContext | None) -> PushLink:
    """Make both connections of a link to one rank of prefill.

    Args:
        rank: as registered.
        peer: whose rank it is, for logs.
        greeter: of this rank of decode.
        tls: of who connects; None = no TLS.

    Raises:
        KVStoreError: that did not succeed; no connection is left.
    """
    link = PushLink(os.urandom(16), peer)
    with contextlib.ExitStack() as undo:
        for purpose in PURPOSES:
            until_ns = time.monotonic_ns() + int(CONNECT_S * 1e9)
            stream = connect(*host_and_port(rank.record.address), tls, until_ns)
            undo.callback(stream.close)
            stream.begin(until_ns)
            boot = bytes.fromhex(rank.record.boot)
            sealed = greeter.greet(stream, purpose, link.number, boot, rank.share, rank.states)
            if not link.add(purpose, sealed):
                raise PeerUnreachable("the link was closed")
        undo.pop_all()
    return link


def end_links(links: Sequence[PushLink]) -> None:
    """Close links of decode, wait for their writers, and free their descriptors.

    Args:
        links: nobody reads them.
    """
    for link in links:
        link.close()
    for link in links:
        if link.writer is not None:
            link.writer.join()
        for purpose in PURPOSES:
            link.stream(purpose).close()
