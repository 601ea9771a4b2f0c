"""Sessions: what each holds, for how long, and what happens to it when the session is lost; spaces.

A **session** is one engine with all its processes; a **process** is one connection of it. Leases
(reads) and puts (writes) belong to a process; their bytes count against the session's quota.

::

    lease:  OPEN ──deadline──► EXPIRED (pins became holds) ──release / settled / dead──► gone
    put:    OPEN ──commit──► gone
            OPEN ──connection lost──► LOST (its slots in LIMBO) ──settled / dead──► gone

"Settled": the process says that nothing it started on its earlier connections accesses bytes any
more. "Dead": the kernel says that the process has ended (a pidfd).
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol.errors import CapacityError, InvalidArgument, LayoutMismatch
from kvstore.protocol.page import EngineLabel, PrefixKey, ShardSpec, SpaceIdentity, pack_pair
from kvstore.state.tree.prefix_tree import PrefixTree, Shard
from kvstore.state.tree.slots import SLOT_ALIGNMENT, Slot, SlotTable
from kvstore.state.tree.story import Moment

STRETCH_HELD: Final = 512
"""Leases, puts and fetches that one stretch of :meth:`Session.checks` examines."""
LEASES_MAX = 4096
"""Maximum leases of one connection, expired ones too: small pages are nearly free of quota, and
each lease takes half a kilobyte of the node's own memory."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A request waits for pages to be loaded to memory: from disk, from peers, or from both.

    Attributes:
        pinned: slots of pages that are in memory, pinned until
            :meth:`~kvstore.state.tree.sessions.Fetches.end`.
        outstanding: loads from disk and jobs of peers that it waits for.
        wanted: pages whose loads are started in later turns: space, shard, and packed keys.
        size_bytes: slot bytes of its pages, counted against the session's quota.
        peers_until_ns: until when peers are asked for pages; 0 = they are not.
        copies: a peer wants its pages to be here; no engine has requested them.
        ended: nothing waits for it any more.
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
        """Whether a load or job of it has not ended yet."""
        return self.outstanding > 0 or bool(self.wanted)


@dataclass(slots=True)
class Lease:
    """Pages that one process reads.

    Attributes:
        slots: the slot of each page.
        size_bytes: slot bytes, counted against the quota until the lease is gone.
        expired: its pins have become holds.
    """

    slots: list[Slot]
    size_bytes: int
    deadline_ns: int
    expired: bool = False


@dataclass(slots=True, init=False)
class Put:
    """Pages that one process writes.

    Attributes:
        space: their space.
        shard: their shard number.
        keys: key of each granted page, in chain order, until the put is committed.
        slots: slot of each granted page.
        size_bytes: slot bytes, counted against the quota until the put is gone.
        since_ns: when its slots were granted.
        lost: its writer may still write; its slots are in LIMBO.
        ahead: its slot is reserved for a page that is not known yet.
    """

    space: PrefixTree
    shard: int
    keys: list[PrefixKey]
    slots: list[Slot]
    size_bytes: int
    since_ns: int
    lost: bool = False
    ahead: bool = False

    # Written out for the compiler: what `dataclass` makes stays interpreted.
    def __init__(
        self, space: PrefixTree, shard: int, keys: list[PrefixKey], slots: list[Slot],
        size_bytes: int, since_ns: int, *, ahead: bool = False,
    ) -> None:  # fmt: skip
        self.space = space
        self.shard = shard
        self.keys = keys
        self.slots = slots
        self.size_bytes = size_bytes
        self.since_ns = since_ns
        self.lost = False
        self.ahead = ahead

    def is_of(self, space: PrefixTree, shard: int) -> bool:
        """Whether its pages belong to a shard of a space."""
        return self.space is space and self.shard == shard

    def part(self, pages: int) -> "Put":
        """Split off a put of the leading pages."""
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
    """The other end of a connection, according to the kernel.

    Attributes:
        identity: equal for all connections of one process, and different for any two processes that
            exist at the same time.
        pid: its process id in the node's PID namespace; 0 if it has none there.
        watched: the kernel will report its end.
        tenants: the tenants that it may use; None = any.
        remote: it is another node, which reads over the network and checks digests: what it holds
            is released when its connection or a deadline ends.
        node: name of the node at the other end.
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
        peer: the process, according to the kernel.
        origin: the client's id for itself; empty if it has none.
        number: number among the connections of its origin; 0 if unknown.
        lost: its connection broke or was given up, but the end of the process was not seen.
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
        """Charge ``size_bytes``, which may be negative, against its session's quota."""
        self.session.used_bytes += size_bytes
        self.session.changes += 1
        assert self.session.used_bytes >= 0

    def refuse_lease(self, number: int) -> None:
        """Refuse one lease too many.

        Raises:
            InvalidArgument: the number is in use.
            CapacityError: it has as many as it may have.
        """
        if number in self.leases:
            raise InvalidArgument("lease", f"{number} is in use")
        if len(self.leases) >= LEASES_MAX:
            raise CapacityError(f"{LEASES_MAX} leases of this connection are not released yet")

    @property
    def idle(self) -> bool:
        """Whether it holds nothing."""
        return not self.leases and not self.puts and not self.fetches


@dataclass(slots=True)
class Session:
    """One engine as this node knows it.

    Attributes:
        token: proves that a process belongs to it; also its right to map extents.
        domain: its tenant; empty until it opened its first space.
        engine: the engine's label, as its processes report it; None = unnamed.
        spaces: the spaces that it has opened, by number.
        shards: number of a space → a bit for each of its shards that the session has opened.
        used_bytes: bytes of all its leases, puts and fetches, including expired and lost ones.
        changes: number of changes of these bytes.
        quota_bytes: maximum of ``used_bytes``.
        prefill_s_per_token: as reported by the engine; 0 = not yet.
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
        """The unused part of the quota."""
        return max(0, self.quota_bytes - self.used_bytes)

    def admits(self, extra_bytes: int) -> bool:
        """Whether the quota leaves room for ``extra_bytes`` more."""
        return self.used_bytes + extra_bytes <= self.quota_bytes

    def of(self, origin: bytes) -> list[Process]:
        """Its connections of one origin; empty if the origin is unknown."""
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


class Fetches:
    """All fetches of one node, whatever the source of their pages.

    A source (the SSD log, a peer) reports to a :class:`Fetch` each loaded page, which stays pinned
    for it, and each load that has ended. After the last one, the waiting request is tried again,
    and gets the pages that are in memory.

    Args:
        slots: the slots.
        moment: the time of the message that is being processed.

    Attributes:
        beginning: fetches whose loads from disk have not all begun, the first one first.
        ended: fetches whose last load has ended, to be resumed.
    """

    def __init__(self, slots: SlotTable, moment: Moment) -> None:
        self._slots = slots
        self._moment = moment
        self.beginning: OrderedDict[Fetch, None] = OrderedDict()
        self.ended: list[Fetch] = []

    def keep(self, fetch: Fetch, slots: list[Slot]) -> None:
        """Pin pages in memory until the fetch ends.

        Either all slots of a node are given or none.
        """
        assert not fetch.ended, "nobody would unpin them"
        self._slots.pin(slots, self._moment.tick)
        fetch.pinned += slots

    def came(self, waiters: Iterable[Fetch]) -> None:
        """A load that each of these fetches waits for has ended."""
        for fetch in waiters:
            if not fetch.ended:
                fetch.outstanding -= 1
                assert fetch.outstanding >= 0
                self.tell(fetch)

    def tell(self, fetch: Fetch) -> None:
        """Resume a fetch if nothing is left to wait for."""
        if not fetch.waits:
            self.ended.append(fetch)

    def end(self, fetch: Fetch) -> list[Slot]:
        """End a fetch: its request was answered, or given up; returns the slots that it pinned."""
        assert not fetch.ended
        fetch.ended = True
        fetch.wanted.clear()
        self.beginning.pop(fetch, None)
        pinned, fetch.pinned = fetch.pinned, []
        return pinned


SPACES_MAX = 4096
"""Maximum spaces of a node, in addition to the few that every session may always open."""
SESSION_SPACES_MAX = 256
SESSION_SPACES_ALWAYS = 4
SHARDS_MAX: Final = 1024
"""Maximum shards of a space."""
ALL_SHARDS_MAX = 65_536
"""Maximum shards of all spaces, which take up to a kilobyte each; twice as many for the few spaces
that every session may always open."""


class Spaces:
    """All spaces of one node, and the sessions that may use them. Numbers are never reused.

    Args:
        page_bytes_max: maximum size of a page.
    """

    def __init__(self, page_bytes_max: int) -> None:
        self._page_bytes_max = page_bytes_max
        self._spaces: dict[int, PrefixTree] = {}
        self._by_digest: dict[bytes, PrefixTree] = {}
        self._next = 0
        #: Shards of all spaces.
        self._shards = 0

    def __iter__(self) -> Iterator[PrefixTree]:
        return iter(self._spaces.values())

    def __len__(self) -> int:
        return len(self._spaces)

    def open(
        self, session: Session, identity: SpaceIdentity, shards: Sequence[ShardSpec]
    ) -> tuple[PrefixTree, list[int]]:
        """Find or create the space and its shards.

        Returns:
            the space, and the number of each of ``shards`` in it.

        Raises:
            LayoutMismatch, InvalidArgument: names the field that does not match the known one.
            CapacityError: the node, or the session, has reached its limit of spaces or shards.
        """
        if session.spaces and session.domain != identity.tenant and not session.remote:
            raise InvalidArgument("tenant", f"this session belongs to {session.domain!r}")
        if not 1 <= len(shards) <= SHARDS_MAX:
            raise InvalidArgument("shards", f"{len(shards)} of them, not 1..{SHARDS_MAX}")
        if len(session.spaces) >= SESSION_SPACES_MAX:
            known = self._by_digest.get(identity.digest)
            if known is None or known.number not in session.spaces:
                raise CapacityError(f"the session has {SESSION_SPACES_MAX} spaces open already")
        always = len(session.spaces) < SESSION_SPACES_ALWAYS
        space, numbers = self._find_or_make(identity, shards, always=always)
        session.domain = identity.tenant
        if space.number not in session.spaces:
            session.spaces[space.number] = space
            space.sessions += 1
        assert space.sessions > 0, "a space that a session has open is not closed"
        opened = session.shards.get(space.number, 0)
        for number in numbers:
            opened |= 1 << number
        session.shards[space.number] = opened
        return space, numbers

    def adopt(
        self, identity: SpaceIdentity, shards: Sequence[ShardSpec]
    ) -> tuple[PrefixTree, list[int]]:
        """:meth:`open` for pages that no session has requested yet."""
        return self._find_or_make(identity, shards)

    def get(self, number: int, session: Session) -> PrefixTree:
        """The space that a session has opened under that number.

        Raises:
            InvalidArgument: it has opened none.
        """
        space = session.spaces.get(number)
        if space is None:
            raise InvalidArgument("space", f"{number} is not open in this session")
        return space

    def left(self, session: Session) -> None:
        """A session has ended: none of its spaces is open for it any more."""
        for space in session.spaces.values():
            assert space.sessions > 0
            space.sessions -= 1
        session.spaces.clear()
        session.shards.clear()

    def idle(self) -> list[PrefixTree]:
        """If a limit of spaces or shards is near: the empty spaces that no session has open."""
        if len(self._spaces) < SPACES_MAX and self._shards + SHARDS_MAX <= ALL_SHARDS_MAX:
            return []
        return [one for one in self if not one.sessions and not one.nodes]

    def close(self, space: PrefixTree) -> None:
        """Close an empty space that no session has open, and nothing else refers to."""
        assert not space.sessions
        del self._spaces[space.number], self._by_digest[space.identity.digest]
        self._shards -= len(space.shards)
        assert len(self._spaces) == len(self._by_digest)

    def check(self) -> None:
        """Assert that each space is found by number and by label."""
        assert len(self._spaces) == len(self._by_digest)
        assert all(self._spaces.get(one.number) is one for one in self._by_digest.values())
        assert self._shards == sum(len(one.shards) for one in self)
        assert all(one.sessions >= 0 for one in self)

    def _find_or_make(
        self, identity: SpaceIdentity, shards: Sequence[ShardSpec], *, always: bool = False
    ) -> tuple[PrefixTree, list[int]]:
        """See :meth:`open`; ``always``: it is one of the few that a session may always open."""
        for spec in shards:
            pack_pair(identity, spec)  # refused here, or every write of its pages would be
        sizes = [spec.page_bytes(identity) for spec in shards]
        for size in sizes:
            if size > self._page_bytes_max:
                limit = self._page_bytes_max
                raise InvalidArgument("page_bytes", f"{size} is more than an extent ({limit})")
        space = self._by_digest.get(identity.digest)
        new = set(shards).difference(space.shard_numbers if space else ())
        self._refuse_too_many(space, len(new), 2 if always else 1)
        needs = dict(space.needs) if space else {}
        for spec in shards:
            _refuse_contradiction(spec, needs)
            needs[spec.group] = _merge(spec, needs)
        if space is None:
            space = PrefixTree(self._next, identity)
            self._next += 1
            self._spaces[space.number] = self._by_digest[identity.digest] = space
        numbers = [
            _shard_number(space, spec, size) for spec, size in zip(shards, sizes, strict=True)
        ]
        space.needs = needs
        self._shards += len(new)
        assert len(numbers) == len(shards)
        assert space.identity == identity
        return space, numbers

    def _refuse_too_many(self, space: PrefixTree | None, new: int, share: int) -> None:
        """Refuse a new space (None), or ``new`` shards, beyond the limits times ``share``."""
        if space is not None and len(space.shards) + new > SHARDS_MAX:
            raise CapacityError(f"the space has {len(space.shards)} shards already")
        what = ""
        if space is None and len(self._spaces) >= SPACES_MAX * share:
            what = f"{len(self._spaces)} spaces"
        elif new and self._shards + new > ALL_SHARDS_MAX * share:
            what = f"{self._shards} shards"
        if what:
            raise CapacityError(
                f"{what} are in use already; a space is closed once no engine has it open and no"
                " page of it is left"
            )


def _shard_number(space: PrefixTree, spec: ShardSpec, page_bytes: int) -> int:
    number = space.shard_numbers.get(spec)
    if number is None:
        number = len(space.shards)
        assert number < SHARDS_MAX
        slot_bytes = -(-page_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        space.shards.append(Shard(spec, page_bytes, slot_bytes))
        space.shard_numbers[spec] = number
        if not spec.window_pages:
            space.full_mask |= 1 << number
    return number


def _merge(spec: ShardSpec, known: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """(window_pages, head_dim) of the group of ``spec``; head_dim 0 = none of its shards tells."""
    _, head_dim = known.get(spec.group, (0, 0))
    return spec.window_pages, head_dim or getattr(spec.layout, "head_dim", 0)


def _refuse_contradiction(spec: ShardSpec, known: dict[str, tuple[int, int]]) -> None:
    """A model has one head size and one window per group; a shard with another is refused."""
    if spec.group not in known:
        return
    window_pages, head_dim = known[spec.group]
    if spec.window_pages != window_pages:
        raise LayoutMismatch(
            "window_pages", f"{spec.window_pages} here, {window_pages} in the space"
        )
    mine = getattr(spec.layout, "head_dim", 0)
    if mine and head_dim and mine != head_dim:
        raise LayoutMismatch("head_dim", f"{mine} here, {head_dim} in the space")
