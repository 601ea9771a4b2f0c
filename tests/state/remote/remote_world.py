"""A node with engines, and a peer side that a test answers by hand."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from kvstore.node.describe import describe
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.protocol import wire
from kvstore.protocol.errors import TierUnavailable
from kvstore.protocol.page import KEY_BYTES, ShardSpec
from kvstore.state.remote.jobs import FetchEnd, Holding, Locate, PeerFetch, PeerLimits, Spread
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import Retention
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import SlotState, SlotTable
from tests.state.world import FULL, PAGE, WINDOW, chain, identity

MS = 1_000_000
S = 1_000_000_000
LEASE_MS = 60_000
GONE = TierUnavailable("the peer is gone")
A = TypeVar("A")


def digest_of(key: bytes, shard: ShardSpec) -> bytes:
    """What a peer's page has; nothing else has it."""
    return hashlib.sha256(key + shard.digest).digest()[:16]


def digests_of(job: PeerFetch, pages: int) -> bytes:
    keys = [job.keys[at : at + KEY_BYTES] for at in range(0, pages * KEY_BYTES, KEY_BYTES)]
    return b"".join(digest_of(key, job.shard) for key in keys)


def leased(answer: wire.Answer | None) -> int:
    """How many pages were leased."""
    assert isinstance(answer, wire.Acquired)
    return len(answer.digests) // 16


class NoMemory:
    """The memory of a node whose pages nobody reads."""

    def replace(self, replaced: list[object]) -> None:
        replaced.clear()


class Inbox:
    """The answers of one connection."""

    def __init__(self) -> None:
        self.answers: list[wire.Answer] = []

    def answer(self, answer: wire.Answer) -> None:
        self.answers.append(answer)

    def cut(self) -> None:
        """Nothing is connected."""


class RemoteWorld:
    """A node of 4 extents of 8 slots.

    Attributes:
        locates: questions that have no answer yet.
        reads: jobs that have not ended.
        spreads: copies at peers that have not ended.
        late: jobs that have ended, or were given up, and may still write.
    """

    def __init__(
        self, in_flight_pages: int = 16, extents: int = 4, quota_pages: int = 1000,
        shards: Sequence[ShardSpec] = (FULL, WINDOW),
    ) -> None:  # fmt: skip
        tokens = (number.to_bytes(16, "little") for number in range(1, 1 << 20))
        limits = NodeLimits(quota_pages * PAGE, LEASE_MS)
        slots = SlotTable(8 * PAGE, extents)
        self.node = Node("b", b"b" * 16, slots, limits, lambda: next(tokens))
        self.node.join(PeerLimits(in_flight_pages * PAGE))
        assert self.node.remote is not None
        self.remote = self.node.remote
        self.table = self.node.pages
        self.now_ns = 1
        self.shards = list(shards)
        self.desk = Desk(self.node, NoMemory(), lambda _: None, lambda: self.now_ns)
        self.desk.peers = self
        self.locates: dict[int, Locate] = {}
        self.reads: dict[int, PeerFetch] = {}
        self.spreads: dict[int, Spread] = {}
        self.late: dict[int, PeerFetch] = {}
        self.inboxes: dict[int, Inbox] = {}
        self._names = 0

    # ---- the peer side ----------------------------------------------------------------------

    def flush(self) -> None:
        jobs, self.remote.jobs[:] = list(self.remote.jobs), []
        for job in jobs:
            if isinstance(job, Locate):
                self.locates[job.number] = job
            elif isinstance(job, Spread):
                self.spreads[job.number] = job
            else:
                assert len(job.keys) == KEY_BYTES * len(job.slots) > 0
                assert job.deadline_ns > self.now_ns
                self.reads[job.job] = job

    def tell(self, *holdings: tuple[str, int]) -> None:
        """Answer the oldest question."""
        number = next(iter(self.locates))
        del self.locates[number]
        self.desk.located(number, [Holding(peer, pages) for peer, pages in holdings])
        self.check()

    def end(
        self, job: PeerFetch, pages: int | None = None, *, settled: bool = True,
        digests: bytes | None = None, kept: Sequence[Retention] = (),
    ) -> None:  # fmt: skip
        """End a job after so many pages; None = all of them."""
        came = len(job.slots) if pages is None else pages
        del self.reads[job.job]
        if not settled:
            self.late[job.job] = job
        error = None if came == len(job.slots) else GONE
        told = digests_of(job, came) if digests is None else digests
        self.desk.peer_fetched(FetchEnd(job.job, told, error, settled, kept))
        self.check()

    def end_all(self) -> None:
        while self.reads:
            self.end(next(iter(self.reads.values())))

    def settle(self, job: PeerFetch) -> None:
        del self.late[job.job]
        self.desk.peer_settled(job.job)
        self.check()

    def read(self, **wanted: object) -> PeerFetch:
        """The only job under way with these attributes."""
        (found,) = [
            job
            for job in self.reads.values()
            if all(getattr(job, name) == value for name, value in wanted.items())
        ]
        return found

    # ---- engines ----------------------------------------------------------------------------

    def engine(self, peer: Peer | None = None) -> int:
        """Connect an engine, or another node."""
        inbox = Inbox()
        number = self.desk.connect(peer or Peer(100 + len(self.inboxes)), inbox)
        self.inboxes[number] = inbox
        hello = wire.Hello(1, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "e")
        assert isinstance(self.ask(number, hello), wire.Welcome)
        opened = self.ask(number, wire.OpenSpace(2, identity(), self.shards))
        assert isinstance(opened, wire.SpaceOpened)
        return number

    def ask(self, connection: int, request: wire.Request) -> wire.Answer | None:
        """The answer, if there is one at once; what came before is not of interest any more."""
        self.inboxes[connection].answers.clear()
        self.desk.receive(connection, request)
        self.check()
        return self.answer(connection)

    def answer(self, connection: int) -> wire.Answer | None:
        answers = self.inboxes[connection].answers
        assert len(answers) <= 1
        return answers.pop() if answers else None

    def lookup(
        self, connection: int, path: str, wait_ms: int = 0, shards: tuple[int, ...] = (0,),
        holder: str = "", held: int = 0,
    ) -> wire.Answer | None:  # fmt: skip
        keys = b"".join(chain(path))
        asked = wire.Lookup(7, 0, list(shards), keys, wait_ms, holder, held)
        return self.ask(connection, asked)

    def acquire(
        self, connection: int, path: str, start: int = 0, wait_ms: int = 10_000, shard: int = 0,
        *, begins: bool = False, parent: bool = False,
    ) -> wire.Answer | None:  # fmt: skip
        """Lease the pages of a path from ``start`` on; ``parent``: say which one is before them."""
        self._names += 1
        keys = b"".join(chain(path, start))
        before = chain(path[:start])[-1] if parent else b""
        asked = wire.Acquire(
            8, self._names, 0, shard, keys, LEASE_MS, wait_ms, begins, parent=before
        )
        return self.ask(connection, asked)

    def release(self, connection: int) -> None:
        """Release the lease that was asked for last."""
        self.ask(connection, wire.Release(self._names))

    def begin(self, connection: int, path: str, start: int = 0, shard: int = 0) -> bytes:
        """Begin a put; the statuses."""
        self._names += 1
        before = chain(path[:start])[-1] if start else b""
        keys = b"".join(chain(path, start))
        granted = self.ask(connection, wire.BeginPut(9, self._names, 0, shard, keys, before))
        assert isinstance(granted, wire.PutGranted)
        return granted.statuses

    def commit(
        self, connection: int, path: str, statuses: bytes, start: int = 0, shard: int = 0,
        *, read_once: bool = False,
    ) -> bytes:  # fmt: skip
        """Commit the put that was begun last; what became of its pages."""
        keys = chain(path, start)
        digests = [
            digest_of(key, self.shards[shard])
            for key, status in zip(keys, statuses, strict=True)
            if status == PageStatus.GRANTED
        ]
        done = self.ask(
            connection,
            wire.CommitPut(10, self._names, b"".join(digests), read_once=read_once),
        )
        assert isinstance(done, wire.Committed)
        return done.statuses

    def store(self, connection: int, path: str, start: int = 0) -> None:
        self.commit(connection, path, self.begin(connection, path, start), start)

    def report(self, connection: int, page: str) -> None:
        """Report the first page of a chain as corrupt; it leaves the node."""
        (key,) = chain(page)
        node = self.space.nodes[key]
        _, generation, _ = self.table.slots.address(node.slot(0))
        self.ask(connection, wire.Corrupt(0, 0, key, generation))
        assert not self.ready(page)

    def locate(self, connection: int, path: str, *holdings: tuple[str, int]) -> wire.Found:
        """Look up, let the directory answer, look up again."""
        every = tuple(range(len(self.shards)))
        first = self.lookup(connection, path, shards=every)
        assert isinstance(first, wire.Found)
        assert first.pages + first.pending == len(path)
        self.tell(*holdings)
        found = self.lookup(connection, path, shards=every)
        assert isinstance(found, wire.Found)
        return found

    # ---- time and state ---------------------------------------------------------------------

    def go(self, forward_ns: int) -> None:
        """Let time pass, and every deadline be applied when it comes."""
        end_ns = self.now_ns + forward_ns
        while 0 < (due := self.node.next_deadline_ns()) <= end_ns:
            self.now_ns = max(self.now_ns, due)
            self.desk.advance()
            self.note_late()
        self.now_ns = end_ns
        self.desk.advance()
        self.note_late()
        self.check()

    def note_late(self) -> None:
        """No request waits past its deadline; jobs past theirs may still write."""
        assert not 0 < self.node.waiting.next_deadline_ns() <= self.now_ns

    @property
    def space(self) -> PrefixTree:
        return next(iter(self.table.spaces))

    def ready(self, path: str, shard: int = 0) -> str:
        """The leading part of a path that is READY."""
        found = ""
        for at, key in enumerate(chain(path)):
            node = self.space.index.get(key)
            if node is None or not node.ready >> shard & 1:
                break
            found = path[: at + 1]
        return found

    def check(self) -> None:
        """Assert every invariant, of which some only a test can know."""
        check(self.table)
        for _ in self.remote.checks():
            pass
        states = (SlotState.WRITING, SlotState.LIMBO)
        for job in [*self.reads.values(), *self.late.values()]:
            for slot in job.slots:
                assert self.table.slots.state(slot) in states, "it may still be written"
        for job in self.late.values():
            for slot in job.slots:
                assert self.table.slots.state(slot) == SlotState.LIMBO
        for space in self.table.spaces:
            for number in space.by_creation.numbers(0):
                for page in space.shown(number):  # runs stay runs
                    for shard, digest in page.digests.items():
                        told = digest_of(page.key, space.shards[shard].spec)
                        assert digest == told, "no verified page"

    def check_nothing_held(self) -> None:
        """Assert that nothing is pinned, being written, or in LIMBO."""
        stats = describe(self.node)
        host = stats.host
        assert host.writing_bytes == host.limbo_bytes == host.pinned_bytes == 0
        assert stats.waiting_requests == stats.leases == stats.session_bytes == 0
        remote = stats.remote
        assert remote.jobs == remote.unsettled_jobs == remote.in_flight_bytes == 0
