"""Connections between simulated nodes: in order each way, delayed, cut and healed."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvstore.testing.timeline import Timeline

WIRE_NS_MAX: Final = 1_500_000
"""Longest time of a message between two nodes that are not cut off from each other."""

Turn = Callable[[Callable[[], object]], None]
"""Makes a call in a turn of one life of a node: later while it is stopped, never after its end."""


@dataclass(frozen=True)
class CircuitEnd:
    """One end of a connection.

    Attributes:
        node: name of its node.
        turn: of its node.
        receive: gets each message.
        closed: called once, when the connection is gone and was not closed here.
    """

    node: str
    turn: Turn
    receive: Callable[[Any], None]
    closed: Callable[[], None]


class Circuit:
    """One connection; made by :meth:`Wires.connect`.

    Attributes:
        ends: both.
        lag_ns: what messages take longer than usual.
    """

    def __init__(self, wires: "Wires", ends: tuple[CircuitEnd, CircuitEnd]) -> None:
        self.ends = ends
        self.lag_ns = 0
        self._wires = wires
        #: For each end: messages on their way to it; None = the connection is gone.
        self._coming: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self._dead = [False, False]
        self._due_ns = [0, 0]

    @property
    def nodes(self) -> frozenset[str]:
        """The names of both nodes."""
        return frozenset(end.node for end in self.ends)

    def send(self, to: int, message: Any) -> None:
        """Send a message to one end."""
        if not self._dead[1 - to]:
            self._push(to, message)

    def close(self, by: int) -> None:
        """One end closes; the other one hears of it after all messages before."""
        if not self._dead[by]:
            self._dead[by] = True
            self._push(1 - by, None)
            self._wires.forget(self, self._dead)

    def lose(self) -> None:
        """Break the connection for both, with the messages on their way."""
        for to in (0, 1):
            self._coming[to].clear()
            self._push(to, None)

    def go_on(self) -> None:
        """The nodes are not cut off from each other any more."""
        for to in (0, 1):
            for _ in self._coming[to]:
                self._schedule(to)

    def _push(self, to: int, message: Any) -> None:
        if not self._dead[to]:
            self._coming[to].append(message)
            self._schedule(to)

    def _schedule(self, to: int) -> None:
        time = self._wires.time
        due_ns = time.now_ns + time.random.randrange(WIRE_NS_MAX) + self.lag_ns
        self._due_ns[to] = due_ns = max(due_ns, self._due_ns[to])
        time.at(due_ns - time.now_ns, lambda: self._arrive(to))

    def _arrive(self, to: int) -> None:
        if self._coming[to] and self.nodes not in self._wires.cuts:
            message = self._coming[to].popleft()
            self.ends[to].turn(lambda: self._deliver(to, message))

    def _deliver(self, to: int, message: Any) -> None:
        if self._dead[to]:
            return
        if message is None:
            self._dead[to] = True
            self._wires.forget(self, self._dead)
            self.ends[to].closed()
        else:
            self.ends[to].receive(message)


class Wires:
    """All connections between the nodes of a cluster.

    Attributes:
        time: timeline of the simulation.
        cuts: pairs of nodes of which no message arrives, until :meth:`heal`.
    """

    def __init__(self, time: Timeline) -> None:
        self.time = time
        self.cuts: set[frozenset[str]] = set()
        self._circuits: list[Circuit] = []

    def connect(self, one: CircuitEnd, other: CircuitEnd) -> Circuit:
        """A new connection; its ends are numbered 0 and 1."""
        made = Circuit(self, (one, other))
        self._circuits.append(made)
        return made

    def heal(self, pair: frozenset[str]) -> None:
        """Let the messages of two nodes arrive again."""
        self.cuts.discard(pair)
        for circuit in list(self._circuits):
            if circuit.nodes == pair:
                circuit.go_on()

    def lose_some(self) -> None:
        """Break one connection."""
        if self._circuits:
            self.time.random.choice(self._circuits).lose()

    def ended(self, node: str) -> None:
        """A node has ended: its kernel closes all of its connections."""
        for circuit in list(self._circuits):
            for by, end in enumerate(circuit.ends):
                if end.node == node:
                    circuit.close(by)

    def lag(self, node: str, lag_ns: int) -> None:
        """Delay what is sent to the second end of connections that end at a node."""
        for circuit in self._circuits:
            if circuit.ends[1].node == node:
                circuit.lag_ns = lag_ns

    def forget(self, circuit: Circuit, dead: list[bool]) -> None:
        """A connection is gone at some of its ends."""
        if all(dead) and circuit in self._circuits:
            self._circuits.remove(circuit)
