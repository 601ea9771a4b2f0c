"""The engines of one node of a simulated cluster, and their connections to it."""

from itertools import count
from typing import Final

from kvstore.protocol import wire
from kvstore.protocol.page import PrefixKeys
from kvstore.state.tree.sessions import Peer
from kvstore.testing.actors import (
    DELAY_NS_MAX,
    SHARDS,
    Actor,
    Engines,
    Habits,
    digest_of_page,
)
from kvstore.testing.cluster_node import TICK_NS, ClusterNode
from kvstore.testing.timeline import Timeline

MS: Final = 1_000_000
ACTIONS: Final = ("put", "put", "put", *["restore"] * 7, "read", "wait", "persist", "replicate")
WAITS_MS: Final = (0, 20, 80, 200, 200)
TTLS_MS: Final = (0, 0, 0, 0, 30)


class EngineLine:
    """One connection of an engine to its node."""

    def __init__(self, engines: "NodeEngines", process: Actor) -> None:
        self.number = 0
        self._engines = engines
        self._process = process

    def answer(self, answer: wire.Answer) -> None:
        """See :class:`kvstore.node.desk.Line`."""
        self._engines.carry(self, self._process, answer=answer)

    def cut(self) -> None:
        """See :class:`kvstore.node.desk.Line`."""
        assert not self._engines.is_open(self), "its client had not given it up"


class NodeEngines:
    """The engines of one node; they outlive it.

    Args:
        time: timeline of the simulation.
        node: the node.
        prompts: of each tenant, equal at all nodes.
        wanted: number of engines at any time.
        shards: number of shards of each space.
    """

    def __init__(
        self, time: Timeline, node: ClusterNode, prompts: dict[str, list[PrefixKeys]], wanted: int,
        shards: int,
    ) -> None:  # fmt: skip
        self.node = node
        self._time = time
        self._random = time.random
        self._wanted = wanted
        self._pids = count(1)
        self._processes: list[Actor] = []
        self._lines: dict[Actor, EngineLine] = {}
        self._arrival_ns: dict[tuple[EngineLine, bool], int] = {}
        habits = Habits(ACTIONS, WAITS_MS, TTLS_MS, 4 * MS, digest_of_page, SHARDS[:shards])
        self._engines = Engines(
            time, node.memory.extents, self._connect, self._tell, habits, prompts
        )

    def begin(self) -> None:
        """Start the engines."""
        for _ in range(self._wanted):
            self._spawn()

    def end(self) -> None:
        """End all engines."""
        self._wanted = 0
        for process in list(self._processes):
            self._end(process)

    def lost_node(self) -> None:
        """The node was killed: all connections are gone."""
        for process in list(self._processes):
            self._break(process)

    def is_open(self, line: EngineLine) -> bool:
        """Whether the engine has not lost or given up this connection."""
        return line in self._lines.values()

    def carry(
        self, line: EngineLine, process: Actor, request: wire.Request | None = None,
        answer: wire.Answer | None = None,
    ) -> None:  # fmt: skip
        """Deliver a message after a delay, in order, unless the connection breaks before."""
        key = line, request is not None
        due_ns = self._time.now_ns + self._random.randrange(DELAY_NS_MAX)
        due_ns = self._arrival_ns[key] = max(due_ns, self._arrival_ns.get(key, 0))
        turn, desk = self.node.turns(), self.node.desk

        def receive() -> None:
            if request is not None and self.is_open(line):
                desk.receive(line.number, request)

        def deliver() -> None:
            if self._lines.get(process) is not line:
                return
            if self._random.random() < self._time.faults.connection:
                self._break(process)
            elif request is not None:
                turn(receive)
            elif answer is not None and getattr(answer, "id", 0) == process.awaited:
                self._resume(process, answer)

        self._time.at(due_ns - self._time.now_ns, deliver)

    def _break(self, process: Actor) -> None:
        """Break a connection for both sides; the node may notice it before or after the client."""
        line = self._lines.pop(process, None)
        if line is None:
            return
        self._time.outcome.connections_lost += 1
        process.connection = 0
        turn, desk = self.node.turns(), self.node.desk
        self._time.at(
            self._random.randrange(DELAY_NS_MAX),
            lambda: turn(lambda: desk.disconnect(line.number, ended=not process.alive)),
        )
        if process.awaited:
            self._resume(process, None)

    def _connect(self, process: Actor) -> int:
        line = EngineLine(self, process)
        desk = self.node.desk
        if not self.node.alive:
            return 0
        line.number = desk.connect(Peer(process.pid, process.pid, process.watched), line)
        process.connection = line.number
        self._lines[process] = line
        return line.number

    def _spawn(self) -> None:
        tenant = self._random.choice(("red", "blue"))
        process = Actor(next(self._pids), tenant)
        process.watched = self._random.random() >= self._time.faults.unwatched
        if self._random.random() < 0.5:  # another process of an existing engine
            process.session = self._engines.sessions.get(tenant, b"")
        self._processes.append(process)
        process.script = self._engines.live(process)
        self._time.at(self._random.randrange(DELAY_NS_MAX), lambda: self._resume(process, None))

    def _end(self, process: Actor) -> None:
        """End a process at any point of its script; the node is notified after a delay."""
        self._time.outcome.processes_ended += 1
        process.alive = False
        process.awaited = 0
        self._processes.remove(process)
        self._break(process)
        if process.watched:
            turn, desk, pid = self.node.turns(), self.node.desk, process.pid
            self._time.at(
                self._random.randrange(2 * DELAY_NS_MAX),
                lambda: turn(lambda: desk.process_ended(pid)),
            )
        if len(self._processes) < self._wanted:
            self._spawn()

    def _resume(self, process: Actor, answer: wire.Answer | None) -> None:
        """Run the next step of a process's script."""
        process.awaited = 0
        if not process.alive or process.script is None:
            return
        if self._random.random() < self._time.faults.process:
            self._end(process)
            return
        node = self.node.node
        with node.pages.story.explaining():
            step = process.script.send(answer)
        if isinstance(step, int):
            self._time.at(step, lambda: self._resume(process, None))
        else:
            self._ask(process, step)

    def _ask(self, process: Actor, request: wire.Request) -> None:
        """Send a request; an answer that is late on an open connection fails the run."""
        process.serial += 1
        process.awaited = process.serial
        request.id = process.serial  # type: ignore[union-attr]
        line = self._lines.get(process)
        if line is None:
            self._time.at(TICK_NS, lambda: self._resume(process, None))
            return
        self.carry(line, process, request=request)
        limit_ns = getattr(request, "wait_ms", 0) * MS + 2 * DELAY_NS_MAX + 2 * TICK_NS
        self._expect(process, line, request, limit_ns)

    def _expect(
        self, process: Actor, line: EngineLine, request: wire.Request, limit_ns: int
    ) -> None:
        """Assert that a request is answered in time; while its node is stopped no time passes."""
        serial = process.serial

        def late() -> None:
            if self._lines.get(process) is not line or process.awaited != serial:
                return
            node = self.node
            if node.stopped or node.stalled_ns + limit_ns > self._time.now_ns:
                self._time.at(limit_ns, late)
                return
            with node.node.pages.story.explaining():
                raise AssertionError(f"{request} was not answered in {limit_ns / MS} ms")

        self._time.at(limit_ns + 1, late)

    def _tell(self, process: Actor, request: wire.Request) -> None:
        """Send a message without an answer."""
        line = self._lines.get(process)
        if line is not None:
            self.carry(line, process, request=request)
