"""The desk: carries out a node's decisions, in one order, for all faces of the node.

A **face** lets engines reach a node: its Unix socket, the store in an engine's own process, a
simulation. A face gives the desk a **line** for each of its connections, and passes received
requests to it. After each call the desk carries out what the node decided:

1. memory: extents that get a new tenant get new memory, before any client learns of their slots;
2. jobs of the SSD tier, which read and write that memory;
3. jobs of the peer side, which ask other nodes and read their pages into that memory;
4. answers, on the lines that wait for them;
5. events, for the node's followers.

The node decides, memory, SSD tier and peers move bytes; only the desk carries decisions out.
"""

from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic_ns
from typing import Protocol, TypeVar

from kvstore.node.describe import describe, work_left
from kvstore.node.node import Node
from kvstore.node.selfcheck import SelfCheck
from kvstore.protocol import wire
from kvstore.protocol.counts import NodeCounts, SelfCheckCounts, SsdCounts
from kvstore.state.remote.jobs import FetchEnd, Holding, SpreadEnd
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.actions import Action
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import Replacement
from kvstore.state.tree.story import explained

T = TypeVar("T")


class Line(Protocol):
    """One connection of a face."""

    def answer(self, answer: wire.Answer) -> None:
        """Send one answer. The peer may react during the call, with :meth:`Desk.receive`."""

    def cut(self) -> None:
        """Close the connection: its client has given it up, or is refused."""


class Memory(Protocol):
    """The memory of the host tier."""

    def replace(self, replaced: list[Replacement]) -> None:
        """Give new memory to extents that change tenants, and empty the list.

        Called in each turn, so that earlier failures are retried.
        """


class DiskSide(Protocol):
    """Moves pages between the host tier and the SSDs."""

    def flush(self) -> None:
        """Start the node's pending jobs, as many as the tier accepts."""

    def poll(self, now_ns: int) -> None:
        """Pass completed jobs to the node."""

    def stats(self) -> SsdCounts:
        """Content and counts of the SSD tier."""


class PeerSide(Protocol):
    """Queries other nodes for pages, and reads their pages."""

    def flush(self) -> None:
        """Take all jobs of the node and start them; never blocks, and may end some at once."""


class Desk:
    """One node with its memory and SSD tier, and the lines to its clients.

    It does no I/O itself. It belongs to one thread, or to threads that share one lock.

    Args:
        node: the node.
        memory: the memory of the node's slots.
        publish: called with the pages that became READY or left, in order.
        clock: monotonic time in nanoseconds.
        soon: schedules a function for a later turn; None = the desk continues at once until the
            node has nothing left to do.
        check_every_step: check the whole state after each call, to find a bug where it is.

    Attributes:
        self_check: checks the state.
        story: the last events of pages, which an error that is a bug of the node shows.
        disk: the SSD tier; None if there is none.
        peers: the peer side; None if the node is alone.
        lines: the open connections, by number.
    """

    def __init__(
        self, node: Node, memory: Memory, publish: Callable[[list[Action]], None],
        clock: Callable[[], int] = monotonic_ns,
        soon: Callable[[Callable[[], None]], object] | None = None, *,
        check_every_step: bool = False,
    ) -> None:  # fmt: skip
        self.node = node
        self.self_check = SelfCheck(node)
        self.memory = memory
        self.disk: DiskSide | None = None
        self.peers: PeerSide | None = None
        self.lines: dict[int, Line] = {}
        self._publish, self._clock, self._soon = publish, clock, soon
        self._check_every_step = check_every_step
        self.story = node.pages.story
        self._meter, self._sources = node.pages.meter, node.pages.eviction.sources
        self._numbers = count(1)
        #: A later turn is scheduled.
        self._going_on = False
        #: Answers are being sent: what they cause is carried out after them.
        self._flushing = False

    # ---- calls of faces ---------------------------------------------------------------------

    def connect(self, peer: Peer, line: Line) -> int:
        """Add a connection; returns its number, which is never reused."""
        number = next(self._numbers)
        assert number not in self.lines
        self.lines[number] = line
        self.node.connected(number, peer)
        return number

    def receive(self, connection: int, request: wire.Request) -> None:
        """Process one request of a connection; its answer is sent on its line."""
        came_ns = self._clock()
        try:
            answered = self.node.receive(connection, request, came_ns)
            self._flush()
        except Exception as error:  # as `explained` does, which costs each message more
            self.story.explain(error)
            raise
        took_ns = self._clock() - came_ns
        self._meter.note_turn(took_ns, request)
        if answered and (latency := self.node.latencies.get(type(request))) is not None:
            latency.observe(took_ns)

    @explained
    def disconnect(self, connection: int, *, ended: bool) -> None:
        """A connection was closed; ``ended``: its process is known to have ended too."""
        began_ns = self._clock()
        self.lines.pop(connection, None)
        self.node.disconnected(connection, began_ns, ended=ended)
        self._flush()
        self._meter.note_turn(self._clock() - began_ns, "the end of a connection")

    @explained
    def process_ended(self, identity: int) -> None:
        """The kernel reports that a process has ended: it uses no memory any more."""
        began_ns = self._clock()
        self.node.process_ended(identity, began_ns)
        self._flush()
        self._meter.note_turn(self._clock() - began_ns, "the end of a process")

    @explained
    def operate(self, change: Callable[[PageTable], T], what: str = "an operator's request") -> T:
        """Carry out a change of the page table; ``what`` it is, in words for the log.

        Raises:
            KVStoreError: raised by ``change``; what it did before that is carried out nevertheless.
        """
        began_ns = self._clock()
        try:
            return self.node.operate(change, began_ns)
        finally:
            self._flush()
            self._meter.note_turn(self._clock() - began_ns, what)

    # ---- time and disk ----------------------------------------------------------------------

    @explained
    def advance(self) -> None:
        """Apply all deadlines that have passed."""
        began_ns = self._clock()
        self.node.advance(began_ns)
        self._flush()
        self._meter.note_turn(self._clock() - began_ns, "deadlines")

    @explained
    def poll_disk(self) -> None:
        """Process the SSD tier's completions."""
        began_ns = self._clock()
        if self.disk is not None:
            self.disk.poll(began_ns)
        self._flush()
        self._meter.note_turn(self._clock() - began_ns, "completions of the SSD tier")

    # ---- peers ------------------------------------------------------------------------------

    @explained
    def located(self, number: int, holdings: Sequence[Holding]) -> None:
        """The directory has answered a query."""
        began_ns = self._clock()
        self.node.located(number, holdings, began_ns)
        self._flush()
        self._meter.note_turn(self._clock() - began_ns, "an answer of the directory")

    @explained
    def peer_fetched(self, end: FetchEnd) -> None:
        """A job of a peer has ended."""
        began_ns = self._clock()
        self.node.peer_fetched(end, began_ns)
        self._flush()
        self._meter.note_turn(self._clock() - began_ns, "the end of a fetch from a peer")

    @explained
    def peer_settled(self, job: int) -> None:
        """Nothing writes into the slots of an ended job any more."""
        began_ns = self._clock()
        self.node.peer_settled(job, began_ns)
        self._flush()
        self._meter.note_turn(self._clock() - began_ns, "the end of a peer's late writes")

    def peer_standing(self, peer: str, boot: bytes) -> None:
        """The session with a peer is up; ``boot`` empty: it is down."""
        self._sources.changed(peer, boot)

    @explained
    def peer_spread(self, end: SpreadEnd) -> None:
        """Other nodes have fetched copies of pages, or cannot."""
        began_ns = self._clock()
        self.node.peer_spread(end, began_ns)
        self._flush()
        self._meter.note_turn(self._clock() - began_ns, "the end of copies to peers")

    # ---- decisions of the node --------------------------------------------------------------

    @explained
    def flush(self) -> None:
        """Carry out the node's decisions: memory, then disk and peers, answers, events."""
        self._flush()

    def _flush(self) -> None:
        if self._flushing:
            return
        self._flushing = True
        try:
            self._carry_out()
            while self.node.outbox or self._goes_on_now() or (self.peers and self._has_peer_jobs()):
                self._carry_out()
            if self._check_every_step:
                self.self_check.run()
        finally:
            self._flushing = False
        more = self.node.unfinished or self.node.pages.disk.unfinished  # by this flush
        if more and self._soon is not None and not self._going_on:
            self._going_on = True
            self._soon(self._later)

    def stats(self) -> NodeCounts:
        """Counters of the node and of its SSD tier, as of one moment."""
        checks = SelfCheckCounts(rounds=self.self_check.rounds, pages=self.self_check.pages)
        return describe(self.node, self.disk.stats() if self.disk is not None else None, checks)

    def _carry_out(self) -> None:
        node = self.node
        self.memory.replace(node.pages.slots.replaced)
        if self.disk is not None:
            self.disk.flush()
            if node.pages.slots.replaced:  # a job that failed at once freed slots for a request
                self.memory.replace(node.pages.slots.replaced)
        if self.peers is not None and self._has_peer_jobs():
            self.peers.flush()
            if node.pages.slots.replaced:  # so may a fetch that failed at once
                self.memory.replace(node.pages.slots.replaced)
        assert not node.pages.slots.replaced, "an answer may name memory that is not there"
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

    def _has_peer_jobs(self) -> bool:
        """Whether there are jobs for the peer side; one that ends at once may create another."""
        return self.node.remote is not None and bool(self.node.remote.jobs)

    def _goes_on_now(self) -> bool:
        """Continue the node's work if there are no later turns; returns whether it did."""
        if self._soon is not None or not self.node.unfinished:
            return False
        self.node.go_on(self._clock())
        return True

    @explained
    def _later(self) -> None:
        began_ns, what = self._clock(), work_left(self.node)
        self._going_on = False
        self.node.go_on(began_ns)
        self._flush()
        self._meter.note_turn(self._clock() - began_ns, what)
