"""Connections of a rank of decode to those of prefill."""

import contextlib
import os
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Final

from kvstore.handoff.greeting import Greeter, Purpose
from kvstore.handoff.links import PushLink
from kvstore.handoff.peers import PeerRank
from kvstore.protocol.errors import InvalidArgument, KVStoreError, PeerUnreachable, ProtocolError
from kvstore.transport.streams import connect, host_and_port

CONNECT_S: Final = 2.0
"""For one connection, before its greeting."""
LINKING_S: Final = 20.0
"""For the links to all ranks of an instance: a handoff waits 30 s for them, usually."""
LINKING_MAX = 16
"""Links that are made side by side; so 256 ranks that take a second each are linked in time."""
PURPOSES: Final[tuple[Purpose, ...]] = ("messages", "pushes")


def link_all(
    ranks: Sequence[PeerRank], make: Callable[[PeerRank, int], None], until_ns: int
) -> None:
    """Make the links to all ranks of an instance, a few of them side by side.

    When this returns or raises, no call of ``make`` runs; if one has failed, no more are begun.

    Args:
        ranks: at least one.
        make: makes one link, until the time that it is given; called by several threads.
        until_ns: when all must be there.

    Raises:
        KVStoreError: that did not succeed; the message names a rank.
    """

    def run(rank: PeerRank) -> None:
        try:
            if time.monotonic_ns() >= until_ns:
                raise PeerUnreachable(f"no time is left to link {len(ranks)} ranks")
            make(rank, until_ns)
        except KVStoreError as error:
            raise _named(error, rank) from error

    if len(ranks) == 1:
        run(ranks[0])
        return
    count = min(len(ranks), LINKING_MAX)
    with ThreadPoolExecutor(count, "kvstore-handoff-linker") as threads:
        try:
            for made in as_completed([threads.submit(run, rank) for rank in ranks]):
                made.result()
        finally:
            threads.shutdown(cancel_futures=True)


def link_to(
    rank: PeerRank, peer: str, greeter: Greeter, tls: ssl.SSLContext | None, until_ns: int
) -> PushLink:
    """Make both connections of a link to one rank of prefill.

    Args:
        rank: as registered.
        peer: whose rank it is, for logs.
        greeter: of this rank of decode.
        tls: of who connects; None = no TLS.
        until_ns: when both must be connected; a greeting that began before may take longer.

    Raises:
        KVStoreError: that did not succeed; no connection is left.
    """
    link = PushLink(os.urandom(16), peer)
    with contextlib.ExitStack() as undo:
        for purpose in PURPOSES:
            soon_ns = min(time.monotonic_ns() + int(CONNECT_S * 1e9), until_ns)
            stream = connect(*host_and_port(rank.record.address), tls, soon_ns)
            undo.callback(stream.close)
            stream.begin(soon_ns)
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


def _named(error: KVStoreError, rank: PeerRank) -> KVStoreError:
    """The same error, with the rank that could not be linked."""
    record = rank.record
    group = f" of group {record.data_rank}" if record.data_ranks > 1 else ""
    who = f"rank {record.rank}{group} at {record.address}"
    if isinstance(error, InvalidArgument):
        what = str(error).removeprefix(f"{error.field}: ")
        return InvalidArgument(error.field, f"{who}: {what}")
    kind = ProtocolError if isinstance(error, ProtocolError) else PeerUnreachable
    return kind(f"{who}: {error}")
