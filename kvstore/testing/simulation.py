"""A whole node with its engines in one thread: simulated clock, connections, processes and memory.

The :class:`~kvstore.node.node.Node` is the real one. Its clients copy bytes a piece at a time, so
that everything else happens between two pieces: connections break, leases run out, processes end.
One seed is one history. Whatever a client reads is compared with what the page's key says it must
be, without asking the digest, so a single byte from another page ends the run.
"""

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from random import Random
from typing import Final

import numpy as np

from kvstore import wire
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity, page_keys
from kvstore.state.disk.jobs import DiskRules
from kvstore.state.table.retirement import AGAIN_NS
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import Replacement, SlotTable
from kvstore.testing import slowtier
from kvstore.testing.followers import KnownPages, page_token

PAGE_BYTES: Final = slowtier.PAGE_BYTES
EXTENT_BYTES: Final = 4 * PAGE_BYTES
PIECES: Final = 4
DELAY_NS_MAX: Final = 2_000_000
TICK_NS: Final = 1_000_000
WAIT_MS: Final = 30
LEASE_MS_MAX: Final = 20
TURN_PAGES: Final = 3
UNWATCHED_NS: Final = 30_000_000
LAST_NS: Final = 3 * AGAIN_NS
"""After the end of every process: extents that others still read then are looked at again."""
_SHARD: Final = ShardSpec(layout=CanonicalLayout(2048), layers=(0, 1), heads=(0, 1))
_ORIGINS: Final = count(1)

Script = Generator[int | wire.Request, wire.Answer | None, None]
"""What a process does: yields nanoseconds to pass, or a request; gets its answer, None if lost."""


@dataclass(frozen=True)
class FaultRates:
    """How likely things go wrong, as probabilities at each chance they have.

    Attributes:
        connection: a connection breaks, while a message is on its way and in each millisecond.
        process: a process ends, at each step it takes.
        slowness: a piece of a copy takes longer than any lease.
        disk: a job of the disk fails.
        flip: a record comes back from the disk with other bytes.
        unwatched: nobody can tell when a process ends.
    """

    connection: float = 0.02
    process: float = 0.002
    slowness: float = 0.02
    disk: float = 0.02
    flip: float = 0.02
    unwatched: float = 0.2


@dataclass
class SimulationOutcome:
    """What happened in a run; a test asks that each of these did happen."""

    pages_read: int = 0
    pages_stored: int = 0
    lookups_waited: int = 0
    connections_lost: int = 0
    processes_ended: int = 0
    late_pieces: int = 0
    pages_from_disk: int = 0
    disk_failures: int = 0
    pages_persisted: int = 0
    pages_checked: int = 0
    extents_retired: int = 0


@dataclass(eq=False)
class Actor:
    """One simulated process of an engine.

    Attributes:
        pid: what the kernel would call it.
        tenant: whose pages it uses.
        session: the token it shows; empty before its first Welcome.
        connection: number of the open connection; 0 = none.
        mapped: extents it has mapped; it goes on using them whatever becomes of its connection.
        watched: the kernel tells the node when it ends.
    """

    pid: int
    tenant: str
    session: bytes = b""
    connection: int = 0
    alive: bool = True
    watched: bool = True
    mapped: dict[int, bytearray] = field(default_factory=dict)
    origin: bytes = field(default_factory=lambda: next(_ORIGINS).to_bytes(8, "little"))
    awaited: int = 0
    script: Script | None = None
    serial: int = 0
    names: "count[int]" = field(default_factory=lambda: count(1))


@dataclass
class _Memory:
    """Extents by number; whoever maps one that left goes on using it."""

    outcome: SimulationOutcome
    extents: dict[int, bytearray]

    def replace(self, replaced: list[Replacement]) -> None:
        while replaced:
            old, new, in_use = replaced.pop(0)
            gone = self.extents.pop(old)
            if not in_use:
                gone[:] = bytes(EXTENT_BYTES)  # whoever still maps it reads zeros
            self.outcome.extents_retired += in_use
            self.extents[new] = bytearray(EXTENT_BYTES)


@dataclass
class _Line:
    """One connection: its answers take a while."""

    simulation: "Simulation"
    number: int = 0

    def answer(self, answer: wire.Answer) -> None:
        self.simulation.carry(self.number, answer=answer)

    def cut(self) -> None:
        assert self.simulation.is_broken(self.number), "its client had not given it up"


class Simulation:
    """One seeded history of a node and its clients.

    Args:
        seed: decides everything.
        processes: clients at any time; two tenants share them.
        extents: capacity, in extents of four pages.
        faults: what goes wrong how often.
        rules: there is an SSD tier with these rules.
    """

    def __init__(
        self, seed: int, processes: int = 5, extents: int = 5, faults: FaultRates | None = None,
        rules: DiskRules | None = None,
    ) -> None:  # fmt: skip
        """Make the node; :meth:`run` starts its clients."""
        self.random = Random(seed)
        self.faults = faults or FaultRates()
        self.outcome = SimulationOutcome()
        self.now_ns = 1
        slots = SlotTable(EXTENT_BYTES, extents)
        self.memory = {extent.number: bytearray(EXTENT_BYTES) for extent in slots.extents}
        self.followers = KnownPages()
        limits = NodeLimits(extents * EXTENT_BYTES // 2, LEASE_MS_MAX, TURN_PAGES, UNWATCHED_NS)
        self.node = Node("simulated", b"b" * 16, slots, limits, lambda: self.random.randbytes(16))
        self.desk = Desk(
            self.node, _Memory(self.outcome, self.memory), self.followers.follow,
            lambda: self.now_ns, lambda call: self.at(1, call),
        )  # fmt: skip
        self.disk = slowtier.SimulatedTier(self, rules) if rules is not None else None
        self.desk.disk = self.disk
        self._capacity_bytes = extents * EXTENT_BYTES
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._pids = count(1)
        self._arrival_ns: dict[tuple[int, bool], int] = {}
        self._processes: list[Actor] = []
        self._by_connection: dict[int, Actor] = {}
        self._wanted = processes
        self._sessions: dict[str, bytes] = {}
        self._prompts = {tenant: self._make_prompts(tenant) for tenant in ("red", "blue")}

    def run(self, seconds: float) -> SimulationOutcome:
        """Let so much simulated time pass, then end every process and check what is left.

        Raises:
            AssertionError: a wrong byte was read, a wait did not end, or the state broke.
        """
        end_ns = self.now_ns + int(seconds * 1e9)
        self.at(0, self._tick)
        for _ in range(self._wanted):
            self._spawn()
        self._pass_until(end_ns)
        self._wanted = 0
        for process in list(self._processes):
            self._end(process)
        self._pass_until(end_ns + LAST_NS)
        self._check_the_end()
        return self.outcome

    # ---- time -------------------------------------------------------------------------------

    def at(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Call it after so much simulated time."""
        heapq.heappush(self._agenda, (self.now_ns + delay_ns, next(self._order), call))

    def _pass_until(self, end_ns: int) -> None:
        while self._agenda and self._agenda[0][0] <= end_ns:
            self.now_ns, _, call = heapq.heappop(self._agenda)
            call()
        self.now_ns = end_ns

    def _tick(self) -> None:
        self.desk.advance()
        for process in list(self._processes):
            if self.random.random() < self.faults.connection:
                self._break(process)
        if self.disk is not None and self._wanted and self.random.random() < 0.1:
            self.disk.check_some()
        if self.disk is not None:
            self.disk.check_quotas()
            if self._wanted and self.random.random() < 0.02:  # at the end, nothing new begins
                self.desk.operate(self.disk.limit_some)
        self.node.pages.check()
        for session in self.node.sessions.values():
            session.check()
        self.followers.check(self.node.pages)
        stats = self.node.pages.slots.stats()
        used = stats.writing_bytes + stats.ready_bytes + stats.limbo_bytes
        assert used <= self._capacity_bytes, "more is in use than there is"
        self.at(TICK_NS, self._tick)

    # ---- connections ------------------------------------------------------------------------

    def is_broken(self, connection: int) -> bool:
        """Whether its client has lost, or given up, a connection."""
        return connection not in self._by_connection

    def carry(
        self,
        connection: int,
        request: wire.Request | None = None,
        answer: wire.Answer | None = None,
    ) -> None:
        """Deliver a message after a while, in order, unless the connection breaks before."""
        to_node = request is not None
        key = (connection, to_node)
        due_ns = self.now_ns + self.random.randrange(DELAY_NS_MAX)
        due_ns = self._arrival_ns[key] = max(due_ns, self._arrival_ns.get(key, 0))

        def deliver() -> None:
            process = self._by_connection.get(connection)
            if process is None:
                return
            if self.random.random() < self.faults.connection:
                self._break(process)
            elif request is not None:
                self.desk.receive(connection, request)
            elif answer is not None and getattr(answer, "id", 0) == process.awaited:
                self._resume(process, answer)

        self.at(due_ns - self.now_ns, deliver)

    def _break(self, process: Actor) -> None:
        """Both sides lose the connection; the node hears of it first or last."""
        connection = process.connection
        if not connection:
            return
        self.outcome.connections_lost += 1
        process.connection = 0
        del self._by_connection[connection]
        delay_ns = self.random.randrange(DELAY_NS_MAX)
        self.at(
            delay_ns,
            lambda: self.desk.disconnect(connection, ended=not process.alive),
        )
        if process.awaited:
            self._resume(process, None)

    # ---- processes --------------------------------------------------------------------------

    def _spawn(self) -> None:
        tenant = self.random.choice(("red", "blue"))
        process = Actor(next(self._pids), tenant)
        process.watched = self.random.random() >= self.faults.unwatched
        if self.random.random() < 0.5:  # another process of an engine that is there already
            process.session = self._sessions.get(tenant, b"")
        self._processes.append(process)
        process.script = self._live(process)
        self.at(self.random.randrange(DELAY_NS_MAX), lambda: self._resume(process, None))

    def _end(self, process: Actor) -> None:
        """The process is gone in the middle of whatever it did; the kernel tells a bit later."""
        self.outcome.processes_ended += 1
        process.alive = False
        process.awaited = 0
        assert process.script is not None
        self._processes.remove(process)
        self._break(process)
        if process.watched:
            pid = process.pid
            self.at(
                self.random.randrange(2 * DELAY_NS_MAX),
                lambda: self.desk.process_ended(pid),
            )
        if len(self._processes) < self._wanted:
            self._spawn()

    def _resume(self, process: Actor, answer: wire.Answer | None) -> None:
        """Take the next step of a process's script."""
        process.awaited = 0
        if not process.alive or process.script is None:
            return
        if self.random.random() < self.faults.process:
            self._end(process)
            return
        step = process.script.send(answer)
        if isinstance(step, int):
            self.at(step, lambda: self._resume(process, None))
        else:
            self._ask(process, step)

    def _ask(self, process: Actor, request: wire.Request) -> None:
        """Send a request; an answer that does not come on an open connection ends the run."""
        process.serial += 1
        serial = process.awaited = process.serial
        request.id = serial  # type: ignore[union-attr]
        connection = process.connection
        if not connection:
            self.at(TICK_NS, lambda: self._resume(process, None))
            return
        self.carry(connection, request=request)
        limit_ns = WAIT_MS * 1_000_000 + 4 * DELAY_NS_MAX + 2 * TICK_NS

        def late() -> None:
            waits = process.alive and process.connection == connection
            assert not (waits and process.awaited == serial), f"{request} was never answered"

        self.at(limit_ns, late)

    def _tell(self, process: Actor, request: wire.Request) -> None:
        """Send a message that has no answer."""
        if process.connection:
            self.carry(process.connection, request=request)

    # ---- what a process does ----------------------------------------------------------------

    def _live(self, process: Actor) -> Script:
        identity = SpaceIdentity(tenant=process.tenant, model="m", kv_dtype="uint8", page_tokens=1)
        space = -1
        while True:
            if not process.connection:
                space = yield from self._connect(process, identity)
                continue
            keys = self._prompt(process.tenant)
            actions = (self._put, self._put, self._read, self._read, self._wait, self._persist)
            action = self.random.choice(actions)
            yield from action(process, space, keys)
            yield self.random.randrange(DELAY_NS_MAX)

    def _connect(self, process: Actor, identity: SpaceIdentity) -> Generator[
        int | wire.Request, wire.Answer | None, int
    ]:  # fmt: skip
        yield self.random.randrange(DELAY_NS_MAX)
        line = _Line(self)
        peer = Peer(process.pid, process.pid, process.watched)
        number = line.number = process.connection = self.desk.connect(peer, line)
        self._by_connection[number] = process
        hello = wire.Hello(
            0, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "simulated", process.session,
            process.origin, number,
        )  # fmt: skip
        welcome = yield hello
        if not isinstance(welcome, wire.Welcome):
            return -1
        process.session = self._sessions[process.tenant] = welcome.session
        # A script does one thing at a time: nothing of an earlier connection is under way.
        self._tell(process, wire.Settled(number))
        opened = yield wire.OpenSpace(0, identity, [_SHARD])
        return opened.space if isinstance(opened, wire.SpaceOpened) else -1

    def _put(self, process: Actor, space: int, keys: PrefixKeys) -> Script:
        put = next(process.names)
        wait_ms = self.random.choice((0, WAIT_MS))
        tokens = b"".join(map(page_token, keys)) if put % 3 else b""
        granted = yield wire.BeginPut(0, put, space, 0, keys.packed, b"", tokens, wait_ms)
        if not isinstance(granted, wire.PutGranted) or not granted.addresses:
            return
        chosen = [
            key
            for key, status in zip(keys, granted.statuses, strict=True)
            if status == PageStatus.GRANTED
        ]
        places = self._map(process, granted.addresses)
        digests = b""
        for key, place in zip(chosen, places, strict=True):
            content = page_content(key)
            for start in range(0, PAGE_BYTES, PAGE_BYTES // PIECES):
                if place is not None:
                    memory, offset = place
                    piece = content[start : start + PAGE_BYTES // PIECES]
                    memory[offset + start : offset + start + len(piece)] = piece
                    self.outcome.late_pieces += not process.connection
                yield self._piece_ns()
            digests += sha256(content).digest()[:16]
        if self.random.random() < 0.1 or None in places:
            self._tell(process, wire.AbortPut(put))
            return
        ttl_ms = self.random.choice((0, 0, 5))
        committed = yield wire.CommitPut(0, put, digests, ttl_ms, self.random.random() < 0.1)
        if isinstance(committed, wire.Committed):
            self.outcome.pages_stored += committed.statuses.count(PageStatus.STORED)

    def _read(self, process: Actor, space: int, keys: PrefixKeys) -> Script:
        lease = next(process.names)
        lease_ms = self.random.randrange(1, LEASE_MS_MAX + 1)
        wait_ms = self.random.choice((0, WAIT_MS - 1))
        leased = yield wire.Acquire(0, lease, space, 0, keys.packed, lease_ms, wait_ms)
        if not isinstance(leased, wire.Acquired):
            return
        places = self._map(process, leased.addresses)
        for key, place in zip(keys, places, strict=False):
            if place is None:
                break
            memory, offset = place
            content = page_content(key)
            for start in range(0, PAGE_BYTES, PAGE_BYTES // PIECES):
                stop = start + PAGE_BYTES // PIECES
                seen = memory[offset + start : offset + stop]
                assert seen == content[start:stop], f"wrong bytes under {key.hex()[:8]}"
                yield self._piece_ns()
            self.outcome.pages_read += 1
        self._tell(process, wire.Release(lease))

    def _wait(self, _process: Actor, space: int, keys: PrefixKeys) -> Script:
        before_ns = self.now_ns
        found = yield wire.Lookup(0, space, [0], keys.packed, self.random.randrange(WAIT_MS))
        if isinstance(found, wire.Found):
            assert found.pages + found.pending <= len(keys)
            self.outcome.lookups_waited += self.now_ns - before_ns > 2 * DELAY_NS_MAX

    def _persist(self, _process: Actor, space: int, keys: PrefixKeys) -> Script:
        answer = yield wire.Persist(0, space, 0, keys.packed, WAIT_MS - 1)
        if isinstance(answer, wire.Persisted):
            assert self.disk is not None
            self.outcome.pages_persisted += len(keys)

    def _map(self, process: Actor, addresses: bytes) -> list[tuple[bytearray, int] | None]:
        """Where slots are; None where the extent is gone and was not mapped before."""
        places: list[tuple[bytearray, int] | None] = []
        for extent, _, offset in np.frombuffer(addresses, dtype=wire.ADDRESS).tolist():
            if extent not in process.mapped and extent in self.memory:
                process.mapped[extent] = self.memory[extent]
            memory = process.mapped.get(extent)
            places.append(None if memory is None else (memory, offset))
        return places

    def _piece_ns(self) -> int:
        slow = self.random.random() < self.faults.slowness
        return LEASE_MS_MAX * 1_500_000 if slow else self.random.randrange(300_000)

    # ---- content ----------------------------------------------------------------------------

    def _make_prompts(self, tenant: str) -> list[PrefixKeys]:
        """Prompts that branch: a common start and many ends."""
        common = [len(tenant), 1, 2]
        ends = [[self.random.randrange(3) for _ in range(6)] for _ in range(6)]
        return [page_keys(common + end, 1) for end in ends]

    def _prompt(self, tenant: str) -> PrefixKeys:
        keys = self.random.choice(self._prompts[tenant])
        return keys[: self.random.randrange(1, len(keys) + 1)]

    def _check_the_end(self) -> None:
        """Everything that processes held is free again, and what is READY is right."""
        node = self.node
        node.pages.check()
        assert not node.processes
        assert not node.sessions
        stats = node.stats()
        assert stats["leases"] == stats["puts"] == stats["waiting_requests"] == 0
        host = stats["host"]
        assert host["writing_bytes"] == host["limbo_bytes"] == host["pinned_bytes"] == 0
        for space in node.pages.spaces:
            for key, page in space.nodes.items():
                for slot in page.slots.values():
                    number, _, offset = node.pages.slots.address(slot)
                    stored = self.memory[number][offset : offset + PAGE_BYTES]
                    assert stored == page_content(key), "a late write landed in a READY page"


def page_content(key: bytes) -> bytes:
    """The only right bytes of a page, different in every 32 of them from any other page's."""
    return key * (PAGE_BYTES // len(key))
