"""Sessions: who holds what, for how long, and what becomes of it when they vanish.

A **session** is one engine with all its processes; a **process** is one connection of it. Leases
(reads) and puts (writes) belong to a process, their bytes count against the session's quota.

::

    lease:  OPEN ──deadline──► EXPIRED (pins became holds) ──release / settled / dead──► gone
    put:    OPEN ──commit──► gone
            OPEN ──connection lost──► LOST (its slots in LIMBO) ──settled / dead──► gone

"Settled" is the process's own word that nothing it began on its connections before a certain one
touches bytes any more; "dead" is the kernel's (a pidfd).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvstore.page import EngineLabel, PrefixKey
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.slots import Slot

STRETCH_HELD: Final = 512
"""Leases, puts and fetches that one stretch of :meth:`Session.checks` looks at."""


@dataclass(slots=True, eq=False)
class Fetch:
    """Somebody waits for pages to come to memory: from disk, from peers, or from both.

    Attributes:
        pinned: slots of pages that are in memory, pinned until
            :meth:`~kvstore.state.tree.fetches.Fetches.end`.
        outstanding: loads from disk and jobs of peers that it waits for.
        wanted: pages whose loads are to be begun in the turns that come: space, shard, and packed
            keys.
        size_bytes: slot bytes of its pages, counted against the quota of who waits.
        peers_until_ns: until when peers are asked for pages; 0 = they are not.
        copies: a peer wants its pages to be here; no engine has asked for them.
        ended: nobody waits any more.
    """

    pinned: list[Slot] = field(default_factory=list)
    outstanding: int = 0
    wanted: deque[tuple[PrefixTree, int, bytes]] = field(default_factory=deque)
    size_bytes: int = 0
    peers_until_ns: int = 0
    copies: bool = False
    ended: bool = False

    @property
    def waits(self) -> bool:
        """Whether a load or a job of it has not ended yet."""
        return self.outstanding > 0 or bool(self.wanted)


@dataclass(slots=True)
class Lease:
    """Pages one process reads.

    Attributes:
        slots: the slot of each page.
        size_bytes: slot bytes, counted against the quota until the lease is gone.
        expired: its pins have become holds.
    """

    slots: list[Slot]
    size_bytes: int
    deadline_ns: int
    expired: bool = False


@dataclass(slots=True)
class Put:
    """Pages one process writes.

    Attributes:
        space: the space they are of.
        shard: the shard number they are all of.
        keys: of each granted page, in chain order, until it is committed.
        slots: of each of these.
        size_bytes: slot bytes, counted against the quota until the put is gone.
        since_ns: when its slots were granted.
        lost: its writer may still write, its slots are in LIMBO.
    """

    space: PrefixTree
    shard: int
    keys: list[PrefixKey]
    slots: list[Slot]
    size_bytes: int
    since_ns: int
    lost: bool = False

    def part(self, pages: int) -> "Put":
        """A put of the leading pages, which are no longer of this one."""
        assert 0 < pages < len(self.slots)
        assert not self.lost
        size = self.size_bytes // len(self.slots) * pages
        keys, slots = self.keys[:pages], self.slots[:pages]
        part = Put(self.space, self.shard, keys, slots, size, self.since_ns)
        del self.keys[:pages], self.slots[:pages]
        self.size_bytes -= size
        return part


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connected, as the kernel tells it.

    Attributes:
        identity: equal for all connections of one process, and for no two processes at a time.
        pid: its process id in the node's PID namespace; 0 when it has none there.
        watched: the kernel will say when it ends.
        tenants: the tenants that it may belong to; None = any.
        remote: it is another node, which reads over the network and checks digests: what it holds
            is released when its connection or a deadline ends.
        node: name of that node.
    """

    identity: int
    pid: int = 0
    watched: bool = True
    tenants: frozenset[str] | None = None
    remote: bool = False
    node: str = ""


@dataclass(slots=True, eq=False)
class Process:
    """One connection of one process of an engine.

    Attributes:
        connection: names it on this node.
        peer: what the kernel says of the process.
        origin: what connected, as it names itself; empty when it does not.
        number: which of its origin's connections it is; 0 when it does not say.
        lost: its connection broke or was given up, but the process was not seen to end.
    """

    connection: int
    peer: Peer
    session: "Session"
    origin: bytes = b""
    number: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    puts: dict[int, Put] = field(default_factory=dict)
    fetches: list[Fetch] = field(default_factory=list)
    lost: bool = False

    def charge(self, size_bytes: int) -> None:
        """So many bytes more, or fewer, count against its session's quota."""
        self.session.used_bytes += size_bytes
        self.session.changes += 1
        assert self.session.used_bytes >= 0

    @property
    def idle(self) -> bool:
        """Whether it holds nothing."""
        return not self.leases and not self.puts and not self.fetches


@dataclass(slots=True)
class Session:
    """One engine as this node knows it.

    Attributes:
        token: what its processes show to belong to it; also its right to map extents.
        domain: its tenant; empty until it opened its first space.
        engine: the engine that its processes belong to, as they say; None = unnamed.
        spaces: the spaces that it has opened, by number.
        shards: number of a space → a bit for each of its shards that the session has opened.
        used_bytes: bytes of all its leases, puts and fetches, expired and lost ones included.
        changes: how often these bytes changed.
        quota_bytes: the most that ``used_bytes`` may reach.
        prefill_s_per_token: what the engine reported; 0 until it did.
        remote: another node, which maps no memory and so may open spaces of several tenants.
    """

    token: bytes
    name: str
    quota_bytes: int
    domain: str = ""
    engine: EngineLabel | None = None
    spaces: dict[int, PrefixTree] = field(default_factory=dict)
    shards: dict[int, int] = field(default_factory=dict)
    used_bytes: int = 0
    changes: int = 0
    prefill_s_per_token: float = 0.0
    remote: bool = False
    processes: dict[int, Process] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """Whether a process of it is connected."""
        return any(not one.lost for one in self.processes.values())

    @property
    def free_bytes(self) -> int:
        """What the quota leaves."""
        return max(0, self.quota_bytes - self.used_bytes)

    def admits(self, extra_bytes: int) -> bool:
        """Whether the quota leaves room for ``extra_bytes`` more."""
        return self.used_bytes + extra_bytes <= self.quota_bytes

    def of(self, origin: bytes) -> list[Process]:
        """Its connections of one origin; none where that is not told."""
        return [one for one in self.processes.values() if origin and one.origin == origin]

    def checks(self) -> Iterator[None]:
        """Assert that the bytes add up, a stretch at a time."""
        changes, used = self.changes, 0
        for connection, process in list(self.processes.items()):
            assert process.connection == connection
            assert process.session is self
            held: list[Lease | Put | Fetch] = [
                *process.leases.values(),
                *process.puts.values(),
                *process.fetches,
            ]
            for first in range(0, len(held), STRETCH_HELD):
                used += sum(one.size_bytes for one in held[first : first + STRETCH_HELD])
                yield
            yield
        assert used == self.used_bytes or self.changes != changes
