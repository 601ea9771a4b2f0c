"""Several whole nodes with their engines in one thread: simulated clock, network and directory.

The nodes, their desks, their sessions with each other on both sides, and the transport ``memory``
are the product's. Connections between nodes break, delay and are cut; nodes stop, go on, are killed
and come back with another boot; the directory of each node lags, lies and is away; pages come with
wrong bytes, and late. A seed determines the whole history. Engines compare what they read with the
bytes that follow from the page's key, as in :mod:`kvstore.testing.simulation`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Final

from kvstore.state.disk.jobs import DiskRules, SyncPolicy, WritePolicy
from kvstore.testing.actors import make_prompts
from kvstore.testing.cluster_directory import MODES
from kvstore.testing.cluster_engines import NodeEngines
from kvstore.testing.cluster_node import ClusterNode, Extents
from kvstore.testing.cluster_wires import Wires
from kvstore.testing.records_on_disk import RecordsOnDisk
from kvstore.testing.timeline import PAGE_BYTES, FaultRates, SimulationOutcome, Timeline
from kvstore.transport.base import PageTransfer
from kvstore.transport.memory import Fate, MemoryNetwork

MS: Final = 1_000_000
CHECK_NS: Final = 25 * MS
"""Between checks of all invariants."""
QUIET_CHECK_NS: Final = 200 * MS
"""The same after the end of all engines."""
TROUBLE_NS_MAX: Final = 60 * MS
"""Longest time between two troubles of the cluster."""
PROMPTS: Final = 16
"""Of each tenant: more pages than one node has memory for."""
DISK_LOST: Final = 0.4
"""Share of the killed nodes with an SSD tier that begin again with an empty disk."""
BUSY_NS: Final = 300 * MS
"""After the end of all engines; what nodes do later has no deadline that is near."""
LAST_NS: Final = 1_500 * MS
"""Time after the end of all engines; everything that was held is released by then."""


@dataclass(frozen=True)
class ClusterSize:
    """What there is of each kind.

    Attributes:
        nodes: number of nodes.
        engines: number of engines of each node at any time.
        disks: how many nodes have an SSD tier, if there are any.
        shards: number of shards of each space, at most 3: two ranks, and a group with a window.
    """

    nodes: int = 3
    engines: int = 2
    disks: int = 1
    shards: int = 1


@dataclass(frozen=True)
class ClusterFaults:
    """Probabilities of what may happen between nodes.

    Attributes:
        trouble: that something happens to the cluster, each time it may.
        damage: a page comes with a wrong byte.
        loss: a transfer breaks off, or its peer says nothing more.
        late: what has not come arrives after the end of such a transfer.
        kill: weight of killing a node, among the troubles.
    """

    trouble: float = 0.7
    damage: float = 0.05
    loss: float = 0.12
    late: float = 0.6
    kill: float = 1.0


class _Carrier(MemoryNetwork):
    """The network of transports, stepped by the timeline."""

    def __init__(self, cluster: "ClusterSimulation", time: Timeline) -> None:
        super().__init__(cluster.fate)
        self._cluster = cluster
        self._time = time

    def at(self, at_ns: int, event: Callable[[], None]) -> None:
        """See :meth:`kvstore.transport.memory.MemoryNetwork.at`."""
        super().at(at_ns, event)
        self._time.at(max(0, at_ns - self._time.now_ns), self.go)

    def fate_of(self, by: str, transfer: PageTransfer) -> Fate:
        """See :meth:`kvstore.transport.memory.MemoryNetwork.fate_of`."""
        self.step(self._time.now_ns)
        self._time.at(1, self.go)  # it may be refused at once
        return super().fate_of(by, transfer)

    def go(self) -> None:
        """Let happen what is due, and tell the nodes."""
        self.step(self._time.now_ns)
        for node in self._cluster.nodes:
            if node.alive:
                node.turn(lambda node=node: node.peers.poll(node.transport))  # type: ignore[misc]


class ClusterSimulation:
    """One seeded history of a cluster and its engines.

    Args:
        seed: determines all random choices.
        size: how many nodes, engines, SSDs and shards there are.
        extents: memory of each node.
        faults: of the cluster.
        rates: of engines and disks.
        rules: rules of the SSD tiers; None = there are none.

    Attributes:
        nodes: all nodes.
        outcome: what has happened.
    """

    def __init__(
        self, seed: int, size: ClusterSize = ClusterSize(), extents: Extents | None = None,
        faults: ClusterFaults | None = None, rates: FaultRates | None = None,
        rules: DiskRules | None = None,
    ) -> None:  # fmt: skip
        """Create the nodes; :meth:`run` starts them and their engines."""
        self._time = time = Timeline(seed, rates or FaultRates(connection=0.003))
        self._random = time.random
        self._faults = faults or ClusterFaults()
        self.outcome: SimulationOutcome = time.outcome
        self._wires = Wires(time)
        network = _Carrier(self, time)
        names = [chr(ord("a") + at) for at in range(size.nodes)]
        self.nodes = [
            ClusterNode(
                name, time, self._wires, network, extents or Extents(), names,
                rules if at < size.disks else None,
            )
            for at, name in enumerate(names)
        ]  # fmt: skip
        prompts = make_prompts(time.random, PROMPTS)
        self.hosts = [
            NodeEngines(time, node, prompts, size.engines, size.shards) for node in self.nodes
        ]
        self._quiet = False

    def run(self, seconds: float) -> SimulationOutcome:
        """Run for this much simulated time, then heal everything, and check that nothing is held.

        Raises:
            AssertionError: a wrong byte was read, an answer was late, or an invariant failed.
        """
        time = self._time
        end_ns = time.now_ns + int(seconds * 1e9)
        try:
            for node in self.nodes:
                node.start(self._others(node))
            for host in self.hosts:
                host.begin()
            time.at(0, self._trouble)
            time.at(CHECK_NS, self._check)
            time.pass_until(end_ns)
            self._heal()
            for host in self.hosts:
                host.end()
            time.pass_until(end_ns + BUSY_NS)
            for node in self.nodes:
                node.resting = True
            time.pass_until(end_ns + LAST_NS)
            for node in self.nodes:
                with node.node.pages.story.explaining():
                    node.check_idle(self._others(node))
            self._part()
        except Exception as error:
            error.add_note(self._describe())
            raise
        finally:
            for node in self.nodes:
                node.close()
        return self.outcome

    def fate(self, by: str, place: str, transfer: PageTransfer) -> Fate:
        """What happens to a transfer; see :class:`kvstore.transport.memory.Fate`."""
        random, faults, pages = self._random, self._faults, len(transfer.remote)
        reader, owner = self._of(by), self._of(place)
        flying = reader.transport.stats()["in_flight_bytes"] + transfer.total_bytes
        assert flying <= reader.in_flight_bytes_max, f"{flying} bytes in flight"
        late_ns = random.randrange(1, 200 * MS) if random.random() < faults.late else -1
        unheard = owner.stopped or frozenset((by[0], place[0])) in self._wires.cuts
        if not self._quiet and (unheard or random.random() < faults.loss):
            some, broken = random.randrange(pages + 1), random.random() < 0.5
            return Fate(random.randrange(3 * MS), some, broken, (), late_ns)
        damaged = tuple(at for at in range(pages) if random.random() < faults.damage)
        return Fate(random.randrange(4 * MS), -1, damaged=damaged, late_ns=late_ns)

    # ---- troubles -----------------------------------------------------------------------------

    def _trouble(self) -> None:
        if self._quiet:
            return
        random = self._random
        self._time.at(random.randrange(TROUBLE_NS_MAX), self._trouble)
        if random.random() >= self._faults.trouble:
            return
        weights = (4.0, 2.0, 2.0, 3.0, 2.0, 2.0, self._faults.kill)
        choices = (
            self._wires.lose_some, self._cut, self._stop, self._mislead, self._lag, self._leave,
            self._kill,
        )  # fmt: skip
        random.choices(choices, weights)[0]()

    def _cut(self) -> None:
        one, other = self._random.sample(self.nodes, 2)
        pair = frozenset((one.name, other.name))
        if pair not in self._wires.cuts:
            self.outcome.partitions += 1
            self._wires.cuts.add(pair)
            self._time.at(self._random.randrange(300 * MS), lambda: self._wires.heal(pair))

    def _stop(self) -> None:
        node = self._random.choice(self.nodes)
        if node.alive and not node.stopped:
            self.outcome.nodes_stopped += 1
            node.stop()
            longest_ns = 2_500 * MS if self._random.random() < 0.05 else 200 * MS
            self._time.at(self._random.randrange(longest_ns), node.go_on)

    def _mislead(self) -> None:
        node = self._random.choice(self.nodes)
        if node.alive:
            node.directory.mode = self._random.choice(MODES)

    def _lag(self) -> None:
        node = self._random.choice(self.nodes)
        self._wires.lag(node.name, self._random.choice((0, 0, 20 * MS, 100 * MS)))

    def _leave(self) -> None:
        """One node is told that another one has left, and later that it is back."""
        one, other = self._random.sample(self.nodes, 2)
        if other.name in one.links:
            self.outcome.nodes_left += 1
            one.turn(lambda: one.part(other))
            back_ns = self._random.randrange(100 * MS)
            self._time.at(back_ns, lambda: one.turn(lambda: one.meet(other)))

    def _kill(self) -> None:
        host = self._random.choice(self.hosts)
        node = host.node
        if node.alive:
            self.outcome.nodes_killed += 1
            node.kill()
            if node.rules is not None and self._random.random() < DISK_LOST:
                self.outcome.disks_lost += 1
                node.on_disk = RecordsOnDisk()
            host.lost_node()
            self._time.at(self._random.randrange(60 * MS), lambda: self._start(node))

    def _start(self, node: ClusterNode) -> None:
        if not node.alive:
            node.start(self._others(node))

    # ---- the end ------------------------------------------------------------------------------

    def _heal(self) -> None:
        """End all troubles, for good."""
        self._quiet = True
        for one, other in combinations(self.nodes, 2):
            self._wires.heal(frozenset((one.name, other.name)))
        for node in self.nodes:
            node.go_on()
            self._start(node)
            node.directory.mode = "honest"
            for other in self._others(node):
                node.meet(other)
            self._wires.lag(node.name, 0)

    def _part(self) -> None:
        """End all sessions between nodes; no process of a peer may be left."""
        for node in self.nodes:
            for link in node.links.values():
                link.end()
        self._time.pass_until(self._time.now_ns + 50 * MS)
        for node in self.nodes:
            assert not node.node.processes, f"{node.name} has processes of peers"
            assert not node.node.sessions

    def check(self) -> None:
        """Assert the invariants of all nodes."""
        for node in self.nodes:
            if node.alive:
                with node.node.pages.story.explaining():
                    node.check()

    def _check(self) -> None:
        self.check()
        self._time.at(QUIET_CHECK_NS if self._quiet else CHECK_NS, self._check)

    # ---- inside -------------------------------------------------------------------------------

    def _others(self, node: ClusterNode) -> Sequence[ClusterNode]:
        return [other for other in self.nodes if other is not node]

    def _of(self, place: str) -> ClusterNode:
        return next(node for node in self.nodes if node.name == place.partition("/")[0])

    def _describe(self) -> str:
        """The state of the cluster, in a few lines."""
        lines = [f"the cluster at {self._time.now_ns / 1e9:.6f} s, {self.outcome}"]
        for node in self.nodes:
            if node.life:
                state = "stopped" if node.stopped else "alive" if node.alive else "killed"
                lines.append(
                    f"node {node.name}: {state}, life {node.life}, {node.directory.mode} directory,"
                    f" {node.node.remote.stats() if node.node.remote else ''}"
                )
        return "\n  ".join(lines)


def drawn_cluster(seed: int) -> ClusterSimulation:
    """A cluster whose size, memory, faults and SSD tier follow from the seed too."""
    random = Random(seed)
    extents = Extents(random.randrange(3, 7), random.randrange(2, 8))
    calm = random.random() < 0.2
    faults = ClusterFaults(
        trouble=0.1 if calm else 0.8, damage=random.choice((0.0, 0.05, 0.2)),
        loss=0.02 if calm else random.choice((0.1, 0.3)), late=random.random(),
        kill=random.choice((0.0, 1.0, 3.0)),
    )  # fmt: skip
    rules = None
    if random.random() < 0.3:
        rules = DiskRules(
            random.choice(list(WritePolicy)), random.choice(list(SyncPolicy)), 5 * MS,
            16 * PAGE_BYTES, 20 * MS,
        )  # fmt: skip
    rates = FaultRates(random.choice((0.0, 0.003, 0.02)))
    nodes, engines = random.choice((2, 3, 3, 4)), random.randrange(1, 4)
    disks, shards = random.randrange(1, nodes + 1), random.choice((1, 1, 2, 3, 3))
    size = ClusterSize(nodes, engines, disks, shards)
    return ClusterSimulation(seed, size, extents, faults, rates, rules)
