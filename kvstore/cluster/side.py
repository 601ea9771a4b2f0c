"""The desk's side towards other nodes: passes queries to the directory and fetches to links."""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from time import monotonic_ns
from typing import Final, Protocol

import numpy as np

from kvstore.cluster.bringing import BringEnded
from kvstore.cluster.copier import Copier
from kvstore.cluster.effects import (
    CancelTransfer,
    CarriedOut,
    Ended,
    PeerStanding,
    SlotsSettled,
    StartTransfer,
)
from kvstore.cluster.greeting import LocalNode
from kvstore.cluster.links import PeerLink
from kvstore.cluster.membership import Membership
from kvstore.cluster.session import PeerSession
from kvstore.protocol import wire
from kvstore.protocol.counts import PeerSessionCounts
from kvstore.protocol.errors import KVStoreError, PeerUnreachable, TierUnavailable, TransferTimeout
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, digest_seed, page_seeds
from kvstore.state.remote.jobs import (
    BringEnd,
    FetchEnd,
    Holding,
    Locate,
    PeerBring,
    PeerFetch,
    PeerJob,
    Spread,
    SpreadEnd,
)
from kvstore.state.tree.slots import SlotTable
from kvstore.transport.base import (
    PageTransfer,
    Range,
    TicketEnded,
    TransferEnd,
    TransferSettled,
    Transport,
)

MEMORY_POLL_S: Final = 0.005
"""Seconds between checks for the memory of an extent that has changed its tenant."""


class Locating(Protocol):
    """Answers which nodes have a prefix of some pages."""

    def locate(self, asked: Locate, found: Callable[[int, Sequence[Holding]], None]) -> None:
        """Look pages up; never blocks. ``found`` is called once, now or later."""


class PeerDesk(Protocol):
    """Gets completions; carries each out at once."""

    def located(self, number: int, holdings: Sequence[Holding]) -> None:
        """The answer to a Locate."""

    def peer_fetched(self, end: FetchEnd) -> None:
        """The end of a PeerFetch."""

    def peer_settled(self, job: int) -> None:
        """Nothing writes into the slots of an ended PeerFetch any more."""

    def peer_standing(self, peer: str, boot: bytes) -> None:
        """The session with a peer is up; ``boot`` empty: it is down."""

    def peer_spread(self, end: SpreadEnd) -> None:
        """The end of a Spread."""


class SlotMemory(Protocol):
    """The memory of the slots; see :class:`kvstore.tier.host.HostMemory`."""

    def address(self, number: int) -> int:
        """The address at which an extent is mapped."""

    def pending(self, number: int) -> bool:
        """Whether an extent's memory is still being created."""


class FetchLink(Protocol):
    """The connection to one other node; see :class:`kvstore.cluster.links.PeerLink`."""

    @property
    def up(self) -> bool:
        """Whether the other node has welcomed this one."""

    def fetch(self, job: PeerFetch) -> None:
        """Start a fetch."""

    def bring(self, job: PeerBring) -> None:
        """Ask the other node to fetch pages from here."""

    def transfer_ended(self, end: TransferEnd) -> None:
        """A transfer of the session has ended."""

    def transfer_settled(self, job: int) -> None:
        """An ended transfer does not write any more."""

    def end(self) -> None:
        """End all fetches now, and close the connection; transfers may settle later."""

    def stats(self, *, draining: bool) -> PeerSessionCounts:
        """State and counts; ``draining``: the other node's record says so."""


class LoopTime:
    """The time of the running loop."""

    def now_ns(self) -> int:
        """Monotonic time in nanoseconds."""
        return monotonic_ns()

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call a function after ``delay_s`` seconds, in a separate turn."""
        loop = asyncio.get_running_loop()
        if delay_s:
            loop.call_later(delay_s, call)
        else:
            loop.call_soon(call)


class Peers:
    """All other nodes, as the desk's peer side.

    Args:
        desk: gets the completions, in later turns of the loop.
        take: returns and removes the node's new jobs.
        slots: the places of slots.
        memory: the memory of the slots.
        transports: the preferred one first; they are closed by their owner.
        directory: says which nodes have which pages.
        ticket_ended: a revoked ticket for peers is no longer in use.
        time: of the loop; None = the running one.

    Attributes:
        copier: copies pages of this node to others.
    """

    def __init__(
        self, desk: PeerDesk, take: Callable[[], list[PeerJob]], slots: SlotTable,
        memory: SlotMemory, transports: Sequence[Transport], directory: Locating,
        ticket_ended: Callable[[bytes], None], time: LoopTime | None = None,
    ) -> None:  # fmt: skip
        self._desk = desk
        self._take = take
        self._slots = slots
        self._memory = memory
        self._transports = {one.name: one for one in transports}
        self._directory = directory
        self._ticket_ended = ticket_ended
        self._time = time or LoopTime()
        self._links: dict[str, FetchLink] = {}
        #: Fetch whose transfer is not settled → its link and transport.
        self._reading: dict[int, tuple[FetchLink, Transport]] = {}
        #: Fetches of these whose transfer waits for memory.
        self._without_memory: set[int] = set()
        self._completions: deque[Callable[[], None]] = deque()
        #: Nodes that are draining: they are asked for pages, but not to keep more.
        self._leaving: set[str] = set()
        self.copier = Copier(self._bring, self._up, self._time.now_ns)

    async def run(
        self, local: LocalNode, membership: Membership, tls: ssl.SSLContext | None
    ) -> None:
        """Keep sessions with the other nodes of a membership until cancelled.

        Args:
            local: this node.
            membership: the other nodes.
            tls: this node's certificate, and the authority of its peers; None = plain TCP.
        """
        loop = asyncio.get_running_loop()
        for transport in self._transports.values():
            loop.add_reader(transport.fileno(), self.poll, transport)
        try:
            async with asyncio.TaskGroup() as tasks, aclosing(membership.watch()) as changes:
                links: dict[str, tuple[str, asyncio.Task[None]]] = {}
                async for nodes in changes:
                    self._leaving = {name for name, at in nodes.items() if at.state == "draining"}
                    places = {name: one.endpoint for name, one in nodes.items()}
                    places.pop(local.name, None)
                    for peer, (place, task) in list(links.items()):
                        if places.get(peer) != place:
                            del links[peer]
                            self.remove(peer)
                            task.cancel()
                    for peer in places.keys() - links.keys():
                        link = self._link(peer, places[peer], local, tls)
                        self.add(peer, link)
                        links[peer] = places[peer], tasks.create_task(link.run())
        finally:
            for transport in self._transports.values():
                loop.remove_reader(transport.fileno())

    def _link(
        self, peer: str, place: str, local: LocalNode, tls: ssl.SSLContext | None
    ) -> PeerLink:
        session = PeerSession(peer, local, list(self._transports), place)
        return PeerLink(session, place, tls, self.carry)

    def add(self, peer: str, link: FetchLink) -> None:
        """Use this link for fetches from this node from now on."""
        self._links[peer] = link

    def remove(self, peer: str) -> None:
        """This node left the cluster, or is unreachable: fetches from it end now."""
        self._links.pop(peer).end()

    def flush(self) -> None:
        """Start the node's jobs; never blocks, and completes none of them at once."""
        for job in self._take():
            if isinstance(job, Locate):
                self._directory.locate(job, self._located)
                continue
            if isinstance(job, Spread):
                self.copier.spread(job, self._spread)
                continue
            link = self._links.get(job.peer)
            if link is None:
                error = PeerUnreachable(f"{job.peer!r} is not a node of this cluster")
                self._ended(FetchEnd(job.job, b"", error, settled=True))
            else:
                link.fetch(job)

    @property
    def transfers(self) -> int:
        """Transfers that are not settled."""
        return len(self._reading)

    def sessions(self) -> dict[str, PeerSessionCounts]:
        """Counts of the session with each other node."""
        return {
            name: link.stats(draining=name in self._leaving) for name, link in self._links.items()
        }

    def transports(self) -> dict[str, dict[str, int]]:
        """Counts of each transport."""
        return {name: one.stats() for name, one in self._transports.items()}

    # ---- what sessions decide ---------------------------------------------------------------

    def carry(self, link: FetchLink, effect: CarriedOut) -> None:
        """Carry out a decision of a link's session about a fetch, or a request."""
        match effect:
            case StartTransfer():
                self._start(link, effect)
            case CancelTransfer(job):
                if job in self._without_memory:
                    self._without_memory.remove(job)
                    self._not_started(effect.job, 0, TransferTimeout("the fetch has ended"))
                else:
                    self._reading[job][1].cancel(job)
            case Ended(end):
                self._ended(end)
            case SlotsSettled(job):
                self._complete(partial(self._desk.peer_settled, job))
            case PeerStanding(peer, boot):
                self._complete(partial(self._desk.peer_standing, peer, boot))
            case BringEnded(bring_end):
                self.copier.brought(bring_end)

    def _start(self, link: FetchLink, start: StartTransfer) -> None:
        job = start.fetch.job
        self._reading[job] = link, self._transports[start.ways[-1].transport]
        self._without_memory.add(job)
        self._read(start)

    def _read(self, start: StartTransfer) -> None:
        """Start a transfer once the memory of its slots exists."""
        job = start.fetch.job
        if job not in self._without_memory:
            return  # nobody waits for it any more
        pages = len(start.lent.digests) // DIGEST_BYTES
        places = [self._slots.address(slot) for slot in start.fetch.slots[:pages]]
        missing = any(self._memory.pending(extent) for extent, _, _ in places)
        if missing and self._time.now_ns() < start.deadline_ns:
            self._time.later(MEMORY_POLL_S, partial(self._read, start))
            return
        self._without_memory.remove(job)
        if missing:
            self._not_started(job, pages, TransferTimeout("no memory for the pages in time"))
            return
        try:
            transport, transfer = self._choose(start, self._transfer(start, places))
            self._reading[job] = self._reading[job][0], transport
            transport.read(transfer)
        except KVStoreError as error:
            self._not_started(job, pages, error)

    def _choose(
        self, start: StartTransfer, transfer: PageTransfer
    ) -> tuple[Transport, PageTransfer]:
        """The first transport that accepts a transfer, and the transfer adapted to it.

        Raises:
            TierUnavailable: none does.
        """
        for way in start.ways:
            asked = replace(transfer, endpoint=way.endpoint, addresses=way.addresses)
            if self._transports[way.transport].takes(asked):
                return self._transports[way.transport], asked
        raise TierUnavailable(f"no transport of {start.fetch.peer} reads these pages now")

    def _not_started(self, job: int, pages: int, error: KVStoreError) -> None:
        end = TransferEnd(job, bytes(pages), error, settled=True)
        self._time.later(0.0, partial(self._transfer_ended, end))

    def _transfer(
        self, start: StartTransfer, places: Sequence[tuple[int, int, int]]
    ) -> PageTransfer:
        """The transfer of leased pages into the leading slots of a fetch, without transport yet.

        Raises:
            TierUnavailable: the memory of a slot is not available.
        """
        fetch, lent = start.fetch, start.lent
        size = fetch.shard.page_bytes(fetch.identity)
        remote = [Range(*address, size) for address in wire.unpack_addresses(lent.addresses)]
        local = np.array(
            [self._memory.address(extent) + offset for extent, _, offset in places],
            dtype=np.uint64,
        )
        keys = fetch.keys[: len(remote) * KEY_BYTES]
        seeds = page_seeds(keys, digest_seed(fetch.identity, fetch.shard))
        return PageTransfer(
            fetch.job, "", lent.ticket, remote, local, seeds, lent.digests,
            start.deadline_ns,
        )  # fmt: skip

    # ---- completions ------------------------------------------------------------------------

    def poll(self, transport: Transport) -> None:
        """Process the ends of a transport's transfers."""
        for event in transport.poll():
            match event:
                case TransferEnd():
                    self._transfer_ended(event)
                case TransferSettled(number):
                    link, _ = self._reading.pop(number)
                    link.transfer_settled(number)
                case TicketEnded(ticket):
                    self._ticket_ended(ticket)

    def _transfer_ended(self, end: TransferEnd) -> None:
        link, _ = self._reading[end.number]
        if end.settled:
            del self._reading[end.number]
        link.transfer_ended(end)

    def _located(self, number: int, holdings: Sequence[Holding]) -> None:
        self._complete(partial(self._desk.located, number, holdings))

    def _bring(self, job: PeerBring) -> None:
        link = self._links.get(job.peer)
        if link is None:
            error = PeerUnreachable(f"{job.peer!r} is not a node of this cluster")
            self.copier.brought(BringEnd(job.number, 0, error))
        else:
            link.bring(job)

    def _up(self) -> dict[str, bool]:
        return {name: name in self._leaving for name, link in self._links.items() if link.up}

    def _spread(self, end: SpreadEnd) -> None:
        self._complete(partial(self._desk.peer_spread, end))

    def _ended(self, end: FetchEnd) -> None:
        self._complete(partial(self._desk.peer_fetched, end))

    def _complete(self, completion: Callable[[], None]) -> None:
        """Report to the desk in a later turn, because it may be carrying out decisions now."""
        self._completions.append(completion)
        if len(self._completions) == 1:
            self._time.later(0.0, self._tell)

    def _tell(self) -> None:
        completions, self._completions = self._completions, deque()
        for completion in completions:
            completion()
