"""The desk: where what a node decides is carried out, in one order, for all who reach the node.

A **face** lets engines reach a node: its Unix socket, the store in an engine's own process, a
simulation. A face gives the desk a **line** for each of its connections, hands in what comes on
them, and knows nothing of the rest. After each call the desk carries out what the node decided:

1. memory: extents that changed tenants get new memory, before anyone is told where slots are;
2. jobs of the SSD tier, which read and write that memory;
3. answers, on the lines that wait for them;
4. events, for those who follow the node.

The node decides, memory and SSD tier move bytes; nobody else calls them in that order.
"""

from collections.abc import Callable
from itertools import count
from time import monotonic_ns
from typing import Any, Protocol, TypeVar

from kvstore import wire
from kvstore.node.node import Node
from kvstore.page import KEY_BYTES
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.actions import Action
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import Replacement

T = TypeVar("T")


class Line(Protocol):
    """One connection, as its face has it."""

    def answer(self, answer: wire.Answer) -> None:
        """Take one answer to the other end; what it makes that end ask may come back at once."""

    def cut(self) -> None:
        """Close it: its client has given it up, or may not go on."""


class Memory(Protocol):
    """The bytes of the host tier."""

    def replace(self, replaced: list[Replacement]) -> None:
        """Give new memory to the extents that changed hands, and empty the list.

        Called at each turn, so that what could not be had before is tried again.
        """


class DiskSide(Protocol):
    """What moves pages between the host tier and the SSDs."""

    def flush(self) -> None:
        """Begin the jobs that the node decided on, as far as there is room for them."""

    def poll(self, now_ns: int) -> None:
        """Tell the node which jobs have ended."""

    def stats(self) -> dict[str, Any]:
        """What is on disk and what was moved, as plain values."""


class Desk:
    """One node, its memory and its SSD tier, and the lines to those who ask it.

    It does no I/O of its own and belongs to one thread, or to those who share one lock.

    Args:
        node: decides.
        memory: of the node's slots.
        publish: takes what became READY or left, in order.
        clock: the time in nanoseconds, never going back.
        soon: calls what it is given in a later turn; None: the desk goes on at once until the node
            has nothing left to do.

    Attributes:
        disk: the SSD tier; None while there is none.
        lines: the open connections, by number.
    """

    def __init__(
        self, node: Node, memory: Memory, publish: Callable[[list[Action]], None],
        clock: Callable[[], int] = monotonic_ns,
        soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:  # fmt: skip
        self.node = node
        self.memory = memory
        self.disk: DiskSide | None = None
        self.lines: dict[int, Line] = {}
        self._publish = publish
        self._clock = clock
        self._soon = soon
        self._numbers = count(1)
        #: The longest turn of late in nanoseconds, and what was done in it: a request, or words.
        self._longest: tuple[int, object] = (0, "")
        #: A later turn is asked for already.
        self._going_on = False
        #: Answers are being given: what they make others ask is carried out after them.
        self._flushing = False

    # ---- what faces bring -------------------------------------------------------------------

    def connect(self, peer: Peer, line: Line) -> int:
        """A process connected; returns the connection's number, which is never used again."""
        number = next(self._numbers)
        self.lines[number] = line
        self.node.connected(number, peer)
        return number

    def receive(self, connection: int, request: wire.Request) -> None:
        """One request came on a connection; its answer goes out on its line."""
        came_ns = self._clock()
        answered = self.node.receive(connection, request, came_ns)
        self.flush()
        took_ns = self._clock() - came_ns
        self.note_turn(took_ns, request)
        if answered and (latency := self.node.latencies.get(type(request))) is not None:
            latency.observe(took_ns)

    def disconnect(self, connection: int, *, ended: bool) -> None:
        """A connection is gone; ``ended`` when its process is known to have ended too."""
        began_ns = self._clock()
        self.lines.pop(connection, None)
        self.node.disconnected(connection, began_ns, ended=ended)
        self.flush()
        self.note_turn(self._clock() - began_ns, "the end of a connection")

    def process_ended(self, identity: int) -> None:
        """The kernel says that a process is gone: it touches no memory any more."""
        began_ns = self._clock()
        self.node.process_ended(identity, began_ns)
        self.flush()
        self.note_turn(self._clock() - began_ns, "the end of a process")

    def operate(self, change: Callable[[PageTable], T]) -> T:
        """Carry out what an operator wants of the page table.

        Raises:
            KVStoreError: what ``change`` raises; what it did before is carried out all the same.
        """
        began_ns = self._clock()
        try:
            return self.node.operate(change, began_ns)
        finally:
            self.flush()
            self.note_turn(self._clock() - began_ns, "what an operator asked for")

    # ---- what time and the disk bring -------------------------------------------------------

    def advance(self) -> None:
        """Apply every deadline that has passed."""
        began_ns = self._clock()
        self.node.advance(began_ns)
        self.flush()
        self.note_turn(self._clock() - began_ns, "deadlines")

    def poll_disk(self) -> None:
        """Take what the SSD tier has done."""
        began_ns = self._clock()
        if self.disk is not None:
            self.disk.poll(began_ns)
        self.flush()
        self.note_turn(self._clock() - began_ns, "what the SSD tier has done")

    # ---- how long it took -------------------------------------------------------------------

    def note_turn(self, took_ns: int, what: object) -> None:
        """Count a turn, in which nobody else was served; ``what``: a request, or words."""
        self.node.pages.meter.loop_turn.observe(took_ns)
        if took_ns > self._longest[0]:
            self._longest = took_ns, what

    def take_longest(self) -> tuple[int, str]:
        """The longest turn since the last call in nanoseconds, and what was done in it."""
        (took_ns, what), self._longest = self._longest, (0, "")
        keys = len(getattr(what, "keys", b"")) // KEY_BYTES
        name = what if isinstance(what, str) else type(what).__name__
        return took_ns, f"{name} of {keys} keys" if keys else name

    # ---- what the node decided --------------------------------------------------------------

    def flush(self) -> None:
        """Carry out what the node decided: memory, then the disk, then answers, then events."""
        if self._flushing:
            return
        self._flushing = True
        try:
            self._carry_out()
            while self.node.outbox or self._goes_on_now():
                self._carry_out()
        finally:
            self._flushing = False
        if self.node.unfinished and self._soon is not None and not self._going_on:
            self._going_on = True
            self._soon(self._later)

    def stats(self) -> dict[str, Any]:
        """The node's statistics and those of its SSD tier, as plain values."""
        return {
            **self.node.stats(),
            "ssd": self.disk.stats() if self.disk is not None else None,
        }

    def _carry_out(self) -> None:
        node = self.node
        self.memory.replace(node.pages.slots.replaced)
        if self.disk is not None:
            self.disk.flush()
            if node.pages.slots.replaced:  # a job that failed at once made room for a request
                self.memory.replace(node.pages.slots.replaced)
        outbox, node.outbox = node.outbox, []
        for number, answer in outbox:
            line = self.lines.get(number)
            if line is not None:
                line.answer(answer)
        while node.closing:
            line = self.lines.get(node.closing.pop())
            if line is not None:
                line.cut()
        if node.actions:
            actions, node.actions = node.actions, []
            self._publish(actions)

    def _goes_on_now(self) -> bool:
        """Whether more was done at once, there being no later turn."""
        if self._soon is not None or not self.node.unfinished:
            return False
        self.node.go_on(self._clock())
        return True

    def _later(self) -> None:
        began_ns = self._clock()
        self._going_on = False
        self.node.go_on(began_ns)
        self.flush()
        self.note_turn(self._clock() - began_ns, "what one turn could not end")
