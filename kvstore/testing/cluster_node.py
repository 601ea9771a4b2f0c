"""One node of a simulated cluster: it stops, goes on, is killed, and begins another life."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from kvstore.cluster.greeting import BOOT_BYTES, LocalNode
from kvstore.cluster.records import SCHEME
from kvstore.cluster.session import PeerSession
from kvstore.cluster.side import LoopTime, Peers
from kvstore.node.describe import describe
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.disk.jobs import DiskRules
from kvstore.state.remote.jobs import (
    FetchEnd,
    Holding,
    PeerFetch,
    PeerJob,
    PeerLimits,
    SpreadEnd,
)
from kvstore.state.tree.actions import Action
from kvstore.state.tree.slots import Replacement, SlotTable
from kvstore.testing.cluster_directory import SimulatedDirectory, SimulatedPublication, held_pages
from kvstore.testing.cluster_links import SimulatedLink
from kvstore.testing.cluster_serving import LentRetentions, SimulatedLoans, SimulatedService
from kvstore.testing.cluster_wires import Circuit, CircuitEnd, Wires
from kvstore.testing.followers import KnownPages
from kvstore.testing.records_on_disk import RecordsOnDisk
from kvstore.testing.slowtier import SimulatedTier
from kvstore.testing.timeline import EXTENT_BYTES, PAGE_BYTES, Timeline, page_content
from kvstore.transport.memory import MemoryNetwork, MemoryTransport

TICK_NS: Final = 2_000_000
IDLE_TICK_NS: Final = 20_000_000
"""Between deadlines of a node that nobody asks for anything any more."""
FETCH_NS: Final = 150_000_000
PEER_LEASE_MS_MAX: Final = 60
TURN_PAGES: Final = 3
UNWATCHED_NS: Final = 30_000_000
PENDING_NS: Final = 4_000_000
"""New memory that is late is there so long after it was asked for."""
FOLLOW_NS: Final = 15_000_000
"""Between attempts to follow a node's events."""


@dataclass(frozen=True)
class Extents:
    """How much memory each node has.

    Attributes:
        count: extents of four pages.
        in_flight_pages: most pages on their way from peers.
    """

    count: int = 5
    in_flight_pages: int = 6


class ClusterMemory:
    """A node's memory; that of earlier lives and owners is kept, so that late writes show.

    Args:
        time: timeline of the simulation.
        late: new memory takes some time, sometimes.

    Attributes:
        extents: by number, of this life.
    """

    def __init__(self, time: Timeline, *, late: bool) -> None:
        self.extents: dict[int, bytearray] = {}
        self._time = time
        self._kept: list[bytearray] = []
        self._addresses: dict[int, int] = {}
        #: Extents whose memory is still being created.
        self._pending: set[int] = set()
        self._late = late

    def begin(self, numbers: Sequence[int]) -> None:
        """The memory of a new life."""
        self.extents.clear()
        self._addresses.clear()
        self._pending.clear()
        for number in numbers:
            self._create(number)

    def replace(self, replaced: list[Replacement]) -> None:
        """See :class:`kvstore.node.desk.Memory`."""
        while replaced:
            old, new, in_use = replaced.pop(0)
            self._pending.discard(old)
            gone = self.extents.pop(old, None)
            if gone is not None and not in_use:
                gone[:] = bytes(EXTENT_BYTES)  # who still maps it reads zeros
            self._time.outcome.extents_retired += in_use
            if self._late and self._time.random.random() < 0.3:
                self._pending.add(new)
                self._time.at(PENDING_NS, partial(self._arrive, new))
            else:
                self._create(new)

    def address(self, number: int) -> int:
        """Where an extent is."""
        return self._addresses[number]

    def pending(self, number: int) -> bool:
        """Whether an extent's memory is still being created."""
        return number in self._pending

    def _arrive(self, number: int) -> None:
        if number in self._pending:
            self._pending.remove(number)
            self._create(number)

    def _create(self, number: int) -> None:
        made = self.extents[number] = bytearray(EXTENT_BYTES)
        self._kept.append(made)
        self._addresses[number] = np.frombuffer(made, dtype=np.uint8).ctypes.data


class _TimeOfNode(LoopTime):
    """The time of one life."""

    def __init__(self, time: Timeline, later: Callable[[int, Callable[[], None]], None]) -> None:
        self._time = time
        self._make_later = later

    def now_ns(self) -> int:
        """See :meth:`kvstore.cluster.side.LoopTime.now_ns`."""
        return self._time.now_ns

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """See :meth:`kvstore.cluster.side.LoopTime.later`."""
        self._make_later(round(delay_s * 1e9) + 1, call)


class _StoppableDesk(Desk):
    """The desk of one life; its SSD tier polls it in turns of the node."""

    turn: Callable[[Callable[[], object]], None]

    def poll_disk(self) -> None:
        """See :meth:`kvstore.node.desk.Desk.poll_disk`."""
        self.turn(super().poll_disk)


class ClusterNode:
    """One node; its engines are not part of it.

    Args:
        name: its name.
        time: timeline of the simulation.
        wires: joins it with the others.
        network: carries pages.
        extents: how much memory it has.
        names: of all nodes.
        rules: rules of its SSD tier; None = it has none.

    Attributes:
        in_flight_bytes_max: limit of the bytes on their way from peers.
        life: number of this life; 0 before the first.
        alive: it is not between two lives.
        stalled_ns: until then it was stopped, or has not been alive.
        followers: checks its own events.
        lent: how long pages stay here that others have read.
        on_disk: what its lives leave on its disk.
        resting: all engines have ended, for good; deadlines may pass a little late.
    """

    node: Node
    desk: Desk
    peers: Peers
    loans: SimulatedLoans
    service: SimulatedService
    transport: MemoryTransport
    directory: SimulatedDirectory
    publication: SimulatedPublication
    _local: LocalNode

    def __init__(
        self, name: str, time: Timeline, wires: Wires, network: MemoryNetwork, extents: Extents,
        names: Sequence[str], rules: DiskRules | None,
    ) -> None:  # fmt: skip
        self.name = name
        self.life = 0
        self.alive = False
        self.stopped = False
        self.stalled_ns = 0
        self.memory = ClusterMemory(time, late=rules is None)
        self.followers = KnownPages()
        self.links: dict[str, SimulatedLink] = {}
        self.lent = LentRetentions()
        #: Links to nodes that have left the membership since.
        self._former: list[SimulatedLink] = []
        self.rules = rules
        self.in_flight_bytes_max = extents.in_flight_pages * PAGE_BYTES
        self.disk: SimulatedTier | None = None
        self.on_disk = RecordsOnDisk()
        self._time = time
        self._wires = wires
        self._network = network
        self._extents = extents
        self._names = names
        self.resting = False
        self._waiting: list[tuple[int, Callable[[], object]]] = []
        self._others: dict[str, ClusterNode] = {}
        #: Keys on their way here, by job.
        self._coming: dict[int, PeerFetch] = {}

    # ---- turns ------------------------------------------------------------------------------

    def turn(self, call: Callable[[], object], life: int = 0) -> None:
        """Make a call: later while the node is stopped, never once that life has ended."""
        if not self.alive or life not in (0, self.life):
            return
        if self.stopped:
            self._waiting.append((self.life, call))
        else:
            call()

    def turns(self) -> Callable[[Callable[[], object]], None]:
        """:meth:`turn` for this life only."""
        life = self.life
        return lambda call: self.turn(call, life)

    def later(self, delay_ns: int, call: Callable[[], object]) -> None:
        """Make a call in a later turn of this life."""
        turn = self.turns()
        self._time.at(delay_ns, lambda: turn(call))

    # ---- lives ------------------------------------------------------------------------------

    def start(self, others: Sequence["ClusterNode"]) -> None:
        """Begin a life, with another boot id and empty memory."""
        self.life += 1
        self.alive = True
        self._others = {other.name: other for other in others}
        time, random = self._time, self._time.random
        count, in_flight = self._extents.count, self.in_flight_bytes_max
        boot = f"{self.name} {self.life}".encode().ljust(BOOT_BYTES)
        slots = SlotTable(EXTENT_BYTES, count)
        self.memory.begin([extent.number for extent in slots.extents])
        self.followers = KnownPages()
        limits = NodeLimits(count * EXTENT_BYTES // 2, PEER_LEASE_MS_MAX, TURN_PAGES, UNWATCHED_NS)
        self.node = node = Node(self.name, boot, slots, limits, lambda: random.randbytes(16))
        node.join(PeerLimits(in_flight, FETCH_NS))
        self.publication = SimulatedPublication(node.pages)
        self.desk = desk = _StoppableDesk(
            node, self.memory, self._publish, lambda: time.now_ns, partial(self.later, 1)
        )
        desk.turn = self.turns()
        if self.rules is not None:
            desk.disk = self.disk = SimulatedTier(
                time, desk, self.memory.extents, self.rules, self.on_disk
            )
            self.followers.begin(node.pages)
        local = LocalNode("simulated", self.name, boot, SCHEME)
        place = f"{self.name}/{self.life}"
        self.transport = transport = self._network.open(place, 4 * in_flight)
        self.loans = SimulatedLoans(
            time, self.later, transport, self.memory.address, self.lent, node.pages
        )
        self.service = SimulatedService(local, desk, self.loans, self.later, place, self._names)
        names = [other.name for other in others]
        self.directory = SimulatedDirectory(time, self.turns(), names)
        self._coming.clear()
        desk.peers = self.peers = Peers(
            self, self._take, slots, self.memory, [transport], self.directory, lambda _: None,
            _TimeOfNode(time, self.later),
        )  # fmt: skip
        self._local = local
        self.links.clear()
        self._former.clear()
        for other in others:
            self.meet(other)
            self.later(1, partial(self._follow, other))
        self.later(TICK_NS, self._tick)

    def meet(self, other: "ClusterNode") -> None:
        """The membership names another node; nothing happens if it did before."""
        if other.name in self.links:
            return
        session = PeerSession(other.name, self._local, [self.transport.name], f"{other.name}:1")
        link = SimulatedLink(
            session, self.peers, lambda: self._time.now_ns, self.later, partial(self._dial, other)
        )
        self.links[other.name] = link
        self.peers.add(other.name, link)
        self.later(1, link.connect)

    def part(self, other: "ClusterNode") -> None:
        """The membership names another node no more; fetches from it end now."""
        link = self.links.pop(other.name, None)
        if link is not None:
            fetching = [job.job for job in self._coming.values() if job.peer == other.name]
            self.peers.remove(other.name)
            self._former.append(link)
            self.later(2, lambda: self._check_parted(fetching))

    def kill(self) -> None:
        """End this life at once."""
        self.alive = self.stopped = False
        self._waiting.clear()
        if self.disk is not None:
            self.disk.end()
        self.transport.close()
        self._wires.ended(self.name)

    def close(self) -> None:
        """Release the resources of the last life."""
        if self.life:
            self.transport.close()

    def stop(self) -> None:
        """Run nothing until :meth:`go_on`: what comes waits."""
        self.stopped = True

    def go_on(self) -> None:
        """Make all calls that have waited, in order."""
        if not self.stopped:
            return
        self.stopped = False
        waiting, self._waiting = self._waiting, []
        self.stalled_ns = self._time.now_ns
        for life, call in waiting:
            self.turn(call, life)

    # ---- what the peer side tells the desk ----------------------------------------------------

    def located(self, number: int, holdings: Sequence[Holding]) -> None:
        """See :class:`kvstore.cluster.side.PeerDesk`."""
        self.desk.located(number, holdings)

    def peer_fetched(self, end: FetchEnd) -> None:
        """See :class:`kvstore.cluster.side.PeerDesk`."""
        job = self._coming.pop(end.job)
        pages = len(end.digests) // 16
        assert self._time.now_ns <= max(job.deadline_ns, self.stalled_ns) + TICK_NS, "a late end"
        self._time.outcome.pages_fetched += pages
        self._time.outcome.window_pages_fetched += pages * (job.shard.window_pages > 0)
        self._time.outcome.fetches_failed += pages * KEY_BYTES < len(job.keys)
        self._time.outcome.fetches_unsettled += not end.settled
        if end.digests:
            self._others[job.peer].lent.check(end, job, self._time.now_ns)
        self.desk.peer_fetched(end)

    def peer_settled(self, job: int) -> None:
        """See :class:`kvstore.cluster.side.PeerDesk`."""
        self.desk.peer_settled(job)

    def peer_standing(self, peer: str, boot: bytes) -> None:
        """See :class:`kvstore.cluster.side.PeerDesk`."""
        self.desk.peer_standing(peer, boot)

    def peer_spread(self, end: SpreadEnd) -> None:
        """See :class:`kvstore.cluster.side.PeerDesk`."""
        self.desk.peer_spread(end)

    # ---- checks -------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants of the node."""
        self.desk.self_check.run()
        self.followers.check(self.node.pages)
        if self.disk is not None:
            self.disk.check_quotas()

    def check_idle(self, others: Sequence["ClusterNode"]) -> None:
        """Assert that nothing is held, and that the directory knows what the others have."""
        self.check()
        counts = describe(self.node)
        held = {
            "leases": counts.leases, "puts": counts.puts,
            "waiting_requests": counts.waiting_requests,
        }  # fmt: skip
        assert not any(held.values()), f"{self.name} holds {held}"
        host, remote = counts.host, counts.remote
        assert host.writing_bytes == host.limbo_bytes == host.pinned_bytes == 0, (self.name, host)
        assert remote is not None
        assert remote.jobs == remote.unsettled_jobs == remote.locating == 0, (self.name, remote)
        assert remote.in_flight_bytes == 0, (self.name, remote)
        assert not self._coming, "fetches that have not ended"
        links = [*self.links.values(), *self._former]
        assert all(link.session.fetches == 0 for link in links)
        assert self.peers.transfers == 0
        assert self.peers.copier.stats().running == 0, "nodes that are asked to bring pages"
        assert self.node.remote is not None
        assert not len(self.node.remote.spreads), "copies that are waited for"
        transport = self.transport.stats()
        assert transport["in_flight_bytes"] == transport["tickets"] == 0
        assert not self.loans.open, "loans that are open"
        assert self.loans.counts["reports_true"] == 0, "bytes are damaged on their way only"
        assert all(process.peer.remote for process in self.node.processes.values())
        for other in others:
            there = {page: media for page, media in held_pages(other.node.pages).items() if media}
            assert self.directory.knows(other.name) == there, f"{self.name} of {other.name}"
        self._check_bytes()

    def _check_bytes(self) -> None:
        pages = self.node.pages
        for space in pages.spaces:
            for key, page in space.nodes.items():
                for shard, slot in page.slots.items():
                    number, _, offset = pages.slots.address(slot)
                    stored = self.memory.extents[number][offset : offset + PAGE_BYTES]
                    content = page_content(key, space.shards[shard].spec)
                    assert stored == content, "a late write landed in a READY page"

    # ---- inside -------------------------------------------------------------------------------

    def _check_parted(self, jobs: Sequence[int]) -> None:
        left = [job for job in jobs if job in self._coming]
        assert not left, f"fetches {left} from a node that has left have not ended"

    def _tick(self) -> None:
        self.desk.advance()
        busy = not self.resting or self._coming or len(self.node.waiting)
        self.later(TICK_NS if busy else IDLE_TICK_NS, self._tick)

    def _publish(self, actions: list[Action]) -> None:
        self.followers.follow(actions)
        self.publication.publish(actions)
        for action in actions:
            cause = getattr(action, "cause", "")
            assert self.disk is not None or cause != "corrupt", "a good page was dropped"

    def _take(self) -> list[PeerJob]:
        """The node's new jobs; no page is on its way twice."""
        assert self.node.remote is not None
        jobs, self.node.remote.jobs[:] = list(self.node.remote.jobs), []
        for job in jobs:
            if isinstance(job, PeerFetch):
                assert job.job not in self._coming, "the number of a job was used twice"
                for other in self._coming.values():
                    if (other.identity, other.shard) == (job.identity, job.shard):
                        assert not _keys(job.keys) & self._awaited(other), "a page comes twice"
                self._coming[job.job] = job
        return jobs

    def _awaited(self, job: PeerFetch) -> set[bytes]:
        """The pages of a job that the node waits for still; others were dropped with their head."""
        space = next(one for one in self.node.pages.spaces if one.identity == job.identity)
        awaited: set[bytes] = set()
        for key, slot in zip(_split(job.keys), job.slots, strict=True):
            page = space.index.get(PrefixKey(key))
            for shard in page.slot_columns if page is not None else ():
                assert page is not None
                if page.slots_of(shard)[page.position(PrefixKey(key))] == slot:
                    awaited.add(key)
        return awaited

    def _dial(self, other: "ClusterNode", link: SimulatedLink) -> Circuit | None:
        if not other.alive or frozenset((self.name, other.name)) in self._wires.cuts:
            return None
        served, service = other.service.accept(), other.service
        circuit = self._wires.connect(
            CircuitEnd(self.name, self.turns(), lambda frame: link.receive(circuit, frame),
                lambda: link.closed(circuit)),
            CircuitEnd(other.name, other.turns(), lambda frame: service.receive(served, frame),
                lambda: service.lost(served)),
        )  # fmt: skip
        served.circuit = circuit
        return circuit

    def _follow(self, other: "ClusterNode") -> None:
        def again() -> None:
            self.later(FOLLOW_NS, lambda: self._follow(other))

        if not other.alive or frozenset((self.name, other.name)) in self._wires.cuts:
            again()
            return
        self.directory.follow(
            self._wires, self.name, other.name, other.turns(), other.publication, again
        )


def _split(packed: bytes) -> list[bytes]:
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


def _keys(packed: bytes) -> set[bytes]:
    return set(_split(packed))
