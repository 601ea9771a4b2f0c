"""Connections of a decode rank to prefill ranks."""

import contextlib
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from random import uniform
from typing import Final

from kvstore.handoff.greeting import CONNECT_S, Greeter, Purpose
from kvstore.handoff.links import PushLink
from kvstore.handoff.peers import PeerRank
from kvstore.protocol.errors import InvalidArgument, KVStoreError, PeerUnreachable, ProtocolError
from kvstore.transport.streams import connect, host_and_port

LINKING_S: Final = 20.0
"""Time limit for the links to all ranks of an instance: a handoff usually waits 30 s for them."""
TRIES_MAX: Final = 3
"""Attempts to ask the registry and connect; then the waiting handoffs fail."""
PAUSE_S: Final = 0.2
"""Pause before the second attempt, on average; each further one is three times as long."""
LINKING_MAX = 16
"""Links that are connected in parallel; so 256 ranks that take a second each are linked in time."""
PURPOSES: Final[tuple[Purpose, ...]] = ("messages", "pushes")


def link_peer(
    find: Callable[[], Sequence[PeerRank]], make: Callable[[PeerRank, int], None],
    made: list[tuple[PeerRank, PushLink]], silence_s: float, over: threading.Event,
) -> None:  # fmt: skip
    """Connect the links to all ranks of an instance; retry early failures.

    Pauses grow, and differ by up to a half: when a prefill instance starts again all decode ranks
    come at once, and must not come back together.

    Args:
        find: asks the registry for the ranks.
        make: connects one link, until the given time, and adds it to ``made``; called by several
            threads.
        made: the links; the caller ends them if this raises.
        silence_s: a failure after this time is not retried.
        over: ends the pauses.

    Raises:
        KVStoreError: the last attempt has failed.
    """
    begun, pause_s = time.monotonic(), PAUSE_S
    until_ns = time.monotonic_ns() + int(LINKING_S * 1e9)
    for number in range(TRIES_MAX):
        try:
            link_all(find(), make, until_ns)
            if any(link.is_closed for _, link in made):
                raise PeerUnreachable("a link was closed while others were made")
        except ValueError as error:
            raise ProtocolError(f"the registration cannot be read: {error}") from error
        except KVStoreError as error:
            refused = isinstance(error, InvalidArgument | ProtocolError)
            silent = time.monotonic() - begun >= silence_s
            last = refused or silent or number + 1 == TRIES_MAX
            if last or over.wait(pause_s * uniform(0.5, 1.5)):
                raise
            pause_s *= 3
            end_links([link for _, link in made])
            made.clear()
        else:
            return
    raise AssertionError("the last attempt returns or raises")


def link_all(
    ranks: Sequence[PeerRank], make: Callable[[PeerRank, int], None], until_ns: int
) -> None:
    """Connect the links to all ranks of an instance, a few of them in parallel.

    When this returns or raises, no call of ``make`` runs; after a failure, no more are started.

    Args:
        ranks: at least one.
        make: connects one link, until the given time; called by several threads.
        until_ns: deadline for all links.

    Raises:
        KVStoreError: it failed; the message names a rank.
    """
    ending = threading.Event()

    def run(rank: PeerRank) -> None:
        if ending.is_set():
            return
        try:
            if time.monotonic_ns() >= until_ns:
                raise PeerUnreachable(f"no time is left to link {len(ranks)} ranks")
            make(rank, until_ns)
        except BaseException as error:
            ending.set()
            if isinstance(error, KVStoreError):
                raise _named(error, rank) from error
            raise

    if len(ranks) == 1:
        run(ranks[0])
        return
    count = min(len(ranks), LINKING_MAX)
    with ThreadPoolExecutor(count, "kvstore-handoff-linker") as threads:
        try:
            for made in as_completed([threads.submit(run, rank) for rank in ranks]):
                made.result()
        finally:
            ending.set()


def link_to(
    rank: PeerRank, peer: str, greeter: Greeter, tls: ssl.SSLContext | None, until_ns: int
) -> PushLink:
    """Connect both connections of a link to one prefill rank.

    Args:
        rank: as registered.
        peer: name of the engine, for logs.
        greeter: of this decode rank.
        tls: for the connecting side; None = no TLS.
        until_ns: deadline for both connections; a greeting that started before may take longer.

    Raises:
        KVStoreError: it failed; no connection is left open.
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
        links: no thread reads them any more.
    """
    for link in links:
        link.close()
    for link in links:
        if link.writer is not None:
            link.writer.join()
        for purpose in PURPOSES:
            link.stream(purpose).close()


def _named(error: KVStoreError, rank: PeerRank) -> KVStoreError:
    """The same error, with the rank whose link failed."""
    record = rank.record
    group = f" of group {record.data_rank}" if record.data_ranks > 1 else ""
    who = f"rank {record.rank}{group} at {record.address}"
    if isinstance(error, InvalidArgument):
        what = str(error).removeprefix(f"{error.field}: ")
        return InvalidArgument(error.field, f"{who}: {what}")
    kind = ProtocolError if isinstance(error, ProtocolError) else PeerUnreachable
    return kind(f"{who}: {error}")
