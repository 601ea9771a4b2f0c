"""A whole node with its engines in one thread: simulated clock, connections, processes and memory.

The :class:`~kvstore.node.node.Node` is the real one. Its clients copy bytes in pieces, so that
other events happen between two pieces: connections break, leases expire, processes end. A seed
determines the whole history. Bytes that a client reads are compared with those that follow from the
page's key, without the digest, so a single byte of another page fails the run.
"""

from dataclasses import dataclass
from itertools import count
from typing import Final

from kvstore.node.describe import describe
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.protocol import wire
from kvstore.state.disk.jobs import DiskRules
from kvstore.state.table.deadlines import AGAIN_NS
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import Replacement, SlotTable
from kvstore.testing.actors import DELAY_NS_MAX, LEASE_MS_MAX, WAIT_MS, Actor, Engines
from kvstore.testing.followers import KnownPages
from kvstore.testing.slowtier import SimulatedTier
from kvstore.testing.timeline import (
    EXTENT_BYTES,
    PAGE_BYTES,
    FaultRates,
    SimulationOutcome,
    Timeline,
    page_content,
)

TICK_NS: Final = 1_000_000
QUIET_TICKS: Final = 20
"""Between checks of all invariants when no process is left; with processes every tick checks."""
TURN_PAGES: Final = 3
UNWATCHED_NS: Final = 30_000_000
LAST_NS: Final = 3 * AGAIN_NS
"""Time after the end of all processes, for extents that had to wait for readers."""


@dataclass
class _Memory:
    """Extents by number; a client with an old extent mapped keeps using it."""

    outcome: SimulationOutcome
    extents: dict[int, bytearray]

    def replace(self, replaced: list[Replacement]) -> None:
        while replaced:
            old, new, in_use = replaced.pop(0)
            gone = self.extents.pop(old)
            if not in_use:
                gone[:] = bytes(EXTENT_BYTES)  # clients that still map it read zeros
            self.outcome.extents_retired += in_use
            self.extents[new] = bytearray(EXTENT_BYTES)


@dataclass
class _Line:
    """One connection, with delayed answers."""

    simulation: "Simulation"
    number: int = 0

    def answer(self, answer: wire.Answer) -> None:
        self.simulation.carry(self.number, answer=answer)

    def cut(self) -> None:
        assert self.simulation.is_broken(self.number), "its client had not given it up"


class Simulation:
    """One seeded history of a node and its clients.

    Args:
        seed: determines all random choices.
        processes: number of clients at any time; two tenants share them.
        extents: capacity, in extents of four pages.
        faults: fault rates.
        rules: rules of a simulated SSD tier; None = no SSD tier.
    """

    def __init__(
        self, seed: int, processes: int = 5, extents: int = 5, faults: FaultRates | None = None,
        rules: DiskRules | None = None,
    ) -> None:  # fmt: skip
        self._time = time = Timeline(seed, faults or FaultRates())
        self._random = time.random
        self._faults = time.faults
        self.outcome = time.outcome
        slots = SlotTable(EXTENT_BYTES, extents)
        self.memory = {extent.number: bytearray(EXTENT_BYTES) for extent in slots.extents}
        self.followers = KnownPages()
        limits = NodeLimits(extents * EXTENT_BYTES // 2, LEASE_MS_MAX, TURN_PAGES, UNWATCHED_NS)
        self.node = Node("simulated", b"b" * 16, slots, limits, lambda: time.random.randbytes(16))
        self.desk = Desk(
            self.node, _Memory(time.outcome, self.memory), self.followers.follow,
            lambda: time.now_ns, lambda call: time.at(1, call),
        )  # fmt: skip
        self.disk: SimulatedTier | None = None
        if rules is not None:
            self.disk = SimulatedTier(time, self.desk, self.memory, rules)
        self.desk.disk = self.disk
        time.between = self.desk.self_check.step  # anything may happen between two stretches
        self._capacity_bytes = extents * EXTENT_BYTES
        self._ticks = 0
        self._pids = count(1)
        self._arrival_ns: dict[tuple[int, bool], int] = {}
        self._processes: list[Actor] = []
        self._by_connection: dict[int, Actor] = {}
        self._wanted = processes
        self._engines = Engines(time, self.memory, self._connect, self._tell)

    def run(self, seconds: float) -> SimulationOutcome:
        """Run for this much simulated time, then end all processes and check the node.

        Raises:
            AssertionError: a wrong byte was read, a request was not answered, or an invariant
                failed.
        """
        end_ns = self._time.now_ns + int(seconds * 1e9)
        self._time.at(0, self._tick)
        with self.node.pages.story.explaining():
            for _ in range(self._wanted):
                self._spawn()
            self._time.pass_until(end_ns)
            self._wanted = 0
            for process in list(self._processes):
                self._end(process)
            self._time.pass_until(end_ns + LAST_NS)
            self._check_the_end()
        return self.outcome

    def _tick(self) -> None:
        self.desk.advance()
        for process in list(self._processes):
            if self._random.random() < self._faults.connection:
                self._break(process)
        if self.disk is not None and self._wanted and self._random.random() < 0.1:
            self.disk.check_some()
        if self.disk is not None:
            self.disk.check_quotas()
            if self._wanted and self._random.random() < 0.02:  # at the end, no new limits
                self.desk.operate(self.disk.limit_some)
        self._ticks += 1
        if self._processes or self._ticks % QUIET_TICKS == 0:
            self._check()
        self._time.at(TICK_NS, self._tick)

    def _check(self) -> None:
        """Assert the invariants of the node, and that nobody uses more than there is."""
        self.desk.self_check.run()
        self.followers.check(self.node.pages)
        stats = self.node.pages.slots.stats()
        used = stats.writing_bytes + stats.ready_bytes + stats.limbo_bytes
        assert used <= self._capacity_bytes, "more is in use than there is"

    # ---- connections ------------------------------------------------------------------------

    def is_broken(self, connection: int) -> bool:
        """Whether the client has lost or given up this connection."""
        return connection not in self._by_connection

    def carry(
        self,
        connection: int,
        request: wire.Request | None = None,
        answer: wire.Answer | None = None,
    ) -> None:
        """Deliver a message after a delay, in order, unless the connection breaks before."""
        to_node = request is not None
        key = (connection, to_node)
        due_ns = self._time.now_ns + self._random.randrange(DELAY_NS_MAX)
        due_ns = self._arrival_ns[key] = max(due_ns, self._arrival_ns.get(key, 0))

        def deliver() -> None:
            process = self._by_connection.get(connection)
            if process is None:
                return
            if self._random.random() < self._faults.connection:
                self._break(process)
            elif request is not None:
                self.desk.receive(connection, request)
            elif answer is not None and getattr(answer, "id", 0) == process.awaited:
                self._resume(process, answer)

        self._time.at(due_ns - self._time.now_ns, deliver)

    def _break(self, process: Actor) -> None:
        """Break a connection for both sides; the node may notice it before or after the client."""
        connection = process.connection
        if not connection:
            return
        self.outcome.connections_lost += 1
        process.connection = 0
        del self._by_connection[connection]
        delay_ns = self._random.randrange(DELAY_NS_MAX)
        self._time.at(
            delay_ns,
            lambda: self.desk.disconnect(connection, ended=not process.alive),
        )
        if process.awaited:
            self._resume(process, None)

    def _connect(self, process: Actor) -> int:
        line = _Line(self)
        peer = Peer(process.pid, process.pid, process.watched)
        number = line.number = process.connection = self.desk.connect(peer, line)
        self._by_connection[number] = process
        return number

    # ---- processes --------------------------------------------------------------------------

    def _spawn(self) -> None:
        tenant = self._random.choice(("red", "blue"))
        process = Actor(next(self._pids), tenant)
        process.watched = self._random.random() >= self._faults.unwatched
        if self._random.random() < 0.5:  # another process of an existing engine
            process.session = self._engines.sessions.get(tenant, b"")
        self._processes.append(process)
        process.script = self._engines.live(process)
        self._time.at(self._random.randrange(DELAY_NS_MAX), lambda: self._resume(process, None))

    def _end(self, process: Actor) -> None:
        """End a process at any point of its script; the node is notified after a delay."""
        self.outcome.processes_ended += 1
        process.alive = False
        process.awaited = 0
        assert process.script is not None
        self._processes.remove(process)
        self._break(process)
        if process.watched:
            pid = process.pid
            self._time.at(
                self._random.randrange(2 * DELAY_NS_MAX),
                lambda: self.desk.process_ended(pid),
            )
        if len(self._processes) < self._wanted:
            self._spawn()

    def _resume(self, process: Actor, answer: wire.Answer | None) -> None:
        """Run the next step of a process's script."""
        process.awaited = 0
        if not process.alive or process.script is None:
            return
        if self._random.random() < self._faults.process:
            self._end(process)
            return
        step = process.script.send(answer)
        if isinstance(step, int):
            self._time.at(step, lambda: self._resume(process, None))
        else:
            self._ask(process, step)

    def _ask(self, process: Actor, request: wire.Request) -> None:
        """Send a request; a missing answer on an open connection fails the run."""
        process.serial += 1
        serial = process.awaited = process.serial
        request.id = serial  # type: ignore[union-attr]
        connection = process.connection
        if not connection:
            self._time.at(TICK_NS, lambda: self._resume(process, None))
            return
        self.carry(connection, request=request)
        limit_ns = WAIT_MS * 1_000_000 + 4 * DELAY_NS_MAX + 2 * TICK_NS

        def late() -> None:
            waits = process.alive and process.connection == connection
            assert not (waits and process.awaited == serial), f"{request} was never answered"

        self._time.at(limit_ns, late)

    def _tell(self, process: Actor, request: wire.Request) -> None:
        """Send a message without an answer."""
        if process.connection:
            self.carry(process.connection, request=request)

    def _check_the_end(self) -> None:
        """Everything that processes held is free, and READY pages have the right bytes."""
        node = self.node
        self.desk.self_check.run()
        assert not node.processes
        assert not node.sessions
        assert self.disk is not None or not self.outcome.pages_persisted, "on which disk?"
        counts = describe(node)
        assert counts.leases == counts.puts == counts.waiting_requests == 0
        host = counts.host
        assert host.writing_bytes == host.limbo_bytes == host.pinned_bytes == 0
        for space in node.pages.spaces:
            for key, page in space.nodes.items():
                for slot in page.slots.values():
                    number, _, offset = node.pages.slots.address(slot)
                    stored = self.memory[number][offset : offset + PAGE_BYTES]
                    assert stored == page_content(key), "a late write landed in a READY page"
